# SPDX-License-Identifier: Apache-2.0
"""The reference result in PyTorch, and a backend's error in units of the error of PyTorch's SDPA.

The reference is attention in float64 on the unrounded inputs. The unit is the error of
`torch.nn.functional.scaled_dot_product_attention` on inputs rounded as a backend must round them: in the model's
dtype, with keys and values in the cache's dtype.
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
    """The error of an output, in the request with the largest ratio.

    ``ratio`` is the error relative to SDPA's: the larger of the ratio of the root mean squares and half the ratio of
    the maxima, which scatter more. It is infinite if the output is not finite.
    """

    ratio: float
    error: float  # largest absolute error of the request
    sdpa_error: float
    request: int
    note: str = ""

    def __str__(self) -> str:
        text = f"error {self.error:.3g} in request {self.request}, SDPA's {self.sdpa_error:.3g}, ratio {self.ratio:.3g}"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True)
class Answer:
    """A request's reference result and SDPA's absolute error, float64 ``[query, num_heads, head_size]`` each."""

    right: Any
    sdpa_error: Any


def measure(case: Case, inputs: Inputs, output: Any, *, quantized_query: bool = False) -> Measure:
    """Compare a backend's output with the reference, request by request.

    Args:
        output: ``[num_tokens, num_heads, head_size]``.
        quantized_query: Whether the layer also rounds the query to the cache's dtype.
    """
    return compare(answers(case, inputs, quantized_query=quantized_query), output)


def compare(right: Sequence[Answer], output: Any) -> Measure:
    """Return the error of an output's worst request.

    Args:
        right: The reference of each request.
        output: ``[num_tokens, num_heads, head_size]``, in the model's dtype.
    """
    # Rounding to the output's dtype limits every implementation, even where SDPA is more exact by chance.
    eps = torch.finfo(output.dtype).eps
    measures = []
    parts = output.split([len(answer.right) for answer in right])
    for index, (answer, rows) in enumerate(zip(right, parts, strict=True)):
        error = (rows.double() - answer.right).abs()
        rms = max(_rms(answer.sdpa_error), eps / 4 * _rms(answer.right))
        largest = max(float(answer.sdpa_error.max()), eps / 2 * float(answer.right.abs().max()))
        ratio = max(_rms(error) / rms, float(error.max()) / largest / 2)
        measures.append(Measure(ratio if math.isfinite(ratio) else math.inf, float(error.max()), largest, index))
    return max(measures, key=lambda measure: measure.ratio)


def answers(case: Case, inputs: Inputs, *, quantized_query: bool = False) -> list[Answer]:
    """Return the reference of each request; arguments as for `measure`."""
    results = []
    queries = inputs.query.split([request.query for request in case.requests])
    for request, query, key, value in zip(case.requests, queries, inputs.keys, inputs.values, strict=True):
        right = _attend(case, inputs, request, query, key, value, softcap=case.softcap)
        # SDPA has no softcap, so its error is measured against the reference without softcap.
        target = right if case.softcap is None else _attend(case, inputs, request, query, key, value, softcap=None)
        rounded_query = _as_cached(query, case) if quantized_query else query
        other = _sdpa(case, inputs, request, rounded_query, _as_cached(key, case), _as_cached(value, case))
        results.append(Answer(right, (other.double() - target).abs()))
    return results


def _attend(case: Case, inputs: Inputs, request: Request, query: Any, key: Any, value: Any, *, softcap: Any) -> Any:
    bias = _bias(case, inputs, request, torch.float64, query.device)
    output = torch.empty_like(query, dtype=torch.float64)
    # Head by head: the scores of a long prompt in float64 would take gigabytes.
    for head in range(case.num_heads):
        keys, values = (tensor[:, head * case.num_kv_heads // case.num_heads].double() for tensor in (key, value))
        scores = query[:, head].double() @ keys.T / math.sqrt(case.head_size)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + bias[head % len(bias)]
        if inputs.sinks is not None:
            # A sink is a key whose value is zero.
            scores = torch.cat([scores, inputs.sinks[head].double().expand(len(scores), 1)], dim=-1)
        output[:, head] = scores.softmax(dim=-1)[:, : request.total] @ values
    return output


def _sdpa(case: Case, inputs: Inputs, request: Request, query: Any, key: Any, value: Any) -> Any:
    key, value = (tensor.repeat_interleave(case.num_heads // case.num_kv_heads, dim=1) for tensor in (key, value))
    bias = _bias(case, inputs, request, query.dtype, query.device)
    if inputs.sinks is not None:
        # A sink is a key of score zero plus a bias, whose value is zero.
        key, value = (torch.cat([tensor, torch.zeros_like(tensor[:1])]) for tensor in (key, value))
        bias = bias.expand(case.num_heads, -1, -1)
        bias = torch.cat([bias, inputs.sinks[:, None, None].expand(-1, bias.shape[1], 1)], dim=-1)
    batch = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(*batch, attn_mask=bias[None])
    return output[0].transpose(0, 1)


def _bias(case: Case, inputs: Inputs, request: Request, dtype: Any, device: Any) -> Any:
    """Return the scores' bias, ``[1 or num_heads, query, total]``."""
    # Minus infinity: masked.
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
