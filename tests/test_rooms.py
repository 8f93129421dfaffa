# SPDX-License-Identifier: Apache-2.0
"""Which part imports which: arrows go one way, and a package is used through its public modules."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "vllm_hwplugin"
WORKSHOP, LAB = f"{NAME}_workshop", f"{NAME}_lab"
ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for package in (NAME, WORKSHOP, LAB)
    for file in (ROOT / package).rglob("*.py")
}


def imported(module: str) -> Iterator[str]:
    """The modules of the three packages that a module imports, at its top or in a function."""
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            # `from package import thing`: the thing is a module, or a name in the package.
            known = name if name in MODULES else name.rpartition(".")[0]
            if known in MODULES:
                yield known


def room(module: str) -> str:
    """Of the plugin; the other packages are a room each."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == NAME else package


def test_no_package_imports_a_private_module_of_another() -> None:
    wrong = []
    for module in MODULES:
        for name in imported(module):
            parts = name.split(".")
            for depth, part in enumerate(parts):
                owner = ".".join(parts[:depth])
                if part.startswith("_") and not f"{module}.".startswith(f"{owner}."):
                    wrong.append(f"{module} imports {name}, which is private to {owner}")
    assert wrong == []


ROOMS = {room(module) for module in MODULES} - {WORKSHOP, LAB}


@pytest.mark.parametrize(
    ("importer", "allowed"),
    [
        # The plugin needs neither of the other packages, nor do they need each other; the command line finds their
        # commands by name.
        *(
            (importer, ROOMS)
            for importer in sorted(ROOMS - {"base", "patching", "spec_decode", "nwor", "attention", "ops"})
        ),
        *((importer, {importer, *ROOMS}) for importer in (WORKSHOP, LAB)),
        ("base", {"base", ""}),
        ("patching", {"patching", "base", ""}),
        # What is patched in knows nothing of patching.
        *((importer, ROOMS - {"patching"}) for importer in ("spec_decode", "nwor", "attention", "ops")),
    ],
)
def test_what_a_room_may_import(importer: str, allowed: set[str]) -> None:
    arrows = {
        room(name): f"{module} imports {name}"
        for module in MODULES
        if room(module) == importer
        for name in imported(module)
    }
    assert arrows.keys() <= allowed, [text for name, text in arrows.items() if name not in allowed]
    assert arrows or importer not in {"base", "patching", "spec_decode", "nwor", "attention", "ops", WORKSHOP, LAB}


def test_arrows_go_one_way() -> None:
    """No room needs, by whatever way, one that needs it."""
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        # The package itself is not a room: it has the version, which everybody may ask.
        needs.setdefault(room(module), set()).update(room(name) for name in imported(module) if room(name))
    needs = {name: others - {name} for name, others in needs.items() if name}
    assert needs["dflash"] >= {"patching", "spec_decode"}, "the test looks in the wrong place"
    order: list[str] = []
    while lowest := [name for name, others in needs.items() if name not in order and others <= {*order}]:
        order += lowest
    assert needs.keys() - order == set(), {name: needs[name] - {*order} for name in needs.keys() - order}


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        # Each process of vLLM imports it, also those without the plugin.
        ("import vllm_hwplugin.plugin", ("vllm_hwplugin.base", "vllm_hwplugin.patching", "packaging", "torch")),
        ("import vllm_hwplugin.base.gates", ("packaging", "tomli", "torch", "numpy")),
        ("import vllm_hwplugin.patching as p; p.load_catalogue()", ("torch", "rich", "typer", "requests", "numpy")),
        ("import vllm_hwplugin.ops.overrides", ("torch",)),
        ("import vllm_hwplugin.attention.capabilities", ("torch",)),
        ("from vllm_hwplugin.plugin import platform; assert platform() is None", ("torch", "vllm_hwplugin.patch")),
    ],
)
def test_what_every_start_imports_is_light(code: str, left_out: tuple[str, ...]) -> None:
    program = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert [name for name in loaded if name.startswith((*left_out, "vllm.")) or name == "vllm"] == []
    assert [name for name in loaded if name.startswith("vllm_hwplugin")]


def test_errors_have_one_root() -> None:
    """The command line tells what the project says on purpose from a fault of its own by that."""
    roots = {name for name, item in vars(builtins).items() if isinstance(item, type) and issubclass(item, Exception)}
    wrong = []
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or module == f"{NAME}.base.errors":
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if bases & roots and "HwpluginError" not in bases:
                wrong.append(f"{module}.{node.name}")
    assert wrong == []


def test_a_feature_is_looked_for_under_its_name() -> None:
    """Where a feature's hunks call the plugin, a module or a package has its name; V1's and V2's have rooms for it."""
    nameless = []
    for folder in sorted(file.parent for file in (ROOT / "patches").rglob("patch.toml")):
        added = "".join(line for diff in folder.glob("*.diff") for line in diff.open() if line.startswith("+"))
        called = set(re.findall(rf"from {NAME}\.([\w.]+) import", added))
        name = folder.name.replace("-", "_").removeprefix("backport_")
        inside = folder.parent.name != "patches"
        path = re.sub(r"^(v[12])_", rf"{folder.parent.name}." if inside else r"spec_decode.\1.", name)
        if called and not any(f".{path}." in f"{module}." for module in MODULES):
            nameless.append(f"{folder.name} has no module {path}; its hunks import {', '.join(sorted(called))}")
    assert nameless == []


def test_no_file_is_too_long_to_be_read_at_a_sitting() -> None:
    files = [
        file
        for folder in (NAME, WORKSHOP, LAB, "benchmarks", "csrc", "tests")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cu", ".cuh", ".h", ".cpp") and "assets" not in file.parts
    ]
    assert len(files) > len(MODULES)
    assert [str(file) for file in files if file.read_bytes().count(b"\n") > 700] == []
