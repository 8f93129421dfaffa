# SPDX-License-Identifier: Apache-2.0
"""PyTorch definitions of vLLM's operations, for builds of vLLM that lack them on their device.

CUDA needs none: vLLM's C extension has them all. A vLLM for no device, which MUSA hosts can run, has no extension, but
still calls some of its operations by name. Existing kernels stay. vLLM does not run there without these definitions, so
they have no switch; the kernels that may replace some of them have one (:mod:`.overrides`).

A function's signature is the schema: it takes what every supported version passes, so it may have more arguments with
defaults than a version's own operation. All functions can be captured: no size and no branch depends on a tensor's
data.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn.functional import gelu, silu

from ..base import run_records
from .define import SCHEMAS
from .operations import DEFINED, OPS, RECORD, Operation, describe

logger = logging.getLogger("vllm.hwplugin")

_lock = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}


def define_missing(key: str) -> tuple[str, ...]:
    """Define what vLLM's imported extension lacks for a dispatch key; idempotent.

    It returns all operations that have a definition.
    """
    with _lock:
        new = [
            operation for operation in DEFINED.values() if operation.name not in _libraries and _define(operation, key)
        ]
    if new:
        logger.info(
            "this vLLM has no %s kernel of %s; the plugin's PyTorch definitions run instead",
            key,
            ", ".join(operation.qualname for operation in new),
        )
    for operation in new:
        run_records.note(f"{RECORD}{operation.name}", describe("torch", f"this vLLM has no kernel of it for {key}"))
    return tuple(_libraries)


def is_defined(name: str) -> bool:
    """Whether an operation is the plugin's own, so vLLM has no kernel."""
    return name in _libraries


def undefine() -> None:
    """Take all definitions back, for tests; none may run meanwhile."""
    with _lock:
        for library in _libraries.values():
            library._destroy()
        _libraries.clear()


def described(operation: Operation) -> tuple[str, Callable[..., Any]]:
    """Return a definition's schema without the name, and its function."""
    if operation.name not in OPS:
        body: Callable[..., Any] = globals()[operation.name]
        return torch.library.infer_schema(body, mutates_args=operation.writes), body
    module = importlib.import_module(f"vllm_hwplugin.ops.{operation.name}")
    return SCHEMAS[operation.name].removeprefix(operation.name), getattr(module, operation.name).__wrapped__


def _define(operation: Operation, key: str) -> bool:
    there = getattr(getattr(torch.ops, operation.namespace), operation.name, None)
    if there is not None:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        keys = (key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        if any(has(operation.qualname, dispatch_key) for dispatch_key in keys):
            return False
    arguments, body = described(operation)
    if there is not None and not _takes(arguments, there.default._schema):
        logger.warning(
            "%s has no kernel for %s and an unknown schema, so it is not defined: %s",
            operation.qualname,
            key,
            there.default._schema,
        )
        return False
    library = torch.library.Library(operation.namespace, "FRAGMENT")
    if there is None:
        library.define(operation.name + arguments)
    library.impl(operation.name, body, key)
    _libraries[operation.name] = library
    return True


def _takes(arguments: str, schema: Any) -> bool:
    """Whether a definition can be called with an operation's schema."""
    # Builds for other devices name arguments differently.
    own, given = torch._C.parse_schema(f"own{arguments}").arguments, schema.arguments

    def written(argument: Any) -> bool:
        return bool(argument.is_write) and "Tensor" in str(argument.type)

    def fits(argument: Any, other: Any) -> bool:
        # Two numbers fit a list, and a required argument fits an optional one.
        theirs = str(other.type).replace("Tuple[int, int]", "List[int]")
        return str(argument.type) in (theirs, f"Optional[{theirs}]") and written(argument) == written(other)

    more = own[len(given) :]
    alike = all(fits(argument, other) for argument, other in zip(own, given, strict=False))
    return alike and len(given) <= len(own) and all(argument.has_default_value() for argument in more)


def weak_ref_tensor(input: torch.Tensor) -> torch.Tensor:
    """Return a view of a non-empty tensor that does not own memory.

    vLLM holds a captured graph's outputs by such views. Their memory belongs to the graph's pool, and an owning tensor
    would keep the pool from reusing it for the next graph.
    """
    last = sum((size - 1) * stride for size, stride in zip(input.shape, input.stride(), strict=True))
    # From the tensor's first element, which may lie inside its storage.
    storage = torch._C._construct_storage_from_data_pointer(
        input.data_ptr(), input.device, (last + 1) * input.element_size()
    )
    empty = torch.empty(0, dtype=input.dtype, device=input.device)
    return empty.set_(storage, 0, input.shape, input.stride())


def rms_norm(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """Write ``input / rms(input) * weight``, rounded before the weight.

    Args:
        result: like input. Written.
        input: [..., width], float32, float16 or bfloat16.
        weight: [width]; or [input.shape[0], width], a row for each outermost index; None for no weight.
        epsilon: added to the mean square, which is float32.
    """
    value = input.float()
    value = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)).to(result.dtype)
    if weight is not None:
        rows = weight if weight.dim() == 1 else weight.view(-1, *(1,) * (input.dim() - 2), weight.shape[-1])
        value = value * rows
    result.copy_(value)


