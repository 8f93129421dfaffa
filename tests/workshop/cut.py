"""The project's catalogue as it was before its newest vLLM: what a maintainer has on the day of a release."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from vllm_hwplugin.base.versions import SUPPORTED, UNKNOWN_FROM, Versions
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.patching._catalogue import TEXTS
from vllm_hwplugin.patching.texts import default_folder, parse_diff
from vllm_hwplugin_workshop.authoring import render

NEWEST, LAST = SUPPORTED[-1], SUPPORTED[-2]
_END = Versions(f"<{NEWEST.removesuffix('.0')}")


def cut_catalogue(folder: Path) -> Path:
    """Write the catalogue without what was made for the newest of `SUPPORTED`, and return its folder."""
    shutil.copytree(default_folder(), folder)
    for feature in (file.parent for file in folder.rglob("patch.toml")):
        file = feature / "patch.toml"
        text = file.read_text()
        file.write_text(re.sub(rf"<{re.escape(UNKNOWN_FROM)}(\.0)?\b", str(_END), text))
        for diff in feature.glob("*.diff"):
            _cut_diff(diff)
    texts = json.loads((folder / TEXTS).read_text())
    for of_file in texts.values():
        of_file.pop(NEWEST, None)
    (folder / TEXTS).write_text(json.dumps(texts) + "\n")
    return folder


def work() -> set[str]:
    """Return the features that somebody has made other hunks of for the newest."""
    of_both = [one for one in load_catalogue().features if one.versions.covers(LAST) and one.versions.covers(NEWEST)]
    return {one.id for one in of_both if one.files_for(LAST) != one.files_for(NEWEST)}


def _cut_diff(file: Path) -> None:
    made = []
    before = parse_diff(file.read_text(), file.name)
    for diff in before:
        hunks = []
        for hunk in diff.hunks:
            ranges = [each.strip() for each in str(hunk.versions or "").split("||")]
            kept = [each.removesuffix(f",{_END}") for each in ranges if not each.startswith(f">={str(_END)[1:]}")]
            kept = ["" if each == str(_END) else each for each in kept]
            if kept:
                hunks.append(hunk._replace(versions=None if "" in kept else Versions(" || ".join(kept))))
        if hunks:
            made.append(diff._replace(hunks=tuple(hunks)))
    if not made:
        file.unlink()
    elif tuple(made) != before:
        file.write_text(render(made))
