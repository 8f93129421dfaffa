# SPDX-License-Identifier: Apache-2.0
"""benchmarks/results/kernels.md: every figure of the single kernels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench.micro import left_out

from . import _attention_tables, _op_tables
from ._judged import MARGIN, OPS_BYTES, ROOFLINE_TEXT, goal_table
from ._read import Found
from ._text import escaped

HEAD = f"""# Single kernels: every figure

Each chapter is one run of `vllm-hwplugin bench attention` or `vllm-hwplugin bench ops` on a GPU; the page is made from
their results files by `make docs`, do not edit. What follows from it is in
[docs/kernel-benchmarks.md](../../docs/kernel-benchmarks.md). First what the kernels are held to and whether they meet
it, then all figures.

- **us, ms**: time on the device, the median over replays of a CUDA graph. Launches rotate over sets of random inputs
  that are together more than four times the L2 cache, but over 128 sets at most: the smallest problems are served by
  the cache in part.
- **% of copy**: bandwidth, relative to a copy of 2 GiB. **% of same size**: the time of a copy of as many bytes, by the
  kernel's. The copy is the faster of PyTorch's `copy_` and an elementwise kernel, in the same process. Bytes are keys
  and values for attention; for operations, each input read once and each output written once.
- **% of roofline** (attention): a yardstick of the shape's time, by the kernel's, and what it is **bound by**.
  {textwrap.fill(ROOFLINE_TEXT, 118, subsequent_indent="  ")}
- **error** (attention): of the timed launches' output against float64, by the error of PyTorch's SDPA on the same
  requests; the first and the last of a batch. Attention is causal, bfloat16, with pages of 16. `b8 c1024 q4 h8/1 d512`
  is a batch of 8, context 1024, 4 query tokens each, 8 query heads on 1 KV head, head size 512.
- **agrees** (operations): up to 64 rows equal the plugin's reference, within a few roundings.
- **ratio** (operations): vLLM's time by the plugin's. The verdict is a gain where its geometric mean is above
  {1 + MARGIN:.2f} for the small sizes (1, 8, 64 tokens) and for the large ones (8192, 65536), and no shape is below
  {1 - MARGIN:.2f}. Operations are held to the copy bandwidth where a launch moves {OPS_BYTES >> 20} MiB or more:
  of less, the L2 cache holds a good part.
- **Other kernels** are unpatched vLLM's, called as by its backends. *hwplugin, Triton* runs if the plugin's kernel for
  Hopper cannot be loaded. FLEX_ATTENTION and SDPA have contiguous keys and values, which spares them the block table.
  FlashAttention 3 at head size 256, which it was made for, has the same tokens and heads.
"""


def markdown(files: Sequence[Found]) -> str:
    """Return the page, with a chapter for each file."""
    lines = [HEAD]
    for file in files:
        lines += [*_chapter(file.results), ""]
    return "\n".join(lines).rstrip() + "\n"


def _chapter(results: Mapping[str, Any]) -> list[str]:
    host, first = results["host"], results["processes"][0] if results["processes"] else {}
    names = {"attention": "Attention at head size 512", "ops": "Operations"}
    packages = ", ".join(f"{name} {is_at}" for name, is_at in first.get("packages", {}).items() if is_at is not None)
    copies = [f"{p['copy_bandwidth'] / 1e9:.0f} GB/s" for p in results["processes"] if "copy_bandwidth" in p]
    body = _attention_tables.tables(results) if results["kind"] == "attention" else _op_tables.tables(results)
    return [
        f"## {names[results['kind']]}: {host['name']}, vLLM {host['vllm']}",
        "",
        f"`{_command(results)}`, {results['date'][:10]}, commit `{results['commit']}`, driver {host['driver']}; "
        f"{packages}. Copy: {', '.join(copies) or 'not measured'}{_cache(first)}.",
        "",
        *goal_table(results),
        "",
        *body,
        *_faults(results),
    ]


def _cache(process: Mapping[str, Any]) -> str:
    l2_bytes = process.get("l2_bytes")
    return "" if l2_bytes is None else f"; L2 cache: {l2_bytes / 2**20:.0f} MiB"


def _command(results: Mapping[str, Any]) -> str:
    settings = results["settings"]
    only = [f'--{option} "{value}"' for option, values in settings["only"].items() for value in values]
    limits = f"--seconds {settings['seconds']:g} --seed {settings['seed']}"
    return " ".join([f"vllm-hwplugin bench {results['kind']}", *only, limits])


def _faults(results: Mapping[str, Any]) -> Iterator[str]:
    if lines := left_out(results):
        yield ""
        yield "Without a figure, or wrong:"
        yield ""
        yield from (f"- {escaped(line)}" for line in lines)
