# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402
"""``torch.musa`` over the simulated device: the names of torch_musa 2.7.1, whose source is public, and no others. To
others it is the release for torch 2.11, which vLLM needs.

Everything here is written from a description of torch_musa's interface. What torch_musa lacks is lacking, so that code
which asks for it fails as it would there; what it has and nothing here needs is not there, or raises
``NotImplementedError``.
"""

import os
import sys

import musa_sim_limits
import musa_sim_mapping
import torch

__version__ = "2.11.0.post2"

torch.utils.rename_privateuse1_backend("musa")

from . import _MUSAC, amp, core
from .core import mccl, memory, random
from .core._lazy_init import _is_in_bad_fork, _lazy_call, _lazy_init
from .core.amp import get_amp_supported_dtype
from .core.device import (
    _exchange_device,
    _maybe_exchange_device,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_available,
    set_device,
    synchronize,
)
from .core.memory import (
    MemPool,
    MUSAPluggableAllocator,
    empty_cache,
    get_allocator_backend,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    use_mem_pool,
)
from .core.musart import musart
from .core.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    set_rng_state,
    set_rng_state_all,
)
from .core.stream import Event, Stream, current_stream, default_stream, set_stream, stream
from .musa_graph.graphs import MUSAGraph, graph, graph_pool_handle, is_current_stream_capturing

OutOfMemoryError = torch.OutOfMemoryError
# The types of tensors by name, which Dynamo looks for. Nothing here makes one.
for _name in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Int", "Short", "Long", "Bool"):
    globals()[f"{_name}Tensor"] = type(f"{_name}Tensor", (), {})
torch._register_device_module("musa", sys.modules[__name__])
torch.version.musa = "50100"
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
if torch.distributed.is_available():
    mccl.register()
if os.environ.get("TRITON_INTERPRET") == "1":
    from triton_musa import interpreter

    interpreter.install()
musa_sim_limits.install()
musa_sim_mapping.install()


def _autoload() -> None:
    """What ``import torch`` calls by the entry point; importing this module has done everything."""
