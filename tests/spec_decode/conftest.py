"""Stand-ins for what needs a GPU, and what features report of their use."""

from __future__ import annotations

from typing import Any

import pytest

pytest.register_assert_rewrite(f"{__package__}.walks")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """By feature, whether the engine uses it, as the run record was told last; where there is no capture to leave."""
    from vllm_hwplugin.base import run_records
    from vllm_hwplugin.spec_decode import graph_recording

    told: dict[str, bool] = {}
    monkeypatch.setattr(graph_recording, "leave_capture", lambda pool, *, broken: None)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    monkeypatch.setattr(run_records, "use", lambda feature, used, reason="": told.__setitem__(feature, used))
    return told


@pytest.fixture(scope="session")
def vllm_here() -> Any:
    """The text of the vLLM that this process imports."""
    from vllm_hwplugin.patching import find_installed

    return find_installed()


class _Capture:
    """`torch.cuda.CUDAGraph` of a host without a GPU, as far as a capture that failed is left."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recording asks of torch beside its graph, on a host without a GPU."""
    import torch

    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Capture)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    for name in ("memory_reserved", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))


@pytest.fixture
def uses(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[bool, str]]:
    """What features say of their use, on a host without a GPU where recordings may fail."""
    from vllm_hwplugin.base import run_records

    said: dict[str, tuple[bool, str]] = {}
    monkeypatch.setattr(run_records, "use", lambda feature, used, reason="": said.update({feature: (used, reason)}))
    return said


@pytest.fixture
def entry() -> Any:
    """This process's run record, in which `capture-sizes` and `v2-mixed-graphs` are live."""
    from vllm_hwplugin.base import run_records

    made = run_records.new("0")
    made.features = {name: {"state": "live", "reason": ""} for name in ("capture-sizes", "v2-mixed-graphs")}
    run_records.begin(made, None)
    return made
