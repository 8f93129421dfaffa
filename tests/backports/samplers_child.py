# SPDX-License-Identifier: Apache-2.0
"""What released rejection samplers sample: `python -m tests.backports.samplers_child TEXTS cpu` prints it; or `cuda`.

A process of its own: on a CPU TRITON_INTERPRET has to be set before Triton is imported. The interpreter finds a maximum
by NumPy, for which a NaN is the largest. On a device two elements are compared at a time, and a NaN is neither larger
nor smaller; so short vectors are reduced in that way here.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import ReduceOps

from tests.interpreter import save_time
from tests.released import Modules

# What the memory behind a buffer holds.
FOREIGN = 1 << 24
_by_numpy = ReduceOps.apply_impl


def _reduce(self: Any, values: Any) -> Any:
    if len(values) == 1 or values[0].handle.data.size > 32:
        return _by_numpy(self, values)
    found, *rest = zip(*(value.handle.data for value in values), strict=True)
    for other in rest:
        # Triton's `_argmax_combine`.
        if not (found[0] > other[0] or (found[0] == other[0] and found[1] < other[1])):
            found = other
    return tuple(self.to_tensor(one, value.dtype) for one, value in zip(found, values, strict=True))


def modules_of(texts: Mapping[str, str]) -> Modules:
    """The modules of one side of one version, by their texts. What else they import of vLLM is not reached."""
    given = {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True},
        "vllm.logger": {"init_logger": lambda name: None},
    }
    names = {f"{name.replace('.', '/')}.py": name for name in texts}
    return Modules(lambda path: texts[names[path]] if path in names else None, texts, given=given, installed=False)


def recovered(modules: Modules, probs: Sequence[float]) -> int:
    """The token that the V1 runner's kernel puts in place of draft 0, when blocks of 8 hold the vocabulary."""
    module = modules("vllm.v1.sample.rejection_sampler")
    kernel = module.sample_recovered_tokens_kernel
    found = torch.full((1,), -1, dtype=torch.int32)
    more = {"USE_FP64_GUMBEL": False} if "USE_FP64_GUMBEL" in kernel.arg_names else {}
    drafts = torch.ones(1, dtype=torch.int32)
    kernel[(1, 1)](
        found, drafts, 0 * drafts, None, torch.tensor([probs]), torch.ones(1, len(probs)), len(probs),
        BLOCK_SIZE=8, NO_DRAFT_PROBS=True, **more,
    )  # fmt: skip
    return int(found)


def in_vocabulary(modules: Modules, sampler: str, bad_rows: Sequence[int], logit: float) -> bool:
    """Whether Model Runner V2 samples tokens of the vocabulary for one greedy request.

    Args:
        bad_rows: of the row that verifies the draft, which its logits accept, and the row that follows.
        logit: all there is in them.
    """
    module = modules(sampler)
    sample = getattr(module, "rejection_sample", None) or module.probabilistic_rejection_sample
    # Three blocks of 8192, which are padded to four, or 18 of 1024, padded to 32.
    vocabulary = 18 * 1024
    logits = torch.zeros(2, vocabulary)
    logits[:, 5] = 1
    logits[bad_rows] = logit
    tokens, count = sample(
        target_logits=logits,
        draft_logits=torch.zeros(1, 1, vocabulary),
        draft_sampled=torch.tensor([0, 5]),
        cu_num_logits=torch.tensor([0, 2], dtype=torch.int32),
        pos=torch.tensor([7, 8]),
        idx_mapping=torch.tensor([0], dtype=torch.int32),
        expanded_idx_mapping=torch.tensor([0, 0], dtype=torch.int32),
        expanded_local_pos=torch.tensor([0, 1], dtype=torch.int32),
        temperature=torch.zeros(1),
        seed=torch.tensor([3]),
        num_speculative_steps=1,
    )
    return all(token < vocabulary for token in tokens[0, : int(count)].tolist())


def _new_empty(self: torch.Tensor, *shape: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """`Tensor.new_empty`, with memory of others behind it."""
    sizes = shape if isinstance(shape[0], int) else tuple(shape[0])
    count = math.prod(sizes)
    return torch.full((count + 16,), FOREIGN, dtype=dtype or self.dtype)[:count].view(sizes)


def main(path: Path, device: str) -> None:
    torch.set_default_device(device)
    if device == "cpu":
        save_time()
        ReduceOps.apply_impl = _reduce
        # The interpreter has none of its functions.
        libdevice.log1p = lambda value: tl.log(1 + value)
    torch.Tensor.new_empty = _new_empty  # type: ignore[method-assign, assignment]
    answers: dict[str, Any] = {}
    nan = float("nan")
    for side, texts in json.loads(path.read_text()).items():
        modules = modules_of(texts)
        answers[side] = answer = {}
        if "vllm.v1.sample.rejection_sampler" in texts:
            answer["nan"] = [recovered(modules, [nan] * size) < size for size in (5, 13)]
            good = ([0.1, 0.2, 0.5, 0.2], [0.3, 0.1, 0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.7], [0.0] * 3)
            answer["good"] = [recovered(modules, probs) for probs in good]
        for sampler in (name for name in texts if name.endswith("rejection_sampler_utils")):
            for logit in (nan, 0.0):
                answer[f"logits {logit}"] = [in_vocabulary(modules, sampler, rows, logit) for rows in ([0, 1], [1])]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
