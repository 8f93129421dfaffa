# SPDX-License-Identifier: Apache-2.0
"""Which tests notice that a line is wrong: ``python -m tests.mutants [FILE ...]``.

Each file beside this one lists mutants of one room: one edit of the source, and the tests that have to fail with it.
They run in a copy of the tree, each in a fork of a process that has imported torch and vLLM already. The command ends
with 1 where tests pass with a mutant, fail without one, or where the text to be edited does not stand exactly once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).resolve().parent
TREE = HERE.parent.parent
#: Seconds for the tests of one mutant; a mutant that makes them wait longer is noticed, too.
LIMIT = 300


def _preload() -> None:
    # Nothing of the plugin's: a fork would run what its parent has imported, not the edited file.
    os.environ["VLLM_PLUGINS"] = ""
    import torch  # noqa: F401
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    del os.environ["VLLM_PLUGINS"]
    assert not [name for name in sys.modules if name.startswith("vllm_hwplugin")]


def _noticed(tree: Path, tests: list[str]) -> tuple[bool, str]:
    """Whether one of ``tests`` fails in ``tree``, and the line that says so."""
    report = tree / "mutant.log"
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != TREE)]
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests]
        try:
            status = int(pytest.main(options))
        except BaseException:
            status = 99
        os._exit(status)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.1)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True, f"more than {LIMIT} s"
    lines = report.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if not failed and not any(" passed" in line for line in lines[-3:]):
        return True, f"no test passed: {lines[-1] if lines else 'no output'}"
    return bool(failed), failed[0] if failed else lines[-1]


def _wrong(tree: Path, mutants: list[dict[str, Any]]) -> int:
    passed_before: dict[tuple[str, ...], str | None] = {}
    wrong = 0
    for mutant in mutants:
        tests = tuple(mutant["tests"])
        if tests not in passed_before:
            failed, line = _noticed(tree, list(tests))
            passed_before[tests] = line if failed else None
        file = tree / mutant["file"]
        text = file.read_text() if file.exists() else ""
        count = text.count(mutant["old"])
        if count != 1:
            found, line = False, f"its text stands {count} times in the file, not once"
        elif passed_before[tests] is not None:
            found, line = False, f"without it: {passed_before[tests]}"
        else:
            file.write_text(text.replace(mutant["old"], mutant["new"]))
            try:
                found, line = _noticed(tree, list(tests))
            finally:
                file.write_text(text)
        wrong += not found
        at = text[: text.find(mutant["old"])].count("\n") + 1
        print(f"{'noticed' if found else 'NOT NOTICED'}  {mutant['file']}:{at}  {line}", flush=True)
    return wrong


def main(names: list[str]) -> int:
    files = [Path(name).resolve() for name in names] or sorted(HERE.glob("*.toml"))
    mutants = [mutant for file in files for mutant in tomllib.loads(file.read_text())["mutant"]]
    _preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=TREE, capture_output=True, check=True
        ).stdout
        for name in filter(None, tracked.decode().split("\0")):
            if (TREE / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TREE / name, tree / name)
        wrong = _wrong(tree, mutants)
    print(f"{len(mutants) - wrong} of {len(mutants)} mutants noticed")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
