# SPDX-License-Identifier: Apache-2.0
"""docs/kernel-benchmarks.md: which kernel is faster where, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from vllm_hwplugin_lab.bench.micro import MEASURED, left_out
from vllm_hwplugin_lab.bench.micro import attention_cases as attention
from vllm_hwplugin_lab.bench.micro import op_cases as ops
from vllm_hwplugin_lab.bench.table import between

from ._attention_tables import PROMPTS, present, ratios, slower
from ._judged import MARGIN, ROOFLINE_TEXT, goal_table, verdicts
from ._read import Found
from ._text import NONE, escaped, item, paragraph, table

_HEAD = """# Benchmarks of single kernels

Where the plugin's kernels are faster than vLLM's and PyTorch's. A kernel is a part of a step; whole engines are in
[benchmarks.md](benchmarks.md). Every figure, and how it was taken:
[benchmarks/results/kernels.md](../benchmarks/results/kernels.md).
"""

_AGAIN = """## Measure it on your host

```
vllm-hwplugin bench attention --json attention.json
vllm-hwplugin bench ops --json ops.json
```

Both need a GPU and no model. The table at the end says which kernel is faster there, and whether its results are right.

This page is made from the results files of both commands by `make docs`.
"""

_KINDS = (attention.PREFILL, attention.DECODE)


def page(files: Sequence[Found]) -> str:
    """Return the page from files of ``bench attention`` and ``bench ops``."""
    lines = [_HEAD]
    for file in files:
        chapter = _attention if file.results["kind"] == "attention" else _ops
        lines += [
            *chapter(file),
            "",
            "What these kernels are held to:",
            "",
            *goal_table(file.results),
            "",
            *(
                [paragraph(f"The roofline: {ROOFLINE_TEXT[0].lower()}{ROOFLINE_TEXT[1:]}"), ""]
                if file.results["kind"] == "attention"
                else []
            ),
            *_sure(file),
            "",
        ]
    return "\n".join([*lines, _AGAIN])


def _attention(file: Found) -> Iterator[str]:
    results = file.results
    yield f"## Attention with heads of 512: {file.device}, vLLM {file.vllm}"
    yield ""
    yield paragraph(
        "The time of another kernel, by the time of the plugin's CUDA kernel on the same batch: above 1 the plugin's "
        "is faster. 8 query heads, bfloat16, causal."
    )
    others = [name for name in present(results, attention.PREFILL) if name != attention.OURS]
    spared = " (FLEX_ATTENTION and SDPA are spared the paged cache here)" if attention.SDPA in others else ""
    if others:
        yield ""
        yield f"**A prompt**{spared}:"
        yield ""
        rows = [[name, *(_by_ours(results, name, [case]) for case in attention.PREFILL)] for name in others]
        yield from table(["kernel", *PROMPTS], rows)
    contexts = [case.context for case in attention.DECODE]
    rivals = [name for name in (attention.TRITON, attention.FA4) if name in present(results, attention.DECODE)]
    for rival in rivals:
        yield ""
        yield (
            f"**Decode and verification**, only {rival}, over contexts of {min(contexts)} to {max(contexts)} tokens:"
        )
        yield ""
        yield from _decode(results, rival)
        yield ""
        yield (
            "In batches as a server has them, of unequal lengths or of 24 and 100 requests: "
            f"{_by_ours(results, rival, attention.AS_SERVED)}."
        )
    yield from slower(results, [*rivals, attention.OURS_TRITON])
    prompt, decode = (ratios(results, attention.OURS_TRITON, attention.TRITON, cases) for cases in _KINDS)
    if prompt and decode:
        yield ""
        yield paragraph(
            "If the CUDA kernel cannot be loaded, the plugin's Triton kernels run. They take "
            f"{between(prompt, '.2f')} times {attention.TRITON}'s time for prompts, and {between(decode, '.2f')} times "
            f"in decode and verification, where they are the slower ones on {sum(ratio > 1 for ratio in decode)} of "
            f"{len(decode)} shapes."
        )


def _decode(results: Mapping[str, Any], rival: str) -> list[str]:
    queries = list(dict.fromkeys(case.query for case in attention.DECODE))
    rows = []
    for kv_heads, batch in dict.fromkeys((case.kv_heads, case.batch) for case in attention.DECODE):
        same = [case for case in attention.DECODE if (case.kv_heads, case.batch) == (kv_heads, batch)]
        by_query = [[case for case in same if case.query == query] for query in queries]
        cells = [_by_ours(results, rival, cases) for cases in by_query]
        rows.append([str(kv_heads), str(batch), *cells])
    names = ["KV heads", "requests", *(f"{query} token{'s'[: query - 1]} each" for query in queries)]
    return table(names, rows)


def _by_ours(results: Mapping[str, Any], name: str, cases: Sequence[attention.AttentionCase]) -> str:
    """Return the range of another kernel's time by the plugin's."""
    known = ratios(results, name, attention.OURS, cases)
    return between(known, ".2f") if known else NONE


def _ops(file: Found) -> Iterator[str]:
    results, sizes = file.results, (ops.SMALL, ops.LARGE)
    yield f"## vLLM's operations: {file.device}, vLLM {file.vllm}"
    yield ""
    yield paragraph(
        "vLLM's time by the plugin's: the geometric mean over the shapes, and the least of all. It is a gain where "
        f"both means are above {1 + MARGIN:.2f}, no shape is below {1 - MARGIN:.2f}, and every answer is right. "
        "[kernels.md](kernels.md) says which operations replace vLLM's by default."
    )
    yield ""
    tokens = {size: ", ".join(str(n) for n, of_size in ops.TOKENS.items() if of_size == size) for size in sizes}
    names = ["operation", "verdict", *(f"{tokens[size]} tokens" for size in sizes), "least", "why"]
    rows = []
    for verdict in verdicts(results).values():
        means = [f"{verdict.ratios[size]:.2f}" if size in verdict.ratios else NONE for size in sizes]
        least = NONE if verdict.least is None else f"{verdict.least:.2f}"
        rows.append([f"`{verdict.op}`", verdict.verdict, *means, least, escaped(verdict.why.partition(";")[0]) or NONE])
    yield from table(names, rows)


def _sure(file: Found) -> Iterator[str]:
    cells = [cell for cell in file.results["cells"] if cell["status"] == MEASURED]
    spreads = [abs(cell[end] / cell["seconds"] - 1) for cell in cells for end in ("fastest", "slowest")]
    text = f"From `{file.name}`: {file.source}."
    if cells:
        text += (
            f" Each figure is the median of {min(cell['repeats'] for cell in cells)} or more replays of a graph in one "
            f"process. The fastest and the slowest replay lie {median(spreads):.1%} from it for half of the figures, "
            f"up to {quantiles(spreads, n=20)[-1]:.1%} for 95 % of them, {max(spreads):.0%} at most."
        )
    yield paragraph(text)
    if lines := left_out(file.results):
        yield from ("", "Without a figure, or wrong:", "")
        yield from (item(escaped(line)) for line in lines)
