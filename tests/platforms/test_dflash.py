# SPDX-License-Identifier: Apache-2.0
"""The hooks for DFlash on stand-ins; `test_dflash_processes` has them on the real VllmConfig."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin import dflash, journal, patching
from vllm_hwplugin.spec_decode.dflash_config import DFlashConfigError
from vllm_hwplugin.spec_decode.dflash_sizes import capture_sizes

from ..conftest import versions

VLLMS_OWN = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]


# -- stand-ins --------------------------------------------------------------------------------------------------------


class Compilation(SimpleNamespace):
    """As much of vLLM's `CompilationConfig` as the hooks touch."""

    def post_init_cudagraph_sizes(self) -> None:
        """As vLLM's: put the capture sizes in the place of their name, and sort."""
        named = [self.cudagraph_capture_sizes if isinstance(x, str) else [x] for x in self.compile_sizes or ()]
        self.compile_sizes = [size for sizes in named for size in sizes]
        self.cudagraph_capture_sizes.sort()
        assert self.cudagraph_capture_sizes[-1] == self.max_cudagraph_capture_size


def made_by_vllm(
    sizes: list[int] | None = None, largest: int | None = None, compile_sizes: list | None = None, **changes: Any
) -> SimpleNamespace:
    """A `VllmConfig` that has gone through both hooks, as in `__post_init__`."""
    values = {"mode": "FULL", "full": True, "v2": False, "tp": 1, "sp": False, "k": 7, "block_size": 8, "seqs": 32}
    values |= {"default": VLLMS_OWN, **changes}
    target = SimpleNamespace(model="target", hf_text_config=SimpleNamespace(num_hidden_layers=4, hidden_size=64))
    draft = SimpleNamespace(hidden_size=64, block_size=values["block_size"], dflash_config={"target_layer_ids": [0]})
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            use_dflash=lambda: values.get("dflash", True),
            num_speculative_tokens=values["k"],
            attention_backend=None,
            draft_model_config=SimpleNamespace(model="draft", hf_config=draft),
            target_model_config=target,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=values["seqs"], max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(tensor_parallel_size=values["tp"]),
        compilation_config=Compilation(
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=largest,
            compile_sizes=compile_sizes,
            cudagraph_mode=SimpleNamespace(name=values["mode"], has_full_cudagraphs=lambda: values["full"]),
            pass_config=SimpleNamespace(enable_sp=values["sp"]),
        ),
    )
    if values["v2"] is not None:
        vllm_config.use_v2_model_runner = values["v2"]
    make_again(vllm_config, values["default"])
    return vllm_config


def make_again(vllm_config: SimpleNamespace, default: list[int] = VLLMS_OWN) -> None:
    """What `__post_init__` does, for a fresh configuration and for one that is made from another."""
    compilation = vllm_config.compilation_config
    dflash.note_user_sizes(vllm_config)
    if compilation.cudagraph_capture_sizes is None:
        largest = compilation.max_cudagraph_capture_size or 512
        compilation.cudagraph_capture_sizes = [size for size in default if size <= largest]
    compilation.cudagraph_capture_sizes.sort()
    compilation.max_cudagraph_capture_size = (compilation.cudagraph_capture_sizes or [0])[-1]
    if compilation.compile_sizes is not None and compilation.cudagraph_capture_sizes:
        compilation.post_init_cudagraph_sizes()
    dflash.check_and_update_config(vllm_config)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> journal.Journal:
    """The journal of a process in which the DFlash drafter's feature is live, and nothing is to be verified."""
    made = journal.new("0")
    made.features = {"dflash-full-graph": {"state": "live", "reason": ""}}
    journal.begin(made, None)
    monkeypatch.setattr(patching, "install", lambda: made)
    monkeypatch.setattr(patching, "force", lambda features: None)
    return made


def sizes(vllm_config: SimpleNamespace) -> list[int]:
    compilation = vllm_config.compilation_config
    assert compilation.max_cudagraph_capture_size == (compilation.cudagraph_capture_sizes or [0])[-1]
    return compilation.cudagraph_capture_sizes


def decision(entry: journal.Journal) -> str:
    return entry.decisions["dflash-capture-sizes"]


# -- capture sizes ----------------------------------------------------------------------------------------------------


