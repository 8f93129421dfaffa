# SPDX-License-Identifier: Apache-2.0
"""The number of drafts by load, on simulated engines.

Step times are models of engines on H100s, fitted to measured steps with k=3 (Qwen3-8B with Eagle3 7.6, 8.3, 10.3 and
17.3 ms at 1, 16, 64 and 128 requests) and, for Qwen3.6-27B in FP8 with MTP, to the bytes that a step reads. Acceptance
is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import pytest

from vllm_hwplugin.spec_decode.draft_policy import MIN_STEPS, DraftPolicy, bucket_of

#: Milliseconds of a step, by requests and k.
StepTime = Callable[[int, int], float]

K = 3
COUNTS = (3, 2, 1)
LOW, MID, HIGH = (0.55, 0.45, 0.4), (0.75, 0.67, 0.62), (0.88, 0.84, 0.81)
#: Steps that an engine learns from before it is compared.
LEARNING = 1500


def _layers(tokens: int, weights_ms: float, params: float, flops: float) -> float:
    """Time of linear layers: of reading the weights or of computing, whichever is longer."""
    return float((weights_ms**6 + (tokens * 2 * params / flops * 1e3) ** 6) ** (1 / 6))


def dense_8b(num_reqs: int, k: int) -> float:
    tokens = num_reqs * (1 + k)
    head = 0.44 * max(1, tokens / 300)
    return _layers(tokens, 5.85, 7.57e9, 650e12) + head + 0.025 * num_reqs + k * (0.25 + 0.0015 * num_reqs) + 0.85


def mtp_27b(num_reqs: int, k: int) -> float:
    tokens = num_reqs * (1 + k)
    head = 0.92 * max(1, tokens / 300)
    return _layers(tokens, 10.2, 25.6e9, 1000e12) + head + 0.02 * num_reqs + 1.09 * k + 0.5


ENGINES = {"8B": dense_8b, "27B-FP8": mtp_27b}


class Simulation:
    """An engine whose scheduler runs one step ahead, and the policy that chooses its k."""

    def __init__(self, time: StepTime, acceptance: Sequence[float], counts: Collection[int] = COUNTS, seed: int = 0):
        self.policy = DraftPolicy(counts, [max(counts)] * 257)
        self.time, self.acceptance = time, acceptance
        self._chance = np.random.default_rng(seed)
        self._drafted = [max(counts)] * 2
        #: Requests and verified drafts of each step.
        self.steps: list[tuple[int, int]] = []

    def run(
        self, load: Iterable[int], *, noise: float = 0.05, prompts: float = 0.3, clock: StepTime | None = None
    ) -> None:
        """Run a step for each number of requests.

        Args:
            noise: of a step's time.
            prompts: share of the steps with a prompt.
            clock: the milliseconds that the policy is told; None: those that a step takes.
        """
        chosen: dict[int, int] = {}
        for num_reqs in load:
            verified, drafts = self._drafted
            seconds = (clock or self.time)(num_reqs, verified) * self._chance.lognormal(0, noise) / 1e3
            reached, accepted = [], []
            left = num_reqs
            for share in self.acceptance[:verified]:
                reached.append(left)
                left = int(self._chance.binomial(left, share))
                accepted.append(left)
            steady = verified == drafts and self._chance.random() >= prompts
            k = self.policy.observe(num_reqs, verified, seconds if steady else None, accepted, reached)
            self.steps.append((num_reqs, verified))
            # The next step is scheduled already.
            self._drafted = [drafts, chosen.get(bucket_of(num_reqs), max(self.policy.counts))]
            chosen[bucket_of(num_reqs)] = k

    def gain(self, start: int = 0, k: int = K) -> float:
        """Return the speed over an engine with a fixed k, from a step on."""
        spent = sum(self.time(num_reqs, verified) for num_reqs, verified in self.steps[start:])
        fixed = sum(
            tokens(self.acceptance, verified) / tokens(self.acceptance, k) * self.time(num_reqs, k)
            for num_reqs, verified in self.steps[start:]
        )
        return fixed / spent


def tokens(acceptance: Sequence[float], k: int) -> float:
    """Return the expected tokens of a request's step."""
    return 1 + sum(accumulate(acceptance[:k], mul))


