# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are drawn in front of a graph are those that vLLM draws on its way, for any padding."""

from __future__ import annotations

from collections.abc import Collection

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from vllm.v1.sample.ops.topk_topp_sampler import random_sample
from vllm.v1.sample.rejection_sampler import generate_uniform_probs

from vllm_hwplugin.spec_decode.v1.noise import Noise

VOCABULARY = 50
DRAFTS = 3
MOST = 6


def verified(count: int, generators: dict[int, torch.Generator], first: int = 0) -> tuple[torch.Tensor, ...]:
    """What vLLM's rejection sampler draws for so many requests, in its order; its last part is a kernel's."""
    logits = torch.arange(first * VOCABULARY, (first + count) * VOCABULARY).reshape(count, -1).float().sin() * 3
    bonus = random_sample(torch.softmax(logits, -1), generators)
    uniform = generate_uniform_probs(count * DRAFTS, [DRAFTS] * count, generators, torch.device("cpu"))
    recovered = torch.empty(count, VOCABULARY)
    recovered.exponential_()
    for request, generator in generators.items():
        recovered[request].exponential_(generator=generator)
    return bonus, uniform, recovered


def seeds(requests: Collection[int], count: int) -> dict[int, torch.Generator]:
    return {request: torch.Generator().manual_seed(request) for request in requests if request < count}


def read(noise: Noise, num_reqs: int, at_once: int) -> tuple[torch.Tensor, ...]:
    """What a graph of so many requests reads, so many of them at a time."""
    parts = []
    for first in range(0, num_reqs, at_once):
        part = min(at_once, num_reqs - first)
        noise.begin(part, first)
        with noise.read():
            parts.append(verified(part, {}, first))
    return tuple(torch.cat(numbers) for numbers in zip(*parts, strict=True))


@pytest.mark.parametrize("at_once", [6, 4, 1])
@pytest.mark.parametrize("seeded", [(), (0,), range(MOST)], ids=["none", "one", "all"])
@pytest.mark.parametrize(("count", "padded"), [(6, 6), (1, 1), (3, 4), (5, 6)])
def test_they_are_vllms(count: int, padded: int, seeded: Collection[int], at_once: int) -> None:
    noise = Noise(MOST)
    for num_reqs in (6, 4, 1):
        read(noise, num_reqs, at_once)

    torch.manual_seed(7)
    expected = verified(count, seeds(seeded, count))
    state = torch.get_rng_state()

    torch.manual_seed(7)
    noise.draw(count, seeds(seeded, count))
    # What is drawn afterwards is the same as well.
    assert torch.equal(torch.get_rng_state(), state)
    found = read(noise, padded, at_once)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right[: left.shape[0]])
    assert torch.equal(torch.get_rng_state(), state)
