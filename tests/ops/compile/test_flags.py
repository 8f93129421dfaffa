# SPDX-License-Identifier: Apache-2.0
"""The table of flags: which compiler gets which, by version, gate and kernel."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_hwplugin.base import gates
from vllm_hwplugin.ops.compile.flags import TABLE, flags_for, words

ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"

NVCC_12 = ("-O3", "-std=c++17", "-Xcompiler=-fPIC", ABI, "-lineinfo")
NVCC = (*NVCC_12, "-frandom-seed=hwplugin")
MCC = ("-mtgpu", "-O3", "-Od3", "-std=c++17", "-fPIC", ABI, "-DNDEBUG", "-fno-strict-aliasing", "-DUSE_MUSA")
MCC += ("-fno-signed-zeros", "-ffast-math", "-fmusa-flush-denormals-to-zero", "-fno-finite-math-only")
NO_SLP = ("-mllvm", "-vectorize-slp=false")
CLUSTER = ("-mllvm", "-mtgpu-load-cluster-mutation=1", "-mllvm", "--num-dwords-of-load-in-mutation=64")


def _mcc(version: str, **environ: str) -> tuple[str, ...]:
    return words(flags_for("mcc", Version(version), environ))


@pytest.mark.parametrize(
    ("version", "clustering"), [("4.2.0", ()), ("4.3.5", ()), ("4.3.6", CLUSTER), ("5.0.0", CLUSTER)]
)
def test_mcc_up_to_5_0_0_has_no_slp_and_load_clustering_from_mates_oldest(
    version: str, clustering: tuple[str, ...]
) -> None:
    expected = (*MCC, *NO_SLP, *clustering)
    assert _mcc(version) == expected
    # Neither gate can turn on what the compiler is too old for.
    assert _mcc(version, VLLM_HWPLUGIN_SLP="1", VLLM_HWPLUGIN_LOAD_CLUSTER="1") == expected
    assert _mcc(version, VLLM_HWPLUGIN_SLP="0") == expected
    assert _mcc(version, VLLM_HWPLUGIN_LOAD_CLUSTER="0") == (*MCC, *NO_SLP)


@pytest.mark.parametrize("version", ["5.0.1", "5.1.0", "5.1.0rc1", "6.0"])
def test_later_mcc_has_both(version: str) -> None:
    assert _mcc(version) == (*MCC, *CLUSTER)


def test_a_bad_gate_is_an_error_where_it_decides_and_nowhere_else() -> None:
    environ = {"VLLM_HWPLUGIN_SLP": "perhaps"}
    with pytest.raises(gates.GateError, match="VLLM_HWPLUGIN_SLP"):
        flags_for("mcc", Version("5.1.0"), environ)
    assert words(flags_for("nvcc", Version("13.0"), environ)) == NVCC


def test_every_row_can_be_read_and_says_why() -> None:
    for row in TABLE:
        SpecifierSet(row.versions)
        assert row.reason, row
        assert row.gate is None or gates.BY_NAME[row.gate].kind == "bool"
