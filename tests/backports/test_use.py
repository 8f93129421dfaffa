# SPDX-License-Identifier: Apache-2.0
"""Which backports an engine uses: what a worker says of vLLM's own configurations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from packaging.version import Version
from vllm.config import (
    CUDAGraphMode,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    VllmConfig,
)

from vllm_hwplugin import journal
from vllm_hwplugin.journal import Use
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.spec_decode import worker_use

SMALL = Path(__file__).parents[1] / "assets" / "small"

BACKPORTS = {feature.id for feature in load_catalogue().features if feature.id.startswith("backport-")}
# By the configuration of the tests' engines alone; what a worker finds in its drafter is added to it.
ALWAYS = {"backport-padded-request"}
WITH_MODEL = ALWAYS | {"backport-draft-lookahead"}


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return ModelConfig(model=str(SMALL / "target"), dtype="float16", max_model_len=128)


def uses(
    target: ModelConfig,
    method: str | None,
    *,
    v2: bool = False,
    parser: str = "",
    drafter: Any = None,
    mode: str = "FULL_AND_PIECEWISE",
    connector: str | None = None,
    **parallel: int,
) -> dict[str, Use]:
    """What a worker says of each backport in an engine of this configuration, with all of them live."""
    sizes = ParallelConfig(**parallel)
    options = {
        "ngram": {"prompt_lookup_max": 3},
        "eagle3": {"model": str(SMALL / "eagle3")},
        "dflash": {"model": str(SMALL / "dflash")},
    }
    config = VllmConfig(
        model_config=target,
        parallel_config=sizes,
        kv_transfer_config=connector and KVTransferConfig(kv_connector=connector, kv_role="kv_both"),
        structured_outputs_config=StructuredOutputsConfig(reasoning_parser=parser),
        speculative_config=method
        and SpeculativeConfig(
            method=method,
            num_speculative_tokens=3,
            target_model_config=target,
            target_parallel_config=sizes,
            **options[method],
        ),
    )
    # A CPU has none.
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    drafter = drafter or (method and SimpleNamespace(model=None))
    runner = SimpleNamespace(**{"speculator" if v2 else "drafter": drafter or None})
    worker = SimpleNamespace(vllm_config=config, model_runner=runner, use_v2_model_runner=v2, rank=0)
    entry = journal.new("1")
    entry.vllm_version = "0.26.0"
    return worker_use.uses_of(worker_use.worker_facts(worker, entry), BACKPORTS)


def used(found: dict[str, Use]) -> set[str]:
    # Each one is spoken of, and each that is not used says why.
    assert found.keys() == BACKPORTS
    assert all(bool(use["reason"]) is not use["used"] for use in found.values())
    return {name for name, use in found.items() if use["used"]}


def windowed(size: int | None) -> Any:
    """A speculator of Model Runner V2 whose layers have a window."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(sliding_window=size))
    return SimpleNamespace(model=None, attn_groups=[[], [group]])


class Loaded:
    """A draft model of vLLM's `llama_eagle3`."""

    __module__ = "vllm.model_executor.models.llama_eagle3"


def test_each_backport_says_whether_an_engine_uses_it(target: ModelConfig) -> None:
    assert used(uses(target, None)) == set()
    assert used(uses(target, "ngram")) == ALWAYS | {"backport-recovered-token"}
    assert used(uses(target, "eagle3")) == WITH_MODEL | {"backport-recovered-token"}
    assert used(uses(target, "eagle3", v2=True)) == WITH_MODEL | {"backport-nan-logits"}


def test_what_the_configuration_adds(target: ModelConfig) -> None:
    v1, v2 = (used(uses(target, "eagle3", v2=v2)) for v2 in (False, True))
    assert used(uses(target, "eagle3", parser="qwen3")) - v1 == {"backport-reasoning-end"}
    assert used(uses(target, "eagle3", data_parallel_size=2)) - v1 == {"backport-dp-drafter"}
    assert used(uses(target, "eagle3", data_parallel_size=2, v2=True)) == v2
    assert v1 - used(uses(target, "eagle3", connector="NixlConnector")) == {"backport-draft-lookahead"}
    assert used(uses(target, "ngram", data_parallel_size=2)) == used(uses(target, "ngram"))
    assert used(uses(target, "eagle3", mode="FULL", v2=True)) - v2 == {"backport-mixed-graphs"}
    assert used(uses(target, "eagle3", mode="FULL")) == v1
    assert used(uses(target, "eagle3", pipeline_parallel_size=2, v2=True)) - v2 == {"backport-pipeline-drafts"}


def test_what_the_drafter_adds(target: ModelConfig) -> None:
    v1 = used(uses(target, "eagle3"))
    assert used(uses(target, "eagle3", drafter=SimpleNamespace(model=Loaded()))) - v1 == {"backport-eagle-bias"}
    full, window = (used(uses(target, "dflash", v2=True, drafter=windowed(size))) for size in (None, 64))
    assert window - full == {"backport-draft-schedule"}
    assert used(uses(target, "dflash", drafter=windowed(64))) == v1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"method": "mtp"}, "backport-mtp-embeddings"),
        ({"mamba": True, "data_parallel_ranks": 2}, "backport-vacated-row"),
    ],
)
def test_models_that_are_not_at_hand(changes: dict[str, Any], name: str) -> None:
    facts = worker_use.WorkerFacts(Version("0.26.0"), worker_use.V1, **changes)
    assert worker_use.uses_of(facts, [name])[name]["used"]
    facts = dataclasses.replace(facts, runner=worker_use.V2)
    assert "Model Runner V2" in worker_use.uses_of(facts, [name])[name]["reason"]
