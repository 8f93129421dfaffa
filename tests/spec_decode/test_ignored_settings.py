# SPDX-License-Identifier: Apache-2.0
"""Which settings of `--speculative-config` a released model runner ignores, by its text."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_hwplugin.spec_decode.ignored_settings import ignored

#: `quantization` goes to the draft's own configuration, `attention_backend` to V2 from 0.26 on.
FIELDS = ("model", "method", "num_speculative_tokens", "quantization", "attention_backend")
MOE, BY_BATCH, VERIFIED = "moe_backend", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"


@pytest.mark.parametrize(
    ("version", "v2", "expected"),
    [
        ("0.26.0", True, {MOE, BY_BATCH}),
        ("0.30.0", True, {BY_BATCH}),
        ("0.33.0", True, set()),
        ("0.30.0", False, {VERIFIED}),
    ],
)
def test_settings_that_only_the_other_runner_reads(version: str, v2: bool, expected: set[str], vllm_tree: Any) -> None:
    fields = (*FIELDS, MOE, BY_BATCH, VERIFIED)
    assert set(ignored(fields, v2=v2, read=vllm_tree(version).read)) == expected
