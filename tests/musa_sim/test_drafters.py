# SPDX-License-Identifier: Apache-2.0
"""Drafters of other kinds, and adapters, on Model Runner V2, with graphs and without, on the simulated device."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin_lab.bench._shapes import SHAPES, write_configs

from . import loads
from .counting_processor import Counting
from .loads import Engine, Load, Request, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

DRAFTS = 3
GRAPHS = ("v2-step-inputs", "v2-tail-graph")


def _write(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dflash2(folder: Path) -> dict[str, Any]:
    """A draft that walks through candidates, beside the small trained target."""
    trained = json.loads((loads.SMALL / "dflash" / "config.json").read_text())
    walk = {"conv_kernel_size": 2, "conv_group_size": 64, "selector_rank": 16, "selector_top_k": 4}
    config = {**trained, "architectures": ["DFlash2DraftModel"], "block_size": 1 + DRAFTS}
    config["dflash_config"] = {**trained["dflash_config"], **walk}
    draft = _write(folder / "draft", config)
    return loads.dummies(
        loads.SMALL / "target",
        {
            "method": "dflash",
            "model": str(draft),
            "num_speculative_tokens": DRAFTS,
            "draft_sample_method": "probabilistic",
        },
    )


def with_head(folder: Path, method: str, config: Mapping[str, Any], head: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return options of the small trained target and DFlash draft, with more weights in the draft."""
    draft = _write(folder / "draft", config)
    trained = load_file(loads.SMALL / "dflash" / "model.safetensors")
    more = {name: value.to(torch.bfloat16) for name, value in head.items()}
    save_file({**trained, **more}, draft / "model.safetensors")
    speculation = {"method": method, "model": str(draft), "num_speculative_tokens": DRAFTS}
    options = loads.dummies(loads.SMALL / "target", speculation)
    del options["load_format"]
    return options


def dspark(folder: Path, confident: bool = False) -> dict[str, Any]:
    """A draft whose blocks begin with a token to predict, and which samples their tokens one after another.

    Args:
        confident: whether it says how likely each token is accepted, for adaptive verification.
    """
    trained = json.loads((loads.SMALL / "dflash" / "config.json").read_text())
    config = {**trained, "architectures": ["Qwen3DSparkModel"], "block_size": DRAFTS, "markov_rank": 16}
    chance = torch.Generator().manual_seed(0)
    head = {
        f"markov_head.markov_w{part}.weight": 0.2 * torch.randn((trained["vocab_size"], 16), generator=chance)
        for part in (1, 2)
    }
    if confident:
        config["enable_confidence_head"] = True
        head["confidence_head.proj.weight"] = 0.5 * torch.randn((1, trained["hidden_size"]), generator=chance)
        head["confidence_head.proj.bias"] = torch.zeros(1)
    return with_head(folder, "dspark", config, head)


