# SPDX-License-Identifier: Apache-2.0
"""Configurations of an engine with a drafter whose capture sizes the plugin sets, and what released runners make of
them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.spec_decode import capture_sizes as feature

from ..released import Modules, texts
from .graph_manager import MODE

V2 = ("vllm/config/vllm.py", "vllm/v1/worker/gpu/cudagraph_utils.py")
V1 = ("vllm/config/vllm.py", "vllm/v1/cudagraph_dispatcher.py")


def crossed(versions: Sequence[Any], values: Sequence[Any], *more: Any) -> list[Any]:
    """Return parameters: the first and the last version with each value, and every other version with one of them."""
    made = []
    for number, version in enumerate(versions):
        ends = number in (0, len(versions) - 1)
        name, marks = (version, ()) if isinstance(version, str) else (version.values[0], version.marks)
        chosen = values if ends else [values[number % len(values)]]
        made += [pytest.param(name, value, *more, marks=marks) for value in chosen]
    return made


def own_of(block: int, max_num_seqs: int, max_num_batched_tokens: int, ceiling: int = 512) -> list[int]:
    """As vLLM makes them."""
    largest = min(max_num_seqs * block * 2, ceiling, max_num_batched_tokens)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16)) if size <= largest]


def config_of(k: int = 3, seqs: int = 1024, batched: int = 8192, method: str = "eagle3", **more: Any) -> Any:
    """A `VllmConfig` before vLLM fills in the sizes; without a drafter for `k` of 0."""
    sizes, largest = more.get("sizes"), more.get("largest")
    speculative_config = SimpleNamespace(
        method=method,
        num_speculative_tokens=k,
        num_speculative_tokens_per_batch_size=more.get("tiers"),
        enable_adaptive_verification=more.get("adaptive"),
        uses_dynamic_speculative_decoding=lambda: False,
    )
    return SimpleNamespace(
        speculative_config=speculative_config if k else None,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=batched),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=more.get("tp", 1),
            data_parallel_size=more.get("dp", 1),
            enable_elastic_ep=more.get("elastic", False),
            use_ubatching=more.get("ubatches", False),
            pipeline_parallel_size=more.get("pp", 1),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=largest,
            cudagraph_mode=more.get("mode", MODE),
            cudagraph_specialize_lora=False,
            # vLLM 0.32 has no such field any more.
            pass_config=SimpleNamespace(**({"enable_sp": more["sp"]} if "sp" in more else {})),
            post_init_cudagraph_sizes=lambda: None,
            adjust_cudagraph_sizes_for_spec_decode=lambda *_: None,
            compile_sizes=more.get("compile_sizes"),
            is_attention_compiled_piecewise=lambda: True,
        ),
        model_config=SimpleNamespace(
            enforce_eager=False,
            runner_type=more.get("runner", "generate"),
            architectures=more.get("architectures", ()),
            get_hidden_size=lambda: more.get("hidden", 4096),
            is_moe=more.get("experts", False),
            multimodal_config=more.get("multimodal"),
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        lora_config=more.get("lora"),
        use_v2_model_runner=more.get("v2", False),
        is_encoder_only=more.get("encodes", False),
        performance_mode="balanced",
        uniform_decode_query_len=1 + k,
        num_speculative_tokens=k,
    )


def made(config: Any, fill: Callable[[Any], None]) -> Any:
    """As `__post_init__`: the platform's first hook, vLLM's sizes by `fill`, the platform's second hook."""
    feature.note_user_sizes(config)
    fill(config)
    feature.check_and_update_config(config)
    assert not [name for name in vars(config) if name.startswith("_")]
    return config


def stock(config: Any) -> None:
    compilation, scheduler = config.compilation_config, config.scheduler_config
    if compilation.cudagraph_capture_sizes is None:
        block = config.uniform_decode_query_len
        ceiling = compilation.max_cudagraph_capture_size or 512
        own = own_of(block, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, ceiling)
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = own, own[-1]


def methods(text: str, owner: str) -> dict[str, ast.FunctionDef]:
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == owner]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def method_of(text: str, owner: str, name: str, **given: Any) -> Any:
    """One method of a released class, as a function."""
    exec(compile(ast.Module([methods(text, owner)[name]], []), f"released {name}", "exec"), given)
    return given[name]


def fill_of(tree: Any) -> Any:
    """The released `VllmConfig._set_cudagraph_sizes`."""
    quiet = SimpleNamespace(warning=lambda *_: None)
    text = tree.read("vllm/config/vllm.py")
    return method_of(text, "VllmConfig", "_set_cudagraph_sizes", CUDAGraphMode=CUDAGraphMode, logger=quiet)


def round_up_sizes(tree: Any, compilation: Any, block: int) -> None:
    """As the V1 runner does before it captures."""
    rounding = method_of(
        tree.read("vllm/config/compilation.py"),
        "CompilationConfig",
        "adjust_cudagraph_sizes_for_spec_decode",
        round_up=lambda size, multiple: -(-size // multiple) * multiple,
    )
    rounding(compilation, block, *([1] if rounding.__code__.co_argcount == 3 else []))


def dispatcher_of(tree: Any, config: Any) -> Any:
    """A released dispatcher of the V1 runner, with its keys."""
    name = "vllm.v1.cudagraph_dispatcher"
    dispatcher = Modules(texts(tree), [name])(name).CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(MODE, config.uniform_decode_query_len)
    return dispatcher
