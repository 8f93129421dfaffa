# SPDX-License-Identifier: Apache-2.0
"""The sizes that the plugin adds on the V1 runner, and what a capture of such a size costs where it fails."""

from __future__ import annotations

from collections.abc import Container
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode import graph_recording
from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, LARGEST_MIXED
from vllm_hwplugin.spec_decode.v1 import mixed_sizes

from ...conftest import versions
from ..sized_configs import V1, config_of, crossed, dispatcher_of, fill_of, made, round_up_sizes


class Runner:
    """A V1 runner's dispatchers, and a wrapper of each mode that holds graphs. Captures of some sizes fail."""

    def __init__(self, tree: Any, config: Any, failing: Container[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.compilation_config, self.parallel_config = config.compilation_config, config.parallel_config
        self._tree, self._config, self._failing = tree, config, failing
        self.uniform_decode_query_len = config.uniform_decode_query_len
        self.begin()
        self.model, *_ = wrappers = [
            SimpleNamespace(runtime_mode=mode, graph_pool="vLLM's", concrete_cudagraph_entries={})
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        ]
        self.of_draft = SimpleNamespace(
            runtime_mode=CUDAGraphMode.FULL, graph_pool="the draft's", concrete_cudagraph_entries={}
        )
        self.wrappers = {one.runtime_mode: one for one in wrappers}
        monkeypatch.setattr(mixed_sizes.CUDAGraphWrapper, "_all_instances", [*wrappers, self.of_draft])

    def begin(self) -> None:
        """As vLLM does once more after it has measured what graphs need."""
        round_up_sizes(self._tree, self.compilation_config, self.uniform_decode_query_len)
        self.cudagraph_dispatcher = dispatcher_of(self._tree, self._config)
        self.drafter = SimpleNamespace(cudagraph_dispatcher=dispatcher_of(self._tree, self._config))

    def _warmup_and_capture(self, desc: Any, cudagraph_runtime_mode: CUDAGraphMode) -> None:
        entries = self.wrappers[cudagraph_runtime_mode].concrete_cudagraph_entries
        # A wrapper has made an entry before it captures.
        entries[desc] = None
        self.of_draft.concrete_cudagraph_entries[desc] = self
        if desc.num_tokens in self._failing:
            raise RuntimeError("CUDA error: out of memory")
        entries[desc] = self.wrappers[cudagraph_runtime_mode].graph_pool

    def capture(self) -> dict[str, list[int]]:
        """As `capture_model`: tokens of the graphs."""
        for mode, descs in mixed_sizes.settled(self, self.cudagraph_dispatcher.get_capture_descs()):
            for desc in descs:
                self._warmup_and_capture(desc, cudagraph_runtime_mode=mode)
        found = {mode.name: list(one.concrete_cudagraph_entries.items()) for mode, one in self.wrappers.items()}
        assert all(graph is not None for graphs in found.values() for _, graph in graphs)
        return {mode: [batch.num_tokens for batch, _ in graphs] for mode, graphs in found.items()}


#: An engine, and the captures that fail.
CASES: list[tuple[dict[str, int], range]] = [
    ({"k": 3}, range(513, 4096)),
    ({"k": 3}, range(1025, 4096)),
    # vLLM's own largest is 510.
    ({"k": 5}, range(511, 517)),
    # The fullest decode batch has 30 tokens; vLLM captures 27 and 33, and from 0.29 on 30 as well.
    ({"k": 2, "seqs": 10}, range(30, 31)),
    # The maximum is the user's.
    ({"k": 6, "seqs": 6, "largest": 42}, range(42, 43)),
]


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pools whose capture was left."""
    pools: list[Any] = []
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")

    def leave_capture(pool: Any, *, broken: bool | None) -> None:
        # It begins a capture, which changes tensors that vLLM's captures have made.
        assert torch.is_inference_mode_enabled()
        pools.append(pool)

    monkeypatch.setattr(graph_recording, "leave_capture", leave_capture)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another")
    return pools


@pytest.mark.parametrize(("version", "case"), [(SUPPORTED[0], CASES[0]), *((SUPPORTED[-1], case) for case in CASES)])
def test_sizes_that_fail_are_those_of_the_plugin(
    vllm_tree: Any,
    version: str,
    case: tuple[dict[str, int], range],
    entry: run_records.RunRecord,
    left: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, (engine, failing) = vllm_tree(version), case
    plain = config_of(**engine)
    fill_of(tree)(plain)
    by_vllm = Runner(tree, plain, (), monkeypatch).capture()
    whole = Runner(tree, made(config_of(**engine), fill_of(tree)), (), monkeypatch)
    added = set(whole.capture()["FULL"]) - set(by_vllm["FULL"])
    if "seqs" in engine and "largest" not in engine and not added:
        return
    assert added & set(failing)
    runner = Runner(tree, made(config_of(**engine), fill_of(tree)), failing, monkeypatch)
    assert runner.capture() == by_vllm
    assert left == ["vLLM's"]
    assert [one.graph_pool for one in runner.wrappers.values()] == ["another"] * 2
    # Those of the drafter are the plugin's, and in a pool of their own.
    assert runner.of_draft.graph_pool == "the draft's"
    assert {batch.num_tokens for batch in runner.of_draft.concrete_cudagraph_entries} & added
    # No batch is padded to a graph that was not captured, nor in an engine whose memory was only measured.
    block = 1 + engine["k"]
    for _ in range(2):
        for dispatcher in (runner.cudagraph_dispatcher, runner.drafter.cudagraph_dispatcher):
            found = [dispatcher.dispatch(size, uniform_decode=True) for size in range(block, max(added) + 1, block)]
            full = {batch.num_tokens for mode, batch in found if mode == CUDAGraphMode.FULL}
            assert full
            assert full <= set(by_vllm["FULL"])
        runner.begin()
    assert runner.capture() == by_vllm


@pytest.mark.parametrize(("version", "seqs"), crossed(versions(*V1), [64, 1024]))
def test_graphs_of_mixed_batches_reach_4096_tokens(
    entry: run_records.RunRecord, version: str, seqs: int, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "mixed")
    tree, decodes = vllm_tree(version), min(LARGEST, 4 * seqs)
    runner = Runner(tree, made(config_of(seqs=seqs), fill_of(tree)), (), monkeypatch)
    for _ in range(2):
        captured = runner.capture()
        assert (max(captured["PIECEWISE"]), max(captured["FULL"])) == (LARGEST_MIXED, decodes)
        # No batch is padded to a graph that was not captured.
        for dispatcher in (runner.cudagraph_dispatcher, runner.drafter.cudagraph_dispatcher):
            assert dispatcher.dispatch(LARGEST_MIXED - 1)[0] == CUDAGraphMode.PIECEWISE
            assert dispatcher.dispatch(LARGEST_MIXED + 1)[0] == CUDAGraphMode.NONE
            assert dispatcher.dispatch(decodes, uniform_decode=True)[0] == CUDAGraphMode.FULL
            assert dispatcher.dispatch(decodes + 4, uniform_decode=True)[0] != CUDAGraphMode.FULL
        runner.begin()
