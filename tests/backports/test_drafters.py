# SPDX-License-Identifier: Apache-2.0
"""Backports in loaders, drafters and the V1 runner: vLLM's released functions, stock and patched."""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.model_executor.model_loader.weight_utils import default_weight_loader, maybe_remap_kv_scale_name

from tests.released import take
from vllm_hwplugin.base.versions import SUPPORTED

from ..conftest import versions

K = 3
FILES = ("vllm/v1/spec_decode/", "vllm/v1/worker/", "vllm/model_executor/models/")


def between(first: str | None, end: str) -> tuple[str, ...]:
    return SUPPORTED[SUPPORTED.index(first) if first else 0 : SUPPORTED.index(end)]


# -- backport-mtp-embeddings ------------------------------------------------------------------------------------------


def embeddings_after_sharing(modules: Any, **of_the_draft: Any) -> tuple[Any, Any, Any]:
    """The target's, the draft's own, and what the draft has once vLLM has shared them; widths 8 and 4."""
    proposer = take(
        modules.text("vllm/v1/spec_decode/llm_base_proposer.py"),
        "SpecDecodeBaseProposer",
        {"_maybe_share_embeddings"},
        given={
            "get_pp_group": lambda: SimpleNamespace(world_size=1),
            "torch": torch,
            "logger": SimpleNamespace(info=lambda *_: None),
        },
    )()
    target, own = torch.nn.Embedding(16, 8), torch.nn.Embedding(16, 4)
    proposer.model = SimpleNamespace(model=SimpleNamespace(embed_tokens=own), **of_the_draft)
    proposer._maybe_share_embeddings(SimpleNamespace(model=SimpleNamespace(embed_tokens=target)))
    return target, own, proposer.model.model.embed_tokens


@pytest.mark.parametrize("version", versions(*FILES, among=between("0.25.0", "0.27.0")))
def test_mtp_drafts_take_the_targets_embeddings(version: str, modules: Callable[..., Any]) -> None:
    """Gemma 4's draft has a narrower table of its own, for its output alone."""
    _, own, kept = embeddings_after_sharing(modules(version, VLLM_HWPLUGIN_BACKPORT_MTP_EMBEDDINGS="off"))
    assert kept is own
    target, _, shared = embeddings_after_sharing(modules(version))
    assert shared is target


@pytest.mark.parametrize("version", versions(*FILES, among=between("0.25.0", "0.27.0")))
@pytest.mark.parametrize("has_own", [True, False])
def test_eagle_drafts_keep_embeddings_of_their_own_width(
    version: str, has_own: bool, modules: Callable[..., Any]
) -> None:
    _, own, kept = embeddings_after_sharing(modules(version), has_own_embed_tokens=has_own)
    assert kept is own


# -- backport-eagle-bias ----------------------------------------------------------------------------------------------


def loaded(modules: Any, module: str, names: list[str]) -> set[str]:
    """The parameters that vLLM's loader of an EAGLE draft fills from tensors of these names."""
    model = take(
        modules.text(f"vllm/model_executor/models/{module}.py"),
        "LlamaModel",
        {"load_weights"},
        given={
            "nn": torch.nn,
            "support_torch_compile": lambda *cls, **_: cls[0] if cls else (lambda one: one),
            "default_weight_loader": default_weight_loader,
            "maybe_remap_kv_scale_name": maybe_remap_kv_scale_name,
        },
    )()
    model.quant_config = None
    model.fc = torch.nn.Linear(2, 2, bias=False)
    model.qkv_proj = torch.nn.Linear(2, 6, bias=False)
    model.qkv_proj.weight.weight_loader = lambda *_: None
    model.attn = torch.nn.ModuleDict({"qkv_proj": model.qkv_proj})
    del model.qkv_proj
    return model.load_weights((name, torch.zeros(2, 2)) for name in names)


