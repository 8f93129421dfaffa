# SPDX-License-Identifier: Apache-2.0
"""Which capture sizes of vLLM's are left where their graphs would be too many for one process."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.musa import graph_budget
from vllm_hwplugin.spec_decode import capture_sizes

#: vLLM's own, of engines with 256 requests or more at once.
OWN = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def model(layers: int) -> SimpleNamespace:
    return SimpleNamespace(get_num_layers=lambda _: layers)


def config(layers: int, drafter: SimpleNamespace | None = None, lora: Any = None, piecewise: bool = True) -> Any:
    target = model(layers)
    return SimpleNamespace(
        model_config=target,
        speculative_config=drafter and SimpleNamespace(draft_model_config=drafter),
        parallel_config=None,
        lora_config=lora,
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(OWN),
            cudagraph_specialize_lora=True,
            cudagraph_mode=SimpleNamespace(requires_piecewise_compilation=lambda: piecewise),
        ),
    )


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        (config(36), 47),
        (config(36, model(1)), 36),
        (config(36, model(28)), 23),
        (config(36, model(1), piecewise=False), 51),
        (config(36, lora=SimpleNamespace(max_loras=1)), 23),
        (config(36, lora=SimpleNamespace(max_loras=4, specialize_active_lora=True)), 9),
    ],
)
def test_as_many_sizes_as_a_process_can_hold(made: Any, kept: int) -> None:
    graph_budget.fit(made, named=False)
    sizes = made.compilation_config.cudagraph_capture_sizes
    assert len(OWN) == 51
    assert len(sizes) == kept
    assert set(sizes) <= set(OWN)
    assert (sizes[0], sizes[-1]) == (1, 512)
    # Small batches are not padded more than before, and larger ones to the double at most.
    assert {4, 8, 16, 32, 64} <= set(sizes)
    assert max(after / before for before, after in itertools.pairwise(sizes) if before >= 4) <= 2


@pytest.mark.parametrize(("layers", "largest"), [(6, 4096), (36, 1024)])
def test_larger_graphs_of_batches_with_prompts_go_first(layers: int, largest: int) -> None:
    """A decode batch of 256 requests with three drafts keeps its graph, and is padded no more for them."""
    made = config(layers, model(1))
    made.speculative_config.num_speculative_tokens, made.scheduler_config = 3, SimpleNamespace(max_num_seqs=256)
    compilation = made.compilation_config
    compilation.cudagraph_capture_sizes = list(capture_sizes.capture_sizes(4, 256, 8192, OWN, mixed=4096))
    vars(compilation).update({capture_sizes._OWN: 512, capture_sizes._MIXED: 4096})
    assert max(capture_sizes.piecewise_sizes(compilation)) == 4096
    graph_budget.fit(made, named=False)
    assert compilation.cudagraph_capture_sizes[-1] == largest
    decodes = config(layers, model(1))
    decodes.compilation_config.cudagraph_capture_sizes = list(capture_sizes.capture_sizes(4, 256, 8192, OWN))
    vars(decodes.compilation_config).update({capture_sizes._OWN: 512, capture_sizes._MIXED: 512})
    decodes.speculative_config.num_speculative_tokens, decodes.scheduler_config = 3, made.scheduler_config
    graph_budget.fit(decodes, named=False)
    if largest == 1024:
        assert compilation.cudagraph_capture_sizes == decodes.compilation_config.cudagraph_capture_sizes
        assert max(capture_sizes.piecewise_sizes(compilation)) == 512


def test_sizes_that_the_user_named_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    made = config(64)
    graph_budget.fit(made, named=True)
    assert made.compilation_config.cudagraph_capture_sizes == OWN
    (line,) = caplog.messages
    assert line.startswith("51 capture sizes would have some 3366 graphs, expected 1800 at most on MUSA")
    assert line.endswith("choose at most 27 sizes")
