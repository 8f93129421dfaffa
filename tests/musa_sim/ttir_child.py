# SPDX-License-Identifier: Apache-2.0
"""What an installed Triton's front end makes of vLLM's kernels: `python -m tests.musa_sim.ttir_child FOUND`.

Of each kernel FOUND has "compiles", what the front end says, or "parity": the sum of a mask is one bit there. No
GPU is asked.
"""

import importlib
import importlib.metadata
import json
import re
import sys
from unittest.mock import MagicMock

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

TARGET = GPUTarget("cuda", 90, 32)
MOE = "vllm.model_executor.layers.fused_moe.fused_moe:fused_moe_kernel"
EXPERTS = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 8,
    "SPLIT_K": 1,
    "MUL_ROUTED_WEIGHT": True,
    "top_k": 2,
    "compute_type": tl.float16,
    "use_fp8_w8a8": False,
    "use_int8_w8a8": False,
    "use_int8_w8a16": False,
    "per_channel_quant": False,
    "HAS_BIAS": False,
    "b_bias_ptr": None,
    "group_n": 0,
    "group_k": 0,
    "naive_block_assignment": False,
}
UNSCALED = {"a_scale_ptr": None, "b_scale_ptr": None}
OF_EXPERTS = "a:fp16 b:fp16 c:fp16 a_scale:fp32 b_scale:fp32 topk_weights:fp32"
OF_FP8_EXPERTS = OF_EXPERTS.replace("a:fp16 b:fp16", "a:fp8e4nv b:fp8e4nv")
FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils"
W4A16 = "vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16:triton_w4a16_gemm_kernel"
BITS = {"ZP_BIAS": 8, "BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "group_size": 128}
BLOCKS = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8}
INT8 = "vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm:scaled_mm_kernel"
OF_INT8 = {"ACCUMULATOR_DTYPE": tl.int32, "bias_ptr": None, **dict.fromkeys(("BLOCK_SIZE_M", "BLOCK_SIZE_N"), 32)}
OF_INT8 |= dict.fromkeys(("BLOCK_SIZE_K", "BLOCK_SIZE_SCALE_A", "BLOCK_SIZE_SCALE_B"), 32)

#: The kernel, types of its tensors (int32 of those that are not named), and its constants.
KERNELS = {
    "experts": (MOE, OF_EXPERTS, {**EXPERTS, **UNSCALED}),
    "experts, FP8 by block": (MOE, OF_FP8_EXPERTS, EXPERTS | {"use_fp8_w8a8": True, "group_n": 128, "group_k": 128}),
    "experts, FP8 by channel": (MOE, OF_FP8_EXPERTS, EXPERTS | {"use_fp8_w8a8": True, "per_channel_quant": True}),
    "inputs, FP8 by group": (
        f"{FP8}:_per_token_group_quant_fp8",
        "y:fp16 y_q:fp8e4nv y_s:fp32",
        {"BLOCK": 128, "use_ue8m0": False, "fp8_min": -448.0, "fp8_max": 448.0},
    ),
    "linear, FP8 by block": (
        f"{FP8}:_w8a8_triton_block_scaled_mm",
        "A:fp8e4nv B:fp8e4nv C:fp16 As:fp32 Bs:fp32",
        BLOCKS,
    ),
    "linear, INT8": (INT8, "a:i8 b:i8 c:fp16 scale_a:fp32 scale_b:fp32", OF_INT8),
    "linear, W4A16": (W4A16, "a:fp16 scales:fp16 c:fp16", BITS | {"HAS_ZP": False}),
    "linear, W4A16 with zero points": (W4A16, "a:fp16 scales:fp16 c:fp16", BITS | {"HAS_ZP": True}),
    "top-k and top-p": (
        "vllm.v1.sample.ops.topk_topp_triton:_topk_topp_kernel",
        "LOGITS:fp32 BUFFER:fp32 PERCENTILE_TO_STD_TABLE:fp32 NORMAL_CDF_TO_SIGMA_TABLE:fp32 K:i32 P:fp32",
        {
            "VOCAB_SIZE": 4096,
            "MASK_VALUE": float("-inf"),
            "BLOCK_SIZE": 1024,
            "BLOCK_SIZE_TRUNC": 512,
            "TOPK_ENABLED": True,
            "TOPP_ENABLED": True,
        },
    ),
    "parts of a context, merged": (
        "vllm.v1.attention.ops.triton_merge_attn_states:merge_attn_states_kernel",
        "output:fp16 output_lse:fp32 prefix_output:fp16 prefix_lse:fp32 suffix_output:fp16 suffix_lse:fp32",
        {"HEAD_SIZE": 128, "PADDED_HEAD_SIZE": 128, "OUTPUT_LSE": True, "USE_FP8": False, "output_scale": None}
        | {"FP8_MIN": -448.0, "FP8_MAX": 448.0, "prefill_tokens_with_context": 64},
    ),
    "next tokens of drafters": (
        "vllm.v1.spec_decode.utils:eagle_prepare_next_token_padded_kernel",
        "discard_request_mask:i1",
        {"BLOCK_SIZE_TOKENS": 8},
    ),
}


def found_of(path: str, types: str, constants: dict) -> str:
    module, _, name = path.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    tensors = dict(item.split(":") for item in types.split())
    signature, given = {}, {}
    for parameter in kernel.params:
        if parameter.is_constexpr or parameter.name in constants:
            given[parameter.name] = constants.get(parameter.name)
        elif (short := parameter.name.removesuffix("_ptr")) in tensors or parameter.name.endswith("_ptr"):
            signature[parameter.name] = f"*{tensors.get(short, 'i32')}"
        else:
            signature[parameter.name] = "fp32" if parameter.name in ("eps", "fp8_min", "fp8_max") else "i32"
    return said_of(kernel, signature, given)


def said_of(kernel, signature: dict[str, str], constants: dict) -> str:
    """What the front end says of a kernel with these types and constants."""
    backend = make_backend(TARGET)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    try:
        made = ASTSource(kernel, signature, constants).make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
    except Exception as error:
        return str(error)
    sums_of_masks = re.search(r"arith\.addi [^\n]* : i1\b", str(made))
    return "parity" if sums_of_masks else "compiles"


def pretend_a_gpu() -> None:
    """Have vLLM take Triton, which it leaves alone where there is no GPU, and where it is a build for the CPU."""
    for name, backend in backends.items():
        backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
    driver = MagicMock()
    driver.get_current_target.return_value = TARGET
    driver.utils.get_device_properties.return_value = {"multiprocessor_count": 56, "max_shared_mem": 192 << 10}
    triton.runtime.driver.set_active(driver)
    # Kernels of delta rules ask for it when they are imported.
    torch.cuda.get_device_name = lambda *_: "MTT S5000"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version(name).partition("+")[0] if name == "vllm" else version(name)


if __name__ == "__main__":
    pretend_a_gpu()
    found = {name: found_of(*kernel) for name, kernel in KERNELS.items()}
    with open(sys.argv[1], "w") as file:
        json.dump({"triton": triton.__version__, **found}, file)
