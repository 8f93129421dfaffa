# SPDX-License-Identifier: Apache-2.0
"""Building at first use: once, under a lock, in a cache that is trusted; and what happens where it cannot be."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from tests.cpu_seconds import patience, wait_until
from vllm_hwplugin.base import cachedir
from vllm_hwplugin.ops.compile import built, jit, toolchain, torch_build
from vllm_hwplugin.ops.compile.ninja import build
from vllm_hwplugin.ops.compile.plan import BuildPlan
from vllm_hwplugin.ops.compile.spec import KernelSpec, KernelUnavailable
from vllm_hwplugin.ops.compile.torch_build import TorchBuild

from ..forked import said_by_a_fork

MakePlan = Callable[..., BuildPlan]
Provide = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("ninja")


def test_the_first_call_builds_and_the_next_finds(provide: Provide, own_cache: Path, nvcc: Any, plan: MakePlan) -> None:
    library = provide()
    assert library.read_text() == "built\n"
    assert library.parent == own_cache / "kernels" / f"sample-{plan().key}"
    assert len(nvcc.calls) == 2
    assert provide() == library
    assert len(nvcc.calls) == 2
    assert sorted(path.name for path in library.parent.iterdir()) == ["built.json", "lock", "sample.so"]


@pytest.mark.parametrize("listed", ["8.0", "7.0 8.0 9.0", "Hopper"])
def test_at_first_use_a_library_is_for_the_devices_whatever_is_listed_for_builds_ahead(
    provide: Provide, nvcc: Any, listed: str
) -> None:
    """The list is often left over from another build; code for another device than this ends the engine."""
    library = provide({**os.environ, "TORCH_CUDA_ARCH_LIST": listed})
    assert [call.count("-gencode") for call in nvcc.calls] == [1, 0]
    found = built.read_cached(library.parent)
    assert found is not None
    assert found.runs_on((9, 0))
    assert provide() == library


def test_what_runs_on_other_devices_is_neither_taken_from_the_cache_nor_after_a_build(
    provide: Provide, nvcc: Any, plan: MakePlan
) -> None:
    record = provide().parent / "built.json"
    whole = record.read_text()
    record.write_text(whole.replace("sm_90", "sm_80"))
    count = len(nvcc.calls)
    provide()
    assert len(nvcc.calls) == 2 * count
    assert record.read_text() == whole
    with pytest.raises(KernelUnavailable, match=r"sm_80 does not run on every device here, which are 9\.0"):
        jit.build_once(plan(environ={"TORCH_CUDA_ARCH_LIST": "8.0"}, ahead=True), os.environ)


def test_what_the_compiler_takes_from_its_surroundings_makes_another_library(provide: Provide, tmp_path: Path) -> None:
    """A flag in a variable of one process, such as --use_fast_math, is not for those that follow."""
    other = tmp_path / "other" / "gcc"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho gcc 99\n")
    other.chmod(0o755)
    path = os.environ["PATH"]
    surroundings = (
        {},
        {"NVCC_APPEND_FLAGS": "--use_fast_math"},
        {"NVCC_PREPEND_FLAGS": "--use_fast_math"},
        {"NVCC_CCBIN": str(other)},
        {"PATH": f"{other.parent}:{path}", "NVCC_APPEND_FLAGS": "-g"},
        {"PATH": path, "NVCC_APPEND_FLAGS": "-g"},
    )
    libraries = {provide({**os.environ, **one}) for one in surroundings}
    assert len(libraries) == len(surroundings)


@pytest.fixture
def together(nvcc: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None], int], None]:
    """`together(ask, count)` asks in so many threads; the compiler goes on when all of them wait for the lock."""
    waiting: list[Path] = []
    locked = jit._locked

    def noted(path: Path) -> Any:
        waiting.append(path)
        # Each opens the lock file for itself, as processes do.
        return locked(path)

    def run(ask: Callable[[], None], count: int) -> None:
        waiting.clear()
        nvcc.set("held")
        threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in threads:
            thread.start()
        all_wait = wait_until(lambda: len(waiting) == count, 30)
        nvcc.set("held", False)
        for thread in threads:
            thread.join()
        assert all_wait

    monkeypatch.setattr(jit, "_locked", noted)
    return run


def test_of_many_that_ask_one_builds(provide: Provide, nvcc: Any, together: Any) -> None:
    libraries: list[Path] = []
    together(lambda: libraries.append(provide()), 4)
    assert len(libraries) == 4
    assert len(set(libraries)) == 1
    assert len(nvcc.calls) == 2


def test_who_waits_too_long_says_so(own_cache: Path, plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_cache / "kernels" / f"sample-{plan().key}"
    folder.mkdir(parents=True)
    for made in (own_cache, own_cache / "kernels", folder):
        made.chmod(0o700)
    monkeypatch.setattr(jit, "WAIT", 0.1)
    with (
        jit._locked(folder / "lock"),
        pytest.raises(KernelUnavailable, match=r"another process has been building in .*"),
    ):
        jit.build_once(plan(), os.environ)


def test_who_has_waited_for_a_build_that_failed_does_not_repeat_it(provide: Provide, nvcc: Any, together: Any) -> None:
    nvcc.set("broken")
    said: list[str] = []

    def ask() -> None:
        with pytest.raises(KernelUnavailable) as failure:
            provide()
        said.append(str(failure.value))

    for _ in range(2):
        together(ask, 3)
    # Once at each start.
    assert len(nvcc.calls) == 2
    assert sum("another process's build failed just now" in one for one in said) == 4
    assert all("the compiler is broken" in one for one in said)
    nvcc.set("broken", False)
    assert provide().exists()


def test_a_compiler_that_hangs_is_ended_with_all_that_ninja_started(
    provide: Provide, nvcc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As some releases of pip's ninja are.
    script = tmp_path / "scripts" / "ninja"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\n{toolchain.find_tool("ninja", os.environ)} "$@"\nexit $?\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    # Ninja has to have started it by then.
    monkeypatch.setattr(jit, "WAIT", patience(3))
    nvcc.set("hangs")
    with pytest.raises(KernelUnavailable, match=r"nvcc took more than [\d.]+ s over sample"):
        provide()
    compiler = int(nvcc.path.with_name("hangs").read_text())

    def is_gone() -> bool:
        try:
            return " Z " in Path(f"/proc/{compiler}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    assert wait_until(is_gone, 2), "the compiler runs on"


@pytest.mark.parametrize("status", ["signal", "139", "254"])
def test_a_compiler_that_crashes_runs_once_more_without_optional_flags(
    own_cache: Path, plan: MakePlan, torch_musa: TorchBuild, nvcc: Any, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By a signal; or as clang's driver ends when its compiling process was ended by one."""
    nvcc.path.with_name("dies").write_text("kill -SEGV $$" if status == "signal" else f"exit {status}")
    made = plan(toolchain=toolchain.Toolchain("mcc", str(nvcc.path), Version("5.1.0")), torch=torch_musa)
    library = jit.build_once(made, os.environ)
    assert ["load-cluster" in call for call in nvcc.calls] == [True, False, False]
    found = built.read_cached(library.parent)
    assert found is not None
    assert not any("load-cluster" in flag for flag in found.flags)
    assert "did not build sample" in caplog.text
    assert "again without optional flags" in caplog.text
    assert jit.build_once(made, os.environ) == library
    assert len(nvcc.calls) == 3


