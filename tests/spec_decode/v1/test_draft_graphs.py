# SPDX-License-Identifier: Apache-2.0
"""Which graphs a drafter's passes have, and which batches are left to vLLM; `test_order_of_calls` compares drafts."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from vllm_hwplugin.spec_decode import capture_sizes
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS
from vllm_hwplugin.spec_decode.v1 import draft_decision, draft_full_graph
from vllm_hwplugin.spec_decode.v1.draft_buffers import DraftBuffers
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs

from .. import engines, test_order_of_calls
from ..engines import Backend
from ..metadata_builders import FLASHINFER, FLEX
from ..scheduled_runner import Side
from ..test_order_of_calls import CHAIN, KINDS, both
from ..walks import live_load

#: Requests of the captured passes.
LADDER = (1, 2, 4)


def named(path: str, **attributes: Any) -> Callable[[], type]:
    """Return what gives builders with the name of another class, whose metadata the models here read."""
    module, _, name = path.rpartition(".")
    made = type(name, (TritonAttentionMetadataBuilder,), {"__module__": module, **attributes})
    return staticmethod(lambda: made)


def captured(drafter: Any) -> dict[int, tuple[int, ...]]:
    """Return the numbers of requests of the captured passes, by tokens of a request."""
    found: dict[int, list[int]] = {}
    for key in drafter.draft_graphs.captured._graphs.concrete_cudagraph_entries:
        found.setdefault(key.num_tokens // key.num_reqs, []).append(key.num_reqs)
    return {length: tuple(sorted(counts)) for length, counts in found.items()}


def served(part: Any) -> int:
    count: int = part._step_counts.outcomes().get("served", 0)
    return count


@pytest.mark.parametrize(("threshold", "expected"), [(512, {1: LADDER, 3: LADDER}), (2, {1: LADDER})])
def test_builders_that_plan_have_a_graph_for_each_pass_and_no_chain(
    vllm_here: Any,
    threshold: int,
    expected: dict[int, tuple[int, ...]],
    notes: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lowest decode threshold decides about the first pass."""
    monkeypatch.setattr(Backend, "get_builder_cls", named(FLASHINFER, reorder_batch_threshold=threshold))
    with both(vllm_here, CHAIN) as sides:
        drafter = sides.both[1].runner.drafter
        assert captured(drafter) == expected
        assert drafter.draft_loop.captured is None
        assert "metadata must be built between steps (FlashInfer" in notes["draft-loop-graph"]
        live_load(sides, KINDS)
    assert (served(drafter.draft_graphs) > 5) == (3 in expected)


def no_template(patch: pytest.MonkeyPatch) -> None:
    plan = draft_full_graph.plan_at_capture
    patch.setattr(draft_full_graph, "plan_at_capture", lambda proposer, mode, _: plan(proposer, mode, None))


def no_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draft_decision, "own_sizes", lambda _: None)
    patch.setattr(draft_decision, "MAX_NUM_REQS", 0)


def short_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draft_decision, "rows_held", lambda table: LADDER[-1] - 1)


def planned_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backend, "get_builder_cls", named(FLEX))


def causal_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backend, "get_builder_cls", named(FLASHINFER))


