# SPDX-License-Identifier: Apache-2.0
"""Choose the capture sizes of an engine that the plugin makes graphs for, unless the user lists them.

A decode batch has a FULL graph if its token count is a multiple of 1 + k, up to the largest size. vLLM's list counts
tokens and ends at 512. This module adds multiples of 1 + k tokens, up to `LARGEST`, and larger ones for batches with
prompts. If the user names only the largest size (`max_cudagraph_capture_size`), only whole blocks up to it are added.
The sizes follow from the configuration, so each start has the same (docs/drafter-graphs.md).

vLLM calls a platform twice in `VllmConfig.__post_init__`: before it fills in defaults, and when everything is decided.
The first call leaves the user's setting on the configuration object, and the second takes it away. Workers read plain
attributes of the `CompilationConfig`: pickled, but not part of vLLM's hash. No torch is imported here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from packaging.version import Version

from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.base.features import CAPTURE_SIZES, V2_MIXED_GRAPHS, gate_of
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS, TRIED_METHODS

logger = logging.getLogger("vllm.hwplugin")

#: Tokens of the largest decode batch that is captured by default: 512 requests of four, 128 of sixteen. A larger batch
#: keeps a device busy for longer than the host takes to launch its parts.
LARGEST: Final = 2048
#: Tokens of the largest batch with prompts. A batch in which several requests begin has more than two thousand.
LARGEST_MIXED: Final = 4096
#: The same for a small target, where Model Runner V2 has FULL graphs of such batches.
LARGEST_MIXED_SMALL: Final = 8192
# Sizes per octave of request counts. Padding adds less than its inverse to a batch.
_RUNGS_PER_OCTAVE: Final = 8
UNSERVED: Final = "decode batches without a FULL graph"
#: The largest size that the user named without a list, or None; not set if a list is named.
_LIMIT: Final = "_hwplugin_largest_named"
#: Why the sizes are not the plugin's; empty if they are.
_LEFT: Final = "_hwplugin_sizes_left"
_OWN: Final = "_hwplugin_own_capture_size"
_MIXED: Final = "_hwplugin_largest_mixed"
_FULL_MIXED: Final = "_hwplugin_full_mixed_sizes"
_VLLMS: Final = "_hwplugin_vllms_sizes"
_SIZES: Final = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
#: Largest sizes that vLLM sets for a model if the user names none (`vllm/model_executor/models/config.py`). The
#: platform is called afterwards and cannot tell such a size from the same number named by the user.
MODEL_DEFAULTS: Final = {"GptOssForCausalLM": 1024}


class CaptureSizesError(HwpluginError, RuntimeError):
    """The choice of sizes failed, in strict mode."""


def capture_sizes(
    block: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    own_sizes: Iterable[int],
    *,
    mixed: int = 0,
    steps: bool = False,
) -> tuple[int, ...]:
    """Return the sizes of an engine with a drafter, in tokens, ascending.

    vLLM's sizes from a block on become whole blocks, as on the V1 runner: Model Runner V2 of 0.25 to 0.28 looks for a
    decode batch's FULL graph only at the next size, and a size that is not a whole block has none. Above vLLM's largest
    size there are eight sizes per octave, up to the fullest decode batch, or up to `mixed`. The fullest decode batch
    has its own size, up to `LARGEST` or `mixed`, because V1's DFlash drafter has buffers for no larger one.

    Args:
        block: tokens of a request in a decode batch.
        own_sizes: vLLM's own capture sizes, in tokens.
        mixed: tokens of the largest batch with prompts that gets a graph above vLLM's sizes; 0 for none.
        steps: whether graphs of the sizes up to `max_num_seqs`, draft with one token per request. Then
            `max_num_seqs` is a size if vLLM's sizes reach it, with the whole blocks on both sides: otherwise, in 0.25
            to 0.28, decode batches of the one kind would find the other kind's graph.
    """
    own = {size if size < block else min(_whole_blocks(size, block), max_num_batched_tokens) for size in own_sizes}
    largest = max(own)
    bound, most = (min(max_num_batched_tokens, max(top, largest)) // block for top in (LARGEST, mixed))
    tops = {min(max_num_seqs, count) for count in ((bound, most) if mixed else (bound,))} - {0}
    counts = _request_counts(most if mixed else min(max_num_seqs, bound))
    ladder = {count * block for count in counts if count * block > largest}
    sizes = own | ladder | {top * block for top in tops}
    if steps and max_num_seqs <= largest:
        whole = _whole_blocks(max_num_seqs, block)
        sizes |= {max_num_seqs, whole - block, min(whole, max_num_batched_tokens)} - {0}
    return tuple(sorted(sizes))


def _whole_blocks(size: int, block: int) -> int:
    return -(-size // block) * block


def _request_counts(top: int) -> Iterator[int]:
    """Yield 1 to 16, then eight counts per octave, up to `top`."""
    count = 1
    while count < top:
        yield count
        octave = 1 << (count.bit_length() - 1)
        count += max(1, octave // _RUNGS_PER_OCTAVE)
    if top > 0:
        yield top


# -- while vLLM makes a configuration ---------------------------------------------------------------------------------


def note_user_sizes(vllm_config: Any) -> None:
    """Remember the user's largest size, in a platform's `apply_config_platform_defaults`."""
    compilation, model = vllm_config.compilation_config, getattr(vllm_config, "model_config", None)
    if compilation.cudagraph_capture_sizes is None:
        largest = compilation.max_cudagraph_capture_size
        defaults = {MODEL_DEFAULTS.get(name) for name in getattr(model, "architectures", None) or ()}
        vars(vllm_config)[_LIMIT] = None if largest in defaults else largest


def check_and_update_config(vllm_config: Any) -> bool:
    """Set the sizes of an engine with the plugin's graphs, unless listed.

    A platform's `check_and_update_config` calls this, after its base class has decided the cudagraph mode. The result
    says whether the user named neither a list nor the largest size.

    Raises:
        CaptureSizesError: the plugin failed, in strict mode.
    """
    listed = _LIMIT not in vars(vllm_config)
    limit: int | None = vars(vllm_config).pop(_LIMIT, None)
    unnamed = not listed and limit is None
    spec, compilation = vllm_config.speculative_config, vllm_config.compilation_config
    # A configuration that is made from another one already has its sizes.
    if (spec is None and not gates.is_on(gates.PLAIN_DECODE)) or (listed and _LEFT in vars(compilation)):
        return unnamed
    if spec is not None and spec.method not in TRIED_METHODS:
        vars(compilation)[_LEFT] = f"the speculative method is {spec.method}"
        return unnamed
    try:
        reason = "cudagraph_capture_sizes are named" if listed else _why_left(vllm_config)
        reason, decision = _set(vllm_config, limit) if reason is None else (reason, "")
        vars(compilation)[_LEFT] = reason
        decision = decision or f"left to vLLM: {reason}"
        if spec is not None or not reason:
            # vLLM's own list goes up in steps of 8, and from 256 tokens on of 16.
            by_largest = "max_cudagraph_capture_size", 16 if reason else 1
            _note_unserved(vllm_config, *(("cudagraph_capture_sizes", 1) if listed else by_largest))
    except Exception as error:
        decision = f"left to vLLM: {type(error).__name__}: {error}"
        if gates.read(gates.STRICT).flag:
            raise CaptureSizesError(
                f"{CAPTURE_SIZES}: {decision}, a bug in vllm-hwplugin; set {gate_of(CAPTURE_SIZES)}=off, and report it"
            ) from error
        logger.exception("%s: the sizes are left to vLLM, because the plugin failed", CAPTURE_SIZES)
    run_records.note(CAPTURE_SIZES, decision)
    return unnamed


def _why_left(vllm_config: Any) -> str | None:
    """Return why the sizes stay vLLM's, or None."""
    compilation, parallel, entry = vllm_config.compilation_config, vllm_config.parallel_config, run_records.current()
    if entry is None or CAPTURE_SIZES not in entry.live:
        reason = "" if entry is None else entry.features.get(CAPTURE_SIZES, {}).get("reason") or entry.error
        return f"{CAPTURE_SIZES} is not patched in{f' ({reason})' if reason else ''}"
    mode = compilation.cudagraph_mode
    if not (mode.separate_routine() and mode.decode_mode().name == "FULL"):
        return f"cudagraph_mode is {mode.name}"
    if not compilation.cudagraph_capture_sizes:
        return "nothing is captured"
    if compilation.compile_sizes:
        # vLLM ends the start if one of them is padded.
        return "compile_sizes are given"
    # Ranks that join later would choose sizes by another number of ranks, and capture while the others serve.
    if getattr(parallel, "enable_elastic_ep", False):
        return "ranks may join (elastic expert parallelism)"
    # With micro-batches vLLM captures each size twice.
    if _padding_ranks(vllm_config) > 1 and (getattr(parallel, "use_ubatching", False) or not uses_v2(vllm_config)):
        return "data-parallel ranks pad their batches to each other's"
    model = getattr(vllm_config, "model_config", None)
    if vllm_config.speculative_config is None and not uses_v2(vllm_config):
        return "without a drafter only Model Runner V2 has graphs of the plugin"
    if vllm_config.speculative_config is None and getattr(model, "runner_type", None) != "generate":
        return "the model does not generate"
    if encodes_only(vllm_config):
        return "only the multi-modal encoder runs"
    if any("DeepseekV41" in name for name in getattr(model, "architectures", None) or ()):
        return "DeepSeek V4.1 replays layers in graphs whose sizes and buffers follow from the capture sizes"
    # Not there from 0.32 on.
    if parallel.tensor_parallel_size > 1 and getattr(compilation.pass_config, "enable_sp", False):
        return "with sequence parallelism they must also be multiples of the tensor parallel size"
    if vllm_config.lora_config is not None:
        return "with LoRA each of them is captured several times"
    spec = vllm_config.speculative_config
    if getattr(spec, "num_speculative_tokens_per_batch_size", None):
        return "the number of drafts changes from step to step"
    return None


