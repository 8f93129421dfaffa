# SPDX-License-Identifier: Apache-2.0
"""The shapes of `vllm_hwplugin_lab.bench`, cut so that an engine starts quickly and several fit on one GPU.

Layers have their real sizes; there are fewer of them, and fewer experts. Weights are vLLM's dummies, which are the same
in every process, and so is the acceptance: synthetic, by seeded coins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm_hwplugin_lab.bench._shapes import SHAPES, Shape, write_configs

from ..musa_sim import loads
from ..musa_sim.loads import Load
from .engines import SMALL_ENGINE

#: In a batch, at most.
_MAX_NUM_SEQS: Final = 6


def cut(name: str, layers: int, **more: Any) -> Shape:
    """The shape `name` with so many layers, unquantised, and other values for keys of its config.

    Quantised experts of dummy weights are zeros, and would be no part of what is compared.
    """
    shape = SHAPES[name]
    kept = {key: value for key, value in shape.more.items() if key != "quantization_config"}
    if "layer_types" in kept:
        kept["layer_types"] = kept["layer_types"][:layers]
    return dataclasses.replace(shape, layers=layers, more={**kept, **more})


def _gemma4() -> Shape:
    """A target without shared keys, and its assistant, which looks a dummy's token up in all of the vocabulary."""
    window = {"sliding_window": 32}
    shape = cut("gemma-4-e4b", 6, num_kv_shared_layers=0, **window)
    assert shape.assistant is not None
    text = shape.assistant["text_config"] | window
    return dataclasses.replace(
        shape, assistant={**shape.assistant, "text_config": text, "use_ordered_embeddings": False}
    )


@dataclass(frozen=True)
class Case:
    """A target with its drafter, and what the plugin does with them.

    Attributes:
        shape: the target.
        method: of speculation, with `k` drafts.
        v1: features of the V1 runner -> why the engine does not use it; empty where it does.
        v2: those of Model Runner V2; it has none before 0.24.
        since: the first vLLM that runs it.
        options: of vLLM's.
        initialised: see :class:`Load`. All drafts of a block begin as the same token, and would all be one.
        variables: of the environment.
    """

    shape: Shape
    method: str
    v1: Mapping[str, str]
    v2: Mapping[str, str]
    k: int = 3
    since: str = "0.20.0"
    options: Mapping[str, Any] = field(default_factory=dict)
    initialised: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def engine(self, folder: Path) -> dict[str, Any]:
        """Arguments of `LLM`.

        Args:
            folder: one that does not exist, for the config files.
        """
        target, drafter = write_configs(self.shape, folder, self.method, self.k + 1)
        speculation = {
            "method": self.method,
            "num_speculative_tokens": self.k,
            "rejection_sample_method": "synthetic",
            # A length would have each step accept as many drafts as the other, or one more.
            "synthetic_acceptance_rates": [1 - (position + 1) / (self.k + 2) for position in range(self.k)],
        }
        # Logits of dummy weights are close together, and a batch that is padded may have others in the last bits. The
        # small sizes are for vLLM's own draft steps with one token per request: the plugin's graphs pad none of them.
        batches = range(1, _MAX_NUM_SEQS + 1)
        sizes = sorted({*batches, *((1 + self.k) * requests for requests in batches)})
        return {
            **SMALL_ENGINE,
            "model": str(target),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 128,
            "max_num_seqs": _MAX_NUM_SEQS,
            "max_num_batched_tokens": 112,
            "speculative_config": speculation if drafter is None else {**speculation, "model": str(drafter)},
            "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sizes},
            **self.options,
        }

    def load(self, folder: Path) -> Load:
        # A grammar needs a tokenizer.
        requests = [one for one in loads.mixed() if "structured_outputs" not in one.params]
        return Load(self.engine(folder), requests, autotuned=False, initialised=self.initialised)


