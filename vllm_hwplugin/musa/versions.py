# SPDX-License-Identifier: Apache-2.0
"""Which versions of a Moore Threads host's packages go together: for ``doctor``, the platform, and docs/platforms.md.

All of it is read in what Moore Threads publish (sources, requirements, guides) and in vLLM's own requirements; nothing
was run on MUSA hardware. Nothing here imports torch or vLLM.
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

#: The first Triton that compiles the kernel which vLLM's drafters run after each verification.
MIN_TRITON_TO_SPECULATE: Final = Version("3.3")

#: The first mate that takes a page table and writes where it is told to.
MIN_MATE: Final = Version("0.2")

#: The first mate whose prebuilt kernels are a distribution of their own, mate-mubin.
MATE_WITHOUT_KERNELS: Final = Version("0.2.6")

#: The oldest torchada that is named for torch 2.11 (by vllm-musa). On 0.1.48 vLLM's worker is reported to stop.
MIN_TORCHADA: Final = Version("0.1.95")

#: The first pymtml that counts its callers; before, one's end closes the driver's library for all.
MIN_MTML: Final = Version("2.4")

#: The versions of vLLM that import torchvision while an engine warms up, whatever its model is.
TORCHVISION_IN_WARM_UP: Final = Versions(">=0.24")

#: The first MUSA architecture that the platform class runs on, that of the MTT S5000; and earlier GPUs, as the driver
#: names them.
MIN_CAPABILITY: Final = (3, 1)
EARLIER_GPUS: Final = ("MTT S80", "MTT S3000", "MTT S4000")
WIDE_WARPS: Final = (
    "before MUSA 3.1 a warp has 128 threads, and Triton's kernels are reported to add up wrongly there; use an MTT "
    "S5000"
)

_PUBLIC_BACKENDS: Final = frozenset(("amd", "cpu", "nvidia"))
_INDEX: Final = "from Moore Threads' own index"


@dataclass(frozen=True, slots=True)
class Pin:
    """The torch that versions of vLLM require, by its minor version, and the torch_musa that they run with.

    From 0.27 on that is one for an older torch: 0.27 to 0.32 ran with torch 2.11 on the simulated device, and vllm-musa
    takes it for 0.28.

    Attributes:
        since: the first of those versions.
        before: the first that is none of them.
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
        """Minor versions: the torch that vLLM requires, and that of torch_musa where it is another."""
        return tuple(dict.fromkeys((self.torch, *([_minor(self.torch_musa)] if self.torch_musa else []))))

    def __str__(self) -> str:
        return f"{self.since} and later, before {self.before}"


PINS: Final = (
    Pin("0.20", "0.27", "2.11", "2.11.0.post2"),
    Pin("0.27", "0.33", "2.13", "2.11.0.post2"),
    Pin("0.33", "0.34", "2.14"),
)


@dataclass(frozen=True, slots=True)
class MusaHost:
    """What is installed on a Moore Threads host.

    Attributes:
        versions: distribution -> its version, or None where it is not installed; of `DISTRIBUTIONS`.
        vllm: vLLM's version.
        vendors_mate: whether the package ``mate`` is Moore Threads' own; None where there is none.
        triton_backends: the devices that the installed Triton has compilers for; empty where that is not known.
        gpus: the GPUs' names, as the driver tells them.
    """

    versions: Mapping[str, str | None]
    vllm: str | None = None
    vendors_mate: bool | None = None
    triton_backends: frozenset[str] = frozenset()
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """``trouble`` is empty where nothing is wrong; ``stops``: an engine does not start with it."""

    package: str
    found: str
    expected: str
    trouble: str = ""
    stops: bool = False


DISTRIBUTIONS: Final = (
    "torch",
    "torch_musa",
    "triton",
    "mate",
    "mate-mubin",
    "torchada",
    "mthreads-ml-py",
    "torchvision",
)


