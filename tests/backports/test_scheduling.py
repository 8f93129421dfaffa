# SPDX-License-Identifier: Apache-2.0
"""Backports in the scheduler, with vLLM's released schedulers, KV cache managers and requests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_hwplugin.base.versions import SUPPORTED

from ..conftest import versions
from .schedulers import BLOCK_SIZE, Off, make_request, make_scheduler

K = 3
FILES = ("vllm/v1/core/", "vllm/v1/request.py", "vllm/config/speculative.py")
NO_LOOKAHEAD = SUPPORTED[: SUPPORTED.index("0.23.0")]
GROWS_HITS = SUPPORTED[: SUPPORTED.index("0.26.0")]
BEFORE_29 = SUPPORTED[: SUPPORTED.index("0.29.0")]
PADS = SUPPORTED[SUPPORTED.index("0.25.0") : SUPPORTED.index("0.29.0")]
OFF = {
    "lookahead": "VLLM_HWPLUGIN_BACKPORT_DRAFT_LOOKAHEAD",
    "padding": "VLLM_HWPLUGIN_BACKPORT_PADDED_REQUEST",
    "hit": "VLLM_HWPLUGIN_BACKPORT_MAMBA_HIT",
}


# -- backport-draft-lookahead -----------------------------------------------------------------------------------------


def blocks_of_first_step(modules: Any, method: str) -> int:
    """How many blocks a prompt of two whole blocks has when its first drafts are written."""
    scheduler = make_scheduler(modules, method, K)
    scheduler.add_request(make_request(modules, "one", range(2 * BLOCK_SIZE)))
    (request,) = scheduler.schedule().scheduled_new_reqs
    return len(request.block_ids[0])


@pytest.mark.parametrize("version", versions(*FILES, among=NO_LOOKAHEAD))
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_first_drafts_have_blocks(version: str, method: str, modules: Callable[..., Any]) -> None:
    assert blocks_of_first_step(modules(version, **{OFF["lookahead"]: "off"}), method) == 2
    assert blocks_of_first_step(modules(version), method) == 3


@pytest.mark.parametrize("version", versions(*FILES, among=NO_LOOKAHEAD))
def test_every_query_of_dflash_has_a_slot(version: str, modules: Callable[..., Any]) -> None:
    """It asks for the last sampled token as well as for each draft, after the tokens that the step verifies."""
    prompt = 3 * BLOCK_SIZE - (1 + K) - K

    def slots(**choices: str) -> int:
        one = modules(version, **choices)
        scheduler = make_scheduler(one, "dflash", K)
        scheduler.add_request(make_request(one, "one", range(prompt)))
        (request,) = scheduler.schedule().scheduled_new_reqs
        scheduler.schedule()  # the step of the first drafts, which is scheduled before they are known
        return len(scheduler.kv_cache_manager.get_block_ids(request.req_id)[0]) * BLOCK_SIZE

    needed = prompt + (1 + K) + (1 + K)
    assert slots(**{OFF["lookahead"]: "off"}) < needed
    assert slots() >= needed


class Connector:
    """Of an engine that loads a prompt's KV cache from another one, or sends it there; notes the blocks of both."""

    def __init__(self, loads: bool):
        self.loads = loads
        self.blocks: list[list[int]] = []

    def bind_gpu_block_pool(self, pool: Any) -> None:
        pass

    def on_new_request(self, request: Any) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return (request.num_tokens - computed, True) if self.loads else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self.blocks.append(blocks.get_block_ids()[0])

    def build_connector_meta(self, output: Any) -> None:
        return None

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, None]:
        self.blocks.append(blocks)
        return False, None


