# SPDX-License-Identifier: Apache-2.0
"""Operations that vLLM calls by name on a device that it does not know, and that its builds for no device lack.

The plugin defines them there (:mod:`.definitions`), because without them vLLM does not serve. That is no matter of
speed and has no gate; the kernels that may stand in front of some of them have one (:mod:`.override_table`).
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from ..versions import Versions
from .override_table import ALL_VERSIONS, OPS, Schema

#: The dispatch key of torch's one backend from outside, which is MUSA's where torch_musa is.
MUSA_KEY: Final = "PrivateUse1"

_BODIES: Final = "_definition_bodies"


class Definition(NamedTuple):
    """An operation of vLLM that the plugin defines where vLLM does not.

    Attributes:
        name: of the operation.
        namespace: in ``torch.ops``.
        schemas: vLLM's own, by version.
        module: of this package. ``body``, a dotted name in it, computes the operation in torch.
        caller: what of vLLM reaches it on MUSA; empty where nothing does today.
    """

    name: str
    namespace: Literal["_C", "_moe_C", "_C_cache_ops"]
    schemas: tuple[Schema, ...]
    module: str
    body: str
    caller: str

    @property
    def qualname(self) -> str:
        return f"{self.namespace}::{self.name}"

    def schema(self, version: str) -> str:
        """The text for a version of vLLM; for one that is no version, as of a source tree without tags, the newest."""
        known = (item.text for item in self.schemas if Versions(item.versions).covers(version))
        return next(known, self.schemas[-1].text)


# What reaches the operations that have a kernel of the plugin.
_CALLERS: Final = {
    "rotary_embedding": "DFlash drafters, for the keys of the context",
    "topk_softmax": "routers of mixtures of experts",
}

_OWN: Final = (
    Definition(
        "weak_ref_tensor",
        "_C",
        (Schema(ALL_VERSIONS, "weak_ref_tensor(Tensor input) -> Tensor"),),
        _BODIES,
        "weak_ref_tensor",
        "every capture of a graph",
    ),
    Definition(
        "rms_norm",
        "_C",
        (
            Schema(">=0.20.0,<0.24.0", "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()"),
            Schema(">=0.24.0", "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()"),
        ),
        _BODIES,
        "rms_norm",
        "DFlash and DSpark drafters, for the states and the keys of the context",
    ),
    Definition(
        "apply_repetition_penalties_",
        "_C",
        (
            Schema(
                ALL_VERSIONS,
                "apply_repetition_penalties_(Tensor! logits, Tensor prompt_mask, Tensor output_mask, "
                "Tensor repetition_penalties) -> ()",
            ),
        ),
        _BODIES,
        "apply_repetition_penalties",
        "requests with a repetition penalty: vLLM asks tensors for is_cuda, which torchada answers with yes",
    ),
    Definition(
        "reshape_and_cache_flash",
        "_C_cache_ops",
        (
            Schema(
                ALL_VERSIONS,
                "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
                "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()",
            ),
        ),
        _BODIES,
        "reshape_and_cache_flash",
        "FLEX_ATTENTION",
    ),
)

DEFINITIONS: Final[Mapping[str, Definition]] = MappingProxyType(
    {
        item.name: item
        for item in (
            *_OWN,
            *(
                Definition(
                    op.name, op.namespace, op.schemas, op.name, f"{op.name}.__wrapped__", _CALLERS.get(op.name, "")
                )
                for op in OPS.values()
            ),
        )
    }
)
