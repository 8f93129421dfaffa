"""The rivals are called as vLLM's backends call them."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types

import pytest
import torch

from vllm_hwplugin.bench.micro import _attention_cases as cases
from vllm_hwplugin.bench.micro._attention_cases import AttentionCase
from vllm_hwplugin.bench.micro._attention_inputs import Pool
from vllm_hwplugin.bench.micro._attention_kernels import FlashAttention, FlashInfer, Ours, Triton, contiguous
from vllm_hwplugin.bench.micro._torch_kernels import Flex, prefill_kernels

CASE = AttentionCase("decode", 3, 70, 4, 2, head_size=32)
#: Its requests have 47, 164, 34 and 40 keys.
UNEVEN = AttentionCase("decode", 4, 95, 4, 2, head_size=32, spread=1.0)


@pytest.fixture
def batch():
    (one,) = Pool(1 << 16, "cpu", 0).batches(CASE, 1)
    return one


@pytest.fixture
def uneven():
    (one,) = Pool(1 << 16, "cpu", 0).batches(UNEVEN, 1)
    return one


@pytest.fixture
def module(monkeypatch):
    def make(name, **content):
        parent, _, leaf = name.rpartition(".")
        if parent:
            make(parent) if parent not in sys.modules else None
            monkeypatch.setattr(sys.modules[parent], leaf, None, raising=False)
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
        if parent:
            monkeypatch.setattr(sys.modules[parent], leaf, made, raising=False)
        return made

    return make


def test_ours_gets_the_batch(module, batch):
    calls = []
    module(
        "vllm_hwplugin.attention.paged",
        refuse=lambda *asked: f"no {asked}",
        Scratch=types.SimpleNamespace(allocate=lambda device: f"scratch on {device}"),
        paged_attention=lambda *tensors, **options: calls.append((tensors, options)),
    )
    ours = Ours()
    assert ours.missing() is None
    assert ours.refuses(CASE) == "no (32, torch.bfloat16, torch.bfloat16, 16)"
    assert ours.prepare(batch)() is batch.output
    ((tensors, options),) = calls
    assert [a is b for a, b in zip(tensors, (batch.query, batch.keys, batch.values, batch.output), strict=True)]
    assert options["query_start_loc"].tolist() == [0, 4, 8, 12]
    assert options["seq_lens"].tolist() == [70] * 3
    assert options["block_table"] is batch.block_table
    assert (options["max_query_len"], options["causal"]) == (4, True)
    assert options["scale"] == pytest.approx(32**-0.5)
    assert options["scratch"] == "scratch on cpu"


@dataclasses.dataclass(frozen=True)
class Scratch:
    device: object
    hopper: bool = True


def test_our_triton_kernels_are_forced_where_the_device_would_take_the_other(module, batch):
    asked = []
    module(
        "vllm_hwplugin.attention.paged",
        refuse=lambda *asked: None,
        Scratch=types.SimpleNamespace(allocate=Scratch),
        paged_attention=lambda *tensors, **options: asked.append(options["scratch"]),
    )
    kernels = Ours(), Ours(triton=True)
    assert [kernel.name for kernel in kernels] == [cases.OURS, cases.OURS_TRITON]
    for kernel in kernels:
        kernel.prepare(batch)()
    assert asked == [Scratch(batch.query.device), Scratch(batch.query.device, hopper=False)]


def test_the_packages_scratch_says_which_kernel_is_taken():
    from vllm_hwplugin.attention import paged

    assert "hopper" in {field.name for field in dataclasses.fields(paged.Scratch)}


@pytest.mark.gpu
def test_ours_is_the_packages_own():
    assert Ours().missing() is None
    assert Ours().refuses(cases.DECODE[0]) is None


def test_triton_gets_what_its_version_knows(module, batch, uneven):
    got = {}

    def unified_attention(
        q, k, v, out, seqused_k, max_seqlen_k, causal, seq_threshold_3D=None, softmax_segm_output=None, extra=7
    ):
        got.update(locals())

    module("vllm.v1.attention.backends.triton_attn", MIN_LAUNCH_GRID_SIZE_2D=128, NUM_PAR_SOFTMAX_SEGMENTS=16)
    module("vllm.v1.attention.ops.triton_unified_attention", unified_attention=unified_attention)
    triton = Triton()
    assert triton.missing() is None
    assert triton.prepare(batch)() is batch.output
    assert got["k"] is batch.keys
    assert (got["causal"], got["seq_threshold_3D"], got["extra"]) == (True, 64, 7)
    assert tuple(got["softmax_segm_output"].shape) == (64, 8, 16, 32)
    assert got["max_seqlen_k"] == 70
    triton.prepare(uneven)()
    assert (got["max_seqlen_k"], got["seqused_k"].tolist()) == (164, [47, 164, 34, 40])


@pytest.mark.parametrize("version", ["0.20.2", "0.24.0", "0.26.0", "0.33.0"])
def test_what_every_triton_kernel_needs_is_passed(vllm_tree, module, batch, version):
    tree = vllm_tree(version)
    source = tree.read("vllm/v1/attention/ops/triton_unified_attention.py")
    (function,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "unified_attention"
    ]
    arguments = function.args.args
    names = {a.arg for a in arguments}
    needed = {a.arg for a in arguments[: len(arguments) - len(function.args.defaults)]}
    backend = tree.read("vllm/v1/attention/backends/triton_attn.py")
    assert {"MIN_LAUNCH_GRID_SIZE_2D", "NUM_PAR_SOFTMAX_SEGMENTS"} <= {
        node.id for node in ast.walk(ast.parse(backend)) if isinstance(node, ast.Name)
    }
    got = {}
    module("vllm.v1.attention.backends.triton_attn", MIN_LAUNCH_GRID_SIZE_2D=128, NUM_PAR_SOFTMAX_SEGMENTS=16)
    space = {"got": got}
    exec(f"def unified({', '.join(f'{name}=None' for name in sorted(names))}): got.update(locals())", space)
    module("vllm.v1.attention.ops.triton_unified_attention", unified_attention=space["unified"])
    Triton().prepare(batch)()
    # Descales of queries are of quantized ones.
    assert needed - {"q_descale"} <= {name for name, value in got.items() if value is not None}
    assert {"seq_threshold_3D", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"} <= {
        name for name, value in got.items() if value is not None
    }


@pytest.mark.parametrize("paged", [True, False])
def test_flash_attention_reads_the_pages_or_what_was_gathered(module, batch, uneven, paged):
    got = {}
    module(
        "vllm.vllm_flash_attn.flash_attn_interface",
        flash_attn_varlen_func=lambda **options: got.update(options),
        is_fa_version_supported=lambda version: version == 3,
        fa_version_unsupported_reason=lambda version: f"not {version}",
    )
    attention = FlashAttention("fa", 3, 256, paged=paged)
    assert attention.missing() is None
    assert "up to 256" in attention.refuses(AttentionCase("decode", 1, 16, 1, 1))
    assert attention.refuses(CASE) is None
    assert attention.prepare(batch)() is batch.output
    assert (got["fa_version"], got["causal"], got["max_seqlen_k"]) == (3, True, 70)
    if paged:
        assert got["k"] is batch.keys
        assert got["block_table"] is batch.block_table
    else:
        assert got["cu_seqlens_k"].tolist() == [0, 70, 140, 210]
        assert torch.equal(got["v"], contiguous(batch)[1])
    attention.prepare(uneven)()
    assert got["max_seqlen_k"] == 164
    if paged:
        assert got["seqused_k"].tolist() == [47, 164, 34, 40]
    else:
        assert got["cu_seqlens_k"].tolist() == [0, 47, 211, 245, 285]
        assert got["k"].shape[0] == 285
    module("vllm.vllm_flash_attn.cute.interface")
    assert FlashAttention("fa", 4, 512).missing() == "not 4"


def test_gathered_keys_are_those_of_the_table(batch):
    keys, values = contiguous(batch)
    block, slot = int(batch.block_table[1, 2]), 5
    assert torch.equal(keys[70 + 2 * 16 + slot], batch.keys[block, slot])
    assert torch.equal(values[70 + 2 * 16 + slot], batch.values[block, slot])


def test_flashinfer_gets_its_pages_and_the_length_of_the_last(module, batch, uneven):
    planned, ran = [], []

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, *arguments, **options):
            planned.append((arguments, options))

        def run(self, query, cache, out):
            ran.append((query, cache, out))

    module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    FlashInfer._WORKSPACE, whole = 16, FlashInfer._WORKSPACE
    try:
        assert FlashInfer().prepare(batch)() is batch.output
        FlashInfer().prepare(uneven)
    finally:
        FlashInfer._WORKSPACE = whole
    (arguments, options), ((_, *others), _) = planned
    starts, pages, indices, last, *sizes = arguments
    assert (starts.tolist(), pages.tolist(), last.tolist()) == ([0, 4, 8, 12], [0, 5, 10, 15], [6, 6, 6])
    assert indices.tolist() == batch.block_table.flatten().tolist()
    assert sizes == [8, 2, 32, 16]
    assert options["causal"] is True
    assert ran[0][2] is batch.output
    pages, indices, last, *_ = others
    assert (pages.tolist(), last.tolist()) == ([0, 3, 14, 17, 20], [15, 4, 2, 8])
    table = uneven.block_table.tolist()
    assert indices.tolist() == [*table[0][:3], *table[1], *table[2][:3], *table[3][:3]]


def test_kernels_without_lengths_refuse_requests_of_unequal_length():
    equal = AttentionCase("prefill", 8, 20, 20, 2, head_size=32)
    uneven = dataclasses.replace(equal, spread=1.0)
    for kernel in prefill_kernels():
        assert kernel.refuses(equal) is None
        assert kernel.refuses(uneven) is not None, kernel.name


def test_flex_has_the_blocks_and_options_of_the_backend(module):
    case = AttentionCase("prefill", 2, 20, 20, 2, head_size=32)
    (batch,) = Pool(1 << 16, "cpu", 0).batches(case, 1)
    got = []

    def compiled(query, key, value, score, mask, scale, *, enable_gqa, kernel_options):
        got.append((mask, enable_gqa, kernel_options))
        return query

    module(
        "vllm.v1.attention.backends.flex_attention",
        FlexAttentionMetadata=types.SimpleNamespace(q_block_size=16),
        get_kernel_options=lambda query, m, n, direct: {"BLOCK_M": m, "BLOCK_N": n, "direct": direct},
        flex_attention_compiled=compiled,
    )
    flex = Flex()
    assert flex.refuses(CASE) is not None
    assert flex.refuses(case) is None
    assert torch.equal(flex.prepare(batch)(), batch.query)
    ((mask, grouped, options),) = got
    assert (mask.BLOCK_SIZE, grouped) == ((16, 16), True)
    assert options == {"BLOCK_M": 16, "BLOCK_N": 16, "direct": True}
    seen = mask.mask_mod
    asks = [[bool(seen(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(40)] for q in range(40)]
    assert asks == [[q // 20 == k // 20 and k <= q for k in range(40)] for q in range(40)]


def test_what_cannot_be_imported_says_why(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert FlashInfer().missing().startswith("flashinfer is not importable: ModuleNotFoundError")
