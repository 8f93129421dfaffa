# SPDX-License-Identifier: Apache-2.0
"""What test_gemma_shape is made of, where there is no GPU: the model starts and drafts, and texts are told apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab.bench import engine_environment, engine_options
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment

from . import gemma_shape, test_gemma_shape
from .drafts import same_drafts

PROMPTS, TOKENS = 3, 4


@pytest.mark.engine
def test_the_model_starts_and_drafts(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("vLLM runs on the GPU here, and so does test_gemma_shape")
    target, draft = gemma_shape.write_configs(tmp_path / "model", images=True)
    options = engine_options("cpu", max_model_len=1024, cudagraph_mode="NONE", max_num_seqs=4)
    del options["max_model_len"]
    prompts = [prompt[:8] for prompt in test_gemma_shape.requests()[0][:PROMPTS]]
    job = {
        "model": str(target),
        "options": {**options, "speculative_config": gemma_shape.speculation(draft)},
        "prompts": prompts,
        "tokens": [TOKENS] * PROMPTS,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    child = Path(__file__).with_name("gemma_shape_child.py")
    ended = subprocess.run(
        [sys.executable, str(child), str(tmp_path / "job.json"), str(tmp_path / "answer.json")],
        env=child_environment(engine_environment("cpu", patched=True), provide(tmp_path / "metadata")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    answer = json.loads((tmp_path / "answer.json").read_text())
    layers = [[layer["head_size"], layer["kv_heads"], layer["window"]] for layer in answer["layers"]]
    assert layers == test_gemma_shape.LAYERS
    assert [len(text) for text in answer["texts"]] == [TOKENS] * PROMPTS
    # A request is drafted for from its prompt on, before each token that a step adds.
    assert {(request, len(prompts[request])) for request in range(PROMPTS)} <= {
        (request, computed) for request, computed, _ in answer["drafts"]
    }
    # Weights that fade would make all drafts alike, and all texts.
    assert len({tuple(tokens) for *_, tokens in answer["drafts"]}) > len(answer["drafts"]) / 2
    assert len({tuple(text) for text in answer["texts"]}) == PROMPTS


def answer(texts: list[list[int]], drafts: list[Any] = (), second: float = -1.5) -> dict[str, Any]:  # type: ignore[assignment]
    """Texts whose first choices stand at -1 nat, and token 9 at `second`."""
    return {
        "texts": texts,
        "choices": [[[[-1.0, token], [second, 9]] for token in text] for text in texts],
        "drafts": drafts,
    }


def test_a_text_is_compared_up_to_where_it_parts() -> None:
    stock = answer([[1, 2, 3, 4], [5, 6, 7, 8]], second=-1.1)
    gaps, compared = test_gemma_shape.parted(stock, answer([[1, 2, 3, 4], [5, 9, 1, 1]]))
    assert gaps == [pytest.approx(0.1)]
    assert compared == 5 / 8
    assert test_gemma_shape.parted(stock, stock) == ([], 1.0)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([[1, 2, 3, 9], [5, 6, 7, 8]], id="a token that is far below the first choice"),
        pytest.param([[1, 2, 3, 1], [5, 6, 7, 8]], id="a token that is not among the choices"),
    ],
)
def test_a_wrong_text_is_none_by_a_tie(other: list[list[int]]) -> None:
    stock = answer([[1, 2, 3, 4], [5, 6, 7, 8]], second=-1.5)
    with pytest.raises(AssertionError):
        test_gemma_shape.agree(stock, answer(other))


def test_texts_that_part_at_once_say_too_little() -> None:
    stock = answer([[1, 2, 3, 4], [5, 6, 7, 8]], second=-1.01)
    with pytest.raises(AssertionError):
        test_gemma_shape.agree(stock, answer([[9, 2, 3, 4], [9, 6, 7, 8]]))


def test_drafts_are_compared_after_the_same_text() -> None:
    eager = answer([[1, 2, 3], [4, 5, 6]], [[0, 2, [7, 7]], [0, 3, [7, 8]], [1, 3, [7, 7]]])
    graphs = answer([[1, 2, 3], [4, 9, 9]], [[0, 2, [7, 7]], [0, 3, [7, 9]], [1, 3, [1, 1]], [1, 4, [1, 1]]])
    # The second request has parted by then; nobody knows what the eager engine would have drafted.
    assert same_drafts([[0, 0], [0, 0]], eager, graphs) == {"compared": 4, "share": 3 / 4}