def test_sizes_of_the_user_are_kept_or_explained(entry: journal.Journal, caplog: pytest.LogCaptureFixture) -> None:
    assert sizes(made_by_vllm([64, 1, 8, 20])) == [8, 64]
    (line,) = [item.getMessage() for item in caplog.records]
    assert "dropped: 1, 20 (not a multiple of 1 + num_speculative_tokens = 8)" in line
    assert "captured: [8, 64]" in line
    assert "dropped: 1, 20" in decision(entry)


def test_whole_blocks_of_the_user_are_taken_as_they_are(
    entry: journal.Journal, caplog: pytest.LogCaptureFixture
) -> None:
    assert sizes(made_by_vllm([8, 64])) == [8, 64]
    assert not [item for item in caplog.records if item.levelno >= logging.WARNING]


def test_where_no_block_fits_vllm_decides(entry: journal.Journal) -> None:
    assert sizes(made_by_vllm(largest=7)) == [1, 2, 4]
    assert decision(entry) == "left to vLLM: no block of 8 tokens fits in 4, the largest allowed"


@pytest.mark.parametrize("given", [{}, {"sizes": [64, 1, 8, 20]}, {"sizes": [20]}, {"largest": 50}, {"sizes": [8, 64]}])
def test_a_configuration_made_from_another_keeps_everything(
    entry: journal.Journal, caplog: pytest.LogCaptureFixture, given: dict
) -> None:
    vllm_config = made_by_vllm(**given, compile_sizes=["cudagraph_capture_sizes", 3])
    before, said = vllm_config.compilation_config.__dict__.copy(), decision(entry)
    before["cudagraph_capture_sizes"] = list(before["cudagraph_capture_sizes"])
    caplog.clear()
    for _ in range(2):
        make_again(vllm_config)
        assert vllm_config.compilation_config.__dict__ == before
        assert decision(entry) == said
    assert not caplog.records


def test_a_second_engine_puts_its_own_decision_on_record(entry: journal.Journal) -> None:
    made_by_vllm(full=False)
    made_by_vllm([8, 64])
    assert decision(entry).startswith("2 capture sizes")


def test_sizes_to_compile_for_follow(entry: journal.Journal) -> None:
    vllm_config = made_by_vllm([64, 1, 8], compile_sizes=["cudagraph_capture_sizes", 3])
    assert sorted(vllm_config.compilation_config.compile_sizes) == [3, 8, 64]
    vllm_config = made_by_vllm([64, 1, 8], compile_sizes=[5])
    assert vllm_config.compilation_config.compile_sizes == [5]


def test_nothing_is_left_on_the_configuration(entry: journal.Journal) -> None:
    for changes in ({}, {"dflash": False}, {"full": False}):
        assert not [name for name in vars(made_by_vllm(**changes)) if name.startswith("_")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v2": True}, "Model Runner V2 makes its own sizes"),
        ({"full": False, "mode": "PIECEWISE"}, "cudagraph_mode is PIECEWISE"),
        ({"default": []}, "nothing is captured"),
        ({"tp": 2, "sp": True}, "with sequence parallelism they also have to be multiples of the tensor parallel size"),
    ],
)
def test_sizes_that_are_left_to_vllm(entry: journal.Journal, changes: dict, reason: str) -> None:
    assert sizes(made_by_vllm(**changes)) == changes.get("default", VLLMS_OWN)
    assert decision(entry) == f"left to vLLM: {reason}"


@pytest.mark.parametrize("changes", [{"tp": 2}, {"sp": True}, {"v2": False}])
def test_sizes_that_only_look_like_that(entry: journal.Journal, changes: dict) -> None:
    assert sizes(made_by_vllm(**changes)) != VLLMS_OWN


def test_without_the_drafters_graphs_sizes_are_left_to_vllm(entry: journal.Journal) -> None:
    entry.features["dflash-full-graph"] = {"state": "off", "reason": "its gate is off"}
    assert sizes(made_by_vllm()) == VLLMS_OWN
    assert decision(entry) == "left to vLLM: dflash-full-graph is not live (its gate is off)"


