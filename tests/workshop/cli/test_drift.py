"""The drift check from the command line: every verdict, every way to fail, and the files it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import program
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin_workshop.cli import drift
from vllm_hwplugin_workshop.cli._drift_report import check, exit_status
from vllm_hwplugin_workshop.sources import Index, PipConfig, TreeSource

ADD = "vllm/v1/add.py"


def run(*arguments: str) -> Any:
    return program("drift", *arguments)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache, or asks the real package index."""
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    offline = PipConfig(index_url="http://127.0.0.1:9/simple")
    monkeypatch.setattr(drift, "Index", lambda: Index(offline, retries=0))


@pytest.fixture
def catalogue(small_catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command line reads the small catalogue."""
    monkeypatch.setattr(drift, "load_catalogue", lambda: load_catalogue(small_catalogue))
    return small_catalogue


def judged(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and of the one target each feature's verdict by its id."""
    result = run(*arguments, "--json", "-")
    (target,) = json.loads(result.stdout)["targets"]
    return result.exit_code, {item["feature"]: item for item in target["features"]}


DRIFT = ("    total = 0\n", "    total = 0.0\n")
# What stands in the file of `graphs`, on which version, and the verdict on that feature with each hunk's.
VERDICTS: dict[str, tuple[Callable[[str], str], str, int, str, list[tuple[str, int, list[int]]]]] = {
    "exact": (lambda text: text, "0.33.0", 0, "applies", [("exact", 0, [])]),
    "a local build": (lambda text: text, "0.33.0+cpu", 0, "applies", [("exact", 0, [])]),
    "moved": (lambda text: "# 1\n# 2\n# 3\n" + text, "0.33.0", 0, "applies", [("moved", 3, [])]),
    "upstream": (lambda text: text.replace("a + b", "b + a"), "0.33.0", 0, "upstream", [("upstream", 0, [])]),
    "drifted": (lambda text: text.replace(*DRIFT), "0.33.0", 1, "drifted", [("drifted", 0, [])]),
    "twice": (lambda text: "# moved\n" + text * 2, "0.33.0", 1, "drifted", [("ambiguous", 0, [6, 14])]),
    "newer": (lambda text: text, "0.34.0", 1, "unlisted", [("exact", 0, [])]),
    "a release candidate": (lambda text: text, "0.34.0rc1", 1, "unlisted", [("exact", 0, [])]),
    "older": (lambda text: text, "0.19.1", 1, "unlisted", [("exact", 0, [])]),
    "a commit": (lambda text: text, "0.34.1.dev3+gabc", 1, "unlisted", [("exact", 0, [])]),
    "newer, drifted": (lambda text: text.replace(*DRIFT), "0.34.0", 1, "unlisted", [("drifted", 0, [])]),
    # A vLLM may be written for a newer Python than the one that checks it.
    "another Python": (lambda text: text + "\n\nof the future: ?\n", "0.33.0", 0, "applies", [("exact", 0, [])]),
}


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(small_tree: Callable[..., Path], name: str) -> None:
    change, version, status, verdict, hunks = VERDICTS[name]
    tree = small_tree()
    (tree / ADD).write_text(change((tree / ADD).read_text()))
    exit_code, found = judged(f"{tree}@{version}")
    graphs = found["graphs"]
    assert (exit_code, graphs["status"], graphs["expected"]) == (status, verdict, status == 0)
    assert [(item["status"], item["offset"], item["found_at"]) for item in graphs["hunks"]] == hunks
    assert graphs["exact"] == (verdict == "applies" and hunks[0][0] == "exact")


@pytest.mark.parametrize(("version", "status"), [("0.33.0", "no-python"), ("0.34.0", "unlisted")])
def test_what_would_be_no_python(
    catalogue: Path, small_tree: Callable[..., Path], add_feature: Callable[..., None], version: str, status: str
) -> None:
    """It fits, and no process could import what comes of it."""
    add_feature(catalogue, "broken", "VLLM_HWPLUGIN_DFLASH_FULL_GRAPH", "    total = 0\n", "        total = 0\n")
    exit_code, found = judged(f"{small_tree()}@{version}")
    assert (exit_code, found["broken"]["status"]) == (1, status)
    assert ["no Python" in found[name]["reason"] for name in ("broken", "graphs")] == [True, False]


def test_what_would_be_no_python_does_not_pass_ahead_of_its_range(
    catalogue: Path, small_tree: Callable[..., Path], add_feature: Callable[..., None]
) -> None:
    """Where a new release is checked before a patch lists it, one that fits is expected, and this is not."""
    tree = TreeSource(small_tree(), "0.34.0")
    assert exit_status([check(load_catalogue(catalogue), "0.34.0", tree, ahead=True)]) == 0
    add_feature(catalogue, "broken", "VLLM_HWPLUGIN_DFLASH_FULL_GRAPH", "    total = 0\n", "        total = 0\n")
    assert exit_status([check(load_catalogue(catalogue), "0.34.0", tree, ahead=True)]) == 1


def test_conflict(catalogue: Path, small_tree: Callable[..., Path], add_feature: Callable[..., None]) -> None:
    """Two features that fit alone, but not together: each names the other."""
    add_feature(catalogue, "rival", "VLLM_HWPLUGIN_DFLASH_FULL_GRAPH", "    return a + b\n", "    return sum((a, b))\n")
    exit_code, found = judged(f"{small_tree()}@0.33.0")
    assert exit_code == 1
    assert {name: item["status"] for name, item in found.items()} == {
        "context": "applies",
        "graphs": "conflict",
        "rival": "conflict",
    }
    assert ("rival" in found["graphs"]["reason"], "graphs" in found["rival"]["reason"]) == (True, True)


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "a target is empty"),
        ("latest", "latest: not a wheel file, an unpacked tree or a version"),
        ("./absent.whl", "./absent.whl: no such file or folder"),
        ("0.33.0", "no usable answer"),
        ("torn.whl", "torn.whl: not a readable wheel"),
        ("other", "no vllm/ package in this folder"),
        ("~nobody-of-this-name/x", "cannot be read"),
        ("x" * 5000, "(5000 characters): cannot be read (File name too long)"),
    ],
)
def test_could_not_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str) -> None:
    """One line on standard error, status 2, no traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.whl").write_bytes(b"PK\x03\x04")
    (tmp_path / "other").mkdir()
    result = run(target)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_the_hunks_that_fit_best_have_the_smallest_share_of_trouble(
    small_tree: Callable[..., Path], catalogue: Path
) -> None:
    """One hunk of one that does not fit is further off than two of three."""
    tree = small_tree()
    folder = catalogue / "graphs"
    old = (folder / "graphs.diff").read_text()
    (folder / "graphs.diff").write_text(re.sub("^(@@.*@@)$", r"\1 <0.33", old, flags=re.MULTILINE))
    (folder / "new.diff").write_text(
        "--- a/vllm/v1/norm.py\n+++ b/vllm/v1/norm.py\n@@ -1,2 +1,2 @@ >=0.33\n def norm(weight):\n"
        "-    return weight[0]\n+    return weight[1]\n"
        "--- a/vllm/gone.py\n+++ b/vllm/gone.py\n@@ -1,2 +1,2 @@ >=0.33\n a\n-b\n+c\n"
        "@@ -9,2 +9,2 @@ >=0.33\n d\n-e\n+f\n"
    )
    (tree / ADD).write_text((tree / ADD).read_text().replace(*DRIFT))
    _, found = judged(f"{tree}@0.35.0")
    assert {item["diff"] for item in found["graphs"]["hunks"]} == {"graphs/new.diff"}
