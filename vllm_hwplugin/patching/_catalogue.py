# SPDX-License-Identifier: Apache-2.0
"""Reader of a catalogue: a folder per feature, with its `patch.toml` and its diffs (docs/your-own-patches.md).

`load_catalogue` reads the project's own catalogue. `outside` reads external catalogues; `Terms` has the differences.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..base.gates import BY_NAME, CATALOGUE_PREFIX, Gate, GateError, feature_gate
from ..base.terms import read_term
from ..base.versions import SUPPORTED, Versions
from ._diff import parse_diff
from ._errors import CatalogueError, DiffError
from ._model import VLLM, Catalogue, Feature, FileDiff, NotNeeded, Overridden, Relied, target_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The file that makes a folder of a catalogue a feature.
PATCH = "patch.toml"

_TEXTS = ("id", "title", "gate", "what", "origin", "removal")
#: What a `patch.toml` of any catalogue may hold.
FEATURE_KEYS = frozenset(
    {*_TEXTS, "requires", "versions", "not_needed", "default", "help", "compile_key", "uses_when", "overrides"}
)
#: What the project's own features may state.
_OWN_KEYS = FEATURE_KEYS | {"since", "aliases", "relies", "with", "reapply"}
#: What the features of external catalogues may state.
_OUTSIDE_KEYS = FEATURE_KEYS | {"distribution", "platform", "with"}
_NOT_NEEDED_KEYS = frozenset({"versions", "reason"})
_OVERRIDE_KEYS = frozenset({"path", "class", "methods", "calls", "also", "versions"})
#: The file of the project's own catalogue with the texts that its features rely on. `make docs` writes it.
TEXTS = "texts.json"
#: Folders of features in the project's own catalogue.
GROUPS: Final = ("backports", "frozen")
#: How the names of a feature's diffs end.
DIFFS = ".diff"
#: Prefix of the project's own features in requirements of external catalogues: `vllm-hwplugin/draft-full-graph`.
OWN: Final = "vllm-hwplugin"
#: Bytes of a TOML file. Each start reads it, and the parser's time grows with the square of a dotted key's length:
#: about a second for a key of this size.
_LARGEST: Final = 32 << 10
_NAME: Final = re.compile("[a-z0-9]+(-[a-z0-9]+)*")


class Terms(NamedTuple):
    """How the features of a catalogue are read.

    Attributes:
        catalogue: the name that ids begin with; empty for the project's own catalogue.
        distribution: whose files features of an external catalogue change by default.
        read: returns the bytes of a file, or raises OSError.
        texts: path -> version -> text, as in `Relied`.
    """

    catalogue: str = ""
    distribution: str = VLLM
    read: Callable[[Path], bytes] = Path.read_bytes
    texts: Mapping[str, Mapping[str, str | None]] = MappingProxyType({})


def default_folder() -> Path:
    """Return `patches/` in the installed package, or next to the source tree's."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def load_catalogue(folder: Path | None = None) -> Catalogue:
    """Read every feature of `folder`, by default the project's own.

    Raises a CatalogueError for an invalid folder or `patch.toml`, and a DiffError for a malformed diff.
    """
    folder = default_folder() if folder is None else folder
    try:
        terms = Terms(texts=json.loads((folder / TEXTS).read_bytes()))
    except FileNotFoundError:
        # Without the file, no text that a feature relies on counts as reviewed.
        terms = Terms()
    except (OSError, ValueError) as error:
        raise CatalogueError(f"{folder / TEXTS}: can't be read ({error}); reinstall vllm-hwplugin") from error
    groups = [folder / group for group in GROUPS if (folder / group).is_dir()]
    homes = [home for parent in (folder, *groups) for home in feature_folders(parent) if home not in groups]
    features = [load_feature(home, terms) for home in sorted(homes, key=lambda home: home.name)]
    return Catalogue(in_order(features, folder))


