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
    modes = first_pass_modes(graphs) if graphs is not None else []
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
        "first_passes": modes,
        "builders": sorted({type(group.get_metadata_builder()).__name__ for group in runner.drafter.draft_attn_groups}),
    }


def first_pass_modes(graphs) -> list[str]:
    """The graph mode of every first pass from now on, in order."""
    modes: list[str] = []
    begin, determine = graphs.begin_first_pass, graphs.determine_batch_execution_and_padding
    first = False

    def beginning(num_tokens, metadata):
        nonlocal first
        first = True
        begin(num_tokens, metadata)

    def determining(num_tokens):
        nonlocal first
        mode, *padding = determine(num_tokens)
        if first:
            modes.append(mode.name)
        first = False
        return mode, *padding

    graphs.begin_first_pass, graphs.determine_batch_execution_and_padding = beginning, determining
    return modes


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
