# SPDX-License-Identifier: Apache-2.0
"""Cause the other failures in docs/failures.md: see ``failure_scenarios.py``."""

from __future__ import annotations

from .failure_scenarios import Scenario, made_up, made_up_with
from .patching.madeup import GATES, Project

ATTENTION, OPS = "VLLM_HWPLUGIN_ATTENTION", "VLLM_HWPLUGIN_OPS"

OFF = dict.fromkeys(
    (
        *GATES,
        "VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH",
        "VLLM_HWPLUGIN_DFLASH_DRAFT_BACKEND",
        "VLLM_HWPLUGIN_WINDOW_BLOCKS",
        OPS,
    ),
    "off",
)

# On a Moore Threads host vLLM has no compiled operations: the plugin defines them and registers kernels. The dispatch
# key CPU stands in for MUSA's.
OPERATIONS = """
import torch
from types import ModuleType
from vllm_hwplugin.base import gates
from vllm_hwplugin.ops import definitions, overrides
from vllm_hwplugin.ops.compile import jit
from vllm_hwplugin.ops.compile.spec import KernelUnavailable

overrides.is_musa_host, overrides.MUSA_KEY = lambda: True, "CPU"
sys.modules["vllm._custom_ops"] = ModuleType("vllm._custom_ops")
AFFECTED = "silu_and_mul_per_block_quant"

def served():
    # The plugin's kernel also serves an operation that is not decided yet.
    live = {name for name, override in overrides._overrides.items() if override.state in ("plugin", "open")}
    states = {name: "live" if name in live else "vllm" for name in overrides.OPS}
    return {AFFECTED: states.pop(AFFECTED)}, states
"""

# vLLM chooses TRITON_ATTN for a layer with heads of 512. The plugin's class refuses for `REFUSED`.
LAYER = """
from collections import namedtuple
from types import ModuleType, SimpleNamespace
from vllm_hwplugin.platforms import _cuda_attention as attention

def module(name, **members):
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(members)

REFUSED, OBSTACLE, ANSWER = [], "", "triton.Triton"
module("triton", Triton=SimpleNamespace(get_name=lambda: "TRITON_ATTN"))
own = SimpleNamespace(validate_configuration=lambda **asked: REFUSED)
module(attention.CUDA.module, **{attention.CUDA.cls: own})
attention.jit.obstacle = lambda kernel, capability: OBSTACLE
Config = namedtuple("Config", "head_size use_mla use_sparse use_mm_prefix use_non_causal")
Capability = namedtuple("Capability", "major minor")

def vllm(selected, config, heads):
    if not ANSWER:
        raise ValueError("no valid backend")
    return ANSWER

def attempt():
    named = SimpleNamespace(name="FLASH_ATTN", is_overridden=lambda: False)
    path = attention.choose(vllm, named, Config(512, False, False, False, False), 8, Capability(9, 0))
    return {"layer": "live" if path == attention.CUDA.path else "vllm"}, {}
"""

# vLLM asks for the platform class first, and loads the general plugin later.
PLATFORM = """
from types import ModuleType
from vllm_hwplugin import plugin
platforms = sys.modules["vllm.platforms"] = ModuleType("vllm.platforms")
platforms.builtin_platform_plugins = {"cpu": lambda: "vllm.platforms.cpu.CpuPlatform"}

def attempt():
    assert plugin.platform() is None
    plugin.register()
    return {}, {}
"""

OTHERS: dict[str, list[Scenario]] = {
    "does not exist in this release": [Scenario(change=made_up, variables={"VLLM_HWPLUGIN_STRIKT": "1"})],
    "the next folder can": [Scenario(change=made_up_with(Project.block_cache), variables={"TMPDIR": "tmp"})],
    "has unknown parameters": [
        Scenario(
            OPERATIONS
            + """
def attempt():
    other = torch.library.Library("_C", "FRAGMENT")
    other.define(AFFECTED + "(Tensor! out) -> ()")
    definitions.define_missing("CPU")
    overrides.install(gates.Settings())
    return served()
""",
            gate=OPS,
        )
    ],
    "no kernel can be registered": [
        Scenario(
            OPERATIONS
            + f"""
def attempt():
    definitions.define_missing("CPU")
    {spoil}
    overrides.install(gates.Settings())
    return served()
""",
            gate=OPS,
        )
        for spoil in (
            'sys.modules["vllm._custom_ops"] = None',
            "del torch.library.get_kernel",
            # Without the argument `allow_override`.
            "impl = torch.library.Library.impl\n    torch.library.Library.impl = lambda self, name, function, key: ("
            "impl(self, name, function, key))",
        )
    ],
    "built or loaded at its first call": [
        Scenario(
            OPERATIONS
            + """
def no_compiler(kernel, torch):
    raise KernelUnavailable("no compiler")

def attempt():
    definitions.define_missing("CPU")
    jit.provide = no_compiler
    overrides.install(gates.Settings())
    out, x, scales = torch.empty(2, 128).to(torch.int8), torch.ones(2, 256).half(), torch.empty(2, 1)
    torch.ops._C.silu_and_mul_per_block_quant(out, x, scales, 128, None, False)
    return served()
""",
            gate=OPS,
        )
    ],
    "OPS_SKIP": [
        Scenario(
            OPERATIONS
            + """
def attempt():
    definitions.define_missing("CPU")
    overrides.install(gates.Settings())
    return served()
""",
            gate=OPS,
            variables={"VLLM_HWPLUGIN_OPS_SKIP": "rope"},
        )
    ],
    "does not fit a layer": [Scenario(LAYER + "REFUSED = ['no fp8']", gate=ATTENTION)],
    "does not fit such a layer": [Scenario(LAYER + "REFUSED = ['no fp8']; ANSWER = ''", gate=ATTENTION)],
    "cannot be imported or queried": [Scenario(LAYER + "sys.modules[attention.CUDA.module] = None", gate=ATTENTION)],
    "would be faster": [Scenario(LAYER + "OBSTACLE = 'no nvcc'", gate=ATTENTION)],
    "the platform class": [
        Scenario(PLATFORM, variables={**OFF, "VLLM_HWPLUGIN_PLATFORM": "cuda"}),
        # A vLLM with another table of platforms.
        Scenario(PLATFORM + "platforms.builtin_platform_plugins = 1", variables=OFF),
    ],
}
