# SPDX-License-Identifier: Apache-2.0
"""The likeliest place of a hunk that does not fit, as a hint for people. Nothing is ever applied there."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Sequence

from vllm_hwplugin.patching.texts import Nearest

#: Lines; a longer hunk is not compared, since time grows with the square of its length.
LONGEST_COMPARED = 200

_STARTS_TO_COMPARE = 8
# A line that is in a file more often does not tell the place.
_MOST_PLACES = 1000


def nearest(lines: Sequence[str], block: Sequence[str], stated: int) -> Nearest | None:
    """Return the window of `lines` most like `block`, or None.

    Of equal windows, the nearest to line `stated` (0-based) wins. None: nothing is alike, or `block` is longer than
    `LONGEST_COMPARED`. Each common line, at any indentation, votes for a start of the window, and rare lines have more
    weight. Only the windows with the most votes are compared in full, which keeps this quick on files of thousands of
    lines. A window may also end where a window from another start ends: upstream may have added or removed lines in it.
    """
    if len(block) > LONGEST_COMPARED:
        return None
    places: defaultdict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        places[line.strip()].append(number)
    votes: Counter[int] = Counter()
    for offset, line in enumerate(block):
        here = places.get(line.strip(), ()) if line.strip() else ()
        for place in here if len(here) <= _MOST_PLACES else ():
            # Integers, because a Counter's are: large enough that the rarest line still outweighs the rest.
            votes[max(place - offset, 0)] += 1_000_000 // len(here)
    starts = [start for start, _ in votes.most_common(_STARTS_TO_COMPARE)]
    windows = {(start, other + len(block)) for start in starts for other in starts if abs(other - start) < len(block)}
    if not windows:
        return None
    ranked = ((_similarity(block, lines[start:end]), -abs(start - stated), start, end) for start, end in windows)
    similarity, _, start, end = max(ranked)
    shown = difflib.unified_diff(_visible(block), _visible(lines[start:end]), "expected", "found", n=1)
    return Nearest(line=start + 1, similarity=similarity, diff="".join(shown))


def _similarity(block: Sequence[str], window: Sequence[str]) -> float:
    """Return the share of equal lines; other indentation counts half."""
    exact = difflib.SequenceMatcher(None, block, window, autojunk=False).ratio()
    stripped = [line.strip() for line in block], [line.strip() for line in window]
    return (exact + difflib.SequenceMatcher(None, *stripped, autojunk=False).ratio()) / 2


def _visible(lines: Sequence[str]) -> list[str]:
    """Show unusual line ends, so that different lines look different."""
    return [
        line[:-2] + "\\r\n" if line.endswith("\r\n") else line if line.endswith("\n") else line + "\\ no newline\n"
        for line in lines
    ]
