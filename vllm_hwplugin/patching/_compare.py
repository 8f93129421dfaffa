# SPDX-License-Identifier: Apache-2.0
"""What differs between two texts of a module, and whether a live module can take it: pure, text in, decision out."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import HwpluginError

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Scope = ast.Module | ast.ClassDef

COMPILING_DECORATOR = "support_torch_compile"

# Decorators that keep the function and only call it: new code in the function is new code for every caller. Anything
# else may have read the source (Triton), compiled it, or handed the function to a registry.
_TRANSPARENT_DECORATORS = frozenset(
    {
        *("staticmethod", "classmethod", "property", "setter", "getter", "deleter", "abstractmethod", "override"),
        *("final", "no_grad", "inference_mode", "enable_grad", "contextmanager", "asynccontextmanager", "wraps"),
        # vLLM's own, which return the function or a plain wrapper of it: for tracing, and for experts that move.
        *("instrument", "step_eplb_after"),
    }
)
# The same where the last name alone says too little. vLLM's: it calls `__init__` while kernels can be registered.
_TRANSPARENT_METHODS = frozenset({"JitWarmupRegistry.capture"})
# Class decorators, with the methods that they look into or replace.
_CLASS_DECORATORS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("dataclass", "final", "runtime_checkable", "total_ordering", "unique"), frozenset()),
    # vLLM's: it reads the signature of `forward` and wraps the others; graphs are compiled for each object.
    COMPILING_DECORATOR: frozenset({"forward", "__init__", "__call__"}),
}

# Python runs these while it makes a class, which is over.
_CLASS_CREATION_HOOKS = frozenset({"__init_subclass__", "__set_name__", "__prepare__"})


class NotSwappable(HwpluginError):
    """The difference cannot be brought into a module that is already imported; the message says why."""


@dataclass(frozen=True, slots=True)
class FunctionChange:
    """A function or method with another text.

    ``scope`` names the classes around it; ``compiled`` says that objects of its class may hold graphs of it.
    """

    scope: tuple[str, ...]
    old: _Function
    new: _Function
    compiled: bool = False

    @property
    def name(self) -> str:
        return ".".join([*self.scope, self.old.name])


@dataclass(frozen=True, slots=True)
class Addition:
    """A function or class that only the new text has."""

    scope: tuple[str, ...]
    node: _Definition


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """All that has to happen to a live module."""

    functions: tuple[FunctionChange, ...]
    additions: tuple[Addition, ...]
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    class_lines: dict[tuple[str, ...], int]
    postponed_annotations: bool


def compare(old_text: str, new_text: str) -> ModuleChange:
    """Find what turns a live module with ``old_text`` into one with ``new_text``.

    Raises:
        NotSwappable: something that ran once, while the module was imported, is different.
        SyntaxError: one of the texts is no Python.
    """
    old, new = ast.parse(old_text), ast.parse(new_text)
    functions: list[FunctionChange] = []
    additions: list[Addition] = []
    class_lines: dict[tuple[str, ...], int] = {}
    _compare_scope((), old, new, functions, additions, class_lines)
    _refuse_captured(old, functions)
    imports = _new_imports(old, new)
    return ModuleChange(
        tuple(functions), tuple(additions), imports, class_lines, "annotations" in dict(_bindings(new, future=True))
    )


def first_line(node: _Definition) -> int:
    """The line that the compiler gives a definition: that of its first decorator."""
    return node.decorator_list[0].lineno if node.decorator_list else node.lineno


def _compare_scope(
    scope: tuple[str, ...],
    old: _Scope,
    new: _Scope,
    functions: list[FunctionChange],
    additions: list[Addition],
    class_lines: dict[tuple[str, ...], int],
) -> None:
    _compare_statements(scope, old, new)
    old_definitions, new_definitions = _definitions(old), _definitions(new)
    for key, node in old_definitions.items():
        if key not in new_definitions:
            raise NotSwappable(f"{_where(scope, node)} is removed, and others may hold it")
    for key, node in new_definitions.items():
        before = old_definitions.get(key)
        if before is None:
            _check_addition(scope, node)
            additions.append(Addition(scope, node))
        elif isinstance(node, ast.ClassDef) and isinstance(before, ast.ClassDef):
            _compare_class(scope, before, node, functions, additions, class_lines)
        elif isinstance(node, ast.ClassDef) or isinstance(before, ast.ClassDef):
            raise NotSwappable(f"{_where(scope, node)} is a class in one text and a function in the other")
        elif ast.dump(before) != ast.dump(node):
            change = FunctionChange(scope, before, node, _compiled(new))
            _check_function(change)
            _check_class_decorators(change, new)
            functions.append(change)


def _compare_class(
    scope: tuple[str, ...],
    old: ast.ClassDef,
    new: ast.ClassDef,
    functions: list[FunctionChange],
    additions: list[Addition],
    class_lines: dict[tuple[str, ...], int],
) -> None:
    inner = (*scope, new.name)
    class_lines[inner] = first_line(new)
    if ast.dump(old) == ast.dump(new):
        for node in _definitions(new).values():
            if isinstance(node, ast.ClassDef):
                _compare_class(inner, node, node, functions, additions, class_lines)
        return
    where = _where(scope, new)
    for part in ("bases", "keywords", "decorator_list", "type_params"):
        if _dumps(getattr(old, part, ())) != _dumps(getattr(new, part, ())):
            raise NotSwappable(f"{where} has other {part.replace('_', ' ')}, which were used when the class was made")
    for decorator in new.decorator_list:
        if _tail(decorator) not in _CLASS_DECORATORS:
            raise NotSwappable(f"{where} is decorated with @{ast.unparse(decorator)}, which may hold its methods' code")
    if getattr(new, "type_params", ()):
        raise NotSwappable(f"{where} has type parameters, whose scope cannot be entered again")
    _compare_scope(inner, old, new, functions, additions, class_lines)


def _compare_statements(scope: tuple[str, ...], old: _Scope, new: _Scope) -> None:
    """Statements that ran once must be the same ones in the same order."""
    before, after = _executed(old), _executed(new)
    for left, right in zip(before, after, strict=False):
        if ast.dump(left) != ast.dump(right):
            raise NotSwappable(_state(scope, right))
    if len(before) != len(after):
        longer = before if len(before) > len(after) else after
        raise NotSwappable(_state(scope, longer[min(len(before), len(after))]))


def _state(scope: tuple[str, ...], node: ast.stmt) -> str:
    level = f"the body of class {'.'.join(scope)}" if scope else "module level"
    return f"line {node.lineno} changes state at {level}: {ast.unparse(node).splitlines()[0]}"


def _executed(scope: _Scope) -> list[ast.stmt]:
    skipped = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    imports = ast.Import | ast.ImportFrom
    return [
        node
        for node in scope.body
        if not isinstance(node, skipped)
        and not (isinstance(scope, ast.Module) and isinstance(node, imports))
        and not _is_type_checking(node)
    ]


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and _tail(node.test) == "TYPE_CHECKING" and not node.orelse


def _definitions(scope: _Scope) -> dict[tuple[str, int], _Definition]:
    """Definitions by name and occurrence: a property and its setter share a name."""
    found: dict[tuple[str, int], _Definition] = {}
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            occurrence = sum(1 for name, _ in found if name == node.name)
            found[node.name, occurrence] = node
    return found


def _check_addition(scope: tuple[str, ...], node: _Definition) -> None:
    if not scope:
        return
    where = _where(scope, node)
    if isinstance(node, ast.ClassDef):
        raise NotSwappable(f"{where} is a new class inside a class, whose scope cannot be entered again")
    if node.name.startswith("__") and node.name.endswith("__"):
        raise NotSwappable(f"{where} is a new special method, which may change how the class was made")
    if getattr(node, "type_params", ()):
        raise NotSwappable(f"{where} has type parameters, whose scope cannot be entered again")
    if any(_tail(decorator) == "abstractmethod" for decorator in node.decorator_list):
        raise NotSwappable(f"{where} is a new abstract method, and the set of them was fixed when the class was made")


def _check_function(change: FunctionChange) -> None:
    where = _where(change.scope, change.new)
    if _dumps(change.old.decorator_list) != _dumps(change.new.decorator_list):
        raise NotSwappable(f"{where} has other decorators, which have already run")
    for decorator in change.new.decorator_list:
        written = ast.unparse(decorator)
        if _tail(decorator) not in _TRANSPARENT_DECORATORS and written not in _TRANSPARENT_METHODS:
            raise NotSwappable(f"{where} is decorated with @{written}, which may hold its old code")
    if type(change.old) is not type(change.new):
        raise NotSwappable(f"{where} is a coroutine in one text and not in the other")
    if change.old.name in _CLASS_CREATION_HOOKS:
        raise NotSwappable(f"{where} runs while classes are made, which is over")
    if getattr(change.old, "type_params", ()) or getattr(change.new, "type_params", ()):
        raise NotSwappable(f"{where} has type parameters, whose scope cannot be entered again")


def _check_class_decorators(change: FunctionChange, scope: _Scope) -> None:
    for decorator in scope.decorator_list if isinstance(scope, ast.ClassDef) else ():
        if change.old.name in _CLASS_DECORATORS[_tail(decorator)]:
            raise NotSwappable(f"{change.name} is held by @{ast.unparse(decorator)} of its class")


def _compiled(scope: _Scope) -> bool:
    decorators = scope.decorator_list if isinstance(scope, ast.ClassDef) else []
    return any(_tail(decorator) == COMPILING_DECORATOR for decorator in decorators)


def _refuse_captured(module: ast.Module, functions: Sequence[FunctionChange]) -> None:
    """A changed function that took part in a call at import time left a result of its old text behind.

    Told by names alone: whose method it is that `x.method()` calls, no text says.
    """
    makers = {change.scope[-1]: change for change in functions if change.scope and change.old.name in _MAKERS}
    others = {change.old.name: change for change in functions if change.old.name not in _MAKERS}
    calls = _calls_in(module)
    for node in _run_at_import(module):
        change = None
        if isinstance(node, ast.Attribute):
            change = others.get(node.attr)
            change = change if change is not None and _is_property(change.old) else None
        else:
            mentioned = {_tail(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)}
            called = _reached(_tail(node.func), calls)
            named = [*(others.get(name) for name in mentioned | called), *(makers.get(name) for name in called)]
            change = next((item for item in named if item is not None), None)
        if change is not None:
            raise NotSwappable(
                f"{change.name} was used while the module was imported, at line {node.lineno}: "
                f"{ast.unparse(node).splitlines()[0]}"
            )


# An object that was made at import time was made by the old text of these.
_MAKERS = frozenset({"__new__", "__init__", "__post_init__"})


def _is_property(function: _Function) -> bool:
    return any(_tail(decorator) in ("property", "cached_property", "getter") for decorator in function.decorator_list)


def _calls_in(module: ast.Module) -> dict[str, set[str]]:
    """Name -> what functions and methods of this name call; of a class, what making an object of it does."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            ran = [item for item in node.body if isinstance(item, _Function) and item.name in _MAKERS]
            found.setdefault(node.name, set()).update(_tail(base) for base in node.bases)
        elif isinstance(node, _Function) and node.name not in _MAKERS:
            ran = [node]
        else:
            continue
        for function in ran:
            calls = (_tail(inner.func) for inner in ast.walk(function) if isinstance(inner, ast.Call))
            found.setdefault(node.name, set()).update(calls)
    return found


