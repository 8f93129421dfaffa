# SPDX-License-Identifier: Apache-2.0
"""Patching of a module that is already imported, by new bodies of its functions.

A second import would make a second set of classes and functions and register torch operators twice. So a function
object stays and gets new code: `from x import f`, bound methods and subclasses run the new body. Apart from bodies, the
new text may only import more names. Everything else (signatures, decorators, classes, statements outside of functions)
ran while the module was imported, and must be the same in both texts. The code that runs must be the installed file's.

A running call, generator or coroutine keeps the old body until it ends. A swap cannot see behaviour that another module
copied, such as a graph compiled from a function.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import zip_longest
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ._errors import PatchingError
from ._finder import CopyLoader
from ._overlay import Copy

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# The name of a definition and its first line.
_Key = tuple[str, int]

# Decorators that keep the function and only call it: new code in the function is new code for every caller. Any other
# decorator may have read the source (Triton), compiled it, or passed the function to a registry.
_ONLY_CALL = frozenset(
    {
        *("staticmethod", "classmethod", "property", "setter", "getter", "deleter", "abstractmethod", "override"),
        *("final", "no_grad", "inference_mode", "enable_grad", "contextmanager", "asynccontextmanager", "wraps"),
        # vLLM's own, which return the function or a plain wrapper of it: for tracing, and for experts that move.
        *("instrument", "step_eplb_after"),
        # vLLM's, whose last name is ambiguous: it calls `__init__` while kernels can be registered.
        "JitWarmupRegistry.capture",
    }
)
_COMPILES = "support_torch_compile"
# Class decorators, with the methods that they look into or replace.
_OF_CLASSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dataclass", "final", "runtime_checkable", "total_ordering", "unique"), ()),
    # vLLM's: it reads the signature of `forward` and wraps the others; graphs are compiled for each object.
    _COMPILES: ("forward", "__init__", "__call__"),
}
_MAKERS = ("__new__", "__init__", "__post_init__")
# Python runs these while it makes a class, which has happened already.
_MAKE_CLASSES = ("__init_subclass__", "__set_name__", "__prepare__")


class ReapplyRefused(PatchingError):
    """A module is imported already and cannot be patched in place."""


class NotABody(PatchingError):
    """New bodies are not enough to make the new text from the old."""


class Change(NamedTuple):
    """A function with another body, and the classes around it."""

    classes: tuple[ast.ClassDef, ...]
    old: _Function
    new: _Function

    @property
    def name(self) -> str:
        return ".".join(node.name for node in (*self.classes, self.old))

    @property
    def compiled(self) -> bool:
        """Whether objects of its class may hold graphs of it."""
        return bool(self.classes) and _COMPILES in map(_tail, self.classes[-1].decorator_list)


class Swap(NamedTuple):
    """What patches an imported module in place."""

    module: ModuleType
    copy: Copy
    bodies: tuple[tuple[FunctionType, CodeType], ...]
    imports: tuple[ast.stmt, ...]
    class_lines: tuple[tuple[type, int], ...]

    def apply(self) -> Callable[[], None]:
        """Run the new imports, set the new bodies, and return an undo.

        Raises:
            ReapplyRefused: an import fails, or the module has another object under its name. Nothing stays changed.
        """
        with contextlib.ExitStack() as undo:
            for target, name, value in self._values():
                known = vars(target) if isinstance(target, ModuleType) else {name: getattr(target, name)}
                undo.callback(*((setattr, target, name, known[name]) if name in known else (delattr, target, name)))
                setattr(target, name, value)
            return undo.pop_all().close

    def _values(self) -> Iterator[tuple[Any, str, Any]]:
        path, cached, loader, mine = str(self.copy.path), self.copy.bytecode, CopyLoader(self.copy), vars(self.module)
        names = {key: value for key, value in mine.items() if key in ("__builtins__", "__name__", "__package__")}
        try:
            exec(compile(ast.Module([*self.imports], []), path, "exec", dont_inherit=True), names)
        except Exception as error:
            raise _refusal(self.module, f"a new import fails: {type(error).__name__}: {error}") from error
        for name, value in names.items():
            if mine.get(name, value) is not value:
                raise _refusal(self.module, f"it is to import {name}, and has something else under this name")
            yield self.module, name, value
        for function, code in self.bodies:
            yield function, "__code__", code
            # Python reads a docstring only when it makes the function.
            yield function, "__doc__", FunctionType(code, {}, closure=function.__closure__).__doc__
        # For `inspect`, which asks the module for its text and, from Python 3.13 on, a class for its line in the text.
        names_of_text = (("__file__", path), ("__cached__", cached), ("__loader__", loader))
        yield from ((self.module, *named) for named in names_of_text)
        if (spec := self.module.__spec__) is not None:
            yield from ((spec, *named) for named in (("origin", path), ("cached", cached), ("loader", loader)))
        yield from ((owner, "__firstlineno__", line) for owner, line in self.class_lines)


def plan_swap(module: ModuleType | None, copy: Copy, installed_path: str, installed_text: str) -> Swap:
    """Plan an imported module's patch in place; change nothing.

    Args:
        module: imported from the installed file; None if `sys.modules` blocks its import.

    Raises:
        ReapplyRefused: it cannot be patched in place; the message says why and, as far as known, who imported it.
    """
    if not isinstance(module, ModuleType):
        raise ReapplyRefused(
            f"{copy.module} is {module!r} in sys.modules, so its import is blocked; take the entry out before "
            "vLLM loads its plugins"
        )
    if getattr(module.__spec__, "_initializing", False):
        raise _refusal(module, "it is being imported right now")
    with _no_collection():
        old, new = ast.parse(installed_text), ast.parse(copy.text)
    try:
        changes = changed_bodies(old, new)
        before, after = _codes(installed_text, installed_path), _codes(copy.text, str(copy.path))
        live = {_key_of(function.__code__): function for function in _live(module)}
        bodies = [_body(change, live.get(_key(change.old)), before, after) for change in changes]
        _refuse_closures([function for function, _ in bodies])
        _refuse_objects(module, changes)
    except NotABody as error:
        raise _refusal(module, str(error)) from None
    known = {ast.dump(node) for node in old.body if _is_import(node)}
    imports = tuple(node for node in new.body if _is_import(node) and ast.dump(node) not in known)
    return Swap(module, copy, tuple(bodies), imports, tuple(_class_lines(vars(module), new.body)))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection, which may run Python code.

    CPython 3.11 counts the depth of syntax trees once a process. If a collection's callback or finalizer parses in the
    middle of `ast.parse`, or lets another thread do so, `ast.parse` raises a SystemError.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def changed_bodies(old: ast.Module, new: ast.Module) -> list[Change]:
    """Return functions with new bodies; raise NotABody for other changes."""
    changes = [*_changes(_run_once(old), _run_once(new))]
    for change in changes:
        _check(change)
    if changes:
        _refuse_uses_at_import(old)
    return changes


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__")


def _run_once(module: ast.Module) -> list[ast.stmt]:
    return [node for node in module.body if not _is_import(node)]


def _changes(old: list[ast.stmt], new: list[ast.stmt], classes: tuple[ast.ClassDef, ...] = ()) -> Iterator[Change]:
    for before, after in zip_longest(old, new):
        if before is None or after is None or _without_body(before) != _without_body(after):
            node: ast.stmt = after or before
            level = f"the body of class {'.'.join(owner.name for owner in classes)}" if classes else "module level"
            first = next(line for line in ast.unparse(node).splitlines() if not line.startswith("@"))
            raise NotABody(f"line {node.lineno} changes more than the body of a function, at {level}: {first}")
        if isinstance(before, ast.ClassDef) and isinstance(after, ast.ClassDef):
            yield from _changes(before.body, after.body, (*classes, after))
        elif isinstance(before, _Function) and isinstance(after, _Function) and ast.dump(before) != ast.dump(after):
            yield Change(classes, before, after)


def _without_body(node: ast.stmt) -> str:
    if isinstance(node, _Function | ast.ClassDef):
        node = type(node)(**{**dict(ast.iter_fields(node)), "body": []})
    return ast.dump(node)


def _check(change: Change) -> None:
    """Raise NotABody if old code may be held or runs no more."""
    for decorator in change.old.decorator_list:
        if not {_tail(decorator), ast.unparse(decorator)} & _ONLY_CALL:
            raise NotABody(f"{change.name} is decorated with @{ast.unparse(decorator)}, which may hold its old code")
    for owner in change.classes:
        for decorator in owner.decorator_list:
            held = _OF_CLASSES.get(_tail(decorator))
            if held is None or (owner is change.classes[-1] and change.old.name in held):
                raise NotABody(f"{change.name} may be held by @{ast.unparse(decorator)} of its class")
    if change.old.name in _MAKE_CLASSES:
        raise NotABody(f"{change.name} runs while classes are made, which is over")


def _refuse_uses_at_import(module: ast.Module) -> None:
    """Raise NotABody if the import used definitions: results may be held.

    Compared by name only: the text does not tell whose method `x.method()` calls.
    """
    own = {node.name for node in ast.walk(module) if isinstance(node, _Function | ast.ClassDef)}
    for node in _used_at_import(module):
        names = {_tail(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)}
        if used := sorted(names & own):
            raise NotABody(f"{used[0]} was used while the module was imported, at line {node.lineno}")


def _used_at_import(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the calls, attributes and decorators that an import evaluates."""
    if isinstance(node, ast.Call | ast.Attribute):
        yield node
        return
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    # A property's decorators only hold the function.
    yield from (node for node in decorators if _tail(node) not in ("setter", "getter", "deleter"))
    for child in [node.args] if isinstance(node, _Function | ast.Lambda) else ast.iter_child_nodes(node):
        if child not in decorators:
            yield from _used_at_import(child)


