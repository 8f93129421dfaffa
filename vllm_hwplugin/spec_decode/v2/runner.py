# SPDX-License-Identifier: Apache-2.0
"""Override methods of vLLM's `GPUModelRunner` with graphs, by one hunk that decorates the class.

A subclass replaces the class, so another plugin's subclass overrides these methods. They call vLLM's methods by
`super()`. The `[[overrides]]` of `patch.toml` name each method, its callers and their order. A method has vLLM's
parameter names, because callers use keywords.

This module imports nothing of vLLM: the module that defines the class imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from vllm_hwplugin.spec_decode.v2.methods import put_before

#: Attributes that locate a class's source. `__wrapped__` is not used, because subclasses would inherit it.
_DEFINED: Final = ("__name__", "__qualname__", "__module__", "__doc__", "__firstlineno__")


def with_tail_graphs(vllms: Any) -> Any:
    """Return a subclass that samples and drafts by its `tail_graphs`."""
    # Up to 0.25 a hunk calls the capture, because `v2-capture-metadata` replaces vLLM's capture of the draft there.
    captures = "tail_graphs" not in inspect.unwrap(vllms.capture_model).__code__.co_names

    class TailGraphRunner(vllms):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any):
            super().__init__(vllm_config, device)
            from .tail_graph import TailGraphs

            self.tail_graphs = TailGraphs(self, super())
            if self.speculator is not None:
                put_before(self.speculator, "propose", self._propose)
                if captures:
                    put_before(self.speculator, "capture", self._capture)

        def initialize_kv_cache(self, *arguments: Any, **settings: Any) -> None:
            super().initialize_kv_cache(*arguments, **settings)
            if self.speculator is None and captures:
                put_before(self.cudagraph_manager, "capture", self._capture)

        def add_requests(self, scheduler_output: Any) -> None:
            super().add_requests(scheduler_output)
            for request in scheduler_output.scheduled_new_reqs if self.is_last_pp_rank else ():
                if request.sampling_params is not None:
                    row = self.req_states.req_id_to_index[request.req_id]
                    self.tail_graphs.add_request(row, request.sampling_params)

        def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            return self.tail_graphs.sample(hidden_states, input_batch, grammar_output)

        def postprocess_sampled(self, *arguments: Any, **settings: Any) -> None:
            self.tail_graphs.postprocess_sampled(*arguments, **settings)

        def _propose(self, vllms: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
            # Looked up at each call: a benchmark puts a probe there.
            return self.tail_graphs.propose(vllms, *arguments, **settings)

        def _capture(self, vllms: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
            """Capture after vLLM has captured all, before it measures memory."""
            from .local_argmax import take_local_argmax

            take_local_argmax(self.speculator)
            captured = vllms(*arguments, **settings)
            self.tail_graphs.capture()
            return captured

    made = TailGraphRunner
    # `v2-step-inputs` has no decorator: two hunks cannot insert lines at one place.
    if getattr(vllms, "hwplugin_step_inputs", False):
        made = _with_step_inputs(made)
    # For `inspect`, `pickle` and logs.
    for name in _DEFINED:
        if hasattr(vllms, name):
            setattr(made, name, getattr(vllms, name))
    return made


def _with_step_inputs(tail_graph_runner: Any) -> Any:
    """Return a subclass that makes a step's inputs by its `step_inputs`."""
    # Without `self` and `scheduler_output`. The parameters before `batch_desc` differ by version.
    desc_at = [*inspect.signature(tail_graph_runner.prepare_inputs).parameters].index("batch_desc") - 2

    class StepInputRunner(tail_graph_runner):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any):
            super().__init__(vllm_config, device)
            from .step_inputs import StepInputs

            self.step_inputs = self.tail_graphs.add(StepInputs)

        def initialize_kv_cache(self, *arguments: Any, **settings: Any) -> None:
            super().initialize_kv_cache(*arguments, **settings)
            inputs, state = self.step_inputs, self.model_state
            put_before(self.block_tables, "apply_staged_writes", inputs.apply_blocks)
            if self.sampler is not None:
                put_before(self.sampler, "apply_staged_writes", inputs.apply_sampling)
            put_before(state, "prepare_attn", inputs.prepare_metadata)
            put_before(state, "prepare_inputs", inputs.prepare_model_inputs)
            # 0.29 renamed it.
            for name in ("get_mm_embeddings", "prepare_inputs_embeds"):
                if hasattr(state, name):
                    put_before(state, name, inputs.prepare_embeddings)

        def add_requests(self, scheduler_output: Any) -> None:
            self.step_inputs.begin_step(scheduler_output)
            super().add_requests(scheduler_output)

        def prepare_inputs(self, scheduler_output: Any, *arguments: Any, **settings: Any) -> Any:
            desc = settings["batch_desc"] if "batch_desc" in settings else arguments[desc_at]
            batch = self.step_inputs.steady(scheduler_output, desc)
            return super().prepare_inputs(scheduler_output, *arguments, **settings) if batch is None else batch

        def prepare_attn(self, input_batch: Any) -> Any:
            return self.step_inputs.attention_inputs(input_batch) or super().prepare_attn(input_batch)

    return StepInputRunner
