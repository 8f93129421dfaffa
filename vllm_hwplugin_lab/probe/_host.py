# SPDX-License-Identifier: Apache-2.0
"""A backend on this process's device: its declarations, and its results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_hwplugin.base.errors import HwpluginError

from ._cases import BLOCK_SIZES, DTYPES, Case, Plain, Request, Trial
from ._refusals import refusals
from ._session import Declared
from ._step import Step
from ._vllm import configuration, device, layer_of, measured
from .inputs import make_inputs, poison
from .reference import Measure

_LONGEST_ON_GPU = 2000
#: Long enough that kernels split the keys of a decode among multiprocessors.
_DEEPEST_ON_GPU = 8000
#: Head sizes to try for the plain batch, in this order: each backend declares at least one.
_PLAIN_HEAD_SIZES = (64, 128, 256, 512)
#: Values of vLLM's `AttentionCGSupport` with which a batch can be replayed.
_GRAPHS = {
    "decode": ("UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"),
    "verify": ("UNIFORM_BATCH", "ALWAYS"),
    "mixed": ("ALWAYS",),
}


class NoPlainBatch(HwpluginError, RuntimeError):
    """A backend declares no usual head size and dtype, so it cannot be probed."""


class LayerHost:
    """Run cases through a class of vLLM's ``AttentionBackend`` on this process's device.

    Raises:
        NoPlainBatch: The backend cannot be probed.
    """

    def __init__(self, backend: type[Any]) -> None:
        self.backend = backend
        self.device = device()
        self.plain = self._plain()

    def can_try(self, trial: Trial) -> bool:
        """Whether this process can run a trial: only CUDA devices have graphs."""
        return "graph" not in trial.settings or bool(self.device.type == "cuda")

    def declared(self, trial: Trial, case: Case) -> Declared:
        """Return the class's declaration for a trial; ``case`` is its case."""
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
        """Run a case, and measure its worst output.

        Raises:
            Refused: The backend refuses the case.
            Exception: A bug of the backend or of the probe.
        """
        turns = [case]
        if case.graph:
            turns = [
                dataclasses.replace(case, requests=rows, padding=len(case.graph) - len(rows), seed=case.seed + turn)
                for turn, rows in enumerate((case.requests, *case.replays))
            ]
        contents = [make_inputs(turn, self.device) for turn in turns]
        columns = max(inputs.block_table.shape[1] for inputs in contents)
        num_blocks = max(inputs.num_blocks for inputs in contents)
        measures = []
        with layer_of(self.backend, case, self.device, contents[0], num_blocks) as layer:
            with refusals():
                step = Step(layer, case, columns, self.device)
            for turn, inputs in zip(turns, contents, strict=True):
                with refusals():
                    poison(layer.cache, turn.seed)
                    output = step.run(turn, inputs)
                    self.check()
                measures.append(measured(turn, inputs, output, layer.rounds_query))
        return max(measures, key=lambda measure: measure.ratio)

    def check(self) -> None:
        """Wait for the device, so that a kernel's error is raised here."""
        if self.device.type != "cpu":
            torch.zeros(1, device=self.device).add_(1).item()

    def _reasons(self, case: Case) -> list[str]:
        """Return the class's reasons against a case, asked as platforms ask."""
        window = case.sliding_window is not None
        asked = {"has_sink": case.sinks, "use_non_causal": not case.causal, "has_sliding_window": window}
        known = {name: value for name, value in asked.items() if name in AttentionSelectorConfig._fields}
        dtype = getattr(torch, case.dtype)
        question = AttentionSelectorConfig(case.head_size, dtype, case.kv_cache_dtype, block_size=None, **known)
        capability = current_platform.get_device_capability()
        return list(self.backend.validate_configuration(device_capability=capability, **question._asdict()))

    def _kernel_takes(self, block_size: int) -> bool:
        sizes = self.backend.get_supported_kernel_block_sizes()
        return any(block_size % size.base == 0 if hasattr(size, "base") else block_size == size for size in sizes)

    def _plain(self) -> Plain:
        on_gpu = {} if self.device.type == "cpu" else {"longest": _LONGEST_ON_GPU, "deepest": _DEEPEST_ON_GPU}
        for dtype in ("bfloat16", *DTYPES):
            for head_size in _PLAIN_HEAD_SIZES:
                case = Case((Request(1, 1),), dtype, "auto", head_size, 1, 1, 16)
                # Some answers depend on the current configuration.
                with configuration(self.backend, case):
                    block_size = next((size for size in BLOCK_SIZES if size >= 16 and self._kernel_takes(size)), None)
                    if block_size and not self._reasons(dataclasses.replace(case, block_size=block_size)):
                        return Plain(dtype, head_size, block_size, **on_gpu)
        raise NoPlainBatch(
            f"{self.backend.__qualname__} declares no plain decoder attention; expected a head size of "
            f"{_PLAIN_HEAD_SIZES}, a dtype of {DTYPES}, and a block size of {BLOCK_SIZES[1:]}"
        )
