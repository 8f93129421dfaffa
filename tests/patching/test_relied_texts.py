"""On what texts of files that it does not change a feature is right: `patches/texts.json`, which `make docs` writes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from vllm_hwplugin.patching import Catalogue, load_catalogue, make_plan
from vllm_hwplugin.patching._catalogue import TEXTS
from vllm_hwplugin.patching._model import Relied, blob_of
from vllm_hwplugin.patching.texts import Source, Status, default_folder
from vllm_hwplugin_workshop.authoring import relied_texts, write_texts
from vllm_hwplugin_workshop.sources import Index, IndexSource
from vllm_hwplugin_workshop.verdicts import evaluate

from .texts import ALPHA, GATE, OTHER, PATH, Memory, feature, file_diff

TABLE = default_folder() / TEXTS


def relied_on() -> set[str]:
    return {item.path for one in load_catalogue().features for item in one.texts}


def test_every_supported_version_was_read(vllm_tree: Callable[[str], Source]) -> None:
    found = json.loads(TABLE.read_bytes())
    assert found == relied_texts(relied_on(), vllm_tree)
    # A file that no version has is a name that is spelt wrong.
    assert all(found.values())


class Fork:
    """A version of vLLM with another text of one file, in which no hunk changes a line."""

    def __init__(self, source: Source, path: str) -> None:
        self.version, self.label, self._source, self._path = source.version, "a fork", source, path

    def read(self, path: str) -> str | None:
        text = self._source.read(path)
        return f"{text}# Ours.\n" if path == self._path and text is not None else text


def test_a_fork_has_the_features_whose_files_it_left_alone(vllm_tree: Callable[[str], Source]) -> None:
    """Hunks say nothing of a file that they are not in. The draft's own graphs patch this one, and only there."""
    fork = Fork(vllm_tree("0.28.0"), "vllm/v1/spec_decode/llm_base_proposer.py")
    found = {one.id: evaluate(one, fork).status for one in load_catalogue().features}
    refused = {name for name, status in found.items() if status is Status.OTHER_TEXT}
    assert refused == {"v1-draft-phase", "v1-step-inputs"}
    assert found["draft-full-graph"] is Status.APPLIES


def test_a_vendors_kernel_of_block_tables_leaves_v2_without_graphs(vllm_tree: Callable[[str], Source]) -> None:
    """As vllm-musa changes the file for its Triton: no hunk is in it, and what V2's inputs require relies on it."""
    fork = Fork(vllm_tree("0.28.0"), "vllm/v1/worker/gpu/block_table.py")
    features = make_plan(load_catalogue(), fork, {}).features
    for name in ("v2-tail-graph", "v2-step-inputs", "v2-mixed-graphs"):
        assert features[name].state == "refused"
    assert "block_table.py" in features["v2-tail-graph"].reason
    assert features["v2-graph-addresses"].state == "live"


BETA = "read, and not patched\n"
RELIES = feature(file_diff(ALPHA, ALPHA + "more\n"))._replace(relies=(Relied(OTHER, {"0.26.0": blob_of(BETA)}),))


@pytest.mark.parametrize(
    ("version", "beta", "state"),
    [
        ("0.32.0", BETA, "live"),
        ("0.32.0+cu130", BETA, "live"),
        ("0.32.0", BETA + "\n", "refused"),
        ("0.32.0", None, "refused"),
        # It came with 0.26.0.
        ("0.25.1", BETA, "refused"),
        ("0.25.1", None, "live"),
        # Who asks for a version that nobody has read has asked for that.
        ("0.99.0", BETA + "\n", "live"),
    ],
)
def test_a_text_that_was_not_read_is_as_one_that_drifted(version: str, beta: str | None, state: str) -> None:
    source = Memory({PATH: ALPHA} | ({} if beta is None else {OTHER: beta}), version)
    for choice in ("auto", "on"):
        plan = make_plan(Catalogue((RELIES,)), source, {GATE: choice}, try_unlisted=True)
        assert plan.features["one"].state == state
        assert bool(plan.errors) == (choice == "on" and state == "refused")


if __name__ == "__main__":
    index = Index()
    write_texts(default_folder(), relied_texts(relied_on(), lambda version: IndexSource(version, index)))