def encodes_only(vllm_config: Any) -> bool:
    """Whether this instance runs only the multi-modal encoder."""
    # A producer of an encoder connector says so by a property in 0.28, and sets the option from 0.29 on.
    named = getattr(getattr(vllm_config, "model_config", None), "multimodal_config", None)
    return bool(getattr(named, "mm_encoder_only", False) or getattr(vllm_config, "is_encoder_only", False))


def uses_v2(vllm_config: Any) -> bool:
    """Whether vLLM chooses Model Runner V2 for a `VllmConfig`."""
    # Up to 0.21 a worker asks only the environment.
    chosen = getattr(vllm_config, "use_v2_model_runner", None)
    if chosen is None:
        from vllm import envs

        chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    return bool(chosen)


def _padding_ranks(vllm_config: Any) -> int:
    """Return how many data-parallel ranks pad their batches to the largest."""
    # Layers of experts exchange tokens. Ranks of other models are separate engines.
    model = getattr(vllm_config, "model_config", None)
    return int(vllm_config.parallel_config.data_parallel_size) if getattr(model, "is_moe", True) else 1


def _block(vllm_config: Any) -> int:
    """Return a request's tokens in a decode batch; 1: any number."""
    spec = vllm_config.speculative_config
    varies = spec is None or getattr(spec, "enable_adaptive_verification", False)
    return 1 if varies else 1 + int(spec.num_speculative_tokens)


