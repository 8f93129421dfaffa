# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's attention backends the MUSA platform uses.

vLLM's compiled kernels (``vllm._C``, FlashAttention, FlashInfer, FlashMLA, CUTLASS) are built for other devices. What
is left is what compiles on the host: Triton kernels, and FlexAttention through ``torch.compile``. Each backend's own
declarations then decide, by vLLM's own ``validate_configuration``. Not run on MUSA hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

# Best first. Names and not members: vLLM's list of backends differs from version to version.
DECODER: Final = ("TRITON_ATTN", "FLEX_ATTENTION")
MLA: Final = ("TRITON_MLA",)


def choose(selected: Any | None, config: Any, capability: Any, known: Any) -> str:
    """The qualified name of the backend's class.

    Args:
        selected: the member of ``AttentionBackendEnum`` that the user named, or None.
        config: vLLM's ``AttentionSelectorConfig`` for one layer.
        capability: the device's ``DeviceCapability``.
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
        return _first([known[name] for name in names], config, capability)
    # A backend that a plugin registered under this name is that plugin's responsibility.
    if selected.name not in names and not selected.is_overridden():
        raise ValueError(
            f"attention backend {selected.name} is not supported on MUSA: expected {' or '.join(names)}"
            f"{' for MLA' if config.use_mla else ''}, or one that a plugin has registered; without a name one is chosen"
        )
    return _first([selected], config, capability)


def _first(members: Sequence[Any], config: Any, capability: Any) -> str:
    refused: dict[str, list[str]] = {}
    for member in members:
        try:
            backend = member.get_class()
            reasons = backend.validate_configuration(device_capability=capability, **config._asdict())
        except (ImportError, OSError) as error:
            reasons = [f"{type(error).__name__}: {error}"]
        if not reasons:
            return f"{backend.__module__}.{backend.__qualname__}"
        refused[member.name] = reasons
    told = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    raise ValueError(f"no attention backend fits on MUSA ({told}); asked for {config!r}")
