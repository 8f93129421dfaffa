# SPDX-License-Identifier: Apache-2.0
"""A layer's step by what differs between versions of vLLM and between devices."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402

from vllm_hwplugin_lab.probe import Case, Request, _step, _vllm  # noqa: E402
from vllm_hwplugin_lab.probe.inputs import make_inputs  # noqa: E402
from vllm_hwplugin_lab.probe.reference import answers  # noqa: E402

CASE = Case((Request(9, 20),), "float32", "auto", 16, 4, 2, 16, seed=3)


@pytest.mark.parametrize(("short", "mixed"), [(False, 16), (True, 1)])
def test_a_batch_is_captured_with_the_bound_that_the_model_runner_announces(monkeypatch, short, mixed):
    monkeypatch.setattr(_step, "captures_short_queries", lambda config: config == "a configuration" and short)
    for requests, graph, longest in (
        ((Request(1, 5), Request(6, 9), Request(9, 3)), (1,) * 16, mixed),
        ((Request(4, 5),), (4,) * 8, 4),
        ((Request(1, 5),), (1,) * 8, 1),
    ):
        case = dataclasses.replace(CASE, requests=requests, graph=graph)
        assert _step.announced(case, "a configuration") == longest


@pytest.mark.parametrize(("version", "works"), [("0.23.0", {0, 3}), ("0.24.0", {3})])
def test_a_window_may_look_back_only_where_vllms_flash_attention_does(monkeypatch, version, works):
    monkeypatch.setattr(_vllm, "__version__", version)
    case = dataclasses.replace(CASE, causal=False, sliding_window=4)
    inputs = make_inputs(case, "cpu")
    for ahead in (None, 0, 3):
        (answer,) = answers(dataclasses.replace(case, window_ahead=ahead), inputs)
        found = _vllm.measured(case, inputs, answer.right.float(), False)
        assert (found.ratio < 2) is (ahead in works), (ahead, found)
        assert bool(found.note) is (version == "0.23.0" and ahead == 0)


def test_what_the_layer_keeps_is_on_the_device_and_nothing_else_is_made_there():
    """A device whose tensors hold nothing stands in for one that is not the CPU."""
    with _vllm.layer_of(CPUAttentionBackend, dataclasses.replace(CASE, block_size=32), torch.device("meta")) as layer:
        assert layer.layer._k_scale.device.type == layer.cache.device.type == "meta"
        assert torch.empty(()).device.type == "cpu"
        common = _step.Step(layer, CASE, 4, "meta")._metadata(CASE)
        assert common.block_table_tensor.device.type == "meta"
        assert common.query_start_loc_cpu.device.type == common.seq_lens_cpu_upper_bound.device.type == "cpu"
