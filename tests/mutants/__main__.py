# SPDX-License-Identifier: Apache-2.0
"""Check that tests fail with a wrong line: ``python -m tests.mutants [FILE ...]``.

Each TOML file here lists the mutants of one package: an edit of the source, and the tests that have to fail with it.
FILE is such a file, or a source file, for all that edit its folder; without one, all mutants run. As many run at a
time as there are cores, each in a copy of the tree and in a fork of a process that has imported torch and vLLM.

A mutant is noticed if a test fails with it. A test that ends with an error, of a fixture or of its collection, notices
nothing: it would end so with most edits.

The exit status is 1 if a mutant is not noticed, if tests end with an error or do not pass without a mutant, or if the
text to edit is not there exactly once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import tomllib

from tests.cpu_seconds import patience

HERE = Path(__file__).resolve().parent
TREE = HERE.parent.parent
#: A copy of the file that is edited.
KEPT = "mutant.orig"
#: Seconds of one test on a fast and idle host. A mutant that makes it wait longer is noticed.
LIMIT = 300


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self) -> str:
        """Return file and line of the edit, or raise ValueError if its text is not there exactly once."""
        before, *after = (TREE / self.file).read_text().split(self.old) if (TREE / self.file).exists() else [""]
        line = before.count("\n") + 1
        if len(after) != 1:
            raise ValueError(f"{self.file}  {self.old.strip()!r} is there {len(after)} times, not once")
        return f"{self.file}:{line}"


class Run(NamedTuple):
    """Tests with an edit, or without one."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None
    place: str = ""


def _preload() -> None:
    # No module of the plugin: a fork would run what its parent has imported, not the edited file.
    os.environ["VLLM_PLUGINS"] = ""
    import torch  # noqa: F401
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    del os.environ["VLLM_PLUGINS"]
    assert not [name for name in sys.modules if name.startswith("vllm_hwplugin")]


def _copy(tree: Path) -> None:
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=TREE, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (TREE / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, tree / name)


def _start(tree: Path, run: Run) -> int:
    if run.mutant is not None:
        _, old, new, _ = run.mutant
        file, kept = tree / run.mutant.file, tree / KEPT
        shutil.copy2(file, kept)
        file.write_text(kept.read_text().replace(old, new))
    child = os.fork()
    if child:
        return child
    output = os.open(tree / "mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != TREE)]
    import pytest

    options = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--tb=line",
        f"--timeout={patience(LIMIT)}",
        *run.tests,
    ]
    try:
        status = int(pytest.main(options))
    except BaseException:
        status = 99
    os._exit(status)


def _end(tree: Path, run: Run) -> tuple[str, str]:
    """Return `passed`, `failed` or `error`, and the line that says so; undo the edit."""
    if run.mutant is not None:
        shutil.move(tree / KEPT, tree / run.mutant.file)
    lines = (tree / "mutant.log").read_text(errors="replace").splitlines() or ["no output"]
    for outcome in ("failed", "error"):
        if told := [line for line in lines if line.startswith(outcome.upper())]:
            return outcome, told[0]
    if not any(" passed" in line for line in lines[-3:]):
        return "error", f"no test passed: {lines[-1]}"
    return "passed", lines[-1]


def _results(trees: Sequence[Path], runs: Sequence[Run]) -> Iterator[tuple[Run, str, str]]:
    free, waiting, running = list(trees), list(runs), dict[int, tuple[Path, Run]]()
    while waiting or running:
        while waiting and free:
            tree, run = free.pop(), waiting.pop(0)
            running[_start(tree, run)] = tree, run
        tree, run = running.pop(os.wait()[0])
        free.append(tree)
        yield run, *_end(tree, run)


def mutants_of(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of the named TOML files, and of those that edit the folder of a named source file."""
    named = {path if path.suffix == ".toml" else path.parent for path in (Path(name).resolve() for name in names)}
    found = []
    for listing in sorted({*HERE.glob("*.toml"), *(path for path in named if path.suffix == ".toml")}):
        listed = tomllib.loads(listing.read_text())["mutant"]
        mutants = [Mutant(one["file"], one["old"], one["new"], tuple(one["tests"])) for one in listed]
        if not names or not named.isdisjoint({listing, *((TREE / mutant.file).parent for mutant in mutants)}):
            found += mutants
    return found


def main(names: Sequence[str]) -> int:
    mutants, runs, wrong = mutants_of(names), [], 0
    for mutant in mutants:
        try:
            runs.append(Run(mutant.tests, mutant, mutant.place()))
        except ValueError as error:
            wrong += 1
            print(f"NOT NOTICED  {error}", flush=True)
    if runs:
        _preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(min(len(os.sched_getaffinity(0)), len(runs)))]
        for tree in trees:
            _copy(tree)
        failing = set()
        for run, outcome, line in _results(trees, [Run(tests) for tests in dict.fromkeys(run.tests for run in runs)]):
            if outcome != "passed":
                failing.add(run.tests)
                print(f"without a mutant: {line}", flush=True)
        for run, outcome, line in _results(trees, runs):
            noticed = outcome == "failed" and run.tests not in failing
            wrong += not noticed
            told = "noticed" if noticed else "ERROR" if outcome == "error" else "NOT NOTICED"
            print(f"{told}  {run.place}  {line}", flush=True)
    print(f"{len(mutants) - wrong} of {len(mutants)} mutants noticed")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
