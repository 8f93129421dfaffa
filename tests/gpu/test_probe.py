# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin probe`` on the plugin's FLASH_ATTN, on a real GPU: what is declared holds, and was really run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

OWN = "vllm_hwplugin.attention.cuda.CudaFlashAttentionBackend"
CAPABILITIES = ("non_causal_head_size", "sliding_window", "non_causal_window", "sinks", "softcap", "captured")
LARGE = "head size 512"
MUST_WORK = {
    ("plain", "causal"),
    *(("non_causal_head_size", size) for size in ("256", "320", "384", "448", "512")),
    *(
        (capability, value)
        for capability in ("sliding_window", "non_causal_window", "sinks", "softcap")
        for value in ("yes", LARGE)
    ),
    *(("captured", f"{batch}{heads}") for batch in ("decode", "verify") for heads in ("", f", {LARGE}")),
    ("captured", f"non-causal verify, {LARGE}"),
}


def test_what_the_plugins_flash_attn_declares_holds(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    chosen = [word for name in CAPABILITIES for word in ("--capability", name)]
    command = [sys.executable, "-m", "vllm_hwplugin.cli", "probe", "--backend", OWN, "--cases", "2", *chosen]
    ended = subprocess.run(
        [*command, "--json", str(file), "--timeout", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    report = json.loads(file.read_text())
    assert report["ok"]
    assert report["host"]["device"] == "cuda"
    assert [one["path"] for one in report["backends"]] == [OWN]
    found = {(one["capability"], one["value"]): one for one in report["results"]}
    missing = {key: found.get(key, {}).get("behaviour") for key in MUST_WORK}
    assert {key for key, behaviour in missing.items() if behaviour != "works"} == set(), ended.stdout[-6000:]
    assert all(found[key]["ratio"] <= report["settings"]["factor"] for key in MUST_WORK)
