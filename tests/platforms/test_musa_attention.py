# SPDX-License-Identifier: Apache-2.0
"""The choice of an attention backend on MUSA: by name, then by the backend's own declarations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from vllm_hwplugin.platforms import _musa_attention as attention


class Config(NamedTuple):
    head_size: int = 128
    use_mla: bool = False
    use_sparse: bool = False


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


def test_triton_is_first_and_its_class_is_named() -> None:
    triton = backend("TRITON_ATTN")
    found = attention.choose(None, Config(head_size=64), (3, 1), members(triton, FLEX))
    assert found == "vllm.made.up.TRITON_ATTNBackend"
    assert triton.asked == [{"device_capability": (3, 1), "head_size": 64, "use_mla": False, "use_sparse": False}]


@pytest.mark.parametrize(
    "triton",
    [backend("TRITON_ATTN", "non-causal attention not supported"), backend("TRITON_ATTN", error=ImportError("triton"))],
)
def test_flex_is_taken_where_triton_is_not_fit(triton: Any) -> None:
    assert attention.choose(None, Config(), None, members(triton, FLEX)) == "vllm.made.up.FLEX_ATTENTIONBackend"


def test_mla_goes_to_triton_mla() -> None:
    found = attention.choose(None, Config(use_mla=True), None, members(TRITON, FLEX, MLA))
    assert found == "vllm.made.up.TRITON_MLABackend"


def test_the_named_backend_is_taken_or_its_reason_told() -> None:
    known = members(TRITON, FLEX)
    assert attention.choose(FLEX, Config(), None, known) == "vllm.made.up.FLEX_ATTENTIONBackend"
    with pytest.raises(ValueError, match="FLEX_ATTENTION: head_size not supported"):
        attention.choose(backend("FLEX_ATTENTION", "head_size not supported"), Config(), None, known)


def test_all_reasons_are_told_when_none_fits() -> None:
    known = members(backend("TRITON_ATTN", "no a"), backend("FLEX_ATTENTION", error=ImportError("no b")))
    with pytest.raises(ValueError, match="TRITON_ATTN: no a; FLEX_ATTENTION: ImportError: no b"):
        attention.choose(None, Config(), None, known)


@pytest.mark.parametrize(("name", "mla"), [("FLASH_ATTN", False), ("TRITON_MLA", False), ("TRITON_ATTN", True)])
def test_a_backend_for_other_devices_is_refused_with_those_that_work(name: str, mla: bool) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported on MUSA: expected TRITON_"):
        attention.choose(backend(name), Config(use_mla=mla), None, members(TRITON, FLEX, MLA))


def test_a_backend_that_a_plugin_registered_is_taken_under_any_name() -> None:
    mate = backend("FLASH_ATTN", overridden=True)
    assert attention.choose(mate, Config(), None, {}) == "vllm.made.up.FLASH_ATTNBackend"


def test_sparse_attention_is_refused_first() -> None:
    with pytest.raises(ValueError, match="sparse MLA attention is not supported on MUSA"):
        attention.choose(None, Config(use_mla=True, use_sparse=True), None, members(MLA))
