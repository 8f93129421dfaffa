# SPDX-License-Identifier: Apache-2.0
"""The gates in an environment: their values, what is set and changes nothing, and what vLLM is told of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from .replaced import REPLACED
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
    gate = BY_NAME[name] if isinstance(name, str) else name
    environ = os.environ if environ is None else environ
    ways = {gate.name: None, **{alias.name: alias for alias in gate.aliases}}
    said = {way: raw for way in ways if (raw := _present(way, environ)) is not None}
    if not said:
        return GateValue(gate, gate.default, "default", None)
    (winner, raw), *others = said.items()
    value = _value(gate, ways[winner], raw)
    passed_over = [f"{way}={_shown(other)}" for way, other in others if _disagrees(gate, ways[way], other, value)]
    conflict = f"{' and '.join(passed_over)} is not followed, because {winner}={_shown(raw)} is set"
    return GateValue(gate, value, _source(ways[winner]), raw, conflict if passed_over else None)


def demands(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a feature's gate says ``on``: an engine that cannot have the feature does not start then."""
    return (_present(name, os.environ if environ is None else environ) or "").strip().lower() in WORDS_TRUE


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


def unknown(environ: Mapping[str, str] | None = None, more: Iterable[Gate] = ()) -> tuple[str, ...]:
    """A line for each variable that is set and changes nothing: those that look like gates and are none, older ones.

    Args:
        more: gates that features declare.
    """
    import difflib  # a third of this module's import time, and only a mistaken user needs it

    environ = os.environ if environ is None else environ
    good = sorted({*BY_NAME, *(gate.name for gate in more)})
    lines = []
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in (*good, FINGERPRINT)):
        nearest = next(iter(difflib.get_close_matches(name, good, n=1)), None)
        hint = f"; did you mean {nearest}?" if nearest else ""
        lines.append(f"{name} is set, but it is not a variable of this release{hint}")
    older = ((name, instead) for name, instead in REPLACED.items() if _present(name, environ) is not None)
    return (*lines, *(f"{name} is set, but nothing reads it: {instead}" for name, instead in older))


def unclaimed(environ: Mapping[str, str], known: Iterable[Gate]) -> tuple[str, ...]:
    """Variables that demand a feature of a catalogue from outside, by their prefix, and are no gate here.

    Args:
        known: the gates of the catalogues that there are.
    """
    names = {gate.name for gate in known}
    return tuple(
        name
        for name in sorted(environ)
        if name.startswith(CATALOGUE_PREFIX) and name not in names and demands(name, environ)
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


def _source(way: Alias | None) -> str:
    return f"alias {way.name}" if way else "environment"


def _value(gate: Gate, way: Alias | None, raw: str) -> Value:
    """The value of a gate that is set by its own name (None) or an alias.

    Raises:
        GateError: it does not know that value.
    """
    text = raw.strip() if way is None else way.mapping.get(raw.strip().lower())
    value = None if text is None else _parse(gate, text)
    if value is None:
        variable = gate.name if way is None else f"{way.name} (alias of {gate.name})"
        good = gate.good_values if way is None else ", ".join(way.mapping)
        message = f"{variable}={_shown(repr(raw))} is not one of the good values: {good}. ({gate.help})"
        raise GateError(message, _source(way), raw)
    return value


def _parse(gate: Gate, text: str) -> Value:
    """None where it is no value of this gate."""
    if gate.kind == "path":
        return _path(text)
    if gate.kind == "paths":
        paths = [_path(part.strip()) for part in text.split(os.pathsep) if part.strip()]
        return None if None in paths else tuple(dict.fromkeys(filter(None, paths)))
    if gate.kind == "list":
        return tuple(dict.fromkeys(item for item in (part.strip() for part in text.split(",")) if item))
    text = text.lower()
    if gate.kind == "bool":
        return text in WORDS_TRUE if text in WORDS_TRUE + WORDS_FALSE else None
    if gate.kind == "switch":
        # As vLLM's own switches are written.
        text = "on" if text in WORDS_TRUE else "off" if text in WORDS_FALSE else text
    return text if text in gate.choices else None


def _path(text: str) -> str | None:
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        # No such user, or a user without a home.
        return None
    # A relative folder would be another one in each process that changes its working directory.
    return str(path) if path.is_absolute() else None


def _disagrees(gate: Gate, way: Alias | None, raw: str, value: Value) -> bool:
    try:
        said = _value(gate, way, raw)
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
