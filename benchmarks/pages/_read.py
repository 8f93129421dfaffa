# SPDX-License-Identifier: Apache-2.0
"""Read the folder of results files, whose names tell their kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_hwplugin_lab.bench import micro, results, serve, soak

_OF_ENGINES = ("date", "commit", "plugin", "host", "settings", "cases")
_OF_KERNELS = ("date", "commit", "plugin", "host", "settings", "processes", "cells")
#: Prefix of a file's name -> the entry with its format, the format that is read, and required entries.
#: None: on no page.
_FORMATS: Mapping[str, tuple[str, Any, tuple[str, ...]] | None] = {
    "engines-": ("format", results.FORMAT, _OF_ENGINES),
    "cost-linear-": ("format", results.FORMAT, _OF_ENGINES),
    "cost-nwor-": ("format", results.FORMAT, _OF_ENGINES),
    "cost-ops-": ("format", results.FORMAT, _OF_ENGINES),
    "kernels-attention-": ("kernels_format", micro.FORMAT, _OF_KERNELS),
    "kernels-ops-": ("kernels_format", micro.FORMAT, _OF_KERNELS),
    "soak-": ("format", soak.FORMAT, ("date", "commit", "plugin", "host", "settings", "sides", "failures")),
    "phases-": ("format", results.PHASES_FORMAT, (*_OF_ENGINES, "engines")),
    "serve-": ("format", serve.FORMAT, _OF_ENGINES),
    "probe-": None,
    "starts-": ("format", "starts 1", _OF_ENGINES),
    "start_cost": None,
    "commits-": None,
}
#: README.md's picture has results from this vLLM on. docs/benchmarks.md has all.
_RECENT = Version("0.27")


class ResultsError(Exception):
    """A file of the results folder that no page can use."""


@dataclass(frozen=True)
class Found:
    """A results file: its name and content."""

    name: str
    results: Mapping[str, Any]

    @property
    def device(self) -> str:
        return str(self.results["host"]["name"])

    @property
    def vllm(self) -> str:
        return str(self.results["host"]["vllm"])

    @property
    def day(self) -> str:
        return str(self.results["date"])[:10]

    @property
    def source(self) -> str:
        """The origin of the figures, in words."""
        host, commit = self.results["host"], self.results["commit"]
        settings = self.results["settings"]
        idle = ", other engines idle" if settings.get("others_idle") else ""
        seqs = self._arguments.get("max_num_seqs")
        return (
            f"{host['name']}, driver {host['driver']}, torch {host['torch']}, vLLM {host['vllm']}, vllm-hwplugin "
            f"{self.results['plugin']} at `{commit}`, {self.day}{self.asked}"
            f"{f', max_num_seqs={seqs}' if seqs else ''}{self.conditions}{idle}"
        )

    @property
    def conditions(self) -> str:
        """Remarks in the file about the host's other load."""
        words = str(self.results.get("conditions") or "")
        words = words.replace("busy host", "loaded machine").replace("busy GPU and host", "loaded machine and GPU")
        return f", {words}" if words else ""

    @property
    def asked(self) -> str:
        """Engine arguments of the run, to append to the target.

        Without `max_num_seqs`: if it is not named, it is the largest number of requests.
        """
        named = {
            inner: content
            for name, value in self._arguments.items()
            for inner, content in (value if isinstance(value, dict) else {name: value}).items()
        }
        return "".join(f", {name}={value}" for name, value in named.items() if name != "max_num_seqs")

    @property
    def _arguments(self) -> Mapping[str, Any]:
        return self.results["settings"].get("vllm_arguments") or {}


def read_all(folder: Path, kind: str) -> list[Found]:
    """Read the files whose names begin with ``kind``, by name.

    Raises:
        ResultsError: any file of the folder is of no known kind; or one of this kind cannot be read, is no JSON, has
            another format, or lacks an entry.
    """
    paths = sorted(folder.glob("*.json"))
    for path in paths:
        if not path.name.startswith(tuple(_FORMATS)):
            raise ResultsError(f"{path}: of no known kind; expected a name that begins with {', '.join(_FORMATS)}")
    return [_read(path, kind) for path in paths if path.name.startswith(kind)]


def recent(files: Iterable[Found]) -> list[Found]:
    """Return the files for README.md's picture."""
    return [file for file in files if Version(file.vllm) >= _RECENT]


def _read(path: Path, kind: str) -> Found:
    try:
        content = results.read_results(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ResultsError(f"{path}: not JSON, so no results file ({error}); run the benchmark again") from error
    form = _FORMATS[kind]
    assert form is not None
    entry, wanted, needed = form
    actual = content.get(entry) if isinstance(content, dict) else type(content).__name__
    if actual != wanted:
        raise ResultsError(f"{path}: {entry} {actual!r}, expected {wanted!r}; run the benchmark again")
    if missing := [name for name in needed if content.get(name) is None]:
        raise ResultsError(f"{path}: no {', '.join(missing)}; run the benchmark again")
    if kind.startswith("kernels-") and not kind.endswith(f"-{content.get('kind')}-"):
        raise ResultsError(f"{path}: holds results of `bench {content.get('kind')}`; name it so")
    return Found(path.name, content)
