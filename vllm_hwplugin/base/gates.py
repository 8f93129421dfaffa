# SPDX-License-Identifier: Apache-2.0
"""The plugin's environment variables and their parser. Each feature declares its own switch in `patch.toml`.

`docs/gates.md` shows the table, ``doctor`` prints it, and :func:`register_with_vllm` tells vLLM about it. Every vLLM
process reads the variables before anything else of the plugin. So only the standard library is imported, the records
are named tuples, which take a fifth of the time of a frozen dataclass to define, and no annotation is a string, because
a named tuple compiles each string.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args

from .errors import HwpluginError

Kind = Literal["switch", "bool", "path", "paths", "list", "choice"]
Value = bool | str | tuple[str, ...] | None
MoreGraphs = Literal["trtllm", "image-spans", "mla-prompts", "shared-experts"]

PREFIX: Final = "VLLM_HWPLUGIN"

# Prefix of switches of external catalogues; no variable of the table begins with it.
CATALOGUE_PREFIX: Final = "VLLM_HWPLUGIN_PATCH_"

# The fingerprint of the patch set: a computed value in vLLM's table, and in the environment that the first process of
# an engine leaves to its children. Users do not set it.
FINGERPRINT: Final = "VLLM_HWPLUGIN_FINGERPRINT"

PLAIN_DECODE: Final = "VLLM_HWPLUGIN_PLAIN_DECODE"
MORE_GRAPHS: Final = "VLLM_HWPLUGIN_MORE_GRAPHS"
STRICT: Final = "VLLM_HWPLUGIN_STRICT"
COMPILE_KEY: Final = "compile key"

WORDS_TRUE: Final = ("1", "true", "yes", "on")
WORDS_FALSE: Final = ("0", "false", "no", "off")


class GateError(HwpluginError, ValueError):
    """A variable holds an unknown `raw` value from `source`. The message lists the good values."""

    def __init__(self, message: str, source: str = "", raw: str = "") -> None:
        super().__init__(message)
        self.source, self.raw = source, raw


class Alias(NamedTuple):
    """Another name of a variable. `mapping`: lower-cased raw text -> a value of the variable."""

    name: str
    mapping: Mapping[str, str]


class Gate(NamedTuple):
    """An environment variable; ``since`` is the first release in which it has an effect."""

    name: str
    kind: Kind
    default: Value
    help: str
    aliases: tuple[Alias, ...] = ()
    affects: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    since: str = "0.1.0"

    @property
    def variables(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *(alias.name for alias in self.aliases))

    @property
    def switches(self) -> bool:
        """Whether it can switch a feature: it takes `off`, and values that let the feature be patched in."""
        return self.kind == "switch" or (self.kind == "choice" and "patches" in self.affects)

    @property
    def of_part(self) -> bool:
        """Whether it switches a part of the plugin that is no feature; a bad value switches that part off."""
        return self.affects in (("operations",), ("attention backend",), ("graphs",))

    @property
    def of_feature(self) -> bool:
        """Whether it switches a feature; a bad value costs that feature only."""
        return self.switches and "patches" in self.affects

    @property
    def good_values(self) -> str:
        """The accepted values, for errors and documentation."""
        if self.kind == "bool":
            return "1, 0 (or true/false, yes/no, on/off)"
        if self.kind == "path":
            return "an absolute path"
        if self.kind == "paths":
            return f"absolute paths separated by {os.pathsep!r}"
        choices = ", ".join(self.choices)
        if self.kind == "list":
            return f"names separated by commas: {choices}" if choices else "names separated by commas"
        return choices


class GateValue(NamedTuple):
    """A variable's value and its source.

    Attributes:
        source: ``default``, ``environment`` (its own name) or ``alias NAME``.
        conflict: a sentence if another name of the same variable is set to a different value and is not followed.
    """

    gate: Gate
    value: Value
    source: str
    raw: str | None
    conflict: str | None = None

    @property
    def flag(self) -> bool:
        """The value of a ``bool`` variable."""
        assert isinstance(self.value, bool), self.gate.name
        return self.value

    @property
    def text(self) -> str:
        """The value of a ``switch`` or ``choice`` variable."""
        assert isinstance(self.value, str), self.gate.name
        return self.value

    @property
    def choice(self) -> str:
        """``auto``, ``on`` or ``off`` for the feature that it switches; a mode counts as ``auto``."""
        return self.text if self.text in _SWITCH else "auto"

    @property
    def path(self) -> Path | None:
        """The value of a ``path`` variable; None if it is not set and has no default."""
        assert isinstance(self.value, str | None), self.gate.name
        return None if self.value is None else Path(self.value)

    @property
    def names(self) -> tuple[str, ...]:
        """The value of a ``list`` or ``paths`` variable."""
        assert isinstance(self.value, tuple), self.gate.name
        return self.value


def _words(when_true: str, when_false: str) -> Mapping[str, str]:
    return MappingProxyType(dict.fromkeys(WORDS_TRUE, when_true) | dict.fromkeys(WORDS_FALSE, when_false))


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
        STRICT,
        "bool",
        False,
        "Stop the process with an error where the plugin would otherwise fall back to unpatched vLLM.",
        affects=("errors",),
    ),
    Gate(
        "VLLM_HWPLUGIN_TRY_UNLISTED",
        "bool",
        False,
        "On a vLLM version that is not listed, apply a feature when its hunks for the nearest one each fit one place.",
        affects=("patches", COMPILE_KEY),
    ),
    Gate(
        "VLLM_HWPLUGIN_CACHE_DIR",
        "path",
        None,
        "Folder for patched copies, kernels, run records and the drift check's sources. Default: the user's cache.",
        affects=("cache",),
    ),
    Gate(
        "VLLM_HWPLUGIN_PATCHES",
        "paths",
        (),
        "Folders of your own patches, each with a catalogue.toml; their code runs in vLLM (docs/your-own-patches.md).",
        affects=("patches",),
        since="0.2.0",
    ),
    Gate(
        "VLLM_HWPLUGIN_PLATFORM",
        "choice",
        "auto",
        "Which platform class to offer to vLLM: the one that fits the host, only the named one, or none.",
        affects=("platform",),
        choices=("auto", "cuda", "musa", "off"),
    ),
    Gate(
        "VLLM_HWPLUGIN_ATTENTION",
        "switch",
        "auto",
        "The plugin's FLASH_ATTN for heads above 256 on CUDA: where it is faster or the only backend, where it fits, "
        "or never.",
        affects=("attention backend",),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_OPS",
        "switch",
        "auto",
        "The plugin's kernels under the names of vLLM's operations: auto takes, on MUSA, those that vLLM has no "
        "kernel for; on takes all, off takes none.",
        aliases=(Alias("VLLM_MUSA_OP_PERF_OVERRIDES", _words("on", "off")),),
        affects=("operations",),
        choices=_SWITCH,
    ),
    Gate(
        "VLLM_HWPLUGIN_OPS_SKIP",
        "list",
        (),
        "Operations that keep vLLM's own kernel with any VLLM_HWPLUGIN_OPS, such as topk_softmax.",
        affects=("operations",),
    ),
    Gate(
        "VLLM_HWPLUGIN_SELF_TEST",
        "bool",
        True,
        "Compare a MUSA GPU with torch on the CPU when a worker starts, once for each set of versions, and refuse what "
        "it computes wrongly.",
        affects=("errors",),
        since="0.3.0",
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
        "VLLM_HWPLUGIN_CAPTURE_SIZES",
        "choice",
        "mixed",
        "Feature capture-sizes: decode batches of up to 2048 tokens have CUDA graphs where the user names no size "
        "(decode); batches with prompts of up to 4096 tokens, too, and of a small target up to 8192 (mixed).",
        affects=("patches",),
        choices=("off", "decode", "mixed"),
        since="0.2.0",
    ),
    Gate(
        MORE_GRAPHS,
        "list",
        (),
        "Graphs that are off by default (Model Runner V2). trtllm: inputs and drafts over FlashInfer's TRTLLM kernels "
        "(trtllm-gen, XQA, sparse MLA), vLLM's default on Blackwell; not run on a GPU. image-spans: decode and mixed "
        "batches with a drafter over TRITON_FLASH_ATTN (Gemma 4 31B and 26B-A4B on Hopper and newer), for steps "
        "without a part of an image (vLLM 0.30 and newer); not run on a GPU. mla-prompts: mixed batches of MLA over "
        "FLASH_ATTN_MLA, for steps without a request of more than 512 new tokens (vLLM 0.31 and newer, Hopper); run on "
        "an H200, tokens/s the same. shared-experts: drafts of drafters with experts under data parallelism (vLLM "
        "0.30 and newer); not run on several GPUs.",
        affects=("graphs",),
        choices=get_args(MoreGraphs),
        since="0.3.0",
    ),
    Gate(
        PLAIN_DECODE,
        "bool",
        True,
        "Graphs of sampling, inputs and batches with prompts also for an engine without speculation (Model Runner V2). "
        "Without them it starts sooner and needs less memory.",
        affects=("graphs",),
        since="0.2.0",
    ),
    Gate(
        "VLLM_HWPLUGIN_V2_DRAFT_HEAD",
        "choice",
        "auto",
        "Feature v2-draft-head: Eagle and MTP drafts multiply by an FP8 copy of the head (copy; auto, if it is large), "
        "or by FP8 rows of recent tokens (rows); Model Runner V2.",
        affects=("patches",),
        choices=("auto", "off", "copy", "rows"),
        since="0.3.0",
    ),
    Gate(
        "VLLM_HWPLUGIN_NWOR_MODE",
        "choice",
        "off",
        "Feature nwor: rejected drafts leave the target's KV cache as it was (restore, or stage), or zeros (scrub).",
        aliases=(
            # The word of a design that withheld the rows until they were accepted.
            Alias(
                "VLLM_NWOR_MODE",
                MappingProxyType({"off": "off", "stage": "restore", "restore": "restore", "scrub": "scrub"}),
            ),
        ),
        affects=("patches",),
        choices=("off", "restore", "scrub", "stage"),
        since="0.2.0",
    ),
    Gate(
        "VLLM_HWPLUGIN_NWOR_EMIT_METRICS",
        "bool",
        False,
        "With nwor: count drafted, accepted and rejected rows for Prometheus (vllm:nwor_*).",
        aliases=(Alias("VLLM_NWOR_EMIT_METRICS", _SAME),),
        affects=("metrics",),
        since="0.2.0",
    ),
    Gate(
        "VLLM_HWPLUGIN_NWOR_DEBUG_SYNC",
        "bool",
        False,
        "With nwor: wait for the device after each step, compare, and stop at the layer and slot that differ.",
        aliases=(Alias("VLLM_NWOR_DEBUG_SYNC", _SAME),),
        affects=("errors",),
        since="0.2.0",
    ),
)

BY_NAME: Final[Mapping[str, Gate]] = MappingProxyType({gate.name: gate for gate in GATES})

#: Variable of older builds that neither vLLM nor the plugin reads -> what to use in its place.
REPLACED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "VLLM_ATTENTION_BACKEND": "name the target's backend with --attention-backend, and from vLLM 0.21.0 on a "
        "draft's with attention_backend in --speculative-config; VLLM_HWPLUGIN_ATTENTION says where the plugin's "
        "FLASH_ATTN handles heads above 256",
        "VLLM_MUSA_EAGLE_RUNNER": "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH puts each pass of a drafter into a CUDA graph, "
        "VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH all one-token steps into one; both are on by default",
        "VLLM_MUSA_DRAFT_COPY_DEFAULT_STREAM": "it worked around a bug of the runner that VLLM_MUSA_EAGLE_RUNNER "
        "chose, which is gone; set nothing",
        "VLLM_HWPLUGIN_TRTLLM_GRAPHS": f"{MORE_GRAPHS}=trtllm asks for these graphs",
        "VLLM_HWPLUGIN_DELTA_RULE_GRAPHS": "VLLM_HWPLUGIN_V2_MIXED_GRAPHS=off leaves these graphs out",
    }
)

# Characters of a raw value in a message.
_LONGEST: Final = 200


def feature_gate(
    name: str,
    help_: str,
    default: str = "auto",
    *,
    catalogue: str = "",
    compile_key: bool = True,
    aliases: Iterable[str] = (),
    since: str = "0.1.0",
) -> Gate:
    """Return a feature's switch, as its `patch.toml` declares it.

    Args:
        catalogue: the external catalogue that has the feature; empty for the project's own.
        compile_key: whether the switch may change what vLLM compiles.
        aliases: older variables that turn the feature on or off.

    Raises:
        GateError: the name is malformed or not the catalogue's to give, or the default is no value of a switch.
    """
    own = f"{catalogue.upper().replace('-', '_')}_"
    letters = name.replace("_", "")
    well_formed = name[:1].isalpha() and letters.isascii() and letters.isalnum() and letters.isupper()
    # Other names may have a meaning: HOME, LD_PRELOAD, and the variables of vLLM and of the plugin.
    named = name.startswith(CATALOGUE_PREFIX) or (name.startswith(own) and not name.startswith("VLLM"))
    if not catalogue:
        own = f"{PREFIX}_"
        named = name.startswith(own) and name not in BY_NAME and not name.startswith(CATALOGUE_PREFIX)
    if not well_formed or not named:
        whose = f"the catalogue {catalogue}" if catalogue else "a feature of the plugin"
        beginnings = f"{CATALOGUE_PREFIX} or {own}" if catalogue else own
        raise GateError(
            f"{name!r} is no name for a switch of {whose}; expected capitals, digits and `_`, and at its beginning "
            f"{beginnings}"
        )
    if default not in _SWITCH:
        raise GateError(f"default is {default!r}, expected {', '.join(_SWITCH)}")
    older = tuple(Alias(alias, _AUTO_OR_OFF) for alias in aliases)
    affects = ("patches", COMPILE_KEY) if compile_key else ("patches",)
    return Gate(name, "switch", default, help_, older, affects, _SWITCH, since)


def read(name: str | Gate, environ: Mapping[str, str] | None = None) -> GateValue:
    """Read a variable from the environment.

    Its own name wins over its aliases. A variable that is set but empty counts as not set, because shells and container
    files have no better way to unset it. Values are compared without case and outer blanks.

    Args:
        name: its own name; or the `Gate`, if a feature declares it and the table does not have it.
        environ: None: ``os.environ``.

    Raises:
        GateError: the name that wins holds an unknown value.
    """
    gate = BY_NAME[name] if isinstance(name, str) else name
    environ = os.environ if environ is None else environ
    ways = {gate.name: None, **{alias.name: alias for alias in gate.aliases}}
    raws = {way: raw for way in ways if (raw := _present(way, environ)) is not None}
    if not raws:
        return GateValue(gate, gate.default, "default", None)
    (winner, raw), *others = raws.items()
    value = _value(gate, ways[winner], raw)
    passed_over = [f"{way}={_shown(other)}" for way, other in others if _disagrees(gate, ways[way], other, value)]
    conflict = f"{' and '.join(passed_over)} is not followed, because {winner}={_shown(raw)} is set"
    return GateValue(gate, value, _source(ways[winner]), raw, conflict if passed_over else None)


def is_on(name: str) -> bool:
    """Return a ``bool`` variable; False if its value is bad."""
    # A process reports a bad value at its start.
    try:
        return read(name).flag
    except GateError:
        return False


def asks_for(graphs: MoreGraphs) -> bool:
    """Whether `MORE_GRAPHS` names these graphs; False if its value is bad."""
    try:
        return graphs in read(MORE_GRAPHS).names
    except GateError:
        return False


def demands(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a switch is ``on``: no engine starts without the feature."""
    return (_present(name, os.environ if environ is None else environ) or "").strip().lower() in WORDS_TRUE


