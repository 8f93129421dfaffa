# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..conftest import cannot_run
from . import simulated
from .device_process import DeviceProcess


@pytest.fixture(scope="session")
def musa_host() -> None:
    """Skips where the device cannot be simulated."""
    if reason := simulated.obstacle():
        cannot_run(reason)


@pytest.fixture(scope="session")
def device(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    """A process with two simulated GPUs of 64 MiB."""
    environment = simulated.environment(tmp_path_factory.mktemp("device"), devices=2)
    process = DeviceProcess({**environment, "MUSA_SIM_MEMORY": str(64 << 20)})
    yield process
    process.close()
