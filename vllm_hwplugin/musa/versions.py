# SPDX-License-Identifier: Apache-2.0
"""Package versions that fit together on a Moore Threads host: for ``doctor``, the platform and docs/platforms.md.

Sources: what Moore Threads publish (sources, requirements, guides) and vLLM's requirements. Nothing was run on MUSA
hardware. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from packaging.version import InvalidVersion, Version

from ..versions import Versions

#: The first Triton whose MUSA build is expected to compile vLLM's kernels; vllm-musa changes them for 3.2.
MIN_TRITON: Final = Version("3.6")
#: The first Triton that compiles the kernel that vLLM's drafters run after each verification.
MIN_TRITON_TO_SPECULATE: Final = Version("3.3")
#: The first mate that takes a page table and an output tensor.
MIN_MATE: Final = Version("0.2")
#: The first mate whose prebuilt kernels are a separate distribution, mate-mubin.
MATE_WITHOUT_KERNELS: Final = Version("0.2.6")
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

DISTRIBUTIONS: Final = (
    "torch", "torch_musa", "triton", "mate", "mate-mubin", "torchada", "mthreads-ml-py", "torchvision",
)  # fmt: skip
#: With a problem of one of these packages, an engine does not start.
_NEEDED: Final = ("torchvision", "GPUs")
_PUBLIC_BACKENDS: Final = frozenset(("amd", "cpu", "nvidia"))
_INDEX: Final = "from Moore Threads' own index"


@dataclass(frozen=True, slots=True)
class Pin:
    """The minor version of torch that a range of vLLM versions requires, and the torch_musa that fits.

    From 0.27 on torch_musa is for an older torch: 0.27 to 0.32 ran with torch 2.11 on the simulated device, and
    vllm-musa uses it for 0.28.

    Attributes:
        since: The first version of the range.
        before: The first version after the range.
    """

    since: str
    before: str
    torch: str
    torch_musa: str = ""

    @property
    def vllm(self) -> Versions:
        return Versions(f">={self.since},<{self.before}")

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
        versions: Name in `DISTRIBUTIONS` -> its version; None: not installed.
        vllm: vLLM's version.
        vendors_mate: Whether the package ``mate`` is Moore Threads'; None: not installed.
        triton_backends: Devices that the installed Triton compiles for; empty: not known.
        gpus: GPU names that the driver reports.
    """

    versions: Mapping[str, str | None]
    vllm: str | None = None
    vendors_mate: bool | None = None
    triton_backends: frozenset[str] = frozenset()
    gpus: tuple[str, ...] = ()

    def has(self, distribution: str) -> bool:
        return self.versions.get(distribution) is not None

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
    kernels = ["TRITON_ATTN", "TRITON_MLA", "LoRA", "top-k and top-p"]
    if number.release < MIN_TRITON_TO_SPECULATE.release:
        kernels.insert(0, "speculation")
    return f"Triton {version} cannot compile vLLM's kernels ({', '.join(kernels)}); {expected}"


