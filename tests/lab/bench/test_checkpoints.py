from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench import CheckpointsMissing, find_checkpoints, load_prompts


def test_the_source_tree_carries_checkpoints():
    found = find_checkpoints(None)
    assert found.root.parts[-3:] == ("tests", "assets", "small")
    assert (found.target / "model.safetensors").exists()
    assert (found.drafter("dflash") / "config.json").exists()
    prompts = load_prompts(found, 96)
    assert len(prompts) == 96
    assert load_prompts(found, 2) == prompts[:2]


def test_a_folder_without_checkpoints_names_what_is_missing_and_the_option(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(CheckpointsMissing, match=r"missing: eagle3, dflash, prompts.json.*--model FOLDER"):
        find_checkpoints(tmp_path)


def test_more_prompts_than_there_are():
    with pytest.raises(CheckpointsMissing, match="holds 96 prompts, 97 were asked for"):
        load_prompts(find_checkpoints(None), 97)
