# SPDX-License-Identifier: Apache-2.0
"""Load a kernel's library: the wheel's, the cache's, or one that is built now.

A kernel that cannot be had is no error: its operation has a torch reference, one warning says what is missing and what
that costs, and this process does not try again. The next start does, because what was missing may be there by then;
workers that have waited for a build that failed do not.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from ...cachedir import UntrustedFolder, places, private_folder, writable
from . import built, toolchain, torch_build
from .ninja import build, find_ninja
from .plan import BuildPlan, make_plan, source_digest
from .port import port_for
from .spec import KernelSpec, KernelUnavailable, source_root
from .toolchain import find_tool
from .torch_build import TorchBuild

logger = logging.getLogger("vllm.hwplugin")

#: Seconds that a build may take, and that a process waits for another one's. vLLM's API servers wait 600 for an engine.
WAIT = 400.0
#: Beside a lock: why the last build failed.
_FAILED: Final = "failed"
_POLL_SECONDS: Final = 0.1

#: Types of devices that a kernel may be built for.
GPUS: Final = ("cuda", "musa")

_lock = threading.Lock()
_loaded: dict[str, bool] = {}


def ensure(kernel: KernelSpec) -> bool:
    """Load the kernel into this process, once. Not for use while a graph is captured: it may run a compiler.

    Returns:
        Whether the operation has its kernel now; otherwise its torch reference serves.
    """
    with _lock:
        if kernel.name not in _loaded:
            _loaded[kernel.name] = _try_load(kernel)
        return _loaded[kernel.name]


def _try_load(kernel: KernelSpec) -> bool:
    try:
        library = provide(kernel, torch_build.installed())
        torch: Any = importlib.import_module("torch")
        torch.ops.load_library(str(library))
    except (KernelUnavailable, OSError) as error:
        logger.warning("the kernel %s is not used: %s. Without it, %s.", kernel.name, error, kernel.fallback_cost)
        return False
    logger.info("the kernel %s is loaded from %s", kernel.name, library)
    return True


def provide(kernel: KernelSpec, torch: TorchBuild, environ: Mapping[str, str] | None = None) -> Path:
    """The library for this host, found or built.

    Raises:
        KernelUnavailable: it cannot be had.
        GateError: a gate that decides here has a bad value.
    """
    environ = os.environ if environ is None else environ
    found = _find(kernel, torch, environ)
    return found if isinstance(found, Path) else build_once(found, environ)


def obstacle(kernel: KernelSpec, capability: tuple[int, int], environ: Mapping[str, str] | None = None) -> str:
    """Why a kernel cannot be had for an NVIDIA device; empty where it probably can.

    For choices that are made before the kernel is needed: nothing is built or loaded, and the device is not touched. A
    build may still fail.

    Args:
        capability: (major, minor) of the device.

    Raises:
        GateError: a gate that decides here has a bad value.
    """
    environ = os.environ if environ is None else environ
    if not kernel.is_for(capability):
        number = "{}.{}".format(*capability)
        return f"{kernel.name} is for {', '.join(kernel.cuda_arch)} alone, and the device is {number}"
    try:
        found = _find(kernel, torch_build.installed((capability,)), environ)
        if isinstance(found, BuildPlan) and not any(_is_ready(found, folder) for folder in _folders(found, environ)):
            find_ninja(environ)
    except (KernelUnavailable, OSError) as error:
        return str(error)
    return ""


def _find(kernel: KernelSpec, torch: TorchBuild, environ: Mapping[str, str]) -> Path | BuildPlan:
    """The wheel's library, else what has to be built if the cache does not have it."""
    if torch.toolchain is None:
        raise KernelUnavailable(f"torch {torch.version} is a CPU build, beside which no GPU kernel can run")
    root = source_root()
    if (ready := find_prebuilt(kernel, torch, built.prebuilt_folder(), root)) is not None:
        return ready
    if reason := kernel.excluded.get(torch.toolchain):
        raise KernelUnavailable(f"{kernel.name} is not built by {torch.toolchain}: {reason}")
    ccache = find_tool("ccache", environ)
    compiler, port = toolchain.find(torch.toolchain, environ), port_for(torch.toolchain)
    return make_plan(kernel, compiler, torch, environ, root, ccache, port)


def _ready(plan: BuildPlan, folder: Path) -> Path | None:
    """The library of that folder, if it is whole and runs here.

    Raises:
        UntrustedFolder: another user can change what lies in it.
    """
    found = built.read_cached(folder)
    return found.library if found is not None and _runs_here(found, plan.kernel, plan.torch) else None


