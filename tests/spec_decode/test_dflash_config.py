# SPDX-License-Identifier: Apache-2.0
"""Bad DFlash configurations: one error each, from the config alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.base import run_records
from vllm_hwplugin.spec_decode import dflash_config
from vllm_hwplugin.spec_decode.dflash_config import DFlashConfigError, check

# Shapes of config.json as published: z-lab's own format, and the speculators format as vLLM converts it.
PLAIN = {
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
CONVERTED = {
    "hidden_size": 2048,
    "target_hidden_size": 4096,
    "num_hidden_layers": 3,
    "eagle_aux_hidden_state_layer_ids": [2, 18, 36],
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 17, 35], "causal": False},
}


def config(draft: dict = PLAIN, k: int = 15, *, layers: int = 36, width: int = 4096, **changes: Any) -> SimpleNamespace:
    """A `VllmConfig` as far as the rules read it."""
    target = SimpleNamespace(
        model="target", hf_text_config=SimpleNamespace(num_hidden_layers=layers, hidden_size=width)
    )
    spec = SimpleNamespace(
        use_dflash=lambda: True,
        num_speculative_tokens=k,
        draft_model_config=SimpleNamespace(model="draft", hf_config=SimpleNamespace(**{**draft, **changes})),
        target_model_config=target,
        attention_backend=None,
    )
    attention = SimpleNamespace(backend=None)
    return SimpleNamespace(speculative_config=spec, model_config=target, attention_config=attention)


class Backend:
    """A member of `AttentionBackendEnum`."""

    name = "SOME_ATTN"

    def __init__(self, non_causal: bool | Exception) -> None:
        self.non_causal = non_causal

    def get_path(self) -> str:
        return "some.module.SomeBackend"

    def get_class(self) -> Any:
        if isinstance(self.non_causal, Exception):
            raise self.non_causal
        return SimpleNamespace(supports_non_causal=lambda: self.non_causal)


def problem(vllm_config: SimpleNamespace) -> str:
    with pytest.raises(DFlashConfigError) as error:
        check(vllm_config)
    return str(error.value)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Callable[[SimpleNamespace], str]:
    """`warned(config)`: a config that some version serves passes with this in the run record; an error if required."""

    def warning(vllm_config: SimpleNamespace) -> str:
        noted: dict[str, str] = {}
        dflash_config._warn.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(run_records, "note", noted.__setitem__)
            check(vllm_config)
            patch.setenv("VLLM_HWPLUGIN_DFLASH_FULL_GRAPH", "on")
            said = problem(vllm_config)
        assert noted == {"dflash-config": said}
        return said

    return warning


@pytest.mark.parametrize("draft", [PLAIN, CONVERTED], ids=["plain", "converted"])
def test_published_configs_pass(draft: dict) -> None:
    check(config(draft))


# -- block, layers and width ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draft",
    [PLAIN, {**PLAIN, "block_size": 99, "dflash_config": {"target_layer_ids": [1], "block_size": 16}}],
    ids=["top level", "dflash_config goes first"],
)
def test_more_tokens_than_the_block_holds(draft: dict, warned: Callable[[SimpleNamespace], str]) -> None:
    check(config(draft, 15))
    said = warned(config(draft, 16))
    for part in ("num_speculative_tokens=16", "draft draft", "block_size 16", "1 to 15", "to 15 or less"):
        assert part in said


AUX, EAGLE = "eagle_aux_hidden_state_layer_ids", "eagle_config"
NO_AUX = {"use_aux_hidden_state": False}


@pytest.mark.parametrize(
    "vllm_config",
    [
        # Where no block size is stated none is guessed.
        *(config(PLAIN, 99, block_size=stated) for stated in (None, True)),
        # Id n is the stream after the last layer, which the converted format names.
        config(CONVERTED, **{AUX: [0, 18, 36]}),
        config(dflash_config={"layer_ids": [1, 36]}),
        # A draft without aux layers has none to check.
        config(**NO_AUX, dflash_config={"target_layer_ids": [99]}),
        config(CONVERTED, width=4096),
        # vLLM reads a null as absent.
        config(CONVERTED, target_hidden_size=None, width=2048),
        # Without aux layers the draft's own width counts.
        config(CONVERTED, width=2048, dflash_config=NO_AUX),
    ],
)
def test_what_fits_passes(vllm_config: SimpleNamespace) -> None:
    check(vllm_config)


@pytest.mark.parametrize(
    ("vllm_config", "parts"),
    [
        # Ids of checkpoints count layers from zero.
        (
            config(dflash_config={"target_layer_ids": [1, 36, 40]}),
            ("dflash_config.target_layer_ids [1, 36, 40]", "no layer 36, 40", "0 to 35", "made for one of 36 layers"),
        ),
        # Ids in vLLM's own key count what went before.
        (config(CONVERTED, **{AUX: [2, 18, 37]}), (f"{AUX} [2, 18, 37]", "0 to 36")),
        # Lists that only some versions read.
        (config(**{"dflash_config": {}, EAGLE: {AUX: [1, 37]}}), (f"{EAGLE}.{AUX}",)),
        (config(dflash_config={"layer_ids": [1, 37]}), ("dflash_config.layer_ids",)),
        (config(width=2560), ("width 4096", "draft draft", "target target", "hidden_size 2560")),
        (config(CONVERTED, width=4096, dflash_config=NO_AUX), ("width 2048 (hidden_size",)),
    ],
)
def test_what_does_not_fit_is_said(vllm_config: SimpleNamespace, parts: tuple[str, ...]) -> None:
    said = problem(vllm_config)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize("key", [AUX, EAGLE])
def test_a_wrong_list_beside_the_one_that_is_read(key: str, warned: Callable[[SimpleNamespace], str]) -> None:
    """vLLM's own key goes before the others; of the others no version reads all."""
    good = [1, 9] if key == AUX else {AUX: [1, 9]}
    assert "no layer 40" in warned(config(**{"dflash_config": {"target_layer_ids": [1, 40]}, key: good}))


