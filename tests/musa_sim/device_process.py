# SPDX-License-Identifier: Apache-2.0
"""Tests that run where the simulated device is: one child process takes them in turn.

The device becomes torch's accelerator for the whole process, so it cannot be in the process of the other tests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.cpu_seconds import patience


class DeviceProcess:
    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.musa_sim.device_process"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([module, name, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process of the simulated device has ended with {self._process.wait()}"
        assert (error := json.loads(answer)) is None, error

    def close(self) -> None:
        self._process.communicate(timeout=patience(60))


def on_the_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in the fixture ``device``'s process; parameters have to be JSON."""

    @functools.wraps(test)
    def run(device: DeviceProcess, **arguments: Any) -> None:
        device.run(f"tests.musa_sim.{test.__module__.rpartition('.')[2]}", test.__name__, arguments)

    parameters = inspect.signature(test).parameters.values()
    fixture = inspect.Parameter("device", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([fixture, *parameters])  # type: ignore[attr-defined]
    return run


def serve() -> None:
    answers = sys.stdout
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        error = None
        try:
            # Standard output is for answers.
            with contextlib.redirect_stdout(sys.stderr):
                getattr(importlib.import_module(module), name).__wrapped__(**arguments)
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    serve()
