# SPDX-License-Identifier: Apache-2.0
"""The choice of an attention backend on MUSA: by name, then by the backend's own declarations."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from vllm_hwplugin.attention.backends import MUSA
from vllm_hwplugin.attention.capabilities import declared
from vllm_hwplugin.musa import _selector as attention


class Config(NamedTuple):
    head_size: int = 128
    use_mla: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False


def backend(name: str, *reasons: str, error: Exception | None = None, overridden: bool = False) -> Any:
    asked: list[dict[str, Any]] = []

    def validate_configuration(**arguments: Any) -> list[str]:
        asked.append(arguments)
        return list(reasons)

    cls = type(f"{name}Backend", (), {"validate_configuration": staticmethod(validate_configuration)})
    cls.__module__ = "vllm.made.up"

    def get_class() -> type:
        if error is not None:
            raise error
        return cls

    return SimpleNamespace(name=name, get_class=get_class, is_overridden=lambda: overridden, asked=asked)


def members(*backends: Any) -> dict[str, Any]:
    return {item.name: item for item in backends}


TRITON, FLEX, MLA = backend("TRITON_ATTN"), backend("FLEX_ATTENTION"), backend("TRITON_MLA")
FLASHMLA = backend("FLASHMLA", "vLLM's own class, which is not for this device")
FLASH = backend("FLASH_ATTN", "vLLM's own class, which is not for this device")
OWN = "vllm_hwplugin.musa.attention"


@pytest.fixture(autouse=True)
def _no_mate_and_a_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mate", None)
    monkeypatch.setattr(attention.versions, "installed", {"triton": "3.6.0"}.get)


def with_mate(monkeypatch: pytest.MonkeyPatch, *reasons: str) -> None:
    """A host where the plugin's FLASH_ATTN can be imported, and refuses for these reasons."""
    own = backend("MusaFlashAttention", *reasons).get_class()
    own.declarations = declared(MUSA.declared, "0.26.0")
    own.__module__ = OWN
    module = ModuleType(OWN)
    module.MusaFlashAttentionBackend = own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, OWN, module)


def test_mates_flash_attn_is_first_where_it_is_there_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = backend("TRITON_ATTN")
    known = members(triton, FLASH, FLEX)
    assert attention.choose(None, Config(head_size=64), (3, 1), known) == "vllm.made.up.TRITON_ATTNBackend"
    assert triton.asked == [Config(head_size=64)._asdict() | {"device_capability": (3, 1)}]
    with_mate(monkeypatch)
    assert attention.choose(None, Config(), None, known) == f"{OWN}.MusaFlashAttentionBackend"
    with_mate(monkeypatch, "head_size not supported")
    assert attention.choose(None, Config(), None, known) == "vllm.made.up.TRITON_ATTNBackend"


def test_mates_flashmla_is_first_for_mla_where_it_is_there_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    latent, known = Config(head_size=576, use_mla=True), members(MLA, FLASHMLA)
    monkeypatch.setitem(sys.modules, "vllm_hwplugin.musa.mla", None)
    assert attention.choose(None, latent, None, known) == "vllm.made.up.TRITON_MLABackend"
    with pytest.raises(ValueError, match=r"FLASHMLA: ModuleNotFoundError: .*Moore Threads' mate"):
        attention.choose(FLASHMLA, latent, None, known)
    own = ModuleType("vllm_hwplugin.musa.mla")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    for reasons, chosen in (((), "MusaFlashMLA"), (("block_size not supported",), "TRITON_MLA")):
        own.MusaFlashMLABackend = backend("MusaFlashMLA", *reasons).get_class()  # type: ignore[attr-defined]
        assert attention.choose(None, latent, None, known) == f"vllm.made.up.{chosen}Backend"
    theirs = backend("FLASHMLA", overridden=True)
    assert attention.choose(None, latent, None, members(MLA, theirs)) == "vllm.made.up.FLASHMLABackend"


@pytest.mark.parametrize("version", ["3.2.0", None])
def test_a_triton_that_cannot_compile_a_backend_is_not_chosen_for_it_unless_it_is_named(
    version: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention.versions, "installed", {"triton": version}.get)
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    monkeypatch.setattr(attention.logger, "propagate", True)
    known = members(TRITON, FLASH, FLEX, MLA, FLASHMLA)
    assert attention.choose(None, Config(), None, known) == "vllm.made.up.FLEX_ATTENTIONBackend"
    with pytest.raises(ValueError, match=r"TRITON_MLA: Triton .*--attention-backend TRITON_MLA"):
        attention.choose(None, Config(use_mla=True), None, known)
    # vLLM warns of its own, where this test is the first to import it.
    assert [item for item in caplog.records if item.name == "vllm.hwplugin"] == []
    caplog.clear()
    assert attention.choose(TRITON, Config(), None, known) == "vllm.made.up.TRITON_ATTNBackend"
    assert len(caplog.records) == 1
    theirs = backend("TRITON_MLA", overridden=True)
    assert (
        attention.choose(None, Config(use_mla=True), None, members(theirs, FLASHMLA))
        == "vllm.made.up.TRITON_MLABackend"
    )


def test_what_holds_for_text_only_is_not_chosen_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_mate(monkeypatch)
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    monkeypatch.setattr(attention.logger, "propagate", True)
    images = Config(use_mm_prefix=True)
    known = members(backend("TRITON_ATTN", "non-causal attention not supported"), FLASH, FLEX)
    assert attention.choose(None, images, None, known) == "vllm.made.up.FLEX_ATTENTIONBackend"
    assert caplog.records == []
    assert attention.choose(FLASH, images, None, known) == f"{OWN}.MusaFlashAttentionBackend"
    (record,) = caplog.records
    assert "mm_prefix for text only" in record.getMessage()


@pytest.mark.parametrize(
    "error",
    [AttributeError("module 'mate' has no attribute"), RuntimeError("no visible device"), ValueError("tvm_ffi")],
)
def test_a_mate_that_fails_when_it_is_imported_leads_to_another_backend_and_is_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise error

    monkeypatch.setitem(sys.modules, OWN, Fails(OWN))
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    monkeypatch.setattr(attention.logger, "propagate", True)
    known = members(backend("TRITON_ATTN", "non-causal attention not supported"), FLASH, FLEX)
    assert attention.choose(None, Config(), None, known) == "vllm.made.up.FLEX_ATTENTIONBackend"
    (record,) = caplog.records
    assert str(error) in record.getMessage()
    with pytest.raises(ValueError, match=rf"FLASH_ATTN: {type(error).__name__}: .*Moore Threads' mate"):
        attention.choose(FLASH, Config(), None, {})
