# SPDX-License-Identifier: Apache-2.0
"""vLLM's operations on a simulated Moore Threads GPU, under vLLM's own names, in graphs and out of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from vllm_hwplugin.ops.operations import DEFINED, OPS

from ..musa_sim import simulated

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

# A vLLM without compiled modules, with the plugin as vLLM loads it.
HOST = """
import json, torch, torchada
from tests.ops.vllms_names import WithoutExtension
WithoutExtension.install()
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.ops import overrides

load_general_plugins()
import vllm._custom_ops as ops
assert type(current_platform).__name__ == "MusaPlatform"
"""

# Every capture collects garbage, and vLLM's modules take long to look through.
FREEZE = "import gc; gc.freeze()\n"

NAMES = (
    HOST
    + """
from tests.ops.operation_checks import replay_of
from tests.ops.vllms_names import Check, cases, check_weak_references
from vllm.utils.torch_utils import weak_ref_tensors
"""
    + FREEZE
    + """
def own(name):
    return getattr(torch.ops.hwplugin, name)

def served():
    notes = run_records.current().decisions.items()
    return {name.split()[1]: said.partition(":")[0] for name, said in notes if name.startswith("operation ")}

musa = torch.device("musa", 0)
check_weak_references(weak_ref_tensors, musa)

def check_all():
    for name, case in cases(ops, own).items():
        check = Check(case, musa)
        for seed in range(3):
            check.compare(seed, check.call)
        replay = replay_of(check.call, "musa")
        for seed in range(3, 6):
            check.compare(seed, replay)

def calls_of_own():
    check = Check(cases(ops, own)["topk_softmax"], musa)
    with torch.profiler.profile() as profile:
        check.call()
    return "hwplugin::topk_softmax" in {event.key for event in profile.key_averages()}

check_all()
found = [[served(), calls_of_own()]]
# The same with the plugin's operations in front, which have no kernel here and so run as their references.
overrides.remove()
overrides.load_kernel = lambda op: True
overrides.install(gates.Settings({}))
check_all()
found.append([served(), calls_of_own()])
print(json.dumps(found))
"""
)


def _printed(program: str, folder: Path) -> Any:
    if reason := simulated.obstacle():
        pytest.skip(reason)
    environ = {**simulated.environment(folder), "VLLM_HWPLUGIN_CACHE_DIR": str(folder / "cache")}
    environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_operation_is_served_under_vllms_name_in_graphs_and_out_of_them(tmp_path: Path) -> None:
    (without, by_own), (in_front, by_own_then) = _printed(NAMES, tmp_path)
    assert without == dict.fromkeys(DEFINED, "the plugin's definition in torch")
    assert not by_own
    assert {name for name, said in in_front.items() if said == "the plugin's kernel"} == set(OPS)
    assert by_own_then