class Settings:
    """The values of one reading of the environment; a start passes them on.

    `values` has the default for a bad value, and `errors` says why it is bad.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = os.environ if environ is None else environ
        self.values: dict[str, GateValue] = {}
        self.errors: dict[str, GateError] = {}
        self.read(GATES)

    def read(self, gates: Iterable[Gate]) -> None:
        """Read further variables, once the features that declare them are known."""
        for gate in gates:
            try:
                self.values[gate.name] = read(gate, self.environ)
            except GateError as error:
                self.values[gate.name] = GateValue(gate, gate.default, error.source, error.raw)
                self.errors[gate.name] = error

    @property
    def process_errors(self) -> list[str]:
        """Why values of process-wide variables are bad; the plugin then does nothing. In strict mode also of parts."""
        wide = [gate.name for gate in GATES if not (gate.of_feature or (gate.of_part and not self.strict))]
        return [str(self.errors[name]) for name in wide if name in self.errors]

    @property
    def part_errors(self) -> list[str]:
        """Why the switches of parts have bad values; these parts are off."""
        bad = [gate for gate in GATES if gate.of_part and gate.name in self.errors]
        return [f"{self.errors[gate.name]} It counts as {'off' if gate.switches else 'not set'}" for gate in bad]

    def require_process(self) -> None:
        """Raise a GateError that lists the bad values of process-wide variables."""
        if self.process_errors:
            raise GateError("\n".join(self.process_errors))

    @property
    def gates(self) -> tuple[Gate, ...]:
        return tuple(value.gate for value in self.values.values())

    @property
    def switched_on(self) -> bool:
        """Whether the plugin does anything; the engine reports a bad value."""
        return self.values[PREFIX].flag

    @property
    def strict(self) -> bool:
        """Whether strict mode is on; a bad value counts as on."""
        return STRICT in self.errors or self.values[STRICT].flag

    @property
    def choices(self) -> dict[str, str]:
        """A feature's switch -> ``auto``, ``on`` or ``off``; ``auto`` if its value is bad."""
        of_features = {name: value for name, value in self.values.items() if value.gate.of_feature}
        return {name: "auto" if name in self.errors else value.choice for name, value in of_features.items()}

    @property
    def demanded(self) -> bool:
        """Whether strict mode or a feature's switch forbids an unpatched vLLM."""
        return self.strict or "on" in self.choices.values() or bool(self.unclaimed)

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Variables at ``on`` that can only be switches of missing features."""
        # Before the project's own catalogue is read, any variable may be the switch of a feature in it.
        prefix = CATALOGUE_PREFIX if len(self.values) > len(GATES) else f"{PREFIX}_"
        names = sorted(name for name in self.environ if name.startswith(prefix) and name not in self.values)
        return tuple(name for name in names if demands(name, self.environ))

    def unknown(self) -> tuple[str, ...]:
        """Return a line per mistyped or older variable, which changes nothing."""
        import difflib  # a third of this module's import time, and only a mistaken user needs it

        lines = []
        for name in sorted(self.environ):
            if not name.startswith(PREFIX) or name in self.values or name == FINGERPRINT or name in REPLACED:
                continue
            if name.startswith(CATALOGUE_PREFIX):
                hint = "; a catalogue of your own may have it: its folder must be in VLLM_HWPLUGIN_PATCHES"
            else:
                nearest = next(iter(difflib.get_close_matches(name, sorted(self.values), n=1)), None)
                hint = f"; did you mean {nearest}?" if nearest else ""
            lines.append(f"{name} is set, but it is not a variable of this release{hint}")
        older = ((name, instead) for name, instead in REPLACED.items() if _present(name, self.environ) is not None)
        return (*lines, *(f"{name} is set, but nothing reads it: {instead}" for name, instead in older))


def register_with_vllm(envs_module: Any, more: Iterable[Gate] = ()) -> None:
    """Enter the variables and their aliases in ``vllm.envs.environment_variables``.

    vLLM then does not call them unknown, and copies them to Ray workers. ``compile_factors()`` asks every entry of that
    table for its value, so variables that change compiled code are in the compile-cache key. Other entries answer with
    a constant: a cache folder that moves must not invalidate every compiled graph. Names that vLLM has stay vLLM's. All
    supported versions have the same table. `more`: switches that features declare.
    """
    table = envs_module.environment_variables
    for gate in (*GATES, *more):
        in_key = COMPILE_KEY in gate.affects
        table.setdefault(gate.name, _key_getter(gate) if in_key else _no_factor)
        for alias in gate.aliases:
            table.setdefault(alias.name, _no_factor)
    # Switches of features that this process has not read, because the plugin is off or they cannot be read; and what
    # the first process of an engine left, if this process is another engine's and has the plugin switched off.
    for name in os.environ:
        # VLLM_MUSA_ begins older names of features' switches.
        if name.startswith((f"{PREFIX}_", "VLLM_MUSA_")):
            table.setdefault(name, _no_factor)


def show(value: Value, kind: Kind = "list") -> str:
    """Return a value as users write it; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, str) else (os.pathsep if kind == "paths" else ",").join(value)


