# SPDX-License-Identifier: Apache-2.0
"""Which KV connectors load or save keys layer by layer.

vLLM asks a connector before and after each attention layer, on the host. A captured pass does not come by there. A
connector that needs it can say so, and vLLM then has no FULL graphs; not all do.
"""

from __future__ import annotations

import dis
from typing import Any, Final

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

_HOOKS: Final = ("wait_for_layer_load", "save_kv_layer")
_ANSWER: Final = "requires_piecewise_for_cudagraph"
#: What Python makes of a method without statements. A decorated one has its decorator's, which call it.
_NOTHING: Final = frozenset(("RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"))


def working_by_layer(transfer: KVTransferConfig | None) -> str | None:
    """The name of the connector's class that may do something at each layer, or None.

    Args:
        transfer: vLLM's `kv_transfer_config`, of an engine with FULL graphs.
    """
    if transfer is None:
        return None
    cls: Any = KVConnectorFactory.get_connector_class(transfer)
    name: str = cls.__name__
    if name == "MultiConnector":
        parts = transfer.kv_connector_extra_config.get("connectors", ())
        return next((found for part in parts if (found := working_by_layer(KVTransferConfig(**part)))), None)
    if any(_ANSWER in vars(base) for base in cls.__mro__ if base is not KVConnectorBase_V1):
        # It was asked, and works in another way with these options.
        return None
    return None if all(_does_nothing(getattr(cls, hook)) for hook in _HOOKS) else name


def _does_nothing(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and all(one.opname in _NOTHING for one in dis.get_instructions(code))