V1_GRAPHS: Final = ("draft-full-graph", "draft-loop-graph", "dflash-full-graph", "v1-draft-phase", "v1-step-inputs")
V2_GRAPHS: Final = ("v2-tail-graph", "v2-step-inputs")
_DRAFTS_STEP_BY_STEP: Final = dict.fromkeys(
    ("draft-full-graph", "draft-loop-graph", "v1-draft-phase", "v1-step-inputs"), ""
)
_PASSES_OF_MLA: Final = {
    "draft-full-graph": "",
    "draft-loop-graph": "metadata must be built between steps",
    "v1-draft-phase": "metadata must be built in each step",
    "v1-step-inputs": "",
}
_ALL_OF_V2: Final = dict.fromkeys(V2_GRAPHS, "")
#: FlashInfer's, which vLLM prefers on Hopper, is compiled by nvcc when an engine starts.
_PREFILL: Final = {"gdn_prefill_backend": "triton", "enable_prefix_caching": False}
#: Variables with which linear layers in FP8 are not FlashInfer's or DeepGEMM's, which are compiled as well.
_NOTHING_TO_COMPILE: Final = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
#: A sum is split alike whatever else is in a batch. vLLM would leave compiled models, and their pieces, out with it.
_BATCH_INVARIANT: Final = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}

CASES: Final[Mapping[str, Case]] = {
    "experts": Case(cut("30b-a3b", 4), "eagle3", _DRAFTS_STEP_BY_STEP, _ALL_OF_V2),
    "experts, sinks and windows": Case(
        # A window that requests outgrow.
        cut("gpt-oss-20b", 4, sliding_window=32),
        "eagle3",
        _DRAFTS_STEP_BY_STEP,
        _ALL_OF_V2,
    ),
    "hybrid": Case(
        cut("qwen3-next-4l", 4, num_experts=64),
        "mtp",
        _DRAFTS_STEP_BY_STEP,
        _ALL_OF_V2,
        options=_PREFILL,
        # With vLLM's own dummy weights a state that is not moved would not show.
        initialised=True,
        variables=_BATCH_INVARIANT,
    ),
    "hybrid, dflash": Case(
        # So many layers that all with attention, the drafter's as well, are one KV cache group, as V1 needs it.
        cut("qwen3-next-4l", 20, num_experts=16),
        "dflash",
        {
            "draft-full-graph": "",
            "dflash-full-graph": "",
            "draft-loop-graph": "there is no chain",
            "v1-draft-phase": "",
            "v1-step-inputs": "",
        },
        _ALL_OF_V2,
        k=7,
        # Before, the model does not give out the hidden states that the drafter reads.
        since="0.24.0",
        # Of states for six requests.
        options={**_PREFILL, "kv_cache_memory_bytes": 2 << 30},
        initialised=True,
    ),
    "MLA": Case(
        cut("deepseek-v3-4l", 4, n_routed_experts=16),
        "mtp",
        _PASSES_OF_MLA,
        _ALL_OF_V2,
        options={"attention_config": {"backend": "FLASH_ATTN_MLA"}},
        variables=_BATCH_INVARIANT,
    ),
    "MLA, planned by its kernel": Case(
        cut("deepseek-v3-4l", 4, n_routed_experts=16),
        "mtp",
        _PASSES_OF_MLA,
        _ALL_OF_V2,
        options={"attention_config": {"backend": "FLASHMLA"}},
    ),
    "MLA, FP8 keys": Case(
        cut("deepseek-v3-4l", 4, n_routed_experts=16),
        "mtp",
        _PASSES_OF_MLA,
        _ALL_OF_V2,
        options={"attention_config": {"backend": "FLASHMLA"}, "kv_cache_dtype": "fp8"},
    ),
    # With activations that are scaled as they come.
    "FP8": Case(
        dataclasses.replace(SHAPES["8b-fp8-tp2"], layers=8, tensor_parallel_size=1),
        "eagle3",
        _DRAFTS_STEP_BY_STEP,
        _ALL_OF_V2,
        variables=_NOTHING_TO_COMPILE,
    ),
    # A draft that reads the keys of the target's last layers and has none of its own.
    "assistant": Case(
        _gemma4(),
        "mtp",
        {"draft-full-graph": "its own drafting code"},
        _ALL_OF_V2,
        since="0.23.0",
        # For heads of 512 FlashAttention needs packages that not every host has.
        options={"attention_config": {"backend": "TRITON_ATTN"}},
    ),
}
