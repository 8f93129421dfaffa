# SPDX-License-Identifier: Apache-2.0
"""Capture sizes of an engine with a drafter: by arithmetic, and what the released runners make of them."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin import journal
from vllm_hwplugin.spec_decode import capture_sizes as feature
from vllm_hwplugin.spec_decode import mixed_sizes
from vllm_hwplugin.spec_decode.capture_sizes import (
    LARGEST,
    LARGEST_MIXED,
    capture_sizes,
    largest_own,
    max_num_splits,
    sampled,
    two_samples,
)
from vllm_hwplugin.spec_decode.v1 import mixed_sizes as v1_mixed_sizes
from vllm_hwplugin.spec_decode.v2 import mixed_graphs
from vllm_hwplugin.spec_decode.v2 import mixed_sizes as v2_mixed_sizes
from vllm_hwplugin.versions import SUPPORTED

from ..conftest import versions
from .graph_manager import MODE, Manager, Memory
from .released import Modules, texts

OFF = {"VLLM_HWPLUGIN_CAPTURE_SIZES": "off"}


# -- by arithmetic ----------------------------------------------------------------------------------------------------


def own_of(block: int, max_num_seqs: int, max_num_batched_tokens: int, ceiling: int = 512) -> list[int]:
    """As vLLM makes them."""
    largest = min(max_num_seqs * block * 2, ceiling, max_num_batched_tokens)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16)) if size <= largest]


ENGINES = st.tuples(
    st.integers(2, 17),
    st.one_of(st.sampled_from([1, 2, 3, 64, 256, 1024]), st.integers(1, 1024)),
    st.one_of(st.sampled_from([64, 512, 2048, 8192, 16384]), st.integers(20, 16384)),
    st.sampled_from([512, 1024]),
)


@given(ENGINES)
@example((4, 1024, 16384, 512))
@example((7, 73, 512, 512))
def test_every_decode_batch_up_to_the_bound_has_a_size_of_whole_blocks(engine: tuple[int, int, int, int]) -> None:
    block, seqs, batched, _ = engine
    own = own_of(*engine)
    sizes = capture_sizes(block, seqs, batched, own)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] <= batched
    top = min(seqs, min(batched, LARGEST) // block)
    for requests in range(1, top + 1):
        size = next(size for size in sizes if size >= requests * block)
        assert size % block == 0, requests
        assert size // block <= seqs, requests
        if requests * block > max(*own, block):
            assert (size - requests * block) * 8 < requests * block, requests
    # That batch fills its size.
    assert top == 0 or top * block in sizes


@given(ENGINES)
@example((4, 1024, 16384, 512))
def test_few_sizes_are_added(engine: tuple[int, int, int, int]) -> None:
    block, seqs, batched, _ = engine
    own = own_of(*engine)
    sizes = capture_sizes(block, seqs, batched, own)
    rounded = {-(-size // block) * block for size in own}
    assert len([size for size in sizes if size <= max(rounded)]) <= len(own) + 1
    above = [size for size in sizes if size > max(rounded)]
    assert len(above) <= 8 * math.ceil(math.log2(max(2.0, LARGEST / max(own)))) + 8
    # On the GPUs where vLLM takes 1024 requests: two octaves.
    if engine == (4, 1024, 16384, 512):
        assert len(above) == 16


@given(ENGINES)
@example((4, 64, 8192, 512))
def test_batches_with_prompts_have_sizes_up_to_the_bound_for_any_number_of_requests(
    engine: tuple[int, int, int, int],
) -> None:
    block, seqs, batched, _ = engine
    own = own_of(*engine)
    sizes, mixed = (capture_sizes(*engine[:3], own, mixed=mixed) for mixed in (False, True))
    assert set(sizes) <= set(mixed)
    bound = min(batched, LARGEST_MIXED)
    assert bound - block < max(mixed) <= max(bound, *own, block)
    # A DFlash drafter's buffers on the V1 runner hold the fullest decode batch and no more.
    assert seqs * block > max(mixed) or seqs * block in mixed
    assert [size for size in mixed if size <= max(own)] == [size for size in sizes if size <= max(own)]


def test_where_vllms_sizes_hold_every_decode_batch_they_stay() -> None:
    for block, seqs in ((4, 64), (8, 64), (2, 256)):
        own = own_of(block, seqs, 8192)
        assert list(capture_sizes(block, seqs, 8192, own)) == own


# -- as vLLM calls it -------------------------------------------------------------------------------------------------


@pytest.fixture
def entry() -> journal.Journal:
    made = journal.new("0")
    made.features = {"capture-sizes": {"state": "live", "reason": ""}}
    journal.begin(made, None)
    return made


def config_of(k: int = 3, seqs: int = 1024, batched: int = 8192, method: str = "eagle3", **more: Any) -> Any:
    """A `VllmConfig` before vLLM fills in the sizes."""
    sizes, largest = more.get("sizes"), more.get("largest")
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method,
            num_speculative_tokens=k,
            num_speculative_tokens_per_batch_size=more.get("tiers"),
            uses_dynamic_speculative_decoding=lambda: False,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=batched),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=more.get("tp", 1),
            data_parallel_size=more.get("dp", 1),
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
        model_config=SimpleNamespace(enforce_eager=False),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        lora_config=more.get("lora"),
        use_v2_model_runner=more.get("v2", False),
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
        block = 1 + config.speculative_config.num_speculative_tokens
        own = own_of(block, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = own, own[-1]


def test_an_engine_of_several_gpus_has_the_sizes(entry: journal.Journal) -> None:
    for more in ({}, {"sp": False}):
        assert made(config_of(tp=2, **more), stock).compilation_config.max_cudagraph_capture_size == LARGEST_MIXED
    assert "left to vLLM" not in entry.decisions["capture-sizes"]


def test_where_batches_with_prompts_have_no_graphs_there_are_no_sizes_for_them(entry: journal.Journal) -> None:
    config = made(config_of(mode=CUDAGraphMode.FULL_DECODE_ONLY), stock)
    assert config.compilation_config.max_cudagraph_capture_size == LARGEST


def test_what_is_decided_is_on_record_and_stays(entry: journal.Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    config = made(config_of(), stock)
    said, sizes = entry.decisions["capture-sizes"], config.compilation_config.cudagraph_capture_sizes
    assert sizes[-1] == config.compilation_config.max_cudagraph_capture_size == LARGEST
    assert "512 requests" in said
    assert largest_own(config.compilation_config) == 512
    # A configuration that is made from it.
    made(config, stock)
    assert (entry.decisions["capture-sizes"], config.compilation_config.cudagraph_capture_sizes) == (said, sizes)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"mode": CUDAGraphMode.PIECEWISE}, "cudagraph_mode is PIECEWISE"),
        # Its graphs of batches with prompts would be as many, and as large.
        ({"mode": CUDAGraphMode.FULL}, "cudagraph_mode is FULL"),
        ({"dp": 2}, "a rank of data parallelism pads its batches to those of others"),
        ({"tp": 2, "sp": True}, "with sequence parallelism they also have to be multiples of the tensor parallel size"),
        # A dispatcher of the V1 runner takes no size to compile for that is padded.
        ({"compile_sizes": [600]}, "compile_sizes are given"),
        ({"lora": object()}, "with LoRA each of them is captured several times"),
        ({"tiers": [(1, 8, 3)]}, "the number of drafts changes from step to step"),
    ],
)
def test_sizes_that_are_left_to_vllm(entry: journal.Journal, more: dict[str, Any], reason: str) -> None:
    config = made(config_of(**more), stock)
    assert config.compilation_config.max_cudagraph_capture_size == 512
    assert largest_own(config.compilation_config) is None
    assert entry.decisions["capture-sizes"] == f"left to vLLM: {reason}"


@pytest.mark.parametrize("more", [{"sizes": [4, 8]}, {"largest": 256}, {"method": "ngram"}])
def test_sizes_of_the_user_and_of_other_methods_are_left_alone(entry: journal.Journal, more: dict[str, Any]) -> None:
    def fill(config: Any) -> None:
        config.compilation_config.cudagraph_capture_sizes = [4, 8]

    config = made(config_of(**more), fill)
    assert config.compilation_config.cudagraph_capture_sizes == [4, 8]
    assert largest_own(config.compilation_config) is None
    assert not entry.decisions


def test_without_the_feature_sizes_are_vllms(entry: journal.Journal) -> None:
    entry.features["capture-sizes"] = {"state": "off", "reason": "its gate is off"}
    assert made(config_of(), stock).compilation_config.max_cudagraph_capture_size == 512
    assert entry.decisions["capture-sizes"] == "left to vLLM: capture-sizes is not live (its gate is off)"


def test_a_fault_leaves_the_sizes_to_vllm_unless_strict(
    entry: journal.Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(config: Any) -> None:
        stock(config)
        del config.lora_config

    assert made(config_of(), fill).compilation_config.max_cudagraph_capture_size == 512
    assert "AttributeError" in entry.decisions["capture-sizes"]
    monkeypatch.setenv("VLLM_HWPLUGIN_STRICT", "1")
    with pytest.raises(feature.CaptureSizesError, match="VLLM_HWPLUGIN_CAPTURE_SIZES=off"):
        made(config_of(), fill)


# -- on the released code ---------------------------------------------------------------------------------------------


def methods(text: str, owner: str) -> dict[str, ast.FunctionDef]:
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == owner]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("version", versions("vllm/config/vllm.py", "vllm/config/compilation.py"))
def test_vllm_calls_the_hooks_around_its_own_sizes(version: str, vllm_tree: Any) -> None:
    """The first before it fills in sizes, the second before it makes anything of them."""
    config = methods(vllm_tree(version).read("vllm/config/vllm.py"), "VllmConfig")
    body = ast.unparse(config["__post_init__"])
    calls = [
        "current_platform.apply_config_platform_defaults(self)",
        "self._set_cudagraph_sizes()",
        "current_platform.check_and_update_config(self)",
        "self.compilation_config.set_splitting_ops_for_v1(",
    ]
    assert all(body.count(call) == 1 for call in calls)
    places = [body.index(call) for call in calls]
    assert places == sorted(places)
    assert "cudagraph_capture_sizes" not in body[places[2] :]
    assert "cudagraph_capture_sizes" not in body[: places[0]]


def method_of(text: str, owner: str, name: str, **given: Any) -> Any:
    """One method of a released class, as a function."""
    exec(compile(ast.Module([methods(text, owner)[name]], []), f"released {name}", "exec"), given)
    return given[name]


def fill_of(tree: Any) -> Any:
    """The released `VllmConfig._set_cudagraph_sizes`."""
    quiet = SimpleNamespace(warning=lambda *_: None)
    text = tree.read("vllm/config/vllm.py")
    return method_of(text, "VllmConfig", "_set_cudagraph_sizes", CUDAGraphMode=CUDAGraphMode, logger=quiet)


V2 = ("vllm/config/vllm.py", "vllm/v1/worker/gpu/cudagraph_utils.py")
V1 = ("vllm/config/vllm.py", "vllm/v1/cudagraph_dispatcher.py")


@pytest.mark.parametrize("k", [2, 3, 6, 15])
@pytest.mark.parametrize("version", versions(*V2))
def test_released_v2_runners_decode_in_full_graphs(
    entry: journal.Journal, version: str, k: int, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    tree = vllm_tree(version)
    config = made(config_of(k, v2=True), fill_of(tree))
    manager, own = Manager(tree, config, monkeypatch), largest_own(config.compilation_config)
    assert own is not None
    for requests in range(1, LARGEST // (1 + k) + 1):
        assert manager.serves(requests, requests * (1 + k)).startswith("FULL"), requests
    # Batches with prompts end where they did.
    assert max(manager.captured("PIECEWISE")) == own
    assert manager.serves(9, 500).startswith("PIECEWISE")
    assert manager.serves(9, own + 1) == f"NONE {own + 1}"
    # vLLM's own sizes, as before.
    plain = config_of(k)
    fill_of(tree)(plain)
    before = Manager(tree, plain, monkeypatch, **OFF)
    requests = 512 // (1 + k) + 1
    assert before.serves(requests, requests * (1 + k)).startswith("NONE")
    assert len(manager.captured("FULL")) <= len(before.captured("FULL")) + 18
    assert len(manager.captured("PIECEWISE")) <= len(before.captured("PIECEWISE"))


@pytest.mark.parametrize("version", versions(*V2, among=("0.25.0", "0.26.0", "0.29.0")))
def test_why_vllms_sizes_become_whole_blocks(version: str, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.28 four requests of three tokens find the PIECEWISE graph of 16, and not the FULL one of 18."""
    plain = config_of(2)
    fill_of(vllm_tree(version))(plain)
    stock_manager = Manager(vllm_tree(version), plain, monkeypatch, **OFF)
    assert stock_manager.serves(4, 12) == ("FULL 12" if version == "0.29.0" else "PIECEWISE 16")