def check(host: MusaHost, min_torch: Version) -> tuple[Finding, ...]:
    """Check the packages and GPUs of a host.

    Args:
        min_torch: The first PyTorch that the plugin's kernels support.
    """
    pin, vllm, versions = pin_of(host.vllm), host.vllm, host.versions
    torch, torch_musa, triton, mate = (versions.get(name) for name in ("torch", "torch_musa", "triton", "mate"))
    other_torch = pin is not None and torch is not None and _minor(torch) not in pin.torches
    needs_torchvision = vllm is not None and TORCHVISION_IN_WARM_UP.covers(vllm)
    needs_mubin = host.vendors_mate and _number(mate) is not None and not host.older("mate", MATE_WITHOUT_KERNELS)
    newest = next(pin for pin in reversed(PINS) if pin.torch_musa)
    earlier_gpus = [name for name in dict.fromkeys(host.gpus) if name in EARLIER_GPUS]
    requires = f"vLLM {vllm} requires torch {pin.torch if pin else None}, found {torch}"
    # Package, what fits, and the reasons why it does not fit: the first that holds is reported.
    rows: tuple[tuple[str, str, dict[str, bool | None]], ...] = (
        ("torch", f"{' or '.join(pin.torches)}, for vLLM {vllm}" if pin else "the torch of torch_musa", {
            f"{requires}; install torch and torch_musa {pin.torch_musa if pin else None} {_INDEX}":
                other_torch and bool(pin and pin.torch_musa),
            f"{requires}; no torch_musa is known for it: use a vLLM of {newest}, with torch {newest.torches[-1]}":
                other_torch,
        }),
        ("torch_musa", f"the minor version of torch, and {min_torch} or later for the plugin's kernels", {
            f"torch_musa is not installed, and torch has no MUSA device without it; install it {_INDEX}":
                torch_musa is None,
            f"torch_musa {torch_musa} requires torch {_minor(torch_musa)}, found {torch}; install matching versions "
            f"{_INDEX}": torch is not None and _minor(torch_musa) != _minor(torch),
            f"torch_musa {torch_musa} is too old for the plugin's kernels, so torch references replace them; expected "
            f"{min_torch} or later": host.older("torch_musa", min_torch),
        }),
        ("triton", f"{MIN_TRITON} or later, MUSA's build", {
            triton_trouble(triton): True,
            f"Triton {triton} is the public build, which compiles only for {' and '.join(sorted(host.triton_backends))}"
            f"; install MUSA's build of {MIN_TRITON} or later {_INDEX}":
                bool(host.triton_backends) and not host.triton_backends - _PUBLIC_BACKENDS,
        }),
        ("mate", f"{MIN_MATE} or later, Moore Threads' own", {
            f"mate {mate or 'without a version'} is another project of that name, so there is no FLASH_ATTN; uninstall "
            f"it and install Moore Threads' mate {_INDEX}": host.vendors_mate is False,
            f"mate is not installed, so there is no FLASH_ATTN; install Moore Threads' mate {_INDEX}":
                host.vendors_mate is None and mate is None,
            f"mate {mate} is too old: its attention takes no page table, so there is no FLASH_ATTN; expected "
            f"{MIN_MATE} or later": host.older("mate", MIN_MATE),
        }),
        ("mate-mubin", f"mate's version, from {MATE_WITHOUT_KERNELS} on", {
            f"mate-mubin is not installed, so mate {mate} downloads its kernels when they are first called; install it "
            f"{_INDEX}": needs_mubin and not host.has("mate-mubin"),
        }),
        ("torchada", f"{MIN_TORCHADA} or later", {
            f"torchada {versions.get('torchada')} is older than the versions known to support torch 2.11; expected "
            f"{MIN_TORCHADA} or later": host.older("torchada", MIN_TORCHADA),
        }),
        ("mthreads-ml-py", f"{MIN_MTML} or later", {
            f"mthreads-ml-py {versions.get('mthreads-ml-py')} has one handle per process: any other user of pymtml who "
            f"shuts the library down takes it from vLLM; expected {MIN_MTML} or later":
                host.older("mthreads-ml-py", MIN_MTML),
        }),
        ("torchvision", "MUSA's build for this torch" if needs_torchvision else "any", {
            f"torchvision is not installed, and vLLM {vllm} imports it during warm-up with any model; install MUSA's "
            f"build for this torch, {_INDEX}": needs_torchvision and not host.has("torchvision"),
        }),
        ("GPUs", "MTT S5000 or later", {
            f"an engine does not start on the {' and '.join(earlier_gpus)}: {WIDE_WARPS}": bool(earlier_gpus),
        }),
    )  # fmt: skip
    findings = []
    for package, expected, troubles in rows[: None if host.gpus else -1]:
        version = versions.get(package) or "" if package != "GPUs" else ", ".join(host.gpus)
        trouble = next((text for text, holds in troubles.items() if text and holds), "")
        findings.append(Finding(package, version, expected, trouble, bool(trouble) and package in _NEEDED))
    return tuple(findings)


def pin_of(vllm: str | None) -> Pin | None:
    """Return the torch that a vLLM version requires; None: not known."""
    return None if vllm is None else next((pin for pin in PINS if pin.vllm.covers(vllm)), None)


def _number(version: str | None) -> Version | None:
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def _minor(version: str | None) -> str | None:
    number = _number(version)
    return version if number is None else f"{number.major}.{number.minor}"
