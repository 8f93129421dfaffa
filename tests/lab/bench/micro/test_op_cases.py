"""The operations' arguments are those of vLLM's schemas, and their bytes those that have to move."""

from __future__ import annotations

import pytest

from vllm_hwplugin.ops.operations import OPS as OVERRIDABLE
from vllm_hwplugin_lab.bench.micro import _op_cases as cases


def case(start, tokens):
    """The first one of an operation, or of a shape."""
    return next(c for c in cases.CASES.values() if c.key.startswith(start) and c.tokens == tokens)


def test_every_operation_that_can_stand_under_vllms_name_is_measured():
    assert set(cases.OPS) == set(OVERRIDABLE)


@pytest.mark.parametrize(
    ("op", "tokens", "moved"),
    [
        # the values are not touched, and there are more tokens than rows of the table
        ("fused_qk_norm_rope", 65536, 65536 * (8 + 2 * 40 * 128 * 2) + 40960 * 128 * 2 + 2 * 128 * 2),
        ("fused_qk_norm_rope", 8, 8 * (8 + 2 * 40 * 128 * 2 + 128 * 2) + 2 * 128 * 2),
        ("silu_and_mul_per_block_quant", 8, 8 * (2 * 12288 * 2 + 12288 + 96 * 4)),
        ("rms_norm_dynamic_per_token_quant", 8, 8 * (4096 * 2 + 4096 + 4) + 4096 * 2),
        # and the residual is read and written
        ("rms_norm_dynamic_per_token_quant 4096 with residual", 8, 8 * (3 * 4096 * 2 + 4096 + 4) + 4096 * 2),
        ("merge_attn_states", 8, 8 * 32 * (3 * 128 * 2 + 3 * 4)),
        ("rotary_embedding", 8, 8 * (8 + 2 * 40 * 128 * 2 + 128 * 2)),
        ("topk_softmax", 8, 8 * (128 * 4 + 3 * 8 * 4)),
    ],
)
def test_bytes(op, tokens, moved):
    assert case(op, tokens).bytes_moved == moved
