# SPDX-License-Identifier: Apache-2.0
"""FULL graphs of mixed batches: how long a request attention is told of, and vLLM with them beside those of decode."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from vllm_hwplugin.base.gates import PLAIN_DECODE
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.v2 import mixed_graphs, recording
from vllm_hwplugin.spec_decode.v2.mixed_bounds import is_mixed_graph, most_splits, set_mixed_graphs

from ...conftest import versions
from .. import engines
from ..engines import BLOCK, DRAFTS
from ..engines import MAX_LEN as MAX_LENGTH
from ..engines import MAX_REQS as MAX_REQS_HERE
from ..engines import VOCAB as WORDS
from ..walks import BEST, MORE, PLAIN, UNPATCHED, Sides, host_of_graphs, live_load, walk
from .released_modules import ReleasedModules
from .scheduled_runner import STAND_INS, Side, read_by_the_plugin
from .speculators import DEVICE, HIDDEN, MAX_LEN, MAX_REQS, RUNGS, Runner, Views

K = 3
FAULTY = SUPPORTED[: SUPPORTED.index("0.31.0")]
OFF = {"VLLM_HWPLUGIN_BACKPORT_MIXED_GRAPHS": "off"}
ALONE = UNPATCHED | dict.fromkeys(OFF, "on")
#: Graphs of these many tokens: with a token for each request, and with two for some.
SIZES = (*RUNGS, 12)


class Longest(Views):
    """Takes down requests, tokens and the longest query of each build."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        self.asked = getattr(self, "asked", [])
        self.asked.append((common.num_reqs, common.num_actual_tokens, common.max_query_len))
        return super().build(common_prefix_len, common)


def longest_of(modules: Any, version: str, **choices: str) -> dict[str, set[tuple[int, ...]]]:
    """Of the target's graphs, of those of the draft's first pass and of its steps: requests, tokens, longest query."""
    mode, loaded, builder = CUDAGraphMode.FULL, modules(version, **choices), Longest()
    made = Runner(loaded, version, builder, K)
    made.config.compilation_config.cudagraph_mode = mode
    vars(made.config.compilation_config).update(cudagraph_capture_sizes=[*SIZES], max_cudagraph_capture_size=max(SIZES))
    made.config.lora_config = None
    state = types.SimpleNamespace(
        max_model_len=MAX_LEN,
        supports_mm_inputs=False,
        vllm_config=made.config,
        model_config=types.SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
        prepare_dummy_inputs=lambda *args: {},
    )
    state.prepare_attn = types.MethodType(loaded("model_states.default").DefaultModelState.prepare_attn, state)
    shapes, speculator = loaded("cudagraph_utils"), made.speculator
    shapes.set_forward_context = lambda *args, **kwargs: contextlib.nullcontext()
    speculator.init_cudagraph_manager(mode)
    target = shapes.ModelCudaGraphManager(made.config, DEVICE, mode, K + 1)
    shared = {
        "model": lambda input_ids, **_: torch.zeros(len(input_ids), HIDDEN),
        "forward_fn": lambda *args, **kwargs: None,
        "model_state": state,
        "input_buffers": speculator.input_buffers,
        "intermediate_tensors": None,
        "block_tables": made.block_tables,
        "attn_groups": speculator.attn_groups,
        "kv_cache_config": speculator.kv_cache_config,
    }
    managers = {"target": target, "steps": speculator.decode_cudagraph_manager}
    # Up to 0.25 it is captured with what was made for the target.
    if version not in SUPPORTED[: SUPPORTED.index("0.26.0")]:
        managers["first pass"] = speculator.prefill_cudagraph_manager
    found = {}
    for name, manager in managers.items():
        builder.asked = []
        manager.capture(**known_arguments(manager.capture, **shared))
        found[name] = set(builder.asked)
    return found


