# SPDX-License-Identifier: Apache-2.0
"""Attention with large heads on a real GPU: the kernel for Hopper and the Triton kernels, each against float64."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from vllm_hwplugin.attention import paged  # noqa: E402
from vllm_hwplugin_lab.probe import Case, Request  # noqa: E402
from vllm_hwplugin_lab.probe.inputs import make_inputs  # noqa: E402
from vllm_hwplugin_lab.probe.reference import measure  # noqa: E402

from ..attention.paged import batches  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LIMIT = 2.0
HEAD_SIZES = (264, 320, 384, 448, 512)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return batches.On.device(torch.device("cuda"))


@pytest.fixture(params=["hopper", "triton"])
def on(request: pytest.FixtureRequest, loaded: Any) -> Any:
    """A kernel of each kind, with the memory that all tests share."""
    if request.param == "triton":
        return dataclasses.replace(loaded, kernel=paged.TritonKernel.load(torch.device("cuda")))
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the CUDA kernel is for compute capability 9.0")
    assert loaded.kernel.name == "hopper", "the CUDA kernel was not loaded: the log says why"
    return loaded


@pytest.fixture
def seed() -> int:
    number = random.SystemRandom().randrange(1 << 20)
    print("seed", number)
    return number


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_setting_of_a_layer_is_right(on: Any, seed: int, dtype: str) -> None:
    sizes = HEAD_SIZES if on.kernel.name == "hopper" else (328, 512)
    found = [
        (f"{case}; {layout}; {fill}", batches.measured(case, on, layout, fill=fill).ratio)
        for case, layout in batches.cases(sizes, seed, dtype, 6000)
        for fill in ("poison", "nan")
    ]
    assert [one for one in found if not one[1] <= LIMIT] == []


@pytest.mark.sanitizer
def test_every_setting_is_right_on_short_requests(on: Any, seed: int) -> None:
    found = [
        (f"{case}; {layout}", batches.measured(case, on, layout).ratio)
        for case, layout in batches.cases((264, 512) if on.kernel.name == "hopper" else (328,), seed, "bfloat16", 700)
    ]
    assert [one for one in found if not one[1] <= LIMIT] == []


def test_a_captured_launch_serves_other_batches(on: Any, seed: int) -> None:
    rows, each = 8, 4
    case = Case(tuple(Request(each, 500) for _ in range(rows)), "bfloat16", "bfloat16", 512, 8, 1, 16, seed=seed)
    inputs = make_inputs(case, "cuda")
    query, out = inputs.query.clone(), torch.full_like(inputs.query, math.nan)
    blocks = 2000
    memory = torch.empty(2, blocks, 16, 1, 512, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(rows, 300, dtype=torch.int32, device="cuda")
    given = batches.metadata(case, "cuda")

    def launch() -> None:
        batches.launch(on, query, *memory.unbind(0), out, block_table=table, **given, **batches.settings(case))

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for replay in range(16):
        # Other lengths, fewer requests, other pages.
        shape = random.Random(seed + replay)
        requests = tuple(
            Request(shape.randint(1, each), shape.choice((0, 63, shape.randint(1, 4700))))
            for _ in range(shape.randint(1, rows))
        )
        other = dataclasses.replace(case, requests=requests, padding=rows - len(requests), seed=seed + replay)
        new = make_inputs(other, "cuda")
        keys, values = batches.caches(other, new, "apart", "cuda")
        memory[0, : len(keys)], memory[1, : len(values)] = keys, values
        table.zero_()
        table[:, : new.block_table.shape[1]] = new.block_table
        for name, tensor in batches.metadata(other, "cuda").items():
            if torch.is_tensor(tensor):
                given[name].copy_(tensor)
        query[: other.num_tokens] = new.query
        out.fill_(math.nan)
        graph.replay()
        found = measure(other, new, out[: other.num_tokens])
        assert found.ratio <= LIMIT, f"replay {replay}: {found}"
        assert out[other.num_tokens :].isnan().all()


def test_a_row_is_the_same_alone_and_in_a_batch(on: Any, seed: int) -> None:
    requests = (Request(1, 900), Request(70, 1000), Request(8, 64), Request(1, 3000))
    case = Case(requests, "bfloat16", "bfloat16", 512, 8, 2, 16, seed=seed)
    inputs = make_inputs(case, "cuda")
    together = batches.attend(case, inputs, on, batch_invariant=True)
    for rows, found in batches.alone(case, inputs, on):
        assert torch.equal(found, together[rows]), rows


def test_launches_that_follow_at_once_do_not_disturb_each_other(on: Any, seed: int) -> None:
    """One may begin while the one before it ends, and all leave their splits' results in the same memory."""
    shapes = ((Request(1, 3000), Request(1, 900)), (Request(8, 2000),), (Request(1, 5000),), (Request(5, 64),) * 9)
    launches = []
    for number, requests in enumerate(shapes):
        case = Case(requests, "bfloat16", "bfloat16", 512, 8, 1, 16, seed=seed + number)
        launches.append(batches.prepared(case, make_inputs(case, "cuda"), on))
    expected = []
    for launch, out in launches:
        launch()
        torch.cuda.synchronize()
        expected.append(out.clone())
    for _ in range(20):
        for _, out in launches:
            out.fill_(math.nan)
        for launch, _ in launches * 3:
            launch()
        assert all(torch.equal(out, right) for (_, out), right in zip(launches, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch, _ in launches * 3:
            launch()
    for _ in range(20):
        for _, out in launches:
            out.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(out, right) for (_, out), right in zip(launches, expected, strict=True))


def requests_of_many_lengths(rows: int, seed: int) -> tuple[Request, ...]:
    dice = random.Random(seed)
    contexts = [int(min(700 * dice.lognormvariate(0, 1.5), 9000)) for _ in range(rows)]
    return tuple(Request(dice.randint(1, 8), context) for context in contexts)


@pytest.mark.parametrize(("rows", "kv_heads"), [(2, 1), (7, 4), (33, 2), (64, 1), (140, 1), (250, 1), (300, 1)])
def test_batches_of_many_lengths_are_right(on: Any, seed: int, rows: int, kv_heads: int) -> None:
    requests = requests_of_many_lengths(rows, seed)
    case = Case(requests, "bfloat16", "bfloat16", 512, 8, kv_heads, 16, padding=3, seed=seed)
    assert batches.measured(case, on).ratio <= LIMIT


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"sliding_window": 1000}, id="window"),
        pytest.param({"causal": False}, id="non-causal"),
        pytest.param({"causal": False, "sliding_window": 700, "window_ahead": 300}, id="window to both sides"),
        pytest.param({"softcap": 2.0, "sinks": True}, id="softcap and sinks"),
        pytest.param({"head_size": 264, "dtype": "float16", "kv_cache_dtype": "float16"}, id="264, float16"),
        pytest.param({"num_heads": 7, "num_kv_heads": 1}, id="7 heads"),
    ],
)
def test_layers_of_each_setting_are_right_with_many_lengths(on: Any, seed: int, setting: dict[str, Any]) -> None:
    case = Case(requests_of_many_lengths(20, seed), "bfloat16", "bfloat16", 512, 8, 1, 16, padding=3, seed=seed)
    assert batches.measured(dataclasses.replace(case, **setting), on).ratio <= LIMIT


