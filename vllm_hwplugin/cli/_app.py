# SPDX-License-Identifier: Apache-2.0
"""The `vllm-hwplugin` program: which commands there are, and how a failure is shown.

A command's module is imported only when that command runs: `drift` must work where neither vLLM nor torch is
installed, and `--help` should not wait for either.

Every command ends with 0 (as it should be), 1 (it looked, and something is wrong) or 2 (it could not tell). Scripts act
on 1, so nothing that went wrong on the way may end with it.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..errors import HwpluginError
from .parser import FAILURE, Command, Parser
from .text import printable

#: Those of the workshop and of the lab are named here and nowhere imported: the plugin needs neither.
COMMANDS = {
    "doctor": Command("vllm_hwplugin.cli._doctor", "doctor", "Show host, vLLM, gates, and what is live where."),
    "gates": Command("vllm_hwplugin.cli._gates", "gates", "List the environment variables and their values."),
    "patches": Command("vllm_hwplugin.cli._patches", "patches", "List the patches; show, make, edit and check them."),
    "drift": Command("vllm_hwplugin_workshop.cli.drift", "drift", "Check which patches fit which versions of vLLM."),
    "demo": Command("vllm_hwplugin_lab.cli.demo", "run", "Run vLLM on tiny checkpoints, stock and patched.", "lab"),
    "bench": Command("vllm_hwplugin_lab.cli.bench", "run", "Measure stock and patched vLLM in turn.", "lab"),
    "probe": Command("vllm_hwplugin_lab.cli.probe", "run", "Run what the attention backends declare.", "lab"),
}


def _parser() -> Parser:
    parser = Parser(
        "",
        "Exact, versioned source patches for vLLM's speculative decoding.\n\n"
        "Every command ends with 0: as it should be; 1: something is wrong; 2: it could not tell.",
        ["doctor", "drift --help"],
        COMMANDS,
    )
    parser.add_argument("--version", action="version", version=__version__, help="Show the version and exit.")
    parser.add_argument("--traceback", action="store_true", help="Show where an error arose, not only what it is.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; only a closed or full standard output is left to `main`."""
    with_traceback = False
    try:
        parser = _parser()
        options, command = parser.choose(arguments)
        with_traceback = options.traceback
        if command is not None:
            return command()
        parser.print_help()
    except SystemExit as end:
        # argparse's, of --help, --version and what it cannot read.
        return end.code if isinstance(end.code, int) else FAILURE
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:
        # The reader has seen enough.
        pass
    except Exception as error:
        _tell(error, with_traceback)
    return FAILURE


def _tell(error: Exception, with_traceback: bool) -> None:
    if with_traceback:
        traceback.print_exception(error)
    elif isinstance(error, HwpluginError):
        # Its message says all there is to say, in one line a fault; a traceback would only hide it.
        print("error: " + printable(str(error)), file=sys.stderr)
    elif isinstance(error, OSError):
        print("error: " + printable(str(error), keep=""), file=sys.stderr)
    else:
        what = printable(f"{type(error).__name__}: {error}", keep="")
        where = "`vllm-hwplugin --traceback COMMAND ...` shows where it arose"
        print(f"error: unexpected {what}; {where}", file=sys.stderr)


def _open_standard_streams() -> None:
    """Where one is closed (`>&-`) nobody reads, or there is nothing to read: the exit status is still asked for."""
    # In this order each gets the lowest number that is free, its own; else the next file that is opened would.
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
        # A full disk shows only now. Python would try once more at its end, and end with a status of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE and status != FAILURE:
            print(f"error: standard output cannot be written ({error.strerror})", file=sys.stderr)
        status = FAILURE
    sys.exit(status)
