# SPDX-License-Identifier: Apache-2.0
"""Batches through `paged_attention`: random ones, from the probe's cases, in each shape that vLLM gave its KV cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_hwplugin.attention import paged
from vllm_hwplugin_lab.probe import Case, Request
from vllm_hwplugin_lab.probe.inputs import Inputs, make_inputs, poison
from vllm_hwplugin_lab.probe.reference import Measure, measure

#: By vLLM version: keys and values apart (to 0.22), side by side in a block (to 0.25), side by side in a head (later).
LAYOUTS = ("apart", "in a block", "in a head")


def caches(case: Case, inputs: Inputs, layout: str, device: Any, *, fill: str = "poison") -> tuple[Any, Any]:
    """Keys and values [blocks, block size, KV heads, head size], the unused slots poisoned or not a number."""
    dtype = getattr(torch, case.dtype)
    blocks, page, heads, size = inputs.num_blocks, case.block_size, case.num_kv_heads, case.head_size
    if layout == "apart":
        memory = torch.empty(2, blocks, page, heads, size, dtype=dtype, device=device)
        keys, values = memory.unbind(0)
    elif layout == "in a block":
        memory = torch.empty(blocks, 2, page, heads, size, dtype=dtype, device=device)
        keys, values = memory.unbind(1)
    else:
        memory = torch.empty(blocks, heads, page, 2 * size, dtype=dtype, device=device)
        keys, values = memory.transpose(1, 2).split(size, dim=-1)
    if fill == "poison":
        poison(memory, case.seed)
    else:
        memory.fill_(math.nan)
    for request, slots, key, value in zip(case.requests, inputs.slots, inputs.keys, inputs.values, strict=True):
        # vLLM takes back the pages that no token's window reaches any more, and gives them to others.
        reach = request.total if case.sliding_window is None else request.query + case.sliding_window - 1
        kept = slice(max(request.total - reach, 0) // page * page, None)
        keys[slots[kept] // page, slots[kept] % page] = key[kept]
        values[slots[kept] // page, slots[kept] % page] = value[kept]
    return keys, values


def metadata(case: Case, device: Any) -> dict[str, Any]:
    """The arguments that say which tokens are whose, padding rows included."""
    ends = [0]
    for row in case.rows:
        ends.append(ends[-1] + row.query)
    return {
        "query_start_loc": torch.tensor(ends, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([row.total for row in case.rows], dtype=torch.int32, device=device),
        "max_query_len": max(row.query for row in case.rows),
    }


@dataclasses.dataclass(frozen=True)
class On:
    """What launches run on."""

    kernel: paged.Kernel
    scratch: paged.Scratch

    @classmethod
    def device(cls, device: Any) -> On:
        return cls(paged.kernel_for(device), paged.Scratch.allocate(device))


def settings(case: Case) -> dict[str, Any]:
    """The arguments that a layer has for all batches."""
    left = -1 if case.sliding_window is None else case.sliding_window - 1
    right = -1 if case.sliding_window is None or case.window_ahead is None else case.window_ahead
    return {
        "scale": 1 / math.sqrt(case.head_size),
        "causal": case.causal,
        "window": (left, right),
        "softcap": case.softcap or 0.0,
    }


def prepared(
    case: Case,
    inputs: Inputs,
    on: On,
    layout: str = "apart",
    *,
    fill: str = "poison",
    **changes: Any,
) -> tuple[Callable[[], None], Any]:
    """A launch, and where its answer [tokens, heads, head size] will be; until then that is not a number.

    ``changes`` are arguments in place of the case's own, or beside them.
    """
    device = inputs.query.device
    keys, values = caches(case, inputs, layout, device, fill=fill)
    out = torch.full_like(inputs.query, math.nan)
    given = {
        "block_table": inputs.block_table,
        "sinks": None if inputs.sinks is None else inputs.sinks.float(),
        **metadata(case, device),
        **settings(case),
        **changes,
    }
    return lambda: launch(on, inputs.query, keys, values, out, **given), out


def launch(on: On, *tensors: Any, max_query_len: int, batch_invariant: bool = False, **given: Any) -> None:
    """Run query, keys, values and out; `given` are further fields of `Arguments`."""
    how: dict[str, Any] = {"max_query_len": max_query_len, "batch_invariant": batch_invariant}
    paged.paged_attention(paged.Arguments(*tensors, **given), kernel=on.kernel, scratch=on.scratch, **how)


def attend(*arguments: Any, **more: Any) -> Any:
    """The answer of a launch that is `prepared` so."""
    launch, out = prepared(*arguments, **more)
    launch()
    return out


def alone(case: Case, inputs: Inputs, on: On) -> Iterator[tuple[slice, Any]]:
    """For each request its rows in the batch, and the answer where it is the only one, batch-invariant."""
    start = 0
    for row, request in enumerate(case.requests):
        rows, one = slice(start, start + request.query), slice(row, row + 1)
        only = dataclasses.replace(
            inputs,
            query=inputs.query[rows],
            keys=inputs.keys[one],
            values=inputs.values[one],
            slots=inputs.slots[one],
            block_table=inputs.block_table[one],
        )
        yield rows, attend(dataclasses.replace(case, requests=(request,)), only, on, batch_invariant=True)
        start = rows.stop


def measured(case: Case, on: On, layout: str = "apart", *, fill: str = "poison") -> Measure:
    """The error of one random batch, relative to SDPA's."""
    inputs = make_inputs(case, on.scratch.out.device)
    return measure(case, inputs, attend(case, inputs, on, layout, fill=fill))


def cases(head_sizes: tuple[int, ...], seed: int, dtype: str, longest: int) -> list[tuple[Case, str]]:
    """Every setting of a layer at each head size, over batches of each kind, with a shape of cache."""
    plain = Case(
        (Request(1, longest), Request(5, 70), Request(40, 0)), dtype, dtype, head_sizes[0], 8, 1, 16, padding=2
    )
    verify = tuple(Request(query, longest // query) for query in (1, 2, 4, 8, 16, 32))
    prefill = (Request(longest // 4, longest // 8), Request(17, 0), Request(64, 1))
    shapes = [
        plain,
        dataclasses.replace(plain, causal=False, requests=(Request(1, longest), Request(9, 3))),
        dataclasses.replace(plain, requests=verify, num_kv_heads=4),
        dataclasses.replace(plain, requests=prefill, num_heads=6, num_kv_heads=2, block_size=48),
        dataclasses.replace(plain, requests=verify, num_heads=14, num_kv_heads=2),
        dataclasses.replace(plain, requests=prefill, causal=False, num_kv_heads=8, block_size=32),
        dataclasses.replace(plain, sliding_window=20, num_kv_heads=4),
        dataclasses.replace(plain, sliding_window=70, causal=False, window_ahead=69, requests=prefill),
        dataclasses.replace(plain, softcap=2.0, sinks=True),
        dataclasses.replace(plain, sinks=True, requests=tuple(Request(1, 63 + n) for n in range(3)), num_heads=16),
    ]
    return [
        (dataclasses.replace(shape, head_size=size, seed=seed + 100 * number + size), LAYOUTS[(number + index) % 3])
        for index, size in enumerate(head_sizes)
        for number, shape in enumerate(shapes)
    ]