def moving(steps: int = 2000) -> list[int]:
    return [num_reqs for num_reqs in (1, 8, 32, 64, 128, 8) for _ in range(steps)]


@pytest.mark.parametrize("acceptance", [LOW, MID, HIGH], ids=["low", "mid", "high"])
@pytest.mark.parametrize("engine", ENGINES)
def test_never_costs_more_than_a_hundredth_of_a_fixed_number(engine: str, acceptance: Sequence[float]) -> None:
    gains = {}
    for num_reqs in (1, 8, 32, 64, 128):
        simulation = Simulation(ENGINES[engine], acceptance, seed=num_reqs)
        simulation.run([num_reqs] * (2 * LEARNING))
        gains[num_reqs] = simulation.gain(LEARNING)
    assert min(gains.values()) > 0.99, gains
    whole = Simulation(ENGINES[engine], acceptance)
    whole.run(moving())
    assert whole.gain() > 0.99


@pytest.mark.parametrize(
    ("engine", "acceptance", "least"), [("8B", LOW, 1.05), ("27B-FP8", LOW, 1.1), ("27B-FP8", MID, 1.05)]
)
def test_gains_over_a_load_that_moves(engine: str, acceptance: Sequence[float], least: float) -> None:
    """With what it costs to learn."""
    simulation = Simulation(ENGINES[engine], acceptance)
    simulation.run(moving(4000))
    assert simulation.gain() > least


def test_learns_from_step_times_and_from_acceptance() -> None:
    """Without one of them it chooses the wrong number."""
    crowd = [128] * (2 * LEARNING)
    simulation = Simulation(mtp_27b, LOW)
    simulation.run(crowd)
    assert simulation.gain(LEARNING) > 1.4
    assert simulation.policy.learned() == [(128, 1)]
    without_clock = Simulation(mtp_27b, LOW)
    without_clock.run(crowd, clock=lambda num_reqs, k: 10.0)
    assert without_clock.gain(LEARNING) < 1.02
    accepted = Simulation(mtp_27b, (1.0, 1.0, 1.0))
    accepted.run(crowd)
    assert accepted.policy.learned() == [(128, 3)]


def test_follows_another_acceptance() -> None:
    simulation = Simulation(mtp_27b, HIGH)
    for acceptance, k in ((HIGH, 3), ((0.1, 0.1, 0.1), 1), (HIGH, 3)):
        # One draft says nothing of the later positions; trials do.
        simulation.acceptance = acceptance
        simulation.run([32] * 2 * LEARNING)
        assert simulation.policy.learned() == [(32, k)]


def feed(policy: DraftPolicy, steps: int, times: Sequence[float], num_reqs: int = 4) -> list[int]:
    """Let a policy have its k in each step; `times` are seconds by k, every second draft is accepted."""
    used, k = [], 3
    for _ in range(steps):
        reached = [8 >> position for position in range(k)]
        k = policy.observe(num_reqs, k, times[k], [number // 2 for number in reached], reached)
        used.append(k)
    return used


def test_decides_on_enough_steps_only() -> None:
    used = feed(DraftPolicy(COUNTS, [3] * 9), 2 * MIN_STEPS, [0, 1.0, 2.0, 3.0])
    assert used[MIN_STEPS - 2 :].index(1) <= 60
    # Until then only trials have another number.
    assert used[: MIN_STEPS - 1].count(3) > 0.8 * MIN_STEPS
    assert set(used[-20:]) == {1}


def test_batches_of_about_the_same_size_learn_together() -> None:
    assert [bucket_of(count) for count in (1, 2, 3, 4, 5, 8, 9, 128, 129)] == [1, 2, 4, 4, 8, 8, 16, 128, 256]
    # More requests than the list has items.
    assert DraftPolicy(COUNTS, [0, 3, 3, 2]).observe(3, 2, None) == 2
