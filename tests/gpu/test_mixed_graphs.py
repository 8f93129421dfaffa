# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 in a CUDA graph of mixed batches: what it is told of the longest request, and what it does.

The installed vLLM's kernels, called as its attention backend calls them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytestmark = pytest.mark.gpu

HEADS, BLOCK, SPLITS, LONGEST = 16, 16, 32, 1024
#: Floats of MLA's latent and rotary keys.
LATENT, ROTARY = 512, 64
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


def difference(
    head_size: int, batch: Sequence[tuple[int, int]], captured: int, scheduled: int, latent: int = 0
) -> float:
    """From plain torch; infinite where attention wrote nothing.

    Args:
        head_size: of the keys; with `latent`, of their rotary part.
        batch: tokens and keys of each request.
        captured: the longest request that the graph is captured for.
        scheduled: the longest that the replay's schedule is laid out for.
        latent: the size of values that are keys as well, as in FLASH_ATTN_MLA, or 0.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

    torch.manual_seed(0)
    shape = {"dtype": torch.bfloat16, "device": "cuda"}
    blocks = LONGEST // BLOCK
    kv_heads, value_size = (1, latent) if latent else (8, head_size)
    query = torch.randn(TOKENS, HEADS, head_size, **shape)
    keys = torch.randn(REQUESTS * blocks, BLOCK, kv_heads, head_size, **shape)
    values = torch.randn(REQUESTS * blocks, BLOCK, kv_heads, value_size, **shape)
    of_latents = {"q_v": torch.randn(TOKENS, HEADS, latent, **shape)} if latent else {}
    scale = (head_size + latent) ** -0.5
    table = torch.arange(REQUESTS * blocks, dtype=torch.int32, device="cuda").view(REQUESTS, blocks)
    starts = torch.zeros(REQUESTS + 1, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(REQUESTS, dtype=torch.int32, device="cuda")
    kept = torch.zeros(1 + 4 * REQUESTS, dtype=torch.int32, device="cuda")
    out = torch.zeros(TOKENS, HEADS, value_size, **shape)

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
            num_heads_kv=kv_heads,
            headdim=head_size,
            headdim_v=value_size,
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
            softmax_scale=scale,
            causal=True,
            block_table=table,
            scheduler_metadata=plan,
            fa_version=3,
            num_splits=SPLITS,
            **of_latents,
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
        key, value = (one.repeat_interleave(HEADS // kv_heads, dim=1).transpose(0, 1) for one in read)
        scores = query[own].float().transpose(0, 1) @ key.transpose(1, 2)
        for part in of_latents.values():
            scores += part[own].float().transpose(0, 1) @ value.transpose(1, 2)
        scores *= scale
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


#: Prompts of as many tokens as the decode way of FLASH_ATTN_MLA takes, and of few, beside requests that verify drafts.
SHORT_PROMPTS = ((512, 512), (300, 900), (4, 900), (1, 50))


@pytest.mark.parametrize("batch", [SHORT_PROMPTS, SINGLE])
def test_over_mla_a_graph_for_its_longest_request_serves_any_shorter(batch: Sequence[tuple[int, int]]) -> None:
    assert difference(ROTARY, batch, captured=512, scheduled=512, latent=LATENT) < 0.02
