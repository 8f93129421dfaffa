"""Many processes at once, children by spawn and fork, and a sudden death at any point of a cold start."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cpu_seconds import patience

from .madeup import EDITS, Project

USE = """
    import vllm.v1.alpha as alpha, vllm.v1.pack as pack
    assert (alpha.double(2), alpha.Runner().step(1), pack.name()) == (6, 11, "patched pack")
"""


def test_eight_processes_on_a_cold_cache_all_end_patched(patched: Project) -> None:
    # A gate in a file lets all of them reach the cache at the same moment.
    code = f"""
        import os, time
        while not os.path.exists({str(patched.folder / "go")!r}):
            time.sleep(0.001)
        record = install()
        assert record.live == ("made-up",), record
        """
    running = [
        subprocess.Popen(
            patched.command(code, USE),
            env=patched.environ(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    (patched.folder / "go").touch()
    for process in running:
        _, errors = process.communicate(timeout=patience(120))
        assert process.returncode == 0, errors
    assert len(list(patched.cache.glob("records/*.json"))) == 8
    assert len(list(patched.cache.glob("overlay/*/*.py"))) == len(EDITS)
    assert not list(patched.cache.rglob("*.tmp"))


# Kills the process just before its n-th call of anything that changes the file system.
KILLER = """
    import os, signal
    calls = iter(range(10_000))

    def deadly(name):
        real = getattr(os, name)
        def call(*args, **kwargs):
            reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not reads and next(calls) == {point}:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call

    for name in ("mkdir", "open", "write", "replace", "unlink"):
        setattr(os, name, deadly(name))
"""


@pytest.mark.slow
def test_a_kill_at_any_point_of_a_cold_start_leaves_a_working_state(patched: Project) -> None:
    killed = 0
    for point in range(200):
        cache = patched.folder / f"cache{point}"
        done = patched.start(KILLER.format(point=point), "install()", USE, VLLM_HWPLUGIN_CACHE_DIR=str(cache))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        patched.run("assert install().live", USE, VLLM_HWPLUGIN_CACHE_DIR=str(cache))
    else:
        pytest.fail("the start never ended by itself")
    # Folders, copies, byte code and the run record: each is made, written and renamed.
    assert killed >= 20


CHILD = """
import sys
from pathlib import Path

def install():
    from vllm_hwplugin.patching import _catalogue, _runtime
    return _runtime.install(catalogue=_catalogue.load_catalogue(Path(sys.argv[1])))

def work(queue, plugin):
    # vLLM loads its plugins in a spawned worker; a forked one inherits them.
    if plugin:
        install()
    import vllm.v1.alpha as alpha
    queue.put((alpha.double(2), alpha.__file__))

if __name__ == "__main__":
    import multiprocessing
    install()
    if sys.argv[3] == "early":
        import vllm.v1.alpha
    context = multiprocessing.get_context(sys.argv[2])
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue, sys.argv[2] == "spawn"), name="VllmWorker-0")
    child.start()
    value, file = queue.get()
    child.join()
    assert child.exitcode == 0 and value == 6, (child.exitcode, value)
    print(child.pid, file)
"""


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_worker_processes_are_patched_and_have_records(patched: Project, method: str, when: str) -> None:
    script = patched.folder / "main.py"
    script.write_text(CHILD)
    python = patched.command("")[0]
    done = subprocess.run(
        [python, str(script), str(patched.patches), method, when],
        env=patched.environ(),
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stderr
    pid, file = done.stdout.split()
    assert Path(file).is_relative_to(patched.cache)
    records = {entry["pid"]: entry for entry in map(read, patched.cache.glob("records/*.json"))}
    worker = records.pop(int(pid))
    (parent,) = records.values()
    assert (worker["role"], parent["role"], worker["ppid"]) == ("worker", "parent", parent["pid"])
    assert worker["features"] == parent["features"]
    assert worker["fingerprint"] == parent["fingerprint"]
    assert worker["modules"]["vllm.v1.alpha"] == "served"
    assert parent["modules"]["vllm.v1.alpha"] == ("served" if when == "early" else "pending")


def read(path: Path) -> dict[str, object]:
    entry: dict[str, object] = json.loads(path.read_text())
    return entry
