# SPDX-License-Identifier: Apache-2.0
"""The plan of what a process runs, from switches, verdicts, requirements and conflicts, before anything is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from ..base.gates import STRICT
from ._apply import apply_edits
from ._errors import AlreadyImported, NotPython, PatchingError
from ._evaluate import Fit, Texts, compiled, conflicts_between, fit
from ._model import (
    VLLM,
    Catalogue,
    Feature,
    FeatureState,
    FeatureVerdict,
    PatchedFile,
    Plan,
    Source,
    State,
    Status,
    module_name,
)

_SETTLED: dict[Status, State] = {Status.NOT_NEEDED: "not-needed", Status.UPSTREAM: "upstream"}
_SATISFIED = ("live", "not-needed", "upstream")


def make_plan(
    catalogue: Catalogue,
    source: Source,
    choices: Mapping[str, str],
    *,
    try_unlisted: bool = False,
    strict: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
    unneeded: Mapping[str, str] = MappingProxyType({}),
    others: Mapping[str, Source] = MappingProxyType({}),
    check: Callable[[PatchedFile], object] = lambda file: None,
) -> Plan:
    """Decide which features are patched into `source`, and make the patched texts.

    A feature is patched in completely or not at all. Of two features that conflict, the later in the catalogue is
    refused. A feature that requires a feature at "off" is off, too, unless its own switch is "on".

    Args:
        source: vLLM.
        choices: a feature's switch -> "auto", "on" or "off"; a missing switch is "auto".
        try_unlisted: also accept an unlisted version if every hunk for the nearest listed version fits its text.
        strict: a refused feature is an error also at "auto".
        refused: feature id -> why the process cannot have it, though its text may fit.
        unneeded: feature id -> why this host does not need it.
        others: the other distributions that features change.
        check: raises a PatchingError if the process cannot have a patched file. Then the file's features are refused:
            the features that override methods in it, or else all. After a NotPython only the features whose change does
            not compile by itself are refused, or else the file's last feature. After an AlreadyImported the features
            that are not to be re-applied are off, or refused if their switch is "on".
    """
    refused, absent = dict(refused), set[str]()
    sources = {VLLM: source, **others}
    while True:
        texts = {name: Texts(source) for name, source in sources.items()}
        states: dict[str, FeatureState] = {}
        live: list[Fit] = []
        for feature in catalogue.features:
            choice = choices.get(feature.gate, "auto")
            if choice != "off" and feature.id in unneeded:
                states[feature.id] = FeatureState(feature, "not-needed", unneeded[feature.id])
            elif choice != "off" and feature.id in refused:
                state: State = "off" if feature.id in absent and choice != "on" else "refused"
                states[feature.id] = FeatureState(feature, state, refused[feature.id])
            else:
                read = texts.get(feature.distribution)
                states[feature.id] = _settle(feature, read, choice, try_unlisted, states, live)
        files = patched_files(texts, live)
        errors = tuple(_errors(states, choices, texts, strict))
        everywhere = [patched for patched in live if states[patched.verdict.feature].feature.reapply]
        varying = {path for patched in live if patched not in everywhere for path in patched.edits}
        common = {path: file for path, file in files.items() if path not in varying}
        fingerprint = _fingerprint(common | patched_files(texts, everywhere, varying))
        plan = Plan(source.version, states, files, fingerprint, errors)
        wrong = _refused_by(check, plan, sources, absent)
        if not wrong:
            return plan
        refused |= wrong


def _refused_by(
    check: Callable[[PatchedFile], object], plan: Plan, sources: Mapping[str, Source], absent: set[str]
) -> dict[str, str]:
    """Return why features of checked files are refused.

    `absent` gets the features that are off unless demanded.
    """
    wrong: dict[str, str] = {}
    for file in plan.files.values():
        try:
            check(file)
        except NotPython as error:
            texts = Texts(sources[file.distribution])
            verdicts = [compiled(fit(plan.features[name].feature, texts), texts) for name in file.features]
            by_itself = {verdict.feature: verdict.reason for verdict in verdicts if verdict.status is Status.NO_PYTHON}
            wrong |= by_itself or {file.features[-1]: str(error)}
        except AlreadyImported as error:
            names = {name for name in file.features if not plan.features[name].feature.reapply}
            absent |= names
            wrong |= dict.fromkeys(names, str(error))
        except PatchingError as error:
            # A module that was imported before the plugin takes new bodies, and an override makes another class.
            users = {name: plan.features[name].feature.overrides for name in file.features}
            remade = [
                name
                for name, overrides in users.items()
                if any(overridden.path == file.path for overridden in overrides)
            ]
            wrong |= dict.fromkeys(remade or file.features, str(error))
    return wrong


def _errors(
    states: Mapping[str, FeatureState], choices: Mapping[str, str], texts: Mapping[str, Texts], strict: bool
) -> Iterator[str]:
    for name, (feature, state, reason, _) in states.items():
        gate = feature.gate
        read = texts.get(feature.distribution)
        target = feature.target if read is None else f"{feature.target} {read.source.version}"
        if state == "refused" and choices.get(gate) == "on":
            yield f"{gate}=on, but {name} cannot be patched into {target}: {reason}; set {gate}=auto to run without it"
        elif state == "refused" and strict:
            yield f"{STRICT}=1, but {name} cannot be patched into {target}: {reason}; set {gate}=off to run without it"


def _settle(
    feature: Feature,
    texts: Texts | None,
    choice: str,
    try_unlisted: bool,
    states: Mapping[str, FeatureState],
    live: list[Fit],
) -> FeatureState:
    off = FeatureState(feature, "off", f"{feature.gate}=off")
    if texts is None:
        missing = f"there is no {feature.target} that it could change"
        return off if choice == "off" else FeatureState(feature, "refused", missing)
    result = fit(feature, texts, try_unlisted=try_unlisted)
    verdict = result.verdict
    if verdict.status in _SETTLED:
        # Switched off or not, what requires it has it from vLLM.
        return FeatureState(feature, _SETTLED[verdict.status], verdict.reason, verdict)
    if choice == "off":
        return off
    unmet = [states[name] for name in feature.requires if states[name].state not in _SATISFIED]
    lacking = min(unmet, key=lambda state: state.state != "off", default=None)
    needs = "" if lacking is None else f"it requires {lacking.feature.id}, which is {lacking.state} ({lacking.reason})"
    if lacking is not None and lacking.state == "off":
        # A user who switches off a requirement does without this feature, too, unless its switch is `on`.
        return FeatureState(feature, "refused" if choice == "on" else "off", needs, verdict)
    if verdict.status is not Status.APPLIES:
        return FeatureState(feature, "refused", _refusal(feature, verdict, try_unlisted), verdict)
    if needs:
        return FeatureState(feature, "refused", needs, verdict)
    conflict = next((clash for patched in live for clash in conflicts_between([patched, result])), None)
    if conflict is not None:
        return FeatureState(feature, "refused", str(conflict), verdict)
    live.append(result)
    return FeatureState(feature, "live", "", verdict)


def _refusal(feature: Feature, verdict: FeatureVerdict, tried: bool) -> str:
    if verdict.status is Status.UNLISTED:
        lists = "its patch.toml" if feature.is_outside else "docs/compatibility.md"
        way_out = (
            f"{lists} lists those"
            if tried
            else "set VLLM_HWPLUGIN_TRY_UNLISTED=1 to apply it where its hunks for the nearest one each fit one place"
        )
        return f"{feature.target} {verdict.version} is not a version it was made for ({verdict.reason}); {way_out}"
    hint = "; `vllm-hwplugin drift` shows the nearest places" if verdict.status is Status.DRIFTED else ""
    return f"{verdict.status.value}: {verdict.reason}{hint}"


def patched_files(
    texts: Mapping[str, Texts], live: list[Fit], only: Collection[str] | None = None
) -> dict[str, PatchedFile]:
    files: dict[str, PatchedFile] = {}
    for path, distribution in sorted({(path, patched.distribution) for patched in live for path in patched.edits}):
        if only is not None and path not in only:
            continue
        pristine = texts[distribution].get(path)
        assert pristine is not None
        users = [patched for patched in live if path in patched.edits]
        text = apply_edits(pristine, [edit for user in users for edit in user.edits[path]])
        of = tuple(user.verdict.feature for user in users)
        files[path] = patched_file(path, module_name(path), text, of, distribution)
    return files


def patched_file(
    path: str, module: str, text: str, features: tuple[str, ...] = (), distribution: str = VLLM
) -> PatchedFile:
    """Return a file with that text and its digest."""
    data = text.encode("utf-8")
    digest = hashlib.sha256(f"{module}\0".encode())
    digest.update(data)
    return PatchedFile(path, module, data, digest.hexdigest(), features, distribution)


def _fingerprint(files: Mapping[str, PatchedFile]) -> str:
    if not files:
        return "none"
    digest = hashlib.sha256()
    for path, file in sorted(files.items()):
        digest.update(f"{path}\0{file.digest}\0".encode())
    return digest.hexdigest()[:16]