@pytest.mark.parametrize("longest", [0, 31])
def test_a_long_request_has_the_programs_that_short_ones_do_not_need(loaded: Any, longest: int) -> None:
    if loaded.kernel.name != "hopper":
        pytest.skip("the CUDA kernel is for compute capability 9.0")
    requests = tuple(Request(1, 20_000 if row == longest else 40) for row in range(32))
    case = Case(requests, "bfloat16", "bfloat16", 512, 8, 1, 16, seed=1)
    loaded.scratch.lse.fill_(math.nan)
    batches.attend(case, make_inputs(case, "cuda"), loaded)
    # Only splits leave results here, of eight rows each; a short request has one split, which leaves none. Split alike,
    # the long one would have as many splits as there are programs for each request.
    assert (~loaded.scratch.lse.isnan()).sum() / 8 > 4 * loaded.kernel.multiprocessors / len(requests)


@pytest.mark.parametrize("context", [20, 4000])
def test_tokens_beyond_the_bound_are_left_alone(loaded: Any, seed: int, context: int) -> None:
    """What was announced is what there is room for: a longer query must not spoil the rows that were."""
    if loaded.kernel.name != "hopper":
        pytest.skip("the CUDA kernel is for compute capability 9.0")
    case = Case((Request(4, context), Request(1, 70)), "bfloat16", "bfloat16", 512, 8, 1, 16, seed=seed)
    inputs = make_inputs(case, "cuda")
    right = batches.attend(case, inputs, loaded)
    out = batches.attend(case, inputs, loaded, max_query_len=1)
    assert out[1:4].isnan().all()
    torch.testing.assert_close(out[[0, 4]], right[[0, 4]], rtol=0.02, atol=0.02)


