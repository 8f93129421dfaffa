# SPDX-License-Identifier: Apache-2.0
"""Settings that were measured to be faster than the one that an engine has, as advice.

Advice is given for what was measured alone: the same vLLM, device, method and number of drafted tokens. The ratios are
those of results files of `vllm-hwplugin bench`, whose sides ran in turn; a test computes them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from packaging.version import Version

from vllm_hwplugin.record import Use
from vllm_hwplugin.spec_decode.features import V1_DRAFT_PHASE, V1_STEP_INPUTS

#: Where the files are, in the source tree.
FOLDER: Final = "benchmarks/results"


@dataclass(frozen=True)
class Measured:
    """Tokens/s of Model Runner V2 by those of the V1 runner, both with the plugin.

    Attributes:
        files: in `FOLDER`.
        shapes: the dense targets, as `vllm-hwplugin bench --shape` names them, one a file.
        low: the lowest ratio of all shapes and batch sizes, rounded down to two digits.
        high: the highest, rounded up.
    """

    files: tuple[str, ...]
    vllm: str
    device: str
    method: str
    num_speculative_tokens: int
    shapes: tuple[str, ...]
    low: float
    high: float


MRV2_BY_V1: Final = (
    Measured(
        ("engines-h200-vllm-0.26.0-eagle3-0.6b.json",),
        "0.26.0",
        "NVIDIA H200",
        "eagle3",
        3,
        ("0.6b",),
        low=1.01,
        high=1.12,
    ),
    Measured(
        ("engines-h200-vllm-0.26.0-dflash-0.6b.json",),
        "0.26.0",
        "NVIDIA H200",
        "dflash",
        7,
        ("0.6b",),
        low=1.01,
        high=1.15,
    ),
)

# Have to be used for a worker to be as the V1 side was.
_V1_HAD: Final = (V1_DRAFT_PHASE, V1_STEP_INPUTS)


@dataclass(frozen=True)
class Setting:
    """What has to agree with a measurement.

    Attributes:
        runner_was_named: whether the user set `VLLM_USE_V2_MODEL_RUNNER`.
        dense: neither a mixture of experts nor a hybrid of attention and other layers.
        devices: that one replica of the model runs on.
        full_graphs: whether the target has FULL CUDA graphs.
    """

    vllm: Version
    device: str
    runner: str
    runner_was_named: bool
    method: str | None
    num_speculative_tokens: int
    dense: bool
    devices: int
    full_graphs: bool


def advice(setting: Setting, uses: Mapping[str, Use]) -> str | None:
    """The setting that was measured to be faster, and where; None where nothing was measured.

    Args:
        setting: the worker's.
        uses: what it uses, by feature.
    """
    # Where vLLM itself chose V1, the other runner lacks something that the engine needs.
    if setting.runner != "V1" or not setting.runner_was_named:
        return None
    if not (setting.dense and setting.full_graphs and setting.devices == 1):
        return None
    for found in MRV2_BY_V1:
        if (
            found.low > 1
            and setting.vllm == Version(found.vllm)
            and setting.device == found.device
            and setting.method == found.method
            and setting.num_speculative_tokens == found.num_speculative_tokens
            and all(_used(uses, feature) for feature in _V1_HAD)
        ):
            return (
                f"Without VLLM_USE_V2_MODEL_RUNNER=0, Model Runner V2 with its features gave {found.low:.2f} to "
                f"{found.high:.2f} times the tokens/s of V1 with these ({found.method} "
                f"k={found.num_speculative_tokens}, dense, {' and '.join(found.shapes)}, {found.device}, vLLM "
                f"{found.vllm}; {FOLDER}: {', '.join(found.files)})"
            )
    return None


def _used(uses: Mapping[str, Use], feature: str) -> bool:
    return feature in uses and uses[feature]["used"]
