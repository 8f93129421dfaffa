# SPDX-License-Identifier: Apache-2.0
"""Output lines of the workshop, escaped: they quote catalogues, diffs, file names and vLLM's text."""

from __future__ import annotations

import sys
from typing import TextIO

from vllm_hwplugin.cli.text import printable


def inert(text: str) -> str:
    """Return the text as one line that is safe to print.

    It has no control characters, and no commands for a CI runner.
    """
    return printable(text, keep="\t")


def line(text: str, stream: TextIO | None = None) -> None:
    """Print one line, by default to standard output."""
    print(inert(text), file=sys.stdout if stream is None else stream)


def note(text: str) -> None:
    """Print one line to standard error."""
    line(text, sys.stderr)
