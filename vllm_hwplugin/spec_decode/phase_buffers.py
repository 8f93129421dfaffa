# SPDX-License-Identifier: Apache-2.0
"""What the graphs of a draft phase write, and what they read of a batch beside the runner's own buffers.

The target's FULL graph of a decode batch reads token ids, positions, sequence lengths and slots in the runner's
buffers, whose addresses never change, and leaves its hidden states where it was captured. So the graphs behind it find
nearly all of a batch in place. What is left is which of a graph's requests are real.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hwplugin.spec_decode.decode_batch import Rung
from vllm_hwplugin.spec_decode.v1.noise import Noise


class PhaseBuffers:
    """The buffers of one runner's draft phase.

    Args:
        max_num_reqs: of the largest graph.
        query_len: tokens of a request in a decode batch, 1 + num_speculative_tokens.
        device: where the captured kernels run.

    Attributes:
        sampled_token_ids: int32 [max_num_reqs, query_len], -1 behind the last token that was accepted or sampled.
        next_token_ids: int32 [max_num_reqs], the last of them.
        num_valid: int32 [max_num_reqs], how many they are.
        sample_indices: int32 [max_num_reqs], the token of the batch that the first draft follows.
        num_rejected: int32 [max_num_reqs].
        drafts: int64 [max_num_reqs, query_len - 1].
        start_loc: int32 [max_num_reqs + 1], `query_start_loc` of a batch without padding.
        temperature: float32 [max_num_reqs].
        greedy_noise: what verifying drafts draws at random where all requests are greedy: something where a synthetic
            acceptance is asked for, else nothing.
        noise: what it draws where some are not.
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
        self.temperature = rows(dtype=torch.float32).fill_(1.0)
        self.greedy_noise = Noise(max_num_reqs)
        self.noise = Noise(max_num_reqs)
        self.draft_noise = Noise(max_num_reqs)
        self._draft_probs: torch.Tensor | None = None
        self.none_discarded = rows(dtype=torch.bool)
        self.start_loc = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device) * query_len
        self._dead = torch.ones(max_num_reqs, dtype=torch.bool, device=device)
        self._alive = (0, max_num_reqs)
        self._indices: dict[int, tuple[torch.Tensor, ...]] = {}

    def draft_probs(self, num_reqs: int, like: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [num_reqs, query_len - 1, vocabulary]: what drafts were drawn from.

        Args:
            like: [..., vocabulary], of which they are made at first.
        """
        if self._draft_probs is None:
            assert like is not None
            self._draft_probs = like.new_zeros(*self.drafts.shape, like.shape[-1])
        return self._draft_probs[:num_reqs]

    def hold(self, count: int, num_reqs: int) -> None:
        """Have the first `count` requests of a graph of `num_reqs` be real, and the others padding."""
        if self._alive != (count, num_reqs):
            self._dead[:count].fill_(False)
            self._dead[count:num_reqs].fill_(True)
            self._alive = (count, num_reqs)

    def dead(self, num_reqs: int) -> torch.Tensor:
        """bool [num_reqs]: which requests of a graph are padding."""
        return self._dead[:num_reqs]

    def dead_tokens(self, num_reqs: int) -> torch.Tensor:
        """bool [num_reqs * query_len]: which tokens of a graph are those of padding; a tensor of its own."""
        return self._dead[:num_reqs, None].expand(-1, self.query_len).reshape(-1).clone()

    def spec_decode_metadata(self, rung: Rung, token_ids: torch.Tensor) -> SpecDecodeMetadata:
        """vLLM's metadata of a batch that fills `rung`, with tensors that live as long as these buffers.

        Args:
            token_ids: int32 [num_tokens], what the target was given.
        """
        if rung.num_reqs not in self._indices:
            self._indices[rung.num_reqs] = self._indices_of(rung)
        cu_draft, cu_sampled, target, bonus, every = self._indices[rung.num_reqs]
        drafts = token_ids.view(rung.num_reqs, rung.query_len)[:, 1:].reshape(-1).contiguous()
        return SpecDecodeMetadata(
            draft_token_ids=drafts,
            num_draft_tokens=[rung.query_len - 1] * rung.num_reqs,
            cu_num_draft_tokens=cu_draft,
            cu_num_sampled_tokens=cu_sampled,
            target_logits_indices=target,
            bonus_logits_indices=bonus,
            logits_indices=every,
        )

    def _indices_of(self, rung: Rung) -> tuple[torch.Tensor, ...]:
        every: Any = np.arange(rung.num_tokens, dtype=np.int32)
        requests: Any = np.arange(1, rung.num_reqs + 1, dtype=np.int32)
        by_request = every.reshape(rung.num_reqs, rung.query_len)
        host = (
            requests * (rung.query_len - 1),
            requests * rung.query_len,
            by_request[:, :-1].reshape(-1),
            by_request[:, -1],
            every,
        )
        return tuple(torch.from_numpy(np.ascontiguousarray(one)).to(self._dead.device) for one in host)
