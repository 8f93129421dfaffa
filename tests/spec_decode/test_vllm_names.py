"""What the bodies use of vLLM by name exists in every supported version; hunks are held by the patch engine, names not.

Read from the released sources, so that one machine can tell for all versions.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import vllm_hwplugin
from vllm_hwplugin.patching import SUPPORTED

from ..conftest import versions

BODIES = Path(vllm_hwplugin.__file__).parent / "spec_decode"
PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"
DFLASH = "vllm/v1/spec_decode/dflash.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
UTILS = "vllm/v1/spec_decode/utils.py"
METADATA = "vllm/v1/attention/backend.py"
GRAPHS = "vllm/compilation/cuda_graph.py"
KV_TRANSFER = "vllm/distributed/kv_transfer/kv_connector"

# Bodies that take any proposer; those of DFlash see a subclass with members of its own.
FOR_ANY = ("v1/draft_decision.py", "v1/draft_full_graph.py", "v1/draft_loop_graph.py", "v1/pass_graphs.py")
FOR_DFLASH = ("v1/dflash_full_graph.py", "v1/draft_phase_graphs.py")
FOR_RUNNERS = ("v1/draft_phase.py", "v1/draft_phase_graphs.py")

# Read with a default where the version may not have them.
OPTIONAL = {
    "_share_mtp_indices",
    "_enable_probabilistic_draft_probs",
    "constant_draft_positions",
    "use_heterogeneous_vocab",
    "draft_uses_xdrope_dim",
    "eplb_state",
}
# Given to the proposer by the hunks themselves.
OURS = {"draft_graphs", "draft_loop", "draft_context"}
# Called where a vLLM that has drafts drawn says that they are.
FOR_DRAWN_DRAFTS = {"_sample_draft_tokens", "_draft_probs", "_draft_prob_req_ids"}


Trees = Callable[[str], Any]


def tree_of(vllm_tree: Trees, version: str, path: str) -> ast.Module:
    return ast.parse(vllm_tree(version).read(path) or "")


def classes_of(vllm_tree: Trees, version: str, path: str) -> dict[str, set[str]]:
    """By each name that a file of vLLM defines, its methods, class attributes, and what a method assigns to `self`."""
    found = {}
    for node in tree_of(vllm_tree, version, path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            parts = list(ast.walk(node))
            names = {one.name for one in parts if isinstance(one, ast.FunctionDef)}
            names |= {one.attr for one in parts if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}
            names |= {
                one.target.id for one in parts if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            found[node.name] = names
    return found


def find(tree: ast.Module, name: str) -> Any:
    return next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)


def attributes_read(module: str, owner: str) -> Iterator[str]:
    """Names that `module` reads as `owner.NAME` or `self._owner.NAME`."""
    for node in ast.walk(ast.parse((BODIES / module).read_text())):
        if isinstance(node, ast.Attribute):
            value = node.value
            if isinstance(value, ast.Name) and value.id == owner:
                yield node.attr
            if isinstance(value, ast.Attribute) and value.attr == f"_{owner}":
                yield node.attr


def tuples_of(module: str, *names: str) -> set[str]:
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse((BODIES / module).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    assert found.keys() == set(names)
    return {name for values in found.values() for name in values}


def tuples_in(module: str, function: str) -> set[str]:
    """The strings in the tuples that a function of ours names, for attributes that it reads by name."""
    body = find(ast.parse((BODIES / module).read_text()), function)
    return {
        one.value
        for node in ast.walk(body)
        if isinstance(node, ast.Tuple)
        for one in node.elts
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }


def read_of(owner: str, modules: Sequence[str]) -> set[str]:
    return {name for module in modules for name in attributes_read(module, owner)}


#: By a class of vLLM, what is read of it.
READ = {
    (PROPOSER, "SpecDecodeBaseProposer"): read_of("proposer", FOR_ANY) - OURS,
    (RUNNER, "GPUModelRunner"): read_of("runner", FOR_RUNNERS) - FOR_DRAWN_DRAFTS,
    (METADATA, "CommonAttentionMetadata"): read_of("metadata", ("v1/draft_buffers.py", "v1/draft_full_graph.py"))
    | {"query_start_loc_cpu", "num_actual_tokens", "max_seq_len"},
    # `capture` is of `DraftGraphs`, in a variable of the same name.
    (GRAPHS, "CUDAGraphWrapper"): read_of("graphs", (*FOR_ANY, *FOR_DFLASH)) - {"capture"},
    (GRAPHS, "CUDAGraphOptions"): {"debug_log_enable", "gc_disable"},
    ("vllm/forward_context.py", "BatchDescriptor"): set(),
    ("vllm/forward_context.py", "set_forward_context"): set(),
    ("vllm/config/compilation.py", "CUDAGraphMode"): set(),
    (f"{KV_TRANSFER}/v1/base.py", "KVConnectorBase_V1"): {
        *("wait_for_layer_load", "save_kv_layer", "requires_piecewise_for_cudagraph")
    },
    (f"{KV_TRANSFER}/factory.py", "KVConnectorFactory"): {"get_connector_class"},
    ("vllm/config/kv_transfer.py", "KVTransferConfig"): {"kv_connector_extra_config"},
}
#: Read with a default where the version may not have them: one has, or had. A default hides a misspelt name.
SOMEWHERE = {
    (PROPOSER, "SpecDecodeBaseProposer"): OPTIONAL,
    (RUNNER, "GPUModelRunner"): {"_draft_probs", "enable_prompt_embeds"},
    (METADATA, "CommonAttentionMetadata"): tuples_of("v1/draft_buffers.py", "_HOST_ROWS", "_DROPPED", "_UNMANAGED"),
}


def test_what_is_read_exists(vllm_tree: Trees) -> None:
    assert {"input_ids", "_slot_mapping_buffer", "_greedy_sample"} <= READ[PROPOSER, "SpecDecodeBaseProposer"]
    assert {"input_batch", "discard_request_mask", "rejection_sampler"} <= READ[RUNNER, "GPUModelRunner"]
    assert READ[GRAPHS, "CUDAGraphWrapper"] == {"graph_pool", "concrete_cudagraph_entries"}
    missing, ever = [], {key: set[str]() for key in SOMEWHERE}
    for version in SUPPORTED:
        for (path, name), read in READ.items():
            known = classes_of(vllm_tree, version, path).get(name)
            missing += [f"vLLM {version}: {name}.{one}" for one in read - (known or set())] or [name] * (known is None)
            if (path, name) in ever:
                ever[path, name] |= known or set()
    assert missing == []
    assert [name for key, names in SOMEWHERE.items() for name in names - ever[key]] == []


def test_what_is_read_of_a_dflash_proposer_exists(vllm_tree: Trees) -> None:
    read = read_of("proposer", FOR_DFLASH) | tuples_in("v1/dflash_full_graph.py", "lengthen_query_buffers")
    assert {"_context_positions_buffer", "max_query_tokens", "positions"} <= read
    for version in SUPPORTED:
        known = classes_of(vllm_tree, version, PROPOSER)["SpecDecodeBaseProposer"]
        known |= classes_of(vllm_tree, version, DFLASH)["DFlashProposer"]
        assert read - known - OURS - FOR_DRAWN_DRAFTS == set(), version


def test_the_connectors_of_one_that_has_several_are_where_they_are_looked_for(vllm_tree: Trees) -> None:
    for version in SUPPORTED:
        text = ast.unparse(tree_of(vllm_tree, version, f"{KV_TRANSFER}/v1/multi_connector.py"))
        assert ".get('connectors')" in text, version


def test_a_block_of_queries_is_causal_only_where_the_version_says_so(vllm_tree: Trees) -> None:
    """`draft_decision` takes drafts for non-causal where a version has no `dflash_causal`."""
    for version in SUPPORTED:
        tree = tree_of(vllm_tree, version, DFLASH)
        (causal,) = (
            ast.unparse(keyword.value)
            for node in ast.walk(find(tree, "set_inputs_first_pass"))
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if keyword.arg == "causal"
        )
        named = "dflash_causal" in classes_of(vllm_tree, version, DFLASH)["DFlashProposer"]
        assert causal == ("self.dflash_causal" if named else "False"), version


@pytest.mark.parametrize("model", ["qwen3_dflash", "laguna_dflash"])
def test_the_context_is_stored_by_a_function_of_tokens_alone(vllm_tree: Trees, model: str) -> None:
    """States, positions, slots: a graph of the context is kept by its number of tokens, so nothing else may go in."""
    found = 0
    for version in SUPPORTED:
        text = vllm_tree(version).read(f"vllm/model_executor/models/{model}.py")
        for node in ast.walk(ast.parse(text or "")):
            if isinstance(node, ast.FunctionDef) and node.name == "precompute_and_store_context_kv":
                names = [argument.arg for argument in node.args.args]
                assert names == ["self", "context_states", "context_positions", "context_slot_mapping"], version
                called = {ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
                assert not any("get_forward_context" in name for name in called), version
                found += 1
    assert found > 0


def test_every_tensor_field_of_the_metadata_is_dealt_with(vllm_tree: Trees) -> None:
    """A new tensor of a new version would keep its changing address in a captured graph."""
    handled = tuples_of("v1/draft_buffers.py", "_HOST_ROWS", "_DROPPED", "_UNMANAGED")
    handled |= {"query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping", "causal"}
    # Host copies of fields that turn the graphs off, and one that only Mamba2 layers read.
    handled |= {"dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound", "replayssm_decode_base_cpu"}
    unhandled = []
    for version in SUPPORTED:
        metadata = find(tree_of(vllm_tree, version, METADATA), "CommonAttentionMetadata")
        for one in metadata.body:
            if (
                isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and "torch.Tensor" in ast.unparse(one.annotation)
                and one.target.id not in handled
            ):
                unhandled.append(f"vLLM {version}: CommonAttentionMetadata.{one.target.id}")
    assert not unhandled, unhandled


def test_the_step_function_takes_what_the_chain_gives(vllm_tree: Trees) -> None:
    (call,) = (
        node
        for node in ast.walk(ast.parse((BODIES / "v1/draft_loop_graph.py").read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "eagle_step_update_slot_mapping_and_metadata"
    )
    given = {keyword.arg for keyword in call.keywords}
    assert not call.args
    wrong = []
    for version in SUPPORTED:
        tree = tree_of(vllm_tree, version, UTILS)
        function = find(tree, "eagle_step_update_slot_mapping_and_metadata")
        accepted = [argument.arg for argument in function.args.args]
        required = accepted[: len(accepted) - len(function.args.defaults)]
        wrong += [f"vLLM {version}: no parameter {name}" for name in sorted(given - set(accepted))]
        wrong += [f"vLLM {version}: {name} is required" for name in sorted(set(required) - given)]
        padding = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PADDING_SLOT_ID"
        ]
        if padding != [-1]:
            wrong.append(f"vLLM {version}: PADDING_SLOT_ID is {padding}")
    assert not wrong, wrong


def test_capture_sizes_are_aligned_in_every_full_mode(vllm_tree: Trees) -> None:
    """vLLM once aligned them only where decode has graphs of its own, which mode FULL has not (PR 34880's k = 2 fault).

    `request_ladder` reads sizes that are multiples of 1 + num_speculative_tokens.
    """
    wrong = []
    for version in SUPPORTED:
        conditions = []
        for path in ("vllm/config/compilation.py", "vllm/v1/worker/gpu_model_runner.py"):
            for node in ast.walk(tree_of(vllm_tree, version, path)):
                if isinstance(node, ast.If) and any(
                    isinstance(one, ast.Call)
                    and isinstance(one.func, ast.Attribute)
                    and one.func.attr == "adjust_cudagraph_sizes_for_spec_decode"
                    for statement in node.body
                    for one in ast.walk(statement)
                ):
                    conditions.append(ast.unparse(node.test))
        innermost = [test for test in conditions if "uniform_decode_query_len > 1" in test]
        if not innermost:
            wrong.append(f"vLLM {version}: no condition found around the call; have {conditions}")
        wrong += [f"vLLM {version}: {test}" for test in conditions if "separate_routine" in test]
        wrong += [f"vLLM {version}: {test}" for test in innermost if "decode_mode() == CUDAGraphMode.FULL" not in test]
    assert not wrong, wrong


@pytest.mark.parametrize("version", versions(RUNNER))
def test_a_length_of_sequences_tells_the_memory_profile_from_a_capture(vllm_tree: Trees, version: str) -> None:
    """By it `v1-draft-phase` knows that vLLM measures its largest graph, which is captured with it like any other."""
    runner = find(tree_of(vllm_tree, version, RUNNER), "GPUModelRunner")
    calls = {
        (method.name, call.func.attr)
        for method in runner.body
        if isinstance(method, ast.FunctionDef)
        for call in ast.walk(method)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if "profile_seq_lens" in {keyword.arg for keyword in call.keywords}
    }
    assert calls == {("profile_cudagraph_memory", "_warmup_and_capture"), ("_warmup_and_capture", "_dummy_run")}
