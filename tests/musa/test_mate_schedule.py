# SPDX-License-Identifier: Apache-2.0
"""How FLASH_ATTN on MUSA calls mate for decodes, for prompts and in graphs, in the order in which vLLM calls it.

The stand-in for mate raises where a schedule is not that of the batch. Not run on MUSA hardware.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.versions import SUPPORTED

torch = pytest.importorskip("torch")

from ..attention.layer import Layer, close  # noqa: E402
from ..attention.released import released  # noqa: E402
from .mate_standin import mate  # noqa: E402

# The first one and the last; and those whose engines were run on a simulated device.
some_versions = pytest.mark.parametrize("version", sorted({SUPPORTED[0], "0.20.2", "0.32.0", SUPPORTED[-1]}))
last = pytest.mark.parametrize("version", [SUPPORTED[-1]])
OWN = "vllm_hwplugin.musa.attention"
Tree = Callable[[str], Any]
# Three drafts to verify: decodes of up to four tokens.
DRAFTS = SimpleNamespace(num_speculative_tokens=3)
# Long and short contexts: 11, 1 and 5 tiles of 64 keys.
DECODES = ((4, 700), (4, 9), (4, 290))


def layer_of(load: Any, batch: Any, head_size: int = 64, **options: Any) -> Layer:
    return Layer(load, load(OWN).MusaFlashAttentionBackend, head_size, batch=batch, **options)


@some_versions
def test_the_keys_of_decodes_are_split(version: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), mate=mate(calls)) as load:
        layer = layer_of(load, DECODES)
        layer.write(slice(None))
        builder = layer.builder(speculative_config=DRAFTS)
        close(layer.run(builder.build(0, layer.common_metadata(True))), layer.right(causal=True))
        # One token more than a decode has.
        layer = layer_of(load, ((5, 700), (1, 9)))
        layer.write(slice(None))
        close(layer.run(builder.build(0, layer.common_metadata(True))), layer.right(causal=True))
    schedule, decode, extend = calls
    assert schedule["num_splits"] == decode["num_splits"] > 1
    parts, requests = decode["scheduler_metadata"][:6].view(2, 3).tolist()
    found = dict(zip(requests, parts, strict=True))
    # The longest context in the most parts, and one that fits into a tile in one.
    assert found[0] > found[2] > found[1] == 1
    assert extend["scheduler_metadata"] is None
    assert extend["num_splits"] == 0


def captured(layer: Layer, builder: Any) -> tuple[Any, Callable[[], Any]]:
    """A graph of the layer: what vLLM builds for its capture, and a call that reads the same tensors again."""
    common = layer.common_metadata(True)
    # What it is captured with: no request has a context, and each has as many tokens as at replay.
    common.seq_lens.copy_(common.query_start_loc.diff())
    metadata = builder.build_for_cudagraph_capture(common)
    layer.run(metadata)
    return common, lambda: layer.run(metadata)


@some_versions
def test_a_graph_is_replayed_with_the_schedule_of_the_new_batch(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        layer = layer_of(load, DECODES)
        layer.write(slice(None))
        builder = layer.builder(speculative_config=DRAFTS)
        common, replay = captured(layer, builder)
        common.seq_lens.copy_(torch.tensor([length for _, length in DECODES]))
        with pytest.raises(RuntimeError, match="the schedule is not that of the batch"):
            replay()
        builder.build(0, common)
        close(replay(), layer.right(causal=True))


@some_versions
def test_a_prompt_as_short_as_a_decode_refreshes_the_schedule_of_its_graph(version: str, vllm_tree: Tree) -> None:
    """Its batch has a decode's shape, so vLLM replays that graph, which reads keys from the cache."""
    batch = ((4, 4), (4, 4), (4, 4))
    with released(version, vllm_tree(version), mate=mate()) as load:
        layer = layer_of(load, batch)
        layer.write(slice(None))
        builder = layer.builder(speculative_config=DRAFTS)
        common, replay = captured(layer, builder)
        for lengths in ([700, 9, 290], [4, 4, 4]):
            common.seq_lens.copy_(torch.tensor(lengths))
            common.seq_lens_cpu_upper_bound = torch.tensor(lengths, dtype=torch.int32)
            builder.build(0, common)
        close(replay(), layer.right(causal=True))


