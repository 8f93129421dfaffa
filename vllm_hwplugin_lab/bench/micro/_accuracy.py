# SPDX-License-Identifier: Apache-2.0
"""How far an attention kernel is off, by what PyTorch's SDPA is off on the same requests in the same dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ._attention_inputs import Batch


@dataclass(frozen=True)
class Right:
    """The right answer of one request in float64, and SDPA's error: root mean square and maximum."""

    request: int
    answer: Any  # [query, heads, head_size]
    sdpa_rms: float
    sdpa_max: float


def right(batch: Batch) -> list[Right]:
    """The first and the last request of a batch, which differ in every offset, its longest and its shortest."""
    lengths = batch.case.lengths
    chosen = {0, len(lengths) - 1, lengths.index(max(lengths)), lengths.index(min(lengths))}
    return [_right(batch, request) for request in sorted(chosen)]


def ratio(answers: list[Right], batch: Batch, output: Any) -> float:
    """The error of ``output`` over SDPA's, on the worst request: infinite where a number is not finite.

    It is the larger of the ratio of the root mean squares and half the ratio of the maxima, which scatter more. SDPA's
    error counts as no less than what rounding to the output's dtype costs.
    """
    eps = torch.finfo(output.dtype).eps
    worst = 0.0
    for one in answers:
        found = output.view(batch.case.batch, batch.case.query, *output.shape[1:])[one.request]
        error = (found.double() - one.answer).abs()
        rms = max(one.sdpa_rms, eps / 4 * _rms(one.answer))
        top = max(one.sdpa_max, eps / 2 * float(one.answer.abs().max()))
        value = max(_rms(error) / rms, float(error.max()) / top / 2)
        worst = max(worst, value if math.isfinite(value) else math.inf)
    return worst


def _right(batch: Batch, request: int) -> Right:
    case = batch.case
    query = batch.query.view(case.batch, case.query, case.heads, case.head_size)[request]
    keys, values = batch.gathered(request)
    group = case.heads // case.kv_heads
    places = torch.arange(case.lengths[request], device=query.device)
    seen = places[None] <= places[-case.query :, None]
    answer = torch.empty_like(query, dtype=torch.float64)
    # One head after the other: all scores of a long prefill in float64 would take gigabytes.
    for head in range(case.heads):
        key, value = keys[:, head // group].double(), values[:, head // group].double()
        scores = (query[:, head].double() @ key.T * batch.scale).masked_fill_(~seen, -math.inf)
        answer[:, head] = scores.softmax(-1) @ value
    repeated = [one.repeat_interleave(group, dim=1).transpose(0, 1)[None] for one in (keys, values)]
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], *repeated, attn_mask=seen, scale=batch.scale
    )
    error = (sdpa[0].transpose(0, 1).double() - answer).abs()
    return Right(request, answer, _rms(error), float(error.max()))


def _rms(tensor: Any) -> float:
    return float(tensor.double().square().mean().sqrt())
