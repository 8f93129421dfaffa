# SPDX-License-Identifier: Apache-2.0
"""Check of a class's text against the overrides that were written for it.

A hunk changes one call. An override answers every call of a method, also calls that a later version adds. So a feature
declares who calls what it overrides, in what order, and is refused if the class calls it elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ._model import Overridden

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def misfits(override: Overridden, module: ast.Module) -> Iterator[str]:
    """Yield how a module's class differs from the declared one."""
    classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == override.owner]
    if len(classes) != 1 or classes[0] not in module.body:
        yield f"{override.path} has {len(classes)} classes {override.owner}, expected one at module level"
        return
    (owner,) = classes
    # An override makes a subclass, or another class than the body means.
    named = [node for node in ast.walk(module) if isinstance(node, ast.Name) and node.id == override.owner]
    if not {*named}.isdisjoint(ast.walk(owner)):
        yield f"{override.owner} names itself"
    if any(isinstance(node.ctx, ast.Store) for node in named):
        yield f"{override.path} gives the name {override.owner} to something else, too"
    functions = [node for node in owner.body if isinstance(node, _Function)]
    for name, expected in override.methods.items():
        yield from (f"{override.owner}.{name} {trouble}" for trouble in _changed(name, expected, functions))
    yield from (
        f"{override.owner} has no {name}" for name in override.calls if name not in {node.name for node in functions}
    )
    watched = {f"self.{name}" for name in override.methods} | {
        name for calls in override.calls.values() for name in _all(calls)
    }
    for node in owner.body:
        name = node.name if isinstance(node, _Function) else "the class body"
        expected_calls = override.calls.get(name, ())
        calls = _uses(node, watched)
        if name not in override.also and not _alike(calls, expected_calls):
            yield (
                f"in {override.owner}, {name} uses {', '.join(calls) or 'nothing'} of what is overridden, expected "
                f"{', '.join(expected_calls) or 'nothing'}"
            )


def _all(calls: Sequence[str]) -> Iterator[str]:
    for call in calls:
        yield from call.split("|")


def _changed(name: str, expected: str, functions: Sequence[_Function]) -> Iterator[str]:
    """Yield why no plain method of this name takes the expected parameters."""
    methods = [node for node in functions if node.name == name]
    if len(methods) != 1:
        yield f"is defined {len(methods)} times, expected once"
        return
    (method,) = methods
    if isinstance(method, ast.AsyncFunctionDef) or method.decorator_list:
        decorators = [f"@{ast.unparse(node)}" for node in method.decorator_list]
        yield f"is {', '.join(decorators) or 'async'}, expected a plain method"
    parameters = _parameters(method.args)
    if not _accepts(expected.split(", "), parameters):
        yield f"takes ({', '.join(parameters)}), expected ({expected})"


def _parameters(arguments: ast.arguments) -> list[str]:
    """Return the parameters as a signature spells them, without defaults."""
    positional = [node.arg for node in arguments.posonlyargs]
    names = [*positional, *(["/"] if positional else []), *(node.arg for node in arguments.args)]
    if arguments.vararg is not None or arguments.kwonlyargs:
        names.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    names += [node.arg for node in arguments.kwonlyargs]
    return names if arguments.kwarg is None else [*names, f"**{arguments.kwarg.arg}"]


def _accepts(expected: Sequence[str], parameters: Sequence[str]) -> bool:
    """Whether parameters are as expected; `...` stands for any number."""
    if not expected:
        return not parameters
    if expected[0] == "...":
        return any(_accepts(expected[1:], parameters[start:]) for start in range(len(parameters) + 1))
    return parameters[:1] == expected[:1] and _accepts(expected[1:], parameters[1:])


def _alike(calls: Sequence[str], expected: Sequence[str]) -> bool:
    return len(calls) == len(expected) and all(
        call in names.split("|") for call, names in zip(calls, expected, strict=True)
    )


def _uses(node: ast.AST, watched: set[str]) -> list[str]:
    """Return the watched expressions of a method, in text order."""
    local: dict[str, set[str]] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign | ast.NamedExpr) and inner.value is not None:
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    local.setdefault(target.id, set()).add(_dotted(inner.value))
    uses: list[tuple[int, int, str]] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute | ast.Call):
            head, _, rest = _dotted(inner).partition(".")
            # `speculator = self.speculator` is no way around it.
            names = watched & {f"{name}.{rest}" for name in (head, *local.get(head, ()))}
            uses += [(inner.lineno, inner.col_offset, name) for name in names]
    return [name for *_, name in sorted(uses)]


def _dotted(node: ast.expr) -> str:
    """Return `self.a.b`, also for `getattr(self.a, "b")`; empty for other nodes."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            pass
        case ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str(name)), *_]):
            pass
        case _:
            return ""
    head = _dotted(inner)
    return f"{head}.{name}" if head else ""
