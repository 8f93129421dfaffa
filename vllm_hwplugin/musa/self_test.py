# SPDX-License-Identifier: Apache-2.0
"""Results of the self-test of a Moore Threads GPU, without torch and vLLM. Not run on MUSA hardware."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from .. import __version__
from ..base import cachedir, run_records
from . import versions

logger = logging.getLogger("vllm.hwplugin")

GATE: Final = "VLLM_HWPLUGIN_SELF_TEST"
_FOLDER: Final = "musa-self-test"
#: The packages whose versions a result depends on.
_PACKAGES: Final = ("torch", "torch_musa", "triton", "torchada", "mate")


class Result(NamedTuple):
    """A check's result: right, wrong, error (it could not run) or skipped, why, and what a wrong one refuses."""

    name: str
    state: str
    detail: str
    refuses: str
    seconds: float

    def __str__(self) -> str:
        refused = f"; refused: {self.refuses}" if self.state == "wrong" and self.refuses else ""
        return f"{self.name}: {self.state}{self.detail and ': '}{self.detail}{refused}"


def installed_packages() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {"plugin": __version__, **{name: versions.installed(name) or "" for name in _PACKAGES}}


def keep_results(host: Mapping[str, str], make: Callable[[], list[Result]]) -> list[Result]:
    """Return this host's cached results, or make and cache them."""
    try:
        folder = cachedir.private_folder(cachedir.own_folder() / _FOLDER)
    except (OSError, cachedir.UntrustedFolder):
        return make()
    file = folder / f"{hashlib.sha256(json.dumps(host, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if (cached := _read(file)) is not None and cached[0] == host:
        return cached[1]
    results = make()
    data = {"host": dict(host), "checks": [result._asdict() for result in results]}
    try:
        cachedir.write_atomically(file, json.dumps(data, indent=2).encode())
    except OSError as error:
        logger.debug("the self-test's results are not kept: %s", error)
    return results


def _read(file: Path) -> tuple[dict[str, str], list[Result]] | None:
    try:
        data = json.loads(cachedir.read_private(file) or b"")
        return data["host"], [Result(**check) for check in data["checks"]]
    except (ValueError, KeyError, TypeError):
        return None


def find_failures(folders: Iterable[Path]) -> list[str]:
    """Return cached failures of GPUs with the installed versions."""
    current = installed_packages()
    lines = []
    for file in sorted(file for folder in folders for file in (folder / _FOLDER).glob("*.json")):
        host, results = _read(file) or ({}, [])
        if current.items() <= host.items():
            failed = [result for result in results if result.state in ("wrong", "error")]
            lines += [f"self-test of the {host['gpu']} {host['uuid']}: {result}" for result in failed]
    return lines


_wrong: dict[str, str] = {}


def note_results(results: Iterable[Result]) -> None:
    """Log failed checks, and refuse what needs a wrong one."""
    failed = [result for result in results if result.state in ("wrong", "error")]
    _wrong.update({result.name: result.detail for result in failed if result.state == "wrong"})
    for result in failed:
        logger.warning("self-test of this GPU: %s", result)
    run_records.note("self-test", "; ".join(map(str, failed)) or "nothing wrong")


def find_wrong(*checks: str) -> str | None:
    """Return why what needs these checks is refused, or None."""
    name = next((name for name in checks if name in _wrong), None)
    return name and f"this GPU's self-test finds wrong: {name}: {_wrong[name]} ({GATE}=0 skips the test)"
