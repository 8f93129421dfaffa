# SPDX-License-Identifier: Apache-2.0
"""Outputs of a command, and its option ``--json``.

``--json FILE`` writes a file and prints the report as usual. ``--json -`` prints only JSON on standard output, and the
report on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.cachedir import write_atomically
from ..base.errors import HwpluginError
from .text import table

STANDARD_OUTPUT = Path("-")


class OutputError(HwpluginError):
    """Results could not be written."""


def writable(text: str) -> Path:
    """Raise argparse.ArgumentTypeError unless an option's output file can be written."""
    # A benchmark must not lose its results at the end.
    file = Path(text)
    if file == STANDARD_OUTPUT or (file.exists() and not file.is_file() and not file.is_dir()):
        return file
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file")
    folder = file.parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{file}: folder {folder} does not exist; create it, or name another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{file}: folder {folder} is not writable; name another file")
    return file


def add_json(options: argparse.ArgumentParser | argparse._ArgumentGroup, **more: Any) -> None:
    """Give a command the option ``--json``."""
    text = "Write the results to this file; -: standard output."
    options.add_argument("--json", metavar="FILE", type=writable, help=text, **more)


def add_optional_json(options: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Give a command the option ``--json``, whose file defaults to standard output."""
    add_json(options, nargs="?", const=STANDARD_OUTPUT)


def as_objects(keys: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return table rows as JSON objects with these keys."""
    return [dict(zip(keys, row, strict=True)) for row in rows]


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, and tab-separated lines elsewhere."""
    if sys.stdout.isatty():
        print(table(columns, rows))
        return
    for row in (columns, *rows):
        print(*row, sep="\t")


def write_json(results: Mapping[str, Any], json_file: Path) -> None:
    """Write results atomically as JSON; raise OutputError if that fails."""
    # A CI runner takes `##[...]` in a step's output for a command.
    write_text(json.dumps(results, indent=1).replace("##[", "##\\u005b") + "\n", json_file)


def write_text(text: str, file: Path) -> None:
    """Write text atomically; raises as :func:`write_json`."""
    if file == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        if file.exists() and not file.is_file():
            # A pipe or a device cannot be replaced.
            file.write_text(text, encoding="utf-8")
        else:
            write_atomically(file.resolve(), text.encode(), durable=False, mode=_mode(file))
    except OSError as error:
        raise OutputError(f"{file}: cannot be written ({error.strerror}); name another file") from error


def _mode(file: Path) -> int:
    """Return the mode of the replaced file, or the user's default."""
    # Other users may read results.
    if file.exists():
        return stat.S_IMODE(file.stat().st_mode)
    # The umask can only be read by setting it.
    os.umask(mask := os.umask(0o077))
    return 0o666 & ~mask
