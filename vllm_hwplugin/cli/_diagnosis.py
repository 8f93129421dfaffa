# SPDX-License-Identifier: Apache-2.0
"""The data of ``doctor``: collected once, printed as tables or as JSON.

This module imports neither vLLM nor torch, and changes nothing. It decides a feature's state from the installed text
exactly as a vLLM process would, and reads what happened in the last engine from its run records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_hwplugin

from .. import platforms
from ..base import cachedir, gates, run_records
from ..base.run_records import RunRecord
from ..base.versions import is_supported
from ..musa import host as musa_host
from ..musa import self_test
from ..musa import versions as musa_versions
from ..ops.compile import built
from ..ops.operations import GATE as OPS
from ..ops.operations import SKIP, unknown_names
from ..patching import (
    FOLDER,
    Catalogue,
    Feature,
    Installed,
    NotInstalled,
    PatchedFile,
    PatchingError,
    VersionUnknown,
    find_installed,
    find_targets,
    find_unneeded,
    has_copy,
    load_catalogue,
    make_plan,
)
from ..patching.outside import FOLDERS, Found, find_outside
from ..patching.texts import NotPython, trouble_in
from . import _host
from ._engines import Engine, find_engines, fingerprints_differ, warn_of_orphans
from ._kernels import KernelRow, kernel_rows
from ._operations import OperationRow, operation_problems, operation_rows
from ._planned import NotPlanned, Planned, plan
from .text import printable, shortened

#: Version of the JSON: rises when a key changes its meaning or disappears, not when a key is added.
FORMAT = 2

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
    overrides: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The fields of ``doctor --json``, in order; docs/commands.md describes them.

    ``problems`` make doctor exit with 1; ``warnings`` do not.
    """

    plugin: Mapping[str, str]
    host: Mapping[str, str | int]
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
    last_engine: tuple[RunRecord, ...]
    planned: Planned | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object, with ``toolchains`` by name."""
        fields = {"format": FORMAT, **dataclasses.asdict(self)}
        for process, record in zip(fields["last_engine"], self.last_engine, strict=True):
            process["alive"] = run_records.is_running(record)
        return fields | {"toolchains": {tool.pop("name"): tool for tool in fields["toolchains"]}}


@dataclass(slots=True)
class _Look:
    """A diagnosis in progress; `problems` and `warnings` as in :class:`Diagnosis`."""

    settings: gates.Settings
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def lines(self, problem: bool) -> list[str]:
        return self.problems if problem else self.warnings


def diagnose(
    environ: Mapping[str, str] | None = None,
    *,
    catalogue: Catalogue | None = None,
    engine: int | None = None,
    command: str | None = None,
    gpu: str | None = None,
) -> Diagnosis:
    """Collect the data of ``doctor``.

    Args:
        engine: Id of a process of the engine to show; None: the newest running engine, else the newest.
        command: A server command to foresee, see :func:`plan`.
        gpu: The compute capability to assume for `command`.

    Raises:
        NoSuchEngine: That process has left no readable run record.
        NotPlanned: `command` cannot be read.
    """
    settings = gates.Settings(environ)
    look = _Look(settings, settings.process_errors, [] if settings.strict else settings.part_errors)
    _check_skip_list(look)
    installed = _find_vllm(look)
    _check_entry_points(look)
    own = _own_catalogue(catalogue, look)
    outside = _find_outside(own, look)
    cache = _cache(look)
    features, fingerprint = _decide(installed, own, outside, cache, look)
    # Run records list an ignored catalogue in the same way.
    ignored = (
        FeatureRow(trouble.where, "a catalogue", "", "", "refused", trouble.reason) for trouble in outside.troubles
    )
    features = (*ignored, *features)
    states = {row.state for row in features}
    if not look.problems and settings.switched_on and "refused" in states and "live" not in states:
        look.problems.append("the plugin would do nothing: no feature is patched in")
    engines, processes = find_engines(_run_records(cache, look), engine)
    planned = None if command is None else _plan(command, gpu, installed, look)
    look.warnings += warn_of_orphans(processes) + fingerprints_differ(processes)
    platform = _host.find_platform()
    tools = _host.find_tools(environ=settings.environ)
    libraries = built.read_all(cache.trusted, look.warnings)
    look.problems += operation_problems(platform.kind, settings)
    platform_class = _platform_class(installed, platform, look)
    extension = installed is not None and any((installed.root / "vllm").glob("_C*.so"))
    return Diagnosis(
        host=_host.this_host(),
        platform=platform,
        platform_class=platform_class,
        musa=_musa(platform.kind, installed, platform_class["class"], cache, look),
        toolchains=tools,
        kernels=kernel_rows(platform, libraries, tools),
        operations=operation_rows(platform, settings, tools, libraries, extension=extension),
        plugin={"version": vllm_hwplugin.__version__, "path": str(Path(vllm_hwplugin.__file__).parent)},
        vllm=_describe(installed),
        packages={
            name: musa_versions.installed(name) for name in ("torch", "triton", "torch_musa", "torchada", "mate")
        },
        cache={str(place): state for place, state in cache.states.items()},
        gates=tuple(_row(value, settings.errors.get(name)) for name, value in settings.values.items()),
        features=features,
        fingerprint=fingerprint,
        engines=engines,
        last_engine=processes,
        planned=planned,
        problems=tuple(look.problems),
        warnings=tuple(look.warnings),
    )


def _check_skip_list(look: _Look) -> None:
    skip, ops = look.settings.values[SKIP].names, look.settings.values[OPS].text
    if wrong := unknown_names(skip):
        names = shortened(printable(", ".join(wrong), keep=""))
        lines = look.lines(ops == "on" or (ops != "off" and look.settings.strict))
        lines.append(f"{SKIP}: the plugin has no kernel for {names}; `vllm-hwplugin doctor -v` lists the operations")


def _own_catalogue(catalogue: Catalogue | None, look: _Look) -> Catalogue | None:
    try:
        return load_catalogue() if catalogue is None else catalogue
    except PatchingError as error:
        look.problems.append(str(error))
        return None


def _find_outside(own: Catalogue | None, look: _Look) -> Found:
    """Find installed and named catalogues, and read their switches."""
    outside, settings = Found(), look.settings
    if own is not None:
        settings.read(own.gates)
        outside = find_outside(settings.values[FOLDERS].names, own)
        settings.read(outside.gates)
    look.warnings += [*(value.conflict for value in settings.values.values() if value.conflict), *settings.unknown()]
    look.lines(settings.strict and settings.switched_on).extend(
        f"{trouble.where} is not patched in, vLLM runs unpatched there: {trouble.reason}"
        for trouble in outside.troubles
    )
    look.lines(settings.switched_on).extend(
        f"{name}=on, but no catalogue of patches has this switch" for name in settings.unclaimed
    )
    return outside


def _row(value: gates.GateValue, error: gates.GateError | None) -> GateRow:
    gate = value.gate
    if error is not None:
        return GateRow(gate.name, gate.kind, error.raw, error.source, error.raw, error=str(error))
    return GateRow(gate.name, gate.kind, gates.show(value.value, gate.kind), value.source, value.raw, value.conflict)


def _find_vllm(look: _Look) -> Installed | None:
    try:
        installed = find_installed()
        look.warnings += installed.troubles
        return installed
    except NotInstalled as error:
        look.lines(isinstance(error, VersionUnknown) and look.settings.switched_on).append(str(error))
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


def _check_entry_points(look: _Look) -> None:
    """Check that vLLM can find the plugin and may load it."""
    lines = look.lines(look.settings.switched_on)
    for group, part in ((_GROUP, "the plugin"), (platforms.GROUP, "the plugin's platform class")):
        if ENTRY_POINT not in {point.name for point in importlib.metadata.entry_points(group=group)}:
            lines.append(
                f"vLLM will not load {part}: no installed distribution offers {ENTRY_POINT} in the entry-point group "
                f"{group}; install vllm-hwplugin with pip, a path on PYTHONPATH is not enough"
            )
    allowed = look.settings.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        lines.append(f"vLLM will not load the plugin: VLLM_PLUGINS={allowed!r} does not name it; add {ENTRY_POINT}")


def _decide(
    installed: Installed | None, own: Catalogue | None, outside: Found, cache: _Cache, look: _Look
) -> tuple[tuple[FeatureRow, ...], str]:
    """Return a new vLLM process's feature states and fingerprint."""
    # A problem stops that process or leaves it without any patch; the process itself logs the warnings.
    if own is None:
        return (), "none"
    catalogue, settings = outside.behind(own), look.settings
    choices = settings.choices

    def row(feature: Feature, state: str, reason: str) -> FeatureRow:
        return FeatureRow(feature.id, feature.title, feature.gate, choices.get(feature.gate, ""), state, reason)

    def all_of(state: str, reason: str, lines: list[str]) -> tuple[tuple[FeatureRow, ...], str]:
        rows = tuple(row(feature, state, reason) for feature in catalogue.features)
        lines += [f"{row.gate}=on, but {row.id} is not patched in: {reason}" for row in rows if row.choice == "on"]
        return rows, "none"

    if settings.process_errors:
        reason = "an environment variable has an invalid value; the plugin stays off until it is fixed"
        return all_of("refused", reason, look.problems)
    if not look.settings.switched_on:
        return all_of("off", "VLLM_HWPLUGIN=0 switches the plugin off", look.warnings)
    if installed is None:
        return all_of("refused", "vLLM is not installed, or its version is unknown", look.problems)
    if cache.trouble is not None and not cache.read_only:
        look.problems.append(cache.trouble)
        return all_of("refused", "no folder for patched copies", look.problems)

    def platform() -> list[str]:
        return _platform_names(installed, look)

    others, missing = find_targets(catalogue.features, platform)

    def check(file: PatchedFile) -> None:
        if trouble := trouble_in(file.path, file.text):
            raise NotPython(trouble)
        if cache.trouble is not None and not any(has_copy(file, place) for place in cache.read_only):
            raise PatchingError(cache.trouble)

    plan = make_plan(
        catalogue,
        installed,
        choices,
        try_unlisted=settings.values["VLLM_HWPLUGIN_TRY_UNLISTED"].flag,
        strict=settings.strict,
        refused=missing | catalogue.mistaken(settings),
        unneeded=find_unneeded(catalogue.features, platform),
        others=others,
        check=check,
    )
    look.problems += plan.errors
    refusals: dict[str, list[str]] = {}
    for name, planned in plan.features.items():
        if planned.state == "refused" and not settings.strict and choices[planned.feature.gate] != "on":
            refusals.setdefault(planned.reason, []).append(name)
    look.warnings += [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not patched in, vLLM runs unpatched there: {reason}"
        for reason, names in refusals.items()
    ]
    rows = [
        dataclasses.replace(row(planned.feature, planned.state, planned.reason), overrides=planned.overridden)
        for planned in plan.features.values()
    ]
    return tuple(rows), plan.fingerprint


