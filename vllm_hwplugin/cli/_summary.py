# SPDX-License-Identifier: Apache-2.0
"""The summary and the verdict of ``doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from ..base.run_records import Use, is_running
from ..spec_decode.capture_sizes import UNSERVED
from ..spec_decode.engine_report import unused_by_cause
from ..spec_decode.step_counts import SERVED
from ._diagnosis import Diagnosis
from ._engines import name_of
from ._planned import Planned
from .text import ago, shortened

_LABEL: Final = 14
#: Reasons to name for the steps that a fast path did not serve.
_REASONS: Final = 2


def verdict(diagnosis: Diagnosis) -> str:
    """Return the last line of the report."""
    if diagnosis.problems:
        return f"NOT OK: {_count(diagnosis.problems, 'problem')}, named above"
    warned = f", with {_count(diagnosis.warnings, 'warning')}" if diagnosis.warnings else ""
    if any(row.name == "VLLM_HWPLUGIN" and row.value == "0" for row in diagnosis.gates):
        return f"OK: the plugin is switched off (VLLM_HWPLUGIN=0), and vLLM runs unpatched{warned}"
    return f"OK{warned} (all tables: vllm-hwplugin doctor -v)"


def summary(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines between the warnings and the verdict."""
    vllm = "no vLLM" if diagnosis.vllm is None else f"{diagnosis.vllm['dist']} {diagnosis.vllm['version']}"
    yield _line("installed", f"vllm-hwplugin {diagnosis.plugin['version']}, {vllm}, {diagnosis.host['executable']}")
    devices = Counter(device.name for device in diagnosis.platform.devices)
    here = ", ".join(f"{count} x {name}" for name, count in devices.items()) or diagnosis.platform.kind
    yield _line("device", here if diagnosis.planned is None else diagnosis.planned.device)
    yield _line("features", _features(diagnosis))
    changed = [f"{row.name}={shortened(row.value)}" for row in diagnosis.gates if row.source != "default"]
    if changed:
        yield _line("settings", ", ".join(changed))
    yield from _engine(diagnosis) if diagnosis.planned is None else _planned(diagnosis.planned)


def _planned(planned: Planned) -> Iterator[str]:
    yield _line("for", planned.command)
    if not planned.described:
        return
    yield _line("engine", f"not started: {planned.described}")
    if active := [name for name, use in planned.uses.items() if use["used"]]:
        yield _line("  active", ", ".join(active))
    for name, reason in planned.left.items():
        yield _line("  left", f"{name}: {reason}")
    for line in unused_by_cause(planned.uses):
        yield _line("  not used", line)
    if planned.unserved:
        yield _line("  eager", f"{UNSERVED}: {planned.unserved}")
    for line in planned.ignored:
        yield _line("  ignored", line)
    if planned.unknown:
        about = dict.fromkeys(name for names in planned.unknown.values() for name in names)
        yield _line(
            "  not known",
            f"{len(planned.unknown)} conditions that need the device or the loaded model, for {', '.join(about)} (-v)",
        )


def _count(lines: Collection[str], noun: str) -> str:
    return f"{len(lines)} {noun}{'s' * (len(lines) > 1)}"


def _features(diagnosis: Diagnosis) -> str:
    if diagnosis.vllm is None:
        return "none: no vLLM"
    states = Counter(row.state for row in diagnosis.features)
    words = {
        "live": "patched in",
        "not-needed": f"not needed on {diagnosis.vllm['version']}",
        "upstream": f"already in vLLM {diagnosis.vllm['version']}",
        "off": "switched off",
        "refused": "refused",
    }
    return ", ".join(f"{states[state]} {word}" for state, word in words.items() if states[state]) or "none"


def _engine(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.last_engine:
        yield _line("engine", "none seen yet (start vLLM once)")
        return
    first = diagnosis.last_engine[0]
    shown = next(engine for engine in diagnosis.engines if (engine.pid, engine.started) == (first.pid, first.started))
    running = [name_of(entry) for entry in diagnosis.last_engine if entry.role != "inspection" and is_running(entry)]
    line = f"{shown.state}, started {ago(first.started)}, {', '.join(running) or name_of(first)}"
    # The doctor of another environment reports its engine.
    elsewhere = first.vllm_root is not None and (
        diagnosis.vllm is None or Path(diagnosis.vllm["path"]).parent != Path(first.vllm_root)
    )
    line += f", vLLM {first.vllm_version}" if first.vllm_version else ""
    line += f", in {first.vllm_root}, not the installation above" if elsewhere else ""
    if not shown.stands and not shown.running:
        line += "; no engine was built"
    off = any(entry.off for entry in diagnosis.last_engine)
    yield _line("engine", line + ("; the plugin is off there (VLLM_HWPLUGIN=0)" if off else ""))
    if not elsewhere:
        yield from _uses(diagnosis)
    others = [
        str(engine.pid) for engine in diagnosis.engines if engine.stands and engine.running and engine is not shown
    ]
    if others:
        yield _line("also running", f"{', '.join(others)} (--engine PID)")


def _uses(diagnosis: Diagnosis) -> Iterator[str]:
    uses: dict[str, Use] = {}
    for name, use in (pair for entry in diagnosis.last_engine for pair in entry.uses.items()):
        # A feature is active if any rank uses it.
        if use["used"] or name not in uses:
            uses[name] = use
    served = {name: "" for name, use in uses.items() if use["used"]}
    for path, outcomes in sorted(_steps(diagnosis).items()):
        name, _, part = path.partition(" ")
        if name in served and outcomes.total():
            served[name] += f"; {part} {_share(outcomes)}"
    for name, shares in served.items():
        if shares:
            yield _line("  active", name + shares)
    if without_steps := [name for name, shares in served.items() if not shares]:
        yield _line("  active", ", ".join(without_steps))
    if uses and not served:
        yield _line("  active", "no feature")
    for line in unused_by_cause(uses):
        yield _line("  not used", line)
    notes = (entry.decisions[UNSERVED] for entry in diagnosis.last_engine if UNSERVED in entry.decisions)
    for note in dict.fromkeys(notes):
        yield _line("  eager", f"{UNSERVED}: {note}")


def _steps(diagnosis: Diagnosis) -> Mapping[str, Counter[str]]:
    """Sum over the engine's processes: path -> outcome -> steps."""
    steps: dict[str, Counter[str]] = {}
    for path, outcomes in (pair for entry in diagnosis.last_engine for pair in entry.steps.items()):
        steps.setdefault(path, Counter()).update(outcomes)
    return steps


def _share(outcomes: Counter[str]) -> str:
    total, served = outcomes.total(), outcomes[SERVED]
    missed = Counter({name: count for name, count in outcomes.items() if name != SERVED}).most_common(_REASONS)
    reasons = ", ".join(f"{name.replace('_', ' ')} {count / total:.0%}" for name, count in missed)
    return f"{served / total:.0%} of {total} steps" + (f" (not: {reasons})" if reasons else "")


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"
