"""Which metadata a graph of draft steps may make: the rule, and vLLM's own builds on a device that has no host."""

from __future__ import annotations

import types
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

import vllm_hwplugin
from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.spec_decode.builders import BUILDERS, allows, refusing, updated_in_place, why_not_in_graph

from ..conftest import versions
from ..released import take

VERSIONS = Versions("").supported()
FILES = ("vllm/v1/attention/", "vllm/model_executor/layers/attention/")
ROOT = Path(vllm_hwplugin.__file__).parents[1]
REQS, BLOCKS, LONGEST = 4, 8, 4096
FLASHINFER = "vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder"
DEVICE = torch.device("meta")
Metadata = TypeVar("Metadata")


class Crossed(AssertionError):
    """Something went between the host and the device."""


class Border(TorchDispatchMode):
    """Lets no operation take a tensor of the host and one of the device, or bring one to the other."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        if devices == {"cpu", "meta"}:
            raise Crossed(func)
        return out


class Base(Generic[Metadata]):
    """vLLM's `AttentionMetadataBuilder`."""

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)  # type: ignore[attr-defined]


class Made(types.SimpleNamespace):
    """A class of metadata: it holds what it is given."""


def schedule(**given: Any) -> torch.Tensor:
    """FlashAttention 3's `get_scheduler_metadata`: device work of a length that the batch's size fixes."""
    return torch.empty(1 + given["batch_size"] * 4, dtype=torch.int32, device=given["cache_seqlens"].device)


def plan(seq_lens: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's `get_mla_metadata_dense_fp8`."""
    parts = torch.empty((5, 8), dtype=torch.int32, device=seq_lens.device)
    return parts, torch.empty(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)


def names_of(tree: Any, path: str) -> dict[str, Any]:
    """The names that a backend's module has of others; what a draft step does not reach is left out."""
    fp8 = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, get_fp8_dtype_for_flashattn=lambda _: torch.float8_e4m3fn
    )
    given: dict[str, Any] = {
        "torch": torch,
        "Generic": Generic,
        "M": Metadata,
        "current_platform": fp8,
        "FlashAttentionBackend": fp8,
        "AttentionMetadataBuilder": Base,
        "envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
        "get_scheduler_metadata": schedule,
        "get_mla_metadata": lambda *_, **__: (Made(tile_scheduler_metadata=None, num_splits=None), None),
        "get_mla_metadata_dense_fp8": plan,
        "get_flash_attn_version": lambda: 3,
        "AttentionCGSupport": types.SimpleNamespace(ALWAYS=3, UNIFORM_BATCH=2),
        "_get_sliding_window_configs": lambda config: {(-1, -1)},
        "_maybe_symmetrize_window": lambda window, causal: window,
        "QueryLenSupport": types.SimpleNamespace(VARLEN="varlen", SINGLE_ONLY="single", UNIFORM="uniform"),
        "use_trtllm_attention": lambda *_, **__: True,
    }
    for name in ("FlashAttentionMetadata", "TritonAttentionMetadata", "MLACommonDecodeMetadata", "MLACommonMetadata"):
        given[name] = Made
    for name in ("FlashInferMetadata", "FlashInferTrtllmAPIDecode"):
        given[name] = Made
    for kind in ("FlashAttnMLA", "FlashMLA", "FlashInferMLA"):
        given |= {f"{kind}DecodeMetadata": Made, f"{kind}Metadata": Made}
    given["_make_xqa_draft_block_mask"] = lambda tokens, causal, device: torch.zeros(tokens, 1, device=device)
    text = tree.read("vllm/v1/attention/backends/utils.py")
    given["split_decodes_and_prefills"] = take(text, "split_decodes_and_prefills", given={"torch": torch})
    if path.startswith("vllm/v1/attention/backends/mla/"):
        common = tree.read("vllm/model_executor/layers/attention/mla_attention.py")
        methods = ("build", "build_for_cudagraph_capture", "_build_decode")
        given["MLACommonMetadataBuilder"] = take(common, "MLACommonMetadataBuilder", methods, given=given)
    return given


