# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes do with a DFlash configuration, on the installed vLLM; run by test_dflash_processes.py.

`python dflash_child.py configurations FOLDER` makes configurations under a platform that calls the hooks.
`python dflash_child.py processes FOLDER` imports patched modules too early in this process, in forked and in spawned
ones. FOLDER holds the checkpoints `target` and `dflash`. The last line of the output is what came of it, as JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import sys
from importlib.machinery import PathFinder
from typing import Any

# Patched modules, and a function of each that the patches change.
MODULES = {
    "vllm.v1.spec_decode.dflash": ("DFlashProposer", "_create_draft_vllm_config"),
    "vllm.model_executor.models.qwen3_dflash": ("DFlashQwen3Model", "_normalize_context_k"),
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner", "_dummy_run"),
}


def use_platform() -> None:
    """Make vLLM's current platform a CPU that captures graphs, as far as a configuration can tell."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    from vllm_hwplugin import dflash
    from vllm_hwplugin.spec_decode import capture_sizes

    class Platform(CpuPlatform):
        @classmethod
        def support_static_graph_mode(cls) -> bool:
            return True

        @classmethod
        def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
            super().apply_config_platform_defaults(vllm_config)
            capture_sizes.note_user_sizes(vllm_config)

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            compilation = vllm_config.compilation_config
            decided = compilation.cudagraph_capture_sizes, compilation.cudagraph_mode
            super().check_and_update_config(vllm_config)
            compilation.cudagraph_capture_sizes, compilation.cudagraph_mode = decided
            dflash.check_and_update_config(vllm_config)
            capture_sizes.check_and_update_config(vllm_config)

    vllm.platforms.current_platform = Platform()


def make(folder: str, compilation: dict | None = None, k: int = 7, **arguments: Any) -> Any:
    from vllm import EngineArgs

    arguments = {
        "model": f"{folder}/target",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "speculative_config": {"method": "dflash", "model": f"{folder}/dflash", "num_speculative_tokens": k},
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", **(compilation or {})},
        **arguments,
    }
    return EngineArgs(**arguments).create_engine_config()


def outcome(vllm_config: Any) -> dict:
    from vllm_hwplugin import journal
    from vllm_hwplugin.spec_decode import capture_sizes

    compilation = vllm_config.compilation_config
    entry = journal.current()
    return {
        "sizes": list(compilation.cudagraph_capture_sizes),
        "largest": compilation.max_cudagraph_capture_size,
        "compile": sorted(compilation.compile_sizes),
        "mode": compilation.cudagraph_mode.name,
        "extra": sorted(vars(vllm_config).keys() - {field.name for field in dataclasses.fields(vllm_config)}),
        "own": capture_sizes.largest_own(compilation),
        "note": entry.decisions.get("capture-sizes") if entry is not None else None,
    }


def configurations(folder: str) -> dict[str, Any]:
    from vllm_hwplugin import journal

    use_platform()
    made: dict[str, Any] = {}

    def add(name: str, **arguments: Any) -> Any:
        try:
            vllm_config = make(folder, **arguments)
        except Exception as error:
            made[name] = f"{type(error).__name__}: {error}"
            return None
        made[name] = outcome(vllm_config)
        return vllm_config

    add("plain")
    many = add("many requests", max_num_seqs=256)
    key = many.compute_hash()
    made["replaced"] = outcome(dataclasses.replace(many))
    made["pickled"] = outcome(dataclasses.replace(pickle.loads(pickle.dumps(many))))
    made["same key"] = key == many.compute_hash() == dataclasses.replace(many).compute_hash()
    # What the V1 runner does once the attention backends are known.
    many.compilation_config.adjust_cudagraph_sizes_for_spec_decode(8)
    made["adjusted"] = outcome(many)
    add("given", compilation={"cudagraph_capture_sizes": [64, 1, 8, 20]})
    add("bounded", compilation={"max_cudagraph_capture_size": 50})
    add("piecewise", compilation={"mode": 3, "cudagraph_mode": "PIECEWISE"})
    add("eager", enforce_eager=True)
    add("no speculation", speculative_config=None)
    add("block", k=8)
    made["block said"] = journal.current().decisions["dflash-config"]
    os.environ["VLLM_HWPLUGIN_DFLASH_FULL_GRAPH"] = "on"
    add("block, required", k=8)
    return made


def import_stock(sabotage: str | None) -> None:
    """Import the targets past the plugin's finder, and make one of them unfit for a swap."""
    sys.meta_path.insert(0, PathFinder)  # type: ignore[arg-type]
    for name in MODULES:
        importlib.import_module(name)
    sys.meta_path.remove(PathFinder)  # type: ignore[arg-type]
    spoilt = {"drafter": "vllm.v1.spec_decode.dflash", "runner": "vllm.v1.worker.gpu_model_runner"}.get(sabotage or "")
    if spoilt is not None:
        holder, function = MODULES[spoilt]
        # Another plugin that replaces the function: what runs is no longer what the installed file says.
        setattr(getattr(sys.modules[spoilt], holder), function, lambda self, *arguments: None)


