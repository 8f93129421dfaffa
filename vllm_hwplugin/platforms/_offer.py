# SPDX-License-Identifier: Apache-2.0
"""The choice of the platform class to offer to vLLM, made and logged once per process.

Small probes gather evidence, and pure functions decide. vLLM prefers a plugin's class to its own, so the plugin offers
the CUDA class only if vLLM's detection chooses CUDA: offering it to, say, a CPU build on a GPU host would break a
working setup.
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

from ..base import gates, run_records
from ..base.errors import HwpluginError

if TYPE_CHECKING:
    from ..musa.host import Musa

logger = logging.getLogger("vllm.hwplugin")

#: Key of the decision in the run record (:func:`vllm_hwplugin.base.run_records.note`).
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
    """The class to offer (``kind`` None: no class), and the logging level of the reason."""

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
    """In strict mode: the choice failed, or the class that the user named cannot be offered."""


def offer() -> str | None:
    """Return the qualified name of the class to offer, or None."""
    # vLLM calls this twice per process.
    if getattr(_asking, "rivals", False):
        # A plugin that is being asked asks back whether this plugin offers a class. The other plugin takes precedence.
        return None
    return decision().qualname


@functools.cache
def decision() -> Decision:
    """Return this process's decision. It raises nothing, because vLLM swallows errors here."""
    failure: Exception | None = None
    try:
        choice = _decide()
    except gates.GateError as error:
        choice = Decision(None, str(error), logging.ERROR)
    except Exception as error:
        failure = error
        choice = Decision(None, f"the choice failed: {type(error).__name__}: {error}", logging.ERROR)
    if choice is not _SWITCHED_OFF:
        level = logging.DEBUG if run_records.repeats_another() else choice.level
        logger.log(level, "platform: %s", choice, exc_info=failure)
        run_records.note(KEY, str(choice))
    if choice.kind == "musa":
        from ..musa import triton_gaps

        # Before vLLM imports Triton, as it does once it has its platform.
        triton_gaps.install()
    return choice


_SWITCHED_OFF = Decision(None, "VLLM_HWPLUGIN=0")


def _decide() -> Decision:
    if not gates.read("VLLM_HWPLUGIN").flag:
        return _SWITCHED_OFF
    choice = gates.read(GATE).text
    foreseen, rivals = foresee(choice, ask_vllm(sys.modules.get("vllm.platforms")), os.environ)
    if foreseen.kind is None:
        return foreseen
    _asking.rivals = True
    try:
        return settle(choice, foreseen, active(rivals))
    finally:
        _asking.rivals = False


def foresee(
    choice: str, builtins: tuple[str, ...] | None, environ: Mapping[str, str]
) -> tuple[Decision, tuple[EntryPoint, ...]]:
    """Decide without asking other plugins, which would import vLLM.

    Args:
        builtins: The platforms that vLLM's detection finds; None: vLLM cannot be asked.
        environ: Environment variables, for ``VLLM_PLUGINS``.

    Returns:
        The decision, and the other plugins that a process would ask (empty if no class is offered).
    """
    foreseen = decide(choice, builtins, probe_musa)
    return foreseen, tuple(others(environ)) if foreseen.kind is not None else ()


def must_hold(settings: gates.Settings) -> None:
    """Raise the error of :func:`offer` in strict mode.

    vLLM would swallow it there.

    Raises:
        PlatformError: vLLM asked for a class, and the choice failed or the named class cannot be offered.
    """
    if not decision.cache_info().currsize or not settings.strict:
        return
    choice = decision()
    if choice.kind is None and choice.level >= logging.ERROR:
        raise PlatformError(
            f"{gates.STRICT}=1, but vllm-hwplugin offers {choice}; set {GATE}=off to run without a class"
        )


def note_used() -> None:
    """Record the platform class that vLLM has chosen, if it has.

    All supported versions store it in ``vllm.platforms._current_platform``; reading the public name would make vLLM
    choose.
    """
    if run_records.current() is None:
        return
    used = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    if used is None:
        return
    offered = str(decision()) if decision.cache_info().currsize else "no platform class: vLLM did not ask for one"
    run_records.note(KEY, f"{offered}; vLLM runs on {type(used).__module__}.{type(used).__qualname__}")


def others(environ: Mapping[str, str]) -> tuple[EntryPoint, ...]:
    """Return the entry points of other platform plugins to be loaded.

    ``VLLM_PLUGINS`` filters by name.
    """
    allowed = environ.get("VLLM_PLUGINS")
    names = None if allowed is None else allowed.split(",")
    return tuple(
        point
        for point in importlib.metadata.entry_points(group=GROUP)
        # Compared by value: an editable and a regular installation list the same entry point twice.
        if point.value != OWN and (names is None or point.name in names)
    )