def builder_of(tree: Any, path: str, name: str, cache_dtype: str) -> Any:
    """A released builder, with what its `__init__` would have given it for an engine with FULL graphs."""
    text = tree.read(path)
    if text is None or f"class {name}(" not in text:
        return None
    methods = (
        "build",
        "build_for_cudagraph_capture",
        "_build_decode",
        "_schedule_decode",
        "_get_scheduler_metadata",
        "_store_scheduler_metadata",
        "_compute_decode_query_lens",
        "_get_decode_mask",
    )
    cls = take(text, name, methods, given=names_of(tree, path))
    builder = cls()
    full = types.SimpleNamespace(has_full_cudagraphs=lambda: True)
    vars(builder).update(
        device=DEVICE,
        vllm_config=None,
        aot_schedule=True,
        fa_aot_schedule=True,
        aot_sliding_window=None,
        use_full_cuda_graph=True,
        max_cudagraph_size=64,
        max_num_splits=32,
        scheduler_metadata=torch.zeros(1 + 64 * 4, dtype=torch.int32, device=DEVICE),
        num_heads_q=2, num_heads_kv=1, num_heads=2, num_q_heads=2, headdim=64, block_size=16, page_size=16,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_spec=types.SimpleNamespace(dtype=torch.bfloat16, sliding_window=None),
        cache_config=types.SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=types.SimpleNamespace(cudagraph_mode=full),
        dcp_world_size=1, use_pcp=False, rswa_window=None, _use_fi_prefill=True,
        mla_dims=types.SimpleNamespace(qk_rope_head_dim=64, kv_lora_rank=512),
        model_config=types.SimpleNamespace(get_head_size=lambda: 576),
        metadata_cls=Made,
        query_len_support="varlen", reorder_batch_threshold=4,
        is_fp8_kvcache=cache_dtype.startswith("fp8"),
        cg_buf_tile_scheduler_metadata=torch.zeros((132, 8), dtype=torch.int32, device=DEVICE),
        cg_buf_num_splits=torch.zeros(65, dtype=torch.int32, device=DEVICE),
        seq_threshold_3D=8, num_par_softmax_segments=16, max_seqs_64_segments=0,
        softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None,
        flashinfer_trtllm_api_decode_kernel=types.SimpleNamespace(name="TRTLLM_GEN"),
        use_trtllm_decode_attention=True, use_xqa=False, use_dedicated_xqa=False, use_trtllm_gen_varlen_decode=True,
        use_dcp=False, max_num_reqs=REQS, _decode_mask_cache={},
        attention_config=types.SimpleNamespace(use_trtllm_attention=None), num_qo_heads=2, num_kv_heads=1,
        cache_dtype=cache_dtype, q_data_type=torch.bfloat16, q_data_type_prefill=torch.bfloat16,
        q_data_type_decode=torch.bfloat16, has_sinks=True, kv_cache_layout="HND", _num_speculative_tokens=3,
    )  # fmt: skip
    return builder


def step(query_len: int) -> Any:
    """The common metadata that vLLM makes for a step in which each request has so many tokens."""
    tokens = REQS * query_len

    def on_device(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=DEVICE)

    return types.SimpleNamespace(
        num_reqs=REQS, num_actual_tokens=tokens, max_query_len=query_len, max_seq_len=LONGEST,
        query_start_loc=on_device(REQS + 1),
        query_start_loc_cpu=torch.arange(0, tokens + 1, query_len, dtype=torch.int32),
        seq_lens=on_device(REQS), seq_lens_cpu_upper_bound=torch.full((REQS,), LONGEST, dtype=torch.int32),
        block_table_tensor=on_device(REQS, BLOCKS), slot_mapping=on_device(tokens),
        causal=True, dcp_local_seq_lens=None, mm_req_doc_ranges=None, rswa_prefix_lens=None, is_prefilling=None,
    )  # fmt: skip


OWN = [
    (path, query_len)
    for path, builder in BUILDERS.items()
    for query_len, allowed in ((1, builder.one_token), (4, builder.decode))
    if allowed and path.startswith("vllm.")
] + [(f"{FLASHINFER} {kernel}", query_len) for kernel in ("TRTLLM_GEN", "XQA") for query_len in (1, 4)]


