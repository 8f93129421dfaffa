# SPDX-License-Identifier: Apache-2.0
"""What the log says at a start, by each version's own logging and by the order in which its processes call it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_seconds import patience
from vllm_hwplugin.base.versions import SUPPORTED

from .patching.madeup import EDITS, GATES, OTHER_EDITS, Project, make_project

VERSIONS = (SUPPORTED[0], *SUPPORTED[-3:])
# From then on vLLM configures logging after it has loaded its plugins.
LATE = SUPPORTED[-3:]

STUBS = {
    "vllm/config/__init__.py": "",
    "vllm/config/logging.py": """
        from dataclasses import dataclass
        import vllm.envs as envs

        @dataclass
        class LoggingConfig:
            configure_logging: bool = envs.VLLM_CONFIGURE_LOGGING
            log_level: str = envs.VLLM_LOGGING_LEVEL
            pylogging_config_file: str | None = envs.VLLM_LOGGING_CONFIG_PATH
            formatter: str = "text"
        """,
    "vllm/platforms/__init__.py": """
        class current_platform:
            @staticmethod
            def log_warnings():
                pass
        """,
}

# The first process loads plugins to parse its arguments and then configures logging, a child does that at its start.
PROCESSES = """
import multiprocessing, types

def start(first):
    import vllm.logger as logger
    from vllm_hwplugin import plugin
    configure = getattr(logger, "configure_logging_from_args", lambda args: None)
    if not first:
        configure(ARGS)
    # The rest of `register` needs torch, and a start without it takes a quarter of the time.
    plugin.platform()
    install()
    if first and CONFIGURES:
        configure(ARGS)
    logger.init_logger("vllm.engine").info("vLLM serves")

def child(variables, method):
    # A forked one has what its parent has.
    if method == "spawn":
        os.environ.update(variables)
        start(False)

import os
ARGS = types.SimpleNamespace(**LOGGING)
if "formatter" in LOGGING:
    from vllm.config.logging import LoggingConfig
    ARGS.logging_config = LoggingConfig(formatter=LOGGING["formatter"])
if APPLICATION:
    import logging
    logging.basicConfig(level="INFO", format="%(levelname)s of %(name)s: %(message)s", stream=sys.stdout)
if __name__ == "__main__":
    start(True)
    for method, name in ("spawn", "EngineCore"), ("spawn", "VllmWorker-0"), ("fork", "VllmWorker-1"):
        process = multiprocessing.get_context(method).Process(
            target=child, args=(CHILDREN, method), name=name
        )
        process.start()
        process.join()
        assert process.exitcode == 0
