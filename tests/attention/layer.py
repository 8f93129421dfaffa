# SPDX-License-Identifier: Apache-2.0
"""One attention layer on a backend of the plugin: its cache, a batch, and the right answer by definition.

The metadata is built by the builder of the vLLM version that is loaded. The right answer comes from contiguous keys and
values, so a token that is written to a wrong place of the cache, or an argument that does not arrive, shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

HEADS, KV_HEADS, BLOCK = 4, 2, 16
# (tokens in this step, tokens in all) of each request
BATCH = ((1, 40), (5, 5), (3, 33))


def config(layers: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """A ``VllmConfig`` for one process without CUDA graphs, and with these attention layers."""
    model = MagicMock(rswa_window=None, is_mm_prefix_lm=False, max_model_len=1024)
    compilation = MagicMock(max_cudagraph_capture_size=8, static_forward_context=layers or {})
    compilation.cudagraph_mode.has_full_cudagraphs.return_value = False
    kernel = SimpleNamespace(enable_jit_warmup=False)
    usual = {
        "model_config": model,
        "compilation_config": compilation,
        "kernel_config": kernel,
        "use_v2_model_runner": False,
        "speculative_config": None,
        # vLLM's default.
        "attention_config": SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
    }
    return MagicMock(**usual | settings)


class Layer:
    """One attention layer, its cache with a random mapping of blocks, and the tokens of a batch.

    Args:
        batch: (tokens in this step, tokens in all) of each request.
    """

    def __init__(
        self,
        load: Any,
        backend: Any,
        head_size: int,
        seed: int = 0,
        dtype: Any = torch.bfloat16,
        batch: Sequence[tuple[int, int]] = BATCH,
        heads: int = HEADS,
        **options: Any,
    ) -> None:
        self.batch = batch
        self.window = options.get("sliding_window")
        self.heads = heads
        self.head_size = head_size
        self.dtype = dtype
        self.common = load("vllm.v1.attention.backend").CommonAttentionMetadata
        self.backend = backend
        self.scale = head_size**-0.5
        self.impl = backend.get_impl_cls()(heads, head_size, self.scale, KV_HEADS, **options)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.keys = [random(length, KV_HEADS, head_size) for _, length in batch]
        self.values = [random(length, KV_HEADS, head_size) for _, length in batch]
        self.query = random(sum(new for new, _ in batch), heads, head_size)
        width = max(-(-length // BLOCK) for _, length in batch)
        needed = len(batch) * width
        self.blocks = max(20, needed)
        self.table = torch.randperm(self.blocks, generator=generator)[:needed].view(len(batch), width).int()
        self.cache = self._cache(head_size)

    def _cache(self, head_size: int) -> Any:
        """As the model runner makes it: the memory in the backend's order, unused slots poisoned."""
        if not hasattr(self.backend, "get_kv_cache_shape"):
            return torch.full((self.blocks, KV_HEADS, BLOCK, 2 * head_size), float("nan"), dtype=self.dtype)
        shape = self.backend.get_kv_cache_shape(self.blocks, BLOCK, KV_HEADS, head_size)
        order = self.backend.get_kv_cache_stride_order()
        memory = torch.full([shape[dim] for dim in order], float("nan"), dtype=self.dtype)
        return memory.permute([order.index(dim) for dim in range(len(order))])

    def write(self, which: slice) -> None:
        for request, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            at = torch.arange(len(keys))
            slots = self.table[request, at // BLOCK] * BLOCK + at % BLOCK
            scales = SimpleNamespace(_k_scale=None, _v_scale=None)
            self.impl.do_kv_cache_update(scales, keys[which], values[which], self.cache, slots[which])

    def metadata(self, causal: bool, **more: Any) -> Any:
        return self.builder().build(0, self.common_metadata(causal, **more))

    def common_metadata(self, causal: bool, **more: Any) -> Any:
        """Of the batch, as vLLM's model runner makes it."""
        new, lengths = zip(*self.batch, strict=True)
        start = torch.tensor([0, *new]).cumsum(0).int()
        return self.common(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=torch.tensor(lengths).int(),
            num_reqs=len(self.batch),
            num_actual_tokens=int(start[-1]),
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(int(start[-1])),
            causal=causal,
            **more,
        )

    def builder(self, **settings: Any) -> Any:
        spec = self.spec(self.head_size, self.window)
        layers = {"layer": SimpleNamespace(impl=self.impl, kv_cache=self.cache)}
        settings = {"layers": layers} | settings
        return self.backend.get_builder_cls()(spec, [*settings["layers"]], config(**settings), torch.device("cpu"))

    @staticmethod
    def spec(head_size: int, window: int | None = None) -> Any:
        """Of one layer's KV cache."""
        return SimpleNamespace(
            block_size=BLOCK,
            num_kv_heads=KV_HEADS,
            head_size=head_size,
            dtype=torch.bfloat16,
            sliding_window=window,
            dcp_sharded=False,
        )

    def run(self, metadata: Any, **more: Any) -> Any:
        """The layer, with the new tokens' keys and values beside the cache as in vLLM's."""
        output = torch.full_like(self.query, float("nan"))
        rows = [slice(length - new, length) for new, length in self.batch]
        key, value = (
            torch.cat([found[row] for found, row in zip(all_, rows, strict=True)]) for all_ in (self.keys, self.values)
        )
        found = self.impl.forward(None, self.query, key, value, self.cache, metadata, output, **more)
        assert found is output
        return output

    def right(self, *, causal: bool, window: int | None = None, cap: float = 0.0, sinks: Any = None) -> Any:
        """By definition, a query and a head at a time, in float64."""
        rows = []
        token = 0
        for (new, length), keys, values in zip(self.batch, self.keys, self.values, strict=True):
            for position in range(length - new, length):
                for head in range(self.heads):
                    kv = head // (self.heads // KV_HEADS)
                    seen = torch.tensor(
                        [
                            (not causal or key <= position) and (window is None or abs(position - key) < window)
                            for key in range(length)
                        ]
                    )
                    scores = keys[seen, kv].double() @ self.query[token, head].double() * self.scale
                    scores = cap * torch.tanh(scores / cap) if cap else scores
                    mass = scores.exp().sum() + (sinks[head].double().exp() if sinks is not None else 0)
                    rows.append((scores.exp() / mass) @ values[seen, kv].double())
                token += 1
        return torch.stack(rows).view_as(self.query)


def close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found.double(), right, atol=2e-2, rtol=2e-2)
