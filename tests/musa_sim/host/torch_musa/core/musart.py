# SPDX-License-Identifier: Apache-2.0
import functools
import types

from .memory import mem_get_info


def _not_simulated(name):
    def call(*_):
        raise NotImplementedError(f"{name} of the runtime is not simulated")

    return call


@functools.cache
def musart():
    """The runtime's functions that torch_musa binds."""
    names = ("musaHostRegister", "musaHostUnregister", "musaStreamCreate", "musaStreamDestroy", "musaGetErrorString")
    runtime = types.SimpleNamespace(**{name: _not_simulated(name) for name in names})
    runtime.musaMemGetInfo = mem_get_info
    return runtime
