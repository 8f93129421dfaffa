# SPDX-License-Identifier: Apache-2.0
"""How the CUDA attention kernel shares the keys of a batch out, its own source compiled for a CPU.

Only the device knows the lengths. Whatever they are, each key of a request is read by one program, the merge expects as
many results as there are, and each has room.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_hwplugin.attention.backends import CUDA, LARGEST_GROUP
from vllm_hwplugin.attention.paged import HopperKernel
from vllm_hwplugin.attention.paged._plan import MAX_SPLITS, balance, plan_launch
from vllm_hwplugin.ops.compile import toolchain
from vllm_hwplugin.ops.compile.spec import KernelUnavailable, source_root

TILE = 64


@dataclass(frozen=True)
class Batch:
    """``queries`` and ``lengths`` of each request, in tokens; the window to both sides, -1 for no end."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 1
    window: tuple[int, int] = (-1, -1)
    causal: bool = True
    multiprocessors: int = 132
    longest_query: int = 8
    division_error: int = 0


@dataclass(frozen=True)
class Work:
    """Of one program."""

    request: int
    split: int
    splits: int
    begin: int
    end: int


@dataclass(frozen=True)
class Shared:
    """``merged``: for each request the number of splits that the merge takes, and the keys from first to last."""

    room: int
    work: list[Work]
    merged: list[tuple[int, int, int]]


Share = Callable[[list[Batch]], list[Shared]]


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    try:
        compiler = toolchain.find("nvcc")
    except KernelUnavailable as error:
        pytest.skip(str(error))
    program = tmp_path_factory.mktemp("shares") / "shares"
    source = Path(__file__).with_name("shares_on_cpu.cpp")
    folders = f"-I{source_root()}", f"-I{source_root() / 'paged_attention'}"
    facts = (
        f"-DLARGEST_HEAD={CUDA.largest_head}",
        f"-DHEAD_MULTIPLE={CUDA.head_multiple}",
        f"-DPAGE_MULTIPLE={CUDA.page_multiple}",
        f"-DLARGEST_GROUP={LARGEST_GROUP}",
        f"-DMAX_SPLITS={MAX_SPLITS}",
        f"-DTILE_ROWS={HopperKernel.heights[-1][0]}",
    )
    command = [compiler.path, "-x", "c++", "-std=c++17", "-O1", *folders, *facts, str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def run(batches: list[Batch]) -> list[Shared]:
        asked, room, programs = [], [], []
        for batch in batches:
            group = batch.heads // batch.kv_heads
            plan = plan_launch(
                ((64, 1),),
                num_requests=len(batch.lengths),
                num_tokens=sum(batch.queries),
                max_query_len=batch.longest_query,
                num_heads=batch.heads,
                num_kv_heads=batch.kv_heads,
                multiprocessors=batch.multiprocessors,
                batch_invariant=False,
            )
            found = balance(plan, group=group, num_kv_heads=batch.kv_heads, multiprocessors=batch.multiprocessors)
            assert found.programs > 0, "this batch is split alike"
            starts = [sum(batch.queries[:row]) for row in range(len(batch.queries) + 1)]
            numbers = [len(batch.lengths), found.programs, found.at_once, found.splits]
            numbers += [min(plan.tokens, batch.longest_query), group, *batch.window, batch.causal, batch.division_error]
            asked.append(" ".join(str(int(number)) for number in [*numbers, *starts, *batch.lengths]))
            room.append(found.splits)
            programs.append(found.programs)
        said = subprocess.run([str(program)], input="\n".join(asked), capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        rows = iter([tuple(map(int, line.split())) for line in said.stdout.splitlines()])
        return [
            Shared(
                most,
                [Work(*next(rows)) for _ in range(count)],
                [(one[0], one[1], one[2]) for one in (next(rows) for _ in batch.lengths)],
            )
            for batch, most, count in zip(batches, room, programs, strict=True)
        ]

    return run


def check(batch: Batch, found: Shared) -> None:
    for row, (query, (splits, begin, end)) in enumerate(zip(batch.queries, found.merged, strict=True)):
        own = sorted((work for work in found.work if work.request == row), key=lambda work: work.split)
        if query == 0:
            assert own == []
            assert splits == 0
            continue
        # One without keys has a program too, which writes zeros.
        assert [work.split for work in own] == list(range(max(splits, 1))), f"request {row} of {batch}"
        assert {work.splits for work in own} == {max(splits, 1)}
        assert splits <= found.room
        if end <= begin:
            assert splits == 0
            continue
        edges = [begin, *(work.end for work in own)]
        assert [work.begin for work in own] == edges[:-1]
        assert edges[-1] == end
        assert all(work.begin < work.end and (work.begin - begin) % TILE == 0 for work in own)


def drawn(dice: random.Random) -> Batch:
    kv_heads = dice.choice((1, 1, 2, 4, 8))
    multiprocessors = dice.choice((132, 114, 78))
    longest = dice.randint(1, 8)
    rows = dice.randint(2, min(200, 2 * multiprocessors // kv_heads - 8))
    mean = dice.choice((3, 300, 5000, 60_000))
    real = dice.choice((rows, dice.randint(0, rows)))
    queries = [dice.randint(0, longest) if row < real else 0 for row in range(rows)]
    contexts = [int(mean * dice.lognormvariate(0, dice.choice((0, 1, 2)))) for _ in range(rows)]
    # Rows that pad a captured batch may hold any length.
    stale = (0, -7, 1, 12345, 2_000_000)
    lengths = [
        query + context if query else dice.choice(stale) for query, context in zip(queries, contexts, strict=True)
    ]
    if dice.random() < 0.2:
        # As in a batch of vLLM's own, which has no requests behind it.
        lengths[dice.randrange(rows)] = 0
    window = dice.choice(((-1, -1), (999, -1), (100, 50), (-1, 3)))
    return Batch(
        tuple(queries),
        tuple(lengths),
        kv_heads=kv_heads,
        window=window,
        causal=dice.random() < 0.7,
        multiprocessors=multiprocessors,
        longest_query=longest,
        division_error=dice.randint(-2, 2),
    )


def test_each_key_is_read_once_and_the_merge_knows_by_how_many(share: Share) -> None:
    dice = random.Random(0)
    batches = [drawn(dice) for _ in range(150)]
    for batch, found in zip(batches, share(batches), strict=True):
        check(batch, found)


ONE, EIGHT = (1,), (8,)


@pytest.mark.parametrize(
    ("queries", "lengths", "splits"),
    [
        # A long request gets the programs that short ones do not need.
        (ONE * 32, (40,) * 20 + (20_000,) + (40,) * 11, [1] * 20 + [79] + [1] * 11),
        # Others are not cut for one that has no room for more.
        (EIGHT * 64, (100_000,) + (1024,) * 63, [8] + [1] * 63),
        # Requests of the same length have as many as fit.
        *(
            (ONE * rows, (8192,) * rows, [splits] * rows)
            for rows, splits in ((8, 16), (20, 6), (24, 5), (32, 4), (64, 2), (100, 1), (128, 1))
        ),
        # Where results take long next to the keys there are fewer.
        (EIGHT * 8, (2048,) * 8, [11] * 8),
        # Each request has 16 tiles: 16 splits would leave a result for each tile, and two rounds are no longer.
        (EIGHT * 8, (1024,) * 8, [8] * 8),
    ],
)
def test_how_many_splits_a_request_gets(
    share: Share, queries: tuple[int, ...], lengths: tuple[int, ...], splits: list[int]
) -> None:
    (found,) = share([Batch(queries, lengths, longest_query=queries[0])])
    assert [count for count, _, _ in found.merged] == splits