def test_a_compiler_that_refuses_the_source_does_not_run_again(
    own_cache: Path, plan: MakePlan, torch_musa: TorchBuild, nvcc: Any
) -> None:
    nvcc.set("broken")
    made = plan(toolchain=toolchain.Toolchain("mcc", str(nvcc.path), Version("5.1.0")), torch=torch_musa)
    with pytest.raises(KernelUnavailable, match="the compiler is broken"):
        jit.build_once(made, os.environ)
    assert len(nvcc.calls) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_file_systems_that_keep_no_locks_are_passed_over(
    provide: Provide, own_cache: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: Any, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(jit.fcntl, "flock", flock)
    with pytest.raises(KernelUnavailable, match=f"{own_cache}.*: .*{os.strerror(number)}.*set VLLM_HWPLUGIN_CACHE_DIR"):
        provide()


def test_a_library_that_is_not_whole_is_built_again(provide: Provide, nvcc: Any) -> None:
    library = provide()
    os.truncate(library, 2)
    assert provide().read_text() == "built\n"
    assert len(nvcc.calls) == 4


def test_a_build_that_was_cut_off_is_done_again(provide: Provide, nvcc: Any) -> None:
    library = provide()
    (library.parent / "built.json").unlink()
    (library.parent / "building").mkdir()
    (library.parent / "building" / "sample.so").write_text("half")
    library.write_text("half")
    assert provide() == library
    assert library.read_text() == "built\n"
    assert len(nvcc.calls) == 4


def test_a_folder_that_others_can_write_to_is_not_loaded_from(provide: Provide, tmp_path: Path) -> None:
    library = provide()
    library.parent.chmod(0o777)
    elsewhere = provide()
    assert elsewhere.is_relative_to(tmp_path / "temporary")


def test_a_read_only_cache_serves_what_it_has_and_the_other_place_builds(
    provide: Provide, own_cache: Path, tmp_path: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = provide()
    (own_cache / "kernels").chmod(0o500)
    # Root may write all the same, so it is told otherwise.
    monkeypatch.setattr(os, "access", lambda path, mode, **how: not Path(path).is_relative_to(own_cache))
    assert provide() == library
    (csrc / "sample" / "sample.cu").write_text("// changed\n")
    assert provide().is_relative_to(tmp_path / "temporary")
    (own_cache / "kernels").chmod(0o700)


def test_a_place_that_no_library_can_be_loaded_from_is_passed_over(
    provide: Provide, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachedir, "SHARED_MEMORY", tmp_path / "none")
    noexec = [own_cache]
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC * any(one in path.parents for one in noexec))
    )
    assert provide().is_relative_to(tmp_path / "temporary")
    shutil.rmtree(tmp_path / "temporary")
    noexec.append(tmp_path / "temporary")
    with pytest.raises(KernelUnavailable, match="mounted noexec"):
        provide()


