# SPDX-License-Identifier: Apache-2.0
"""The members of remote wheels that were read before, kept in the user's cache folder.

One folder a wheel file name: `members.json` (what the wheel's directory says of each Python file: size and CRC-32) and
the members that were read, under their own paths. A kept member counts only while it agrees with its CRC, so a torn or
altered file is fetched again. These texts are compared with patches and never run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_hwplugin.cachedir import UntrustedFolder, places, private_folder, temporary_folder, write_atomically

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Member:
    """What a wheel's directory says of one file."""

    size: int
    crc: int


class WheelCache:
    """The kept part of one remote wheel.

    A cache that cannot be written costs a second download, not the answer: `trouble` then says why nothing was kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.trouble: str | None = None

    def members(self, digest: str | None) -> dict[str, Member] | None:
        """The wheel's directory as kept; None where nothing usable is kept.

        Args:
            digest: SHA-256 that the index states for the wheel. A directory of another wheel with the same name (two
                indexes, or one that replaced a file) is not used. None accepts what is there.
        """
        try:
            kept = json.loads((self._folder / "members.json").read_text(encoding="utf-8"))
            if kept["format"] != _FORMAT or (digest is not None and kept["sha256"] != digest):
                return None
            return {name: Member(size=size, crc=crc) for name, (size, crc) in kept["members"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep_members(self, members: Mapping[str, Member], digest: str | None) -> None:
        table = {name: [member.size, member.crc] for name, member in sorted(members.items())}
        record = {"format": _FORMAT, "sha256": digest, "members": table}
        self._write("members.json", json.dumps(record).encode())

    def get(self, name: str, member: Member) -> bytes | None:
        """The bytes of a member, or None unless they are exactly what the wheel holds."""
        try:
            data = self._place(name).read_bytes()
        except OSError:
            return None
        return data if len(data) == member.size and zlib.crc32(data) == member.crc else None

    def keep(self, name: str, data: bytes) -> None:
        self._write("files/" + name, data)

    def _place(self, name: str) -> Path:
        return self._folder.joinpath("files", *PurePosixPath(name).parts)

    def _write(self, name: str, data: bytes) -> None:
        target = self._folder.joinpath(*PurePosixPath(name).parts)
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(target, data)
        except OSError as error:
            self.trouble = f"{self._folder}: downloads are not kept ({error.strerror or error})"


def sources_folder() -> Path:
    """Where read members are kept: the first place of the cache that is this user's own, else a temporary folder.

    Raises:
        GateError: the gate that names the cache folder has a bad value.
        UntrustedFolder, OSError: not even a temporary folder can be had.
    """
    for place in places():
        try:
            return private_folder(place) / "sources"
        except (UntrustedFolder, OSError):
            continue
    return temporary_folder() / "sources"


def safe_member(name: str) -> bool:
    """Whether a member may be kept under its own name: relative, and inside the wheel's folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