def _reached(name: str, calls: Mapping[str, set[str]]) -> set[str]:
    """What a call of this name leads to, itself included."""
    found: set[str] = set()
    pending = {name}
    while pending:
        found |= pending
        pending = {inner for outer in pending for inner in calls.get(outer, ())} - found
    return found


def _run_at_import(module: ast.Module) -> Iterator[ast.Call | ast.Attribute]:
    """The calls that an import makes, and what it asks of objects."""
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call | ast.Attribute):
            yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # The body runs later. A decorator is a call of it with the function; those of a property only hold it.
            decorators = [item for item in node.decorator_list if _tail(item) not in ("setter", "getter", "deleter")]
            for decorator in decorators:
                yield ast.copy_location(ast.Call(func=decorator, args=[], keywords=[]), decorator)
            pending += [*decorators, *node.args.defaults, *(d for d in node.args.kw_defaults if d)]
        elif isinstance(node, ast.Lambda):
            pending += [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
        else:
            pending += ast.iter_child_nodes(node)


def _new_imports(old: ast.Module, new: ast.Module) -> tuple[ast.Import | ast.ImportFrom, ...]:
    known = dict(_bindings(old))
    if {name for name, _ in _bindings(old, future=True)} != {name for name, _ in _bindings(new, future=True)}:
        raise NotSwappable("the `from __future__` imports differ, and they rule how the whole module was compiled")
    wanted: list[ast.Import | ast.ImportFrom] = []
    for name, node in _bindings(new):
        before = known.get(name)
        if before is None:
            wanted.append(node)
        elif ast.dump(before) != ast.dump(node):
            raise NotSwappable(f"line {node.lineno} binds {name} to something else, and others may hold the old one")
    return tuple(wanted)


def _bindings(module: ast.Module, *, future: bool = False) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    """Name -> the import of that one name, for the imports at module level."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (node.module == "__future__") == future:
            for alias in node.names:
                single = ast.ImportFrom(module=node.module, names=[alias], level=node.level)
                yield alias.asname or alias.name, ast.copy_location(single, node)
        elif isinstance(node, ast.Import) and not future:
            for alias in node.names:
                # `import a.b` and `import a.c` both bind `a`, but each loads its own submodule.
                yield alias.asname or alias.name, ast.copy_location(ast.Import(names=[alias]), node)


def _tail(node: ast.expr) -> str:
    """The last name of a decorator or test: ``inference_mode`` for ``@torch.inference_mode()``."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _dumps(nodes: Iterable[ast.AST]) -> list[str]:
    return [ast.dump(node) for node in nodes]


def _where(scope: tuple[str, ...], node: _Definition) -> str:
    return f"{'.'.join([*scope, node.name])} (line {first_line(node)})"
