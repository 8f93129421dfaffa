# SPDX-License-Identifier: Apache-2.0
"""FULL graphs of mixed batches on the V1 runner: their captures, failures, and what attention builders get."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import FeatureRequired
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode import graph_recording
from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, LARGEST_MIXED, full_mixed_sizes, max_num_splits
from vllm_hwplugin.spec_decode.v1 import mixed_graphs, mixed_sizes

from ...conftest import versions
from ..sized_configs import V1, config_of, crossed, fill_of, made
from .test_added_sizes import Runner

FEATURE = "v1-mixed-graphs"
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class MixedRunner(Runner):
    """A V1 runner that also plans graphs of mixed batches. `failing` are tokens of those that cannot be captured."""

    def __init__(
        self, tree: Any, config: Any, monkeypatch: pytest.MonkeyPatch, failing: Collection[int] = (), **more: Any
    ) -> None:
        self.scheduler_config = config.scheduler_config
        self.max_num_reqs, self.max_model_len = config.scheduler_config.max_num_seqs, LARGEST_MIXED
        self.failing_mixed = failing
        super().__init__(tree, config, more.get("added", ()), monkeypatch)

    def begin(self) -> None:
        super().begin()
        mixed_graphs.plan_mixed_graphs(self)

    def _build_attention_metadata(self, **asked: Any) -> tuple[Any, Any]:
        return asked, SimpleNamespace(max_query_len=asked["max_query_len"])

    def _is_uniform_decode(
        self, longest: int, query_len: int, num_tokens: int, num_reqs: int, forced: bool | None
    ) -> bool:
        return (longest == query_len and num_tokens == longest * num_reqs) if forced is None else forced

    def _determine_batch_execution_and_padding(
        self,
        *,
        num_tokens: int,
        num_reqs: int,
        max_num_scheduled_tokens: int,
        force_uniform_decode: bool | None = None,
    ) -> Any:
        uniform = self._is_uniform_decode(max_num_scheduled_tokens, 4, num_tokens, num_reqs, force_uniform_decode)
        return self.cudagraph_dispatcher.dispatch(num_tokens, uniform_decode=uniform)

    def _warmup_and_capture(self, desc: Any, cudagraph_runtime_mode: CUDAGraphMode) -> None:
        # As `_dummy_run` does.
        num_reqs = min(desc.num_tokens, self.scheduler_config.max_num_seqs)
        longest = 4 if desc.uniform else desc.num_tokens
        dispatched = self._determine_batch_execution_and_padding(
            num_tokens=desc.num_tokens,
            num_reqs=-(-desc.num_tokens // 4) if desc.uniform else num_reqs,
            max_num_scheduled_tokens=longest,
            force_uniform_decode=desc.uniform,
        )
        assert dispatched == (cudagraph_runtime_mode, desc)
        super()._warmup_and_capture(desc, cudagraph_runtime_mode)
        if cudagraph_runtime_mode == FULL and not desc.uniform and desc.num_tokens in self.failing_mixed:
            raise RuntimeError("CUDA error: out of memory")

    def graphs(self, mode: CUDAGraphMode, *, uniform: bool = False) -> set[int]:
        entries = self.wrappers[mode].concrete_cudagraph_entries
        return {desc.num_tokens for desc in entries if desc.uniform == uniform}

    def dispatched(self, num_tokens: int, num_reqs: int = 1, *, uniform: bool = False) -> tuple[CUDAGraphMode, int]:
        longest, num_reqs = (4, num_tokens // 4) if uniform else (num_tokens - num_reqs + 1, num_reqs)
        mode, desc = self._determine_batch_execution_and_padding(
            num_tokens=num_tokens, num_reqs=num_reqs, max_num_scheduled_tokens=longest
        )
        return mode, desc.num_tokens


@pytest.fixture(autouse=True)
def engine(entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch) -> run_records.RunRecord:
    """An engine against whose mixed graphs nothing stands, on a host without a GPU."""
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "mixed")
    monkeypatch.setattr(mixed_graphs, "why_not", lambda *_: None)

    def leave_capture(*_: Any, **__: Any) -> None:
        # It begins a capture, which changes tensors that vLLM's captures have made.
        assert torch.is_inference_mode_enabled()

    monkeypatch.setattr(graph_recording, "leave_capture", leave_capture)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another")
    return entry


@pytest.mark.parametrize(("version", "seqs"), crossed(versions(*V1), [64, 1024]))
def test_each_piecewise_size_has_a_full_graph(
    version: str, seqs: int, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, decodes = vllm_tree(version), min(LARGEST, 4 * seqs)
    runner = MixedRunner(tree, made(config_of(seqs=seqs), fill_of(tree)), monkeypatch)
    # Once to measure memory.
    for _ in range(2):
        runner.capture()
        pieces = runner.graphs(PIECEWISE)
        assert runner.graphs(FULL) == {size for size in pieces if size >= 32}
        assert max(pieces) == LARGEST_MIXED
        assert max(runner.graphs(FULL, uniform=True)) == decodes
        assert runner.dispatched(LARGEST_MIXED - 1) == (FULL, LARGEST_MIXED)
        assert runner.dispatched(LARGEST_MIXED + 1)[0] == NONE
        assert runner.dispatched(31) == (FULL, 32)
        assert runner.dispatched(23) == (PIECEWISE, 24)
        assert runner.dispatched(decodes, uniform=True) == (FULL, decodes)
        # With more requests than the graph has rows, as in unpatched vLLM.
        assert runner.dispatched(1000, min(seqs, 256)) == (FULL, 1024)
        if seqs > 256:
            assert runner.dispatched(1000, 257) == (PIECEWISE, 1024)
            assert runner.dispatched(257, 257) == (PIECEWISE, 272)
        graphs = [desc for desc in runner.wrappers[FULL].concrete_cudagraph_entries if not desc.uniform]
        assert all(desc.num_reqs == min(desc.num_tokens, seqs, 256) for desc in graphs)
        assert runner.scheduler_config.max_num_seqs == seqs
        # The draft's passes have their own graphs.
        assert runner.drafter.cudagraph_dispatcher.dispatch(LARGEST_MIXED)[0] == PIECEWISE
        runner.begin()


def test_a_decode_batch_that_is_padded_to_more_requests_keeps_its_graph(
    vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (mixed_graphs, mixed_sizes):
        monkeypatch.setattr(module, "MAX_NUM_REQS", 250)
    tree = vllm_tree(SUPPORTED[-1])
    runner = MixedRunner(tree, made(config_of(seqs=1024), fill_of(tree)), monkeypatch)
    runner.capture()
    assert runner.dispatched(4 * 249, uniform=True) == (FULL, 1024)


@pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
def test_a_failure_costs_these_graphs_and_no_other(
    version: str, engine: run_records.RunRecord, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, config = vllm_tree(version), made(config_of(), fill_of(vllm_tree(version)))
    whole = Runner(tree, config, (), monkeypatch).capture()
    runner = MixedRunner(tree, made(config_of(), fill_of(tree)), monkeypatch, failing={1024})
    for _ in range(2):
        captured = runner.capture()
        assert {mode: sorted(sizes) for mode, sizes in captured.items()} == {
            mode: sorted(sizes) for mode, sizes in whole.items()
        }
        assert runner.dispatched(2000) == (PIECEWISE, 2048)
        assert runner.dispatched(LARGEST, uniform=True) == (FULL, LARGEST)
        runner.begin()
    assert [wrapper.graph_pool for wrapper in runner.wrappers.values()] == ["another"] * 2
    assert "out of memory" in engine.decisions[FEATURE]

    monkeypatch.setenv("VLLM_HWPLUGIN_V1_MIXED_GRAPHS", "on")
    with pytest.raises(FeatureRequired):
        MixedRunner(tree, made(config_of(), fill_of(tree)), monkeypatch, failing={64}).capture()


def test_without_added_sizes_vllms_own_keep_their_graphs(vllm_tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = vllm_tree(SUPPORTED[-1])
    runner = MixedRunner(tree, made(config_of(), fill_of(tree)), monkeypatch, added=range(513, 1024))
    runner.capture()
    assert max(runner.graphs(PIECEWISE)) == max(runner.graphs(FULL)) == 512
    assert runner.dispatched(500) == (FULL, 512)
    assert runner.dispatched(600)[0] == NONE


def test_a_reason_against_them_leaves_all_to_vllm(
    engine: run_records.RunRecord, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "why_not", lambda *_: "prompts may have images or the like")
    tree = vllm_tree(SUPPORTED[-1])
    runner = MixedRunner(tree, made(config_of(), fill_of(tree)), monkeypatch)
    assert runner.capture() == Runner(tree, made(config_of(), fill_of(tree)), (), monkeypatch).capture()
    assert engine.decisions[FEATURE].endswith("images or the like")
    assert "_build_attention_metadata" not in vars(runner)
    assert full_mixed_sizes(runner.compilation_config) is None
    engine.decisions.clear()
    runner.drafter = None
    mixed_graphs.plan_mixed_graphs(runner)
    assert FEATURE not in engine.decisions


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        # A prompt beside decodes, and decodes of which none has drafts.
        ({"num_tokens": 600, "num_reqs": 3, "max_query_len": 592, "num_tokens_padded": 608}, 608),
        ({"num_tokens": 40, "num_reqs": 40, "max_query_len": 1, "num_tokens_padded": 40}, 40),
        ({"num_tokens": 42, "num_reqs": 11, "max_query_len": 4, "num_tokens_padded": 48}, 48),
        # Decodes, and a batch without a FULL graph.
        ({"num_tokens": 44, "num_reqs": 11, "max_query_len": 4, "num_tokens_padded": 48}, 4),
        ({"num_tokens": 600, "num_reqs": 3, "max_query_len": 592, "num_tokens_padded": None}, 592),
    ],
)
def test_builders_get_the_longest_request_of_the_graph_and_the_drafter_that_of_the_step(
    asked: dict[str, Any], told: int, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = vllm_tree(SUPPORTED[-1])
    runner = MixedRunner(tree, made(config_of(), fill_of(tree)), monkeypatch)
    built, common = runner._build_attention_metadata(**asked)
    assert (built["max_query_len"], common.max_query_len) == (told, asked["max_query_len"])


def test_requests_of_a_capture_are_no_longer_than_their_block_tables(
    vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = vllm_tree(SUPPORTED[-1])
    runner: Any = MixedRunner(tree, made(config_of(), fill_of(tree)), monkeypatch)
    runner.max_model_len, runner.seq_lens = 1000, torch.tensor([2048, 2048, 0], dtype=torch.int32)
    runner._build_attention_metadata(num_tokens=2048, num_reqs=2, max_query_len=2048, num_tokens_padded=None)
    assert runner.seq_lens.tolist() == [1000, 1000, 0]


def test_flash_attention_3_has_one_bound_of_splits_in_capture_and_replays(
    vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = vllm_tree(SUPPORTED[-1])
    compilation = MixedRunner(tree, made(config_of(), fill_of(tree)), monkeypatch).compilation_config
    builder = SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=compilation, speculative_config=SimpleNamespace(num_speculative_tokens=3)
        ),
        max_num_splits=32,
        max_cudagraph_size=compilation.max_cudagraph_capture_size,
    )
    for size in full_mixed_sizes(compilation) or ():
        assert 0 < max_num_splits(builder, size, size) * size <= 32 * 512
    # Without a graph the kernel decides.
    assert max_num_splits(builder, 1024, 700) == 0
