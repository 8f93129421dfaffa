# SPDX-License-Identifier: Apache-2.0
"""Forced re-apply: bring a module that is already imported to its patched text, in place, or refuse.

Importing it again would make a second set of classes and functions and register torch operators twice, so identity is
kept: changed functions and methods get new code, and new imports, functions, classes and methods are added. What ran
only once, while the module was imported, must be the same in both texts (``_compare`` decides that), and what runs now
must be what the installed file says; else the module is refused and stays as it was.

Three steps, so that several modules change together or not at all: :func:`plan_module` only reads,
:meth:`ModulePlan.stage` makes every new value beside the module, :meth:`Staged.commit` sets them. What none of them can
see is behaviour that another module copied earlier, such as a graph that was compiled from a function.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import AsyncGeneratorType, CellType, CodeType, CoroutineType, FunctionType, GeneratorType, ModuleType
from typing import Any

from ._compare import Addition, FunctionChange, ModuleChange, NotSwappable, compare, first_line
from ._errors import PatchingError
from ._finder import CopyLoader
from ._overlay import Copy

_MISSING = object()


class ReapplyRefused(PatchingError):
    """A module is imported already and cannot be brought to its patched text."""


@dataclass(frozen=True, slots=True)
class _Swap:
    """One live function and the code that it gets; ``owner`` is the class around it."""

    change: FunctionChange
    function: FunctionType
    code: CodeType
    owner: type | None


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """A module that can be brought to its patched text, and how."""

    module: ModuleType
    copy: Copy
    change: ModuleChange
    swaps: tuple[_Swap, ...]
    new_code: CodeType

    def stage(self) -> Staged:
        """Make all new values without touching the module. This runs the new imports.

        Raises:
            ReapplyRefused: an import, a default, an annotation or a decorator of the new text fails.
        """
        try:
            return self._stage()
        except Exception as error:
            # Whatever the new text's own expressions raise: the module is untouched, so it is a refusal like any other.
            raise _refusal(self.module, f"its new text cannot be evaluated: {type(error).__name__}: {error}") from error

    def _stage(self) -> Staged:
        names: dict[str, Any] = {}
        setters: list[Setter] = []
        for node in self.change.imports:
            scratch = {key: self.module.__dict__.get(key) for key in ("__name__", "__package__", "__spec__")}
            before = set(scratch)
            self._execute(node, scratch, scratch)
            names |= {name: value for name, value in scratch.items() if name not in before and name != "__builtins__"}
        for addition in self.change.additions:
            if not addition.scope:
                self._execute(addition.node, self.module.__dict__, names)
        setters += [Setter(self.module, name, value) for name, value in names.items()]
        added: dict[type, dict[str, Any]] = {}
        for addition in self.change.additions:
            if addition.scope:
                owner = _resolve(self.module, addition.scope)
                name = _attribute(addition.scope, addition.node.name)
                added.setdefault(owner, {})[name] = self._method(owner, addition, names, added)
        setters += [Setter(owner, name, value) for owner, values in added.items() for name, value in values.items()]
        for swap in self.swaps:
            setters += self._function(swap, names)
        setters += self._places()
        return Staged(self, tuple(setters))

    def _execute(self, node: ast.stmt, globals_: dict[str, Any], locals_: dict[str, Any]) -> None:
        module = ast.Module(body=[node], type_ignores=[])
        flags = _future_flags(self.new_code)
        exec(compile(module, str(self.copy.path), "exec", flags, dont_inherit=True), globals_, locals_)

    def _evaluate(self, node: ast.expr, owner: type | None, *scopes: dict[str, Any]) -> Any:
        expression = compile(ast.Expression(node), str(self.copy.path), "eval", dont_inherit=True)
        inner = [dict(vars(owner))] if owner is not None else []
        return eval(expression, self.module.__dict__, ChainMap(*scopes, *inner))

    def _annotation(self, node: ast.expr, owner: type | None, names: dict[str, Any]) -> Any:
        return ast.unparse(node) if self.change.postponed_annotations else self._evaluate(node, owner, names)

    def _method(
        self, owner: type, addition: Addition, names: dict[str, Any], added: dict[type, dict[str, Any]]
    ) -> object:
        node = addition.node
        assert not isinstance(node, ast.ClassDef)
        code = _find_code(self.new_code, addition.scope, node)
        if code is None or code.co_freevars not in ((), ("__class__",)):
            raise NotSwappable(f"{node.name} closes over more than its class")
        closure = (CellType(owner),) if code.co_freevars else None
        function = FunctionType(code, self.module.__dict__, node.name, None, closure)
        function.__qualname__ = f"{owner.__qualname__}.{node.name}"
        function.__module__ = self.module.__name__
        # A function without a past: every default and annotation is new.
        bare = ast.parse(f"def {node.name}(): ...").body[0]
        assert isinstance(bare, ast.FunctionDef)
        for setter in self._function(_Swap(FunctionChange(addition.scope, bare, node), function, code, owner), names):
            setter.set()
        value: object = function
        for decorator in reversed(node.decorator_list):
            value = self._evaluate(decorator, owner, added.get(owner, {}), names)(value)
        return value

    def _function(self, swap: _Swap, names: dict[str, Any]) -> Iterator[Setter]:
        function, old, new = swap.function, swap.change.old.args, swap.change.new.args
        yield Setter(function, "__code__", swap.code)
        old_values = dict(zip(_positional(old)[::-1], (function.__defaults__ or ())[::-1], strict=False))
        old_values |= function.__kwdefaults__ or {}
        known = {name: (ast.dump(node), old_values.get(name, _MISSING)) for name, node in _defaults(old)}
        values: dict[str, Any] = {}
        for name, node in _defaults(new):
            text, value = known.get(name, ("", _MISSING))
            # The same expression keeps its value: a mutable default may hold something by now.
            values[name] = (
                value if text == ast.dump(node) and value is not _MISSING else self._evaluate(node, swap.owner, names)
            )
        positional = tuple(values[name] for name in _positional(new) if name in values)
        keywords = {arg.arg: values[arg.arg] for arg in new.kwonlyargs if arg.arg in values}
        yield Setter(function, "__defaults__", positional or None)
        yield Setter(function, "__kwdefaults__", keywords or None)
        annotated = dict(_annotated(swap.change.old))
        annotations: dict[str, Any] = {}
        for name, node in _annotated(swap.change.new):
            before = annotated.get(name)
            same = before is not None and ast.dump(before) == ast.dump(node) and name in function.__annotations__
            annotations[name] = function.__annotations__[name] if same else self._annotation(node, swap.owner, names)
        yield Setter(function, "__annotations__", annotations)
        documented = ast.get_docstring(swap.change.new, clean=False) is not None and sys.flags.optimize < 2
        yield Setter(function, "__doc__", swap.code.co_consts[0] if documented else None)

    def _places(self) -> Iterator[Setter]:
        """The module and its spec name the copy, so that ``inspect`` finds the text of classes and of the module."""
        path, cached, module = str(self.copy.path), self.copy.bytecode, self.module
        loader = CopyLoader(self.copy)
        yield Setter(module, "__file__", path)
        yield Setter(module, "__cached__", cached)
        yield Setter(module, "__loader__", loader)
        if module.__spec__ is not None:
            yield Setter(module.__spec__, "origin", path)
            yield Setter(module.__spec__, "cached", cached)
            yield Setter(module.__spec__, "loader", loader)
        for scope, line in self.change.class_lines.items():
            try:
                owner = _resolve(module, scope)
            except NotSwappable:
                # Not there under its own name, so it has no text that could be asked for; its methods are not changed.
                continue
            # Since Python 3.13 `inspect` finds the text of a class by this number, in the file of its module.
            if "__firstlineno__" in vars(owner):
                yield Setter(owner, "__firstlineno__", line)


@dataclass(frozen=True, slots=True)
class Setter:
    """One attribute that will be set; made beforehand, so that setting is all that is left to do."""

    target: Any
    name: str
    value: Any

    def set(self) -> Callable[[], None]:
        """Set it and return what takes it back."""
        before = (
            vars(self.target).get(self.name, _MISSING)
            if isinstance(self.target, type | ModuleType)
            else (getattr(self.target, self.name, _MISSING))
        )
        setattr(self.target, self.name, self.value)

        def undo() -> None:
            if before is _MISSING:
                delattr(self.target, self.name)
            else:
                setattr(self.target, self.name, before)

        return undo


@dataclass(frozen=True, slots=True)
class Staged:
    """All values are made; committing sets them."""

    plan: ModulePlan
    setters: tuple[Setter, ...]

    def commit(self) -> Callable[[], None]:
        """Bring the module to its patched text; returns what takes it back. On an error nothing stays changed."""
        undone: list[Callable[[], None]] = []

        def undo() -> None:
            while undone:
                undone.pop()()

        try:
            for setter in self.setters:
                undone.append(setter.set())
        except BaseException:
            undo()
            raise
        return undo


def plan_module(module: ModuleType | None, copy: Copy, installed_path: str, installed_text: str) -> ModulePlan:
    """Decide whether an imported module can be brought to its patched text.

    Args:
        module: the live module, imported from the installed file; None where `sys.modules` blocks its import.
        copy: its patched text.
        installed_path: the installed file.
        installed_text: what the installed file says.

    Raises:
        ReapplyRefused: it cannot; the message says why and, as far as it can be known, who imported the module.
    """
    if not isinstance(module, ModuleType):
        raise ReapplyRefused(
            f"{copy.module} is {module!r} in sys.modules, so its import is blocked; take the entry out before "
            "vLLM loads its plugins"
        )
    if getattr(module.__spec__, "_initializing", False):
        raise _refusal(module, "it is being imported right now")
    text = copy.text.decode("utf-8")
    try:
        change = compare(installed_text, text)
        old_code = compile(installed_text, installed_path, "exec", dont_inherit=True)
        new_code = compile(text, str(copy.path), "exec", dont_inherit=True)
        swaps = tuple(_plan_swap(module, function, old_code, new_code) for function in change.functions)
        for addition in change.additions:
            name, scope = addition.node.name, addition.scope
            holder: Any = _resolve(module, scope) if scope else module
            if _attribute(scope, name) in vars(holder):
                raise NotSwappable(f"{'.'.join([*scope, name])} is new in the patched text but exists already")
        _refuse_running(swaps)
        _refuse_instances(swaps)
    except NotSwappable as error:
        raise _refusal(module, str(error)) from error
    return ModulePlan(module, copy, change, swaps, new_code)


def _plan_swap(module: ModuleType, change: FunctionChange, old_code: CodeType, new_code: CodeType) -> _Swap:
    owner: Any = _resolve(module, change.scope) if change.scope else None
    before = _find_code(old_code, change.scope, change.old)
    after = _find_code(new_code, change.scope, change.new)
    value = vars(owner if owner is not None else module).get(_attribute(change.scope, change.old.name))
    found = next((function for function in _functions(value) if function.__code__ == before), None)
    if before is None or after is None or found is None:
        raise NotSwappable(f"{change.name} as it runs is not what the installed file says; something replaced it")
    if before.co_freevars != after.co_freevars:
        names = ", ".join(sorted(set(before.co_freevars) ^ set(after.co_freevars)))
        raise NotSwappable(f"{change.name} closes over other variables than before ({names})")
    if len(found.__defaults__ or ()) != len(change.old.args.defaults):
        raise NotSwappable(f"{change.name} has other defaults than the installed file says; something replaced them")
    return _Swap(change, found, after, owner)


def _functions(value: object) -> Iterator[FunctionType]:
    """The plain functions inside what a name is bound to, through the wrappers that only call them."""
    pending, seen = [value], set[int]()
    while pending:
        item = pending.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, staticmethod | classmethod):
            pending.append(item.__func__)
        elif isinstance(item, property):
            pending += [item.fget, item.fset, item.fdel]
        elif isinstance(item, FunctionType):
            yield item
            pending.append(getattr(item, "__wrapped__", None))


def _attribute(scope: tuple[str, ...], name: str) -> str:
    """The name under which a definition is kept: private names of a class carry the name of the class."""
    mangled = scope and name.startswith("__") and not name.endswith("__") and scope[-1].strip("_")
    return f"_{scope[-1].lstrip('_')}{name}" if mangled else name


def _find_code(code: CodeType, scope: tuple[str, ...], node: ast.stmt) -> CodeType | None:
    """The code object of a definition, found the way the compiler nested it."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    inner: CodeType | None = code
    for name in scope:
        inner = next((child for child in _children(inner) if child.co_name == name), None)
        if inner is None:
            return None
    line = first_line(node)
    return next((c for c in _children(inner) if c.co_name == node.name and c.co_firstlineno == line), None)


