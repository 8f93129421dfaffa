# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the plugin reads: one table, one parser, one page of documentation.

The table is the single place where a variable is named, typed, defaulted and explained. ``docs/gates.md`` is written
from it, ``doctor`` prints it, and :func:`register_with_vllm` tells vLLM about it. Only the standard library is
imported, because every vLLM process reads the gates before anything else of the plugin; for the same reason the records
here are named tuples, which take a fifth of the time of a frozen dataclass to define.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from .errors import HwpluginError
from .replaced import REPLACED, Replaced

Kind = Literal["switch", "bool", "path", "list", "choice"]
Value = bool | str | tuple[str, ...] | None

PREFIX: Final = "VLLM_HWPLUGIN"

# vLLM's table holds this name too (the patch set's fingerprint, a computed value); it is not something to set.
FINGERPRINT: Final = "VLLM_HWPLUGIN_FINGERPRINT"

COMPILE_KEY: Final = "compile key"

# Characters of a raw value in a message.
_LONGEST: Final = 200

_WORDS_TRUE: Final = ("1", "true", "yes", "on")
_WORDS_FALSE: Final = ("0", "false", "no", "off")


class GateError(HwpluginError, ValueError):
    """A variable holds a value that its gate does not know. The message names it and lists the good values."""


class Alias(NamedTuple):
    """Another name under which a gate may be set, with its own spelling of the values.

    ``mapping`` takes the lower-cased raw text to a text that the gate itself accepts, so an inverted variable
    (``DISABLE_X=1``) is only a different mapping.
    """

    name: str
    mapping: Mapping[str, str]


class Gate(NamedTuple):
    """One variable. ``effect`` is ``reserved`` where the name is parsed and checked but nothing reads it yet."""

    name: str
    kind: Kind
    default: Value
    help: str
    aliases: tuple[Alias, ...] = ()
    affects: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    since: str = "0.1.0"
    effect: Literal["live", "reserved"] = "live"

    @property
    def good_values(self) -> str:
        """The accepted values, as a reader should see them in an error or in the documentation."""
        if self.kind == "bool":
            return "1, 0 (or true/false, yes/no, on/off)"
        if self.kind == "path":
            return "an absolute path"
        if self.kind == "list":
            return "names separated by commas"
        return ", ".join(self.choices)


class GateValue(NamedTuple):
    """What a gate is set to, and by whom.

    ``source`` is ``default``, ``environment`` (the gate's own name) or ``alias NAME``. ``conflict`` is a sentence when
    another name of the same gate is set and was not followed.
    """

    gate: Gate
    value: Value
    source: str
    raw: str | None
    conflict: str | None = None

    @property
    def is_set(self) -> bool:
        return self.source != "default"

    @property
    def flag(self) -> bool:
        """The value of a ``bool`` gate."""
        if not isinstance(self.value, bool):
            raise TypeError(f"{self.gate.name} is a {self.gate.kind} gate, not a bool")
        return self.value

    @property
    def text(self) -> str:
        """The value of a ``switch`` or ``choice`` gate."""
        if not isinstance(self.value, str) or self.gate.kind == "path":
            raise TypeError(f"{self.gate.name} is a {self.gate.kind} gate, not a switch or a choice")
        return self.value

    @property
    def path(self) -> Path | None:
        """The value of a ``path`` gate; None when it is not set and has no default."""
        if self.gate.kind != "path" or not isinstance(self.value, str | None):
            raise TypeError(f"{self.gate.name} is a {self.gate.kind} gate, not a path")
        return None if self.value is None else Path(self.value)

    @property
    def names(self) -> tuple[str, ...]:
        """The value of a ``list`` gate."""
        if not isinstance(self.value, tuple):
            raise TypeError(f"{self.gate.name} is a {self.gate.kind} gate, not a list")
        return self.value


def _words(when_true: str, when_false: str) -> Mapping[str, str]:
    return MappingProxyType(dict.fromkeys(_WORDS_TRUE, when_true) | dict.fromkeys(_WORDS_FALSE, when_false))


# The older variables turned a feature on without demanding it, which is what `auto` means here.
_AUTO_OR_OFF: Final = _words("auto", "off")
_SAME: Final = _words("1", "0")
_INVERTED: Final = _words("0", "1")
_SWITCH: Final = ("auto", "on", "off")

