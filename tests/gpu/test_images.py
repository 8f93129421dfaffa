# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, a model that takes images: its batches of text are replays, those with images are vLLM's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..musa_sim import images, loads
from ..musa_sim.loads import Load
from ..musa_sim.test_images import DRAFTS, requests_in_pieces, steps_with_images
from .engines import SMALL_ENGINE, needs
from .mixed_load import run_each

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

#: Capture sizes by features. Graphs of mixed batches have multiples of 32 tokens; PIECEWISE graphs of the same sizes
#: round alike. Graphs of one token per request are for vLLM's own draft steps.
SIZES = {
    ("v2-mixed-graphs",): [32, 64, 96],
    ("v2-tail-graph", "v2-step-inputs"): sorted({*range(1, 7), *range(4, 25, 4)}),
}


@pytest.mark.parametrize("features", SIZES, ids=" ".join)
def test_graphs_change_nothing(features: tuple[str, ...], tmp_path: Path) -> None:
    needs("0.26")
    target, drafter = images.write_model(tmp_path / "model", DRAFTS)
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    options = {
        **SMALL_ENGINE,
        **loads.dummies(target, speculation),
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_encoder_attn_backend": "TORCH_SDPA",
        "max_model_len": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 96,
        "long_prefill_token_threshold": 20,
        "compilation_config": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": SIZES[features],
        },
    }
    requests = requests_in_pieces()
    load = Load(options, requests, autotuned=False, initialised=True, images=True)
    runs = run_each(load, tmp_path, "V2", {"off": {}, "on": dict.fromkeys(features, "on")}, features)
    expected, found = runs["off"], runs["on"]
    shown = steps_with_images(found, requests, 0)
    replays = {side: run.counts["graph_replays"]["target"] for side, run in runs.items()}
    loads.assert_same(expected, found)
    assert set(features) <= set(found.used)
    assert 0 < expected.accepted()[-1] < expected.accepted()[0]
    assert shown > 4
    if features == ("v2-mixed-graphs",):
        # Attention of four layers splits a model into five pieces.
        assert replays["on"] == len(found.steps) + 4 * shown < replays["off"]
