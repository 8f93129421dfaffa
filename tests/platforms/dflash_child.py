# SPDX-License-Identifier: Apache-2.0
"""DFlash configurations of the installed vLLM under a platform that calls the hooks; run by test_dflash_processes.py.

`python dflash_child.py FOLDER`: the folder holds the checkpoints `target` and `dflash`. The last line of the output is
what came of it, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
from typing import Any


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
    from vllm_hwplugin.base import run_records
    from vllm_hwplugin.spec_decode import capture_sizes

    compilation = vllm_config.compilation_config
    entry = run_records.current()
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
    from vllm_hwplugin.base import run_records

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
    made["block said"] = run_records.current().decisions["dflash-config"]
    os.environ["VLLM_HWPLUGIN_DFLASH_FULL_GRAPH"] = "on"
    add("block, required", k=8)
    return made


if __name__ == "__main__":
    print(json.dumps(configurations(sys.argv[1])))
