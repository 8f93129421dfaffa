# SPDX-License-Identifier: Apache-2.0
"""The schedule that FlashAttention 3 gets for a windowed DFlash draft: vLLM's released speculators and builders.

What is recorded is what the builder asks FlashAttention for; FlashAttention's own host code runs on a GPU alone
(`tests/gpu/test_draft_schedule.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

import torch

from tests.spec_decode.released import Modules, texts
from vllm_hwplugin.patching import SUPPORTED

RUNNER, FLASH = "vllm.v1.worker.gpu", "vllm.v1.attention.backends.flash_attn"
WINDOWED = SUPPORTED[SUPPORTED.index("0.25.0") : SUPPORTED.index("0.30.0")]
OFF = {"VLLM_HWPLUGIN_BACKPORT_DRAFT_SCHEDULE": "off"}
WINDOW, MAX_MODEL_LEN, BLOCK, K = 128, 1024, 16, 7
DRAFT, TARGET = "draft.layers.0.attn", "target.layers.0.attn"


class Engine:
    """Two sides of a released engine: the draft's metadata when its graph is captured, and in a step.

    Args:
        version: of the modules.
        window: of the draft's layer.
        target_flash: whether the target's layers run FlashAttention as well.
    """

    def __init__(self, tree: Any, *, window: int | None, target_flash: bool = False, **choices: str) -> None:
        self.asked: list[dict[str, Any]] = []
        layers: dict[str, Any] = {}
        own = (RUNNER, FLASH, "vllm.v1.worker.utils", "vllm.v1.kv_cache_interface")
        stand_ins = {
            "get_flash_attn_version": lambda **_: 3,
            "get_num_attention_heads_from_layers": lambda config, names: layers[names[0]].num_heads,
            "get_layers_from_vllm_config": lambda config, kind, names=None: {
                name: layer for name, layer in layers.items() if names is None or name in names
            },
        }
        modules = Modules(texts(tree, **choices), own, stand_ins=stand_ins)
        flash, kv = modules(FLASH), modules("vllm.v1.kv_cache_interface")
        # Imported where there is a GPU.
        vars(flash)["get_scheduler_metadata"] = self._schedule
        for name, size in ((DRAFT, window), (TARGET, None)) if target_flash else ((DRAFT, window),):
            implementation = object.__new__(flash.FlashAttentionImpl)
            implementation.sliding_window = (-1, -1) if size is None else (size - 1, 0)
            implementation.num_heads = 4
            layers[name] = SimpleNamespace(
                impl=implementation,
                num_heads=4,
                get_attn_backend=lambda: Backend,
                kv_sharing_target_layer_name=None,
            )
        sizes = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
        spec = (
            kv.FullAttentionSpec(**sizes) if window is None else kv.SlidingWindowSpec(**sizes, sliding_window=window)
        )
        self._kv = kv.KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[kv.KVCacheGroupSpec([DRAFT], spec)]
        )

        class Backend(flash.FlashAttentionBackend):  # type: ignore[name-defined, misc]
            @staticmethod
            def get_builder_cls() -> type:
                return flash.FlashAttentionMetadataBuilder

            @classmethod
            def full_cls_name(cls) -> tuple[str, str]:
                return FLASH, "FlashAttentionBackend"

        speculator = object.__new__(modules(f"{RUNNER}.spec_decode.dflash.speculator").DFlashSpeculator)
        config = _config()
        vars(speculator).update(
            vllm_config=config,
            device=torch.device("cpu"),
            draft_attn_layer_names={DRAFT},
            max_num_tokens=64,
            requires_non_causal=True,
            model=SimpleNamespace(),
        )
        type(speculator).attn_vllm_config = config
        buffers = SimpleNamespace(block_sizes=[BLOCK], kernel_block_sizes=[BLOCK])
        target = (SimpleNamespace(), []) if tree.version >= "0.26" else ()
        speculator.set_attn(SimpleNamespace(), self._kv, buffers, *target)
        self._groups, self._build = speculator.attn_groups, modules(f"{RUNNER}.attn_utils").build_attn_metadata

    def _schedule(self, **asked: Any) -> torch.Tensor:
        self.asked.append(asked)
        return torch.zeros(9, dtype=torch.int32)

    def metadata(self, max_seq_len: int, capture: bool = False) -> Any:
        """Of one request's queries, whose sequences are that long at most."""
        queries = torch.tensor([0, 1 + K], dtype=torch.int32)
        made = self._build(
            attn_groups=self._groups,
            num_reqs=1,
            num_tokens=1 + K,
            query_start_loc_gpu=queries,
            query_start_loc_cpu=queries,
            max_query_len=1 + K,
            seq_lens=torch.tensor([max_seq_len], dtype=torch.int32),
            max_seq_len=max_seq_len,
            block_tables=[torch.zeros(1, 8, dtype=torch.int32)],
            slot_mappings=torch.zeros(1, 1 + K, dtype=torch.int64),
            kv_cache_config=self._kv,
            for_cudagraph_capture=capture,
            causal=False,
        )
        return made[DRAFT]


def _config() -> Any:
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 4,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: 64,
        rswa_window=None,
        is_mm_prefix_lm=False,
        max_model_len=MAX_MODEL_LEN,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=64
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
    )


def reaches(asked: dict[str, Any]) -> tuple[bool, bool]:
    """What FlashAttention 3 makes of a window to both sides: whether it is one for these sequences and queries."""
    left, right = asked["window_size"]
    return 0 <= left < asked["max_seqlen_k"] - 1, 0 <= right < asked["max_seqlen_q"] - 1


@pytest.mark.parametrize("version", WINDOWED)
def test_a_step_of_short_sequences_is_scheduled_as_its_graph_was(
    version: str, vllm_tree: Callable[[str], Any]
) -> None:
    stock = Engine(vllm_tree(version), window=WINDOW, **OFF)
    # What the captured kernel was given, and the schedule that it reads in a step.
    stock.metadata(MAX_MODEL_LEN, capture=True)
    stock.metadata(WINDOW // 2)
    captured, replayed = stock.asked
    assert captured["window_size"] == replayed["window_size"] == (WINDOW - 1, WINDOW - 1)
    assert (reaches(captured), reaches(replayed)) == ((True, False), (False, False))

    patched = Engine(vllm_tree(version), window=WINDOW)
    assert patched.metadata(MAX_MODEL_LEN, capture=True).scheduler_metadata is None
    assert patched.metadata(WINDOW // 2).scheduler_metadata is None
    assert patched.asked == []


@pytest.mark.parametrize("version", WINDOWED)
def test_other_drafts_are_scheduled_as_before(version: str, vllm_tree: Callable[[str], Any]) -> None:
    for choices in (OFF, {}):
        assert Engine(vllm_tree(version), window=None, **choices).metadata(100).scheduler_metadata is not None
        # Two windows, for which vLLM makes no schedule by itself.
        both = Engine(vllm_tree(version), window=WINDOW, target_flash=True, **choices)
        assert both.metadata(100).scheduler_metadata is None
