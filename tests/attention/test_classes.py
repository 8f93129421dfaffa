# SPDX-License-Identifier: Apache-2.0
"""Classes that are made from declarations, on the real base classes of every supported vLLM."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from packaging.version import Version

from vllm_hwplugin.attention import capabilities, classes
from vllm_hwplugin.attention.backends import CUDA, FLASH_ATTN_LARGE, MUSA
from vllm_hwplugin.attention.capabilities import (
    CAPABILITIES,
)
from vllm_hwplugin.base.versions import SUPPORTED

torch = pytest.importorskip("torch")

from ..conftest import versions  # noqa: E402
from ..musa.mate_standin import mate  # noqa: E402
from .released import released  # noqa: E402

every_version = pytest.mark.parametrize(
    "version",
    versions("vllm/v1/attention/", "vllm/utils/torch_utils.py", "vllm/config/cache.py", "vllm/transformers_utils/"),
)
FLASH = "vllm.v1.attention.backends.flash_attn"
Tree = Callable[[str], Any]

# Arguments of `validate_configuration` that every version requires.
PLAIN: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": (9, 0),
    "attn_type": "decoder",
}


def arguments(cls: Any, **asked: Any) -> dict[str, Any]:
    known = inspect.signature(cls.__mro__[1].validate_configuration)
    return PLAIN | {name: value for name, value in asked.items() if name in known.parameters}


@every_version
def test_on_cuda_declared_answers_are_given_and_the_others_are_vllms(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version)) as load:
        made = load("vllm_hwplugin.attention.cuda").CudaFlashAttentionBackend
        stock = load(FLASH).FlashAttentionBackend
        assert made.__mro__[1] is stock
        assert made.get_name() == stock.get_name() == "FLASH_ATTN"
        own = {CAPABILITIES[name].method for name in made.declarations}
        assert own == {name for name in vars(made) if name.startswith(("supports_", "is_"))}
        assert made.supports_non_causal() is True
        assert made.is_mla() is False
        # At 8 and 16 FlashAttention 3 runs without end over the cache of 0.26.
        small = [8, 16] if Version(version) < Version("0.26") else []
        asked = (8, 16, 32, 256, 260, 264, 512, 520)
        assert [size for size in asked if made.supports_head_size(size)] == [*small, 32, 256, 264, 512]
        assert [size for size in range(8, 257, 8) if not stock.supports_head_size(size)] == []
        assert [block.base for block in made.get_supported_kernel_block_sizes()] == [16]
        assert made.validate_configuration(**arguments(made, use_non_causal=True, has_sliding_window=True)) == []


@pytest.mark.parametrize("version", ["0.20.0", "0.21.0"])
def test_no_type_of_cache_is_declared_that_vllms_layer_then_raises_on(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), flash=(3,)) as load:
        flash = load(FLASH)
        flash.is_quantized_kv_cache = lambda name: name.startswith("fp8")
        flash.flash_attn_supports_fp8 = lambda: True
        made = load("vllm_hwplugin.attention.cuda").CudaFlashAttentionBackend
        for name, fails in (("fp8", False), ("fp8_e5m2", True)):
            assert flash.FlashAttentionBackend.supports_kv_cache_dtype(name)
            with pytest.raises(ValueError, match="FP8") if fails else contextlib.nullcontext():
                flash.FlashAttentionBackend.get_fp8_dtype_for_flashattn(name)
            assert made.supports_kv_cache_dtype(name) is not fails


@every_version
def test_musa_takes_what_it_declares_and_explains_what_it_refuses(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        made = load("vllm_hwplugin.musa.attention").MusaFlashAttentionBackend
        # The MUSA architecture 3.1 would be too old for vLLM's class, and for its sinks.
        good = arguments(
            made,
            head_size=512,
            has_sink=True,
            use_mm_prefix=True,
            use_non_causal=True,
            use_batch_invariant=True,
            has_sliding_window=True,
            device_capability=(3, 1),
        )
        assert made.validate_configuration(**good) == []
        bad = arguments(made, head_size=576, kv_cache_dtype="fp8_e5m2", block_size=24, use_per_head_quant_scales=True)
        told = made.validate_configuration(**bad)
        assert told[:4] == [
            "head_size not supported",
            "kv_cache_dtype not supported",
            "block_size not supported",
            "per-head quant scales not supported",
        ]
        assert any("head_size is 576, expected a multiple of 8 up to 512" in line for line in told)
        assert any("block_size is 24, expected a multiple of 16" in line for line in told)
        mixed = made.validate_configuration(**arguments(made, dtype=torch.float16, kv_cache_dtype="bfloat16"))
        assert mixed == [
            "FLASH_ATTN on MUSA needs keys of the queries' type torch.float16, and the KV cache is bfloat16"
        ]


def test_a_version_with_a_question_that_is_not_declared_gives_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"FLASH_ATTN@musa has no declaration of alibi_sqrt, .* for vLLM 0\.34\.0"):
        classes.declares(MUSA.declared, "0.34.0")
    for version in ("0.34.0", "dev"):
        with pytest.raises(ImportError, match=f"no declaration of anything for vLLM {version}"):
            classes.declares(CUDA.declared, version, above=(256, FLASH_ATTN_LARGE))
    kept = tuple(item for item in capabilities.DECLARATIONS if item.capability != "sink")
    monkeypatch.setattr(capabilities, "DECLARATIONS", kept)
    with pytest.raises(ImportError, match=r"no declaration of sink for vLLM 0\.26\.0"):
        classes.declares(MUSA.declared, "0.26.0")


@pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
def test_above_a_head_size_the_second_table_judges_alone(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version)) as load:
        stock = load(FLASH).FlashAttentionBackend
        asked: list[dict[str, Any]] = []
        own = {"refuse_above": classmethod(lambda cls, arguments: asked.append(arguments) or ["beside the table"])}
        made: Any = type("Made", (stock,), own)
        classes.declares(CUDA.declared, version, above=(256, FLASH_ATTN_LARGE))(made)
        # vLLM's class has no sinks without FlashAttention 3, and its word does not count above 256.
        assert made.validate_configuration(**arguments(made, head_size=256, has_sink=True)) != []
        assert asked == []
        assert made.validate_configuration(**arguments(made, head_size=264, has_sink=True)) == ["beside the table"]
        assert (asked[0]["head_size"], asked[0]["has_sink"]) == (264, True)
        (reason,) = made.validate_configuration(**arguments(made, head_size=264, dtype=torch.float32))
        assert "dtype is float32" in reason