def _tail(node: ast.expr) -> str:
    """Return an expression's last name: ``inference_mode`` for ``@torch.inference_mode()``."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _body(
    change: Change, function: FunctionType | None, before: Mapping[_Key, CodeType], after: Mapping[_Key, CodeType]
) -> tuple[FunctionType, CodeType]:
    if function is None or function.__code__ != before[_key(change.old)]:
        raise NotABody(f"{change.name} as it runs is not what the installed file says; something replaced it")
    code = after[_key(change.new)]
    if code.co_freevars != function.__code__.co_freevars:
        names = ", ".join(sorted({*code.co_freevars} ^ {*function.__code__.co_freevars}))
        raise NotABody(f"{change.name} closes over other variables than before ({names})")
    return function, code


def _key(node: _Function | ast.ClassDef) -> _Key:
    # The compiler gives a definition the line of its first decorator.
    return node.name, min(part.lineno for part in (node, *node.decorator_list))


def _key_of(code: CodeType) -> _Key:
    return code.co_name, code.co_firstlineno


def _codes(text: str | bytes, path: str) -> dict[_Key, CodeType]:
    codes = [compile(text, path, "exec", dont_inherit=True)]
    for code in codes:
        codes += _inside(code)
    return {_key_of(code): code for code in codes}


def _inside(code: CodeType) -> Iterator[CodeType]:
    yield from (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _live(module: ModuleType) -> Iterator[FunctionType]:
    """Yield a module's plain functions, also in classes and plain wrappers."""
    pending: list[Any] = [*vars(module).values()]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        kind = type(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if kind is FunctionType:
            pending.append(getattr(value, "__wrapped__", None))
            if value.__globals__ is vars(module):
                yield value
        elif kind in (staticmethod, classmethod):
            pending.append(value.__func__)
        elif issubclass(kind, property):
            pending += [value.fget, value.fset, value.fdel]
        elif issubclass(kind, type) and value.__module__ == module.__name__:
            pending += vars(value).values()


def _refuse_closures(functions: list[FunctionType]) -> None:
    """Raise NotABody if other functions hold, and would keep, the old code."""
    codes = [function.__code__ for function in functions]
    for code in codes:
        codes += _inside(code)
    for holder in gc.get_referrers(*codes) if codes else ():
        if isinstance(holder, FunctionType) and holder not in functions:
            raise NotABody(f"{holder.__qualname__}, which the old text made, still exists")


def _refuse_objects(module: ModuleType, changes: list[Change]) -> None:
    """Raise NotABody if objects exist that the old text has set up.

    They may lack what the new text relies on, or hold graphs of the old text.
    """
    pending: list[Any] = []
    for change in changes:
        if change.classes and (change.old.name in _MAKERS or change.compiled):
            pending.append(reduce(lambda holder, node: getattr(holder, node.name), change.classes, module))
    family: set[type] = set()
    while pending:
        family.add(owner := pending.pop())
        pending += type.__subclasses__(owner)
    # An object refers to its class, and finding a class's referrers is quicker than looking at every object.
    for value in gc.get_referrers(*family) if family else ():
        if type(value) in family:
            raise NotABody(f"an object of {type(value).__name__} exists, set up by the old text")


def _class_lines(names: Any, body: list[ast.stmt]) -> Iterator[tuple[type, int]]:
    for node in body:
        # A class under another name has no text that `inspect` can find.
        if isinstance(node, ast.ClassDef) and issubclass(type(owner := names.get(node.name)), type):
            if "__firstlineno__" in vars(owner):
                yield owner, _key(node)[1]
            yield from _class_lines(vars(owner), node.body)


def _refusal(module: ModuleType, reason: str) -> ReapplyRefused:
    importers = importers_of(module)
    by = f" (by {', '.join(importers)})" if importers else ""
    return ReapplyRefused(
        f"{module.__name__} was imported{by} before the plugin was loaded, and cannot be patched in place: {reason}; "
        "let vLLM load its plugins before that import"
    )


def importers_of(module: ModuleType, limit: int = 3) -> tuple[str, ...]:
    """Return modules whose names hold this module, its functions or classes."""
    importers: list[str] = []
    for name, other in sorted(sys.modules.items()):
        if other is module or not issubclass(type(other), ModuleType):
            continue
        parent = module.__name__.startswith(name + ".")
        for value in list(vars(other).values()):
            # `type()`, not `isinstance`, which runs code of lazy modules and deprecated names.
            defined = issubclass(type(value), FunctionType | type) and value.__module__ == module.__name__
            if (value is module and not parent) or (defined and vars(module).get(value.__name__) is value):
                importers.append(name)
                break
    return tuple(importers[:limit])
