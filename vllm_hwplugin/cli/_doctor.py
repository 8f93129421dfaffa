# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin doctor``: is the plugin live here, and if not, why not."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..journal import Journal
from ..journals import is_running
from ..ops.operations import RECORD
from ..platforms import KEY as PLATFORM
from ..spec_decode.step_counts import SERVED, Reason
from ._diagnosis import Diagnosis, diagnose
from ._summary import summary, verdict
from .output import STANDARD_OUTPUT, add_optional_json, write_json
from .parser import Parser
from .text import ago, coloured, printable, shortened, table

_USED, _NOT_USED = "live, used", "live, not used"


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str = ""


def doctor(arguments: Sequence[str]) -> int:
    """Is the plugin live here, and if not, why not?"""
    parser = Parser(
        "doctor",
        "Show what is patched in here, and which features the running engine, or the last one, uses.\n\n"
        "Exit 1 if a process of vLLM would stop, or if the plugin would do nothing in it "
        "though it is switched on.",
        ["doctor", "doctor --for 'vllm serve MODEL --max-num-seqs 8'"],
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--engine", type=int, metavar="PID", help="Show the engine of this process.")
    what.add_argument(
        "--for",
        dest="command",
        metavar="COMMAND",
        help="Show what an engine would use, and why not, by a command that starts a server or a file for its "
        "--config; nothing is started.",
    )
    parser.add_argument(
        "--gpu", type=_capability, metavar="CAPABILITY", help="With --for: assume an NVIDIA GPU, such as 9.0."
    )
    results = parser.add_argument_group("results")
    results.add_argument("-v", "--verbose", action="store_true", help="Show all tables.")
    # Without a file: all there is, for another program; docs/commands.md has the fields.
    add_optional_json(results)
    options = parser.read(arguments)
    if options.gpu is not None and options.command is None:
        parser.error("--gpu needs --for")
    found = diagnose(engine=options.engine, command=options.command, gpu=options.gpu)
    if options.json is not None:
        write_json(found.as_json(), options.json)
    if options.json != STANDARD_OUTPUT:
        show(found, all_tables=options.verbose)
    return found.exit_code


def _capability(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"{text} is no compute capability such as 9.0")
    return text


def show(found: Diagnosis, *, all_tables: bool) -> None:
    """Print problems, warnings, a summary and a verdict; before them all tables if asked for.

    These are tables on a terminal, and aligned plain lines where the output goes to a file or a pipe.
    """
    for section in sections(found) if all_tables else ():
        if not sys.stdout.isatty():
            print(*plain(section), sep="\n")
        elif section.rows:
            rows = [[printable(" ".join(cell.split())) for cell in row] for row in section.rows]
            print(section.title, table(section.columns, rows), "", sep="\n")
        else:
            print(f"{section.title}: {section.empty}\n")
    for line in found.problems:
        print(coloured(f"problem: {printable(line)}", "red"))
    for line in found.warnings:
        print(coloured(f"warning: {printable(line)}", "yellow"))
    for line in summary(found):
        print(printable(line, keep=""))
    print(coloured(verdict(found), "red" if found.problems else "green"))


def sections(found: Diagnosis) -> tuple[Section, ...]:
    """What is shown, in order."""
    return (
        Section("host", ("what", "value"), tuple(_host_rows(found))),
        *_musa_sections(found),
        Section(
            "toolchains",
            ("tool", "version", "path"),
            tuple((tool.name, tool.version or "", tool.path or "not found") for tool in found.toolchains),
        ),
        Section(
            "kernels",
            ("kernel", "state", "detail", "library"),
            tuple((row.kernel, row.state, row.detail, row.library or "") for row in found.kernels),
        ),
        Section(
            "vLLM's operations",
            ("operation", "kernel", "reason"),
            tuple((row.operation, row.serves, row.reason) for row in found.operations),
        ),
        Section(
            "gates",
            ("variable", "value", "from", "remark"),
            tuple((row.name, shortened(row.value) or "not set", row.source, row.error or "") for row in found.gates),
        ),
        Section(
            f"features here (fingerprint {found.fingerprint})",
            ("feature", "gate", "state", "reason"),
            tuple((row.id, row.choice, row.state, row.reason) for row in found.features),
            "the catalogue has no feature",
        ),
        Section(
            "overridden methods",
            ("feature", "class", "methods"),
            tuple(
                (row.id, name, ", ".join(methods)) for row in found.features for name, methods in row.overrides.items()
            ),
            "no live feature overrides any",
        ),
        *_planned_sections(found),
        Section(
            "the engine's processes",
            ("process", "started", "vLLM", "feature", "state", "reason"),
            tuple(_process_rows(found)),
            "no process of vLLM has left a run record yet",
        ),
    )


def _planned_sections(found: Diagnosis) -> Iterable[Section]:
    planned = found.planned
    if planned is not None:
        rows = [(name, "active" if use["used"] else "not used", use["reason"]) for name, use in planned.uses.items()]
        rows += [(name, "left to vLLM", reason) for name, reason in planned.left.items()]
        rows += [(", ".join(names), "unless", reason) for reason, names in sorted(planned.unknown.items())]
        yield Section("the engine that is not started", ("feature", "state", "reason"), tuple(rows))


def _musa_sections(found: Diagnosis) -> Iterable[Section]:
    if found.musa:
        yield Section(
            "Moore Threads' packages",
            ("package", "version", "expected", "remark"),
            tuple((row.package, row.found or "not installed", row.expected, row.trouble) for row in found.musa),
        )


def plain(section: Section) -> Iterable[str]:
    """A section as aligned lines without decoration, one line a row however long: for grep and awk."""
    yield f"== {section.title}"
    if not section.rows:
        yield f"  {section.empty}"
    widths = [max(map(len, column)) for column in zip(*section.rows, strict=True)]
    for row in section.rows:
        # A reason may have several lines; a row is one.
        cells = [printable(" ".join(cell.split())).ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()


def _host_rows(found: Diagnosis) -> Iterable[tuple[str, str]]:
    yield "system", f"{found.host.system}, {found.host.cpus} CPUs"
    yield "Python", f"{found.host.python} ({found.host.executable})"
    if found.platform.kind == "cpu":
        yield "platform", f"cpu ({found.platform.evidence})"
    for device in found.platform.devices:
        facts = [
            device.memory,
            device.driver and f"driver {device.driver}",
            device.capability and f"sm {device.capability}",
        ]
        yield "platform", ", ".join([f"{found.platform.kind}: {device.name}", *(fact for fact in facts if fact)])
    yield "platform class", f"{found.platform_class['class'] or 'no platform class'}: {found.platform_class['reason']}"
    yield "vllm-hwplugin", f"{found.plugin['version']} ({found.plugin['path']})"
    if found.vllm is None:
        yield "vLLM", "not installed"
    else:
        listed = "" if found.vllm["supported"] else ", not a supported version"
        yield "vLLM", f"{found.vllm['dist']} {found.vllm['version']} ({found.vllm['path']}){listed}"
    for name, version in found.packages.items():
        if version is not None or name == "torch":
            yield name, version or "not installed"
    for place, state in found.cache.items():
        yield "cache", f"{place}: {state}"


def _process_rows(found: Diagnosis) -> Iterable[tuple[str, ...]]:
    for item in found.last_engine:
        life = "runs" if is_running(item) else "ended"
        head = (f"{item.pid} {item.role} {life}", ago(item.started), item.vllm_version or "")
        if item.error is not None:
            yield (*head, "", "error", item.error)
        if (platform := item.decisions.get(PLATFORM)) is not None:
            yield (*head, PLATFORM, "", platform)
        for name, feature in item.features.items():
            yield (*head, name, *_feature_cells(item, name, feature))
        for key, decision in item.decisions.items():
            # Of what is no feature: vLLM's operations, attention, single modules.
            if key != PLATFORM and key not in item.features:
                yield (*head, key.removeprefix(RECORD), "", decision)
        if item.off:
            yield (*head, "", "off", "VLLM_HWPLUGIN=0 switched the plugin off")


def _feature_cells(item: Journal, name: str, feature: Mapping[str, str]) -> tuple[str, str]:
    """State and reason of a feature in one process."""
    use, decision = item.uses.get(name), item.decisions.get(name)
    reasons = [feature["reason"], decision]
    state = feature["state"]
    steps = {path: outcomes for path, outcomes in item.steps.items() if path.split(" ")[0] == name}
    if use is not None and state == "live":
        state = _USED if use["used"] and _serves(steps.values()) else _NOT_USED
        # A feature that found the obstacle by itself has noted what it does instead, with the reason.
        if use["reason"] not in (decision or ""):
            reasons.append(use["reason"])
        reasons += [_of_steps(path.removeprefix(name).strip(), outcomes) for path, outcomes in steps.items()]
    return state, "; ".join(filter(None, reasons))


def _serves(paths: Collection[Mapping[str, int]]) -> bool:
    """Whether a step was served; also where none was asked for but those of prompts, which few features serve."""
    decode = [outcome for outcomes in paths for outcome in outcomes if outcome != Reason.PROMPT.label]
    return not decode or SERVED in decode


def _of_steps(part: str, outcomes: Mapping[str, int]) -> str:
    """How many steps were served, and why the others were not, the most frequent reason first."""
    missed = sorted((item for item in outcomes.items() if item[0] != SERVED), key=lambda item: -item[1])
    others = ", ".join(f"{outcome.replace('_', ' ')} {count}" for outcome, count in missed)
    served = f"{part}: {outcomes.get(SERVED, 0)} of {sum(outcomes.values())} steps served"
    return f"{served} ({others})" if others else served
