# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with Model Runner V1 on the host, as `v2.scheduled_runner` has it with V2."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.compilation import cuda_graph
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler

from vllm_hwplugin import patching, spec_decode
from vllm_hwplugin.spec_decode import v1

from ..released import Modules, texts
from .engines import BLOCK, DEVICE, BlockModel, Engine
from .v2 import scheduled_runner
from .v2.released_modules import TRITON_UTILS

#: The runner, the drafter, and what has kernels.
OWN = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.block_table",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.spec_decode.dflash",
    "vllm.v1.spec_decode.llm_base_proposer",
    "vllm.v1.spec_decode.utils",
    "vllm.v1.sample.rejection_sampler",
)
RUNNER, *_ = OWN
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
DFLASH = "vllm.v1.spec_decode.dflash"
#: What takes a device, a checkpoint or a process group.
STAND_INS: dict[str, Any] = {
    **{
        name: scheduled_runner.STAND_INS[name]
        for name in (
            *("create_offloader", "set_offloader", "DeviceMemoryProfiler", "graph_capture"),
            *("freeze_gc_for_cudagraph_capture", "lock_workspace", "apply_top_k_top_p"),
        )
    },
    "get_pp_group": lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, ranks=[0]),
    "get_tp_group": lambda: types.SimpleNamespace(world_size=1, rank_in_group=0),
    "get_world_group": lambda: types.SimpleNamespace(local_rank=0),
    "DFlashQwen3ForCausalLM": BlockModel,
    "supports_eagle3": lambda model: True,
    # Up to 0.22 the runner asks.
    "num_compute_units": lambda device: 1,
}


def modules_of(tree: Any, monkeypatch: pytest.MonkeyPatch, **choices: str) -> Modules:
    """Those of `OWN` in one version, with kernels that run on the host.

    Args:
        tree: its text.
        monkeypatch: for what the installed vLLM does with graphs, and torch with functions to compile.
        choices: gate -> value; by default every feature is on.
    """
    monkeypatch.setattr(type(current_platform), "graph_pool_handle", lambda _: object(), raising=False)
    monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda function: function)
    # DFlash's drafter asks for the plugin's patches, which this process's vLLM lacks.
    monkeypatch.setattr(patching, "install", lambda: None)
    # As on a device; a CPU has a kernel of its own from 0.33 on.
    monkeypatch.setattr(Sampler, "greedy_sample", staticmethod(lambda logits: logits.argmax(dim=-1).view(-1)))
    return Modules(texts(tree, **choices), OWN, given={"vllm.triton_utils": TRITON_UTILS}, stand_ins=STAND_INS)


def read_by_the_plugin(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plugin's modules use what `modules` have of vLLM, not the installed one's."""
    for found in pkgutil.iter_modules([*spec_decode.__path__, *v1.__path__]):
        package = v1 if found.module_finder.path in v1.__path__ else spec_decode  # type: ignore[union-attr]
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        for name, value in list(vars(module).items()):
            if (origin := getattr(value, "__module__", None)) in OWN:
                monkeypatch.setattr(module, name, getattr(modules.load(origin), name))
            elif name == "graph_capture":
                monkeypatch.setattr(module, name, STAND_INS[name])
            elif name == "set_forward_context":
                # It is set when there is a runner.
                monkeypatch.setattr(
                    module,
                    name,
                    lambda *args, **given: vars(modules.load(PROPOSER))["set_forward_context"](*args, **given),
                )


class Side(Engine):
    """vLLM of `modules` with its models, its KV cache and its graphs.

    Attributes:
        native: whether torch samples within top-k and top-p, not FlashInfer.
    """

    native = True

    def __init__(self, modules: Modules, **how: bool) -> None:
        super().__init__(**how)
        self.config.use_v2_model_runner = False
        for name in (RUNNER, PROPOSER, DFLASH):
            vars(modules.load(name))["set_forward_context"] = self.context
        target, draft = self.models
        runner = self.runner = modules.load(RUNNER).GPUModelRunner(self.config, DEVICE)
        # As on a device.
        sampler = runner.sampler.topk_topp_sampler
        sampler.forward = sampler.forward_native if self.native else lambda *given: sampler.forward_native(*given)
        runner._freeze_gc = contextlib.nullcontext
        # As a published DFlash draft has it.
        runner.drafter.dflash_causal = False
        runner.drafter.load_model = lambda _: vars(runner.drafter).update(
            model=draft, _draft_attn_layer_names={"draft"}
        )
        vars(modules.load(RUNNER))["get_model_loader"] = scheduled_runner.loader_of(target)
        runner.load_model()
        runner.initialize_kv_cache_tensors = lambda *_, **__: {}
        self.start()

    def start(self) -> None:
        """Begin with a KV cache, and capture graphs."""
        self.runner.initialize_kv_cache(self.kv_cache_config)
        self.runner._kv_block_zeroer = self
        self.runner.capture_model()

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """While it lasts the target has none."""
        dispatcher = self.runner.cudagraph_dispatcher
        before, dispatcher.cudagraph_mode = dispatcher.cudagraph_mode, CUDAGraphMode.NONE
        try:
            yield
        finally:
            dispatcher.cudagraph_mode = before

    def restart(self) -> None:
        super().restart()
        runner = self.runner
        for name in list(runner.requests):
            runner.input_batch.remove_request(name)
            del runner.requests[name]
        runner.input_batch.condense()
        runner.input_batch.refresh_metadata()
        runner.input_batch.prev_sampled_token_ids = runner.input_batch.prev_req_id_to_index = None
        runner.input_batch.sampled_token_ids_cpu = None
        runner._draft_token_ids = runner._draft_probs = None
        runner._draft_prob_req_ids = runner._draft_token_req_ids = None

    def inputs(self) -> dict[str, Any]:
        runner, tokens = self.runner, self.scheduled.total_num_scheduled_tokens
        batch = runner.input_batch
        table = batch.block_table[0]
        return {
            "requests": batch.req_ids,
            "token ids": runner.input_ids.gpu[:tokens].tolist(),
            "positions": runner.positions[:tokens].tolist(),
            # Padding has no length.
            "lengths": runner.seq_lens.tolist(),
            "starts": runner.query_start_loc.gpu.tolist(),
            # What layers with a recurrent state go on from.
            "accepted": runner.num_accepted_tokens.gpu[: batch.num_reqs].tolist(),
            "blocks": [
                table.block_table.gpu[row, : table.num_blocks_per_row[row]].tolist() for row in range(batch.num_reqs)
            ],
            "slots": table.slot_mapping.gpu[:tokens].tolist(),
        }

    def state(self) -> dict[str, Any]:
        """What the runner holds of each request, and its keys of the tokens that were computed before this step."""
        runner, batch = self.runner, self.runner.input_batch
        drafts, tables = runner._draft_token_ids, batch.block_table.block_tables
        table, *recurrent = (one.block_table.gpu for one in tables)
        found: dict[str, Any] = {"drafts": drafts.tolist() if isinstance(drafts, torch.Tensor) else drafts}
        for row, name in enumerate(batch.req_ids):
            places = torch.arange(int(runner.num_computed_tokens[row]))
            slots = table[row, places // BLOCK] * BLOCK + places % BLOCK
            found[name] = len(places), [model.kv[slots].tolist() for model in self.models]
            # Where a layer has states, that behind the last accepted token.
            accepted = int(runner.num_accepted_tokens.gpu[row])
            found[name] += tuple(self.models[0].states[blocks[row, accepted - 1]].tolist() for blocks in recurrent)
        return found
