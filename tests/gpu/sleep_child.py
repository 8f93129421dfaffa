# SPDX-License-Identifier: Apache-2.0
"""One engine that answers, sleeps on each level, wakes up and answers again: `python sleep_child.py JOB ANSWER`.

Level 2 discards the weights. vLLM reloads the target's when asked; the drafter's are put back here, as a trainer would.
"""

import json
import sys
from pathlib import Path

from child import first_pass_modes

from vllm_hwplugin_lab.bench._inside import counters, model_runner


def main(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    from vllm_hwplugin.base import run_records

    llm = LLM(**job["options"])
    runner = model_runner(llm)
    graphs = getattr(runner.drafter, "draft_graphs", None)
    modes = first_pass_modes(graphs) if graphs is not None else []
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for tokens in job["tokens"]
    ]

    def answer() -> dict:
        before = counters(llm)
        modes.clear()
        outputs = llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
        after = counters(llm)
        drafts = after["drafts"] - before["drafts"]
        pairs = zip(after["accepted"], before["accepted"] or [0] * len(after["accepted"]), strict=True)
        return {
            "texts": [list(output.outputs[0].token_ids) for output in outputs],
            "accepted": [(now - then) / drafts for now, then in pairs],
            "first_passes": list(modes),
        }

    answers = {"awake": answer()}
    llm.sleep(level=1)
    llm.wake_up()
    answers["level 1"] = answer()
    weights = draft_weights(runner.drafter.model)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    put_back(runner.drafter.model, weights)
    llm.wake_up(tags=["kv_cache"])
    answers["level 2"] = answer()
    return {**answers, "decisions": dict(run_records.current().decisions) if graphs is not None else {}}


def draft_weights(model) -> dict:
    """Parameters and buffers of the draft model, on the host."""
    return {name: value.detach().cpu().clone() for name, value in tensors_of(model).items()}


def put_back(model, weights: dict) -> None:
    for name, value in tensors_of(model).items():
        value.data.copy_(weights[name])
    # DFlash makes one tensor of its layers' weights, and makes it anew here, at another address.
    fuse = getattr(getattr(model, "model", None), "_build_fused_kv_buffers", None)
    if fuse is not None:
        fuse()


def tensors_of(model) -> dict:
    return dict(model.named_parameters()) | dict(model.named_buffers())


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
