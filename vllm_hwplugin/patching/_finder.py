# SPDX-License-Identifier: Apache-2.0
"""The meta-path finder and the loader: for exactly the patched modules, the text of the copy."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

from ._errors import PatchingError
from ._model import target_name
from ._overlay import Copy


class CopyLoader(SourceFileLoader):
    """A source loader whose source is the text in memory that was verified, not what its path leads to by now."""

    def __init__(self, copy: Copy, on_load: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(copy.module, str(copy.path))
        self._copy = copy
        self._on_load = on_load

    def exec_module(self, module: ModuleType) -> None:
        self._on_load(self._copy.module)
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        return self._copy.code()

    def get_data(self, path: str) -> bytes:
        # `get_source` asks this, too.
        return self._copy.text if path == self.path else super().get_data(path)


class CopyFinder:
    """Serves patched modules from their copies, and knows no other module.

    Args:
        root: the folder that holds the installed folder ``vllm``.
        copies: module name -> copy.
        on_load: called with the module's name when a copy is about to be loaded.
        roots: module name -> the folder that its path begins in, of modules that are not below `root`.

    One limit: data files beside a patched package's ``__init__.py`` are found through ``__path__``, which stays the
    installed folder, but not through ``pkgutil.get_data`` or ``importlib.resources``, which start from the loader.
    """

    def __init__(
        self,
        root: Path,
        copies: Mapping[str, Copy],
        on_load: Callable[[str], None] = lambda _: None,
        roots: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self._root = root
        self._roots = roots
        self._on_load = on_load
        self._asking = threading.local()
        self.copies = dict(copies)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        copy = self.copies.get(fullname)
        if copy is None:
            return None
        installed = self._roots.get(fullname, self._root).joinpath(*fullname.split("."))
        parent = installed.parent
        if path is not None and not any(os.path.realpath(entry) == os.path.realpath(parent) for entry in path):
            # Another tree has taken the package's name since the patches were computed. Its modules are not the ones
            # that were patched, and a mixture of both is the one thing that must not run.
            raise ImportError(
                f"{fullname} was patched in {parent} but is imported from {', '.join(path)}; "
                f"start again with one {target_name(fullname.partition('.')[0])} on the path, or set VLLM_HWPLUGIN=0",
                name=fullname,
            )
        try:
            try:
                copy.verify()
            except PatchingError:
                # Once more: a network file system forgets a handle (ESTALE), and a full table of descriptors empties.
                copy.verify()
        except PatchingError as error:
            # Modules of the same features may run patched already: the stock module would make half a feature.
            raise ImportError(str(error), name=fullname, path=str(copy.path)) from error
        spec = spec_from_file_location(
            fullname,
            copy.path,
            loader=CopyLoader(copy, self._on_load),
            submodule_search_locations=[str(installed)] if copy.is_package else None,
        )
        return self._wrapped(fullname, path, target, spec) or spec

    def _wrapped(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None, spec: ModuleSpec | None
    ) -> ModuleSpec | None:
        """The spec of a copy as another import hook has it, None where no hook has any.

        A hook such as wrapt's asks importlib for a module's spec, and wraps its loader. Those that stand behind this
        finder would never be asked for a patched module. A spec of anything but the copy does not count.
        """
        asking: dict[str, Iterator[Any]] = vars(self._asking)
        outermost = fullname not in asking
        # A hook that asks gets what the hooks behind it make of the copy.
        behind = asking.setdefault(fullname, iter(self._finders_behind()))
        try:
            for other in behind:
                # Up to Python 3.11 one may have none.
                find = getattr(other, "find_spec", None)
                found: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if found is not None and spec is not None and found.origin == spec.origin:
                    return found
            return None
        finally:
            if outermost:
                del asking[fullname]

    def _finders_behind(self) -> Sequence[Any]:
        """Those that are asked after this one, up to Python's own for files; none where this one is not among them."""
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else []
        return behind[: behind.index(PathFinder)] if PathFinder in behind else behind

    def put_first(self) -> None:
        """Make this the finder that is asked first, wherever others have put themselves since."""
        # One assignment: other threads that import now see the old list or the new one.
        sys.meta_path[:] = [self, *(other for other in sys.meta_path if other is not self)]

    def remove(self) -> None:
        """Be asked no more."""
        # A list of its own: another thread's import that is half through the old one would miss a finder.
        sys.meta_path = [other for other in sys.meta_path if other is not self]


def serves(module: ModuleType, copy: Copy) -> bool:
    """Whether an imported module runs from its copy."""
    spec = getattr(module, "__spec__", None)
    return spec is not None and bool(spec.origin == str(copy.path))