@last
def test_the_keys_of_a_window_are_split(version: str, vllm_tree: Tree) -> None:
    """The schedule is of the window that the attention has: a key more or less, and mate's stand-in raises."""
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), mate=mate(calls)) as load:
        layer = layer_of(load, DECODES, sliding_window=300)
        layer.write(slice(None))
        metadata = layer.builder(speculative_config=DRAFTS).build(0, layer.common_metadata(True))
        close(layer.run(metadata), layer.right(causal=True, window=300))
    schedule, attention = calls
    assert schedule["window_size"] == attention["window_size"]
    assert attention["scheduler_metadata"] is not None


@last
def test_the_keys_of_tokens_that_all_see_each_other_are_split(version: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), mate=mate(calls)) as load:
        layer = layer_of(load, DECODES)
        layer.write(slice(None))
        metadata = layer.builder(speculative_config=DRAFTS).build(0, layer.common_metadata(False))
        close(layer.run(metadata), layer.right(causal=False))
    assert [call["causal"] for call in calls] == [False, False]


@some_versions
def test_groups_that_vllm_builds_once_each_refresh_their_own_schedule(version: str, vllm_tree: Tree) -> None:
    """vLLM captures each KV cache group by its own builder, and in a step builds like ones by the first one's."""
    with released(version, vllm_tree(version), mate=mate()) as load:
        layers = [layer_of(load, DECODES, seed=seed) for seed in (0, 1)]
        builders = [layer.builder(speculative_config=DRAFTS) for layer in layers]
        graphs = []
        for layer, builder in zip(layers, builders, strict=True):
            layer.write(slice(None))
            graphs.append(captured(layer, builder))
        lengths = graphs[0][0].seq_lens
        for common, _ in graphs:
            common.seq_lens.copy_(torch.tensor([length for _, length in DECODES]))
        first = builders[0].build(0, graphs[0][0])
        assert first.seq_lens is lengths
        common = graphs[1][0]
        builders[1].update_block_table(first, common.block_table_tensor, common.slot_mapping)
        for layer, (_, replay) in zip(layers, graphs, strict=True):
            close(replay(), layer.right(causal=True))


@some_versions
@pytest.mark.parametrize("batch", [DECODES, ((4, 4), (4, 4), (4, 4))])
def test_a_drafters_metadata_names_the_batchs_tensors_alone(version: str, batch: Any, vllm_tree: Tree) -> None:
    """A chain of steps in one graph: lengths grow and nothing is built, so a schedule would be of other lengths."""
    with released(version, vllm_tree(version), mate=mate()) as load:
        layer = layer_of(load, batch)
        layer.write(slice(None))
        builder = layer.builder(speculative_config=DRAFTS)
        common = layer.common_metadata(True)
        lengths = common.seq_lens.clone()
        common.seq_lens.copy_(common.query_start_loc.diff())
        metadata = builder.build_for_drafting(common, 0)
        common.seq_lens.copy_(lengths)
        close(layer.run(metadata), layer.right(causal=True))


@some_versions
@pytest.mark.parametrize("reason", ["sinks", "batch invariance", "enough requests"])
def test_the_keys_of_decodes_stay_whole_with(version: str, reason: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), mate=mate(calls)) as load:
        load("vllm.envs").VLLM_BATCH_INVARIANT = reason == "batch invariance"
        batch = ((1, 300),) * 28 if reason == "enough requests" else DECODES
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16() if reason == "sinks" else None
        layer = layer_of(load, batch, sinks=sinks)
        layer.write(slice(None))
        builder = layer.builder(speculative_config=DRAFTS)
        assert builder.makes_schedules is (reason != "batch invariance")
        metadata = builder.build(0, layer.common_metadata(True))
        close(layer.run(metadata), layer.right(causal=True, sinks=sinks))
    (call,) = calls
    assert call["num_splits"] == (1 if reason == "batch invariance" else 0)
    assert call["scheduler_metadata"] is None


