# SPDX-License-Identifier: Apache-2.0
"""A windowed DFlash draft's attention metadata, by vLLM's released speculator and FlashAttention's released builder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.released import Modules, texts

RUNNER, FLASH = "vllm.v1.worker.gpu", "vllm.v1.attention.backends.flash_attn"
OFF = {"VLLM_HWPLUGIN_BACKPORT_DRAFT_SCHEDULE": "off"}
WINDOW, MAX_MODEL_LEN, BLOCK, K = 128, 1024, 16, 7
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
DRAFT, TARGET = "draft.layers.0.attn", "target.layers.0.attn"


class Engine:
    """The draft's attention metadata in a released engine with one request.

    Args:
        tree: vLLM's text.
        window: of the draft's layer.
        target_flash: whether the target's layers run FlashAttention as well.
        device: on a CPU there is no FlashAttention, and what its schedules are asked for is put down.
        choices: gate -> value; by default every feature is on.

    Attributes:
        asked: what `get_scheduler_metadata` was given, on a CPU.
        attention: vLLM's implementation of the draft's layer.
    """

    def __init__(
        self, tree: Any, *, window: int | None, target_flash: bool = False, device: str = "cpu", **choices: str
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        # A graph reads these where they were when it was captured.
        self._lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self._queries = torch.tensor([0, 1 + K], dtype=torch.int32, device=device)
        self._blocks = torch.arange(1, 1 + MAX_MODEL_LEN // BLOCK, dtype=torch.int32, device=device)[None]
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
        if device == "cpu":
            vars(flash)["get_scheduler_metadata"] = self._schedule
        for name, size in ((DRAFT, window), (TARGET, None)) if target_flash else ((DRAFT, window),):
            layers[name] = SimpleNamespace(
                impl=flash.FlashAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, None, size, "auto"),
                num_heads=HEADS,
                get_attn_backend=lambda: Backend,
                kv_sharing_target_layer_name=None,
            )
        self.attention = layers[DRAFT].impl
        sizes = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
        spec = kv.FullAttentionSpec(**sizes) if window is None else kv.SlidingWindowSpec(**sizes, sliding_window=window)
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
            device=torch.device(device),
            draft_attn_layer_names={DRAFT},
            max_num_tokens=64,
            requires_non_causal=True,
            model=SimpleNamespace(),
        )
        type(speculator).attn_vllm_config = config
        buffers = SimpleNamespace(block_sizes=[BLOCK], kernel_block_sizes=[BLOCK])
        target: tuple[Any, ...] = (SimpleNamespace(), []) if tree.version >= "0.26" else ()
        speculator.set_attn(SimpleNamespace(), self._kv, buffers, *target)
        self._groups, self._build = speculator.attn_groups, modules(f"{RUNNER}.attn_utils").build_attn_metadata

    def _schedule(self, **asked: Any) -> torch.Tensor:
        self.asked.append(asked)
        return torch.zeros(9, dtype=torch.int32)

    def metadata(self, length: int, *, capture: bool = False) -> Any:
        """Of a step with a sequence of that length, in the blocks 1, 2, ...; or of the capture for such ones."""
        self._lengths.fill_(length)
        made = self._build(
            attn_groups=self._groups,
            num_reqs=1,
            num_tokens=1 + K,
            query_start_loc_gpu=self._queries,
            query_start_loc_cpu=self._queries.cpu(),
            max_query_len=1 + K,
            seq_lens=self._lengths,
            max_seq_len=length,
            block_tables=[self._blocks],
            slot_mappings=torch.zeros(1, 1 + K, dtype=torch.int64, device=self._lengths.device),
            kv_cache_config=self._kv,
            for_cudagraph_capture=capture,
            causal=False,
        )
        return made[DRAFT]


def _config() -> Any:
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: HEAD_SIZE,
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
