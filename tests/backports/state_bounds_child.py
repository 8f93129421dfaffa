# SPDX-License-Identifier: Apache-2.0
"""Which states released kernels read: `python -m tests.backports.state_bounds_child TEXTS cpu` prints it.

A process of its own: TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tests.interpreter import save_time
from tests.released import Modules

REQUESTS, TOKENS, SIZE = 3, 4, 4
COUNTS = (1, TOKENS, 0, TOKENS + 1)
#: By kernel, its grid. One head, one block of values.
KERNELS = {
    "fused_recurrent_gated_delta_rule_fwd_kernel": (1, 1, REQUESTS),
    "fused_sigmoid_gating_delta_rule_update_kernel": (1, 1, REQUESTS),
    "fused_recurrent_kda_fwd_kernel": (REQUESTS,),
    "_causal_conv1d_update_kernel": (REQUESTS, 1),
    "_selective_scan_update_kernel": (1, REQUESTS, 1),
}


def kernels_of(texts: Mapping[str, str]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return the kernels of one side of one release with their grids, by module and name."""
    false = dict.fromkeys(("is_cpu", "is_cuda", "is_rocm", "is_xpu"), lambda: False)
    given: dict[str, Mapping[str, Any]] = {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.platforms": {"current_platform": SimpleNamespace(**false)},
        "vllm.model_executor.layers.mamba.ops.triton_helpers": {"fast_exp": _exp, "launch_autotuned": None},
        **{f"vllm.{package}.ops.op": {"exp": _exp, "log": _log} for package in FLA},
    }
    names = {f"{name.replace('.', '/')}.py": name for name in texts}
    modules = Modules(lambda path: texts[names[path]] if path in names else None, texts, given=given, installed=False)
    found = {}
    for name in texts:
        for kernel in KERNELS:
            if hasattr(modules(name), kernel):
                # In some releases the requests are the grid's first dimension.
                turned = "i_nh, i_v, i_k = tl.program_id(0)" in texts[name]
                grid = KERNELS[kernel][::-1] if turned else KERNELS[kernel]
                found[f"{name} {kernel}"] = getattr(modules(name), kernel), grid
    return found


FLA = ("model_executor.layers.fla", "third_party.flash_linear_attention")


def _exp(value: Any) -> Any:
    # The interpreter replaces what is found in `tl` while a kernel runs.
    return tl.exp(value)


def _log(value: Any) -> Any:
    return tl.log(value)


def foreign_states(kernel: Any, grid: tuple[int, ...], name: str, count: int) -> bool:
    """Whether the second of three requests goes on from another request's state, with a count of accepted tokens.

    Each request has a state for each token, and nothing that is read changes a state.
    """
    # State 0 belongs to nobody; each state of a request has the request's number, so 1, 2 and 3.
    states = torch.arange(1, 1 + REQUESTS * TOKENS, dtype=torch.int32).view(REQUESTS, TOKENS)
    owner = torch.tensor([0.0, *(1.0 + i for i in range(REQUESTS) for _ in range(TOKENS))])
    state = owner.view(-1, 1, 1, 1).repeat(1, 1, SIZE, SIZE)
    rows = REQUESTS * TOKENS
    zeros = torch.zeros(rows, 1, SIZE)
    out = torch.full((rows, 1, SIZE), math.nan)
    given: dict[str, Any] = {
        # The gated delta rules'.
        "q": zeros, "k": zeros, "v": zeros, "g": zeros, "a": zeros, "b": zeros, "raw_g": zeros,
        "o": out, "out": out, "h0": state, "ht": state, "state": state,
        "A_log": torch.full((1,), -1e9), "a_log": None, "g_bias": None, "lower_bound": None,
        "dt_bias": None if "kda_fwd" in name else torch.zeros(SIZE), "threshold": 20.0, "scale": 1.0,
        "beta": 1.0 if "sigmoid" in name else zeros, "N": REQUESTS, "T": rows, "B": 1, "H": 1, "HV": 1,
        "K": SIZE, "V": SIZE, "BK": SIZE, "BV": SIZE, "ssm_state_indices": states, "state_indices": states,
        "num_accepted_tokens": torch.tensor([2, count, 2], dtype=torch.int32),
        "cu_seqlens": torch.arange(0, rows + 1, TOKENS, dtype=torch.int32),
        "stride_indices_seq": TOKENS, "stride_indices_tok": 1, "num_stages": 1,
        **{f"stride_{name}_token": SIZE * SIZE for name in ("init_state", "final_state", "state")},
        **dict.fromkeys(("stride_q_t", "stride_k_t", "stride_v_t", "stride_qkv_token", "stride_g_token"), SIZE),
        **dict.fromkeys(("stride_out_token", "stride_beta_token", "stride_beta_t"), SIZE),
        # Mamba's.
        "state_ptr": state, "x_ptr": zeros, "dt_ptr": zeros, "B_ptr": zeros, "C_ptr": zeros, "out_ptr": out,
        "A_ptr": torch.zeros(1), "state_batch_indices_ptr": states, "dst_state_batch_indices_ptr": states,
        "cu_seqlens_ptr": torch.arange(0, rows + 1, TOKENS, dtype=torch.int32), "null_block_id": 0,
        "nheads": 1, "dim": SIZE, "dstate": SIZE, "nheads_ngroups_ratio": 1, "stride_state_batch": SIZE * SIZE,
        "stride_state_dim": SIZE, "stride_state_dstate": 1, "stride_state_indices_batch": TOKENS,
        "stride_state_indices_T": 1, "stride_dst_state_indices_batch": TOKENS, "stride_dst_state_indices_T": 1,
        **{f"stride_{x}_batch": SIZE for x in ("x", "dt", "B", "C", "out")}, "stride_B_dstate": 1, "stride_C_dstate": 1,
        "stride_x_dim": 1, "stride_out_dim": 1, "BLOCK_SIZE_M": SIZE, "BLOCK_SIZE_DSTATE": SIZE, "TIE_HDIM": False,
    }  # fmt: skip
    if "conv1d" in name:
        return _foreign_history(kernel, grid, count)
    given["num_accepted_tokens_ptr"] = given["num_accepted_tokens"]
    _launch(kernel, grid, given)
    left = state[1 + TOKENS : 1 + 2 * TOKENS]
    return not bool((left == 2.0).all())


