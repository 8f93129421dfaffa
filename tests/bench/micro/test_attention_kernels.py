"""Each kernel attends the batch that it is given: stand-ins compute what their arguments say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import types

import pytest
import torch

from vllm_hwplugin.attention import paged
from vllm_hwplugin.bench.micro import _attention_cases as cases
from vllm_hwplugin.bench.micro._attention_cases import AttentionCase
from vllm_hwplugin.bench.micro._attention_inputs import Pool
from vllm_hwplugin.bench.micro._attention_kernels import FlashAttention, FlashInfer, Ours, Triton, contiguous
from vllm_hwplugin.bench.micro._torch_kernels import Flex, prefill_kernels

from ...attention import paged_standin
from ...attention.mate_standin import attention

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


def right(batch):
    """The answer in float64, request by request, from the keys and values that the batch says are its."""
    case, found = batch.case, []
    for request, length in enumerate(case.lengths):
        query = batch.query[request * case.query : (request + 1) * case.query].double().transpose(0, 1)
        keys, values = (
            one.double().repeat_interleave(case.heads // case.kv_heads, 1).transpose(0, 1)
            for one in batch.gathered(request)
        )
        mask = torch.ones(case.query, length, dtype=torch.bool).tril(length - case.query)
        answer = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=batch.scale)
        found.append(answer.transpose(0, 1))
    return torch.cat(found)


PLAIN = {"window_size": (-1, -1), "softcap": 0.0, "sinks": None}


def our_stand_in(module):
    signature, stand_in = inspect.signature(paged.paged_attention), paged_standin.paged()

    def paged_attention(*tensors, **options):
        given = signature.bind(*tensors, **options)
        given.apply_defaults()
        stand_in.paged_attention(*given.args, **given.kwargs)

    module("vllm_hwplugin.attention.paged", Scratch=stand_in.Scratch, paged_attention=paged_attention)
    return Ours()


def triton_stand_in(module):
    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None,
        softmax_segm_output=None, of_a_later_version=7,
    ):  # fmt: skip
        assert max_seqlen_k >= int(seqused_k.max())
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        # Room for each segment of as many requests as are split, in elements of a power of two.
        assert tuple(softmax_segm_output.shape) == (seq_threshold_3D, q.shape[1], num_par_softmax_segments, 32)
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        out.copy_(attention(q, k, v, cu_seqlens_q, seqused_k, block_table, **options, sinks=None))

    module("vllm.v1.attention.backends.triton_attn", MIN_LAUNCH_GRID_SIZE_2D=128, NUM_PAR_SOFTMAX_SEGMENTS=16)
    module("vllm.v1.attention.ops.triton_unified_attention", unified_attention=unified_attention)
    return Triton()


def flash_stand_in(module, *, paged):
    def flash_attn_varlen_func(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale, causal, fa_version, **where
    ):
        assert fa_version == 3
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        if "block_table" in where:
            lengths, table = where["seqused_k"], where["block_table"]
        else:
            # Of one token after the other, as pages of one.
            starts, k, v = where["cu_seqlens_k"], k.unsqueeze(1), v.unsqueeze(1)
            lengths = starts.diff()
            table = starts[:-1, None] + torch.arange(int(lengths.max()))
        assert max_seqlen_k >= int(lengths.max())
        out.copy_(attention(q, k, v, cu_seqlens_q, lengths, table, softmax_scale=softmax_scale, causal=causal, **PLAIN))

    module(
        "vllm.vllm_flash_attn.flash_attn_interface",
        flash_attn_varlen_func=flash_attn_varlen_func,
        is_fa_version_supported=lambda version: version == 3,
        fa_version_unsupported_reason=lambda version: f"not {version}",
    )
    return FlashAttention("fa", 3, 256, paged=paged)


def flashinfer_stand_in(module, monkeypatch):
    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, starts, pages, indices, last, heads, kv_heads, size, page, *, causal, sm_scale, **types):
            self.shapes = (heads, size), (page, kv_heads, size)
            self.starts, self.options = starts, {"softmax_scale": sm_scale, "causal": causal}
            self.lengths = (pages.diff() - 1) * page + last
            self.table = torch.zeros(len(last), int(pages.diff().max()), dtype=torch.int32)
            for row, (first, end) in enumerate(itertools.pairwise(pages.tolist())):
                self.table[row, : end - first] = indices[first:end]

        def run(self, query, cache, out):
            assert (tuple(query.shape[1:]), tuple(cache[0].shape[1:])) == self.shapes
            out.copy_(attention(query, *cache, self.starts, self.lengths, self.table, **self.options, **PLAIN))

    module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(FlashInfer, "_WORKSPACE", 16)
    return FlashInfer()


@pytest.mark.parametrize("name", ["ours", "triton", "flash", "flash, gathered", "flashinfer"])
def test_a_kernel_attends_the_batch(module, monkeypatch, batch, uneven, name):
    kernel = {
        "ours": lambda: our_stand_in(module),
        "triton": lambda: triton_stand_in(module),
        "flash": lambda: flash_stand_in(module, paged=True),
        "flash, gathered": lambda: flash_stand_in(module, paged=False),
        "flashinfer": lambda: flashinfer_stand_in(module, monkeypatch),
    }[name]()
    assert kernel.missing() is None
    (whole_pages,) = Pool(1 << 16, "cpu", 0).batches(AttentionCase("decode", 2, 64, 4, 2, head_size=32), 1)
    for one in (batch, uneven, whole_pages):
        found = kernel.prepare(one)()
        assert found is one.output
        torch.testing.assert_close(found.double(), right(one), rtol=1e-2, atol=1e-2)


def test_flash_attention_says_what_it_lacks(module):
    kernel = flash_stand_in(module, paged=True)
    assert "up to 256" in kernel.refuses(AttentionCase("decode", 1, 16, 1, 1))
    assert kernel.refuses(CASE) is None
    module("vllm.vllm_flash_attn.cute.interface")
    assert FlashAttention("fa", 4, 512).missing() == "not 4"


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
    assert "hopper" in {field.name for field in dataclasses.fields(paged.Scratch)}


@pytest.mark.gpu
def test_ours_is_the_packages_own():
    assert Ours().missing() is None
    assert Ours().refuses(cases.DECODE[0]) is None


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


def test_gathered_keys_are_those_of_the_table(batch):
    keys, values = contiguous(batch)
    block, slot = int(batch.block_table[1, 2]), 5
    assert torch.equal(keys[70 + 2 * 16 + slot], batch.keys[block, slot])
    assert torch.equal(values[70 + 2 * 16 + slot], batch.values[block, slot])


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
