# SPDX-License-Identifier: Apache-2.0
"""vLLM's `worker_extension_cls` for a worker in which, on the second rank, no graph can hold a function.

vLLM imports it behind the plugins and before the engine's graphs. `FAILING_ON_RANK_1` names the function, as
`module:class.method`; it does its work first.
"""

import functools
import os
import pkgutil

import torch
from vllm.distributed.parallel_state import get_tp_group


class FailingRank:
    """Adds nothing to the worker."""


def fail_there(name: str) -> None:
    path, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def call(*args, **kwargs):
        result = original(*args, **kwargs)
        if get_tp_group().rank_in_group == 1:
            torch.accelerator.synchronize()
        return result

    setattr(owner, attribute, call)


if failing := os.environ.get("FAILING_ON_RANK_1"):
    fail_there(failing)