@pytest.mark.parametrize(("path", "query_len"), OWN)
@pytest.mark.parametrize("version", versions(*FILES, among=VERSIONS))
def test_a_step_is_built_without_the_host(vllm_tree, version: str, path: str, query_len: int) -> None:
    """vLLM's own `build`, of every version, for what is said to be the device's work alone."""
    path, _, kernel = path.partition(" ")
    module, _, name = path.rpartition(".")
    for cache_dtype in ("auto", "fp8"):
        file = f"{module.replace('.', '/')}.py"
        builder = builder_of(vllm_tree(version), file, name, cache_dtype)
        if builder is None or (kernel and "trtllm_api_decode_kernel" not in vllm_tree(version).read(file)):
            pytest.skip(f"vLLM {version} has no {name}, or none that asks for it what kernels there are")
        if kernel == "XQA":
            if query_len > 1 and "def _get_decode_mask(" not in vllm_tree(version).read(file):
                pytest.skip(f"to vLLM {version} several tokens of a request are a prompt here")
            builder.flashinfer_trtllm_api_decode_kernel = Kernel.XQA
            builder.use_xqa = builder.use_dedicated_xqa = True
            builder.use_trtllm_gen_varlen_decode = False
            # The target's metadata has been made before, and the mask with it.
            builder.build(0, step(query_len))
        with Border():
            one, other = builder.build(0, step(query_len)), builder.build(0, step(query_len))
        # What a graph holds of the host is the same in each step.
        assert numbers(one) == numbers(other)


@pytest.mark.parametrize("path", [path for path, one in BUILDERS.items() if one.decode and path.startswith("vllm.")])
@pytest.mark.parametrize("version", versions(*FILES, among=VERSIONS))
def test_a_capture_of_prompts_is_built_where_the_table_says_so(vllm_tree, version: str, path: str) -> None:
    """As Model Runner V2 captures a graph of any batch: its longest request may have all tokens."""
    module, _, name = path.rpartition(".")
    builder = builder_of(vllm_tree(version), f"{module.replace('.', '/')}.py", name, "auto")
    if builder is None:
        pytest.skip(f"vLLM {version} has no {name}")
    batch = step(4)
    batch.max_query_len = batch.num_actual_tokens
    if BUILDERS[path].prompts:
        with Border():
            assert builder.build_for_cudagraph_capture(batch).max_query_len == batch.num_actual_tokens
    else:
        with pytest.raises(AssertionError):
            builder.build_for_cudagraph_capture(batch)


def numbers(made: Any) -> dict[str, Any]:
    plain = {name: value for name, value in vars(made).items() if isinstance(value, int | tuple | bool)}
    return {**plain, **(numbers(made.decode) if getattr(made, "decode", None) else {})}


# -- the rule ---------------------------------------------------------------------------------------------------------


def groups(*builders: type, dcp: int = 1) -> list[list[Any]]:
    """Attention groups of builders whose `__init__`, which asks for a device, was not run."""

    def group(cls: type) -> Any:
        builder = object.__new__(cls)
        builder.dcp_world_size = dcp
        return types.SimpleNamespace(get_metadata_builder=lambda ubatch: builder)

    return [[group(cls)] for cls in builders]


class Kernel(Enum):
    """vLLM's `FlashInferDecodeKernel`."""

    XQA = "xqa"
    TRTLLM_GEN = "trtllm-gen"


class OwnBuild(FlashAttentionMetadataBuilder):
    def build(self, *args: Any, **kwargs: Any) -> Any:
        return super().build(*args, **kwargs)


def test_device_work_is_allowed() -> None:
    assert why_not_in_graph([]) is None
    assert why_not_in_graph(groups(FlashAttentionMetadataBuilder, TritonAttentionMetadataBuilder)) is None
    # As vLLM's builder for a head size of values alone: nothing of the metadata is its own.
    assert why_not_in_graph(groups(type("Plain", (TritonAttentionMetadataBuilder,), {}))) is None