def _present(name: str, environ: Mapping[str, str]) -> str | None:
    raw = environ.get(name)
    return raw if raw is not None and raw.strip() else None


def _shown(raw: str) -> str:
    """Return a raw value as one line, cut at `_LONGEST`, for messages."""
    text = raw if raw.isprintable() else repr(raw)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(raw)} characters)"


def _source(way: Alias | None) -> str:
    return f"alias {way.name}" if way else "environment"


def _value(gate: Gate, way: Alias | None, raw: str) -> Value:
    """Parse a value set by own name (`way` None) or alias."""
    text = raw.strip() if way is None else way.mapping.get(raw.strip().lower())
    value = None if text is None else _parse(gate, text)
    if value is None:
        variable = gate.name if way is None else f"{way.name} (alias of {gate.name})"
        good = gate.good_values if way is None else ", ".join(way.mapping)
        message = f"{variable}={_shown(repr(raw))} is not one of the good values: {good}. ({gate.help})"
        raise GateError(message, _source(way), raw)
    return value


def _parse(gate: Gate, text: str) -> Value:
    """Return the parsed value, or None if it is bad."""
    if gate.kind == "path":
        return _path(text)
    if gate.kind == "paths":
        paths = [_path(part.strip()) for part in text.split(os.pathsep) if part.strip()]
        return None if None in paths else tuple(dict.fromkeys(filter(None, paths)))
    if gate.kind == "list":
        names = tuple(dict.fromkeys(name for name in (part.strip() for part in text.split(",")) if name))
        return None if gate.choices and not {*names} <= {*gate.choices} else names
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
    # A relative folder would differ in each process that changes its working directory.
    return str(path) if path.is_absolute() else None


def _disagrees(gate: Gate, way: Alias | None, raw: str, value: Value) -> bool:
    try:
        asked = _value(gate, way, raw)
    except GateError:
        return True
    # `on` and `auto` both ask for the feature; an alias has no word for the difference.
    asks = ("auto", "on")
    return asked != value and not (gate.kind == "switch" and asked in asks and value in asks)


def _key_getter(gate: Gate) -> Any:
    def value() -> str:
        try:
            return show(read(gate).value)
        except GateError as error:
            # vLLM would log its own warning and leave the variable out of the key. The plugin has already reported the
            # bad value, and two different bad values must not share compiled graphs with a good one.
            return str(error)

    return value


def _no_factor() -> None:
    return None
