# SPDX-License-Identifier: Apache-2.0
"""Choose the number of drafts k by load, from measured step times and acceptance.

The value of k is the expected tokens of a step divided by the time of the step. A bucket holds the batches of up to a
power of two of requests. Each bucket has a chosen k; sometimes another k is tried for a few steps. Its step times
are compared with the steps just before: the time of a step also depends on the batch and on the length of its texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

#: Measured steps of a bucket before its k may change.
MIN_STEPS: Final = 200
#: Gain by which another k replaces the chosen k.
HYSTERESIS: Final = 0.03
#: Measured steps of a bucket between two trials: of a k that was measured in too few steps, and of any other k.
TRIAL_EVERY: Final = (20, 400)
#: A trial ends after this many measured steps with its k, or after so many steps of any kind.
TRIAL_STEPS: Final = (4, 16)
# Measured steps, and drafts of the first position, from which a k is known.
_KNOWN_STEPS: Final = 16
_KNOWN_DRAFTS: Final = 64
# Drafts of a position after which earlier ones count half.
_HALVED: Final = 4000
# The least weight of a step in the moving average of a k's step time.
_WEIGHT: Final = 0.05
# A step that takes longer than so many others was interrupted, and counts as so many.
_OUTLIER: Final = 3.0


def bucket_of(num_reqs: int) -> int:
    """Return the smallest power of two that holds `num_reqs` requests."""
    return 1 << (num_reqs - 1).bit_length()


@dataclass
class _Bucket:
    k: int
    steps: int = 0
    until_trial: int = TRIAL_EVERY[0]
    trial: int | None = None
    tried: list[int] = field(default_factory=lambda: [0, 0])
    # Seconds of the last steps with the chosen k.
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    # Step time by k, relative to each other, and the number of steps behind it.
    time: dict[int, float] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)


class DraftPolicy:
    """The k of each bucket.

    Args:
        counts: the k to choose from; there are at least two.
        start: k by number of requests before anything was measured; item 0 is not used.
    """

    def __init__(self, counts: Collection[int], start: Sequence[int]):
        self.counts = sorted(counts)
        self.steps = dict.fromkeys(self.counts, 0)
        self.trials = 0
        self._start = start
        self._buckets: dict[int, _Bucket] = {}
        self._accepted, self._reached = [0.0] * self.counts[-1], [0.0] * self.counts[-1]

    def observe(
        self, num_reqs: int, k: int, seconds: float | None, accepted: Sequence[int] = (), reached: Sequence[int] = ()
    ) -> int:
        """Learn from a step, and return its bucket's next k.

        Args:
            k: drafts that each request verified.
            seconds: time of the step; None if it cannot be compared, for example because a prompt ran in it.
            accepted: drafts accepted in the step, by position.
            reached: drafts of the step whose predecessors were accepted, by position.
        """
        self._count_drafts(accepted, reached)
        bucket = self._bucket(num_reqs)
        self.steps[k] = self.steps.get(k, 0) + 1
        if seconds is not None:
            self._measure(bucket, k, seconds)
        if bucket.trial is not None:
            bucket.tried[0] += k == bucket.trial and seconds is not None
            bucket.tried[1] += 1
            if any(done >= most for done, most in zip(bucket.tried, TRIAL_STEPS, strict=True)):
                bucket.trial = None
        elif bucket.until_trial <= 0 and len(bucket.recent) >= _KNOWN_STEPS:
            self._try(bucket)
        if bucket.trial is None:
            self._decide(bucket)
        return bucket.k if bucket.trial is None else bucket.trial

    def learned(self) -> list[tuple[int, int]]:
        """Return (bucket, k) of each bucket with enough measured steps, ascending."""
        return [(top, bucket.k) for top, bucket in sorted(self._buckets.items()) if bucket.steps >= MIN_STEPS]

    def _bucket(self, num_reqs: int) -> _Bucket:
        top = bucket_of(num_reqs)
        if top not in self._buckets:
            k = self._start[min(top, len(self._start) - 1)]
            self._buckets[top] = _Bucket(k, time={k: 1.0}, count={k: _KNOWN_STEPS})
        return self._buckets[top]

    def _count_drafts(self, accepted: Sequence[int], reached: Sequence[int]) -> None:
        for position, (hits, drafts) in enumerate(zip(accepted, reached, strict=True)):
            self._accepted[position] += hits
            self._reached[position] += drafts
            if self._reached[position] > _HALVED:
                self._accepted[position] /= 2
                self._reached[position] /= 2

    def _measure(self, bucket: _Bucket, k: int, seconds: float) -> None:
        bucket.steps += 1
        bucket.until_trial -= 1
        if k == bucket.k:
            bucket.recent.append(seconds)
            return
        if len(bucket.recent) < _KNOWN_STEPS:
            return
        middle = sorted(bucket.recent)[len(bucket.recent) // 4 : -(len(bucket.recent) // 4)]
        ratio = min(seconds * len(middle) / sum(middle), _OUTLIER)
        count = bucket.count[k] = bucket.count.get(k, 0) + 1
        before, now = bucket.time.get(k, 0.0), bucket.time[bucket.k] * ratio
        bucket.time[k] = before + max(_WEIGHT, 1 / count) * (now - before)

    def _try(self, bucket: _Bucket) -> None:
        others = [k for k in reversed(self.counts) if k != bucket.k]
        bucket.trial = min(others, key=lambda k: bucket.count.get(k, 0))
        bucket.tried = [0, 0]
        self.trials += 1
        unknown = any(self._value(bucket, k) is None for k in others)
        bucket.until_trial = TRIAL_EVERY[0] if unknown else TRIAL_EVERY[1]

    def _decide(self, bucket: _Bucket) -> None:
        values = {k: value for k in self.counts if (value := self._value(bucket, k)) is not None}
        if bucket.steps < MIN_STEPS or bucket.k not in values:
            return
        best = max(values, key=lambda k: values[k])
        if values[best] > (1 + HYSTERESIS) * values[bucket.k]:
            bucket.k = best
            bucket.recent.clear()

    def _value(self, bucket: _Bucket, k: int) -> float | None:
        """Return k's tokens by time, or None if too little is known."""
        if bucket.count.get(k, 0) < _KNOWN_STEPS or self._reached[0] < _KNOWN_DRAFTS:
            return None
        tokens = survives = 1.0
        for accepted, reached in zip(self._accepted[:k], self._reached[:k], strict=True):
            # A position that is hardly reached hardly counts.
            survives *= (accepted + 1) / (reached + 2)
            tokens += survives
        return tokens / bucket.time[k]