def installed(distribution: str) -> str | None:
    """The version of a distribution, by its metadata; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_trouble(version: str | None) -> str:
    """What is wrong with this Triton, as a sentence without its end; empty where nothing is known to be.

    Args:
        version: of the distribution ``triton``, or None where it is not installed.
    """
    wanted = f"expected MUSA's build of {MIN_TRITON} or later, {_INDEX}"
    if version is None:
        return f"Triton is not installed, and vLLM's kernels are written in it; {wanted}"
    number = _number(version)
    if number is None or number.release >= MIN_TRITON.release:
        return ""
    kernels = ["TRITON_ATTN", "TRITON_MLA", "LoRA", "top-k and top-p"]
    if number.release < MIN_TRITON_TO_SPECULATE.release:
        kernels.insert(0, "speculation")
    return f"Triton {version} cannot compile vLLM's kernels ({', '.join(kernels)}); {wanted}"


def check(host: MusaHost, min_torch: Version) -> tuple[Finding, ...]:
    """Judge what is installed, package by package.

    Args:
        min_torch: the first PyTorch that the plugin's kernels are built for.
    """
    pin, found = pin_of(host.vllm), host.versions.get
    number = _number(found("mthreads-ml-py"))
    one_handle = number is not None and number.release < MIN_MTML.release
    rows = (
        (
            "torch",
            f"{' or '.join(pin.torches)}, for vLLM {host.vllm}" if pin else "what torch_musa is for",
            _torch(host, pin),
        ),
        (
            "torch_musa",
            f"the minor version of torch, and {min_torch} or later for the plugin's kernels",
            _torch_musa(host, min_torch),
        ),
        ("triton", f"{MIN_TRITON} or later, MUSA's build", _triton(host)),
        ("mate", f"{MIN_MATE} or later, Moore Threads' own", _mate(host)),
        ("mate-mubin", f"that of mate, from {MATE_WITHOUT_KERNELS} on", _mubin(host)),
        ("torchada", f"{MIN_TORCHADA} or later", _torchada(host)),
        (
            "mthreads-ml-py",
            f"{MIN_MTML} or later",
            f"mthreads-ml-py {number} has one handle for a whole process, so that any other user of pymtml in it who "
            f"shuts the library down takes it from vLLM; expected {MIN_MTML} or later"
            if one_handle
            else "",
        ),
    )
    findings = [Finding(package, found(package) or "", expected, trouble) for package, expected, trouble in rows]
    needed = host.vllm is not None and TORCHVISION_IN_WARM_UP.covers(host.vllm)
    trouble = ""
    if needed and found("torchvision") is None:
        trouble = (
            f"torchvision is not installed, and vLLM {host.vllm} imports it while it warms up, with any model; install "
            f"MUSA's build for this torch, {_INDEX}"
        )
    expected = "MUSA's build for this torch" if needed else "any"
    findings.append(Finding("torchvision", found("torchvision") or "", expected, trouble, bool(trouble)))
    if host.gpus:
        earlier = [name for name in dict.fromkeys(host.gpus) if name in EARLIER_GPUS]
        trouble = f"an engine does not start on the {' and '.join(earlier)}: {WIDE_WARPS}" if earlier else ""
        findings.append(Finding("GPUs", ", ".join(host.gpus), "MTT S5000 or later", trouble, bool(earlier)))
    return tuple(findings)


def _torch(host: MusaHost, pin: Pin | None) -> str:
    found = host.versions.get("torch")
    if pin is None or found is None or _minor(found) in pin.torches:
        return ""
    trouble = f"vLLM {host.vllm} is made for torch {pin.torch}, and torch is {found}; "
    if pin.torch_musa:
        return trouble + f"install torch and torch_musa {pin.torch_musa} {_INDEX}"
    newest = next(item for item in reversed(PINS) if item.torch_musa)
    return trouble + f"no torch_musa is known for it: take a vLLM of {newest}, with torch {_minor(newest.torch_musa)}"


def _torch_musa(host: MusaHost, min_torch: Version) -> str:
    found, torch = host.versions.get("torch_musa"), host.versions.get("torch")
    if found is None:
        return f"torch_musa is not installed, without which torch has no MUSA device; install it {_INDEX}"
    if torch is not None and _minor(found) != _minor(torch):
        return (
            f"torch_musa {found} is made for torch {_minor(found)}, and torch is {torch}; install both of one version, "
            f"{_INDEX}"
        )
    number = _number(found)
    if number is None or number.release >= min_torch.release:
        return ""
    return (
        f"torch_musa {found} is too old for the plugin's kernels, which torch references then replace; expected "
        f"{min_torch} or later"
    )


def _triton(host: MusaHost) -> str:
    found = host.versions.get("triton")
    if trouble := triton_trouble(found):
        return trouble
    if not host.triton_backends or host.triton_backends - _PUBLIC_BACKENDS:
        return ""
    return (
        f"Triton {found} is the public build, which compiles for {' and '.join(sorted(host.triton_backends))} alone; "
        f"install MUSA's build of {MIN_TRITON} or later {_INDEX}"
    )


def _mate(host: MusaHost) -> str:
    found = host.versions.get("mate")
    if host.vendors_mate is False:
        return (
            f"the installed mate{f' {found}' if found else ''} is another project of that name, so there is no "
            f"FLASH_ATTN; uninstall it and install Moore Threads' mate {_INDEX}"
        )
    if host.vendors_mate is None and found is None:
        return f"mate is not installed, so there is no FLASH_ATTN; install Moore Threads' mate {_INDEX}"
    number = _number(found)
    if number is None or number.release >= MIN_MATE.release:
        return ""
    return (
        f"mate {found} is too old: its attention takes no page table, so there is no FLASH_ATTN; expected {MIN_MATE} "
        "or later"
    )


def _mubin(host: MusaHost) -> str:
    mate = host.versions.get("mate")
    number = _number(mate)
    needed = host.vendors_mate and number is not None and number.release >= MATE_WITHOUT_KERNELS.release
    if not needed or host.versions.get("mate-mubin") is not None:
        return ""
    return (
        f"mate-mubin is not installed, so mate {mate} gets its kernels from the network when they are first called; "
        f"install it {_INDEX}"
    )


def _torchada(host: MusaHost) -> str:
    number = _number(host.versions.get("torchada"))
    if number is None or number.release >= MIN_TORCHADA.release:
        return ""
    return f"torchada {number} is older than what is known to serve torch 2.11; expected {MIN_TORCHADA} or later"


def pin_of(vllm: str | None) -> Pin | None:
    """The torch that a version of vLLM requires; None where that is not known."""
    return None if vllm is None else next((pin for pin in PINS if pin.vllm.covers(vllm)), None)


def _number(version: str | None) -> Version | None:
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def _minor(version: str) -> str:
    number = _number(version)
    return version if number is None else f"{number.major}.{number.minor}"