def _platform_names(installed: Installed, look: _Look) -> list[str]:
    """Return the possible names of a vLLM process's platform here."""
    # Whether another plugin offers its platform only a process can tell, because its functions import vLLM.
    plugins = [point.name.lower() for point in platforms.others(look.settings.environ)]
    return plugins or ["cpu" if "cpu" in f"{installed.dist} {installed.version}" else _host.find_platform().kind]


def _platform_class(installed: Installed | None, platform: _host.Platform, look: _Look) -> dict[str, str | None]:
    """Return the platform class that a vLLM process would be offered."""
    # A process asks vLLM's detection and the other plugins. That would import vLLM, so this function derives their
    # answers from the driver and the installed packages.
    choice = look.settings.values[platforms.GATE].text
    if not look.settings.errors.keys().isdisjoint((platforms.GATE, gates.PREFIX)):
        return {"class": None, "reason": "an environment variable has an invalid value"}
    if not look.settings.switched_on:
        return {"class": None, "reason": "VLLM_HWPLUGIN=0"}
    if installed is None:
        return {"class": None, "reason": "vLLM is not installed"}
    builtins: tuple[str, ...] = ("cuda",) if platform.kind == "cuda" else ()
    if "cpu" in f"{installed.dist} {installed.version}":
        builtins = ("cpu",)
    decision, rivals = platforms.foresee(choice, builtins, look.settings.environ)
    if decision.level >= logging.ERROR:
        look.lines(look.settings.strict).append(decision.reason)
    if rivals:
        names = " and ".join(f"{point.name} ({point.value})" for point in rivals)
        effect = "this plugin offers none" if choice == "auto" else "vLLM stops, because it accepts only one"
        look.warnings.append(
            f"another platform plugin is installed: {names}; if it offers a class, {effect}: list the plugins to load "
            "in VLLM_PLUGINS"
        )
    return {"class": decision.qualname, "reason": decision.reason}


