# SPDX-License-Identifier: Apache-2.0
"""A backend on this process's device: what it declares of a trial, and what it does with a case."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_hwplugin.errors import HwpluginError

from . import _captured
from ._cases import BLOCK_SIZES, DTYPES, Case, Plain, Request, Trial
from ._inputs import Inputs, make_inputs
from ._reference import Measure
from ._session import Declared
from ._trial import refusals
from ._vllm import Layer, Maker, batch_of, device, last, measured, metadata_of

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
#: The arguments of `validate_configuration` in this version, as platforms pass them; a class may take any.
_QUESTIONS = frozenset((*AttentionSelectorConfig._fields, "device_capability"))


class NoPlainBatch(HwpluginError, RuntimeError):
    """A backend declares no usual head size and dtype, so that nothing can be tried on it."""


class LayerHost:
    """Runs cases through one backend class on this process's device.

    Args:
        backend: a subclass of vLLM's ``AttentionBackend``.

    Raises:
        NoPlainBatch: see there.
    """

    def __init__(self, backend: type[Any]) -> None:
        self.backend = backend
        self.device = device()
        self.maker = Maker(backend, self.device)
        self.plain = self._plain()

    def can_try(self, trial: Trial) -> bool:
        """Whether this process has what a trial needs; see `Trial.needs`."""
        if trial.needs == "graphs":
            return bool(self.device.type == "cuda")
        return trial.needs == "" or bool(envs.VLLM_BATCH_INVARIANT)

    def declared(self, trial: Trial, case: Case) -> Declared:
        """What the class says about a trial; ``case`` is one of the trial's."""
        with self.maker.config(case):
            if not self._kernel_takes(case.block_size) or self._reasons(case):
                return "no"
        if trial.capability in ("captured", "padded_batch"):
            return "yes" if self._graphs(case) in _GRAPHS[trial.settings.get("graph", "decode")] else "no"
        unasked = case.sliding_window is not None and "has_sliding_window" not in _QUESTIONS
        return "unasked" if unasked or trial.capability in ("group", "softcap", "alibi") else "yes"

    def run(self, case: Case) -> Measure:
        """Run a case and measure its answer.

        Raises:
            Refused: the backend does not take it.
            Exception: a fault of the backend or of the probe.
        """
        if case.graph:
            return max(_captured.run(self.maker, case), key=lambda found: found.ratio)
        inputs = make_inputs(case, self.device)
        with self.maker.layer(case, inputs, inputs.num_blocks) as layer, refusals():
            layer.write(*(torch.cat(tensors) for tensors in (inputs.keys, inputs.values, inputs.slots)))
            output = self._forward(layer, case, inputs)
            alone = [self._forward(layer, *one) for one in _each(case, inputs)] if case.alone else []
            self.check()
        if case.alone:
            together = output.split([request.query for request in case.requests])
            for index, (found, other) in enumerate(zip(together, alone, strict=True)):
                if not torch.equal(found, other):
                    return Measure(
                        math.inf, float((found - other).abs().max()), 0.0, index, "not the bits of the request alone"
                    )
        return measured(case, inputs, output, layer.rounds_query)

    def check(self) -> None:
        """Wait for the device; a fault of a kernel that ran before is raised here, and not in some later case."""
        if self.device.type != "cpu":
            torch.zeros(1, device=self.device).add_(1).item()

    def _forward(self, layer: Layer, case: Case, inputs: Inputs) -> Any:
        metadata = layer.builder.build(0, metadata_of(case, batch_of(case, inputs, self.device)))
        output = torch.full_like(inputs.query, math.nan)
        keys, values = (last(tensors, case.requests) for tensors in (inputs.keys, inputs.values))
        layer.forward(inputs.query, keys, values, metadata, output)
        return output

    def _graphs(self, case: Case) -> str:
        """Which batches the metadata builder can have replayed."""
        with self.maker.layer(case) as layer:
            support = self.backend.get_builder_cls().get_cudagraph_support(layer.config, layer.spec)
        return str(support.name)

    def _reasons(self, case: Case) -> list[str]:
        asked = {
            "head_size": case.head_size,
            "dtype": getattr(torch, case.dtype),
            "kv_cache_dtype": case.kv_cache_dtype,
            "block_size": None,
            "use_mla": False,
            "has_sink": case.sinks,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "device_capability": current_platform.get_device_capability(),
            "attn_type": "decoder",
            "has_sliding_window": case.sliding_window is not None,
            "use_non_causal": not case.causal,
            "use_batch_invariant": case.alone,
        }
        known = {name: value for name, value in asked.items() if name in _QUESTIONS}
        return list(self.backend.validate_configuration(**known))

    def _kernel_takes(self, block_size: int) -> bool:
        sizes = self.backend.get_supported_kernel_block_sizes()
        bases = [(getattr(size, "base", size), hasattr(size, "base")) for size in sizes]
        return any(block_size % base == 0 if multiple else block_size == base for base, multiple in bases)

    def _plain(self) -> Plain:
        longest, deepest = (
            (Plain.longest, Plain.deepest) if self.device.type == "cpu" else (_LONGEST_ON_GPU, _DEEPEST_ON_GPU)
        )
        one = (Request(1, 1),)
        for dtype in ("bfloat16", *DTYPES):
            for head_size in _PLAIN_HEAD_SIZES:
                # Some of a class's answers depend on the current configuration.
                with self.maker.config(Case(one, dtype, "auto", head_size, 1, 1, 16)):
                    for block_size in [size for size in BLOCK_SIZES if size >= 16 and self._kernel_takes(size)][:1]:
                        if not self._reasons(Case(one, dtype, "auto", head_size, 1, 1, block_size)):
                            return Plain(dtype, head_size, block_size, longest, deepest)
        raise NoPlainBatch(
            f"{self.backend.__qualname__} declares no plain decoder attention: head size one of {_PLAIN_HEAD_SIZES}, "
            f"dtype one of {DTYPES}, blocks of one of {BLOCK_SIZES[1:]} tokens"
        )


def _each(case: Case, inputs: Inputs) -> Iterator[tuple[Case, Inputs]]:
    """The requests of a case, each as a batch of its own."""
    queries = inputs.query.split([request.query for request in case.requests])
    for index, request in enumerate(case.requests):
        one = slice(index, index + 1)
        yield (
            dataclasses.replace(case, requests=(request,)),
            dataclasses.replace(
                inputs,
                query=queries[index],
                keys=inputs.keys[one],
                values=inputs.values[one],
                slots=inputs.slots[one],
                block_table=inputs.block_table[one],
            ),
        )
