# SPDX-License-Identifier: Apache-2.0
"""What the sources declare as weak is there once a library for MUSA is linked and loaded. Not run on MUSA hardware."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_hwplugin.ops.compile import ahead, built, jit, port, torch_build
from vllm_hwplugin.ops.compile.port import Port
from vllm_hwplugin.ops.compile.spec import KERNELS, KernelSpec, KernelUnavailable, source_root
from vllm_hwplugin.ops.compile.torch_build import TorchBuild

from ...conftest import cannot_run
from .vendor import GETTER, make, weak_declarations

PORTED = [spec for spec in KERNELS.values() if "mcc" not in spec.excluded]

# As torch_musa's extension is loaded: for itself alone, before any kernel.
PROGRAM = """
import ctypes, json, sys
*before, path = sys.argv[1:]
kept = [ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL) for library in before]
library = ctypes.CDLL(path)
library.address.restype = ctypes.c_void_p
stream = ctypes.c_void_p()
null = [number for number in range(library.count()) if not library.address(number)]
print(json.dumps([null, None if null else [library.stream(3, ctypes.byref(stream)), stream.value]]))
"""


def _probe(declarations: dict[str, str], getter: str) -> str:
    """A source with the declarations of a common header, that tells where each symbol is, and calls the one for the
    stream."""
    addresses = ", ".join(f"reinterpret_cast<void*>(&{name})" for name in declarations)
    return "\n".join(
        [
            '#include "common/symbols.h"',
            f"static void* const addresses[] = {{{addresses}}};",
            f'extern "C" int count() {{ return {len(declarations)}; }}',
            'extern "C" void* address(int number) { return addresses[number]; }',
            f'extern "C" int stream(int device, void** out) {{ return {getter}(device, out); }}',
            'extern "C" int musaGetLastError();',
            'extern "C" int status() { return musaGetLastError(); }',
            "",
        ]
    )


@pytest.mark.usefixtures("own_cache", "ninja")
def test_no_weak_symbol_of_the_sources_stays_null(
    kernel: KernelSpec, csrc: Path, torch_musa: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None or shutil.which("c++") is None:
        cannot_run("there is no C compiler for stub libraries")
    declarations: dict[str, str] = {}
    for spec in PORTED:
        for folder in spec.folders:
            for path in (path for path in (source_root() / folder).rglob("*") if path.is_file()):
                declarations |= weak_declarations(path.read_text())
    assert declarations, "no kernel takes the current stream by a weak symbol"
    host = tmp_path / "host"
    libraries = make(host)
    monkeypatch.setenv("MUSA_HOME", str(host / "musa"))
    rules = Port("a table", tuple((name, name.replace("cuda", "musa")) for name in declarations))
    monkeypatch.setattr(port, "installed_rules", lambda: rules)
    getter = GETTER.replace("musa", "cuda")
    (csrc / "common").mkdir()
    (csrc / "common" / "symbols.h").write_text(
        "\n".join(["#include <cstdint>", "using AOTITorchError = int32_t;", *declarations.values(), ""])
    )
    (csrc / kernel.name / "sample.cu").write_text(_probe(declarations, getter))
    torch = dataclasses.replace(torch_musa, root=host / "torch", musa_root=host / "torch_musa")
    library = jit.provide(kernel, torch)
    command = [sys.executable, "-c", PROGRAM, *map(str, libraries), str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], [0, 0x1003]], list(declarations)


@pytest.mark.usefixtures("own_cache", "ninja")
def test_a_library_that_was_built_ahead_is_taken_on_a_host_with_its_devices(
    kernel: KernelSpec, csrc: Path, torch_musa: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installation, then a start: on the host that it was built for, and on others."""
    if shutil.which("cc") is None or shutil.which("c++") is None:
        cannot_run("there is no C compiler for stub libraries")
    host = tmp_path / "host"
    make(host)
    torch = dataclasses.replace(torch_musa, root=host / "torch", musa_root=host / "torch_musa")
    monkeypatch.setenv("MUSA_HOME", str(host / "musa"))
    monkeypatch.delenv("MTGPU_TARGET", raising=False)
    monkeypatch.setenv("TORCH_MUSA_ARCH_LIST", "31;32")
    monkeypatch.setattr(port, "installed_rules", lambda: Port("a table", ()))
    monkeypatch.setattr(torch_build, "installed", lambda: torch)
    monkeypatch.setattr(ahead, "KERNELS", {kernel.name: kernel})
    said: list[str] = []
    (library,) = ahead.build_all(built.prebuilt_folder(), csrc, said.append)
    monkeypatch.delenv("TORCH_MUSA_ARCH_LIST")
    # A host that only runs has no compiler.
    shutil.rmtree(host / "musa" / "bin")
    assert jit.provide(kernel, torch) == library, said
    assert jit.provide(kernel, dataclasses.replace(torch, capabilities=((3, 2), (3, 1)))) == library
    for other in (2, 2), (3, 3):
        with pytest.raises(KernelUnavailable, match="no mcc in MUSA_HOME"):
            jit.provide(kernel, dataclasses.replace(torch, capabilities=((3, 1), other)))


def test_torch_musa_is_found_where_torch_says_that_it_serves_musa(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    # A number, as the toolkit's header has it: not a version with dots.
    monkeypatch.setattr(torch.version, "musa", "50100", raising=False)
    monkeypatch.setitem(sys.modules, "torch_musa", None)
    with pytest.raises(KernelUnavailable, match="torch_musa cannot be imported"):
        torch_build.installed(((3, 1),))
    package = ModuleType("torch_musa")
    package.__file__ = str(tmp_path / "torch_musa" / "__init__.py")
    monkeypatch.setitem(sys.modules, "torch_musa", package)
    found = torch_build.installed(((3, 1),))
    assert (found.toolchain, found.musa, found.musa_root) == ("mcc", "50100", tmp_path / "torch_musa")
