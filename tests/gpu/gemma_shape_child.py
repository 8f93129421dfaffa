# SPDX-License-Identifier: Apache-2.0
"""One engine of gemma-4's shape, and all that it can be held to: `python gemma_shape_child.py JOB ANSWER`."""

import json
import sys
from pathlib import Path

import gemma_shape
from drafts import listen, written

from vllm_hwplugin_lab.bench._inside import (
    check_runner,
    counters,
    drafter_of,
    graph_modes,
    model_runner,
    platform_class,
    runner_generation,
)
from vllm_hwplugin_lab.bench._watch import watched

# The likeliest tokens that vLLM gives by default at most.
CHOICES = 20


def main(job: dict) -> dict:
    gemma_shape.register_weights()
    import torch
    from vllm import LLM, SamplingParams

    from vllm_hwplugin.base import run_records

    llm = LLM(**gemma_shape.model_options(Path(job["model"])), **job["options"])
    runner = model_runner(llm)
    check_runner(runner)
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=CHOICES)
        for tokens in job["tokens"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    drafts: dict = {}
    with watched(runner, torch.cuda.CUDAGraph if torch.cuda.is_available() else None) as counts:
        # V2's drafter is asked in other words.
        if drafter_of(runner) is not None and runner_generation(runner) == "V1":
            listen(runner, drafts)
        outputs = llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
    graphs = getattr(drafter_of(runner), "draft_graphs", None)
    return {
        "platform": platform_class(),
        "layers": layers(runner),
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "choices": [
            [sorted(((choice.logprob, token) for token, choice in at.items()), reverse=True) for at in one]
            for one in (output.outputs[0].logprobs for output in outputs)
        ],
        "drafts": written(drafts),
        "graph_modes": graph_modes(runner),
        "captured": 0 if graphs is None else graphs.num_captured,
        "accepted": counters(llm)["accepted"],
        "decisions": dict(run_records.current().decisions) if run_records.current() is not None else {},
        **counts.facts(),
    }


def layers(runner) -> list[dict]:
    """Head size, window, and what computes it, of every attention layer: the draft's count on from the target's."""
    found = []
    for name, layer in runner.vllm_config.compilation_config.static_forward_context.items():
        backend = layer.get_attn_backend()
        found.append(
            {
                "name": name,
                "head_size": layer.head_size,
                "kv_heads": layer.num_kv_heads,
                "window": layer.sliding_window,
                "backend": backend.get_name(),
                "class": f"{backend.__module__}.{backend.__qualname__}",
                "implementation": type(layer.impl).__name__,
            }
        )
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
