# SPDX-License-Identifier: Apache-2.0
"""Architectures come from the variable, else from the devices; and which no kernel is for."""

from __future__ import annotations

import pytest

from vllm_hwplugin.ops.compile.arch import arch_flags
from vllm_hwplugin.ops.compile.spec import KernelUnavailable

SM90 = "-gencode=arch=compute_90,code=sm_90"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("9.0", (SM90,)),
        ("8.6+PTX", ("-gencode=arch=compute_86,code=sm_86", "-gencode=arch=compute_86,code=compute_86")),
        ("9.0a;12.0f", ("-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_120f,code=sm_120f")),
        ("9.0 8.0, 9.0", (SM90, "-gencode=arch=compute_80,code=sm_80")),
    ],
)
def test_the_variable_is_read_as_pytorch_reads_it(text: str, flags: tuple[str, ...]) -> None:
    assert arch_flags("nvcc", {"TORCH_CUDA_ARCH_LIST": text}, [(7, 5)]) == flags


def test_without_it_each_kind_of_device_counts_once() -> None:
    assert arch_flags("nvcc", {"TORCH_CUDA_ARCH_LIST": ""}, [(9, 0), (8, 9), (9, 0)]) == (
        "-gencode=arch=compute_89,code=sm_89",
        SM90,
    )
    assert arch_flags("mcc", {}, [(3, 1)]) == ("--offload-arch=mp_31",)


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({"MTGPU_TARGET": "mp_32"}, ("--offload-arch=mp_32",)),
        ({"TORCH_MUSA_ARCH_LIST": "31;32", "MTGPU_TARGET": ""}, ("--offload-arch=mp_31", "--offload-arch=mp_32")),
        # As images for one GPU set both; then somebody builds for more.
        ({"TORCH_MUSA_ARCH_LIST": "31 32", "MTGPU_TARGET": "mp_31"}, ("--offload-arch=mp_31", "--offload-arch=mp_32")),
    ],
)
def test_musa_has_a_variable_for_one_architecture_and_one_for_several(
    environ: dict[str, str], flags: tuple[str, ...]
) -> None:
    assert arch_flags("mcc", environ, [(3, 3)]) == flags


@pytest.mark.parametrize(
    ("environ", "devices"),
    [({}, [(2, 2)]), ({}, [(3, 1), (2, 1)]), ({"TORCH_MUSA_ARCH_LIST": "22;31"}, []), ({"MTGPU_TARGET": "mp_22"}, [])],
)
def test_no_kernel_is_built_for_musa_devices_with_wider_warps(
    environ: dict[str, str], devices: list[tuple[int, int]]
) -> None:
    with pytest.raises(KernelUnavailable, match=r"mp_2[12] has warps of 128 threads"):
        arch_flags("mcc", environ, devices)


def test_a_kernel_for_one_architecture_is_built_for_it_where_its_number_is_asked_for() -> None:
    exact = ("-gencode=arch=compute_90a,code=sm_90a",)
    assert arch_flags("nvcc", {"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, [], ("9.0a",)) == exact
    assert arch_flags("nvcc", {"TORCH_CUDA_ARCH_LIST": "9.0a+PTX"}, [], ("9.0a",)) == exact
    assert arch_flags("nvcc", {}, [(9, 0), (10, 0)], ("9.0a",)) == exact
    with pytest.raises(KernelUnavailable, match=r"only for 9\.0a; found 10\.0, 8\.0"):
        arch_flags("nvcc", {}, [(8, 0), (10, 0)], ("9.0a",))
