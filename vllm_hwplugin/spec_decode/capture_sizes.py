# SPDX-License-Identifier: Apache-2.0
"""Choose the capture sizes of an engine with a drafter, where the user names no list of them.

A decode batch has a FULL graph if its tokens are a whole multiple of 1 + k, and no more than the largest size. vLLM's
own list counts tokens and ends at 512 of them, which are 128 requests with three drafts and 32 with fifteen; larger
decode batches run without any graph. To these sizes come multiples of 1 + k tokens, up to `LARGEST`, and for batches
with prompts up to `LARGEST_MIXED`. The sizes follow from the configuration, so each start has the same.

Where the user names only the largest size (`max_cudagraph_capture_size`), the whole blocks up to it are added and
nothing above: vLLM's list ends at a multiple of 8 or 16 tokens, and the fullest decode batches have no graph.

vLLM calls a platform twice in `VllmConfig.__post_init__`: before it fills in defaults, and when everything is decided.
The first call leaves on the configuration object what the user named, and the second takes it away. Workers read plain
attributes of the `CompilationConfig`: pickled, but not part of vLLM's hash. No torch is imported here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from packaging.version import Version

from vllm_hwplugin import gates, journal
from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.features import CAPTURE_SIZES, gate_of
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS, TRIED_METHODS

logger = logging.getLogger("vllm.hwplugin")

#: Tokens of the largest decode batch that is captured without being asked for: 512 requests of four, 128 of sixteen. A
#: larger one keeps a device busy for longer than the host takes to launch its parts.
LARGEST: Final = 2048
#: And of the largest batch with prompts. One in which several requests begin has more than two thousand.
LARGEST_MIXED: Final = 4096
# Sizes in one octave of request counts. A batch is padded by less than the inverse of it.
_RUNGS_PER_OCTAVE: Final = 8
#: The note on decode batches that no FULL graph serves.
UNSERVED: Final = "decode batches without a FULL graph"
#: The largest size that the user named without a list, or None; not there where a list is named.
_LIMIT: Final = "_hwplugin_largest_named"
#: Why the sizes are not the plugin's; empty where they are.
_LEFT: Final = "_hwplugin_sizes_left"
_OWN: Final = "_hwplugin_own_capture_size"
_MIXED: Final = "_hwplugin_largest_mixed"
_VLLMS: Final = "_hwplugin_vllms_sizes"
_SIZES: Final = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
#: Largest sizes that vLLM sets for a model where the user names none (`vllm/model_executor/models/config.py`). The
#: platform is called afterwards and cannot tell such a size from the same number named by the user.
MODEL_DEFAULTS: Final = {"GptOssForCausalLM": 1024}


class CaptureSizesError(HwpluginError, RuntimeError):
    """Strict mode does not let a fault in the choice of sizes pass."""


def capture_sizes(
    block: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    own_sizes: Iterable[int],
    *,
    mixed: bool = False,
    steps: bool = False,
) -> tuple[int, ...]:
    """The sizes of an engine with a drafter, in tokens, ascending.

    Those of vLLM from a block on become whole blocks, as the V1 runner makes them anyway: Model Runner V2 of 0.25 to
    0.28 looks for a decode batch's FULL graph at the next size only, and a size that is no whole block has none. The
    fullest decode batch has a size of its own, up to `LARGEST`. Between vLLM's largest and that there are eight an
    octave, or up to `LARGEST_MIXED` for batches with prompts; the fullest decode batch has one up to there as well,
    because a DFlash drafter of the V1 runner has buffers for no larger one.

    Args:
        block: tokens of a request in a decode batch, 1 + num_speculative_tokens.
        max_num_seqs: requests in a batch, at most.
        max_num_batched_tokens: tokens in a batch, at most.
        own_sizes: what vLLM captures by itself, in tokens.
        mixed: whether batches with prompts are to have larger graphs, too.
        steps: whether graphs of these sizes, up to `max_num_seqs`, draft with one token a request. Then that is a size
            where vLLM's reach it. So are the whole blocks on both sides: in 0.25 to 0.28 decode batches of the one
            would else find it, and others the decode batch's graph of the other.
    """
    own = {size if size < block else min(_whole_blocks(size, block), max_num_batched_tokens) for size in own_sizes}
    largest = max(own)
    bound, most = (min(max_num_batched_tokens, max(one, largest)) // block for one in (LARGEST, LARGEST_MIXED))
    tops = {min(max_num_seqs, one) for one in ((bound, most) if mixed else (bound,))} - {0}
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
    """Ascending from 1 to `top`: all up to 16, then eight an octave."""
    count = 1
    while count < top:
        yield count
        octave = 1 << (count.bit_length() - 1)
        count += max(1, octave // _RUNGS_PER_OCTAVE)
    if top > 0:
        yield top


# -- while vLLM makes a configuration ---------------------------------------------------------------------------------


def note_user_sizes(vllm_config: Any) -> None:
    """Remember what the user named; for `apply_config_platform_defaults`, before vLLM fills in its own sizes.

    Args:
        vllm_config: the `VllmConfig` that is being made.
    """
    compilation, model = vllm_config.compilation_config, getattr(vllm_config, "model_config", None)
    if compilation.cudagraph_capture_sizes is None:
        largest = compilation.max_cudagraph_capture_size
        defaults = {MODEL_DEFAULTS.get(name) for name in getattr(model, "architectures", None) or ()}
        vars(vllm_config)[_LIMIT] = None if largest in defaults else largest


def check_and_update_config(vllm_config: Any) -> bool:
    """Set the sizes of an engine with a drafter, unless the user named a list.

    For `check_and_update_config` of a platform, after its base class has decided the cudagraph mode.

    Args:
        vllm_config: the `VllmConfig` that is being made.

    Returns:
        Whether the user named neither a list nor the largest size.

    Raises:
        CaptureSizesError: the plugin failed, in strict mode.
    """
    listed = _LIMIT not in vars(vllm_config)
    limit: int | None = vars(vllm_config).pop(_LIMIT, None)
    unnamed = not listed and limit is None
    spec, compilation = vllm_config.speculative_config, vllm_config.compilation_config
    # A configuration that is made from another one has its sizes.
    if spec is None or (listed and _LEFT in vars(compilation)):
        return unnamed
    if spec.method not in TRIED_METHODS:
        vars(compilation)[_LEFT] = f"the speculative method is {spec.method}"
        return unnamed
    try:
        reason = "cudagraph_capture_sizes are named" if listed else _why_left(vllm_config)
        reason, said = _set(vllm_config, limit) if reason is None else (reason, "")
        vars(compilation)[_LEFT] = reason
        said = said or f"left to vLLM: {reason}"
        _note_unserved(vllm_config, "cudagraph_capture_sizes" if listed else "max_cudagraph_capture_size")
    except Exception as error:
        said = f"left to vLLM: {type(error).__name__}: {error}"
        if gates.read(gates.STRICT).flag:
            raise CaptureSizesError(
                f"{CAPTURE_SIZES}: {said}, a fault in vllm-hwplugin; set {gate_of(CAPTURE_SIZES)}=off, and report it"
            ) from error
        logger.exception("%s: the sizes are left to vLLM, because the plugin failed", CAPTURE_SIZES)
    journal.note(CAPTURE_SIZES, said)
    return unnamed


def _why_left(vllm_config: Any) -> str | None:
    """Why the sizes stay as vLLM has them, None where they are to be set."""
    compilation, parallel, entry = vllm_config.compilation_config, vllm_config.parallel_config, journal.current()
    if entry is None or CAPTURE_SIZES not in entry.live:
        reason = "" if entry is None else entry.features.get(CAPTURE_SIZES, {}).get("reason") or entry.error
        return f"{CAPTURE_SIZES} is not live{f' ({reason})' if reason else ''}"
    mode = compilation.cudagraph_mode
    if not (mode.separate_routine() and mode.decode_mode().name == "FULL"):
        return f"cudagraph_mode is {mode.name}"
    if not compilation.cudagraph_capture_sizes:
        return "nothing is captured"
    if compilation.compile_sizes:
        # vLLM ends the start where one of them is padded.
        return "compile_sizes are given"
    if parallel.data_parallel_size > 1:
        return "a rank of data parallelism pads its batches to those of others"
    model = getattr(vllm_config, "model_config", None)
    if any("DeepseekV41" in name for name in getattr(model, "architectures", None) or ()):
        return "DeepSeek V4.1 replays layers in graphs whose sizes and buffers follow from these"
    # Not there from 0.32 on.
    if parallel.tensor_parallel_size > 1 and getattr(compilation.pass_config, "enable_sp", False):
        return "with sequence parallelism they also have to be multiples of the tensor parallel size"
    if vllm_config.lora_config is not None:
        return "with LoRA each of them is captured several times"
    if getattr(vllm_config.speculative_config, "num_speculative_tokens_per_batch_size", None):
        return "the number of drafts changes from step to step"
    return None


def _set(vllm_config: Any, limit: int | None) -> tuple[str, str]:
    """Set the sizes, none above `limit`; return why they stay vLLM's after all, or what they are now."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    block = 1 + vllm_config.speculative_config.num_speculative_tokens
    own = list(compilation.cudagraph_capture_sizes)
    seqs, batched = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if limit is not None:
        batched = min(batched, limit)
    # With FULL_DECODE_ONLY batches with prompts have no graphs at all.
    mixed = limit is None and wants_mixed() and compilation.cudagraph_mode.mixed_mode().name != "NONE"
    # On the V1 runner the drafter's passes after the first have sizes of their own.
    v2: bool = getattr(vllm_config, "use_v2_model_runner", False)
    steps = v2 and block > 2 and vllm_config.speculative_config.method not in MASK_METHODS
    sizes = list(capture_sizes(block, seqs, batched, own, mixed=mixed, steps=steps))
    if sizes == own:
        blocks = "hold every decode batch" if limit is None else f"have each whole block up to {limit} tokens"
        return f"its {len(own)} sizes {blocks}", ""
    vars(compilation)[_VLLMS] = own, compilation.max_cudagraph_capture_size
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]
    if limit is None:
        vars(compilation)[_OWN] = min(_whole_blocks(own[-1], block), batched)
    # Larger ones are kept where batches with prompts gain by them.
    decodes = min(sizes[-1], max(LARGEST, own[-1]))
    return "", (
        f"{len(sizes)} sizes up to {sizes[-1]} tokens, {len(set(sizes) - set(own))} of them not vLLM's, for decode "
        f"batches of up to {min(decodes // block, seqs)} requests (max_num_seqs is {seqs})"
    )


