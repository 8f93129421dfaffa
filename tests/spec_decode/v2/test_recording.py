# SPDX-License-Identifier: Apache-2.0
"""What a recording leaves of vLLM's sampler, by that sampler."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.sampling_params import SamplingParams

from vllm_hwplugin.spec_decode.v2.recording import SamplerParts, sampling_as

from .samplers import sampler


def test_requests_without_a_seed_are_given_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn one after the other, from numbers that the engine's seed begins."""

    def first(record: bool) -> int:
        np.random.seed(0)
        made = sampler(monkeypatch)
        for needed in SamplerParts if record else ():
            with sampling_as(made, needed):
                assert SamplerParts.of(made.sampling_states, np.array([0])) is needed
        made.add_request(1, SamplingParams(temperature=1.0))
        return int(made.sampling_states.seeds.np[1])

    assert first(record=True) == first(record=False)