def test_others_are_refused_with_a_reason() -> None:
    refused = why_not_in_graph(groups(FlashAttentionMetadataBuilder, FlexAttentionMetadataBuilder))
    assert refused is not None
    assert refused.startswith("FlexAttentionMetadataBuilder: each build makes its block mask")
    refused = why_not_in_graph(groups(CPUAttentionMetadataBuilder, OwnBuild))
    assert refused is not None
    assert "CPUAttentionMetadataBuilder" in refused
    assert "OwnBuild" in refused
    refused = why_not_in_graph(groups(FlashAttentionMetadataBuilder, dcp=2))
    assert refused == "FlashAttentionMetadataBuilder: decode context parallelism"
    # A drafter's build on the V1 runner is another one (`fast_build`), so what is declared for it says nothing here.
    assert why_not_in_graph(groups(type("Declared", (OwnBuild,), {"same_metadata_as_base": True}))) is not None


def test_a_drafters_passes_take_a_class_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusing([CPUAttentionMetadataBuilder], "passes") is not None
    assert refusing([OwnBuild], "passes") is not None
    # What it derives from makes metadata, too, and declares nothing.
    assert refusing([type("Declared", (OwnBuild,), {"same_metadata_as_base": True})], "passes") is not None
    monkeypatch.setattr(OwnBuild, "same_metadata_as_base", True, raising=False)
    assert refusing([OwnBuild], "chain") is None


def test_flashinfers_trtllm_kernels_have_graphs_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = {"flashinfer_trtllm_api_decode_kernel": Kernel.TRTLLM_GEN, "reorder_batch_threshold": 4}
    made = groups(type("FlashInferMetadataBuilder", (), attributes))
    (((group,),),) = (made,)
    refused = why_not_in_graph(made)
    assert refused is not None
    assert "VLLM_HWPLUGIN_MORE_GRAPHS=trtllm" in refused
    assert not allows(group.get_metadata_builder(0), "decode")
    monkeypatch.setenv("VLLM_HWPLUGIN_MORE_GRAPHS", "trtllm")
    assert why_not_in_graph(made) is None
    assert allows(group.get_metadata_builder(0), "decode")
    # They know no queries that see later ones, and a draft model's first pass is no decode to them.
    assert why_not_in_graph(made, causal=False) is not None
    assert why_not_in_graph(made, "chain") is not None
    # The kernel of other devices takes several tokens of a request only where vLLM takes these for a decode.
    builder = group.get_metadata_builder(0)
    builder.flashinfer_trtllm_api_decode_kernel, builder.reorder_batch_threshold = Kernel.XQA, 1
    assert why_not_in_graph(made) is None
    assert not allows(builder, "decode")
    builder.reorder_batch_threshold = 4
    assert allows(builder, "decode")


INDEXER = "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerMetadataBuilder"


@pytest.mark.parametrize(
    ("builders", "changes", "expected"),
    [
        (["indexer"], {}, True),
        # vLLM updates all or none.
        (["indexer"], {"supports_draft_decode_metadata_update": False}, False),
        (["indexer"], {"dcp_world_size": 2}, False),
        # One that builds in the graph, one that plans on the host, and one that nobody has read.
        ([FlashAttentionMetadataBuilder], {}, False),
        (["indexer", FlexAttentionMetadataBuilder], {}, False),
    ],
)
def test_metadata_is_updated_where_vllm_can(builders: list[Any], changes: dict[str, Any], expected: bool) -> None:
    module, _, name = INDEXER.rpartition(".")
    indexer = type(name, (), {"__module__": module})
    made = [(indexer if one == "indexer" else one).__new__(indexer if one == "indexer" else one) for one in builders]
    for one in made:
        vars(one).update({"supports_draft_decode_metadata_update": True, **changes})
    groups = [[types.SimpleNamespace(get_metadata_builder=lambda _, one=one: one)] for one in made]
    assert updated_in_place(types.SimpleNamespace(attn_groups=groups, _generate_fused_drafts=None)) is expected
    # One that drafts all tokens at once, and vLLM before 0.28.
    assert not updated_in_place(types.SimpleNamespace(attn_groups=groups))


def test_every_class_of_the_table_is_there(vllm_tree) -> None:
    for path in BUILDERS:
        module, _, name = path.rpartition(".")
        file = f"{module.replace('.', '/')}.py"
        ours = [(ROOT / file).read_text()] if module.startswith("vllm_hwplugin.") else []
        found = ours or [vllm_tree(version).read(file) for version in (VERSIONS[0], "0.26.0", VERSIONS[-1])]
        texts = [text for text in found if text is not None]
        assert texts, path
        assert f"class {name}(" in texts[-1], path
