# SPDX-License-Identifier: Apache-2.0
"""Layers of quantized checkpoints on the simulated device, made and loaded as vLLM does, against float32 on the host.

`python -m tests.musa_sim.layers_child ERRORS KINDS`, a kind with the rows and outputs of its products: `INT8 192 384`.
"""

import json
import sys
from pathlib import Path

import torch

from . import checkpoints

WIDTH = 256


FOUR_BITS = {
    "W4A16": (checkpoints.W4A16, checkpoints.four_bits),
    "GPTQ": (checkpoints.GPTQ, checkpoints.gptq),
    "AWQ": (checkpoints.AWQ, checkpoints.awq),
}


def tensors(kind: str, outputs: int) -> tuple[dict, dict]:
    """vLLM's quantization config, and the parameters of one layer by name; `weight` is what they stand for."""
    weight = torch.randn(outputs, WIDTH) * 0.05
    e4m3, most = torch.float8_e4m3fn, 448.0
    channel = weight.abs().amax(1, keepdim=True)
    if kind == "FP8, tensor":
        scale = weight.abs().amax() / most
        small = (weight / scale).to(e4m3)
        config = {"quant_method": "fp8", "activation_scheme": "static"}
        given = {"weight": small, "weight_scale": scale, "input_scale": torch.tensor(4 / most)}
        return config, {**given, "stands for": small.float() * scale}
    if kind == "FP8, block":
        given, stands_for = checkpoints.fp8_blocks(weight)
        return checkpoints.FP8_BLOCKS["quantization_config"], {**given, "stands for": stands_for}
    if kind in FOUR_BITS:
        config, made = FOUR_BITS[kind]
        given, stands_for = made(weight, torch.float16)
        return config["quantization_config"], {**given, "stands for": stands_for}
    number = most if kind.startswith("FP8") else 127
    of_weights = {
        "num_bits": 8,
        "type": "float" if number == most else "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "dynamic": False,
    }
    of_inputs = {**of_weights, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": of_weights, "input_activations": of_inputs}
    form = "float-quantized" if number == most else "int-quantized"
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": [], "config_groups": {"group_0": group}}
    scale = channel / number
    numbers = (weight / scale).to(e4m3) if number == most else (weight / scale).round().to(torch.int8)
    return config, {"weight": numbers, "weight_scale": scale, "stands for": numbers.float() * scale}


def error(kind: str, rows: int, outputs: int) -> tuple[str, float, bool]:
    """The kernel's class, the largest difference by the largest output, and whether it falls back."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    torch.manual_seed(0)
    config, given = tensors(kind, outputs)
    stands_for = given.pop("stands for")
    x = torch.randn(rows, WIDTH).half()
    method = get_quantization_config(config["quant_method"])
    # As vLLM's `ModelConfig` does.
    method = get_quantization_config(method.override_quantization_method(config, None) or config["quant_method"])
    quantization = method.from_config(config)
    # vLLM reads GPTQ's quantized layers in the checkpoint's files.
    vars(quantization).update({"modules_in_block_to_quantize": ["layer"]} if kind == "GPTQ" else {})
    torch.set_default_dtype(torch.float16)
    with torch.device("musa"):
        layer = ReplicatedLinear(
            WIDTH,
            outputs,
            bias=False,
            params_dtype=torch.float16,
            quant_config=quantization,
            prefix="layer",
            disable_tp=True,
        )
    torch.set_default_dtype(torch.float32)
    parameters = dict(layer.named_parameters())
    for name, tensor in given.items():
        # A layer without an order of activations has no such parameter.
        if name == "g_idx" and name not in parameters:
            continue
        parameters[name].weight_loader(parameters[name], tensor.to("musa"))
    layer.quant_method.process_weights_after_loading(layer)
    found, _ = layer(x.to("musa"))
    expected = x.float() @ stands_for.t()
    scheme = getattr(layer, "scheme", layer.quant_method)
    kernel = next(value for value in vars(scheme).values() if type(value).__name__.startswith("Musa"))
    far = float((found.cpu().float() - expected).abs().max() / expected.abs().max())
    return type(kernel).__name__, far, bool(getattr(kernel, "trouble", ""))


def main(file: str, *asked: str) -> None:
    import torchada  # noqa: F401
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.v1.worker.gpu_worker  # noqa: F401

    import vllm_hwplugin.musa.layers  # noqa: F401
    from vllm_hwplugin.musa import self_test, self_test_checks

    self_test.note_results(self_test_checks.run(torch.device("musa:0")))

    model = ModelConfig(model=str(checkpoints.TARGET), dtype="float16")
    with set_current_vllm_config(VllmConfig(model_config=model)), torch.inference_mode():
        parallel_state.init_distributed_environment(1, 0, f"file://{file}.store", 0, "gloo")
        parallel_state.initialize_model_parallel()
        found = {}
        for one in asked:
            kind, rows, outputs = one.rsplit(" ", 2)
            found[one] = error(kind, int(rows), int(outputs))
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