@last
def test_layers_with_other_query_heads_have_schedules_of_their_own(version: str, vllm_tree: Tree) -> None:
    """A drafter's layer is in the target's KV cache group where keys are alike; up to 0.20 with the same builder."""
    with released(version, vllm_tree(version), mate=mate()) as load:
        layers = [layer_of(load, ((4, 700), (4, 9)), 256, heads=heads) for heads in (4, 64)]
        named = {str(layer.heads): SimpleNamespace(impl=layer.impl) for layer in layers}
        builder = layers[0].builder(layers=named, speculative_config=DRAFTS)
        metadata = builder.build(0, layers[0].common_metadata(True))
        assert metadata.schedules.keys() == {4, 64}
        for layer in layers:
            layer.table = layers[0].table
            layer.write(slice(None))
            close(layer.run(metadata), layer.right(causal=True))


@last
def test_layers_with_sinks_stay_whole_beside_layers_without(version: str, vllm_tree: Tree) -> None:
    """As the target's layers and a drafter's with as many heads; mate has no split with sinks."""
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), mate=mate(calls)) as load:
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()
        layers = [layer_of(load, DECODES, sinks=found) for found in (None, sinks)]
        named = {str(number): SimpleNamespace(impl=layer.impl) for number, layer in enumerate(layers)}
        builder = layers[0].builder(layers=named, speculative_config=DRAFTS)
        metadata = builder.build(0, layers[0].common_metadata(True))
        for layer, found in zip(layers, (None, sinks), strict=True):
            layer.table = layers[0].table
            layer.write(slice(None))
            close(layer.run(metadata), layer.right(causal=True, sinks=found))
    assert [call["scheduler_metadata"] is None for call in calls[1:]] == [False, True]


@last
def test_a_mate_without_schedules_serves_and_one_line_says_so(
    version: str, vllm_tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = mate()
    del module.get_scheduler_metadata
    with (
        caplog.at_level(logging.WARNING, "vllm.hwplugin"),
        released(version, vllm_tree(version), mate=module) as load,
    ):
        layer = layer_of(load, DECODES)
        layer.write(slice(None))
        metadata = layer.builder(speculative_config=DRAFTS).build(0, layer.common_metadata(True))
        close(layer.run(metadata), layer.right(causal=True))
    (line,) = caplog.messages
    assert "get_scheduler_metadata" in line


@last
@pytest.mark.parametrize(
    ("function", "argument", "required"),
    [
        ("flash_attn_varlen_func", "learnable_sink", False),
        ("get_scheduler_metadata", "num_splits", False),
        ("flash_attn_varlen_func", "scheduler", True),
    ],
)
def test_a_mate_that_lacks_an_argument_or_requires_another_is_not_used(
    version: str, function: str, argument: str, required: bool, vllm_tree: Tree
) -> None:
    module = mate()
    signature = inspect.signature(getattr(module, function))
    kept = [parameter for name, parameter in signature.parameters.items() if name != argument]
    if required:
        kept = [inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD), *kept]
    getattr(module, function).__signature__ = signature.replace(parameters=kept)
    refused = pytest.raises(ImportError, match=f"mate.{function} does not take .*'{argument}'")
    with released(version, vllm_tree(version), mate=module) as load, refused:
        load(OWN)


@last
def test_as_many_parts_as_fill_the_device_and_no_more_than_the_users_bound(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        found = {}
        for requests, most in itertools.product((1, 4, 27, 28), (32, 4, 1)):
            layer = layer_of(load, ((1, 700),) * requests)
            bounded = SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=most)
            metadata = layer.builder(attention_config=bounded).build(0, layer.common_metadata(True))
            found[requests, most] = [schedule.splits for schedule in metadata.schedules.values()]
        # mate has kernels to put 128 parts together.
        schedules = load("vllm_hwplugin.musa._mate_schedule").Schedules
        sizes = {"head_size": 64, "dtype": torch.bfloat16, "page_size": 16, "window": None}
        large = schedules(None, heads={1}, kv_heads=1, compute_units=200, most=256, **sizes)
        assert [large.splits(requests) for requests in (1, 2)] == [128, 100]
    # 56 compute units, 2 KV heads.
    assert [found[requests, 32] for requests in (1, 4, 27, 28)] == [[28], [7], [2], []]
    assert [found[requests, 4] for requests in (1, 4, 27, 28)] == [[4], [4], [2], []]
    assert not any(found[requests, 1] for requests in (1, 4, 27, 28))
