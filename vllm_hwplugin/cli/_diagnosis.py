# SPDX-License-Identifier: Apache-2.0
"""Everything that ``doctor`` knows, as data: collected once, shown as tables or as JSON.

Nothing here imports vLLM or torch, and nothing is changed: a feature's state is decided from the installed text exactly
as a process of vLLM would decide it, and what really happened in the last engine is read from its journals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_hwplugin

from .. import cachedir, gates, journals, platforms
from ..journal import Journal
from ..musa import host as musa_host
from ..musa import versions as musa_versions
from ..ops.compile import built
from ..ops.compile.plan import MIN_TORCH
from ..ops.operations import GATE as OPS
from ..ops.operations import SKIP, unknown_names
from ..patching import (
    FOLDER,
    Catalogue,
    Installed,
    NotInstalled,
    NotPython,
    PatchedFile,
    PatchingError,
    VersionUnknown,
    find_installed,
    has_copy,
    is_supported,
    load_catalogue,
    make_plan,
    trouble_in,
)
from ..patching.outside import FOLDERS, Found, Trouble, find_outside, find_targets
from . import _host
from ._engines import Engine, find_engines, fingerprints_differ
from ._kernels import KernelRow, kernel_rows
from ._operations import OperationRow, operation_problems, operation_rows
from .text import printable, shortened

#: Raised when a key of the JSON changes its meaning or goes away; new keys do not raise it.
FORMAT = 1

_Value = gates.GateValue | gates.GateError
_Values = Mapping[str, _Value]

ENTRY_POINT = "hwplugin"
_GROUP = "vllm.general_plugins"


@dataclass(frozen=True, slots=True)
class GateRow:
    name: str
    kind: str
    value: str
    source: str
    raw: str | None = None
    conflict: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class FeatureRow:
    id: str
    title: str
    gate: str
    choice: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``problems`` make doctor exit with 1; ``warnings`` are for the reader. docs/architecture.md describes the fields.

    They are in the order of ``doctor --json``, where ``toolchains`` are by name.
    """

    plugin: Mapping[str, str]
    host: _host.HostFacts
    platform: _host.Platform
    platform_class: Mapping[str, str | None]
    musa: tuple[musa_versions.Finding, ...]
    vllm: Mapping[str, Any] | None
    packages: Mapping[str, str | None]
    toolchains: tuple[_host.Tool, ...]
    kernels: tuple[KernelRow, ...]
    operations: tuple[OperationRow, ...]
    cache: Mapping[str, str]
    gates: tuple[GateRow, ...]
    features: tuple[FeatureRow, ...]
    fingerprint: str
    engines: tuple[Engine, ...]
    last_engine: tuple[Journal, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def as_json(self) -> dict[str, Any]:
        found = {"format": FORMAT, **dataclasses.asdict(self)}
        return found | {"toolchains": {tool.pop("name"): tool for tool in found["toolchains"]}}


@dataclass(slots=True)
class _Findings:
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


def diagnose(
    environ: Mapping[str, str] | None = None, *, catalogue: Catalogue | None = None, engine: int | None = None
) -> Diagnosis:
    """Collect everything.

    Args:
        environ: where the gates are read; ``os.environ`` by default.
        catalogue: the features to decide about; the project's own by default.
        engine: id of a process whose engine is to be shown; by default the newest engine that runs, else the newest.

    Raises:
        NoSuchEngine: no journal of that process can be read.
    """
    environ = os.environ if environ is None else environ
    found = _Findings()
    values = _read_gates(environ, found)
    installed = _find_vllm(values, found)
    _check_entry_point(environ, values, found)
    own = _own_catalogue(catalogue, found)
    of_features = own.gates if own is not None else ()
    _read_into(values, of_features, environ, found)
    outside = _find_outside(environ, own, values, found)
    cache = _cache(environ, found)
    features, fingerprint = _decide(values, installed, own, outside, environ, found, cache)
    # As the journals of processes have them.
    features = (*(_left_out(item) for item in outside.troubles), *features)
    states = {row.state for row in features}
    if not found.problems and not _is_switched_off(values) and "refused" in states and "live" not in states:
        found.problems.append("the plugin would do nothing: no feature is live")
    engines, processes = find_engines(_journals(cache, found), engine)
    found.warnings += fingerprints_differ(processes)
    platform = _host.find_platform()
    tools = _host.find_tools(environ=environ)
    libraries = built.read_all(cache.trusted, found.warnings)
    found.problems += operation_problems(platform.kind, values)
    platform_class = _platform_class(values, installed, platform, environ, found)
    return Diagnosis(
        host=_host.this_host(),
        platform=platform,
        platform_class=platform_class,
        musa=_musa(platform.kind, installed, platform_class["class"], found),
        toolchains=tools,
        kernels=kernel_rows(platform.kind, libraries, tools),
        operations=operation_rows(
            platform.kind,
            values,
            tools,
            libraries,
            extension=installed is not None and any((installed.root / "vllm").glob("_C*.so")),
        ),
        plugin={"version": vllm_hwplugin.__version__, "path": str(Path(vllm_hwplugin.__file__).parent)},
        vllm=_describe(installed),
        packages={
            name: musa_versions.installed(name) for name in ("torch", "triton", "torch_musa", "torchada", "mate")
        },
        cache={str(place): state for place, state in cache.states.items()},
        gates=tuple(_row(gate, values[gate.name]) for gate in (*gates.GATES, *of_features, *outside.gates)),
        features=features,
        fingerprint=fingerprint,
        engines=engines,
        last_engine=processes,
        problems=tuple(found.problems),
        warnings=tuple(found.warnings),
    )


def _read_gates(environ: Mapping[str, str], found: _Findings) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    _read_into(values, gates.GATES, environ, found)
    skip, ops = values[SKIP], values[OPS]
    if isinstance(skip, gates.GateValue) and isinstance(ops, gates.GateValue) and (wrong := unknown_names(skip.names)):
        stops = ops.text == "on" or (ops.text != "off" and _is_strict(values))
        said = found.problems if stops else found.warnings
        names = shortened(printable(", ".join(wrong), keep=""))
        said.append(f"{SKIP} names {names}, which no kernel is for")
    return values


def _read_into(
    values: dict[str, _Value],
    of: Iterable[gates.Gate],
    environ: Mapping[str, str],
    found: _Findings,
) -> None:
    for gate in of:
        try:
            value = values[gate.name] = gates.read(gate, environ)
        except gates.GateError as error:
            values[gate.name] = error
            found.problems.append(str(error))
            continue
        if value.conflict:
            found.warnings.append(value.conflict)


def _left_out(trouble: Trouble) -> FeatureRow:
    return FeatureRow(trouble.where, "a catalogue", "", "", "refused", trouble.reason)


def _own_catalogue(catalogue: Catalogue | None, found: _Findings) -> Catalogue | None:
    try:
        return load_catalogue() if catalogue is None else catalogue
    except PatchingError as error:
        found.problems.append(str(error))
        return None


def _find_outside(
    environ: Mapping[str, str],
    own: Catalogue | None,
    values: dict[str, _Value],
    found: _Findings,
) -> Found:
    """The catalogues from outside; their gates come into `values`, and what is wrong with them into `found`."""
    folders, switched_off = values[FOLDERS], _is_switched_off(values)
    outside = Found()
    if own is not None and isinstance(folders, gates.GateValue):
        outside = find_outside(environ, own)
        # One that is bad costs its own features alone, which is said of these.
        _read_into(values, outside.gates, environ, _Findings())
    found.warnings += gates.unknown(environ, (*own.gates, *outside.gates) if own is not None else ())
    said = found.problems if _is_strict(values) and not switched_off else found.warnings
    said += [f"{item.where} is not live, vLLM runs stock there: {item.reason}" for item in outside.troubles]
    said = found.warnings if switched_off else found.problems
    said += [
        f"{name}=on, but no catalogue of patches has this gate" for name in gates.unclaimed(environ, outside.gates)
    ]
    return outside


def _is_switched_off(values: _Values) -> bool:
    value = values["VLLM_HWPLUGIN"]
    return isinstance(value, gates.GateValue) and not value.flag


def _is_strict(values: _Values) -> bool:
    value = values[gates.STRICT]
    return isinstance(value, gates.GateValue) and value.flag


def _row(gate: gates.Gate, value: _Value) -> GateRow:
    if isinstance(value, gates.GateError):
        return GateRow(gate.name, gate.kind, "", value.source, error=str(value))
    return GateRow(gate.name, gate.kind, gates.show(value.value, gate.kind), value.source, value.raw, value.conflict)


def _find_vllm(values: _Values, found: _Findings) -> Installed | None:
    try:
        return find_installed()
    except VersionUnknown as error:
        (found.warnings if _is_switched_off(values) else found.problems).append(str(error))
        return None
    except NotInstalled as error:
        found.warnings.append(str(error))
        return None


def _describe(installed: Installed | None) -> dict[str, Any] | None:
    if installed is None:
        return None
    return {
        "dist": installed.dist,
        "version": installed.version,
        "path": str(installed.root / "vllm"),
        "supported": is_supported(installed.version),
    }


def _check_entry_point(environ: Mapping[str, str], values: _Values, found: _Findings) -> None:
    """vLLM must find the plugin by its entry point, and must be allowed to load it."""
    said = found.warnings if _is_switched_off(values) else found.problems
    for group, what in ((_GROUP, "the plugin"), (platforms.GROUP, "its platform class")):
        if ENTRY_POINT not in {point.name for point in importlib.metadata.entry_points(group=group)}:
            said.append(
                f"vLLM will not load {what}: no installed distribution offers {ENTRY_POINT} in the entry-point group "
                f"{group}; install vllm-hwplugin with pip, a path on PYTHONPATH is not enough"
            )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        said.append(f"vLLM will not load the plugin: VLLM_PLUGINS={allowed!r} does not name it; add {ENTRY_POINT}")


def _decide(
    values: _Values,
    installed: Installed | None,
    own: Catalogue | None,
    outside: Found,
    environ: Mapping[str, str],
    found: _Findings,
    cache: _Cache,
) -> tuple[tuple[FeatureRow, ...], str]:
    """The states that a process of vLLM would come to with these gates.

    What would stop that process is a problem, and so is what leaves it without any patch; what it would warn of is a
    warning.
    """
    if own is None:
        return (), "none"
    catalogue = outside.behind(own)
    good = {name: value for name, value in values.items() if isinstance(value, gates.GateValue)}
    more, mistaken = outside.choices(environ)
    choices = {name: value.choice for name, value in good.items() if value.gate.switches} | more
    strict = _is_strict(values)

    def all_of(state: str, reason: str, said: list[str]) -> tuple[tuple[FeatureRow, ...], str]:
        rows = []
        for item in catalogue.features:
            choice = choices.get(item.gate, "")
            rows.append(FeatureRow(item.id, item.title, item.gate, choice, state, reason))
            if choice == "on":
                said.append(f"{item.gate}=on, but {item.id} cannot be live: {reason}")
        return tuple(rows), "none"

    if any(gate.name not in good for gate in (*gates.GATES, *own.gates)):
        reason = "a variable has a bad value, and the plugin does nothing until it is right"
        return all_of("refused", reason, found.problems)
    if not good["VLLM_HWPLUGIN"].flag:
        # Stock vLLM is what was asked for, whatever else is set.
        return all_of("off", "VLLM_HWPLUGIN=0 switches the plugin off", found.warnings)
    if installed is None:
        return all_of("refused", "no vLLM is installed, or none that states its version", found.problems)
    if cache.trouble is not None and not cache.read_only:
        found.problems.append(cache.trouble)
        return all_of("refused", cache.trouble, found.problems)
    others, missing = find_targets(catalogue.features)

    def check(file: PatchedFile) -> None:
        if trouble := trouble_in(file.path, file.text):
            raise NotPython(trouble)
        if cache.trouble is not None and not any(has_copy(file, place) for place in cache.read_only):
            raise PatchingError(cache.trouble)

    plan = make_plan(
        catalogue,
        installed,
        choices,
        try_unlisted=good["VLLM_HWPLUGIN_TRY_UNLISTED"].flag,
        strict=strict,
        refused=missing | mistaken,
        others=others,
        check=check,
    )
    found.problems += plan.errors
    refusals: dict[str, list[str]] = {}
    for name, item in plan.features.items():
        if item.state == "refused" and not strict and choices[item.feature.gate] != "on":
            refusals.setdefault(item.reason, []).append(name)
    found.warnings += [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not live, vLLM runs stock there: {reason}"
        for reason, names in refusals.items()
    ]
    rows = tuple(
        FeatureRow(item.id, item.title, item.gate, choices[item.gate], state.state, state.reason)
        for item in catalogue.features
        for state in (plan.features[item.id],)
    )
    return rows, plan.fingerprint


def _platform_class(
    values: _Values,
    installed: Installed | None,
    platform: _host.Platform,
    environ: Mapping[str, str],
    found: _Findings,
) -> dict[str, str | None]:
    """The platform class that a process of vLLM would be offered.

    A process asks vLLM's own detection and the other plugins; here their answers are foreseen from the driver and from
    what is installed, because asking them would import vLLM.
    """
    master, choice = values["VLLM_HWPLUGIN"], values[platforms.GATE]
    if not isinstance(master, gates.GateValue) or not isinstance(choice, gates.GateValue):
        return {"class": None, "reason": "a variable has a bad value"}
    if not master.flag:
        return {"class": None, "reason": "VLLM_HWPLUGIN=0"}
    if installed is None:
        return {"class": None, "reason": "no vLLM is installed"}
    builtins: tuple[str, ...] = ("cuda",) if platform.kind == "cuda" else ()
    if "cpu" in f"{installed.dist} {installed.version}":
        builtins = ("cpu",)
    decision, rivals = platforms.foresee(choice.text, builtins, environ)
    if decision.level >= logging.ERROR:
        (found.problems if _is_strict(values) else found.warnings).append(decision.reason)
    if rivals:
        names = " and ".join(f"{point.name} ({point.value})" for point in rivals)
        then = "this one steps aside" if choice.text == "auto" else "vLLM stops, because it takes one plugin's only"
        found.warnings.append(
            f"another platform plugin is installed: {names}; where it offers a class, too, {then}: name the plugins "
            "that are to be loaded in VLLM_PLUGINS"
        )
    return {"class": decision.qualname, "reason": decision.reason}


def _musa(
    kind: str, installed: Installed | None, offered: str | None, found: _Findings
) -> tuple[musa_versions.Finding, ...]:
    """The packages that have to go together on a Moore Threads host, or wherever torch_musa is installed."""
    if kind != "musa" and musa_versions.installed("torch_musa") is None:
        return ()
    host = musa_host.look(None if installed is None else installed.version)
    findings = musa_versions.check(host, MIN_TORCH)
    for item in findings:
        if item.trouble:
            stops = item.stops and offered == platforms.CLASSES["musa"]
            (found.problems if stops else found.warnings).append(item.trouble)
    return findings


@dataclass(frozen=True, slots=True)
class _Cache:
    """Where copies may lie.

    Attributes:
        states: place -> its state, best place first.
        read_only: those that can only be read, and serve the copies that they have.
        trusted: those that journals and kernels are read from.
        trouble: why no copy can be written anywhere; None where one can.
    """

    states: Mapping[Path, str]
    read_only: tuple[Path, ...] = ()
    trusted: tuple[Path, ...] = ()
    trouble: str | None = None


def _cache(environ: Mapping[str, str], found: _Findings) -> _Cache:
    notes: list[str] = []
    try:
        places = cachedir.places(environ, notes)
    except gates.GateError:
        return _Cache({})
    found.warnings += notes
    states: dict[Path, str] = {}
    read_only, trusted = [], []
    usable = False
    for place in places:
        with contextlib.suppress(OSError, cachedir.UntrustedFolder):
            trusted.append(cachedir.code_folder(place))
        try:
            states[place] = "ready" if cachedir.check_place(place / FOLDER) else "no patched copy yet"
            usable = True
        except (OSError, cachedir.UntrustedFolder) as error:
            states[place] = str(error)
            notes.append(str(error))
            with contextlib.suppress(OSError, cachedir.UntrustedFolder):
                read_only.append(cachedir.trusted_folder(place / FOLDER).parent)
                states[place] = "read only"
                continue
            found.warnings.append(f"the cache is not used: {error}")
    trouble = f"no folder for patched copies: {'; '.join(notes)}: set VLLM_HWPLUGIN_CACHE_DIR to one of your own"
    return _Cache(states, tuple(read_only), tuple(trusted), None if usable else trouble)


def _journals(cache: _Cache, found: _Findings) -> list[Journal]:
    written = [item for place in cache.trusted for item in journals.read_all(place, found.warnings)]
    return sorted(written, key=lambda item: item.started)
