# SPDX-License-Identifier: Apache-2.0
"""Check a DFlash engine's config before any weight is loaded.

Unpatched vLLM finds these errors late and says little: layers that the target does not have end as a shape error inside
the draft's first matrix product, and a backend without non-causal attention is refused once the target's weights are on
the device. No version runs such a config, so it is an error here. A config that some version runs is a warning (a block
that is too long only costs acceptance; one of several lists of layers may never be read), and an error only if
`VLLM_HWPLUGIN_DFLASH_FULL_GRAPH` is `on`.

The keys of config.json are from the published DFlash checkpoints (`block_size`, `num_target_layers` and `dflash_config`
with `target_layer_ids`) and from the `speculators` format as vLLM converts it (`eagle_aux_hidden_state_layer_ids`, no
block size).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.base.features import DFLASH_DRAFT_BACKEND, DFLASH_FULL_GRAPH, gate_of

logger = logging.getLogger("vllm.hwplugin")

_SLIDING = "sliding_attention"
_OWN_KEY = "eagle_aux_hidden_state_layer_ids"
_DECISION = "dflash-config"


class DFlashConfigError(HwpluginError, ValueError):
    """A DFlash draft, its target and the settings do not fit together. The message says what to change."""


class _Problem(NamedTuple):
    """What is wrong with a config, and whether some vLLM version still runs it."""

    text: str
    served: bool = False


def check(vllm_config: Any) -> None:
    """Refuse a DFlash config that cannot work; warn if it works badly.

    vLLM makes a config, of the target or of the draft, several times; each warning is logged once in a process, and
    noted in the run record.

    Raises:
        DFlashConfigError: the draft's layers or width do not fit the target, or the user named an attention backend for
            the draft that has no non-causal attention. If the switch is `on`, also if `num_speculative_tokens` does not
            fit the draft's block.
    """
    spec = vllm_config.speculative_config
    if spec is None or not spec.use_dflash() or spec.draft_model_config is None:
        return
    draft, config = spec.draft_model_config.model, spec.draft_model_config.hf_config
    # In a draft's VllmConfig `model_config` may be the draft's; `target_model_config` never is.
    target = spec.target_model_config or vllm_config.model_config
    # Whether the draft's `fc` reads several target layers; else it reads the target's last hidden states.
    uses_aux = bool(_stated(config, "use_aux_hidden_state", True))
    problems = (
        _block_problem(draft, config, spec.num_speculative_tokens),
        _layer_problem(draft, config, target) if uses_aux else None,
        _width_problem(draft, config, target, uses_aux),
        _backend_problem(draft, vllm_config) if _non_causal(config) else None,
    )
    present = [problem for problem in problems if problem is not None]
    required = gates.demands(gate_of(DFLASH_FULL_GRAPH))
    for problem in present:
        if required or not problem.served:
            raise DFlashConfigError(problem.text)
    if present:
        _warn("; ".join(problem.text for problem in present))


@functools.lru_cache(maxsize=16)
def _warn(text: str) -> None:
    run_records.note(_DECISION, text)
    logger.warning("%s", text)


def _block_problem(draft: str, config: Any, num_speculative_tokens: int) -> _Problem | None:
    """Return why a stated block cannot hold the tokens, or None."""
    # Its tokens are the last accepted one and the masks after it.
    block_size = _positive(_stated(config, "block_size", None))
    if block_size is None or num_speculative_tokens < block_size:
        return None
    most = block_size - 1
    return _Problem(
        f"num_speculative_tokens={num_speculative_tokens} does not fit the DFlash draft {draft}: its config.json "
        f"says block_size {block_size}, which holds the last accepted token and {most} drafted ones; expected 1 "
        f"to {most}, and later tokens are hardly ever accepted; set num_speculative_tokens to {most} or less in "
        "--speculative-config",
        served=True,
    )


def _layer_problem(draft: str, config: Any, target: Any) -> _Problem | None:
    """Return why the target lacks layers that the draft reads, or None.

    Of several lists each version reads one: all read vLLM's own key if the config has it.
    """
    count = getattr(target.hf_text_config, "num_hidden_layers", None)
    if count is None:
        return None
    trained = _positive(getattr(config, "num_target_layers", None))
    made_for = f" (it was made for one of {trained} layers)" if trained else ""
    wrong: dict[str, str] = {}
    read: list[str] = []
    for where, ids, last in _aux_layers(config):
        read.append(where)
        last += count
        if outside := ", ".join(str(layer) for layer in ids if not 0 <= layer <= last):
            wrong[where] = (
                f"{where} {list(ids)} of the DFlash draft {draft} does not fit the target {target.model}: it has no "
                f"layer {outside}; the target has {count} layers, expected ids from 0 to {last}{made_for}; use "
                "the draft that was trained for this target"
            )
    if not wrong:
        return None
    read = [_OWN_KEY] if _OWN_KEY in read else read
    return _Problem(next(iter(wrong.values())), served=not all(where in wrong for where in read))


def _width_problem(draft: str, config: Any, target: Any, uses_aux: bool) -> _Problem | None:
    """Return why the target's width does not fit the draft, or None."""
    width = getattr(config, "hidden_size", None)
    expected = _positive((uses_aux and getattr(config, "target_hidden_size", None)) or width)
    actual = getattr(target.hf_text_config, "hidden_size", None)
    if expected is None or actual is None or expected == actual:
        return None
    key = "target_hidden_size or hidden_size" if uses_aux else "hidden_size"
    return _Problem(
        f"the DFlash draft {draft} reads target states of width {expected} ({key} of its config.json), but the "
        f"target {target.model} has hidden_size {actual}; use the draft that was trained for this target"
    )


