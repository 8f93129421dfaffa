# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on a CPU, in Triton's interpreter: `python -m tests.attention.paged.interpreted_child SEED`.

It prints a line for each case. A process of its own: the variable TRITON_INTERPRET has to be set before Triton is
imported.
"""

import dataclasses
import json
import sys

import torch

from tests.interpreter import save_time
from vllm_hwplugin_lab.probe.inputs import make_inputs

from . import batches


def main(seed: int) -> None:
    save_time()
    torch.manual_seed(seed)
    on = batches.On.device(torch.device("cpu"))
    for number, (case, layout) in enumerate(batches.cases((40,), seed, "float16", 90)):
        # The interpreter takes its time for every head: two of the KV cache show what more would.
        kv_heads = min(case.num_kv_heads, 2 if number in (2, 3) else 1)
        group = case.num_heads // case.num_kv_heads
        group = min(group, 3) if any(request.query > 32 for request in case.requests) else group
        case = dataclasses.replace(case, num_heads=group * kv_heads, num_kv_heads=kv_heads)
        found = batches.measured(case, on, layout, fill="nan" if number % 2 else "poison")
        print(json.dumps({"case": f"{case}; {layout}", "ratio": found.ratio}), flush=True)
    # The same rows, alone and in a batch.
    case = dataclasses.replace(batches.cases((64,), seed, "bfloat16", 90)[0][0], padding=0)
    inputs = make_inputs(case, "cpu")
    together = batches.attend(case, inputs, on, batch_invariant=True)
    for rows, found in batches.alone(case, inputs, on):
        ratio = 0.0 if torch.equal(found, together[rows]) else 99.0
        print(json.dumps({"case": f"alone, {rows}", "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