def _children(code: CodeType | None) -> Iterator[CodeType]:
    yield from (constant for constant in (code.co_consts if code else ()) if isinstance(constant, CodeType))


def _resolve(module: ModuleType, scope: tuple[str, ...]) -> Any:
    holder: Any = module
    for depth, name in enumerate(scope):
        holder = vars(holder).get(name)
        if not isinstance(holder, type) or holder.__qualname__ != ".".join(scope[: depth + 1]):
            raise NotSwappable(f"class {'.'.join(scope)} is not what the installed file says; something replaced it")
    return holder


def _refuse_running(swaps: tuple[_Swap, ...]) -> None:
    """Frames, generators and closures keep the code that they were made from."""
    names: dict[int, str] = {}
    codes: list[CodeType] = []
    pending = [(swap.function.__code__, swap.change.name) for swap in swaps]
    while pending:
        code, name = pending.pop()
        names[id(code)] = name
        codes.append(code)
        pending += [(child, name) for child in _children(code)]
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if id(inner.f_code) in names:
                raise NotSwappable(f"{names[id(inner.f_code)]} is running right now")
            inner = inner.f_back
    targets = {id(swap.function) for swap in swaps}
    for holder in gc.get_referrers(*codes) if codes else ():
        prefix = _SUSPENDED.get(type(holder))
        if isinstance(holder, FunctionType) and id(holder) not in targets:
            raise NotSwappable(f"a function that {names[id(holder.__code__)]} made, or a copy of it, is in use")
        if prefix is not None and getattr(holder, f"{prefix}_frame") is not None:
            name = names[id(getattr(holder, f"{prefix}_code"))]
            raise NotSwappable(f"a generator or coroutine of {name} is in use")


