# SPDX-License-Identifier: Apache-2.0
"""What the kernels cannot do is refused before they start, with what was found and what is expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from vllm_hwplugin.attention.paged import (  # noqa: E402
    HopperKernel,
    Kernel,
    Scratch,
    _hopper,
    paged_attention,
    refuse_heads,
)
from vllm_hwplugin.attention.paged._arguments import Arguments, check  # noqa: E402

HALF = torch.bfloat16


def arguments(**changes: Any) -> Arguments:
    given = Arguments(
        query=torch.zeros(3, 8, 512, dtype=HALF),
        keys=torch.zeros(4, 16, 2, 512, dtype=HALF),
        values=torch.zeros(4, 16, 2, 512, dtype=HALF),
        out=torch.zeros(3, 8, 512, dtype=HALF),
        query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([5, 6], dtype=torch.int32),
        block_table=torch.zeros(2, 3, dtype=torch.int32),
        scale=1.0,
        causal=True,
        window=(-1, -1),
        softcap=0.0,
        sinks=None,
    )
    return dataclasses.replace(given, **changes)


def test_what_fits_passes() -> None:
    check(arguments())
    check(arguments(sinks=torch.zeros(8)))
    # A slice of a fused projection, and a cache of keys beside values.
    check(arguments(query=torch.zeros(3, 24, 512, dtype=HALF)[:, 8:16]))
    keys, values = torch.zeros(4, 2, 16, 1024, dtype=HALF).transpose(1, 2).split(512, dim=-1)
    check(arguments(keys=keys, values=values))
    # Nothing is reached by the stride of a single token.
    one = torch.zeros(3 * 8 * 512, dtype=HALF).as_strided((1, 8, 512), (7, 512, 1))
    check(arguments(query=one, out=torch.zeros(1, 8, 512, dtype=HALF)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(3, 4096, dtype=HALF)}, "expected \\[tokens, heads, head size\\]"),
        ({"query": torch.zeros(3, 8, 512, dtype=torch.float32)}, "queries are torch.float32, expected"),
        ({"out": torch.zeros(2, 8, 512, dtype=HALF)}, "out has shape .2, 8, 512.; expected .3, 8, 512"),
        ({"keys": torch.zeros(4, 16, 512, dtype=HALF)}, "keys have shape \\(4, 16, 512\\), expected \\[blocks"),
        ({"keys": torch.zeros(4, 16, 2, 512), "values": torch.zeros(4, 16, 2, 512)}, "expected the queries' type"),
        ({"values": torch.zeros(4, 16, 2, 512)}, "values is torch.float32; expected torch.bfloat16"),
        (
            {"keys": torch.zeros(4, 24, 2, 512, dtype=HALF), "values": torch.zeros(4, 24, 2, 512, dtype=HALF)},
            "a page has 24 tokens, expected a multiple of 16",
        ),
        (
            {"keys": torch.zeros(4, 16, 3, 512, dtype=HALF), "values": torch.zeros(4, 16, 3, 512, dtype=HALF)},
            "8 query heads and 3 KV heads",
        ),
        ({"query": torch.zeros(3, 8, 516, dtype=HALF)[..., :512]}, "query has strides"),
        ({"out": torch.zeros(3, 8, 1024, dtype=HALF)[..., ::2]}, "out has strides"),
        ({"query": torch.zeros(3 * 8 * 512 + 1, dtype=HALF)[1:].view(3, 8, 512)}, "multiple of 16 bytes"),
        ({"seq_lens": torch.tensor([5, 6])}, "seq_lens is torch.int64"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, "block_table has shape .1, 3.; expected .2, 3"),
        ({"out": torch.zeros(3, 8, 512, dtype=HALF, device="meta")}, "out is on meta; expected query's device, cpu"),
        ({"sinks": torch.zeros(8, dtype=HALF)}, "sinks is torch.bfloat16; expected torch.float32"),
        ({"sinks": torch.zeros(2)}, "sinks has shape .2,.; expected .8,"),
    ],
)
def test_what_does_not_fit_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(arguments(**changes))


def call(given: Arguments, kernel: Kernel, scratch: Scratch) -> None:
    paged_attention(given, max_query_len=2, kernel=kernel, scratch=scratch)


def test_the_cuda_kernel_is_left_to_check_what_a_plan_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(HopperKernel, "launch", lambda self, given, plan, scratch: launched.append((given, plan)))
    kernel, scratch = HopperKernel(132), Scratch(torch.empty(0), torch.empty(0))
    wrong = arguments(out=torch.zeros(3, 8, 1024, dtype=HALF)[..., ::2])
    call(wrong, kernel, scratch)
    assert launched[0][0].out is wrong.out
    # The layers of a step share a plan.
    call(arguments(), kernel, scratch)
    assert launched[1][1] is launched[0][1]
    # A batch without requests has no programs, and a grid of none is an error of the driver.
    starts, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    call(arguments(query_start_loc=starts, seq_lens=none, block_table=none.view(0, 3)), kernel, scratch)
    assert len(launched) == 2
    with pytest.raises(ValueError, match="8 query heads and 3 KV heads"):
        call(arguments(keys=torch.zeros(4, 16, 3, 512, dtype=HALF)), kernel, scratch)
    with pytest.raises(ValueError, match="expected \\[tokens, heads, head size\\]"):
        call(arguments(query=torch.zeros(3, 4096, dtype=HALF)), kernel, scratch)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_no_other_gpu_gets_the_kernel_for_hopper(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(_hopper, "ensure", lambda kernel: pytest.fail("it would have been built"))
    assert HopperKernel.load(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ((65, 1), "65 query heads and 1 KV heads, expected a multiple, and at most 64 times"),
        ((8, 3), "8 query heads and 3 KV heads"),
        ((8, 0), "8 query heads and 0 KV heads"),
    ],
)
def test_query_heads_that_cannot_share_are_refused(heads: tuple[int, int], words: str) -> None:
    assert words in str(refuse_heads(*heads))
    assert refuse_heads(128, 2) is None