def _note_unserved(vllm_config: Any, option: str) -> None:
    """Note which decode batches have no FULL graph, and the size that would give them one."""
    compilation, scheduler, entry = vllm_config.compilation_config, vllm_config.scheduler_config, journal.current()
    mode = compilation.cudagraph_mode
    if entry is None or mode.decode_mode().name != "FULL":
        # Without any FULL graph of decode batches the mode is what has to change.
        return
    block = 1 + vllm_config.speculative_config.num_speculative_tokens
    top = min(scheduler.max_num_seqs, min(LARGEST, scheduler.max_num_batched_tokens) // block)
    served = served_requests(
        block,
        scheduler.max_num_seqs,
        compilation.cudagraph_capture_sizes,
        separate=mode.separate_routine(),
        v2=getattr(vllm_config, "use_v2_model_runner", False),
        vllm=Version(entry.vllm_version or "0"),
    )
    missing = [count for count in range(1, top + 1) if count not in served]
    if missing:
        said = (
            f"{_ranges(missing)} of {scheduler.max_num_seqs} requests; {option} with {missing[-1] * block} serves them"
        )
        if entry.decisions.get(UNSERVED) != said:
            logger.info("%s: %s", UNSERVED, said)
        journal.note(UNSERVED, said)


def served_requests(
    block: int, max_num_seqs: int, sizes: Sequence[int], *, separate: bool, v2: bool, vllm: Version
) -> frozenset[int]:
    """Return the request counts of decode batches that vLLM runs in a FULL graph.

    Args:
        block: tokens of a request in a decode batch, 1 + num_speculative_tokens.
        max_num_seqs: requests in a batch, at most.
        sizes: `cudagraph_capture_sizes`, in tokens, ascending.
        separate: whether decode batches have FULL graphs of their own; else each FULL graph takes any batch.
        v2: whether Model Runner V2 looks for the graph.
        vllm: the version.
    """
    largest = max(sizes, default=0)
    graphs = set(sizes)
    if separate:
        if not v2 or vllm >= Version("0.25"):
            graphs = {_whole_blocks(size, block) for size in sizes}
        graphs = {size for size in graphs if block <= size <= min(largest, block * max_num_seqs)}
        if not graphs and not v2 and block <= largest:
            graphs = {block}
    if separate and v2 and vllm < Version("0.29"):
        # The next size decides, also one whose only graph is PIECEWISE.
        def has_graph(tokens: int) -> bool:
            return min((size for size in (*graphs, *sizes) if size >= tokens), default=0) in graphs
    else:

        def has_graph(tokens: int) -> bool:
            return tokens <= max(graphs, default=0)

    return frozenset(count for count in range(1, max_num_seqs + 1) if has_graph(count * block))


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
    """Take back what is for batches with prompts alone, where the sizes are the plugin's.

    For a platform on which a process cannot have as many graphs.
    """
    compilation, spec = vllm_config.compilation_config, vllm_config.speculative_config
    own = largest_own(compilation)
    if own is None:
        return
    vars(compilation)[_MIXED] = own
    decodes = min(LARGEST, vllm_config.scheduler_config.max_num_seqs * (1 + spec.num_speculative_tokens))
    kept = [size for size in compilation.cudagraph_capture_sizes if size <= max(own, decodes)]
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = kept, kept[-1]


# -- in a worker ------------------------------------------------------------------------------------------------------


def largest_own(compilation_config: Any) -> int | None:
    """Tokens of the largest size that vLLM would have captured; None where no size above that is the plugin's."""
    own: int | None = vars(compilation_config).get(_OWN)
    return own


def why_left(compilation_config: Any) -> str | None:
    """Return why the sizes are not the plugin's, or None where they are."""
    reason: str = vars(compilation_config).get(_LEFT, "vLLM's own platform class has chosen them")
    return reason or None


def has_sizes(compilation_config: Any) -> bool:
    """Whether some sizes are not vLLM's."""
    return _VLLMS in vars(compilation_config)


def added_sizes(compilation_config: Any, block: int) -> frozenset[int]:
    """Return the sizes that the V1 runner would not capture without the plugin.

    Args:
        block: tokens of a request in a decode batch. That runner rounds its sizes up to multiples of it.
    """
    own, largest = vars(compilation_config)[_VLLMS]
    rounded = {_whole_blocks(size, block) for size in own}
    return frozenset(compilation_config.cudagraph_capture_sizes) - {size for size in rounded if size <= largest}


def leave_to_vllm(compilation_config: Any) -> None:
    """Put vLLM's own sizes back, after a capture of the others has failed."""
    kept = vars(compilation_config)
    sizes, largest = kept.pop(_VLLMS)
    kept.pop(_OWN, None)
    compilation_config.cudagraph_capture_sizes, compilation_config.max_cudagraph_capture_size = sizes, largest


@contextmanager
def vllms_sizes(compilation_config: Any) -> Iterator[None]:
    """Have only vLLM's own sizes while it lasts."""
    kept = vars(compilation_config)
    before = {name: kept[name] for name in (_VLLMS, _OWN, *_SIZES) if name in kept}
    if _VLLMS in kept:
        leave_to_vllm(compilation_config)
    try:
        yield
    finally:
        kept.update(before)


def wants_mixed() -> bool:
    """Whether batches with prompts may have larger graphs than vLLM's, too, where these gain."""
    return gates.read(gate_of(CAPTURE_SIZES)).text == "mixed"


def largest_mixed(compilation_config: Any) -> int | None:
    """Return the tokens of the largest graph of a batch with prompts; None where :func:`largest_own` is None."""
    own = largest_own(compilation_config)
    if own is None:
        return None
    largest: int = compilation_config.cudagraph_capture_sizes[-1] if wants_mixed() else own
    return int(vars(compilation_config).get(_MIXED, largest))


def piecewise_sizes(compilation_config: Any) -> Sequence[int]:
    """Return the sizes of PIECEWISE graphs on the V1 runner, for its patched `CudagraphDispatcher`."""
    return _up_to(largest_mixed(compilation_config), compilation_config.cudagraph_capture_sizes)


def own_sizes(compilation_config: Any) -> Sequence[int]:
    """Sizes up to vLLM's largest."""
    return _up_to(largest_own(compilation_config), compilation_config.cudagraph_capture_sizes)


def _up_to(bound: int | None, sizes: Sequence[int]) -> Sequence[int]:
    return sizes if bound is None else [size for size in sizes if size <= bound]


def sampled(compilation_config: Any, descs: Sequence[Any]) -> list[Any]:
    """Which graphs vLLM is to capture to estimate what all of one mode take, in the order of capture; the last stands
    for each but the first (:func:`two_samples`).

    vLLM captures the two largest, and counts what the second one takes for each further graph. Of 512 tokens that is
    little. Of 4096 a part is memory that later graphs use again, and an estimate of several times what is taken makes
    the KV cache smaller. What the smallest graph takes is its own.

    Args:
        compilation_config: of the engine.
        descs: `BatchDescriptor` of all graphs of the mode, largest first.
    """
    own, first = largest_own(compilation_config), list(descs[:2])
    if own is None or not first or first[0].num_tokens <= own:
        return first
    # FlashAttention's buffers have more parts at vLLM's own sizes.
    own_largest = [desc for desc in descs if desc.num_tokens <= own][:1]
    return list(dict.fromkeys([*first, *own_largest, descs[-1]]))


def two_samples(samples: list[int]) -> tuple[list[int], int]:
    """Of the memory that graphs of :func:`sampled` took: the two samples that vLLM reads, which are the first and the
    last, and what the others add to its estimate.

    Args:
        samples: bytes, in the order of capture.
    """
    return (samples, 0) if len(samples) < 3 else ([samples[0], samples[-1]], sum(samples[1:-1]))


def max_num_splits(builder: Any, num_tokens: int, max_query_len: int = 1) -> int:
    """FlashAttention 3's bound on the parts of a sequence; called by its patched metadata builders.

    vLLM allows 32 for each batch up to the largest size, captured or not, and the kernel takes float32 buffers of
    [parts, heads, tokens, head size] for them: at 32 heads of 128, 256 MiB for 512 tokens, and a GiB for 2048. Above
    vLLM's own sizes the bound is so low that they need no more than at vLLM's largest; it leaves some for a long
    sequence among short ones. A replay has the bound of its capture, because no graph serves batches on both sides.

    Args:
        builder: of FlashAttention's metadata.
        num_tokens: of the batch.
        max_query_len: of its requests. A batch with a longer one than a decode batch has none of these FULL graphs.
    """
    splits: int = builder.max_num_splits
    own = largest_own(builder.vllm_config.compilation_config)
    if own is None or num_tokens <= own:
        return splits
    if max_query_len > 1 + builder.vllm_config.speculative_config.num_speculative_tokens:
        # As without the larger sizes: the kernel decides by itself.
        return 0
    largest: int = builder.max_cudagraph_size
    return min(splits, max(1, splits * own // largest))
