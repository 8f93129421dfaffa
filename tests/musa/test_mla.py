# SPDX-License-Identifier: Apache-2.0
"""MLA on MUSA over a stand-in for mate: prompts with any vLLM that can have them, decodes with the installed one.

Not run on MUSA hardware.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin.base.versions import Versions  # noqa: E402

from ..attention.released import released  # noqa: E402
from ..conftest import versions  # noqa: E402
from .mate_standin import mate  # noqa: E402

OWN = "vllm_hwplugin.musa"
#: The first whose prompts a class of another can compute.
VERSIONS = versions("vllm/v1/attention/backends/mla/prefill/base.py", among=Versions(">=0.23").supported())
Tree = Callable[[str], Any]


def attention(query: Any, keys: Any, values: Any, scale: float) -> Any:
    """In float32, where the last query goes with the last key."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(keys) - len(query))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values.float())


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=4e-3)


# -- prompts


def starts(lengths: list[int]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def backend(load: Any, nope: int = 128, rope: int = 64, value: int = 128) -> Any:
    cls = load(f"{OWN}.mla_prefill").MusaMLAPrefillBackend
    return cls(4, (nope + rope) ** -0.5, 512, nope, rope, value, SimpleNamespace())


def merged(parts: list[tuple[Any, Any]]) -> Any:
    """Attention over parts of the keys, together, each by its log-sum-exp."""
    sums = torch.stack([lse for _, lse in parts])
    shares = (sums - sums.logsumexp(0)).exp().transpose(1, 2).unsqueeze(-1)
    return (shares * torch.stack([out.float() for out, _ in parts])).sum(0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sizes", [(128, 64, 128), (192, 64, 256), (64, 64, 128)])
def test_a_prompt_sees_itself_and_its_context(sizes: tuple[int, int, int], version: str, vllm_tree: Tree) -> None:
    """Three requests, of which the first has a context of two parts, the second of one, and the last has none."""
    new, contexts = [5, 3, 2], [[64, 64], [64, 0], [0, 0]]
    nope, rope, value = sizes
    torch.manual_seed(0)
    key_of = [torch.randn(sum(context) + n, 4, nope + rope).half() for context, n in zip(contexts, new, strict=True)]
    value_of = [torch.randn(len(keys), 4, value).half() for keys in key_of]
    query = torch.randn(sum(new), 4, nope + rope).half()
    own = [torch.cat([one[-n:] for one, n in zip(all_of, new, strict=True)]) for all_of in (key_of, value_of)]
    with released(version, vllm_tree(version), mate=mate()) as load:
        made = backend(load, *sizes)
        older = "chunk_idx" in load("inspect").signature(type(made).__base__.run_prefill_context_chunk).parameters
        lengths = [[context[at] for context in contexts] for at in range(2)]
        chunked = SimpleNamespace(
            cu_seq_lens=[starts(one) for one in lengths], max_seq_lens=[max(one) for one in lengths]
        )
        made.prepare_metadata(
            SimpleNamespace(query_start_loc=starts(new), max_query_len=max(new), chunked_context=chunked)
        )
        # Values lie beside what keys come of.
        out = torch.empty(sum(new), 4, value, dtype=torch.float16)
        strided = torch.cat([own[1], own[1]], -1)[..., :value]
        part, lse = made.run_prefill_new_tokens(query, own[0], strided, True, out=out)
        assert part.data_ptr() == out.data_ptr()
        assert torch.equal(made.run_prefill_new_tokens(query, own[0], strided, False), out)
        parts = [(part, lse)]
        for at in range(2):
            taken = [slice(sum(context[:at]), sum(context[: at + 1])) for context in contexts]
            keys, values = (
                torch.cat([one[where] for one, where in zip(all_of, taken, strict=True)])
                for all_of in (key_of, value_of)
            )
            if older:
                parts.append(made.run_prefill_context_chunk(chunk_idx=at, q=query, k=keys, v=values))
                # Else vLLM's kernel makes NaN of two parts without keys.
                assert parts[-1][1].isfinite().all()
                continue
            # Only the requests that have keys there.
            count = 2 - at
            chunk = SimpleNamespace(
                query_start_loc=starts(new[:count]), cu_seq_lens=starts(lengths[at][:count]),
                max_query_len=max(new[:count]), max_seq_len=max(lengths[at]),
            )  # fmt: skip
            tokens = sum(new[:count])
            some, sums = made.run_prefill_context_chunk(chunk=chunk, q=query[:tokens], k=keys, v=values)
            whole, whole_lse = torch.zeros(len(query), 4, value), torch.full((4, len(query)), -torch.inf)
            whole[:tokens], whole_lse[:, :tokens] = some, sums
            parts.append((whole, whole_lse))
    right = [attention(*one, made.scale) for one in zip(query.split(new), key_of, value_of, strict=True)]
    close(merged(parts), torch.cat(right))


@pytest.mark.parametrize(
    ("nope", "rope", "value", "served"),
    [
        (448, 64, 512, True),
        (456, 64, 520, False),
        (128, 64, 128, True),
        (128, 64, 256, False),
        (64, 64, 192, False),
        (120, 64, 128, False),
        (64, 32, 64, False),
    ],
)
def test_the_largest_heads_and_those_of_unequal_sizes(
    nope: int, rope: int, value: int, served: bool, vllm_tree: Tree
) -> None:
    with released(VERSIONS[-1], vllm_tree(VERSIONS[-1]), mate=mate()) as load:
        cls = load(f"{OWN}.mla_prefill").MusaMLAPrefillBackend
        sizes = SimpleNamespace(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
        assert cls.supports_mla_dimensions(sizes) == served
        with contextlib.nullcontext() if served else pytest.raises(ValueError, match="or equal sizes up to"):
            assert backend(load, nope, rope, value).supports_out()


# -- decodes


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, on the vLLM that is installed and on the stand-in."""
    pytest.importorskip("vllm")
    monkeypatch.setitem(sys.modules, "mate", mate())
    names = [f"{OWN}.{name}" for name in ("_mate", "mla_prefill", "mla")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(names[-1])
    for name in names:
        sys.modules.pop(name, None)


def made_by(own: Any, heads: int) -> Any:
    """A builder, with what its `__init__` would have given it."""
    builder = object.__new__(own.MusaFlashMLAMetadataBuilder)
    vars(builder).update(num_heads=heads, _plans={})
    return builder


def planned(builder: Any, lengths: list[int], tokens: int, table: Any = None) -> Any:
    """Metadata of decodes with so many tokens each."""
    return builder._build_decode(
        block_table_tensor=table,
        seq_lens_device=torch.tensor(lengths, dtype=torch.int32),
        max_seq_len=max(lengths),
        query_start_loc_cpu=None,
        query_start_loc_device=None,
        num_decode_tokens=tokens * len(lengths),
        max_query_len=tokens,
        dcp_tot_seq_lens_device=None,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "tokens", "in_parts"), [(4, 1, True), (4, 3, False), (128, 2, True)])
def test_decodes_are_attention_over_the_cache(own: Any, heads: int, tokens: int, in_parts: bool, dtype: Any) -> None:
    lengths = [3, 64, 65, 200]
    torch.manual_seed(heads)
    # One layer of a cache that several share.
    cache = torch.randn(2, 9, 64, 576).to(dtype)[1]
    table = torch.randperm(8).int()[torch.arange(16).view(4, 4) % 8]
    query = torch.randn(4 * tokens, heads, 576).to(dtype)
    impl = object.__new__(own.MusaFlashMLAImpl)
    impl.kv_lora_rank, impl.scale = 512, 192**-0.5
    metadata = SimpleNamespace(num_decodes=4, decode=planned(made_by(own, heads), lengths, tokens, table))
    asked = (query[..., :512], query[..., 512:]) if in_parts else query
    out, lse = impl.forward_mqa(asked, cache, metadata, None)
    assert lse is None
    for request, length in enumerate(lengths):
        keys = cache[table[request].long()].flatten(0, 1)[:length, None].expand(-1, heads, -1)
        rows = slice(request * tokens, (request + 1) * tokens)
        close(out[rows], attention(query[rows], keys, keys[..., :512], impl.scale))


def test_a_graph_finds_each_plan_where_it_was(own: Any) -> None:
    builder = made_by(own, 16)
    first = planned(builder, [9000, 5], 1)
    before, where = first.parts.clone(), (first.parts.data_ptr(), first.num_splits.data_ptr())
    others = [planned(builder, [10, 20], 9), planned(builder, [10, 20, 30], 1)]
    with torch.inference_mode():
        again = planned(builder, [5, 9000], 1)
    assert (again.parts.data_ptr(), again.num_splits.data_ptr()) == where
    assert not torch.equal(before, first.parts)
    assert torch.equal(first.num_splits, planned(made_by(own, 16), [5, 9000], 1).num_splits)
    # Rows of 144 are two tiles, so half as many parts run side by side.
    assert [one.parts.shape for one in (first, *others)] == [(56, 8), (28, 8), (56, 8)]
    assert {one.parts.data_ptr() for one in others}.isdisjoint(where)


FIT: dict[str, Any] = {
    "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": True,
    "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": None, "attn_type": "decoder",
}  # fmt: skip


def test_what_mate_has_no_kernels_for_is_refused(own: Any) -> None:
    def reasons(**changes: Any) -> list[str]:
        found: list[str] = own.MusaFlashMLABackend.validate_configuration(**{**FIT, **changes})
        return found

    assert reasons() == reasons(kv_cache_dtype="bfloat16") == reasons(block_size=128) == []
    for changes, told in (
        ({"head_size": 320}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "keys of the queries' type torch.bfloat16, and the KV cache is float16"),
        ({"block_size": 16}, "block_size"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_kv_connector": True}, "KV connector"),
        ({"has_sink": True}, "sinks"),
    ):
        assert any(told in reason for reason in reasons(**changes)), told
    assert own.MusaFlashMLABackend.get_preferred_block_size(16) == 64


def test_a_layer_that_needs_more_than_mate_has_is_refused(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own.MusaFlashMLAImpl.__base__, "__init__", lambda *_, **__: None)
    asked: dict[str, Any] = {
        "num_heads": 4, "head_size": 576, "scale": 1.0, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    own.MusaFlashMLAImpl(**asked)
    for changes in (
        {"kv_lora_rank": 544, "qk_rope_head_dim": 32}, {"sliding_window": 128}, {"alibi_slopes": [1.0]},
        {"logits_soft_cap": 30.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"FLASHMLA on MUSA supports .*; use TRITON_MLA"):
            own.MusaFlashMLAImpl(**{**asked, **changes})
