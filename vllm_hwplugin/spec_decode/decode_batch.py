# SPDX-License-Identifier: Apache-2.0
"""The shapes of graphs of a decode step's parts, and the sampling parameters that they support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

#: Requests of the largest graph. `max_num_seqs` also bounds them.
MAX_NUM_REQS: Final = 256

_HANDLED: Final = frozenset(("temperature", "top_k", "top_p", "seed"))

#: What other parts of vLLM do with a request. The tokens to stop at matter to the sampler only with `min_tokens`.
_NOT_THE_SAMPLERS: Final = frozenset(
    (
        *("n", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "_eos_token_id", "_all_stop_token_ids"),
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("output_kind", "output_text_buffer_length", "stream_interval", "skip_clone", "skip_reading_prefix_cache"),
        *("repetition_detection", "_bad_words_token_ids", "watermarking", "_watermarking_skipped"),
        "routed_experts_prompt_start",
    )
)

#: Keys of `extra_args` that the scheduler's `Request` reads (vllm/v1/request.py). Other keys are for logits processors.
_OF_THE_SCHEDULER: Final = frozenset(("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"))


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The shape of a graph: `num_tokens` tokens in `num_reqs` requests of `query_len` tokens (None: of any length)."""

    num_tokens: int
    num_reqs: int
    query_len: int | None


def uniform_shape(query_len: int, num_reqs: int) -> GraphShape:
    return GraphShape(num_tokens=query_len * num_reqs, num_reqs=num_reqs, query_len=query_len)


def asks_for_nothing_else(params: Any) -> bool:
    """Whether these `SamplingParams` need only temperature, top-k, top-p and a seed.

    An unknown parameter must have its default value: a vLLM may have learned to do more.
    """
    default = type(params)()
    return _OF_THE_SCHEDULER.issuperset(params.extra_args or ()) and all(
        getattr(params, name) == getattr(default, name)
        for name in params.__struct_fields__
        if name != "extra_args" and name not in _HANDLED and name not in _NOT_THE_SAMPLERS
    )


def has_prompt(input_batch: Any, count: int) -> bool:
    """Whether any of V1's first `count` requests still computes its prompt."""
    return bool((input_batch.num_computed_tokens_cpu[:count] < input_batch.num_prompt_tokens[:count]).any())
