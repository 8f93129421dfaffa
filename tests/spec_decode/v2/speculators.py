"""A released autoregressive speculator with a small draft model, on the host.

Its attention writes a key of each token to the slot that it is given, and reads what its metadata names: the keys of as
many positions as it says that there are, by the block table. So a slot, a length or a block that is not the step's
changes the drafts.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.spec_decode import graph_recording

from .released_modules import STAND_INS, ReleasedModules, by_the_host

LAYER, BLOCK, MAX_LEN, MAX_REQS, MAX_TOKENS, HIDDEN, VOCAB = "draft", 4, 64, 8, 64, 8, 97
RUNGS = [4, 8]
DEVICE = torch.device("cpu")


class Views:
    """A builder whose metadata names the batch's tensors, as TRITON_ATTN's does."""

    dcp_world_size = 1

    def __init__(self) -> None:
        self.plan = torch.zeros(MAX_REQS, dtype=torch.int32)
        #: The longest sequence that each build was for.
        self.longest: list[int] = []

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        self.longest.append(common.max_seq_len)
        return types.SimpleNamespace(
            lengths=self.lengths(common.seq_lens), block_table=common.block_table_tensor, slots=common.slot_mapping
        )

    build_for_cudagraph_capture = lambda self, common: self.build(0, common)  # noqa: E731

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        return seq_lens


class DevicePlan(Views):
    """Derives what it needs of the lengths on the device, into a tensor of its own, as FlashAttention 3's schedule."""

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        plan = self.plan[: len(seq_lens)]
        plan.copy_(seq_lens)
        return plan


class HostPlan(Views):
    """Does so on the host, as FLASHINFER's plan: a graph holds nothing of it."""

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        plan = self.plan[: len(seq_lens)]
        with by_the_host():
            plan.copy_(seq_lens)
        return plan