def scenario(config: bytes, early: bool, sabotage: str | None, variables: dict[str, str], answers: Any) -> None:
    """Unpickle a configuration and make others from it, as a worker does for the draft.

    Args:
        early: the modules are imported before the plugin is, otherwise past its finder.
        answers: has `put` for what came of it.
    """
    os.environ.update(variables)
    vllm_config = pickle.loads(config)
    from vllm_hwplugin import journal
    from vllm_hwplugin.patching import _runtime

    if not early:
        _runtime.install()
    import_stock(sabotage)
    # What `from ... import` elsewhere would have bound.
    bound = {
        name: inspect.unwrap(vars(getattr(sys.modules[name], holder))[function])
        for name, (holder, function) in MODULES.items()
    }
    stock = {name: function.__code__ for name, function in bound.items()}
    use_platform()
    logged = Lines()
    logging.getLogger("vllm.hwplugin").addHandler(logged)
    answer: dict[str, Any] = {"error": None}
    try:
        for _ in range(2):
            vllm_config = dataclasses.replace(vllm_config)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    entry, plan = journal.current(), _runtime.current_plan()
    assert entry is not None
    texts = {} if plan is None else {file.module: file.text for file in plan.files.values()}
    answer |= {
        "live": list(entry.live),
        "refused": {name: item["reason"] for name, item in entry.features.items() if item["state"] == "refused"},
        "stock before": all(code.co_filename.startswith(str(entry.vllm_root)) for code in stock.values()),
        # The function that was bound before runs what its source says, which is the patched text.
        "patched": sorted(
            name
            for name, function in bound.items()
            if inspect.getsource(sys.modules[name]) == texts.get(name) and function.__code__ is not stock[name]
        ),
        "warnings": logged.lines,
        "role": entry.role,
    }
    answers.put(answer)


class Lines(logging.Handler):
    """The warnings that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, entry: logging.LogRecord) -> None:
        self.lines.append(entry.getMessage())


class Kept(list):
    """Takes the place of a queue in this process."""

    put = list.append


def processes(folder: str) -> dict[str, Any]:
    # Made without the hooks and without the plugin, and pickled as vLLM sends it to a worker.
    config = pickle.dumps(make(folder))
    off = {"VLLM_HWPLUGIN_DFLASH_FULL_GRAPH": "off"}
    cases: dict[str, tuple[str, bool, str | None, dict[str, str]]] = {
        "forked, before the plugin": ("fork", True, None, off),
        "forked, past the finder": ("fork", False, None, off),
        "spawned, past the finder": ("spawn", False, None, off),
        "everything on": ("fork", False, None, {}),
        "drafter": ("fork", False, "drafter", {}),
        "drafter, strict": ("fork", False, "drafter", {"VLLM_HWPLUGIN_STRICT": "1"}),
        "drafter, on": ("fork", False, "drafter", {"VLLM_HWPLUGIN_DFLASH_FULL_GRAPH": "on"}),
        "runner": ("fork", False, "runner", {}),
    }
    found: dict[str, Any] = {}
    for name, (method, *arguments) in cases.items():
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        child = context.Process(target=scenario, args=(config, *arguments, answers))
        child.start()
        child.join()
        found[name] = answers.get() if not answers.empty() else {"error": f"ended with {child.exitcode}"}
    here = Kept()
    scenario(config, False, None, off, here)
    found["parent, past the finder"] = here[0]
    return found


if __name__ == "__main__":
    print(json.dumps({"configurations": configurations, "processes": processes}[sys.argv[1]](sys.argv[2])))
