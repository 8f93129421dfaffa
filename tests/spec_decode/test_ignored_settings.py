# SPDX-License-Identifier: Apache-2.0
"""Which settings of `--speculative-config` a released model runner ignores, by its text."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.spec_decode.ignored_settings import ignored

from ..conftest import versions
from ..released import texts

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


INTERNAL = "vLLM fills it in"
NO_NGRAM, NO_SUFFIX = "vLLM drafts by n-grams on V1", "vLLM decodes by suffixes on V1"
#: By runner (V2 or not): field -> the releases on which only the other runner reads it, and why that is known.
KNOWN = {
    True: {
        "moe_backend": ("<0.30", "backport-draft-moe-backend reads it"),
        "num_speculative_tokens_per_batch_size": (">=0.24,<0.32", "`doctor --for` says so; 0.24 refuses it"),
        "attention_backend": (">=0.21,<0.25", "`doctor --for` says so"),
        "use_heterogeneous_vocab": (">=0.25", "`doctor --for` says so; vLLM 0.33 takes V1"),
        "disable_padded_drafter_batch": ("<0.29", "V2 pads always; vLLM refuses it with async scheduling"),
        "use_local_argmax_reduction": ("<0.25", "only faster"),
        "speculative_token_tree": ("<0.21", "V2 drafts no trees"),
        "parallel_drafting": (">=0.20", "vLLM takes V1 for EAGLE drafts with it; DFlash drafts so on V2 without it"),
        "prompt_lookup_max": ("<0.32", NO_NGRAM),
        "prompt_lookup_min": ("<0.32", NO_NGRAM),
        "suffix_decoding_max_tree_depth": (">=0.20", NO_SUFFIX),
        "suffix_decoding_max_cached_requests": (">=0.20", NO_SUFFIX),
        "suffix_decoding_max_spec_factor": (">=0.20", NO_SUFFIX),
        "suffix_decoding_min_token_prob": (">=0.20", NO_SUFFIX),
        "target_model_config": (">=0.20", INTERNAL),
        "target_parallel_config": (">=0.20", INTERNAL),
        "draft_parallel_config": ("<0.30", INTERNAL),
        "draft_load_config": ("<0.23", INTERNAL),
    },
    False: {
        "synthetic_acceptance_rates": (">=0.20", "for measurements on V2"),
        "rejection_sample_method": ("<0.22", "V1 has one method"),
        "draft_sample_method": (">=0.21,<0.22", "V1 has one method"),
        "enable_adaptive_verification": (">=0.28", "`doctor --for` says so"),
        "dspark_draft_topk": (">=0.28", "DSpark runs on V2"),
        "draft_lm_head_quantization": (">=0.33", "`doctor --for` says so"),
        "xpress_topc": (">=0.33", "a method of V2"),
        "fly_window_size": (">=0.33", "a method of V2"),
        "fly_entropy_threshold": (">=0.33", "a method of V2"),
        "fly_entropy_top_k": (">=0.33", "a method of V2"),
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
@pytest.mark.parametrize("version", versions("vllm/config/speculative.py"))
def test_each_field_is_read_or_known(version: str, v2: bool, vllm_tree: Any) -> None:
    tree = vllm_tree(version)
    fields = fields_of(tree.read("vllm/config/speculative.py"))
    known = {field for field, (where, reason) in KNOWN[v2].items() if reason and Versions(where).covers(version)}
    assert set(ignored(fields, v2=v2, read=tree.read)) == known
    # In the patched text no setting is ignored that a backport reads.
    patched = set(ignored(fields, v2=v2, read=texts(tree)))
    # On 0.24 `dflash-draft-backend` reads the attention backend of a DFlash drafter.
    assert patched - {"attention_backend"} == known - {"moe_backend", "attention_backend"}
