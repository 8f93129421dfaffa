# SPDX-License-Identifier: Apache-2.0
"""Backends that do not do what they declare, each in its own way, around vLLM's CPU backend; graphs are stand-ins."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import get_current_vllm_config  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import (  # noqa: E402
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from vllm_hwplugin_lab.probe import Case, Request, _child, _host, _step, _vllm, trials  # noqa: E402
from vllm_hwplugin_lab.probe._trial import try_out  # noqa: E402
from vllm_hwplugin_lab.probe.inputs import make_inputs  # noqa: E402
from vllm_hwplugin_lab.probe.reference import answers  # noqa: E402

CASE = Case((Request(9, 20),), "float32", "auto", 16, 4, 2, 16, seed=3)
OWN = "vllm_hwplugin.attention.cuda.CudaFlashAttentionBackend"


def backend(builder=CPUAttentionMetadataBuilder, impl=CPUAttentionBackendImpl, **declared):
    methods = {name: staticmethod(lambda *_, answer=answer: answer) for name, answer in declared.items()}
    made = {"get_builder_cls": staticmethod(lambda: builder), "get_impl_cls": staticmethod(lambda: impl)}
    return type("Fake", (CPUAttentionBackend,), made | methods)


class Causal(CPUAttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return super().build(common_prefix_len, common_attn_metadata.replace(causal=True), fast_build)


class Forgetful(CPUAttentionBackendImpl):
    """Never writes the last key, so that what the cache held before is read instead."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        super().do_kv_cache_update(layer, key[:-1], value[:-1], kv_cache, slot_mapping[:-1])


class WithoutSinks(CPUAttentionBackendImpl):
    """As vLLM's implementations that know no sinks: an argument that is not there."""

    def __init__(self, *shape_to_sharing):
        super().__init__(*shape_to_sharing)


class KeepsBuffers(CPUAttentionMetadataBuilder):
    """As one for graphs: what it makes for a capture changes with each batch."""

    kept = None

    def build_for_cudagraph_capture(self, common_attn_metadata):
        self.kept = super().build_for_cudagraph_capture(common_attn_metadata)
        return self.kept

    def build(self, *arguments, **options):
        found = super().build(*arguments, **options)
        if self.kept is not None:
            vars(self.kept).update(vars(found))
        return found


class AsksConfiguration(CPUAttentionBackend):
    """Answers from the current configuration, as vLLM's FlashAttention does up to 0.21."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        assert get_current_vllm_config().model_config is not None
        return CPUAttentionBackend.get_supported_kernel_block_sizes()


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    if _vllm.device().type != "cpu":
        pytest.skip("these are for vLLM's CPU backend")
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()

    def capture(build, step):
        step(build())
        metadata = build()
        step(metadata)
        return lambda: step(metadata)

    monkeypatch.setattr(_step, "capture", capture)


@pytest.mark.parametrize(
    ("one", "trial", "found"),
    [
        # What the next one does, without its question.
        pytest.param(CPUAttentionBackend, ("plain", "causal"), ("yes", "works"), marks=pytest.mark.slow),
        (AsksConfiguration, ("plain", "causal"), ("yes", "works")),
        (backend(Causal), ("non_causal", "yes"), ("yes", "wrong")),
        (backend(supports_non_causal=False), ("non_causal", "yes"), ("no", "works")),
        (backend(get_supported_kernel_block_sizes=[8, 32]), ("block_size", "8"), ("yes", "refuses")),
        (backend(impl=Forgetful), ("plain", "causal"), ("yes", "wrong")),
        (backend(impl=WithoutSinks), ("sinks", "yes"), ("no", "refuses")),
        (backend(KeepsBuffers), ("captured", "decode"), ("no", "works")),
        (backend(KeepsBuffers), ("captured", "verify"), ("no", "works")),
        (backend(KeepsBuffers), ("captured", "mixed"), ("no", "works")),
        (CPUAttentionBackend, ("captured", "verify"), ("no", "wrong")),
    ],
)
def test_what_is_declared_and_what_is_done(one, trial, found):
    (trial,) = [each for each in trials() if each.key == trial]
    with torch.inference_mode():
        made = try_out(_host.LayerHost(one), trial, seed=3, count=2, factor=4.0, on_case=lambda case, declared: None)
    assert (made["declared"], made["behaviour"]) == found, made


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


def test_a_name_means_all_classes_that_the_platform_gives_for_it(monkeypatch):
    flash, triton = AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN

    def answer(member, asked):
        if member is triton:
            raise RuntimeError("no such device")
        if member is not flash:
            raise ValueError("not here")
        return flash.get_path() if asked.head_size <= 256 else OWN

    monkeypatch.setattr(_child, "current_platform", SimpleNamespace(get_attn_backend_cls=answer))
    classes = {path: SimpleNamespace(get_name=lambda: "FLASH_ATTN") for path in (flash.get_path(), OWN)}
    monkeypatch.setattr(_child, "resolve_name", classes.__getitem__)
    both = {"FLASH_ATTN": classes[flash.get_path()], OWN: classes[OWN]}
    assert _child.chosen(["FLASH_ATTN"]) == (both, {})
    assert _child.chosen([OWN]) == ({OWN: classes[OWN]}, {})
    found, broken = _child.chosen([])
    assert found == both
    assert "TRITON_ATTN cannot be asked on this host: RuntimeError: no such device" in broken["TRITON_ATTN"]
    with pytest.raises(SystemExit, match="no such device"):
        _child.chosen(["TRITON_ATTN"])
