# SPDX-License-Identifier: Apache-2.0
"""The terms of `uses_when` in a `patch.toml`: what an engine must be to use a feature.

`spec_decode.worker_use` asks a worker about each term. docs/your-own-patches.md has the table.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .versions import Versions

#: Term -> why an engine without it leaves the feature unused. Values follow a colon, separated by commas.
TERMS: Final = {
    "attention-backend": "no attention backend is named, so the draft selects its own anyway",
    "capture-sizes": "the capture sizes are vLLM's: {}",
    "context-norm": "the norm operation reads each layer's row of weights",
    "copied-head": "the draft keeps the target's whole head",
    "data-parallel": "there is one data parallel rank",
    "decode-graphs": "decode batches have no FULL CUDA graphs",
    "draft-counts": "the number of drafts stays as configured: {}",
    "draft-loader:": "no draft was loaded by {}",
    "draft-setting:": "--speculative-config names no {}",
    "drafter:": "the speculative method is {}",
    "drafts-here": "only the last stage of the pipeline samples and drafts",
    "dtype:": "the model is not in {}",
    "hopper": "this is no GPU of compute capability 9.0, or VLLM_BATCH_INVARIANT is on",
    "image-features": "the model keeps no features of images in buffers",
    "images": "the target has no images that are seen in both directions",
    "inner-state": "the model has no states but keys and values",
    "method:": "the speculative method is {}",
    "mixed-graphs": "batches with prompts have no FULL graphs",
    "model-drafts": "{} runs no draft model that the feature covers",
    "no-kv-connector": "vLLM allocates blocks that a KV connector may send or load",
    "obstacles": "an obstacle hinders graphs of V1's drafter (docs/obstacles.md)",
    "pipeline": "the pipeline has one stage",
    "plain-decode": "there is no speculative decoding, and {}",
    "reasoning-parser": "no reasoning parser is named for structured outputs",
    "runner:": "the engine runs on Model Runner {}",
    "samples": "the model is for pooling, and samples nothing",
    "sleep-mode": "the engine never sleeps: sleep mode is off",
    "speculation": "there is no speculative decoding",
    "stepwise-drafts": "{} does not draft step by step",
    "three-drafts": "vLLM makes the metadata of one or two draft tokens",
    "token-by-token": "the drafter drafts all tokens in one pass",
    "triton": "there is no Triton, and vLLM sorts",
    "windowed-draft": "no layer of the draft has a sliding window",
}
#: The only values that these terms take; other terms take any.
VALUES: Final = {"runner:": ("v1", "v2"), "drafter:": ("cached", "masks")}


class Term(NamedTuple):
    """A term as a `patch.toml` states it.

    Attributes:
        name: one of `TERMS`.
        versions: the releases of vLLM that it is asked on; None: all.
    """

    name: str
    values: tuple[str, ...]
    versions: Versions | None

    def asked_on(self, vllm: str) -> bool:
        return self.versions is None or self.versions.covers(vllm)


def read_term(text: str) -> Term:
    """Read a term, such as `runner:v1`, `method:eagle,mtp` or `images if >=0.28`.

    Raises:
        ValueError: the text is no term, or has a value that the term does not take.
    """
    stated, condition, versions = text.partition(" if ")
    name, colon, listed = stated.strip().partition(":")
    name, values = name + colon, tuple(value.strip() for value in listed.split(",")) if colon else ()
    if name not in TERMS or not all(value and value in VALUES.get(name, (value,)) for value in values):
        raise ValueError(f"{stated!r} is no term; expected one of {', '.join(TERMS)}")
    return Term(name, values, Versions(versions) if condition else None)
