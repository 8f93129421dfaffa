"""`propose` of every supported vLLM, stock and patched, on its own metadata; `test_draft_graphs` has the installed one.

The classes are those of the released texts. What they call is the installed vLLM's, or a stand-in of `drafters`.
"""

from __future__ import annotations

import dataclasses
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.v1.attention.backend as attention  # noqa: E402
import vllm.v1.spec_decode.llm_base_proposer as proposers  # noqa: E402
from typing_extensions import deprecated  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402

from vllm_hwplugin.spec_decode.v1.draft_full_graph import DraftGraphs  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_loop_graph import DraftLoop  # noqa: E402

from ..conftest import versions  # noqa: E402
from ..released import take, text_of  # noqa: E402
from . import drafters  # noqa: E402
from .drafters import Runner, boot, compare  # noqa: E402
from .recorded_graph import RecordedGraphs  # noqa: E402

PATH = "vllm/v1/spec_decode/llm_base_proposer.py"
PARTS = {"passes": {"DraftGraphs": DraftGraphs}, "loop": {"DraftGraphs": DraftGraphs, "DraftLoop": DraftLoop}}
CHOICES = {"passes": {"VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH": "off"}, "loop": {}}


def module_of(text: str, parts: dict) -> types.SimpleNamespace:
    given = vars(proposers) | {
        "eagle_step_update_slot_mapping_and_metadata": drafters.plain_eagle_step,
        # 0.20 alone drafts trees.
        "TreeAttentionMetadata": types.NoneType,
        "PADDING_SLOT_ID": drafters.PADDING_SLOT_ID,
    }
    cls = take(text, "SpecDecodeBaseProposer", given=given | parts)
    return types.SimpleNamespace(SpecDecodeBaseProposer=cls, **parts)


@pytest.mark.parametrize("version", versions(PATH, "vllm/v1/attention/backend.py"))
@pytest.mark.parametrize("which", ["passes", "loop"])
def test_drafts_are_those_of_stock(vllm_tree, make, monkeypatch, version, which):
    tree, k = vllm_tree(version), 3
    given = vars(attention) | {"deprecated": deprecated}
    metadata = take(tree.read("vllm/v1/attention/backend.py"), "CommonAttentionMetadata", given=given)
    monkeypatch.setattr(drafters, "CommonAttentionMetadata", metadata)
    monkeypatch.setattr(drafters, "FIELDS", {field.name for field in dataclasses.fields(metadata)})
    runner = Runner(1)
    stock = make("stock", k, module=module_of(tree.read(PATH), {}))
    graphed = make(which, k, module=module_of(text_of(tree, PATH, **CHOICES[which]), PARTS[which]))
    boot(stock, CUDAGraphMode.NONE, runner)
    boot(graphed, CUDAGraphMode.FULL, runner)
    RecordedGraphs.sealed = True
    # One row more than the ladder has: its steps take a mixed graph.
    for size in (3, 9):
        for kind in ("decode", "mixed", "prefill"):
            compare(stock, graphed, runner.batch(k, kind, size=size))
    passes = {(key.num_tokens // key.num_reqs if key.uniform else None) for key in RecordedGraphs.instances[0].replayed}
    assert passes == {1 + k, None} | ({1} if which == "passes" else set())
    assert len(RecordedGraphs.instances) == len(PARTS[which])
    assert all(graphs.replayed for graphs in RecordedGraphs.instances)
