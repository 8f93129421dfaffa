# SPDX-License-Identifier: Apache-2.0
"""The hook for DFlash on stand-ins; `test_dflash_processes` has it on the real VllmConfig."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_hwplugin import dflash, patching
from vllm_hwplugin.base import run_records


def made_by_vllm(*, k: int = 7, uses_dflash: bool = True) -> SimpleNamespace:
    """A `VllmConfig` that has gone through the hook, as in `__post_init__`."""
    target = SimpleNamespace(model="target", hf_text_config=SimpleNamespace(num_hidden_layers=4, hidden_size=64))
    draft = SimpleNamespace(hidden_size=64, block_size=8, dflash_config={"target_layer_ids": [0]})
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            use_dflash=lambda: uses_dflash,
            num_speculative_tokens=k,
            attention_backend=None,
            draft_model_config=SimpleNamespace(model="draft", hf_config=draft),
            target_model_config=target,
        )
    )
    dflash.check_and_update_config(vllm_config)
    return vllm_config


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> run_records.RunRecord:
    """The run record of a process in which the DFlash drafter's feature is live, and nothing is to be verified."""
    made = run_records.new("0")
    made.features = {"dflash-full-graph": {"state": "live", "reason": ""}}
    run_records.begin(made, None)
    monkeypatch.setattr(patching, "install", lambda: made)
    monkeypatch.setattr(patching, "force", lambda: None)
    return made


def test_the_patches_are_forced_for_dflash_only(entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[str] = []
    monkeypatch.setattr(patching, "force", lambda: forced.append("forced"))
    made_by_vllm(uses_dflash=False)
    assert not forced
    made_by_vllm()
    assert forced == ["forced"]
