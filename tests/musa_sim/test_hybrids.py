# SPDX-License-Identifier: Apache-2.0
"""A hybrid of attention and a delta rule on both model runners, with graphs and without, on the simulated device."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin_lab.bench._shapes import NO_DRAFTS, SHAPES, Recurrent, write_configs

from . import checkpoints, loads
from .loads import Load, Process, Request, Run
from .test_engines import V1, texts

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

DRAFTS = 3
V2 = loads.UNPATCHED | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
GRAPHS = {gate_of(one): "on" for one in ("v2-tail-graph", "v2-step-inputs", "v2-graph-addresses")}
# Not all of the engines can have these graphs.
GRAPHS |= {gate_of(one): "auto" for one in ("engine-report", "v2-mixed-graphs", "backport-mixed-graphs")}
NAMED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8, 16]}
#: Qwen3-Next in small.
SMALL = dataclasses.replace(
    SHAPES["qwen3-next-4l"],
    layers=4,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=64,
    intermediate=128,
    vocabulary=4096,
    more={
        **SHAPES["qwen3-next-4l"].more,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    recurrent=Recurrent(key_heads=2, value_heads=4, head_dim=32),
)


def options(folder: Path) -> dict[str, Any]:
    target, _ = write_configs(SMALL, folder, "mtp", DRAFTS + 1)
    return {
        **loads.Engine("eagle3", drafts=DRAFTS).on_musa(),
        **loads.dummies(target, {"method": "mtp", "num_speculative_tokens": DRAFTS}),
        "enable_prefix_caching": True,
        "gdn_prefill_backend": "triton",
    }


def written(folder: Path) -> Path:
    """The same model with weights; the layer that drafts is the last one's, over both of its inputs."""
    target, _ = write_configs(SMALL, folder, "mtp", DRAFTS + 1)
    size = SMALL.hidden
    # Norms count from 1.
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    drafts = {f"mtp.{name}.weight": torch.zeros(size) for name in norms}
    drafts["mtp.fc.weight"] = torch.cat([torch.eye(size), torch.eye(size) / 2], 1)
    config = json.loads((target / "config.json").read_text())
    return checkpoints.by_chance(target, config, SMALL.layers - 1, "mtp.layers.0.", drafts)


#: Each ends in its second block, of 48 tokens.
ASKED = [
    Request(name, list(range(3 + number, 43 + number)), number, {"max_tokens": 16, "temperature": temperature})
    for number, (name, temperature) in enumerate((("a", 0.0), ("b", 0.8), ("c", 0.0)))
]


def coming_and_going() -> list[Request]:
    """Greedy ones, in batches that graphs are larger than. What padding moves shows in log probabilities."""
    chosen = random.Random(3)
    times = ((0, 6), (0, 8), (0, 26), (0, 26), (9, 16), (14, 6), (16, 6), (20, 16))
    return [
        Request(
            f"r{number}",
            [chosen.randrange(1, 4000) for _ in range(chosen.randrange(5, 40))],
            at,
            {"max_tokens": tokens, "temperature": 0.0, **({"logprobs": 3} if number in (2, 3, 6) else {})},
        )
        for number, (at, tokens) in enumerate(times)
    ]


def with_prompts() -> list[Request]:
    """Prompts of one token and more, in pieces of 20, that come alone, together, and while others decode."""
    chosen = random.Random(7)
    lengths = ((0, 26), (1, 45), (3, 1), (3, 13), (6, 63), (8, 21), (8, 5), (14, 40), (17, 2), (19, 30))
    return [
        Request(
            f"r{number}",
            [chosen.randrange(1, 4000) for _ in range(length)],
            at,
            {"max_tokens": 8 + number % 5, "temperature": 0.8 if number % 4 == 3 else 0.0, "seed": number},
        )
        for number, (at, length) in enumerate(lengths)
    ]


def many() -> list[Request]:
    chosen = random.Random(7)
    return [
        Request(f"r{number}", chosen.choices(range(1, 4000), k=length), at, {"max_tokens": 7, "temperature": 0.0})
        for number, (at, length) in enumerate([*[(0, 2)] * 66, (3, 9), (4, 15)])
    ]


def loads_of_v2(folder: Path) -> dict[str, Load]:
    """By name; what makes attention of any batch stays for a process, so its engines are the last."""
    made = options(folder / "model")
    target, _ = write_configs(SMALL, folder / "without a drafter", NO_DRAFTS, 1)
    plain = {**loads.Engine(None).on_musa(), "model": str(target), "load_format": "dummy", "skip_tokenizer_init": True}
    pieces = made | {
        "long_prefill_token_threshold": 20,
        "num_gpu_blocks_override": 60,
        "compilation_config": NAMED | {"cudagraph_capture_sizes": [4, 8, 16, 24, 64]},
    }
    crowded = made | {
        "enable_prefix_caching": False,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "max_num_seqs": 76,
        "max_num_batched_tokens": 152,
        "num_gpu_blocks_override": 600,
        "compilation_config": NAMED | {"cudagraph_capture_sizes": [2, 152]},
    }
    # With vLLM's own dummy weights a state that is not moved would not show.
    common: dict[str, Any] = {"delta_rule": True, "autotuned": False, "initialised": True}
    mixed = common | {"unknown": "any batch, metadata is shared"}
    return {
        "decoding": Load(made, ASKED, **common),
        "no drafter": Load({**plain, "gdn_prefill_backend": "triton"}, coming_and_going(), **common),
        "prompts": Load(pieces | {"enable_prefix_caching": False}, with_prompts(), **mixed),
        "prompts, prefix cache": Load(pieces, with_prompts(), **mixed),
        "many": Load(crowded, many(), **mixed),
    }