@pytest.mark.parametrize("version", versions("vllm/v1/worker/", "vllm/v1/attention/", among=FAULTY))
def test_graphs_of_any_batch_are_captured_for_one_request_with_all_tokens(modules, version: str) -> None:
    any_batch = {(min(tokens, MAX_REQS), tokens) for tokens in SIZES}
    stock, patched = (longest_of(modules, version, **choices) for choices in (OFF, {}))
    for name in stock.keys() - {"steps"}:
        assert {one[:2] for one in stock[name]} == {one[:2] for one in patched[name]} == any_batch
        # FlashAttention 3 needs no causal mask for such.
        assert {longest for requests, tokens, longest in stock[name] if requests == tokens} == {1}
        assert all(longest == tokens for _, tokens, longest in patched[name])
    assert patched["steps"] == stock["steps"]


def longest_in_steps(tree: Any, mode: CUDAGraphMode, **choices: str) -> tuple[set[Any], set[Any]]:
    """Of the target's graphs, and of the steps that are replays of them: tokens and the longest query."""
    found: list[tuple[int, int]] = []
    build = TritonAttentionMetadataBuilder.build

    def asked(builder: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((common_attn_metadata.num_actual_tokens, common_attn_metadata.max_query_len))
        return build(builder, common_prefix_len, common_attn_metadata, *args, **kwargs)

    with host_of_graphs() as monkeypatch:
        monkeypatch.setattr(TritonAttentionMetadataBuilder, "build", asked)
        side = Side(ReleasedModules(tree, STAND_INS, **choices), mode=mode)
        graphs, steps = set(found), set()
        prepare = side.runner.model_state.prepare_attn

        def prepared(batch: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
            found.clear()
            metadata = prepare(batch, graph, *args, **kwargs)
            if graph == CUDAGraphMode.FULL:
                steps.update(found)
            return metadata

        side.runner.model_state.prepare_attn = prepared
        # Prompts of one token and of several, alone and beside requests that decode.
        for name, prompt in enumerate(([6], [1, 2, 3, 4, 5], [7])):
            side.add(str(name), prompt, max_tokens=9, temperature=0.0)
            side.step()
        side.abort("0")
        side.add("3", [8], max_tokens=1, temperature=0.0)
        for _ in range(9):
            side.step()
    return graphs, steps


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_a_schedule_is_laid_out_for_the_request_that_its_graph_was_captured_for(vllm_here) -> None:
    tree = vllm_here
    graphs, steps = longest_in_steps(tree, CUDAGraphMode.FULL, **ALONE)
    assert len(steps) > 1
    assert steps <= graphs
    # FlashAttention 3 lays a schedule of single tokens out in another way.
    _, stock = longest_in_steps(tree, CUDAGraphMode.FULL, **UNPATCHED)
    assert any(longest == 1 < tokens for tokens, longest in stock)


class Whole(Side):
    """Sees what a step writes into the KV cache, and leaves padding out, which others have more of or less."""

    def step(self) -> None:
        before = [model.kv.clone() for model in self.models]
        super().step()
        for model, kept in zip(self.models, before, strict=True):
            # The last row takes what has no slot.
            assert self._own_slots().issuperset((model.kv != kept)[:-1].any(1).nonzero().flatten().tolist())

    def _own_slots(self) -> set[int]:
        """Of the tokens of this step, and of the drafts behind them."""
        if self.executed is None:
            return set()
        batch, table = self.executed.input_batch, self.runner.block_tables.block_tables[0].gpu
        # DFlash's block may end past a request's last token; vLLM 0.26 then writes into block 0, which no request has.
        found = set(range(BLOCK)) if self.config.speculative_config.use_dflash() else set[int]()
        for row, end, count in zip(batch.idx_mapping_np, batch.seq_lens, batch.num_scheduled_tokens, strict=False):
            last = min(int(end) + self.config.num_lookahead_tokens, MAX_LENGTH)
            places = torch.arange(int(end) - int(count), last)
            found.update((table[row, places // BLOCK] * BLOCK + places % BLOCK).tolist())
        return found

    def inputs(self) -> dict[str, Any]:
        found, batch = super().inputs(), self.executed.input_batch
        padding = {
            "lengths": (found["lengths"][batch.num_reqs :], 0),
            "starts": (found["starts"][batch.num_reqs + 1 :], batch.num_tokens),
            "slots": (found["slots"][0][batch.num_tokens :], -1),
        }
        assert all(set(values) <= {value} for values, value in padding.values())
        cut = {name: found[name][: len(found[name]) - len(padding[name][0])] for name in ("lengths", "starts")}
        return found | cut | {"slots": found["slots"][0][: batch.num_tokens]}


def graphs_of(side: Side) -> dict[str, set[int]]:
    """Of the target and of the draft's first pass: tokens of the graphs of any batch."""
    managers = {"target": side.runner.cudagraph_manager, "first pass": side.runner.speculator.prefill_cudagraph_manager}
    return {
        name: {desc.num_tokens for desc in manager.graphs if desc.uniform_token_count is None}
        for name, manager in managers.items()
    }


SIZES_HERE = (2, 5, 9, 16, 24)


@contextlib.contextmanager
def with_them(tree: Any, mode: CUDAGraphMode, gate: str = "on", **settings: Any) -> Iterator[Sides]:
    """Stock vLLM, and vLLM with graphs of any batch, and with all others of the plugin; `settings` are `Whole`'s."""
    with host_of_graphs() as monkeypatch:
        monkeypatch.setattr(mixed_graphs, "SIZES", (*SIZES_HERE, 40))
        on = {"VLLM_HWPLUGIN_V2_MIXED_GRAPHS": gate}
        stock, patched = (ReleasedModules(tree, STAND_INS, **one) for one in (UNPATCHED, on))
        read_by_the_plugin(patched, monkeypatch)
        for modules in (stock, patched):
            # As if the models here were compiled in pieces.
            vars(modules("cudagraph_utils"))["has_compiled_submodule"] = lambda model: True
        yield Sides(*(Whole(modules, mode=mode, largest=max(SIZES_HERE), **settings) for modules in (stock, patched)))


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_each_step_of_a_live_load_is_a_replay_and_nothing_differs(vllm_here, mode: CUDAGraphMode) -> None:
    with with_them(vllm_here, mode) as sides:
        stock, patched = map(graphs_of, sides.both)
        assert stock == {"target": set(), "first pass": set()}
        assert patched == {"target": {*SIZES_HERE}, "first pass": {*SIZES_HERE}}
        engines = [side.runner.compilation_config for side in sides.both]
        assert [most_splits(one, MAX_REQS_HERE, 9, 9, 32) for one in engines] == [None, 32]
        live_load(sides)
    assert all(graphs for _, graphs in sides.replays)
    assert not all(graphs for graphs, _ in sides.replays)
    # Decode batches have graphs of their own as before, and the tail's with them; the others are sampled by these, and
    # drafted for by graphs of mixed batches.
    tail = sides.both[1].runner.tail_graphs
    assert tail._sampling.outcomes()["served"] > 15
    # What is left has no token or no row for padding. Older releases may decode a prompt of one token.
    drafting = tail._drafting.outcomes()
    assert drafting.keys() - {"prompt"} == {"served", "no_full_graph", "no_free_row"}
    assert drafting["served"] > 12
    assert drafting.get("prompt", 0) <= 1


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_dflash_drafts_for_prompts_in_two_graphs(vllm_here) -> None:
    """One by tokens, for the keys of the context, and one by requests, for their blocks."""
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, blocks=True) as sides:
        live_load(sides)
        # Target, sampling and these; vLLM replays only the pass over blocks.
        assert sides.replays.count((1, 4)) > 2
        outcomes = sides.both[1].runner.tail_graphs._drafting.outcomes()
        assert outcomes["served"] > 12
        # The last step of all makes no drafts.
        assert max(outcomes.get("prompt", 0), outcomes.get("fewer_drafts", 0)) <= 1
        # Longer than a kernel's block of the graph's requests, and ended by another step.
        sides.add(prompt=[place % WORDS for place in range(40)], max_tokens=9, **PLAIN[0])
        sides.step()
        sides.add(prompt=[1, 2], max_tokens=9, **PLAIN[1])
        sides.finish()


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_a_graph_with_the_tokens_of_a_full_decode_batch_drafts_for_prompts(
    vllm_here, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = MAX_REQS_HERE * (1 + DRAFTS)
    monkeypatch.setitem(globals(), "SIZES_HERE", (full, 2 * full))
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY) as sides:
        for length in (full - 1, full - 2, full - 4):
            sides.add(prompt=[(3 * length + place) % WORDS for place in range(length)], max_tokens=4, **PLAIN[0])
            sides.finish()
        tail = sides.both[1].runner.tail_graphs
    assert tail.captured.mixed.keys() == {full, 2 * full}
    assert "prompt" not in tail._drafting.outcomes()


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_a_step_of_more_than_4096_tokens_is_a_replay(vllm_here, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 128
    larger = {"MAX_REQS": count, "MAX_TOKENS": 8192, "NUM_BLOCKS": 12 * count, "MOST_BLOCKS": 12 * count}
    for name, value in larger.items():
        monkeypatch.setattr(engines, name, value)
    (largest, *_) = (size for size in mixed_graphs.SIZES if size > 4096)
    monkeypatch.setitem(globals(), "SIZES_HERE", (largest,))
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY) as sides:
        for number in range(4096 // 40 + 1):
            # No two begin alike: prefixes are cached.
            prompt = [*divmod(number, WORDS), *((number + 3 * place) % WORDS for place in range(38))]
            sides.add(prompt=prompt, max_tokens=3, **PLAIN[0])
        sides.step()
        assert sides.both[1].executed.input_batch.num_tokens > 4096
        assert sides.both[1].runner.tail_graphs._drafting.outcomes() == {"served": 1}
        sides.finish()
    assert all(graphs for _, graphs in sides.replays)


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("blocks", [False, True])
def test_nor_does_it_whatever_happens_to_requests(vllm_here, blocks: bool) -> None:
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, blocks=blocks) as sides:
        walk(sides, 3 * (PLAIN + BEST) + MORE, examples=8)


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("tokens", [6000, 9])
def test_batches_of_more_requests_have_graphs_in_place_of_piecewise_graphs(
    vllm_here, mode: CUDAGraphMode, blocks: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to as many tokens as a layer computes while the host launches it."""
    for module in (mixed_graphs, recording):
        monkeypatch.setattr(module, "MAX_NUM_REQS", 2)
    monkeypatch.setattr(mixed_graphs, "SIZES_OF_MANY", (1, 5, 16, 40))
    monkeypatch.setattr(mixed_graphs, "launch_tokens", lambda config: tokens)
    many = {size: min(size, MAX_REQS_HERE) for size in (5, 16, 24) if size <= tokens}
    with with_them(vllm_here, mode, blocks=blocks) as sides:
        side, dispatched = sides.both[1], set[Any]()
        manager = side.runner.cudagraph_manager
        held = [(one.num_tokens, one.num_reqs) for one in manager.graphs if one.uniform_token_count is None]
        assert sorted(held) == sorted({*many.items(), *((size, 2) for size in SIZES_HERE)})
        # A batch of few requests keeps the smaller graph.
        few, more = (manager.dispatch(reqs, 12, None, num_active_loras=0) for reqs in (2, 3))
        assert (few.cg_mode.name, few.num_tokens, few.num_reqs) == ("FULL", 16, 2)
        if 16 in many:
            assert (more.cg_mode.name, more.num_tokens, more.num_reqs) == ("FULL", 16, many[16])
        else:
            assert more.cg_mode.name == ("PIECEWISE" if mode == CUDAGraphMode.FULL_AND_PIECEWISE else "NONE")
        dispatch = manager.dispatch

        def noted(*arguments: Any, **named: Any) -> Any:
            desc = dispatch(*arguments, **named)
            dispatched.add((desc.num_tokens, desc.num_reqs))
            return desc

        manager.dispatch = noted
        if mode == CUDAGraphMode.FULL_DECODE_ONLY and 16 in many:
            # In pieces, the models here cannot do a step without graphs.
            walk(sides, 3 * (PLAIN + BEST) + MORE, examples=4)
        live_load(sides)
        outcomes = side.runner.tail_graphs._drafting.outcomes()
    assert outcomes["served"] > 5
    assert ((16, 4) in dispatched and outcomes.get("larger_batch", 0) > 5) is (16 in many)


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("blocks", [False, True])
def test_over_flash_attention_2_larger_graphs_hold_fewer_requests(
    vllm_here, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches blocks for the longest query of each request that the graph holds."""
    monkeypatch.setattr(mixed_graphs, "flash_versions", lambda group, config: {2})
    monkeypatch.setattr(mixed_graphs, "_FLASH_2_GRID", 50)
    with with_them(vllm_here, CUDAGraphMode.FULL_AND_PIECEWISE, blocks=blocks) as sides:
        manager = sides.both[1].runner.cudagraph_manager
        held = {one.num_tokens: one.num_reqs for one in manager.graphs if one.uniform_token_count is None}
        assert held == {size: min(size, MAX_REQS_HERE, 50 // size) for size in SIZES_HERE}
        live_load(sides)
        # Batches with more requests run in PIECEWISE graphs.
        modes = [manager.dispatch(reqs, 12, None, num_active_loras=0).cg_mode.name for reqs in (3, 4)]
        assert modes == ["FULL", "PIECEWISE"]
        for number, length in enumerate((2, 2, 8)):
            sides.add(prompt=[number, *range(length - 1)], max_tokens=9, **PLAIN[0])
            sides.step()
        sides.finish()
    # DFlash's blocks of three requests are those of four, and a graph of 16 tokens makes inputs of three.
    assert ("larger_batch" in sides.both[1].runner.tail_graphs._drafting.outcomes()) is blocks


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_a_drafter_without_graphs_of_its_own_reads_batches_that_the_target_replays(
    vllm_here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "SHARED_FIRST_PASS", frozenset())
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY) as sides:
        assert graphs_of(sides.both[1]) == {"target": {*SIZES_HERE}, "first pass": set()}
        live_load(sides)
    assert all(graphs for _, graphs in sides.replays)


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("off", [False, True])
def test_without_a_drafter_there_are_some_unless_they_are_off(
    vllm_here, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off:
        monkeypatch.setenv(PLAIN_DECODE, "0")
    monkeypatch.setenv("VLLM_HWPLUGIN_V2_MIXED_GRAPHS", "on")
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, drafts=0) as sides:
        runner = sides.both[1].runner
        graphs = dict(runner.cudagraph_manager.graphs)
        # The requests of a capture are no longer than the model's longest.
        runner.max_model_len = 3
        mixed_graphs.add_mixed_graphs(runner)
        largest = [is_mixed_graph(runner.compilation_config, MAX_REQS_HERE, size, size) for size in (12, 16)]
        assert largest == [not off, False]
        # A model that only embeds starts, though the feature's switch is `on`.
        runner.sampler = None
        mixed_graphs.add_mixed_graphs(runner)
    assert {one.num_tokens for one in graphs if one.uniform_token_count is None} == (set() if off else {*SIZES_HERE})


def test_splits_take_64_mib_at_most() -> None:
    config = types.SimpleNamespace()
    sizes = (64, 128, 512, 1024, 2049, 4096)
    set_mixed_graphs(config, {size: {16: size, 300: size} for size in sizes})
    splits = [most_splits(config, 16, size, size, 32) for size in sizes]
    assert splits == [32, 32, 8, 4, 1, 1]
    assert most_splits(config, 16, 128, 128, 1) == most_splits(config, 300, 512, 512, 32) == 1
