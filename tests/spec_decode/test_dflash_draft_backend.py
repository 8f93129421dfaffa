# SPDX-License-Identifier: Apache-2.0
"""What target and DFlash draft ask of vLLM's selector of attention backends, by its released text with the hunks."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest

# Read by the released `_get_model`.
pytest.importorskip("vllm.compilation.backends")

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode import dflash_draft_backend

from ..conftest import versions
from ..released import take, text_of

GATE = "VLLM_HWPLUGIN_DFLASH_DRAFT_BACKEND"
SELECTOR = "vllm/v1/attention/selector.py"
DFLASH = "vllm/v1/spec_decode/dflash.py"
BASE = "vllm/v1/spec_decode/llm_base_proposer.py"
V2_LOADER = "vllm/v1/worker/gpu/spec_decode/dflash/utils.py"
SHARED_FLAG = SUPPORTED[SUPPORTED.index("0.28.0") :]


class Backend(enum.Enum):
    """`AttentionBackendEnum`; the values are whether it has non-causal attention."""

    TRITON_ATTN = False
    FLEX_ATTENTION = True

    def get_class(self) -> Any:
        return types.SimpleNamespace(supports_non_causal=lambda: self.value)


@dataclasses.dataclass
class AttentionConfig:
    backend: Backend | None = None


@dataclasses.dataclass
class NewAttentionConfig(AttentionConfig):
    use_non_causal: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    is_mm_prefix_lm: bool = True


@dataclasses.dataclass
class ModelConfig:
    model_arch_config: Architecture = dataclasses.field(default_factory=Architecture)


@dataclasses.dataclass
class Speculative:
    method: str = "dflash"
    moe_backend: str | None = None
    attention_backend: Backend | None = None
    kv_cache_dtype: str | None = None
    draft_model_config: Any = "draft model"
    draft_load_config: Any = None


@dataclasses.dataclass
class Config:
    """An engine whose target sees images in both directions."""

    attention_config: AttentionConfig
    speculative_config: Speculative = dataclasses.field(default_factory=Speculative)
    model_config: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    kernel_config: Any = None
    cache_config: Any = None
    kv_transfer_config: Any = None
    compilation_config: Any = dataclasses.field(default_factory=dict)


def asked(tree: Any, config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Backend | None, bool, bool]:
    """Return the backend that is named for a layer under `config`, and if it needs non-causal attention, and images."""
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    names = {
        "NamedTuple": NamedTuple,
        "AttentionType": types.SimpleNamespace(DECODER="decoder"),
        "CacheDType": str,
        "cast": cast,
        "envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        "needs_non_causal": dflash_draft_backend.needs_non_causal,
        "_cached_get_attn_backend": lambda **given: given,
    }
    text = text_of(tree, SELECTOR)
    names["AttentionSelectorConfig"] = take(text, "AttentionSelectorConfig", given=names)
    images = config.model_config.model_arch_config.is_mm_prefix_lm
    found = take(text, "get_attn_backend", given=names)(128, "bfloat16", None, use_mm_prefix=images)
    wanted = found["attn_selector_config"]
    return found["backend"], wanted.use_non_causal, wanted.use_mm_prefix


def draft_of(tree: Any, config: Config, **choices: str) -> Config:
    """Return the configuration that a version's `DFlashProposer` loads the draft under."""
    base = take(
        text_of(tree, BASE, **choices),
        "SpecDecodeBaseProposer",
        {"_create_draft_vllm_config", "_get_model"},
        given={
            "replace": dataclasses.replace,
            "get_model": lambda vllm_config, **_: vllm_config,
            "get_draft_load_config": lambda *_: None,
        },
    )
    given = {"SpecDecodeBaseProposer": base, "override": lambda method: method, "replace": dataclasses.replace}
    given["without_mm_prefix"] = dflash_draft_backend.without_mm_prefix
    made = take(text_of(tree, DFLASH, **choices), "DFlashProposer", {"_create_draft_vllm_config"}, given=given)()
    made.vllm_config, made.speculative_config, made.dflash_causal = config, config.speculative_config, False
    made.method = "dflash"
    return made._get_model()


@pytest.mark.parametrize("version", versions(SELECTOR, BASE, among=SUPPORTED[: SUPPORTED.index("0.24.0")]))
def test_a_draft_asks_neither_for_the_targets_backend_nor_for_images(
    vllm_tree: Callable[[str], Any], version: str, notes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, of_target = vllm_tree(version), AttentionConfig if version.startswith("0.20.") else NewAttentionConfig
    config = Config(of_target(Backend.TRITON_ATTN))
    assert asked(tree, draft_of(tree, config), monkeypatch) == (None, True, False)
    assert asked(tree, config, monkeypatch) == (Backend.TRITON_ATTN, False, True)


def test_up_to_0_20_a_draft_has_the_targets_backend_where_it_fits_both(notes: dict[str, str]) -> None:
    for named in (Backend.FLEX_ATTENTION, None):
        draft = dflash_draft_backend.draft_config(cast(Any, Config(AttentionConfig(named))))
        assert cast(Any, draft.attention_config.backend) is named


@pytest.mark.parametrize("named", [None, Backend.FLEX_ATTENTION])
def test_model_runner_v2_reads_the_drafts_backend(vllm_tree: Callable[[str], Any], named: Backend | None) -> None:
    config = Config(NewAttentionConfig(Backend.TRITON_ATTN), Speculative(attention_backend=named))
    loaded: list[Config] = []

    class Loaded(Exception):
        pass

    def load(vllm_config: Config, model_config: Any) -> None:
        loaded.append(vllm_config)
        raise Loaded

    given = {"replace": dataclasses.replace, "get_model": load, "get_dflash_causal": lambda _: False}
    function = take(text_of(vllm_tree("0.24.0"), V2_LOADER), "load_dflash_model", given=given)
    with pytest.raises(Loaded):
        function(None, config)
    assert loaded[0].attention_config == NewAttentionConfig(named, use_non_causal=True)


@pytest.mark.parametrize("version", versions(DFLASH, among=SHARED_FLAG))
def test_the_targets_images_stay_seen_in_both_directions(vllm_tree: Callable[[str], Any], version: str) -> None:
    def flags(**choices: str) -> tuple[bool, ...]:
        config = Config(NewAttentionConfig(Backend.TRITON_ATTN))
        draft = draft_of(vllm_tree(version), config, **choices)
        return tuple(one.model_config.model_arch_config.is_mm_prefix_lm for one in (config, draft))

    assert flags(**{GATE: "off"}) == (False, False)
    assert flags() == (True, False)
