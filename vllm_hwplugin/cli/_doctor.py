# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin doctor``: what is patched in here, what is not, and why."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import platform as host
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..base.run_records import RunRecord, is_running
from ..ops.operations import RECORD
from ..platforms import KEY as PLATFORM
from ..spec_decode.step_counts import SERVED, Reason
from ._diagnosis import Diagnosis, diagnose
from ._paste import as_issue, redacted
from ._summary import summary, verdict
from .output import STANDARD_OUTPUT, add_optional_json, write_json
from .parser import Parser
from .text import ago, coloured, printable, shortened, table

_USED, _NOT_USED = "patched in, active", "patched in, not used"


class Section(NamedTuple):
    """A table: its columns, separated by commas, its rows, and what stands there without rows."""

    title: str
    columns: str
    rows: Sequence[tuple[str, ...]]
    empty: str = ""


def doctor(arguments: Sequence[str]) -> int:
    """Show what is patched in; return 1 if there are problems."""
    parser = Parser(
        "doctor",
        "Show what is patched in here, and which features the running or last engine uses.\n\n"
        "Exit status 1: a vLLM process would stop, or the plugin is on but would do nothing in it.",
        ["doctor", "doctor --for 'vllm serve MODEL --max-num-seqs 8'"],
    )
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--engine", type=int, metavar="PID", help="Show the engine of this process.")
    engine.add_argument(
        "--for",
        dest="command",
        metavar="COMMAND",
        help="Show which features an engine would use, given the command that starts it, or a file for its "
        "--config. Nothing is started.",
    )
    parser.add_argument(
        "--gpu",
        type=_capability,
        metavar="CAPABILITY",
        help="With --for: assume an NVIDIA GPU of this compute capability, such as 9.0.",
    )
    results = parser.add_argument_group("results")
    results.add_argument("-v", "--verbose", action="store_true", help="Show all tables.")
    results.add_argument(
        "--paste",
        action="store_true",
        help="Print a report for an issue: all tables, without home folders, host names, addresses and tokens.",
    )
    # docs/commands.md describes the fields.
    add_optional_json(results)
    options = parser.read(arguments)
    if options.gpu is not None and options.command is None:
        parser.error("--gpu needs --for")
    if options.paste and options.json is not None:
        parser.error("--paste and --json exclude each other")
    diagnosis = diagnose(engine=options.engine, command=options.command, gpu=options.gpu)
    if options.json is not None:
        write_json(diagnosis.as_json(), options.json)
    if options.paste:
        print(_for_an_issue(diagnosis))
    elif options.json != STANDARD_OUTPUT:
        show(diagnosis, all_tables=options.verbose)
    return diagnosis.exit_code


def _for_an_issue(diagnosis: Diagnosis) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show(diagnosis, all_tables=True)
    public = functools.partial(redacted, home=Path.home(), host=host.node())
    return as_issue(public(text.getvalue()), public(verdict(diagnosis)))


def _capability(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"{text} is not a compute capability; expected a number such as 9.0")
    return text


def show(diagnosis: Diagnosis, *, all_tables: bool) -> None:
    """Print problems, warnings, a summary and a verdict, optionally after all tables."""
    for section in sections(diagnosis) if all_tables else ():
        rows = [[printable(" ".join(cell.split())) for cell in row] for row in section.rows]
        print(f"== {section.title}", table(section.columns.split(","), rows) or section.empty, "", sep="\n")
    for line in diagnosis.problems:
        print(coloured(f"problem: {printable(line)}", "red"))
    for line in diagnosis.warnings:
        print(coloured(f"warning: {printable(line)}", "yellow"))
    for line in summary(diagnosis):
        print(printable(line, keep=""))
    print(coloured(verdict(diagnosis), "red" if diagnosis.problems else "green"))


def sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Yield the tables in their order."""
    yield Section("host", "what,value", [*_host_rows(diagnosis)])
    if diagnosis.musa:
        packages = [(row.package, row.found or "not installed", row.expected, row.trouble) for row in diagnosis.musa]
        yield Section("Moore Threads packages", "package,version,expected,remark", packages)
    tools = [(tool.name, tool.version or "", tool.path or "not found") for tool in diagnosis.toolchains]
    yield Section("toolchains", "tool,version,path", tools)
    kernels = [(row.kernel, row.state, row.detail, row.library or "") for row in diagnosis.kernels]
    yield Section("kernels", "kernel,state,detail,library", kernels)
    operations = [(row.operation, row.serves, row.reason) for row in diagnosis.operations]
    yield Section("vLLM's operations", "operation,kernel,reason", operations)
    gates = [(row.name, shortened(row.value) or "not set", row.source, row.error or "") for row in diagnosis.gates]
    yield Section("environment variables", "variable,value,from,remark", gates)
    features = [(row.id, row.choice, row.state, row.reason) for row in diagnosis.features]
    title = f"features here (fingerprint {diagnosis.fingerprint})"
    yield Section(title, "feature,switch,state,reason", features, "no features")
    overrides = [
        (row.id, name, ", ".join(methods)) for row in diagnosis.features for name, methods in row.overrides.items()
    ]
    nothing = "no feature that is patched in overrides methods"
    yield Section("overridden methods", "feature,class,methods", overrides, nothing)
    planned = diagnosis.planned
    if planned is not None:
        rows = [(name, "active" if use["used"] else "not used", use["reason"]) for name, use in planned.uses.items()]
        rows += [(name, "left to vLLM", reason) for name, reason in planned.left.items()]
        rows += [(", ".join(names), "unless", reason) for reason, names in sorted(planned.unknown.items())]
        yield Section("planned engine", "feature,state,reason", rows)
    nothing = "no run record of a vLLM process yet"
    columns = "process,started,vLLM,feature,state,reason"
    yield Section("the engine's processes", columns, [*_process_rows(diagnosis)], nothing)


def _host_rows(diagnosis: Diagnosis) -> Iterable[tuple[str, str]]:
    yield "system", f"{diagnosis.host['system']}, {diagnosis.host['cpus']} CPUs"
    yield "Python", f"{diagnosis.host['python']} ({diagnosis.host['executable']})"
    if diagnosis.platform.kind == "cpu":
        yield "platform", f"cpu ({diagnosis.platform.evidence})"
    for device in diagnosis.platform.devices:
        facts = [
            device.memory,
            device.driver and f"driver {device.driver}",
            device.capability and f"sm {device.capability}",
        ]
        yield "platform", ", ".join([f"{diagnosis.platform.kind}: {device.name}", *(fact for fact in facts if fact)])
    yield (
        "platform class",
        f"{diagnosis.platform_class['class'] or 'no platform class'}: {diagnosis.platform_class['reason']}",
    )
    yield "vllm-hwplugin", f"{diagnosis.plugin['version']} ({diagnosis.plugin['path']})"
    if diagnosis.vllm is None:
        yield "vLLM", "not installed"
    else:
        listed = "" if diagnosis.vllm["supported"] else ", not a supported version"
        yield "vLLM", f"{diagnosis.vllm['dist']} {diagnosis.vllm['version']} ({diagnosis.vllm['path']}){listed}"
    for name, version in diagnosis.packages.items():
        if version is not None or name == "torch":
            yield name, version or "not installed"
    for place, state in diagnosis.cache.items():
        yield "cache", f"{place}: {state}"


def _process_rows(diagnosis: Diagnosis) -> Iterable[tuple[str, ...]]:
    for process in diagnosis.last_engine:
        life = "runs" if is_running(process) else "ended"
        head = (f"{process.pid} {process.role} {life}", ago(process.started), process.vllm_version or "")
        if process.error is not None:
            yield (*head, "", "error", process.error)
        if (platform := process.decisions.get(PLATFORM)) is not None:
            yield (*head, PLATFORM, "", platform)
        for name, feature in process.features.items():
            yield (*head, name, *_feature_cells(process, name, feature))
        for key, decision in process.decisions.items():
            # Decisions that are about no feature: vLLM's operations, attention, single modules.
            if key != PLATFORM and key not in process.features:
                yield (*head, key.removeprefix(RECORD), "", decision)
        if process.off:
            yield (*head, "", "off", "VLLM_HWPLUGIN=0 switched the plugin off")


def _feature_cells(process: RunRecord, name: str, feature: Mapping[str, str]) -> tuple[str, str]:
    """Return state and reason of a feature in one process."""
    use, decision = process.uses.get(name), process.decisions.get(name)
    reasons = [feature["reason"], decision]
    state = feature["state"]
    steps = {path: outcomes for path, outcomes in process.steps.items() if path.split(" ")[0] == name}
    if use is not None and state == "live":
        state = _USED if use["used"] and _serves(steps.values()) else _NOT_USED
        # A feature that found the obstacle itself has recorded the reason with what it does instead.
        if use["reason"] not in (decision or ""):
            reasons.append(use["reason"])
        reasons += [_served_steps(path.removeprefix(name).strip(), outcomes) for path, outcomes in steps.items()]
    return state, "; ".join(filter(None, reasons))


def _serves(paths: Collection[Mapping[str, int]]) -> bool:
    """Whether a decode step was served, or there were only prompt steps."""
    # Few features serve prompt steps.
    decode = [outcome for outcomes in paths for outcome in outcomes if outcome != Reason.PROMPT.label]
    return not decode or SERVED in decode


def _served_steps(part: str, outcomes: Mapping[str, int]) -> str:
    """Return how many steps were served, and the reasons for the rest."""
    missed = sorted(((name, count) for name, count in outcomes.items() if name != SERVED), key=lambda pair: -pair[1])
    reasons = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in missed)
    served = f"{part}: {outcomes.get(SERVED, 0)} of {sum(outcomes.values())} steps served"
    return f"{served} ({reasons})" if reasons else served
