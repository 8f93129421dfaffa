# SPDX-License-Identifier: Apache-2.0
"""What an engine counted of its drafts; for the processes that the tests here start."""

from typing import Any


def accepted_share(llm: Any) -> list[float]:
    """How often each drafted position was accepted, over all that `llm` has generated."""
    accepted, drafts = [], 0
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = list(metric.values)
        elif metric.name == "vllm:spec_decode_num_drafts":
            drafts = metric.value
    return [count / drafts for count in accepted]
