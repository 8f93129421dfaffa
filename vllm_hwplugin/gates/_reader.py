# SPDX-License-Identifier: Apache-2.0
"""The gates in an environment: their values, what is set and changes nothing, and what vLLM is told of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from .replaced import REPLACED, Replaced
from .table import (
    BY_NAME,
    CATALOGUE_PREFIX,
    COMPILE_KEY,
    FINGERPRINT,
    GATES,
    PREFIX,
    WORDS_FALSE,
    WORDS_TRUE,
    Alias,
    Gate,
    GateError,
    GateValue,
    Kind,
    Value,
    find,
)

# Characters of a raw value in a message.
_LONGEST: Final = 200


def read(name: str | Gate, environ: Mapping[str, str] | None = None) -> GateValue:
    """Read one gate from the environment.

    The gate's own name wins over its aliases. A variable that is set but empty counts as not set, because shells and
    container files have no better way to take one back. Values are compared without case and outer blanks.

    Args:
        name: the gate's own name; or a gate that is not in the table, because a feature declares it.
        environ: where to look; ``os.environ`` by default.

    Raises:
        GateError: the variable that decides holds a value that the gate does not know.
    """
    gate = find(name) if isinstance(name, str) else name
    environ = os.environ if environ is None else environ
    chosen: GateValue | None = None
    own = _present(gate.name, environ)
    if own is not None:
        chosen = GateValue(gate, _parse(gate, own), "environment", own)
    passed_over: list[str] = []
    for alias in gate.aliases:
        raw = _present(alias.name, environ)
        if raw is None:
            continue
        if chosen is None:
            chosen = GateValue(gate, _parse_alias(gate, alias, raw), f"alias {alias.name}", raw)
        elif _alias_disagrees(gate, alias, raw, chosen.value):
            passed_over.append(f"{alias.name}={_shown(raw)}")
    if chosen is None:
        return GateValue(gate, gate.default, "default", None)
    if not passed_over:
        return chosen
    winner = gate.name if chosen.source == "environment" else chosen.source.removeprefix("alias ")
    conflict = f"{' and '.join(passed_over)} is not followed, because {winner}={_shown(chosen.raw or '')} is set"
    return GateValue(gate, chosen.value, chosen.source, chosen.raw, conflict)


def demands(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a feature's gate says ``on``: an engine that cannot have the feature does not start then."""
    return (_present(name, os.environ if environ is None else environ) or "").strip().lower() in WORDS_TRUE


def source(name: str | Gate, environ: Mapping[str, str] | None = None) -> str:
    """Where a gate's value comes from, also a bad one: ``default``, ``environment`` or ``alias NAME``."""
    environ = os.environ if environ is None else environ
    gate = find(name) if isinstance(name, str) else name
    if _present(gate.name, environ) is not None:
        return "environment"
    aliases = (f"alias {alias.name}" for alias in gate.aliases if _present(alias.name, environ) is not None)
    return next(aliases, "default")


def read_all(environ: Mapping[str, str] | None = None, gates: Iterable[Gate] = GATES) -> dict[str, GateValue]:
    """Read every gate of the table, or of those given.

    Raises:
        GateError: one or more values are bad; the message has one line for each of them.
    """
    values: dict[str, GateValue] = {}
    faults: list[str] = []
    for gate in gates:
        try:
            values[gate.name] = read(gate, environ)
        except GateError as error:
            faults.append(str(error))
    if faults:
        raise GateError("\n".join(faults))
    return values


class Unknown(NamedTuple):
    """A variable with the plugin's prefix that is no gate: most often a spelling mistake."""

    name: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{self.name} is set, but it is not a variable of this release{hint}"


def unknown(environ: Mapping[str, str] | None = None, more: Iterable[Gate] = ()) -> tuple[Unknown | Replaced, ...]:
    """Variables that are set and change nothing: those that look like gates and are none, and older ones.

    Args:
        more: gates that features declare.
    """
    import difflib  # a third of this module's import time, and only a mistaken user needs it

    environ = os.environ if environ is None else environ
    known = {*BY_NAME, FINGERPRINT, *(gate.name for gate in more)}
    found = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    good = sorted(known - {FINGERPRINT})
    mistaken = (Unknown(name, next(iter(difflib.get_close_matches(name, good, n=1)), None)) for name in found)
    return (*mistaken, *(old for old in REPLACED if _present(old.name, environ) is not None))


def unclaimed(environ: Mapping[str, str], known: Iterable[Gate]) -> tuple[str, ...]:
    """Variables that demand a feature of a catalogue from outside, by their prefix, and are no gate here.

    Args:
        known: the gates of the catalogues that there are.
    """
    names = {gate.name for gate in known}
    return tuple(
        name
        for name in sorted(environ)
        if name.startswith(CATALOGUE_PREFIX) and name not in names and environ[name].strip().lower() in WORDS_TRUE
    )


