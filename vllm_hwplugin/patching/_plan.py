# SPDX-License-Identifier: Apache-2.0
"""What a process will run: gates, verdicts, requirements and conflicts, settled before anything is touched."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from ..gates import STRICT
from ._apply import apply_edits, split_lines
from ._errors import NotPython, PatchingError
from ._evaluate import Fit, Texts, conflicts_between, evaluate, fit
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
    others: Mapping[str, Source] = MappingProxyType({}),
    check: Callable[[PatchedFile], object] = lambda file: None,
) -> Plan:
    """Settle which features are live on `source` and make the patched texts.

    A feature is live as a whole or not at all. Of two that conflict, the later one in the catalogue is refused. One
    that requires what its user has switched off is off as well, unless it was asked for.

    Args:
        source: vLLM.
        choices: a feature's gate -> "auto", "on" or "off"; a gate that is not named is "auto".
        try_unlisted: also take versions that are not listed, whose text every hunk for the nearest listed one fits.
        strict: a feature that is refused is an error, whatever its gate says.
        refused: feature id -> why the process cannot have it, though its text may fit.
        others: the other distributions that features change.
        check: raises a PatchingError where the process cannot have a patched file. Its features are refused then, those
            that override methods there before the others; where it is a NotPython, only those whose own change is
            none, or else the last one of the file.
    """
    refused = dict(refused)
    sources = {VLLM: source, **others}
    while True:
        plan = _plan(catalogue, sources, choices, try_unlisted, strict, refused)
        wrong: dict[str, str] = {}
        for file in plan.files.values():
            try:
                check(file)
            except NotPython as error:
                verdicts = [evaluate(plan.features[name].feature, sources[file.distribution]) for name in file.features]
                alone = {item.feature: item.reason for item in verdicts if item.status is Status.NO_PYTHON}
                wrong |= alone or {file.features[-1]: str(error)}
            except PatchingError as error:
                # A module that was imported before the plugin takes new bodies, and an override makes another class.
                users = {name: plan.features[name].feature.overrides for name in file.features}
                remade = [name for name, items in users.items() if any(item.path == file.path for item in items)]
                wrong |= dict.fromkeys(remade or file.features, str(error))
        if not wrong:
            return plan
        refused |= wrong


def _plan(
    catalogue: Catalogue,
    sources: Mapping[str, Source],
    choices: Mapping[str, str],
    try_unlisted: bool,
    strict: bool,
    refused: Mapping[str, str],
) -> Plan:
    texts = {name: Texts(item) for name, item in sources.items()}
    states: dict[str, FeatureState] = {}
    live: list[Fit] = []
    for feature in catalogue.features:
        choice = choices.get(feature.gate, "auto")
        if choice != "off" and feature.id in refused:
            states[feature.id] = FeatureState(feature, "refused", refused[feature.id])
        else:
            states[feature.id] = _settle(feature, texts.get(feature.distribution), choice, try_unlisted, states, live)
    files = _patched(texts, live)
    errors = tuple(_errors(states, choices, texts, strict))
    return Plan(sources[VLLM].version, states, files, _fingerprint(files), errors)


def _errors(
    states: Mapping[str, FeatureState], choices: Mapping[str, str], texts: Mapping[str, Texts], strict: bool
) -> Iterator[str]:
    for name, item in states.items():
        gate = item.feature.gate
        read = texts.get(item.feature.distribution)
        target = item.feature.target if read is None else f"{item.feature.target} {read.source.version}"
        if item.state == "refused" and choices.get(gate) == "on":
            yield (f"{gate}=on, but {name} can't be live on {target}: {item.reason}; set {gate}=auto to run without it")
        elif item.state == "refused" and strict:
            yield (f"{STRICT}=1, but {name} can't be live on {target}: {item.reason}; set {gate}=off to run without it")


def _settle(
    feature: Feature,
    texts: Texts | None,
    choice: str,
    try_unlisted: bool,
    states: Mapping[str, FeatureState],
    live: list[Fit],
) -> FeatureState:
    if choice == "off":
        return FeatureState(feature, "off", f"{feature.gate}=off")
    if texts is None:
        return FeatureState(feature, "refused", f"there is no {feature.target} that it could change")
    # A process that starts has no time for hints; the drift check gives them.
    result = fit(feature, texts, try_unlisted=try_unlisted, hints=False)
    verdict = result.verdict
    if verdict.status in _SETTLED:
        return FeatureState(feature, _SETTLED[verdict.status], verdict.reason, verdict)
    unmet = [states[name] for name in feature.requires if states[name].state not in _SATISFIED]
    lacking = min(unmet, key=lambda item: item.state != "off", default=None)
    needs = "" if lacking is None else f"it requires {lacking.feature.id}, which is {lacking.state} ({lacking.reason})"
    if lacking is not None and lacking.state == "off":
        # Switching off the one is a wish for a process without the other, unless the other is asked for by name.
        return FeatureState(feature, "refused" if choice == "on" else "off", needs, verdict)
    if verdict.status is not Status.APPLIES:
        return FeatureState(feature, "refused", _refusal(feature, verdict, try_unlisted), verdict)
    if needs:
        return FeatureState(feature, "refused", needs, verdict)
    conflict = next((item for one in live for item in conflicts_between([one, result])), None)
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


def _patched(texts: Mapping[str, Texts], live: list[Fit]) -> dict[str, PatchedFile]:
    files: dict[str, PatchedFile] = {}
    for path, distribution in sorted({(path, one.distribution) for one in live for path in one.edits}):
        pristine = texts[distribution].get(path)
        assert pristine is not None
        users = [one for one in live if path in one.edits]
        text = apply_edits(pristine, [edit for one in users for edit in one.edits[path]])
        of = tuple(one.verdict.feature for one in users)
        files[path] = patched_file(path, module_name(path), text, of, distribution)
    return files


def patched_file(
    path: str, module: str, text: str, features: tuple[str, ...] = (), distribution: str = VLLM
) -> PatchedFile:
    """A file with that text, and its digest."""
    data = text.encode("utf-8")
    digest = hashlib.sha256(f"{module}\0".encode())
    digest.update(data)
    return PatchedFile(path, module, data, digest.hexdigest(), features, distribution)


def _fingerprint(files: Mapping[str, PatchedFile]) -> str:
    if not files:
        return "none"
    digest = hashlib.sha256()
    for path, file in files.items():
        digest.update(f"{path}\0{file.digest}\0".encode())
    return digest.hexdigest()[:16]


def render_diff(feature: Feature, source: Source) -> str:
    """The exact change of `feature` alone, as a unified diff of the version's own text.

    Args:
        source: the distribution that it changes.

    Raises:
        PatchingError: the feature does not apply to that version.
    """
    texts = Texts(source)
    result = fit(feature, texts)
    if result.verdict.status is not Status.APPLIES:
        status, reason = result.verdict.status.value, result.verdict.reason
        raise PatchingError(f"{feature.id} changes nothing in {feature.target} {source.version}: {status} ({reason})")
    parts = []
    for path, file in _patched({feature.distribution: texts}, [result]).items():
        pristine = texts.get(path)
        assert pristine is not None
        lines = difflib.unified_diff(pristine.lines, split_lines(file.text), f"a/{path}", f"b/{path}")
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts)