def lilicorr(folder: Path) -> dict[str, Any]:
    """The small trained DFlash draft with a head over its candidates, whose weights are random.

    vLLM makes what the head reads only where it loads weights, so these cannot be dummies.
    """
    trained = json.loads((loads.SMALL / "dflash" / "config.json").read_text())
    wide, narrow, factors, heads, candidates, block = trained["hidden_size"], 64, 16, 2, 4, trained["block_size"]
    head = {
        "hidden_size": narrow,
        "candidate_topk": candidates,
        "num_heads": heads,
        "mlp_ratio": 2,
        "factor_dim": factors,
        "vector_eps": 1e-6,
        "logit_scale": 4.0,
        "num_layers": 1,
    }
    config = {**trained, "architectures": ["LiLiCorrDraftModel"]}
    config["dflash_config"] = {
        **trained["dflash_config"],
        **{f"lilicorr_{name}": value for name, value in head.items()},
    }
    linear = {
        "token_proj": (narrow, wide),
        "pass_hidden_proj": (narrow, wide),
        "context_proj": (narrow, wide),
        "feature_mlp.up_proj": (narrow, 5),
        "feature_mlp.down_proj": (narrow, narrow),
        "layers.0.attn.out_proj": (narrow, narrow),
        "layers.0.mlp.up_proj": (2 * narrow, narrow),
        "layers.0.mlp.down_proj": (narrow, 2 * narrow),
        "factor_input_proj": (narrow, 3 * narrow),
        "out_head": (factors, narrow),
        "in_head": (factors, narrow),
        "anchor_out_head": (factors, narrow),
    }
    sizes: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in linear.items()}
    sizes |= {f"{name}.bias": size[:1] for name, size in linear.items()}
    sizes |= {
        "layers.0.attn.in_proj_weight": (3 * narrow, narrow),
        "layers.0.attn.in_proj_bias": (3 * narrow,),
        "feature_norm.bias": (5,),
        "slot_embedding": (1, 1, block - 1, 1, narrow),
        "rank_embedding": (1, 1, 1, candidates, narrow),
        "relative_slot_bias": (heads, 2 * block - 1),
        "same_slot_bias": (heads,),
    }
    chance = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(size, generator=chance) for name, size in sizes.items()}
    norms = ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm")
    weights |= {f"{name}.weight": torch.ones(narrow) for name in norms} | {"feature_norm.weight": torch.ones(5)}
    return with_head(folder, "dflash", config, {f"lilicorr.{name}": value for name, value in weights.items()})


def gemma4(folder: Path) -> dict[str, Any]:
    """A draft without keys of its own, whose positions stay the same."""
    shape = SHAPES["gemma-4-e4b"]
    assert shape.assistant is not None
    heads = {"sliding_window": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
    text = heads | {"vocab_size": 4096, "head_dim": 64, "hidden_size": 64, "intermediate_size": 256}
    text |= {"layer_types": layers["layer_types"][:2], "num_hidden_layers": 2, "num_kv_shared_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    small = dataclasses.replace(
        shape,
        layers=4,
        hidden=128,
        heads=2,
        kv_heads=1,
        head_dim=64,
        intermediate=256,
        vocabulary=4096,
        more={**shape.more, **heads, **layers},
        assistant={
            **shape.assistant,
            "backbone_hidden_size": 128,
            "use_ordered_embeddings": False,
            "text_config": {**shape.assistant["text_config"], **text},
        },
    )
    target, draft = write_configs(small, folder, "mtp", DRAFTS + 1)
    return loads.dummies(target, {"method": "mtp", "model": str(draft), "num_speculative_tokens": DRAFTS})


def scheduled() -> dict[str, Any]:
    """Four drafts for one request, two for two or three, one for more, up to five of which are padded to six."""
    engine = Engine("dflash", drafts=4)
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 3, 2], [4, 6, 1]]}
    made = dataclasses.replace(engine, more={"speculative_config": engine.speculation["speculative_config"] | schedule})
    options = {**made.on_musa(), "num_gpu_blocks_override": 60}
    # vLLM rounds them up to whole requests of each length.
    options["compilation_config"]["cudagraph_capture_sizes"] = [5, 12]
    return options


def growing() -> list[Request]:
    """Requests of which there are one, then some, then many at a time, and fewer again; twice."""
    asked = loads.by_temperature()
    begins, tokens = (0, 5, 6, 9, 10, 30), (50, 28, 24, 12, 10, 24)
    return [
        dataclasses.replace(one, at=at, params={**one.params, "max_tokens": most})
        for one, at, most in zip(asked, begins, tokens, strict=True)
    ]


def adapter(folder: Path, targets: Sequence[str]) -> str:
    """A LoRA adapter of the small target, in all of its attention, and in its head where that is among the targets."""
    config = json.loads((loads.SMALL / "target" / "config.json").read_text())
    heads, hidden = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    sizes = {f"model.layers.{layer}.self_attn.o_proj": (heads, hidden) for layer in range(config["num_hidden_layers"])}
    if "lm_head" in targets:
        sizes["lm_head"] = (hidden, config["vocab_size"])
    rank, chance = 4, torch.Generator().manual_seed(0)
    weights = {
        f"base_model.model.{module}.lora_{side}.weight": 0.1 * torch.randn(size, generator=chance)
        for module, (into, out) in sizes.items()
        for side, size in (("A", (rank, into)), ("B", (out, rank)))
    }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return str(folder)