@pytest.mark.parametrize("version", versions(*FILES, among=between(None, "0.25.0")))
@pytest.mark.parametrize("module", ["llama_eagle", "llama4_eagle", "llama_eagle3"])
@pytest.mark.parametrize("bias", ["fc.bias", "attn.q_proj.bias"])
def test_a_bias_that_the_draft_lacks_is_skipped(
    version: str, module: str, bias: str, modules: Callable[..., Any]
) -> None:
    names = ["fc.weight", "attn.q_proj.weight", bias, "attn.k_proj.weight"]
    with pytest.raises(KeyError, match="bias"):
        loaded(modules(version, VLLM_HWPLUGIN_BACKPORT_EAGLE_BIAS="off"), module, names)
    assert loaded(modules(version), module, names) == {"fc.weight", "attn.qkv_proj.weight"}
    with pytest.raises(KeyError, match="gate"):
        loaded(modules(version), module, [*names, "attn.gate"])


# -- backport-vacated-row ---------------------------------------------------------------------------------------------


def rows_after_a_move(modules: Any) -> tuple[Any, Any]:
    """A request in row 2 moves up to row 0: the table's rows, and how many blocks each has."""
    table = take(
        modules.text("vllm/v1/worker/block_table.py"),
        "BlockTable",
        {"add_row", "append_row", "move_row"},
        given={"np": np},
    )()
    table.use_hybrid_blocks = False
    table.block_table = SimpleNamespace(np=np.zeros((4, 6), dtype=np.int32))
    table.num_blocks_per_row = np.zeros(4, dtype=np.int32)
    table.add_row([3, 4], 0)
    table.add_row([5, 6, 7], 2)
    table.move_row(2, 0)
    return table.block_table.np, table.num_blocks_per_row


@pytest.mark.parametrize("version", versions(*FILES, among=between(None, "0.27.0")))
def test_a_row_that_was_left_is_empty(version: str, modules: Callable[..., Any]) -> None:
    stale, _ = rows_after_a_move(modules(version, VLLM_HWPLUGIN_BACKPORT_VACATED_ROW="off"))
    assert stale[2].any()
    rows, counts = rows_after_a_move(modules(version))
    assert rows[0].tolist() == [5, 6, 7, 0, 0, 0]
    assert not rows[2].any()
    assert counts.tolist() == [3, 0, 0, 0]


# -- backport-dp-drafter ----------------------------------------------------------------------------------------------


class Drafter:
    """Counts the passes in which data parallel ranks meet."""

    def __init__(self) -> None:
        self.passes = 0

    def dummy_run(self, num_tokens: int) -> None:
        assert num_tokens == 1
        self.passes += 1

    def prepare_next_token_ids_padded(self, *_: Any) -> tuple[None, None]:
        return None, None


AFTER_BOOKKEEPING = ("if propose_drafts_after_bookkeeping:", "if draft_after_bookkeeping:")


@functools.cache
def drafting_of(text: str) -> tuple[Callable[..., None], type]:
    """What the released `GPUModelRunner.sample_tokens` does from the choice of drafting until drafts are made.

    Also a class with the method that makes the choice, which the runner has from 0.23 on.
    """
    runner = next(node for node in ast.parse(text).body if getattr(node, "name", None) == "GPUModelRunner")
    method = next(node for node in runner.body if getattr(node, "name", None) == "sample_tokens")
    names = [ast.unparse(node) for node in method.body]
    start = next(i for i, name in enumerate(names) if name.startswith("def propose_draft_token_ids("))
    end = next(i for i, name in enumerate(names) if name.startswith(AFTER_BOOKKEEPING))
    args = (
        "self, scheduler_output, sampler_output, logits, hidden_states, sample_hidden_states, aux_hidden_states,"
        "spec_decode_metadata, spec_decode_common_attn_metadata, slot_mappings"
    )
    (made,) = ast.parse(f"def draft({args}): pass").body
    assert isinstance(made, ast.FunctionDef)
    made.body = method.body[start : end + 1]
    kinds = ("Eagle", "DFlash", "DraftModel", "ExtractHiddenStates", "Gemma4")
    namespace = {f"{kind}Proposer": Drafter for kind in kinds} | {
        "torch": torch,
        "record_function_or_nullcontext": lambda name: contextlib.nullcontext(),
    }
    exec(compile(ast.fix_missing_locations(ast.Module([made], [])), "released sample_tokens", "exec"), namespace)
    return namespace["draft"], take(text, "GPUModelRunner", {"_input_fits_in_drafter"}, given=BASES)


