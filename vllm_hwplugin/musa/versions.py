# SPDX-License-Identifier: Apache-2.0
"""Package versions that fit together on a Moore Threads host: for ``doctor``, the platform and docs/platforms.md.

Sources: what Moore Threads publish, and vLLM's requirements. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from packaging.version import InvalidVersion, Version

from ..base.versions import Versions
from ..ops.compile.plan import MIN_TORCH

#: The first Triton whose MUSA build is expected to compile vLLM's kernels.
MIN_TRITON: Final = Version("3.6")
#: The first Triton that compiles V1's drafters without the feature next-token-kernel.
MIN_TRITON_TO_SPECULATE: Final = Version("3.3")
#: The first vLLM whose kernel for recurrent states of drafts in the prefix cache also needs that Triton.
VLLM_WITH_TILED_STATES: Final = Version("0.28")
#: The first mate that takes a page table and an output tensor.
MIN_MATE: Final = Version("0.2")
#: The first mate whose prebuilt kernels are a separate distribution, mate-mubin.
MATE_WITHOUT_KERNELS: Final = Version("0.2.6")
#: The first mate that is known to read an FP8 KV cache: vllm-musa's pin since its FLASH_ATTN uses one.
MATE_WITH_FP8: Final = Version("0.2.7")
#: The oldest torchada that vllm-musa names for torch 2.11. With 0.1.48 vLLM's worker is reported to stop.
MIN_TORCHADA: Final = Version("0.1.95")
#: The first pymtml that counts its callers.
MIN_MTML: Final = Version("2.4")

#: The first MUSA architecture that the platform class supports: the MTT S5000's.
MIN_CAPABILITY: Final = (3, 1)
#: Earlier GPUs, by the driver's names.
EARLIER_GPUS: Final = ("MTT S80", "MTT S3000", "MTT S4000")
WIDE_WARPS: Final = (
    "before MUSA 3.1 a warp has 128 threads, and Triton's kernels are reported to add up wrongly there; use an MTT "
    "S5000"
)

_PUBLIC_BACKENDS: Final = frozenset(("amd", "cpu", "nvidia"))
_INDEX: Final = "from Moore Threads' own index"
#: The Python of torch_musa's wheels.
PYTHON: Final = "3.10"


#: The torch_musa that is known to fit vLLM before 0.33, although vLLM requires a later torch from 0.27 on: 0.27 to 0.32
#: ran with torch 2.11 on the simulated device, and vllm-musa uses it for 0.28.
TORCH_MUSA: Final = "2.11.0.post2"
TORCH_BY_VLLM: Final = {
    Versions(">=0.20,<0.27"): "2.11",
    Versions(">=0.27,<0.33"): "2.13",
    Versions(">=0.33,<0.34"): "2.14",
}


@dataclass(frozen=True, slots=True)
class MusaHost:
    """The packages and GPUs of a Moore Threads host.

    Attributes:
        versions: Name in `ROWS` -> its version; None: not installed.
        vendors_mate: Whether the package ``mate`` is Moore Threads'; None: not installed.
        triton_backends: Devices that the installed Triton compiles for; empty: not known.
    """

    versions: Mapping[str, str | None]
    vllm: str | None = None
    vendors_mate: bool | None = None
    triton_backends: frozenset[str] = frozenset()
    gpus: tuple[str, ...] = ()
    python: str = field(default_factory=lambda: ".".join(platform.python_version_tuple()[:2]))

    def has(self, distribution: str) -> bool:
        return self.versions.get(distribution) is not None

    @property
    def other_torch(self) -> str:
        """The minor version of torch that vLLM requires, if another is installed that is not known to serve."""
        required = next((torch for vllm, torch in TORCH_BY_VLLM.items() if self.vllm and vllm.covers(self.vllm)), "")
        fitting = (required, "2.11" if required != "2.14" else "")
        return required if self.has("torch") and _minor(self.versions["torch"]) not in fitting else ""

    def older(self, distribution: str, version: Version) -> bool:
        """Whether the distribution is installed, of a known version before this one."""
        return older(self.versions.get(distribution), version)


@dataclass(frozen=True, slots=True)
class Finding:
    """A package, with an empty ``trouble`` if it fits; ``stops``: an engine does not start."""

    package: str
    found: str
    expected: str
    trouble: str = ""
    stops: bool = False


def installed(distribution: str) -> str | None:
    """Return a distribution's version from its metadata; None: not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_trouble(version: str | None) -> str:
    """Return why this Triton (None: not installed) does not fit, or nothing."""
    if version is None:
        return f"Triton is not installed, and vLLM's kernels need it; install MUSA's build {_INDEX}"
    if not older(version, MIN_TRITON):
        return ""
    return (
        f"Triton {version} cannot compile vLLM's kernels (TRITON_ATTN, TRITON_MLA, LoRA; torch sorts for top-k and "
        f"top-p); {MIN_TRITON} can, and attention over mate needs none of them"
    )


