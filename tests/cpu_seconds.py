# SPDX-License-Identifier: Apache-2.0
"""What the tests take of the processor, children included: on a shared host it says more of them than the time does.

Those that `make test` runs have a budget, and so have all. What takes more is named. In CI it is a failure to take more
than a slow hour of a host explains. What one test takes beyond its part fails nothing: the first of a file pays for
what all have in common.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

_CPUINFO = Path("/proc/cpuinfo")
# Without AVX-512, vLLM has slower kernels for the CPU.
_FAST = _CPUINFO.exists() and "avx512f" in _CPUINFO.read_text()
BUDGETS = {"make test": 2 * 60 * (8 if _FAST else 10), "all": 2700 if _FAST else 4800}
#: Times a budget. The same tests took 2,895 and 3,608 seconds on hosts where the loop below was as fast: it does not
#: see how long a core waits for memory that it shares.
_MOST = 1.5
#: Of the loop in `slowness`, on the processor that the budgets were set on, while tests ran on each of its cores.
_LOOP = 0.0042
#: Of a test that is neither marked `smoke` nor `slow`.
BUDGET_OF_ONE = 6.0


def slowness() -> float:
    """How many times longer Python takes here and now than where the budgets were set."""
    taken = []
    for _ in range(3):
        started = time.process_time()
        sum(number * number for number in range(100_000))
        taken.append(time.process_time() - started)
    return min(taken) / _LOOP


def patience(seconds: float) -> float:
    """Return a limit for a wait that ends within `seconds` on a fast and idle host."""
    waiting_for_a_core = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * max(1.0, slowness()) * max(1.0, waiting_for_a_core)


def wait_until(met: Callable[[], bool], seconds: float, *, unless: Callable[[], bool] = lambda: False) -> bool:
    """Return whether `met()` comes true within the `patience` for `seconds`; stop waiting once `unless()` is true."""
    started = time.monotonic()
    while not met():
        waited = time.monotonic() - started
        if unless() or (waited > seconds and waited > patience(seconds)):
            return met()
        time.sleep(0.02)
    return True


#: Of processes that are no children of this one.
used_elsewhere: list[float] = []


def _cpu_seconds() -> float:
    return sum(os.times()[:4]) + sum(used_elsewhere)


class Clock:
    """Puts `cpu_seconds` into the reports of the process that runs a test. xdist hands them on."""

    def __init__(self) -> None:
        self._before = _cpu_seconds()

    def pytest_runtest_logstart(self) -> None:
        self._before = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        now = _cpu_seconds()
        report.cpu_seconds, self._before = now - self._before, now
        return report


class Budget:
    """Sums them up in the process that a user has started. Where others run the tests, it shows how far they are."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._of = dict.fromkeys(BUDGETS, 0.0)
        # While tests run, because processes that share a core are slower than one alone.
        self._slowness: list[float] = []
        self._each = Counter[str]()
        self._ended = 0
        self._started = time.monotonic()
        self._quiet = bool(config.getoption("numprocesses", None)) and config.get_verbosity() <= 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        # In place of some thousand dots. What was skipped is listed at the end.
        if self._quiet and (report.skipped or (report.passed and report.when == "call")):
            return report.outcome, "", ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        taken: Any = getattr(report, "cpu_seconds", 0.0)
        self._of["all"] += taken
        if "slow" not in report.keywords:
            self._of["make test"] += taken
            if "smoke" not in report.keywords:
                self._each[report.nodeid] += taken
        if report.when == "teardown":
            self._ended += 1
            tenths = [ended * 10 // self._session.testscollected for ended in (self._ended - 1, self._ended)]
            passed = time.monotonic() - self._started
            # By the minute: most of the time goes to few tests.
            if passed >= 60 * len(self._slowness):
                self._slowness.append(slowness())
            if self._quiet and tenths[0] < tenths[1]:
                minutes, seconds = divmod(int(passed), 60)
                terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
                terminal.write_line(f"{tenths[1] * 10:3} % of the tests after {minutes}:{seconds:02}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (
            self._over(self._of, {name: _MOST * seconds for name, seconds in BUDGETS.items()})
            and os.environ.get("CI", "").lower() in ("1", "true")
            and session.exitstatus == 0
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        times = self._times()
        sums = [f"{name} {taken:.0f} of {BUDGETS[name] * times:.0f}" for name, taken in self._of.items()]
        terminalreporter.write_line(f"CPU seconds: {', '.join(sums)}; a second of the budgets is {times:.2f} here")
        most_expensive = dict(self._each.most_common(5))
        each = dict.fromkeys(most_expensive, BUDGET_OF_ONE)
        for line in (*self._over(self._of, BUDGETS), *self._over(most_expensive, each)):
            terminalreporter.write_line(line, red=True)

    def _times(self) -> float:
        return max(1.0, statistics.median(self._slowness or [1.0]))

    def _over(self, taken: Mapping[str, float], most: Mapping[str, float]) -> list[str]:
        return [
            f"more than {most[name] * self._times():.0f} CPU seconds: {name}, {seconds:.0f}"
            for name, seconds in taken.items()
            if seconds > most[name] * self._times()
        ]
