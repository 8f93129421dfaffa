# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform for Moore Threads GPUs, through torch_musa and torchada. Not run on MUSA hardware.

torchada maps ``cuda`` to torch_musa's device: ``torch.device("cuda")`` is a ``musa`` device, ``torch.cuda`` is
``torch.musa``, and the backend ``nccl`` is ``mccl``. vLLM's GPU worker and V1 model runner run through this mapping. To
vLLM it is an out-of-tree platform, so layers run their native implementations, not kernels of ``vllm._C``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torchada
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..base import log, run_records
from ..base.features import NEXT_TOKEN_KERNEL, gate_of
from ..ops.definitions import define_missing
from ..spec_decode.drafters import CACHED_METHODS
from . import _mtml, _selector, _vllm_api, versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = logging.getLogger("vllm.hwplugin")

if not torchada.is_musa_platform():
    raise ImportError(
        f"torchada {torchada.__version__} detects {torchada.get_device_name()}, expected musa: install the torch_musa "
        "for this torch, and unset TORCHADA_PLATFORM; or set VLLM_HWPLUGIN_PLATFORM=off, and vLLM chooses the platform"
    )

_V2 = "VLLM_USE_V2_MODEL_RUNNER"
# Environment of this platform's processes and vLLM's children. A value that the user has set stays.
_ENVIRONMENT = {
    # Model Runner V2 maps host tensors with a kernel of vllm._C; later versions of vLLM choose V2 by default.
    _V2: "0",
    # A forked child cannot use a device that its parent has initialized; vLLM spawns on XPU for the same reason.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # vLLM 0.20 captures graphs to measure their memory, and torch_musa 2.7.1 does not free a graph's memory.
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
}
# Up to 0.23 the kernels are `_C` and `_moe_C`, later modules for torch's stable ABI.
_KERNELS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")
_MLA_PREFILL = "vllm_hwplugin.musa.mla_prefill.MusaMLAPrefillBackend"
_HYBRID = (
    "drafts of a model with recurrent layers are verified {} on MUSA, and asynchronous scheduling is off: pull "
    "requests 97 and 228 of vllm-musa report wrong results of both. Its recipe: --no-enable-chunked-prefill "
    "--no-enable-prefix-caching --no-async-scheduling -cc.mode=0 -cc.cudagraph_mode=FULL_DECODE_ONLY"
)


