# SPDX-License-Identifier: Apache-2.0
"""Checks of option values that several commands share."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def known(values: list[str], good: tuple[str, ...], option: str) -> list[str]:
    """``values``, all of which have to be among ``good``.

    Raises:
        typer.BadParameter: one is not.
    """
    for value in values:
        if value not in good:
            raise typer.BadParameter(f"{value!r}; choose from {', '.join(good)}", param_hint=option)
    return values


def pairs(values: Iterable[str], option: str) -> dict[str, str]:
    """``KEY=VAL`` options as a dictionary.

    Raises:
        typer.BadParameter: one has no key or no equals sign.
    """
    found = {}
    for value in values:
        name, equals, setting = value.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{value!r} is not KEY=VAL", param_hint=option)
        found[name] = setting
    return found
