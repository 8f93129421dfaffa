# SPDX-License-Identifier: Apache-2.0
"""An engine whose workers, and whose core, are processes of their own: what comes of a load, and what each worker is.

`python -m tests.musa_sim.two_gpus_child LOADS FOUND`
"""

import json
import os
import sys
from pathlib import Path


def watch(worker) -> None:
    """Runs in a worker: count from here on."""
    import torch

    from vllm_hwplugin_lab.bench._watch import watched

    worker.worker.sim_watch = watched(worker.worker.model_runner, torch.cuda.CUDAGraph)
    worker.worker.sim_counts = worker.worker.sim_watch.__enter__()


def report(worker) -> dict:
    """Runs in a worker: what it is made of, and what it has done since ``watch``."""
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_hwplugin_lab.bench._inside import runner_generation

    worker.worker.sim_watch.__exit__(None, None, None)
    return {
        "process": os.getpid(),
        "device": str(worker.worker.device),
        "runner": runner_generation(worker.worker.model_runner),
        "communicator": type(get_tp_group().device_communicator).__name__,
        **worker.worker.sim_counts.facts(),
    }


if __name__ == "__main__":
    from vllm import LLM

    from tests.musa_sim.load_child import sampling_params

    (job,) = json.loads(Path(sys.argv[1]).read_text()).values()
    llm = LLM(**job["options"])
    llm.collective_rpc(watch)
    prompts = [{"prompt_token_ids": request["prompt"]} for request in job["requests"]]
    params = [sampling_params(request["params"]) for request in job["requests"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "process": os.getpid(),
        "workers": llm.collective_rpc(report),
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
    llm.llm_engine.engine_core.shutdown()
