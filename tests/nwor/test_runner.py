# SPDX-License-Identifier: Apache-2.0
"""What a model runner calls, in its order: its KV cache is made, batches run, and some of their drafts are rejected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from vllm_hwplugin.nwor import runner as nwor  # noqa: E402

from .configs import config  # noqa: E402
from .host_kernels import kernels  # noqa: E402

BLOCKS, TOKENS, HEADS, SIZE, DRAFTS = 4, 16, 2, 8, 3


class Backend:
    """Of a cache as vLLM has it from 0.29 on."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = torch.rand(BLOCKS, HEADS, TOKENS, 2 * SIZE)

    def get_attn_backend(self) -> type[Backend]:
        return Backend


class Model(torch.nn.Module):
    """Writes each token of a batch where it is mapped: a layer of each KV cache group."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention() for _ in runner.block_tables.slot_mappings)
        self._slots = runner.block_tables.slot_mappings

    @property
    def attention(self) -> Any:
        return self.layers[0]

    def forward(self, positions: Any) -> None:
        for layer, mapping in zip(self.layers, self._slots, strict=True):
            slots = mapping[: positions.shape[-1]]
            for slot in slots[slots >= 0].tolist():
                layer.kv_cache[slot // TOKENS, :, slot % TOKENS] = torch.rand(HEADS, 2 * SIZE)


class Runner:
    """What is read of a `GPUModelRunner` of V2."""

    def __init__(self, groups: int = 1, position_dims: int = 1, **changed: Any) -> None:
        self.device, self.max_num_reqs = torch.device("cpu"), 4
        self._position_dims = position_dims
        self.block_tables = SimpleNamespace(slot_mappings=torch.full((groups, 64), -1))
        self.input_buffers = SimpleNamespace(query_start_loc=torch.zeros(5, dtype=torch.int32))
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
        self.model = Model(self)
        layers = {"layer" if not group else f"layer {group}": one for group, one in enumerate(self.model.layers)}
        made = [SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name in layers]
        self.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=made)
        self.vllm_config = config(static_forward_context=layers, **changed)

    def get_model(self) -> Model:
        return self.model

    def cache(self, group: int = 0) -> Any:
        return self.model.layers[group].kv_cache.clone()

    def run(self, slots: list[list[int]]) -> None:
        """A batch of requests with these slots; each further group has them in the opposite order."""
        flat = torch.tensor([slot for request in slots for slot in request])
        ends = torch.tensor([len(request) for request in slots]).cumsum(0)
        self.input_buffers.query_start_loc[1:] = len(flat)
        self.input_buffers.query_start_loc[1 : len(slots) + 1] = ends
        self.block_tables.slot_mappings.fill_(-1)
        for group, mapping in enumerate(self.block_tables.slot_mappings):
            mapping[: len(flat)] = flat.flip(0) if group % 2 else flat
        self.model(positions=torch.zeros((self._position_dims, len(flat)) if self._position_dims > 1 else len(flat)))


def attached(*given: Any, **more: Any) -> Runner:
    runner = Runner(*given, **more)
    nwor.attach(runner)
    return runner


def numbers(*rejected: int) -> Any:
    return torch.tensor(rejected, dtype=torch.int32)


def taken_out(runner: Runner, before: Any, slots: list[int], group: int = 0) -> Any:
    """What the cache holds now, but for these slots, which hold what they did before."""
    expected = runner.cache(group)
    for slot in slots:
        expected[slot // TOKENS, :, slot % TOKENS] = before[slot // TOKENS, :, slot % TOKENS]
    return expected


@pytest.fixture
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_NWOR_MODE", "restore")


@pytest.fixture
def checked(restoring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_NWOR_DEBUG_SYNC", "1")


def test_batches_without_drafts_between_others_leave_nothing_to_put_back(restoring: None) -> None:
    """A prompt and a step without drafts are written to stay; what was kept for them must not come back later."""
    runner = attached()
    runner.run([list(range(16, 26)), [40, 41, 42, 43]])
    nwor.restore(runner, num_rejected=numbers(0, 0), num_draft_tokens=0)
    written = runner.cache()
    runner.run([[26], [44]])
    nwor.restore(runner, num_rejected=numbers(0, 0), num_draft_tokens=0)
    before = runner.cache()
    assert torch.equal(taken_out(runner, written, [26, 44]), written)
    # The second request has more drafts than it had room for, the first none.
    runner.run([[27], [45, 46, 47]])
    expected = taken_out(runner, before, [46, 47])
    nwor.restore(runner, num_rejected=numbers(0, 2), num_draft_tokens=2)
    assert torch.equal(runner.cache(), expected)


def test_a_cache_that_is_made_again_is_the_one_that_is_restored(restoring: None) -> None:
    """vLLM measures graphs with a small cache first, which is given up with all that refers to it."""
    runner = Runner()
    nwor.attach(runner, is_profiling=True)
    assert not runner.model._forward_pre_hooks
    for _ in range(2):
        runner.model.attention.kv_cache = torch.rand(BLOCKS, HEADS, TOKENS, 2 * SIZE)
        nwor.attach(runner)
        before = runner.cache()
        runner.run([[16, 17, 18, 19]])
        expected = taken_out(runner, before, [18, 19])
        nwor.restore(runner, num_rejected=numbers(2), num_draft_tokens=3)
        assert torch.equal(runner.cache(), expected)
    assert len(runner.model._forward_pre_hooks) == 1


def test_a_cache_that_is_measured_with_is_not_written_to(restoring: None) -> None:
    runner = attached()
    runner.run([[16, 17, 18, 19]])
    nwor.attach(runner, is_profiling=True)
    written = runner.cache()
    nwor.restore(runner, num_rejected=numbers(3), num_draft_tokens=3)
    assert torch.equal(runner.cache(), written)


def test_each_group_has_its_own_slots_and_positions_may_have_several_dimensions(restoring: None) -> None:
    runner = attached(groups=2, position_dims=3)
    before = [runner.cache(group) for group in range(2)]
    requests = [[16, 17, 18, 19], [24, 25], [33, 34], [40, 41, 42]]
    runner.run(requests)
    flat = [slot for request in requests for slot in request]
    # The last draft of the first request, and both of the fourth.
    tokens = [3, 9, 10]
    expected = [
        taken_out(runner, before[0], [flat[token] for token in tokens], 0),
        taken_out(runner, before[1], [flat[::-1][token] for token in tokens], 1),
    ]
    nwor.restore(runner, num_rejected=numbers(1, 0, 0, 2), num_draft_tokens=7)
    assert all(torch.equal(runner.cache(group), expected[group]) for group in range(2))


def test_a_batch_without_drafts_has_no_count_of_what_was_rejected(restoring: None) -> None:
    runner = attached()
    runner.run([[16]])
    nwor.restore(runner, num_rejected=None, num_draft_tokens=0)


def test_zeros_are_what_is_checked_where_nothing_is_kept(checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_NWOR_MODE", "scrub")
    runner = attached()
    runner.run([[16, 17, 18, 19]])
    nwor.restore(runner, num_rejected=numbers(2), num_draft_tokens=3)
    assert not runner.cache()[1, :, 2:4].any()
    runner.run([[16, 17, 18, 19]])
    with pytest.raises(nwor.NotRestored, match=r"layer does not hold zeros at slot 18"):
        nwor.replayed(runner, numbers(2))


def test_a_capture_waits_for_nothing(checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured nothing has happened yet that could be compared."""
    runner = attached()
    monkeypatch.setattr(nwor, "is_capturing", lambda device: True)
    with mock.patch.object(nwor.ReferenceRows, "differing", side_effect=RuntimeError("waits for the device")):
        runner.run([[16, 17, 18, 19]])
        nwor.restore(runner, num_rejected=numbers(2), num_draft_tokens=3)


