"""Model Runner V2 on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def modules(vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`modules("0.26.0", GATE="off")`: that version's `ReleasedModules`, with graphs that are written down."""
    from .released_modules import Graph, ReleasedModules, capture

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.capturing is not None)
    monkeypatch.setattr(Graph, "replayed", [])
    return lambda version, **choices: ReleasedModules(vllm_tree(version), **choices)


@pytest.fixture
def known_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plugin know the builders of `speculators` instead of vLLM's."""
    from vllm_hwplugin.spec_decode import builders

    from .speculators import DevicePlan, HostPlan, Views

    kinds = {Views: "", DevicePlan: "", HostPlan: "each build plans on the host"}
    known = {
        f"{cls.__module__}.{cls.__qualname__}": builders.Builder(one_token=not why, why=why)
        for cls, why in kinds.items()
    }
    monkeypatch.setattr(builders, "BUILDERS", known)
