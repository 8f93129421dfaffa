# SPDX-License-Identifier: Apache-2.0
"""The MUSA platform's choice of an attention backend.

Candidates are the plugin's FLASH_ATTN and FLASHMLA (they need mate), Triton kernels (they need a recent Triton), and
FlexAttention. vLLM's ``validate_configuration`` checks each backend's declarations. Not run on MUSA hardware.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Sequence
from typing import Any, Final

from vllm_hwplugin.attention.backends import MUSA, MUSA_NEEDS
from vllm_hwplugin.attention.capabilities import reserves

from . import versions

logger = logging.getLogger("vllm.hwplugin")

# Best first, as in vllm-musa: mate's kernels need no particular Triton. vLLM's enum differs between versions.
DECODER: Final = (MUSA.name, "TRITON_ATTN", "FLEX_ATTENTION")
MLA: Final = ("FLASHMLA", "TRITON_MLA")
# The plugin's classes that replace vLLM's.
_OWN: Final = {MUSA.name: f"{MUSA.module}:{MUSA.cls}", "FLASHMLA": "vllm_hwplugin.musa.mla:MusaFlashMLABackend"}
_IN_TRITON: Final = ("TRITON_ATTN", "TRITON_MLA")


def choose(selected: Any | None, config: Any, capability: Any, known: Any) -> str:
    """Return the class of `selected` or the first fitting backend.

    Raises:
        ValueError: The named backend cannot run here, or none can; with each backend's reason.
    """
    if config.use_sparse:
        raise ValueError(
            "sparse MLA attention is not supported on MUSA: vLLM has sparse kernels for other devices only; "
            "use a model without an indexer"
        )
    names = MLA if config.use_mla else DECODER
    if selected is None:
        return _first([known[name] for name in names], config, capability, named=False)
    # Another plugin answers for a backend that it registered under this name.
    if selected.name not in names and not selected.is_overridden():
        raise ValueError(
            f"attention backend {selected.name} is not supported on MUSA: expected {' or '.join(names)}"
            f"{' for MLA' if config.use_mla else ''}, or a backend that a plugin has registered; omit the name to let "
            "the plugin choose"
        )
    return _first([selected], config, capability, named=True)


def _first(members: Sequence[Any], config: Any, capability: Any, *, named: bool) -> str:
    refused: dict[str, list[str]] = {}
    only_reserved: list[str] = []
    needs = config._asdict()
    for member in members:
        own = None if member.is_overridden() else _OWN.get(member.name)
        try:
            backend = pkgutil.resolve_name(own) if own else member.get_class()
        except Exception as error:
            # The import loads mate or Triton, which raise any error without a device or in a wrong build. That refuses
            # only this backend.
            reason = f"{type(error).__name__}: {error}" + (f"; it needs {MUSA_NEEDS}" if own else "")
            if not isinstance(error, ModuleNotFoundError):
                logger.warning("no %s on this host: %s", member.name, reason)
            refused[member.name] = [reason]
            continue
        reasons = backend.validate_configuration(device_capability=capability, **needs)
        if reasons:
            refused[member.name] = reasons
            continue
        # Only the user may choose a backend with known limits.
        reserved = [*reserves(getattr(backend, "declarations", {}), needs), *_triton_troubles(member)]
        if named or not reserved:
            if reserved:
                logger.warning("%s", "; ".join(reserved))
            return f"{backend.__module__}.{backend.__qualname__}"
        refused[member.name] = reserved
        only_reserved.append(member.name)
    layer = ", ".join(f"{name}={value}" for name, value in needs.items() if value is not None and value is not False)
    refusals = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    if named:
        way_out = "omit the name to let the plugin choose"
    elif only_reserved:
        way_out = f"--attention-backend {' or '.join(only_reserved)} selects it with these limits"
    else:
        way_out = "docs/platforms.md lists what each backend needs on the host"
    raise ValueError(f"no attention backend on MUSA for a layer with {layer} ({refusals}); {way_out}")


def _triton_troubles(member: Any) -> list[str]:
    """Return why Triton cannot compile the backend's kernels; empty if replaced."""
    own = member.name in _IN_TRITON and not member.is_overridden()
    trouble = versions.triton_trouble(versions.installed("triton")) if own else ""
    return [trouble] if trouble else []
