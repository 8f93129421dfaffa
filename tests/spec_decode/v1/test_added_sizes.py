# SPDX-License-Identifier: Apache-2.0
"""A capture of a size that the plugin added on the V1 runner costs these sizes where it fails, and not the start."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin import journal
from vllm_hwplugin.spec_decode import graph_recording
from vllm_hwplugin.spec_decode.v1 import added_sizes, mixed_sizes

from ...conftest import versions
from ..released import texts
from ..sized_configs import V1, config_of, dispatcher_of, fill_of, made, methods, stock

RUNNER = "vllm/v1/worker/gpu_model_runner.py"


@pytest.mark.parametrize("version", versions(RUNNER))
def test_each_released_runner_captures_by_the_guarded_method(vllm_tree: Any, version: str) -> None:
    runner = methods(texts(vllm_tree(version))(RUNNER) or "", "GPUModelRunner")
    assert "_warmup_and_capture" in runner
    for name in ("_capture_cudagraphs", "profile_cudagraph_memory"):
        assert "self._warmup_and_capture(" in ast.unparse(runner[name])


class Runner:
    """A V1 runner's dispatchers, and a wrapper of each mode that holds graphs. Some passes of more tokens fail."""

    def __init__(self, tree: Any, config: Any, fails_above: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compilation_config, self.parallel_config = config.compilation_config, config.parallel_config
        self._tree, self._config, self._fails_above = tree, config, fails_above
        self.begin()
        self.model, *_ = wrappers = [
            SimpleNamespace(runtime_mode=mode, graph_pool="vLLM's", concrete_cudagraph_entries={})
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        ]
        self.of_draft = SimpleNamespace(
            runtime_mode=CUDAGraphMode.FULL, graph_pool="the draft's", concrete_cudagraph_entries={}
        )
        self.wrappers = {one.runtime_mode: one for one in wrappers}
        monkeypatch.setattr(added_sizes.CUDAGraphWrapper, "_all_instances", [*wrappers, self.of_draft])

    def begin(self) -> None:
        """As vLLM does once more after it has measured what graphs need."""
        self.cudagraph_dispatcher = dispatcher_of(self._tree, self._config)
        self.drafter = SimpleNamespace(cudagraph_dispatcher=dispatcher_of(self._tree, self._config))

    def _warmup_and_capture(self, desc: Any, cudagraph_runtime_mode: CUDAGraphMode) -> None:
        entries = self.wrappers[cudagraph_runtime_mode].concrete_cudagraph_entries
        # A wrapper has made an entry before it captures.
        entries[desc] = None
        self.of_draft.concrete_cudagraph_entries[desc] = self
        if desc.num_tokens > self._fails_above:
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


@pytest.mark.parametrize("fails_above", [512, 1024, 4096])
@pytest.mark.parametrize("version", versions(*V1))
def test_sizes_that_fail_are_those_of_the_plugin(
    vllm_tree: Any, version: str, fails_above: int, entry: journal.Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    monkeypatch.setattr(graph_recording, "leave_capture", lambda pool, *, broken: left.append(pool))
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another")
    tree = vllm_tree(version)
    plain = config_of()
    stock(plain)
    by_vllm = Runner(tree, plain, 4096, monkeypatch).capture()
    config = made(config_of(), fill_of(tree))
    runner = Runner(tree, config, fails_above, monkeypatch)
    found = runner.capture()
    if fails_above == 4096:
        assert max(found["FULL"]) == 2048
        return
    assert found == by_vllm
    assert left == ["vLLM's"]
    assert [one.graph_pool for one in runner.wrappers.values()] == ["another"] * 2
    # Those of the drafter are the plugin's, and in a pool of their own.
    assert runner.of_draft.graph_pool == "the draft's"
    assert max(batch.num_tokens for batch in runner.of_draft.concrete_cudagraph_entries) == 2048
    # No batch is padded to a graph that was not captured, nor in an engine whose memory was only measured.
    for _ in range(2):
        for dispatcher in (runner.cudagraph_dispatcher, runner.drafter.cudagraph_dispatcher):
            assert dispatcher.dispatch(512, uniform_decode=True)[0] == CUDAGraphMode.FULL
            assert dispatcher.dispatch(516, uniform_decode=True)[0] == CUDAGraphMode.NONE
        runner.begin()
    assert runner.capture() == by_vllm


def test_a_size_of_vllms_that_fails_ends_the_start_as_without_the_plugin(
    vllm_tree: Any, entry: journal.Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_recording, "leave_capture", lambda pool, *, broken: None)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another")
    tree = vllm_tree("0.33.0")
    config = made(config_of(), fill_of(tree))
    vars(config.compilation_config)["_hwplugin_largest_mixed"] = 512
    with pytest.raises(RuntimeError, match="out of memory"):
        Runner(tree, config, 256, monkeypatch).capture()
