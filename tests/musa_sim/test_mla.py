# SPDX-License-Identifier: Apache-2.0
"""A small DeepSeek V3 on the simulated device: prompts and decodes of MLA over mate. Texts are those of float32.

Prompts come in pieces, and one out of the prefix cache, so that new tokens see keys of the cache as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from . import loads
from .loads import Engine, Load, Process, Request, Run
from .test_engines import V1, texts

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

LAYERS, HIDDEN, HEADS, LATENT, ROTARY, HEAD, VOCABULARY = 2, 128, 4, 512, 64, 128, 4096
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 99,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROTARY,
    "qk_nope_head_dim": HEAD,
    "v_head_dim": HEAD,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float16",
}


def write(folder: Path) -> Path:
    """Weights by chance, so large that what a token attends to counts."""
    chance = torch.Generator().manual_seed(3)

    def linear(outputs: int, inputs: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=chance) * scale / inputs**0.5).half()

    def norm(size: int = HIDDEN) -> torch.Tensor:
        return torch.ones(size, dtype=torch.float16)

    weights = {
        "model.embed_tokens.weight": linear(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": linear(VOCABULARY, HIDDEN),
        "model.norm.weight": norm(),
    }
    # The last one is the layer that drafts.
    for layer in range(LAYERS + 1):
        weights |= {
            f"model.layers.{layer}.{name}": one
            for name, one in {
                "input_layernorm.weight": norm(),
                "post_attention_layernorm.weight": norm(),
                "self_attn.q_proj.weight": linear(HEADS * (HEAD + ROTARY), HIDDEN, 3),
                "self_attn.kv_a_proj_with_mqa.weight": linear(LATENT + ROTARY, HIDDEN),
                "self_attn.kv_a_layernorm.weight": norm(LATENT),
                "self_attn.kv_b_proj.weight": linear(HEADS * 2 * HEAD, LATENT),
                "self_attn.o_proj.weight": linear(HIDDEN, HEADS * HEAD, 2),
                "mlp.gate_proj.weight": linear(2 * HIDDEN, HIDDEN),
                "mlp.up_proj.weight": linear(2 * HIDDEN, HIDDEN),
                "mlp.down_proj.weight": linear(HIDDEN, 2 * HIDDEN),
            }.items()
        }
    drafting = f"model.layers.{LAYERS}"
    weights |= {
        f"{drafting}.enorm.weight": norm(),
        f"{drafting}.hnorm.weight": norm(),
        f"{drafting}.eh_proj.weight": linear(HIDDEN, 2 * HIDDEN),
        f"{drafting}.shared_head.norm.weight": norm(),
        f"{drafting}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{drafting}.shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def requests() -> list[Request]:
    asked = {"temperature": 0.0, "max_tokens": 8}
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (3, 150), generator=chance).tolist()
    return [
        Request("a", tokens[0], 0, asked),
        Request("b", tokens[1][:30], 0, asked),
        Request("c", [*tokens[0][:140], *tokens[2][:7]], 8, asked),
    ]


def options(model: Path, method: str | None) -> dict[str, Any]:
    engine = Engine(None, graphs_of=(1, 2, 4), more={"max_model_len": 256, "max_num_seqs": 4})
    made = {**engine.on_musa(), "model": str(model), "skip_tokenizer_init": True}
    # The backend says how many tokens a page has.
    made.pop("block_size", None)
    if method is not None:
        made["speculative_config"] = {"method": method, "num_speculative_tokens": 2}
        made["compilation_config"] = {**made["compilation_config"], "cudagraph_capture_sizes": [3, 6, 12]}
    return made


def expected(model: Path) -> list[list[int]]:
    """What transformers computes in float32. vLLM's own MLA on CPUs gives other texts in float16."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for request in requests():
        tokens = list(request.prompt)
        for _ in range(request.params["max_tokens"]):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(request.prompt) :])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mla") / "model")


@pytest.fixture(scope="module")
def runs(
    musa_host: None, newest: tuple[str, Path], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """On both model runners with drafts, also without features, and on V1 without drafts."""
    folder = tmp_path_factory.mktemp("runs")
    alone, drafts = (Load(options(model, method), requests()) for method in (None, "mtp"))
    asked = {
        "V1": Process({"V1 alone": alone, "V1": drafts}, loads.musa(folder / "host, V1", newest, **V1)),
        "V2": Process({"V2": drafts}, loads.musa(folder / "host, V2", newest)),
        "V1 stock": Process({"V1 stock": drafts}, loads.musa(folder / "stock, V1", newest, **V1, **loads.UNPATCHED)),
        "V2 stock": Process({"V2 stock": drafts}, loads.musa(folder / "stock, V2", newest, **loads.UNPATCHED)),
    }
    return {name: run for found in loads.side_by_side(asked, folder).values() for name, run in found.items()}


@pytest.mark.parametrize("name", ["V1 alone", "V1", "V2"])
def test_texts_are_those_of_float32(name: str, runs: dict[str, Run], model: Path) -> None:
    run = runs[name]
    assert texts(run) == expected(model)
    assert (run.platform, run.runner, run.attention) == ("MusaPlatform", name[:2], ["MusaFlashMLABackend"])
    # A prompt in pieces, and one of which some pages were there.
    assert [step["scheduled"] for step in run.of("a")][:3] == [64, 64, 22]
    assert run.answers["c"]["cached"] >= 64


@pytest.mark.parametrize(
    ("runner", "used"), [("V1", {"draft-full-graph", "v1-step-inputs"}), ("V2", {"v2-step-inputs", "v2-tail-graph"})]
)
def test_graphs_change_no_draft(runner: str, used: set[str], runs: dict[str, Run]) -> None:
    run = runs[runner]
    loads.assert_same(runs[f"{runner} stock"], run)
    assert used <= set(run.used)
    assert run.counts["graph_replays"]["target"] > run.counts["steps"] // 2
    # V2 makes no drafts, and replays none, where all of a step are pieces of prompts.
    pieces = sum(not any(step["sampled"].values()) for step in run.steps) if runner == "V2" else 0
    assert run.counts["draft_phases_in_graphs"] == run.counts["draft_phases"] - pieces > 0
    # Each build plans, so a graph holds one pass.
    assert "draft-loop-graph" not in run.used
