# SPDX-License-Identifier: Apache-2.0
"""``doctor --paste``: nothing of a person, a host or a secret, and all that a report needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import program
from vllm_hwplugin.cli._paste import redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/.cache/vllm-hwplugin: ready", "~/.cache/vllm-hwplugin: ready"),
        ("/home/bob/x.py, /root/y.py", "~/x.py, ~/y.py"),
        ("/srv/acme/secret/models/site-packages/vllm", "/…/site-packages/vllm"),
        ("/usr/local/cuda/bin/nvcc /dev/shm/vllm-hwplugin-0", "/usr/local/cuda/bin/nvcc /dev/shm/vllm-hwplugin-0"),
        ("gpu-node-7.acme.example says, gpu-node-7 says", "HOST says, HOST says"),
        ("https://user:pw@hub.acme.example/x and tcp://10.0.0.1:29500", "URL and URL"),
        ("bound to 10.20.30.40:8000", "bound to ADDRESS:8000"),
        ("HF_TOKEN=hf_abcdefghijklmnop", "HF_TOKEN=***"),
        ("vllm serve m --api-key abc123 --port 80", "vllm serve m --api-key *** --port 80"),
        ("value sk-0123456789abcdef", "value ***"),
        ("key aB3dEfGhIjKlMnOpQrStUvWxYz012345", "key ***"),
        # What a report is about stays.
        ('"num_speculative_tokens": 3, "model": "m"', '"num_speculative_tokens": 3, "model": "m"'),
        ("rms_norm_dynamic_per_token_quant  not built", "rms_norm_dynamic_per_token_quant  not built"),
        ("vLLM 0.33.0, torch 2.13.0+cpu, driver 580.95.05", "vLLM 0.33.0, torch 2.13.0+cpu, driver 580.95.05"),
    ],
)
def test_what_is_left_of_a_text(text: str, shown: str) -> None:
    assert redacted(text, home=Path("/home/alice"), host="gpu-node-7.acme.example") == shown


def test_a_report_for_an_issue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "alice"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(home / "cache"))
    monkeypatch.setenv("VLLM_HWPLUGIN_PATCHES", "/srv/acme-corp/customer/patches")
    monkeypatch.setattr("platform.node", lambda: "gpu-node-7")
    result = program("doctor", "--paste")
    head, _, report = result.stdout.partition("```text\n")
    assert head.startswith("**vllm-hwplugin doctor**: ")
    assert report.endswith("```\n\n</details>\n")
    assert "alice" not in result.stdout
    assert "/…/customer/patches" in report
    assert "/srv/acme-corp/customer" not in report
    for section in ("host", "environment variables", "the engine's processes"):
        assert f"== {section}\n" in report
    assert program("doctor", "--paste", "--json").exit_code == 2
