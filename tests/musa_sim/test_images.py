# SPDX-License-Identifier: Apache-2.0
"""A model that takes images on Model Runner V2, with graphs and without, on the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.features import gate_of

from . import images, loads
from .loads import Load, Process, Request, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

DRAFTS = 3


def options_of(folder: Path, **engine: Any) -> dict[str, Any]:
    """Options of an engine with a model that takes images, which is written to `folder`."""
    target, drafter = images.write_model(folder, DRAFTS)
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    return {
        **loads.Engine("eagle3", drafts=DRAFTS, **engine).on_musa(),
        **loads.dummies(target, speculation),
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "max_num_batched_tokens": 96,
    }


#: Tokens of an image, in the place of one.
_TOKENS = 16
_SHOWN = [images.START, images.IMAGE, images.END]


def requests_in_pieces() -> list[Request]:
    """Prompts in pieces of 20 tokens, greedy and random; images in one piece, across a border, and just after it."""

    def asked(name: str, at: int, before: int, after: int, image: int | None, **params: object) -> Request:
        prompt = [*range(3, 3 + before), *(_SHOWN if image is not None else ()), *range(90, 90 + after)]
        shown = {} if image is None else {"image": image}
        return Request(name, prompt, at, {"max_tokens": 9, "temperature": 0.0, **params, **shown})

    return [
        asked("a", 0, 27, 0, None, max_tokens=20),
        asked("b", 1, 10, 12, 1, max_tokens=20),
        asked("c", 3, 1, 6, 2, temperature=0.8, seed=5),
        asked("d", 6, 20, 5, None),
        # The image begins with the second piece, and its mark ends the first.
        asked("e", 9, 19, 30, 3, logprobs=2),
        asked("f", 12, 33, 4, None, logprobs=2),
        # Encoded before, for another request.
        asked("g", 15, 15, 3, 1, temperature=0.9, seed=7),
        asked("h", 18, 45, 0, None),
    ]


def steps_with_images(run: Run, requests: Sequence[Request], ahead: int) -> int:
    """Steps that compute a token of an image, or end `ahead` tokens before one."""
    at = {one.name: one.prompt.index(images.IMAGE) for one in requests if "image" in one.params}
    lengths = {one.name: len(one.prompt) + (_TOKENS - 1 if one.name in at else 0) for one in requests}
    computed, found = dict.fromkeys(lengths, 0), 0
    for step in run.steps:
        shown = False
        for name, count in step["scheduled"].items():
            start = computed[name]
            if name in at and start < lengths[name]:
                shown |= at[name] < start + count + ahead and start < at[name] + _TOKENS
            computed[name] += count
        found += shown
    return found


def load_in_pieces(
    folder: Path, mode: str | None = "FULL_DECODE_ONLY", unknown: str = "any batch", seeded: bool = True
) -> Load:
    options = options_of(folder / "model", graphs=mode, graphs_of=(1, 2, 4, 6, 24)) | {
        "long_prefill_token_threshold": 20,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 40,
    }
    requests = [one for one in requests_in_pieces() if seeded or "seed" not in one.params]
    return Load(options, requests, autotuned=False, initialised=True, images=True, unknown=unknown)


#: By load, how many tokens ahead of the target a draft takes images.
AHEAD = {"text": 0, "draft takes images": 1}


@pytest.fixture(scope="module")
def v2(
    musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, tuple[Load, Run]]]:
    """By side, each load and its run."""
    folder = tmp_path_factory.mktemp("images on V2")
    # What makes the draft take images stays, so its engine is the last of its process.
    eager, full = load_in_pieces(folder / "eager", None), load_in_pieces(folder / "full", "FULL")
    mixed = {
        name: load_in_pieces(folder / name, unknown="any batch" if name == "text" else f"any batch, {name}")
        for name in AHEAD
    }
    asked = {"stock": {"eager": eager, "FULL": full, **mixed}, "graphs": {"FULL": full, **mixed}}
    features = ("v2-tail-graph", "v2-step-inputs", "v2-graph-addresses", "v2-mixed-graphs", "backport-mixed-graphs")
    # Not all of the engines can have all of them.
    gates = {gate_of(one): "auto" for one in (*features, "backport-image-features", "engine-report")}
    stock = loads.UNPATCHED | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    variables = {"stock": stock, "graphs": stock | gates}
    runs = loads.side_by_side(
        {side: Process(asked[side], loads.musa(folder / f"host, {side}", newest, **variables[side])) for side in asked},
        folder,
    )
    return {side: {name: (load, runs[side][name]) for name, load in asked[side].items()} for side in asked}


@pytest.mark.parametrize("name", AHEAD)
def test_batches_of_text_with_prompts_are_replays_and_those_with_images_are_not(
    name: str, v2: dict[str, dict[str, tuple[Load, Run]]]
) -> None:
    """Behind an image the three positions of a token are less than what comes before it."""
    load, expected = v2["stock"][name]
    _, found = v2["graphs"][name]
    loads.assert_same(expected, found)
    assert (expected.runner, found.runner) == ("V2", "V2")
    assert {"v2-mixed-graphs", "v2-tail-graph", "v2-step-inputs"} <= set(found.used)
    assert 0 < expected.accepted()[-1] < expected.accepted()[0]
    inputs = found.counted["v2-step-inputs inputs"]
    assert inputs["served"] == found.counts["graph_replays"]["inputs"] > 5
    assert not found.preempted
    shown = steps_with_images(found, load.requests, AHEAD[name])
    assert shown > 4
    before, after = (run.counts["graph_replays"]["target"] for run in (expected, found))
    assert before + 5 < after == found.counts["steps"] - shown


def test_replays_with_an_image_leave_nothing_for_later_tokens(v2: dict[str, dict[str, tuple[Load, Run]]]) -> None:
    """With `cudagraph_mode` FULL vLLM's model leaves features for later layers in a buffer."""
    (_, eager), (_, full), (_, fixed) = v2["stock"]["eager"], v2["stock"]["FULL"], v2["graphs"]["FULL"]
    assert fixed.counts["graph_replays"]["target"] == fixed.counts["steps"]
    loads.assert_same(eager, fixed)
    with pytest.raises(AssertionError, match=r"request ., its step \d+: "):
        loads.assert_same(eager, full)


def test_nor_on_v1(musa_host: None, newest: tuple[str, Path], tmp_path: Path) -> None:
    variables = loads.UNPATCHED | {"VLLM_USE_V2_MODEL_RUNNER": "0", gate_of("backport-image-features"): "on"}
    # The simulated device's generators have no offset, which V1 sets back.
    asked = {str(mode): load_in_pieces(tmp_path / f"of {mode}", mode, seeded=False) for mode in (None, "FULL")}
    runs = Process(asked, loads.musa(tmp_path / "host", newest, **variables)).run(tmp_path / "engines")
    assert runs["FULL"].counts["graph_replays"]["target"] == runs["FULL"].counts["steps"]
    loads.assert_same(runs["None"], runs["FULL"])