def _set(vllm_config: Any, limit: int | None) -> tuple[str, str]:
    """Set the sizes; return why they stay vLLM's, or what they are."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    block, spec = _block(vllm_config), vllm_config.speculative_config
    own = list(compilation.cudagraph_capture_sizes)
    seqs, batched = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if limit is not None:
        batched = min(batched, limit)
    if (ranks := _padding_ranks(vllm_config)) > 1:
        batched = min(batched, max(own[-1], LARGEST_MIXED // ranks))
    v2 = uses_v2(vllm_config)
    # With FULL_DECODE_ONLY batches with prompts have no graphs.
    wants_mixed = gates.read(gate_of(CAPTURE_SIZES)).text == "mixed"
    mixes = limit is None and wants_mixed and compilation.cudagraph_mode.mixed_mode().name != "NONE"
    mixed = _largest_with_prompts(vllm_config, v2) if mixes else 0
    # On the V1 runner the drafter's passes after the first have their own sizes.
    steps = v2 and block > 2 and spec.method not in MASK_METHODS
    sizes = list(capture_sizes(block, seqs, batched, own, mixed=mixed, steps=steps))
    if v2 and mixed:
        # A step that computes as much of prompts as it may has this many tokens. V1 rounds its sizes up.
        sizes = sorted({*sizes, min(batched, mixed)})
    if sizes == own:
        blocks = "hold every decode batch" if limit is None else f"have each whole block up to {limit} tokens"
        return f"its {len(own)} sizes {blocks}", ""
    vars(compilation)[_VLLMS] = own, compilation.max_cudagraph_capture_size
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]
    if limit is None:
        largest = vars(compilation)[_OWN] = min(_whole_blocks(own[-1], block), batched)
        vars(compilation)[_MIXED] = sizes[-1] if wants_mixed else largest
    # Larger sizes stay if batches with prompts gain from them.
    decodes = min(sizes[-1], max(LARGEST, own[-1]))
    return "", (
        f"{len(sizes)} sizes up to {sizes[-1]} tokens, {len(set(sizes) - set(own))} of them not vLLM's, for decode "
        f"batches of up to {min(decodes // block, seqs)} requests (max_num_seqs is {seqs})"
    )


def _largest_with_prompts(vllm_config: Any, v2: bool) -> int:
    """Return the tokens of the largest graph of a batch with prompts."""
    entry = run_records.current()
    full = v2 and entry is not None and V2_MIXED_GRAPHS in entry.live
    return LARGEST_MIXED_SMALL if full and launch_tokens(vllm_config) >= 6000 else LARGEST_MIXED


def launch_tokens(vllm_config: Any) -> int:
    """Return how many tokens a layer computes while the host launches it."""
    # Without a graph the host needs 1 ms or more. A dense layer has about 12 × hidden size² parameters, divided among
    # the ranks: at 2048 a GPU with 6e14 FLOP/s computes 6,000 tokens in 1 ms, at 4096 1,500.
    hidden: int = vllm_config.model_config.get_hidden_size()
    return 6000 * 2048**2 * int(vllm_config.parallel_config.tensor_parallel_size) // hidden**2 if hidden else 0


def _note_unserved(vllm_config: Any, option: str, step: int) -> None:
    """Note decode batches without a FULL graph and the size for them.

    Args:
        option: the option that takes the size, a multiple of `step` tokens.
    """
    compilation, scheduler, entry = vllm_config.compilation_config, vllm_config.scheduler_config, run_records.current()
    mode = compilation.cudagraph_mode
    if entry is None or mode.decode_mode().name != "FULL":
        # Without any FULL graph of decode batches, only the mode helps.
        return
    block = _block(vllm_config)
    top = min(scheduler.max_num_seqs, min(LARGEST, scheduler.max_num_batched_tokens) // block)
    served = served_requests(
        block,
        scheduler.max_num_seqs,
        compilation.cudagraph_capture_sizes,
        separate=mode.separate_routine(),
        v2=uses_v2(vllm_config),
        vllm=Version(entry.vllm_version or "0"),
    )
    missing = [count for count in range(1, top + 1) if count not in served]
    if missing:
        size = _whole_blocks(missing[-1] * block, step)
        text = f"{_ranges(missing)} of {scheduler.max_num_seqs} requests; {option} with {size} covers them"
        if entry.decisions.get(UNSERVED) != text:
            logger.info("%s: %s", UNSERVED, text)
        run_records.note(UNSERVED, text)


def served_requests(
    block: int, max_num_seqs: int, sizes: Sequence[int], *, separate: bool, v2: bool, vllm: Version
) -> frozenset[int]:
    """Return the request counts of decode batches with a FULL graph.

    Args:
        block: tokens of a request in a decode batch, 1 + num_speculative_tokens.
        sizes: `cudagraph_capture_sizes`, in tokens, ascending.
        separate: whether decode batches have their own FULL graphs; else each FULL graph takes any batch.
    """
    largest = max(sizes, default=0)
    graphs = set(sizes)
    if separate:
        if not v2 or vllm >= Version("0.25"):
            graphs = {_whole_blocks(size, block) for size in sizes}
        graphs = {size for size in graphs if block <= size <= min(largest, block * max_num_seqs)}
        if not graphs and not v2 and block <= largest:
            graphs = {block}
    # The next size decides; up to 0.28 also one whose only graph is PIECEWISE.
    deciding = graphs.union(sizes) if separate and v2 and vllm < Version("0.29") else graphs
    nexts = {n: min((size for size in deciding if size >= n * block), default=0) for n in range(1, max_num_seqs + 1)}
    return frozenset(count for count, size in nexts.items() if size in graphs)


def _ranges(counts: Sequence[int]) -> str:
    """Name ascending counts: "5 and 6", "1, 3 to 9"."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][-1] == count - 1:
            runs[-1].append(count)
        else:
            runs.append([count])
    named = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return ", ".join(named)


