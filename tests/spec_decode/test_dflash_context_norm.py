"""The op is asked, not the platform's name: fake ops with the faults that real ones have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin.base import run_records  # noqa: E402
from vllm_hwplugin.spec_decode import dflash_context_norm  # noqa: E402

EPS = 1e-6
LAYERS, TOKENS, HEADS, WIDTH = 3, 5, 2, 16


def plain(x, weights):
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    if weights.dim() == 2:
        weights = weights.reshape(weights.shape[0], *([1] * (x.dim() - 2)), weights.shape[1])
    return (normed * weights.float()).to(x.dtype)


class Op:
    """An rms_norm that counts its calls, with 2-D weights handled as ``fault`` says."""

    def __init__(self, fault=None):
        self.fault = fault
        self.shapes = []

    def __call__(self, out, x, weights, eps):
        assert eps == EPS
        self.shapes.append(tuple(weights.shape))
        if weights.dim() == 1 or self.fault is None:
            out.copy_(plain(x, weights))
        elif self.fault == "row 0":
            out.copy_(plain(x, weights[0]))
        elif self.fault == "first layer only":
            out[0] = plain(x[0], weights[0])
        elif self.fault == "rejects":
            raise RuntimeError("weight must be one-dimensional\nat layernorm.cpp:1")
        elif self.fault == "ignores strides":
            flat = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())
            out.copy_(plain(flat, weights))


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    said = {}
    monkeypatch.setattr(dflash_context_norm, "_answers", {})
    monkeypatch.setattr(run_records, "note", said.__setitem__)
    return said


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LAYERS, TOKENS, HEADS, WIDTH, generator=generator)
    weights = torch.randn(LAYERS, WIDTH, generator=generator)
    return torch.empty_like(x), x, weights


def real_calls(op):
    """What was called for the caller, without the probe's one call."""
    return op.shapes[1:]


def test_a_right_op_keeps_its_single_call(tensors, notes):
    out, x, weights = tensors
    op = Op()
    dflash_context_norm.norm_rows(op, out, x, weights, EPS)
    assert real_calls(op) == [(LAYERS, WIDTH)]
    torch.testing.assert_close(out, plain(x, weights))
    assert notes == {
        f"dflash-context-norm cpu float32 [{LAYERS}, {WIDTH}]": "rms_norm honours a weight row per layer; "
        "vLLM's single call is kept"
    }


@pytest.mark.parametrize("fault", ["row 0", "first layer only", "rejects"])
def test_a_wrong_op_is_called_once_a_layer(tensors, fault, notes):
    out, x, weights = tensors
    op = Op(fault)
    dflash_context_norm.norm_rows(op, out, x, weights, EPS)
    assert real_calls(op) == [(WIDTH,)] * LAYERS
    torch.testing.assert_close(out, plain(x, weights))
    (decision,) = notes.values()
    assert decision.endswith("one call a layer instead")
    assert ("RuntimeError: weight must be one-dimensional)" in decision) == (fault == "rejects")


@pytest.mark.parametrize("fault", [None, "row 0"])
def test_low_precision_is_told_from_a_fault_of_many_layers(fault):
    x, weights = torch.ones(40, TOKENS, WIDTH).bfloat16(), torch.ones(40, WIDTH).bfloat16()
    op = Op(fault)
    dflash_context_norm.norm_rows(op, torch.empty_like(x), x, weights, EPS)
    assert real_calls(op) == ([(40, WIDTH)] if fault is None else [(WIDTH,)] * 40)


def test_the_op_is_asked_once_for_each_type_and_shape(tensors):
    out, x, weights = tensors
    op = Op()
    for _ in range(3):
        dflash_context_norm.norm_rows(op, out, x, weights, EPS)
    assert len(op.shapes) == 1 + 3
    half = [t.half() for t in tensors]
    dflash_context_norm.norm_rows(op, *half, EPS)
    dflash_context_norm.norm_rows(op, *half, EPS)
    assert len(op.shapes) == 1 + 3 + 1 + 2
    dflash_context_norm.norm_rows(op, out[:2], x[:2], weights[:2], EPS)
    assert len(op.shapes) == 7 + 1 + 1


@pytest.mark.parametrize("fault", [None, "ignores strides", "row 0"])
def test_an_input_that_all_layers_share(tensors, fault):
    _, x, weights = tensors
    shared = x[:1, :, 0, :].expand(LAYERS, -1, -1)
    out = torch.empty(LAYERS, TOKENS, WIDTH)
    op = Op(fault)
    dflash_context_norm.norm_rows(op, out, shared, weights, EPS)
    torch.testing.assert_close(out, plain(shared, weights))
    # A wrong op is not handed the broadcast probe at all.
    probes = 1 if fault == "row 0" else 2
    assert op.shapes[probes:] == ([(LAYERS, WIDTH)] if fault is None else [(WIDTH,)] * LAYERS)


def test_in_a_trace_nothing_is_asked_and_the_result_is_right(tensors, notes):
    out, x, weights = tensors

    def row_0(out, x, weights, eps):
        out.copy_(plain(x, weights if weights.dim() == 1 else weights[0]))

    traced = torch.compile(
        lambda: dflash_context_norm.norm_rows(row_0, out, x, weights, EPS), backend="eager", fullgraph=True
    )
    traced()
    torch.testing.assert_close(out, plain(x, weights))
    assert notes == {}


def test_in_a_capture_nothing_is_asked(tensors, notes, monkeypatch):
    out, x, weights = tensors

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    op = Op("row 0")
    dflash_context_norm.norm_rows(op, out, x.as_subclass(OnGpu), weights, EPS)
    assert op.shapes == [(WIDTH,)] * LAYERS
    torch.testing.assert_close(out, plain(x, weights))
    assert notes == {}
