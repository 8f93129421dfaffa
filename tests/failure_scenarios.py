# SPDX-License-Identifier: Apache-2.0
"""How to bring about each failure of the table: a change to a made-up vLLM, and what its process does then.

A scenario's ``attempt()`` runs in a process of its own. It returns two dicts of states, of what the failure concerns
and of what it does not: ``live`` where the plugin serves it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .patching.madeup import EDITS, GATES, Project

MADE_UP, OTHER, THIRD = GATES
ATTENTION, OPS = "VLLM_HWPLUGIN_ATTENTION", "VLLM_HWPLUGIN_OPS"
ACME, FOLDERS = "VLLM_HWPLUGIN_PATCH_ACME_FIX", "VLLM_HWPLUGIN_PATCHES"
LIMIT = [("LIMIT = 3", "LIMIT = 4")]


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        attempt: code that defines ``attempt()``.
        change: what is done to the project before.
        gate: of what is concerned.
        variables: are set under every column.
    """

    attempt: str
    change: Callable[[Project], None] = lambda project: None
    gate: str = MADE_UP
    variables: Mapping[str, str] = field(default_factory=dict)


INSTALL = """
def states(entry, concerned):
    found = {name: item["state"] for name, item in entry.features.items()}
    return {concerned: found.pop(concerned, "none")}, found

def attempt():
    return states(install(), "made-up")
"""


def _made_up(project: Project) -> None:
    project.feature("made-up", EDITS)
    project.feature("other", {"vllm/v1/beta.py": [("double(double(value))", "double(value)")]}, gate=OTHER)


def _with(*changes: Callable[[Project], None]) -> Callable[[Project], None]:
    def change(project: Project) -> None:
        _made_up(project)
        for one in changes:
            one(project)

    return change


def _drift(project: Project) -> None:
    project.write("vllm/v1/alpha.py", project.read("vllm/v1/alpha.py").replace("value * 2", "value*2"))


def _tear(project: Project) -> None:
    (project.site / "vllm/v1/alpha.py").write_bytes(b"# \xe9\n")


def _rival(project: Project) -> None:
    project.feature("rival", {"vllm/v1/alpha.py": [("value * 2", "value + value")]}, gate=THIRD)


def _uninstall(project: Project) -> None:
    project.write("acme_lib/core.py", "VALUE = 1\n")
    edits = {"acme_lib/core.py": [("VALUE = 1", "VALUE = 2")]}
    more = 'distribution = "acme-lib"'
    project.feature("fix", edits, gate=None, catalogue=project.catalogue("acme"), more=more)


def _open_to_all(project: Project) -> None:
    (project.folder / "acme").chmod(0o777)


def _needs(project: Project) -> None:
    project.feature("needs", {"vllm/v1/pack/inner.py": [("'inner'", "'x'")]}, gate=THIRD, requires=["made-up"])


def _apply(project: Project) -> None:
    for path, replacements in EDITS.items():
        text = project.read(path)
        for old, new in replacements:
            text = text.replace(old, new)
        project.write(path, text)


def _age(project: Project) -> None:
    project.write("vllm/_version.py", "__version__ = version = '0.99.0'\n")


def _forget_version(project: Project) -> None:
    (project.site / "vllm/_version.py").unlink()


def _second_tree(project: Project) -> None:
    shutil.copytree(project.site, project.folder / "second")


def _block_cache(project: Project) -> None:
    project.cache.write_text("in the way")
    (project.folder / "tmp").mkdir()


def _state(*more: str) -> Callable[[Project], None]:
    """The feature cannot be patched in place: it changes what ran when its module was imported."""

    def change(project: Project) -> None:
        edits = {"vllm/v1/alpha.py": LIMIT, **{path: EDITS[path] for path in more}}
        project.feature("dflash-made-up", edits)
        project.feature("other", {"vllm/v1/beta.py": [("double(double(value))", "double(value)")]}, gate=OTHER)

    return change


IMPORTED = """
def attempt():
    import vllm.v1.alpha
    return states(install(), "dflash-made-up")
"""

# As a platform class calls it while vLLM makes its configuration, after something was imported past the finder.
DFLASH = """
from importlib.machinery import PathFinder
from types import SimpleNamespace
from vllm_hwplugin.platforms import dflash

def config(**draft):
    target = SimpleNamespace(num_hidden_layers=4, hidden_size=64)
    model = SimpleNamespace(model="draft", hf_config=SimpleNamespace(**draft)) if draft else None
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            use_dflash=lambda: True, num_speculative_tokens=7, attention_backend=None, draft_model_config=model,
            target_model_config=SimpleNamespace(model="target", hf_text_config=target),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[], max_cudagraph_capture_size=None, compile_sizes=None
        ),
        use_v2_model_runner=True,
    )
"""
DFLASH_MODULE = (
    DFLASH
    + """
def attempt():
    entry = install()
    sys.meta_path.insert(0, PathFinder)
    import vllm.v1.alpha
    sys.meta_path.remove(PathFinder)
    dflash.check_and_update_config(config())
    return states(entry, "dflash-made-up")
"""
)
DFLASH_CONFIG = (
    DFLASH
    + """
def attempt():
    entry = install()
    dflash.check_and_update_config(config(hidden_size=32, block_size=8, dflash_config={"target_layer_ids": [0]}))
    return states(entry, "made-up")
"""
)