@pytest.fixture(scope="module")
def v2(
    musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Run, Run]]:
    """By load, runs without features and with graphs."""
    folder = tmp_path_factory.mktemp("hybrids on V2")
    return loads.run_both(loads_of_v2(folder / "models"), V2, V2 | GRAPHS, folder, newest)


def test_graphs_change_nothing(v2: dict[str, tuple[Run, Run]]) -> None:
    """With prefix caching, so that states move between blocks.

    No request comes that would find the state kept at the end of a block.
    """
    expected, found = v2["decoding"]
    loads.assert_same(expected, found)
    assert (expected.runner, found.runner) == ("V2", "V2")
    assert {"v2-tail-graph", "v2-step-inputs"} <= set(found.used)
    assert 0 < expected.accepted()[-1] < expected.accepted()[0]
    assert found.counted["v2-tail-graph drafting"]["served"] > 3
    assert found.counted["v2-step-inputs inputs"]["served"] > 3


def test_nor_do_they_without_a_drafter(v2: dict[str, tuple[Run, Run]]) -> None:
    expected, found = v2["no drafter"]
    loads.assert_same(expected, found)
    assert {"v2-tail-graph", "v2-step-inputs"} <= set(found.used)
    assert found.counted["v2-tail-graph sampling"]["served"] > 5
    assert found.counted["v2-step-inputs inputs"]["served"] > 10
    assert "attention metadata is vLLM's" in found.noted["v2-step-inputs"]


@pytest.mark.parametrize("name", ["prompts", "prompts, prefix cache"])
def test_steps_with_prompts_are_replays(name: str, v2: dict[str, tuple[Run, Run]]) -> None:
    """Of target and draft, but for steps with more prompts than a graph holds, or with as many tokens as it has."""
    expected, found = v2[name]
    loads.assert_same(expected, found)
    assert "v2-mixed-graphs" in found.used
    assert 0 < expected.accepted()[-1] < expected.accepted()[0]
    assert not found.preempted
    before, after = (run.counts["graph_replays"]["target"] for run in (expected, found))
    assert before + 10 < after == found.counts["steps"]


def test_so_are_steps_with_more_than_64_requests(v2: dict[str, tuple[Run, Run]]) -> None:
    """But for the first, which has more prompts than a graph holds."""
    expected, found = v2["many"]
    loads.assert_same(expected, found)
    batches = [set(step["verified"].values()) for step in found.steps if len(step["scheduled"]) == 66]
    assert max(found.widths()) > 66
    decodes = batches.count({1})
    assert decodes > 1
    before, after = (run.counts["graph_replays"]["target"] for run in (expected, found))
    assert before + 1 < after == found.counts["steps"] - 1
    for path in ("v2-step-inputs inputs", "v2-tail-graph sampling", "v2-tail-graph drafting"):
        assert found.counted[path]["served"] >= decodes, found.counted


def load_of_float32(folder: Path) -> Load:
    model = written(folder / "written")
    made = options(folder / "model") | {"enable_prefix_caching": False, "compilation_config": NAMED}
    made |= {"model": str(model), "load_format": "auto"}
    made["speculative_config"] = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    return Load(made, [one for one in ASKED if one.greedy], delta_rule=True, autotuned=False)


def assert_texts_are_those_of_float32(load: Load, run: Run) -> None:
    assert (run.runner, run.platform) == ("V1", "MusaPlatform")
    assert texts(run) == checkpoints.in_float32(Path(load.options["model"]), load.requests)
    assert run.counts["graph_replays"]["target"] > 10


def test_on_v1_texts_are_those_of_float32(
    released: Callable[[str], tuple[str, Path]], musa_host: None, tmp_path: Path
) -> None:
    """On the vLLM for MUSA's torch."""
    load = load_of_float32(tmp_path)
    host = loads.musa(tmp_path / "host", released("0.26.0"), **V1)
    assert_texts_are_those_of_float32(load, Process({"": load}, host).run(tmp_path / "engine")[""])


def test_on_v1_drafts_are_verified_in_pieces_and_in_full_graphs_where_they_are_named(
    musa_host: None, newest: tuple[str, Path], tmp_path: Path
) -> None:
    """By default, and as vllm-musa's recipe names it; over mate. Whether a device does either right, is not shown."""
    made = options(tmp_path / "model") | {"enable_prefix_caching": False}
    graphs = {
        "eager": {"mode": 0, "cudagraph_mode": "NONE"},
        # Inductor generates no code for MUSA in torch's own build.
        "default": {"mode": 3, "backend": "eager", "cudagraph_capture_sizes": [4, 8, 16]},
        "named": NAMED,
    }
    engines = {
        name: Load(made | {"compilation_config": asked}, ASKED, delta_rule=True, autotuned=False, initialised=True)
        for name, asked in graphs.items()
    }
    in_float32 = load_of_float32(tmp_path / "float32")
    host = loads.musa(tmp_path / "host", newest, **V1)
    runs = Process(engines | {"float32": in_float32}, host).run(tmp_path / "engines")
    assert_texts_are_those_of_float32(in_float32, runs.pop("float32"))
    for run in runs.values():
        assert (run.runner, run.platform) == ("V1", "MusaPlatform")
        assert "MusaFlashAttentionBackend" in run.attention
        loads.assert_same(runs["eager"], run)
    assert 0 < runs["eager"].accepted()[-1] < runs["eager"].accepted()[0]
    assert runs["eager"].counts["graph_replays"]["target"] == 0
    assert "PIECEWISE" in runs["default"].unused["draft-full-graph"]
    assert runs["default"].counts["graph_replays"]["target"] > runs["default"].counts["steps"]
    assert "draft-full-graph" in runs["named"].used
    assert 0 < runs["named"].counts["graph_replays"]["target"] <= runs["named"].counts["steps"]
