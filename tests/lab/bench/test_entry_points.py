"""The engine's process finds the plugin as an installation would show it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from vllm_hwplugin_lab.bench import _entry_points
from vllm_hwplugin_lab.bench._launch import child_environment

ASK = """
import importlib.metadata as m, json, sys
groups = json.loads(sys.argv[1])
print(json.dumps({g: {p.name: p.value for p in m.entry_points(group=g) if p.value.startswith("vllm_hwplugin.")}
                  for g in groups}))
"""


def seen_by_a_child(metadata: Path | None, elsewhere: Path) -> dict[str, dict[str, str]]:
    """What ``importlib.metadata.entry_points``, which vLLM asks, says in a fresh process.

    It is started ``elsewhere``: in a clone that was installed to be edited, setuptools' own folder would be seen first.
    """
    command = [sys.executable, "-c", ASK, json.dumps(_entry_points.GROUPS)]
    environment = child_environment({}, metadata)
    done = subprocess.run(command, env=environment, cwd=elsewhere, capture_output=True, text=True, check=True)
    return {group: points for group, points in json.loads(done.stdout).items() if points}


def test_metadata_of_an_older_copy_are_hidden(monkeypatch, tmp_path):
    old = tmp_path / "old" / "vllm_hwplugin-0.0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-hwplugin\nVersion: 0.0.1\n")
    (old / "entry_points.txt").write_text("[vllm.general_plugins]\nhwplugin = vllm_hwplugin.gone:register\n")
    monkeypatch.setenv("PYTHONPATH", str(old.parent))
    assert "vllm_hwplugin.gone:register" in seen_by_a_child(None, tmp_path)["vllm.general_plugins"].values()
    monkeypatch.setattr(_entry_points, "installed", dict)
    assert seen_by_a_child(_entry_points.provide(tmp_path / "metadata"), tmp_path) == _entry_points.declared()


def test_an_installation_that_says_the_same_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(_entry_points, "installed", _entry_points.declared)
    assert _entry_points.provide(tmp_path / "metadata") is None
    assert not (tmp_path / "metadata").exists()
