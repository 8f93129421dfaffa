# SPDX-License-Identifier: Apache-2.0
"""What test_shapes is made of, where there is no GPU: vLLM's configs of the models that are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from .small_shapes import CASES


@pytest.mark.parametrize("name", CASES)
def test_the_engine_gets_what_vllm_knows(name: str, tmp_path: Path) -> None:
    config = pytest.importorskip("vllm.transformers_utils.config")
    speculative = pytest.importorskip("vllm.config.speculative")
    load = CASES[name].load(tmp_path / "model")
    options = load.options
    target = config.get_config(options["model"], trust_remote_code=False)
    of_draft = config.get_config(options["speculative_config"].get("model", options["model"]), trust_remote_code=False)
    of_draft = speculative.SpeculativeConfig.hf_config_override(of_draft)
    # An assistant's states are narrower than the target's, which it reads.
    read = of_draft.backbone_hidden_size if name == "assistant" else of_draft.hidden_size
    assert read == target.hidden_size
    assert len(getattr(target, "layer_types", None) or [None] * target.num_hidden_layers) == target.num_hidden_layers
    # No prompt token is beyond the vocabulary.
    assert max(token for request in load.requests for token in request.prompt) < target.vocab_size
