# SPDX-License-Identifier: Apache-2.0
"""Ask a Moore Threads GPU whether it computes right what the vendor's sources report as wrong.

A worker runs the checks once for each GPU and set of versions, and ``vllm-hwplugin probe musa`` again. A wrong result
refuses what needs it. A check that cannot run is reported, and refuses nothing. Not run on MUSA hardware.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..spec_decode.drafters import CACHED_METHODS
from . import _mtml
from .self_test import Result, find_wrong, installed_packages


class Check(NamedTuple):
    """A check of the device, which returns what is wrong or an empty text, and what a wrong result refuses.

    Engines that have all `uses` (`_uses`) are refused, with the way out. Without `uses` the code that needs the check
    calls `find_wrong`, or nothing needs it.
    """

    name: str
    run: Callable[[torch.device], str]
    refuses: str = ""
    uses: frozenset[str] = frozenset()
    way_out: str = ""


class _Skipped(Exception):
    """The check does not concern this host."""


def _differs(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> str:
    result, expected = result.cpu().double(), expected.double()
    largest = float((result - expected).abs().max())
    # Also if it is NaN.
    if largest <= tolerance * max(float(expected.abs().max()), 1e-9):
        return ""
    return (
        f"found {result.flatten()[:4].tolist()}, expected {expected.flatten()[:4].tolist()} (largest error {largest:g})"
    )


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mm(device: torch.device) -> str:
    left, right = _random(16, 256).half(), _random(256, 64, seed=1).half()
    result = torch.mm(left.to(device), right.to(device), out_dtype=torch.float32)
    return _differs(result, left.float() @ right.float(), 1e-2)


def _kernel(name: str) -> Any:
    return getattr(importlib.import_module("vllm_hwplugin.musa._self_test_kernels"), name)


def _count(name: str, device: torch.device) -> str:
    values = torch.arange(-3, 61, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    _kernel(name)[(1,)](values.to(device), count, WIDTH=64)
    return _differs(count, (values >= 0).sum()[None])


def _in_place(device: torch.device) -> str:
    values = _random(64)
    given = values.to(device)
    _kernel("in_place_kernel")[(1,)](None, 1, given, given, WIDTH=64)
    return _differs(given, (values + 1) * 2, 1e-6)


def _dot(stages: int, device: torch.device) -> str:
    left, right = _random(32, 256).half(), _random(256, 32, seed=1).half()
    result = torch.zeros(32, 32, device=device)
    _kernel("dot_kernel")[(1,)](left.to(device), right.to(device), result, DEPTH=256, SIZE=32, num_stages=stages)
    return _differs(result, left.float() @ right.float(), 1e-2)


def _scaled_mm(bits: int, inner: int, outputs: int, device: torch.device) -> str:
    # A decode, vLLM's padding in eager mode, and more than a block.
    scale, e4m3 = torch.full((1,), 0.5, device=device), torch.float8_e4m3fn
    right = _random(outputs, inner, seed=1).to(e4m3)
    for rows, out_dtype in itertools.product((1, 17, 33), _RESULTS[bits]):
        left = _random(rows, inner).to(e4m3)
        options = {"scale_a": scale, "scale_b": scale, "out_dtype": out_dtype}
        try:
            result = torch._scaled_mm(left.to(device), right.to(device).t(), **options)
        except (RuntimeError, ValueError) as refusal:
            return f"{rows} rows are refused: {refusal}"
        if wrong := _differs(result, left.float() @ right.float().t() / 4, 1e-2):
            return f"{rows} rows: {wrong}"
    return ""


def _overflow(device: torch.device) -> str:
    values = torch.tensor([10000.0, -10000.0, 1.0])
    return _differs(values.to(device).to(torch.float8_e4m3fn).float(), values.clamp(-448, 448))


def _event(device: torch.device) -> str:
    musa: Any = torch.musa
    size = 512
    left, result = torch.eye(size, device=device), torch.zeros(size, device=device)
    musa.synchronize(device)
    main, other, done = musa.current_stream(device), musa.Stream(device), torch.Event(device.type)
    with musa.stream(other):
        value = left
        for _ in range(8):
            value = torch.mm(value, left)
        result.copy_(value.sum(0))
        done.record(other)
    main.wait_event(done)
    read = result.clone()
    musa.synchronize(device)
    return _differs(read, torch.ones(size))


def _replays(device: torch.device, step: Callable[[], torch.Tensor], change: Callable[[], torch.Tensor]) -> str:
    """Compare a captured step's replay with what `change` expects."""
    musa: Any = torch.musa
    graph = musa.MUSAGraph()
    with musa.stream(musa.Stream(device)):
        # Kernels are compiled before the capture.
        step()
        musa.synchronize(device)
        # `musa.graph` would collect garbage first, for most of a second. MCCL's thread may query events meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            output = step()
        finally:
            graph.capture_end()
    expected = change()
    graph.replay()
    musa.synchronize(device)
    return _differs(output.float(), expected, 2e-2)


def _graph(device: torch.device) -> str:
    weight, first, second = _random(64, 64), _random(8, 64, seed=1), _random(8, 64, seed=2)
    given, right = first.to(device), weight.to(device)

    def change() -> torch.Tensor:
        given.copy_(second)
        return (second @ weight).relu()

    return _replays(device, lambda: (given @ right).relu(), change)


