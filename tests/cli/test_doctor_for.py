# SPDX-License-Identifier: Apache-2.0
"""``doctor --for``: an engine that is not started, by the configuration that the real vLLM makes of its command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.cpu_seconds import patience
from tests.program import program
from vllm_hwplugin.cli import _planned

SMALL = Path(__file__).parent.parent / "assets" / "small"
SPECULATION = {"method": "eagle3", "model": str(SMALL / "eagle3"), "num_speculative_tokens": 6}


def doctor(folder: Path, *more: str, **speculation: Any) -> tuple[int, dict[str, Any]]:
    """Exit status and results for a server of at most six requests, on a GPU that is not here."""
    draft = json.dumps(SPECULATION | speculation)
    words = ["vllm", "serve", str(SMALL / "target"), "--speculative-config", draft, "--max-num-seqs", "6", *more]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM")}
    cache = folder / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "vllm_hwplugin", "doctor", "--json", "--gpu", "9.0", "--for", shlex.join(words)],
        env=kept
        | {"VLLM_HWPLUGIN_CACHE_DIR": str(cache), "VLLM_CACHE_ROOT": str(folder / "vllm"), "TMPDIR": str(folder)}
        | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=patience(300),
    )
    # It is no engine, and leaves no record of one.
    assert not cache.exists()
    return done.returncode, json.loads(done.stdout)["planned"]


@pytest.mark.engine
def test_the_answer_is_that_of_vllms_own_configuration(tmp_path: Path) -> None:
    status, found = doctor(tmp_path, "--max-cudagraph-capture-size", "41", suffix_decoding_max_tree_depth=8)
    assert (status, found["refused"]) == (0, "")
    assert found["described"] == "Model Runner V2, eagle3 k=6, cudagraph_mode FULL_AND_PIECEWISE"
    assert found["uses"]["v2-tail-graph"]["used"]
    assert not found["uses"]["draft-full-graph"]["used"]
    assert found["unserved"].startswith("6 of 6 requests; max_cudagraph_capture_size with 42")
    assert [line.partition(":")[0] for line in found["ignored"]] == ["suffix_decoding_max_tree_depth"]
    # What asks the runner or the drafter is not known, and not taken for a no.
    assert any("v2-tail-graph" in names for names in found["unknown"].values())
    assert not any("drafts are verified" in reason for reason in found["unknown"])
    assert not found["left"]


@pytest.mark.engine
def test_what_a_configuration_excludes_is_known(tmp_path: Path) -> None:
    _, found = doctor(tmp_path, "--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')
    features = ("v2-tail-graph", "v2-step-inputs", "v2-mixed-graphs", "v2-draft-head")
    assert [found["uses"][name]["used"] for name in features] == 4 * [False]
    # vLLM's own sizes end at 40 tokens, with LoRA also next to the plugin.
    more = ("--pipeline-parallel-size", "2", "--enable-lora", "--max-cudagraph-capture-size", "42")
    _, found = doctor(tmp_path, *more)
    assert [found["uses"][name]["used"] for name in features] == [False, False, True, False]
    assert found["unserved"].startswith("6 of 6 requests; max_cudagraph_capture_size with 48")


def test_what_vllm_refuses_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with a configuration that cannot be made."""

    def refuse(*_: object) -> NoReturn:
        raise ValueError("max_model_len is too large")

    def run(command: list[str], **_: object) -> None:
        monkeypatch.setattr(sys, "argv", ["", command[-1]])
        _planned.answer()

    arguments = SimpleNamespace(AsyncEngineArgs=SimpleNamespace(from_cli_args=str))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", arguments)
    for name, stand_in in {"_parsed": str, "_foreseen": refuse, "_assume_gpu": str}.items():
        monkeypatch.setattr(_planned, name, stand_in)
    monkeypatch.setattr(_planned, "subprocess", SimpleNamespace(run=run))
    result = program("doctor", "--json", "--for", "vllm serve m")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["planned"]["refused"] == "ValueError: max_model_len is too large"


@pytest.mark.parametrize(
    ("command", "variables", "words"),
    [
        ("vllm serve m --port 1", {}, ["m", "--port", "1"]),
        ("VLLM_X=1 A='b c' /x/bin/vllm serve m", {"VLLM_X": "1", "A": "b c"}, ["m"]),
        ("python -m vllm.entrypoints.openai.api_server --model m", {}, ["--model", "m"]),
        (__file__, {}, ["--config", __file__]),
        (f"vllm serve m {'--port 1 ' * 999}", {}, ["m", *["--port", "1"] * 999]),
    ],
)
def test_commands_that_start_a_server(command: str, variables: dict[str, str], words: list[str]) -> None:
    assert _planned._serve_arguments(command) == (variables, words)


@pytest.mark.parametrize("arguments", [["--for", "no such"], ["--for", "vllm serve 'm"], ["--gpu", "9.0"]])
def test_what_cannot_be_answered_is_status_2(arguments: list[str]) -> None:
    result = program("doctor", *arguments)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