GATES: Final[tuple[Gate, ...]] = (
    Gate(
        "VLLM_HWPLUGIN",
        "bool",
        True,
        "Master switch. 0 leaves vLLM exactly as installed: no patch, no finder.",
        affects=("patches", COMPILE_KEY),
    ),
    Gate(
        "VLLM_HWPLUGIN_STRICT",
        "bool",
        False,
        "Whatever the plugin should do and cannot stops the process with an error, where it would go on as stock vLLM.",
        affects=("errors",),
    ),
    Gate(
        "VLLM_HWPLUGIN_TRY_UNLISTED",
        "bool",
        False,
        "On a vLLM version that is not listed, apply a feature when every hunk of its nearest variant fits exactly.",
        affects=("patches", COMPILE_KEY),
    ),
    Gate(
        "VLLM_HWPLUGIN_CACHE_DIR",
        "path",
        None,
        "Folder for patched copies, kernels, process records and the drift check's sources. Default: the user's cache.",
        affects=("cache",),
    ),
    Gate(
        "VLLM_HWPLUGIN_PLATFORM",
        "choice",
        "auto",
        "Which platform class to offer to vLLM: the one that fits the host, this one alone, or none.",
        affects=("platform",),
        choices=("auto", "cuda", "musa", "off"),
    ),
    Gate(
        "VLLM_HWPLUGIN_ATTENTION",
        "switch",
        "auto",
        "The plugin's FLASH_ATTN for heads above 256 on CUDA: where it is faster or alone, wherever it fits, or never.",
        affects=("attention backend",),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH",
        "switch",
        "auto",
        "Feature draft-full-graph: Eagle, Eagle3, MTP, P-EAGLE and draft_model drafters in FULL graphs (V1 runner).",
        aliases=(Alias("VLLM_MUSA_DRAFT_FULL_WRAP", _AUTO_OR_OFF),),
        affects=("patches", COMPILE_KEY),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH",
        "switch",
        "auto",
        "Feature draft-loop-graph: all one-token steps of a drafter in one graph launch.",
        affects=("patches", COMPILE_KEY),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_DFLASH_FULL_GRAPH",
        "switch",
        "auto",
        "Feature dflash-full-graph: the DFlash drafter in FULL graphs (V1 runner); needs draft-full-graph.",
        aliases=(Alias("VLLM_MUSA_DFLASH_FULL_WRAP", _AUTO_OR_OFF),),
        affects=("patches", COMPILE_KEY),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_V2_STEP_INPUTS",
        "switch",
        "auto",
        "Feature v2-step-inputs: the inputs of a decode step in one CUDA graph (Model Runner V2); needs v2-tail-graph.",
        affects=("patches", COMPILE_KEY),
        choices=_SWITCH,
        since="0.2.0",
    ),
    Gate(
        "VLLM_HWPLUGIN_V2_TAIL_GRAPH",
        "switch",
        "auto",
        "Feature v2-tail-graph: sampling and drafting of a decode step in two CUDA graphs (Model Runner V2).",
        affects=("patches", COMPILE_KEY),
        choices=_SWITCH,
        since="0.2.0",
    ),
    Gate(
        "VLLM_HWPLUGIN_DFLASH_CONTEXT_NORM",
        "switch",
        "auto",
        "Feature dflash-context-norm: each DFlash draft layer's context keys get that layer's own norm.",
        affects=("patches", COMPILE_KEY),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_DFLASH_DRAFT_BACKEND",
        "switch",
        "auto",
        "Feature dflash-draft-backend: a DFlash draft and its target each have an attention backend of their own.",
        affects=("patches", COMPILE_KEY),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_WINDOW_BLOCKS",
        "switch",
        "auto",
        "Feature window-blocks: a sliding window keeps the KV cache blocks that rejected drafts bring back into it.",
        affects=("patches",),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_ENGINE_REPORT",
        "switch",
        "auto",
        "Feature engine-report: each worker says which live features its engine uses, and why not the others.",
        affects=("patches",),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_OPS",
        "switch",
        "auto",
        "The plugin's kernels under the names of vLLM's operations: auto takes those that were measured to gain on "
        "this device, and on MUSA those that vLLM has no kernel of; on takes all, off takes none.",
        aliases=(Alias("VLLM_MUSA_OP_PERF_OVERRIDES", _words("on", "off")),),
        affects=("operations",),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_OPS_SKIP",
        "list",
        (),
        "Operations that keep vLLM's own kernel whatever VLLM_HWPLUGIN_OPS says, such as rotary_embedding.",
        affects=("operations",),
    ),
    Gate(
        "VLLM_HWPLUGIN_SLP",
        "bool",
        True,
        "Build kernels with SLP vectorisation where the MUSA compiler is new enough.",
        aliases=(Alias("VLLM_MUSA_DISABLE_SLP", _INVERTED),),
        affects=("kernels",),
    ),
    Gate(
        "VLLM_HWPLUGIN_LOAD_CLUSTER",
        "bool",
        True,
        "Build kernels with load clustering where the MUSA compiler is new enough.",
        aliases=(Alias("VLLM_MUSA_DISABLE_LOAD_CLUSTER", _INVERTED),),
        affects=("kernels",),
    ),
    Gate(
        "VLLM_HWPLUGIN_NWOR_MODE",
        "choice",
        "off",
        "No-write-on-reject for draft tokens in the KV cache.",
        aliases=(Alias("VLLM_NWOR_MODE", MappingProxyType({"off": "off", "stage": "stage"})),),
        choices=("off", "stage"),
        effect="reserved",
    ),
    Gate(
        "VLLM_HWPLUGIN_NWOR_EMIT_METRICS",
        "bool",
        False,
        "Count staged, accepted and rejected draft tokens for Prometheus.",
        aliases=(Alias("VLLM_NWOR_EMIT_METRICS", _SAME),),
        effect="reserved",
    ),
    Gate(
        "VLLM_HWPLUGIN_NWOR_DEBUG_SYNC",
        "bool",
        False,
        "Synchronise the device after each restore of rejected drafts, to find a fault.",
        aliases=(Alias("VLLM_NWOR_DEBUG_SYNC", _SAME),),
        effect="reserved",
    ),
)

