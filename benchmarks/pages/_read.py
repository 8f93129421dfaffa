# SPDX-License-Identifier: Apache-2.0
"""Reading the folder of results files. What a file is of, its name says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.bench import micro, serve, soak

#: Beginning of a file's name -> the entry that says which format it is, and those that are read. None: the files of
#: `probe`, `start_cost.py` and `import_share.py`, of which no page is made.
_FORMATS: Mapping[str, tuple[str, tuple[Any, ...]] | None] = {
    "engines-": ("format", (bench.FORMAT,)),
    "cost-nwor-": ("format", (bench.FORMAT,)),
    "kernels-attention-": ("kernels_format", (micro.FORMAT,)),
    "kernels-ops-": ("kernels_format", (micro.FORMAT,)),
    "soak-": ("format", (soak.FORMAT,)),
    "phases-": ("format", (bench.PHASES_FORMAT,)),
    "serve-": ("format", (serve.FORMAT,)),
    "probe-": None,
    "starts-": ("format", ("starts 1",)),
    "start_cost": None,
    "import_share": None,
}
#: What a file of that kind has to have.
_NEEDED = {
    "engines-": ("date", "commit", "plugin", "host", "settings", "cases"),
    "cost-nwor-": ("date", "commit", "plugin", "host", "settings", "cases"),
    "kernels-attention-": ("date", "commit", "plugin", "host", "settings", "processes", "cells"),
    "kernels-ops-": ("date", "commit", "plugin", "host", "settings", "processes", "cells"),
    "soak-": ("date", "commit", "plugin", "host", "settings", "sides", "failures"),
    "phases-": ("date", "commit", "plugin", "host", "settings", "cases", "engines"),
    "serve-": ("date", "commit", "plugin", "host", "settings", "cases"),
    "starts-": ("date", "commit", "plugin", "host", "settings", "cases"),
}


class ResultsError(Exception):
    """A file of the results folder that no page can be made of."""


@dataclass(frozen=True)
class Found:
    """A results file: its name and what is in it."""

    name: str
    results: Mapping[str, Any]

    @property
    def device(self) -> str:
        return str(self.results["host"]["name"])

    @property
    def vllm(self) -> str:
        return str(self.results["host"]["vllm"])

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        host, commit = self.results["host"], self.results["commit"]
        return (
            f"{host['name']}, driver {host['driver']}, torch {host['torch']}, vLLM {host['vllm']}, vllm-hwplugin "
            f"{self.results['plugin']} at `{commit}`, {self.results['date'][:10]}"
        )


def read_all(folder: Path, kind: str) -> list[Found]:
    """The files whose names begin with ``kind``, by name.

    Raises:
        ResultsError: a file of the folder, of whatever kind, has a name that says nothing; or one of this kind cannot
            be read, is no JSON, has another format, or lacks an entry.
    """
    paths = sorted(folder.glob("*.json"))
    for path in paths:
        if not path.name.startswith(tuple(_FORMATS)):
            raise ResultsError(f"{path}: of no known kind; expected a name that begins with {', '.join(_FORMATS)}")
    return [_read(path, kind) for path in paths if path.name.startswith(kind)]


def _read(path: Path, kind: str) -> Found:
    try:
        results = bench.read_results(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ResultsError(f"{path}: not JSON, so no results file ({error}); run the benchmark again") from error
    form = _FORMATS[kind]
    assert form is not None
    entry, wanted = form
    found = results.get(entry) if isinstance(results, dict) else type(results).__name__
    if found not in wanted:
        expected = " or ".join(map(repr, wanted))
        raise ResultsError(f"{path}: {entry} {found!r}, expected {expected}; run the benchmark again")
    if missing := [name for name in _NEEDED[kind] if results.get(name) is None]:
        raise ResultsError(f"{path}: no {', '.join(missing)}; run the benchmark again")
    if kind.startswith("kernels-") and not kind.endswith(f"-{results.get('kind')}-"):
        raise ResultsError(f"{path}: holds results of `bench {results.get('kind')}`; name it so")
    return Found(path.name, results)
