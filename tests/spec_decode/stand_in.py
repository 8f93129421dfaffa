# SPDX-License-Identifier: Apache-2.0
"""Objects that stand in for vLLM's, and answer "no" to names that they are not known to have."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from typing import Any


class UnknownName(UserWarning):
    """vLLM has asked a stand-in for a name that nobody has given it."""


class No(int):
    """False, zero or nothing, also as the result of a call."""

    def __new__(cls, name: str) -> No:
        made = super().__new__(cls, 0)
        made._name = name  # type: ignore[attr-defined]
        return made

    def __getattr__(self, name: str) -> No:
        if name.startswith("__"):
            raise AttributeError(name)
        return No(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> No:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __repr__(self) -> str:
        return f"<no {self._name}>"


class StandIn(types.SimpleNamespace):
    """A namespace that answers :class:`No` to a name that it has not, with a warning.

    Args:
        stands_for: what it is in vLLM, for the warning.
        has: its attributes.
    """

    def __init__(self, stands_for: str, /, **has: Any) -> None:
        super().__init__(**has)
        self._stands_for = stands_for

    def __copy__(self) -> StandIn:
        return StandIn(self._stands_for, **vars(self))

    def __getattr__(self, name: str) -> No:
        if name.startswith("__") or "_stands_for" not in vars(self):
            raise AttributeError(name)
        asked = f"{self._stands_for}.{name}"
        warnings.warn(f"{asked} is not known to the tests; it is taken for a no", UnknownName, stacklevel=2)
        return No(asked)