def dispatcher_of(tree: Any, config: Any) -> Any:
    """A released dispatcher of the V1 runner, with its keys."""
    name = "vllm.v1.cudagraph_dispatcher"
    dispatcher = Modules(texts(tree), [name])(name).CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(MODE, config.uniform_decode_query_len)
    return dispatcher


@pytest.mark.parametrize("k", [2, 3, 6, 15])
@pytest.mark.parametrize("version", versions(*V1))
def test_released_v1_runners_decode_in_full_graphs(
    entry: journal.Journal, version: str, k: int, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    tree = vllm_tree(version)
    config = made(config_of(k), fill_of(tree))
    compilation, own = config.compilation_config, largest_own(config.compilation_config)
    assert own is not None
    # As the runner does before.
    rounding = method_of(
        tree.read("vllm/config/compilation.py"),
        "CompilationConfig",
        "adjust_cudagraph_sizes_for_spec_decode",
        round_up=lambda size, multiple: -(-size // multiple) * multiple,
    )
    large = [size for size in compilation.cudagraph_capture_sizes if size > k]
    rounding(compilation, 1 + k, *([1] if rounding.__code__.co_argcount == 3 else []))
    assert compilation.cudagraph_capture_sizes == sorted({1 + k, *large})
    dispatcher = dispatcher_of(tree, config)
    for requests in range(1, LARGEST // (1 + k) + 1):
        assert dispatcher.dispatch(requests * (1 + k), uniform_decode=True)[0] == CUDAGraphMode.FULL, requests
    assert dispatcher.dispatch(own)[0] == CUDAGraphMode.PIECEWISE
    assert dispatcher.dispatch(own + 1)[0] == CUDAGraphMode.NONE


# -- FlashAttention's buffers -----------------------------------------------------------------------------------------


def splits_of(config: Any, num_tokens: int, max_query_len: int, splits: int = 32) -> int:
    largest = config.compilation_config.max_cudagraph_capture_size
    builder = SimpleNamespace(vllm_config=config, max_num_splits=splits, max_cudagraph_size=largest)
    return max_num_splits(builder, num_tokens, max_query_len)


@pytest.mark.parametrize("k", [2, 3, 6, 15])
def test_flash_attentions_buffers_do_not_grow_and_a_replay_has_the_bound_of_its_capture(
    entry: journal.Journal, k: int
) -> None:
    config = made(config_of(k), stock)
    compilation, own = config.compilation_config, largest_own(config.compilation_config)
    assert own is not None
    for query_len in (1, 1 + k):
        for requests in range(1, min(1024, LARGEST // query_len) + 1):
            tokens = requests * query_len
            graph = next((size for size in compilation.cudagraph_capture_sizes if size >= tokens), None)
            if graph is None:
                continue
            splits = splits_of(config, graph, query_len)
            assert splits * graph <= 32 * own
            assert splits_of(config, tokens, query_len) == splits
    assert splits_of(config, own, 1 + k) == 32
    assert 1 < splits_of(config, LARGEST, 1 + k) < 32
    # A batch with a prompt has no such graph, and the kernel decides as without the feature.
    assert splits_of(config, own + 1, 500) == 0
    # FlashAttention 2 splits nothing.
    assert splits_of(config, LARGEST, 1 + k, splits=0) == 0


FLASH = {
    "vllm.v1.attention.backends.flash_attn": "num_actual_tokens",
    "vllm.v1.attention.backends.mla.flashattn_mla": "num_decode_tokens",
}


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("version", versions("vllm/v1/attention/backends/"))
def test_released_builders_ask_for_the_bound(name: str, version: str, vllm_tree: Any) -> None:
    """Their `build` needs a device; what they hand on is in one statement."""
    text = texts(vllm_tree(version))(f"{name.replace('.', '/')}.py")
    calls = [
        [ast.unparse(one) for one in node.args]
        for node in ast.walk(ast.parse(text or ""))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "max_num_splits_of"
    ]
    assert calls == [["self", FLASH[name], "max_query_len"]]


# -- larger graphs of mixed batches where they win -----------------------------------------------------------------


class Clock:
    """Stands for the time that passes take: the host's for launching, or the device's for the tokens."""

    def __init__(self, per_token: float, eager: float = 13e-3, graph: float = 5e-3) -> None:
        self._host = {"NONE": eager, "PIECEWISE": graph}
        self._per_token, self._now, self._seen = per_token, 0.0, 0

    def read(self, passes: list[tuple[int, str]]) -> float:
        for tokens, mode in passes[self._seen :]:
            self._now += max(self._host[mode], tokens * self._per_token)
        self._seen = len(passes)
        return self._now


def timed_by(clock: Clock, passes: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_sizes, "reserved_memory", lambda: 0)
    monkeypatch.setattr(mixed_sizes, "time", SimpleNamespace(perf_counter=lambda: clock.read(passes)))


#: 0.6B: the host's launches take longer than 4096 tokens. 8B: they do not, from 500 tokens on; between them, 1024.
TARGETS = pytest.mark.parametrize(("per_token", "largest"), [(2.2e-6, LARGEST_MIXED), (26e-6, 512), (12e-6, 1024)])


@TARGETS
@pytest.mark.parametrize("seqs", [64, 1024])
@pytest.mark.parametrize("version", versions(*V2, among=("0.24.0", "0.26.0", "0.33.0")))
def test_larger_graphs_of_mixed_batches_are_kept_where_they_win(
    entry: journal.Journal,
    version: str,
    seqs: int,
    per_token: float,
    largest: int,
    vllm_tree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, clock, passes = vllm_tree(version), Clock(per_token), []
    config = made(config_of(seqs=seqs, v2=True), fill_of(tree))
    timed_by(clock, passes, monkeypatch)
    settled: list[list[tuple[int, str]]] = []
    monkeypatch.setattr(mixed_sizes, "settle_all_reduce", lambda: settled.append(passes[-2:]))

    # A FULL one goes where the PIECEWISE one goes, and is taken back with it.
    full = mixed_graphs.SIZES if version != "0.24.0" else ()
    manager = Manager(tree, config, monkeypatch, full, passes=passes)
    assert max(manager.captured("PIECEWISE"), default=None) == (None if full and seqs == 64 else largest)
    assert max(manager.captured("FULL")) == min(max(largest, LARGEST), 4 * seqs)
    assert manager.serves(9, largest) == f"{'FULL' if full else 'PIECEWISE'} {largest}"
    if largest < LARGEST_MIXED:
        assert manager.serves(9, largest + 1) == f"NONE {largest + 1}"
    assert f"up to {largest} tokens" in entry.decisions["capture-sizes of mixed batches"]
    # Ranks of tensor parallelism exchange what a graph reads behind its capture, and before it is replayed.
    captured = [run for run in settled if run[1][1] == "PIECEWISE"]
    assert captured
    assert all(run == [(run[0][0], "NONE"), (run[0][0], "PIECEWISE")] for run in captured)
    # As after vLLM's profile of memory: what was found holds, and nothing is timed again.
    passes.clear()
    again = Manager(tree, config, monkeypatch, full, passes=passes)
    assert again.captured("PIECEWISE") == manager.captured("PIECEWISE")
    assert passes.count((LARGEST_MIXED, "PIECEWISE")) <= 1
    assert again.made.hidden_states.shape[0] == max(
        desc.num_tokens for descs in again.made._capture_descs.values() for desc in descs
    )


class Runner:
    """What the V1 runner's dispatchers and passes are for `settled`; it holds the graphs that vLLM's wrappers would."""

    def __init__(self, tree: Any, config: Any, passes: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.compilation_config, self.parallel_config = config.compilation_config, config.parallel_config
        self.cudagraph_dispatcher = dispatcher_of(tree, config)
        self.drafter = SimpleNamespace(cudagraph_dispatcher=dispatcher_of(tree, config))
        self.model, self._passes, self.most_tokens = object(), passes, LARGEST_MIXED
        self.failure: Exception = RuntimeError("CUDA error: out of memory")
        self.graphs: dict[Any, object] = {}
        wrapper = SimpleNamespace(concrete_cudagraph_entries=self.graphs, graph_pool=(0, 1))
        monkeypatch.setattr(mixed_sizes.CUDAGraphWrapper, "_all_instances", [wrapper])
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        monkeypatch.setattr(v1_mixed_sizes, "reserved_memory", lambda: 0)

    def _dummy_run(self, num_tokens: int, *, cudagraph_runtime_mode: CUDAGraphMode, **more: bool) -> None:
        assert more == {"skip_eplb": True, "remove_lora": False, "is_graph_capturing": True}
        self._passes.append((num_tokens, cudagraph_runtime_mode.name))
        if cudagraph_runtime_mode != CUDAGraphMode.NONE:
            if num_tokens > self.most_tokens:
                raise self.failure
            # That of a DFlash drafter has no more tokens than decode batches may have.
            for tokens in (num_tokens, min(num_tokens, 256)):
                self.graphs[self.cudagraph_dispatcher.dispatch(tokens)[1]] = object()

    def captured(self) -> dict[str, int]:
        """Tokens of the largest graph by mode, as vLLM's `capture_model` would capture them."""
        found = v1_mixed_sizes.settled(self, self.cudagraph_dispatcher.get_capture_descs())
        return {mode.name: descs[0].num_tokens for mode, descs in found}


@TARGETS
@pytest.mark.parametrize("seqs", [64, 1024])
@pytest.mark.parametrize("version", versions(*V1))
def test_larger_graphs_of_mixed_batches_are_kept_on_the_v1_runner(
    entry: journal.Journal,
    version: str,
    seqs: int,
    per_token: float,
    largest: int,
    vllm_tree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, clock, passes = vllm_tree(version), Clock(per_token), []
    config = made(config_of(seqs=seqs), fill_of(tree))
    timed_by(clock, passes, monkeypatch)
    runner = Runner(tree, config, passes, monkeypatch)
    expected = {"PIECEWISE": largest, "FULL": min(max(largest, LARGEST), 4 * seqs)}
    assert runner.captured() == expected
    assert f"up to {largest} tokens" in entry.decisions["capture-sizes of mixed batches"]
    # What vLLM measures of the first capture includes what the graphs of the comparison needed.
    assert not runner.graphs
    # vLLM has measured what the graphs need, and begins anew: nothing is timed again.
    passes.clear()
    for dispatcher in (runner.cudagraph_dispatcher, runner.drafter.cudagraph_dispatcher):
        dispatcher.initialize_cudagraph_keys(MODE, config.uniform_decode_query_len)
    assert runner.captured() == expected
    assert not passes
    # No batch is padded to a graph that was not captured.
    for dispatcher in (runner.cudagraph_dispatcher, runner.drafter.cudagraph_dispatcher):
        assert dispatcher.dispatch(largest - 1)[0] == CUDAGraphMode.PIECEWISE
        assert dispatcher.dispatch(largest + 1)[0] == CUDAGraphMode.NONE
        decodes = expected["FULL"]
        assert dispatcher.dispatch(decodes, uniform_decode=True)[0] == CUDAGraphMode.FULL
        assert dispatcher.dispatch(decodes + 4, uniform_decode=True)[0] == CUDAGraphMode.NONE or decodes < largest


@pytest.mark.parametrize("full", [(), mixed_graphs.SIZES], ids=["decodes", "mixed"])
@pytest.mark.parametrize("version", versions(*V2, among=SUPPORTED[SUPPORTED.index("0.29.0") :]))
def test_released_v2_runners_estimate_about_what_graphs_take(
    entry: journal.Journal, version: str, full: Sequence[int], vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the KV cache lacks it: by vLLM's two samples decodes alone would be several times of that."""
    tree, passes = vllm_tree(version), list[tuple[int, str]]()
    timed_by(Clock(2.2e-6), passes, monkeypatch)
    config = made(config_of(v2=True), fill_of(tree))
    made_by = partial(Manager, tree, config, monkeypatch, full, passes=passes)
    first = made_by(profile=True)
    # Of each mode a few; of the others nobody needs to wait for a capture.
    assert len({tokens for tokens, mode in passes if mode == "PIECEWISE"}) == 4
    # Passes that vLLM times then find no graph that is not there.
    assert first.serves(65, 500) == "NONE 500"
    real = made_by()
    assert max(real.captured("FULL")) == LARGEST_MIXED
    estimate = estimated(first)
    # With both of 4096 tokens in front nobody sees the parts of the next size.
    assert 0.9 * real.memory.taken <= estimate < 1.1 * real.memory.taken


def estimated(manager: Manager) -> int:
    """What the patched `profile_cudagraph_memory` returns after the capture; it makes a KV cache and needs a device."""
    (found,) = [
        node
        for node in ast.parse(manager.text).body
        if isinstance(node, ast.FunctionDef) and node.name == "profile_cudagraph_memory"
    ]
    blocks = [node for node in ast.walk(found) if isinstance(node, ast.Try)]
    (body,) = [node.body for node in blocks if any(isinstance(one, ast.Return) for one in node.body)]
    start = next(number for number, node in enumerate(body) if "num_full_graphs" in ast.unparse(node))
    function = ast.parse("def estimate(manager, measured, mem_samples): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body[start:]
    exec(compile(ast.Module([function], []), "released estimate", "exec"), names := dict(vars(manager.module)))
    found_bytes: int = names["estimate"](manager.made, manager.memory.taken, manager.made._capture_mem_samples)
    return found_bytes


@pytest.mark.parametrize("seqs", [64, 1024])
@pytest.mark.parametrize("version", versions(*V2, among=SUPPORTED[SUPPORTED.index("0.26.0") :]))
def test_graphs_that_no_batch_would_get_are_not_captured(
    entry: journal.Journal, version: str, seqs: int, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, passes = vllm_tree(version), list[tuple[int, str]]()
    timed_by(Clock(2.2e-6), passes, monkeypatch)
    config = made(config_of(seqs=seqs, v2=True), fill_of(tree))
    forgotten: list[int] = []
    monkeypatch.setattr(v2_mixed_sizes, "forget", forgotten.append)
    manager = Manager(tree, config, monkeypatch, mixed_graphs.SIZES, passes=passes)
    pieces = set(manager.captured("PIECEWISE"))
    # 64 requests at most have FULL graphs of any batch.
    needed = {size for size in config.compilation_config.cudagraph_capture_sizes if seqs > 64 and size > 64}
    assert pieces == needed
    assert {tokens for tokens, mode in passes if mode == "PIECEWISE"} - pieces <= {*forgotten}
    assert manager.serves(64, 65) == "FULL 96"
    assert seqs == 64 or manager.serves(65, 65) == "PIECEWISE 72"


@pytest.mark.parametrize("version", versions(*V2, among=SUPPORTED[SUPPORTED.index("0.29.0") :]))
def test_attention_without_full_graphs_has_its_memory_estimated(
    entry: journal.Journal, version: str, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the worker finds that out, when the sizes are there."""
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    tree = vllm_tree(version)
    config = made(config_of(v2=True), fill_of(tree))
    manager = Manager(tree, config, monkeypatch, profile=True, mode=CUDAGraphMode.PIECEWISE)
    assert manager.made._capture_mem_samples == []
    assert v2_mixed_sizes.left_out(manager.made)


PROFILE = "profile_cudagraph_memory"
WRAPPERS = ("CUDAGraphWrapper", "BreakableCUDAGraphWrapper")


@pytest.mark.parametrize("version", versions(*V1, "vllm/v1/worker/gpu_model_runner.py"))
def test_released_v1_runners_estimate_about_what_graphs_take(
    entry: journal.Journal, version: str, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, passes, memory = vllm_tree(version), list[tuple[int, str]](), Memory()
    timed_by(Clock(2.2e-6), passes, monkeypatch)
    text = texts(tree)("vllm/v1/worker/gpu_model_runner.py") or ""
    wrappers = SimpleNamespace(_all_instances=[], clear_all_graphs=lambda: None)
    # What it names beside these takes no memory.
    found = [node for node in ast.walk(methods(text, "GPUModelRunner")[PROFILE]) if isinstance(node, ast.Name)]
    names = dict.fromkeys({node.id for node in found} - {node.id for node in found if isinstance(node.ctx, ast.Store)})
    names = {name: MagicMock() for name in names if not hasattr(builtins, name)}
    names |= {"torch": torch, "CUDAGraphMode": CUDAGraphMode, "sampled": sampled, "two_samples": two_samples}
    names |= {"settled": v1_mixed_sizes.settled, **dict.fromkeys(WRAPPERS, wrappers)}
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory.info, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory.info)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    class Profiled(Runner):
        max_model_len, max_num_tokens, lora_config = 4096, 8192, None
        _create_encoder_cudagraph_manager = staticmethod(lambda: None)

        def __getattr__(self, name: str) -> Any:
            return MagicMock()

        def _warmup_and_capture(self, desc: Any, *, cudagraph_runtime_mode: CUDAGraphMode, **_: Any) -> None:
            whole = cudagraph_runtime_mode == CUDAGraphMode.FULL
            memory.capture(desc.num_tokens, desc.num_tokens // 4 if whole else None)

    runner = Profiled(tree, made(config_of(), fill_of(tree)), passes, monkeypatch)
    planned = runner.cudagraph_dispatcher.get_capture_descs()
    estimate = method_of(text, "GPUModelRunner", PROFILE, **names)(runner)
    memory.pool = memory.taken = 0
    memory.last.clear()
    for mode, descs in v1_mixed_sizes.settled(runner, planned):
        for desc in descs:
            runner._warmup_and_capture(desc, cudagraph_runtime_mode=mode)
    assert memory.taken <= estimate < 1.1 * memory.taken


@pytest.mark.parametrize("version", versions("vllm/v1/worker/gpu_model_runner.py"))
def test_released_v1_runners_ask_what_is_captured_wherever_they_capture(version: str, vllm_tree: Any) -> None:
    """What graphs need is measured on those that will be captured; both functions need a device."""
    text = texts(vllm_tree(version))("vllm/v1/worker/gpu_model_runner.py")
    captures = methods(text or "", "GPUModelRunner")
    for name in ("profile_cudagraph_memory", "capture_model"):
        loops = [ast.unparse(node.iter) for node in ast.walk(captures[name]) if isinstance(node, ast.For)]
        assert sum(one.startswith("settled(self, ") for one in loops) == 1, name


@pytest.fixture
def small(entry: journal.Journal, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A target to which 4096 tokens are nothing, on the V1 runner."""
    tree, passes = vllm_tree("0.33.0"), list[tuple[int, str]]()
    timed_by(Clock(2.2e-6), passes, monkeypatch)
    return Runner(tree, made(config_of(), fill_of(tree)), passes, monkeypatch)


@pytest.mark.parametrize("failure", [RuntimeError("CUDA error: out of memory"), AssertionError("at most 2048 tokens")])
def test_a_size_whose_capture_fails_loses(small: Runner, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """In whatever words CUDA says that there is no memory, torch has to leave the capture."""
    small.failure = failure
    left: list[Any] = []
    monkeypatch.setattr(mixed_sizes, "leave_capture", lambda pool, *, broken: left.append((pool, broken)))
    small.most_tokens = 2048
    assert small.captured() == {"PIECEWISE": 2048, "FULL": LARGEST}
    assert left == [((0, 1), None)]


def test_graphs_that_break_at_attention_are_not_timed(small: Runner) -> None:
    """From 0.30 on they are within a wrapper for FULL graphs."""
    inner = type("BreakableCUDAGraphWrapper", (SimpleNamespace,), {})(runnable=object())
    small.model = type("CUDAGraphWrapper", (SimpleNamespace,), {})(runnable=inner)
    assert small.captured() == {"PIECEWISE": 512, "FULL": LARGEST}
