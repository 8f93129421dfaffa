# SPDX-License-Identifier: Apache-2.0
"""Which class fits which host."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from vllm_hwplugin import musa
from vllm_hwplugin.musa.host import Musa
from vllm_hwplugin.platforms._offer import CLASSES, ask_vllm, decide, probe_musa

from . import standins
from .realvllm import own

TWO = Musa(devices=2)
NONE = Musa(missing=("torch_musa",))


@pytest.mark.parametrize(
    ("choice", "builtins", "musa", "kind", "words"),
    [
        ("auto", ("cuda",), TWO, "cuda", "vLLM's detection chooses CUDA"),
        ("auto", ("cpu",), TWO, None, "finds cpu"),
        ("auto", ("cuda", "tpu"), TWO, None, "finds cuda and tpu"),
        ("auto", (), TWO, "musa", "2 Moore Threads GPUs"),
        ("auto", (), NONE, None, "not installed for Moore Threads: torch_musa"),
        ("auto", (), Musa(trouble="OSError: libmtml.so"), None, "no Moore Threads GPU answers: OSError: libmtml.so"),
        ("auto", (), Musa(), None, "the driver counts none"),
        ("auto", None, TWO, None, "not loaded"),
        ("cuda", ("cuda",), TWO, "cuda", "VLLM_HWPLUGIN_PLATFORM=cuda"),
        ("musa", (), TWO, "musa", "2 Moore Threads GPUs"),
        ("off", ("cuda",), TWO, None, "VLLM_HWPLUGIN_PLATFORM=off"),
    ],
)
def test_decisions(choice: str, builtins: tuple[str, ...] | None, musa: Musa, kind: str | None, words: str) -> None:
    found = decide(choice, builtins, lambda: musa)
    assert found.kind == kind
    assert words in found.reason
    assert found.qualname == (CLASSES[kind] if kind else None)  # type: ignore[index]
    assert found.level == (logging.INFO if kind else logging.DEBUG)


def test_vllms_own_probes_decide_and_one_that_fails_is_not_there() -> None:
    def fails() -> str:
        raise RuntimeError

    probes = {"tpu": lambda: None, "cuda": lambda: "vllm.platforms.cuda.CudaPlatform", "rocm": fails}
    assert ask_vllm(SimpleNamespace(builtin_platform_plugins=probes)) == ("cuda",)
    assert ask_vllm(None) is None


@pytest.fixture
def musa_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_musa", "torchada"):
        monkeypatch.setitem(sys.modules, name, standins.torchada())
    monkeypatch.setitem(sys.modules, "pymtml", standins.pymtml())


@pytest.mark.usefixtures("musa_host")
def test_moore_threads_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(musa, "_mtml", own("vllm_hwplugin.musa._mtml"), raising=False)
    assert probe_musa() == Musa(devices=3)


@pytest.mark.usefixtures("musa_host")
def test_a_driver_that_does_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymtml", standins.pymtml(broken=OSError("Failed to load MTML library")))
    monkeypatch.setattr(musa, "_mtml", own("vllm_hwplugin.musa._mtml"), raising=False)
    assert probe_musa() == Musa(trouble="OSError: Failed to load MTML library")
