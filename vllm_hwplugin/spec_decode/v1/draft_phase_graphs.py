# SPDX-License-Identifier: Apache-2.0
"""Capture a draft phase of the V1 runner from vLLM's own functions, for one shape of a batch.

There are three graphs. *Sampling* goes from the target's hidden states through logits and rejection to what the runner
and the drafter need to know. *Counting* is the second half of that, for tokens that were sampled without a graph.
*Drafting* goes from there to the last draft token. They are separate because vLLM starts to copy counts to the host
between them, and drafting should not delay that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.drafters import COMBINING_METHODS, MASK_METHODS
from vllm_hwplugin.spec_decode.graph_recording import record_graph, shared_scratch
from vllm_hwplugin.spec_decode.v1.noise import Noise
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs

#: Tokens that are verified together, at most, unless one request has more. vLLM makes three float32 copies of their
#: logits, and the largest graph's memory is taken from the KV cache: 39 MB each at a vocabulary of 152,000.
TOKENS_AT_ONCE: Final = 64


class Sampling(Enum):
    """How the tokens of a batch are sampled."""

    GREEDY = "greedy"
    #: Some requests are, only by temperature; drafts are the best ones.
    RANDOM = "random"
    #: The same within top-k, top-p or both, as the model's default sampling parameters say.
    FILTERED = "random, within top-k and top-p"
    #: Drafts are drawn ones.
    RANDOM_OF_DRAWN = "random, of drawn drafts"
    FILTERED_OF_DRAWN = "random, within top-k and top-p, of drawn drafts"

    @property
    def filters(self) -> bool:
        return self in (Sampling.FILTERED, Sampling.FILTERED_OF_DRAWN)

    @property
    def of_drawn(self) -> bool:
        return self in (Sampling.RANDOM_OF_DRAWN, Sampling.FILTERED_OF_DRAWN)


def default_filters(model_config: Any, vocab_size: int) -> tuple[bool, bool]:
    """Return whether requests that set no sampling parameters need top-k, and top-p.

    The model's `generation_config.json` or the user sets the defaults. vLLM's `get_diff_sampling_param` is not called:
    it would log what it finds once more.
    """
    given = {} if model_config.generation_config == "vllm" else model_config.try_get_generation_config()
    given = {**given, **model_config.override_generation_config}
    return 0 < (given.get("top_k") or 0) < vocab_size, (given.get("top_p") or 1.0) < 1.0


def draws_natively(runner: Any) -> bool:
    """Whether vLLM filters by top-k and top-p with torch's random numbers.

    FlashInfer and AITER, which vLLM uses if no request has a seed, get a seed from the host in each launch. A graph
    would draw the same numbers each time.
    """
    sampler = runner.rejection_sampler.sampler.topk_topp_sampler
    return bool(sampler.forward == sampler.forward_native)


class Drafting(Enum):
    """Whether a draft is the token that its model finds best, or one that is drawn by temperature."""

    BEST = "best"
    DRAWN = "drawn"


def addresses(states: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(layer.data_ptr() for layer in states)


class PhaseBuffers:
    """The buffers of one runner's draft phase.

    Args:
        query_len: tokens of a request in a decode batch, 1 + num_speculative_tokens.

    Attributes:
        sampled_token_ids: int32 [max_num_reqs, query_len], -1 behind the last token that was accepted or sampled.
        next_token_ids: int32 [max_num_reqs], the last of them.
        num_valid: int32 [max_num_reqs], how many they are.
        sample_indices: int32 [max_num_reqs], the token of the batch that the first draft follows.
        num_rejected: int32 [max_num_reqs].
        drafts: int64 [max_num_reqs, query_len - 1].
        temperature: float32 [max_num_reqs].
        top_k: int32 [max_num_reqs].
        top_p: float32 [max_num_reqs].
        greedy_noise: what verifying drafts draws at random if all requests are greedy: something with a synthetic
            acceptance, else nothing.
        noise: what it draws if some are not.
        draft_noise: what drafting draws.
        none_discarded: bool [max_num_reqs], all False.
    """

    def __init__(self, max_num_reqs: int, query_len: int, device: torch.device):
        def rows(*width: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(max_num_reqs, *width, dtype=dtype, device=device)

        self.query_len = query_len
        self.sampled_token_ids = rows(query_len)
        self.next_token_ids = rows()
        self.num_valid = rows()
        self.sample_indices = rows()
        self.num_rejected = rows()
        self.drafts = rows(query_len - 1, dtype=torch.int64)
        self.temperature, self.top_p = (rows(dtype=torch.float32).fill_(1.0) for _ in range(2))
        # Every vocabulary has at least one token.
        self.top_k = rows().fill_(1)
        self.greedy_noise = Noise(max_num_reqs)
        self.noise = Noise(max_num_reqs)
        self.draft_noise = Noise(max_num_reqs)
        self._draft_probs = rows(query_len - 1, 0, dtype=torch.float32)
        self.none_discarded = rows(dtype=torch.bool)
        requests = torch.arange(1, max_num_reqs + 1, dtype=torch.int32, device=device)
        every = torch.arange(max_num_reqs * query_len, dtype=torch.int32, device=device)
        target, bonus = every.view(-1, query_len).split((query_len - 1, 1), dim=1)
        # Of all requests: a batch of fewer reads the leading part.
        self._indices = requests * (query_len - 1), requests * query_len, target.flatten(), bonus.flatten(), every

    def draft_probs(self, num_reqs: int, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [num_reqs, query_len - 1, vocabulary] draft distributions, made like `like`."""
        if like is not None and not self._draft_probs.shape[-1]:
            self._draft_probs = like.new_zeros(*self.drafts.shape, like.shape[-1])
        return self._draft_probs[:num_reqs]

    def spec_decode_metadata(self, shape: GraphShape, token_ids: torch.Tensor) -> SpecDecodeMetadata:
        """Return vLLM's metadata of a batch that fills `shape`.

        Its tensors last as long as the buffers. `token_ids`, int32 [num_tokens], are what the target was given.
        """
        num_reqs, num_drafts = shape.num_reqs, self.query_len - 1
        cu_draft, cu_sampled, target, bonus, every = self._indices
        return SpecDecodeMetadata(
            draft_token_ids=token_ids.view(num_reqs, self.query_len)[:, 1:].reshape(-1).contiguous(),
            num_draft_tokens=[num_drafts] * num_reqs,
            cu_num_draft_tokens=cu_draft[:num_reqs],
            cu_num_sampled_tokens=cu_sampled[:num_reqs],
            target_logits_indices=target[: num_reqs * num_drafts],
            bonus_logits_indices=bonus[:num_reqs],
            logits_indices=every[: shape.num_tokens],
        )


