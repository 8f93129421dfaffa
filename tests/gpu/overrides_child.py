# SPDX-License-Identifier: Apache-2.0
"""One engine on a GPU, its texts and which kernels served: `python overrides_child.py JOB.json ANSWER.json`."""

import json
import sys
from pathlib import Path


def main(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    from vllm_hwplugin.base import run_records
    from vllm_hwplugin.ops.operations import RECORD

    llm = LLM(**job["options"])
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
    decisions = run_records.current().decisions
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "decisions": {key.removeprefix(RECORD): text for key, text in decisions.items() if key.startswith(RECORD)},
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
