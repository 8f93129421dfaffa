# SPDX-License-Identifier: Apache-2.0
"""What a declaration and a behaviour mean together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Behaviour(str, Enum):
    """What a backend did on all cases of a trial."""

    WORKS = "works"
    REFUSES = "refuses"
    WRONG = "wrong"
    CRASHES = "crashes"
    #: It ended with an exception that says neither yes nor no: a fault of the backend, or of the probe itself.
    ERROR = "error"


class Declared(str, Enum):
    """What a backend's class says; ``UNASKED`` where vLLM has no question for it and hands the layer over anyway."""

    YES = "yes"
    NO = "no"
    UNASKED = "unasked"


class Verdict(str, Enum):
    HOLDS = "holds"
    WRONG = "wrong"
    CRASHES = "crashes"
    REFUSED_THOUGH_DECLARED = "refused-though-declared"
    WORKS_UNDECLARED = "works-undeclared"
    REFUSED = "refused"
    UNDECLARED_WRONG = "undeclared, and wrong"
    UNDECLARED_CRASHES = "undeclared, and crashes"
    ERROR = "error"


@dataclass(frozen=True)
class Judged:
    verdict: Verdict
    fails: bool


def judge(declared: Declared, behaviour: Behaviour, *, strict: bool) -> Judged:
    """Hold a behaviour against a declaration.

    Args:
        declared: what the class says.
        behaviour: what it did.
        strict: something that works and is not declared is a failure: the declaration is ours to correct.
    """
    if behaviour is Behaviour.ERROR:
        # Whatever is declared: nobody knows what this backend does, and a probe that fails must not look like a no.
        return Judged(Verdict.ERROR, True)
    if behaviour is Behaviour.WORKS:
        if declared is Declared.NO:
            return Judged(Verdict.WORKS_UNDECLARED, strict)
        return Judged(Verdict.HOLDS, False)
    if behaviour is Behaviour.REFUSES:
        if declared is Declared.YES:
            return Judged(Verdict.REFUSED_THOUGH_DECLARED, True)
        return Judged(Verdict.REFUSED, False)
    wrong = behaviour is Behaviour.WRONG
    if declared is Declared.NO:
        # vLLM keeps such a layer away; whoever bypasses its checks should know what would happen.
        return Judged(Verdict.UNDECLARED_WRONG if wrong else Verdict.UNDECLARED_CRASHES, False)
    # Also where nobody asks: vLLM then has no way to keep the layer away.
    return Judged(Verdict.WRONG if wrong else Verdict.CRASHES, True)


def combine(behaviours: list[Behaviour]) -> Behaviour:
    """Of all cases: the worst; what is refused in part is not supported."""
    for worst in (Behaviour.ERROR, Behaviour.CRASHES, Behaviour.WRONG, Behaviour.REFUSES):
        if worst in behaviours:
            return worst
    return Behaviour.WORKS