def leave_mixed_to_vllm(vllm_config: Any) -> None:
    """Drop the plugin's prompt-only sizes, for platforms with few graphs per process."""
    compilation = vllm_config.compilation_config
    own = largest_own(compilation)
    if own is None:
        return
    vars(compilation)[_MIXED] = own
    decodes = min(LARGEST, vllm_config.scheduler_config.max_num_seqs * _block(vllm_config))
    sizes = [size for size in compilation.cudagraph_capture_sizes if size <= max(own, decodes)]
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]


# -- in a worker ------------------------------------------------------------------------------------------------------


def largest_own(compilation_config: Any) -> int | None:
    """Return vLLM's largest size in tokens; None if no larger is added."""
    own: int | None = vars(compilation_config).get(_OWN)
    return own


def why_left(compilation_config: Any) -> str | None:
    """Return why the sizes are not the plugin's, or None."""
    reason: str = vars(compilation_config).get(_LEFT, "vLLM's own platform class has chosen them")
    return reason or None


def has_sizes(compilation_config: Any) -> bool:
    return _VLLMS in vars(compilation_config)


def added_sizes(compilation_config: Any, block: int) -> frozenset[int]:
    """Return the sizes that the V1 runner captures only with the plugin.

    Args:
        block: tokens of a request in a decode batch. The V1 runner rounds its sizes up to multiples of it.
    """
    own, largest = vars(compilation_config)[_VLLMS]
    rounded = {_whole_blocks(size, block) for size in own}
    return frozenset(compilation_config.cudagraph_capture_sizes) - {size for size in rounded if size <= largest}


