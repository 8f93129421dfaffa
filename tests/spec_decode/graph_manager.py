# SPDX-License-Identifier: Apache-2.0
"""The graphs of a released Model Runner V2, captured without a device, and the memory that graphs take of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.v2 import mixed_graphs
from vllm_hwplugin.spec_decode.v2.mixed_bounds import MOST_REQS, set_mixed_graphs

from ..released import Modules, texts
from .streams import Stream

MODE = CUDAGraphMode.FULL_AND_PIECEWISE


@contextlib.contextmanager
def _graph_capture(**_: Any) -> Iterator[None]:
    before = Stream.current
    Stream.current = Stream()
    try:
        yield
    finally:
        Stream.current = before


class _Platform:
    graph_pool_handle = get_global_graph_pool = staticmethod(lambda: None)


STAND_INS: dict[str, Any] = {
    "current_platform": _Platform,
    "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
    "current_stream": lambda: Stream.current,
    "graph_capture": _graph_capture,
    "capture_pool": lambda *_: contextlib.nullcontext(),
    "has_compiled_submodule": lambda _: True,
    "is_breakable_cudagraph_enabled": lambda: False,
    "is_global_first_rank": lambda: False,
    "prepare_inputs_to_capture": lambda *_, **__: (None, None),
}


class Memory:
    """A model of what graphs take: of a pool that each of a stream uses again, and besides.

    It has the samples that vLLM 0.26 took of Qwen3-0.6B on an H100: a graph of 3840 tokens needs some 100 MiB more than
    one of 4096. FlashAttention 3, in FULL graphs alone, would need those for float32 parts of outputs: 4, or 32 up to
    vLLM's own sizes, and none above 992 requests. Nobody has isolated that. A graph that is captured after a smaller
    one took 16 and 26 MiB more than after a larger one.
    """

    def __init__(self) -> None:
        self.pools: dict[Stream, int] = {}
        self.taken = 0
        self.last: dict[bool, int] = {}

    def capture(self, tokens: int, requests: int | None = None) -> None:
        pool = self.pools.setdefault(Stream.current, 0)
        parts = 0 if requests is None or requests > 992 else 4 if tokens > 512 else 32
        grown = max(0, tokens * (72 << 10) + parts * tokens * (8 << 10) - pool)
        piecewise = requests is None
        again = 20 << 20 if tokens > self.last.get(piecewise, tokens) else 0
        self.pools[Stream.current] += grown
        self.taken += grown + again + (4 << 20)
        self.last[piecewise] = tokens

    def info(self) -> tuple[int, int]:
        return (80 << 30) - self.taken, 80 << 30


class Manager:
    """The target's graphs on a released Model Runner V2, captured."""

    def __init__(
        self,
        tree: Any,
        config: Any,
        monkeypatch: pytest.MonkeyPatch,
        full: Sequence[int] = (),
        profile: bool = False,
        passes: list[tuple[int, str]] | None = None,
        mode: CUDAGraphMode = MODE,
        varlen: bool = False,
        many: Sequence[int] = (),
        **choices: str,
    ) -> None:
        """Args:
        full: tokens of FULL graphs of mixed batches.
        profile: as vLLM captures to estimate the memory.
        passes: where they are taken down.
        varlen: as vLLM does with adaptive verification.
        many: tokens of a second FULL graph for `MOST_REQS` requests.
        """
        name = "vllm.v1.worker.gpu.cudagraph_utils"
        self.passes = [] if passes is None else passes
        self.memory, self._pieces = Memory(), set[tuple[object, int]]()
        context = {"set_forward_context": self._context}
        patched = texts(tree, **choices)
        self.text = patched("vllm/v1/worker/gpu/cudagraph_utils.py") or ""
        self.module = module = Modules(patched, [name], stand_ins=STAND_INS | context)(name)
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(Stream, "current", Stream(), raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Stream, "current", stream))
        monkeypatch.setattr(torch.accelerator, "get_memory_info", self.memory.info, raising=False)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        spec = config.speculative_config
        self.block = 1 + (0 if spec is None else spec.num_speculative_tokens)
        more = {"varlen_decode": True} if varlen else {}
        self.made = module.ModelCudaGraphManager(config, torch.device("cpu"), mode, self.block, **more)
        if full:
            shape = partial(module.BatchExecutionDescriptor, cg_mode=CUDAGraphMode.FULL)
            shapes: dict[int, dict[int, int]] = {}
            for sizes, most in ((full, MAX_NUM_REQS), (many, MOST_REQS)):
                held = {size: min(size, most) for size in sizes}
                mixed_graphs._offer(self.made, [shape(num_tokens=size, num_reqs=reqs) for size, reqs in held.items()])
                for size, reqs in held.items():
                    shapes.setdefault(size, {})[reqs] = size
            set_mixed_graphs(config.compilation_config, shapes)
        if profile:
            self.made._max_full_descs_to_capture, self.made._capture_mem_samples = 2, []
        batched = config.scheduler_config.max_num_batched_tokens
        names = ("input_ids", "positions", "is_padding")
        inputs = {
            "model": lambda input_ids, **_: input_ids[:, None],
            "model_state": SimpleNamespace(prepare_dummy_inputs=lambda *_: {}, supports_mm_inputs=False),
            "input_buffers": SimpleNamespace(**{name: torch.zeros(batched, dtype=torch.bool) for name in names}),
            **dict.fromkeys(("intermediate_tensors", "block_tables", "attn_groups", "kv_cache_config")),
        }
        self.made.capture(**known_arguments(self.made.capture, **inputs))

    @contextlib.contextmanager
    def _context(self, *_: Any, num_tokens: int, cudagraph_runtime_mode: CUDAGraphMode, **__: Any) -> Iterator[None]:
        self._run(self, num_tokens, cudagraph_runtime_mode)
        yield

    def _run(self, owner: object, num_tokens: int, mode: CUDAGraphMode) -> None:
        self.passes.append((num_tokens, mode.name))
        if mode == CUDAGraphMode.PIECEWISE and (owner, num_tokens) not in self._pieces:
            self._pieces.add((owner, num_tokens))
            self.memory.capture(num_tokens)

    def capture_drafter(self, mode: CUDAGraphMode) -> Any:
        """The graphs of a drafter: of its first pass, or with FULL_DECODE_ONLY of the others."""
        block = self.block if mode == MODE else 1
        drafter = self.module.CudaGraphManager(self.made.vllm_config, torch.device("cpu"), mode, block)
        drafter.capture(lambda desc, **_: partial(self._run, drafter, desc.num_tokens))
        return drafter

    @contextlib.contextmanager
    def _graph(self, *_: Any, stream: Stream | None = None, **__: Any) -> Iterator[None]:
        yield
        assert stream in (None, Stream.current)
        tokens, _ = self.passes[-1]
        self.memory.capture(tokens, tokens // self.block)

    def captured(self, mode: str) -> list[int]:
        """Tokens of the graphs of decode batches where these are FULL."""
        descs = self.made._capture_descs[CUDAGraphMode[mode]]
        return [desc.num_tokens for desc in descs if mode == "PIECEWISE" or desc.uniform_token_count]

    def serves(self, requests: int, tokens: int) -> str:
        """Mode and tokens of the graph for a batch: of decodes, if its tokens are those of decodes."""
        uniform = self.block if tokens == requests * self.block else None
        loras = () if not hasattr(self.made, "lora_capture_cases") else (0,)
        found = self.made.dispatch(requests, tokens, uniform, *loras)
        return f"{found.cg_mode.name} {found.num_tokens}"
