# SPDX-License-Identifier: Apache-2.0
"""Add FULL CUDA graphs for batches of any shape to vLLM's graphs for decode batches (Model Runner V2).

With `cudagraph_mode` FULL vLLM captures a batch with a prompt, or with unequal draft counts, whole, but then it has no
graphs for decode batches, and the plugin's sampling and drafting need them. This module gives vLLM's graph managers
both kinds. Capture, padding and replay are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from zlib import crc32

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.base.features import BACKPORT_MIXED_GRAPHS, V2_MIXED_GRAPHS
from vllm_hwplugin.spec_decode.builders import builders_of, computes_images_apart, flash_versions, longest_as_decode
from vllm_hwplugin.spec_decode.capture_sizes import launch_tokens
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS
from vllm_hwplugin.spec_decode.delta_rule_obstacles import is_delta_rule
from vllm_hwplugin.spec_decode.drafters import SHARED_FIRST_PASS
from vllm_hwplugin.spec_decode.obstacles import Part, decodes_plainly, why_not
from vllm_hwplugin.spec_decode.ranks import Beyond, same_on_stages
from vllm_hwplugin.spec_decode.v2.mixed_bounds import MOST_REQS, has_mixed_graphs, lost_mixed_graphs, set_mixed_graphs
from vllm_hwplugin.spec_decode.v2.mixed_dispatch import MixedDispatch
from vllm_hwplugin.spec_decode.v2.mixed_sizes import KEEPS_PIECES

_STOCK: Final = "only decode batches have FULL graphs"

#: Tokens of the graphs. A batch is padded to the next size: by at most 31 tokens up to 1024, above that by at most a
#: sixteenth of its tokens, and by 2 % on average. Above 4096, for a small target only, it is 4 %. Each size is captured
#: for target and drafter and makes starts longer.
SIZES: Final = (*range(32, 1024, 32), *range(1024, 2048, 64), *range(2048, 4096, 128), *range(4096, 8193, 512))

#: Sizes with a second graph, for more than `MAX_NUM_REQS` requests: four per octave. It replaces a PIECEWISE graph,
#: which takes twice as long to capture.
SIZES_OF_MANY: Final = tuple(
    size for size in SIZES if size > MAX_NUM_REQS and size % (1 << (size.bit_length() - 3)) == 0
)

#: Limit of tokens × requests over FlashAttention 2: for each request it launches thread blocks for the longest query
#: that the graph may get, and most of them only exit. At 32 heads the limit leaves 16,384 blocks per layer, by an
#: estimate 0.1 ms. Not measured.
_FLASH_2_GRID: Final = 1 << 15


@dataclass(frozen=True)
class _Plan:
    """The graphs of a runner.

    Attributes:
        most: requests of a graph, at most, if it has enough tokens.
        held: tokens of a graph -> requests, ascending.
        many: the same for graphs of more than `MAX_NUM_REQS` requests.
        longest: tokens of a request, at most; None for any number.
        grid: tokens × requests of a graph, at most; None for any number.
        delta_rules: builders of gated delta rules.
        keeps_pieces: whether vLLM's PIECEWISE graphs are still needed.
    """

    most: int
    held: Mapping[int, int]
    many: Mapping[int, int]
    longest: int | None
    grid: int | None
    delta_rules: Sequence[Any]
    keeps_pieces: bool

    def graphs(self, reqs: Mapping[int, int]) -> list[BatchExecutionDescriptor]:
        # Before 0.28 no graph bounds the tokens of a request.
        bounds = {size: {} if self.longest is None else {"max_query_len": min(size, self.longest)} for size in reqs}
        return [
            BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=count, **bounds[size])
            for size, count in reqs.items()
        ]

    @property
    def in_words(self) -> str:
        more = f", and {self.grid} tokens × requests over FlashAttention 2" if self.grid else ""
        more += f", and {self.longest} tokens per request over MLA" if self.longest else ""
        more += f"; {len(self.many)} of at most {max(self.many)} tokens for more requests" if self.many else ""
        return f"{len(self.held)} shapes of at most {max(self.held)} tokens and {self.most} requests{more}"


def add_mixed_graphs(runner: Any) -> None:
    """Have target and drafter also capture FULL graphs for any batch.

    vLLM then prefers these graphs to PIECEWISE graphs and to none. A drafter whose first pass runs on the target's
    batch has its own graphs; any other drafter reads such a batch as with `cudagraph_mode` FULL.

    Raises:
        FeatureRequired: an engine with a drafter cannot have these graphs, and the feature's switch is `on`.
    """
    if computes_images_apart(runner.attn_groups) and not runner.use_pp:
        # vLLM's own graphs of decode batches hold no image either.
        dispatch = MixedDispatch.of(runner) or MixedDispatch(runner)
        dispatch.attach(hasattr(runner.speculator, "prefill_cudagraph_manager"))
    # The stages of a pipeline must make the same calls, and only the last one has a sampler.
    plain = gates.is_on(gates.PLAIN_DECODE) if runner.use_pp else decodes_plainly(runner)
    if runner.speculative_config is None and not plain:
        return
    if lost_mixed_graphs(runner.compilation_config):
        # The capture for vLLM's memory estimate failed and gave the reason.
        return
    most = min(runner.max_num_reqs, MAX_NUM_REQS)
    largest_size: int = runner.compilation_config.max_cudagraph_capture_size or 0
    # A capture's requests share its tokens, and may not be longer than their block tables.
    most_tokens = min(runner.max_num_tokens, largest_size, most * runner.max_model_len)
    beyond = Beyond.STAGES | Beyond.DATA_PARALLEL
    if getattr(runner.vllm_config.parallel_config, "enable_elastic_ep", False):
        # A rank that joins captures while the others serve.
        beyond = Beyond.STAGES
    reason = why_not(runner, Part.V2_MIXED, beyond=beyond)
    if reason is not None or most_tokens < SIZES[0]:
        report_unused(V2_MIXED_GRAPHS, _STOCK, reason or f"graphs have {most_tokens} tokens at most")
        if has_mixed_graphs(runner.compilation_config):
            # vLLM has estimated their memory, and it does not suffice.
            set_mixed_graphs(runner.compilation_config, {})
        return
    plan = _planned(runner, most, most_tokens)
    graphs, larger = plan.graphs(plan.held), plan.graphs(plan.many)
    if not same_on_stages(crc32(repr(graphs + larger).encode())):
        report_unused(V2_MIXED_GRAPHS, _STOCK, "layers of another stage of the pipeline need other graphs")
        return
    # With LoRA a draft may share adapted layers with the target, and its graphs hold one number of adapters.
    shares_first_pass = type(runner.speculator).__name__ in SHARED_FIRST_PASS and runner.lora_config is None
    for offered in (graphs, larger):
        _offer(runner.cudagraph_manager, offered, spare=1 if plan.delta_rules else 0)
        if shares_first_pass:
            # Its batch is padded to the target's graph.
            _offer(runner.speculator.prefill_cudagraph_manager, offered)
    _attach(runner, plan, shares_first_pass)
    vars(runner.compilation_config)[KEEPS_PIECES] = plan.keeps_pieces
    shapes: dict[int, dict[int, int]] = {}
    for desc in (*graphs, *larger):
        shapes.setdefault(desc.num_tokens, {})[desc.num_reqs] = min(desc.num_tokens, plan.longest or desc.num_tokens)
    set_mixed_graphs(runner.compilation_config, shapes)
    run_records.note(V2_MIXED_GRAPHS, plan.in_words)
    for feature in (V2_MIXED_GRAPHS, BACKPORT_MIXED_GRAPHS):
        run_records.use(feature, True)


def _planned(runner: Any, most: int, most_tokens: int) -> _Plan:
    sizes = [*(size for size in SIZES if size < most_tokens), most_tokens]
    groups = (group for groups in runner.attn_groups for group in groups)
    over_flash_2 = any(2 in flash_versions(group, runner.compilation_config) for group in groups)
    grid = _FLASH_2_GRID if over_flash_2 else None
    builders = list(builders_of(runner.attn_groups))
    if runner.dp_size > 1:
        # Ranks of data parallelism agree on tokens, and each looks for the graph by its own requests: a graph takes as
        # many as a batch of its tokens may have, so that all find the same.
        most = runner.max_num_reqs
        sizes = [size for size in sizes if not grid or min(size, most) <= grid // size]
    longest = min(filter(None, map(longest_as_decode, builders)), default=None)
    if longest is not None:
        # More tokens need a longer request.
        sizes = [size for size in sizes if size <= longest * most]
    held = {size: min(size, most, grid // size if grid else most) for size in sizes}
    delta_rules = [builder for builder in builders if is_delta_rule(builder)]
    if delta_rules:
        # It needs parts of vLLM that 0.31 has not.
        from vllm_hwplugin.spec_decode.v2.delta_rule import most_requests

        held = {size: min(reqs, most_requests(size, runner.decode_query_len)) for size, reqs in held.items()}
    keeps_pieces = runner.supports_mm_inputs or bool(delta_rules) or longest is not None
    many: dict[int, int] = {}
    if runner.max_num_reqs > most and not (keeps_pieces or grid):
        bound = min(most_tokens, launch_tokens(runner.vllm_config))
        rows = min(runner.max_num_reqs, MOST_REQS)
        many = {size: min(size, rows) for size in (*SIZES_OF_MANY, most_tokens) if most < size <= bound}
    return _Plan(most, held, many, longest, grid, delta_rules, keeps_pieces)


def _attach(runner: Any, plan: _Plan, shares_first_pass: bool) -> None:
    """Tell vLLM's dispatch, and builders of delta rules, of the graphs."""
    dispatch = MixedDispatch.of(runner) or MixedDispatch(runner)
    if not plan.delta_rules:
        dispatch.attach(shares_first_pass, None, plan.longest is not None)
        return
    from vllm_hwplugin.spec_decode.v2 import delta_rule

    dispatch.attach(shares_first_pass, delta_rule.MOST_PROMPTS, plan.longest is not None)
    for builder in plan.delta_rules:
        delta_rule.attach(builder, max(plan.held), max(plan.held.values()), dispatch.replays)


