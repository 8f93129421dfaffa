# SPDX-License-Identifier: Apache-2.0
"""The stateful part of the engine: it applies this process's patches once, and knows what is patched in."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

from .. import __version__
from ..base import gates, run_records
from ..base.run_records import RunRecord
from ..base.versions import SUPPORTED, is_supported
from . import outside
from ._agreement import compare_with_first
from ._catalogue import load_catalogue
from ._errors import AlreadyImported, InstallError, PatchingError, ReapplyRefused
from ._finder import CopyFinder
from ._installed import Installed, find_installed, find_targets, find_unneeded
from ._model import VLLM, Catalogue, PatchedFile, Plan
from ._overlay import Copy, Overlay
from ._plan import make_plan

logger = logging.getLogger("vllm.hwplugin")


class _Wanted(NamedTuple):
    """What the plan depends on.

    Attributes:
        installed: distribution -> where it is, vLLM first.
        missing: feature -> why the process cannot have it, even if its diffs fit.
    """

    installed: Mapping[str, Installed]
    missing: Mapping[str, str]
    catalogue: Catalogue
    choices: Mapping[str, str]
    try_unlisted: bool
    strict: bool
    overlay: Overlay


class _State:
    """What is patched in; `finder` and `undo` are exact at every moment."""

    def __init__(self, entry: RunRecord) -> None:
        self.record = entry
        self.gates: tuple[gates.Gate, ...] = ()
        self.wanted: _Wanted | None = None
        self.plan: Plan | None = None
        self.finder: CopyFinder | None = None
        # Module that is patched in place -> what takes that back.
        self.undo: dict[str, Callable[[], None]] = {}
        self._tried: list[CopyFinder] = []

    def put_first(self, finder: CopyFinder) -> None:
        # In this order, so that `withdraw` finds what to undo after an interrupt at any line.
        earlier, self.finder = self.finder, finder
        self._tried.append(finder)
        finder.put_first()
        if earlier is not None:
            earlier.remove()

    def withdraw(self) -> None:
        """Remove the finder and undo re-applied code."""
        while self.undo:
            self.undo.popitem()[1]()
        self.remove_finder()

    def remove_finder(self) -> None:
        if self.finder is not None:
            self.finder.remove()
            self.finder = None

    def left_over(self, copies: Mapping[str, Copy]) -> list[str]:
        """Return imported modules that run from copies of an earlier try."""
        return sorted(
            name
            for finder in self._tried
            for name, copy in finder.copies.items()
            if copies.get(name) != copy and _served(name, copy)
        )


_lock = threading.RLock()
_state: _State | None = None


def install(settings: gates.Settings | None = None, *, catalogue: Catalogue | None = None) -> RunRecord:
    """Apply this process's patches, once; later calls change nothing.

    After any failure, a feature is patched in completely or not at all. The returned run record, one log line, and a
    file for ``vllm-hwplugin doctor`` say what is patched in.

    Args:
        settings: None: read here from the environment.
        catalogue: features in place of the project's own. Features of external catalogues follow them.

    Raises:
        InstallError: a switch at ``on`` or strict mode demands a feature that cannot be patched in; or a module already
            runs patched and its features would be half patched.
        PatchingError, GateError: no plan can be made, and strict mode or a switch at ``on`` demands one. A bug of the
            plugin is an InstallError then.
    """
    global _state
    with _lock:
        if _state is None:
            _state = _install(gates.Settings() if settings is None else settings, catalogue)
        elif _state.finder is not None:
            _state.finder.put_first()
        _register_with_vllm()
        return _state.record


def current_plan() -> Plan | None:
    """Return the active plan; None before :func:`install` or after its failure."""
    return _state.plan if _state is not None else None


def force(*, in_place: bool = True) -> None:
    """Patch modules that another finder loaded unpatched, or refuse their features.

    For callers that know that an engine needs the patches, before it is built (`in_place`) or when it is complete.

    Raises:
        InstallError: only a part of a feature would run patched, or a demanded feature is lost.
    """
    with _lock:
        state = _state
        if state is None or state.finder is None or state.plan is None or state.wanted is None:
            return
        state.finder.put_first()
        if not any(_is_unpatched(name, copy) for name, copy in state.finder.copies.items()):
            return
        before = state.record.live
        # What was refused stays refused: a part of it may have run unpatched.
        refused = {name: feature.reason for name, feature in state.plan.features.items() if feature.state == "refused"}
        _patch_in(state, state.wanted, refused, in_place=in_place)
        lost = [name for name in before if name not in state.record.live]
        if lost:
            reasons = dict.fromkeys(state.record.features[name]["reason"] for name in lost)
            logger.warning("%s: not patched in, vLLM runs unpatched there: %s", ", ".join(lost), "; ".join(reasons))
        run_records.save()


def _install(settings: gates.Settings, catalogue: Catalogue | None) -> _State:
    state = _State(run_records.new(__version__))
    try:
        settings.require_process()
        if not settings.switched_on:
            return _State(run_records.begin_off(__version__))
        _activate(state, settings, catalogue)
    except BaseException as error:
        state.withdraw()
        # Only a bug of the plugin needs a traceback; other errors are complete in one line.
        expected = isinstance(error, PatchingError | gates.GateError)
        required = isinstance(error, InstallError) or settings.demanded
        if not isinstance(error, Exception) or (expected and required):
            raise
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        if required:
            raise InstallError(
                f"a bug in vllm-hwplugin, which is an error with strict mode or a feature's switch at `on`: {text}; "
                "set VLLM_HWPLUGIN=0 to run without it, and report it"
            ) from error
        _refuse_mixture(state, {}, text)
        # Placing the copies may have shown that the first folder is full.
        base = state.wanted.overlay.writable_base() if state.wanted is not None else None
        state = _State(_unpatched_record(state.record, text))
        if not compare_with_first(state.record, settings.environ, stop=False):
            logger.error(
                "nothing is patched in, vLLM runs unpatched in this process (%s): %s",
                state.record.role,
                text.replace("\n", "; "),
                exc_info=None if expected else error,
            )
        run_records.begin(state.record, base)
    return state


def _refuse_mixture(state: _State, copies: Mapping[str, Copy], reason: str) -> None:
    """Raise InstallError if modules run other patches from an earlier try."""
    modules = state.left_over(copies)
    if modules:
        raise InstallError(f"{reason}; {', '.join(modules)} run patched already: start again with VLLM_HWPLUGIN=0")


def _unpatched_record(entry: RunRecord, error: str) -> RunRecord:
    """Return a run record of the process with nothing patched in."""
    plain = run_records.new(entry.plugin_version)
    plain.vllm_dist, plain.vllm_version, plain.vllm_root = entry.vllm_dist, entry.vllm_version, entry.vllm_root
    plain.error = error
    return plain


def _activate(state: _State, settings: gates.Settings, catalogue: Catalogue | None) -> None:
    installed = find_installed()
    entry = state.record
    entry.vllm_dist, entry.vllm_version, entry.vllm_root = installed.dist, installed.version, str(installed.root)
    overlay = Overlay(settings.environ)
    try_unlisted, strict = settings.values["VLLM_HWPLUGIN_TRY_UNLISTED"].flag, settings.strict
    if catalogue is None:
        catalogue = load_catalogue()
    settings.read(catalogue.gates)
    external = outside.find_outside(settings.values[outside.FOLDERS].names, catalogue)
    settings.read(external.gates)
    state.gates = settings.gates
    for trouble in external.troubles:
        if strict:
            raise InstallError(f"{gates.STRICT}=1, but the patches of {trouble.where} are off: {trouble.reason}")
        # Recorded as a feature, because the catalogue may have had some.
        entry.features[trouble.where] = {"state": "refused", "reason": trouble.reason}
    catalogue = external.behind(catalogue)
    others, missing = find_targets(catalogue.features)
    if run_records.starts_engines():
        for text in (*installed.troubles, *settings.part_errors, *settings.unknown()):
            logger.warning("%s", text)
    if demanded := settings.unclaimed:
        left_out = "; ".join(f"{name}: {record['reason']}" for name, record in entry.features.items())
        raise InstallError(
            f"{demanded[0]}=on, but no catalogue of patches has this switch{left_out and f' ({left_out})'}; name the "
            "catalogue's folder in VLLM_HWPLUGIN_PATCHES, or unset the variable"
        )
    targets = {VLLM: installed, **others}
    refused, choices = missing | catalogue.mistaken(settings), settings.choices
    wanted = state.wanted = _Wanted(targets, refused, catalogue, choices, try_unlisted, strict, overlay)
    plan = _patch_in(state, wanted, {})
    entry.notes, entry.overlay = [*installed.troubles, *overlay.notes], str(overlay.base)
    if not compare_with_first(entry, settings.environ, stop=settings.demanded):
        _report(entry, plan, installed, overlay, try_unlisted)
    run_records.begin(entry, overlay.writable_base())


def _report(entry: RunRecord, plan: Plan, installed: Installed, overlay: Overlay, try_unlisted: bool) -> None:
    """Log what is patched in, and a line per refused feature."""
    for note in overlay.notes:
        logger.warning("patched copies go to %s instead: %s", overlay.base, note)
    listed = is_supported(installed.version)
    if not listed:
        logger.warning(
            "vLLM %s is not a version that vllm-hwplugin %s knows (%s to %s); %s",
            installed.version,
            __version__,
            SUPPORTED[0],
            SUPPORTED[-1],
            "features whose every hunk fits exactly are patched in"
            if try_unlisted
            else "its features are off: set VLLM_HWPLUGIN_TRY_UNLISTED=1 to use those whose every hunk fits exactly",
        )
    for name, record in entry.features.items():
        # If nothing is tried, the line above is the reason for all of the project's features.
        told = name in plan.features and not plan.features[name].feature.is_outside and not listed and not try_unlisted
        if record["state"] == "refused" and not told:
            logger.warning("%s is not patched in, vLLM runs unpatched there: %s", name, record["reason"])
    logger.info(
        "patched in on %s %s (plugin %s, %s): %s",
        installed.dist,
        installed.version,
        __version__,
        entry.role,
        ", ".join(entry.live) or "nothing",
    )


def _patch_in(state: _State, wanted: _Wanted, refused: Mapping[str, str], *, in_place: bool = True) -> Plan:
    """Plan, serve the copies, and patch imported modules in place.

    The finder comes first: what another thread imports from then on is patched. Features that cannot be patched in
    place are refused, and the plan is made again.

    Args:
        in_place: False: refuse the features of imported modules.

    Raises:
        InstallError: a module runs patches that are not in the plan any more, or a demanded feature is refused.
    """
    refused = {**wanted.missing, **refused}
    while True:
        plan, copies = _plan(wanted, refused, in_place=in_place)
        if plan.errors:
            raise InstallError("; ".join(plan.errors))
        reasons = dict.fromkeys(feature.reason for feature in plan.features.values() if feature.state == "refused")
        _refuse_mixture(state, copies, "; ".join(reasons))
        if not copies:
            state.remove_finder()
            break
        roots = {file.module: wanted.installed[file.distribution].root for file in plan.files.values()}
        state.put_first(CopyFinder(roots, copies, _on_load(state)))
        undo: dict[str, Callable[[], None]] = {}
        for file in plan.files.values():
            try:
                if _is_unpatched(file.module, copies[file.module]):
                    undo[file.module] = _reapply(wanted, file, copies[file.module], in_place=in_place)
            except PatchingError as error:
                while undo:
                    undo.popitem()[1]()
                # The new text's imports may have loaded patched modules, which the next round then refuses.
                state.remove_finder()
                refused |= dict.fromkeys(file.features, str(error))
                break
        else:
            state.undo |= undo
            break
    _record(state, plan, copies)
    return plan


def _plan(wanted: _Wanted, refused: Mapping[str, str], *, in_place: bool) -> tuple[Plan, dict[str, Copy]]:
    """Plan what can be placed, compiled and patched in place."""
    placed: dict[str, Copy] = {}

    def check(file: PatchedFile) -> None:
        copy = placed[file.path] = wanted.overlay.place(file)
        copy.check()
        if _is_unpatched(file.module, copy):
            _reapply(wanted, file, copy, in_place=in_place, only_check=True)

    plan = make_plan(
        wanted.catalogue,
        wanted.installed[VLLM],
        wanted.choices,
        try_unlisted=wanted.try_unlisted,
        strict=wanted.strict,
        refused=refused,
        unneeded=find_unneeded(wanted.catalogue.features),
        others=wanted.installed,
        check=check,
    )
    return plan, {file.module: placed[path] for path, file in plan.files.items()}


def _reapply(
    wanted: _Wanted, file: PatchedFile, copy: Copy, *, in_place: bool, only_check: bool = False
) -> Callable[[], None]:
    module = sys.modules[file.module]
    features = (wanted.catalogue.feature(name) for name in file.features)
    if any(feature is not None and not feature.reapply for feature in features):
        raise AlreadyImported(f"not in this process: {file.module} was imported before the plugin")
    if not in_place:
        raise ReapplyRefused(
            f"{file.module} was imported from {getattr(module, '__file__', None)}, past the plugin; put the import "
            f"hook that did it (sys.meta_path: {sys.meta_path[:2]}) in place before vLLM loads its plugins"
        )
    # Rarely needed, and a tenth of what the plugin adds to a process's start.
    from ._swap import patch_in_place

    installed = wanted.installed[file.distribution]
    text = installed.read(file.path)
    # The plan was made from this text, so the file exists.
    assert text is not None
    return patch_in_place(module, copy, str(installed.root / file.path), text, only_check=only_check)


def _record(state: _State, plan: Plan, copies: Mapping[str, Copy]) -> None:
    entry, state.plan = state.record, plan
    entry.fingerprint = plan.fingerprint
    for name, (feature, state_of, reason, _) in plan.features.items():
        entry.features[name] = {"state": state_of, "reason": reason}
        if state_of == "live" and feature.uses_when:
            entry.features[name]["uses_when"] = "\n".join(feature.uses_when)
    unpatched = {name: "stock" for name in entry.modules if name in sys.modules}
    entry.modules = unpatched | {name: _runs(name, copy, state) for name, copy in copies.items()}


def _on_load(state: _State) -> Callable[[str], None]:
    def on_load(name: str) -> None:
        # The first sign of life of a child of a plain fork.
        run_records.adopt()
        state.record.modules[name] = "served"
        run_records.save()
        # If patches were applied before vLLM was imported, its table exists by now. While the state is being made, the
        # switches are not all known.
        if _state is not None:
            _register_with_vllm()

    return on_load


def _register_with_vllm() -> None:
    """Enter the variables and the patches' fingerprint in ``vllm.envs``, if imported.

    ``compile_factors()`` asks every entry of that table in all supported versions, so the fingerprint is in the key of
    vLLM's compile cache: vLLM finds no graph that was compiled from other patches. The value has the plugin's version,
    because vLLM's key covers the text of traced code, but not of passes over graphs.
    """
    envs = sys.modules.get("vllm.envs")
    table = getattr(envs, "environment_variables", None)
    if table is None or gates.FINGERPRINT in table:
        return
    gates.register_with_vllm(envs, _state.gates if _state is not None else ())
    table[gates.FINGERPRINT] = _fingerprint


def _fingerprint() -> str:
    patches = _state.record.fingerprint if _state is not None else "none"
    return patches if patches == "none" else f"{patches} {__version__}"


def _is_unpatched(name: str, copy: Copy) -> bool:
    return name in sys.modules and not _served(name, copy)


def _served(name: str, copy: Copy) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) if isinstance(module, ModuleType) else None
    return spec is not None and bool(spec.origin == str(copy.path))


def _runs(name: str, copy: Copy, state: _State) -> str:
    """Return what a module runs, as :class:`RunRecord` names it."""
    if name not in sys.modules:
        return "pending"
    if _is_unpatched(name, copy):
        return "stock"
    return "re-applied" if name in state.undo else "served"


def _renew_locks() -> None:
    # Another thread of the parent may have held them, and it does not exist in the child.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)
run_records.check_with(functools.partial(force, in_place=False))
