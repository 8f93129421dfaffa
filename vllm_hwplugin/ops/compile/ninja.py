# SPDX-License-Identifier: Apache-2.0
"""Run a plan's commands by ninja.

``torch.utils.cpp_extension`` is not used: it adds its own flags to the table's, wants Python's headers although a
library on the stable ABI needs none, and its lock outlives a killed process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...base.cachedir import write_atomically
from .plan import BuildPlan
from .spec import KernelUnavailable
from .toolchain import find_tool

logger = logging.getLogger("vllm.hwplugin")

#: The file next to a library that says what it was built with.
RECORD = "built.json"

_TAIL = 2000
#: Seconds for commands to end after SIGTERM.
_END: Final = 10.0
# A shell's status of a command that a signal ended, also clang's when its compiling process dies (254 on some
# releases); and LLVM's of a fatal error.
_DIED: Final = re.compile(r"^exit status (?:70|1[3-9]\d|12[89]|2\d\d)$", re.MULTILINE)


class _CompilerDied(KernelUnavailable):
    """The compiler ended by itself, not because of an error in the source."""


def build(plan: BuildPlan, folder: Path, environ: Mapping[str, str], limit: float | None = None) -> Path:
    """Build the library in ``folder``; write its record last.

    If the compiler crashes, it runs once more without the flags that only optimise.

    Args:
        folder: exists; no other process uses it meanwhile.
        environ: of the commands; its PATH is searched for ninja.
        limit: seconds that they may take.

    Raises:
        KernelUnavailable: ninja is missing, a command failed or took too long, or the sources cannot be ported.
        OSError: the folder cannot be written to.
    """
    begin = time.monotonic()
    try:
        return _build(plan, folder, environ, limit)
    except _CompilerDied as death:
        without = plan.without_optional_flags()
        if without == plan:
            raise
        logger.warning("%s. Building %s again without optional flags", death, plan.kernel.name)
        return _build(without, folder, environ, limit and max(0.0, limit - (time.monotonic() - begin)))


def _build(plan: BuildPlan, folder: Path, environ: Mapping[str, str], limit: float | None) -> Path:
    work = folder / "building"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    (work / "build.ninja").write_text(script(plan.ported(work / "ported")), encoding="utf-8")
    code, output = _run([find_ninja(environ), "-C", str(work)], environ, limit)
    if code != 0:
        # The folder stays, so that the commands can be run again by hand.
        happened = f"took more than {limit:g} s over" if code is None else "did not build"
        raise (_CompilerDied if code is not None and _DIED.search(output) else KernelUnavailable)(
            f"{plan.toolchain.path} {happened} {plan.kernel.name}; run `ninja -C {work}` to see it again; "
            f"the end of its output: {output[-_TAIL:].strip()}"
        )
    library = folder / plan.library
    with open(work / plan.library, "rb") as made:
        # Before the record, so that a power cut leaves no truncated library with a record.
        os.fsync(made.fileno())
    os.replace(work / plan.library, library)
    record = {**plan.record(), "size": library.stat().st_size}
    write_atomically(folder / RECORD, json.dumps(record, indent=1).encode())
    shutil.rmtree(work, ignore_errors=True)
    return library


def _run(command: list[str], environ: Mapping[str, str], limit: float | None) -> tuple[int | None, str]:
    """Return the exit status and output; None if all processes were stopped."""
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
        # Some releases of pip's ninja are a script that runs the program. The program stops its commands, which have
        # their own process groups.
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
    compiled = f"{plan.kernel.name}.o"
    # ninja does not tell how a command ended.
    command = '$words || { status=$$?; echo "exit status $$status"; exit $$status; }'
    lines = ["ninja_required_version = 1.5", "rule run", f"  command = {command}", ""]
    lines += _edge(compiled, str(plan.source), plan.compile_command(compiled))
    lines += _edge(plan.library, compiled, plan.link_command(compiled, plan.library))
    return "\n".join(lines) + "\n"


def _edge(output: str, needed: str, command: tuple[str, ...]) -> list[str]:
    path = needed.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
    return [f"build {output}: run {path}", f"  words = {shlex.join(command).replace('$', '$$')}", ""]


def find_ninja(environ: Mapping[str, str]) -> str:
    """Return ninja's path, or raise KernelUnavailable."""
    path = find_tool("ninja", environ)
    if path is None:
        raise KernelUnavailable("ninja is neither on PATH nor installed; run `pip install ninja`")
    return path
