# SPDX-License-Identifier: Apache-2.0
"""Markers of several tokens; what released schedulers do with it all is in tests/backports."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from vllm_hwplugin.frozen import reasoning_end

MARKER = [5, 6]


class Reasoner:
    """Sees the marker in what is new alone, as some of vLLM's parsers do."""

    def is_reasoning_end_streaming(self, tokens: Sequence[int], delta: Sequence[int]) -> bool:
        return any(list(delta[i : i + 2]) == MARKER for i in range(len(delta)))


def test_a_step_whose_marker_no_single_token_shows_is_all_reasoning() -> None:
    request = SimpleNamespace(all_token_ids=[1, 2, *MARKER, 9], structured_output_request=SimpleNamespace())
    assert reasoning_end.after_end(request, [2, *MARKER, 9]) == [2, *MARKER, 9]
    reasoning_end.note_end(request, Reasoner(), start=1)
    assert reasoning_end.after_end(request, [2, *MARKER, 9]) == []
    request.all_token_ids.extend([10, 11])
    assert reasoning_end.after_end(request, [10, 11]) == [10, 11]
