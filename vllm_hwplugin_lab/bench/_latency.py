# SPDX-License-Identifier: Apache-2.0
"""What clients saw of a load, in the figures of ``vllm bench serve``: TTFT, TPOT, ITL and end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._job import Event
from ._rounds import acceptance

_PERCENTILES = (50, 99)
#: Name -> what it is.
LATENCIES = {
    "ttft_ms": "time to the first token",
    "tpot_ms": "time per output token after the first",
    "itl_ms": "time between two parts of the stream",
    "e2e_ms": "time to the last token",
}


def load_entry(rounds: Sequence[Event]) -> dict[str, Any] | None:
    """Some rounds of one load as one entry of a results file, all requests together; None without a round.

    Args:
        rounds: events ``loaded`` of one side.
    """
    if not rounds:
        return None
    requests = [request for one in rounds for request in one["requests"]]
    # One that the engine gave up has waited for nothing, which is not the quickest answer.
    answered = [request for request in requests if request["tokens"]]
    # One token has no time per token after the first.
    several = [request for request in requests if request["tokens"] > 1]
    speeds = [sum(request["tokens"] for request in one["requests"]) / one["seconds"] for one in rounds]
    graphs: dict[tuple[str, int, int, str], int] = {}
    for row in (row for one in rounds for row in one["graphs"]):
        key = (row["model"], row["unpadded"], row["padded"], row["mode"])
        graphs[key] = graphs.get(key, 0) + row["count"]
    names = ("model", "unpadded", "padded", "mode")
    return {
        "rounds": len(rounds),
        "requests": len(requests),
        "unanswered": len(requests) - len(answered),
        "seconds": [one["seconds"] for one in rounds],
        "host_us": [one["host_us"] for one in rounds],
        "prompt_tokens": sum(request["prompt_tokens"] for request in requests),
        "tokens": sum(request["tokens"] for request in requests),
        "steps": sum(one["steps"] for one in rounds),
        "tokens_per_second": {"best": max(speeds), "all": speeds},
        "ttft_ms": spread([request["ttft"] for request in answered]),
        "tpot_ms": spread([(one["e2e"] - one["ttft"]) / (one["tokens"] - 1) for one in several]),
        "itl_ms": spread([gap for request in requests for gap in request["gaps"]]),
        "e2e_ms": spread([request["e2e"] for request in answered]),
        **acceptance(rounds),
        "graphs": [{**dict(zip(names, key, strict=True)), "count": count} for key, count in graphs.items()],
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    import numpy

    shares = {f"p{percent}": float(numpy.percentile(seconds, percent)) * 1e3 for percent in _PERCENTILES}
    return {"mean": float(numpy.mean(seconds)) * 1e3, **shares}
