# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: attention over parts of the keys becomes attention over all; and clear errors."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.merge_attn_states import merge_attn_states  # noqa: E402

from .operation_checks import signature  # noqa: E402
from .vllm_child import printed_beside_vllm  # noqa: E402

TOKENS, HEADS, SIZE = 5, 3, 8
INF = float("inf")


def _attention(scores: Any, values: Any) -> tuple[Any, Any]:
    """Of [heads, tokens, keys] over [keys, heads, head_size]; no keys are an output of 0 and an LSE of -inf."""
    output = torch.einsum("htk,khd->thd", scores.softmax(-1), values)
    return output, scores.logsumexp(-1)


def _parts(keys_before: int, keys_after: int) -> tuple[Any, ...]:
    scores = torch.randn(HEADS, TOKENS, keys_before + keys_after, dtype=torch.float64) * 3
    values = torch.randn(keys_before + keys_after, HEADS, SIZE, dtype=torch.float64)
    prefix = _attention(scores[..., :keys_before], values[:keys_before])
    suffix = _attention(scores[..., keys_before:], values[keys_before:])
    return *prefix, *suffix, *_attention(scores, values)


def _results(dtype: Any = torch.float32) -> tuple[Any, Any]:
    return torch.full((TOKENS, HEADS, SIZE), 7.0).to(dtype), torch.full((HEADS, TOKENS), 7.0)


