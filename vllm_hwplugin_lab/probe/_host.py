# SPDX-License-Identifier: Apache-2.0
"""A backend on this process's device: what it declares of a trial, and what it does with a case."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_hwplugin.errors import HwpluginError

from ._cases import BLOCK_SIZES, DTYPES, Case, Plain, Request, Trial
from ._session import Declared
from ._step import Step
from ._trial import refusals
from ._vllm import configuration, device, layer_of, measured
from .inputs import make_inputs, poison
from .reference import Measure

_LONGEST_ON_GPU = 2000
#: Enough that kernels split the keys of a decode among multiprocessors.
_DEEPEST_ON_GPU = 8000
#: Head sizes that some backend of every kind declares, tried in this order for the plain batch.
_PLAIN_HEAD_SIZES = (64, 128, 256, 512)
#: What vLLM's `AttentionCGSupport` has to say for a batch to be replayed.
_GRAPHS = {
    "decode": ("UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"),
    "verify": ("UNIFORM_BATCH", "ALWAYS"),
    "mixed": ("ALWAYS",),
}


class NoPlainBatch(HwpluginError, RuntimeError):
    """A backend declares no usual head size and dtype, so that nothing can be tried on it."""


class LayerHost:
    """Runs cases through one class of vLLM's ``AttentionBackend`` on this process's device.

    Raises:
        NoPlainBatch: see there.
    """

    def __init__(self, backend: type[Any]) -> None:
        self.backend = backend
        self.device = device()
        self.plain = self._plain()

    def can_try(self, trial: Trial) -> bool:
        """Whether this process has what a trial needs: graphs are of CUDA devices alone."""
        return "graph" not in trial.settings or bool(self.device.type == "cuda")

    def declared(self, trial: Trial, case: Case) -> Declared:
        """What the class says about a trial; ``case`` is one of the trial's."""
        with configuration(self.backend, case):
            if not self._kernel_takes(case.block_size) or self._reasons(case):
                return "no"
        if trial.capability in ("captured", "padded_batch"):
            with layer_of(self.backend, case, self.device) as layer:
                support = self.backend.get_builder_cls().get_cudagraph_support(layer.config, layer.spec)
            return "yes" if support.name in _GRAPHS[trial.settings.get("graph", "decode")] else "no"
        unasked = case.sliding_window is not None and "has_sliding_window" not in AttentionSelectorConfig._fields
        return "unasked" if unasked or trial.capability in ("group", "softcap", "alibi") else "yes"

    def run(self, case: Case) -> Measure:
        """Run a case and measure its worst answer.

        Raises:
            Refused: the backend does not take it.
            Exception: a fault of the backend or of the probe.
        """
        turns = [case]
        if case.graph:
            turns = [
                dataclasses.replace(case, requests=rows, padding=len(case.graph) - len(rows), seed=case.seed + turn)
                for turn, rows in enumerate((case.requests, *case.replays))
            ]
        contents = [make_inputs(turn, self.device) for turn in turns]
        columns = max(one.block_table.shape[1] for one in contents)
        num_blocks = max(one.num_blocks for one in contents)
        found = []
        with layer_of(self.backend, case, self.device, contents[0], num_blocks) as layer:
            with refusals():
                step = Step(layer, case, columns, self.device)
            for turn, inputs in zip(turns, contents, strict=True):
                with refusals():
                    poison(layer.cache, turn.seed)
                    output = step.run(turn, inputs)
                    self.check()
                found.append(measured(turn, inputs, output, layer.rounds_query))
        return max(found, key=lambda one: one.ratio)

    def check(self) -> None:
        """Wait for the device; a fault of a kernel that ran before is raised here, and not in some later case."""
        if self.device.type != "cpu":
            torch.zeros(1, device=self.device).add_(1).item()

    def _reasons(self, case: Case) -> list[str]:
        """Why the class says no, asked as platforms ask it."""
        window = case.sliding_window is not None
        asked = {"has_sink": case.sinks, "use_non_causal": not case.causal, "has_sliding_window": window}
        known = {name: value for name, value in asked.items() if name in AttentionSelectorConfig._fields}
        dtype = getattr(torch, case.dtype)
        question = AttentionSelectorConfig(case.head_size, dtype, case.kv_cache_dtype, block_size=None, **known)
        capability = current_platform.get_device_capability()
        return list(self.backend.validate_configuration(device_capability=capability, **question._asdict()))

    def _kernel_takes(self, block_size: int) -> bool:
        sizes = self.backend.get_supported_kernel_block_sizes()
        return any(block_size % one.base == 0 if hasattr(one, "base") else block_size == one for one in sizes)

    def _plain(self) -> Plain:
        on_gpu = {} if self.device.type == "cpu" else {"longest": _LONGEST_ON_GPU, "deepest": _DEEPEST_ON_GPU}
        for dtype in ("bfloat16", *DTYPES):
            for head_size in _PLAIN_HEAD_SIZES:
                case = Case((Request(1, 1),), dtype, "auto", head_size, 1, 1, 16)
                # Some of a class's answers depend on the current configuration.
                with configuration(self.backend, case):
                    block_size = next((size for size in BLOCK_SIZES if size >= 16 and self._kernel_takes(size)), None)
                    if block_size and not self._reasons(dataclasses.replace(case, block_size=block_size)):
                        return Plain(dtype, head_size, block_size, **on_gpu)
        raise NoPlainBatch(
            f"{self.backend.__qualname__} declares no plain decoder attention: head size one of {_PLAIN_HEAD_SIZES}, "
            f"dtype one of {DTYPES}, blocks of one of {BLOCK_SIZES[1:]} tokens"
        )