class Runner:
    """What the released function reads of a `GPUModelRunner`; the drafter writes over the target's states, of 1.0.

    Args:
        ranks: of data parallelism.
        padded: whether all requests draft as many tokens.
        drafts: whether there is a drafter.
        asked: whether a request asks for log probabilities of its prompt.
    """

    num_spec_tokens, effective_drafter_max_model_len, device = K, 64, "cpu"
    valid_sampled_token_count_event: Any = object()
    requests: Any = None
    routed_experts_initialized = False
    discard_request_mask = SimpleNamespace(gpu=None)
    input_batch = SimpleNamespace(req_ids=["one"], sampling_metadata=None)

    def __init__(self, text: str, *, ranks: int = 1, padded: bool = True, drafts: bool = True, asked: bool = False):
        spec = SimpleNamespace(
            use_eagle=lambda: True,
            use_dflash=lambda: False,
            use_ngram_gpu=lambda: False,
            disable_padded_drafter_batch=not padded,
        )
        self.speculative_config = spec if drafts else None
        self.parallel_config = SimpleNamespace(data_parallel_size=ranks)
        self.num_prompt_logprobs = {"one": 1} if asked else {}
        self.drafter, self.states, self.read = Drafter(), torch.ones(2, 4), None
        self._results = 8 if "num_nans: torch.Tensor | None" in text else 7

    def propose_draft_token_ids(self, *_: Any) -> None:
        self.drafter.passes += 1
        self.states.zero_()

    def _copy_draft_token_ids_to_cpu(self, output: Any, zeros_only: bool = False) -> None: ...

    def _copy_valid_sampled_token_count(self, *_: Any) -> None: ...

    def _bookkeeping_sync(self, output: Any, sampled: Any, logits: Any, hidden_states: Any, *_: Any) -> Any:
        self.read = hidden_states
        return (None,) * self._results


def drafted(text: str, longest: int = 10, **facts: Any) -> Any:
    """Return a runner after a step, whose longest request has that many of 64 tokens."""
    draft, fits = drafting_of(text)
    runner = type("Both", (Runner, fits), {})(text, **facts)
    output = SimpleNamespace(total_num_scheduled_tokens=2)
    sampled, metadata = SimpleNamespace(sampled_token_ids=None), SimpleNamespace(max_seq_len=longest)
    draft(runner, output, sampled, None, runner.states, None, None, None, metadata, None)
    return runner


BASES = {
    name: type(name, (), {})
    for name in ("LoRAModelRunnerMixin", "KVConnectorModelRunnerMixin", "ECConnectorModelRunnerMixin")
}


@pytest.mark.parametrize("version", versions(*FILES, among=between(None, "0.25.0")))
@pytest.mark.parametrize("padded", [True, False])
def test_a_rank_that_cannot_draft_meets_the_others(version: str, padded: bool, modules: Callable[..., Any]) -> None:
    short, long = 10, 64 - K + 1
    # Drafts are asked for by another name there.
    others = {"VLLM_HWPLUGIN_V1_DRAFT_PHASE": "off"}
    path = "vllm/v1/worker/gpu_model_runner.py"
    stock, patched = (
        modules(version, **others, **off).text(path) for off in ({"VLLM_HWPLUGIN_BACKPORT_DP_DRAFTER": "off"}, {})
    )

    def passes(text: str, ranks: int) -> list[int]:
        return [drafted(text, longest, ranks=ranks, padded=padded).drafter.passes for longest in (short, long)]

    assert (passes(stock, 2), passes(patched, 2), passes(patched, 1)) == ([1, 0], [1, 1], [1, 0])


