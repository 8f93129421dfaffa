# SPDX-License-Identifier: Apache-2.0
"""In an engine texts part from cuBLAS's only where two tokens are as likely, as cuBLAS's own do between batch sizes."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from vllm_hwplugin.base.features import LINEAR, gate_of
from vllm_hwplugin_lab.bench._shapes import SHAPES, write_configs

from ...musa_sim import loads
from ...musa_sim.loads import Load, Process, Request, Run
from ..engines import SMALL_ENGINE
from ..findings import keep
from ..mixed_load import environment

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

_REQUESTS = 12
_TOKENS = 96


def requests(apart: int) -> list[Request]:
    """Greedy ones, each so many steps after the one before it."""
    chosen = random.Random(0)
    # As many as may tie: in bfloat16 three did.
    params = {"temperature": 0.0, "max_tokens": _TOKENS, "logprobs": 8}
    return [
        Request(f"r{number}", [chosen.randrange(1, 150_000) for _ in range(40)], number * apart, params)
        for number in range(_REQUESTS)
    ]


def same_start(expected: Run, found: Run) -> tuple[list[float], int, float]:
    """Of all requests: how far log probabilities of the same tokens are apart up to the first token that differs, how
    many texts differ, and the widest lead of the expected token over the other one where they do.
    """
    distances, differ, lead = [], 0, 0.0
    for name, one in expected.answers.items():
        other = found.answers[name]
        for position, (left, right) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            distances += [abs(left[token][1] - right[token][1]) for token in left.keys() & right.keys()]
            tokens = str(one["tokens"][position]), str(other["tokens"][position])
            if tokens[0] != tokens[1]:
                differ += 1
                lead = max(lead, left[tokens[0]][1] - left[tokens[1]][1] if tokens[1] in left else float("inf"))
                break
    return distances, differ, lead


def test_texts_differ_where_cublas_rounds_otherwise_too(tmp_path: Path) -> None:
    target, _ = write_configs(SHAPES["0.6b"], tmp_path / "model", "eagle3", 4)
    options: dict[str, Any] = {
        **SMALL_ENGINE,
        "model": str(target),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 12, 16]},
    }
    together, alone = (Load(options, requests(apart), initialised=True) for apart in (0, _TOKENS + 8))
    sides = {"cuBLAS": ("off", together), "cuBLAS, one by one": ("off", alone), "plugin": ("on", together)}
    runs = loads.side_by_side(
        {
            side: Process({"load": load}, environment(tmp_path, side, "V2", **{gate_of(LINEAR): gate}))
            for side, (gate, load) in sides.items()
        },
        tmp_path,
    )
    expected, other, found = (runs[side]["load"] for side in sides)
    assert LINEAR in found.noted
    assert LINEAR not in expected.noted
    assert max(expected.widths()) == _REQUESTS
    assert other.widths() == {1}
    facts = {}
    for side, run in (("cuBLAS, one by one", other), ("plugin", found)):
        distances, differ, lead = same_start(expected, run)
        facts[side] = {"compared": len(distances), "apart": fmean(distances), "differ": differ, "lead": lead}
    keep("texts of linear layers", facts)
    by_cublas, by_plugin = facts.values()
    assert by_plugin["compared"] > 200
    # Logits are bfloat16, and those of these weights are below 4.
    step = 2**-6
    assert by_plugin["apart"] < step, facts
    assert max(by_cublas["lead"], by_plugin["lead"]) <= step, facts
