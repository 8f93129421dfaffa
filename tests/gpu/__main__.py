# SPDX-License-Identifier: Apache-2.0
"""Run what matters most on one GPU, newest runner first: `python -m tests.gpu [FILE [TEST...]]`.

Token and draft equality of Eagle3, DFlash, DSpark, MTP and `draft_model` under a load, with images and adapters too,
batches of up to 512 requests, mixed graphs, failed captures at a start, the KV cache after rejected drafts, and every
kernel.
Results, versions, device and commit go to FILE as JSON after each test, and a failure is printed when it happens: a
run that is stopped has told what it found. The exit status is pytest's.
Most of the time goes to starts of engines, so a host of few cores with cold caches takes longest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from vllm_hwplugin_lab.bench import detect_host
from vllm_hwplugin_lab.bench.results import provenance

HERE: Final = Path(__file__).parent
#: Engines come first, and those that take longest before the others.
TESTS: Final = (
    "test_nwor.py::test_nor_with_the_graphs_of_other_features[V2]",
    "test_starts.py",
    "test_shapes.py::test_v2[hybrid]",
    "test_v2_graphs.py::test_more_graphs_change_nothing[eagle3-FULL_AND_PIECEWISE-True]",
    "test_v2_graphs.py::test_more_graphs_change_nothing[dflash-FULL_AND_PIECEWISE-False]",
    "test_v2_graphs.py::test_graphs_serve_256_concurrent_requests",
    "test_v2_graphs.py::test_mixed_graphs_serve_512_concurrent_requests",
    "test_v2_graphs.py::test_nor_do_full_graphs_of_mixed_batches[eagle3]",
    "test_v2_graphs.py::test_nor_do_full_graphs_of_mixed_batches_with_adapters",
    "test_images.py",
    "test_v2_graphs.py::test_nor_with_dspark[False]",
    "test_v2_graphs.py::test_nor_with_dspark[True]",
    "test_v2_graphs.py::test_nor_without_a_drafter",
    "test_v2_graphs.py::test_nor_with_drafters_that_vllm_has_no_graph_for[draft_model-0.31.0]",
    "test_v2_graphs.py::test_nor_with_a_schedule_of_numbers_of_drafts[eagle3]",
    "test_shapes.py::test_v2[MLA]",
    "test_shapes.py::test_v1[hybrid]",
    "test_v1_graphs.py::test_more_graphs_change_nothing[eagle3-FULL_AND_PIECEWISE-True]",
    "test_v1_graphs.py::test_graphs_serve_256_concurrent_requests",
    "test_v1_graphs.py::test_nor_do_full_graphs_of_mixed_batches[eagle3]",
    "test_mixed_graphs.py",
    "test_sampled_tokens.py",
    "test_draft_rows.py",
    "test_paged_attention.py",
    "linear/test_kernels.py",
    "ops",
)
#: Cores that a test keeps busy: mostly it starts two engines at a time. On 16 cores and with cold caches, none of eight
#: tests ended within 6 minutes; three took 100 s.
CORES_PER_TEST: Final = 4
#: Characters of a failure that are printed at once. An engine's log ends there.
_SHOWN: Final = 3000


class Results:
    """Outcome and seconds of each test, by its name, in a file if one is given."""

    def __init__(self, file: Path | None) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._file, self._started = file, time.monotonic()
        self._facts: dict[str, Any] = {}
        if file is not None:
            host = detect_host(device="cuda")
            facts = {"gpu": host.name, "driver": host.driver, "vllm": host.vllm, "torch": host.torch}
            self._facts = {**provenance(), **facts}

    @property
    def seconds(self) -> int:
        """Seconds since the start."""
        return round(time.monotonic() - self._started)

    def write(self) -> None:
        """Write the file, also while tests run."""
        if self._file is not None:
            record = {**self._facts, "seconds": self.seconds, "tests": self.tests}
            self._file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "unfinished", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 1)
        if report.when == "call" or report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.failed:
            print(f"\n{report.nodeid} after {self.seconds} s:\n{report.longreprtext[-_SHOWN:]}", flush=True)
        if report.when == "teardown":
            self.write()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description="Run what matters most on one GPU, newest runner first."
    )
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="write results, versions and device here")
    parser.add_argument("tests", metavar="TEST", nargs="*", help="as pytest names them, below tests/gpu")
    given = parser.parse_args(arguments)
    results = Results(given.file)
    workers = max(1, min(8, len(os.sched_getaffinity(0)) // CORES_PER_TEST))
    options = ["-q", "-n", str(workers), "--dist", "loadgroup", "--durations", "15", "-p", "no:benchmark"]
    status = pytest.main([*options, *(str(HERE / test) for test in given.tests or TESTS)], plugins=[results])
    results.write()
    print(f"{len(results.tests)} tests in {results.seconds} s, {workers} at a time")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
