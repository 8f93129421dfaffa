# SPDX-License-Identifier: Apache-2.0
"""Target and DFlash draft get their attention backends from the released text of vLLM, stock and patched.

The selector, the CUDA platform's choice, the proposer's configuration and its loading are executed as they were
released; the backends are stand-ins that declare what the released ones do.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest

# Read by the released `_get_model`; imported before the tests change the platform.
pytest.importorskip("vllm.compilation.backends")

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode import dflash_draft_backend

from ..conftest import versions
from ..released import take, text_of
from .attention_host import (
    DECLARED,
    Backend,
    Config,
    Host,
    ModelConfig,
    Silent,
    Speculative,
    new,
    old,
    seen_both_ways,
)

GATE = "VLLM_HWPLUGIN_DFLASH_DRAFT_BACKEND"
FILES = ("vllm/v1/spec_decode/", "vllm/v1/worker/", "vllm/v1/attention/", "vllm/config/")
SELECTOR = "vllm/v1/attention/selector.py"
DFLASH = "vllm/v1/spec_decode/dflash.py"
BASE = "vllm/v1/spec_decode/llm_base_proposer.py"
V2_LOADER = "vllm/v1/worker/gpu/spec_decode/dflash/utils.py"
OLD = [version for version in SUPPORTED if version.startswith("0.20.")]
TEXT_ONLY = [version for version in SUPPORTED if version.startswith(("0.21.", "0.22.", "0.23."))]
SHARED_FLAG = SUPPORTED[SUPPORTED.index("0.28.0") :]


@pytest.fixture
def released(vllm_tree: Callable, notes, monkeypatch: pytest.MonkeyPatch):
    """`released(version, ...)`: how one version selects attention backends, on a stand-in host."""
    import vllm.config
    import vllm.platforms

    def selection(version: str, *, patched: bool = True) -> Selection:
        tree, choices = vllm_tree(version), {} if patched else {GATE: "off"}
        cuda = take(
            tree.read("vllm/platforms/cuda.py"),
            "CudaPlatformBase",
            {"get_valid_backends", "get_attn_backend_cls"},
            given={"Platform": Host, "logger": Silent(), "_get_backend_priorities": lambda *_: list(Backend)},
        )
        monkeypatch.setattr(vllm.platforms, "current_platform", cuda)
        names = {
            "NamedTuple": NamedTuple,
            "AttentionType": types.SimpleNamespace(DECODER="decoder"),
            "CacheDType": str,
            "cast": cast,
            "cache": functools.cache,
            "envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False),
            "logger": Silent(),
            "resolve_obj_by_qualname": DECLARED.__getitem__,
            "needs_non_causal": dflash_draft_backend.needs_non_causal,
        }
        text = text_of(tree, SELECTOR, **choices)
        for name in ("AttentionSelectorConfig", "_cached_get_attn_backend", "get_attn_backend"):
            names[name] = take(text, name, given=names)

        def build(config: Config) -> str:
            """What `Attention.__init__` asks for a layer that is built under `config`."""
            monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
            mm_prefix = config.model_config.model_arch_config.is_mm_prefix_lm
            return names["get_attn_backend"](128, "bfloat16", None, use_mm_prefix=mm_prefix).name

        def load(vllm_config: Config, **_: Any) -> tuple[str, Config]:
            return build(vllm_config), vllm_config

        return Selection(build, proposer(tree, choices, load), names["_cached_get_attn_backend"])

    return selection


def proposer(tree: Any, choices: dict[str, str], load: Callable[..., Any]) -> type:
    """A version's `DFlashProposer`, as far as it makes the draft's configuration and loads the model."""
    base = take(
        text_of(tree, BASE, **choices),
        "SpecDecodeBaseProposer",
        {"_create_draft_vllm_config", "_get_model"},
        given={"replace": dataclasses.replace, "get_model": load},
    )
    return take(
        text_of(tree, DFLASH, **choices),
        "DFlashProposer",
        {"_create_draft_vllm_config"},
        given={
            "SpecDecodeBaseProposer": base,
            "override": lambda method: method,
            "replace": dataclasses.replace,
            "without_mm_prefix": dflash_draft_backend.without_mm_prefix,
        },
    )


@dataclasses.dataclass
class Selection:
    """`target(config)` and `draft(config)` are the names of the backends that their layers get."""

    target: Callable[[Config], str]
    proposer_class: type
    cached: Any

    def load(self, config: Config) -> tuple[str, Config]:
        made = self.proposer_class()
        made.vllm_config, made.speculative_config, made.dflash_causal = config, config.speculative_config, False
        made.method = "dflash"
        return made._get_model()

    def draft(self, config: Config) -> str:
        return self.load(config)[0]


@pytest.mark.parametrize("version", versions(*FILES, among=OLD))
@pytest.mark.parametrize(
    ("named", "draft"),
    [(Backend.TRITON_ATTN, "FLASH_ATTN"), (Backend.FLEX_ATTENTION, "FLEX_ATTENTION"), (None, "FLASH_ATTN")],
)
def test_a_target_keeps_its_name_and_a_draft_that_it_does_not_fit_selects(
    released, version: str, named: Backend | None, draft: str
) -> None:
    """Also with images, which Gemma 4's class names TRITON_ATTN for."""
    patched = released(version)
    config = old(named, model_config=seen_both_ways() if named else ModelConfig())
    for _ in range(2):
        assert patched.target(config) == (named.name if named else "FLASH_ATTN")
        assert patched.draft(config) == draft
    # Target and draft are two entries of the selector's cache, each found again.
    assert patched.cached.cache_info().misses == patched.cached.cache_info().hits == 2


