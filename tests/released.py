# SPDX-License-Identifier: Apache-2.0
"""Parts of the released text of a vLLM version, with the project's patches or without, as things that can be called.

The versions do not run beside the installed one, so single functions and classes of them are executed, with stand-ins
for the names that they use; or whole modules, which take the rest from the installed vLLM.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.util
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from vllm_hwplugin.patching import load_catalogue, make_plan

#: A feature with modes is off where none is asked for, and here are no caches that it could look at.
WITHOUT_MODES: Final = {"VLLM_HWPLUGIN_NWOR_MODE": "off"}
_numbers = itertools.count()


@functools.cache
def text_of(tree: Any, path: str, **choices: str) -> str:
    """The text of one module after all features were applied that `choices` (gate -> value) leaves on."""
    patched = _plan_of(tree, **choices).files.get(path)
    text = patched.text if patched is not None else tree.read(path)
    assert text is not None, f"vLLM {tree.version} has no {path}"
    return text


@functools.cache
def _plan_of(tree: Any, **choices: str) -> Any:
    plan = make_plan(load_catalogue(), tree, {**WITHOUT_MODES, **choices})
    assert plan.errors == ()
    return plan


def take(text: str, name: str, methods: Collection[str] | None = None, *, given: Mapping[str, Any]) -> Any:
    """Execute one function or class of a module's text and return it.

    Annotations are left unevaluated, as the stand-ins need not have every class that is named there.

    Args:
        methods: of a class, what to keep; all of its body by default. A method that the text lacks is no error.
        given: the names that the text uses. The function or class is added, so that parts can refer to each other.
    """
    (found,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    if methods is not None:
        assert isinstance(found, ast.ClassDef)
        found.body = [one for one in found.body if isinstance(one, ast.FunctionDef) and one.name in methods]
        found.body = found.body or [ast.Pass()]
    module = ast.fix_missing_locations(ast.Module([found], []))
    namespace = dict(given)
    annotations = compile("from __future__ import annotations", "flags", "exec").co_flags
    exec(compile(module, f"released {name}", "exec", flags=annotations, dont_inherit=True), namespace)
    return namespace[name]


class NotThere:
    """A name that the installed vLLM does not have, or that is not to be reached. It may be named, and not be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{type(self).__name__} is not there")


class Modules:
    """Modules of one version, each executed from its text when it is first asked for.

    Args:
        text: of a path, None where there is no such file; see :func:`texts`.
        own: packages and modules that are taken from there. Everything else is the installed vLLM's, and a name that
            this one does not have is a :class:`NotThere`.
        given: modules that are neither, with all the names that they have. Another one is an ImportError.
        stand_ins: what stands for a name in every module that imports or defines it.
        installed: whether the installed vLLM is asked at all.
    """

    def __init__(
        self,
        text: Callable[[str], str | None],
        own: Collection[str],
        *,
        given: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({}),
        stand_ins: Mapping[str, Any] = types.MappingProxyType({}),
        installed: bool = True,
    ) -> None:
        self._text, self._own, self._given = text, tuple(f"{name}." for name in own), given
        self._stand_ins, self._installed = stand_ins, installed
        self._modules: dict[str, types.ModuleType] = {}

    def text(self, path: str) -> str:
        text = self._text(path)
        assert text is not None, f"there is no {path}"
        return text

    def has(self, name: str) -> bool:
        return self._text(f"{name.replace('.', '/')}.py") is not None

    def load(self, name: str) -> types.ModuleType:
        if name in self._modules:
            return self._modules[name]
        path = name.replace(".", "/")
        package = self._text(f"{path}.py") is None
        text = self.text(f"{path}/__init__.py" if package else f"{path}.py")
        module = types.ModuleType(f"released_{next(_numbers)}.{name}")
        module.__package__ = name if package else name.rpartition(".")[0]
        module.__builtins__ = {**vars(builtins), "__import__": self._import}  # type: ignore[attr-defined]
        # A dataclass looks up the module that it is made in.
        sys.modules[module.__name__] = self._modules[name] = module
        # Triton looks its kernels' text up by the file's name.
        module.__file__ = filename = f"<{module.__name__}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        exec(compile(text, filename, "exec", dont_inherit=True), vars(module))
        vars(module).update({key: value for key, value in self._stand_ins.items() if key in vars(module)})
        return module

    __call__ = load

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level:
            name = importlib.util.resolve_name("." * level + name, globals["__package__"])
        if not name.startswith("vllm.") or not fromlist:
            return builtins.__import__(name, globals, locals, fromlist)
        found: Any = types.SimpleNamespace()
        if name in self._given:
            found = types.SimpleNamespace(**self._given[name])
        elif f"{name}.".startswith(self._own):
            found = self.load(name)
        elif self._installed:
            with contextlib.suppress(ImportError):
                found = importlib.import_module(name)
        return types.SimpleNamespace(**{item: self._item(name, found, item) for item in fromlist})

    def _item(self, name: str, found: Any, item: str) -> Any:
        if item in self._stand_ins:
            return self._stand_ins[item]
        if name in self._given and not hasattr(found, item):
            raise ImportError(f"{name} is given {sorted(vars(found))}, without {item}")
        if hasattr(found, item):
            return getattr(found, item)
        path = f"{name}.{item}".replace(".", "/")
        if f"{name}.".startswith(self._own) and self._text(f"{path}.py") is not None:
            return self.load(f"{name}.{item}")
        return type(item, (NotThere,), {})


def texts(tree: Any, **choices: str) -> Callable[[str], str | None]:
    """What :class:`Modules` are made of: the texts of a version after the features that ``choices`` leaves on."""
    return lambda path: None if tree.read(path) is None else text_of(tree, path, **choices)
