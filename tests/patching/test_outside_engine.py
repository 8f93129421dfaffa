# SPDX-License-Identifier: Apache-2.0
"""A catalogue from outside in the real vLLM: its parent, its engine core, and a library that both import."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_hwplugin
from tests.cpu_seconds import patience
from vllm_hwplugin.base import run_records
from vllm_hwplugin.patching import find_distribution, find_installed

pytestmark = pytest.mark.engine

REPOSITORY = Path(vllm_hwplugin.__file__).parent.parent
SCHEDULER, LIBRARY = "vllm/v1/core/sched/utils.py", "transformers/utils/versions.py"
PROGRAM = """
from vllm import LLM, SamplingParams
import transformers.utils.versions as versions
llm = LLM(model=MODEL, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=1, seed=0)
(output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=8, ignore_eos=True))
print("ANSWER", len(output.outputs[0].token_ids), versions.require_version_core.__code__.co_filename)
llm.llm_engine.engine_core.shutdown()
"""


def write_feature(
    catalogue: Path, name: str, distribution: str, version: str, text: str, path: str, old: str, new: str
) -> None:
    assert text.count(old) == 1, f"this {distribution} has {old!r} {text.count(old)} times"
    before, after = text.splitlines(keepends=True), text.replace(old, new).splitlines(keepends=True)
    (catalogue / name).mkdir(parents=True)
    (catalogue / name / "a.diff").write_text("".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")))
    (catalogue / name / "patch.toml").write_text(
        f'id = "{name}"\ntitle = "t"\nwhat = "w"\norigin = "o"\nremoval = "r"\ndistribution = "{distribution}"\n'
        f'versions = "=={version}"\n'
    )


def test_both_processes_of_an_engine_run_features_from_outside(tmp_path: Path) -> None:
    catalogue, cache, metadata = tmp_path / "acme", tmp_path / "cache", tmp_path / "metadata/vllm_hwplugin-0.dist-info"
    vllm, library = find_installed(), find_distribution("transformers", [LIBRARY])
    # The body of a function: the library was imported before the plugin.
    core = "    return require_version(requirement, hint)\n"
    for name, distribution, installed, path, old, new in (
        ("half", "vllm", vllm, SCHEDULER, "num_output_tokens >= request.max_tokens", "num_output_tokens >= 4"),
        ("hint", "transformers", library, LIBRARY, core, f"    hint += '.'\n{core}"),
    ):
        text = installed.read(path)
        assert text is not None
        write_feature(catalogue, name, distribution, installed.version, text, path, old, new)
    (catalogue / "catalogue.toml").write_text('name = "acme"\n')
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-hwplugin\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nhwplugin = vllm_hwplugin.plugin:register\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_HWPLUGIN", "PYTHON"))}
    environ = kept | {
        "PYTHONPATH": os.pathsep.join([str(metadata.parent), str(REPOSITORY)]),
        "VLLM_HWPLUGIN_CACHE_DIR": str(cache),
        "VLLM_HWPLUGIN_PATCHES": str(catalogue),
        "VLLM_HWPLUGIN_PATCH_ACME_HALF": "on",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    program = f"MODEL = {str(REPOSITORY / 'tests/assets/small/target')!r}\n{PROGRAM}"
    command, limit = [sys.executable, "-c", program], patience(300)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr[-4000:]
    (answer,) = (line.split() for line in done.stdout.splitlines() if line.startswith("ANSWER"))
    _, tokens, file = answer
    assert tokens == "4", "the scheduler of the engine core runs stock"
    assert Path(file).is_relative_to(cache)
    found = {item.role: item for item in run_records.read_all(cache)}
    assert {"parent", "engine-core"} <= found.keys()
    for role in ("parent", "engine-core"):
        assert {"acme/half", "acme/hint"} <= set(found[role].live), role
    assert len({item.fingerprint for item in found.values()}) == 1
    assert not any("Unknown vLLM environment variable" in line and "ACME" in line for line in done.stderr.splitlines())
