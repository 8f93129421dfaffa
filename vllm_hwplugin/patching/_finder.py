# SPDX-License-Identifier: Apache-2.0
"""The meta-path finder and the loader, which give exactly the patched modules the text of their copies."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ._errors import PatchingError
from ._model import target_name
from ._overlay import Copy


class CopyLoader(SourceFileLoader):
    """A loader of the verified text in memory, not of the file that its path leads to."""

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
        # `get_source` calls this, too.
        return self._copy.text if path == self.path else super().get_data(path)


class CopyFinder:
    """Finder of patched modules only, which it loads from their copies.

    Limit: data files next to a patched package's ``__init__.py`` are found through ``__path__``, which stays the
    installed folder, but not through ``pkgutil.get_data`` or ``importlib.resources``, which start from the loader.

    Args:
        roots: module name -> the installed folder that its path begins in.
        on_load: called with the module's name before a copy is loaded.
    """

    def __init__(
        self, roots: Mapping[str, Path], copies: Mapping[str, Copy], on_load: Callable[[str], None] = lambda _: None
    ) -> None:
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
        installed = self._roots[fullname].joinpath(*fullname.split("."))
        parent = installed.parent
        if path is not None and not any(os.path.realpath(entry) == os.path.realpath(parent) for entry in path):
            # Another tree has taken the package's name since the patches were computed. Its modules are not the patched
            # modules, and a mixture of both must not run.
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
            # Modules of the same features may run patched already: an unpatched module would make half a feature.
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
        """Return the copy's spec as another import hook wraps it, or None.

        A hook such as wrapt's asks importlib for a module's spec, and wraps its loader. Python would not ask the hooks
        after this finder for a patched module. A spec of anything but the copy does not count.
        """
        asking: dict[str, Iterator[Any]] = vars(self._asking)
        outermost = fullname not in asking
        # A hook that asks gets what the hooks after it make of the copy.
        behind = asking.setdefault(fullname, iter(self._finders_behind()))
        try:
            for other in behind:
                # Up to Python 3.11 a finder may lack it.
                find = getattr(other, "find_spec", None)
                wrapped: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if wrapped is not None and spec is not None and wrapped.origin == spec.origin:
                    return wrapped
            return None
        finally:
            if outermost:
                del asking[fullname]

    def _finders_behind(self) -> Sequence[Any]:
        """Return the finders between this one, if Python asks it, and `PathFinder`."""
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else []
        return behind[: behind.index(PathFinder)] if PathFinder in behind else behind

    def put_first(self) -> None:
        """Make this the first finder that Python asks."""
        # One assignment: threads that import meanwhile see the old list or the new list.
        sys.meta_path[:] = [self, *(other for other in sys.meta_path if other is not self)]

    def remove(self) -> None:
        """Take this finder off the meta path."""
        # A new list: another thread's import that is half through the old list would miss a finder.
        sys.meta_path = [other for other in sys.meta_path if other is not self]