def with_adapters(engine: Engine, folder: Path, targets: Sequence[str], unknown: str = "") -> Load:
    """Return few tokens of requests, of which each second one has an adapter.

    Triton's interpreter takes seconds for the kernels of each step.
    """
    adapted = {"adapter": adapter(folder, targets)}
    return Load(
        {**engine.on_musa(), "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets},
        [
            dataclasses.replace(one, params={**one.params, "max_tokens": 8, **(adapted if at % 2 == 0 else {})})
            for at, one in enumerate(loads.by_temperature()[:4])
        ],
        autotuned=False,
        unknown=unknown,
    )


@pytest.fixture(scope="module")
def runs(
    musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Run, Run]]:
    """By engine, runs without features and with graphs."""
    folder = tmp_path_factory.mktemp("drafters")
    # Room for all requests at a time, also for their windows.
    common = {**Engine("eagle3").on_musa(), "num_gpu_blocks_override": 60}
    made = {
        "dflash2": dflash2(folder / "dflash2"),
        "lilicorr": lilicorr(folder / "lilicorr"),
        "gemma4": gemma4(folder / "gemma4"),
    }
    asked = {
        **{
            name: Load({**common, **options}, loads.by_temperature(), initialised=True, autotuned=False)
            for name, options in made.items()
        },
        "processor": Load(
            {**Engine("eagle3").on_musa(), "logits_processors": [f"{Counting.__module__}:{Counting.__qualname__}"]},
            loads.by_temperature(),
            autotuned=False,
        ),
        "schedule": Load(scheduled(), growing(), autotuned=False),
        "head adapters": with_adapters(Engine("eagle3"), folder / "adapter", ["o_proj", "lm_head"]),
        # What makes attention of any batch stays, so these are the last ones.
        "adapters, prompts": with_adapters(
            Engine("eagle3", graphs_of=(1, 2, 4, 6, 16)), folder / "other adapter", ["o_proj"], "any batch"
        ),
        "dspark": Load(
            {**Engine(None, graphs_of=(4, 8, 16, 24, 64)).on_musa(), "num_gpu_blocks_override": 60}
            | dspark(folder / "dspark"),
            loads.by_temperature(),
            autotuned=False,
            unknown="any batch",
        ),
    }
    # Few requests: vLLM drafts without graphs here, and Triton's interpreter is slow.
    verified = dspark(folder / "adaptive", confident=True)
    verified["speculative_config"]["enable_adaptive_verification"] = True
    asked["adaptive"] = dataclasses.replace(
        asked["dspark"],
        options={**asked["dspark"].options, **verified},
        requests=[
            dataclasses.replace(one, params={**one.params, "max_tokens": 10}) for one in asked["dspark"].requests[:4]
        ],
        calls=[(0, "charge_each_token")],
    )
    graphs = {gate_of(feature): "on" for feature in ("engine-report", "v2-graph-addresses")}
    graphs |= {gate_of(feature): "auto" for feature in (*GRAPHS, "v2-mixed-graphs", "backport-mixed-graphs")}
    return loads.run_both(asked, loads.UNPATCHED, loads.UNPATCHED | graphs, folder, newest)


@pytest.mark.parametrize("name", ["dflash2", "lilicorr", "gemma4", "processor", "schedule", "head adapters"])
def test_graphs_change_nothing(name: str, runs: dict[str, tuple[Run, Run]]) -> None:
    expected, found = runs[name]
    loads.assert_same(expected, found)
    assert found.runner == "V2"
    assert set(GRAPHS) <= set(found.used)
    assert 0 < expected.accepted()[1] < expected.accepted()[0]
    # Three requests are padded to four.
    assert found.widths() >= {1, 2, 3, 4}
    assert found.counted["v2-tail-graph drafting"]["served"] == found.counted["v2-step-inputs inputs"]["served"] > 3


