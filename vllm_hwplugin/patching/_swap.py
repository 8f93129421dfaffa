# SPDX-License-Identifier: Apache-2.0
"""Patching of a module that is already imported, by new bodies of its functions.

A function object stays and gets new code: `from x import f`, bound methods and subclasses run the new body, and a call
under way ends in the old one. The new text may import more. All else must be the same in both texts, and as installed.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import zip_longest
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ._errors import PatchingError, ReapplyRefused
from ._finder import CopyLoader
from ._overlay import Copy

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Body = tuple[FunctionType, CodeType]
_Codes = dict[tuple[str, int], CodeType]

# Decorators that only call the function. Others may have read its source, compiled it, or passed it to a registry.
_ONLY_CALL = {"staticmethod", "classmethod", "override", "inference_mode", "instrument", "JitWarmupRegistry.capture"}
# vLLM's class decorator, and the methods that it looks into or replaces.
_COMPILES, _COMPILED = "support_torch_compile", ("forward", "__init__", "__call__")
# Set up objects; run while Python makes a class.
_MAKERS, _MAKE_CLASSES = ("__new__", "__init__", "__post_init__"), ("__init_subclass__", "__set_name__", "__prepare__")
# With such a name a text may run its functions without naming them.
_UNNAMED = {*_MAKE_CLASSES, "globals", "vars", "eval", "exec", "__subclasses__"}


class NotABody(PatchingError):
    """New bodies are not enough to make the new text from the old."""


class Change(NamedTuple):
    """A function with another body, and the classes around it."""

    name: str
    classes: tuple[ast.ClassDef, ...]
    old: _Function
    new: _Function


def patch_in_place(
    module: ModuleType | None, copy: Copy, installed_path: str, installed_text: str, *, only_check: bool = False
) -> Callable[[], None]:
    """Patch an imported module, or only check; return an undo.

    Raises:
        ReapplyRefused: nothing is changed. The message says why and, as far as known, who imported the module.
    """
    if not isinstance(module, ModuleType):
        raise ReapplyRefused(f"{copy.module} is {module!r} in sys.modules, so its import is blocked; take it out")
    try:
        if getattr(module.__spec__, "_initializing", False):
            raise NotABody("it is being imported right now")
        old, new = _parse(installed_text), _parse(copy.text)
        changes = changed_bodies(old, new)
        before, after = _codes(installed_text, installed_path), _codes(copy.text, str(copy.path))
        bodies = [_body(change, module, before, after) for change in changes]
        _refuse_holders(module, changes, bodies)
        with contextlib.ExitStack() as undo:
            for target, name, value in () if only_check else _values(module, copy, old, new, changes, bodies):
                known = vars(target) if isinstance(target, ModuleType) else {name: getattr(target, name)}
                undo.callback(*((setattr, target, name, known[name]) if name in known else (delattr, target, name)))
                setattr(target, name, value)
            return undo.pop_all().close
    except NotABody as error:
        by = f" (by {', '.join(names)})" if (names := importers_of(module)) else ""
        raise ReapplyRefused(
            f"{module.__name__} was imported{by} before the plugin was loaded, and cannot be patched in place: "
            f"{error}; let vLLM load its plugins before that import"
        ) from error.__cause__


def _parse(text: str | bytes) -> ast.Module:
    with contextlib.ExitStack() as after:
        if gc.isenabled():
            # CPython 3.11 raises a SystemError if a collection's callback parses in the middle of `ast.parse`.
            gc.disable()
            after.callback(gc.enable)
        return ast.parse(text)


def _values(
    module: ModuleType, copy: Copy, old: ast.Module, new: ast.Module, changes: list[Change], bodies: list[_Body]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield objects, names and the values to set."""
    path, cached, loader, mine = str(copy.path), copy.bytecode, CopyLoader(copy), vars(module)
    known = {ast.dump(node) for node in old.body if _is_import(node)}
    imports = [node for node in new.body if _is_import(node) and ast.dump(node) not in known]
    names = {key: value for key, value in mine.items() if key in ("__builtins__", "__name__", "__package__")}
    try:
        exec(compile(ast.Module(imports, []), path, "exec", dont_inherit=True), names)
    except Exception as error:
        raise NotABody(f"a new import fails: {type(error).__name__}: {error}") from error
    if taken := [name for name, value in names.items() if mine.get(name, value) is not value]:
        raise NotABody(f"it is to import {taken[0]}, and has something else under this name")
    # Again, because other threads may have made objects during the imports.
    _refuse_holders(module, changes, bodies)
    yield from ((module, *named) for named in names.items())
    for function, code in bodies:
        yield function, "__code__", code
        # Python reads a docstring only when it makes the function.
        yield function, "__doc__", FunctionType(code, {}, closure=function.__closure__).__doc__
    # For `inspect`, which asks the module for its text and, from Python 3.13 on, a class for its line in the text.
    yield from ((module, *named) for named in (("__file__", path), ("__cached__", cached), ("__loader__", loader)))
    for named in (("origin", path), ("cached", cached), ("loader", loader)) if module.__spec__ is not None else ():
        yield module.__spec__, *named
    yield from ((owner, "__firstlineno__", line) for owner, line in _class_lines(mine, new.body))