@pytest.mark.parametrize("version", versions(*FILES, among=TEXT_ONLY))
def test_a_text_only_draft_is_not_left_with_flex_attention(released, version: str) -> None:
    config = new(Backend.TRITON_ATTN, model_config=seen_both_ways())
    stock = released(version, patched=False)
    assert (stock.target(config), stock.draft(config)) == ("TRITON_ATTN", "FLEX_ATTENTION")
    patched = released(version)
    assert (patched.target(config), patched.draft(config)) == ("TRITON_ATTN", "FLASH_ATTN")


def loaded_by_v2(tree: Any, named: Backend | None, **choices: str) -> Config:
    """The configuration under which Model Runner V2 builds the draft."""

    class Loaded(Exception):
        pass

    def load(vllm_config: Config, model_config: Any) -> None:
        raise Loaded(vllm_config)

    config = new(Backend.TRITON_ATTN, speculative_config=Speculative(attention_backend=named))
    function = take(
        text_of(tree, V2_LOADER, **choices),
        "load_dflash_model",
        given={"replace": dataclasses.replace, "get_model": load, "get_dflash_causal": lambda _: False},
    )
    with pytest.raises(Loaded) as loaded:
        function(None, config)
    return loaded.value.args[0]


@pytest.mark.parametrize("named", [None, Backend.FLEX_ATTENTION])
def test_model_runner_v2_reads_the_drafts_backend(vllm_tree: Callable, named: Backend | None) -> None:
    tree = vllm_tree("0.24.0")
    assert loaded_by_v2(tree, named, **{GATE: "off"}).attention_config.backend is Backend.TRITON_ATTN
    draft = loaded_by_v2(tree, named)
    assert (draft.attention_config.backend, draft.attention_config.use_non_causal) == (named, True)


@pytest.mark.parametrize("version", versions(*FILES, among=SHARED_FLAG))
def test_the_targets_images_stay_seen_in_both_directions(vllm_tree: Callable, version: str) -> None:
    def flags(**choices: str) -> tuple[bool, bool]:
        config = new(Backend.TRITON_ATTN, model_config=seen_both_ways())
        made = proposer(vllm_tree(version), choices, lambda **_: None)()
        made.vllm_config, made.speculative_config, made.dflash_causal = config, config.speculative_config, False
        made.method = "dflash"
        draft = made._create_draft_vllm_config()
        return tuple(one.model_config.model_arch_config.is_mm_prefix_lm for one in (config, draft))

    assert flags(**{GATE: "off"}) == (False, False)
    assert flags() == (True, False)
