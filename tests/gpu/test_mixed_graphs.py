# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 in a CUDA graph of batches of any shape: what it is told of the longest request, and what it does.

The installed vLLM's kernels, called as its attention backend calls them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, BLOCK, SPLITS, LONGEST = 16, 8, 16, 32, 1024
#: Of the graph.
TOKENS, REQUESTS = 1024, 64
#: Tokens and keys of each request: a prompt in its second part, one that verifies drafts, and one that has none.
PROMPT = ((700, 900), (4, 900), (1, 50))
#: So few keys that no request's are split.
SINGLE = ((1, 40),) * REQUESTS


@pytest.fixture(scope="module", autouse=True)
def _fa3() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for compute capability 9.0")


def difference(head_size: int, batch: Sequence[tuple[int, int]], captured: int, scheduled: int) -> float:
    """From plain torch; infinite where attention wrote nothing.

    Args:
        batch: tokens and keys of each request.
        captured: the longest request that the graph is captured for.
        scheduled: the longest that the replay's schedule is laid out for.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

    torch.manual_seed(0)
    shape = {"dtype": torch.bfloat16, "device": "cuda"}
    blocks = LONGEST // BLOCK
    query = torch.randn(TOKENS, HEADS, head_size, **shape)
    keys, values = torch.randn(2, REQUESTS * blocks, BLOCK, KV_HEADS, head_size, **shape)
    table = torch.arange(REQUESTS * blocks, dtype=torch.int32, device="cuda").view(REQUESTS, blocks)
    starts = torch.zeros(REQUESTS + 1, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(REQUESTS, dtype=torch.int32, device="cuda")
    kept = torch.zeros(1 + 4 * REQUESTS, dtype=torch.int32, device="cuda")
    out = torch.zeros_like(query)

    def schedule(requests: Sequence[tuple[int, int]], longest: int) -> torch.Tensor:
        """What vLLM's builder makes, for the tensors that the graph reads."""
        padded = [*requests, *[(0, 0)] * (REQUESTS - len(requests))]
        starts[1:] = torch.tensor([tokens for tokens, _ in padded]).cumsum(0)
        lengths.copy_(torch.tensor([length for _, length in padded]))
        made = get_scheduler_metadata(
            batch_size=REQUESTS,
            max_seqlen_q=longest,
            max_seqlen_k=LONGEST,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=head_size,
            cache_seqlens=lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=BLOCK,
            causal=True,
            window_size=(-1, -1),
            num_splits=SPLITS,
        )
        kept.zero_()
        kept[: len(made)] = made
        return kept[: len(made)]

    def attend(plan: torch.Tensor) -> None:
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=captured,
            seqused_k=lengths,
            max_seqlen_k=LONGEST,
            causal=True,
            block_table=table,
            scheduler_metadata=plan,
            fa_version=3,
            num_splits=SPLITS,
        )

    dummy = [(TOKENS // REQUESTS, TOKENS // REQUESTS)] * REQUESTS
    attend(schedule(dummy, captured))
    plan = schedule(dummy, captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(plan)
    schedule(batch, scheduled)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()

    worst, start = 0.0, 0
    for row, (tokens, length) in enumerate(batch):
        own = slice(start, start + tokens)
        read = [cache[table[row].long()].flatten(0, 1)[:length].float() for cache in (keys, values)]
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for one in read)
        scores = query[own].float().transpose(0, 1) @ key.transpose(1, 2) * head_size**-0.5
        future = torch.ones(tokens, length, dtype=torch.bool, device="cuda").triu(1 + length - tokens)
        expected = (scores.masked_fill(future, float("-inf")).softmax(-1) @ value).transpose(0, 1)
        worst = max(worst, (out[own].float() - expected).abs().nan_to_num(nan=float("inf")).max().item())
        start += tokens
    return worst


@pytest.mark.parametrize("batch", [PROMPT, SINGLE])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_a_graph_for_one_request_with_all_tokens_serves_any_batch(
    head_size: int, batch: Sequence[tuple[int, int]]
) -> None:
    assert difference(head_size, batch, captured=TOKENS, scheduled=TOKENS) < 0.02


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_one_for_requests_of_few_tokens_leaves_rows_of_a_longer_one_unwritten(head_size: int) -> None:
    assert difference(head_size, PROMPT, captured=TOKENS // REQUESTS, scheduled=700) == float("inf")


@pytest.mark.parametrize("head_size", [64, 256])
def test_nor_does_it_serve_single_tokens_by_their_own_schedule(head_size: int) -> None:
    assert difference(head_size, SINGLE, captured=TOKENS, scheduled=1) > 0.1