def feature_folders(folder: Path, way_out: str = "reinstall vllm-hwplugin") -> tuple[Path, ...]:
    """Return the features' folders without `_*` and `.*`, or raise CatalogueError."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name[0] not in "_." and entry.is_dir())
    except OSError as error:
        raise CatalogueError(f"{folder}: the folder of patches can't be read ({error}); {way_out}") from error
    return tuple(folder / name for name in names)


def read_toml(file: Path, read: Callable[[Path], bytes], missing: str) -> dict[str, Any]:
    """Read a TOML file, or raise CatalogueError; `missing` is the error's hint."""
    try:
        data = read(file)
        if len(data) > _LARGEST:
            raise CatalogueError(f"{file}: has {len(data)} bytes, expected at most {_LARGEST}; make it shorter")
        values: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise CatalogueError(f"{file}: can't be read ({error.strerror}); {missing}") from error
    except ValueError as error:
        raise CatalogueError(f"{file}: not TOML ({error}); see docs/your-own-patches.md") from error
    return values


def load_feature(folder: Path, terms: Terms) -> Feature:
    """Read a feature; see `load_catalogue` for errors."""
    file = folder / PATCH
    raw = read_toml(file, terms.read, "each folder of patches needs one")
    refuse_unknown(raw, _OUTSIDE_KEYS if terms.catalogue else _OWN_KEYS, "", file)
    if "id" in raw and raw["id"] != folder.name:
        raise CatalogueError(f"{file}: id is {raw['id']!r}, expected the folder's name {folder.name!r}")
    if terms.catalogue:
        gate = gate_name(terms.catalogue, plain_name(folder.name, file))
        raw = {"gate": gate, "distribution": terms.distribution} | raw
    texts = {key: text_of(raw, key, file) for key in _TEXTS}
    distribution = distribution_of(raw, file) if terms.catalogue else VLLM
    requires = _list_of(raw, "requires", "feature ids", file)
    relied_on = _list_of(raw, "relies", "files of vLLM", file)
    versions = _versions(raw, file)
    not_needed = [
        NotNeeded(_versions(table, file), text_of(table, "reason", file))
        for table in _tables(raw, "not_needed", _NOT_NEEDED_KEYS, file)
    ]
    _refuse_overlap([versions, *(entry.versions for entry in not_needed)], file, distribution)
    if terms.catalogue and not versions.has_end:
        raise CatalogueError(
            f"{file}: the range '{versions}' has no end, so it would hold unknown releases; end it before the first of "
            "them"
        )
    files = _diffs(folder, terms, distribution)
    overrides = tuple(_override(table, terms, file) for table in _tables(raw, "overrides", _OVERRIDE_KEYS, file))
    if lost := {override.path for override in overrides} - {diff.path for diff in files}:
        raise CatalogueError(
            f"{file}: [[overrides]]: no diff of the feature changes {sorted(lost)[0]}; a hunk there overrides"
        )
    return Feature(
        **(texts | {"id": _joined(terms.catalogue, folder.name)}),
        requires=tuple(_required(terms.catalogue, name) for name in requires),
        versions=versions,
        not_needed=tuple(not_needed),
        files=files,
        distribution=distribution,
        switch=_switch(raw, texts, terms, file),
        uses_when=tuple(_terms(raw, file)),
        relies=tuple(Relied(path, terms.texts.get(path, {})) for path in relied_on),
        overrides=overrides,
        reapply=_bool(raw, "reapply", file),
        group=folder.parent.name if not terms.catalogue and folder.parent.name in GROUPS else "",
        platforms=tuple(_platforms(raw, file)),
        companion=_companion(raw, file),
    )


def _platforms(raw: Mapping[str, Any], file: Path) -> list[str]:
    names = _list_of(raw, "platform", "names of platforms", file)
    if "platform" in raw and not all(name.strip() for name in names or [""]):
        raise CatalogueError(f"{file}: platform is {names!r}, expected names such as ['npu', 'musa']")
    return [name.strip().lower() for name in names]


