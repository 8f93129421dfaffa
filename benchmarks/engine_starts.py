# SPDX-License-Identifier: Apache-2.0
"""Measure what the plugin adds to the start of an engine: `python -m benchmarks.engine_starts --json FILE`.

Each side of a case starts as for users: in fresh processes, the engine core in its own, with vLLM's own
`gpu_memory_utilization`, `max_num_seqs` and capture sizes. Compared are the seconds until the engine is ready, and the
blocks of its KV cache. Shapes are from `vllm-hwplugin bench`, with dummy weights.

Each side has its own caches of compiled code. A first start of all sides at the same time, with a small KV cache each,
fills them, so a first start's seconds include the load of the other starts. Further such starts, by `--fills`, are not
measured: they fill what vLLM compiles only after it finds a compiled graph. Then each side starts with the device to
itself, in turn, `--rounds` times. The first round may still compile kernels for sizes that follow from vLLM's own
settings, so one round says little.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.bench import Case, Job, Outcome
from vllm_hwplugin_lab.bench.plan import check, shapes_folder
from vllm_hwplugin_lab.bench.turns import turn

FORMAT: Final = "starts 1"
#: Settings of `bench` for engines that share a device; here vLLM's own values count.
_SET_BY_BENCH: Final = (
    "max_num_seqs",
    "max_model_len",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "compilation_config",
)
_CASES: Final = ("eagle3:3", "dflash:15")
#: Of each engine while all start together.
_SMALL_CACHE: Final = 1 << 30
#: Of the device's memory: a start checks this share first, even if its cache has a fixed size.
_SMALL_SHARE: Final = 0.1
_TIMEOUT: Final = 500.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--case", action="append", metavar="METHOD:K", help="default: eagle3:3 and dflash:15")
    parser.add_argument("--side", action="append", help=f"default: {', '.join(bench.ALL_SIDES)}")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each side, the only one on the device")
    parser.add_argument("--fills", type=int, default=2, help="starts of all sides at the same time before that")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="as `bench serve`: first starts next to other runs'")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args(arguments)
    host = bench.detect_host()
    sides = tuple(asked.side or bench.ALL_SIDES)
    settings = bench.Settings(
        batches=(1,),
        rounds=0,
        cudagraph_mode="",
        tokens=0,
        tiny_prompts=0,
        tiny_tokens=0,
        acceptance_length=None,
        profile_tokens=0,
        vllm_environment={},
        patched_environment={},
        sides=sides,
    )
    cases = [
        Case(asked.shape, method, int(k)) for method, _, k in (case.partition(":") for case in asked.case or _CASES)
    ]
    check(cases, host, sides)
    results: dict[str, Any] = {
        "format": FORMAT,
        **bench.provenance(),
        "host": dataclasses.asdict(host),
        "settings": {"shape": asked.shape, "rounds": asked.rounds, "fills": asked.fills, "sides": sides},
        "cases": [],
    }
    with tempfile.TemporaryDirectory(prefix="engine-starts-") as folder:
        jobs = {
            (case, side): _as_users_start(
                bench.job_for(case, side, settings, host, None, shapes_folder(), own_process=True),
                Path(folder) / f"{case.method}-{case.k}-{side}",
            )
            for case in cases
            for side in sides
        }
        with turn(asked.lock, bench.TimeLimit(), alone=False):
            first = _together(jobs)
            for _ in range(asked.fills - 1):
                _together(jobs)
        for key, outcome in first.items():
            print(f"{jobs[key].label}, first: {_facts(outcome)}", flush=True)
        alone: dict[tuple[Case, str], list[Outcome]] = {key: [] for key in jobs}
        with turn(asked.lock, bench.TimeLimit(), alone=True):
            for _ in range(asked.rounds):
                for key, job in jobs.items():
                    alone[key].append(bench.launch(job, timeout=_TIMEOUT))
                    results["cases"] = [
                        _case(case, {side: (first[case, side], alone[case, side]) for side in sides}) for case in cases
                    ]
                    asked.json.write_text(bench.results_text(results))
                    print(f"{job.label}: {_facts(alone[key][-1])}", flush=True)
    return 1 if any(outcome.error for outcomes in alone.values() for outcome in outcomes) else 0


def _as_users_start(job: Job, caches: Path) -> Job:
    """Return the engine's job with vLLM's own settings and separate caches."""
    own = {
        "VLLM_CACHE_ROOT": caches / "vllm",
        "TRITON_HOME": caches,
        "TORCHINDUCTOR_CACHE_DIR": caches / "inductor",
    }
    return dataclasses.replace(
        job,
        options={name: value for name, value in job.options.items() if name not in _SET_BY_BENCH},
        environment={**job.environment, **{name: str(path) for name, path in own.items()}},
        workloads=(),
    )


def _together(jobs: Mapping[tuple[Case, str], Job]) -> dict[tuple[Case, str], Outcome]:
    small = {
        key: dataclasses.replace(
            job,
            options={
                **job.options,
                "kv_cache_memory_bytes": _SMALL_CACHE,
                "gpu_memory_utilization": _SMALL_SHARE,
                "max_model_len": 4096,
            },
        )
        for key, job in jobs.items()
    }
    with concurrent.futures.ThreadPoolExecutor(len(small)) as pool:
        started = {key: pool.submit(bench.launch, job, timeout=_TIMEOUT) for key, job in small.items()}
        return {key: outcome.result() for key, outcome in started.items()}


def _case(case: Case, sides: Mapping[str, tuple[Outcome, Sequence[Outcome]]]) -> dict[str, Any]:
    return {
        **dataclasses.asdict(case),
        "sides": {
            side: {"first_together": _facts(first), "alone": [_facts(outcome) for outcome in alone]}
            for side, (first, alone) in sides.items()
        },
    }


def _facts(outcome: Outcome) -> dict[str, Any]:
    ready = outcome.ready()
    decisions = {
        key: text
        for record in outcome.records
        for key, text in record["decisions"].items()
        if key.startswith(("v1-", "v2-", "capture"))
    }
    return {
        "error": outcome.error,
        "log_tail": outcome.log_tail,
        "seconds": ready.get("seconds"),
        "host_us": ready.get("host_us"),
        "num_gpu_blocks": ready.get("num_gpu_blocks"),
        "said": decisions,
        "took": outcome.took,
    }


if __name__ == "__main__":
    sys.exit(main())