def _foreign_history(kernel: Any, grid: tuple[int, ...], count: int) -> bool:
    """The same of a convolution, which keeps the inputs of all tokens in one line per request."""
    width = 4
    length = width - 1 + TOKENS - 1
    lines = torch.arange(REQUESTS + 1, dtype=torch.float32)[:, None, None].repeat(1, 1, length)
    x = torch.tensor([[1.0 + i // TOKENS] for i in range(REQUESTS * TOKENS)])
    out = torch.full_like(x, math.nan)
    given = {
        "x_ptr": x, "o_ptr": out, "w_ptr": torch.full((1, width), 0.25), "bias_ptr": None, "conv_state_ptr": lines,
        "conv_state_indices_ptr": torch.arange(1, 1 + REQUESTS, dtype=torch.int32),
        "num_accepted_tokens_ptr": torch.tensor([2, count, 2], dtype=torch.int32),
        "query_start_loc_ptr": torch.arange(0, 1 + REQUESTS * TOKENS, TOKENS, dtype=torch.int32),
        "batch": REQUESTS, "dim": 1, "seqlen": TOKENS, "state_len": length, "num_cache_lines": REQUESTS + 1,
        "stride_x_dim": 1, "stride_x_token": 1, "stride_w_dim": width, "stride_w_width": 1, "stride_o_dim": 1,
        "stride_o_token": 1, "stride_conv_state_seq": length, "stride_conv_state_dim": length,
        "stride_conv_state_tok": 1, "stride_state_indices": 1, "null_block_id": 0, "pad_slot_id": -1,
        "KERNEL_WIDTH": width, "NP2_STATELEN": 8, "BLOCK_N": 1, "IS_VARLEN": True, "IS_SPEC_DECODING": True,
        "HAS_NULL_BLOCK": True,
    }  # fmt: skip
    _launch(kernel, grid, given)
    own = slice(TOKENS, 2 * TOKENS)
    return not bool((out[own] == 2.0).all() and (lines[2] == 2.0).all())


def _launch(kernel: Any, grid: tuple[int, ...], given: Mapping[str, Any]) -> None:
    """What is not given is off: a pointer that is null, a stride of 0, a flag that is false."""
    names = kernel.arg_names
    true = {"USE_INITIAL_STATE", "INPLACE_FINAL_STATE", "IS_VARLEN", "IS_CONTINUOUS_BATCHING", "IS_SPEC_DECODING"}
    true |= {"HAS_STATE_BATCH_INDICES"}

    def value(name: str) -> Any:
        if name in given:
            return given[name]
        if name in true:
            return True
        return None if name.endswith("_ptr") else 0

    kernel[grid](**{name: value(name) for name in names})


def main(path: Path) -> None:
    save_time()
    answers: dict[str, Any] = {}
    for side, texts in json.loads(path.read_text()).items():
        answers[side] = {
            name: {count: foreign_states(*kernel, name.rpartition(" ")[2], count) for count in COUNTS}
            for name, kernel in kernels_of(texts).items()
        }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
