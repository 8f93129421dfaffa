# SPDX-License-Identifier: Apache-2.0
"""Text of other origin (variables, journals, an index's answers) made fit for a terminal."""

from __future__ import annotations

# Beyond this, what a variable holds is no longer read but scrolled past.
_LONGEST = 300


def printable(text: str, keep: str = "\n") -> str:
    """The text with its control characters written out, so that it can neither move the cursor nor forge a line.

    Args:
        text: any.
        keep: control characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
    """The text, or its beginning and its length where it is long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