DFLASH_FAULT = (
    DFLASH
    + """
def attempt():
    entry = install()
    made = config(hidden_size=64, block_size=8, dflash_config={"target_layer_ids": [0]})
    # A vLLM whose configuration has another shape.
    made.speculative_config.target_model_config = None
    dflash.check_and_update_config(made)
    return states(entry, "made-up")
"""
)

PATCHES: dict[str, list[Scenario]] = {
    "misfit": [Scenario(INSTALL, _with(_drift))],
    "conflict": [Scenario(INSTALL + 'attempt = lambda: states(install(), "rival")', _with(_rival), THIRD)],
    "unreadable": [Scenario(INSTALL, _with(_tear))],
    "imported": [Scenario(INSTALL + IMPORTED, _state())],
    "distribution": [
        Scenario(
            INSTALL + 'attempt = lambda: states(install(), "acme/fix")', _with(_uninstall), ACME, {FOLDERS: "acme"}
        )
    ],
    "catalogue": [
        Scenario(
            INSTALL + f'import os; attempt = lambda: states(install(), os.environ["{FOLDERS}"])',
            _with(_uninstall, _open_to_all),
            ACME,
            {FOLDERS: "acme"},
        )
    ],
    "requirement": [
        Scenario(
            INSTALL
            + """
def attempt():
    concerned, others = states(install(), "needs")
    # What is lost itself is a matter of its own row.
    del others["made-up"]
    return concerned, others
""",
            _with(_needs, _drift),
            THIRD,
        )
    ],
    "contradiction": [
        Scenario(
            INSTALL + 'attempt = lambda: states(install(), "needs")', _with(_needs), THIRD, variables={MADE_UP: "off"}
        )
    ],
    "upstream": [Scenario(INSTALL, _with(_apply))],
    "unlisted": [Scenario(INSTALL, _with(_age))],
    "undecided": [
        Scenario(INSTALL, _with(_forget_version)),
        Scenario(INSTALL + "_runtime.make_plan = None", _made_up),
        Scenario(INSTALL + "import tempfile; tempfile.tempdir = '/proc/nowhere'", _with(_block_cache)),
    ],
    "bad value": [Scenario(INSTALL, _made_up, variables={"VLLM_HWPLUGIN_SLP": "perhaps"})],
    "mixture": [
        Scenario(
            """
class Overtaken(_runtime.CopyFinder):
    def put_first(self):
        # What another thread imports, before and after the finder is there.
        import vllm.v1.alpha
        super().put_first()
        import vllm.v1.pack

_runtime.CopyFinder = Overtaken

def attempt():
    install()
    return {}, {}
""",
            _state("vllm/v1/pack/__init__.py"),
        )
    ],
    "other tree": [
        Scenario(
            """
def attempt():
    install()
    sys.path.insert(0, SECOND)
    import vllm.v1.alpha
    return {}, {}
""",
            _with(_second_tree),
        )
    ],
    "copy": [
        Scenario(
            """
def attempt():
    import shutil
    overlay = Path(CACHE, "overlay")
    install()
    shutil.rmtree(overlay)
    overlay.write_text("in the way")
    try:
        import vllm.v1.alpha
    finally:
        # The other columns have the same cache.
        overlay.unlink()
    return {}, {}
""",
            _made_up,
        )
    ],
    "DFlash module": [Scenario(INSTALL + DFLASH_MODULE, _state())],
    "DFlash mixture": [Scenario(INSTALL + DFLASH_MODULE, _state("vllm/v1/pack/__init__.py"))],
    "DFlash config": [Scenario(INSTALL + DFLASH_CONFIG, _made_up)],
    "DFlash served": [
        Scenario(
            INSTALL + DFLASH_CONFIG.replace("hidden_size=32, block_size=8", "hidden_size=64, block_size=7"),
            _made_up,
            THIRD,
        )
    ],
    "DFlash fault": [Scenario(INSTALL + DFLASH_FAULT, _made_up, THIRD)],
    "engine": [
        Scenario(
            INSTALL
            + """
def attempt():
    from vllm_hwplugin.fallback import stays_stock
    entry = install()
    # What a live feature calls where it finds that the engine is not for it. Its gate is the made-up one's, too.
    stays_stock("draft-full-graph", "the drafter runs as in stock vLLM", "a reason")
    return states(entry, "made-up")
""",
            _made_up,
        )
    ],
}

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