def _is_ready(plan: BuildPlan, folder: Path) -> bool:
    try:
        return _ready(plan, folder) is not None
    except UntrustedFolder:
        # It will not be used either, and what is asked here is whether another is needed.
        return False


def _runs_here(found: built.Built, kernel: KernelSpec, torch: TorchBuild) -> bool:
    """Whether it has code for every device that the kernel is for: a launch without it ends the engine."""
    devices = [capability for capability in torch.capabilities if kernel.is_for(capability)]
    return bool(devices) and all(found.runs_on(capability) for capability in devices)


def _folders(plan: BuildPlan, environ: Mapping[str, str]) -> list[Path]:
    return [place / built.FOLDER / f"{plan.kernel.name}-{plan.key}" for place in places(environ)]


def find_prebuilt(kernel: KernelSpec, torch: TorchBuild, folder: Path, root: Path) -> Path | None:
    """The wheel's library, if it is of these sources and suits this PyTorch and every device.

    The stable ABI makes a library good for the PyTorch that it was built with and for later ones; the major version of
    CUDA has to be the same, because PyTorch and the library share streams and one driver.
    """
    found = built.read(folder / kernel.name)
    if found is None or found.toolchain != torch.toolchain or found.sources != source_digest(root, kernel.folders):
        return None
    if torch.cuda is not None and Version(found.version).major != Version(torch.cuda).major:
        return None
    return found.library if _runs_here(found, kernel, torch) else None


def build_once(plan: BuildPlan, environ: Mapping[str, str]) -> Path:
    """The library in the cache; the first process of all that ask builds it, the others wait.

    The lock is the operating system's, so a dead holder's lock is free. On network file systems that do not keep locks
    across hosts, two hosts may build the same library; each then puts a whole file in place. A file system that keeps
    no locks at all is passed over.

    Raises:
        KernelUnavailable: no folder can be used, the build failed, its result runs on other devices, or another process
            took too long over it.
    """
    notes = []
    for candidate in _folders(plan, environ):
        try:
            folder = private_folder(candidate)
        except (OSError, UntrustedFolder) as error:
            notes.append(str(error))
            continue
        if (ready := _ready(plan, folder)) is not None:
            return ready
        if not writable(folder):
            notes.append(f"{folder} is not writable")
            continue
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            # As containers have /dev/shm, and temporary files that Docker's --tmpfs makes: no library is loaded there.
            notes.append(f"{folder} is on a file system that is mounted noexec")
            continue
        try:
            failed_before = _failure(folder)
            with _locked(folder / "lock"):
                # Whoever held the lock before may have built it, or have found that it cannot be built.
                if (ready := _ready(plan, folder)) is not None:
                    return ready
                if (failed := _failure(folder)) != failed_before and failed is not None:
                    raise KernelUnavailable(f"another process has just found that {failed.partition(' ')[2]}")
                logger.info("building the kernel %s with %s", plan.kernel.name, plan.toolchain.path)
                try:
                    build(plan, folder, environ, WAIT)
                except KernelUnavailable as error:
                    # On a full disk those that wait try for themselves.
                    with contextlib.suppress(OSError):
                        # The number makes it another one than the last, which may have had the same reason.
                        (folder / _FAILED).write_text(f"{time.time_ns()} {error}", encoding="utf-8")
                    raise
                (folder / _FAILED).unlink(missing_ok=True)
                if (ready := _ready(plan, folder)) is not None:
                    return ready
                raise KernelUnavailable(
                    f"what {plan.toolchain.path} built for {' '.join(plan.arch)} does not run on every device here, "
                    f"which are {', '.join('{}.{}'.format(*one) for one in plan.torch.capabilities)}"
                )
        except TimeoutError as error:
            raise KernelUnavailable(f"another process has been building in {folder} for {WAIT:g} s") from error
        except OSError as error:
            notes.append(f"{folder}: {error}")
    raise KernelUnavailable(
        f"no folder for built kernels can be used: {'; '.join(notes)}; set VLLM_HWPLUGIN_CACHE_DIR to a folder that can"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock alone.

    Some releases of `filelock` that vLLM allows wait for ever where a file system keeps no locks, or raise what is no
    OSError; so this asks the operating system.

    Raises:
        TimeoutError: another process has held it for `WAIT` seconds.
        OSError: the file system keeps no locks.
    """
    with open(path, "ab") as file:
        end = time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(path) from None
                time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            # A child that was forked meanwhile has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


def _failure(folder: Path) -> str | None:
    try:
        return (folder / _FAILED).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _renew_lock() -> None:
    # Another thread of the parent may have been building, and it does not exist in the child.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
