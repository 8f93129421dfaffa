# SPDX-License-Identifier: Apache-2.0
"""A windowed DFlash draft's attention in a CUDA graph: `python -m tests.gpu.draft_schedule_child CHOICE`.

By the installed vLLM's speculator, metadata builder and attention: captured for the longest sequence, and replayed
after the metadata of a short one was made. Prints the largest difference from plain torch. CHOICE is the gate's value.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from tests.backports.draft_schedule import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    MAX_MODEL_LEN,
    OFF,
    WINDOW,
    Engine,
    K,
)
from vllm_hwplugin.patching._installed import find_installed

# Every key is within the window of every query, and one tile of FlashAttention's holds them all.
LENGTH = WINDOW // 2


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of all queries to all keys, [tokens, heads, head size] each, as float32."""
    key, value = (one.float().repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for one in (key, value))
    scores = query.float().transpose(0, 1) @ key.transpose(1, 2) * HEAD_SIZE**-0.5
    return (scores.softmax(-1) @ value).transpose(0, 1)


def main(choice: str) -> None:
    torch.manual_seed(0)
    (gate,) = OFF
    source = find_installed()
    choices: dict[str, Any] = {gate: choice}
    engine = Engine(source, window=WINDOW, device="cuda", **choices)
    sizes = {"dtype": torch.bfloat16, "device": "cuda"}
    query, out = torch.randn(1 + K, HEADS, HEAD_SIZE, **sizes), torch.zeros(1 + K, HEADS, HEAD_SIZE, **sizes)
    key, value = torch.randn(2, LENGTH, KV_HEADS, HEAD_SIZE, **sizes)
    expected = reference(query, key, value)

    blocks = 1 + MAX_MODEL_LEN // BLOCK
    shape: tuple[int, ...] = (blocks, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
    if Version(source.version) < Version("0.26.0"):
        shape = (blocks, 2, BLOCK, KV_HEADS, HEAD_SIZE)
    kv_cache = torch.zeros(shape, **sizes)
    one = torch.ones(1, device="cuda")
    layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    # The request's blocks begin behind the null block.
    slots = BLOCK + torch.arange(LENGTH, device="cuda")
    engine.attention.do_kv_cache_update(layer, key, value, kv_cache, slots)

    captured = engine.metadata(MAX_MODEL_LEN, capture=True)
    engine.attention.forward(layer, query, None, None, kv_cache, captured, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.attention.forward(layer, query, None, None, kv_cache, captured, out)
    engine.metadata(LENGTH)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    print((out.float() - expected).abs().nan_to_num(nan=float("inf")).max().item())


if __name__ == "__main__":
    main(sys.argv[1])