def _mate(length: int, device: torch.device) -> str:
    try:
        attend = importlib.import_module("mate").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise _Skipped(f"no FLASH_ATTN: {error}") from error
    pages, heads, groups, width, scale = 64, 2, 2, 128, 128**-0.5
    lengths, before = [70, 133], [66, 10]
    cache = _random(2, 6, pages, heads, width).bfloat16()
    table = torch.tensor([[3, 1, 0], [4, 5, 2]], dtype=torch.int32)
    queries = _random(2 * length, heads * groups, width, seed=1).bfloat16()
    on_device = [tensor.to(device) for tensor in (queries, cache[0], cache[1], table)]
    used = torch.tensor(before, dtype=torch.int32, device=device)
    starts = torch.arange(3, dtype=torch.int32, device=device) * length

    def step() -> torch.Tensor:
        query, keys, values, pages_of = on_device
        options = {"max_seqlen_q": length, "max_seqlen_k": 3 * pages, "softmax_scale": scale, "causal": True}
        result = attend(query, keys, values, cu_seqlens_q=starts, seqused_k=used, page_table=pages_of, **options)
        return result[0] if isinstance(result, tuple) else result

    def change() -> torch.Tensor:
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        # All pages of each request; a query sees them up to its own position.
        keys, values = (tensor[table.long()].flatten(1, 2).transpose(1, 2).float() for tensor in cache)
        positions = torch.tensor(lengths)[:, None] - length + torch.arange(length)
        seen = torch.arange(keys.shape[2]) <= positions[:, None, :, None]
        query = queries.view(2, length, heads * groups, width).transpose(1, 2).float()
        result = scaled_dot_product_attention(query, keys, values, seen, scale=scale, enable_gqa=True)
        return result.transpose(1, 2).flatten(0, 1)

    return _replays(device, step, change)


def _uses(config: Any) -> set[str]:
    """Return what an engine with this `VllmConfig` uses."""
    mode, spec = config.compilation_config.cudagraph_mode, config.speculative_config
    wanted = {
        "graphs": mode.name != "NONE",
        "full graphs": mode.has_full_cudagraphs(),
        "drafts": spec is not None and spec.method in CACHED_METHODS,
        "async": config.scheduler_config.async_scheduling,
        "hybrid": config.model_config.is_hybrid,
    }
    return {name for name, is_used in wanted.items() if is_used}


_NO_FULL: Final = """set --compilation-config '{"cudagraph_mode": "PIECEWISE"}'"""
TOP_K: Final = "Triton: sum of a mask"
DOTS: Final = ("Triton: dot, 1 stage", "Triton: dot, 3 stages")
_USE_DOTS: Final = "experts, FP8 by block, INT8, W4A16"
_RESULTS: Final = {16: (torch.float16, torch.bfloat16), 32: (torch.float32,)}
#: Names by the bits of the result, and whether 32 divides the widths, as torch_musa 2.7.1's source wants it.
SCALED: Final = {
    (bits, divisible): f"_scaled_mm to {bits} bits, widths {'' if divisible else 'not '}divisible by 32"
    for bits in _RESULTS
    for divisible in (True, False)
}

CHECKS: Final = (
    Check("mm of float16 in float32", _mm),
    Check(TOP_K, partial(_count, "count_bits_kernel"), "top-k and top-p by Triton (torch's sort replaces it)"),
    Check(
        "Triton: sum of a mask in int32",
        partial(_count, "count_kernel"),
        "speculation with a draft model",
        frozenset({"drafts"}),
        "run without --speculative-config",
    ),
    Check("Triton: in place, behind a None", _in_place, "hybrid models", frozenset({"hybrid"}), "serve another model"),
    Check(DOTS[0], partial(_dot, 1), _USE_DOTS),
    Check(DOTS[1], partial(_dot, 3), _USE_DOTS),
    *(
        Check(
            name,
            partial(_scaled_mm, bits, *((64, 96) if divisible else (48, 40))),
            "_scaled_mm in FP8 layers (dequantized weights replace it)",
        )
        for (bits, divisible), name in SCALED.items()
    ),
    # The plugin's definitions clamp before they convert.
    Check("e4m3: overflow", _overflow),
    Check(
        "event between two streams",
        _event,
        "async scheduling with a draft model",
        frozenset({"drafts", "async"}),
        "set --no-async-scheduling",
    ),
    Check("graph: replay", _graph, "graphs", frozenset({"graphs"}), "set --enforce-eager"),
    Check("graph: attention, 1 token", partial(_mate, 1), "FULL graphs", frozenset({"full graphs"}), _NO_FULL),
    Check(
        "graph: attention, 4 tokens",
        partial(_mate, 4),
        "FULL graphs with a draft model",
        frozenset({"full graphs", "drafts"}),
        _NO_FULL,
    ),
)


def run(device: torch.device) -> list[Result]:
    """Run every check on a device that this process has started."""
    return [_result(check, device) for check in CHECKS]


def _result(check: Check, device: torch.device) -> Result:
    begin = time.perf_counter()
    try:
        with torch.musa.device(device), torch.inference_mode():
            detail = check.run(device)
        state = "wrong" if detail else "right"
    except _Skipped as reason:
        state, detail = "skipped", str(reason)
    except Exception as error:
        state, detail = "error", f"{type(error).__name__}: {error}".partition("\n")[0]
    return Result(check.name, state, detail, check.refuses, round(time.perf_counter() - begin, 3))


def this_host(device: torch.device) -> dict[str, str]:
    """Return what the results on a device depend on."""
    from vllm.platforms import current_platform

    uuid = current_platform.get_device_uuid(device.index)
    gpu = {"gpu": torch.musa.get_device_name(device), "uuid": uuid, "driver": _mtml.driver()}
    return {**gpu, **installed_packages()}


def check_config(config: Any) -> None:
    """Raise ValueError if an engine needs a check that failed."""
    used = _uses(config)
    for check in CHECKS:
        if check.uses and check.uses <= used and (reason := find_wrong(check.name)):
            raise ValueError(f"{check.refuses} refused on MUSA: {reason}; {check.way_out}")