def _plan(command: str, gpu: str | None, installed: Installed | None, look: _Look) -> Planned:
    if installed is None:
        raise NotPlanned("vLLM is not installed here; --for needs its configuration: install vLLM, or omit --for")
    planned = plan(command, _host.find_platform().kind, gpu, f"{installed.dist} {installed.version}")
    if planned.refused:
        look.problems.append(f"vLLM refuses this engine, for {planned.device}: {planned.refused}")
    return planned


def _musa(
    kind: str, installed: Installed | None, offered: str | None, cache: _Cache, look: _Look
) -> tuple[musa_versions.Finding, ...]:
    """Check the packages of a host with Moore Threads GPUs or torch_musa."""
    if kind != "musa" and musa_versions.installed("torch_musa") is None:
        return ()
    host = musa_host.look(None if installed is None else installed.version)
    findings = musa_versions.check(host)
    for finding in findings:
        if finding.trouble:
            look.lines(finding.stops and offered == platforms.CLASSES["musa"]).append(finding.trouble)
    look.warnings += self_test.find_failures(cache.trusted)
    return findings


@dataclass(frozen=True, slots=True)
class _Cache:
    """Folders for patched copies.

    Attributes:
        states: Folder -> its state, best folder first.
        read_only: Folders whose existing copies can be used.
        trusted: Folders to read run records and kernels from.
        trouble: Why no folder is writable; None if one is.
    """

    states: Mapping[Path, str]
    read_only: tuple[Path, ...] = ()
    trusted: tuple[Path, ...] = ()
    trouble: str | None = None


def _cache(look: _Look) -> _Cache:
    notes: list[str] = []
    try:
        places = cachedir.places(look.settings.environ, notes)
    except gates.GateError:
        return _Cache({})
    states: dict[Path, str] = {}
    read_only, trusted, warnings = [], [], list(notes)
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
            warnings.append(f"the cache is not used: {error}")
    if usable or read_only:
        look.warnings += warnings
    other = "another" if "VLLM_HWPLUGIN_CACHE_DIR" in look.settings.environ else "a"
    way_out = f"set VLLM_HWPLUGIN_CACHE_DIR to {other} folder, one that only this user can write to"
    trouble = f"no folder for patched copies: {'; '.join(notes)}: {way_out}"
    return _Cache(states, tuple(read_only), tuple(trusted), None if usable else trouble)


def _run_records(cache: _Cache, look: _Look) -> list[RunRecord]:
    records = [record for place in cache.trusted for record in run_records.read_all(place, look.warnings)]
    return sorted(records, key=lambda record: record.started)