def _offer(manager: Any, graphs: Sequence[Any], spare: int = 0) -> None:
    """Plan `graphs`, in ascending order of tokens, and make them candidates.

    Args:
        spare: tokens of a graph that no batch has.
    """
    # A batch gets the smallest graph that holds it. vLLM's FULL graphs come first, because they have a fixed shape and
    # pad less. PIECEWISE graphs come last. Each number of adapters (LoRA) that vLLM captures has its own graphs.
    planned = manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    for num_loras in manager.lora_capture_cases:
        start, own_graphs = 1, [replace(graph, num_active_loras=num_loras) for graph in graphs]
        planned.extend(own_graphs)
        for place, graph in enumerate(own_graphs):
            fitting = list(_with_more_requests(own_graphs[place:]))
            for num_tokens in range(start, graph.num_tokens + 1 - spare):
                own = manager._candidates.get((num_tokens, num_loras), [])
                ordered = sorted([*own, *fitting], key=lambda desc: desc.cg_mode != CUDAGraphMode.FULL)
                manager._candidates[num_tokens, num_loras] = ordered
            start = graph.num_tokens + 1 - spare
    planned.sort(key=lambda desc: desc.num_tokens, reverse=True)


def _with_more_requests(graphs: Sequence[Any]) -> Iterator[Any]:
    """Yield the first graph, then graphs that hold more requests."""
    most = 0
    for graph in graphs:
        if most < min(graph.num_reqs, graphs[0].num_tokens):
            most = graph.num_reqs
            yield graph
