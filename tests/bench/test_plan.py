from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from vllm_hwplugin.bench import find_checkpoints
from vllm_hwplugin.bench._plan import Case, NotOnThisHost, cases, check, job_for, synthetic_length


def test_the_two_sides_differ_in_the_master_gate_and_the_patched_environment_alone(settings, gpu_host, tmp_path):
    stock, patched = (
        job_for(Case("tiny", "eagle3", 3), side, settings, gpu_host, find_checkpoints(None), tmp_path)
        for side in ("stock", "patched")
    )
    assert stock.options == patched.options
    assert stock.workloads == patched.workloads
    differing = {k for k in patched.environment if patched.environment[k] != stock.environment.get(k)}
    assert differing == {"VLLM_HWPLUGIN", "ONE"}
    assert stock.environment["VLLM_HWPLUGIN"] == "0"
    assert stock.environment["BOTH"] == "1"
    assert stock.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_tiny_runs_the_same_prompts_at_every_batch_size(settings, gpu_host, tmp_path):
    job = job_for(Case("tiny", "dflash", 7), "stock", settings, gpu_host, find_checkpoints(None), tmp_path)
    one, eight = job.workloads
    assert (one.batch, eight.batch) == (1, 8)
    assert len(one.prompts) == 4
    assert len(eight.prompts) == 8
    assert eight.prompts[:4] == one.prompts
    speculation = job.options["speculative_config"]
    assert speculation["num_speculative_tokens"] == 7
    assert "rejection_sample_method" not in speculation


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_dummy_shapes_have_configs_and_synthetic_acceptance(settings, gpu_host, tmp_path, method):
    job = job_for(Case("8b", method, 5), "patched", settings, gpu_host, None, tmp_path)
    assert job.options["load_format"] == "dummy"
    assert job.options["compilation_config"] == {"cudagraph_mode": "FULL"}
    speculation = job.options["speculative_config"]
    assert speculation["rejection_sample_method"] == "synthetic"
    assert speculation["synthetic_acceptance_length"] == 3.5
    folders = job.options["model"], speculation["model"]
    target, drafter = (json.loads((Path(folder) / "config.json").read_text()) for folder in folders)
    assert (target["num_hidden_layers"], target["hidden_size"], target["tie_word_embeddings"]) == (36, 4096, False)
    assert drafter["hidden_size"] == 4096
    assert drafter["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33]
    if method == "eagle3":
        assert (drafter["num_hidden_layers"], drafter["draft_vocab_size"]) == (1, 32000)
    else:
        assert (drafter["num_hidden_layers"], drafter["block_size"]) == (5, 6)
        assert drafter["dflash_config"]["target_layer_ids"] == [1, 17, 32]
    assert [len(w.prompts) for w in job.workloads] == [1, 8]


def test_a_cpu_is_eager_exact_and_not_profiled(settings, cpu_host, tmp_path):
    job = job_for(Case("tiny", "eagle3", 3), "stock", settings, cpu_host, find_checkpoints(None), tmp_path)
    assert job.options["dtype"] == "float32"
    assert job.options["enforce_eager"] is True
    assert "compilation_config" not in job.options
    assert job.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert [w.profile_tokens for w in job.workloads] == [0, 0]


def test_a_chosen_acceptance_length_wins_but_never_for_tiny(settings):
    chosen = dataclasses.replace(settings, acceptance_length=2.25)
    assert synthetic_length(Case("0.6b", "eagle3", 3), settings) == 2.5
    assert synthetic_length(Case("0.6b", "eagle3", 3), chosen) == 2.25
    assert synthetic_length(Case("tiny", "eagle3", 3), chosen) is None


def test_dummy_shapes_are_refused_on_a_cpu(settings, cpu_host, gpu_host):
    planned = cases(["tiny", "8b", "0.6b"], ["eagle3"], [2, 3])
    assert len(planned) == 6
    check(planned, gpu_host)
    check(planned[:2], cpu_host)
    with pytest.raises(NotOnThisHost, match=r"--shape 0.6b 8b needs a GPU.*use --shape tiny"):
        check(planned, cpu_host)