@pytest.mark.parametrize("version", versions(*FILES, among=NO_LOOKAHEAD))
@pytest.mark.parametrize("method", ["eagle3", "draft_model", "dflash"])
def test_engines_that_exchange_kv_caches_count_blocks_alike(
    version: str, method: str, modules: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL pairs the blocks of both from the last one on: one more of a prompt on one side shifts them all."""

    def blocks(loads: bool, prompt: int, **choices: str) -> list[int]:
        one, connector = modules(version, **choices), Connector(loads)
        factory = SimpleNamespace(create_connector=lambda **_: connector)
        monkeypatch.setattr(one("vllm.v1.core.sched.scheduler"), "KVConnectorFactory", factory)
        transfer = SimpleNamespace(kv_load_failure_policy="fail", is_kv_consumer=loads, is_kv_producer=not loads)
        scheduler = make_scheduler(one, method, K, kv_transfer_config=transfer)
        scheduler.max_num_scheduled_tokens = 4 * BLOCK_SIZE
        scheduler.add_request(make_request(one, "one", range(prompt)))
        for _ in range(1 + prompt // (4 * BLOCK_SIZE + 1)):
            scheduler.schedule()
        scheduler.finish_requests("one", one("vllm.v1.request").RequestStatus.FINISHED_LENGTH_CAPPED)
        return [len(found) for found in connector.blocks]

    for prompt in (2 * BLOCK_SIZE, 3 * BLOCK_SIZE - 1):
        computed, loaded = (blocks(loads, prompt) for loads in (False, True))
        assert computed == [-(-prompt // BLOCK_SIZE)] * 2
        assert loaded[0] == computed[-1]
    # In pieces vLLM counts drafts from the second on, without DFlash's slot.
    in_pieces = 6 * BLOCK_SIZE - K
    assert blocks(False, in_pieces) == blocks(False, in_pieces, **{OFF["lookahead"]: "off"})


# -- backport-padded-request ------------------------------------------------------------------------------------------


def beside_a_running_request(modules: Any, max_model_len: int, prompt: int) -> dict[str, int]:
    """What is scheduled of a request when all but the last token of its prompt is cached and another one runs."""
    scheduler = make_scheduler(modules, "draft_model", K, max_model_len=max_model_len)
    scheduler.add_request(make_request(modules, "before", range(prompt)))
    scheduler.schedule()
    scheduler.finish_requests("before", modules("vllm.v1.request").RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request(modules, "running", range(100, 105)))
    scheduler.schedule()
    scheduler.add_request(make_request(modules, "new", range(prompt)))
    return scheduler.schedule()


@pytest.mark.parametrize("version", versions(*FILES, among=PADS))
@pytest.mark.parametrize(("room", "stock", "patched"), [(1 + K + 1, 1 + K, 1 + K), (1 + K, 1 + K, 1), (K, None, 1)])
def test_padding_leaves_room_for_the_sampled_token(
    version: str, room: int, stock: int | None, patched: int, modules: Callable[..., Any]
) -> None:
    prompt = 4 * BLOCK_SIZE + 1
    for choices, expected in (({OFF["padding"]: "off"}, stock), ({}, patched)):
        output = beside_a_running_request(modules(version, **choices), prompt - 1 + room, prompt)
        assert "running" in output.num_scheduled_tokens
        assert output.num_scheduled_tokens.get("new") == expected
        drafts = len(output.scheduled_spec_decode_tokens.get("new", ()))
        assert drafts == (expected or 1) - 1


@pytest.mark.parametrize("version", versions(*FILES, among=PADS))
def test_placeholders_that_are_cut_are_dropped(version: str, modules: Callable[..., Any]) -> None:
    """The prompt's KV cache came from elsewhere; its last token is computed here, and ends a Mamba block."""

    def rows(**choices: str) -> tuple[int, int]:
        one = modules(version, **choices)
        scheduler = make_scheduler(one, "draft_model", K)
        scheduler.add_request(make_request(one, "running", range(100, 105)))
        scheduler.schedule()
        scheduler.need_mamba_block_aligned_split = True
        request = make_request(one, "new", range(2 * BLOCK_SIZE))
        scheduler.kv_cache_manager.allocate_slots(request, request.num_tokens - 1)
        request.num_computed_tokens = request.num_tokens - 1
        scheduler.add_request(request)
        output = scheduler.schedule()
        return output.num_scheduled_tokens["new"], 1 + len(output.scheduled_spec_decode_tokens.get("new", ()))

    tokens, sampled = rows(**{OFF["padding"]: "off"})
    assert (tokens, sampled) == (1, 1 + K)
    assert rows() == (1, 1)


# -- backport-mamba-hit -----------------------------------------------------------------------------------------------


def uncached_keys(modules: Any) -> int:
    """How many blocks of keys and values of a prefix that counts as cached are not the first request's."""
    cache = Off(num_gpu_blocks=64, enable_prefix_caching=True, mamba_cache_mode="align", block_size=BLOCK_SIZE)
    scheduler = make_scheduler(modules, "eagle3", K, hybrid=True, cache_config=cache)
    scheduler.max_num_scheduled_tokens = 2 * BLOCK_SIZE

    def run(name: str, prompt: int) -> tuple[int, list[int]]:
        scheduler.add_request(make_request(modules, name, range(prompt)))
        (request,) = scheduler.schedule().scheduled_new_reqs
        while scheduler.requests[name].num_computed_tokens < prompt:
            scheduler.schedule()
        blocks = scheduler.kv_cache_manager.get_block_ids(name)[0]
        scheduler.finish_requests(name, modules("vllm.v1.request").RequestStatus.FINISHED_ABORTED)
        return request.num_computed_tokens // BLOCK_SIZE, blocks

    # The first prompt is computed in pieces of two blocks, and the Mamba state behind each piece is cached.
    _, first = run("first", 9 * BLOCK_SIZE + 1)
    computed, second = run("second", 6 * BLOCK_SIZE + 1)
    assert computed > 0
    return sum(ours != theirs for ours, theirs in zip(second[:computed], first, strict=False))


@pytest.mark.parametrize("version", versions(*FILES, among=BEFORE_29))
def test_a_cached_prefix_has_keys_and_values(version: str, modules: Callable[..., Any]) -> None:
    assert uncached_keys(modules(version, **{OFF["hit"]: "off"})) == (version in GROWS_HITS)
    assert uncached_keys(modules(version)) == 0
