# SPDX-License-Identifier: Apache-2.0
"""New processes of Python, forked from one that has imported the patch engine: they cost no start of an interpreter."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# What it imports is what each program imports first, and nothing of vLLM.
_SERVER = """
import atexit, io, json, os, sys, threading, traceback
from pathlib import Path
from vllm_hwplugin.patching import _catalogue, _runtime

OWN = os.environ["PYTHONPATH"].split(os.pathsep)
answers = os.dup(1)

def run(job):
    for number, path in enumerate((os.devnull, job["out"], job["err"])):
        os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
    os.environ.clear()
    os.environ.update(job["environ"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *(path for path in sys.path if path and path not in OWN)]
    try:
        exec(compile(job["code"], "<string>", "exec"), vars(sys.modules["__main__"]))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
    os.write(answers, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

_server: subprocess.Popen[str] | None = None


def _start(repository: Path, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env={**environ, "PYTHONPATH": str(repository)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def start(code: str, repository: Path, environ: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What ``python -c code`` does in this environment, which may hold no variable of Python but the path.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds; it has ended by now.
    """
    global _server
    if _server is None or _server.poll() is not None:
        _server = _start(repository, environ)
    assert _server.stdin is not None
    assert _server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        job = {"code": code, "environ": dict(environ), "out": out.name, "err": err.name}
        print(json.dumps(job), file=_server.stdin, flush=True)
        if not select.select([_server.stdout], [], [], timeout)[0]:
            _stop(_server)
            raise subprocess.TimeoutExpired(code, timeout, out.read(), err.read())
        status = int(_server.stdout.readline())
        return subprocess.CompletedProcess([sys.executable, "-c", code], status, out.read(), err.read())
