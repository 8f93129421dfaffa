"""Modules of a released Model Runner V2 that run on the host, with graphs that are written down.

A module of `vllm.v1.worker.gpu` is executed from the released text, patched or stock, and takes what it imports from
there the same way. `plain_triton` runs its kernels, and a graph holds their launches next to the tensor operations: a
replay repeats both on the same tensors, with the numbers that they had at capture.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from vllm.model_executor.offloader.base import NoopOffloader

from ...released import Modules, NotThere, texts
from ..recording import Recording
from ..stand_in import StandIn
from . import plain_triton

RUNNER = "vllm.v1.worker.gpu"


class Launches:
    """A Triton kernel whose launches the current capture writes down."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            def run(*args: Any, **kwargs: Any) -> None:
                with _disable_current_modes():
                    self._kernel[grid](*args, **kwargs)

            run(*args, **kwargs)
            if Graph.capturing is not None:
                Graph.capturing.operations.append((run, args, kwargs, []))

        return launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """From another kernel."""
        return self._kernel(*args, **kwargs)


def jit(function: Any = None, **options: Any) -> Any:
    """`triton.jit`."""
    return partial(jit, **options) if function is None else Launches(plain_triton.Kernel(function))


#: vLLM's module `vllm.triton_utils`.
TRITON_UTILS: dict[str, Any] = {
    "tl": plain_triton.LANGUAGE,
    "tldevice": NotThere,
    "triton": types.SimpleNamespace(**{**vars(triton), "jit": jit}),
    "HAS_TRITON": True,
}


class Graph:
    """`torch.cuda.CUDAGraph` for one capture."""

    capturing: ClassVar[Recording | None] = None
    #: The graphs that were replayed, in order.
    replayed: ClassVar[list[Graph]] = []

    def capture_begin(self, pool: Any = None) -> None:
        assert Graph.capturing is None
        Graph.capturing = Recording()
        Graph.capturing.__enter__()

    def capture_end(self) -> None:
        assert Graph.capturing is not None
        Graph.capturing.__exit__(None, None, None)
        self.operations, Graph.capturing = Graph.capturing.operations, None

    def replay(self) -> None:
        Graph.replayed.append(self)
        for function, args, kwargs, made in self.operations:
            result = function(*args, **kwargs)
            if made:
                leaves = torch.utils._pytree.tree_leaves(result)
                values = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                for target, value in zip(made, values, strict=True):
                    target.copy_(value)


@contextlib.contextmanager
def capture(graph: Graph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """`torch.cuda.graph`."""
    graph.capture_begin(pool)
    try:
        yield
    finally:
        graph.capture_end()


@contextlib.contextmanager
def by_the_host() -> Iterator[None]:
    """What is done here no graph holds: the host does it whenever Python runs, and never at a replay."""
    with _disable_current_modes():
        yield


class PlainUvaBuffer:
    """vLLM's `UvaBuffer` where host and device are one."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np, self.uva = self.cpu.numpy(), self.cpu


def best_token(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    *_: Any,
    output_processed_logits: torch.Tensor | None = None,
    output_processed_logits_col: torch.Tensor | None = None,
    **__: Any,
) -> torch.Tensor:
    """What `gumbel_sample` does without temperature. Rows without a request leave their logits in the last row."""
    if output_processed_logits is not None:
        rows = idx_mapping % len(output_processed_logits)
        # A number of the device, by which an index of no dimension would go over the host.
        column = torch.zeros_like(rows) + output_processed_logits_col
        output_processed_logits[rows, column] = logits
    return logits.argmax(dim=-1)


#: What takes a device or a process group: name -> what stands for it in each module that imports it.
STAND_INS: dict[str, Any] = {
    "graph_capture": lambda device: contextlib.nullcontext(),
    "is_global_first_rank": lambda: False,
    "get_pp_group": lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True),
    "get_offloader": NoopOffloader,
    "is_breakable_cudagraph_enabled": lambda: False,
    "set_graph_pool_id": lambda pool: None,
    "current_platform": StandIn(
        "current_platform",
        get_global_graph_pool=object,
        device_type="cpu",
        **{f"is_{other}": lambda: False for other in ("cpu", "cuda", "rocm", "xpu")},
    ),
    "PIN_MEMORY": False,
    "MULTIMODAL_REGISTRY": types.SimpleNamespace(supports_multimodal_inputs=lambda config: False),
    # Its kernel draws random numbers by Triton's functions, which `plain_triton` does not have.
    "gumbel_sample": best_token,
    "UvaBuffer": PlainUvaBuffer,
    # From 0.29 on a speculator asks the class of the target.
    "get_model_cls": lambda config: object,
    # From 0.30 on there is a buffer for hosts without, and it is taken.
    "is_uva_available": lambda: False,
    "CommonAttentionMetadata": types.SimpleNamespace,
}


class ReleasedModules(Modules):
    """The modules of one version.

    Args:
        tree: its text.
        more: to stand in for, beside `STAND_INS`.
        choices: gate -> value; by default every feature is on.
    """

    def __init__(
        self,
        tree: Any,
        more: Mapping[str, Any] = types.MappingProxyType({}),
        **choices: str,
    ) -> None:
        given = {"vllm.triton_utils": TRITON_UTILS}
        super().__init__(texts(tree, **choices), (RUNNER,), given=given, stand_ins={**STAND_INS, **more})

    def __call__(self, name: str) -> types.ModuleType:
        """`modules("block_table")`: one below `vllm.v1.worker.gpu`."""
        return self.load(f"{RUNNER}.{name}")
