# SPDX-License-Identifier: Apache-2.0
"""Capture sizes of an engine with a drafter: by arithmetic, and what the released runners make of them."""

from __future__ import annotations

import ast
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.version import Version
from vllm import envs
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode import capture_sizes as feature
from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, LARGEST_MIXED, capture_sizes, largest_own, max_num_splits

from ..conftest import versions
from .graph_manager import Manager
from .sized_configs import (
    V2,
    config_of,
    crossed,
    fill_of,
    made,
    methods,
    own_of,
    stock,
)

OFF = {"VLLM_HWPLUGIN_CAPTURE_SIZES": "off"}


# -- by arithmetic ----------------------------------------------------------------------------------------------------


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
@example((4, 1000, 8192, 512))
def test_batches_with_prompts_have_sizes_up_to_the_bound_for_any_number_of_requests(
    engine: tuple[int, int, int, int],
) -> None:
    block, seqs, batched, _ = engine
    own = own_of(*engine)
    sizes, mixed = (capture_sizes(*engine[:3], own, mixed=mixed) for mixed in (0, LARGEST_MIXED))
    assert set(sizes) <= set(mixed)
    bound = min(batched, LARGEST_MIXED)
    assert bound - block < max(mixed) <= max(bound, *own, block)
    # A DFlash drafter's buffers on the V1 runner hold the fullest decode batch and no more.
    assert seqs * block > max(mixed) or seqs * block in mixed
    assert [size for size in mixed if size <= max(own)] == [size for size in sizes if size <= max(own)]


# -- as vLLM calls it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "largest"),
    [
        # Qwen3-0.6B, 1.7B and 8B, and the latter over as many GPUs as leave each that little.
        ({"hidden": 1024}, 8192),
        ({"hidden": 2048}, 8192),
        ({"hidden": 4096}, 4096),
        ({"hidden": 4096, "tp": 4}, 8192),
        ({"hidden": 0}, 4096),
        ({"hidden": 1024, "batched": 6001}, 6001),
        ({"hidden": 1024, "batched": 16384}, 8192),
    ],
)
def test_batches_with_prompts_of_a_small_target_have_larger_sizes_on_v2(
    entry: run_records.RunRecord, shape: dict[str, Any], largest: int
) -> None:
    config = made(config_of(**shape, v2=True), stock)
    assert config.compilation_config.max_cudagraph_capture_size == largest
    assert len([size for size in config.compilation_config.cudagraph_capture_sizes if size > LARGEST_MIXED]) <= 10
    # On the V1 runner, and where the graphs' feature is off, nothing changes.
    block = config.uniform_decode_query_len
    assert made(config_of(**shape), stock).compilation_config.max_cudagraph_capture_size == 4096 // block * block
    del entry.features["v2-mixed-graphs"]
    assert made(config_of(**shape, v2=True), stock).compilation_config.max_cudagraph_capture_size == 4096
    # The split bound of decode batches does not depend on it.
    assert splits_of(config, LARGEST, block) == 4


def test_adaptive_verification_keeps_vllms_sizes_and_has_larger_ones(entry: run_records.RunRecord) -> None:
    """It verifies any number of drafts: whole blocks of 17 tokens would pad a batch of 24 to 34."""
    config = made(config_of(k=16, seqs=256, adaptive=True, v2=True, method="dspark"), stock)
    sizes, own = config.compilation_config.cudagraph_capture_sizes, own_of(17, 256, 8192)
    assert sizes[: len(own)] == own
    assert sizes[-1] == LARGEST_MIXED
    assert largest_own(config.compilation_config) == own[-1]


def test_where_batches_with_prompts_have_no_graphs_there_are_no_sizes_for_them(entry: run_records.RunRecord) -> None:
    config = made(config_of(mode=CUDAGraphMode.FULL_DECODE_ONLY), stock)
    assert config.compilation_config.max_cudagraph_capture_size == LARGEST