# A host with an H200, as far as a process that does not start CUDA can tell, and vLLM's extension with its operations.
# The dispatch key CPU stands in for CUDA.
OPERATIONS = """
import torch
from types import ModuleType, SimpleNamespace
from vllm_hwplugin.ops import overrides
from vllm_hwplugin.ops.build import jit
from vllm_hwplugin.ops.build.errors import KernelUnavailable

torch.version.cuda = "13.0"
overrides.KEY = "CPU"
overrides.device_name = lambda device: "NVIDIA H200"
nvml = sys.modules["vllm.third_party.pynvml"] = ModuleType("pynvml")
nvml.NVMLError = type("NVMLError", (Exception,), {})
nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
nvml.nvmlDeviceGetCount = lambda: 1
nvml.nvmlDeviceGetHandleByIndex = int
nvml.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
sys.modules["vllm._custom_ops"] = ModuleType("vllm._custom_ops")
CONCERNED = "silu_and_mul_per_block_quant"
libraries = []

def define(missing=()):
    for op in overrides.OPS.values():
        if op.name not in missing:
            library = torch.library.Library(op.namespace, "FRAGMENT")
            library.define(op.schemas[0].text)
            library.impl(op.name, lambda *args: None, "CPU")
            libraries.append(library)

def served():
    # Not decided yet is in front of vLLM's.
    states = {name: "live" if not text.startswith("vLLM's") else "vllm" for name, text in overrides.states().items()}
    gaining = [op.name for op in overrides.OPS.values() if op.default_on]
    states = {name: states.get(name, "vllm") for name in gaining}
    return {CONCERNED: states.pop(CONCERNED)}, states
"""

# vLLM's answer for a layer with heads of 512 is TRITON_ATTN; the plugin's class says what it is told to say.
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
WARM_UP = """
from types import SimpleNamespace

from vllm_hwplugin.attention.warm_up import warm_up

def fails(**_):
    raise OSError("mcc: no such file")

def attempt():
    group = SimpleNamespace(get_metadata_builder=lambda _: SimpleNamespace(warm_up=fails))
    warm_up(SimpleNamespace(attn_groups=[[group]], speculative_config=None))
    return {}, {}
"""

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
    "unknown variable": [Scenario(INSTALL, _made_up, variables={"VLLM_HWPLUGIN_STRIKT": "1"})],
    "second place": [Scenario(INSTALL, _with(_block_cache), variables={"TMPDIR": "tmp"})],
    "operation": [
        Scenario(
            OPERATIONS
            + """
def attempt():
    define(missing=[CONCERNED])
    overrides.install()
    return served()
""",
            gate=OPS,
        )
    ],
    "operations": [
        Scenario(
            OPERATIONS
            + f"""
def attempt():
    define()
    {spoil}
    overrides.install()
    return served()
""",
            gate=OPS,
        )
        for spoil in ('sys.modules["vllm._custom_ops"] = None', "del torch.library.get_kernel")
    ],
    "kernel": [
        Scenario(
            OPERATIONS
            + """
def no_compiler(kernel, torch):
    raise KernelUnavailable("no compiler")

def attempt():
    define()
    jit.provide = no_compiler
    overrides.install()
    out, x, scales = torch.empty(2, 128), torch.empty(2, 256), torch.empty(2, 1)
    torch.ops._C.silu_and_mul_per_block_quant(out, x, scales, 128, None, False)
    return served()
""",
            gate=OPS,
        )
    ],
    "skip list": [
        Scenario(
            OPERATIONS
            + """
def attempt():
    define()
    overrides.install()
    return served()
""",
            gate=OPS,
            variables={"VLLM_HWPLUGIN_OPS_SKIP": "rope"},
        )
    ],
    "attention misfit": [Scenario(LAYER + "REFUSED = ['no fp8']", gate=ATTENTION)],
    "attention none": [Scenario(LAYER + "REFUSED = ['no fp8']; ANSWER = ''", gate=ATTENTION)],
    "attention import": [Scenario(LAYER + "sys.modules[attention.CUDA.module] = None", gate=ATTENTION)],
    "attention kernel": [Scenario(LAYER + "OBSTACLE = 'no nvcc'", gate=ATTENTION)],
    "attention warm-up": [Scenario(WARM_UP)],
    "platform": [
        Scenario(PLATFORM, variables={**OFF, "VLLM_HWPLUGIN_PLATFORM": "cuda"}),
        # A vLLM whose table of platforms is another one.
        Scenario(PLATFORM + "platforms.builtin_platform_plugins = 1", variables=OFF),
    ],
}

SCENARIOS = PATCHES | OTHERS
