# SPDX-License-Identifier: Apache-2.0
"""Which requests graphs sample for. That they compute what vLLM does is shown on the simulated device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.spec_decode.decode_batch import asks_for_nothing_else

sampling_params = pytest.importorskip("vllm.sampling_params")
SamplingParams = sampling_params.SamplingParams


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3},
        {"max_tokens": 1000, "stop": ["."], "stop_token_ids": [5], "ignore_eos": True, "n": 2, "prompt_logprobs": 1},
        {"skip_special_tokens": False, "include_stop_str_in_output": True, "detokenize": True},
        {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
    ],
)
def test_what_the_graphs_sample_for(asked: dict[str, Any]) -> None:
    assert asks_for_nothing_else(SamplingParams(**asked))


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 0},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 2},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["no"]},
        {"extra_args": {"anything": 1}},
        {"extra_args": {"kv_transfer_params": {}, "anything": 1}},
        {"structured_outputs": sampling_params.StructuredOutputsParams(regex="a+")},
    ],
)
def test_what_is_left_to_vllm(asked: dict[str, Any]) -> None:
    assert not asks_for_nothing_else(SamplingParams(**asked))


def test_a_parameter_that_is_not_known_keeps_a_request_out() -> None:
    """As one that a later vLLM has."""
    fields = (*SamplingParams.__struct_fields__, "anything_new")

    class Later(SimpleNamespace):
        __struct_fields__ = fields

        def __init__(self, **changed: Any) -> None:
            default = SamplingParams()
            super().__init__(**{name: getattr(default, name) for name in fields[:-1]} | {"anything_new": 0} | changed)

    assert asks_for_nothing_else(Later())
    assert not asks_for_nothing_else(Later(anything_new=1))
