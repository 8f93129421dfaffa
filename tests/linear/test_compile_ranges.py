# SPDX-License-Identifier: Apache-2.0
"""Steps of more tokens than the kernels serve: vLLM compiles them apart, and as without the plugin's operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from vllm import ir
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config import PassConfig, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers.activation import SiluAndMul

from vllm_hwplugin.base import run_records
from vllm_hwplugin.linear import compile_ranges, layers
from vllm_hwplugin.linear.operations import MOST_TOKENS
from vllm_hwplugin.linear.restore_pass import RestorePass

from ..conftest import versions
from ..released import Modules, take, text_of, texts
from .test_layers import ON, RELEASES, weights

MANAGER = "vllm.compilation.passes.pass_manager"
#: What the text of vLLM's configurations names.
NAMES = {"Range": Range, "ConfigDict": dict, "config": lambda item=None, **_: item or (lambda cls: cls)}


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feature."""
    monkeypatch.setattr(run_records, "current", lambda: SimpleNamespace(live=("linear",)))


class NoPass:
    """A `PassConfig` that has every fusion, and asks for none."""

    def __getattr__(self, name: str) -> bool:
        return False


def layer(x: torch.Tensor, norm: torch.Tensor, both: torch.Tensor, down: torch.Tensor) -> Any:
    """A norm, an MLP, and the norm of its sum with what came in."""
    inner = torch.ops.hwplugin.linear(torch.ops.hwplugin.rms_norm(x, norm, 1e-6), both, True)
    return torch.ops.hwplugin.add_rms_norm(torch.ops.hwplugin.linear(inner, down), x, norm, 1e-6)


def vllms(x: torch.Tensor, norm: torch.Tensor, both: torch.Tensor, down: torch.Tensor) -> Any:
    inner = SiluAndMul.forward_native(F.linear(ir.ops.rms_norm(x, norm, 1e-6), both))
    return ir.ops.fused_add_rms_norm(F.linear(inner, down), x, norm, 1e-6)


def layer_weights() -> tuple[torch.Tensor, ...]:
    """Of 512 hidden and 1024 inner features."""
    return torch.rand(512).bfloat16(), weights(2048, 512), weights(512, 1024)


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 512, dtype=torch.bfloat16)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed vLLM's configuration with what those of older ones have."""
    for name in ("enable_sp", "fuse_gemm_comms", "fuse_minimax_qk_norm"):
        monkeypatch.setattr(PassConfig, name, False, raising=False)


@pytest.mark.parametrize("version", versions(f"{MANAGER.replace('.', '/')}.py", among=RELEASES))
@pytest.mark.usefixtures("older")
def test_released_passes_leave_the_operations_to_few_tokens(version: str, vllm_tree: Any) -> None:
    manager = Modules(texts(vllm_tree(version), **ON), [MANAGER])(MANAGER).PostGradPassManager()
    config = VllmConfig()
    manager.configure(config)
    # Ahead of vLLM's: they are to find what they look for.
    assert type(manager.passes[0]) is RestorePass
    given = rows(40), *layer_weights()
    found = {}
    for name, bounds in (("few", (1, MOST_TOKENS)), ("all", (1, 8192)), ("more", (MOST_TOKENS + 1, 8192))):
        graph = make_fx(layer, tracing_mode="symbolic")(*given)
        with set_current_vllm_config(config), pass_context(Range(*bounds)):
            manager(graph.graph)
        graph.recompile()
        found[name] = [
            node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
        ]
        torch.testing.assert_close(graph(*given), vllms(*given), atol=2e-2, rtol=2e-2)
    own = ["hwplugin::rms_norm", "hwplugin::linear", "hwplugin::linear", "hwplugin::add_rms_norm"]
    assert found["few"] == found["all"] == own
    assert found["more"].count("aten::mm") == 2
    assert not [name for name in found["more"] if name.startswith(("hwplugin", "vllm_ir"))]


@pytest.mark.parametrize(
    ("given", "batched", "expected"),
    [
        (None, 8192, [(1, MOST_TOKENS), (MOST_TOKENS + 1, 8192)]),
        ([8, 64], 8192, [(1, 8), (9, MOST_TOKENS), (MOST_TOKENS + 1, 64), (65, 8192)]),
        (None, 16, [(1, 16)]),
    ],
)
@pytest.mark.parametrize("version", versions("vllm/config/vllm.py", "vllm/config/compilation.py", among=RELEASES))
@pytest.mark.usefixtures("live")
def test_released_ranges_end_at_the_most_tokens_of_the_kernels(
    version: str, given: Any, batched: int, expected: Any, vllm_tree: Any
) -> None:
    compilation, config = (
        take(text_of(vllm_tree(version), f"vllm/config/{file}.py"), name, [method], given=NAMES)()
        for file, name, method in (
            ("compilation", "CompilationConfig", "get_compile_ranges"),
            ("vllm", "VllmConfig", "_set_compile_ranges"),
        )
    )
    compilation.compile_ranges_endpoints = given
    compilation.pass_config, compilation.compile_mm_encoder = NoPass(), False
    config.compilation_config = compilation
    config.scheduler_config = SimpleNamespace(max_num_batched_tokens=batched)
    # A configuration that is made of another one is asked again.
    for _ in range(2):
        compile_ranges.check_and_update_config(config)
        config._set_compile_ranges()
    assert [(one.start, one.end) for one in compilation.get_compile_ranges()] == expected


@pytest.mark.parametrize(
    ("names", "hopper", "encoder"),
    [((), True, False), (("linear",), False, False), (("linear",), True, True)],
)
def test_ranges_stay_vllms_without_the_feature_or_its_gpu_and_with_an_encoder(
    names: tuple[str, ...], hopper: bool, encoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "ON_HOPPER", hopper)
    monkeypatch.setattr(run_records, "current", lambda: SimpleNamespace(live=names))
    compilation = SimpleNamespace(compile_ranges_endpoints=None, compile_mm_encoder=encoder)
    compile_ranges.check_and_update_config(SimpleNamespace(compilation_config=compilation))
    assert compilation.compile_ranges_endpoints is None
