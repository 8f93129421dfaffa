# SPDX-License-Identifier: Apache-2.0
"""The list of mutants: an edit of a line that has changed since would prove nothing, and nobody would see it."""

from __future__ import annotations

from .mutants.__main__ import mutants_of


def test_each_mutant_edits_a_text_that_is_there_once() -> None:
    mutants = mutants_of([])
    assert len(mutants) > 500
    for mutant in mutants:
        mutant.place()
