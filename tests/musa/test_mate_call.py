# SPDX-License-Identifier: Apache-2.0
"""Which functions the backend calls, and that no argument is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_hwplugin.musa._mate_call import MateMismatch, bind, bind_schedule

torch = pytest.importorskip("torch")

ARGUMENTS: dict[str, Any] = {
    name: f"the {name}"
    for name in (
        "q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "block_table", "softmax_scale",
        "causal", "window_size", "softcap", "sinks", "deterministic", "num_splits",
    )
}  # fmt: skip
OTHER = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, softmax_scale, causal, window_size, learnable_sink, "
    "softcap, deterministic"
)


def function(parameters: str, result: Any = None) -> tuple[Any, dict[str, Any]]:
    """A function with these parameters, and what it was called with last."""
    seen: dict[str, Any] = {}
    scope: dict[str, Any] = {"seen": seen, "result": result}
    exec(f"def made({parameters}):\n    seen.update(locals())\n    return result", scope)
    return scope["made"], seen


@pytest.mark.parametrize("with_lse", [False, True])
def test_every_argument_arrives_under_the_functions_own_name(with_lse: bool) -> None:
    out, right = torch.zeros(2, 3), torch.ones(2, 3)
    made, seen = function(OTHER, (right, "log-sum-exp") if with_lse else right)
    bind(made)(out, **ARGUMENTS)
    renamed = {"block_table": "page_table", "sinks": "learnable_sink"}
    optional = ("max_seqlen_q", "max_seqlen_k", "num_splits")
    expected = {renamed.get(name, name): value for name, value in ARGUMENTS.items() if name not in optional}
    assert seen == expected | {"cu_seqlens_k": None}
    assert torch.equal(out, right)


def test_a_function_that_writes_in_place_is_given_where() -> None:
    out = torch.zeros(2)
    made, seen = function(OTHER + ", max_seqlen_q, max_seqlen_k, num_splits=0, out=None", out)
    bind(made)(out, **ARGUMENTS)
    assert seen["out"] is out
    assert seen["num_splits"] == "the num_splits"
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == ("the max_seqlen_q", "the max_seqlen_k")


@pytest.mark.parametrize(
    "argument", ["causal", "learnable_sink", "deterministic", "window_size", "softcap", "page_table"]
)
def test_a_function_without_an_argument_is_not_used(argument: str) -> None:
    made, _ = function(OTHER.replace(f", {argument}", ""))
    with pytest.raises(MateMismatch, match=f"no argument .*{argument}.*it has q, k, v"):
        bind(made)


def test_a_function_that_requires_more_is_not_used() -> None:
    made, _ = function(OTHER + ", scheduler, tuned=True, *args, **kwargs")
    with pytest.raises(MateMismatch, match="requires scheduler, which"):
        bind(made)


def test_a_function_without_a_signature_is_not_used() -> None:
    with pytest.raises(MateMismatch, match="no signature"):
        bind(type)


def test_keys_that_are_packed_need_no_page_table_where_that_may_be_left_out() -> None:
    out = torch.zeros(2)
    leading, rest = OTHER.split("seqused_k, page_table, ")
    made, seen = function(f"*, {leading}{rest}, seqused_k=None, page_table=None", out)
    call = bind(made)
    assert call.takes_packed_keys
    packed = {name: value for name, value in ARGUMENTS.items() if name not in ("block_table", "seqused_k")}
    call(out, **packed, cu_seqlens_k="the cu_seqlens_k")
    assert (seen["cu_seqlens_k"], seen["seqused_k"], seen["page_table"]) == ("the cu_seqlens_k", None, None)
    assert not bind(function(OTHER)[0]).takes_packed_keys


@pytest.mark.parametrize("lengths", ["seqused_k", "cache_seqlens"])
def test_a_schedules_arguments_arrive_under_the_functions_own_names(lengths: str) -> None:
    names = (
        "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "qkv_dtype",
        "cu_seqlens_q", "page_size", "causal", "window_size", "num_splits",
    )  # fmt: skip
    made, seen = function(f"{', '.join(names)}, {lengths}=None, pack_gqa=None", "a schedule")
    given = {name: f"the {name}" for name in (*names, "seqused_k")}
    assert bind_schedule(made)(**given) == "a schedule"
    assert seen == {**{name: f"the {name}" for name in names}, lengths: "the seqused_k", "pack_gqa": None}
    with pytest.raises(MateMismatch, match="get_scheduler_metadata requires margin, which"):
        bind_schedule(function(f"{', '.join(names)}, {lengths}, margin")[0])
