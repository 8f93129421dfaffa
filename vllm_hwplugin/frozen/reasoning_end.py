# SPDX-License-Identifier: Apache-2.0
"""Find where a request's reasoning ends within a step, so that its grammar gets only what follows.

Without speculative decoding a step has one token, and the end marker is a whole step. A step with accepted
drafts may hold reasoning, the marker and the beginning of the structured output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def in_step(request: Any, new_token_ids: list[int]) -> Any:
    """Keep where a step, the end of ``all_token_ids``, begins; return `request`."""
    if request.structured_output_request is not None:
        end = len(request.all_token_ids)
        request.structured_output_request.hwplugin_step = end - len(new_token_ids), end
    return request


def start_of_step(request: Any) -> int:
    """Return the index in ``all_token_ids`` where the current step begins.

    If `in_step` did not see the step, it is vLLM's guess, which lies behind the step after rejected drafts.
    """
    count = len(request.all_token_ids)
    start, end = getattr(request.structured_output_request, "hwplugin_step", (0, -1))
    if end == count:
        return int(start)
    computed = request.num_computed_tokens - request.num_output_placeholders
    return int(computed if computed >= 0 else max(count + computed, 0))


def note_end(request: Any, reasoner: Any, start: int) -> None:
    """Keep where the reasoning ended in ``all_token_ids[start:]``, for `after_end`."""
    tokens: Sequence[int] = request.all_token_ids
    before = list(itertools.islice(tokens, start))
    # A marker of several tokens may only be seen in the whole step; all of the step then counts as reasoning.
    end = len(tokens) - 1
    for index in range(start, len(tokens)):
        before.append(tokens[index])
        if reasoner.is_reasoning_end_streaming(before, [tokens[index]]):
            end = index
            break
    request.structured_output_request.reasoning_end_token_index = end


def after_end(request: Any, new_token_ids: list[int]) -> list[int]:
    """Return the tokens of a step that the grammar takes.

    These follow the token that `note_end` kept; all if that token is in an earlier step, or was never kept.
    """
    end: int | None = getattr(request.structured_output_request, "reasoning_end_token_index", None)
    if end is None:
        return new_token_ids
    first = len(request.all_token_ids) - len(new_token_ids)
    return new_token_ids[max(0, end + 1 - first) :]