"""
VLLMS_FORM = re.compile(
    r"(\([\w-]+ pid=\d+\) )?(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] (?P<text>.+)"
)
OF_THE_FILE = re.compile(r"(?P<level>[A-Z]+) of vllm\.hwplugin: (?P<text>.+)")
BARE = re.compile(r"(?P<text>vllm-hwplugin: .+)")
FILE = {
    "version": 1,
    "formatters": {"plain": {"format": "%(levelname)s of %(name)s: %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["out"], "level": "INFO", "propagate": False}},
}

Lines = list[tuple[str | None, str]]


@pytest.fixture
def project(tmp_path: Path, vllm_tree: Callable[[str], Any]) -> Callable[[str], Project]:
    """A made-up vLLM with the logging of a version; one of its two features does not fit."""

    def make(version: str) -> Project:
        made, tree = make_project(tmp_path / f"start {len(os.listdir(tmp_path))}"), vllm_tree(version)
        made.feature("made-up", EDITS)
        made.feature("other", OTHER_EDITS, gate=GATES[1])
        made.drift()
        made.write("vllm/_version.py", f"__version__ = version = '{version}'\n")
        paths = [path for path in tree.paths("vllm/logging_utils/") if "dump_input" not in path]
        for path in (*paths, "vllm/logger.py", "vllm/envs.py"):
            made.write(path, tree.read(path))
        for path, text in STUBS.items():
            made.write(path, text)
        return made

    return make


@pytest.fixture
def lines(project: Callable[[str], Project]) -> Callable[..., Lines]:
    """The plugin's lines of a start, as (level, text) by a form."""

    def start(
        version: str,
        form: re.Pattern[str] | None,
        logging: Mapping[str, str] | None = None,
        *,
        application: bool = False,
        configures: bool = True,
        children: Mapping[str, str] | None = None,
        **variables: str,
    ) -> Lines:
        made = project(version)
        values = {
            "LOGGING": dict(logging or {}),
            "APPLICATION": application,
            "CONFIGURES": configures,
            "CHILDREN": dict(children or {}),
        }
        constants = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        script = made.folder / "start.py"
        script.write_text(made.command(constants, PROCESSES)[-1])
        done = subprocess.run(
            [sys.executable, str(script)],
            env=made.environ(VLLM_HWPLUGIN_PLATFORM="off", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(60),
        )
        assert done.returncode == 0, done.stdout
        # A line of vLLM's shows that what is looked for would be seen, and comes behind.
        assert form is BARE or done.stdout.index("vllm-hwplugin") < done.stdout.index("vLLM serves"), done.stdout
        own = [line for line in done.stdout.splitlines() if "vllm-hwplugin" in line]
        if form is None:
            return [(item["levelname"], item["message"]) for item in map(json.loads, own)]
        matches = [form.fullmatch(line) for line in own]
        assert None not in matches, done.stdout
        return [(match.groupdict().get("level"), match["text"]) for match in matches if match is not None]

    return start


def check(said: Lines, *, levels: bool = True, patched_in: tuple[str, ...] = ("parent",)) -> None:
    """Each refusal once, and what is patched in once, by the first process and by children that differ."""
    refused = [level for level, text in said if text.startswith("vllm-hwplugin: made-up is not patched in, ")]
    found = [re.match(r"vllm-hwplugin: patched in on vllm [\d.]+ \(plugin .+, (.+)\): ", text) for _, text in said]
    assert refused == ["WARNING" if levels else None] * max(1, len(patched_in)), said
    assert [match[1] for match in found if match] == list(patched_in), said
    assert len(said) == len(refused) + len(patched_in), said


@pytest.mark.parametrize("version", VERSIONS)
def test_a_start_says_once_what_is_patched_in_in_vllms_form(version: str, lines: Callable[..., Lines]) -> None:
    check(lines(version, VLLMS_FORM))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_configuration_file_has_the_lines(version: str, lines: Callable[..., Lines], tmp_path: Path) -> None:
    file = tmp_path / "logging.json"
    file.write_text(json.dumps(FILE))
    if version in LATE:
        check(lines(version, OF_THE_FILE, {"log_config_file": str(file)}))
    else:
        check(lines(version, OF_THE_FILE, VLLM_LOGGING_CONFIG_PATH=str(file)))


# 0.31.0 has no such formatter.
@pytest.mark.parametrize("version", SUPPORTED[-2:])
def test_vllms_json_has_the_lines(version: str, lines: Callable[..., Lines]) -> None:
    check(lines(version, None, {"formatter": "json"}))


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_where_vllm_configures_nothing_python_decides(version: str, lines: Callable[..., Lines]) -> None:
    off = {"VLLM_CONFIGURE_LOGGING": "0"}
    check(lines(version, BARE, **off), levels=False, patched_in=())
    check(lines(version, OF_THE_FILE, application=True, **off))


def test_where_vllm_never_gets_to_it_nothing_is_swallowed(lines: Callable[..., Lines]) -> None:
    check(lines(LATE[-1], BARE, configures=False), levels=False, patched_in=())


FORKED = """
import logging, os
import vllm.logger
from vllm_hwplugin import plugin
plugin.platform()
install()
if os.fork() == 0:
    logging.getLogger("vllm.hwplugin").warning("in the child")
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


def test_a_child_that_is_forked_before_the_logging_stands_loses_and_doubles_nothing(
    project: Callable[[str], Project],
) -> None:
    done = project(LATE[-1]).start("import sys; sys.stderr = sys.stdout", FORKED, VLLM_HWPLUGIN_PLATFORM="off")
    child, parent = done.stdout.splitlines()
    assert child == "vllm-hwplugin: in the child", done.stdout
    assert parent.startswith("vllm-hwplugin: made-up is not patched in")


# As in a worker of Ray: with no logging of vLLM until the engine stands.
ENGINE_STANDS = """
import vllm.logger
from vllm_hwplugin import plugin
plugin.platform()
install()
print("not yet")
from vllm_hwplugin.spec_decode.engine_report import Findings, report
report(None, lambda part, entry: Findings("a worker", {}))
print("later")
"""


def test_the_end_of_an_engines_start_gives_the_lines_out(project: Callable[[str], Project]) -> None:
    made = project(LATE[-1])
    variables = {"VLLM_HWPLUGIN_PLATFORM": "off", "PYTHONUNBUFFERED": "1"}
    done = made.start("import sys; sys.stderr = sys.stdout", ENGINE_STANDS, **variables)
    first, refused, last = done.stdout.splitlines()
    assert (first, last) == ("not yet", "later"), done.stdout
    assert refused.startswith("vllm-hwplugin: made-up is not patched in")


def test_children_that_differ_say_so(lines: Callable[..., Lines]) -> None:
    said = lines(LATE[-1], VLLMS_FORM, children={GATES[1]: "off"})
    check(said, patched_in=("parent", "engine-core", "worker"))


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_a_start_with_the_plugin_off_says_so_once(version: str, lines: Callable[..., Lines]) -> None:
    said = lines(version, VLLMS_FORM, VLLM_HWPLUGIN="0")
    assert said == [("INFO", "vllm-hwplugin: switched off by VLLM_HWPLUGIN, vLLM runs unpatched")]