@pytest.mark.parametrize(
    ("prepare", "blocks", "reason"),
    [
        (no_template, False, "no attention metadata for the drafter's KV-cache group"),
        (no_size, False, "no capture size holds a whole batch of the drafter"),
        (short_table, False, "the largest graph has 4 rows, and the drafter's block table holds 3"),
        (planned_on_the_host, False, "FlexAttentionMetadataBuilder: each build makes its block mask again"),
        (causal_only, True, "non-causal attention (FlashInferMetadataBuilder"),
    ],
)
def test_what_cannot_be_captured_leaves_the_drafter_to_vllm(
    vllm_here: Any,
    prepare: Callable[[pytest.MonkeyPatch], None],
    blocks: bool,
    reason: str,
    notes: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(monkeypatch)
    with both(vllm_here, blocks=blocks) as sides:
        live_load(sides, KINDS)
    graphs = sides.both[1].runner.drafter.draft_graphs
    assert graphs._step_counts.outcomes().keys() == {"not_captured"}
    assert reason in notes["draft-full-graph"] + notes.get("dflash-full-graph", "")


def test_the_largest_decode_batches_of_the_target_bring_no_passes(
    vllm_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes would have memory of their own, for batches whose GPU has work enough."""

    def of_the_plugin(*arguments: Any, **settings: Any) -> Any:
        config = config_of(*arguments, **settings)
        vars(config.compilation_config)[capture_sizes._OWN] = 6
        return config

    config_of = engines.config_of
    monkeypatch.setattr(engines, "config_of", of_the_plugin)
    monkeypatch.setattr(draft_decision, "MAX_NUM_REQS", 2)
    with both(vllm_here) as sides:
        assert captured(sides.both[1].runner.drafter) == {1: (1, 2), 3: (1, 2)}


def test_a_second_start_holds_nothing_of_the_first_and_decides_anew(
    vllm_here: Any, notes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM first measures the memory of the largest graphs, and may have other attention groups then."""
    shapes, capture = list[Any](), PassGraphs.capture

    def noted(graphs: PassGraphs, shape: Any, template: Any) -> None:
        shapes.append(shape)
        capture(graphs, shape, template)

    with both(vllm_here, CHAIN) as sides:
        side = sides.both[1]
        runner, drafter = side.runner, side.runner.drafter
        planned = drafter.draft_graphs._keys
        monkeypatch.setattr(PassGraphs, "capture", noted)
        runner._init_minimal_kv_cache_for_profiling = partial(
            runner.initialize_kv_cache, side.kv_cache_config, is_profiling=True
        )
        runner.attn_groups.clear()
        runner.profile_cudagraph_memory()
        assert shapes == list(planned.largest(MAX_NUM_REQS).all())
        held = [weakref.ref(part.captured) for part in (drafter.draft_graphs, drafter.draft_loop)]
        monkeypatch.setattr(Backend, "get_builder_cls", named(FLASHINFER))
        runner.initialize_kv_cache(side.kv_cache_config)
        gc.collect()
        # Its memory would count in the next start's measurement.
        assert [graphs() for graphs in held] == [None, None]
        # It has cleared all graphs.
        for one in sides.both:
            one.runner.capture_model()
        assert captured(drafter) == {1: LADDER, 3: LADDER}
        assert "metadata must be built between steps" in notes["draft-loop-graph"]
        live_load(sides, KINDS)
    assert served(drafter.draft_graphs) > 5


class Allocations(TorchDispatchMode):
    """Takes down who allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe()
        while frame is not None:
            self.modules.add(frame.f_globals["__name__"])
            frame = frame.f_back
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("blocks", [False, True])
def test_nothing_that_graphs_read_is_allocated_with_the_kv_cache(
    vllm_here: Any, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has a memory pool for that, whose contents a sleep loses."""
    made: list[set[str]] = []

    class Watched(Side):
        def start(self) -> None:
            initialize = self.runner.initialize_kv_cache

            def watched(*arguments: Any) -> None:
                with Allocations() as allocations:
                    initialize(*arguments)
                made.append(allocations.modules)

            self.runner.initialize_kv_cache = watched
            super().start()

    monkeypatch.setattr(test_order_of_calls, "Side", Watched)
    with both(vllm_here, blocks=blocks):
        stock, patched = made
    assert stock
    assert not {name for name in patched if name.startswith("vllm_hwplugin")}


def test_batches_that_lie_elsewhere_are_passed_over_and_a_table_that_moved_gives_the_graphs_up(
    vllm_here: Any, notes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with both(vllm_here, CHAIN) as sides:
        drafter = sides.both[1].runner.drafter
        parts = drafter.draft_graphs, drafter.draft_loop

        def served_under(*trouble: Any) -> list[int]:
            before = [served(part) for part in parts]
            with monkeypatch.context() as patch:
                if trouble:
                    owner, name, answer = trouble
                    patch.setattr(owner, name, lambda *_: answer)
                live_load(sides, KINDS)
            return [served(part) - count for part, count in zip(parts, before, strict=True)]

        assert min(served_under()) > 5
        assert served_under(draft_full_graph, "unmanaged_field", "encoder_seq_lens") == [0, 0]
        assert notes["draft-full-graph"].count("'encoder_seq_lens'") == 1
        assert min(served_under()) > 5
        assert served_under(DraftBuffers, "block_table_moved", True) == [0, 0]
        assert "block table moved" in notes["draft-full-graph"]
        assert served_under() == [0, 0]
    for part in parts:
        assert part._step_counts.outcomes()["moved"] > 0


def test_weights_that_moved_give_the_graphs_up(vllm_here: Any, notes: dict[str, str]) -> None:
    """Without piecewise graphs vLLM reads them at their new addresses."""
    with both(vllm_here, CHAIN) as sides:
        for side in sides.both:
            weight = side.runner.drafter.model.mix.weight
            weight.data = -weight.data
        live_load(sides, KINDS)
    assert "another tensor than at capture" in notes["draft-full-graph"]
    assert served(sides.both[1].runner.drafter.draft_graphs) == 0
