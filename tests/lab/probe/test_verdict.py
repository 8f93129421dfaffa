# SPDX-License-Identifier: Apache-2.0
"""Every declaration with every behaviour."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.probe import Behaviour, Declared, Verdict, judge
from vllm_hwplugin_lab.probe._verdict import combine

YES, NO, UNASKED = Declared.YES, Declared.NO, Declared.UNASKED
WORKS, REFUSES, WRONG, CRASHES = Behaviour.WORKS, Behaviour.REFUSES, Behaviour.WRONG, Behaviour.CRASHES
ERROR = Behaviour.ERROR

TABLE = [
    (YES, WORKS, Verdict.HOLDS, False),
    (YES, REFUSES, Verdict.REFUSED_THOUGH_DECLARED, True),
    (YES, WRONG, Verdict.WRONG, True),
    (YES, CRASHES, Verdict.CRASHES, True),
    (NO, WORKS, Verdict.WORKS_UNDECLARED, False),
    (NO, REFUSES, Verdict.REFUSED, False),
    (NO, WRONG, Verdict.UNDECLARED_WRONG, False),
    (NO, CRASHES, Verdict.UNDECLARED_CRASHES, False),
    (UNASKED, WORKS, Verdict.HOLDS, False),
    (UNASKED, REFUSES, Verdict.REFUSED, False),
    (UNASKED, WRONG, Verdict.WRONG, True),
    (UNASKED, CRASHES, Verdict.CRASHES, True),
    (YES, ERROR, Verdict.ERROR, True),
    (NO, ERROR, Verdict.ERROR, True),
    (UNASKED, ERROR, Verdict.ERROR, True),
]


@pytest.mark.parametrize(("declared", "behaviour", "verdict", "fails"), TABLE)
def test_table(declared, behaviour, verdict, fails):
    judged = judge(declared, behaviour, strict=False)
    assert (judged.verdict, judged.fails) == (verdict, fails)


def test_the_table_is_whole():
    assert {(declared, behaviour) for declared, behaviour, *_ in TABLE} == {(d, b) for d in Declared for b in Behaviour}


def test_strict_changes_what_works_undeclared_and_nothing_else():
    for declared, behaviour, verdict, fails in TABLE:
        judged = judge(declared, behaviour, strict=True)
        assert judged.verdict is verdict
        assert judged.fails is (True if verdict is Verdict.WORKS_UNDECLARED else fails)


@pytest.mark.parametrize(
    ("several", "one"),
    [
        ([WORKS, WORKS], WORKS),
        ([WORKS, REFUSES], REFUSES),
        ([REFUSES, WRONG, WORKS], WRONG),
        ([WRONG, CRASHES], CRASHES),
        ([WRONG, ERROR, WORKS], ERROR),
    ],
)
def test_the_worst_case_counts(several, one):
    assert combine(several) is one