_BY_NAME: Final[Mapping[str, Gate]] = MappingProxyType({gate.name: gate for gate in GATES})


def find(name: str) -> Gate:
    """Return the gate of that name.

    Raises:
        KeyError: there is no such gate (a fault of the caller, not of the user).
    """
    return _BY_NAME[name]


def read(name: str, environ: Mapping[str, str] | None = None) -> GateValue:
    """Read one gate from the environment.

    The gate's own name wins over its aliases. A variable that is set but empty counts as not set, because shells and
    container files have no better way to take one back. Values are compared without case and outer blanks.

    Args:
        name: the gate's own name.
        environ: where to look; ``os.environ`` by default.

    Raises:
        GateError: the variable that decides holds a value that the gate does not know.
    """
    gate = find(name)
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


def source(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Where a gate's value comes from, also a bad one: ``default``, ``environment`` or ``alias NAME``."""
    environ = os.environ if environ is None else environ
    gate = find(name)
    if _present(gate.name, environ) is not None:
        return "environment"
    aliases = (f"alias {alias.name}" for alias in gate.aliases if _present(alias.name, environ) is not None)
    return next(aliases, "default")


def read_all(environ: Mapping[str, str] | None = None) -> dict[str, GateValue]:
    """Read every gate.

    Raises:
        GateError: one or more values are bad; the message has one line for each of them.
    """
    values: dict[str, GateValue] = {}
    faults: list[str] = []
    for gate in GATES:
        try:
            values[gate.name] = read(gate.name, environ)
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


def unknown(environ: Mapping[str, str] | None = None) -> tuple[Unknown | Replaced, ...]:
    """Variables that are set and change nothing: those that look like gates and are none, and older ones."""
    import difflib  # a third of this module's import time, and only a mistaken user needs it

    environ = os.environ if environ is None else environ
    found = sorted(name for name in environ if name.startswith(PREFIX) and name not in _BY_NAME and name != FINGERPRINT)
    mistaken = (Unknown(name, next(iter(difflib.get_close_matches(name, _BY_NAME, n=1)), None)) for name in found)
    return (*mistaken, *(old for old in REPLACED if _present(old.name, environ) is not None))


def register_with_vllm(envs_module: Any) -> None:
    """Enter the gates and their aliases in ``vllm.envs.environment_variables``.

    vLLM then does not call them unknown, copies them to Ray workers, and, as ``compile_factors()`` asks every entry of
    that table for its value, has those that change compiled code in its compile-cache key. Entries that cannot change
    compiled code answer with a constant: a cache folder that moves must not invalidate every compiled graph. A name
    that vLLM already has is left to vLLM.

    Args:
        envs_module: the module ``vllm.envs`` (all supported versions have the same table).
    """
    table = envs_module.environment_variables
    for gate in GATES:
        in_key = COMPILE_KEY in gate.affects
        table.setdefault(gate.name, _key_getter(gate) if in_key else _no_factor)
        for alias in gate.aliases:
            table.setdefault(alias.name, _no_factor)


def markdown() -> str:
    """The text of ``docs/gates.md``."""
    from . import failures  # for the page alone

    lines = [
        "# Environment variables",
        "",
        "Written by `vllm-hwplugin gates --markdown docs/gates.md` from the table in `vllm_hwplugin/gates.py`; a test",
        "compares the two. A variable that is set but empty counts as not set. `vllm-hwplugin doctor` shows the values",
        "in force and where each came from.",
        "",
        "A *switch* takes `auto` (live where it applies), `on` (an error where it cannot be live), `off` (stock vLLM);",
        "the table below says what each failure does.",
        "",
        "## In force",
        "",
        *_table([gate for gate in GATES if gate.effect == "live"]),
        "",
        "## Reserved",
        "",
        "Parsed and checked, so that a bad value is an error today; they change nothing in this release, and `doctor`",
        "says so when one is set.",
        "",
        *_table([gate for gate in GATES if gate.effect == "reserved"]),
        "",
        *failures.markdown(),
        "",
        "## Aliases",
        "",
        "Older names that keep working. The own name wins; `doctor` reports an alias that says something else.",
        "",
        "| alias | sets | values |",
        "|---|---|---|",
        *[f"| `{alias.name}` | `{gate.name}` | {_alias_values(alias)} |" for gate in GATES for alias in gate.aliases],
        "",
        "## No longer read",
        "",
        "Where one of these is set, a line in the log, in `gates` and in `doctor` says what replaced it.",
        "",
        "| variable | in its place |",
        "|---|---|",
        *[f"| `{old.name}` | {old.instead} |" for old in REPLACED],
    ]
    return "\n".join(lines) + "\n"


def show(value: Value) -> str:
    """A value as a user would write it in the environment; empty for "not set"."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, str) else ",".join(value)


def _table(gates: list[Gate]) -> list[str]:
    rows = ["| variable | kind | default | values | affects | since | what it does |", "|---|---|---|---|---|---|---|"]
    for gate in gates:
        default = f"`{show(gate.default)}`" if show(gate.default) else "not set"
        affects = ", ".join(gate.affects) or "nothing yet"
        cells = (f"`{gate.name}`", gate.kind, default, gate.good_values, affects, gate.since, gate.help)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _alias_values(alias: Alias) -> str:
    # The words true/yes/on say the same as 1; naming them all would only bury the meaning.
    return ", ".join(
        f"`{raw}` → `{value}`" for raw, value in alias.mapping.items() if raw in ("0", "1") or "1" not in alias.mapping
    )


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
        try:
            path = Path(text).expanduser()
        except RuntimeError as error:
            # No such user, or a user without a home.
            raise _bad(gate.name, raw, gate.good_values, gate.help) from error
        # A relative folder would be another one in each process that changes its working directory.
        if not path.is_absolute():
            raise _bad(gate.name, raw, gate.good_values, gate.help)
        return str(path)
    if gate.kind == "list":
        return tuple(dict.fromkeys(item for item in (part.strip() for part in text.split(",")) if item))
    text = text.lower()
    if gate.kind == "bool":
        if text not in _WORDS_TRUE + _WORDS_FALSE:
            raise _bad(gate.name, raw, gate.good_values, gate.help)
        return text in _WORDS_TRUE
    if text not in gate.choices:
        raise _bad(gate.name, raw, gate.good_values, gate.help)
    return text


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
            return show(read(gate.name).value)
        except GateError as error:
            # vLLM would log a warning of its own and leave the gate out of the key. The plugin has already reported the
            # bad value, and two different bad values must not share compiled graphs with a good one.
            return str(error)

    return value


def _no_factor() -> None:
    return None
