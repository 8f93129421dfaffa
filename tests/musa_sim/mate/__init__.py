# SPDX-License-Identifier: Apache-2.0
"""A stand-in for mate 0.2.2, Moore Threads' library of kernels. Nothing here was recorded on MUSA hardware.

The functions have the names, the order and the defaults of mate 0.2.2's source, and raise where that raises; what they
compute is plain torch. Written anew from what was read there: no code of mate's is here. What the plugin never asks for
is refused with NotImplementedError, or is not there.

Where it is stricter than the real one: a plan has to be that of the batch it is used for; keys that a page table does
not hold are an error. The real kernels would read what is there. A request without keys is an error where a kernel
comes built, so that nobody could read what it does.

``mate._device`` says which tensors it takes (``musa``, as the real one). A call that needs a module of kernels for the
first time compiles it, which a graph's capture refuses.
"""

from __future__ import annotations

from . import _device, flashmla, jit
from .flashmla import flash_mla_with_kvcache, get_mla_metadata
from .mha_interface import flash_attn_varlen_func

__version__ = "0.2.2"
__all__ = ["_device", "flash_attn_varlen_func", "flash_mla_with_kvcache", "flashmla", "get_mla_metadata", "jit"]
