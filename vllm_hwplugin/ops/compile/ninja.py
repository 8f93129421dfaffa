# SPDX-License-Identifier: Apache-2.0
"""Run a plan's commands by ninja.

``torch.utils.cpp_extension`` does not serve: it adds flags of its own to those of the table, wants Python's headers
although a library on the stable ABI needs none, and its lock outlives a process that is killed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...cachedir import write_atomically
from .plan import BuildPlan
from .spec import KernelUnavailable
from .toolchain import find_tool

#: The file beside a library that says what it was built with.
RECORD = "built.json"

_TAIL = 2000
#: Seconds for commands to end once they are told to.
_END: Final = 10.0


def build(plan: BuildPlan, folder: Path, environ: Mapping[str, str], limit: float | None = None) -> Path:
    """Build the library in ``folder``, and write its record last, so that a record stands for a whole library.

    Args:
        folder: exists and is used by this process alone, for the time being.
        environ: of the commands; PATH is read there too.
        limit: seconds that they may take.

    Raises:
        KernelUnavailable: ninja is missing, a command failed or took too long, or the sources cannot be ported to this
            compiler.
        OSError: the folder cannot be written to.
    """
    work = folder / "building"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    (work / "build.ninja").write_text(script(plan.ported(work / "ported")), encoding="utf-8")
    code, output = _run([find_ninja(environ), "-C", str(work)], environ, limit)
    if code != 0:
        # The folder is left as it is: the commands can be run again by hand.
        happened = f"took more than {limit:g} s over" if code is None else "did not build"
        raise KernelUnavailable(
            f"{plan.toolchain.path} {happened} {plan.kernel.name}; run `ninja -C {work}` to see it again; "
            f"the end of its output: {output[-_TAIL:].strip()}"
        )
    library = folder / plan.library
    with open(work / plan.library, "rb") as made:
        # Before the record, so that a power cut leaves no half of it behind a record.
        os.fsync(made.fileno())
    os.replace(work / plan.library, library)
    record = {**plan.record(), "size": library.stat().st_size}
    write_atomically(folder / RECORD, json.dumps(record, indent=1).encode())
    shutil.rmtree(work, ignore_errors=True)
    return library


def _run(command: list[str], environ: Mapping[str, str], limit: float | None) -> tuple[int | None, str]:
    """The exit status, None where it had to be ended with all that it started, and what it said."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException as error:
        # Some releases of pip's ninja are a script that runs the program. That ends its commands, which have process
        # groups of their own.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=_END)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = ""
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, output
    return process.returncode, output


def script(plan: BuildPlan) -> str:
    """The text of ``build.ninja``: an edge for the source, and one for the library."""
    compiled = f"{plan.kernel.name}.o"
    lines = ["ninja_required_version = 1.5", "rule run", "  command = $words", ""]
    lines += _edge(compiled, str(plan.source), plan.compile_command(compiled))
    lines += _edge(plan.library, compiled, plan.link_command(compiled, plan.library))
    return "\n".join(lines) + "\n"


def _edge(output: str, needed: str, command: tuple[str, ...]) -> list[str]:
    path = needed.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
    return [f"build {output}: run {path}", f"  words = {shlex.join(command).replace('$', '$$')}", ""]


def find_ninja(environ: Mapping[str, str]) -> str:
    """The program.

    Raises:
        KernelUnavailable: it is not there.
    """
    found = find_tool("ninja", environ)
    if found is None:
        raise KernelUnavailable("ninja is neither on PATH nor installed; run `pip install ninja`")
    return found
