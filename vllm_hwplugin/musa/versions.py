# SPDX-License-Identifier: Apache-2.0
"""Package versions that fit together on a Moore Threads host: for ``doctor``, the platform and docs/platforms.md.

Sources: what Moore Threads publish (sources, requirements, guides) and vLLM's requirements. Nothing was run on MUSA
hardware. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from packaging.version import InvalidVersion, Version

from ..ops.compile.plan import MIN_TORCH
from ..versions import Versions

#: The first Triton whose MUSA build is expected to compile vLLM's kernels; vllm-musa changes them for 3.2.
MIN_TRITON: Final = Version("3.6")
#: The first Triton that compiles the kernel that V1's drafters run after each verification as vLLM has it; the feature
#: next-token-kernel is for earlier ones.
MIN_TRITON_TO_SPECULATE: Final = Version("3.3")
#: The first mate that takes a page table and an output tensor.
MIN_MATE: Final = Version("0.2")
#: The first mate whose prebuilt kernels are a separate distribution, mate-mubin.
MATE_WITHOUT_KERNELS: Final = Version("0.2.6")
#: The first mate that is known to read an FP8 KV cache: vllm-musa's pin since its FLASH_ATTN uses one.
MATE_WITH_FP8: Final = Version("0.2.7")
#: The oldest torchada that vllm-musa names for torch 2.11. With 0.1.48 vLLM's worker is reported to stop.
MIN_TORCHADA: Final = Version("0.1.95")
#: The first pymtml that counts its callers; in earlier ones the first caller that ends closes the library for all.
MIN_MTML: Final = Version("2.4")
#: The versions of vLLM that import torchvision during warm-up, for any model.
TORCHVISION_IN_WARM_UP: Final = Versions(">=0.24")

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
#: The Python of torch_musa's wheels, and the versions of vLLM that need a later one.
PYTHON: Final = "3.10"
NEEDS_LATER_PYTHON: Final = Versions(">=0.32")


class Pin(NamedTuple):
    """The minor version of torch that a range of vLLM versions requires, and the torch_musa that fits.

    From 0.27 on torch_musa is for an older torch: 0.27 to 0.32 ran with torch 2.11 on the simulated device, and
    vllm-musa uses it for 0.28. `before` is the first version after the range.
    """

    since: str
    before: str
    torch: str
    torch_musa: str = ""

    @property
    def torches(self) -> tuple[str, ...]:
        """Minor versions of the torch that vLLM requires and the torch that torch_musa requires."""
        return tuple(dict.fromkeys((self.torch, *filter(None, [_minor(self.torch_musa)]))))

    def __str__(self) -> str:
        return f"{self.since} and later, before {self.before}"


PINS: Final = (
    Pin("0.20", "0.27", "2.11", "2.11.0.post2"),
    Pin("0.27", "0.33", "2.13", "2.11.0.post2"),
    Pin("0.33", "0.34", "2.14"),
)


@dataclass(frozen=True, slots=True)
class MusaHost:
    """The packages and GPUs of a Moore Threads host.

    Attributes:
        versions: Name in `ROWS` -> its version; None: not installed.
        vllm: vLLM's version.
        vendors_mate: Whether the package ``mate`` is Moore Threads'; None: not installed.
        triton_backends: Devices that the installed Triton compiles for; empty: not known.
        gpus: GPU names that the driver reports.
        python: Minor version of Python.
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
    def pin(self) -> Pin | None:
        """The torch that vLLM requires; None: not known."""
        covering = (pin for pin in PINS if Versions(f">={pin.since},<{pin.before}").covers(self.vllm or ""))
        return next(covering, None) if self.vllm else None

    def older(self, distribution: str, version: Version) -> bool:
        """Whether the distribution is installed, of a known version before this one."""
        number = _number(self.versions.get(distribution))
        return number is not None and number.release < version.release


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
    """Return why this Triton does not fit; empty: it does.

    `version` None: Triton is not installed.
    """
    expected = f"expected MUSA's build of {MIN_TRITON} or later, {_INDEX}"
    if version is None:
        return f"Triton is not installed, and vLLM's kernels need it; {expected}"
    number = _number(version)
    if number is None or number.release >= MIN_TRITON.release:
        return ""
    return (
        f"Triton {version} cannot compile vLLM's kernels (TRITON_ATTN, TRITON_MLA, LoRA, top-k and top-p); {expected}"
    )


