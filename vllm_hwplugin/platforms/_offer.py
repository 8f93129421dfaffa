# SPDX-License-Identifier: Apache-2.0
"""Which platform class vLLM is offered: decided once a process, logged once, and kept for ``doctor``.

Small probes gather evidence, and pure rules decide. For NVIDIA vLLM's own detection decides. A plugin's class wins over
vLLM's own. So offering the CUDA class where vLLM would have chosen another platform (a CPU build on a GPU host, for
one) would break a working set-up.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from .. import gates, journal
from ..errors import HwpluginError

if TYPE_CHECKING:
    from ..musa.host import Musa

logger = logging.getLogger("vllm.hwplugin")

#: Under this key the decision stands among a process's decisions (:func:`vllm_hwplugin.journal.note`).
KEY = "platform"

GATE: Final = "VLLM_HWPLUGIN_PLATFORM"
GROUP: Final = "vllm.platform_plugins"
OWN: Final = "vllm_hwplugin.plugin:platform"

Kind = Literal["cuda", "musa"]

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


_asking = threading.local()


class PlatformError(HwpluginError, RuntimeError):
    """Strict mode is on, and no class can be offered through a fault, or the named one cannot."""


def offer() -> str | None:
    """The qualified name of the class to offer, or None. vLLM asks twice in each process."""
    if getattr(_asking, "rivals", False):
        # Another plugin asks, while it is being asked, whether this one offers a class. It comes first then.
        return None
    return decision().qualname


@functools.cache
def decision() -> Decision:
    """What is offered in this process, and why. Faults and bad values are answers, because vLLM swallows errors."""
    fault: Exception | None = None
    try:
        found = _decide()
    except gates.GateError as error:
        found = Decision(None, str(error), logging.ERROR)
    except Exception as error:
        fault = error
        found = Decision(None, f"its choice failed: {type(error).__name__}: {error}", logging.ERROR)
    if found is not _SWITCHED_OFF:
        level = logging.DEBUG if journal.repeats_another() else found.level
        logger.log(level, "platform: %s", found, exc_info=fault)
        journal.note(KEY, str(found))
    return found


_SWITCHED_OFF = Decision(None, "VLLM_HWPLUGIN=0")


def _decide() -> Decision:
    if not gates.read("VLLM_HWPLUGIN").flag:
        return _SWITCHED_OFF
    choice = gates.read(GATE).text
    found, rivals = foresee(choice, ask_vllm(sys.modules.get("vllm.platforms")), os.environ)
    if found.kind is None:
        return found
    _asking.rivals = True
    try:
        return settle(choice, found, active(rivals))
    finally:
        _asking.rivals = False


def foresee(
    choice: str, builtins: tuple[str, ...] | None, environ: Mapping[str, str]
) -> tuple[Decision, tuple[EntryPoint, ...]]:
    """The choice as far as it can be told without asking other plugins, which would import vLLM.

    Args:
        choice: what the gate `GATE` says.
        builtins: the platforms that vLLM's own detection finds; None where it cannot be asked.
        environ: where the plugins that are to be loaded are named.

    Returns:
        The decision, and the other plugins that a process would ask; none where no class is offered anyway.
    """
    found = decide(choice, builtins, probe_musa)
    return found, tuple(others(environ)) if found.kind is not None else ()


def must_hold(settings: gates.Settings) -> None:
    """Say in strict mode what vLLM would swallow if :func:`offer` raised it.

    Raises:
        PlatformError: this process was asked for a class and could offer none, through a fault or against its gate.
    """
    if not decision.cache_info().currsize or not settings.strict:
        return
    found = decision()
    if found.kind is None and found.level >= logging.ERROR:
        raise PlatformError(
            f"{gates.STRICT}=1, but vllm-hwplugin offers {found}; set {GATE}=off to run without a class"
        )


def note_used() -> None:
    """Add to the process's journal which class vLLM runs on, if it has chosen one by now.

    vLLM keeps the chosen platform under ``vllm.platforms._current_platform`` in all supported versions; the public name
    would make it choose.
    """
    if journal.current() is None:
        return
    used = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    if used is None:
        return
    offered = str(decision()) if decision.cache_info().currsize else "no platform class: vLLM did not ask for one"
    journal.note(KEY, f"{offered}; vLLM runs on {type(used).__module__}.{type(used).__qualname__}")


def others(environ: Mapping[str, str]) -> tuple[EntryPoint, ...]:
    """The entry points of the group that vLLM would load beside this plugin's: ``VLLM_PLUGINS`` filters by name."""
    allowed = environ.get("VLLM_PLUGINS")
    names = None if allowed is None else allowed.split(",")
    return tuple(
        point
        for point in importlib.metadata.entry_points(group=GROUP)
        # By value: an editable and an ordinary installation list the same entry point twice.
        if point.value != OWN and (names is None or point.name in names)
    )


def active(points: Iterable[EntryPoint]) -> tuple[str, ...]:
    """The names of those whose function offers a platform class on this host.

    This calls the function, as vLLM does as well. One that fails offers nothing: vLLM ignores it.
    """

    def offers(point: EntryPoint) -> bool:
        return _answers(f"the platform plugin {point.name} ({point.value})", lambda: point.load()())

    return tuple(dict.fromkeys(point.name for point in points if offers(point)))


# -- the rules, and what they are asked with --------------------------------------------------------------------------


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
    return tuple(name for name, probe in probes.items() if _answers(f"vLLM's probe for {name}", probe))


def _answers(name: str, ask: Callable[[], Any]) -> bool:
    try:
        return ask() is not None
    except Exception:
        # vLLM's resolver, too, takes an error for "not here".
        logger.debug("%s could not be asked for a platform class", name, exc_info=True)
        return False


def probe_musa() -> Musa:
    """Look for Moore Threads GPUs; what that imports is imported where it is asked."""
    from ..musa import host

    return host.probe()
