# SPDX-License-Identifier: Apache-2.0
"""Where a command's results go: the option ``--json``, the same on every command that has it.

``--json FILE`` writes the file beside what is printed. ``--json -`` puts the JSON alone on standard output, and what is
for a reader on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..cachedir import write_atomically
from ..errors import HwpluginError
from .text import table

STANDARD_OUTPUT = Path("-")


class OutputError(HwpluginError):
    """Results could not be written."""


def writable(text: str) -> Path:
    """An option's file, looked at before the work begins: a benchmark should not lose its results at the end.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or its own folder is missing or not writable.
    """
    file = Path(text)
    if file == STANDARD_OUTPUT or (file.exists() and not file.is_file() and not file.is_dir()):
        return file
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file")
    folder = file.parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{file}: there is no folder {folder}; make it, or name another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{file}: the folder {folder} cannot be written to; name another file")
    return file


def add_json(options: argparse.ArgumentParser | argparse._ArgumentGroup, **more: Any) -> None:
    """Give a command the option ``--json``."""
    text = "Write the results there; -: standard output."
    options.add_argument("--json", metavar="FILE", type=writable, help=text, **more)


def add_optional_json(options: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Give a command that only lists the option ``--json``, whose default file is standard output."""
    add_json(options, nargs="?", const=STANDARD_OUTPUT)


def as_objects(keys: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return table rows as JSON objects with these keys."""
    return [dict(zip(keys, row, strict=True)) for row in rows]


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, and tab-separated lines under a header elsewhere: for grep, awk and cut."""
    if sys.stdout.isatty():
        print(table(columns, rows))
        return
    for row in (columns, *rows):
        print(*row, sep="\t")


def for_a_reader(json_file: Path | None) -> TextIO:
    """Where a command prints what is for a reader."""
    return sys.stderr if json_file == STANDARD_OUTPUT else sys.stdout


def write_json(results: Mapping[str, Any], json_file: Path) -> None:
    """Write results, so that the file holds the old ones or the new ones at any moment.

    Raises:
        OutputError: the file cannot be written; says why.
    """
    # A CI runner would take `##[...]` in what a step prints for a command.
    write_text(json.dumps(results, indent=1).replace("##[", "##\\u005b") + "\n", json_file)


def write_text(text: str, file: Path) -> None:
    """As :func:`write_json`, for any text."""
    if file == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        if file.exists() and not file.is_file():
            # A pipe or a device: there is nothing to replace.
            file.write_text(text, encoding="utf-8")
        else:
            write_atomically(file.resolve(), text.encode(), durable=False, mode=_mode(file))
    except OSError as error:
        raise OutputError(f"{file}: cannot be written ({error.strerror}); name another file") from error


def _mode(file: Path) -> int:
    """That of the file which is replaced, or of one that this user makes: results are for others, too."""
    if file.exists():
        return stat.S_IMODE(file.stat().st_mode)
    # There is no way to ask for it without setting it.
    os.umask(mask := os.umask(0o077))
    return 0o666 & ~mask
