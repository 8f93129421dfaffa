# SPDX-License-Identifier: Apache-2.0
"""Where a request's reasoning ends within a step, so that its grammar is fed what follows and nothing before.

Without speculative decoding a step has one token, and the marker of the end is a step of its own. A step with accepted
drafts may hold reasoning, the marker and the beginning of what the grammar is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def note_end(request: Any, reasoner: Any, start: int) -> None:
    """Keep where the reasoning ended, for `after_end`.

    Args:
        request: vLLM's ``Request``; its reasoning ends within ``all_token_ids[start:]``.
        reasoner: vLLM's ``ReasoningParser`` of the request.
        start: of the step, an index of ``all_token_ids``.
    """
    tokens: Sequence[int] = request.all_token_ids
    before = list(itertools.islice(tokens, start))
    # A marker of several tokens may be seen in the whole step alone; all of the step is then taken for reasoning.
    end = len(tokens) - 1
    for index in range(start, len(tokens)):
        before.append(tokens[index])
        if reasoner.is_reasoning_end_streaming(before, [tokens[index]]):
            end = index
            break
    request.structured_output_request.reasoning_end_token_index = end


def after_end(request: Any, new_token_ids: list[int]) -> list[int]:
    """What of a step's tokens is for the grammar.

    Args:
        request: vLLM's ``Request``, whose ``all_token_ids`` end with the step's.
        new_token_ids: of the step.

    Returns:
        The tokens after the one that `note_end` kept; all where that is of an earlier step, or there is none.
    """
    end: int | None = getattr(request.structured_output_request, "reasoning_end_token_index", None)
    if end is None:
        return new_token_ids
    first = len(request.all_token_ids) - len(new_token_ids)
    return new_token_ids[max(0, end + 1 - first) :]
