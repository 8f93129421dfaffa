# SPDX-License-Identifier: Apache-2.0
"""Other distributions than vLLM that features change: which version this process would import, and from where."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ._errors import UnreadableFile
from ._installed import Installed, InstalledSource, NotInstalled
from ._model import VLLM, Feature


class DistributionSource(NamedTuple):
    """The modules of an installed distribution as text (see the ``Source`` protocol of the pure engine).

    Attributes:
        record: the text of its RECORD; None where that lists no modules, as of an editable installation.
    """

    label: str
    version: str
    root: Path
    name: str
    record: str | None

    def read(self, path: str) -> str | None:
        """The text of a file, newlines untouched; None where the distribution has no such file.

        Raises:
            UnreadableFile: it cannot be read, or Python would import the module from elsewhere.
        """
        # As text: the records of large libraries take longer to parse than all else that a start does.
        if self.record is not None and f"\n{path}," not in self.record:
            return None
        text = InstalledSource(self.label, self.version, self.root, self.name).read(path)
        top = path.partition("/")[0]
        places = importable(top.removesuffix(".py"))
        if text is not None and not any(
            os.path.realpath(place) == os.path.realpath(self.root / top) for place in places
        ):
            found = ", ".join(map(str, places)) or "nowhere"
            raise UnreadableFile(
                f"{top} is imported from {found}, which is not that of {self.label}; install {self.name} again"
            )
        return text


def find_distribution(name: str, paths: Iterable[str]) -> Installed:
    """Find an installed distribution.

    Args:
        name: as PEP 503 normalizes it.
        paths: the files that are asked for; they tell where an editable installation has its packages.

    Raises:
        NotInstalled: there is none, or it states no version.
    """
    try:
        distribution = importlib.metadata.distribution(name)
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
        record, root = None, _editable_root(name, origin.get("url", ""), paths)
    label, owned = f"{name} {version} in {root}", None if record is None else f"\n{record}"
    return Installed(name, version, root, DistributionSource(label, version, root, name, owned))


def find_targets(features: Iterable[Feature]) -> tuple[dict[str, Installed], dict[str, str]]:
    """The other distributions that features change, and by feature why its distribution cannot be changed."""
    found: dict[str, Installed] = {}
    missing: dict[str, str] = {}
    of: dict[str, list[Feature]] = {}
    for feature in features:
        if feature.distribution != VLLM:
            of.setdefault(feature.distribution, []).append(feature)
    for name, users in of.items():
        paths = [file.path for user in users for file in user.files]
        try:
            found[name] = find_distribution(name, paths)
        except NotInstalled as error:
            missing |= {user.id: str(error) for user in users}
    return found, missing


def importable(top: str) -> list[Path]:
    """The folders of a top-level package, or the file of a module, that ``import`` leads to; empty where none does."""
    module = sys.modules.get(top)
    if module is not None and getattr(module, "__path__", None):
        # `__path__`, not `__file__`: a patched `__init__.py` is served from elsewhere.
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


def _editable_root(name: str, url: str, paths: Iterable[str]) -> Path:
    project = os.path.realpath(urllib.request.url2pathname(urllib.parse.urlparse(url).path))
    tops = sorted({path.partition("/")[0].removesuffix(".py") for path in paths})
    for place in (place for top in tops for place in importable(top)):
        if os.path.realpath(place).startswith(project + os.sep):
            return place.absolute().parent
    raise NotInstalled(f"{name} is installed from {project}, and {' or '.join(tops)} is not imported from there")