@pytest.mark.parametrize(
    ("more", "largest", "said"),
    [
        ({"v2": True}, 8192, "decode batches of up to 64 requests"),
        ({}, 128, "left to vLLM: without a drafter only Model Runner V2 has graphs of the plugin"),
        ({"v2": True, "runner": "pooling"}, 128, "left to vLLM: the model does not generate"),
    ],
)
def test_an_engine_without_a_drafter_has_larger_sizes_unless_its_graphs_are_off(
    entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], largest: int, said: str
) -> None:
    """Prompt steps had no graphs above twice `max_num_seqs` tokens."""
    monkeypatch.setenv(gates.PLAIN_DECODE, "off")
    off = made(config_of(k=0, seqs=64, hidden=1024, **more), stock)
    assert off.compilation_config.max_cudagraph_capture_size == 128
    assert "capture-sizes" not in entry.decisions
    monkeypatch.delenv(gates.PLAIN_DECODE)
    config = made(config_of(k=0, seqs=64, hidden=1024, **more), stock)
    assert config.compilation_config.max_cudagraph_capture_size == largest
    assert said in entry.decisions["capture-sizes"]


def test_up_to_0_21_the_environment_chooses_the_runner(
    entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    for on_v2, largest in ((False, 4096), (True, 8192)):
        monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", on_v2)
        config = config_of(hidden=1024)
        del config.use_v2_model_runner
        assert made(config, stock).compilation_config.max_cudagraph_capture_size == largest


def test_what_is_decided_is_on_record_and_stays(entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"dp": 2, "experts": True}, "data-parallel ranks pad their batches to each other's"),
        ({"experts": True, "v2": True, "elastic": True}, "ranks may join (elastic expert parallelism)"),
        (
            {"dp": 2, "experts": True, "v2": True, "ubatches": True},
            "data-parallel ranks pad their batches to each other's",
        ),
        ({"tp": 2, "sp": True}, "with sequence parallelism they must also be multiples of the tensor parallel size"),
        # A dispatcher of the V1 runner takes no size to compile for that is padded.
        ({"compile_sizes": [600]}, "compile_sizes are given"),
        (
            {"architectures": ["DeepseekV41ForCausalLM"]},
            "DeepSeek V4.1 replays layers in graphs whose sizes and buffers follow from the capture sizes",
        ),
        ({"multimodal": SimpleNamespace(mm_encoder_only=True)}, "only the multi-modal encoder runs"),
        # In 0.28.
        ({"encodes": True}, "only the multi-modal encoder runs"),
        ({"lora": object()}, "with LoRA each of them is captured several times"),
        ({"tiers": [(1, 8, 3)]}, "the number of drafts changes from step to step"),
    ],
)
def test_sizes_that_are_left_to_vllm(entry: run_records.RunRecord, more: dict[str, Any], reason: str) -> None:
    config = made(config_of(**more), stock)
    assert config.compilation_config.max_cudagraph_capture_size == 512
    assert largest_own(config.compilation_config) is None
    assert entry.decisions["capture-sizes"] == f"left to vLLM: {reason}"


@pytest.mark.parametrize(
    ("ranks", "experts", "largest"), [(2, True, 2048), (4, True, 1024), (16, True, 512), (16, False, LARGEST_MIXED)]
)
def test_ranks_that_pad_to_each_other_have_the_tokens_of_one_engine_together(
    entry: run_records.RunRecord, ranks: int, experts: bool, largest: int
) -> None:
    """Prompts of more than 512 tokens ran without graphs, on all ranks."""
    config = made(config_of(dp=ranks, experts=experts, v2=True), stock)
    assert config.compilation_config.max_cudagraph_capture_size == largest


def test_the_largest_size_that_vllm_sets_for_a_model_is_no_bound(entry: run_records.RunRecord) -> None:
    """Prompt steps of gpt-oss had no graphs above 1,024 tokens."""
    config = made(config_of(largest=1024, architectures=["GptOssForCausalLM"]), stock)
    assert config.compilation_config.max_cudagraph_capture_size == LARGEST_MIXED
    assert largest_own(config.compilation_config) == 1024
    named = made(config_of(largest=512, architectures=["GptOssForCausalLM"]), stock)
    assert named.compilation_config.max_cudagraph_capture_size == 512


