# SPDX-License-Identifier: Apache-2.0
"""Which live features a worker uses: by its configuration, what outweighs that, and where released workers ask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import FeatureRequired
from vllm_hwplugin.base.gates import PLAIN_DECODE
from vllm_hwplugin.base.run_records import Use
from vllm_hwplugin.base.terms import TERMS, Term
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.spec_decode import capture_sizes, dflash_context_norm, worker_use
from vllm_hwplugin.spec_decode.engine_report import UNNEEDED, unused_by_cause, use_of
from vllm_hwplugin.spec_decode.step_counts import StepCounts

TERMS_OF = {feature.id: feature.uses_when for feature in load_catalogue().features if feature.uses_when}
ALL = TERMS_OF.keys()
SCHEDULED = {"backport-draft-lookahead", "backport-padded-request"}
PASSES = {"draft-full-graph", "draft-loop-graph", "v1-draft-phase"}
#: Eagle3 on either runner, as the scheduler and the worker have it.
ON_V1 = PASSES | SCHEDULED | {"nwor", "v1-step-inputs", "v1-mixed-graphs", "next-token-kernel"}
ON_V1 |= {"backport-recovered-token", "backport-prompt-logprobs"}
NEED_KEYS = {"backport-draft-lookahead", "next-token-kernel"}
#: With recurrent states.
HYBRID = {"backport-mamba-hit", "backport-state-bounds"}
TAIL = {"v2-step-inputs", "v2-tail-graph", "v2-fused-drafts", "v2-capture-metadata"}
SAMPLES = {"backport-nan-logits", "backport-top-k-top-p"}
ON_V2 = TAIL | SCHEDULED | SAMPLES | {"nwor", "v2-mixed-graphs", "v2-draft-metadata", "v2-draft-head"}
DFLASH_V1 = ON_V1 | {"dflash-full-graph", "dflash-context-norm"}
#: It makes the metadata that it captures with, and drafts in one pass.
DFLASH_V2 = ON_V2 - {"v2-fused-drafts", "v2-capture-metadata", "v2-draft-head"} | {
    "dflash-context-norm",
    "backport-dflash-lm-head",
}


def patched_in(names: Iterable[str]) -> dict[str, dict[str, str]]:
    return {name: {"state": "live", "reason": "", "uses_when": "\n".join(TERMS_OF[name])} for name in names}


@pytest.fixture(autouse=True)
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[run_records.RunRecord]:
    """A process in which all features are live, there is Triton, and vLLM's norm was not asked."""
    monkeypatch.setattr(worker_use, "HAS_TRITON", True)
    monkeypatch.setattr(dflash_context_norm, "_answers", {})
    run_records.forget()
    made = run_records.new("1")
    made.vllm_version = "0.33.0+cpu"
    made.features = patched_in(ALL)
    run_records.begin(made, tmp_path)
    yield made
    run_records.forget()


