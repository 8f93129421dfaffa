# SPDX-License-Identifier: Apache-2.0
"""The project's own commit hooks are asked for every file that what they check is made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import pages

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
HOOKS: dict[str, dict[str, Any]] = {
    hook["id"]: hook
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]
}


def below(folder: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize(
    ("hook", "files"),
    [
        ("mypy", [*below("vllm_hwplugin"), *below("benchmarks")]),
        (
            "gates-page",
            [*below("vllm_hwplugin/gates"), "docs/gates.md"],
        ),
        ("results-pages", [*pages(), *below("benchmarks/pages")]),
    ],
)
def test_a_hook_is_asked_for_every_file_that_it_checks(hook: str, files: list[str]) -> None:
    pattern = re.compile(HOOKS[hook]["files"])
    assert [name for name in files if not pattern.search(name)] == []
    assert all((ROOT / name).is_file() for name in files)
