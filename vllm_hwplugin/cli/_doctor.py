# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin doctor``: is the plugin live here, and if not, why not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from ..journal import Journal
from ..musa import versions as musa_versions
from ..ops.compile.plan import MIN_TORCH
from ..ops.override_table import RECORD
from ..platforms import KEY as PLATFORM
from ..spec_decode.step_counts import SERVED, Reason
from ._app import FAILURE
from ._diagnosis import Diagnosis, diagnose
from .output import STANDARD_OUTPUT, JsonFile, write_json, write_text
from .tables import print_rows
from .text import printable, shortened

_USED, _NOT_USED = "live, used", "live, not used"
_COLOURS = {
    _USED: "green",
    _NOT_USED: "yellow",
    "live": "green",
    "upstream": "green",
    "not-needed": "green",
    "off": "yellow",
    "refused": "red",
}


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str = ""


class _JsonStandsAlone(TyperCommand):
    """``--json`` without a file is ``--json -``; nothing else could follow it, for doctor takes no arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        name = "--json"
        filled: list[str] = []
        for position, arg in enumerate(args):
            filled.append(arg)
            following = args[position + 1] if position + 1 < len(args) else None
            if arg == name and (following is None or (following.startswith("-") and following != "-")):
                filled.append("-")
        return super().parse_args(ctx, filled)


app = typer.Typer(add_completion=False)


@app.command(cls=_JsonStandsAlone)
def doctor(
    json_file: JsonFile = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--musa-versions", metavar="FILE", help="Only write the table of versions for MUSA into that page."
        ),
    ] = None,
) -> None:
    """Show host, vLLM, gates and features: here, and in the last engine's processes.

    `--json` alone prints everything as JSON; see docs/architecture.md. Exit 1 if a process of vLLM would stop, or if
    the plugin would do nothing in it though it is switched on.
    """
    if page is not None:
        _write_versions(page)
        return
    found = diagnose()
    if json_file is not None:
        write_json(found.as_json(), json_file)
    if json_file != STANDARD_OUTPUT:
        show(found, Console())
    raise typer.Exit(found.exit_code)


def _write_versions(page: Path) -> None:
    try:
        text = page.read_text(encoding="utf-8")
        write_text(musa_versions.written_into(text, MIN_TORCH), page)
    except (OSError, ValueError) as error:
        Console(stderr=True).print(f"doctor: {page} is not written: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(FAILURE) from None


def show(found: Diagnosis, console: Console) -> None:
    """Print the findings: tables on a terminal, aligned plain lines where the output goes to a file or a pipe."""
    for section in sections(found):
        if console.is_terminal:
            _show_table(section, console)
        else:
            for line in plain(section):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    for kind, style, lines in (("problem", "red", found.problems), ("warning", "yellow", found.warnings)):
        for line in lines:
            console.print(f"{kind}: {printable(line)}", style=style, markup=False, highlight=False, soft_wrap=True)
    if not found.problems and not found.warnings:
        console.print("nothing to report", style="green", highlight=False)


def sections(found: Diagnosis) -> tuple[Section, ...]:
    """What is shown, in order."""
    return (
        Section("host", ("what", "value"), tuple(_host_rows(found))),
        *_musa_sections(found),
        Section(
            "toolchains",
            ("tool", "version", "path"),
            tuple((tool.name, tool.version or "", tool.path or "not found") for tool in found.tools),
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
            "the last engine's processes",
            ("process", "started", "vLLM", "feature", "state", "reason"),
            tuple(_process_rows(found)),
            "no process of vLLM has left a journal yet",
        ),
    )


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


def _show_table(section: Section, console: Console) -> None:
    if not section.rows:
        console.print(Text(f"{section.title}: {section.empty}"))
        return
    rows = [[Text(printable(cell), style=_COLOURS.get(cell, "")) for cell in row] for row in section.rows]
    print_rows(console, section.title, section.columns, rows)


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
        process = f"{item.pid} {item.role}"
        head = (process, item.started, item.vllm_version or "")
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
        if item.error is None and not item.features:
            yield (*head, "", "off", "the plugin was switched off")


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
