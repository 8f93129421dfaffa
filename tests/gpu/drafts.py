# SPDX-License-Identifier: Apache-2.0
"""What a drafter drafted, by request and by what was computed of it: runs are then comparable step by step.

Whole steps are not: one draft more or less accepted shifts all batches that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def listen(runner: Any, drafts: dict[tuple[int, int], list[int]]) -> None:
    """Write down each draft of the V1 runner under the number of its request and how many tokens of it are computed."""
    drafter = runner.drafter
    propose = drafter.propose

    def listening(*args: Any, **kwargs: Any) -> Any:
        metadata, rejected = kwargs["common_attn_metadata"], kwargs["num_rejected_tokens_gpu"]
        computed = metadata.seq_lens[: metadata.num_reqs]
        if rejected is not None:
            computed = computed - rejected[: metadata.num_reqs]
        computed = computed.tolist()
        result = propose(*args, **kwargs)
        for request, known, tokens in zip(runner.input_batch.req_ids, computed, result.tolist(), strict=False):
            # vLLM numbers the requests, and from some version on adds a random part.
            drafts[int(request.split("-")[0]), known] = tokens
        return result

    drafter.propose = listening


def written(drafts: dict[tuple[int, int], list[int]]) -> list[list[Any]]:
    """The drafts as JSON can hold them: request, computed tokens, drafted tokens."""
    return [[request, known, tokens] for (request, known), tokens in sorted(drafts.items())]


def same_drafts(prompts: Sequence[Sequence[int]], reference: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How many drafted tokens were compared, after the same text, and the share that is the same."""
    known = {(request, computed): tokens for request, computed, tokens in reference["drafts"]}
    same, count = 0, 0
    for request, computed, tokens in other["drafts"]:
        # The next token stands in the text, and is not computed yet.
        so_far = max(computed + 1 - len(prompts[request]), 0)
        texts = [side["texts"][request][:so_far] for side in (reference, other)]
        if texts[0] == texts[1] and (request, computed) in known:
            same += sum(a == b for a, b in zip(tokens, known[request, computed], strict=True))
            count += len(tokens)
    return {"compared": count, "share": same / max(count, 1)}