_SUSPENDED: dict[type, str] = {GeneratorType: "gi", CoroutineType: "cr", AsyncGeneratorType: "ag"}


def _refuse_instances(swaps: tuple[_Swap, ...]) -> None:
    """An object that was set up by the old text may lack what the new text relies on, or hold graphs of the old."""
    makers = ("__new__", "__init__", "__post_init__")
    family: dict[type, str] = {}
    pending = [
        (s.owner, s.change.scope[-1]) for s in swaps if s.owner and (s.change.old.name in makers or s.change.compiled)
    ]
    while pending:
        owner, name = pending.pop()
        family[owner] = name
        children: list[type] = type.__subclasses__(owner)
        pending += [(child, name) for child in children]
    # An object refers to its class, and asking for what refers to a class is quicker than looking at every object.
    for value in gc.get_referrers(*family) if family else ():
        if type(value) in family:
            raise NotSwappable(f"an object of {family[type(value)]} exists, set up by the old text")


def _positional(args: ast.arguments) -> list[str]:
    return [arg.arg for arg in [*args.posonlyargs, *args.args]]


def _defaults(args: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    yield from reversed(list(zip(_positional(args)[::-1], args.defaults[::-1], strict=False)))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if default is not None:
            yield arg.arg, default


def _annotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    args = node.args
    for arg in [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]:
        if arg is not None and arg.annotation is not None:
            yield arg.arg, arg.annotation
    if node.returns is not None:
        yield "return", node.returns


def _future_flags(code: CodeType) -> int:
    import __future__

    known = (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    return sum(flag for flag in set(known) if code.co_flags & flag)


def _refusal(module: ModuleType, reason: str) -> ReapplyRefused:
    importers = importers_of(module)
    by = f" (by {', '.join(importers)})" if importers else ""
    return ReapplyRefused(
        f"{module.__name__} was imported{by} before the plugin was loaded, and cannot be patched in place: {reason}; "
        "let vLLM load its plugins before that import"
    )


def importers_of(module: ModuleType, limit: int = 3) -> tuple[str, ...]:
    """Modules that hold this one, or a function or class of it, by name: as much as can be known afterwards."""
    found: list[str] = []
    for name, other in sorted(sys.modules.items()):
        if other is module or not issubclass(type(other), ModuleType):
            continue
        parent = module.__name__.startswith(name + ".")
        for value in list(vars(other).values()):
            # `type()`, not `isinstance`: lazy modules and deprecated names answer the latter by running code.
            defined = issubclass(type(value), FunctionType | type) and value.__module__ == module.__name__
            if (value is module and not parent) or (defined and vars(module).get(value.__name__) is value):
                found.append(name)
                break
    return tuple(found[:limit])