class MusaPlatform(Platform):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """Moore Threads GPUs; vLLM maps ids to physical ids with ``MUSA_VISIBLE_DEVICES``."""

    _enum = PlatformEnum.OOT
    device_name = "musa"
    device_type = "musa"
    dispatch_key = "PrivateUse1"
    # Ray counts these GPUs only with `ray start --num-gpus`, under its general name.
    ray_device_key = "GPU"
    # torchada keeps CUDA_VISIBLE_DEVICES and MUSA_VISIBLE_DEVICES equal, so Ray must change neither.
    ray_noset_device_env_vars: ClassVar[list[str]] = [
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES",
    ]
    # vLLM compiles some functions at their first call; vllm-musa reports that Inductor fails once graphs are captured.
    simple_compile_backend = "eager"
    dist_backend = "mccl"
    device_control_env_var = "MUSA_VISIBLE_DEVICES"

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        for name, value in _ENVIRONMENT.items():
            if os.environ.setdefault(name, value) != value:
                logger.warning("%s=%s on MUSA, expected %s: vLLM may fail; unset it", name, os.environ[name], value)
        # 0.25 to 0.27 set a mode of torch that torch_musa lacks even without a check to make.
        if checked := os.environ.pop("VLLM_GPU_SYNC_CHECK", ""):
            logger.warning("VLLM_GPU_SYNC_CHECK=%s is unset on MUSA: torch_musa has no such check", checked)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        super().apply_config_platform_defaults(vllm_config)
        from ..spec_decode import capture_sizes

        capture_sizes.note_user_sizes(vllm_config)
        compilation = vllm_config.compilation_config
        if _verifies_hybrid(vllm_config) and compilation.cudagraph_mode is None:
            from vllm.config.compilation import CUDAGraphMode

            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        _check_four_bits(vllm_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_hwplugin.musa.worker.MusaWorker"
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        if model is not None and model.is_mm_prefix_lm and scheduler.is_multimodal_model:
            log.once("chunked multimodal input is off: this model's attention within an image is bidirectional")
            scheduler.disable_chunked_mm_input = True
        fusions = _vllm_api.switch_off_fusions(vllm_config.compilation_config.pass_config)
        if fusions:
            logger.info("fusions are off on MUSA, their kernels are for other devices: %s", ", ".join(fusions))
        if trouble := versions.triton_trouble(versions.installed("triton")):
            log.once(trouble)
        _check_speculation(vllm_config)
        if _verifies_hybrid(vllm_config):
            # vLLM has decided on it before it asks the platform, so the user's word is not known.
            scheduler.async_scheduling = False
            full = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            log.once(_HYBRID.format("in the FULL graphs that you named" if full else "without FULL graphs"))
        if not _vllm_api.triton_has_knobs() and _vllm_api.switch_off_jit_warmup(vllm_config):
            logger.warning("kernels are compiled at first use, not during warm-up: this Triton has no triton.knobs")
        from .. import dflash
        from ..spec_decode import capture_sizes, draft_schedule
        from . import graph_budget

        dflash.check_and_update_config(vllm_config)
        unnamed = capture_sizes.check_and_update_config(vllm_config)
        draft_schedule.name_draft_counts(vllm_config, named=not unnamed)
        graph_budget.fit(vllm_config, named=not unnamed)

    @classmethod
    def device_count(cls) -> int:
        """Count the GPUs that this process may use, without starting one."""
        visible = os.environ.get(cls.device_control_env_var)
        return _count_visible(visible, _mtml.count()) if visible else _mtml.count()

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return _mtml.name(cls.device_id_to_physical_device_id(device_id))

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return _mtml.uuid(cls.device_id_to_physical_device_id(device_id))

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return _mtml.total_memory(cls.device_id_to_physical_device_id(device_id))

    @classmethod
    def get_all_gpu_pci_bus_ids(cls) -> dict[int, str]:
        return {index: _mtml.pci_bus_id(index) for index in range(_mtml.count())}

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """Return None, or vLLM would refuse every quantized checkpoint."""
        return None

    @classmethod
    def supports_fp8(cls) -> bool:
        return True

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        # The id is the index of a torch.device, as in torch.musa.
        return int(torch.musa.get_device_properties(device_id).multi_processor_count)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Refuse nothing: from MUSA 3.1 on GPUs have all types."""

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.musa.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.musa.manual_seed_all(seed)

    @classmethod
    def get_current_memory_usage(cls, device: Any | None = None) -> float:
        torch.musa.empty_cache()
        torch.musa.reset_peak_memory_stats(device)
        return float(torch.musa.max_memory_allocated(device))

    @classmethod
    def import_kernels(cls) -> None:
        for name in _KERNELS:
            # Absent, or built for CUDA: vLLM then runs its native implementations.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        # Before vLLM's modules check which operations exist, and in every process that may capture a graph.
        define_missing(cls.dispatch_key)

    def is_cumem_allocator_available(self) -> bool:
        """Return False: the allocator of sleep mode (0.23 on) is for CUDA."""
        return False

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        chosen = _selector.choose(
            selected_backend, attn_selector_config, cls.get_device_capability(), AttentionBackendEnum
        )
        logger.info("attention backend on MUSA: %s", chosen)
        if attn_selector_config.use_mla:
            _vllm_api.register_mla_prefill(_MLA_PREFILL)
        return chosen

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Refuse nothing (asked from 0.28 on): the runner is for GPUs."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        # ``torch.cuda.CUDAGraph`` is torch_musa's graph.
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_hwplugin.musa.communicator.MusaCommunicator"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return True


def _check_four_bits(vllm_config: VllmConfig) -> None:
    """Raise ValueError for GPTQ or AWQ that MUSA's kernel cannot serve."""
    config: Any = getattr(vllm_config, "quant_config", None)
    name = "" if config is None else config.get_name()
    kind = next((kind for kind in ("gptq", "awq") if kind in name), None)
    if kind is None:
        return
    reasons = {
        f"needs vLLM {'0.22' if kind == 'gptq' else '0.24'} or later": not name.startswith("auto_"),
        f"has {getattr(config, 'weight_bits', None)} bits, expected 4": getattr(config, "weight_bits", 4) != 4,
        "is ordered by activations (desc_act)": getattr(config, "desc_act", False),
        "has experts": vllm_config.model_config.is_moe,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(
            f"this {kind.upper()} checkpoint {reason}, so it cannot be served on MUSA; served are GPTQ and AWQ of 4 "
            "bits without experts, W4A16 and INT8 of compressed-tensors, and FP8"
        )


def _verifies_hybrid(vllm_config: VllmConfig) -> bool:
    """Whether a model with recurrent layers verifies drafts, such as Qwen3.5."""
    model = vllm_config.model_config
    return vllm_config.speculative_config is not None and model is not None and model.is_hybrid


def _check_speculation(vllm_config: VllmConfig) -> None:
    """Refuse a drafter with a kernel that does not compile."""
    # vLLM launches these kernels at the first request, not while the engine starts.
    spec, triton, record = vllm_config.speculative_config, versions.installed("triton"), run_records.current()
    if spec is None or not versions.older(triton, versions.MIN_TRITON_TO_SPECULATE):
        return
    enough = f"install MUSA's Triton {versions.MIN_TRITON_TO_SPECULATE} or later"
    if os.environ.get(_V2, "0") != "0":
        raise ValueError(
            f"Triton {triton} does not compile Model Runner V2's kernel that verifies drafts; set {_V2}=0, or {enough}"
        )
    tiled = not versions.older(versions.installed("vllm"), versions.VLLM_WITH_TILED_STATES)
    if tiled and _verifies_hybrid(vllm_config) and vllm_config.cache_config.mamba_cache_mode == "align":
        raise ValueError(
            f"Triton {triton} does not compile vLLM's kernel for recurrent states of drafts in the prefix cache; set "
            f"--no-enable-prefix-caching, or {enough}"
        )
    if getattr(spec, "disable_padded_drafter_batch", False) or spec.method not in CACHED_METHODS:
        return
    if record is None or NEXT_TOKEN_KERNEL not in record.live:
        raise ValueError(
            f"Triton {triton} does not compile a kernel of the drafter ({spec.method}), and the feature "
            f"{NEXT_TOKEN_KERNEL}, which makes it compile, is not patched in (`vllm-hwplugin doctor -v` says why). Set "
            f"{gate_of(NEXT_TOKEN_KERNEL)}=auto, or {enough}"
        )


@functools.cache
def _count_visible(text: str, installed: int) -> int:
    """Count the GPUs of ``MUSA_VISIBLE_DEVICES``."""
    # The runtime stops at the first id that does not exist.
    ids = [part.strip() for part in text.split(",")]
    used = list(itertools.takewhile(lambda id_: id_.isdecimal() and int(id_) < installed, ids))
    if len(used) < len(ids):
        wrong = f"{ids[len(used)]!r} is not a GPU of this host (expected a number below {installed})"
        logger.warning("MUSA_VISIBLE_DEVICES=%s: %s, so %d of %d are used", text, wrong, len(used), len(ids))
    return len(used)
