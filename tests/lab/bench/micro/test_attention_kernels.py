"""Each kernel attends the batch that it is given, or says why it cannot."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _attention_cases as cases
from vllm_hwplugin_lab.bench.micro._attention_bench import kernels
from vllm_hwplugin_lab.bench.micro._attention_cases import AttentionCase
from vllm_hwplugin_lab.bench.micro._attention_inputs import Pool
from vllm_hwplugin_lab.bench.micro._attention_kernels import FlashInfer, Triton
from vllm_hwplugin_lab.bench.micro._torch_kernels import prefill_kernels

DECODE = AttentionCase("decode", 3, 70, 4, 2, head_size=256)
#: Its requests have 47, 164, 34 and 40 keys.
UNEVEN = dataclasses.replace(DECODE, batch=4, context=95, spread=1.0)
PROMPT = AttentionCase("prefill", 2, 64, 64, 2, head_size=256)
#: With heads as the plugin's kernel is made for, too.
SMALL = [dataclasses.replace(one, head_size=size) for one in (DECODE, UNEVEN, PROMPT) for size in (256, 512)]
EVERY = tuple(dict.fromkeys(kernel for kernel, _ in cases.plan()))


def batch_of(case, device="cpu"):
    (one,) = Pool(1 << 20, device, 0).batches(case, 1)
    return one


def right(batch):
    """The answer in float64, request by request, from the keys and values that the batch says are its."""
    case, found = batch.case, []
    for request, length in enumerate(case.lengths):
        query = batch.query[request * case.query : (request + 1) * case.query].double().transpose(0, 1)
        keys, values = (
            one.double().repeat_interleave(case.heads // case.kv_heads, 1).transpose(0, 1)
            for one in batch.gathered(request)
        )
        mask = torch.ones(case.query, length, dtype=torch.bool, device=query.device).tril(length - case.query)
        answer = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=batch.scale)
        found.append(answer.transpose(0, 1))
    return torch.cat(found)


def attends(kernel, device):
    """Hold a kernel to the right answer on each small batch that it does not refuse; returns how many these are."""
    taken = [case for case in SMALL if kernel.refuses(case) is None]
    for case in taken:
        batch = batch_of(case, device)
        torch.testing.assert_close(kernel.prepare(batch)().double(), right(batch), rtol=1e-2, atol=1e-2)
    return len(taken)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_a_kernel_of_this_gpu_attends_its_batches(name):
    kernel = kernels()[name]
    if (reason := kernel.missing()) is not None:
        pytest.skip(reason)
    assert attends(kernel, "cuda")


@pytest.mark.parametrize("kernel", prefill_kernels()[:2], ids=lambda kernel: kernel.name)
def test_a_kernel_of_the_cpu_attends_its_batches(kernel):
    assert attends(kernel, "cpu") == 2


def test_kernels_without_lengths_refuse_requests_of_unequal_length():
    uneven = dataclasses.replace(PROMPT, batch=8, spread=1.0)
    for kernel in prefill_kernels():
        assert kernel.refuses(PROMPT) is None
        assert kernel.refuses(uneven) is not None, kernel.name


def test_what_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert FlashInfer().missing().startswith("flashinfer is not importable: ModuleNotFoundError")


@pytest.mark.parametrize("version", ["0.20.2", "0.24.0", "0.26.0", "0.33.0"])
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
    for name, module in ((Triton._KERNEL, kernel), (Triton._BACKEND, types.SimpleNamespace(**backend))):
        monkeypatch.setitem(sys.modules, name, module)
    Triton().prepare(batch_of(DECODE))()
    # Descales of queries are of quantized ones.
    needed = {one.arg for one in function.args.args[: len(function.args.args) - len(function.args.defaults)]}
    needed |= {"seq_threshold_3D", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"}
    assert [name for name in needed - {"q_descale"} if got[name] is None] == []
