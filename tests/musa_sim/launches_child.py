# SPDX-License-Identifier: Apache-2.0
"""What an installed Triton's front end makes of launches: `python -m tests.musa_sim.launches_child FOUND LAUNCHES`.

LAUNCHES has what `MUSA_SIM_LAUNCHES` wrote on the simulated device. FOUND has "compiles" for each kernel, or of its
first launch that does not what the front end says, or "parity": the sum of a mask is one bit there. The plugin's
patches are applied first. No GPU is asked.
"""

import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

TARGET = GPUTarget("cuda", 90, 32)


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


def front_end_says(kernel, signature: dict[str, str], constants: dict) -> str:
    """What the front end says of a kernel with these types and constants."""
    backend = make_backend(TARGET)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    try:
        made = ASTSource(kernel, signature, constants).make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
    except Exception as error:
        return str(error)
    sums_of_masks = re.search(r"arith\.addi [^\n]* : i1\b", str(made))
    return "parity" if sums_of_masks else "compiles"


def pretend_a_gpu() -> None:
    """Have vLLM take Triton, which it leaves alone where there is no GPU, and where it is a build for the CPU."""
    for name, backend in backends.items():
        backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
    driver = MagicMock()
    driver.get_current_target.return_value = TARGET
    driver.utils.get_device_properties.return_value = {"multiprocessor_count": 56, "max_shared_mem": 192 << 10}
    triton.runtime.driver.set_active(driver)
    # Kernels of delta rules ask for it when they are imported.
    torch.cuda.get_device_name = lambda *_: "MTT S5000"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version(name).partition("+")[0] if name == "vllm" else version(name)


def said_of(launch: dict) -> str:
    arguments = launch["arguments"]
    kernel = next(found for found in kernels_of(launch["kernel"]) if {*found.arg_names} == arguments.keys())
    types = {name: taken["type"] for name, taken in arguments.items() if "type" in taken}
    constants = {name: value_of(taken) for name, taken in arguments.items() if "type" not in taken}
    return front_end_says(kernel, types, constants)


if __name__ == "__main__":
    from vllm_hwplugin import plugin
    from vllm_hwplugin.musa import triton_gaps

    triton_gaps.install()
    plugin.register()
    pretend_a_gpu()
    said: dict[str, str] = {}
    for line in Path(sys.argv[2]).read_text().splitlines():
        launch = json.loads(line)
        if said.get(launch["kernel"], "compiles") == "compiles":
            said[launch["kernel"]] = said_of(launch)
    Path(sys.argv[1]).write_text(json.dumps({"triton": triton.__version__, **said}))