@pytest.mark.parametrize("made_of", [{"num_rejected": [2]}, {"sampled": [[7, 8, -1, -1]], "ends": [3]}])
def test_kernels_get_numbers_of_32_bits(
    made_of: dict[str, Any], restoring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that were sharded and gathered have them in 64."""
    monkeypatch.setattr(nwor, "kernels_for", lambda device: True)
    runner = attached()
    before = runner.cache()
    with kernels():
        runner.run([[16, 17, 18, 19]])
        expected = taken_out(runner, before, [18, 19])
        if "num_rejected" in made_of:
            nwor.restore(runner, num_rejected=torch.tensor(made_of["num_rejected"]), num_draft_tokens=3)
        else:
            output = SimpleNamespace(sampled_token_ids=torch.tensor(made_of["sampled"]))
            nwor.restore_sampled(runner, SimpleNamespace(cu_num_draft_tokens=torch.tensor(made_of["ends"])), output)
    assert torch.equal(runner.cache(), expected)


def test_a_draft_that_a_graph_has_not_taken_out_ends_the_step(checked: None) -> None:
    runner = attached()
    runner.run([[16, 17, 18, 19]])
    nwor.restore(runner, num_rejected=numbers(1), num_draft_tokens=3)
    nwor.replayed(runner, numbers(1))
    runner.run([[19, 33, 34, 35]])
    with pytest.raises(nwor.NotRestored, match=r"layer does not hold .* at slot 34 \(block 2, token 2\): .* 1 other"):
        nwor.replayed(runner, numbers(2))


def test_an_engine_that_keeps_rejected_drafts_serves_as_stock(restoring: None, notes: dict[str, str]) -> None:
    runner = attached(pipeline_parallel_size=2)
    runner.run([[16, 17, 18, 19]])
    written = runner.cache()
    nwor.restore(runner, num_rejected=numbers(3), num_draft_tokens=3)
    assert torch.equal(runner.cache(), written)
    assert notes["nwor"] == "rejected drafts stay in the KV cache: pipeline parallelism: only the last stage samples"