def register_with_vllm(envs_module: Any, more: Iterable[Gate] = ()) -> None:
    """Enter the gates and their aliases in ``vllm.envs.environment_variables``.

    vLLM then does not call them unknown, copies them to Ray workers, and, as ``compile_factors()`` asks every entry of
    that table for its value, has those that change compiled code in its compile-cache key. Entries that cannot change
    compiled code answer with a constant: a cache folder that moves must not invalidate every compiled graph. A name
    that vLLM already has is left to vLLM.

    Args:
        envs_module: the module ``vllm.envs`` (all supported versions have the same table).
        more: gates that features declare.
    """
    table = envs_module.environment_variables
    for gate in (*GATES, *more):
        in_key = COMPILE_KEY in gate.affects
        table.setdefault(gate.name, _key_getter(gate) if in_key else _no_factor)
        for alias in gate.aliases:
            table.setdefault(alias.name, _no_factor)
    # Of features that this process has not read, because the plugin is switched off or they cannot be; and what the
    # first process of an engine left, where this one is another engine's and has the plugin switched off.
    for name in os.environ:
        # The latter are older names of features' gates.
        if name.startswith((f"{PREFIX}_", "VLLM_MUSA_")):
            table.setdefault(name, _no_factor)


def show(value: Value, kind: Kind = "list") -> str:
    """A value as a user would write it in the environment; empty for "not set".

    Args:
        kind: the gate's, where the value may be several.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, str) else (os.pathsep if kind == "paths" else ",").join(value)


def _present(name: str, environ: Mapping[str, str]) -> str | None:
    raw = environ.get(name)
    return raw if raw is not None and raw.strip() else None


def _shown(raw: str) -> str:
    """A raw value for a message: one line, and not longer than a reader reads."""
    text = raw if raw.isprintable() else repr(raw)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(raw)} characters)"


def _bad(variable: str, raw: str, good: str, help_: str) -> GateError:
    return GateError(f"{variable}={_shown(repr(raw))} is not one of the good values: {good}. ({help_})")


def _parse(gate: Gate, raw: str) -> Value:
    text = raw.strip()
    if gate.kind == "path":
        return _parse_path(gate, raw, text)
    if gate.kind == "paths":
        parts = (part.strip() for part in text.split(os.pathsep))
        return tuple(dict.fromkeys(_parse_path(gate, raw, part) for part in parts if part))
    if gate.kind == "list":
        return tuple(dict.fromkeys(item for item in (part.strip() for part in text.split(",")) if item))
    text = text.lower()
    if gate.kind == "bool":
        if text not in WORDS_TRUE + WORDS_FALSE:
            raise _bad(gate.name, raw, gate.good_values, gate.help)
        return text in WORDS_TRUE
    if gate.kind == "switch":
        # As vLLM's own switches are written.
        text = "on" if text in WORDS_TRUE else "off" if text in WORDS_FALSE else text
    if text not in gate.choices:
        raise _bad(gate.name, raw, gate.good_values, gate.help)
    return text


def _parse_path(gate: Gate, raw: str, text: str) -> str:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        # No such user, or a user without a home.
        raise _bad(gate.name, raw, gate.good_values, gate.help) from error
    # A relative folder would be another one in each process that changes its working directory.
    if not path.is_absolute():
        raise _bad(gate.name, raw, gate.good_values, gate.help)
    return str(path)


def _parse_alias(gate: Gate, alias: Alias, raw: str) -> Value:
    mapped = alias.mapping.get(raw.strip().lower())
    if mapped is None:
        raise _bad(f"{alias.name} (alias of {gate.name})", raw, ", ".join(alias.mapping), gate.help)
    return _parse(gate, mapped)


def _alias_disagrees(gate: Gate, alias: Alias, raw: str, value: Value) -> bool:
    try:
        said = _parse_alias(gate, alias, raw)
    except GateError:
        return True
    # `on` and `auto` both ask for the feature; an alias has no word for the difference.
    asks = ("auto", "on")
    return said != value and not (gate.kind == "switch" and said in asks and value in asks)


def _key_getter(gate: Gate) -> Any:
    def value() -> str:
        try:
            return show(read(gate).value)
        except GateError as error:
            # vLLM would log a warning of its own and leave the gate out of the key. The plugin has already reported the
            # bad value, and two different bad values must not share compiled graphs with a good one.
            return str(error)

    return value


def _no_factor() -> None:
    return None
