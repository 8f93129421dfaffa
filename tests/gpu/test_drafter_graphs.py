"""Drafters in FULL graphs draft what stock vLLM's draft, on a real GPU.

Stock and patched run the same requests, of different lengths and more than fit at once, so that batches mix prefill and
decode, shrink request by request, and take sizes that were not captured. A captured kernel that reads a stale tensor
leaves the text right and the drafts wrong, so the drafts themselves are compared. vLLM's graph wrapper raises when it
would capture after boot, so a run that ends has captured nothing at request time.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.features import V1_DRAFT_PHASE, V1_STEP_INPUTS, gate_of
from vllm_hwplugin_lab.bench import find_checkpoints, load_prompts

from ..musa_sim.checkpoints import DEEPSEEK
from .drafts import same_drafts
from .engines import SMALL_ENGINE, Child, run_all

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = find_checkpoints(None)

# bf16 kernels choose other splits at other padded sizes, which flips a near-tie now and then.
SAME_DRAFTS = 0.99
ACCEPTANCE_TOLERANCE = 0.01


def eagle3(k: int, **more: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(SMALL.drafter("eagle3")), "num_speculative_tokens": k, **more}


def dflash(k: int) -> dict[str, Any]:
    return {"method": "dflash", "model": str(SMALL.drafter("dflash")), "num_speculative_tokens": k}


def draft_model(folder: Path, *, pard: bool) -> dict[str, Any]:
    """The target as its own drafter; with a mask token it drafts in parallel (PARD)."""
    if not pard:
        return {"method": "draft_model", "model": str(SMALL.target), "num_speculative_tokens": 3}
    shutil.copytree(SMALL.target, folder, copy_function=shutil.copyfile)
    change_config(folder, pard_token=2)
    return {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def deepseek(folder: Path, k: int = 2) -> dict[str, Any]:
    """A small DeepSeek V3 without experts, whose own layer drafts with MLA. Dummy weights: the drafts mean nothing."""
    sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size"), 256) | {"intermediate_size": 512}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 16) | {"first_k_dense_replace": 99}
    folder.mkdir()
    config = {**DEEPSEEK, **sizes, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return {"method": "mtp", "num_speculative_tokens": k}


CASES: dict[str, dict[str, Any]] = {
    "eagle3-k2-FULL_AND_PIECEWISE": {"speculation": lambda folder: eagle3(2), "mode": "FULL_AND_PIECEWISE"},
    "eagle3-k3-FULL": {
        "speculation": lambda folder: eagle3(3),
        "mode": "FULL",
        "options": {"attention_config": {"backend": "FLASH_ATTN"}},
    },
    "eagle3-k3-FULL-steps": {
        "speculation": lambda folder: eagle3(3),
        "mode": "FULL",
        "environment": {"VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH": "off"},
    },
    "eagle3-k3-FULL-triton": {
        "speculation": lambda folder: eagle3(3),
        "mode": "FULL",
        "options": {"attention_config": {"backend": "TRITON_ATTN"}},
        # Triton's kernel is chosen by batch size, and a graph has the choice of its padded size.
        "near_ties": True,
    },
    "draft_model-k3-FULL": {"speculation": lambda folder: draft_model(folder, pard=False), "mode": "FULL"},
    "pard-k3-FULL_AND_PIECEWISE": {
        "speculation": lambda folder: draft_model(folder, pard=True),
        "mode": "FULL_AND_PIECEWISE",
    },
    "dflash-k7-FULL_AND_PIECEWISE": {"speculation": lambda folder: dflash(7), "mode": "FULL_AND_PIECEWISE"},
    "mtp-k2-FULL_AND_PIECEWISE": {"speculation": deepseek, "mode": "FULL_AND_PIECEWISE", "own_target": True},
    "mtp-k3-FLASH_ATTN_MLA": {
        "speculation": lambda folder: deepseek(folder, 3),
        "mode": "FULL_AND_PIECEWISE",
        "own_target": True,
        "options": {"attention_config": {"backend": "FLASH_ATTN_MLA"}},
    },
}

#: Graphs of whole steps draft without the calls that `child.py` listens to; `test_v1_graphs.py` compares these.
DRAFTERS_OWN = {gate_of(feature): "off" for feature in (V1_DRAFT_PHASE, V1_STEP_INPUTS)}


def job_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `child.py` is told: 40 prompts of the small checkpoints, of many lengths, and as many answers."""
    checkpoint, own_target = folder / "checkpoint", case.get("own_target")
    speculation = case["speculation"](checkpoint)
    target = checkpoint if own_target else SMALL.target
    dice = random.Random(0)
    prompts = [list(prompt[: dice.randrange(8, 96)]) for prompt in load_prompts(SMALL, 40)]
    options = {
        **SMALL_ENGINE,
        "model": str(target),
        "speculative_config": speculation,
        "compilation_config": {"cudagraph_mode": case["mode"]},
        **({"load_format": "dummy", "skip_tokenizer_init": True} if own_target else {}),
        **case.get("options", {}),
    }
    return {"options": options, "prompts": prompts, "tokens": [dice.randrange(16, 120) for _ in prompts]}


@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_stock(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = job_of(case, tmp_path)
    environment = {**DRAFTERS_OWN, **case.get("environment", {})}
    children = {
        "stock": Child("child.py", job, patched=False),
        "patched": Child("child.py", job, patched=True, environment=environment),
    }
    stock, patched = run_all(tmp_path, children).values()
    assert stock["captured"] == 0
    same = same_drafts(job["prompts"], stock, patched)
    check(name, patched)
    assert patched["accepted"] == pytest.approx(stock["accepted"], abs=ACCEPTANCE_TOLERANCE)
    if not case.get("near_ties"):
        assert patched["texts"] == stock["texts"]
        assert same["compared"] > 0.9 * len(stock["drafts"]) * len(stock["accepted"])
        assert same["share"] >= SAME_DRAFTS


def check(name: str, patched: dict[str, Any]) -> None:
    """What a patched engine has captured, and how it has decided."""
    assert patched["captured"] > 0, patched["decisions"]
    assert patched["platform"].startswith("vllm_hwplugin.")
    if "dflash" in name:
        width = 1 + len(patched["accepted"])
        # The platform class makes every size a whole block, for every number of requests up to the limit.
        assert {size % width for size in patched["sizes"]} == {0}
        limit = SMALL_ENGINE["max_num_seqs"]
        assert {requests * width for requests in range(1, limit + 1)} <= set(patched["sizes"])
    loop = patched["decisions"].get("draft-loop-graph", "")
    if "steps" in name:
        assert loop == ""
    elif any(part in name for part in ("pard", "dflash")):
        assert "there is no chain" in loop
    elif "mtp" in name:
        # MLA's builder plans each pass.
        assert "launched one by one: metadata must be built between steps" in loop
    else:
        assert "in one graph" in loop
