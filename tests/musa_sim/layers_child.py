# SPDX-License-Identifier: Apache-2.0
"""Layers of quantized checkpoints on the simulated device, made and loaded as vLLM does, against float32 on the host.

`python -m tests.musa_sim.layers_child ERRORS`
"""

import json
import sys
from pathlib import Path

import torch

from . import checkpoints

ROWS, WIDTH, OUTPUTS = 192, 256, 384


def tensors(kind: str) -> tuple[dict, dict]:
    """vLLM's quantization config, and the parameters of one layer by name; `weight` is what they stand for."""
    weight = torch.randn(OUTPUTS, WIDTH) * 0.05
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
    if kind == "W4A16":
        given, stands_for = checkpoints.four_bits(weight, torch.float16)
        return checkpoints.W4A16["quantization_config"], {**given, "stands for": stands_for}
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


def error(kind: str) -> tuple[str, float]:
    """The kernel's class, and the largest difference by the largest output."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    torch.manual_seed(0)
    config, given = tensors(kind)
    stands_for = given.pop("stands for")
    x = torch.randn(ROWS, WIDTH).half()
    quantization = get_quantization_config(config["quant_method"]).from_config(config)
    with torch.device("musa"):
        layer = ReplicatedLinear(
            WIDTH, OUTPUTS, bias=False, params_dtype=torch.float16, quant_config=quantization, disable_tp=True
        )
    parameters = dict(layer.named_parameters())
    for name, tensor in given.items():
        parameters[name].weight_loader(parameters[name], tensor.to("musa"))
    layer.quant_method.process_weights_after_loading(layer)
    found, _ = layer(x.to("musa"))
    expected = x.float() @ stands_for.t()
    scheme = getattr(layer, "scheme", layer.quant_method)
    kernel = next(value for value in vars(scheme).values() if type(value).__name__.startswith("Musa"))
    return type(kernel).__name__, float((found.cpu().float() - expected).abs().max() / expected.abs().max())


KINDS = ("FP8, tensor", "FP8, channel", "FP8, block", "INT8", "W4A16")


def main(file: str) -> None:
    import torchada  # noqa: F401
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.v1.worker.gpu_worker  # noqa: F401

    import vllm_hwplugin.musa.layers  # noqa: F401

    model = ModelConfig(model=str(checkpoints.TARGET), dtype="float16")
    with set_current_vllm_config(VllmConfig(model_config=model)), torch.inference_mode():
        parallel_state.init_distributed_environment(1, 0, f"file://{file}.store", 0, "gloo")
        parallel_state.initialize_model_parallel()
        Path(file).write_text(json.dumps({kind: error(kind) for kind in KINDS}))


if __name__ == "__main__":
    main(sys.argv[1])
