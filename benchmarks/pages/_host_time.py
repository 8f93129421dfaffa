# SPDX-License-Identifier: Apache-2.0
"""docs/host-time.md: the host's time in a step, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from vllm_hwplugin_lab.bench import SHAPES
from vllm_hwplugin_lab.bench.plan import TINY
from vllm_hwplugin_lab.bench.table import NOT_MEASURED, SIDE_NAMES, phases_of

from ._read import Found
from ._text import head, item, missing, paragraph, row, table


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        name: in words.
        functions: patterns of its outermost functions, in the paths of ``bench --profile``.
        plugin: what the plugin does about it.
    """

    name: str
    functions: tuple[str, ...]
    plugin: str


#: A wait belongs only to this part, wherever it is.
_WAITING = Part(
    "waiting for the GPU, and its tokens for the host",
    ("Future.result", "*._get_valid_sampled_token_count", "*.get_output"),
    "nothing; the less the host does, the larger this part of a step",
)
_PARTS = (
    Part("scheduling", ("*Scheduler.*",), "nothing"),
    Part(
        "the requests' states",
        (
            "*._update_states",
            "*.update_states",
            "*Runner.add_requests",
            "*Runner.update_requests",
            "*Runner.finish_requests",
            "*Runner.free_states",
            "*Runner.update_pp_decode_requests",
            "*.apply_staged_writes",
        ),
        "`v2-step-inputs` writes to the device only what has changed",
    ),
    Part(
        "attention metadata",
        (
            "*.build_attention_metadata",
            "*._build_attention_metadata",
            "*ModelState.prepare_attn",
            "build_attn_metadata",
            "build_slot_mappings_by_layer",
        ),
        "`v1-step-inputs` and `v2-step-inputs` make it in the graph of the inputs",
    ),
    Part(
        "inputs",
        (
            "*._prepare_inputs",
            "*.prepare_inputs",
            "*._get_slot_mappings",
            "*.get_slot_mappings",
            "*Runner.prepare_attn",
            "StepInputs.*",
            "*._preprocess",
            "*.preprocess_state",
            "*._determine_batch_execution_and_padding",
            "dispatch_cg_and_sync_dp",
        ),
        "`v1-step-inputs` and `v2-step-inputs` in steps that decode only: one graph",
    ),
    Part("launching the target", ("*._model_forward", "*CudaGraphManager.run_fullgraph"), "nothing"),
    Part(
        "sampling",
        ("*._sample", "*Runner.sample", "TailGraphs.sample", "DraftPhase.sample", "DraftPhase.logits", "*_sampled"),
        "`v1-draft-phase` and `v2-tail-graph`: one graph",
    ),
    Part(
        "drafting",
        ("*.propose_draft_token_ids", "*.propose", "TailGraphs.keep_drafts", "TailGraphs.drafts_of"),
        "`draft-full-graph`, `draft-loop-graph`, `dflash-full-graph`: a graph a pass; `v1-draft-phase` and "
        "`v2-tail-graph`: one graph for all",
    ),
    Part(
        "what goes back to the scheduler",
        ("*._bookkeeping_sync", "*._update_states_after_model_execute", "*._copy_*", "*.postprocess*", "*.set_draft*"),
        "nothing",
    ),
)
_RUNNER = Part(
    "other lines of `execute_model` and `sample_tokens`; on V1 logits, too",
    ("*Runner.execute_model", "*Runner.sample_tokens"),
    "on V1 `v1-draft-phase` has the logits in its graph",
)
_REST = Part("engine core, executor, worker", (), "nothing")
PARTS = (*_PARTS, _RUNNER, _WAITING, _REST)

_FOOT = (
    paragraph(
        "This page is made from the files `phases-*.json` of [benchmarks/results](../benchmarks/results/README.md), "
        "which have every function, by `make docs`."
    )
    + "\n"
)
_HEAD = """# Where a step's time goes on the host

What the CPU does in a decode step, with the plugin and without. Speed is in [benchmarks.md](benchmarks.md).
"""
_HOW = (
    "Host time in a decode step, in microseconds: the median step of the quickest round. Each microsecond is in "
    "exactly one row, so the rows add up to the step. There was no profiler: each function of vLLM and of the "
    "plugin that a step goes through was timed, at about a microsecond a call. The engine ran in its caller's "
    "process. One run looked at all sides in turn, on V1 and on Model Runner V2 (V2); patched has the features named. "
    "GPU busy comes from torch's profiler, in a separate part of the run."
)
#: Number of functions that are named for each side.
_MOST = 8


