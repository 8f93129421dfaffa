# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` says of a Moore Threads host's packages: the real program, on a site of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import vllm_hwplugin
from tests.cpu_seconds import patience
from vllm_hwplugin.musa import versions as musa_versions
from vllm_hwplugin.ops.compile.plan import MIN_TORCH

REPOSITORY = Path(vllm_hwplugin.__file__).parent.parent

#: Distribution -> its version: a host with nothing to say about.
GOOD: Mapping[str, str | None] = {
    "vllm": "0.24.0",
    "torch": "2.11.0.post2+musa5.2.0",
    "torch_musa": "2.11.0.post2+musa5.2.0",
    "torchada": "0.1.103",
    "torchvision": "0.26.0.post2+musa5.2.0",
    "triton": "3.7.0",
    "mate": "0.2.7",
    "mate-mubin": "0.2.7",
    "mthreads-ml-py": "2.4.3",
    "apache-tvm-ffi": "0.1.11.post1+musa.1",
    "numpy": "1.26.4",
}
#: The files of those packages, as far as anything looks at them.
FILES = {
    "vllm/__init__.py": "",
    "torchada/__init__.py": "",
    "torch_musa/__init__.py": "raise SystemExit('imported')",
    "triton/__init__.py": "raise SystemExit('imported')",
    "triton/backends/nvidia/compiler.py": "",
    "triton/backends/musa/compiler.py": "",
    "mate/__init__.py": "raise SystemExit('imported')",
    "mate/mha_interface.py": "",
    "pymtml.py": (
        "mtmlLibraryInit = lambda: None\n"
        "mtmlLibraryCountDevice = lambda: len(GPUS)\n"
        "mtmlLibraryInitDeviceByIndex = lambda index: index\n"
        "mtmlDeviceGetName = lambda device: GPUS[device]\n"
    ),
}

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is installed here, without the packages above: a folder of links."""
    folder = tmp_path_factory.mktemp("others")
    own = tuple({*(name.partition("-")[0] for name in GOOD), "mthreads", "pymtml"})
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(own) or path.name.startswith("vllm_hwplugin-"):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def doctor(tmp_path: Path, others: Path) -> Doctor:
    """`doctor(mate=None)`: its JSON on such a host with other versions; ``files`` replace some (None: no file)."""

    def call(
        gpus: tuple[str, ...] = ("MTT S5000",),
        files: Mapping[str, str | None] = {},
        platform: str = "auto",
        **changes: str | None,
    ) -> dict[str, Any]:
        site = tmp_path / "site"
        for name, version in {
            **GOOD,
            **{name.replace("_", "-") if name != "torch_musa" else name: v for name, v in changes.items()},
        }.items():
            if version is not None:
                folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
                folder.mkdir(parents=True)
                (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        versions = {"vllm/_version.py": f"__version__ = {changes.get('vllm', GOOD['vllm'])!r}\n"}
        for name, text in {**FILES, **versions, **files}.items():
            if text is not None:
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                (site / name).write_text(f"GPUS = {gpus!r}\n{text}" if name == "pymtml.py" else text)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PYTHON"))}
        environ |= {"PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY), str(others)]), "TMPDIR": str(tmp_path)}
        environ |= {"VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache"), "VLLM_HWPLUGIN_PLATFORM": platform}
        command = [sys.executable, "-S", "-m", "vllm_hwplugin.cli", "doctor", "--json"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patience(60))
        assert done.returncode in (0, 1), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == bool(found["problems"])
        # Its vLLM is empty, so that no patch fits.
        found["problems"] = [line for line in found["problems"] if "no feature is patched in" not in line]
        return found

    return call


def test_a_host_whose_packages_go_together_has_nothing_to_say(doctor: Doctor) -> None:
    found = doctor()
    assert found["platform_class"]["class"] == "vllm_hwplugin.musa.platform.MusaPlatform"
    rows = {row["package"]: row for row in found["musa"]}
    assert list(rows) == ["Python", *musa_versions.DISTRIBUTIONS, "GPUs"]
    assert {name: rows[name]["found"] for name in musa_versions.DISTRIBUTIONS} == {
        name: GOOD[name] for name in musa_versions.DISTRIBUTIONS
    }
    assert [row["trouble"] for row in found["musa"] if row["trouble"]] == []


@pytest.mark.parametrize(
    ("package", "changes", "words"),
    [
        ("triton", {"triton": "3.2.0"}, "Triton 3.2.0 cannot compile vLLM's kernels (TRITON_ATTN"),
        ("triton", {"triton": None}, "Triton is not installed"),
        ("triton", {"triton": "3.6.0"}, "Triton 3.6.0 has known bugs"),
        (
            "triton",
            {"triton": "3.7.1", "files": {"triton/backends/musa/compiler.py": None}},
            "Triton 3.7.1 is the public build, which compiles only for nvidia",
        ),
        # The index's own project of that name.
        ("mate", {"mate": "0.2.0", "files": {"mate/mha_interface.py": None}}, "mate 0.2.0 is another project"),
        (
            "mate",
            {"mate": None, "files": {"mate/__init__.py": None, "mate/mha_interface.py": None}},
            "mate is not installed",
        ),
        ("torch_musa", {"torch_musa": "2.9.1"}, "torch_musa 2.9.1 requires torch 2.9, found 2.11.0.post2"),
        ("torch_musa", {"torch": "2.9.1", "torch_musa": "2.9.1"}, f"expected {MIN_TORCH} or later"),
        ("mate-mubin", {"mate_mubin": None}, "mate 0.2.7 downloads its kernels"),
        ("torch", {"vllm": "0.33.0"}, "no torch_musa is known for it: use vLLM before 0.33"),
        ("torch", {"vllm": "0.28.0", "torch": "2.9.1", "torch_musa": "2.9.1"}, "install torch and torch_musa 2.11.0"),
        ("apache-tvm-ffi", {"apache_tvm_ffi": "0.1.11"}, "apache-tvm-ffi is the public build, and mate needs MUSA's"),
        ("Python", {"torch_musa": None, "vllm": "0.32.0"}, "torch_musa's wheels are for 3.10 only: make"),
        ("mthreads-ml-py", {"mthreads_ml_py": "2.2.11"}, "mthreads-ml-py 2.2.11 has one handle"),
    ],
)
def test_what_does_not_go_together_is_a_warning(
    package: str, changes: dict[str, Any], words: str, doctor: Doctor
) -> None:
    found = doctor(**changes)
    (row,) = [row for row in found["musa"] if row["package"] == package]
    assert words in row["trouble"]
    assert row["trouble"] in found["warnings"]
    assert found["problems"] == []


def test_an_earlier_gpu_stops_an_engine(doctor: Doctor) -> None:
    (line,) = doctor(gpus=("MTT S5000", "MTT S4000"))["problems"]
    assert line.startswith("an engine does not start on the MTT S4000: ")


def test_a_missing_torchvision_stops_an_engine_from_0_24_on(doctor: Doctor, tmp_path: Path) -> None:
    found = doctor(torchvision=None)
    (line,) = found["problems"]
    assert line.startswith("torchvision is not installed, and vLLM 0.24.0 imports it during warm-up")


def test_a_missing_torchvision_is_a_warning_where_no_musa_class_is_offered(doctor: Doctor) -> None:
    found = doctor(torchvision=None, platform="off")
    assert found["problems"] == []
    assert any(line.startswith("torchvision is not installed") for line in found["warnings"])
