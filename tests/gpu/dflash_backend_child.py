# SPDX-License-Identifier: Apache-2.0
"""One engine on a GPU, and the attention backends of its layers: `python dflash_backend_child.py JOB ANSWER`."""

import json
import sys
from pathlib import Path

from vllm_hwplugin_lab.bench._inside import counters, model_runner


def main(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    from vllm_hwplugin.base import run_records

    llm = LLM(**job["options"])
    runner = model_runner(llm)
    # The V1 runner's proposer and Model Runner V2's speculator name the draft's layers.
    drafter = getattr(runner, "drafter", None)
    draft = drafter._draft_attn_layer_names if drafter is not None else runner.speculator.draft_attn_layer_names
    layers = runner.vllm_config.compilation_config.static_forward_context
    names = {name: layer.get_attn_backend().get_name() for name, layer in layers.items()}
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
    counts = counters(llm)
    return {
        "target": sorted({backend for name, backend in names.items() if name not in draft}),
        "draft": sorted({names[name] for name in draft}),
        "tokens_a_step": 1 + sum(counts["accepted"]) / counts["drafts"],
        "decisions": dict(run_records.current().decisions) if run_records.current() is not None else {},
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