def test_a_failure_is_one_warning_with_what_it_costs(
    own_cache: Path,
    kernel: KernelSpec,
    torch_cuda: TorchBuild,
    nvcc: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: torch_cuda)
    nvcc.set("broken")
    with caplog.at_level(logging.INFO, "vllm.hwplugin"):
        monkeypatch.setattr(logging.getLogger("vllm.hwplugin"), "propagate", True)
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        assert [jit.ensure(kernel) for _ in range(3)] == [False] * 3
    (warning,) = [item.getMessage() for item in caplog.records if item.levelno >= logging.WARNING]
    assert warning.startswith("the kernel sample is not used: ")
    assert "error: the compiler is broken" in warning
    assert warning.endswith("Without it, it is slow.")


def test_a_process_forked_while_another_thread_builds_does_not_wait_for_it(
    kernel: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "_try_load", lambda spec: True)
    with jit._lock:
        assert said_by_a_fork(lambda: str(jit.ensure(kernel)), 30) == "True"


def test_a_library_that_cannot_be_loaded_is_a_failure_too(
    own_cache: Path, kernel: KernelSpec, torch_cuda: TorchBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(torch_build, "installed", lambda: torch_cuda)
    # The fake compiler's library is a line of text.
    assert jit.ensure(kernel) is False


def test_a_library_of_the_wheel_is_taken_where_it_suits(
    provide: Provide, plan: MakePlan, kernel: KernelSpec, torch_cuda: TorchBuild, nvcc: Any, csrc: Path
) -> None:
    folder = built.prebuilt_folder() / kernel.name
    folder.mkdir(parents=True)
    library = build(plan(), folder, os.environ)
    count = len(nvcc.calls)
    later = dataclasses.replace(torch_cuda, version=Version("2.14.0+cu131"), cuda="13.1")
    assert provide() == jit.provide(kernel, later) == library
    assert len(nvcc.calls) == count

    def suits(**changes: Any) -> bool:
        torch = dataclasses.replace(torch_cuda, **changes)
        return jit.find_prebuilt(kernel, torch, built.prebuilt_folder(), csrc) is not None

    assert suits()
    assert not suits(cuda="12.8")
    assert not suits(cuda=None, musa_root=csrc)
    assert not suits(capabilities=((9, 0), (8, 0)))
    assert not suits(capabilities=())
    (csrc / kernel.name / "sample.cu").write_text("// changed\n")
    assert not suits()


# -- whether a kernel can be had, asked before it is needed ------------------------------------------------------------


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch, torch_cuda: TorchBuild) -> None:
    """PyTorch is one for CUDA whose devices must not be asked for."""

    def installed(capabilities: Any = None) -> TorchBuild:
        assert capabilities is not None
        return dataclasses.replace(torch_cuda, capabilities=capabilities)

    monkeypatch.setattr(torch_build, "installed", installed)


@pytest.mark.usefixtures("no_device")
def test_a_kernel_that_can_be_built_has_no_obstacle_and_is_not_built(
    own_cache: Path, kernel: KernelSpec, nvcc: Any
) -> None:
    assert jit.obstacle(kernel, (9, 0)) == ""
    assert jit.obstacle(dataclasses.replace(kernel, cuda_arch=("9.0a",)), (9, 0)) == ""
    assert nvcc.calls == []
    assert not own_cache.exists()


@pytest.mark.usefixtures("no_device")
def test_without_a_compiler_only_a_library_of_the_wheel_is_no_obstacle(
    own_cache: Path, kernel: KernelSpec, plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = built.prebuilt_folder() / kernel.name
    folder.mkdir(parents=True)
    build(plan(), folder, os.environ)
    monkeypatch.setattr(toolchain, "HOMES", {"nvcc": (("CUDA_HOME",), str(tmp_path / "nowhere"))})
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert jit.obstacle(kernel, (9, 0)) == ""
    assert jit.obstacle(kernel, (8, 0)).startswith("no nvcc in CUDA_HOME, on PATH or in")


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
    assert (found.toolchain, found.musa_root) == ("mcc", tmp_path / "torch_musa")
