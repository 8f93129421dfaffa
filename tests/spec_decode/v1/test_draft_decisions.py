"""What is captured for a drafter, decided in the order in which vLLM's runner starts one; see `host_runner`."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402

from ..drafters import MAX_REQS, Runner, boot, compare, propose  # noqa: E402
from ..host_runner import FLASH_MLA, FLASHINFER, FLEX, Pool, builder  # noqa: E402
from ..recorded_graph import RecordedGraphs  # noqa: E402

FULL, NONE, DECODE_ONLY = CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
LADDER = (1, 2, 4, 8)


def uniform_of(proposer) -> dict[int, tuple[int, ...]]:
    """The request counts that the passes were captured for, by query length."""
    found: dict[int, list[int]] = {}
    for key in RecordedGraphs.instances[-2 if proposer.draft_loop.captured else -1].captured:
        found.setdefault(key.num_tokens // key.num_reqs, []).append(key.num_reqs)
    return {length: tuple(sorted(rungs)) for length, rungs in found.items()}


def test_builders_that_plan_get_a_graph_for_each_pass_and_no_chain(make, notes):
    proposer, runner, k = make("loop", 3), Runner(0), 3
    cls = builder(FLASHINFER)
    proposer.host.use(type(cls.__name__, (cls,), {"reorder_batch_threshold": 512}))
    boot(proposer, DECODE_ONLY, runner, profile=True)
    assert uniform_of(proposer) == {1 + k: LADDER, 1: LADDER}
    assert notes["draft-full-graph"].startswith("FULL drafter graphs for EagleProposer")
    assert notes["draft-loop-graph"].startswith("steps are launched one by one: metadata must be built between")
    assert cls.__name__ in notes["draft-loop-graph"]
    passes = RecordedGraphs.instances[-1]
    propose(proposer, runner.batch(k, size=2))
    assert [key.num_tokens for key in passes.replayed] == [2 * (1 + k)] + [2] * (k - 1)


def test_the_lowest_decode_threshold_decides_about_the_first_pass(make):
    proposer, runner = make("loop", 3), Runner(0)
    proposer.host.use(type("ShortQueries", (builder(FLASHINFER),), {"reorder_batch_threshold": 3}))
    boot(proposer, DECODE_ONLY, runner)
    assert uniform_of(proposer) == {1: LADDER}


def test_the_second_start_decides_by_its_own_attention_groups(make, notes):
    """Profiling leaves groups behind, which may be others than those of the real start."""
    proposer, runner = make("loop", 3), Runner(0)
    boot(proposer, DECODE_ONLY, runner)
    old = list(RecordedGraphs.instances)
    proposer.host.attn_groups.clear()
    proposer.host.use(builder(FLASH_MLA))
    boot(proposer, DECODE_ONLY, runner)
    assert "launched one by one" in notes["draft-loop-graph"]
    propose(proposer, runner.batch(3, size=2))
    assert not any(graphs.replayed for graphs in old)
    assert [key.num_tokens for key in RecordedGraphs.instances[-1].replayed] == [8, 2, 2]


def test_the_graphs_of_an_earlier_start_are_let_go_before_the_next_capture(make):
    """They hold memory that the next start's measurement of it would count."""
    proposer, runner = make("loop", 2), Runner(0)
    boot(proposer, DECODE_ONLY, runner)
    held = [weakref.ref(graphs) for graphs in RecordedGraphs.instances]
    RecordedGraphs.instances.clear()
    proposer.host.attn_groups.clear()
    proposer.host.initialize_kv_cache(proposer.host.kv_cache_config_of(2))
    gc.collect()
    assert not proposer.draft_graphs.ready
    assert [graphs() for graphs in held] == [None, None]


# -- what cannot be had is said, and is an error only where it is required --------------------------------------------


def no_template(proposer, runner):
    return None


def short_table(proposer, runner):
    runner.table = torch.zeros(7, 16, dtype=torch.int32)
    return runner.template()


def planning(proposer, runner):
    proposer.host.use(builder(FLEX))
    return runner.template()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (no_template, "no attention metadata for the drafter's KV-cache group"),
        (short_table, "the largest graph has 8 rows, and the drafter's block table holds 7"),
        (planning, "FlexAttentionMetadataBuilder: each build makes its block mask again"),
    ],
)
def test_what_cannot_be_captured_leaves_the_drafter_stock(make, notes, prepare, reason):
    stock, proposer, runner = make("stock", 2), make("loop", 2), Runner(0)
    boot(stock, NONE, runner)
    template = prepare(proposer, runner)
    proposer.host.start(DECODE_ONLY, template)
    assert reason in notes["draft-full-graph"]
    runner.table = torch.zeros(MAX_REQS, 16, dtype=torch.int32)
    compare(stock, proposer, runner.batch(2, size=3))
    assert RecordedGraphs.instances == []


# -- sleep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "mode"), [("passes", FULL), ("loop", DECODE_ONLY)])
def test_drafts_are_stocks_after_sleep(make, which, mode):
    stock, graphed, runner, pool = make("stock", 3), make(which, 3), Runner(1), Pool()
    boot(stock, NONE, runner)
    boot(graphed, mode, runner, profile=True, kv_pool=pool)
    RecordedGraphs.sealed = True
    batches = [runner.batch(3, kind, size=3) for kind in ("decode", "decode", "mixed", "decode")]
    for index, batch in enumerate(batches * 2):
        if index % 2:
            pool.sleep()
        # An equal batch, whose row starts need not be written again, before and after.
        runner.table[:3].copy_(runner.requests[:3])
        compare(stock, graphed, batch)
    assert all(graphs.replayed for graphs in RecordedGraphs.instances if graphs.concrete_cudagraph_entries)