@pytest.mark.parametrize(("before", "after"), [(6, 2), (1, 9), (4, 0), (0, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_parts_of_the_keys_become_all_of_them(before: int, after: int, dtype: Any, tolerance: float) -> None:
    prefix, prefix_lse, suffix, suffix_lse, whole, whole_lse = _parts(before, after)
    output, lse = _results(dtype)
    merge_attn_states(output, lse, prefix.to(dtype), prefix_lse.float(), suffix.to(dtype), suffix_lse.float())
    torch.testing.assert_close(output.double(), whole, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), whole_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("empty", [INF, -INF])
def test_what_an_empty_part_holds_is_not_used(empty: float) -> None:
    prefix, prefix_lse, suffix, suffix_lse, _, _ = (part.float() for part in _parts(4, 4))
    nothing = torch.full_like(prefix, float("nan"))
    for side in ("prefix", "suffix", "both"):
        output, lse = _results()
        merge_attn_states(
            output,
            lse,
            nothing if side != "suffix" else prefix,
            torch.full_like(prefix_lse, empty) if side != "suffix" else prefix_lse,
            nothing if side != "prefix" else suffix,
            torch.full_like(suffix_lse, empty) if side != "prefix" else suffix_lse,
        )
        expected, expected_lse = {
            "prefix": (suffix, suffix_lse),
            "suffix": (prefix, prefix_lse),
            "both": (torch.zeros_like(output), torch.full_like(lse, -INF)),
        }[side]
        assert torch.equal(output, expected), side
        assert torch.equal(lse, expected_lse), side


def test_what_is_no_number_does_not_become_one() -> None:
    prefix, prefix_lse, suffix, suffix_lse, _, _ = (part.float() for part in _parts(4, 4))
    prefix_lse[1, 2] = float("nan")
    suffix_lse[1, 2] = -INF
    output, lse = _results()
    merge_attn_states(output, lse, prefix, prefix_lse, suffix, suffix_lse)
    assert output[2, 1].isnan().all()
    assert lse.isnan().nonzero().tolist() == [[1, 2]]
    assert output.isnan().sum() == SIZE


@pytest.mark.parametrize("with_context", [0, 2, TOKENS])
def test_tokens_without_context_are_copied_and_their_prefix_is_not_read(with_context: int) -> None:
    prefix, prefix_lse, suffix, suffix_lse, whole, _ = (part.float() for part in _parts(4, 4))
    prefix[with_context:] = float("nan")
    prefix_lse[:, with_context:] = float("nan")
    suffix_lse[0, 3:] = INF
    output, lse = _results()
    merge_attn_states(output, lse, prefix, prefix_lse, suffix, suffix_lse, with_context)
    assert torch.equal(output[with_context:], suffix[with_context:])
    assert torch.equal(lse[:, with_context:], suffix_lse[:, with_context:])
    torch.testing.assert_close(output[: min(with_context, 3)], whole[: min(with_context, 3)], atol=2e-6, rtol=2e-6)


def test_an_output_of_8_bits_is_divided_by_its_scale_and_cut_off() -> None:
    prefix, prefix_lse, suffix, suffix_lse, whole, _ = (part.float() for part in _parts(4, 4))
    for scale in (0.01, 1.0, 1e-5):
        output, _ = _results(torch.float8_e4m3fn)
        merge_attn_states(output, None, prefix, prefix_lse, suffix, suffix_lse, None, torch.tensor([scale]))
        expected = (whole / scale).clamp(-448, 448)
        torch.testing.assert_close(output.float(), expected, atol=2e-3, rtol=0.07)
    assert output.float().abs().max() == 448


def test_any_strides_and_an_output_that_is_an_input() -> None:
    prefix, prefix_lse, suffix, suffix_lse, _, _ = (part.float() for part in _parts(4, 4))
    plain, plain_lse = _results()
    merge_attn_states(plain, plain_lse, prefix, prefix_lse, suffix, suffix_lse)
    padded = torch.full((HEADS, TOKENS, 2 * SIZE), 7.0)
    inside = padded.transpose(0, 1)[..., :SIZE]
    inside.copy_(prefix)
    lse = torch.full((TOKENS, HEADS), 7.0)
    merge_attn_states(inside, lse.t(), inside, prefix_lse.t().contiguous().t(), suffix, suffix_lse)
    assert torch.equal(inside, plain)
    assert torch.equal(lse.t(), plain_lse)
    assert (padded[..., SIZE:] == 7.0).all()


@pytest.mark.parametrize("overwritten", ["prefix_lse", "suffix_lse"])
def test_the_merged_lse_may_take_the_place_of_one_that_is_read(overwritten: str) -> None:
    prefix, prefix_lse, suffix, suffix_lse, whole, whole_lse = (part.float() for part in _parts(4, 4))
    lses = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse}
    output, _ = _results()
    merge_attn_states(output, lses[overwritten], prefix, prefix_lse, suffix, suffix_lse)
    torch.testing.assert_close(output, whole, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lses[overwritten], whole_lse, atol=2e-6, rtol=2e-6)


# From 0.28.0 on vLLM's MLA folds chunks of the context into one running output and LSE.
FOLDED = """
import json, torch
from types import SimpleNamespace
from vllm.model_executor.layers.attention import mla_attention
from vllm_hwplugin.ops.merge_attn_states import merge_attn_states

accumulate = getattr(mla_attention, "accumulate_mla_context_chunk", None)
if accumulate is None:
    print("null")
    raise SystemExit
served = 0

def merge(**given):
    global served
    merge_attn_states(**given)
    served += 1

mla_attention.merge_attn_states = merge
torch.manual_seed(1)
scores, values = torch.randn(4, 6, 9) * 3, torch.randn(9, 4, 192)
output, lse = torch.full((6, 4, 192), 7.0), torch.full((4, 6), 7.0)

def attend(keys):
    part = scores[..., keys]
    return torch.einsum("htk,khd->thd", part.softmax(-1), values[keys]), part.logsumexp(-1)

for number, keys in enumerate((slice(0, 3), slice(3, 5), slice(5, 9))):
    chunk = SimpleNamespace(token_slice=slice(0, 6), is_continuation=number > 0, continuation_token_end=6)
    accumulate(chunk, *attend(keys), output, lse)
whole, whole_lse = attend(slice(0, 9))
print(json.dumps([served, float((output - whole).abs().max()), float((lse - whole_lse).abs().max())]))
"""


@pytest.mark.slow
def test_vllms_mla_may_fold_chunk_after_chunk_into_one_running_state() -> None:
    found = printed_beside_vllm(FOLDED)
    if found is None:
        pytest.skip("this vLLM merges into a second buffer")
    served, output, lse = found
    assert served == 2
    assert max(output, lse) < 4e-6


# In a process of its own that no patch and no test touches. Prints the largest difference, or null where this vLLM has
# no implementation for the CPU.
AGAINST_VLLM = """
import itertools, json, torch
from vllm.v1.attention.ops import merge_attn_states as theirs
from vllm_hwplugin.ops.merge_attn_states import merge_attn_states

reference = getattr(theirs, "_merge_attn_states_torch", None)
if reference is None:
    print("null")
    raise SystemExit
torch.manual_seed(1)
worst = []
for tokens, heads, size, context in itertools.product([1, 33], [1, 8], [64, 128, 576], [None, 0.5]):
    prefix, suffix = torch.randn(2, tokens, heads, size)
    lses = torch.randn(2, heads, tokens) * 4
    lses[torch.rand(lses.shape) < 0.2] = -torch.inf
    context = None if context is None else tokens // 2
    # Beyond the context their CPU turns an LSE of +inf into -inf, which their kernels copy, as we do.
    lses[0][torch.rand(heads, tokens) < 0.2] = torch.inf
    results = [(torch.full((tokens, heads, size), 9.0), torch.full((heads, tokens), 9.0)) for _ in range(2)]
    reference(results[0][0], prefix, lses[0], suffix, lses[1], results[0][1], context)
    merge_attn_states(*results[1], prefix, lses[0], suffix, lses[1], context)
    assert torch.equal(results[0][1].isinf(), results[1][1].isinf())
    worst += [float((a - b).nan_to_num().abs().max()) for a, b in zip(*results)]
print(json.dumps([max(worst), len(worst)]))
"""


def test_it_is_what_vllm_computes_on_the_cpu() -> None:
    found = printed_beside_vllm(AGAINST_VLLM)
    if found is None:
        pytest.skip("this vLLM merges attention states on GPUs alone")
    worst, compared = found
    assert compared == 2 * 2 * 2 * 3 * 2
    assert worst < 2e-6


def test_the_schema_is_vllms() -> None:
    """csrc/torch_bindings.cpp of 0.20.2 and of 0.32.0, with the alias marks spelt out and a number's left out."""
    theirs = torch._C.parse_schema(
        "merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, "
        "Tensor suffix_output, Tensor suffix_lse, int? prefill_tokens_with_context, Tensor? output_scale=None) -> ()"
    )
    ours = torch.ops.hwplugin.merge_attn_states.default._schema
    assert signature(ours) == signature(theirs)
    assert not ours.returns


def call_with(**changes: Any) -> dict[str, Any]:
    output, lse = _results()
    good = {
        "output": output,
        "output_lse": lse,
        "prefix_output": torch.ones(TOKENS, HEADS, SIZE),
        "prefix_lse": torch.ones(HEADS, TOKENS),
        "suffix_output": torch.ones(TOKENS, HEADS, SIZE),
        "suffix_lse": torch.ones(HEADS, TOKENS),
        "prefill_tokens_with_context": None,
        "output_scale": None,
    }
    return {**good, **changes}


def _heads(*shape: int, **more: Any) -> Any:
    return torch.ones(*shape, **more)


MISTAKES: list[dict[str, Any]] = [
    {"prefix_output": _heads(5, 3, 8, dtype=torch.float64)},
    {"suffix_output": _heads(5, 3, 8).half()},
    {"output": _heads(5, 3, 8).half()},
    {"output_scale": torch.ones(1)},
    {"output_scale": torch.ones(2), "output": _heads(5, 3, 8).to(torch.float8_e4m3fn)},
    {"output": _heads(5, 24)},
    {"suffix_output": _heads(4, 3, 8)},
    {"suffix_output": _heads(5, 3, 16)[..., ::2]},
    {"prefix_output": _heads(5, 3, 9)[..., :8]},
    {"prefix_output": _heads(121)[1:].view(5, 3, 8)},
    {"prefix_lse": torch.ones(5, 3)},
    {"suffix_lse": torch.ones(3, 5).half()},
    {"output_lse": torch.ones(3, 1).expand(3, 5)},
    {"output": _heads(1, 3, 8).expand(5, 3, 8)},
    {name: _heads(5, 3, 6) for name in ("output", "prefix_output", "suffix_output")},
    {"prefill_tokens_with_context": 6},
    {"prefill_tokens_with_context": -1},
]


@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 3, 8), (5, 0, 8), (5, 3, 0)])
def test_nothing_to_merge_is_no_error(tokens: int, heads: int, size: int) -> None:
    part, lse = torch.ones(tokens, heads, size), torch.zeros(heads, tokens)
    found = torch.full((heads, tokens), 7.0)
    merge_attn_states(torch.empty_like(part), found, part, lse, part, lse)
    torch.testing.assert_close(found, torch.full_like(found, 2.0).log())
