"""Which text a process runs: the fingerprint of each supported version's plan, held in `fingerprints.json`.

`make docs` writes the file again. It has a line a version, so that a commit shows which ones it changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.base import gates
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import load_catalogue, make_plan
from vllm_hwplugin.patching.texts import Source
from vllm_hwplugin_workshop.sources import Index, IndexSource

from ..conftest import versions
from .texts import Memory

PINS = Path(__file__).with_name("fingerprints.json")


def fingerprints(source: Source) -> dict[str, str]:
    """Of the plan at default gates (""), and where it is another one, with a feature off ("-") or on ("+")."""
    catalogue = load_catalogue()
    paths = {path for feature in catalogue.features for path in feature.paths}
    read = Memory({path: text for path in paths if (text := source.read(path)) is not None}, source.version)
    settings = gates.Settings({})
    settings.read(catalogue.gates)
    default = settings.choices
    asked = {"": default}
    for feature in catalogue.features:
        sign, other = ("+", "on") if default[feature.gate] == "off" else ("-", "off")
        asked[sign + feature.id] = default | {feature.gate: other}
    found = {name: make_plan(catalogue, read, choices).fingerprint for name, choices in asked.items()}
    return {name: value for name, value in found.items() if not name or value != found[""]}


@pytest.mark.parametrize("version", versions("vllm/"))
def test_the_patched_texts_are_those_that_were_reviewed(vllm_tree: Callable[[str], Source], version: str) -> None:
    assert fingerprints(vllm_tree(version)) == json.loads(PINS.read_text(encoding="utf-8"))[version]


if __name__ == "__main__":
    index = Index()
    lines = [f'"{version}": {json.dumps(fingerprints(IndexSource(version, index)))}' for version in SUPPORTED]
    PINS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
