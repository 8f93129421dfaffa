"""The host's time by phase, on classes that lie where vLLM's do; a real engine is looked at in tests/e2e."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from types import ModuleType

import pytest

from vllm_hwplugin_lab.bench._phases import Phases, timed
from vllm_hwplugin_lab.bench.table import Phase, phases_of

SOURCE = """
import dataclasses, threading, time
from concurrent.futures import Future

@dataclasses.dataclass(frozen=True)
class Facts:
    size: int = 1

    def doubled(self):
        return 2 * self.size

class Scheduler:
    def schedule(self):
        time.sleep(0.002)

def read():
    time.sleep(0.0005)

class Base:
    def gather(self):
        read()
        time.sleep(0.0005)

class Helper(Base):
    pass

class Runner:
    def __init__(self):
        self.drafter = None
        self.facts = Facts()
        self.helper = Helper()
        self.drafts = 0

    def execute_model(self):
        for _ in range(2):
            self.helper.gather()
        self._sample()

    def _sample(self):
        time.sleep(0.003)

    @staticmethod
    def plain():
        pass

class Output(Future):
    # Made anew in each step, and read when somebody waits for it.
    def result(self, timeout=None):
        time.sleep(0.001)
        self.set_result("tokens")
        return super().result(timeout)

class Worker:
    def __init__(self, runner):
        self.runner = runner

    def execute_model(self):
        self.runner.execute_model()
        return Output()

class Wrapper:
    def __init__(self, runner):
        self.worker = Worker(runner)

class Executor:
    def __init__(self, runner):
        self.driver_worker = Wrapper(runner)

    def execute_model(self):
        return self.driver_worker.worker.execute_model()

class Core:
    def __init__(self, runner):
        self.scheduler, self.runner, self.model_executor = Scheduler(), runner, Executor(runner)
        self.step_fn = self.step

    def step(self):
        self.scheduler.schedule()
        assert self.model_executor.execute_model().result() == "tokens"
        other = threading.Thread(target=self.runner._sample)
        other.start()
        other.join()
"""


@pytest.fixture
def core(monkeypatch):
    module = ModuleType("vllm.v1.worker.phases_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOURCE, "phases_of_a_test", "exec"), vars(module))
    return module.Core(module.Runner())


def test_each_phase_stands_below_what_it_is_a_part_of(core):
    with timed(core, core.runner) as phases:
        for _ in range(3):
            core.step_fn()
        core.runner.execute_model()  # between steps, so of none
    rows = {one.path: one for one in phases_of(phases.rows())}
    runner = ("step", "Executor.execute_model", "Worker.execute_model", "Runner.execute_model")
    assert list(rows) == [
        ("step",),
        ("step", "Scheduler.schedule"),
        *(runner[:length] for length in (2, 3, 4)),
        (*runner, "Helper.gather"),
        (*runner, "Helper.gather", "read"),
        (*runner, "Runner._sample"),
        ("step", "Future.result"),
        ("step", "Future.result", "Future.result"),
    ]
    assert rows["step", "Future.result"].us >= 1000
    gather = rows[(*runner, "Helper.gather")]
    assert gather.calls == 2
    assert gather.us >= 2000
    inside = sum(row.us for path, row in rows.items() if path[:-1] == runner)
    assert 5000 <= inside <= rows[runner].us + 1000
    assert rows["step",].calls == 1


def test_nothing_is_left_behind(core):
    module = sys.modules[type(core).__module__]
    touched = (core, core.runner, core.scheduler, core.runner.helper, core.model_executor, module, module.Output)
    touched += (Future,)
    before = {id(one): dict(vars(one)) for one in touched}
    with timed(core, core.runner):
        assert "execute_model" in vars(core.runner)
        assert module.read is not before[id(module)]["read"]
    assert {id(one): dict(vars(one)) for one in touched} == before


def test_a_rare_step_does_not_move_the_figures():
    phases = Phases()
    for number in range(9):
        rare = {("step", "prompt"): [0.5]} if number == 0 else {}
        phases.add_step({("step",): [0.6 if rare else 0.002], ("step", "sample"): [0.0005, 0.0005], **rare})
    rows = {one.path[-1]: one for one in phases_of(phases.rows())}
    assert rows["step"].us == pytest.approx(2000)
    assert rows["step"].own == pytest.approx(1000 - 0.5e6 / 9)
    assert rows["sample"] == Phase(("step", "sample"), 2.0, pytest.approx(1000), pytest.approx(1000))
    # What is in one step of nine takes a ninth of its time in each.
    assert (rows["prompt"].calls, rows["prompt"].us) == pytest.approx((1 / 9, 0.5e6 / 9))