def _refuse_holders(module: ModuleType, changes: list[Change], bodies: list[_Body]) -> None:
    """Raise NotABody if a function or an object holds old code."""
    functions = [function for function, _ in bodies]
    codes = [code for function in functions for code in _with_inner(function.__code__)]
    for holder in gc.get_referrers(*codes) if codes else ():
        if isinstance(holder, FunctionType) and holder not in functions:
            raise NotABody(f"{holder.__qualname__}, which the old text made, still exists")
    # Objects of a compiled class may hold graphs of any of its methods.
    family: list[Any] = [
        reduce(lambda holder, node: getattr(holder, node.name), classes, module)
        for _, classes, function, _ in changes
        if classes and (function.name in _MAKERS or _COMPILES in map(_last_name, classes[-1].decorator_list))
    ]
    for owner in family:
        family += {*type.__subclasses__(owner)} - {*family}
    for value in gc.get_referrers(*family) if family else ():
        if type(value) in family:
            raise NotABody(f"an object of {type(value).__name__} exists, set up by the old text")


def changed_bodies(old: ast.Module, new: ast.Module) -> list[Change]:
    """Return functions with new bodies; raise NotABody for other changes."""
    run_once = [[node for node in text.body if not _is_import(node)] for text in (old, new)]
    changes = [*_changes(run_once[0], run_once[1])]
    for change in changes:
        for decorator in change.old.decorator_list:
            if not {_last_name(decorator), ast.unparse(decorator)} & _ONLY_CALL:
                raise NotABody(f"{change.name} has @{ast.unparse(decorator)}, which may hold its old code")
        for decorator in (decorator for owner in change.classes for decorator in owner.decorator_list):
            if _last_name(decorator) != _COMPILES or change.old.name in _COMPILED:
                raise NotABody(f"{change.name} may be held by @{ast.unparse(decorator)} of its class")
        if change.old.name in _MAKE_CLASSES:
            raise NotABody(f"{change.name} runs while classes are made, which is over")
    reaching = _reaching(old, changes) if changes else set()
    for node in _used_at_import(old):
        if used := sorted(reaching & _names(node)):
            raise NotABody(f"{used[0]} was used while the module was imported, at line {node.lineno}")
    return changes


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__")


def _changes(old: list[ast.stmt], new: list[ast.stmt], classes: tuple[ast.ClassDef, ...] = ()) -> Iterator[Change]:
    for before, after in zip_longest(old, new):
        if before is None or after is None or _without_body(before) != _without_body(after):
            node: ast.stmt = after or before
            first = next(line for line in ast.unparse(node).splitlines() if not line.startswith("@"))
            raise NotABody(f"line {node.lineno} changes more than the body of a function: {first}")
        if isinstance(before, ast.ClassDef) and isinstance(after, ast.ClassDef):
            yield from _changes(before.body, after.body, (*classes, after))
        elif isinstance(before, _Function) and isinstance(after, _Function) and ast.dump(before) != ast.dump(after):
            yield Change(".".join(part.name for part in (*classes, after)), classes, before, after)


def _without_body(node: ast.stmt) -> str:
    if isinstance(node, _Function | ast.ClassDef):
        node = type(node)(**{**dict(ast.iter_fields(node)), "body": []})
    return ast.dump(node)


