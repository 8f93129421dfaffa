"""One engine on a GPU, its drafts written down: `python child.py JOB.json ANSWER.json` (see test_drafter_graphs)."""

import json
import sys
from pathlib import Path

from drafts import listen, written

from vllm_hwplugin_lab.bench._inside import counters, model_runner, platform_class


def main(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    from vllm_hwplugin.base import run_records

    llm = LLM(**job["options"])
    runner = model_runner(llm)
    drafts: dict = {}
    listen(runner, drafts)
    graphs = getattr(runner.drafter, "draft_graphs", None)
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for tokens in job["tokens"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
    counts = counters(llm)
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": written(drafts),
        "accepted": [count / counts["drafts"] for count in counts["accepted"]],
        "decisions": dict(run_records.current().decisions) if graphs is not None else {},
        "platform": platform_class(),
        "sizes": runner.compilation_config.cudagraph_capture_sizes,
        "captured": 0 if graphs is None else graphs.num_captured,
        "builders": sorted({type(group.get_metadata_builder()).__name__ for group in runner.drafter.draft_attn_groups}),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
