# SPDX-License-Identifier: Apache-2.0
"""What a platform class does for DFlash while vLLM makes a configuration.

vLLM calls a platform twice in `VllmConfig.__post_init__`: before it fills in defaults, and when everything is decided.
It does so for each configuration, also for those made by `dataclasses.replace` and for the draft's own, in the parent
and in workers. Both functions here therefore change nothing when they meet what they have made.

The first leaves what the user asked for on the configuration object itself, the second takes it away again. So it
belongs to that one object, is in no field (vLLM's hash, a copy and a pickle do not know it) and outlives nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_hwplugin import gates, journal, patching
from vllm_hwplugin.features import DFLASH_FULL_GRAPH, gate_of
from vllm_hwplugin.journal import Journal
from vllm_hwplugin.spec_decode import dflash_config
from vllm_hwplugin.spec_decode.dflash_config import DFlashConfigError
from vllm_hwplugin.spec_decode.dflash_sizes import capture_sizes, describe, explain

logger = logging.getLogger("vllm.hwplugin")

_CHECK = "dflash-config"
_DECISION = "dflash-capture-sizes"
_GATE = gate_of(DFLASH_FULL_GRAPH)
# DFlash's proposer is a subclass of the one that the drafter features patch, and shares the runner's code with it.
_FAMILIES = ("dflash-", "draft-")
_GIVEN = "_hwplugin_given_sizes"
_AS_CAPTURED = "cudagraph_capture_sizes"


@dataclass(frozen=True, slots=True)
class _Given:
    """`CompilationConfig`'s sizes as the user left them; None where nothing was said."""

    sizes: tuple[int, ...] | None
    largest: int | None
    compile_sizes: tuple[int | str, ...]


def note_user_sizes(vllm_config: Any) -> None:
    """Remember the user's capture sizes; for `apply_config_platform_defaults`, before vLLM fills in its own.

    Args:
        vllm_config: the `VllmConfig` that is being made.
    """
    vars(vllm_config)[_GIVEN] = _given(vllm_config.compilation_config)


def check_and_update_config(vllm_config: Any) -> None:
    """Check a DFlash configuration, see that DFlash's patches are in force, and set the capture sizes.

    For `check_and_update_config` of a platform, after its base class has decided the cudagraph mode. Configurations
    without DFlash are left alone, and so is the cudagraph mode.

    Args:
        vllm_config: the `VllmConfig` that is being made.

    Raises:
        DFlashConfigError: draft, target and settings do not fit together.
        InstallError: a patched module was imported too early to be patched in place, and its features would be half
            in force; or a whole feature is lost that way, or the plugin failed through a fault in it, which a gate at
            `on` or strict mode does not allow.
    """
    given = vars(vllm_config).pop(_GIVEN, None) or _given(vllm_config.compilation_config)
    spec = vllm_config.speculative_config
    if spec is None or not spec.use_dflash():
        return
    entry = patching.install()
    with _faults_are_no_end(_CHECK):
        dflash_config.check(vllm_config)
    # Normally all of them run patched: vLLM loads the plugin before it imports what the patches touch.
    patching.force([name for name in entry.live if name.startswith(_FAMILIES)])
    with _faults_are_no_end(_DECISION):
        reason = _why_left(vllm_config, entry)
        if reason is None:
            _set_sizes(vllm_config, given)
        else:
            journal.note(_DECISION, f"left to vLLM: {reason}")


@contextmanager
def _faults_are_no_end(decision: str) -> Iterator[None]:
    """Go on as stock vLLM where the plugin fails at something that vLLM can do without.

    Raises:
        DFlashConfigError: it was raised on purpose.
        InstallError: strict mode or the feature's gate does not let the fault pass.
    """
    try:
        yield
    except DFlashConfigError:
        raise
    except Exception as error:
        if _must_hold():
            raise patching.InstallError(
                f"a fault in vllm-hwplugin at {decision}, which strict mode or {_GATE}=on does not let pass: "
                f"{type(error).__name__}: {error}; set {_GATE}=auto and no strict mode to go on, and report it"
            ) from error
        logger.exception("DFlash: %s is left to vLLM, because the plugin failed", decision)
        journal.note(decision, f"left to vLLM: {type(error).__name__}: {error}")


def _must_hold() -> bool:
    try:
        return gates.read(gates.STRICT).flag or gates.demands(_GATE)
    except gates.GateError:
        # Reported when the patches were to be put in force, and an error then if strictness was asked for.
        return False


# -- capture sizes ----------------------------------------------------------------------------------------------------


def _given(compilation: Any) -> _Given:
    sizes = compilation.cudagraph_capture_sizes
    return _Given(
        sizes=None if sizes is None else tuple(sizes),
        largest=compilation.max_cudagraph_capture_size,
        compile_sizes=tuple(compilation.compile_sizes or ()),
    )


def _why_left(vllm_config: Any, entry: Journal) -> str | None:
    """Why the sizes stay as vLLM has them, None where they are to be set."""
    compilation = vllm_config.compilation_config
    if _uses_v2_runner(vllm_config):
        return "Model Runner V2 makes its own sizes"
    if DFLASH_FULL_GRAPH not in entry.live:
        reason = entry.features.get(DFLASH_FULL_GRAPH, {}).get("reason") or entry.error
        return f"{DFLASH_FULL_GRAPH} is not live{f' ({reason})' if reason else ''}"
    if not compilation.cudagraph_mode.has_full_cudagraphs():
        return f"cudagraph_mode is {compilation.cudagraph_mode.name}"
    if not compilation.cudagraph_capture_sizes:
        return "nothing is captured"
    if vllm_config.parallel_config.tensor_parallel_size > 1 and compilation.pass_config.enable_sp:
        return "with sequence parallelism they also have to be multiples of the tensor parallel size"
    return None


def _uses_v2_runner(vllm_config: Any) -> bool:
    try:
        return bool(vllm_config.use_v2_model_runner)
    except AttributeError:
        # Up to vLLM 0.21 the variable alone decides.
        import vllm.envs as envs

        return bool(envs.VLLM_USE_V2_MODEL_RUNNER)


def _set_sizes(vllm_config: Any, given: _Given) -> None:
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    block = 1 + vllm_config.speculative_config.num_speculative_tokens
    before = list(compilation.cudagraph_capture_sizes)
    found = capture_sizes(
        block,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        given.sizes,
        given.largest,
        default_sizes=before,
    )
    if not found.sizes:
        largest = compilation.max_cudagraph_capture_size
        journal.note(_DECISION, f"left to vLLM: no block of {block} tokens fits in {largest}, the largest allowed")
        return
    text = describe(found.sizes, block, scheduler.max_num_seqs)
    after = list(found.sizes)
    if after == before and _on_record(text):
        # A configuration that came from one with these sizes; why it has them is in the journal already.
        return
    if (lost := explain(found, block)) is not None:
        text = f"{text}; {lost}"
        logger.warning("DFlash: %s; captured: %s", lost, after)
    else:
        logger.info("DFlash: %s", text)
    journal.note(_DECISION, text)
    compilation.cudagraph_capture_sizes = after
    compilation.max_cudagraph_capture_size = after[-1]
    if _AS_CAPTURED in given.compile_sizes:
        # vLLM has put its own sizes in the place of the word; this lets it do so again with these.
        compilation.compile_sizes = list(given.compile_sizes)
        compilation.post_init_cudagraph_sizes()


def _on_record(text: str) -> bool:
    entry = journal.current()
    return entry is not None and entry.decisions.get(_DECISION, "").startswith(text)