def apply_repetition_penalties_(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_mask: torch.Tensor, repetition_penalties: torch.Tensor
) -> None:
    """Call vLLM's PyTorch implementation for devices other than CUDA."""
    from vllm._custom_ops import apply_repetition_penalties_torch

    apply_repetition_penalties_torch(logits, prompt_mask, output_mask, repetition_penalties)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write keys and values into the paged cache.

    Args:
        key, value: [tokens or more, heads, head_size].
        key_cache, value_cache: [blocks, block_size, heads, head_size], any strides. Written.
        slot_mapping: [tokens], int64; -1 for a token without a slot.
        kv_cache_dtype: ``auto`` or an unquantized type.

    Raises:
        NotImplementedError: a quantized cache.
    """
    _unquantized("reshape_and_cache_flash", kv_cache_dtype)
    for new, cache in ((key, key_cache), (value, value_cache)):
        _write_slots(new, cache, slot_mapping)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    """Write latents and rotary keys, concatenated, into the paged cache.

    Args:
        kv_c: [tokens or more, latent size].
        k_pe: [tokens or more, rotary size].
        kv_cache: [blocks, block_size, latent size + rotary size], any strides. Written.
        slot_mapping, kv_cache_dtype: as in :func:`reshape_and_cache_flash`, with its error.
    """
    _unquantized("concat_and_cache_mla", kv_cache_dtype)
    _write_slots(torch.cat([kv_c, k_pe], -1), kv_cache, slot_mapping)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Read several requests' keys, one after another, from the paged cache.

    Args:
        src_cache: [blocks, block_size, size], any strides.
        dst: [num_tokens or more, size]. Its first rows are written.
        block_table: [requests, blocks of a request], integers.
        cu_seq_lens: [requests + 1], integers: first row of each request.
        token_to_seq: [num_tokens or more], integers: request of each row.
        kv_cache_dtype: as in :func:`reshape_and_cache_flash`, with its error.
        seq_starts: [requests], integers: position of each request's first row; None for 0.
    """
    _unquantized("gather_and_maybe_dequant_cache", kv_cache_dtype)
    block_size, requests = src_cache.shape[1], token_to_seq[:num_tokens].long()
    positions = torch.arange(num_tokens, device=dst.device) - cu_seq_lens[requests]
    if seq_starts is not None:
        positions = positions + seq_starts[requests]
    blocks = block_table[requests, positions // block_size].long()
    dst[:num_tokens].copy_(src_cache[blocks, positions % block_size])


def _unquantized(name: str, kv_cache_dtype: str) -> None:
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise NotImplementedError(
            f"{name} in torch has no kv_cache_dtype={kv_cache_dtype}; expected auto, bfloat16 or float16: choose "
            "another --kv-cache-dtype or attention backend"
        )


def _write_slots(new: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    tokens, block_size = slot_mapping.shape[0], cache.shape[1]
    if tokens == 0:
        return
    written = slot_mapping >= 0
    # A token without a slot repeats the write of the first token that has a slot; if there is none, it rewrites slot 0
    # with its own content.
    first = written.int().argmax().view(1)
    slots = torch.where(written, slot_mapping, slot_mapping[first].clamp(min=0))
    places = (slots // block_size, slots % block_size)
    new, written = new[:tokens].to(cache.dtype), written.view(-1, *(1,) * (new.dim() - 1))
    rest = torch.where(written[first], new[first], cache[places[0][first], places[1][first]])
    cache.index_put_(places, torch.where(written, new, rest))


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    maybe_expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Order the rows of a mixture of experts into blocks by expert.

    Args:
        topk_ids: [tokens, topk], integers: the experts of each token. Rows with ids outside 0 to num_experts - 1 are
            dropped.
        num_experts: of all ranks.
        block_size: rows of a block.
        sorted_token_ids: [rows], int32. Written: indices into topk_ids by expert, in order; its number of elements for
            padding.
        experts_ids: [blocks], int32. Written: the expert of each block; 0 for unused blocks.
        num_tokens_post_pad: [1], int32. Written: rows of all used blocks.
        maybe_expert_map: [num_experts], int32: each expert's number on this rank, -1 for experts of other ranks, whose
            rows are dropped; None if this rank has all.
        scatter_idx: [elements of topk_ids, 1], int32. Written: each row's index, -1 if dropped.
    """
    device, rows = topk_ids.device, topk_ids.numel()
    ids = topk_ids.reshape(-1).long()
    served = (ids >= 0) & (ids < num_experts)
    if maybe_expert_map is not None:
        served &= maybe_expert_map[ids.clamp(0, num_experts - 1)] >= 0
    # Dropped rows sort behind all experts.
    by_expert, order = torch.sort(torch.where(served, ids, num_experts), stable=True)
    experts = torch.arange(num_experts, device=device)
    ends = torch.searchsorted(by_expert, experts, right=True)
    counts = torch.cat([ends[:1], ends[1:] - ends[:-1]])
    block_ends = torch.cumsum((counts + block_size - 1) // block_size, 0)
    # From an expert's last row to the last row of its blocks.
    shifts = (block_ends - (counts + block_size - 1) // block_size) * block_size - (ends - counts)
    places = torch.arange(rows, device=device) + shifts[by_expert.clamp(max=num_experts - 1)]
    beyond = sorted_token_ids.shape[0]
    places = torch.where(by_expert < num_experts, places, beyond)
    filled = torch.full((beyond + 1,), rows, dtype=torch.int32, device=device)
    sorted_token_ids.copy_(filled.index_put_((places,), order.int())[:beyond])
    blocks = torch.searchsorted(block_ends, torch.arange(experts_ids.shape[0], device=device), right=True)
    known = blocks.clamp(max=num_experts - 1)
    numbers = known if maybe_expert_map is None else maybe_expert_map[known]
    experts_ids.copy_(torch.where(blocks < num_experts, numbers, 0))
    num_tokens_post_pad.copy_(block_ends[-1:] * block_size)
    if scatter_idx is not None:
        scatter_idx.copy_(torch.where(served, torch.arange(rows, device=device), -1).view(-1, 1))


def moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Sum the outputs of each token's experts.

    Args:
        input: [tokens, topk, width].
        output: [tokens, width]. Written.
        topk_ids: [tokens, topk], integers; None if all experts count.
        expert_map: [experts], int32: -1 for experts of other ranks, which do not count; None if all do.
    """
    if topk_ids is not None:
        served = topk_ids >= 0
        if expert_map is not None:
            served &= expert_map[topk_ids.clamp(min=0).long()] >= 0
        # Rows that no expert has written may be NaN.
        input = torch.where(served.unsqueeze(-1), input, 0)
    output.copy_(input.sum(1))


def silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    """Write ``silu`` of the first half times the second half.

    result: [..., width], written; input: [..., 2 * width].
    """
    gate, up = input.chunk(2, -1)
    torch.mul(silu(gate), up, out=result)


def gelu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, -1)
    torch.mul(gelu(gate), up, out=result)


def gelu_tanh_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, -1)
    torch.mul(gelu(gate, approximate="tanh"), up, out=result)


# vLLM's smallest scale, for rows of zeros.
_LEAST_FP8_SCALE: Final = 1 / (torch.finfo(torch.float8_e4m3fn).max * 512)


def static_scaled_fp8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, group_shape: Sequence[int] | None = None
) -> None:
    """Write ``input / scale``, rounded to FP8, with one scale.

    Args:
        result: [rows or more, width], float8_e4m3fn. Its first rows are written.
        input: [rows, width].
        scale: one element, float32.
    """
    if scale.numel() != 1:
        raise NotImplementedError(
            f"static_scaled_fp8_quant in torch has no scale of shape {tuple(scale.shape)} for groups of {group_shape}; "
            "expected one scale: use a checkpoint with one scale for a layer's activations, or without such scales"
        )
    _to_fp8(result, input, scale)


