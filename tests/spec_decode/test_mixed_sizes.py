# SPDX-License-Identifier: Apache-2.0
"""Larger graphs of mixed batches, and what vLLM's estimate of memory captures, on released runners."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, LARGEST_MIXED
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS
from vllm_hwplugin.spec_decode.v2 import mixed_graphs
from vllm_hwplugin.spec_decode.v2 import mixed_sizes as v2_mixed_sizes
from vllm_hwplugin.spec_decode.v2.mixed_dispatch import MixedDispatch

from ..conftest import versions
from .graph_manager import MODE, Manager
from .sized_configs import V2, config_of, crossed, fill_of, made, own_of


def engine_of(tree: Any, **engine: Any) -> Any:
    """An engine's configuration, with the plugin's sizes."""
    return made(config_of(**engine), fill_of(tree))


@pytest.mark.parametrize("gate", ["mixed", "decode"])
@pytest.mark.parametrize("seqs", [64, 1024])
@pytest.mark.parametrize("version", versions(*V2, among=("0.24.0", "0.26.0", "0.33.0")))
def test_graphs_of_mixed_batches_reach_4096_tokens(
    entry: run_records.RunRecord, version: str, seqs: int, gate: str, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each start: nothing is timed."""
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", gate)
    tree, largest = vllm_tree(version), LARGEST_MIXED if gate == "mixed" else 512
    config, passes = engine_of(tree, seqs=seqs, v2=True), list[tuple[int, str]]()
    # A FULL one goes where the PIECEWISE one goes.
    full = mixed_graphs.SIZES if version != "0.24.0" else ()
    manager = Manager(tree, config, monkeypatch, full, passes=passes)
    assert max(manager.captured("PIECEWISE"), default=None) == (None if full and seqs == 64 else largest)
    assert max(manager.captured("FULL")) == min(LARGEST, 4 * seqs)
    assert manager.serves(9, largest) == f"{'FULL' if full else 'PIECEWISE'} {largest}"
    if largest < LARGEST_MIXED:
        assert manager.serves(9, largest + 1) == f"NONE {largest + 1}"
    assert all(passes.count(one) == 1 for one in passes if one[1] != "NONE")
    assert manager.made.hidden_states.shape[0] == max(
        desc.num_tokens for descs in manager.made._capture_descs.values() for desc in descs
    )


#: Those of the drafter's first pass, and of the others.
DRAFTERS = (MODE, CUDAGraphMode.FULL_DECODE_ONLY)