def older(version: str | None, least: Version) -> bool:
    """Whether this is a known version before `least`."""
    number = _number(version)
    return number is not None and number.release < least.release


class Row(NamedTuple):
    """A reason why a package does not fit; a package's first row that holds is its trouble.

    `trouble` may name `{host}`, the package's `{version}`, and `{result}`, which `find` returns (false: the reason does
    not hold). `stops`: an engine does not start then.
    """

    package: str
    trouble: str
    find: Callable[[MusaHost], object]
    stops: bool = False


def check(host: MusaHost) -> tuple[Finding, ...]:
    """Check the packages and GPUs of a host."""
    others = {"Python": host.python, "GPUs": ", ".join(host.gpus)}
    findings = []
    for package, expected in EXPECTED.items():
        version = others.get(package) or host.versions.get(package) or ""
        rows = ((row, row.find(host)) for row in ROWS if row.package == package)
        row, result = next(((row, result) for row, result in rows if result), (None, None))
        text = row.trouble.format(host=host, version=version, result=result) if row else ""
        findings.append(Finding(package, version, expected, text, bool(row and row.stops)))
    return tuple(findings[: None if host.gpus else -1])


def _number(version: str | None) -> Version | None:
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def _minor(version: str | None) -> str | None:
    number = _number(version)
    return version if number is None else f"{number.major}.{number.minor}"


#: What fits, by package: distributions, Python and the driver's GPUs.
EXPECTED: Final = {
    "Python": f"{PYTHON}, for torch_musa's wheels",
    "torch": "the torch of torch_musa",
    "torch_musa": f"the minor version of torch, and {MIN_TORCH} or later for the plugin's kernels",
    "triton": f"MUSA's build: 3.2.0, Moore Threads' pin; {MIN_TRITON} or later for TRITON_ATTN and LoRA",
    "mate": f"{MIN_MATE} or later, Moore Threads' own",
    "mate-mubin": f"mate's version, from {MATE_WITHOUT_KERNELS} on",
    "apache-tvm-ffi": "MUSA's build (+musa), for mate",
    "numpy": "1.26, as in Moore Threads' image",
    "torchada": f"{MIN_TORCHADA} or later",
    "mthreads-ml-py": f"{MIN_MTML} or later",
    "torchvision": "MUSA's build for this torch, with vLLM 0.24 or later",
    "GPUs": "MTT S5000 or later",
}
DISTRIBUTIONS: Final = tuple(package for package in EXPECTED if package not in ("Python", "GPUs"))
_NO_FLASH_ATTN: Final = "so there is no FLASH_ATTN"

