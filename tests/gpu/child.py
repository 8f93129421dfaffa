"""One engine on a GPU, its drafts written down: `python child.py JOB.json ANSWER.json` (see test_drafter_graphs)."""

import json
import sys
from pathlib import Path

from vllm_hwplugin.bench._inside import counters, model_runner, platform_class


def main(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    from vllm_hwplugin import record

    llm = LLM(**job["options"])
    runner = model_runner(llm)
    propose = runner.drafter.propose
    drafts: list[list[list[int]]] = []

    def listening(*args, **kwargs):
        result = propose(*args, **kwargs)
        drafts.append(result.tolist())
        return result

    runner.drafter.propose = listening
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for tokens in job["tokens"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
    counts = counters(llm)
    graphs = getattr(runner.drafter, "draft_graphs", None)
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": drafts,
        "accepted": [count / counts["drafts"] for count in counts["accepted"]],
        "decisions": dict(record.current().decisions) if graphs is not None else {},
        "platform": platform_class(),
        "sizes": runner.compilation_config.cudagraph_capture_sizes,
        "captured": 0 if graphs is None or graphs._graphs is None else len(graphs._graphs.concrete_cudagraph_entries),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
