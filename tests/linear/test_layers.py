# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few tokens, as far as a CPU goes: which calls reach the kernels, and what vLLM's layers become."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod

from vllm_hwplugin.fallback import FeatureRequired
from vllm_hwplugin.linear import layers, mlp, operations
from vllm_hwplugin.ops.compile.spec import source_root
from vllm_hwplugin.versions import SUPPORTED

from ..conftest import versions
from ..spec_decode.released import take, text_of

ON = {"VLLM_HWPLUGIN_LINEAR": "on"}
RELEASES = SUPPORTED[SUPPORTED.index("0.21.0") :]
#: Hidden size, outputs of qkv, inputs of o, outputs of gate and up, inputs of down: Qwen3-8B, -4B, -1.7B and -0.6B, and
#: Llama 3.1 8B.
MODELS = {
    "8b": (4096, 6144, 4096, 24576, 12288),
    "4b": (2560, 6144, 4096, 19456, 9728),
    "1.7b": (2048, 4096, 2048, 12288, 6144),
    "0.6b": (1024, 4096, 2048, 6144, 3072),
    "llama": (4096, 6144, 4096, 28672, 14336),
}


def weights(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5


class Called(TorchDispatchMode):
    """The plugin's operations that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hwplugin":
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


# -- which calls reach the kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, operations.MOST_TOKENS, operations.MOST_TOKENS + 1])
def test_few_tokens_are_the_kernels(launched: list[tuple[Any, ...]], tokens: int, gated: bool) -> None:
    x, weight = torch.randn(tokens, 512, dtype=torch.bfloat16), weights(2048, 512)
    found = torch.ops.hwplugin.linear(x, weight, gated)
    product = x.float() @ weight.float().t()
    expected = F.silu(product[:, :1024]) * product[:, 1024:] if gated else product
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    assert launched == ([] if tokens > operations.MOST_TOKENS else [((tokens, 512), gated, (32, 512))])


@pytest.mark.parametrize("tokens", [1, operations.MOST_TOKENS + 1])
def test_norms_of_any_number_of_tokens_let_the_next_kernel_start(launched: list[tuple[Any, ...]], tokens: int) -> None:
    x, residual, weight = (torch.randn(*size, dtype=torch.bfloat16) for size in ((tokens, 512), (tokens, 512), (512,)))
    found, total = torch.ops.hwplugin.add_rms_norm(x, residual, weight, 1e-6)
    added = x.float() + residual.float()
    torch.testing.assert_close(total.float(), added, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(found.float(), F.rms_norm(added, (512,), weight.float(), 1e-6), atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(
        torch.ops.hwplugin.rms_norm(x, weight, 1e-6).float(),
        F.rms_norm(x.float(), (512,), weight.float(), 1e-6),
        atol=2e-2,
        rtol=1e-2,
    )
    assert launched == [((tokens, 512),)] * 2


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(4, 512), weights(2048, 512).float()),
        # Rows that do not begin at multiples of 16 bytes.
        (torch.randn(4, 516, dtype=torch.bfloat16)[:, :512], weights(2048, 512)),
        (torch.randn(4, 520, dtype=torch.bfloat16)[:, 1:513], weights(2048, 512)),
        (torch.randn(512, 4, dtype=torch.bfloat16).t(), weights(2048, 512)),
        (torch.randn(4, 512, dtype=torch.bfloat16), weights(512, 2048).t()),
        # No tile divides these, and a router is too small.
        (torch.randn(4, 500, dtype=torch.bfloat16), weights(2048, 500)),
        (torch.randn(4, 512, dtype=torch.bfloat16), weights(128, 512)),
    ],
)
def test_any_other_call_is_torchs(launched: list[tuple[Any, ...]], x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.testing.assert_close(torch.ops.hwplugin.linear(x, weight), F.linear(x, weight))
    assert not launched


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layer_of_the_models_has_a_tile(model: str, ranks: int) -> None:
    hidden, qkv, o, both, down = MODELS[model]
    parted = ((qkv // ranks, hidden), (hidden, o // ranks), (both // ranks, hidden), (hidden, down // ranks))
    for outputs, inputs in parted:
        assert operations.tile_for(outputs, inputs) in operations.TILES, (outputs, inputs)


def test_the_kernel_has_these_tiles() -> None:
    text = (source_root() / "skinny_linear" / "skinny_linear.cu").read_text()
    found = re.findall(r"rows == (\d+) && depth == (\d+)\) {\s+launch_rows<(\d+), (\d+)>", text)
    assert [(int(rows), int(depth)) for rows, depth, *_ in found] == [*operations.TILES]
    assert all(one[:2] == one[2:] for one in found)
    assert f"kMostTokens = {operations.MOST_TOKENS};" in text


def test_a_start_that_demands_the_kernel_ends_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its norms would be slower than stock's."""
    monkeypatch.setattr(operations, "GPUS", ("cpu",))
    monkeypatch.setattr(operations, "_loaded", None)
    monkeypatch.setattr(operations, "ensure", lambda spec: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("VLLM_HWPLUGIN_LINEAR", "on")
    with pytest.raises(FeatureRequired, match="VLLM_HWPLUGIN_LINEAR=auto"):
        operations.linear(torch.randn(4, 512, dtype=torch.bfloat16), weights(2048, 512))


# -- what vLLM's layers become ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions("vllm/model_executor/layers/utils.py", among=RELEASES))
def test_released_linear_layers_are_the_plugins_operation(version: str, vllm_tree: Any) -> None:
    text = text_of(vllm_tree(version), "vllm/model_executor/layers/utils.py", **ON)
    gemm = take(text, "default_unquantized_gemm", given={"hwplugin_layers": layers, "torch": torch})
    x, weight, bias = torch.randn(3, 512, dtype=torch.bfloat16), weights(2048, 512), weights(1, 2048)[0]
    with Called() as called:
        torch.testing.assert_close(gemm(None, x, weight), F.linear(x, weight))
        assert called.names == ["linear"]
        # With a bias, in float32, of a batch of matrices: as before.
        torch.testing.assert_close(gemm(None, x, weight, bias), F.linear(x, weight, bias))
        gemm(None, x.float(), weight.float())
        gemm(None, x[None], weight)
        assert called.names == ["linear"]


@pytest.mark.parametrize("version", versions("vllm/model_executor/layers/layernorm.py", among=RELEASES))
def test_released_norms_of_hidden_states_are_the_plugins(version: str, vllm_tree: Any) -> None:
    text = text_of(vllm_tree(version), "vllm/model_executor/layers/layernorm.py", **ON)
    given = {"hwplugin_layers": layers, "ir": None, "CustomOp": SimpleNamespace}
    norm = take(text.replace("@CustomOp.register", "#"), "RMSNorm", ["forward_native"], given=given)()
    norm.has_weight, norm.variance_size_override, norm.variance_epsilon = True, None, 1e-6
    norm.weight = torch.nn.Parameter(torch.randn(512, dtype=torch.bfloat16), requires_grad=False)
    x, residual = torch.randn(2, 3, 512, dtype=torch.bfloat16)
    with Called() as called:
        out, total = norm.forward_native(x, residual)
        norm.forward_native(x)
        assert called.names == ["add_rms_norm", "rms_norm"]
    added = x.float() + residual.float()
    torch.testing.assert_close(total.float(), added, atol=2e-2, rtol=1e-2)
    expected = F.rms_norm(added, (512,), norm.weight.float(), 1e-6)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=1e-2)
    # Of heads, of a part, and of another type: vLLM's, which is not there.
    for change in ({"variance_size_override": 256}, {"has_weight": False}):
        other = SimpleNamespace(**vars(norm) | change)
        assert not layers.takes_norm(other, x)
    assert not layers.takes_norm(norm, torch.randn(3, 8, 512, dtype=torch.bfloat16))
    assert not layers.takes_norm(norm, x.float())


def released_mlp(tree: Any, name: str, file: str) -> Any:
    """An MLP of 512 hidden and 1024 inner features whose `forward` is the patched one of a release."""
    given = {"hwplugin_mlp": mlp, "nn": torch.nn, "maybe_fused_act_quant": lambda act, x, down: act(x)}
    made = take(text_of(tree, f"vllm/model_executor/models/{file}.py", **ON), name, ["forward"], given=given)()
    gate_up, act = (object.__new__(one) for one in (MergedColumnParallelLinear, SiluAndMul))
    for module in (gate_up, act):
        torch.nn.Module.__init__(module)
    gate_up.weight = torch.nn.Parameter(weights(2048, 512), requires_grad=False)
    gate_up.bias, gate_up.gather_output, gate_up.quant_method = None, False, UnquantizedLinearMethod()
    gate_up.forward = lambda x: (F.linear(x, gate_up.weight), None)
    act.forward = act.forward_native
    down = weights(512, 1024)
    made.gate_up_proj, made.act_fn, made.down_proj = gate_up, act, lambda x: (F.linear(x, down), None)
    return made


@pytest.mark.parametrize(("name", "file"), [("LlamaMLP", "llama"), ("Qwen2MLP", "qwen2")])
@pytest.mark.parametrize("version", versions("vllm/model_executor/models/", among=RELEASES))
def test_released_mlps_activate_in_the_linear_layer(version: str, name: str, file: str, vllm_tree: Any) -> None:
    made, x = released_mlp(vllm_tree(version), name, file), torch.randn(3, 512, dtype=torch.bfloat16)
    with Called() as called:
        found = made.forward(x)
        assert called.names == ["linear"]
        made.gate_up_proj.quant_method = object()
        expected = made.forward(x)
        assert called.names == ["linear"]
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_a_compiled_layer_has_one_operation_for_any_number_of_tokens() -> None:
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    weight = weights(2048, 512)
    norm = SimpleNamespace(
        has_weight=True, variance_size_override=None, variance_epsilon=1e-6, weight=torch.randn(512).bfloat16()
    )

    def layer(x: torch.Tensor) -> Any:
        heads = layers.gemm(x, weight, None)[:, :512]
        return layers.norm(norm, heads, None) if layers.takes_norm(norm, heads) else heads

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (4, 30, 64):
        x = torch.randn(tokens, 512, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(seen) == 1
    assert [str(one) for one in seen[0] if "hwplugin" in str(one)] == ["hwplugin.linear", "hwplugin.rms_norm"]
