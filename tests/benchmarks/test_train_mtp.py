# SPDX-License-Identifier: Apache-2.0
"""A target trained by `benchmarks.train_mtp`: vLLM's drafts are those that each of its passes was trained for."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from benchmarks import train_mtp
from tests.musa_sim import loads
from tests.musa_sim.loads import Engine, Load, Process, Request


def model_of(folder: Path) -> tuple[train_mtp.Model, dict]:
    config = json.loads((folder / "config.json").read_text())
    model = train_mtp.Model(config)
    weights = {
        name.replace("mtp_layers.0", "mtp").removeprefix("model."): weight.float()
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert (missing, unknown) == (["lm_head.weight"] if config["tie_word_embeddings"] else [], [])
    return model, config


def test_head_loss_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_mtp, "_ROWS", 8)
    torch.manual_seed(0)
    hidden, head = (torch.randn(rows, 16, dtype=torch.float64, requires_grad=True) for rows in (20, 50))
    labels = torch.randint(50, (20,))
    (expected := functional.cross_entropy(hidden @ head.T, labels)).backward()
    slopes = [hidden.grad, head.grad]
    hidden.grad = head.grad = None
    loss, best = train_mtp.HeadLoss.apply(hidden, head, labels)
    (3 * loss).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close([hidden.grad, head.grad], [3 * slope for slope in slopes], rtol=1e-5, atol=1e-7)
    assert torch.equal(best, (hidden @ head.T).argmax(-1))


@pytest.mark.engine
@pytest.mark.parametrize("tied", [False, True])
def test_vllm_drafts_as_trained(tied: bool, tmp_path: Path) -> None:
    text, target = tmp_path / "text.xz", tmp_path / "target"
    sources = sorted(Path(train_mtp.__file__).parent.glob("*.py"))
    text.write_bytes(lzma.compress("\0".join(source.read_text() for source in sources).encode()))
    shape = ["--hidden", "128", "--layers", "2", "--length", "64", "--batch", "4", "--steps", "20"]
    tokenizer = str(loads.SMALL / "target")
    train_mtp.main([str(text), "--tokenizer", tokenizer, "--out", str(target), *shape, *["--tied"] * tied])

    prompts = json.loads((loads.SMALL / "prompts.json").read_text())["prompt_ids"]
    model, config = model_of(target)
    with torch.no_grad():
        loss, drafts, _ = train_mtp.losses(model, torch.tensor([prompt[:64] for prompt in prompts[:8]]))
    # Of 4,096 tokens by chance: 8.3.
    assert loss < 8
    assert max(drafts) < 8

    # So few steps teach a few frequent tokens. By chance, a wrong position changes most drafts.
    for weight in model.parameters():
        weight.data.normal_(std=0.2 if weight.dim() == 2 else 1)
    model.save(config, target)
    model, _ = model_of(target)
    params = {"temperature": 1.0, "seed": 0, "max_tokens": 12}
    requests = [Request("abc"[number], prompts[number][: 20 + number], number, params) for number in range(3)]
    speculation = {"method": "mtp", "num_speculative_tokens": train_mtp.DRAFTS}
    engine = Engine(None, more={"model": str(target), "dtype": "float32", "speculative_config": speculation})
    run = Process({"load": Load(engine.on_cpu(), requests)}, loads.cpu()).run(tmp_path / "run")["load"]

    found, expected = [], []
    for request in requests:
        tokens = list(request.prompt)
        for step in run.of(request.name):
            tokens += step["sampled"] or []
            if step["sampled"] and len(step["drafts"] or ()) == train_mtp.DRAFTS:
                said = torch.tensor([tokens + step["drafts"]])
                with torch.no_grad():
                    passes = [states[0, len(tokens) - 2] for states in model.drafts(said, model(said))]
                    expected.append([int((state @ model.lm_head.weight.T).argmax()) for state in passes])
                found.append(step["drafts"])
    assert len({tuple(drafts) for drafts in found}) > 20
    assert found == expected
