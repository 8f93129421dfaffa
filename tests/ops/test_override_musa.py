# SPDX-License-Identifier: Apache-2.0
"""The plugin's kernels on a MUSA host, in front of its own definitions and of vLLM's kernels. The key CPU stands in."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin import journal  # noqa: E402
from vllm_hwplugin.ops import definitions, overrides  # noqa: E402

from .toys import Toy, make_toy  # noqa: E402


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Iterator[journal.Journal]:
    """A host with torch_musa, whose platform defines what vLLM's extension lacks when that is imported."""
    monkeypatch.setattr(definitions, "DEFINITIONS", {})
    monkeypatch.setattr(overrides, "is_musa_host", lambda: True)
    monkeypatch.setattr(overrides, "is_cuda_host", lambda: pytest.fail("asked for CUDA"))
    monkeypatch.setattr(overrides, "MUSA_KEY", "CPU")
    monkeypatch.setattr(overrides, "load_extension", lambda: definitions.define_missing("CPU", "0.32.0"))
    entry = journal.new("0")
    journal.begin(entry, None)
    yield entry
    overrides.remove()
    definitions.undefine()
    journal.forget()


@pytest.fixture
def toys(entry: journal.Journal, monkeypatch: pytest.MonkeyPatch) -> tuple[Toy, Toy]:
    """One that the plugin defines, one that this vLLM has a kernel of."""
    vllms, own = make_toy(monkeypatch), make_toy(monkeypatch, defined=True)
    monkeypatch.setattr(overrides, "OPS", {toy.op.name: toy.op for toy in (own, vllms)})
    monkeypatch.setattr(overrides, "unknown_names", lambda skip: ())
    return own, vllms


def _said(entry: journal.Journal, toy: Toy) -> str:
    return entry.decisions[f"operation {toy.op.name}"].partition(":")[0]


@pytest.mark.parametrize("strict", ["0", "1"])
def test_by_default_the_kernel_serves_what_vllm_has_none_of(
    strict: str, toys: tuple[Toy, Toy], entry: journal.Journal
) -> None:
    own, vllms = toys
    untouched = torch._C._dispatch_dump(vllms.op.qualname)
    overrides.install({"VLLM_HWPLUGIN_STRICT": strict})
    assert [own(None), own(None), vllms(None)] == [2, 2, 1]
    # A call that the kernel does not support.
    assert own(None, dtype=torch.float64) == 1
    assert own.calls == ["load", "plugin", "plugin", "stock"]
    assert torch._C._dispatch_dump(vllms.op.qualname) == untouched
    assert (_said(entry, own), _said(entry, vllms)) == ("the plugin's kernel", "vLLM's kernel")


@pytest.mark.parametrize("gate", ["VLLM_HWPLUGIN_OPS", "VLLM_MUSA_OP_PERF_OVERRIDES"])
def test_switched_off_or_left_out_the_definition_stays(
    gate: str, toys: tuple[Toy, Toy], entry: journal.Journal
) -> None:
    own, vllms = toys
    definitions.define_missing("CPU", "0.32.0")
    off = {"VLLM_HWPLUGIN_OPS": "off"} if gate == "VLLM_HWPLUGIN_OPS" else {gate: "0"}
    for environ in (off, {"VLLM_HWPLUGIN_OPS_SKIP": own.op.name}):
        overrides.install(environ)
        assert [own(None), vllms(None)] == [1, 1]
        assert "load" not in own.calls
        assert _said(entry, own) == "the plugin's definition in torch"


@pytest.mark.parametrize("strict", ["0", "1"])
def test_without_the_kernel_the_definition_serves_unless_it_was_asked_for(
    strict: str,
    toys: tuple[Toy, Toy],
    entry: journal.Journal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, _ = toys
    monkeypatch.setattr(overrides, "load_kernel", lambda op: False)
    overrides.install({"VLLM_HWPLUGIN_STRICT": strict})
    assert [own(None), own(None)] == [1, 1]
    assert _said(entry, own) == "the plugin's definition in torch"
    overrides.remove()
    overrides.install({"VLLM_HWPLUGIN_OPS": "on"})
    with pytest.raises(overrides.OverrideError, match=own.op.name):
        own(None)


@pytest.mark.parametrize("environ", [{"VLLM_HWPLUGIN_OPS": "on"}, {"VLLM_MUSA_OP_PERF_OVERRIDES": "1"}])
def test_asked_for_the_kernel_stands_in_front_of_vllms_too(environ: dict[str, str], toys: tuple[Toy, Toy]) -> None:
    overrides.install(environ)
    assert [toy(None) for toy in toys] == [2, 2]


def test_a_pytorch_that_cannot_put_kernels_in_front_leaves_the_definition(
    toys: tuple[Toy, Toy],
    entry: journal.Journal,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, _ = toys
    monkeypatch.delattr(torch.library, "get_kernel")
    with caplog.at_level(logging.WARNING, "vllm.hwplugin"):
        overrides.install({})
    assert own(None) == 1
    assert own.op.name in caplog.text
    assert _said(entry, own) == "the plugin's definition in torch"


HOST = """
import torch
from types import ModuleType
from vllm_hwplugin.ops import overrides
from vllm_hwplugin.ops.overrides import is_musa_host
assert not is_musa_host()
torch.utils.rename_privateuse1_backend("musa")
musa = ModuleType("torch.musa")
musa.get_device_name = lambda device: f"MTT {device}"
musa.is_current_stream_capturing = lambda: True
torch._register_device_module("musa", musa)
assert is_musa_host()
assert overrides.device_name(torch.device("musa:1")) == "MTT musa:1"
assert overrides.is_capturing(torch.device("musa:1"))
assert overrides.device_name(torch.device("cpu")) == "cpu" and not overrides.is_capturing(torch.device("cpu"))
"""


def test_the_backends_name_tells_a_musa_host_and_its_module_is_asked() -> None:
    """In a process of its own: the name cannot be changed back."""
    done = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
