# SPDX-License-Identifier: Apache-2.0
"""What a scheduler's steps say of the number of drafts, which numbers have graphs, and who is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import FeatureRequired
from vllm_hwplugin.base.features import DRAFT_SCHEDULE, gate_of
from vllm_hwplugin.spec_decode import draft_schedule
from vllm_hwplugin.spec_decode.draft_policy import MIN_STEPS
from vllm_hwplugin.spec_decode.draft_schedule import DraftSchedule, follow_load, learned_setting

from ..conftest import versions
from .graph_manager import Manager
from .sized_configs import config_of


@pytest.fixture
def record() -> Iterator[run_records.RunRecord]:
    entry = run_records.new("0")
    entry.features = {DRAFT_SCHEDULE: {"state": "live"}}
    run_records.begin(entry, None)
    yield entry
    run_records.forget()


def config(**other: Any) -> Any:
    """Return the parts of a `VllmConfig` that are read, with `other` values by dotted name."""
    made = SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=3,
            num_speculative_tokens_per_batch_size=None,
            enable_adaptive_verification=False,
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=100),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[4, 16, 256, 512]),
    )
    for name, value in other.items():
        owner, _, attribute = name.rpartition("__")
        setattr(getattr(made, owner) if owner else made, attribute, value)
    return made


def lookup_of(made: Any) -> list[int]:
    utils = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    spec = made.speculative_config
    lookup: list[int] = utils.build_dynamic_sd_schedule_lookup(
        spec.num_speculative_tokens_per_batch_size, made.scheduler_config.max_num_seqs, spec.num_speculative_tokens
    )
    return lookup


def test_vllm_captures_each_number_and_begins_with_all_drafts(record: run_records.RunRecord) -> None:
    made = config()
    draft_schedule.name_draft_counts(made, named=False)
    assert draft_schedule.counts_of(made.compilation_config) == (3, 2, 1)
    lookup = lookup_of(made)
    assert set(lookup[1:]) == {1, 2, 3}
    # 100 requests with two drafts are no multiple of a size that vLLM would round up to.
    assert made.compilation_config.cudagraph_capture_sizes == [4, 16, 200, 256, 300, 400, 512]
    followed = follow_load(made, lookup)
    assert followed is not None
    assert lookup[1:] == [3] * 100
    # A configuration that is made from this one is left as it is.
    before = list(made.speculative_config.num_speculative_tokens_per_batch_size)
    draft_schedule.name_draft_counts(made, named=False)
    assert made.speculative_config.num_speculative_tokens_per_batch_size == before


def test_a_users_schedule_is_where_it_begins(record: run_records.RunRecord) -> None:
    # The last is of larger batches than there can be, and no bucket of 33 to 64 requests can have two numbers.
    schedule = [(1, 8, 3), (9, 40, 2), (41, 100, 0), (101, 200, 1)]
    made = config(speculative_config__num_speculative_tokens_per_batch_size=schedule)
    draft_schedule.name_draft_counts(made, named=True)
    assert draft_schedule.counts_of(made.compilation_config) == (3, 2, 0)
    lookup = lookup_of(made)
    assert follow_load(made, lookup) is not None
    assert lookup[1:] == [3] * 8 + [2] * 24 + [0] * 68


REFUSED = {
    "there is no speculative decoding": {"speculative_config": None},
    "the engine runs on Model Runner V1": {"use_v2_model_runner": False},
    "the speculative method is ngram": {"speculative_config__method": "ngram"},
    "data-parallel ranks must draft the same number of tokens": {"parallel_config__data_parallel_size": 2},
    "the stages of a pipeline hold several batches at a time": {"parallel_config__pipeline_parallel_size": 2},
    "adaptive verification chooses the number of drafts": {"speculative_config__enable_adaptive_verification": True},
    "leaves one number of drafts": {"speculative_config__num_speculative_tokens": 1},
    "or max_num_seqs leaves one number of drafts": {"scheduler_config__max_num_seqs": 1},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(reason: str, record: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(**REFUSED[reason])
    draft_schedule.name_draft_counts(made, named=False)
    assert follow_load(made, [0, 3]) is None
    assert reason in (draft_schedule.why_fixed(made.compilation_config) or "")
    assert reason in record.decisions[DRAFT_SCHEDULE]
    assert getattr(made.speculative_config, "num_speculative_tokens_per_batch_size", None) is None
    monkeypatch.setenv(gate_of(DRAFT_SCHEDULE), "on")
    with pytest.raises(FeatureRequired, match=reason):
        draft_schedule.name_draft_counts(config(**REFUSED[reason]), named=False)


def test_without_the_feature_nothing_is_set(record: run_records.RunRecord) -> None:
    record.features = {}
    made = config()
    draft_schedule.name_draft_counts(made, named=False)
    assert made.speculative_config.num_speculative_tokens_per_batch_size is None
    assert follow_load(made, [0, 3]) is None


# -- steps ------------------------------------------------------------------------------------------------------------


class Steps:
    """A scheduler's list and its steps, with a clock that goes on by a step's time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 8) -> None:
        self.lookup = [0, *[3] * most]
        self.schedule = DraftSchedule((3, 2, 1), self.lookup)
        self.seen: list[tuple[Any, ...]] = []
        observe = self.schedule.policy.observe
        self.schedule.policy.observe = lambda *step: self.seen.append(step) or observe(*step)  # type: ignore[method-assign, func-returns-value]
        self._now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self._now)

    def step(
        self, verified: Mapping[str, int], new: Mapping[str, int], *, k: int, prompt: int = 0, grammar: bool = False
    ) -> None:
        """Let a step end; `new` are the tokens of each request, 0 where its output was dropped."""
        tokens = {name: 1 + drafts for name, drafts in verified.items()} | ({"prompt": prompt} if prompt else {})
        names = list(tokens)
        scheduled = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={name: [-1] * drafts for name, drafts in verified.items() if drafts},
            num_spec_tokens_to_schedule=k,
            has_structured_output_requests=grammar,
        )
        output = SimpleNamespace(
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[7] * new.get(name, 0) for name in names],
        )
        self._now += 0.25
        self.schedule.observe(scheduled, output)


