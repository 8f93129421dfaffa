# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a released vLLM, with its own requests, KV cache manager and structured outputs, on the host.

Modules below `OWN` are executed from the released text, patched or stock.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from tests.released import Modules, take, texts

OWN = (
    "vllm.v1.core",
    "vllm.v1.engine",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.outputs",
    "vllm.v1.request",
    "vllm.v1.structured_output",
)
BLOCK_SIZE = 4


class Off(SimpleNamespace):
    """A configuration in which all is off that is not named."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def released(tree: Any, **choices: str) -> Modules:
    """The modules of one version.

    Args:
        tree: its text.
        choices: gate -> value; by default every feature is on.
    """
    return Modules(texts(tree, **choices), OWN)


def speculative_config(modules: Modules, method: str, k: int) -> Any:
    """What the scheduler asks of vLLM's `SpeculativeConfig`, answered by its own methods."""
    questions = {
        "use_eagle",
        "use_dflash",
        "uses_draft_model",
        "uses_extract_hidden_states",
        "use_multi_module_mtp",
        "use_dspark",
        "max_num_new_slots_for_drafting",
    }
    text = modules.text("vllm/config/speculative.py")
    made = take(text, "SpeculativeConfig", questions, given={"config": lambda cls: cls})()
    made.method, made.num_speculative_tokens, made.parallel_drafting = method, k, False
    made.num_speculative_tokens_per_batch_size = None
    return made


def make_scheduler(
    modules: Modules, method: str, k: int, *, max_model_len: int = 64, hybrid: bool = False, **changes: Any
) -> Any:
    """vLLM's `AsyncScheduler` for one layer of full attention, with prefix caching and blocks of `BLOCK_SIZE`.

    Args:
        modules: of the version.
        method: of speculative decoding, with `k` drafts.
        hybrid: whether there is a Mamba layer too.
        changes: attributes of the config, instead of those here.
    """
    kv = modules("vllm.v1.kv_cache_interface")
    asynchronous = modules("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    spec = speculative_config(modules, method, k)
    config = Off(
        scheduler_config=Off(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            policy="fcfs",
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            async_scheduling=True,
            watermark=0.0,
            prefill_schedule_interval=1,
        ),
        cache_config=Off(num_gpu_blocks=64, enable_prefix_caching=True, mamba_cache_mode="none", block_size=BLOCK_SIZE),
        parallel_config=Off(
            data_parallel_index=0,
            data_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=Off(max_model_len=max_model_len),
        observability_config=Off(),
        ec_manager_config=Off(get_encoder_cache_manager_obj=lambda: None),
        speculative_config=spec,
        num_speculative_tokens=k,
        num_lookahead_tokens=k + (method == "dflash"),
        max_in_flight_tokens=256,
        max_concurrent_batches=2,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    spec_of_layer = kv.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [kv.KVCacheGroupSpec(["layer"], spec_of_layer)]
    if hybrid:
        mamba = kv.MambaSpec(
            block_size=BLOCK_SIZE,
            shapes=((8,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=config.cache_config.mamba_cache_mode,
            num_speculative_blocks=k,
        )
        groups.append(kv.KVCacheGroupSpec(["mamba"], mamba))
    return asynchronous(
        vllm_config=config,
        kv_cache_config=kv.KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=SimpleNamespace(should_advance=lambda request: False),
        block_size=BLOCK_SIZE,
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda config: False),
    )


def _hashed(value: Any) -> bytes:
    return repr(value).encode()


def make_request(modules: Modules, name: str, prompt: Iterable[int], params: SamplingParams | None = None) -> Any:
    """vLLM's `Request`, whose blocks are hashed for prefix caching."""
    utils = modules("vllm.v1.core.kv_cache_utils")
    if not hasattr(utils, "NONE_HASH"):
        utils.init_none_hash(_hashed)
    return modules("vllm.v1.request").Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=params or SamplingParams(max_tokens=16, ignore_eos=True),
        pooling_params=None,
        block_hasher=utils.get_request_block_hasher(BLOCK_SIZE, _hashed),
    )
