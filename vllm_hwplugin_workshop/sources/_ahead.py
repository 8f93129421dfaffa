# SPDX-License-Identifier: Apache-2.0
"""A few files of a vLLM, read at once, so that its wheel or connection need not stay open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_hwplugin.patching import Source

from ._index import IndexSource
from ._wheel import WheelSource


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A vLLM of which only the files that were asked for are known."""

    label: str
    version: str
    texts: Mapping[str, str | None]

    def read(self, path: str) -> str | None:
        """The text of a file; None where this vLLM has none.

        Raises:
            KeyError: it was not read.
        """
        return self.texts[path]


def read_ahead(source: Source, paths: Iterable[str]) -> ReadSource:
    """Read these files, and close the source.

    Raises:
        HwpluginError: as `source.read` does.
    """
    try:
        return ReadSource(source.label, source.version, {path: source.read(path) for path in paths})
    finally:
        if isinstance(source, (IndexSource, WheelSource)):
            source.close()