class Draft(torch.nn.Module):
    """The draft model: one layer of attention, whose context the speculator's module sets."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=chance)
        self.mix = torch.randn(HIDDEN, HIDDEN, generator=chance)
        self.head = torch.randn(HIDDEN, VOCAB, generator=chance)
        # The last row takes what has no slot.
        self.kv = torch.randn((1 + MAX_REQS * MAX_LEN // BLOCK) * BLOCK + 1, HIDDEN, generator=chance)
        self.context: Any = None

    @contextlib.contextmanager
    def in_context(self, attn_metadata: Any, vllm_config: Any, slot_mapping: Any = None, **_: Any) -> Iterator[None]:
        """What stands for vLLM's `set_forward_context`."""
        self.context = (attn_metadata or {}).get(LAYER), (slot_mapping or {}).get(LAYER)
        yield
        self.context = None

    def forward(self, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any = None) -> Any:
        key = self.embed[input_ids] + torch.sin(positions[:, None] * (1 + torch.arange(HIDDEN)))
        hidden = hidden_states @ self.mix / HIDDEN + key
        metadata, slots = self.context
        if metadata is not None:
            self.kv[torch.where(slots < 0, len(self.kv) - 1, slots)] = key
            hidden = hidden + self.attend(metadata)
        hidden = torch.tanh(hidden)
        return hidden, hidden

    def attend(self, metadata: Any) -> torch.Tensor:
        places = torch.arange(MAX_LEN)
        rows = metadata.block_table[:, places // BLOCK] * BLOCK + places % BLOCK
        # The newest keys count most, so that one that is missed shows.
        age = metadata.lengths[:, None] - 1 - places
        weight = torch.where(age < 0, 0.0, 0.5**age)
        return (self.kv[rows] * weight[..., None]).sum(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.head


class Runner:
    """One speculator with its block tables, as the model runner sets it up, and the batches that it is given.

    Args:
        modules: the released ones.
        builder: of the draft layer's metadata.
        k: drafts a request.
        first_pass: whether the first pass is captured, too; the batches here have no FULL graph for it.
    """

    def __init__(
        self,
        modules: ReleasedModules,
        version: str,
        builder: Any,
        k: int,
        *,
        first_pass: bool = False,
    ) -> None:
        self.modules, self.k = modules, k
        self.model, self.config = Draft(), config(k)
        speculator_module = modules(_module(version))
        speculator_module.set_forward_context = self.model.in_context
        cls = getattr(speculator_module, "AutoRegressiveSpeculator", None) or speculator_module.EagleSpeculator
        # `load_draft_model` is what a subclass for a kind of draft gives.
        made = type("Speculator", (cls,), {"load_draft_model": lambda speculator, *_: self.model})
        self.speculator = made(self.config, DEVICE)
        self.speculator.model = self.model
        self.block_tables = self.block_tables_of(modules)
        group = types.SimpleNamespace(get_metadata_builder=lambda ubatch: builder, layer_names=[LAYER])
        vars(self.speculator).update(
            model_state=types.SimpleNamespace(prepare_attn=self._prepare_attn),
            kv_cache_config=types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=[LAYER])]),
            attn_groups=[[group]],
            target_attn_groups=[[group]],
            target_input_buffers=self.speculator.input_buffers,
            block_tables=self.block_tables,
            draft_attn_layer_names={LAYER},
        )
        self.speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        if not first_pass:
            self.speculator.prefill_cudagraph_manager.capture = lambda *args, **kwargs: None

    @staticmethod
    def block_tables_of(modules: ReleasedModules) -> Any:
        """The runner's `BlockTables`, without any request's blocks."""
        make = modules("block_table").BlockTables
        blocks = MAX_LEN // BLOCK
        if "max_model_len" in make.__init__.__code__.co_varnames:
            lengths: dict[str, Any] = {"max_model_len": MAX_LEN}
        else:
            lengths = {"max_num_blocks_per_group": [blocks]}
        if "kernel_block_sizes" in make.__init__.__code__.co_varnames:
            lengths["kernel_block_sizes"] = [BLOCK]
        return make(
            block_sizes=[BLOCK], max_num_reqs=MAX_REQS, max_num_batched_tokens=MAX_TOKENS, device=DEVICE, **lengths
        )

    def _prepare_attn(self, batch: Any, mode: Any, block_tables: Any, slots: Any, groups: Any, config: Any, **_: Any):
        return self.modules("attn_utils").build_attn_metadata(
            attn_groups=groups,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            query_start_loc_gpu=batch.query_start_loc,
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np),
            max_query_len=1,
            seq_lens=batch.seq_lens,
            max_seq_len=MAX_LEN,
            block_tables=block_tables,
            slot_mappings=slots,
            kv_cache_config=config,
        )

    def admit(self) -> None:
        """Give each row of the runner's state blocks of its own. Block 0 is nobody's."""
        tables = self.block_tables.block_tables[0].gpu
        tables.copy_(1 + torch.arange(tables.numel(), dtype=torch.int32).view_as(tables).flip(1))
        self.block_tables.num_blocks.np[:] = tables.shape[1]
        self.block_tables.num_blocks.copy_to_uva()

    def capture(self) -> None:
        """What `capture_model` does for the speculator, before there is any request."""
        with mock.patch.object(graph_recording, "graph_capture", STAND_INS["graph_capture"]):
            self._capture()

    def _capture(self) -> None:
        if hasattr(self.speculator, "capture_model"):  # 0.20
            self.speculator.capture_model()
        elif "attn_states" in self.speculator.capture.__code__.co_varnames:  # up to 0.25
            self.speculator.capture({})
        else:
            self.speculator.capture()

    def propose(self, states: Sequence[int], lengths: Sequence[int], rejected: Sequence[int]) -> torch.Tensor:
        """The drafts of a batch of decoding requests, as `sample_tokens` asks for them.

        Args:
            states: each request's row in the runner's state.
            lengths: sequence lengths, with the tokens that were verified in this step.
            rejected: of these, how many each request does not keep.
        """
        num_reqs, query_len = len(states), self.k + 1
        tokens = num_reqs * query_len
        idx_mapping, seq_lens = torch.tensor(states, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        self.block_tables.gather_block_tables(idx_mapping, num_reqs)
        starts = np.arange(num_reqs + 1, dtype=np.int32) * query_len
        batch = types.SimpleNamespace(
            num_reqs=num_reqs,
            num_tokens=tokens,
            num_tokens_after_padding=tokens,
            num_scheduled_tokens=np.full(num_reqs, query_len, dtype=np.int32),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            idx_mapping=idx_mapping,
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            input_ids=torch.arange(tokens, dtype=torch.int32) % VOCAB,
            positions=torch.cat([torch.arange(length - query_len, length) for length in lengths]),
        )
        drafts = self.speculator.propose(
            input_batch=batch,
            attn_metadata={},
            slot_mappings={},
            last_hidden_states=torch.arange(tokens * HIDDEN).view(tokens, HIDDEN).remainder(11) / 11,
            aux_hidden_states=None,
            num_sampled=torch.tensor([query_len - count for count in rejected], dtype=torch.int32),
            num_rejected=torch.tensor(rejected, dtype=torch.int32),
            last_sampled=torch.arange(MAX_REQS) + 20,
            next_prefill_tokens=torch.zeros(MAX_REQS, dtype=torch.int32),
            temperature=torch.zeros(MAX_REQS),
            seeds=torch.zeros(MAX_REQS, dtype=torch.int64),
        )
        return drafts.clone()

    def state(self) -> dict[str, torch.Tensor]:
        """What the speculator and the KV cache hold after a batch."""
        buffers = self.speculator.input_buffers
        held = {"kv": self.model.kv[:-1], "slots": self.block_tables.slot_mappings}
        held |= {name: getattr(buffers, name) for name in ("input_ids", "positions", "seq_lens", "query_start_loc")}
        if hasattr(self.speculator, "current_draft_step"):  # from 0.21
            held["current_draft_step"] = self.speculator.current_draft_step
        return {name: value.clone() for name, value in held.items()}


def _module(version: str) -> str:
    kind = "eagle" if version in Versions("<0.23.0").supported() else "autoregressive"
    return f"spec_decode.{kind}.speculator"


def config(k: int) -> Any:
    draft = types.SimpleNamespace(
        get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: VOCAB, hf_config=types.SimpleNamespace()
    )
    speculative = types.SimpleNamespace(
        method="eagle",
        num_speculative_tokens=k,
        draft_model_config=draft,
        rejection_sample_method="strict",
        draft_sample_method="greedy",
        use_local_argmax_reduction=False,
        enable_adaptive_verification=False,
        uses_dynamic_speculative_decoding=lambda: False,
    )
    return types.SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=k,
        scheduler_config=types.SimpleNamespace(max_num_seqs=MAX_REQS, max_num_batched_tokens=MAX_TOKENS),
        model_config=types.SimpleNamespace(max_model_len=MAX_LEN, dtype=torch.float32, use_fp64_gumbel=False),
        cache_config=types.SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=types.SimpleNamespace(
            data_parallel_size=1, data_parallel_rank=0, tensor_parallel_size=1, decode_context_parallel_size=1
        ),
        compilation_config=types.SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=RUNGS,
            max_cudagraph_capture_size=max(RUNGS),
            adjust_cudagraph_sizes_for_spec_decode=lambda *args: None,
        ),
    )
