# SPDX-License-Identifier: Apache-2.0
"""The `vllm-hwplugin` program: its commands, and how it reports a failure.

A command's module is imported only when the command runs: `drift` must work without vLLM and torch, and `--help` must
not wait for them.

Exit status: 0 (no problem), 1 (the command looked and something is wrong), 2 (it could not tell). Scripts act on 1, so
an unexpected error must never end with 1.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..base.errors import HwpluginError
from .parser import FAILURE, Command, Parser
from .text import printable

#: Commands of the workshop and the lab are named, not imported: the plugin needs neither package.
COMMANDS = {
    "doctor": Command("vllm_hwplugin.cli._doctor", "doctor", "Show what is patched in here, and why not."),
    "gates": Command("vllm_hwplugin.cli._gates", "gates", "List the environment variables and their values."),
    "patches": Command("vllm_hwplugin_workshop.cli.patches", "patches", "List, show, make, edit and check patches."),
    "drift": Command("vllm_hwplugin_workshop.cli.drift", "drift", "Check which patches fit which vLLM versions."),
    "demo": Command("vllm_hwplugin_lab.cli.demo", "run", "Compare unpatched and patched vLLM on tiny models.", "lab"),
    "bench": Command("vllm_hwplugin_lab.cli.bench", "run", "Benchmark unpatched and patched vLLM in turn.", "lab"),
    "probe": Command("vllm_hwplugin_lab.cli.probe", "run", "Check what attention backends declare.", "lab"),
}


def _parser() -> Parser:
    parser = Parser(
        "",
        "Exact, versioned source patches for vLLM's speculative decoding.\n\n"
        "Exit status of every command: 0: no problem; 1: something is wrong; 2: it could not tell.",
        ["doctor", "drift --help"],
        COMMANDS,
    )
    parser.add_argument("--version", action="version", version=__version__, help="Show the version and exit.")
    parser.add_argument("--traceback", action="store_true", help="Show the traceback of an error.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status.

    `main` handles an error of standard output (closed, or its disk full).
    """
    with_traceback = False
    try:
        parser = _parser()
        options, command = parser.choose(arguments)
        with_traceback = options.traceback
        if command is not None:
            return command()
        parser.print_help()
    except SystemExit as end:
        # argparse exits for --help, --version and arguments that it cannot read.
        return end.code if isinstance(end.code, int) else FAILURE
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:
        # The reader has seen enough.
        pass
    except Exception as error:
        _report(error, with_traceback)
    return FAILURE


def _report(error: Exception, with_traceback: bool) -> None:
    if with_traceback:
        traceback.print_exception(error)
    elif isinstance(error, HwpluginError):
        # Its message is complete, one line per problem.
        print("error: " + printable(str(error)), file=sys.stderr)
    elif isinstance(error, OSError):
        print("error: " + printable(str(error), keep=""), file=sys.stderr)
    else:
        message = printable(f"{type(error).__name__}: {error}", keep="")
        way_out = "`vllm-hwplugin --traceback COMMAND ...` shows where it arose"
        print(f"error: unexpected {message}; {way_out}", file=sys.stderr)


def _open_standard_streams() -> None:
    """Replace closed standard streams (`>&-`) with /dev/null."""
    # The caller still wants the exit status.
    # open() takes the lowest free descriptor: in this order each stream gets its own number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def main() -> NoReturn:
    """Run the program with the process's arguments, and end the process."""
    _open_standard_streams()
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        # A full disk shows only here. Python would flush again at exit, and change the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE and status != FAILURE:
            print(f"error: standard output cannot be written ({error.strerror})", file=sys.stderr)
        status = FAILURE
    sys.exit(status)
