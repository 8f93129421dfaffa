# SPDX-License-Identifier: Apache-2.0
"""In plain torch, vLLM's kernels that the interpreter cannot run, or that would take most of an engine's time there."""

from itertools import pairwise

import torch

from tests.musa_sim import delta_rule


def _topk_topp(arguments):
    """vLLM's kernel takes ``.to`` of a loop's index, an int in the interpreter: its torch counterpart instead."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = arguments["LOGITS"]
    k = arguments["K"] if arguments["TOPK_ENABLED"] else None
    p = arguments["P"] if arguments["TOPP_ENABLED"] else None
    logits.copy_(apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True))


def _write_keys(arguments):
    """vLLM's kernel has a program for each token and layer."""
    for given, cache in (("key_ptr", "key_cache_ptr"), ("value_ptr", "value_cache_ptr")):
        slots, values, blocks = arguments["slot_mapping_ptr"].long(), arguments[given], arguments[cache]
        there = slots >= 0
        size = arguments["block_size"]
        blocks[slots[there] // size, slots[there] % size] = values[: len(slots)][there].to(blocks.dtype)


def _multiply_by_experts(arguments):
    """vLLM's kernel has a program for 32 or 64 columns of the product of each block of tokens."""
    inputs, weights, products = (arguments[name] for name in ("a_ptr", "b_ptr", "c_ptr"))
    rows, size = products.view(-1, products.shape[-1]), arguments["BLOCK_SIZE_M"]
    count = min(arguments["EM"], int(arguments["num_tokens_post_padded_ptr"]))
    if arguments["naive_block_assignment"]:
        blocks = torch.full((-(-count // size), size), arguments["num_valid_tokens"])
        blocks[:, 0] = torch.arange(len(blocks))
    else:
        blocks = arguments["sorted_token_ids_ptr"][:count].long().view(-1, size)
    for expert, block in zip(arguments["expert_ids_ptr"].tolist(), blocks, strict=False):
        there = block < arguments["num_valid_tokens"]
        # A whole block each time: a row's sums are the same, whatever else is in the batch.
        product = inputs[(block * there) // arguments["top_k"]].float() @ weights[expert].float().t()
        if expert < 0:
            # An expert of another GPU.
            product.zero_()
        elif arguments["MUL_ROUTED_WEIGHT"]:
            product *= arguments["topk_weights_ptr"].view(-1)[block * there, None]
        rows[block[there]] = product[there].to(rows.dtype)


def _are_plain_weights(arguments):
    return not any(arguments[name] for name in ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "HAS_BIAS"))


def _update_delta_rule(arguments):
    """vLLM's kernel has a program for each request and head."""
    heads, groups = arguments["H"], arguments["HV"] // arguments["H"]
    queries, keys = (arguments[name].view(-1, heads, arguments["K"]).float() for name in "qk")
    if arguments["USE_QK_L2NORM_IN_KERNEL"]:
        queries, keys = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (queries, keys))
    queries, keys = (one.repeat_interleave(groups, 1) for one in (queries * arguments["scale"], keys))
    values, out = (arguments[name].view(-1, arguments["HV"], arguments["V"]) for name in "vo")
    rates = arguments["a"].view(-1, arguments["HV"]).float() + arguments["dt_bias"].float()
    rates = torch.nn.functional.softplus(rates, arguments["beta"], arguments["threshold"])
    gates = -arguments["A_log"].float().exp() * rates
    betas = arguments["b"].view(-1, arguments["HV"]).float().sigmoid()
    accepted = arguments["num_accepted_tokens"]
    for number, (start, end) in enumerate(pairwise(arguments["cu_seqlens"].tolist())):
        places = arguments["ssm_state_indices"][number].view(-1).tolist()
        first = places[0 if accepted is None else int(accepted[number]) - 1]
        if start == end or first <= 0:
            continue
        state = arguments["h0"][first].float()
        for place, token in zip(places, range(start, end), strict=False):
            of_token = (one[token] for one in (queries, keys, values.float(), gates, betas))
            state, out[token] = delta_rule.next_state(state, *of_token)
            if place > 0:
                arguments["ht"][place] = state


#: By name of a kernel: what stands for it, and for which of its arguments.
INSTEAD = {
    "_topk_topp_kernel": (_topk_topp, lambda _: True),
    "reshape_and_cache_kernel_flash": (
        _write_keys,
        lambda taken: not (taken["FP8_KV_CACHE"] or taken["USE_HEAD_MAJOR_LAYOUT"]),
    ),
    "fused_moe_kernel": (_multiply_by_experts, _are_plain_weights),
    "fused_sigmoid_gating_delta_rule_update_kernel": (
        _update_delta_rule,
        lambda taken: taken["IS_VARLEN"] and taken["IS_CONTINUOUS_BATCHING"] and taken["INPLACE_FINAL_STATE"],
    ),
}
