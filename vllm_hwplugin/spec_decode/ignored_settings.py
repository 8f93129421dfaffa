# SPDX-License-Identifier: Apache-2.0
"""Find settings of `--speculative-config` that only the other model runner reads.

vLLM takes each field of `SpeculativeConfig` on either runner, and does not warn if the runner has no code for it. The
text of the two runners answers: a field is ignored if a module of the other runner reads it, and no module of the
chosen runner does. No module is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Final

#: Text of a module by its path in vLLM; None if there is no such module.
Read = Callable[[str], "str | None"]

_RUNNERS: Final = {False: "vllm.v1.worker.gpu_model_runner", True: "vllm.v1.worker.gpu.model_runner"}
# Modules outside these packages belong to both runners.
_OF_A_RUNNER: Final = ("vllm.v1.worker.", "vllm.v1.spec_decode.")
_CONFIG: Final = "vllm/config/speculative.py"
# The scheduler reads this setting, and passes its decision to the runner under another name.
_HANDED_ON: Final = {"num_speculative_tokens_per_batch_size": "num_spec_tokens_to_schedule"}


def ignored(fields: Iterable[str], *, v2: bool, read: Read) -> tuple[str, ...]:
    """Return the fields of `SpeculativeConfig` that only the other runner reads."""
    chosen, other = (_names_read(_RUNNERS[runner], _RUNNERS[not runner], read) for runner in (v2, not v2))
    config = ast.parse(read(_CONFIG) or "")
    through, handed_over = _methods_that_read(config), _handed_over(config)

    def reads(names: frozenset[str], field: str) -> bool:
        handed_on = _HANDED_ON.get(field)
        if handed_on is not None:
            return handed_on in names
        return field in names | handed_over or not names.isdisjoint(through.get(field, ()))

    return tuple(field for field in fields if reads(other, field) and not reads(chosen, field))


def _names_read(root: str, without: str, read: Read) -> frozenset[str]:
    """Return every attribute and string name that a runner's modules read."""
    # A module may import a helper of the other runner's, `without`.
    names: set[str] = set()
    seen = {without}
    queue = [root]
    while queue:
        module = queue.pop()
        if module in seen:
            continue
        seen.add(module)
        path = module.replace(".", "/")
        package = False
        text = read(f"{path}.py")
        if text is None:
            text, package = read(f"{path}/__init__.py"), True
        if text is None:
            continue
        for node in ast.walk(ast.parse(text)):
            names |= _named(node)
            queue += [name for name in _imported(node, module, package) if name.startswith(_OF_A_RUNNER)]
    return frozenset(names)


def _named(node: ast.AST) -> set[str]:
    """Return the attribute that a node reads or names in a string."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return {node.attr}
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return {node.value}
    return set()


def _imported(node: ast.AST, module: str, package: bool) -> list[str]:
    """Return the modules that an import statement may load."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = module.split(".") if package else module.split(".")[:-1]
        base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _handed_over(module: ast.Module) -> set[str]:
    """Return the fields that become fields of the draft's own configurations."""
    made = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Config")
    ]
    return {name for call in made for keyword in call.keywords for name in _named(keyword.value)}


def _methods_that_read(module: ast.Module) -> dict[str, set[str]]:
    """Return by field the methods of `SpeculativeConfig` that read it, also indirectly."""
    reads: dict[str, set[str]] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            # A table of fields, such as those for a draft's configuration.
            reads[node.targets[0].id] = {name for part in ast.walk(node.value) for name in _named(part)}
        elif isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig":
            for method in node.body:
                # A method that checks or completes a configuration makes nothing of a setting.
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    inside = list(ast.walk(method))
                    reads[method.name] = {name for part in inside for name in _named(part)}
                    reads[method.name] |= {part.id for part in inside if isinstance(part, ast.Name)}
    through: dict[str, set[str]] = {}
    for start in reads:
        reached, queue = set[str](), [start]
        while queue:
            for name in reads.get(queue.pop(), set()) - reached:
                reached.add(name)
                queue.append(name)
        for field in reached:
            through.setdefault(field, set()).add(start)
    return through