# -- backport-prompt-logprobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions("vllm/v1/worker/gpu_model_runner.py"))
def test_prompt_logprobs_are_those_of_the_target(version: str, modules: Callable[..., Any]) -> None:
    # Drafts are asked for by another name there.
    others = {"VLLM_HWPLUGIN_V1_DRAFT_PHASE": "off"}
    path = "vllm/v1/worker/gpu_model_runner.py"
    baseline = modules(version, VLLM_HWPLUGIN_BACKPORT_PROMPT_LOGPROBS="off", **others).text(path)
    patched = modules(version, **others).text(path)
    assert drafted(baseline, asked=True).read.sum() == 0
    assert drafted(patched, asked=True).read.sum() == 8
    # Nothing is copied where it is not needed.
    for asked, drafts in ((False, True), (True, False)):
        runner = drafted(patched, asked=asked, drafts=drafts)
        assert runner.read is runner.states


# -- backport-draft-moe-backend, backport-dflash-lm-head ---------------------------------------------------------------


class Loaded(Exception):
    """A draft is loaded, with this configuration."""


def _replaced(config: Any, **changes: Any) -> Any:
    return SimpleNamespace(**{**vars(config), **changes})


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(set_model_tag=lambda tag: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "vllm.compilation.backends", module)  # type: ignore[arg-type]


def draft_config(text: str, moe_backend: str | None) -> Any:
    """Return the configuration with which Model Runner V2 loads a draft."""

    def get_model(vllm_config: Any, **_: Any) -> None:
        raise Loaded(vllm_config)

    spec = SimpleNamespace(draft_model_config=None, moe_backend=moe_backend, kv_cache_dtype=None)
    kernels = SimpleNamespace(moe_backend="cutlass", other=1)
    load = take(text, "load_eagle_model", given={"get_model": get_model, "replace": _replaced})
    with pytest.raises(Loaded) as loaded:
        load(None, SimpleNamespace(speculative_config=spec, kernel_config=kernels))
    return loaded.value.args[0].kernel_config


EAGLE_UTILS = "vllm/v1/worker/gpu/spec_decode/eagle/utils.py"


@pytest.mark.parametrize("version", versions(EAGLE_UTILS, among=between(None, "0.30.0")))
def test_a_draft_has_its_own_moe_backend(version: str, modules: Callable[..., Any], tagged: None) -> None:
    baseline = modules(version, VLLM_HWPLUGIN_BACKPORT_DRAFT_MOE_BACKEND="off").text(EAGLE_UTILS)
    patched = modules(version).text(EAGLE_UTILS)
    assert draft_config(baseline, "triton").moe_backend == "cutlass"
    assert vars(draft_config(patched, "triton")) == {"moe_backend": "triton", "other": 1}
    assert draft_config(patched, None).moe_backend == "cutlass"
    names = {"replace", "VllmConfig"}
    assert names <= {alias.name for node in ast.walk(ast.parse(patched)) for alias in getattr(node, "names", ())}


@pytest.mark.parametrize("own", [True, False])
def test_a_dflash_draft_keeps_its_own_lm_head(own: bool, modules: Callable[..., Any], tagged: None) -> None:
    path = "vllm/v1/worker/gpu/spec_decode/dflash/utils.py"

    def head(**choices: str) -> Any:
        text = modules("0.24.0", **choices)
        heads = [SimpleNamespace(weight=torch.full((2, 2), value)) for value in (1.0, 2.0)]
        draft = SimpleNamespace(model=SimpleNamespace(), lm_head=heads[0], has_own_lm_head=own)
        given = {
            "replace": _replaced,
            "get_dflash_causal": lambda config: False,
            "get_model": lambda **_: draft,
            "get_pp_group": lambda: SimpleNamespace(world_size=2),
            "_should_share": take(text.text(EAGLE_UTILS), "_should_share", given={"torch": torch}),
        }
        load = take(text.text(path), "load_dflash_model", given=given)
        spec = SimpleNamespace(draft_model_config=None, attention_backend=None)
        config = SimpleNamespace(speculative_config=spec, attention_config=SimpleNamespace())
        made = load(SimpleNamespace(model=SimpleNamespace(), lm_head=heads[1]), config)
        return "draft's" if made.lm_head is heads[0] else "target's"

    assert head(VLLM_HWPLUGIN_BACKPORT_DFLASH_LM_HEAD="off") == "target's"
    assert head() == ("draft's" if own else "target's")
