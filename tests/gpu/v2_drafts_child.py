# SPDX-License-Identifier: Apache-2.0
"""One engine on Model Runner V2, its drafts and graph launches written down: `python v2_drafts_child.py JOB ANSWER`.

The job's prompts are answered in waves, so that batches of 1, 3 and 8 requests are among them.
"""

import json
import os
import sys
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

from drafts import written

from vllm_hwplugin_lab.bench._inside import counters, model_runner


def main(job: dict) -> dict:
    import torch
    from vllm import LLM, SamplingParams

    from vllm_hwplugin.base import run_records

    llm = LLM(**job["options"])
    runner = model_runner(llm)
    drafts: dict = {}
    replays: Counter = Counter()
    launched = count_replays(torch.cuda.CUDAGraph)
    listen(runner.speculator, drafts, launched, replays)
    texts: list = []

    def answer() -> None:
        for start, end in pairwise([0, *accumulate(job["waves"])]):
            sampling = [
                SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                for tokens in job["tokens"][start:end]
            ]
            prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"][start:end]]
            outputs = llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
            texts.extend(list(output.outputs[0].token_ids) for output in outputs)

    answer()
    if job.get("sleep"):
        llm.sleep(level=1)
        llm.wake_up()
        answer()
    counts = counters(llm)
    entry = run_records.current()
    groups = [group for groups in runner.speculator.attn_groups for group in groups]
    return {
        "texts": texts,
        "drafts": written(drafts),
        "accepted": [count / counts["drafts"] for count in counts["accepted"]],
        "decisions": {} if entry is None else dict(entry.decisions),
        "uses": {} if entry is None else dict(entry.uses),
        "replays": by_requests(replays),
        "builders": sorted({type(group.get_metadata_builder(0)).__name__ for group in groups}),
    }


def count_replays(graph_class) -> list[int]:
    """One number, which every replay of a CUDA graph raises from now on."""
    count, replay = [0], graph_class.replay

    def counting(graph):
        count[0] += 1
        replay(graph)

    graph_class.replay = counting
    return count


def listen(speculator, drafts: dict, launched: list[int], replays: Counter) -> None:
    """Write down each draft, and how many graphs were launched to make those of a batch."""
    propose, width = speculator.propose, speculator.num_speculative_steps + 1

    def listening(*args, **kwargs):
        # Positional or not, by the version.
        batch = kwargs.get("input_batch", args[0] if args else None)
        rejected = kwargs.get("num_rejected", args[6] if len(args) > 6 else None)
        computed = (batch.seq_lens[: batch.num_reqs] - rejected[: batch.num_reqs]).tolist()
        before = launched[0]
        result = propose(*args, **kwargs)
        if (batch.num_scheduled_tokens == width).all():
            replays[batch.num_reqs, launched[0] - before] += 1
        for request, known, tokens in zip(batch.req_ids, computed, result.tolist(), strict=False):
            # vLLM numbers the requests, and from some version on adds a random part.
            drafts[int(request.split("-")[0]), known] = tokens
        return result

    speculator.propose = listening


def by_requests(replays: Counter) -> dict[str, dict[str, int]]:
    """By the number of requests in a batch of decodes: how often a number of graphs was launched for its drafts."""
    found: dict[str, dict[str, int]] = {}
    for (reqs, number), times in sorted(replays.items()):
        found.setdefault(str(reqs), {})[str(number)] = times
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
    sys.stdout.flush()
    # Model Runner V2 of vLLM 0.20 has no shutdown, and an engine that ends with its process fails for want of it.
    os._exit(0)
