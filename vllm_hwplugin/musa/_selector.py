# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's attention backends the MUSA platform uses.

vLLM's compiled kernels (``vllm._C``, FlashAttention, FlashInfer, FlashMLA, CUTLASS) are built for other devices. The
plugin's FLASH_ATTN and FLASHMLA are left, if mate is installed, and what compiles on the host: Triton kernels, if
Triton is new enough for them, and FlexAttention through ``torch.compile``. Then each backend's own declarations decide,
by vLLM's own ``validate_configuration``. Not run on MUSA hardware.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Final

from vllm_hwplugin.attention.backends import MUSA
from vllm_hwplugin.attention.capabilities import reserves

from . import versions

logger = logging.getLogger("vllm.hwplugin")

# Best first, as vllm-musa has them: mate is the vendor's library, and its kernels depend on no release of Triton. Names
# and not members: vLLM's list of backends differs from version to version.
DECODER: Final = (MUSA.name, "TRITON_ATTN", "FLEX_ATTENTION")
MLA: Final = ("FLASHMLA", "TRITON_MLA")
# The plugin's classes in place of vLLM's: module and name.
_OWN: Final = {
    MUSA.name: (MUSA.module, MUSA.cls),
    "FLASHMLA": ("vllm_hwplugin.musa.mla", "MusaFlashMLABackend"),
}
_IN_TRITON: Final = ("TRITON_ATTN", "TRITON_MLA")


def choose(selected: Any | None, config: Any, capability: Any, known: Any) -> str:
    """The qualified name of the backend's class.

    Args:
        selected: the member of ``AttentionBackendEnum`` that the user named, or None.
        config: vLLM's ``AttentionSelectorConfig`` for one layer.
        capability: the device's ``DeviceCapability``, or None.
        known: ``AttentionBackendEnum``.

    Raises:
        ValueError: the named backend cannot run here, or none can; with each backend's reason.
    """
    if config.use_sparse:
        raise ValueError(
            "sparse MLA attention is not supported on MUSA: vLLM has sparse kernels for other devices only; "
            "use a model without an indexer"
        )
    names = MLA if config.use_mla else DECODER
    if selected is None:
        return _first([known[name] for name in names], config, capability, named=False)
    # A backend that a plugin registered under this name is that plugin's responsibility.
    if selected.name not in names and not selected.is_overridden():
        raise ValueError(
            f"attention backend {selected.name} is not supported on MUSA: expected {' or '.join(names)}"
            f"{' for MLA' if config.use_mla else ''}, or one that a plugin has registered; without a name one is chosen"
        )
    return _first([selected], config, capability, named=True)


def _first(members: Sequence[Any], config: Any, capability: Any, *, named: bool) -> str:
    refused: dict[str, list[str]] = {}
    only_reserved: list[str] = []
    asked = config._asdict()
    for member in members:
        try:
            backend = _own_class(member) if _is_own(member) else member.get_class()
        except Exception as error:
            # Importing it runs what it needs (mate, Triton), and those raise whatever they like without a device or in
            # a wrong build. That ends this backend and not the choice.
            refused[member.name] = [_unavailable(member, error)]
            continue
        reasons = backend.validate_configuration(device_capability=capability, **asked)
        if reasons:
            refused[member.name] = reasons
            continue
        # What holds with a reserve is the user's to choose, and not chosen for the user.
        reserved = [*reserves(getattr(backend, "declarations", {}), asked), *_triton_troubles(member)]
        if named or not reserved:
            if reserved:
                logger.warning("%s", "; ".join(reserved))
            return f"{backend.__module__}.{backend.__qualname__}"
        refused[member.name] = reserved
        only_reserved.append(member.name)
    layer = ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None and value is not False)
    told = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    if named:
        way_out = "leave the name out, and one that fits is chosen"
    elif only_reserved:
        way_out = f"--attention-backend {' or '.join(only_reserved)} takes it in spite of that"
    else:
        way_out = "see docs/platforms.md for what each needs on the host"
    raise ValueError(f"no attention backend on MUSA for a layer with {layer} ({told}); {way_out}")


def _triton_troubles(member: Any) -> list[str]:
    """A Triton that cannot compile the backend's kernels, unless a plugin has put other ones there."""
    if member.name not in _IN_TRITON or member.is_overridden():
        return []
    trouble = versions.triton_trouble(versions.installed("triton"))
    return [trouble] if trouble else []


def _unavailable(member: Any, error: Exception) -> str:
    """Why a backend cannot be imported; in the log as well if more is wrong than a missing package."""
    needed = f"; it needs {MUSA.needs}" if _is_own(member) else ""
    reason = f"{type(error).__name__}: {error}{needed}"
    if not isinstance(error, ModuleNotFoundError):
        logger.warning("no %s on this host: %s", member.name, reason)
    return reason


def _is_own(member: Any) -> bool:
    """Whether the plugin's class stands in place of vLLM's."""
    return bool(member.name in _OWN and not member.is_overridden())


def _own_class(member: Any) -> Any:
    module, name = _OWN[member.name]
    return getattr(importlib.import_module(module), name)
