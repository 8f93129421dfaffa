# SPDX-License-Identifier: Apache-2.0
"""The summary of ``doctor``: some lines, and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from ..journal import Use
from ..journals import is_running
from ..spec_decode.capture_sizes import UNSERVED
from ..spec_decode.engine_report import unused_by_cause
from ..spec_decode.step_counts import SERVED
from ._diagnosis import Diagnosis
from ._engines import name_of
from ._planned import Planned
from .text import ago, shortened

_LABEL: Final = 14
#: Reasons that are named for the steps that a fast path did not serve.
_REASONS: Final = 2


def verdict(found: Diagnosis) -> str:
    """Return the last line."""
    if found.problems:
        return f"NOT OK: {_count(found.problems, 'problem')}, named above"
    warned = f", with {_count(found.warnings, 'warning')}" if found.warnings else ""
    if any(row.name == "VLLM_HWPLUGIN" and row.value == "0" for row in found.gates):
        return f"OK: the plugin is switched off (VLLM_HWPLUGIN=0), and vLLM runs unpatched{warned}"
    return f"OK{warned} (all tables: vllm-hwplugin doctor -v)"


def summary(found: Diagnosis) -> Iterator[str]:
    """Yield the lines before the verdict, without problems and warnings."""
    vllm = "no vLLM" if found.vllm is None else f"{found.vllm['dist']} {found.vllm['version']}"
    yield _line("installed", f"vllm-hwplugin {found.plugin['version']}, {vllm}, {found.host.executable}")
    devices = Counter(device.name for device in found.platform.devices)
    here = ", ".join(f"{count} x {name}" for name, count in devices.items()) or found.platform.kind
    yield _line("device", here if found.planned is None else found.planned.device)
    yield _line("features", _features(found))
    changed = [f"{row.name}={shortened(row.value)}" for row in found.gates if row.source != "default"]
    if changed:
        yield _line("settings", ", ".join(changed))
    yield from _engine(found) if found.planned is None else _planned(found.planned)


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


def _count(lines: Collection[str], what: str) -> str:
    return f"{len(lines)} {what}{'s' * (len(lines) > 1)}"


def _features(found: Diagnosis) -> str:
    if found.vllm is None:
        return "none: no vLLM"
    states = Counter(row.state for row in found.features)
    words = {
        "live": "patched in",
        "not-needed": f"not needed on {found.vllm['version']}",
        "upstream": f"in vLLM {found.vllm['version']} itself",
        "off": "switched off",
        "refused": "refused",
    }
    return ", ".join(f"{states[state]} {word}" for state, word in words.items() if states[state]) or "none"


def _engine(found: Diagnosis) -> Iterator[str]:
    if not found.last_engine:
        yield _line("engine", "none seen yet (start vLLM once)")
        return
    first = found.last_engine[0]
    shown = next(one for one in found.engines if one.pid == first.pid and one.started == first.started)
    running = [name_of(item) for item in found.last_engine if item.role != "inspection" and is_running(item)]
    line = f"{shown.state}, started {ago(first.started)}, {', '.join(running) or name_of(first)}"
    # An engine of another environment has its own doctor.
    elsewhere = first.vllm_root is not None and (
        found.vllm is None or Path(found.vllm["path"]).parent != Path(first.vllm_root)
    )
    line += f", vLLM {first.vllm_version}" if first.vllm_version else ""
    line += f", in {first.vllm_root}, not the one above" if elsewhere else ""
    if not shown.stands and not shown.running:
        line += "; no engine was built"
    off = any(item.off for item in found.last_engine)
    yield _line("engine", line + ("; the plugin is off there (VLLM_HWPLUGIN=0)" if off else ""))
    if not elsewhere:
        yield from _uses(found)
    if others := [str(one.pid) for one in found.engines if one.stands and one.running and one is not shown]:
        yield _line("also running", f"{', '.join(others)} (--engine PID)")


def _uses(found: Diagnosis) -> Iterator[str]:
    uses: dict[str, Use] = {}
    for name, use in (pair for item in found.last_engine for pair in item.uses.items()):
        # Any rank that uses a feature counts.
        if use["used"] or name not in uses:
            uses[name] = use
    served = {name: "" for name, use in uses.items() if use["used"]}
    for path, outcomes in sorted(_steps(found).items()):
        name, _, part = path.partition(" ")
        if name in served and outcomes.total():
            served[name] += f"; {part} {_share(outcomes)}"
    for name, shares in served.items():
        if shares:
            yield _line("  active", name + shares)
    if others := [name for name, shares in served.items() if not shares]:
        yield _line("  active", ", ".join(others))
    if uses and not served:
        yield _line("  active", "no feature")
    for line in unused_by_cause(uses):
        yield _line("  not used", line)
    for said in dict.fromkeys(item.decisions[UNSERVED] for item in found.last_engine if UNSERVED in item.decisions):
        yield _line("  eager", f"{UNSERVED}: {said}")


def _steps(found: Diagnosis) -> Mapping[str, Counter[str]]:
    """Of all processes of the engine: path -> outcome -> steps."""
    steps: dict[str, Counter[str]] = {}
    for path, outcomes in (pair for item in found.last_engine for pair in item.steps.items()):
        steps.setdefault(path, Counter()).update(outcomes)
    return steps


def _share(outcomes: Counter[str]) -> str:
    total, served = outcomes.total(), outcomes[SERVED]
    missed = Counter({name: count for name, count in outcomes.items() if name != SERVED}).most_common(_REASONS)
    others = ", ".join(f"{name.replace('_', ' ')} {count / total:.0%}" for name, count in missed)
    return f"{served / total:.0%} of {total} steps" + (f" (not: {others})" if others else "")


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"