def _backend_problem(draft: str, vllm_config: Any) -> _Problem | None:
    option, backend, way_out = _named_backend(vllm_config)
    if backend is None or _supports_non_causal(backend) is not False:
        return None
    return _Problem(
        f"{option}={backend.name} cannot serve the DFlash draft {draft}: the draft's attention is non-causal, and "
        f"{backend.get_path()} says that it has none; name a backend that has it, or {way_out}"
    )


def _named_backend(vllm_config: Any) -> tuple[str, Any, str]:
    """Return the option naming the draft's backend, that `AttentionBackendEnum`, and the cure."""
    spec = vllm_config.speculative_config
    if hasattr(spec, "attention_backend"):
        option = "attention_backend of --speculative-config"
        return option, spec.attention_backend, "leave the option out and vLLM chooses one for the draft"
    # vLLM 0.20 has one option for both models.
    entry = run_records.current()
    # If the feature is patched in, this version's target and draft no longer share one backend.
    apart = entry is not None and DFLASH_DRAFT_BACKEND in entry.live
    return (
        "--attention-backend",
        None if apart else vllm_config.attention_config.backend,
        f"let the draft have its own ({DFLASH_DRAFT_BACKEND}: vllm-hwplugin doctor says why that feature is off)",
    )


def _supports_non_causal(backend: Any) -> bool | None:
    """Return what the backend's class declares, or None if not importable."""
    try:
        backend_class = backend.get_class()
    except Exception as error:
        # A backend of another platform or without its library fails in its own way, which vLLM itself will report.
        logger.debug("attention backend %s cannot be asked for non-causal attention: %r", backend.name, error)
        return None
    return bool(backend_class.supports_non_causal())


def _aux_layers(config: Any) -> Iterator[tuple[str, Sequence[int], int]]:
    """Yield the lists that some version reads, in vLLM's order.

    With the list come its key in config.json and the highest id that a target of n layers has, minus n: -1 if ids
    count layers from 0, 0 if id i is the residual stream after i layers. vLLM up to 0.21 takes `target_layer_ids` as
    they are and later versions add 1. The checkpoints mean the output of layer i, so they never name the n-th.
    """
    own, eagle = _mapping(config, "dflash_config"), _mapping(config, "eagle_config")
    for where, value, last in (
        (_OWN_KEY, getattr(config, _OWN_KEY, None), 0),
        ("dflash_config.target_layer_ids", own.get("target_layer_ids"), -1),
        (f"eagle_config.{_OWN_KEY}", eagle.get(_OWN_KEY), 0),
        ("dflash_config.layer_ids", own.get("layer_ids"), 0),
    ):
        if value and isinstance(value, Sequence) and all(isinstance(layer, int) for layer in value):
            yield where, value, last


def _non_causal(config: Any) -> bool:
    """Whether a layer is non-causal in every version's reading of the config.

    `causal` counts since 0.23, `is_causal` since 0.28, and since 0.25 a draft without either is causal in its sliding
    layers. The first versions take every draft for non-causal; for a causal one they report that themselves.
    """
    stated = [getattr(config, "is_causal", None), _mapping(config, "dflash_config").get("causal")]
    stated = [causal for causal in stated if causal is not None]
    if stated:
        return not any(stated)
    layer_types = getattr(config, "layer_types", None)
    return not layer_types or any(kind != _SLIDING for kind in layer_types)


def _mapping(config: Any, name: str) -> Mapping[str, Any]:
    value = getattr(config, name, None)
    return value if isinstance(value, Mapping) else {}


def _stated(config: Any, name: str, default: Any) -> Any:
    """Return a config's value; `dflash_config` comes first, as in vLLM."""
    return _mapping(config, "dflash_config").get(name, getattr(config, name, default))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
