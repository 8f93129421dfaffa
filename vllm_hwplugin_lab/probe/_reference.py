# SPDX-License-Identifier: Apache-2.0
"""The right answer in plain torch, the error that PyTorch's own SDPA makes, and the measure of a backend's error.

The reference is attention written out in float64 on the inputs as they are, rounded nowhere. What a backend may be off
by is set by `torch.nn.functional.scaled_dot_product_attention` on the same inputs, rounded as the backend has to round
them: in the model's dtype, with keys and values as the cache's dtype holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from ._cases import Case, Request
from ._inputs import Inputs

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


def measure(case: Case, inputs: Inputs, output: Any, *, quantized_query: bool = False) -> Measure:
    """Compare a backend's output with the reference, request by request.

    Args:
        case: the batch.
        inputs: its tensors.
        output: ``[num_tokens, num_heads, head_size]``.
        quantized_query: the layer rounds the query to the cache's dtype as well.
    """
    worst: Measure | None = None
    rows = zip(
        output.split([request.query for request in case.requests]), _answers(case, inputs, quantized_query), strict=True
    )
    for index, (found, (right, sdpa_error)) in enumerate(rows):
        error = (found.to(torch.float64) - right).abs()
        # No implementation can be closer than the output's dtype: where SDPA is by luck, rounding sets the measure.
        eps = torch.finfo(getattr(torch, case.dtype)).eps
        scale_rms = max(_rms(sdpa_error), eps / 4 * _rms(right))
        scale_max = max(float(sdpa_error.max()), eps / 2 * float(right.abs().max()))
        ratio = max(_rms(error) / scale_rms, float(error.max()) / scale_max / 2)
        if not math.isfinite(ratio):
            return Measure(math.inf, float(error.max()), scale_max, index)
        if worst is None or ratio > worst.ratio:
            worst = Measure(ratio, float(error.max()), scale_max, index)
    assert worst is not None, "a batch has a request"
    return worst


def reference(case: Case, inputs: Inputs) -> Any:
    """The right answer: float64 ``[num_tokens, num_heads, head_size]``."""
    return torch.cat([_attend(case, inputs, *row, softcap=case.softcap) for row in _by_request(case, inputs)])


def _by_request(case: Case, inputs: Inputs) -> Iterator[tuple[Request, Any, Any, Any]]:
    """Each request with its query, keys and values."""
    queries = inputs.query.split([request.query for request in case.requests])
    return zip(case.requests, queries, inputs.keys, inputs.values, strict=True)


def _answers(case: Case, inputs: Inputs, quantized_query: bool) -> Iterator[tuple[Any, Any]]:
    """For each request the right answer, and what SDPA is off by."""
    for request, query, key, value in _by_request(case, inputs):
        right = _attend(case, inputs, request, query, key, value, softcap=case.softcap)
        # SDPA has no softcap: its error is taken without one, which leaves it what it is within the same batch.
        target = right if case.softcap is None else _attend(case, inputs, request, query, key, value, softcap=None)
        rounded_query = _as_cached(query, case) if quantized_query else query
        other = _sdpa(case, inputs, request, rounded_query, _as_cached(key, case), _as_cached(value, case))
        yield right, (other.to(torch.float64) - target).abs()


def _attend(case: Case, inputs: Inputs, request: Request, query: Any, key: Any, value: Any, *, softcap: Any) -> Any:
    key, value = (_each_head(case, one.to(torch.float64)) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(torch.float64), key) / math.sqrt(case.head_size)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + _bias(case, inputs, request, torch.float64, scores.device)
    if inputs.sinks is not None:
        sinks = inputs.sinks.to(torch.float64)[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _sdpa(case: Case, inputs: Inputs, request: Request, query: Any, key: Any, value: Any) -> Any:
    key, value = _each_head(case, key), _each_head(case, value)
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


def _each_head(case: Case, tensor: Any) -> Any:
    return tensor.repeat_interleave(case.num_heads // case.num_kv_heads, dim=1)


def _as_cached(tensor: Any, case: Case) -> Any:
    name = FLOAT8.get(case.kv_cache_dtype)
    return tensor if name is None else tensor.to(getattr(torch, name)).to(tensor.dtype)


def _rms(tensor: Any) -> float:
    return float(tensor.to(torch.float64).square().mean().sqrt())