ROWS: Final = (
    Row("Python", f"Python is {{version}}, and torch_musa's wheels are for {PYTHON} only: make the environment with "
        "it, and with vLLM before 0.32, which needs a later Python",
        lambda host: not host.has("torch_musa") and host.python != PYTHON),
    Row("torch", "vLLM {host.vllm} requires torch 2.14, found {version}; no torch_musa is known for it: use vLLM "
        "before 0.33, with torch 2.11", lambda host: host.other_torch == "2.14"),
    Row("torch", "vLLM {host.vllm} requires torch {result}, found {version}; install torch and torch_musa "
        f"{TORCH_MUSA} {_INDEX}", lambda host: host.other_torch),
    Row("torch_musa", f"torch_musa is not installed, and torch has no MUSA device without it; install it {_INDEX}",
        lambda host: not host.has("torch_musa")),
    Row("torch_musa", "torch_musa {version} requires torch {result}, found {host.versions[torch]}; install matching "
        f"versions {_INDEX}", lambda host: host.has("torch") and (
            required := _minor(host.versions["torch_musa"])) != _minor(host.versions["torch"]) and required),
    Row("torch_musa", "torch_musa {version} is too old for the plugin's kernels, so torch references replace them; "
        f"expected {MIN_TORCH} or later", lambda host: host.older("torch_musa", MIN_TORCH)),
    Row("triton", "{result}", lambda host: triton_trouble(host.versions.get("triton"))),
    Row("triton", "Triton {version} is the public build, which compiles only for {result}; install MUSA's build "
        f"{_INDEX}", lambda host: not host.triton_backends - _PUBLIC_BACKENDS and " and ".join(
            sorted(host.triton_backends))),
    Row("triton", "Triton {version} has known bugs: wrong products in loops, and wrong aliased pointers, which the "
        "plugin fixes; run `vllm-hwplugin probe musa`, or install 3.2.0, Moore Threads' pin",
        lambda host: _minor(host.versions.get("triton")) == str(MIN_TRITON)),
    Row("mate", f"mate {{version}} is another project of that name, {_NO_FLASH_ATTN}; uninstall it and install Moore "
        f"Threads' mate {_INDEX}", lambda host: host.vendors_mate is False),
    Row("mate", f"mate is not installed, {_NO_FLASH_ATTN}; install Moore Threads' mate {_INDEX}",
        lambda host: host.vendors_mate is None and not host.has("mate")),
    Row("mate", f"mate {{version}} is too old: its attention takes no page table, {_NO_FLASH_ATTN}; expected "
        f"{MIN_MATE} or later", lambda host: host.older("mate", MIN_MATE)),
    Row("mate-mubin", "mate-mubin is not installed, so mate {result} downloads its kernels when they are first called; "
        f"install it {_INDEX}", lambda host: host.vendors_mate and not host.has("mate-mubin")
        and not host.older("mate", MATE_WITHOUT_KERNELS) and _number(host.versions.get("mate"))),
    Row("apache-tvm-ffi", "apache-tvm-ffi {result}, and mate needs MUSA's to import, so there may be no FLASH_ATTN; "
        f"install it {_INDEX} with --no-deps, after vLLM's requirements, which bring the public build", lambda host: (
            host.vendors_mate and "+musa" not in (version := host.versions.get("apache-tvm-ffi") or "")
            and ("is the public build" if version else "is not installed"))),
    Row("numpy", "numpy is {version}, and Moore Threads' image has 1.26: whether torch_musa runs with 2 is not known; "
        "install 'numpy<2' after everything else", lambda host: host.has("torch_musa") and host.has("numpy")
        and not host.older("numpy", Version("2"))),
    Row("torchada", "torchada {version} is older than the versions known to support torch 2.11; expected "
        f"{MIN_TORCHADA} or later", lambda host: host.older("torchada", MIN_TORCHADA)),
    Row("mthreads-ml-py", "mthreads-ml-py {version} has one handle per process: any other user of pymtml who shuts the "
        f"library down takes it from vLLM; expected {MIN_MTML} or later", lambda host: host.older(
            "mthreads-ml-py", MIN_MTML)),
    Row("torchvision", "torchvision is not installed, and vLLM {host.vllm} imports it during warm-up with any model; "
        f"install MUSA's build for this torch, {_INDEX}", lambda host: (
            host.vllm and not host.has("torchvision") and Versions(">=0.24").covers(host.vllm)), stops=True),
    Row("GPUs", f"an engine does not start on the {{result}}: {WIDE_WARPS}", lambda host: " and ".join(
        name for name in dict.fromkeys(host.gpus) if name in EARLIER_GPUS), stops=True),
)  # fmt: skip
