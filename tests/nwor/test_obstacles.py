# SPDX-License-Identifier: Apache-2.0
"""What leaves rejected drafts where they are, said before anything is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from packaging.version import Version  # noqa: E402
from vllm.config import CompilationMode, SpeculativeConfig, VllmConfig  # noqa: E402

from vllm_hwplugin.nwor import obstacles  # noqa: E402

from .configs import config  # noqa: E402

NEWEST, OLDEST = Version("0.33.0"), Version("0.20.0")


def test_nothing_is_against_an_engine_as_it_is_by_default() -> None:
    assert obstacles.of_config(config(), OLDEST) is None
    chain = SimpleNamespace(speculative_token_tree="[(0,), (0, 0)]")
    assert obstacles.of_config(config(speculative_config=chain), OLDEST) is None
    names = ("speculative_config", "kv_transfer_config", "parallel_config", "model_config", "compilation_config")
    assert set(names) <= set(VllmConfig.__dataclass_fields__)
    assert "enable_adaptive_verification" in SpeculativeConfig.__dataclass_fields__


@pytest.mark.parametrize(
    ("changed", "vllm", "words"),
    [
        ({"speculative_config": None}, NEWEST, "no speculative decoding"),
        ({"kv_transfer_config": object()}, Version("0.23.0"), "blocks that were freed"),
        ({"kv_transfer_config": object()}, Version("0.24.0"), None),
        ({"use_ubatching": True}, NEWEST, "micro-batches"),
        ({"pipeline_parallel_size": 2}, NEWEST, "pipeline parallelism"),
        ({"prefill_context_parallel_size": 2}, NEWEST, "context parallelism"),
        ({"disable_cascade_attn": False}, NEWEST, "cascade attention"),
        ({"speculative_config": SimpleNamespace(speculative_token_tree="[(0,), (1,)]")}, OLDEST, "a tree of drafts"),
        ({"speculative_config": SimpleNamespace(enable_adaptive_verification=True)}, NEWEST, "adaptive verification"),
        ({"is_encoder_decoder": True}, NEWEST, "encoder-decoder"),
        ({"mode": CompilationMode.STOCK_TORCH_COMPILE}, NEWEST, "torch.compile around the whole model"),
    ],
)
def test_what_is_against_it(changed: dict[str, Any], vllm: Version, words: str | None) -> None:
    reason = obstacles.of_config(config(**changed), vllm)
    assert reason is None if words is None else words in (reason or "")


def test_a_model_that_is_compiled_whole_runs_no_hook() -> None:
    class Whole(torch.nn.Linear):
        def __call__(self, *args: Any) -> Any:
            return self.forward(*args)

    compiled = torch.nn.Linear(2, 2)
    compiled.compile(backend="eager")
    assert obstacles.of_model(torch.nn.Linear(2, 2)) is None
    assert "runs no hook" in (obstacles.of_model(Whole(2, 2)) or "")
    assert "runs no hook" in (obstacles.of_model(compiled) or "")