def active(points: Iterable[EntryPoint]) -> tuple[str, ...]:
    """Return the names of plugins that offer a class on this host.

    This calls their functions, as vLLM does. vLLM ignores a function that fails, and so does this one.
    """

    def offers(point: EntryPoint) -> bool:
        return _answers(f"the platform plugin {point.name} ({point.value})", lambda: point.load()())

    return tuple(dict.fromkeys(point.name for point in points if offers(point)))


# -- rules and probes --------------------------------------------------------------------------------------------------


def decide(choice: str, builtins: tuple[str, ...] | None, musa: Callable[[], Musa]) -> Decision:
    """Choose a platform class.

    Args:
        builtins: The platforms that vLLM's detection finds on this host; None: vLLM cannot be asked.
        musa: Probes for Moore Threads GPUs; called only if the answer matters.
    """
    if choice == "off":
        return Decision(None, f"{GATE}=off")
    if builtins is None:
        return Decision(None, "vLLM's platform detection is not loaded")
    own = " and ".join(builtins)
    if choice == "cuda":
        if builtins == ("cuda",):
            return Decision("cuda", f"{GATE}=cuda, and vLLM's detection chooses CUDA", logging.INFO)
        return Decision(
            None,
            f"{GATE}=cuda, but vLLM's detection finds {own or 'no platform'} on this host, expected CUDA only; the "
            "plugin offers no class. Use auto, or a CUDA build of vLLM on a host whose NVIDIA driver answers",
            logging.ERROR,
        )
    if choice == "musa":
        return _musa(musa(), asked=True)
    if builtins == ("cuda",):
        return Decision("cuda", "vLLM's detection chooses CUDA", logging.INFO)
    if builtins:
        return Decision(None, f"vLLM's detection finds {own}, expected CUDA only")
    return _musa(musa(), asked=False)


def _musa(host: Musa, *, asked: bool) -> Decision:
    level = logging.ERROR if asked else logging.DEBUG
    head = f"{GATE}=musa, but" if asked else "vLLM's detection finds no platform, and"
    if host.missing:
        return Decision(None, f"{head} not installed for Moore Threads: {', '.join(host.missing)}", level)
    if not host.devices:
        trouble = host.trouble or "the driver counts none"
        return Decision(None, f"{head} no Moore Threads GPU answers: {trouble}", level)
    gpus = "1 Moore Threads GPU" if host.devices == 1 else f"{host.devices} Moore Threads GPUs"
    return Decision("musa", f"{gpus}, torch_musa and torchada", logging.INFO)


def settle(choice: str, decision: Decision, rivals: tuple[str, ...]) -> Decision:
    """Adjust the decision to other platform plugins.

    vLLM refuses to start if two plugins offer a class.

    Args:
        rivals: Names of the other platform plugins that offer a class on this host.
    """
    if decision.kind is None or not rivals:
        return decision
    names = " and ".join(rivals)
    if choice == "auto":
        return Decision(
            None,
            f"the platform plugin {names} offers a class here, and vLLM accepts only one plugin's; the patches stay "
            f"active. To use vllm-hwplugin's class instead, uninstall that plugin or remove it from VLLM_PLUGINS "
            f"(VLLM_PLUGINS=hwplugin loads only this plugin); {GATE}=off silences this warning",
            logging.WARNING,
        )
    return decision._replace(
        reason=f"{decision.reason}; but the platform plugin {names} also offers a class, and vLLM will stop with 'Only "
        f"one platform plugin can be activated': remove {names} from VLLM_PLUGINS (VLLM_PLUGINS=hwplugin loads only "
        f"this plugin), or set {GATE}=off",
        level=logging.ERROR,
    )


def ask_vllm(platforms: Any) -> tuple[str, ...] | None:
    """Return the names of vLLM's platforms present on this host.

    None: vLLM cannot be asked. This calls vLLM's probes again, which vLLM has called just before it asks a plugin. They
    use NVML and the installed version, and start no device.

    Args:
        platforms: The module ``vllm.platforms``, or None if it is not imported.
    """
    probes: Mapping[str, Callable[[], str | None]] | None = getattr(platforms, "builtin_platform_plugins", None)
    if probes is None:
        return None
    return tuple(name for name, probe in probes.items() if _answers(f"vLLM's probe for {name}", probe))


def _answers(name: str, ask: Callable[[], Any]) -> bool:
    try:
        return ask() is not None
    except Exception:
        # vLLM's resolver also takes an error for "not here".
        logger.debug("%s could not be asked for a platform class", name, exc_info=True)
        return False


def probe_musa() -> Musa:
    """Look for Moore Threads GPUs."""
    from ..musa import host

    return host.probe()
