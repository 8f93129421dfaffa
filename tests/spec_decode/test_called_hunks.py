# SPDX-License-Identifier: Apache-2.0
"""Methods of vLLM that no engine of the tests runs in each version are called where a hunk has changed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.spec_decode import worker_use
from vllm_hwplugin.spec_decode.v2 import recording

from ..conftest import versions
from ..released import text_of
from .called_text import Seen, Text, added_lines
from .test_patched_runners import FACTS
from .walks import UNPATCHED


class Called(NamedTuple):
    """A method of a module, what it calls or sets by a feature's hunk, what decides about its way, its arguments."""

    feature: str
    path: str
    method: str
    hook: str
    facts: Mapping[str, Any] = {}
    given: Mapping[str, Any] = {}


#: Graphs of two sizes.
SIZES = [SimpleNamespace(num_tokens=size, num_reqs=1) for size in (2, 1)]
SHAPES = [(CUDAGraphMode.FULL, SIZES)]
CALLED = (
    *(
        Called(
            "v2-tail-graph",
            "vllm/v1/worker/gpu/spec_decode/draft_model/speculator.py",
            f"PlainDraftModelSpeculator.{method}",
            hook,
            given={"skip_attn": False},
        )
        for method, hook in (("_prefill", "mask_extended(self)"), ("_multi_step_decode", "mask_decode(self)"))
    ),
    Called(
        "v2-tail-graph",
        "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py",
        "DFlashSpeculator.propose",
        "mask_block(self, self.",
    ),
    Called(
        "engine-report", "vllm/v1/worker/cpu_worker.py", "CPUWorker.compile_or_warm_up_model", "report_worker(self)"
    ),
    Called(
        "engine-report",
        "vllm/v1/worker/gpu_worker.py",
        "Worker.compile_or_warm_up_model",
        "report_worker(self)",
        {"enforce_eager": False, "capture_model()": 1},
    ),
    Called(
        "window-blocks",
        "vllm/v1/core/kv_cache_manager.py",
        "KVCacheManager.allocate_slots",
        "window_blocks.remove_skipped_blocks(self.coordinator, request, ",
    ),
    Called(
        "window-blocks",
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler._connector_finished",
        "window_blocks.remove_skipped_blocks(self.kv_cache_manager.coordinator, request, request.num_computed_tokens",
    ),
    Called(
        "capture-sizes",
        "vllm/v1/attention/backends/mla/flashattn_mla.py",
        "FlashAttnMLAMetadataBuilder._build_decode",
        "max_num_splits_of(self, ",
    ),
    Called(
        "capture-sizes",
        "vllm/v1/worker/gpu_worker.py",
        "Worker.determine_available_memory",
        "if cudagraph_memory_estimate",
        {
            "kv_cache_memory_bytes": None,
            "cudagraph_mode": CUDAGraphMode.FULL,
            "profile_cudagraph_memory()": 1,
            "total_memory": 1,
            "gpu_memory_utilization": 1,
        },
    ),
    Called(
        "capture-sizes",
        "vllm/v1/worker/gpu_model_runner.py",
        "GPUModelRunner.profile_cudagraph_memory",
        "settled(self, ",
        {"get_capture_descs()": SHAPES, "settled()": SHAPES, "sampled()": SIZES, "two_samples()": ([3, 2], 1)},
    ),
    Called(
        "dflash-draft-backend",
        "vllm/v1/worker/gpu_model_runner.py",
        "GPUModelRunner._reshape_kv_cache_tensors",
        "layouts_clash(self, kernel_block_sizes",
        {"layer_names": ["layer"], "numel()": 4, "page_size_bytes": 2, "page_size_padded": None},
    ),
    Called(
        "draft-full-graph",
        "vllm/v1/worker/gpu_model_runner.py",
        "GPUModelRunner._check_and_update_cudagraph_mode",
        "self.drafter.initialize_cudagraph_keys(",
    ),
    Called(
        "backport-mixed-graphs",
        "vllm/v1/worker/gpu/model_runner.py",
        "GPUModelRunner.execute_model",
        "input_batch.max_query_len",
        {**FACTS, "max_query_len": None, "uniform_token_count": None},
    ),
)


def covered(called: Called) -> list[str]:
    feature = load_catalogue().feature(called.feature)
    assert feature is not None
    name = called.hook.partition("(")[0]
    hunks = [
        hunk
        for file in feature.files
        if file.path == called.path
        for hunk in file.hunks
        if any(sign == "+" and name in line for sign, line in hunk.lines)
    ]
    return [one for one in SUPPORTED if feature.versions.covers(one) and any(hunk.covers(one) for hunk in hunks)]


def each_version(called: Called) -> Iterator[Any]:
    """Yield the method with each version that has another text; some are slow."""
    for one in versions(called.path, among=covered(called)):
        (version,), marks = ((one,), ()) if isinstance(one, str) else (one.values, one.marks)
        yield pytest.param(called, version, marks=marks, id=f"{called.feature}-{called.method}-{version}")


@pytest.mark.parametrize(("called", "version"), [param for one in CALLED for param in each_version(one)])
def test_a_patched_method_runs_what_was_added(
    called: Called, version: str, vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = vllm_tree(version)
    stock, patched = text_of(tree, called.path, **UNPATCHED), text_of(tree, called.path)
    owner, _, method = called.method.partition(".")
    text = Text(patched, owner, called.facts)
    monkeypatch.setattr(worker_use, "report_worker", Seen("report_worker", text))
    for name in ("mask_block", "mask_extended", "mask_decode"):
        monkeypatch.setattr(recording, name, Seen(name, text))
    added = added_lines(stock, patched)
    # 0.33's worker calls it in another method of this name.
    text.run(method if method in text.methods_at(added) else f"_{method}", Seen("self", text), **called.given)
    assert "(" not in called.hook or [call for call in text.calls if call.startswith(called.hook)], text.calls
    assert added & text.code <= text.lines