def dynamic_scaled_fp8_quant(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantise to FP8 with the largest element's scale, [1] float32, written."""
    scale.copy_((input.abs().amax().float() / torch.finfo(result.dtype).max).clamp(min=_LEAST_FP8_SCALE))
    _to_fp8(result, input, scale)


def dynamic_per_token_scaled_fp8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, scale_ub: torch.Tensor | None
) -> None:
    """Quantise to FP8 with a scale for each row.

    Args:
        scale: [rows or more, 1], float32. Its first rows are written.
        scale_ub: one element, float32: upper bound of a row's largest value; None for no bound.
    """
    largest = input.abs().amax(-1, keepdim=True).float()
    if scale_ub is not None:
        largest = torch.minimum(largest, scale_ub)
    scales = (largest / torch.finfo(result.dtype).max).clamp(min=_LEAST_FP8_SCALE)
    scale[: input.shape[0]].copy_(scales)
    _to_fp8(result, input, scales)


def _to_fp8(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    most = torch.finfo(result.dtype).max
    result[: input.shape[0]].copy_((input.float() / scale).clamp(-most, most))


def static_scaled_int8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None
) -> None:
    """Write ``input / scale``, rounded to INT8.

    Args:
        result: like input, int8. Written.
        input: [..., width].
        scale: one element, or one for each row, float32.
        azp: like scale, int32: the zero point; None for 0.
    """
    numbers = torch.round(input.float() / scale)
    result.copy_((numbers if azp is None else numbers + azp).clamp(-128, 127))


def dynamic_scaled_int8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None
) -> None:
    """Quantise to INT8 with each row's scale and zero point.

    Args:
        scale: [rows, 1], float32. Written.
        azp: [rows, 1], int32, written; None for the zero point 0.
    """
    rows = input.reshape(-1, input.shape[-1]).float()
    # A row of equal numbers would have a scale of 0.
    least = torch.finfo(torch.float32).tiny
    if azp is None:
        scale.copy_((rows.abs().amax(-1, keepdim=True) / 127).clamp(min=least))
    else:
        low = rows.amin(-1, keepdim=True)
        scale.copy_(((rows.amax(-1, keepdim=True) - low) / 255).clamp(min=least))
        azp.copy_(torch.round(-128 - low / scale))
    static_scaled_int8_quant(result.view(rows.shape), rows, scale, azp)
