# SPDX-License-Identifier: Apache-2.0
"""The table of the gates, but for those of features, which their `patch.toml` declares.

The records are named tuples, which take a fifth of the time of a frozen dataclass to define, and no annotation is a
text, because a named tuple compiles each of them: every vLLM process reads this before anything else of the plugin.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from ..errors import HwpluginError

Kind = Literal["switch", "bool", "path", "paths", "list", "choice"]
Value = bool | str | tuple[str, ...] | None

PREFIX: Final = "VLLM_HWPLUGIN"

# Of the gates that catalogues from outside bring with them; no gate of the table begins so.
CATALOGUE_PREFIX: Final = "VLLM_HWPLUGIN_PATCH_"

# The fingerprint of the patch set: a computed value in vLLM's table, and in the environment that the first process of
# an engine leaves to its children. It is not something to set.
FINGERPRINT: Final = "VLLM_HWPLUGIN_FINGERPRINT"

STRICT: Final = "VLLM_HWPLUGIN_STRICT"
COMPILE_KEY: Final = "compile key"

WORDS_TRUE: Final = ("1", "true", "yes", "on")
WORDS_FALSE: Final = ("0", "false", "no", "off")


class GateError(HwpluginError, ValueError):
    """A variable holds a value that its gate does not know. The message names it and lists the good values.

    Attributes:
        source: see :class:`GateValue`.
        raw: the value.
    """

    def __init__(self, message: str, source: str = "", raw: str = "") -> None:
        super().__init__(message)
        self.source, self.raw = source, raw


class Alias(NamedTuple):
    """Another name under which a gate may be set, with its own spelling of the values.

    ``mapping`` takes the lower-cased raw text to a text that the gate itself accepts, so an inverted variable
    (``DISABLE_X=1``) is only a different mapping.
    """

    name: str
    mapping: Mapping[str, str]


class Gate(NamedTuple):
    """One variable; ``since`` is the first release in which it has an effect."""

    name: str
    kind: Kind
    default: Value
    help: str
    aliases: tuple[Alias, ...] = ()
    affects: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    since: str = "0.1.0"

    @property
    def switches(self) -> bool:
        """Whether it can switch a feature: it has the value `off`, and others with which the feature may be live."""
        return self.kind == "switch" or (self.kind == "choice" and "patches" in self.affects)

    @property
    def good_values(self) -> str:
        """The accepted values, as a reader should see them in an error or in the documentation."""
        if self.kind == "bool":
            return "1, 0 (or true/false, yes/no, on/off)"
        if self.kind == "path":
            return "an absolute path"
        if self.kind == "paths":
            return f"absolute paths separated by {os.pathsep!r}"
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
        assert isinstance(self.value, bool), self.gate.name
        return self.value

    @property
    def text(self) -> str:
        """The value of a ``switch`` or ``choice`` gate."""
        assert isinstance(self.value, str), self.gate.name
        return self.value

    @property
    def choice(self) -> str:
        """What a gate says of the feature that it switches: ``auto``, ``on`` or ``off``; a mode of it is ``auto``."""
        return self.text if self.text in _SWITCH else "auto"

    @property
    def path(self) -> Path | None:
        """The value of a ``path`` gate; None when it is not set and has no default."""
        assert isinstance(self.value, str | None), self.gate.name
        return None if self.value is None else Path(self.value)

    @property
    def names(self) -> tuple[str, ...]:
        """The value of a ``list`` or ``paths`` gate."""
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
        "Stop the process with an error where the plugin would otherwise fall back to stock vLLM.",
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
        "Folder for patched copies, kernels, journals and the drift check's sources. Default: the user's cache.",
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
        "The plugin's FLASH_ATTN for heads above 256 on CUDA: where it is faster or alone, wherever it fits, or never.",
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
        "Operations that keep vLLM's own kernel whatever VLLM_HWPLUGIN_OPS says, such as topk_softmax.",
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
        "VLLM_HWPLUGIN_CAPTURE_SIZES",
        "choice",
        "mixed",
        "Feature capture-sizes: decode batches of up to 2048 tokens have CUDA graphs where the user names no size "
        "(decode); on Model Runner V2 batches with prompts, too, where a measurement at the start says that they gain "
        "(mixed).",
        affects=("patches",),
        choices=("off", "decode", "mixed"),
        since="0.2.0",
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
    """The switch of a feature, as its `patch.toml` declares it.

    Args:
        catalogue: the one from outside that brings it; empty for the project's own.
        compile_key: whether what vLLM compiles may differ with it.
        aliases: older variables that turn the feature on or off.

    Raises:
        GateError: the name is no name of a variable, or one that is not the catalogue's to give; or the default is no
            value of a switch.
    """
    own = f"{catalogue.upper().replace('-', '_')}_"
    letters = name.replace("_", "")
    well_formed = name[:1].isalpha() and letters.isascii() and letters.isalnum() and letters.isupper()
    # Others may have a meaning: HOME, LD_PRELOAD, and the variables of vLLM and of the plugin.
    named = name.startswith(CATALOGUE_PREFIX) or (name.startswith(own) and not name.startswith("VLLM"))
    if not catalogue:
        own = f"{PREFIX}_"
        named = name.startswith(own) and name not in BY_NAME and not name.startswith(CATALOGUE_PREFIX)
    if not well_formed or not named:
        whose = f"the catalogue {catalogue}" if catalogue else "a feature of the plugin"
        beginnings = f"{CATALOGUE_PREFIX} or {own}" if catalogue else own
        raise GateError(
            f"{name!r} is no name for a gate of {whose}; expected capitals, digits and `_`, and at its beginning "
            f"{beginnings}"
        )
    if default not in _SWITCH:
        raise GateError(f"default is {default!r}, expected {', '.join(_SWITCH)}")
    older = tuple(Alias(alias, _AUTO_OR_OFF) for alias in aliases)
    affects = ("patches", COMPILE_KEY) if compile_key else ("patches",)
    return Gate(name, "switch", default, help_, older, affects, _SWITCH, since)
