# SPDX-License-Identifier: Apache-2.0
"""The lines that the workshop prints: they quote catalogues, diffs, file names and the examined vLLM."""

from __future__ import annotations

import sys
from typing import TextIO

from vllm_hwplugin.cli.text import printable


def inert(text: str) -> str:
    """Return the text as one line that is only read."""
    return printable(text, keep="\t")


def line(text: str, stream: TextIO | None = None) -> None:
    """Print one line, by default to standard output."""
    print(inert(text), file=sys.stdout if stream is None else stream)


def note(text: str) -> None:
    """Print one line to standard error."""
    line(text, sys.stderr)
