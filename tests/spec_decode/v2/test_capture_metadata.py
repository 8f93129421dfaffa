"""What the kernels of a draft's first pass find while they are captured, in versions with the fault."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.frozen import capture_metadata
from vllm_hwplugin.spec_decode import graph_recording

from .released_modules import STAND_INS, by_the_host
from .speculators import DEVICE, HIDDEN, MAX_LEN, MAX_REQS, Runner, Views

K = 3


class Schedule(Views):
    """Derives the number of requests, into a tensor of its own, as FlashAttention 3 does with its schedule."""

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        plan = self.plan[: len(seq_lens)]
        plan.fill_(len(seq_lens))
        return plan


def captures_of(modules, version: str, monkeypatch: pytest.MonkeyPatch, **choices: str) -> list[tuple[int, int]]:
    """Of each run of the draft's first pass in `capture_model`: its requests, and those of the schedule it reads."""
    loaded = modules(version, **choices)
    made = Runner(loaded, version, Schedule(), K, first_pass=True)
    shapes = loaded("cudagraph_utils")
    monkeypatch.setattr(capture_metadata, "prepare_inputs_to_capture", shapes.prepare_inputs_to_capture)
    speculator, found = made.speculator, []
    speculator.model_state.prepare_dummy_inputs = lambda *args: {}
    shapes.set_forward_context = lambda *args, **kwargs: contextlib.nullcontext()

    def first_pass(num_reqs: int, num_tokens: int, attn_metadata: Any, *_: Any, **__: Any) -> None:
        with by_the_host():
            found.extend((num_reqs, int(one.lengths[0])) for one in attn_metadata.values())

    name = "_prefill" if hasattr(speculator, "_prefill") else "prefill"
    monkeypatch.setattr(speculator, name, first_pass)
    speculator.decode_cudagraph_manager.capture = lambda *args, **kwargs: None
    target = shapes.ModelCudaGraphManager(made.config, DEVICE, CUDAGraphMode.FULL_DECODE_ONLY, K + 1)
    runner = types.SimpleNamespace(
        cudagraph_manager=target,
        speculator=speculator,
        model=lambda input_ids, **_: torch.zeros(len(input_ids), HIDDEN),
        model_state=speculator.model_state,
        input_buffers=speculator.input_buffers,
        intermediate_tensors=None,
        block_tables=made.block_tables,
        attn_groups=speculator.attn_groups,
        kv_cache_config=speculator.kv_cache_config,
        max_num_reqs=MAX_REQS,
        max_model_len=MAX_LEN,
        lora_config=None,
        device=DEVICE,
        use_aux_hidden_state_outputs=False,
        maybe_setup_dummy_loras=lambda config: contextlib.nullcontext(),
        tail_graphs=types.SimpleNamespace(capture=lambda: None),
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    for where, name in ((torch.cuda, "mem_get_info"), (torch.accelerator, "get_memory_info")):
        monkeypatch.setattr(where, name, lambda: (0, 0))
    monkeypatch.setattr(graph_recording, "graph_capture", STAND_INS["graph_capture"])
    loaded("model_runner").GPUModelRunner.capture_model(runner)
    assert set(speculator.prefill_cudagraph_manager.graphs) == set(target.graphs)
    return found


@pytest.mark.parametrize("version", ["0.21.0", "0.25.1"])
def test_each_shape_has_metadata_of_its_own(modules, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    stock = captures_of(modules, version, monkeypatch, VLLM_HWPLUGIN_V2_CAPTURE_METADATA="off")
    assert any(requests != read for requests, read in stock)
    patched = captures_of(modules, version, monkeypatch)
    assert [requests for requests, _ in patched] == [requests for requests, _ in stock]
    assert all(requests == read for requests, read in patched)