def test_a_list_of_the_user_stays(entry: run_records.RunRecord) -> None:
    config = made(config_of(sizes=[4, 8], seqs=2), stock)
    assert config.compilation_config.cudagraph_capture_sizes == [4, 8]
    assert largest_own(config.compilation_config) is None
    assert entry.decisions == {"capture-sizes": "left to vLLM: cudagraph_capture_sizes are named"}


def test_sizes_of_other_methods_are_left_alone(entry: run_records.RunRecord) -> None:
    config = made(config_of(method="ngram"), stock)
    assert config.compilation_config.max_cudagraph_capture_size == 512
    assert feature.why_left(config.compilation_config) == "the speculative method is ngram"
    assert not entry.decisions


@pytest.mark.parametrize(
    ("more", "said"),
    [
        # Five requests of seven tokens end at 35, and 40 is no whole block.
        ({"sizes": [1, 2, 4, 8, 16, 24, 32]}, "5 and 6 of 6 requests; cudagraph_capture_sizes with 42 covers them"),
        ({"largest": 41}, "6 of 6 requests; max_cudagraph_capture_size with 42 covers them"),
        ({"largest": 42}, None),
        (
            {"sizes": [8, 40], "mode": CUDAGraphMode.FULL},
            "6 of 6 requests; cudagraph_capture_sizes with 42 covers them",
        ),
        ({"sizes": [8], "mode": CUDAGraphMode.PIECEWISE}, None),
    ],
)
def test_decode_batches_without_a_graph_are_noted_with_the_size_to_name(
    entry: run_records.RunRecord, more: dict[str, Any], said: str | None
) -> None:
    def fill(config: Any) -> None:
        """As each vLLM: its grid up to the largest size that is named."""
        compilation = config.compilation_config
        if compilation.cudagraph_capture_sizes is None:
            grid = [size for size in own_of(7, 1024, 8192) if size <= more["largest"]]
            compilation.cudagraph_capture_sizes = grid
        compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]

    made(config_of(6, 6, **more), fill)
    assert entry.decisions.get(feature.UNSERVED) == said


def test_without_the_feature_sizes_are_vllms(entry: run_records.RunRecord) -> None:
    entry.features["capture-sizes"] = {"state": "off", "reason": "its gate is off"}
    assert made(config_of(), stock).compilation_config.max_cudagraph_capture_size == 512
    assert entry.decisions["capture-sizes"] == "left to vLLM: capture-sizes is not patched in (its gate is off)"


