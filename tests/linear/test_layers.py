# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few tokens, as far as a CPU goes: which calls reach the kernels, and what vLLM's layers become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod
from vllm.platforms.interface import DeviceCapability

from vllm_hwplugin.base.fallback import FeatureRequired
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.linear import layers, mlp, operations

from ..conftest import versions
from ..released import take, text_of

ON = {"VLLM_HWPLUGIN_LINEAR": "on"}
RELEASES = SUPPORTED[SUPPORTED.index("0.21.0") :]


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


def bfloat16(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.bfloat16)


OTHER_ROWS = {
    "no row": bfloat16(0, 512),
    "rows that begin where no 16 bytes do": bfloat16(4, 516)[:, :512],
    "the first one, too": bfloat16(4, 520)[:, 1:513],
    "elements apart": bfloat16(512, 4).t(),
    "one row for all": bfloat16(1, 512).expand(4, 512),
    "float32": torch.randn(4, 512),
    "a batch of them": bfloat16(1, 4, 512),
}


def test_one_row_is_the_kernels_whatever_is_behind_it(launched: list[tuple[Any, ...]]) -> None:
    torch.ops.hwplugin.linear(bfloat16(1, 516)[:, :512], weights(1024, 512))
    assert launched == [((1, 512), False, (16, 512))]
    assert operations.tile_for(1008, 512) is None


@pytest.mark.parametrize("kind", OTHER_ROWS)
def test_rows_that_are_torchs(launched: list[tuple[Any, ...]], kind: str) -> None:
    x, weight = OTHER_ROWS[kind], bfloat16(512)
    matrix = weights(2048, 512).to(x.dtype)
    torch.testing.assert_close(torch.ops.hwplugin.linear(x, matrix), F.linear(x, matrix))
    expected = F.rms_norm(x.float(), (512,), weight.float(), 1e-6).to(x.dtype)
    torch.testing.assert_close(torch.ops.hwplugin.rms_norm(x, weight, 1e-6), expected, atol=2e-2, rtol=2e-2)
    # A residual is rows as well.
    beside = torch.randn(x.shape, dtype=torch.bfloat16)
    for first, second in ((x, beside), (beside, x)):
        torch.ops.hwplugin.add_rms_norm(first, second, weight, 1e-6)
    assert not launched


@pytest.mark.parametrize(
    ("hidden", "weight", "served"),
    [
        (8192, bfloat16(8192), True),
        (8448, bfloat16(8448), False),
        (512, torch.randn(512), False),
        (512, bfloat16(520)[1:513], False),
    ],
)
def test_norms_have_weights_that_the_kernel_takes(
    launched: list[tuple[Any, ...]], hidden: int, weight: torch.Tensor, served: bool
) -> None:
    x = bfloat16(4, hidden)
    expected = F.rms_norm(x.float(), (hidden,), weight.float(), 1e-6).bfloat16()
    torch.testing.assert_close(torch.ops.hwplugin.rms_norm(x, weight, 1e-6), expected, atol=2e-2, rtol=2e-2)
    assert bool(launched) == served


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (bfloat16(4, 512), weights(512, 2048).t()),
        (bfloat16(4, 512), weights(2048, 520)[:, :512]),
        # No tile divides these, and a router is too small.
        (bfloat16(4, 500), weights(2048, 500)),
        (bfloat16(4, 512), weights(128, 512)),
    ],
)
def test_any_other_call_is_torchs(launched: list[tuple[Any, ...]], x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.testing.assert_close(torch.ops.hwplugin.linear(x, weight), F.linear(x, weight))
    assert not launched


def test_weights_that_are_kept_on_the_host_are_torchs() -> None:
    assert operations._tile_of(bfloat16(4, 512), weights(2048, 512)) == (32, 512)
    assert operations._tile_of(bfloat16(4, 512), weights(2048, 512).to("meta")) is None


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
    for change in ({"variance_size_override": 256}, {"has_weight": False}, {"weight": norm.weight.float()}):
        other = SimpleNamespace(**vars(norm) | {"weight": norm.weight} | change)
        assert not layers.takes_norm(other, x)
    assert not layers.takes_norm(norm, torch.randn(3, 8, 512, dtype=torch.bfloat16))
    assert not layers.takes_norm(norm, x.float())


@pytest.mark.parametrize(("hidden", "taken"), [(256, False), (512, True), (640, False), (8192, True), (8448, False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_are_of_hidden_states_of_one_gpu(
    hidden: int, taken: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(layers, "get_tp_group", lambda: SimpleNamespace(world_size=ranks))
    norm = SimpleNamespace(has_weight=True, variance_size_override=None, weight=bfloat16(hidden))
    assert layers.takes_norm(norm, bfloat16(2, hidden)) == (taken and ranks == 1)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_kernels_are_not_used_with_batch_invariance(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS serves more tokens, in another order of its sums."""
    monkeypatch.setattr(layers.envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
    found = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: DeviceCapability(9, 0))
    monkeypatch.setattr(layers, "current_platform", found)
    assert layers._on_hopper() is not invariant


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


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        # Adapters wrap a layer, and a subclass may do more.
        ("gate_up_proj", "__class__", type("Wrapped", (MergedColumnParallelLinear,), {})),
        ("gate_up_proj", "bias", bfloat16(2048)),
        ("gate_up_proj", "gather_output", True),
        ("gate_up_proj", "weight", torch.nn.Parameter(bfloat16(1008, 512))),
        ("act_fn", "__class__", type("Other", (SiluAndMul,), {})),
    ],
)
def test_other_mlps_are_vllms(part: str, name: str, value: Any, vllm_tree: Any) -> None:
    made, x = released_mlp(vllm_tree(SUPPORTED[-1]), "LlamaMLP", "llama"), bfloat16(3, 512)
    assert mlp.takes(made, x)
    assert not mlp.takes(made, x[None])
    setattr(getattr(made, part), name, value)
    assert not mlp.takes(made, x)


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
