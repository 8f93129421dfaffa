# SPDX-License-Identifier: Apache-2.0
"""Launch the Triton kernels, which run on every GPU of vLLM's Triton."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from . import _kernels
from ._arguments import Arguments, Scratch, check
from ._plan import MAX_SPLITS, Heights, LaunchPlan

_LOG2E: Final = 1.4426950408889634
_MIN_TILES: Final = 4
_SLICE: Final = 128
_CHUNK: Final = 16


@dataclasses.dataclass(frozen=True)
class Tile:
    """Settings of the kernel for one height of the tile.

    Args:
        keys: in one step.
        warps: of a program.
        stages: of keys and values that are loaded ahead, in shared memory.
        together: programs that share a multiprocessor well.
    """

    keys: int
    warps: int
    stages: int
    together: int


# Measured on an H200 at head size 512. With two warps and short tiles several programs fit on a multiprocessor and hide
# each other's latency; greater heights do not fit into the registers. A page holds a multiple of a tile's keys, so a
# tile never reads a page that lies before the window, which may have been overwritten.
TILES: Final[Mapping[int, Tile]] = {16: Tile(16, 2, 3, 4), 32: Tile(16, 4, 3, 2), 64: Tile(16, 8, 3, 1)}

# Any number, for Triton's interpreter on a CPU in tests.
_OF_NO_GPU: Final = 132


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """See :data:`~._call.Kernel`."""

    name: ClassVar[str] = "triton"
    heights: ClassVar[Heights] = tuple((rows, tile.together) for rows, tile in TILES.items())

    multiprocessors: int

    @classmethod
    def load(cls, device: torch.device) -> TritonKernel:
        if device.type == "cpu":
            return cls(_OF_NO_GPU)
        return cls(torch.cuda.get_device_properties(device).multi_processor_count)

    def check(self, given: Arguments) -> None:
        check(given)

    def launch(self, given: Arguments, plan: LaunchPlan, scratch: Scratch) -> None:
        """Run `attention`, and `merge` if there may be splits."""
        tile = TILES[plan.rows]
        head_size = given.query.shape[2]
        num_requests, num_kv_heads = given.seq_lens.shape[0], given.keys.shape[2]
        split = plan.splits > 1
        shared: dict[str, Any] = {
            "BLOCK_M": plan.rows,
            "BLOCK_Q": plan.tokens,
            "BLOCK_N": tile.keys,
            "MIN_TILES": _MIN_TILES,
            "GROUP": given.query.shape[1] // num_kv_heads,
            "HEAD_SIZE": head_size,
            "CAUSAL": given.causal,
            "WINDOW": given.window != (-1, -1),
            "SEARCH": plan.blocks_per_request == 0,
        }
        _kernels.attention[(plan.blocks, num_kv_heads, plan.splits)](
            given.query,
            given.keys,
            given.values,
            given.out,
            scratch.out,
            scratch.lse,
            scratch.lse if given.sinks is None else given.sinks,
            given.query_start_loc,
            given.seq_lens,
            given.block_table,
            num_requests,
            plan.blocks_per_request,
            plan.splits,
            given.scale * _LOG2E,
            given.softcap * _LOG2E,
            *given.window,
            *given.query.stride()[:2],
            *given.out.stride()[:2],
            given.block_table.stride(0),
            *given.keys.stride()[:3],
            *given.values.stride()[:3],
            HEAD_PAD=max(1 << (head_size - 1).bit_length(), 16),
            PAGE=given.keys.shape[1],
            SOFTCAP=given.softcap > 0,
            SINKS=given.sinks is not None,
            SPLIT=split,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **shared,
        )
        if split:
            _kernels.merge[(plan.blocks, num_kv_heads * plan.rows, -(-head_size // _SLICE))](
                given.out,
                scratch.out,
                scratch.lse,
                given.query_start_loc,
                given.seq_lens,
                num_requests,
                plan.blocks_per_request,
                plan.splits,
                *given.window,
                *given.out.stride()[:2],
                KV_HEADS=num_kv_heads,
                SLICE=_SLICE,
                MAX_SPLITS=MAX_SPLITS,
                CHUNK=_CHUNK,
                num_warps=4,
                **shared,
            )