def leave_to_vllm(compilation_config: Any) -> None:
    """Restore vLLM's own sizes, after the capture of added sizes failed."""
    attributes = vars(compilation_config)
    sizes, largest = attributes.pop(_VLLMS)
    for name in (_OWN, _MIXED):
        attributes.pop(name, None)
    compilation_config.cudagraph_capture_sizes, compilation_config.max_cudagraph_capture_size = sizes, largest


@contextmanager
def vllms_sizes(compilation_config: Any) -> Iterator[None]:
    """Use only vLLM's own sizes inside the context."""
    attributes = vars(compilation_config)
    before = {name: attributes[name] for name in (_VLLMS, _OWN, _MIXED, *_SIZES) if name in attributes}
    if _VLLMS in attributes:
        leave_to_vllm(compilation_config)
    try:
        yield
    finally:
        attributes.update(before)


def largest_mixed(compilation_config: Any) -> int | None:
    """Return the largest mixed graph's tokens; None if :func:`largest_own` is None."""
    largest: int | None = vars(compilation_config).get(_MIXED)
    return largest


def piecewise_sizes(compilation_config: Any) -> Sequence[int]:
    """Return the PIECEWISE sizes, for the V1 runner's patched `CudagraphDispatcher`."""
    return _up_to(largest_mixed(compilation_config), compilation_config.cudagraph_capture_sizes)


