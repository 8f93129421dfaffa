"""Each kernel attends the batch that it is given, or says why it cannot."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import sys
import types

import pytest

from vllm_hwplugin_lab.bench.micro import _attention_cases as cases
from vllm_hwplugin_lab.bench.micro._attention_bench import Pool, looked_at, right
from vllm_hwplugin_lab.bench.micro._attention_cases import AttentionCase
from vllm_hwplugin_lab.bench.micro._attention_kernels import KERNELS, unified
from vllm_hwplugin_lab.bench.micro._supervise import Missing, Refused
from vllm_hwplugin_lab.probe.reference import compare

DECODE = AttentionCase("decode", 3, 70, 4, 2, head_size=256)
#: Its requests have 47, 164, 34 and 40 keys.
UNEVEN = dataclasses.replace(DECODE, batch=4, context=95, spread=1.0)
PROMPT = AttentionCase("prefill", 2, 64, 64, 2, head_size=256)
#: With heads as the plugin's kernel is made for, too.
SMALL = [dataclasses.replace(one, head_size=size) for one in (DECODE, UNEVEN, PROMPT) for size in (256, 512)]


def batch_of(case, device="cpu"):
    (one,) = Pool(1 << 20, device, 0).batches(case, 1)
    return one


def attends(name, device):
    """Hold a kernel to the right answer on each small batch that it does not refuse; returns how many these are."""
    taken = 0
    for case in SMALL:
        batch = batch_of(case, device)
        with contextlib.suppress(Refused):
            output = KERNELS[name](batch)()
            assert compare(right(batch), looked_at(output, case)).ratio < 2
            taken += 1
    return taken


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_this_gpu_attends_its_batches(name):
    try:
        assert attends(name, "cuda")
    except Missing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [cases.SDPA, cases.SDPA_REPEATED])
def test_a_kernel_of_the_cpu_attends_its_batches_and_refuses_requests_of_other_lengths(name):
    assert attends(name, "cpu") == 2


def test_every_kernel_of_the_plan_is_there():
    assert set(KERNELS) == {kernel for kernel, _ in cases.plan()}


def test_what_cannot_be_imported_is_missing_and_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.triton_attn", None)
    with pytest.raises(Missing, match=r"triton_attn is not importable: ModuleNotFoundError"):
        unified(batch_of(DECODE))


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0"])
def test_vllms_triton_kernel_gets_all_that_it_needs(vllm_tree, monkeypatch, version):
    """Called with the parameters of that version's function, which a host without a GPU cannot run."""
    tree = vllm_tree(version)
    source = tree.read("vllm/v1/attention/ops/triton_unified_attention.py")
    (function,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "unified_attention"
    ]
    got = {}
    stub = ast.FunctionDef("unified_attention", function.args, ast.parse("got.update(locals())").body, [])
    stub.args.args = [ast.arg(one.arg) for one in function.args.args]
    space = {"got": got, "KVQuantMode": types.SimpleNamespace(NONE=None)}
    exec(ast.unparse(ast.fix_missing_locations(stub)), space)
    kernel = types.SimpleNamespace(unified_attention=space["unified_attention"])
    backend = {}
    for node in ast.parse(tree.read("vllm/v1/attention/backends/triton_attn.py")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            backend[ast.unparse(node.targets[0])] = node.value.value
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", kernel)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.triton_attn", types.SimpleNamespace(**backend))
    unified(batch_of(DECODE))()
    # Descales of queries are of quantized ones.
    needed = {one.arg for one in function.args.args[: len(function.args.args) - len(function.args.defaults)]}
    needed |= {"seq_threshold_3D", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"}
    assert [name for name in needed - {"q_descale"} if got[name] is None] == []