def _reaching(text: ast.Module, changes: list[Change]) -> set[str]:
    """Return the names whose use may lead to a changed function.

    Compared by name only: the text does not tell whose method `x.method()` calls.
    """
    nodes = [*ast.walk(text)]
    definitions = [node for node in nodes if isinstance(node, _Function | ast.ClassDef)]
    local = {part for node in definitions if isinstance(node, _Function) for part in ast.walk(node)}
    leads = [({node.name}, _names(node)) for node in definitions]
    leads += [(_names(node, "target", "targets", "optional_vars"), _names(node)) for node in nodes if node not in local]
    own = {name for names, _ in leads for name in names}
    for node in definitions:
        # The module's own decorators, base classes and metaclasses get what is defined with them.
        leads.append((own & _names(node, "decorator_list", "bases", "keywords"), {node.name, *_names(node)}))
    reaching = {name for change in changes for name in change.name.split(".")}
    reaching |= own if _UNNAMED & (own | _names(text)) else set()
    while more := {name for names, others in leads if reaching & others for name in names} - reaching:
        reaching |= more
    return reaching


def _names(node: ast.AST, *fields: str) -> set[str]:
    """Return the variables and attributes in a node or its fields."""
    values = [getattr(node, field, None) for field in fields] if fields else [node]
    parts = [part for value in values if value for part in (value if isinstance(value, list) else [value])]
    names = (name for part in parts for name in ast.walk(part) if isinstance(name, ast.Name | ast.Attribute))
    return {_last_name(name) for name in names}


def _used_at_import(node: ast.AST) -> Iterator[ast.expr | ast.keyword]:
    """Yield the calls, attributes, decorators and metaclasses that an import evaluates."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    # A property's decorators only hold the function.
    yield from (decorator for decorator in decorators if _last_name(decorator) not in ("setter", "getter", "deleter"))
    if isinstance(node, ast.Call | ast.Attribute | ast.keyword):
        yield node
    else:
        for child in [node.args] if isinstance(node, _Function | ast.Lambda) else ast.iter_child_nodes(node):
            yield from _used_at_import(child) if child not in decorators else ()


def _last_name(node: ast.expr) -> str:
    """Return ``inference_mode`` for ``@torch.inference_mode()``."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _body(change: Change, module: ModuleType, before: _Codes, after: _Codes) -> _Body:
    holder = vars(module)
    for node in change.classes:
        owner = holder.get(node.name)
        holder = vars(owner) if issubclass(type(owner), type) and owner.__module__ == module.__name__ else {}
    function: Any = getattr(holder.get(change.old.name), "__func__", holder.get(change.old.name))
    while type(function) is FunctionType and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    of_module = type(function) is FunctionType and function.__globals__ is vars(module)
    if not of_module or function.__code__ != before[_key(change.old)]:
        raise NotABody(f"{change.name} as it runs is not what the installed file says; something replaced it")
    if (code := after[_key(change.new)]).co_freevars != function.__code__.co_freevars:
        raise NotABody(f"{change.name} closes over other variables than before")
    return function, code


def _key(node: _Function | ast.ClassDef) -> tuple[str, int]:
    # The compiler gives a definition the line of its first decorator.
    return node.name, min(part.lineno for part in (node, *node.decorator_list))


def _codes(text: str | bytes, path: str) -> _Codes:
    return {(code.co_name, code.co_firstlineno): code for code in _with_inner(compile(text, path, "exec", 0, True))}


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        yield from _with_inner(constant) if isinstance(constant, CodeType) else ()


def _class_lines(names: Any, body: list[ast.stmt]) -> Iterator[tuple[type, int]]:
    for node in (node for node in body if isinstance(node, ast.ClassDef)):
        # A class under another name has no text that `inspect` can find.
        if issubclass(type(owner := names.get(node.name)), type):
            yield from [(owner, _key(node)[1])] if "__firstlineno__" in vars(owner) else []
            yield from _class_lines(vars(owner), node.body)


def importers_of(module: ModuleType) -> tuple[str, ...]:
    """Return up to three modules that hold parts of this module."""
    # `type()`, not `isinstance`, which runs code of lazy modules and deprecated names.
    defined = [value for value in vars(module).values() if issubclass(type(value), FunctionType | type)]
    own = {id(value) for value in defined if value.__module__ == module.__name__}
    importers = []
    for name, other in sorted(sys.modules.items()):
        # A package holds its modules without importing them.
        held = own if module.__name__.startswith(f"{name}.") else own | {id(module)}
        if other is not module and issubclass(type(other), ModuleType) and held & {*map(id, vars(other).values())}:
            importers.append(name)
    return tuple(importers[:3])