def needs_next_token_kernel(version: str | None) -> bool:
    """Whether this Triton compiles V1's drafters only with the feature next-token-kernel."""
    number = _number(version)
    return number is not None and number.release < MIN_TRITON_TO_SPECULATE.release


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        package: A distribution, "Python" or "GPUs".
        expected: What fits.
        trouble: Returns why the package of a host does not fit, or "".
        stops: Whether an engine does not start then.
    """

    package: str
    expected: str
    trouble: Callable[[MusaHost], str]
    stops: bool = False


def check(host: MusaHost) -> tuple[Finding, ...]:
    """Check the packages and GPUs of a host."""
    findings = []
    for row in ROWS:
        version = host.versions.get(row.package) or {"GPUs": ", ".join(host.gpus), "Python": host.python}.get(
            row.package
        )
        if version or row.package != "GPUs":
            trouble = row.trouble(host)
            findings.append(Finding(row.package, version or "", row.expected, trouble, row.stops and bool(trouble)))
    return tuple(findings)


def _python(host: MusaHost) -> str:
    if host.has("torch_musa") or host.python == PYTHON:
        return ""
    later = f"vLLM {host.vllm} needs a later Python; use one before 0.32, or vllm-musa"
    way_out = later if host.vllm and NEEDS_LATER_PYTHON.covers(host.vllm) else f"make the environment with {PYTHON}"
    return f"Python is {host.python}, and torch_musa's wheels are for {PYTHON} only: {way_out}"


def _torch(host: MusaHost) -> str:
    pin, torch = host.pin, host.versions.get("torch")
    if pin is None or torch is None or _minor(torch) in pin.torches:
        return ""
    requires = f"vLLM {host.vllm} requires torch {pin.torch}, found {torch}"
    if pin.torch_musa:
        return f"{requires}; install torch and torch_musa {pin.torch_musa} {_INDEX}"
    newest = next(pin for pin in reversed(PINS) if pin.torch_musa)
    return f"{requires}; no torch_musa is known for it: use a vLLM of {newest}, with torch {newest.torches[-1]}"


def _torch_musa(host: MusaHost) -> str:
    torch, torch_musa = host.versions.get("torch"), host.versions.get("torch_musa")
    if torch_musa is None:
        return f"torch_musa is not installed, and torch has no MUSA device without it; install it {_INDEX}"
    if torch is not None and _minor(torch_musa) != _minor(torch):
        required = f"torch_musa {torch_musa} requires torch {_minor(torch_musa)}"
        return f"{required}, found {torch}; install matching versions {_INDEX}"
    if host.older("torch_musa", MIN_TORCH):
        old = f"torch_musa {torch_musa} is too old for the plugin's kernels, so torch references replace them"
        return f"{old}; expected {MIN_TORCH} or later"
    return ""


def _triton(host: MusaHost) -> str:
    triton, backends = host.versions.get("triton"), host.triton_backends
    if trouble := triton_trouble(triton):
        return trouble
    if not backends or backends - _PUBLIC_BACKENDS:
        return ""
    public = f"Triton {triton} is the public build, which compiles only for {' and '.join(sorted(backends))}"
    return f"{public}; install MUSA's build of {MIN_TRITON} or later {_INDEX}"


def _mate(host: MusaHost) -> str:
    mate = host.versions.get("mate")
    trouble = ""
    if host.vendors_mate is False:
        other = f"mate {mate or 'without a version'} is another project of that name"
        trouble = f"{other}, so there is no FLASH_ATTN; uninstall it and install Moore Threads' mate {_INDEX}"
    elif host.vendors_mate is None and mate is None:
        trouble = f"mate is not installed, so there is no FLASH_ATTN; install Moore Threads' mate {_INDEX}"
    elif host.older("mate", MIN_MATE):
        old = f"mate {mate} is too old: its attention takes no page table, so there is no FLASH_ATTN"
        trouble = f"{old}; expected {MIN_MATE} or later"
    return trouble


def _mubin(host: MusaHost) -> str:
    mate = host.versions.get("mate")
    if not host.vendors_mate or host.has("mate-mubin") or not _number(mate) or host.older("mate", MATE_WITHOUT_KERNELS):
        return ""
    return (
        f"mate-mubin is not installed, so mate {mate} downloads its kernels when they are first called; install it "
        f"{_INDEX}"
    )


def _tvm_ffi(host: MusaHost) -> str:
    version = host.versions.get("apache-tvm-ffi")
    if not host.vendors_mate or "+musa" in (version or ""):
        return ""
    public = "is the public build" if version else "is not installed"
    return (
        f"apache-tvm-ffi {public}, and mate needs MUSA's to import, so there may be no FLASH_ATTN; install it {_INDEX} "
        "with --no-deps, after vLLM's requirements, which bring the public build"
    )


def _numpy(host: MusaHost) -> str:
    if not host.has("torch_musa") or not host.has("numpy") or host.older("numpy", Version("2")):
        return ""
    return (
        f"numpy is {host.versions['numpy']}, and Moore Threads' image has 1.26: whether torch_musa runs with 2 is not "
        "known; install 'numpy<2' after everything else"
    )


def _torchvision(host: MusaHost) -> str:
    if host.vllm is None or host.has("torchvision") or not TORCHVISION_IN_WARM_UP.covers(host.vllm):
        return ""
    warm_up = f"torchvision is not installed, and vLLM {host.vllm} imports it during warm-up with any model"
    return f"{warm_up}; install MUSA's build for this torch, {_INDEX}"


def _gpus(host: MusaHost) -> str:
    earlier = [name for name in dict.fromkeys(host.gpus) if name in EARLIER_GPUS]
    return f"an engine does not start on the {' and '.join(earlier)}: {WIDE_WARPS}" if earlier else ""


def _too_old(package: str, version: Version, why: str) -> Row:
    def trouble(host: MusaHost) -> str:
        old = host.older(package, version)
        return f"{package} {host.versions[package]} {why}; expected {version} or later" if old else ""

    return Row(package, f"{version} or later", trouble)


ROWS: Final = (
    Row("Python", f"{PYTHON}, for torch_musa's wheels", _python),
    Row("torch", "the torch of torch_musa", _torch),
    Row("torch_musa", f"the minor version of torch, and {MIN_TORCH} or later for the plugin's kernels", _torch_musa),
    Row("triton", f"{MIN_TRITON} or later, MUSA's build", _triton),
    Row("mate", f"{MIN_MATE} or later, Moore Threads' own", _mate),
    Row("mate-mubin", f"mate's version, from {MATE_WITHOUT_KERNELS} on", _mubin),
    Row("apache-tvm-ffi", "MUSA's build (+musa), for mate", _tvm_ffi),
    Row("numpy", "1.26, as in Moore Threads' image", _numpy),
    _too_old("torchada", MIN_TORCHADA, "is older than the versions known to support torch 2.11"),
    _too_old(
        "mthreads-ml-py",
        MIN_MTML,
        "has one handle per process: any other user of pymtml who shuts the library down takes it from vLLM",
    ),
    Row("torchvision", f"MUSA's build for this torch, with vLLM {TORCHVISION_IN_WARM_UP}", _torchvision, stops=True),
    Row("GPUs", "MTT S5000 or later", _gpus, stops=True),
)
DISTRIBUTIONS: Final = tuple(row.package for row in ROWS if row.package not in ("Python", "GPUs"))


def _number(version: str | None) -> Version | None:
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def _minor(version: str | None) -> str | None:
    number = _number(version)
    return version if number is None else f"{number.major}.{number.minor}"