def test_a_step_counts_for_the_number_that_it_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    # The list may be another by now: later steps are scheduled already.
    steps.lookup[1:] = [1] * 8
    steps.step({"a": 3, "b": 3}, {"a": 4, "b": 2}, k=3)
    assert steps.seen.pop()[:2] == (2, 3)
    steps.step({"a": 3, "b": 3}, {"a": 1, "b": 3}, k=3)
    assert steps.seen.pop() == (2, 3, 0.25, [1, 1, 0], [2, 1, 1])


@pytest.mark.parametrize(
    "asked",
    [{"k": 2}, {"k": 3, "prompt": 20}, {"k": 3, "prompt": 4}, {"k": 3, "grammar": True}],
    ids=["another number follows", "a prompt", "a prompt of as many tokens", "a grammar"],
)
def test_a_step_of_another_kind_has_no_time(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    steps.step({"a": 3}, {"a": 2}, **asked)
    _, _, seconds, accepted, reached = steps.seen.pop()
    assert seconds is None
    # Drafts that a grammar takes out would count as rejected.
    assert (accepted, reached) == (((), ()) if "grammar" in asked else ([1, 0, 0], [1, 1, 0]))


def test_writes_the_lists_items_of_a_bucket(monkeypatch: pytest.MonkeyPatch, record: run_records.RunRecord) -> None:
    steps = Steps(monkeypatch, most=7)
    k = 3
    for _ in range(2 * MIN_STEPS):
        # No draft is ever accepted.
        steps.step(dict.fromkeys("abcdef", k), dict.fromkeys("abcdef", 1), k=k)
        # The time is the number of drafts.
        steps._now += k
        k = steps.lookup[6]
    assert steps.schedule.policy.learned() == [(8, 1)]
    # Up to four requests nothing was measured.
    assert steps.lookup == [0, 3, 3, 3, 3, 1, 1, 1]
    assert '"num_speculative_tokens_per_batch_size": [[1, 7, 1]]; steps: ' in record.decisions[DRAFT_SCHEDULE]


@pytest.mark.parametrize(
    ("learned", "ranges"),
    [([], []), ([(8, 3)], [[1, 8, 3]]), ([(1, 3), (8, 3), (16, 2), (128, 1)], [[1, 8, 3], [9, 16, 2], [65, 100, 1]])],
)
def test_what_was_learned_is_a_value_of_vllms_setting(learned: list[tuple[int, int]], ranges: list[list[int]]) -> None:
    assert learned_setting(learned, 100) == ranges
    if ranges:
        lookup = lookup_of(config(speculative_config__num_speculative_tokens_per_batch_size=ranges))
        assert [lookup[min(top, 100)] for top, _ in learned] == [k for _, k in learned]


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("version", versions("vllm/v1/worker/gpu/cudagraph_utils.py", among=("0.32.0", "0.33.0")))
def test_each_batch_finds_the_next_graph_of_its_own_number(
    version: str, patched: bool, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, most = config_of(k=3, seqs=8, sizes=[1, 2, 4, 8, 16, 24, 32], largest=32), 8
    made.speculative_config.num_speculative_tokens_per_batch_size = [[1, 3, 3], [4, 5, 2], [6, 8, 1]]
    made.speculative_config.uses_dynamic_speculative_decoding = lambda: True
    choice = {gate_of("backport-draft-count-graphs"): "on" if patched else "off"}
    manager = Manager(vllm_tree(version), made, monkeypatch, **choice).made
    full = [desc for desc in manager._capture_descs[CUDAGraphMode.FULL] if desc.uniform_token_count]
    assert {desc.uniform_token_count for desc in full} == {2, 3, 4}
    missed = []
    for block in (2, 3, 4):
        for requests in range(1, most + 1):
            fitting = [d for d in full if d.uniform_token_count == block and d.num_reqs >= requests]
            expected = min(fitting, key=lambda desc: desc.num_tokens, default=None)
            desc = manager.dispatch(requests, requests * block, block, 0)
            if expected is not None and desc != expected:
                missed.append((requests, block))
        # A batch of unequal numbers has none of these graphs.
        assert manager.dispatch(3, 3 * block, None, 0).cg_mode == CUDAGraphMode.PIECEWISE
    assert bool(missed) != patched
