# SPDX-License-Identifier: Apache-2.0
"""What an installed Triton's front end makes of launches: `python -m tests.musa_sim.launches_child FOUND LAUNCHES`.

LAUNCHES has what `MUSA_SIM_LAUNCHES` wrote on the simulated device. FOUND has "compiles" for each kernel, or what the
front end says of its first launch that it refuses. The plugin's patches are applied first. No GPU is asked.
"""

import importlib
import json
import sys
from pathlib import Path

import triton
import triton.language as tl

from . import ttir_child


def kernels_of(path: str):
    """Yield the kernels of that name: of the module, or of a class in it, without an autotuner or heuristics."""
    module, _, name = path.partition(":")
    owner = importlib.import_module(module)
    for place in (owner, *(value for value in vars(owner).values() if isinstance(value, type))):
        if kernel := vars(place).get(name):
            kernel = getattr(kernel, "__func__", kernel)
            while not hasattr(kernel, "params"):
                kernel = kernel.fn
            yield kernel


def value_of(taken: dict):
    match taken:
        case {"constant": value}:
            return value
        case {"dtype": name}:
            return tl.dtype(name)
        case {"function": path}:
            return next(kernels_of(path))
    raise AssertionError(taken)


def said_of(launch: dict) -> str:
    arguments = launch["arguments"]
    kernel = next(found for found in kernels_of(launch["kernel"]) if {*found.arg_names} == arguments.keys())
    types = {name: taken["type"] for name, taken in arguments.items() if "type" in taken}
    constants = {name: value_of(taken) for name, taken in arguments.items() if "type" not in taken}
    return ttir_child.said_of(kernel, types, constants)


if __name__ == "__main__":
    from vllm_hwplugin import plugin
    from vllm_hwplugin.musa import triton_gaps

    triton_gaps.install()
    plugin.register()
    ttir_child.pretend_a_gpu()
    said: dict[str, str] = {}
    for line in Path(sys.argv[2]).read_text().splitlines():
        launch = json.loads(line)
        if said.get(launch["kernel"], "compiles") == "compiles":
            said[launch["kernel"]] = said_of(launch)
    Path(sys.argv[1]).write_text(json.dumps({"triton": triton.__version__, **said}))
