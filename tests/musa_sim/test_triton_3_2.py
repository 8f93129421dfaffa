# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels in the front end of the public Triton 3.2.0: of MUSA's build of that version, what can be had here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import filelock
import platformdirs
import pytest

from ..conftest import cannot_run
from ..releases import NEWEST, package_of
from . import checkpoints, loads, test_hybrids, test_mla
from .loads import Engine, Load, Process
from .test_checkpoints import layers
from .test_engines import V1, requests
from .test_model_runner_v1 import DFLASH, EAGLE3, STOCK

pytestmark = [pytest.mark.engine, pytest.mark.network]

VERSION = "3.2.0"


@pytest.fixture(scope="module")
def triton_3_2() -> Path:
    """Its folder, from the package index or the user's cache of it."""
    folder = platformdirs.user_cache_path("vllm-hwplugin-tests") / f"triton-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
            if subprocess.run([*command, f"triton=={VERSION}"]).returncode:
                cannot_run(f"Triton {VERSION} cannot be had")
            (folder / "done").touch()
    return folder


TOP_K = "vllm.v1.sample.ops.topk_topp_triton:_topk_topp_kernel"
NEXT_TOKENS = "vllm.v1.spec_decode.utils:eagle_prepare_next_token_padded_kernel"
STATES = "vllm.v1.worker.mamba_utils:postprocess_mamba_fused_kernel"
#: Kernels of the self-test: what does not compile there refuses its users, see test_self_test.py.
SELF_TEST = "vllm_hwplugin.musa._self_test_kernels:"
V2_VERIFIES = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:_rejection_kernel"


def said_of(launches: Path, version: str, triton: Path, folder: Path, **variables: str) -> dict[str, str]:
    """Return what Triton 3.2's front end says of each kernel, with vLLM's Python and the plugin's patches."""
    places = (str(triton), str(package_of(version).parent), str(Path(__file__).parents[2]))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "VLLM_HWPLUGIN_PLATFORM": "off",
        "VLLM_HWPLUGIN_CACHE_DIR": str(folder / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        **variables,
    }
    file = folder / "said.json"
    command = [sys.executable, "-m", "tests.musa_sim.launches_child", str(file), str(launches)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(file.read_text())
    assert found.pop("triton") == VERSION
    return found


@pytest.mark.musa_sim
@pytest.mark.parametrize(("version", "runner"), [("0.20.2", "V1"), (NEWEST, "V1"), ("0.32.0", "V2")])
def test_every_kernel_that_a_drafting_engine_launches(
    version: str, runner: str, triton_3_2: Path, musa_host: None, tmp_path: Path
) -> None:
    """The launches of the simulated device with Eagle3 and DFlash, in the plugin's graphs, with their arguments."""
    launches = tmp_path / "launches"
    host = tmp_path / "host"
    own = loads.musa(host, (version, package_of(version)), MUSA_SIM_LAUNCHES=str(launches), MUSA_SIM_INDUCTOR="refuse")
    drafting = {"eagle3": EAGLE3, "dflash": DFLASH}
    if runner == "V1":
        own["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # To the plugin this is a host with Triton 3.2, though another one's interpreter runs the kernels.
        (host / f"triton-{VERSION}.dist-info").mkdir()
        (host / f"triton-{VERSION}.dist-info" / "METADATA").write_text(f"Name: triton\nVersion: {VERSION}\n")
    if runner == "V2" or version == "0.20.2":
        # vLLM 0.20 refuses to start where an earlier engine's memory is freed meanwhile.
        del drafting["dflash"]
    asked = {name: Load(engine.on_musa(), loads.mixed()) for name, engine in drafting.items()}
    runs = Process(asked, own).run(tmp_path / "run")
    assert {run.runner for run in runs.values()} == {runner}

    def refused(**gates: str) -> dict[str, str]:
        found = said_of(launches, version, triton_3_2, tmp_path, **gates)
        assert (NEXT_TOKENS if runner == "V1" else V2_VERIFIES) in found
        return {name: said for name, said in found.items() if said != "compiles" and not name.startswith(SELF_TEST)}

    if runner == "V2":
        # So `MusaPlatform` refuses it. Below 3.6 the worker samples by torch's sort.
        assert refused().keys() == {V2_VERIFIES, TOP_K}
        return
    assert all("next-token-kernel" in run.used for run in runs.values())
    assert not refused()
    if version == NEWEST:
        assert refused(VLLM_HWPLUGIN_NEXT_TOKEN_KERNEL="off").keys() == {NEXT_TOKENS}
    else:
        stock = loads.musa(tmp_path / "host, stock", (version, package_of(version)), **STOCK)
        for name, expected in Process(asked, stock).run(tmp_path / "stock").items():
            loads.assert_same(expected, runs[name])


@pytest.mark.musa_sim
@pytest.mark.parametrize(("version", "refused"), [("0.26.0", set()), (NEWEST, {STATES, TOP_K})])
def test_every_kernel_of_a_hybrid_and_of_mla_with_mtp_and_of_quantized_checkpoints(
    version: str, refused: set[str], triton_3_2: Path, musa_host: None, tmp_path: Path
) -> None:
    """But for those of a prompt's delta rule, which the simulated device does not run."""
    launches = tmp_path / "launches"
    vllm, noted = (version, package_of(version)), {"MUSA_SIM_LAUNCHES": str(launches)}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8]}
    made = test_hybrids.options(tmp_path / "model") | {"compilation_config": graphs}
    blocks, _ = checkpoints.quantized(checkpoints.mixture(), checkpoints.fp8_blocks)
    model = checkpoints.write(tmp_path / "blocks", blocks, **checkpoints.MIXTURE, **checkpoints.FP8_BLOCKS)
    asked = {
        "hybrid": Load(made, test_hybrids.ASKED[:2], delta_rule=True, autotuned=False, initialised=True),
        "MLA": Load(test_mla.options(test_mla.write(tmp_path / "mla")), test_mla.requests()[:1], autotuned=False),
        "FP8 blocks": Load(
            {**Engine(None, graphs=None).on_musa(), "model": str(model)},
            [replace(requests(2, 1)[0], prompt=[5, 6, 7])],
            autotuned=False,
        ),
    }
    Process(asked, loads.musa(tmp_path / "host", vllm, **noted, **V1)).run(tmp_path / "run")
    layers(["INT8 33 128", "W4A16 33 128", "AWQ 33 128"], tmp_path / "layers", vllm, **noted)
    found = said_of(launches, version, triton_3_2, tmp_path)
    # Of the newest `MusaPlatform` refuses hybrids with a prefix cache. Below 3.6 the worker samples by torch's sort.
    kernels = ("delta_rule", STATES, "merge_attn_states", "fused_moe_kernel")
    kernels += ("block_scaled_mm", "group_quant_fp8", "scaled_mm_kernel", "w4a16")
    assert all(any(part in name for name in found) for part in kernels), found.keys()
    assert {name for name, said in found.items() if said != "compiles" and not name.startswith(SELF_TEST)} == refused
