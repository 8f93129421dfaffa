# SPDX-License-Identifier: Apache-2.0
import torch.distributed as dist

from .._MUSAC import device as _sim


def version():
    return (2, 11, 4)


def _create(store, rank, size, timeout):
    return _sim.Mccl(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


def register():
    """As torch_musa: by a maker that takes store, rank, size and timeout, and nothing else."""
    dist.Backend.register_backend("mccl", _create, False, "musa")