@dataclass(frozen=True)
class PhaseGraphs:
    """The graphs of one shape.

    Attributes:
        states: addresses of the target's results, which they read.
        inputs: addresses of sequence lengths and slots, which they read.
        drafting: the best drafts, and drawn drafts if they are asked for.
        owned: objects that were made for the graphs and must last as long.
    """

    shape: GraphShape
    states: tuple[int, ...]
    inputs: tuple[int, ...]
    sampling: Mapping[Sampling, torch.cuda.CUDAGraph]
    counting: torch.cuda.CUDAGraph
    drafting: Mapping[Drafting, torch.cuda.CUDAGraph]
    owned: Any


def input_addresses(metadata: Any) -> tuple[int, ...]:
    """Return the addresses of sequence lengths and slots in a `CommonAttentionMetadata`."""
    return metadata.seq_lens.data_ptr(), metadata.slot_mapping.data_ptr()


class PhaseRecorder:
    """Captures the graphs of one runner's draft phase. `filters`: whether top-k and top-p are applied."""

    def __init__(
        self,
        runner: Any,
        passes: PassGraphs,
        buffers: PhaseBuffers,
        sampling: Sequence[Sampling],
        drafting: Sequence[Drafting],
        filters: tuple[bool, bool],
    ):
        self.sampling, self.drafting, self.filters = sampling, drafting, filters
        self._runner = runner
        self._proposer = runner.drafter
        self._passes = passes
        self.buffers = buffers
        # None: no one-token steps follow the drafter's first pass.
        steps = buffers.query_len > 2 and not runner.drafter.parallel_drafting
        self._chain = runner.drafter.draft_loop.captured if steps else None

    def hold(self, count: int, shape: GraphShape) -> None:
        """Make the first `count` requests of `shape` real, the rest padding."""
        self._passes.buffers.of(shape).write_even_starts(count, shape.num_reqs)
        if self._chain is not None:
            self._chain.buffers.write_even_starts(count, shape.num_reqs)

    def record(self, shape: GraphShape, states: Sequence[torch.Tensor], template: Any) -> PhaseGraphs:
        """Capture the graphs of `shape`, in a stream of vLLM's `graph_capture`.

        All requests are padding meanwhile, so nothing is written to the KV cache.

        Args:
            states: the target's hidden states, [num_tokens, hidden], then several layers' if the drafter reads them.
            template: the `CommonAttentionMetadata` that the runner built for it, of the drafter's KV-cache group.
        """
        buffers, num_reqs = self.buffers, shape.num_reqs
        batch = self._batch(shape, template)
        metadata = self._passes.dummy_metadata(shape, template)
        self.hold(0, shape)
        recorded = partial(record_graph, pool=self._passes.graph_pool, vllm_config=self._runner.vllm_config)
        sample = partial(self._sample, shape, states, batch)

        def draft(kind: Drafting) -> None:
            buffers.drafts[:num_reqs].copy_(self._draft(shape, states, batch, metadata, kind))

        # The largest logits first: later captures reuse their memory. Sampling of drawn drafts last: it needs the
        # distribution that drafting draws from.
        sampling = {kind: recorded(partial(sample, kind)) for kind in self.sampling if not kind.of_drawn}
        drafting = {kind: recorded(partial(draft, kind)) for kind in self.drafting}
        sampling |= {kind: recorded(partial(sample, kind)) for kind in self.sampling if kind.of_drawn}
        return PhaseGraphs(
            shape=shape,
            states=addresses(states),
            inputs=input_addresses(template),
            sampling=sampling,
            drafting=drafting,
            counting=recorded(lambda: self._count(shape, batch)),
            owned=(metadata, batch, shared_scratch()),
        )

    def _batch(self, shape: GraphShape, template: Any) -> Any:
        """Return a decode batch's metadata that fills `shape`, over the runner's tensors."""
        buffers = self._passes.buffers
        return dataclasses.replace(
            # Host code that asks for the longest sequence must get what holds for any.
            buffers.of(shape).batch_for_capture(template, shape, self._proposer.max_model_len),
            seq_lens=template.seq_lens[: shape.num_reqs],
            slot_mapping=template.slot_mapping[: shape.num_tokens],
            block_table_tensor=buffers.block_table(shape.num_reqs),
        )

    def noise_of(self, kind: Sampling) -> Noise:
        """Return what the sampling graphs of this kind read."""
        return self.buffers.greedy_noise if kind is Sampling.GREEDY else self.buffers.noise

    # -- what is recorded ---------------------------------------------------------------------------------------------

    def _sampling_metadata(self, **changes: Any) -> Any:
        """Return vLLM's `SamplingMetadata` that asks for nothing, with some changes."""
        return dataclasses.replace(self._runner.input_batch.sampling_metadata, all_random=False, **changes)

    def _sample(self, shape: GraphShape, states: Sequence[torch.Tensor], batch: Any, kind: Sampling) -> None:
        logits = self._runner.model.compute_logits(states[0][: shape.num_tokens])
        batch_size = max(1, TOKENS_AT_ONCE // self.buffers.query_len)
        for first in range(0, shape.num_reqs, batch_size):
            self._verify(slice(first, min(first + batch_size, shape.num_reqs)), logits, kind)
        self._count(shape, batch)

    def _verify(self, requests: slice, logits: torch.Tensor, kind: Sampling) -> None:
        """Sample for some requests of a batch's `logits`, [batch * query_len, vocabulary]."""
        runner, buffers, query_len = self._runner, self.buffers, self.buffers.query_len
        shape = uniform_shape(query_len, requests.stop - requests.start)
        tokens = slice(requests.start * query_len, requests.stop * query_len)
        greedy = kind is Sampling.GREEDY
        top_k, top_p = (kind.filters and wanted for wanted in self.filters)
        metadata = self._sampling_metadata(
            all_greedy=greedy,
            temperature=None if greedy else buffers.temperature[requests],
            top_k=buffers.top_k[requests] if top_k else None,
            top_p=buffers.top_p[requests] if top_p else None,
        )
        drawn_from = None
        if kind.of_drawn:
            drawn_from = buffers.draft_probs(requests.stop)[requests].flatten(0, 1)
        verified = buffers.spec_decode_metadata(shape, runner.input_ids.gpu[tokens])
        noise = self.noise_of(kind)
        noise.begin(shape.num_reqs, requests.start)
        with noise.read():
            output = runner.rejection_sampler(verified, drawn_from, logits[tokens], metadata)
        buffers.sampled_token_ids[requests].copy_(output.sampled_token_ids)

    def _count(self, shape: GraphShape, batch: Any) -> None:
        """Compute what the drafter must know of the sampled tokens."""
        runner, proposer, buffers, num_reqs = self._runner, self._proposer, self.buffers, shape.num_reqs
        next_token_ids, num_valid = proposer.prepare_next_token_ids_padded(
            buffers.sampled_token_ids[:num_reqs], runner.requests, runner.input_batch, buffers.none_discarded[:num_reqs]
        )
        # Without a token a padded request's draft would follow the last token of the request before it.
        num_valid.masked_fill_(self._passes.buffers.of(shape).inert[:num_reqs], 1)
        metadata = buffers.spec_decode_metadata(shape, runner.input_ids.gpu[: shape.num_tokens])
        _, sample_indices, num_rejected = proposer.prepare_inputs_padded(batch, metadata, num_valid)
        buffers.next_token_ids[:num_reqs].copy_(next_token_ids)
        buffers.num_valid[:num_reqs].copy_(num_valid)
        buffers.sample_indices[:num_reqs].copy_(sample_indices)
        buffers.num_rejected[:num_reqs].copy_(num_rejected)

    def _draft(
        self, shape: GraphShape, states: Sequence[torch.Tensor], batch: Any, metadata: dict[str, Any], kind: Drafting
    ) -> torch.Tensor:
        """Draft from what was sampled, int64 [num_reqs, num_speculative_tokens]."""
        proposer, num_reqs = self._proposer, shape.num_reqs
        sample = proposer._greedy_sample if kind is Drafting.BEST else self._drawing(shape)
        indices, last_hidden, hidden = self._first_pass(shape, states, batch, metadata)
        if self._chain is None:
            return sample(last_hidden[indices]).view(num_reqs, self.buffers.query_len - 1)
        return self._chain.draft(
            num_reqs,
            last_hidden[indices],
            proposer.positions[indices],
            hidden[indices],
            batch.seq_lens - self.buffers.num_rejected[:num_reqs],
            sample,
        )

    def _drawing(self, shape: GraphShape) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that draws drafts and keeps their distribution."""
        buffers, num_reqs = self.buffers, shape.num_reqs
        buffers.draft_noise.begin(num_reqs)
        drafted = 0

        def sample(hidden_states: torch.Tensor) -> torch.Tensor:
            nonlocal drafted
            width = hidden_states.shape[0] // num_reqs
            # vLLM 0.22 to 0.24 do not repeat the temperature for the rows of a request.
            temperature = buffers.temperature[:num_reqs].repeat_interleave(width)
            metadata = self._sampling_metadata(all_greedy=False, temperature=temperature)
            with buffers.draft_noise.read():
                tokens, probs = self._proposer._sample_draft_tokens(hidden_states, metadata)
            part = buffers.draft_probs(num_reqs, probs)[:, drafted : drafted + width]
            part.copy_(probs.view(num_reqs, width, -1))
            drafted += width
            return tokens

        return sample

    def _first_pass(
        self, shape: GraphShape, states: Sequence[torch.Tensor], batch: Any, metadata: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the first pass; return sample indices, last and next hidden states."""
        # In vLLM's order of operations.
        proposer, num_reqs, num_tokens = self._proposer, shape.num_reqs, shape.num_tokens
        indices, batch = self._inputs(shape, states, batch)
        buffers = self._passes.buffers.of(shape)
        inert, seq_lens = buffers.inert[:num_reqs], buffers.seq_lens[:num_reqs]
        inert_tokens = inert[:, None].expand(-1, self.buffers.query_len).flatten()
        seq_lens.copy_(batch.seq_lens)
        seq_lens.masked_fill_(inert, 0)
        # Copies the slots into the buffer that the draft layers read, if they are not in it.
        proposer._get_slot_mapping(num_tokens, batch.slot_mapping)
        proposer._slot_mapping_buffer[:num_tokens].masked_fill_(inert_tokens, PADDING_SLOT_ID)
        if proposer.method in MASK_METHODS:
            proposer._context_slot_mapping_buffer[:num_tokens].masked_fill_(inert_tokens, PADDING_SLOT_ID)
            proposer.draft_context.precompute(num_tokens)
        with self._passes.forward_context(metadata, shape, CUDAGraphMode.FULL):
            output = proposer.model(**self._passes.inputs(num_tokens))
        last_hidden, hidden = output if proposer.model_returns_tuple() else (output, output)
        return indices, last_hidden, hidden

    def _inputs(self, shape: GraphShape, states: Sequence[torch.Tensor], batch: Any) -> tuple[torch.Tensor, Any]:
        """Fill the drafter's buffers; return sample indices and `CommonAttentionMetadata`."""
        proposer, runner, buffers = self._proposer, self._runner, self.buffers
        num_reqs, num_tokens = shape.num_reqs, shape.num_tokens
        hidden, *aux = (layer[:num_tokens] for layer in states)
        target_states = torch.cat(aux, dim=-1) if aux else hidden
        if proposer.method in COMBINING_METHODS:
            target_states = proposer.model.combine_hidden_states(target_states)
        count, indices, batch = proposer.set_inputs_first_pass(
            target_token_ids=runner.input_ids.gpu[:num_tokens],
            next_token_ids=buffers.next_token_ids[:num_reqs],
            target_positions=runner._get_positions(num_tokens),
            target_hidden_states=target_states,
            token_indices_to_sample=buffers.sample_indices[:num_reqs],
            cad=batch,
            num_rejected_tokens_gpu=buffers.num_rejected[:num_reqs],
        )
        assert count == num_tokens
        if proposer.method in MASK_METHODS:
            proposer.hidden_states[:num_tokens].copy_(target_states)
        return indices, batch
