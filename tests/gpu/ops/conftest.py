# SPDX-License-Identifier: Apache-2.0
"""Random inputs for every test here, anew in every run; and the kernel that a file is named after."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """A failure shows the seed, which pytest captures; a fault of a kernel belongs to the test that launched it."""
    import torch

    from vllm_hwplugin.ops.compile.jit import GPUS

    value = random.SystemRandom().getrandbits(32)
    print(f"torch.manual_seed({value})")
    torch.manual_seed(value)
    yield
    for device in GPUS:
        module = getattr(torch, device, None)
        if module is not None and module.is_available():
            module.synchronize()


@pytest.fixture(scope="module", autouse=True)
def kernel(request: pytest.FixtureRequest) -> None:
    from vllm_hwplugin.ops.compile.spec import KERNELS

    from .kernel_checks import load_kernel

    if spec := KERNELS.get(request.path.stem.removeprefix("test_")):
        load_kernel(spec)
