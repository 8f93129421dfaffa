# SPDX-License-Identifier: Apache-2.0
"""Engines one after the other, each in this process or in one of its own, with workers of its own.

`python -m tests.musa_sim.engine_child JOBS ANSWERS`
"""

import json
import os
import sys
import traceback
from pathlib import Path


def watch(worker) -> None:
    """Runs in a worker: count from here on."""
    import torch

    from vllm_hwplugin_lab.bench._watch import watched

    graphs = getattr(torch.cuda, "CUDAGraph", None) if worker.worker.device.type == "musa" else None
    worker.worker.sim_watch = watched(worker.worker.model_runner, graphs)
    worker.worker.sim_counts = worker.worker.sim_watch.__enter__()


def report(worker) -> dict:
    """Runs in a worker: what it is made of, and what it has done since ``watch``."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.platforms import current_platform

    from vllm_hwplugin import journal
    from vllm_hwplugin_lab.bench._inside import runner_generation

    runner, entry, group = worker.worker.model_runner, journal.current(), get_tp_group().device_communicator
    worker.worker.sim_watch.__exit__(None, None, None)
    return {
        "process": os.getpid(),
        "platform": type(current_platform).__name__,
        "device": str(worker.worker.device),
        "runner": runner_generation(runner),
        "attention": sorted({group.backend.__name__ for groups in runner.attn_groups for group in groups}),
        "communicator": type(group).__name__ if group is not None else None,
        "world": torch.distributed.get_world_size(),
        "used": sorted(name for name, use in entry.uses.items() if use["used"]) if entry is not None else [],
        **worker.worker.sim_counts.facts(),
    }


def one(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    from tests.musa_sim.load_child import leave_out_of_collections
    from vllm_hwplugin_lab.bench._inside import counters

    # vLLM looks when it makes an engine.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if job["own_process"] else "0"
    if not job["own_process"]:
        leave_out_of_collections()
    llm = LLM(**job["options"])
    try:
        llm.collective_rpc(watch)
        params = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return {
            "texts": [list(output.outputs[0].token_ids) for output in outputs],
            "process": os.getpid(),
            "workers": llm.collective_rpc(report),
            **counters(llm),
        }
    finally:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    answers = {}
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            answers[name] = one(job)
        except Exception:
            # The others are still to be heard; the engine core's own error is in the log.
            answers[name] = {"error": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(answers))