def test_the_operation_checks_what_it_is_given(loaded: Any) -> None:
    if loaded.kernel.name != "hopper":
        pytest.skip("the CUDA kernel is for compute capability 9.0")

    def call(blocks: int = 1, splits: int = 4, programs: int = 0, at_once: int = 0, **changes: Any) -> None:
        given = {
            "query": torch.zeros(1, 8, 512, dtype=torch.bfloat16, device="cuda"),
            "keys": torch.zeros(4, 16, 1, 512, dtype=torch.bfloat16, device="cuda"),
            "values": torch.zeros(4, 16, 1, 512, dtype=torch.bfloat16, device="cuda"),
            "out": torch.zeros(1, 8, 512, dtype=torch.bfloat16, device="cuda"),
            "partial_out": loaded.scratch.out,
            "partial_lse": loaded.scratch.lse,
            "sinks": None,
            "query_start_loc": torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            "seq_lens": torch.tensor([5], dtype=torch.int32, device="cuda"),
            "block_table": torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
            **changes,
        }
        bounds = {"max_query_len": 1, "blocks": blocks, "blocks_per_request": 1, "splits": splits}
        torch.ops.hwplugin.paged_attention(
            *given.values(),
            scale=1.0,
            causal=True,
            window_left=-1,
            window_right=-1,
            softcap=0.0,
            **bounds,
            programs=programs,
            at_once=at_once,
        )

    call()
    half = torch.bfloat16
    nothing = torch.zeros(1, 0, 512, dtype=half, device="cuda")
    for changes, words in (
        ({"query": torch.zeros(1, 8, 512, dtype=half)}, "not on a CUDA device|same device|CPU"),
        ({"keys": torch.zeros(4, 16, 1, 512, dtype=torch.float16, device="cuda")}, "keys is Half"),
        ({"keys": torch.zeros(4, 8, 1, 512, dtype=half, device="cuda")}, "a page has 8 tokens"),
        ({"values": torch.zeros(4, 16, 1, 504, dtype=half, device="cuda")}, "differ in dimension 3"),
        ({"out": torch.zeros(1, 8, 1024, dtype=half, device="cuda")[..., ::2]}, "out has stride 2"),
        ({"partial_out": loaded.scratch.out[:8]}, "partial_out has to be float32"),
        ({"partial_out": loaded.scratch.out[1:]}, "partial_out has to .* start at a multiple of 16 bytes"),
        ({"query": nothing, "out": nothing}, "0 query heads"),
        ({"blocks": 2}, "a plan that cannot be launched: 2 blocks"),
        ({"programs": 3}, "keys that cannot be shared out: 3 programs, 0 of them at a time"),
        ({"programs": 3, "at_once": 4}, "shared out: 3 programs, 4 of them at a time"),
        ({"programs": 3, "at_once": 3, "splits": 1}, "shared out: .* and 1 splits"),
        ({"programs": 3, "at_once": 3, "blocks": 0}, "shared out: .* for 0 blocks of 1 requests"),
        ({"sinks": torch.zeros(9, device="cuda")}, "9 sinks for 8 heads"),
        ({"seq_lens": torch.tensor([5], device="cuda")}, "seq_lens has to be int32"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int32, device="cuda")}, "do not go with 1 requests"),
        ({"sinks": torch.zeros(4, device="cuda")}, "sinks has to be float32"),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match=words):
            call(**changes)
    call(query=torch.zeros(0, 8, 512, dtype=half, device="cuda"), out=torch.zeros(0, 8, 512, dtype=half, device="cuda"))