def _companion(raw: Mapping[str, Any], file: Path) -> str:
    if "with" not in raw:
        return ""
    from packaging.requirements import InvalidRequirement, Requirement

    text = text_of(raw, "with", file)
    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        wanted = None
    if wanted is None or wanted.url or wanted.marker or wanted.extras:
        raise CatalogueError(f"{file}: with is {text!r}, expected a package and its versions: 'acme-npu>=0.26,<0.27'")
    return text


def _terms(raw: Mapping[str, Any], file: Path) -> list[str]:
    texts = _list_of(raw, "uses_when", "terms", file)
    try:
        for text in texts:
            read_term(text)
    except ValueError as error:
        raise CatalogueError(f"{file}: uses_when: {error}; see docs/your-own-patches.md") from error
    return texts


def _switch(raw: Mapping[str, Any], texts: Mapping[str, str], terms: Terms, file: Path) -> Gate:
    name = texts["gate"]
    if not terms.catalogue and name in BY_NAME and BY_NAME[name].switches:
        return BY_NAME[name]
    compile_key, aliases = _bool(raw, "compile_key", file), _list_of(raw, "aliases", "variables", file)
    try:
        return feature_gate(
            name,
            text_of(raw, "help", file) if "help" in raw else texts["title"],
            text_of(raw, "default", file) if "default" in raw else "auto",
            catalogue=terms.catalogue,
            compile_key=compile_key,
            aliases=aliases,
            since=text_of(raw, "since", file) if "since" in raw else "0.1.0",
        )
    except GateError as error:
        raise CatalogueError(f"{file}: {error}") from error


def _bool(raw: Mapping[str, Any], key: str, file: Path) -> bool:
    value = raw.get(key, True)
    if not isinstance(value, bool):
        raise CatalogueError(f"{file}: {key} is {value!r}, expected true or false")
    return value


def gate_name(catalogue: str, feature: str) -> str:
    """Return the default switch of a feature."""
    return CATALOGUE_PREFIX + f"{catalogue}_{feature}".replace("-", "_").upper()


def plain_name(name: str, file: Path) -> str:
    """Return a valid catalogue's or feature's name, or raise CatalogueError."""
    if not _NAME.fullmatch(name):
        raise CatalogueError(f"{file}: the name {name!r} has more than lower case, digits and single dashes; rename it")
    return name


def distribution_of(raw: Mapping[str, Any], file: Path) -> str:
    """Return the distribution that a file names, or raise CatalogueError."""
    # Normalized by PEP 503: the index, the metadata and users write names with other case and dashes.
    name = re.sub(r"[-_.]+", "-", text_of(raw, "distribution", file)).lower()
    if name == OWN or not _NAME.fullmatch(name):
        raise CatalogueError(f"{file}: distribution is {name!r}, expected a package other than the plugin")
    return name


def _required(catalogue: str, name: str) -> str:
    """Return a requirement as a feature's id."""
    return name.removeprefix(f"{OWN}/") if "/" in name else _joined(catalogue, name)


def _diffs(folder: Path, terms: Terms, distribution: str) -> tuple[FileDiff, ...]:
    names = sorted(name for name in os.listdir(folder) if name.endswith(DIFFS) and not name.startswith("."))
    if not names:
        raise CatalogueError(f"{folder}: has no {DIFFS} file, so it changes nothing; see docs/your-own-patches.md")
    # Messages name a diff in a line.
    if odd := [name for name in names if not name.isprintable()]:
        raise CatalogueError(f"{folder}: the name {odd[0]!r} cannot be printed; rename the file")
    return tuple(diff for name in names for diff in _read_diff(folder, name, terms, distribution))


def _joined(catalogue: str, name: str) -> str:
    return f"{catalogue}/{name}" if catalogue else name


def _read_diff(folder: Path, name: str, terms: Terms, distribution: str) -> tuple[FileDiff, ...]:
    origin = _joined(terms.catalogue, f"{folder.name}/{name}")
    try:
        # As bytes, which keep CRLF lines.
        return parse_diff(terms.read(folder / name).decode("utf-8"), origin, distribution)
    except OSError as error:
        raise CatalogueError(f"{folder / name}: can't be read ({error.strerror}); fix or remove it") from error
    except UnicodeDecodeError as error:
        raise DiffError(f"{origin}: not UTF-8 ({error}); write the diff again") from error