@pytest.mark.parametrize("chosen", [True, False])
def test_up_to_0_21_a_variable_chooses_the_runner(
    entry: journal.Journal, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    vllm, envs = ModuleType("vllm"), ModuleType("vllm.envs")
    vllm.envs = envs  # type: ignore[attr-defined]
    envs.VLLM_USE_V2_MODEL_RUNNER = chosen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    assert (sizes(made_by_vllm(v2=None)) == VLLMS_OWN) == chosen


def test_configurations_without_dflash_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(patching, "install", lambda: calls.append("install"))
    assert sizes(made_by_vllm(dflash=False)) == VLLMS_OWN
    vllm_config = made_by_vllm(dflash=False)
    vllm_config.speculative_config = None
    dflash.check_and_update_config(vllm_config)
    assert not calls


def test_bad_input_is_an_error_where_the_feature_is_required(
    entry: journal.Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by_vllm(k=8)
    assert "num_speculative_tokens=8" in entry.decisions["dflash-config"]
    monkeypatch.setenv("VLLM_HWPLUGIN_DFLASH_FULL_GRAPH", "on")
    with pytest.raises(DFlashConfigError, match="num_speculative_tokens=8"):
        made_by_vllm(k=8)


# -- patches in force -------------------------------------------------------------------------------------------------


def test_the_drafters_features_that_are_live_are_forced(
    entry: journal.Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"draft-full-graph": "live", "dflash-full-graph": "live", "dflash-context-norm": "off", "nwor": "live"}
    entry.features = {name: {"state": state, "reason": ""} for name, state in states.items()}
    forced: list[str] = []
    monkeypatch.setattr(patching, "force", forced.extend)
    made_by_vllm(dflash=False)
    assert not forced
    made_by_vllm()
    assert sorted(forced) == ["dflash-full-graph", "draft-full-graph"]


# -- every supported version -------------------------------------------------------------------------------------------


def methods(text: str, owner: str) -> dict[str, ast.FunctionDef]:
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == owner]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("version", versions("vllm/config/vllm.py", "vllm/config/compilation.py"))
def test_vllm_calls_the_hooks_around_its_own_sizes(version: str, vllm_tree: Callable[[str], Any]) -> None:
    """The first before it fills in sizes, the second before it makes anything of them."""
    tree = vllm_tree(version)
    config = methods(tree.read("vllm/config/vllm.py"), "VllmConfig")
    body = ast.unparse(config["__post_init__"])
    calls = [
        "current_platform.apply_config_platform_defaults(self)",
        "self._set_cudagraph_sizes()",
        "current_platform.check_and_update_config(self)",
        "self.compilation_config.set_splitting_ops_for_v1(",
    ]
    assert all(body.count(call) == 1 for call in calls)
    places = [body.index(call) for call in calls]
    assert places == sorted(places)
    assert "cudagraph_capture_sizes" not in body[places[2] :]
    assert "cudagraph_capture_sizes" not in body[: places[0]]
    # Where the property is missing, the variable has to be there.
    assert "use_v2_model_runner" in config or "VLLM_USE_V2_MODEL_RUNNER: bool = False" in tree.read("vllm/envs.py")
    compilation = methods(tree.read("vllm/config/compilation.py"), "CompilationConfig")
    assert "self.cudagraph_capture_sizes" in ast.unparse(compilation["post_init_cudagraph_sizes"])


@pytest.mark.parametrize("version", versions("vllm/config/vllm.py", "vllm/config/compilation.py"))
def test_no_version_rounds_the_sizes_again(version: str, vllm_tree: Callable[[str], Any]) -> None:
    """The V1 runner rounds them to whole blocks once it knows its attention backends; these it leaves as they are."""
    text = vllm_tree(version).read("vllm/config/compilation.py")
    rounding = methods(text, "CompilationConfig")["adjust_cudagraph_sizes_for_spec_decode"]
    names: dict[str, Any] = {"round_up": lambda size, multiple: -(-size // multiple) * multiple}
    exec(compile(ast.Module([rounding], []), version, "exec"), names)
    parallel = [1] if len(rounding.args.args) == 3 else []
    for block, seqs in ((2, 7), (8, 200), (6, 33)):
        before = list(capture_sizes(block, seqs, 4096, default_sizes=VLLMS_OWN).sizes)
        config = SimpleNamespace(
            cudagraph_capture_sizes=list(before),
            max_cudagraph_capture_size=before[-1],
            pass_config=SimpleNamespace(enable_sp=False),
        )
        names[rounding.name](config, block, *parallel)
        assert config.cudagraph_capture_sizes == before
