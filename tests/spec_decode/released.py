# SPDX-License-Identifier: Apache-2.0
"""Parts of the released text of a vLLM version, with the project's patches or without, as things that can be called.

The versions do not run beside the installed one, so single functions and classes of them are executed, with stand-ins
for the names that they use.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Mapping
from typing import Any, Final

from vllm_hwplugin.patching import load_catalog, make_plan

#: A feature with modes is off where none is asked for, and here are no caches that it could look at.
WITHOUT_MODES: Final = {"VLLM_HWPLUGIN_NWOR_MODE": "off"}


@functools.cache
def text_of(tree: Any, path: str, **choices: str) -> str:
    """The text of one module after all features were applied that `choices` (gate -> value) leaves on."""
    plan = make_plan(load_catalog(version=tree.version), tree, {**WITHOUT_MODES, **choices})
    assert plan.errors == ()
    patched = plan.files.get(path)
    text = patched.text if patched is not None else tree.read(path)
    assert text is not None, f"vLLM {tree.version} has no {path}"
    return text


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