def text_of(table: Mapping[str, Any], key: str, file: Path) -> str:
    """Return the stripped text under `key`, or raise CatalogueError."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise CatalogueError(f"{file}: {key} is {value!r}, expected a text; see docs/your-own-patches.md")
    return value.strip()


def _list_of(raw: Mapping[str, Any], key: str, expected: str, file: Path) -> list[str]:
    values = raw.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CatalogueError(f"{file}: {key} is {values!r}, expected a list of {expected}")
    return values


def _tables(raw: Mapping[str, Any], key: str, known: frozenset[str], file: Path) -> list[dict[str, Any]]:
    tables = raw.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise CatalogueError(f"{file}: {key} is {tables!r}, expected [[{key}]] tables")
    for table in tables:
        refuse_unknown(table, known, f"[[{key}]]: ", file)
    return tables


def _override(table: Mapping[str, Any], terms: Terms, file: Path) -> Overridden:
    methods, calls = table.get("methods", {}), table.get("calls", {})
    if not isinstance(methods, dict) or not isinstance(calls, dict) or not (methods or calls):
        raise CatalogueError(f"{file}: [[overrides]]: expected [overrides.methods], [overrides.calls] or both")
    path = text_of(table, "path", file)
    return Overridden(
        Relied(path, terms.texts.get(path, {})),
        text_of(table, "class", file),
        {name: text_of(methods, name, file) for name in methods},
        {name: tuple(_list_of(calls, name, "expressions", file)) for name in calls},
        tuple(_list_of(table, "also", "methods", file)),
        _versions(table, file) if "versions" in table else None,
    )


def refuse_unknown(table: Mapping[str, Any], known: frozenset[str], where: str, file: Path) -> None:
    """Raise a CatalogueError for a key that is not in `known`."""
    unknown = sorted(table.keys() - known)
    if unknown:
        raise CatalogueError(f"{file}: {where}unknown key {unknown[0]!r}; expected {', '.join(sorted(known))}")


def _versions(table: Mapping[str, Any], file: Path) -> Versions:
    text = text_of(table, "versions", file)
    try:
        return Versions(text)
    except ValueError as error:
        raise CatalogueError(
            f"{file}: versions {text!r} is no PEP 440 specifier, such as '>=0.20.0,<0.22.0'"
        ) from error


def _refuse_overlap(ranges: list[Versions], file: Path, distribution: str) -> None:
    if len(ranges) < 2:
        return
    # Only the ranges tell the versions of other distributions.
    for version in SUPPORTED if distribution == VLLM else [edge for versions in ranges for edge in versions.edges()]:
        covering = [versions for versions in ranges if versions.covers(version)]
        if len(covering) > 1:
            raise CatalogueError(
                f"{file}: the ranges '{covering[0]}' and '{covering[1]}' both cover {target_name(distribution)} "
                f"{version}; make one of them narrower"
            )


def in_order(features: list[Feature], folder: Path, known: Collection[str] = ()) -> tuple[Feature, ...]:
    """Sort features, requirements first, or raise CatalogueError.

    Requirements may be in `known`, the features of earlier catalogues, and must not form a circle.
    """
    by_id = {feature.id: feature for feature in features}
    ordered: dict[str, Feature] = {}

    def visit(feature: Feature, path: tuple[str, ...]) -> None:
        if feature.id in path:
            raise CatalogueError(
                f"{folder}: features require one another in a circle: {' -> '.join([*path, feature.id])}"
            )
        for name in feature.requires:
            if name in known:
                continue
            if name not in by_id:
                file = folder / feature.home / PATCH
                raise CatalogueError(f"{file}: requires {name!r}, which is no feature here")
            visit(by_id[name], (*path, feature.id))
        ordered.setdefault(feature.id, feature)

    for feature in features:
        visit(feature, ())
    return tuple(ordered.values())