def page(files: Sequence[Found]) -> str:
    """Return docs/host-time.md, from files of ``bench --profile``."""
    drawn = "![a step on the host, part by part, and on the GPU; unpatched and patched, V1 and V2](step.svg)"
    lines = [_HEAD, drawn, "", paragraph(_HOW), "", "## The parts of a step, and what the plugin does about them", ""]
    lines += [*table(["part", "what the plugin does"], ([part.name, part.plugin] for part in PARTS)), ""]
    for file in files:
        lines += [f"## vLLM {file.vllm}, {file.device}: `{file.name}`", "", paragraph(f"{file.source}."), ""]
        for early in missing(file.results, case_name, "looked at"):
            lines += [early, ""]
        # A file has the batches of an engine one after another.
        cases: dict[str, dict[str, Mapping[str, Any]]] = {}
        for engine in file.results["engines"]:
            cases.setdefault(f"{case_name(engine)}, batch {engine['batch']}", {})[engine["side"]] = engine
        for name, engines in cases.items():
            lines += [*_chapter(name, engines), ""]
    return "\n".join([*lines, _FOOT])


def parts_us(rows: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Return the microseconds of each part; they add up to the step.

    Args:
        rows: an engine's, from ``bench --profile``.
    """
    times = {part.name: 0.0 for part in PARTS}
    for phase in phases_of(rows):
        times[_part_of(phase.path).name] += phase.own
    return times


def _part_of(path: Sequence[str]) -> Part:
    for parts in ((_WAITING,), _PARTS, (_RUNNER,)):
        for name in path:
            for part in parts:
                if any(fnmatchcase(name, pattern) for pattern in part.functions):
                    return part
    return _REST


def _chapter(name: str, engines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    sides = [side for side in SIDE_NAMES if side in engines]
    us = {side: parts_us(engines[side]["phases"]) for side in sides}
    yield f"### {name}"
    yield ""
    yield from head(["us a step", *(SIDE_NAMES[side] for side in sides)])
    for part in PARTS:
        yield row([part.name, *(f"{us[side][part.name]:.0f}" for side in sides)])
    yield row(["**the step**", *(f"**{sum(us[side].values()):.0f}**" for side in sides)])
    yield row(["GPU busy", *(_busy(engines[side]) for side in sides)])
    yield ""
    for side in sides:
        if features := engines[side]["features"]:
            yield item(f"{SIDE_NAMES[side]} uses {', '.join(f'`{feature}`' for feature in features)}.")
    yield ""
    yield f"The {_MOST} functions with most time of their own, us a step:"
    yield ""
    for side in sides:
        largest = [f"`{function}` {own:.0f}" for function, own in _largest(engines[side]["phases"])]
        yield item(f"{SIDE_NAMES[side]}: {', '.join(largest)}.")


def _busy(engine: Mapping[str, Any]) -> str:
    busy = engine["profile"].get("gpu_busy_ms")
    return f"{busy * 1e3:.0f}" if busy else NOT_MEASURED


def _largest(rows: Sequence[Sequence[Any]]) -> list[tuple[str, float]]:
    """Return the functions with most time, over all their callers."""
    times: dict[str, float] = {}
    for phase in phases_of(rows):
        times[phase.path[-1]] = times.get(phase.path[-1], 0.0) + phase.own
    return sorted(times.items(), key=lambda entry: -entry[1])[:_MOST]


def case_name(case: Mapping[str, Any]) -> str:
    """Return target and drafter, from ``shape``, ``method`` and ``k``."""
    target = TINY if case["shape"] == TINY else SHAPES[case["shape"]].title
    return f"{target}, {case['method']} k={case['k']}"
