# SPDX-License-Identifier: Apache-2.0
"""vLLM's drafters, one row each: their method and classes, and whether CUDA graphs may hold their drafting.

The tables of drafters in README.md and docs/features.md are made from it. No torch is imported here.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Drafter(NamedTuple):
    """A drafter. Rows of one method differ in name and classes, and in which runner captures them.

    Attributes:
        method: vLLM's `method` in `--speculative-config`.
        proposer: V1's class. Its subclasses override parts of `propose`, so each needs its own row.
        speculators: V2's classes, in any version.
        v1: why V1's drafting is not captured; empty if it is.
        v2: why V2's drafting is not captured; empty if it is.
        since: the first vLLM whose V2 has it, if that is later than V2 with graphs.
        combines: the draft model combines hidden states of several target layers.
        cached: drafts have keys and values in the KV cache.
        masks: the model drafts all tokens in one pass over masks, after the context's keys were written.
        standalone: the model reads no hidden states of the target.
        tried: `capture-sizes`, `draft-schedule`, `v1-draft-phase` and the first pass in `v2-mixed-graphs` were tried
            with its method.
    """

    name: str
    method: str
    proposer: str = ""
    speculators: tuple[str, ...] = ()
    v1: str = ""
    v2: str = ""
    since: str = ""
    combines: bool = False
    cached: bool = True
    masks: bool = False
    standalone: bool = False
    tried: bool = False


_OWN_CODE: Final = "its own drafting code"
_V2_ONLY: Final = "vLLM runs it on V2 only"
_V1_ONLY: Final = "vLLM runs it on V1 only"
_NO_MODEL: Final = "no draft model"
_NGRAM: Final = ("NgramGPUSpeculator",)

DRAFTERS: Final = (
    Drafter("Eagle", "eagle", "EagleProposer", ("EagleSpeculator",), tried=True),
    Drafter("Eagle3", "eagle3", "EagleProposer", ("EagleSpeculator",), combines=True, tried=True),
    Drafter("MTP", "mtp", "EagleProposer", ("MTPSpeculator",), tried=True),
    Drafter("DFlash", "dflash", "DFlashProposer", ("DFlashSpeculator",), combines=True, masks=True, tried=True),
    Drafter(
        "`draft_model`",
        "draft_model",
        "DraftModelProposer",
        ("PlainDraftModelSpeculator", "StandaloneARSpeculator"),
        since="0.31",
        standalone=True,
    ),
    Drafter("P-EAGLE", "eagle3", "EagleProposer", v2=_V1_ONLY, combines=True),
    Drafter("Gemma 4's assistant", "mtp", "Gemma4Proposer", ("Gemma4Speculator",), v1=_OWN_CODE),
    Drafter("DFlash2", "dflash", "", ("DFlash2Speculator",), v1=_V2_ONLY, since="0.28", combines=True, masks=True),
    Drafter("LiLiCorr", "dflash", "", ("LiLiCorrSpeculator",), v1=_V2_ONLY, since="0.31", combines=True, masks=True),
    Drafter("XPress", "dflash", "", ("XPressSpeculator",), v1=_V2_ONLY, since="0.33", combines=True, masks=True),
    Drafter(
        "DSpark", "dspark", "", ("DSparkSpeculator",), v1=_V2_ONLY, since="0.25", combines=True, masks=True, tried=True
    ),
    Drafter("n-gram", "ngram", "NgramProposer", _NGRAM, v1=_NO_MODEL, since="0.32", cached=False),
    Drafter("n-gram", "ngram_gpu", "NgramProposerGPU", _NGRAM, v1=_NO_MODEL, since="0.32", cached=False),
    Drafter(
        "several MTP layers (Step 3.5)",
        "mtp",
        "Step3p5MTPProposer",
        ("MultiModuleMTPSpeculator",),
        v1=_OWN_CODE,
        v2=_OWN_CODE,
    ),
    Drafter("Medusa", "medusa", "MedusaProposer", v1=_OWN_CODE, v2=_V1_ONLY, cached=False),
    Drafter("suffix decoding", "suffix", "SuffixDecodingProposer", v1=_NO_MODEL, v2=_V1_ONLY, cached=False),
)

TRIED_METHODS: Final = frozenset(row.method for row in DRAFTERS if row.tried)
MASK_METHODS: Final = frozenset(row.method for row in DRAFTERS if row.masks)
COMBINING_METHODS: Final = frozenset(row.method for row in DRAFTERS if row.combines)
CACHED_METHODS: Final = frozenset(row.method for row in DRAFTERS if row.cached)
STANDALONE_METHODS: Final = frozenset(row.method for row in DRAFTERS if row.standalone)
#: V2's classes whose drafting is captured.
SPECULATORS: Final = frozenset(name for row in DRAFTERS if not row.v2 for name in row.speculators)
#: V2's classes whose first pass runs on the target's batch, in graphs with their own manager.
SHARED_FIRST_PASS: Final = frozenset(
    name for row in DRAFTERS if row.tried and not row.masks for name in row.speculators
)
