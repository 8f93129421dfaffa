# SPDX-License-Identifier: Apache-2.0
"""Released vLLMs, whose Python runs with the torch that is installed here; of what they compile there is nothing."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import filelock
import platformdirs

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin_workshop.sources import Index, IndexSource

#: What `make test` steps, on the simulated device also. `make test-all` steps older releases after it.
NEWEST = SUPPORTED[-1]
#: Exit status of pytest where the Python of `--vllm` does not import with this torch.
DOES_NOT_IMPORT = 70


def package_of(version: str) -> Path:
    """Return the folder `vllm` of a release: its Python files, from the package index or the user's cache of it.

    Raises:
        IndexUnreachable: there is no network.
    """
    folder = platformdirs.user_cache_path("vllm-hwplugin-tests") / f"vllm-{version}-python"
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            source = IndexSource(version, Index())
            for path in source.checksums():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(source.read(path) or "", encoding="utf-8", newline="")
            # vLLM takes the CPU for its platform by the version's ending.
            metadata = folder / f"vllm-{version}+cpu.dist-info"
            metadata.mkdir(exist_ok=True)
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
            (metadata / "RECORD").write_text("vllm/__init__.py,,\n")
            (folder / "done").touch()
    return folder / "vllm"


def put_in_front(version: str) -> None:
    """Have this process, and those that it starts, import this vLLM and not the installed one.

    Raises:
        ImportError: it does not import with this torch.
    """
    assert "vllm" not in sys.modules
    folder = str(package_of(version).parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join((folder, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        importlib.import_module(name)