def worker(v2: bool = False, drafter: Any = ..., **changes: Any) -> SimpleNamespace:
    """What is read of vLLM's worker, and nothing more; it drafts with Eagle3.

    Args:
        changes: by the path of an attribute, its parts joined by two underscores.
    """
    spec = SimpleNamespace(
        method="eagle3",
        num_speculative_tokens=3,
        attention_backend=None,
        enforce_eager=False,
        disable_padded_drafter_batch=False,
        use_dflash=lambda: False,
    )
    config = SimpleNamespace(
        speculative_config=spec,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        attention_config=SimpleNamespace(backend=None),
        model_config=SimpleNamespace(
            dtype=torch.float16,
            is_mm_prefix_lm=False,
            enable_sleep_mode=False,
            has_inner_state=False,
            runner_type="generate",
            enforce_eager=False,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0, decode_context_parallel_size=1
        ),
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        kv_transfer_config=None,
        lora_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    if drafter is ...:
        has = {"fused_drafts": None} if v2 else {"draft_graphs": None, "draft_context": None}
        drafter = type("EagleProposer", (SimpleNamespace,), {})(speculative_config=spec, vllm_config=config, **has)
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner: Any = config
        for one in owners:
            owner = getattr(owner, one)
        setattr(owner, name, value)
    runner = SimpleNamespace(
        model=object(),
        vllm_config=config,
        draft_head=object(),
        speculative_config=config.speculative_config,
        sampler=object() if config.model_config.runner_type == "generate" else None,
        **{"speculator" if v2 else "drafter": drafter},
    )
    return SimpleNamespace(
        vllm_config=config, model_runner=runner, use_v2_model_runner=v2, rank=0, is_driver_worker=True
    )


def uses() -> dict[str, Use]:
    entry = run_records.current()
    assert entry is not None
    return entry.uses


def test_features_of_images_are_cleared_where_the_model_keeps_some() -> None:
    one = worker(True)
    one.model_runner.model = SimpleNamespace(deepstack_input_embeds_num_tokens=0)
    assert "backport-image-features" in used(one) - used(worker(True))


def used(one: SimpleNamespace) -> set[str]:
    worker_use.report_worker(one)
    found = uses()
    # Each is spoken of, and each that is not used says why.
    assert found.keys() == ALL
    assert all(bool(use["reason"]) is not use["used"] for use in found.values())
    return {name for name, use in found.items() if use["used"]}


def test_a_worker_answers_each_term() -> None:
    for v2 in (False, True):
        engine = worker_use.EngineFacts(worker(v2))
        for name in TERMS:
            values = {"runner:": ("v1",), "drafter:": ("masks",)}.get(name, ("x",)) if name.endswith(":") else ()
            assert use_of([engine.reason(Term(name, values, None))])["used"] in (True, False)
    # Of the project's own features only these are not asked of a worker.
    assert {feature.id for feature in load_catalogue().features} - ALL == {
        "engine-report",
        "step-metrics",
        "window-blocks",
    }


def test_a_catalogue_from_outside_declares_who_uses_it(entry: run_records.RunRecord) -> None:
    entry.features = {
        "acme/fix": {"state": "live", "reason": "", "uses_when": "method:eagle3\nrunner:v2 if >=0.33"},
        "acme/other": {"state": "live", "reason": ""},
    }
    worker_use.report_worker(worker())
    # Nothing is said of one without terms.
    assert {name: use["used"] for name, use in uses().items()} == {"acme/fix": False}
    entry.vllm_version = "0.32.0"
    worker_use.report_worker(worker())
    assert uses()["acme/fix"]["used"]


METHOD = "speculative_config__method"
MODE = "compilation_config__cudagraph_mode"
DP, PP = "parallel_config__data_parallel_size", "parallel_config__pipeline_parallel_size"


class Loaded:
    """A draft model of vLLM's `llama_eagle3`."""

    __module__ = "vllm.model_executor.models.llama_eagle3"


#: A speculator of Model Runner V2 whose layers have a window.
WINDOWED = SimpleNamespace(attn_groups=[[], [SimpleNamespace(kv_cache_spec=SimpleNamespace(sliding_window=64))]])
PLAIN_V2 = {"backport-top-k-top-p", "v2-step-inputs", "v2-tail-graph", "v2-mixed-graphs"}
MTP_V1 = ON_V1 | {"backport-mtp-embeddings"}


@pytest.mark.parametrize(
    ("v2", "changes", "expected"),
    [
        (False, {}, ON_V1),
        (True, {}, ON_V2),
        (False, {"speculative_config": None, "drafter": None}, set()),
        (True, {"speculative_config": None, "drafter": None}, PLAIN_V2),
        (True, {"speculative_config": None, "drafter": None, "model_config__runner_type": "pooling"}, set()),
        # Another stage drafts; that the pipeline has stages follows from the sizes.
        (False, {"drafter": None, PP: 2}, SCHEDULED | {"nwor", "backport-pipeline-drafts"}),
        (False, {METHOD: "ngram", "drafter": object()}, ON_V1 - PASSES - NEED_KEYS),
        (False, {MODE: CUDAGraphMode.NONE}, ON_V1 - PASSES - {"v1-step-inputs", "v1-mixed-graphs"}),
        (False, {MODE: CUDAGraphMode.FULL}, ON_V1),
        (True, {MODE: CUDAGraphMode.PIECEWISE}, ON_V2 - TAIL),
        (True, {MODE: CUDAGraphMode.FULL}, ON_V2 | {"backport-mixed-graphs"}),
        (False, {"lora_config": object()}, ON_V1 - PASSES),
        (False, {METHOD: "dflash"}, DFLASH_V1),
        (True, {METHOD: "dflash", "drafter": object()}, DFLASH_V2),
        (False, {METHOD: "dflash", "model_config__is_mm_prefix_lm": True}, DFLASH_V1 | {"dflash-draft-backend"}),
        (True, {"speculative_config__num_speculative_tokens": 2}, ON_V2 - {"v2-draft-metadata"}),
        (True, {"model_config__enable_sleep_mode": True}, ON_V2 | {"v2-graph-addresses"}),
        (False, {"structured_outputs_config__reasoning_parser": "qwen3"}, ON_V1 | {"backport-reasoning-end"}),
        (False, {DP: 2}, ON_V1 - PASSES | {"backport-dp-drafter"}),
        (True, {DP: 2}, ON_V2),
        (False, {"kv_transfer_config": object()}, ON_V1 - {"backport-draft-lookahead"}),
        (False, {METHOD: "mtp"}, MTP_V1),
        (True, {METHOD: "mtp"}, ON_V2),
        (False, {METHOD: "mtp", "model_config__has_inner_state": True}, MTP_V1 | HYBRID | {"backport-accepted-rows"}),
        (True, {METHOD: "mtp", "model_config__has_inner_state": True}, ON_V2 | HYBRID),
        (False, {METHOD: "dflash", "drafter": WINDOWED}, DFLASH_V1 - PASSES - {"dflash-full-graph"}),
    ],
)  # fmt: skip
def test_what_an_engine_uses_follows_from_runner_method_and_mode(
    v2: bool, changes: dict[str, Any], expected: set[str]
) -> None:
    assert used(worker(v2, **changes)) == expected


@pytest.mark.parametrize(
    ("v2", "changes", "added"),
    [
        (False, {"model_config__has_inner_state": True, DP: 2}, "backport-vacated-row"),
        (False, {"drafter": SimpleNamespace(model=Loaded())}, "backport-eagle-bias"),
        (True, {METHOD: "dflash", "drafter": WINDOWED}, "backport-draft-schedule"),
        (True, {METHOD: "mtp", "speculative_config__moe_backend": "triton"}, "backport-draft-moe-backend"),
        (
            True,
            {"speculative_config__num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
            "backport-draft-count-graphs",
        ),
    ],
)
def test_a_backport_is_used_where_its_fault_would_be(v2: bool, changes: dict[str, Any], added: str) -> None:
    assert added in used(worker(v2, **changes))


@pytest.mark.parametrize(
    ("version", "v2", "changes", "expected"),
    [
        ("0.20.2", False, {}, True),
        ("0.22.1", False, {}, False),
        ("0.23.0", False, {"model_config__is_mm_prefix_lm": True}, True),
        ("0.24.0", False, {"attention_config__backend": object()}, False),
        ("0.24.0", True, {"attention_config__backend": object()}, True),
        ("0.24.0", True, {"speculative_config__attention_backend": object()}, True),
        ("0.24.0", True, {}, False),
        ("0.25.1", True, {"attention_config__backend": object()}, False),
        ("0.28.0", True, {"model_config__is_mm_prefix_lm": True}, False),
        ("0.28.0", False, {"model_config__is_mm_prefix_lm": True}, True),
    ],
)
def test_a_drafts_own_backend_matters_where_the_version_has_the_fault(
    entry: run_records.RunRecord, version: str, v2: bool, changes: dict[str, Any], expected: bool
) -> None:
    entry.vllm_version = version
    assert ("dflash-draft-backend" in used(worker(v2, **{METHOD: "dflash", **changes}))) is expected


@pytest.mark.parametrize(("version", "expected"), [("0.31.0", [True, True]), ("0.32.0", [False, True])])
def test_v1_compiles_fewer_kernels_of_top_k_and_top_p_where_the_version_has_more(
    entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch, version: str, expected: list[bool]
) -> None:
    entry.vllm_version = version
    assert ["backport-top-k-top-p" in used(worker(v2)) for v2 in (False, True)] == expected
    monkeypatch.setattr(worker_use, "HAS_TRITON", False)
    assert "backport-top-k-top-p" not in used(worker(v2=True))


def test_capture_sizes_are_used_where_they_are_set_and_captured() -> None:
    for v2, changes, left, expected in (
        (False, {}, "", True),
        (True, {"drafter": None}, "", True),
        # What the attention backend decided later.
        (False, {MODE: CUDAGraphMode.PIECEWISE}, "", False),
        (False, {"speculative_config": None}, "without a drafter only Model Runner V2 has graphs of the plugin", False),
    ):
        one = worker(v2, **changes)
        vars(one.vllm_config.compilation_config)[capture_sizes._LEFT] = left
        assert ("capture-sizes" in used(one)) is expected


def test_the_first_stage_of_a_pipeline_without_a_drafter_leaves_sampling_to_the_last() -> None:
    one = worker(True, drafter=None, speculative_config=None, **{PP: 2})
    one.model_runner.sampler, one.model_runner.is_last_pp_rank = None, False
    vars(one.vllm_config.compilation_config)[capture_sizes._LEFT] = ""
    assert used(one) == {"capture-sizes", "v2-mixed-graphs", "backport-top-k-top-p"}
    assert uses()["v2-tail-graph"]["cause"] == uses()["v2-step-inputs"]["cause"] == TERMS["drafts-here"]


def test_linear_layers_overlap_where_the_gpu_and_the_models_type_have_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [(False, torch.bfloat16), (True, torch.float16), (True, torch.bfloat16)]
    found = []
    for here, dtype in asked:
        monkeypatch.setattr(worker_use.layers, "ON_HOPPER", here)
        found.append("linear" in used(worker(True, model_config__dtype=dtype)))
    assert found == [False, False, True]


def test_an_operation_that_honours_weight_rows_leaves_the_norm_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for honours, expected in ((True, False), (False, True)):
        monkeypatch.setattr(dflash_context_norm, "_answers", {"a question": True, "another": honours})
        assert ("dflash-context-norm" in used(worker(**{METHOD: "dflash"}))) is expected


@pytest.mark.parametrize(
    ("cache", "hopper", "mode", "named"),
    [
        ("fp8_e4m3", False, CUDAGraphMode.PIECEWISE, True),
        ("fp8_e4m3", True, CUDAGraphMode.PIECEWISE, False),
        ("auto", False, CUDAGraphMode.PIECEWISE, False),
        ("fp8_e4m3", False, CUDAGraphMode.NONE, False),
    ],
)
def test_where_a_quantized_cache_may_cost_the_graphs_the_report_says_what_keeps_them(
    cache: str, hopper: bool, mode: CUDAGraphMode, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_use.current_platform, "device_type", "cuda", raising=False)
    monkeypatch.setattr(worker_use.current_platform, "has_device_capability", lambda _: hopper, raising=False)
    worker_use.report_worker(worker(v2=True, **{MODE: mode, "cache_config__cache_dtype": cache}))
    cure = uses()["v2-step-inputs"]["cure"]
    assert ("--attention-backend TRITON_ATTN" in cure) is named


def test_features_are_named_by_the_cause_that_they_share_with_what_to_change(
    entry: run_records.RunRecord, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without CUDA graphs: one cause for the graphs, the drafter and the runner for the others."""
    monkeypatch.setattr(worker_use.current_platform, "device_type", "cuda", raising=False)
    run_records.use("draft-full-graph", False, "found at capture")
    with caplog.at_level("INFO", "vllm.hwplugin"):
        worker_use.report_worker(worker(**{MODE: CUDAGraphMode.NONE, "model_config__enforce_eager": True}))
    assert "--enforce-eager" in uses()["draft-full-graph"]["cure"]
    lines = unused_by_cause(uses())
    for cause in ("--enforce-eager", "Model Runner V1", "the drafter is eagle3"):
        assert sum(cause in line for line in lines) == 1
    assert lines[-1].startswith(UNNEEDED)
    assert len(caplog.messages) == 1
    # What the feature found out by itself keeps the cause.
    assert uses()["draft-full-graph"]["reason"] == "found at capture"


def test_graphs_without_speculation_are_those_of_v2_and_count_steps(
    entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, engines, reasons = [], [], []
    for asked, v2, sampler in ((0, True, object()), (1, True, None), (1, False, object()), (1, True, object())):
        monkeypatch.setenv(PLAIN_DECODE, str(asked))
        one = worker(v2, drafter=None, speculative_config=None)
        one.model_runner.sampler = sampler
        found.append(used(one))
        engines.append(entry.engine)
        reasons.append(uses()["v2-tail-graph"]["reason"])
    narrows = {"backport-top-k-top-p"}
    assert found == [narrows, narrows, set(), PLAIN_V2]
    assert engines == [None, None, None, 0]
    for word, reason in zip((f"{PLAIN_DECODE} is off", "nothing is sampled", "Model Runner V1"), reasons, strict=False):
        assert word in reason


def test_a_feature_that_is_on_ends_the_start_of_an_engine_that_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_DRAFT_FULL_GRAPH", "on")
    with pytest.raises(FeatureRequired, match=r"VLLM_HWPLUGIN_DRAFT_FULL_GRAPH=on.*Model Runner V2"):
        worker_use.report_worker(worker(v2=True))
    # Another stage of the pipeline drafts.
    worker_use.report_worker(worker(v2=True, drafter=None))
    # What mends a fault is not missed where the fault is not.
    monkeypatch.setenv("VLLM_HWPLUGIN_DRAFT_FULL_GRAPH", "auto")
    monkeypatch.setenv("VLLM_HWPLUGIN_DFLASH_CONTEXT_NORM", "on")
    assert "dflash-context-norm" not in used(worker(v2=True))


def test_steps_count_from_the_report_on_and_one_rank_speaks_for_the_engine(entry: run_records.RunRecord) -> None:
    counts = StepCounts("a-feature", "part")
    counts.served()
    one, engines = worker(parallel_config__data_parallel_index=3), []
    drafter = one.model_runner.drafter
    for driver, found in ((False, drafter), (True, None), (True, drafter)):
        one.is_driver_worker, one.model_runner.drafter = driver, found
        worker_use.report_worker(one)
        engines.append(entry.engine)
    assert engines == [None, None, 3]
    assert counts.outcomes() == {}


def test_a_vllm_that_keeps_its_facts_elsewhere_costs_the_report_and_not_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker_use.report_worker(SimpleNamespace(vllm_config=None))
    assert uses() == {}
    (line,) = caplog.records
    assert (line.levelname, line.exc_info is not None) == ("WARNING", True)


# -- every released worker --------------------------------------------------------------------------------------------
