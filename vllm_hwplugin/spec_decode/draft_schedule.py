# SPDX-License-Identifier: Apache-2.0
"""Rewrite vLLM's list of draft counts by number of requests, from the steps that the engine measures.

A platform names the counts in `num_speculative_tokens_per_batch_size`, for which vLLM captures graphs: the same at each
start. The scheduler's patched `update_from_output` measures steps, and changes the list from which the scheduler reads
each step's k. Workers read a plain attribute of the `CompilationConfig`: pickled, but not part of vLLM's hash. No torch
is imported here. docs/draft-schedule.md says what depends on k.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.base.features import DRAFT_SCHEDULE
from vllm_hwplugin.spec_decode.draft_policy import MIN_STEPS, DraftPolicy, bucket_of
from vllm_hwplugin.spec_decode.drafters import TRIED_METHODS
from vllm_hwplugin.spec_decode.step_counts import INTERVAL

logger = logging.getLogger("vllm.hwplugin")

_SETTING: Final = "num_speculative_tokens_per_batch_size"
#: The counts to choose from, or why they are not chosen.
_COUNTS: Final = "_hwplugin_draft_counts"
# Whether the schedule is this module's, not the user's.
_OWN: Final = "_hwplugin_own_draft_schedule"


# -- while vLLM makes a configuration ---------------------------------------------------------------------------------


def name_draft_counts(vllm_config: Any, *, named: bool) -> None:
    """Name the draft counts that need graphs.

    A platform's `check_and_update_config` calls this, after it has set the capture sizes.

    Args:
        named: whether the user chose the capture sizes.

    Raises:
        FeatureRequired: the switch is `on`, and the engine cannot choose.
    """
    entry = run_records.current()
    if entry is None or DRAFT_SCHEDULE not in entry.live:
        return
    attributes = vars(vllm_config.compilation_config)
    if _COUNTS in attributes:
        # This configuration is made from another one.
        return
    attributes[_COUNTS] = reason = _why_fixed(vllm_config)
    if reason is not None:
        report_unused(DRAFT_SCHEDULE, "the number of drafts stays as configured", reason)
        return
    spec, most = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    counts = attributes[_COUNTS] = draft_counts(spec, most)
    attributes[_OWN] = not getattr(spec, _SETTING)
    if attributes[_OWN]:
        # vLLM captures graphs of each count that the schedule names, for any number of requests.
        first = most - len(counts) + 1
        ends = range(first, most + 1)
        setattr(spec, _SETTING, [(1 if end == first else end, end, k) for end, k in zip(ends, counts, strict=True)])
    compilation = vllm_config.compilation_config
    sizes = compilation.cudagraph_capture_sizes
    if sizes and not named:
        # vLLM captures a size as whole requests of each count, and none of more than `max_num_seqs`.
        fullest = (most * (1 + k) for k in counts)
        compilation.cudagraph_capture_sizes = sorted({*sizes, *(size for size in fullest if size < max(sizes))})
    run_records.note(DRAFT_SCHEDULE, f"the load decides between k={', '.join(map(str, counts))}, which have graphs")


def draft_counts(spec: Any, max_num_seqs: int) -> tuple[int, ...]:
    """Return the draft counts that have graphs, largest first.

    By default all drafts, half of them, and one; each costs the graphs of its batch sizes. Else the user's schedule
    names them.
    """
    k, schedule = spec.num_speculative_tokens, getattr(spec, _SETTING)
    if schedule:
        # vLLM captures no graphs of a count that only larger batches have.
        return tuple(sorted({min(count, k) for first, _, count in schedule if first <= max_num_seqs}, reverse=True))
    return tuple(sorted({k, (k + 1) // 2, 1}, reverse=True))[:max_num_seqs]


def _why_fixed(vllm_config: Any) -> str | None:
    """Return why the number of drafts cannot follow the load, or None."""
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if spec is None:
        return "there is no speculative decoding"
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return "the engine runs on Model Runner V1"
    if spec.method not in TRIED_METHODS:
        return f"the speculative method is {spec.method}"
    if parallel.data_parallel_size > 1:
        return "data-parallel ranks must draft the same number of tokens"
    if parallel.pipeline_parallel_size > 1:
        return "the stages of a pipeline hold several batches at a time"
    if getattr(spec, "enable_adaptive_verification", False):
        return "adaptive verification chooses the number of drafts"
    if len(draft_counts(spec, vllm_config.scheduler_config.max_num_seqs)) < 2:
        return f"{_SETTING}, num_speculative_tokens or max_num_seqs leaves one number of drafts"
    return None


# -- in a worker ------------------------------------------------------------------------------------------------------


def counts_of(compilation_config: Any) -> tuple[int, ...]:
    """Return the draft counts that the load decides between, or ()."""
    counts = vars(compilation_config).get(_COUNTS)
    return counts if isinstance(counts, tuple) else ()


def why_fixed(compilation_config: Any) -> str | None:
    """Return why the number of drafts is fixed, or None."""
    counts = vars(compilation_config).get(_COUNTS, "vLLM's own platform class made the configuration")
    return counts if isinstance(counts, str) else None


# -- in the scheduler -------------------------------------------------------------------------------------------------


def follow_load(vllm_config: Any, lookup: list[int]) -> DraftSchedule | None:
    """Return what chooses a scheduler's draft counts; None if they are fixed.

    Args:
        lookup: vLLM's k by number of requests; item 0 is not used. Its items change later.
    """
    compilation = vllm_config.compilation_config
    counts = counts_of(compilation)
    if not counts:
        return None
    if vars(compilation)[_OWN]:
        lookup[1:] = [counts[0]] * (len(lookup) - 1)
    return DraftSchedule(counts, lookup)


class DraftSchedule:
    """Measures a scheduler's steps and writes its `dynamic_sd_lookup`."""

    def __init__(self, counts: Sequence[int], lookup: list[int]):
        most = len(lookup) - 1
        for count in range(1, most):
            # A bucket learns as one: a user's ranges may end within it.
            lookup[count] = lookup[min(bucket_of(count), most)]
        self.policy, self._lookup = DraftPolicy(counts, list(lookup)), lookup
        self._most, self._last, self._noted = counts[0], 0.0, 0.0
        # At the end of the engine, or of the process; a `multiprocessing` process skips atexit handlers.
        multiprocessing.util.Finalize(self, _report, (self.policy, most), exitpriority=1)

    def observe(self, scheduled: Any, output: Any) -> None:
        """Learn from a step, and write the next steps' k.

        Under asynchronous scheduling later steps are scheduled already, so the list says nothing about this step.
        """
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        num_reqs, k = len(tokens), scheduled.num_spec_tokens_to_schedule
        if not tokens:
            return
        # Drafts that violate a grammar are taken out, and the scheduler waits for grammars.
        grammar = scheduled.has_structured_output_requests
        decodes = not grammar and scheduled.total_num_scheduled_tokens == num_reqs * (1 + k)
        # Where the number of drafts changes, the step makes more drafts than it verifies, or fewer.
        steady = decodes and all(len(drafts.get(request, ())) == k for request in tokens)
        accepted, reached = ((), ()) if grammar else self._positions(drafts, output)
        chosen = self.policy.observe(num_reqs, k, seconds if steady else None, accepted, reached)
        top, most = bucket_of(num_reqs), len(self._lookup) - 1
        if self._lookup[min(top, most)] != chosen:
            for count in range(top // 2 + 1, min(top, most) + 1):
                self._lookup[count] = chosen
            if now - self._noted > INTERVAL:
                self._noted = now
                run_records.note(DRAFT_SCHEDULE, described(self.policy, most))

    def _positions(self, drafts: Any, output: Any) -> tuple[list[int], list[int]]:
        """Return accepted drafts, and drafts whose predecessors were accepted, by position."""
        accepted, reached = [0] * self._most, [0] * self._most
        rows, sampled = output.req_id_to_index, output.sampled_token_ids
        pairs = Counter((len(drafts[name]), len(sampled[rows[name]])) for name in drafts if name in rows and sampled)
        for (drafted, new), number in pairs.items():
            # No token is new where a step's output was dropped.
            for position in range(min(drafted, new)):
                reached[position] += number
                accepted[position] += number * (position + 1 < new)
        return accepted, reached


def learned_setting(learned: Sequence[tuple[int, int]], max_num_seqs: int) -> list[list[int]]:
    """Return what was learned as vLLM's `num_speculative_tokens_per_batch_size`.

    vLLM uses the k of a range also for the gap behind it.
    """
    ranges: list[list[int]] = []
    for top, k in learned:
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = min(top, max_num_seqs)
        else:
            ranges.append([top // 2 + 1 if ranges else 1, min(top, max_num_seqs), k])
    return ranges


def described(policy: DraftPolicy, max_num_seqs: int) -> str:
    """Say what was learned, and from how many steps."""
    setting = learned_setting(policy.learned(), max_num_seqs)
    counted = ", ".join(f"{count} with k={k}" for k, count in sorted(policy.steps.items(), reverse=True) if count)
    steps = f"steps: {counted or 'none'}; {policy.trials} trials"
    if not setting:
        return f"nothing learned, no batch size has {MIN_STEPS} measured steps; {steps}"
    return f'learned "{_SETTING}": {setting}; {steps}'


def _report(policy: DraftPolicy, max_num_seqs: int) -> None:
    text = described(policy, max_num_seqs)
    run_records.note(DRAFT_SCHEDULE, text)
    logger.info("%s: %s", DRAFT_SCHEDULE, text)
