# SPDX-License-Identifier: Apache-2.0
"""Processes on the simulated device that begin as forks of one process, which has imported what vLLM imports of others.

A start of vLLM takes seven seconds of a core, five of them for these imports. Nothing of vLLM, of the plugin or of the
device is among them: their imports depend on the environment.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import cpu_seconds

HERE = Path(__file__).parent
#: Some hosts lack some of them.
MODULES = (
    "torch._inductor.standalone_compile",
    "torch._inductor.kernel.flex",
    "transformers.models.auto.modeling_auto",
    "openai.types.responses",
    "fastapi",
    "aiohttp",
    "xgrammar",
    "opentelemetry.trace",
)


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Makes a process for each connection, and ends with the process that started it."""

    max_children = 1000

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != PARENT:
            raise SystemExit


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        if (child := os.fork()) == 0:
            become(**asked)
        _, status, usage = os.wait4(child, 0)
        self.wfile.write(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]).encode())


def become(command: list[str], environment: dict[str, str], log: str, seconds: float) -> None:
    """Run a module with its arguments as `python -m` would in this environment, and end the process."""
    signal.alarm(int(seconds))
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    before = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep) + [path for path in sys.path if path not in before]
    sys.argv = command
    status = 1
    try:
        import torch

        torch._import_device_backends()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@functools.cache
def address() -> str:
    """Start the process that the others are forks of, and return where it listens."""
    # A socket's path has at most 107 bytes, and tests may have a long TMPDIR.
    path = Path(tempfile.mkdtemp(dir="/tmp")) / "socket"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}
    # Triton looks for its backends when it is imported.
    environment["PYTHONPATH"] = os.pathsep.join((str(HERE / "host"), str(HERE.parents[1])))
    command = [sys.executable, "-m", __name__, str(path), str(os.getpid())]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert started.stdout is not None
    cpu_seconds.used_elsewhere.append(float(started.stdout.readline()))
    return str(path)


def run(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> int:
    """Run a module, and return its exit status.

    Args:
        command: the module's name and its arguments.
        log: for what it says.
        seconds: after which it is killed.
    """
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as stream:
        connection.connect(address())
        asked = {"command": command, "environment": dict(environment), "log": str(log), "seconds": seconds}
        stream.write(json.dumps(asked) + "\n")
        stream.flush()
        status, used = json.loads(stream.read())
    cpu_seconds.used_elsewhere.append(used)
    return status


if __name__ == "__main__":
    PARENT = int(sys.argv[2])
    for module in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    gc.freeze()
    with Server(sys.argv[1], Handler) as server:
        print(time.process_time(), flush=True)
        try:
            server.serve_forever()
        finally:
            shutil.rmtree(Path(sys.argv[1]).parent)
