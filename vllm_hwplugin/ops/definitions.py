# SPDX-License-Identifier: Apache-2.0
"""Define vLLM's operations where a build of vLLM has none of them for the device that it runs on.

On CUDA nothing of this happens: vLLM's C extension has them all. A vLLM for no device, which MUSA hosts can run, has no
extension, but still calls some of its operations by name. What is there already stays. Without these vLLM does not
serve there, so they have no gate; the kernels that may stand in front of some of them have one
(:mod:`.override_table`). torch is imported only when something is defined.
"""

from __future__ import annotations

import importlib
import logging
import operator
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from .. import journal
from ..versions import Versions
from .override_table import ALL_VERSIONS, OPS, RECORD, Schema, describe

logger = logging.getLogger("vllm.hwplugin")

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
    "silu_and_mul_per_block_quant": "experts in FP8 blocks",
}

_ALIGN: Final = (
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
    "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map"
)

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
    Definition(
        "moe_align_block_size",
        "_moe_C",
        (
            Schema(">=0.20.0,<0.31.0", f"{_ALIGN}) -> ()"),
            Schema(">=0.31.0", f"{_ALIGN}, Tensor!? scatter_idx=None) -> ()"),
        ),
        _BODIES,
        "moe_align_block_size",
        "experts, for which rows go to which",
    ),
    Definition(
        "moe_sum",
        "_moe_C",
        (
            Schema(">=0.20.0,<0.26.0", "moe_sum(Tensor input, Tensor! output) -> ()"),
            Schema(">=0.26.0", "moe_sum(Tensor input, Tensor! output, Tensor? topk_ids, Tensor? expert_map) -> ()"),
        ),
        _BODIES,
        "moe_sum",
        "experts, for what those of a token add up to",
    ),
    *(
        Definition(
            name,
            "_C",
            (Schema(ALL_VERSIONS, f"{name}(Tensor! result, Tensor input) -> ()"),),
            _BODIES,
            name,
            "experts, between their two layers",
        )
        for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    ),
    *(
        Definition(name, "_C", (Schema(ALL_VERSIONS, f"{name}({arguments}) -> ()"),), _BODIES, name, caller)
        for name, arguments, caller in (
            (
                "static_scaled_fp8_quant",
                "Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None",
                "FP8 experts with a scale in the checkpoint",
            ),
            ("dynamic_scaled_fp8_quant", "Tensor! result, Tensor input, Tensor! scale", "FP8 experts"),
            (
                "dynamic_per_token_scaled_fp8_quant",
                "Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub",
                "FP8 experts with a scale for each token",
            ),
            (
                "static_scaled_int8_quant",
                "Tensor! result, Tensor input, Tensor scale, Tensor? azp",
                "INT8 linear layers with a scale in the checkpoint",
            ),
            (
                "dynamic_scaled_int8_quant",
                "Tensor! result, Tensor input, Tensor! scale, Tensor!? azp",
                "INT8 linear layers",
            ),
        )
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


_lock = threading.Lock()
# An operation is gone when its library is.
_libraries: dict[str, Any] = {}


def define_missing(key: str, version: str) -> tuple[str, ...]:
    """Define, for one dispatch key, what vLLM's extension does not have. To be called after that was imported.

    Calling it again changes nothing.

    Args:
        key: the dispatch key of the device.
        version: of vLLM, which decides between schemas.

    Returns:
        The operations that have got a definition, now or before.
    """
    with _lock:
        new = [item for item in DEFINITIONS.values() if item.name not in _libraries and _define(item, key, version)]
    if new:
        logger.info(
            "this vLLM has no kernel for %s of %s; the plugin's definitions in torch serve",
            key,
            ", ".join(item.qualname for item in new),
        )
    for item in new:
        journal.note(f"{RECORD}{item.name}", describe("torch", f"this vLLM has no kernel of it for {key}"))
    return tuple(_libraries)


def is_defined(name: str) -> bool:
    """Whether an operation is the plugin's own in this process, so that vLLM has no kernel to go back to."""
    return name in _libraries


def undefine() -> None:
    """Take all definitions back. For tests: not while one of them runs."""
    with _lock:
        for library in _libraries.values():
            library._destroy()
        _libraries.clear()


def _define(item: Definition, key: str, version: str) -> bool:
    torch: Any = importlib.import_module("torch")
    there = getattr(getattr(torch.ops, item.namespace), item.name, None)
    if there is not None:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if any(has(item.qualname, one) for one in (key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")):
            return False
        known = [_types(torch._C.parse_schema(f"{item.namespace}::{one.text}")) for one in item.schemas]
        if _types(there.default._schema) not in known:
            logger.warning(
                "%s has no kernel for %s and a schema that is not known, so it stays as it is: %s",
                item.qualname,
                key,
                there.default._schema,
            )
            return False
    body = operator.attrgetter(item.body)(importlib.import_module(f"vllm_hwplugin.ops.{item.module}"))
    library = torch.library.Library(item.namespace, "FRAGMENT")
    if there is None:
        library.define(item.schema(version))
    library.impl(item.name, body, key)
    _libraries[item.name] = library
    return True


def _types(schema: Any) -> list[tuple[str, bool]]:
    """What a body can be called with. Builds for other devices name arguments differently."""
    return [(str(argument.type), argument.is_write) for argument in schema.arguments]
