# SPDX-License-Identifier: Apache-2.0
"""Ranges of versions as sets of intervals, so that a version can be taken out of one or added to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from packaging.version import InvalidVersion, Version

from vllm_hwplugin.patching import SUPPORTED
from vllm_hwplugin.versions import UNKNOWN_FROM, Versions


class Line:
    """All versions, cut where one of these ranges begins or ends, and at each version that is known.

    An interval is the number of its first version. It holds all versions up to the next interval's first one.
    """

    def __init__(self, ranges: Iterable[Versions] = (), named: Iterable[str] = ()) -> None:
        supported = {Version(item) for item in SUPPORTED}
        known = {*supported, Version(UNKNOWN_FROM)}
        self._alone = {Version(Version(item).public) for item in named} - supported
        texts = [edge for item in ranges for edge in item.edges()] + [f"{item}.0.0.1" for item in self._alone]
        self._points = sorted({Version("0"), *known, *self._alone, *filter(None, map(_version, texts))})
        self._known = {number for number, point in enumerate(self._points) if point in known}

    def of(self, versions: Versions | None) -> frozenset[int]:
        """The intervals that a range holds; None is every one."""
        every = range(len(self._points))
        return frozenset(n for n in every if versions is None or versions.covers(str(self._points[n])))

    def about(self, version: str) -> frozenset[int]:
        """A version with those behind it that nobody knows; one that is not supported is alone."""
        point = Version(Version(version).public)
        first = self._points.index(point)
        if point in self._alone:
            return frozenset([first])
        return frozenset(range(first, min(number for number in self._known if number > first)))

    def text(self, held: Collection[int], among: Collection[int] | None = None) -> str:
        """These intervals as a range, which may hold any version besides those `among` which they are.

        Empty where all of those are held.
        """
        order = sorted(range(len(self._points)) if among is None else among)
        parts: list[str] = []
        begin: int | None = None
        for place, number in enumerate([*order, -1]):
            if number in held:
                begin = place if begin is None else begin
            elif begin is not None:
                lower = [] if begin == 0 else [f">={_short(self._points[order[begin]])}"]
                upper = [] if number < 0 else [f"<{_short(self._points[number])}"]
                first = self._points[order[begin]]
                if place == begin + 1 and first in self._alone:
                    lower, upper = [f"=={first}"], []
                parts.append(",".join([*lower, *upper]))
                begin = None
        return " || ".join(parts)


def ranges(versions: Iterable[str]) -> str:
    """The range that holds these versions and no other supported one; empty for none.

    A version that is not supported is spelled out, because a range says nothing of it.
    """
    named = list(versions)
    line = Line(named=named)
    return line.text({number for version in named for number in line.about(version)})


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _short(version: Version) -> str:
    """`0.24` for 0.24.0, as people write ranges."""
    text = str(version)
    return text.removesuffix(".0") if text.count(".") == 2 else text
