# SPDX-License-Identifier: Apache-2.0
"""The project's words: nothing has what CONTRIBUTING.md's "How we write" avoids."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm_hwplugin", "vllm_hwplugin_workshop", "vllm_hwplugin_lab", "benchmarks", "setup.py", "csrc")

#: A phrase, as a regular expression, and what to write. In comments, docstrings and messages.
WORDS = {
    "stock": "baseline, unpatched vLLM",
    "at once": "concurrent, at the same time",
    "live|in force|in use|serves": "patched in (the text), active (the engine), served (the step)",
    "gates?": "environment variable, switch",
    "tails?": "sampling and drafting",
    "journals?": "run record",
    "recordings?": "capture",
    "stands? against": "why CUDA graphs are not used",
    "mend(s|ed|ing)?": "fix",
    "faults?": "bug",
    "rooms?(?! for)|house": "package, module",
    "hand(s|ed|ing)? over": "pass",
    "busy host": "loaded machine",
    "alone": "only",
    "anew": "again",
    "beside": "with, next to",
    "of its own": "its own",
    "as well": "also",
    "has to|have to": "must",
    "whatever": "any",
    "mrv2": "V2",
    "next to nothing": "within noise",
    "those of|that of|of these|of those|of which": "the noun again",
    "none where": "None if",
}
#: What a variable with this name is, its name does not say.
NAMES = frozenset({"found", "one", "item", "kept", "said", "each", "what"})
#: No prose: what is in backticks, a command with its option, formulas, attributes, names that docstrings explain.
_QUOTED = re.compile(
    r"`+[^`]*`+|(\b\w+ )?--[\w-]+( \w+)?|::\n\n(?: +.*\n)+|\b\w+\.[a-z]\w*|^ *\w+(:| =) ", re.MULTILINE
)
#: Nor these, which results files have.
_OF_RESULTS = frozenset({" at once", "busy host"})
#: First words of summaries that are no verbs; ruff's D401 has only some of them.
NO_VERB = re.compile(
    "(All|An?|As|By|Each|Every|For|From|How|In|None|Of|On|One|Some|Th(at|e|ese|is|ose)|Tokens|What|When|Where|Which|While"
    "|Why|With)\\b|[^A-Z]"
)


class Place(NamedTuple):
    rule: str
    file: str
    line: int


def _prose(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield each passage that people read, with its first line."""
    if not file.endswith(".py"):
        for match in re.finditer(r"//+(.*)", text):
            yield text.count("\n", 0, match.start()) + 1, match[1]
    else:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, "" if node.value in _OF_RESULTS else node.value


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield variables and arguments, but not fields, which are read behind a dot."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(one.target) for node in classes for one in node.body if isinstance(one, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def _summaries(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the first paragraph of each function's docstring; a property may have a noun's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            properties = [name for name in map(ast.unparse, node.decorator_list) if "property" in name]
            if not properties:
                yield node.body[0].lineno, text.split("\n\n")[0]


def places(file: str, text: str) -> Iterator[Place]:
    """Yield each place of a file that breaks a rule."""
    for first, passage in _prose(file, text):
        plain = _QUOTED.sub(lambda quoted: "\n" * quoted[0].count("\n"), passage)
        for phrase in WORDS:
            for match in re.finditer(rf"\b({phrase})\b".replace(" ", r"\s+"), plain, re.IGNORECASE):
                yield Place(phrase, file, first + plain.count("\n", 0, match.start()))
    if file.endswith(".py"):
        tree = ast.parse(text)
        for line, name in _names(tree):
            if name in NAMES:
                yield Place("names", file, line)
        for line, summary in _summaries(tree):
            if "\n" in summary or len(summary.split()) > 12 or NO_VERB.match(summary):
                yield Place("summaries", file, line)


def all_places() -> list[Place]:
    files = [ROOT / name for name in PACKAGES if (ROOT / name).is_file()]
    for folder in (ROOT / name for name in PACKAGES if (ROOT / name).is_dir()):
        files += sorted(path for path in folder.rglob("*") if path.suffix in {".py", ".cu", ".cuh", ".h"})
    return [place for file in files for place in places(str(file.relative_to(ROOT)), file.read_text())]


def test_no_place_breaks_a_rule() -> None:
    broken = all_places()
    assert not broken, [
        f"{place.file}:{place.line}: {place.rule!r}: write {WORDS.get(place.rule, 'what CONTRIBUTING.md says')}"
        for place in broken
    ]


def test_each_file_without_d401_still_needs_that() -> None:
    ignored = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    patterns = [name for name, rules in ignored.items() if "D401" in rules]
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--no-cache", "--output-format", "json"]
    done = subprocess.run(
        [*ruff, "--select", "D401", *PACKAGES[:-1], "tests"], cwd=ROOT, capture_output=True, text=True
    )
    broken = {str(Path(place["filename"]).relative_to(ROOT)) for place in json.loads(done.stdout)}
    assert [name for name in patterns if not any(fnmatch(file, name) for file in broken)] == []