@pytest.mark.parametrize(
    ("full", "many"),
    [((), ()), (mixed_graphs.SIZES, ()), (mixed_graphs.SIZES, mixed_graphs.SIZES_OF_MANY)],
    ids=["decodes", "mixed", "mixed, of many requests"],
)
@pytest.mark.parametrize("version", versions(*V2, among=SUPPORTED[SUPPORTED.index("0.29.0") :]))
def test_released_v2_runners_estimate_about_what_graphs_take(
    entry: run_records.RunRecord,
    version: str,
    full: Sequence[int],
    many: Sequence[int],
    vllm_tree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the KV cache lacks it: by vLLM's two samples decodes alone would be several times of that."""
    tree = vllm_tree(version)
    config, passes = engine_of(tree, v2=True), list[tuple[int, str]]()
    made_by = partial(Manager, tree, config, monkeypatch, full, passes=passes, many=many)
    first = made_by(profile=True)
    # Of each mode a few; of the others nobody needs to wait for a capture.
    assert len({tokens for tokens, mode in passes if mode == "PIECEWISE"}) == (0 if many else 4)
    # Passes that vLLM times then find no graph that is not there.
    assert first.serves(MAX_NUM_REQS + 1, 500) == ("FULL 512" if many else "NONE 500")
    for mode in DRAFTERS:
        drafter = first.capture_drafter(mode)
        assert len(drafter.graphs) <= 4
        offered = {desc for descs in drafter._candidates.values() for desc in descs}
        assert {desc for desc in offered if desc.cg_mode == CUDAGraphMode.FULL} == {*drafter.graphs}
    assert len(passes) < 60
    estimate = estimated(first)
    real = made_by()
    assert max(real.captured("FULL")) == LARGEST
    first_pass, later = (real.capture_drafter(mode).graphs for mode in DRAFTERS)
    assert min(len(first_pass), len(later)) > 50
    # Later passes have as many requests as the target's largest decode batch; more would need more memory for logits.
    assert max(desc.num_tokens for desc in later) == LARGEST // 4
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


@pytest.mark.parametrize("many", [(), mixed_graphs.SIZES_OF_MANY], ids=["few", "many"])
@pytest.mark.parametrize("k", [3, 0])
@pytest.mark.parametrize(
    ("version", "seqs"), crossed(versions(*V2, among=SUPPORTED[SUPPORTED.index("0.26.0") :]), [64, 1024])
)
def test_graphs_that_no_batch_would_get_are_not_captured(
    entry: run_records.RunRecord,
    version: str,
    seqs: int,
    k: int,
    many: Sequence[int],
    vllm_tree: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = vllm_tree(version)
    config = engine_of(tree, seqs=seqs, v2=True, k=k)
    if many and seqs > MAX_NUM_REQS:
        manager = Manager(tree, config, monkeypatch, mixed_graphs.SIZES, many=many)
        assert not manager.captured("PIECEWISE")
        assert [manager.serves(reqs, 2000) for reqs in (MAX_NUM_REQS, 513)] == ["FULL 2048", "NONE 2000"]
        assert [manager.serves(reqs, 1100) for reqs in (MAX_NUM_REQS, 512)] == ["FULL 1152", "FULL 1280"]
        return
    manager = Manager(tree, config, monkeypatch, mixed_graphs.SIZES)
    pieces = set(manager.captured("PIECEWISE"))
    # 256 requests at most have FULL graphs of any batch.
    most = MAX_NUM_REQS
    sizes = {size for size in config.compilation_config.cudagraph_capture_sizes if seqs > most and size > most}
    assert {size for size in sizes if size > 512} <= pieces <= sizes
    # Without drafts more requests have as few tokens.
    assert k or pieces == sizes
    for below, size in pairwise(sorted(pieces)):
        assert size - (below + 1) <= size / 5
    assert manager.serves(64, 65) == "FULL 96"
    assert seqs <= most or manager.serves(most + 1, 2 * most).startswith("PIECEWISE")


@pytest.mark.parametrize("version", versions(*V2, among=SUPPORTED[SUPPORTED.index("0.28.0") :]))
def test_with_adaptive_verification_large_batches_of_decodes_replay_mixed_graphs(
    entry: run_records.RunRecord, version: str, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own graphs, of any mix of decodes, stay at its own sizes, and only these are timed for its choice."""
    tree = vllm_tree(version)
    config = engine_of(tree, k=7, seqs=256, adaptive=True, v2=True, method="dspark")
    manager = Manager(tree, config, monkeypatch, mixed_graphs.SIZES, varlen=True).made
    dispatch = MixedDispatch(
        SimpleNamespace(
            cudagraph_manager=manager,
            compilation_config=config.compilation_config,
            adaptive_verification=object(),
            attn_groups=[],
            supports_mm_inputs=False,
        )
    )
    dispatch.attach(shares_first_pass=False)
    decodes = {desc.num_tokens for desc in manager.graphs if not dispatch.is_mixed(desc)}
    assert decodes == set(own_of(8, 256, 8192))
    assert {desc.num_tokens for desc in manager.graphs} == {
        *decodes,
        *(size for size in mixed_graphs.SIZES if size <= LARGEST_MIXED),
    }
    assert manager.captured_token_counts() == sorted(decodes)
    for tokens, longest, replayed in ((500, 8, False), (500, None, True), (1500, 8, True)):
        found = manager.dispatch(250, tokens, None, 0, max_query_len=longest)
        assert (found.cg_mode, dispatch.is_mixed(found)) == (CUDAGraphMode.FULL, replayed)
        assert dispatch.replays() == replayed


@pytest.mark.parametrize("version", versions(*V2, among=SUPPORTED[SUPPORTED.index("0.29.0") :]))
def test_attention_without_full_graphs_has_its_memory_estimated(
    entry: run_records.RunRecord, version: str, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the worker finds that out, when the sizes are there."""
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    tree = vllm_tree(version)
    config = made(config_of(v2=True), fill_of(tree))
    manager = Manager(tree, config, monkeypatch, profile=True, mode=CUDAGraphMode.PIECEWISE)
    assert manager.made._capture_mem_samples == []
    assert v2_mixed_sizes.left_out(manager.made)
