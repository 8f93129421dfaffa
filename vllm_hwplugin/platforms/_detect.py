# SPDX-License-Identifier: Apache-2.0
"""Which platform class fits this host: small probes that gather evidence, and pure rules that decide from it.

For NVIDIA vLLM's own detection decides. A plugin's class wins over vLLM's own. So offering the CUDA class where vLLM
would have chosen another platform (a CPU build on a GPU host, for one) would break a working set-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from ..musa.host import Musa

logger = logging.getLogger("vllm.hwplugin")

Kind = Literal["cuda", "musa"]

GATE: Final = "VLLM_HWPLUGIN_PLATFORM"

CLASSES: Final[Mapping[Kind, str]] = {
    "cuda": "vllm_hwplugin.platforms.cuda.CudaPlatform",
    "musa": "vllm_hwplugin.musa.platform.MusaPlatform",
}


class Decision(NamedTuple):
    """``kind`` is None where no class is offered; ``level`` is the level of :mod:`logging` to say it at."""

    kind: Kind | None
    reason: str
    level: int = logging.DEBUG

    @property
    def qualname(self) -> str | None:
        return None if self.kind is None else CLASSES[self.kind]

    def __str__(self) -> str:
        return f"{self.qualname or 'no platform class'}: {self.reason}"


def decide(choice: str, builtins: tuple[str, ...] | None, musa: Callable[[], Musa]) -> Decision:
    """Choose a platform class.

    Args:
        choice: the value of ``VLLM_HWPLUGIN_PLATFORM``.
        builtins: names of vLLM's own platforms that are present on this host, as vLLM's detection answers; None where
            vLLM was not there to be asked.
        musa: probes for Moore Threads GPUs; called only where the answer matters.
    """
    if choice == "off":
        return Decision(None, f"{GATE}=off")
    if builtins is None:
        return Decision(None, "vLLM's own platform detection is not loaded, so there is nothing to agree with")
    own = " and ".join(builtins)
    if choice == "cuda":
        if builtins == ("cuda",):
            return Decision("cuda", f"{GATE}=cuda, and vLLM's own detection chooses CUDA", logging.INFO)
        found = f"it finds {own}" if builtins else "it finds none of its platforms"
        return Decision(
            None,
            f"{GATE}=cuda, but vLLM's own detection does not choose CUDA on this host: {found}; vLLM runs as if the "
            "plugin offered none. Use auto, or a CUDA build of vLLM on a host whose NVIDIA driver answers",
            logging.ERROR,
        )
    if choice == "musa":
        return _musa(musa(), asked=True)
    if builtins == ("cuda",):
        return Decision("cuda", "vLLM's own detection chooses CUDA", logging.INFO)
    if builtins:
        return Decision(None, f"vLLM's own detection finds {own}, not CUDA alone")
    return _musa(musa(), asked=False)


def _musa(found: Musa, *, asked: bool) -> Decision:
    level = logging.ERROR if asked else logging.DEBUG
    head = f"{GATE}=musa, but" if asked else "vLLM's own detection finds nothing, and"
    if found.missing:
        return Decision(None, f"{head} not installed for Moore Threads: {', '.join(found.missing)}", level)
    if not found.devices:
        trouble = found.trouble or "the driver counts none"
        return Decision(None, f"{head} no Moore Threads GPU answers: {trouble}", level)
    gpus = "1 Moore Threads GPU" if found.devices == 1 else f"{found.devices} Moore Threads GPUs"
    return Decision("musa", f"{gpus}, torch_musa and torchada", logging.INFO)


def settle(choice: str, decision: Decision, rivals: tuple[str, ...]) -> Decision:
    """Take other platform plugins into account: vLLM refuses to start when two of them offer a class.

    Args:
        rivals: names of the other entry points of the group whose function offers a class on this host.
    """
    if decision.kind is None or not rivals:
        return decision
    names = " and ".join(rivals)
    if choice == "auto":
        return Decision(
            None,
            f"the platform plugin {names} offers a class here, and vLLM takes one plugin's only; the patches stay in "
            f"force without it. To use vllm-hwplugin's class instead, uninstall that plugin or leave it out of "
            f"VLLM_PLUGINS (VLLM_PLUGINS=hwplugin loads this one alone); {GATE}=off silences this",
            logging.WARNING,
        )
    return decision._replace(
        reason=f"{decision.reason}; but the platform plugin {names} offers a class, too, and vLLM will stop with 'Only "
        f"one platform plugin can be activated': leave {names} out of VLLM_PLUGINS (VLLM_PLUGINS=hwplugin loads this "
        f"one alone), or set {GATE}=off",
        level=logging.ERROR,
    )


def ask_vllm(platforms: Any) -> tuple[str, ...] | None:
    """The names of vLLM's own platforms that are present on this host.

    It calls vLLM's probes once more; vLLM has called them just before it asks a plugin. They use NVML and the installed
    version, and start no device.

    Args:
        platforms: the module ``vllm.platforms``, or None where it is not imported.
    """
    probes: Mapping[str, Callable[[], str | None]] | None = getattr(platforms, "builtin_platform_plugins", None)
    if probes is None:
        return None
    return tuple(name for name, probe in probes.items() if _answers(name, probe))


def _answers(name: str, probe: Callable[[], str | None]) -> bool:
    try:
        return probe() is not None
    except Exception:
        # vLLM's resolver, too, takes an error for "not here".
        logger.debug("vLLM's probe for %s failed", name, exc_info=True)
        return False


def probe_musa() -> Musa:
    """Look for Moore Threads GPUs; what that imports is imported where it is asked."""
    from ..musa import host

    return host.probe()
