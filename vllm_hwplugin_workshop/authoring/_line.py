# SPDX-License-Identifier: Apache-2.0
"""Ranges of versions as sets of intervals, to add or remove a version."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from packaging.version import Version

from vllm_hwplugin.base.versions import SUPPORTED, UNKNOWN_FROM, Versions, is_version


class Line:
    """All versions, cut where a range begins or ends and at each known version.

    An interval is the number of its first version, and holds all versions before the next interval's first version.
    """

    def __init__(self, ranges: Iterable[Versions] = (), named: Iterable[str] = ()) -> None:
        supported = {Version(version) for version in SUPPORTED}
        known = {*supported, Version(UNKNOWN_FROM)}
        self._single = {Version(Version(version).public) for version in named} - supported
        texts = [edge for range_ in ranges for edge in range_.edges()] + [f"{point}.0.0.1" for point in self._single]
        self._points = sorted({Version("0"), *known, *self._single, *map(Version, filter(is_version, texts))})
        self._known = {number for number, point in enumerate(self._points) if point in known}

    def of(self, versions: Versions | None) -> frozenset[int]:
        """Return the intervals of a range; None: all intervals."""
        numbers = range(len(self._points))
        return frozenset(n for n in numbers if versions is None or versions.covers(str(self._points[n])))

    def about(self, version: str) -> frozenset[int]:
        """Return a version's intervals.

        A supported version holds all up to the next known version, another one only its own interval.
        """
        point = Version(Version(version).public)
        first = self._points.index(point)
        if point in self._single:
            return frozenset([first])
        return frozenset(range(first, min(number for number in self._known if number > first)))

    def text(self, held: Collection[int], among: Collection[int] | None = None) -> str:
        """Return a range with these intervals and no other of `among`.

        None: all intervals. The range may hold versions outside `among`. It is empty if all of `among` are held.
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
                if place == begin + 1 and first in self._single:
                    lower, upper = [f"=={first}"], []
                parts.append(",".join([*lower, *upper]))
                begin = None
        return " || ".join(parts)


def ranges(versions: Iterable[str], *, goes_on: bool = False) -> str:
    """Return the range that holds exactly these of the supported versions.

    An unsupported version is spelled out (`==`), because the range's ends would not tell whether it is held.

    Args:
        goes_on: If the newest supported version is among them, the range also holds all newer versions.
    """
    named = list(versions)
    line = Line(named=named)
    newer = line.of(Versions(f">={UNKNOWN_FROM}")) if goes_on and SUPPORTED[-1] in named else ()
    return line.text({*newer, *(number for version in named for number in line.about(version))})


def _short(version: Version) -> str:
    """Return `0.24` for 0.24.0, as people write ranges."""
    text = str(version)
    return text.removesuffix(".0") if text.count(".") == 2 else text
