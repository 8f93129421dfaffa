# SPDX-License-Identifier: Apache-2.0
"""The right answer in plain torch, the error that PyTorch's own SDPA makes, and the measure of a backend's error.

The reference is attention written out in float64 on the inputs as they are, rounded nowhere. What a backend may be off
by is set by `torch.nn.functional.scaled_dot_product_attention` on the same inputs, rounded as the backend has to round
them: in the model's dtype, with keys and values as the cache's dtype holds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ._cases import Case, Request
from .inputs import Inputs

#: vLLM's cache dtypes that round more than the model's dtype. `fp8` is e4m3, as in vLLM.
FLOAT8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class Measure:
    """How far an answer is off, worst request first.

    ``ratio`` is the error over SDPA's: the larger of the ratio of the root mean squares and half the ratio of the
    maxima, which scatter more. Not finite where the answer is not.
    """

    ratio: float
    error: float  # largest absolute error of that request
    sdpa_error: float
    request: int
    note: str = ""

    def __str__(self) -> str:
        found = (
            f"error {self.error:.3g} in request {self.request}, SDPA's {self.sdpa_error:.3g}, ratio {self.ratio:.3g}"
        )
        return f"{found}; {self.note}" if self.note else found


@dataclass(frozen=True)
class Answer:
    """Of one request, float64 ``[query, num_heads, head_size]`` each: the right one, and what SDPA is off by."""

    right: Any
    sdpa_error: Any


def measure(case: Case, inputs: Inputs, output: Any, *, quantized_query: bool = False) -> Measure:
    """Compare a backend's output with the reference, request by request.

    Args:
        case: the batch.
        inputs: its tensors.
        output: ``[num_tokens, num_heads, head_size]``.
        quantized_query: the layer rounds the query to the cache's dtype as well.
    """
    return compare(answers(case, inputs, quantized_query=quantized_query), output)


def compare(right: Sequence[Answer], output: Any) -> Measure:
    """The error of the worst request of an output.

    Args:
        right: of each request in the output.
        output: ``[num_tokens, num_heads, head_size]``, in the model's dtype.
    """
    # No implementation can be closer than the output's dtype: where SDPA is by luck, rounding sets the measure.
    eps = torch.finfo(output.dtype).eps
    found = []
    for index, (one, rows) in enumerate(zip(right, output.split([len(one.right) for one in right]), strict=True)):
        error = (rows.double() - one.right).abs()
        rms = max(_rms(one.sdpa_error), eps / 4 * _rms(one.right))
        largest = max(float(one.sdpa_error.max()), eps / 2 * float(one.right.abs().max()))
        ratio = max(_rms(error) / rms, float(error.max()) / largest / 2)
        found.append(Measure(ratio if math.isfinite(ratio) else math.inf, float(error.max()), largest, index))
    return max(found, key=lambda one: one.ratio)


def answers(case: Case, inputs: Inputs, *, quantized_query: bool = False) -> list[Answer]:
    """Of each request; arguments as of `measure`."""
    found = []
    queries = inputs.query.split([request.query for request in case.requests])
    for request, query, key, value in zip(case.requests, queries, inputs.keys, inputs.values, strict=True):
        right = _attend(case, inputs, request, query, key, value, softcap=case.softcap)
        # SDPA has no softcap: its error is taken without one, which leaves it what it is within the same batch.
        target = right if case.softcap is None else _attend(case, inputs, request, query, key, value, softcap=None)
        rounded_query = _as_cached(query, case) if quantized_query else query
        other = _sdpa(case, inputs, request, rounded_query, _as_cached(key, case), _as_cached(value, case))
        found.append(Answer(right, (other.double() - target).abs()))
    return found


def _attend(case: Case, inputs: Inputs, request: Request, query: Any, key: Any, value: Any, *, softcap: Any) -> Any:
    bias = _bias(case, inputs, request, torch.float64, query.device)
    found = torch.empty_like(query, dtype=torch.float64)
    # One head after the other: all scores of a long prompt in float64 would take gigabytes.
    for head in range(case.num_heads):
        keys, values = (one[:, head * case.num_kv_heads // case.num_heads].double() for one in (key, value))
        scores = query[:, head].double() @ keys.T / math.sqrt(case.head_size)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + bias[head % len(bias)]
        if inputs.sinks is not None:
            # A key whose value is zero.
            scores = torch.cat([scores, inputs.sinks[head].double().expand(len(scores), 1)], dim=-1)
        found[:, head] = scores.softmax(dim=-1)[:, : request.total] @ values
    return found


def _sdpa(case: Case, inputs: Inputs, request: Request, query: Any, key: Any, value: Any) -> Any:
    key, value = (one.repeat_interleave(case.num_heads // case.num_kv_heads, dim=1) for one in (key, value))
    bias = _bias(case, inputs, request, query.dtype, query.device)
    if inputs.sinks is not None:
        # A sink is a key of score zero, plus a bias, whose value is zero.
        key, value = (torch.cat([one, torch.zeros_like(one[:1])]) for one in (key, value))
        bias = bias.expand(case.num_heads, -1, -1)
        bias = torch.cat([bias, inputs.sinks[:, None, None].expand(-1, bias.shape[1], 1)], dim=-1)
    batch = (one.transpose(0, 1)[None] for one in (query, key, value))
    found = torch.nn.functional.scaled_dot_product_attention(*batch, attn_mask=bias[None])
    return found[0].transpose(0, 1)


def _bias(case: Case, inputs: Inputs, request: Request, dtype: Any, device: Any) -> Any:
    """What is added to the scores: ``[1 or num_heads, query, total]``, minus infinity where nothing may be read."""
    asks = torch.arange(request.context, request.total, device=device)[:, None]
    asked = torch.arange(request.total, device=device)[None]
    hidden = torch.zeros(request.query, request.total, dtype=torch.bool, device=device)
    if case.causal:
        hidden |= asked > asks
    if case.sliding_window is not None:
        hidden |= asked <= asks - case.sliding_window
        if case.window_ahead is not None:
            hidden |= asked > asks + case.window_ahead
    bias = torch.zeros(1, *hidden.shape, dtype=torch.float64, device=device)
    if inputs.alibi_slopes is not None:
        slopes = torch.tensor(inputs.alibi_slopes, dtype=torch.float64, device=device)
        bias = slopes[:, None, None] * (asked - asks)
    return bias.masked_fill(hidden, -math.inf).to(dtype)


def _as_cached(tensor: Any, case: Case) -> Any:
    name = FLOAT8.get(case.kv_cache_dtype)
    return tensor if name is None else tensor.to(getattr(torch, name)).to(tensor.dtype)


def _rms(tensor: Any) -> float:
    return float(tensor.double().square().mean().sqrt())