def test_a_fault_leaves_the_sizes_to_vllm_unless_strict(
    entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("version", versions("vllm/model_executor/models/config.py"))
def test_which_models_vllm_sets_a_largest_size_for(version: str, vllm_tree: Any) -> None:
    tree = ast.parse(vllm_tree(version).read("vllm/model_executor/models/config.py"))
    by_class = {
        node.name: value.value
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for assign in ast.walk(node)
        if isinstance(assign, ast.Assign) and ast.unparse(assign.targets[0]).endswith(".max_cudagraph_capture_size")
        if isinstance(value := assign.value, ast.Constant)
    }
    (models,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MODELS_CONFIG_MAP"
    )
    assert isinstance(models, ast.Dict)
    pairs = [(ast.literal_eval(key), ast.unparse(value)) for key, value in zip(models.keys, models.values, strict=True)]
    assert {name: by_class[hook] for name, hook in pairs if hook in by_class} == feature.MODEL_DEFAULTS


@pytest.mark.parametrize(("version", "k"), crossed(versions(*V2), [2, 3, 6, 15]))
def test_released_v2_runners_decode_in_full_graphs(
    entry: run_records.RunRecord, version: str, k: int, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(
    ("version", "engine"),
    crossed(
        versions(*V2, among=SUPPORTED[SUPPORTED.index("0.26.0") :]),
        [(2, 64), (2, 256), (4, 64), (4, 251), (5, 256), (3, 250)],
    ),
)
def test_the_fullest_batches_draft_in_graphs_too(
    entry: run_records.RunRecord, version: str, engine: tuple[int, int], vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose draft steps have one token a request."""
    k, seqs = engine
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    tree = vllm_tree(version)
    manager = Manager(tree, made(config_of(k, seqs, v2=True), fill_of(tree)), monkeypatch)
    drafter = manager.capture_drafter(CUDAGraphMode.FULL_DECODE_ONLY)
    loras = () if not hasattr(drafter, "lora_capture_cases") else (0,)
    for requests in range(1, seqs + 1):
        assert drafter.dispatch(requests, requests, 1, *loras).cg_mode == CUDAGraphMode.FULL, requests
    for requests in range(1, min(seqs, LARGEST // (1 + k)) + 1):
        assert manager.serves(requests, requests * (1 + k)).startswith("FULL"), requests
    # Nor is one of these sizes missed by a batch with a prompt.
    for tokens in range(seqs - 2 * (1 + k), seqs + 2 * (1 + k)):
        assert not manager.serves(5, tokens).startswith("NONE"), tokens


def served_by(tree: Any, config: Any, monkeypatch: pytest.MonkeyPatch, **choices: str) -> set[int]:
    """Return how many requests may decode in a FULL graph."""
    block, counts = config.uniform_decode_query_len, range(1, config.scheduler_config.max_num_seqs + 1)
    manager = Manager(tree, config, monkeypatch, **choices)
    return {count for count in counts if manager.serves(count, count * block).startswith("FULL")}


#: Drafts, requests, and the largest size that is named.
LIMITS = [(6, 6, 42), (6, 6, 41), (3, 64, 250), (2, 100, 600), (6, 6, 6)]
#: Lists of a user, with holes, without whole blocks, and past the fullest batch.
LISTS = [(2, 8, [1, 2, 4, 8, 16]), (6, 6, [8, 16, 40, 48]), (3, 64, [1, 30, 250]), (2, 16, [64]), (6, 6, [4])]


@pytest.mark.parametrize(("version", "engine"), crossed(versions(*V2), LIMITS))
def test_up_to_the_largest_size_that_is_named_each_whole_block_has_a_graph(
    entry: run_records.RunRecord,
    version: str,
    engine: tuple[int, int, int],
    vllm_tree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry.vllm_version, (k, seqs, limit) = version, engine
    tree = vllm_tree(version)
    config = made(config_of(k, seqs, largest=limit, v2=True), fill_of(tree))
    served = served_by(tree, config, monkeypatch)
    assert served == set(range(1, min(seqs, limit // (1 + k)) + 1))
    assert config.compilation_config.cudagraph_capture_sizes[-1] <= limit
    assert (feature.UNSERVED in entry.decisions) is (len(served) < seqs)


@pytest.mark.parametrize(("version", "engine"), crossed(versions(*V2), LISTS))
def test_which_batches_a_list_serves_is_what_released_runners_do(
    entry: run_records.RunRecord,
    version: str,
    engine: tuple[int, int, list[int]],
    vllm_tree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, (k, seqs, sizes) = vllm_tree(version), engine
    config = made(config_of(k, seqs, sizes=list(sizes), v2=True), fill_of(tree))
    found = feature.served_requests(1 + k, seqs, sizes, separate=True, v2=True, vllm=Version(version))
    assert found == served_by(tree, config, monkeypatch, **OFF)


# -- FlashAttention's buffers -----------------------------------------------------------------------------------------


def splits_of(config: Any, num_tokens: int, max_query_len: int, splits: int = 32) -> int:
    largest = config.compilation_config.max_cudagraph_capture_size
    builder = SimpleNamespace(vllm_config=config, max_num_splits=splits, max_cudagraph_size=largest)
    return max_num_splits(builder, num_tokens, max_query_len)


@pytest.mark.parametrize("k", [3, 15])
def test_flash_attentions_buffers_do_not_grow_and_a_replay_has_the_bound_of_its_capture(
    entry: run_records.RunRecord, k: int
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


def test_nor_without_a_drafter(entry: run_records.RunRecord) -> None:
    """Capturing batches with prompts raised AttributeError over FlashAttention 3."""
    config = made(config_of(k=0, seqs=64, v2=True), stock)
    own = largest_own(config.compilation_config)
    assert own is not None
    assert splits_of(config, own + 32, own + 32) == 0
    assert splits_of(config, own + 32, 1) > 0
