# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_hwplugin_workshop.sources import IndexUnreachable

from .. import releases
from ..conftest import cannot_run
from . import simulated
from .device_process import DeviceProcess


@pytest.fixture(scope="session")
def musa_host() -> None:
    """Skips where the device cannot be simulated."""
    if reason := simulated.obstacle():
        cannot_run(reason)


@pytest.fixture(scope="session")
def released() -> Callable[[str], tuple[str, Path]]:
    """`released("0.33.0")`: a version of vLLM and its folder, from the package index or the user's cache of it."""

    def vllm(version: str) -> tuple[str, Path]:
        try:
            return version, releases.package_of(version)
        except IndexUnreachable as error:
            cannot_run(str(error))

    return vllm


@pytest.fixture(scope="session")
def newest(released: Callable[[str], tuple[str, Path]]) -> tuple[str, Path]:
    return released(releases.NEWEST)


@pytest.fixture(scope="session")
def device(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    """A process with two simulated GPUs of 64 MiB."""
    environment = simulated.environment(tmp_path_factory.mktemp("device"), devices=2)
    process = DeviceProcess({**environment, "MUSA_SIM_MEMORY": str(64 << 20)})
    yield process
    process.close()
