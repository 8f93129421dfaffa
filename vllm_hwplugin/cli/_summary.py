# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` says to somebody who has to know now: some lines, and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ..spec_decode.step_counts import SERVED
from ._diagnosis import Diagnosis
from .text import shortened

_LABEL: Final = 14
#: Reasons that are named for the steps that a fast path did not serve.
_REASONS: Final = 2


def verdict(found: Diagnosis) -> str:
    """The last line."""
    if found.problems:
        return f"NOT OK: {len(found.problems)} problem{'s' * (len(found.problems) > 1)}, named above"
    if any(row.name == "VLLM_HWPLUGIN" and row.value == "0" for row in found.gates):
        return "OK: the plugin is switched off (VLLM_HWPLUGIN=0), and vLLM runs stock"
    return "OK (all tables: vllm-hwplugin doctor -v)"


def summary(found: Diagnosis) -> Iterator[str]:
    """The lines before that."""
    vllm = "no vLLM" if found.vllm is None else f"{found.vllm['dist']} {found.vllm['version']}"
    yield _line("installed", f"vllm-hwplugin {found.plugin['version']}, {vllm}, {found.host.executable}")
    devices = Counter(device.name for device in found.platform.devices)
    yield _line("device", ", ".join(f"{count} x {name}" for name, count in devices.items()) or found.platform.kind)
    states = Counter(row.state for row in found.features)
    yield _line("features here", ", ".join(f"{count} {state}" for state, count in states.most_common()) or "none")
    changed = [f"{row.name}={shortened(row.value)}" for row in found.gates if row.source != "default"]
    if changed:
        yield _line("settings", ", ".join(changed))
    yield from _engine(found)


def _engine(found: Diagnosis) -> Iterator[str]:
    if not found.last_engine:
        yield _line("engine", "none has left a journal yet")
        return
    first = found.last_engine[0]
    shown = next(one for one in found.engines if one.pid == first.pid and one.started == first.started)
    here = found.vllm is not None and Path(found.vllm["path"]).parent == Path(first.vllm_root or "")
    other = "" if here or first.vllm_root is None else f" in {first.vllm_root}, not the one above"
    count = len(found.last_engine)
    yield _line(
        "engine",
        f"pid {first.pid}, {'running' if shown.running else 'over'}, {count} process{'es' * (count > 1)}, started "
        f"{first.started}, vLLM {first.vllm_version}{other}" + ("" if shown.stands else "; no engine was built"),
    )
    used: dict[str, str] = {}
    unused: dict[str, list[str]] = {}
    for name, use in (pair for item in found.last_engine for pair in item.uses.items()):
        if use["used"]:
            used[name] = ""
        else:
            unused.setdefault(use["reason"], []).append(name)
    for path, outcomes in sorted(_steps(found).items()):
        name, _, part = path.partition(" ")
        if name in used and outcomes.total():
            used[name] += f"; {part} {_share(outcomes)}"
    for name, served in used.items():
        yield _line("  in use", name + served)
    for reason, names in unused.items():
        if names := [name for name in dict.fromkeys(names) if name not in used]:
            yield _line("  not in use", f"{', '.join(names)}: {reason}")
    if others := [str(one.pid) for one in found.engines if one.stands and one.running and one is not shown]:
        yield _line("also running", f"{', '.join(others)} (--engine PID)")


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
