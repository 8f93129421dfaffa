"""Where pip looks for packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vllm_hwplugin_workshop.sources import PipConfig
from vllm_hwplugin_workshop.sources._pip import parse_config, pip_config


def test_environment_outweighs_files_and_install_outweighs_global() -> None:
    listing = "\n".join(
        [
            ":env:.cert='/env.pem'",
            "WARNING: something unrelated = odd",
            "global.cert='/global.pem'",
            "global.index-url='http://global.test/simple'",
            "install.index-url='http://install.test/simple'",
            "global.extra-index-url='http://a.test/simple\\nhttp://b.test/simple'",
            "download.proxy='http://not-used.test'",
        ]
    )
    assert parse_config(listing) == PipConfig(
        index_url="http://install.test/simple",
        extra_index_urls=("http://a.test/simple", "http://b.test/simple"),
        cert="/env.pem",
    )


def test_pip_itself_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both a configuration file and PIP_* variables arrive."""
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://file.test/simple\nproxy = http://proxy.test:1\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    assert pip_config().index_url == "http://file.test/simple"
    assert pip_config().proxy == "http://proxy.test:1"
    monkeypatch.setenv("PIP_INDEX_URL", "http://env.test/simple")
    assert pip_config().index_url == "http://env.test/simple"


def test_without_pip_its_variables_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that uv made."""
    (tmp_path / "python").write_text("#!/bin/sh\necho $0: No module named pip >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://a.test http://b.test")
    monkeypatch.setenv("PIP_CERT", "/c.pem")
    assert pip_config() == PipConfig(extra_index_urls=("http://a.test", "http://b.test"), cert="/c.pem")
