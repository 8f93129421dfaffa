# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 4 where it cannot run: when it is taken back, and what every vLLM makes of that."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.base import run_records
from vllm_hwplugin.platforms import _flash_attn_version

from ..conftest import versions
from .realvllm import REAL, Load, own

FILES = (*REAL.values(), "vllm/config/vllm.py", "vllm/model_executor/models/config.py")
every_version = pytest.mark.parametrize("version", versions(*FILES))


class Architecture(SimpleNamespace):
    """Of a model with layers of 256 and 512, as up to 0.27 and as later."""

    head_size = 512
    total_num_hidden_layers = 2
    per_layer_overrides = ({"head_size": 256}, {})

    def __getitem__(self, layer: int) -> Any:
        return SimpleNamespace(head_size=(256, 512)[layer])


def config(version: int | None = 4, **model: Any) -> Any:
    """A configuration of the gemma-4 kind."""
    text = SimpleNamespace(
        head_dim=256, global_head_dim=512, layer_types=["sliding_attention", "full_attention"], model_type="gemma4"
    )
    return SimpleNamespace(
        attention_config=SimpleNamespace(flash_attn_version=version, backend=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(
            **{"model_arch_config": Architecture(), "is_diffusion": False, "hf_text_config": text} | model
        ),
    )


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """What is noted; FlashAttention 4 lacks a package."""
    noted: dict[str, str] = {}
    monkeypatch.setattr(run_records, "note", noted.__setitem__)
    monkeypatch.setattr(_flash_attn_version, "missing_for_fa4", lambda: "no cutlass")
    monkeypatch.setattr(logging.getLogger("vllm.hwplugin"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.hwplugin")
    return noted


def update(vllm_config: Any, capability: tuple[int, int] | None = (9, 0)) -> int | None:
    """The version after the platform's turn."""
    device = None if capability is None else SimpleNamespace(major=capability[0], minor=capability[1])
    _flash_attn_version.check_and_update_config(vllm_config, lambda: device)
    version: int | None = vllm_config.attention_config.flash_attn_version
    return version


def test_a_version_that_cannot_run_is_taken_back_with_one_warning(
    told: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    # That of the target, and the copy of it for the draft.
    assert update(config()) is None
    assert update(config()) is None
    (warning,) = [item.getMessage() for item in caplog.records if item.levelno >= logging.WARNING]
    assert warning.startswith("attention: flash_attn_version=4 is reset: no cutlass. Heads up to 256 run on")
    for way_out in ("install these packages", "--attention-config.flash_attn_version 3", "VLLM_HWPLUGIN_ATTENTION=off"):
        assert way_out in warning
    (noted,) = told.items()
    assert noted[0] == "attention, FlashAttention version"
    assert noted[1].startswith("flash_attn_version=4 is reset: no cutlass")


@pytest.mark.parametrize(
    "case",
    [
        *({"capability": capability} for capability in ((8, 0), (10, 0), (12, 0), None)),
        {"model_arch_config": SimpleNamespace(head_size=256)},
        {"model_arch_config": SimpleNamespace(head_size=128, per_layer_overrides=[{}, {"head_size": 256}])},
        {"is_diffusion": True},
        {"missing": ""},
        {"gate": "off"},
        {"gate": "maybe"},
    ],
)
def test_where_it_can_run_or_the_plugin_has_nothing_for_the_model_it_stays(
    case: dict[str, Any], told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"capability": (9, 0), "missing": "no cutlass", "gate": "on"} | case
    monkeypatch.setenv("VLLM_HWPLUGIN_ATTENTION", asked.pop("gate"))
    missing, capability, made = asked.pop("missing"), asked.pop("capability"), config(**asked)
    monkeypatch.setattr(_flash_attn_version, "missing_for_fa4", lambda: missing)
    assert update(made, capability) == 4
    made.model_config = None
    assert update(made) == 4
    assert told == {}


# -- with vLLM's own text ----------------------------------------------------------------------------------------------


@every_version
def test_the_platform_class_does_it_after_vllm(
    version: str, real_vllm: Load, dflash: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_vllm(version)
    stock = importlib.import_module("vllm.platforms.cuda")
    interface = importlib.import_module("vllm.platforms.interface")
    cls = own("vllm_hwplugin.platforms.cuda").CudaPlatform
    monkeypatch.setattr(cls, "get_device_capability", lambda *_: interface.DeviceCapability(9, 0), raising=False)

    def sets(cls: type, vllm_config: Any) -> None:
        vllm_config.attention_config.flash_attn_version = 4

    monkeypatch.setattr(stock.CudaPlatformBase, "check_and_update_config", classmethod(sets))
    defaults = classmethod(lambda cls, vllm_config: dflash.append("vLLM's defaults"))
    monkeypatch.setattr(stock.CudaPlatformBase, "apply_config_platform_defaults", defaults, raising=False)
    made = config(None)
    cls().apply_config_platform_defaults(made)
    cls().check_and_update_config(made)
    assert made.attention_config.flash_attn_version is None
    assert dflash[:2] == ["vLLM's defaults", "note_user_sizes"]
    assert dflash[2:] == ["check_and_update_config", "set sizes", "end a compile range"]
