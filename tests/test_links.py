# SPDX-License-Identifier: Apache-2.0
"""What the pages point at is there: files, headings, features and environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from vllm_hwplugin import __version__
from vllm_hwplugin.base import gates
from vllm_hwplugin.base.gates import CATALOGUE_PREFIX, REPLACED
from vllm_hwplugin.base.terms import TERMS
from vllm_hwplugin.patching import load_catalogue

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "csrc/*.md", "benchmarks/results/*.md", "tests/ops/compile/recordings/*.md")
    for path in sorted(ROOT.glob(pattern))
]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
GATES = (*gates.GATES, *load_catalogue().gates)
VARIABLES = {gate.name for gate in GATES} | {alias.name for gate in GATES for alias in gate.aliases} | set(REPLACED)
#: Of the examples of a gate to be added, and of a catalogue.
EXAMPLES = ("VLLM_HWPLUGIN_MY_FEATURE", CATALOGUE_PREFIX)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def headings(page: Path) -> Iterator[str]:
    """The anchors that GitHub gives a page's headings."""
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        yield re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not file.startswith("http") and not (target.exists() and (not anchor or anchor in headings(target))):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_name_is_known(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {name for name in re.findall(r"VLLM_(?:HWPLUGIN|MUSA|NWOR)\w*", text) if not name.startswith(EXAMPLES)}
    # `VLLM_MUSA_*` and the like stand for all that begin so.
    beginnings = {name for name in named if name.endswith("_") and any(known.startswith(name) for known in VARIABLES)}
    assert named - VARIABLES - beginnings == set()
    features = {feature.id for feature in load_catalogue().features}
    kinds = "|".join(sorted({feature.partition("-")[0] for feature in features}))
    written = set(re.findall(rf"`((?:{kinds})-[a-z0-9-]+)`", prose(page)))
    assert written - features - TERMS.keys() == set()


def test_the_project_has_one_address_and_the_pages_name_this_version() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    address = urls["Repository"]
    assert all(url.startswith(address) for url in urls.values())
    # Of examples: `uses: OWNER/vllm-hwplugin@v1.0.0`, and `repo:` with `rev:`.
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = [found for text in texts for found in re.findall(r"([\w.-]+/vllm-hwplugin)@v(\S+)", text)]
    named += [
        found for text in texts for found in re.findall(r"github\.com/([\w.-]+/vllm-hwplugin)\n\s+rev: v(\S+)", text)
    ]
    assert {*named} == {(address.removeprefix("https://github.com/"), __version__)}
