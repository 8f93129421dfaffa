# SPDX-License-Identifier: Apache-2.0
"""Load a kernel's library: from the wheel, from the cache, or from a build at first use.

A kernel that cannot be loaded is no error: its operation has a torch reference, one warning says what is missing and
what that costs, and this process does not try again. The next start does, because the missing part may be there then.
Workers that waited for a failed build do not build again.
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

from ...base.cachedir import UntrustedFolder, places, private_folder, writable
from . import built, toolchain, torch_build
from .ninja import build, find_ninja
from .plan import BuildPlan, make_plan, source_digest
from .port import port_for
from .spec import KernelSpec, KernelUnavailable, source_root
from .toolchain import find_tool
from .torch_build import TorchBuild

logger = logging.getLogger("vllm.hwplugin")

#: Most seconds of a build, and of waiting for another process's build. vLLM's API servers wait 600 for an engine.
WAIT = 400.0
#: The file next to a lock that says why the last build failed.
_FAILED: Final = "failed"
_POLL_SECONDS: Final = 0.1

#: Types of devices that a kernel may be built for.
GPUS: Final = ("cuda", "musa")

_lock = threading.Lock()
_loaded: dict[str, bool] = {}


def ensure(kernel: KernelSpec) -> bool:
    """Load the kernel into this process, once; not during a capture.

    It may run a compiler. Without the kernel the operation's torch reference runs.
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
    """Return the library for this host, found or built.

    Raises:
        KernelUnavailable: there is none, and it cannot be built.
    """
    environ = os.environ if environ is None else environ
    library = _find(kernel, torch, environ)
    return library if isinstance(library, Path) else build_once(library, environ)


def obstacle(kernel: KernelSpec, capability: tuple[int, int], environ: Mapping[str, str] | None = None) -> str:
    """Return why an NVIDIA device cannot have a kernel, or "".

    For choices made before the kernel is needed: it builds and loads nothing and does not touch the device. A build may
    still fail. `capability` is (major, minor).
    """
    environ = os.environ if environ is None else environ
    if not kernel.is_for(capability):
        number = "{}.{}".format(*capability)
        return f"{kernel.name} is only for {', '.join(kernel.cuda_arch)}, and the device is {number}"
    try:
        plan = _find(kernel, torch_build.installed((capability,)), environ)
        if isinstance(plan, BuildPlan) and not any(_is_ready(plan, folder) for folder in _folders(plan, environ)):
            find_ninja(environ)
    except (KernelUnavailable, OSError) as error:
        return str(error)
    return ""


def _find(kernel: KernelSpec, torch: TorchBuild, environ: Mapping[str, str]) -> Path | BuildPlan:
    """Return the wheel's library, else the plan of a build."""
    if torch.toolchain is None:
        raise KernelUnavailable(f"torch {torch.version} is a CPU build, which runs no GPU kernel")
    root = source_root()
    if (ready := find_prebuilt(kernel, torch, built.prebuilt_folder(), root)) is not None:
        return ready
    if reason := kernel.excluded.get(torch.toolchain):
        raise KernelUnavailable(f"{kernel.name} is not built by {torch.toolchain}: {reason}")
    ccache = find_tool("ccache", environ)
    compiler, port = toolchain.find(torch.toolchain, environ), port_for(torch.toolchain)
    return make_plan(kernel, compiler, torch, environ, root, ccache, port)


def _ready(plan: BuildPlan, folder: Path) -> Path | None:
    library = built.read_cached(folder)
    return library.library if library is not None and _runs_here(library, plan.kernel, plan.torch) else None


def _is_ready(plan: BuildPlan, folder: Path) -> bool:
    try:
        return _ready(plan, folder) is not None
    except UntrustedFolder:
        # Such a library will not be used, so a build is needed.
        return False


def _runs_here(library: built.Built, kernel: KernelSpec, torch: TorchBuild) -> bool:
    # A launch on a device without code ends the engine.
    devices = [capability for capability in torch.capabilities if kernel.is_for(capability)]
    return bool(devices) and all(library.runs_on(capability) for capability in devices)


def _folders(plan: BuildPlan, environ: Mapping[str, str]) -> list[Path]:
    return [place / built.FOLDER / f"{plan.kernel.name}-{plan.key}" for place in places(environ)]


def find_prebuilt(kernel: KernelSpec, torch: TorchBuild, folder: Path, root: Path) -> Path | None:
    """Return the wheel's library, if it suits sources, PyTorch and devices.

    By the stable ABI a library works with the PyTorch of its build and later releases. The major version of CUDA must
    be equal, because PyTorch and the library share streams and a driver.
    """
    library = built.read(folder / kernel.name)
    if (
        library is None
        or library.toolchain != torch.toolchain
        or library.sources != source_digest(root, kernel.folders)
    ):
        return None
    if torch.cuda is not None and Version(library.version).major != Version(torch.cuda).major:
        return None
    return library.library if _runs_here(library, kernel, torch) else None


def build_once(plan: BuildPlan, environ: Mapping[str, str]) -> Path:
    """Return the cache's library; the first process builds it, others wait.

    The lock is the operating system's, so a dead holder's lock is free. On network file systems without locks across
    hosts, two hosts may build the same library; each then puts a whole file in place. A file system without locks is
    skipped.

    Raises:
        KernelUnavailable: no folder can be used, the build failed, took too long, or is for other devices.
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
            # /dev/shm in containers and Docker's --tmpfs are mounted like this: no library can be loaded from them.
            notes.append(f"{folder} is on a file system that is mounted noexec")
            continue
        try:
            failed_before = _failure(folder)
            with _locked(folder / "lock"):
                # The last holder of the lock may have built it, or have failed to.
                if (ready := _ready(plan, folder)) is not None:
                    return ready
                if (failed := _failure(folder)) != failed_before and failed is not None:
                    raise KernelUnavailable(f"another process's build failed just now: {failed.partition(' ')[2]}")
                logger.info("building the kernel %s with %s", plan.kernel.name, plan.toolchain.path)
                try:
                    build(plan, folder, environ, WAIT)
                except KernelUnavailable as error:
                    # If the disk is full, the waiting processes try for themselves.
                    with contextlib.suppress(OSError):
                        # The time distinguishes it from the last failure, which may have had the same reason.
                        (folder / _FAILED).write_text(f"{time.time_ns()} {error}", encoding="utf-8")
                    raise
                (folder / _FAILED).unlink(missing_ok=True)
                if (ready := _ready(plan, folder)) is not None:
                    return ready
                raise KernelUnavailable(
                    f"what {plan.toolchain.path} built for {' '.join(plan.arch)} does not run on every device here, "
                    f"which are {', '.join('{}.{}'.format(*capability) for capability in plan.torch.capabilities)}"
                )
        except TimeoutError as error:
            raise KernelUnavailable(f"another process has been building in {folder} for {WAIT:g} s") from error
        except OSError as error:
            notes.append(f"{folder}: {error}")
    raise KernelUnavailable(
        f"no folder for built kernels can be used: {'; '.join(notes)}; set VLLM_HWPLUGIN_CACHE_DIR to a usable folder"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock exclusively.

    Raises TimeoutError after `WAIT` seconds, and OSError if the file system has no locks.
    """
    # Not by `filelock`: some releases that vLLM allows wait for ever on a file system without locks, or raise another
    # error than OSError.
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
            # A child that was forked meanwhile also has the file open.
            fcntl.flock(file, fcntl.LOCK_UN)


def _failure(folder: Path) -> str | None:
    try:
        return (folder / _FAILED).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _renew_lock() -> None:
    # A thread of the parent may have been building, and it does not exist in the child.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
