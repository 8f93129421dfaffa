# SPDX-License-Identifier: Apache-2.0
"""Where there is no GPU, the tests here that need one are not even collected, but for those that somebody names."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The second is WSL's.
GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = any(Path(argument.partition("::")[0]).resolve().is_relative_to(HERE) for argument in config.args)
    without_one = collection_path.is_dir() or collection_path.name.endswith("_on_cpu.py")
    return None if GPU or named or without_one else True
