# SPDX-License-Identifier: Apache-2.0
"""The entry point and the classes on the vLLM that is installed, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_hwplugin
from tests.cpu_seconds import patience

pytestmark = pytest.mark.engine

REPOSITORY = Path(vllm_hwplugin.__file__).parent.parent
CHECKPOINT = REPOSITORY / "tests/assets/small/target"

# The kernels that are installed are those of vLLM's CPU, and `vllm._C` those for a processor with AVX-512: on another
# they end the process.
WITHOUT_KERNELS = """
    import sys, types
    for name in ("_C", "_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
"""
# A GPU host for vLLM's detection; the CUDA class needs no more to be made.
CUDA_HOST = """
    import vllm.platforms as platforms
    platforms.builtin_platform_plugins.update(
        {name: lambda: None for name in platforms.builtin_platform_plugins} |
        {"cuda": lambda: "vllm.platforms.cuda.CudaPlatform"}
    )
"""
# torch's own PrivateUse1 device under torch_musa's name, with a device module that can be asked, and can do nothing.
MUSA_HOST = """
    import importlib.util, torch, vllm.platforms as platforms
    spec = importlib.util.spec_from_file_location("standins", STANDINS)
    standins = sys.modules["standins"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standins)
    torch.utils.rename_privateuse1_backend("musa")
    torch._register_device_module("musa", standins.musa([]))
    sys.modules["pymtml"] = standins.pymtml()
    sys.modules["torchada"] = sys.modules["torch_musa"] = standins.torchada()
    platforms.builtin_platform_plugins.update({name: lambda: None for name in platforms.builtin_platform_plugins})
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program where vLLM finds the plugin's two entry points, as in an installation."""
    metadata = tmp_path / "metadata" / "vllm_hwplugin-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-hwplugin\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nhwplugin = vllm_hwplugin.plugin:register\n"
        "[vllm.platform_plugins]\nhwplugin = vllm_hwplugin.plugin:platform\n"
    )

    def call(*parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PYTHON"))}
        environ = kept | {
            "PYTHONPATH": os.pathsep.join([str(metadata.parent), str(REPOSITORY)]),
            "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        program = f"STANDINS = {str(Path(__file__).with_name('standins.py'))!r}\nMODEL = {str(CHECKPOINT)!r}\n"
        program += "\n".join(textwrap.dedent(part) for part in parts)
        command, limit = [sys.executable, "-c", program], patience(300)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit)
        assert done.returncode == 0, done.stderr
        return done

    return call


Run = Callable[..., subprocess.CompletedProcess[str]]

WHAT_RUNS = """
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm_hwplugin.base import run_records
    load_general_plugins()
    print(f"{type(current_platform).__module__}.{type(current_platform).__qualname__}")
    print(run_records.current() and run_records.current().decisions.get("platform"))
"""


@pytest.fixture
def cpu_build() -> None:
    from vllm_hwplugin.patching._installed import find_installed

    found = find_installed()
    if "cpu" not in f"{found.dist} {found.version}":
        pytest.skip(f"{found.dist} {found.version} is no CPU build")


@pytest.mark.usefixtures("cpu_build")
def test_a_cpu_build_stays_on_vllms_cpu_platform(run: Run) -> None:
    used, noted = run(WHAT_RUNS).stdout.splitlines()
    assert used.startswith("vllm.platforms.")
    assert used.endswith("CpuPlatform")
    assert noted.startswith("no platform class: vLLM's detection finds cpu")
    assert noted.endswith(f"vLLM runs on {used}")


# Two processes, of which the second is a fork.
COMMUNICATOR = """
    import datetime, tempfile
    import torch.distributed as dist
    from vllm_hwplugin.musa import communicator as musa_communicator

    folder = tempfile.mkdtemp()
    child = os.fork()
    rank = int(child == 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    communicator = musa_communicator.MusaCommunicator(dist.group.WORLD, torch.device("cpu"), dist.group.WORLD)
    given = torch.full((3,), float(rank + 1))
    summed = communicator.all_reduce(given)
    same = summed.tolist() == [3.0] * 3 and given.tolist() == [float(rank + 1)] * 3
    same = same and communicator.all_gather(given, 0).tolist() == [1.0] * 3 + [2.0] * 3
    same = same and communicator.broadcast(given.clone(), 1).tolist() == [2.0] * 3
    parts = communicator.gather(given, 0, 0)
    same = same and (parts is None if rank else parts.tolist() == [1.0] * 3 + [2.0] * 3)
    if rank:
        communicator.send(given, 0)
    else:
        same = same and communicator.recv(given.size(), given.dtype, 1).tolist() == [2.0] * 3
    communicator.destroy()

    if rank == 1:
        os._exit(0 if same else 1)
    assert same and os.waitpid(child, 0)[1] == 0
"""


def test_the_musa_class_makes_a_configuration_and_its_communicator_sums_on_the_real_vllm(run: Run) -> None:
    more = """
        import os
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.import_utils import resolve_obj_by_qualname
        config = EngineArgs(model=MODEL, max_model_len=256).create_engine_config()
        print(">", config.device_config.device_type, config.device_config.device, config.parallel_config.worker_cls)
        print(">", os.environ["VLLM_USE_V2_MODEL_RUNNER"], os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
        print(">", [name for name, on in vars(config.compilation_config.pass_config).items() if on is True])
        for name in (
            config.parallel_config.worker_cls, current_platform.get_device_communicator_cls(),
            current_platform.get_static_graph_wrapper_cls(), current_platform.get_punica_wrapper(),
        ):
            resolve_obj_by_qualname(name)
        from vllm.v1.attention.selector import AttentionSelectorConfig
        for causal in (True, False):
            asked = AttentionSelectorConfig(
                head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_non_causal=not causal
            )
            print(">", current_platform.get_attn_backend_cls(None, asked).rpartition(".")[2])
        print(">", current_platform.get_device_name(1), current_platform.device_count())
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        causal = asked._replace(use_non_causal=False)
        latent = causal._replace(head_size=576, use_mla=True)
        for named, asked_for in ((AttentionBackendEnum.FLEX_ATTENTION, causal), (None, latent)):
            print(">", current_platform.get_attn_backend_cls(named, asked_for).rpartition(".")[2])
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
        print(">", MLAPrefillBackendEnum.FLASH_ATTN.get_path().rpartition(".")[2])
        # Another project's package of that name.
        sys.modules["mate"] = type(sys)("mate")
        try:
            current_platform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, asked)
        except ValueError as error:
            print(">", "FLASH_ATTN: AttributeError" in str(error) or "FLASH_ATTN: MateMismatch" in str(error))
        for refused in ("enable_sleep_mode", "enable_cumem_allocator"):
            try:
                EngineArgs(model=MODEL, **{refused: True}).create_engine_config()
            except ValueError as error:
                print(">", refused, "not supported on current platform" in str(error))
    """
    lines = run(WITHOUT_KERNELS, MUSA_HOST, WHAT_RUNS, more, COMMUNICATOR).stdout.splitlines()
    assert lines[0] == "vllm_hwplugin.musa.platform.MusaPlatform"
    assert lines[1].startswith(f"{lines[0]}: 3 Moore Threads GPUs")
    # vLLM logs to the same stream.
    assert [line.removeprefix("> ") for line in lines if line.startswith("> ")] == [
        "musa musa vllm_hwplugin.musa.worker.MusaWorker",
        "0 spawn",
        "['eliminate_noops']",
        "TritonAttentionBackend",
        "TritonAttentionBackend",
        "MTT S5000 3",
        "FlexAttentionBackend",
        "TritonMLABackend",
        "MusaMLAPrefillBackend",
        "True",
        "enable_sleep_mode True",
        "enable_cumem_allocator True",
    ]


# vLLM's FlashAttention is not in a CPU build; a class with its name is all that the choice reads.
LARGE_HEADS = """
    import torch
    flash_attention = types.ModuleType("vllm.vllm_flash_attn")
    flash_attention.__path__ = []
    flash_attention.flash_attn_varlen_func = flash_attention.get_scheduler_metadata = None
    flash_attention.compile_flash_attn_varlen_func_from_specs = None
    flash_attention.fa_version_unsupported_reason = lambda version: "a stand-in"
    flash_attention.is_fa_version_supported = lambda version: version in (2, 3)
    for name in ("vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
        sys.modules[f"vllm.{name}"] = flash_attention
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    type(current_platform).get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend

    def chosen(head_size, kv_cache_dtype="auto", block_size=None):
        config = VllmConfig()
        config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
        if block_size is not None:
            config.cache_config.block_size = block_size
            config.cache_config.user_specified_block_size = True
        with set_current_vllm_config(config):
            try:
                backend = get_attn_backend(head_size, torch.bfloat16, kv_cache_dtype)
                return f"{backend.__module__}.{backend.__qualname__}"
            except ValueError as error:
                return f"refused: {error}"
"""


@pytest.mark.usefixtures("cpu_build")
def test_the_cuda_class_is_made_and_takes_the_plugins_flash_attn_for_large_heads_or_says_why_not(run: Run) -> None:
    asked = """
        for asked in ((256,), (512,), (520,), (260,), (512, 'fp8'), (512, 'auto', 24)):
            print(chosen(*asked))
        assert current_platform.is_cuda() and not current_platform.is_out_of_tree()
        from vllm.platforms.cuda import CudaPlatform
        assert isinstance(current_platform, CudaPlatform) and type(current_platform) is not CudaPlatform
        import pickle
        assert type(pickle.loads(pickle.dumps(current_platform))) is type(current_platform)
    """
    lines = run(WITHOUT_KERNELS, CUDA_HOST, LARGE_HEADS, asked, WHAT_RUNS).stdout.splitlines()
    usual, large, *refused, used, noted = lines[-8:]
    assert used == "vllm_hwplugin.platforms.cuda.CudaPlatform"
    assert noted == f"{used}: vLLM's detection chooses CUDA; vLLM runs on {used}"
    assert usual == "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    assert large == "vllm_hwplugin.attention.cuda.CudaFlashAttentionBackend"
    for line, words in zip(
        refused,
        (
            "head_size is 520, expected a multiple of 8 up to 512",
            "head_size is 260, expected a multiple of 8 up to 512",
            "kv_cache_dtype is fp8, expected auto or float16 or bfloat16",
            "block_size is 24, expected a multiple of 16",
        ),
        strict=True,
    ):
        assert line.startswith("refused: no attention backend for heads of")
        assert words in line
