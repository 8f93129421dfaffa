# SPDX-License-Identifier: Apache-2.0
"""What `SamplingStates` of a vLLM leave of logits, and by which kernels:
`python -m tests.backports.top_k_top_p_child TEXTS cpu` prints it; or `cuda`.

A process of its own: on a CPU TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

from tests.interpreter import save_time
from tests.released import Modules

#: Three blocks of 8192.
VOCABULARY = 20_000
#: Top-k and top-p of each row; all of the vocabulary and 1.0 leave a row as it is.
BATCHES = {
    "both": [(20, 0.9), (5, 0.5), (50, 0.95), (1, 0.1)],
    "some of both": [(20, 0.9), (VOCABULARY, 1.0), (50, 1.0), (7, 0.3)],
    "top-p alone beside top-k": [(20, 0.9), (VOCABULARY, 0.4), (VOCABULARY, 1.0), (3, 1.0)],
    "top-p alone": [(VOCABULARY, 0.9), (VOCABULARY, 0.2), (VOCABULARY, 1.0), (VOCABULARY, 0.7)],
    "top-k alone": [(20, 1.0), (VOCABULARY, 1.0), (1, 1.0), (100, 1.0)],
}


class OnCuda(torch.Tensor):
    """A tensor in the host's memory that says it is on a GPU: there alone vLLM has kernels that split rows."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def platform() -> SimpleNamespace:
    answers = {"is_cuda_alike": True, "is_cuda": True, "is_cpu": False, "is_rocm": False, "is_xpu": False}
    return SimpleNamespace(
        simple_compile_backend="eager", **{name: lambda answer=answer: answer for name, answer in answers.items()}
    )


def modules_of(texts: Mapping[str, str], device: str = "cuda") -> Modules:
    stand_ins = {
        "triton": triton,
        "tl": tl,
        "HAS_TRITON": True,
        "current_platform": platform(),
        "num_compute_units": lambda *_: 8,
    }
    if device == "cpu":
        # The interpreter counts a loop by integers of Python's.
        texts = {name: text.replace("row_id.to(tl.int64)", "row_id") for name, text in texts.items()}
    paths = {f"{name.replace('.', '/')}.py": text for name, text in texts.items()}
    return Modules(paths.get, texts, stand_ins=stand_ins)


def main(path: Path, device: str) -> None:
    launched: Counter[str] = Counter()
    if device == "cpu":
        save_time()
    kernel: Any = InterpretedFunction if device == "cpu" else JITFunction
    run = kernel.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        launched[self.__name__] += 1
        return run(self, *args, **options)

    kernel.run = counted
    sides = json.loads(path.read_text())
    print(json.dumps({side: answers(texts, device, launched) for side, texts in sides.items()}))


def answers(texts: Mapping[str, str], device: str, launched: Counter[str]) -> dict[str, Any]:
    states_of = modules_of(texts, device)("vllm.v1.worker.gpu.sample.states").SamplingStates
    logits = (3 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))).to(device)
    found = {}
    for name, rows in BATCHES.items():
        launched.clear()
        left = narrowed(states_of, logits, rows).cpu()
        found[name] = {
            "left": hashlib.sha256(left.numpy().tobytes()).hexdigest(),
            "kept": (left > -float("inf")).sum(dim=1).tolist(),
            "split": sum(count for kernel, count in launched.items() if kernel.startswith("_topp_sb")),
            "other": launched["_topk_topp_kernel"],
        }
    return found


def narrowed(states_of: Any, logits: torch.Tensor, rows: Sequence[tuple[int, float]]) -> torch.Tensor:
    """The logits of a batch in which each request has one row."""
    states = object.__new__(states_of)
    states.vocab_size = VOCABULARY
    for name, dtype, values in (
        ("top_k", torch.int32, [row[0] for row in rows]),
        ("top_p", torch.float32, [row[1] for row in rows]),
    ):
        host = torch.tensor(values, dtype=dtype)
        setattr(states, name, SimpleNamespace(np=host.numpy(), gpu=host.to(logits.device)))
    index: Any = np.arange(len(rows))
    given = logits.clone() if logits.is_cuda else logits.clone().as_subclass(OnCuda)
    left = states.apply_top_k_top_p(given, torch.from_numpy(index).to(logits.device), index)
    return left.as_subclass(torch.Tensor)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