def full_mixed_sizes(compilation_config: Any) -> Sequence[int] | None:
    """Return the sizes of V1's FULL graphs of mixed batches.

    None: this engine has no such graphs. Empty: their capture failed.
    """
    sizes: Sequence[int] | None = vars(compilation_config).get(_FULL_MIXED)
    return sizes


def set_full_mixed_sizes(compilation_config: Any, sizes: Sequence[int]) -> None:
    """Set what :func:`full_mixed_sizes` returns, in ascending order."""
    vars(compilation_config)[_FULL_MIXED] = tuple(sizes)


def own_sizes(compilation_config: Any) -> Sequence[int]:
    """Return the sizes up to vLLM's largest."""
    return _up_to(largest_own(compilation_config), compilation_config.cudagraph_capture_sizes)


def _up_to(bound: int | None, sizes: Sequence[int]) -> Sequence[int]:
    return sizes if bound is None else [size for size in sizes if size <= bound]


def sampled(compilation_config: Any, descs: Sequence[Any]) -> list[Any]:
    """Choose the graphs that vLLM captures to estimate one mode's memory.

    `descs` are the `BatchDescriptor` of all graphs of the mode, largest first. The result is in the order of capture;
    its last graph stands for each but the first (:func:`two_samples`). vLLM captures the two largest graphs, and counts
    the second one's memory for each further graph. At 512 tokens that is little. At 4096 a part is memory that later
    graphs use again, and an estimate of several times the true memory makes the KV cache smaller. The smallest graph's
    memory is its own.
    """
    own, first = largest_own(compilation_config), list(descs[:2])
    if own is None or not first or first[0].num_tokens <= own:
        return first
    # FlashAttention's buffers have more parts at vLLM's own sizes.
    own_largest = [desc for desc in descs if desc.num_tokens <= own][:1]
    return list(dict.fromkeys([*first, *own_largest, descs[-1]]))


def two_samples(samples: list[int]) -> tuple[list[int], int]:
    """Return the first and last sample, and the sum of the rest.

    vLLM reads the samples and adds the sum to its estimate. `samples` are bytes of the graphs of :func:`sampled`, in
    the order of capture.
    """
    return (samples, 0) if len(samples) < 3 else ([samples[0], samples[-1]], sum(samples[1:-1]))


def max_num_splits(builder: Any, num_tokens: int, max_query_len: int = 1) -> int:
    """Return FlashAttention 3's bound on the parts of a sequence.

    FlashAttention's patched metadata builders call this. vLLM allows 32 parts for each batch up to the largest size,
    captured or not, and the kernel allocates float32 buffers of [parts, heads, tokens, head size] for them: at 32 heads
    of 128, 256 MiB for 512 tokens, and a GiB for 2048. Above vLLM's own sizes the bound keeps these buffers within
    their size at vLLM's largest; it leaves some parts for a long sequence among short ones. A replay has the bound of
    its capture, because no graph takes batches on both sides.

    Args:
        max_query_len: the longest request's tokens. Above a decode batch's, the batch has a FULL graph only on the V1
            runner, which then tells the builder all the graph's tokens (`v1/mixed_graphs.py`).
    """
    splits: int = builder.max_num_splits
    own = largest_own(builder.vllm_config.compilation_config)
    if own is None or num_tokens <= own:
        return splits
    spec = builder.vllm_config.speculative_config
    in_mixed_graph = max_query_len == num_tokens and full_mixed_sizes(builder.vllm_config.compilation_config)
    if max_query_len > (1 if spec is None else 1 + spec.num_speculative_tokens) and not in_mixed_graph:
        # As without the larger sizes: the kernel decides.
        return 0
    # Larger graphs hold no decode batch.
    largest: int = min(builder.max_cudagraph_size, LARGEST_MIXED)
    return min(splits, max(1, splits * own // largest))
