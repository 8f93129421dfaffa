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
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ...cachedir import write_atomically
from .plan import BuildPlan
from .spec import KernelUnavailable
from .toolchain import find_tool

#: The file beside a library that says what it was built with.
RECORD = "built.json"

_TAIL = 2000


def build(plan: BuildPlan, folder: Path, environ: Mapping[str, str]) -> Path:
    """Build the library in ``folder``, and write its record last, so that a record stands for a whole library.

    Args:
        folder: exists and is used by this process alone, for the time being.
        environ: of the commands; ``MAX_JOBS`` and PATH are read there too.

    Raises:
        KernelUnavailable: ninja is missing, a command failed, or the sources cannot be ported to this compiler.
        OSError: the folder cannot be written to.
    """
    work = folder / "building"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    (work / "build.ninja").write_text(script(plan.ported(work / "ported")), encoding="utf-8")
    command = [find_ninja(environ), "-C", str(work), *_jobs(environ)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        env=environ,
    )
    if done.returncode != 0:
        # The folder is left as it is: the commands can be run again by hand.
        raise KernelUnavailable(
            f"{plan.toolchain.path} did not build {plan.kernel.name}; run `ninja -C {work}` to see it again; "
            f"the end of its output: {done.stdout[-_TAIL:].strip()}"
        )
    library = folder / plan.library
    os.replace(work / plan.library, library)
    write_atomically(folder / RECORD, json.dumps(plan.record(), indent=1).encode())
    shutil.rmtree(work, ignore_errors=True)
    return library


def script(plan: BuildPlan) -> str:
    """The text of ``build.ninja``: an edge for each source, and one for the library."""
    lines = ["ninja_required_version = 1.5", "rule run", "  command = $words", ""]
    objects = []
    for source in plan.kernel.sources:
        name = f"{Path(source).stem}.o"
        objects.append(name)
        lines += _edge(name, [str(plan.source(source))], plan.compile_command(source, name))
    lines += _edge(plan.library, objects, plan.link_command(objects, plan.library))
    return "\n".join(lines) + "\n"


def _edge(output: str, inputs: list[str], command: tuple[str, ...]) -> list[str]:
    paths = " ".join(text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:") for text in inputs)
    return [f"build {output}: run {paths}", f"  words = {shlex.join(command).replace('$', '$$')}", ""]


def _jobs(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = environ.get("MAX_JOBS", "").strip()
    if not text:
        return ()
    if not text.isdecimal() or int(text) == 0:
        raise KernelUnavailable(f"MAX_JOBS is {text!r}; expected a positive number")
    return "-j", text


def find_ninja(environ: Mapping[str, str]) -> str:
    """The program.

    Raises:
        KernelUnavailable: it is not there.
    """
    found = find_tool("ninja", environ)
    if found is None:
        raise KernelUnavailable("ninja is neither on PATH nor installed; run `pip install ninja`")
    return found