def test_dspark_drafts_in_graphs_of_decodes_and_of_prompts(runs: dict[str, tuple[Run, Run]]) -> None:
    expected, found = runs["dspark"]
    loads.assert_same(expected, found)
    assert set(GRAPHS) <= set(found.used)
    assert 0 < expected.accepted()[1] < expected.accepted()[0]
    decodes, drafted = found.counted["v2-step-inputs inputs"], found.counted["v2-tail-graph drafting"]["served"]
    assert drafted == decodes["served"] + decodes["prompt"] > decodes["served"] > 3


def test_drafts_that_the_device_chooses_are_verified_in_graphs(runs: dict[str, tuple[Run, Run]]) -> None:
    expected, found = runs["adaptive"]
    loads.assert_same(expected, found)
    assert 0 < expected.accepted()[1] < expected.accepted()[0]
    # Steps with a prompt, and steps without: some drafts are left out, not the same number of each request.
    kept = [[step["computed"][one] for one in step["verified"]] for step in found.steps]
    assert any(len(set(counts)) > 1 for counts in kept)
    assert min(map(min, filter(None, kept))) < 1 + DRAFTS
    assert any(step["verified"] and len(step["verified"]) < len(step["scheduled"]) for step in found.steps)
    before, after = (run.counts["graph_replays"]["target"] for run in (expected, found))
    assert before < after == found.counts["steps"]
    # Without drafts vLLM has another sampler; the first step and some others are verified without.
    assert sum(set(counts) <= {1} for counts in kept) > 2
    assert found.counted["v2-tail-graph sampling"] == {"served": found.counts["steps"]}
    assert found.counted["v2-tail-graph drafting"] == {"not_captured": found.counts["steps"]}


def test_graphs_draft_each_number_of_the_schedule(runs: dict[str, tuple[Run, Run]]) -> None:
    """Where as many are verified; where the number changes, vLLM drafts. The states keep what each has drafted."""
    _, found = runs["schedule"]
    steps = [
        (
            {step["verified"].get(one, 0) for one in step["scheduled"]},
            {sum(draft >= 0 for draft in drafts) for drafts in step["drafts"].values()},
        )
        for step in found.steps
    ]
    served = Counter(min(made) for verified, made in steps if verified == made)
    assert served.keys() == {1, 2, 4}
    assert min(served.values()) > 2
    assert found.counted["v2-tail-graph drafting"]["served"] == served.total()
    # Many, some and one at a time, by the steps between which it changes.
    changes = [(verified, made) for verified, made in steps if verified != made and 0 not in verified]
    assert changes[:2] == [({1}, {2}), ({2}, {4})]
    assert found.noted["v2-tail-graph"].startswith("4 shapes of at most 6 requests")


def test_adapters_change_the_texts_of_those_that_have_them(runs: dict[str, tuple[Run, Run]]) -> None:
    (_, plain), (_, found) = runs["schedule"], runs["head adapters"]
    assert set(GRAPHS) <= set(found.used)
    assert found.answers["c"]["tokens"] != plain.answers["c"]["tokens"][:8]
    # Of logits with adapters there is no graph.
    assert found.counted["v2-tail-graph sampling"]["adapters"] > 3


def test_prompts_with_adapters_are_replays(runs: dict[str, tuple[Run, Run]]) -> None:
    expected, found = runs["adapters, prompts"]
    loads.assert_same(expected, found)
    assert {"v2-mixed-graphs", *GRAPHS} <= set(found.used)
    before, after = (run.counts["graph_replays"]["target"] for run in (expected, found))
    assert before < after == found.counts["steps"]
    assert "adapters" not in found.counted["v2-tail-graph sampling"]
