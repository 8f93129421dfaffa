# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on MUSA over a stand-in for mate: what it has beside tests/attention/test_backends.py.

Not run on MUSA hardware.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.base.versions import SUPPORTED

torch = pytest.importorskip("torch")

from vllm_hwplugin.spec_decode.builders import known  # noqa: E402

from ..attention.layer import Layer, close  # noqa: E402
from ..attention.released import released  # noqa: E402
from ..conftest import versions  # noqa: E402
from .mate_standin import mate  # noqa: E402

every_version = pytest.mark.parametrize("version", versions("vllm/v1/attention/"))
ends = pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
OWN = "vllm_hwplugin.musa.attention"
Tree = Callable[[str], Any]


def layer_of(load: Any, head_size: int, **options: Any) -> Layer:
    return Layer(load, load(OWN).MusaFlashAttentionBackend, head_size, **options)


@every_version
def test_a_drafters_graphs_may_hold_its_metadata(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        allowed = known(load(OWN).MusaFlashAttentionMetadataBuilder)
    assert (allowed.passes, allowed.chain, allowed.non_causal) == (True, True, True)


@ends
def test_batch_invariance_asks_for_keys_in_one_piece(version: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), mate=mate(calls)) as load:
        for asked in (False, True):
            load("vllm.envs").VLLM_BATCH_INVARIANT = asked
            layer = layer_of(load, 64)
            layer.write(slice(None))
            layer.run(layer.metadata(causal=True))
    assert [(call["num_splits"], call["deterministic"]) for call in calls] == [(0, False), (1, True)]


def loaded(impl: Any, dtype: Any, version: str, tree: Any) -> None:
    """What vLLM's layer does when its weights are loaded, by that version's text."""
    path = "vllm/model_executor/layers/attention/attention.py"
    (layer,) = (node for node in ast.parse(tree.read(path)).body if getattr(node, "name", "") == "Attention")
    (method,) = (node for node in layer.body if getattr(node, "name", "") == "process_weights_after_loading")
    scope: dict[str, Any] = {"torch": torch, "should_load_quant_weights": lambda method: True}
    exec(compile(ast.Module([method], []), path, "exec"), scope)
    scope[method.name](SimpleNamespace(impl=impl, quant_config=None), dtype)


@ends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_are_cast_once_for_each_loading_of_weights(version: str, dtype: Any, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    tree = vllm_tree(version)
    with released(version, tree, mate=mate(calls)) as load:
        sinks = torch.nn.Parameter(torch.empty(4, dtype=dtype), requires_grad=False)
        layer = layer_of(load, 64, dtype=dtype, sinks=sinks)
        layer.write(slice(None))
        for values in ([0.5, -1.0, 2.0, 0.0], [3.0, 0.25, -2.0, 1.0]):
            # Weights are loaded into a layer that is there, and a second time into one whose graphs hold addresses.
            sinks.data.copy_(torch.tensor(values))
            loaded(layer.impl, dtype, version, tree)
            for _ in range(2):
                close(layer.run(layer.metadata(causal=True)), layer.right(causal=True, sinks=sinks.data))
    # Kept alive by the list, so one address is one tensor.
    assert len({call["learnable_sink"].data_ptr() for call in calls}) == 1
    assert len(calls) == 4


@pytest.mark.parametrize(("argument", "required"), [("learnable_sink", False), ("scheduler", True)])
def test_a_mate_that_lacks_an_argument_or_requires_another_is_not_used(
    argument: str, required: bool, vllm_tree: Tree
) -> None:
    module: Any = mate()
    function = module.flash_attn_varlen_func
    signature = inspect.signature(function)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != argument]
    if required:
        parameters = [inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters]
    function.__signature__ = signature.replace(parameters=parameters)
    refused = pytest.raises(ImportError, match=f"mate.flash_attn_varlen_func does not take .*'{argument}'")
    with released(SUPPORTED[-1], vllm_tree(SUPPORTED[-1]), mate=module) as load, refused:
        load(OWN)


@ends
def test_an_fp8_cache_is_read_from_mate_0_2_7_on(
    version: str, vllm_tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values far outside of e4m3 without their scales, and tokens without a slot."""
    calls: list[dict[str, Any]] = []
    module: Any = mate(calls)
    module._device.VERSION = (0, 2, 7)
    with released(version, vllm_tree(version), mate=module) as load:
        own = load(OWN)
        versions = importlib.import_module("vllm_hwplugin.musa.versions")
        backend = own.MusaFlashAttentionBackend
        for installed, refused in (("0.2.6", True), (None, True), ("0.2.7", False)):
            monkeypatch.setattr(versions, "installed", {"mate": installed}.get)
            for dtype in ("fp8", "fp8_e4m3"):
                trouble = backend.supports_combination(64, torch.float16, dtype, 16, False, False, False, None)
                assert bool(trouble) is refused
                assert backend.supports_kv_cache_dtype(dtype)
        assert not backend.supports_kv_cache_dtype("fp8_e5m2")
        layer = layer_of(load, 64, dtype=torch.float16, kv_cache_dtype="fp8")
        assert layer.impl.supports_quant_query_input
        scales = {"_q_scale": torch.tensor(0.02), "_k_scale": torch.tensor(0.5), "_v_scale": torch.tensor(4.0)}
        attention = SimpleNamespace(**scales)
        layer.values = [values * 500 for values in layer.values]
        layer.cache = torch.zeros_like(layer.cache, dtype=torch.uint8)
        for request, (keys, values) in enumerate(zip(layer.keys, layer.values, strict=True)):
            at = torch.arange(len(keys))
            slots = layer.table[request, at // 16] * 16 + at % 16
            # A row more than slots, and one whose slot is none.
            padded = [torch.cat([one, one[:2]]) for one in (keys, values)]
            slots = torch.cat([slots, torch.tensor([-1])])
            layer.impl.do_kv_cache_update(attention, *padded, layer.cache, slots)
        query = (layer.query.float() / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)
        metadata, output = layer.metadata(causal=True), torch.full_like(layer.query, float("nan"))
        layer.impl.forward(attention, query, None, None, layer.cache, metadata, output)
        expected = layer.right(causal=True)
        assert (output.float() - expected).abs().max() < 0.06 * expected.abs().max()
    assert calls[0]["q_descale"].shape == (len(layer.batch), 2)
    cache = torch.zeros(2, 16, 2, 64, dtype=torch.uint8)
    own.write_fp8(cache, torch.ones(1, 2, 64), torch.tensor([-1]), torch.tensor(1.0))
    assert not cache[1].any()
