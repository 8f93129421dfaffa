"""Released versions of vLLM on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def _made() -> dict[tuple[Any, ...], Any]:
    return {}


@pytest.fixture
def modules(
    vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, _made: dict[tuple[Any, ...], Any]
) -> Callable[..., Any]:
    """`modules("0.26.0", GATE="off")`: that version's modules."""
    pytest.importorskip("vllm")
    import vllm.envs

    from .schedulers import released

    def modules(version: str, **choices: str) -> Any:
        key = (version, *sorted(choices.items()))
        if key not in _made:
            _made[key] = released(vllm_tree(version), **choices)
        return _made[key]

    # Variables that the installed vLLM does not know any more.
    monkeypatch.setattr(vllm.envs, "VLLM_PREFIX_CACHE_RETENTION_INTERVAL", None, raising=False)
    return modules
