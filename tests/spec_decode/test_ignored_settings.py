# SPDX-License-Identifier: Apache-2.0
"""Which settings of `--speculative-config` a released model runner ignores, by its text."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode.ignored_settings import ignored

from ..released import texts

#: `quantization` goes to the draft's own configuration, `attention_backend` to V2 from 0.26 on.
FIELDS = ("model", "method", "num_speculative_tokens", "quantization", "attention_backend")
MOE, BY_BATCH, VERIFIED = "moe_backend", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"


@pytest.mark.parametrize(
    ("version", "v2", "expected"),
    [
        ("0.26.0", True, {MOE, BY_BATCH}),
        ("0.30.0", True, {BY_BATCH}),
    ],
)
def test_settings_that_only_the_other_runner_reads(version: str, v2: bool, expected: set[str], vllm_tree: Any) -> None:
    fields = (*FIELDS, MOE, BY_BATCH, VERIFIED)
    assert set(ignored(fields, v2=v2, read=vllm_tree(version).read)) == expected


INTERNAL = "vLLM fills it in"
NO_SUFFIX = "vLLM decodes by suffixes on V1"
#: By runner (V2 or not): field of the newest release that only the other runner reads -> why that is known.
KNOWN = {
    True: {
        "use_heterogeneous_vocab": "`doctor --for` says so; vLLM takes V1",
        "parallel_drafting": "vLLM takes V1 for EAGLE drafts with it; DFlash drafts so on V2 without it",
        "suffix_decoding_max_tree_depth": NO_SUFFIX,
        "suffix_decoding_max_cached_requests": NO_SUFFIX,
        "suffix_decoding_max_spec_factor": NO_SUFFIX,
        "suffix_decoding_min_token_prob": NO_SUFFIX,
        "target_model_config": INTERNAL,
        "target_parallel_config": INTERNAL,
    },
    False: {
        "synthetic_acceptance_rates": "for measurements on V2",
        "enable_adaptive_verification": "`doctor --for` says so",
        "dspark_draft_topk": "DSpark runs on V2",
        "draft_lm_head_quantization": "`doctor --for` says so",
        "xpress_topc": "a method of V2",
        "fly_window_size": "a method of V2",
        "fly_entropy_threshold": "a method of V2",
        "fly_entropy_top_k": "a method of V2",
    },
}


def fields_of(text: str) -> list[str]:
    """Return the fields of a release's `SpeculativeConfig`."""
    (config,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == "SpeculativeConfig")
    assert isinstance(config, ast.ClassDef)
    return [
        node.target.id for node in config.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


@pytest.mark.parametrize("v2", [False, True])
def test_each_field_is_read_or_known(v2: bool, vllm_tree: Any) -> None:
    tree = vllm_tree(SUPPORTED[-1])
    fields = fields_of(tree.read("vllm/config/speculative.py"))
    assert set(ignored(fields, v2=v2, read=texts(tree))) == KNOWN[v2].keys()