# -- the backend ------------------------------------------------------------------------------------------------------


def named(backend: Backend, **changes: Any) -> SimpleNamespace:
    vllm_config = config(**changes)
    vllm_config.speculative_config.attention_backend = backend
    return vllm_config


def test_a_backend_without_non_causal_attention_that_the_user_named() -> None:
    said = problem(named(Backend(False)))
    for part in ("--speculative-config", "SOME_ATTN", "draft draft", "some.module.SomeBackend", "leave the option out"):
        assert part in said
    check(named(Backend(True)))
    # The target's is not the draft's.
    vllm_config = config()
    vllm_config.attention_config.backend = Backend(False)
    check(vllm_config)


def test_in_0_20_one_option_serves_both_unless_the_draft_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one_option = config()
    del one_option.speculative_config.attention_backend
    one_option.attention_config.backend = Backend(False)
    entry = run_records.new("0")
    monkeypatch.setattr(run_records, "current", lambda: entry)
    said = problem(one_option)
    assert "--attention-backend=SOME_ATTN" in said
    assert "dflash-draft-backend" in said
    entry.features = {"dflash-draft-backend": {"state": "live", "reason": ""}}
    check(one_option)


def test_a_backend_that_cannot_be_imported_is_left_to_vllm() -> None:
    check(named(Backend(AssertionError("no CUDA"))))


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({"dflash_config": {"causal": True}}, True),
        ({"is_causal": True}, True),
        ({"layer_types": ["sliding_attention"] * 5}, True),
        ({"layer_types": ["sliding_attention"] * 5, "dflash_config": {"causal": False}}, False),
        # Versions disagree about which key counts: some would not need non-causal attention.
        ({"is_causal": False, "dflash_config": {"causal": True}}, True),
    ],
)
def test_causal_drafts_take_any_backend(changes: dict, causal: bool) -> None:
    if causal:
        check(named(Backend(False), **changes))
    else:
        assert "non-causal" in problem(named(Backend(False), **changes))
