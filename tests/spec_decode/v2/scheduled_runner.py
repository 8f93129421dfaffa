# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with Model Runner V2 on the host.

All of it is vLLM's own but the models, what samples, and what takes a device. Target and draft write a key of each
token to the slot that they are given, and read as many keys as the batch's metadata say. So a row, a token, a length,
a slot or a block that is not the request's changes what is sampled or drafted for it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from .. import streams
from ..engines import BLOCK, DEVICE, WINDOW, WINDOW_BLOCK, Engine
from . import released_modules
from .released_modules import RUNNER, ReleasedModules


def pick(
    logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, pos: Any, **_: Any
) -> torch.Tensor:
    """`gumbel_sample`, with other noise: the best token, or one that goes by a request's seed and the position."""
    phase = (seeds[rows] % 1009)[:, None] + 31 * pos[:, None] + 7 * torch.arange(logits.shape[-1])
    noise = 3 * torch.sin(phase * 12.9898)
    return (logits + torch.where(temperature[rows][:, None] == 0, 0.0, noise)).argmax(-1)


def verify(
    logits: torch.Tensor,
    draft_logits: None,
    drafts: torch.Tensor,
    starts: torch.Tensor,
    pos: torch.Tensor,
    rows: torch.Tensor,
    expanded_rows: torch.Tensor,
    local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_speculative_steps: int,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rejection_sample`: a draft is right if it is the token that would be picked."""
    picked, last = pick(logits, expanded_rows, temperature, seeds, pos), len(logits) - 1
    columns, counts = torch.arange(1 + num_speculative_steps), (starts[1:] - starts[:-1])[:, None]
    places = starts[:-1, None] + columns
    tokens = picked[places.clamp(max=last)]
    right = (tokens == drafts[(places + 1).clamp(max=last)]) & (columns + 1 < counts)
    return tokens, (1 + right.int().cumprod(1).sum(1)).int()


def best(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, has_topp_only_rows: bool = True
) -> torch.Tensor:
    """`apply_top_k_top_p`. Where there are said to be none, rows with top-p and without top-k get no top-p."""
    ordered, order = logits.sort(-1, descending=True)
    ranks, probs = torch.arange(logits.shape[-1]), ordered.softmax(-1)
    left_out = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        left_out |= ranks >= top_k[:, None]
    if top_p is not None and top_k is not None and not has_topp_only_rows:
        top_p = top_p.masked_fill(top_k >= logits.shape[-1], 1.0)
    if top_p is not None:
        left_out |= probs.cumsum(-1) - probs >= top_p[:, None]
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(left_out, -torch.inf))


def replace(config: Any, /, **changes: Any) -> Any:
    """`dataclasses.replace`, also of a stand-in for a configuration."""
    if dataclasses.is_dataclass(config):
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
    changed = copy.copy(config)
    vars(changed).update(changes)
    return changed


#: What takes a device or a checkpoint, beside what `released_modules` has.
STAND_INS: dict[str, Any] = {
    **released_modules.STAND_INS,
    # The tree is that of the vLLM that is imported.
    "CommonAttentionMetadata": CommonAttentionMetadata,
    "create_offloader": lambda config: None,
    "set_offloader": lambda offloader: None,
    "DeviceMemoryProfiler": lambda: contextlib.nullcontext(types.SimpleNamespace(consumed_memory=0)),
    "freeze_gc_for_cudagraph_capture": contextlib.nullcontext,
    "lock_workspace": lambda: None,
    "use_workspace_lane": lambda lane: contextlib.nullcontext(),
    "init_kv_cache": lambda *_, **__: {},
    "gumbel_sample": pick,
    "rejection_sample": verify,
    "apply_top_k_top_p": best,
    "current_stream": lambda: torch.cuda.current_stream(),
    "replace": replace,
    "set_eagle3_aux_hidden_state_layers": lambda *_, **__: None,
    "async_copy_to_np": lambda tensor: streams.copied(tensor).numpy(),
}


def loader_of(model: torch.nn.Module) -> Callable[[Any], Any]:
    """`get_model_loader`, of which each loads this model."""
    return lambda config: types.SimpleNamespace(load_model=lambda **_: model)


def read_by_the_plugin(modules: ReleasedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plugin's modules use what `modules` have of Model Runner V2, not the installed vLLM's."""
    # V1's runner takes stand-ins from here, also where vLLM is too old for these.
    from vllm_hwplugin.spec_decode import graph_recording
    from vllm_hwplugin.spec_decode.v2 import mixed_graphs, recording, step_inputs, tail_capture, tail_graph

    for module in (mixed_graphs, recording, step_inputs, tail_capture):
        for name, value in list(vars(module).items()):
            origin = getattr(value, "__module__", None) or ""
            if origin.startswith(f"{RUNNER}."):
                monkeypatch.setattr(module, name, getattr(modules.load(origin), name))
    for module in (tail_graph, graph_recording):
        monkeypatch.setattr(module, "graph_capture", STAND_INS["graph_capture"])
    # The sampler here has them in every release.
    monkeypatch.setattr(tail_graph, "splits_top_p", lambda: True)


class Side(Engine):
    """vLLM of `modules` with its models, its KV cache and its graphs."""

    def __init__(self, modules: ReleasedModules, **how: Any) -> None:
        super().__init__(**how)
        # Up to 0.31 some have other names.
        drafters = ("target_dependent_ar", "autoregressive", "dflash", "standalone_ar", "draft_model")
        for name in ("model_runner", "cudagraph_utils", *(f"spec_decode.{one}.speculator" for one in drafters)):
            if modules.has(f"{RUNNER}.{name}"):
                vars(modules(name))["set_forward_context"] = self.context
        target, *drafts = self.models
        vars(modules("model_runner"))["get_model_loader"] = loader_of(target)
        runner = self.runner = modules("model_runner").GPUModelRunner(self.config, DEVICE)
        for draft in drafts:
            draft.plans = True
            runner.speculator.load_draft_model = lambda *_, draft=draft: draft
        runner.load_model()
        if drafts:
            runner.speculator.draft_attn_layer_names = {"draft"}
        runner.initialize_kv_cache(self.kv_cache_config)
        runner.kv_block_zeroer = self
        self.capture()

    def capture(self) -> None:
        """What comes last of a start."""
        self.runner.capture_model()

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """While it lasts the target has none, as after a change of the ranks of experts."""
        manager = self.runner.cudagraph_manager
        manager._graphs_captured = False
        try:
            yield
        finally:
            manager._graphs_captured = True

    def restart(self) -> None:
        super().restart()
        states = self.runner.req_states
        for name in list(states.req_id_to_index):
            self.runner._remove_request(name)
        states.free_indices.sort()

    def inputs(self) -> dict[str, Any]:
        buffers, tables, batch = self.runner.input_buffers, self.runner.block_tables, self.executed.input_batch
        padded, blocks = batch.num_reqs_after_padding, tables.num_blocks.np[:, batch.idx_mapping_np]
        return {
            "token ids": buffers.input_ids[: batch.num_tokens].tolist(),
            "positions": buffers.positions[: batch.num_tokens].tolist(),
            # Padding has no length and no slots.
            "lengths": buffers.seq_lens[:padded].tolist(),
            "starts": buffers.query_start_loc[: padded + 1].tolist(),
            "blocks": [
                row[:count].tolist()
                for table, counts in zip(tables.input_block_tables, blocks, strict=True)
                for row, count in zip(table, counts, strict=False)
            ],
            "slots": tables.slot_mappings[:, : batch.num_tokens_after_padding].tolist(),
        }

    def state(self) -> dict[str, dict[str, Any]]:
        """What the runner holds of each request: its row, and its keys of the tokens that are computed."""
        states, found = self.runner.req_states, {}
        names = [group.layer_names[0] for group in self.kv_cache_config.kv_cache_groups]
        tables = {name: one.gpu for name, one in zip(names, self.runner.block_tables.block_tables, strict=True)}
        table = tables["target"]
        for name, row in states.req_id_to_index.items():
            computed, length = (int(one.gpu[row]) for one in (states.num_computed_tokens, states.total_len))
            places = torch.arange(computed)
            slots = table[row, places // BLOCK] * BLOCK + places % BLOCK
            found[name] = {
                "computed": computed,
                "tokens": states.all_token_ids.gpu[row, :length].tolist(),
                "last": states.last_sampled_tokens[row].tolist(),
                "drafts": states.draft_tokens[row].tolist(),
                "keys": [model.kv[slots].tolist() for model in self.models],
            }
            if "window" in tables:
                # Blocks before the window are another request's.
                places = places[max(0, computed - WINDOW + 1) :]
                slots = tables["window"][row, places // WINDOW_BLOCK] * WINDOW_BLOCK + places % WINDOW_BLOCK
                found[name]["window"] = self.models[0].window_kv[slots].tolist()
            if "recurrent" in tables:
                accepted = int(self.runner.model_state.num_accepted_tokens_gpu[row])
                state = self.models[0].states[tables["recurrent"][row, accepted - 1]]
                found[name]["state"] = accepted, state.tolist()
        return found
