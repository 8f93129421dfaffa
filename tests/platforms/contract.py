# SPDX-License-Identifier: Apache-2.0
"""Does a platform class keep the contract of a version of vLLM's ``Platform``? Faults as sentences."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

# What `Platform` leaves to each platform by a value that stands for "none".
PLACEHOLDERS = ("dispatch_key", "ray_device_key", "device_control_env_var", "dist_backend")


def overrides(own: type) -> dict[str, Any]:
    """The names that the class itself defines, without what Python and typing add."""
    return {name: value for name, value in vars(own).items() if not (name.startswith("__") and name.endswith("__"))}


def faults(own: type, platform: type, others: Iterable[type] = (), later: Iterable[str] = ()) -> list[str]:
    """What is wrong with the overrides of ``own``.

    Args:
        own: the plugin's class.
        platform: that version's ``Platform``.
        others: that version's other platform classes, for what callers ask of a platform by its kind.
        later: names that a later supported version asks for.
    """
    found = []
    for name, value in overrides(own).items():
        homes = [base for base in (platform, *others) if name in vars(base)]
        annotated = any(name in vars(base).get("__annotations__", {}) for base in (platform, *others))
        if not homes:
            if not annotated and name not in later:
                found.append(f"{name}: no platform of this version has it")
            continue
        theirs = vars(homes[0])[name]
        if _shape(value) != _shape(theirs):
            found.append(f"{name}: is {_shape(value)}, expected {_shape(theirs)}")
    return found


def not_given(own: type, text: str, platform: type) -> list[str]:
    """Members that a version's ``Platform`` has no usable default for, and ``own`` does not give."""
    (tree,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "Platform"]
    needed = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(_refuses(statement) for statement in node.body)
    ]
    needed += [
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value is None  # type: ignore[union-attr]
    ]
    given = [name for base in own.__mro__ if base not in platform.__mro__ for name in vars(base)]
    missing = [name for name in [*needed, "get_attn_backend_cls"] if name not in given]
    return missing + [name for name in PLACEHOLDERS if getattr(own, name) == getattr(platform, name)]


def _refuses(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement)


def _shape(member: Any) -> str:
    """Kind and parameters: what a caller of the member relies on. Annotations and default values are not part of it."""
    if isinstance(member, classmethod | staticmethod):
        # A cached function keeps its parameters in what it wraps.
        function = inspect.unwrap(member.__func__)
        return f"{type(member).__name__} {_parameters(function)}"
    if isinstance(member, FunctionType):
        return f"method {_parameters(member)}"
    return "property" if isinstance(member, property) else "attribute"


def _parameters(function: Any) -> list[tuple[str, str, bool]]:
    return [
        (item.name, item.kind.name, item.default is not item.empty)
        for item in inspect.signature(function).parameters.values()
    ]
