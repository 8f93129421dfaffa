"""The operations' arguments are those of vLLM's schemas, and their bytes those that have to move."""

from __future__ import annotations

import ast

import pytest
import torch

from vllm_hwplugin.ops.override_table import OPS as OVERRIDABLE
from vllm_hwplugin_lab.bench.micro import _op_cases as cases
from vllm_hwplugin_lab.bench.micro._op_cases import Operand


def case(start, tokens):
    """The first one of an operation, or of a shape."""
    return next(c for c in cases.CASES.values() if c.key.startswith(start) and c.tokens == tokens)


def test_every_operation_that_can_stand_under_vllms_name_is_measured():
    assert set(cases.OPS) == set(OVERRIDABLE)


@pytest.mark.parametrize("one", [c for c in cases.CASES.values() if c.tokens == 8], ids=lambda c: c.key)
def test_the_arguments_fit_every_schema_of_vllm(one):
    for known in OVERRIDABLE[one.op].schemas:
        schema = torch._C.parse_schema(known.text)
        for argument, expected in zip(one.arguments, schema.arguments, strict=False):
            written = expected.alias_info is not None and expected.alias_info.is_write
            if isinstance(argument, Operand):
                assert "Tensor" in str(expected.type), (expected.name, known.versions)
                assert (argument.role != "in") == written, (expected.name, known.versions)
            elif argument is not None:
                assert str(expected.type) == type(argument).__name__, (expected.name, known.versions)
        assert len(one.arguments) <= len(schema.arguments)
        # What later versions added is left out, or None.
        more = schema.arguments[len(one.arguments) :]
        assert all(a.has_default_value() or isinstance(a.type, torch.OptionalType) for a in more)


def _calls(text):
    """Operation -> the names that vLLM's Python passes it."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("torch.ops._C.", "torch.ops._moe_C.")):
            found.setdefault(node.func.attr, [ast.unparse(a) for a in node.args])
    return found


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0", "0.33.0"])
def test_vllm_passes_as_many_arguments_in_that_order(vllm_tree, version):
    calls = _calls(vllm_tree(version).read("vllm/_custom_ops.py"))
    aliases = {
        "out": "output",
        "result": "output",
        "scale": "scales",
        "topk_indices": "topk_ids",
    }
    for op in cases.OPS:
        one = case(op, 8)
        assert len(calls[op]) - len(one.arguments) in (0, 1), op  # what is left out has a default
        names = [a.name if isinstance(a, Operand) else None for a in one.arguments]
        for ours, theirs in zip(names, calls[op], strict=False):
            assert ours is None or theirs in (ours, aliases.get(ours)), (op, ours, theirs)


@pytest.mark.parametrize(
    ("op", "tokens", "moved"),
    [
        # position, query and key read and written, one row of the table
        ("rotary_embedding", 1, 8 + 2 * (32 + 8) * 128 * 2 + 128 * 2),
        # more tokens than rows: the table is read once
        ("rotary_embedding", 65536, 65536 * (8 + 2 * 40 * 128 * 2) + 40960 * 128 * 2),
        # the values are not touched
        ("fused_qk_norm_rope", 8, 8 * (8 + 2 * 40 * 128 * 2 + 128 * 2) + 2 * 128 * 2),
        ("silu_and_mul_per_block_quant", 8, 8 * (2 * 12288 * 2 + 12288 + 96 * 4)),
        ("rms_norm_dynamic_per_token_quant", 8, 8 * (4096 * 2 + 4096 + 4) + 4096 * 2),
        # and the residual is read and written
        ("rms_norm_dynamic_per_token_quant 4096 with residual", 8, 8 * (3 * 4096 * 2 + 4096 + 4) + 4096 * 2),
        ("merge_attn_states", 8, 8 * 32 * (3 * 128 * 2 + 3 * 4)),
        ("topk_softmax", 8, 8 * (128 * 4 + 3 * 8 * 4)),
    ],
)
def test_bytes(op, tokens, moved):
    assert case(op, tokens).bytes_moved == moved


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0", "0.33.0"])
def test_vllms_layer_passes_the_table_in_the_querys_type(vllm_tree, version):
    """So that a conversion to float32 is the operation's own."""
    text = vllm_tree(version).read("vllm/model_executor/layers/rotary_embedding/base.py")
    functions = {
        node.name: ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    }
    assert "cos_sin_cache = self._match_cos_sin_cache_dtype(query)" in functions["forward_cuda"]
    assert "cos_sin_cache.to(query.device, dtype=query.dtype)" in functions["_match_cos_sin_cache_dtype"]
    assert "float32" not in functions["forward_cuda"] + functions["_match_cos_sin_cache_dtype"]
