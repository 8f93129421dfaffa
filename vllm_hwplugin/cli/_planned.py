# SPDX-License-Identifier: Apache-2.0
"""``doctor --for``: which features an engine would use, from vLLM's configuration for its command.

A child process parses the command with vLLM's parser and makes the `VllmConfig` as `vllm serve` does, with the plugin
loaded. It builds no engine, opens no device and reads no weights.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..base.errors import HwpluginError
from ..base.run_records import Use

#: The GPU to assume if this host has none: what vLLM asks of a device to make a configuration.
ASSUMED_CAPABILITY: Final = "9.0"
_ASSUMED_MEMORY: Final = 80 << 30
_EXTENSIONS: Final = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch")
_SERVERS: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")


class NotPlanned(HwpluginError):
    """The command cannot be read, or the child process failed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is known of an engine before its start; docs/commands.md describes the fields.

    Attributes:
        device: The device that the answer applies to.
        described: Model runner, drafter and mode of CUDA graphs.
        uses: feature -> whether the engine uses it, as far as the configuration tells.
        left: feature and part -> why vLLM runs that part.
        unknown: Condition that only the device or the loaded model decides -> features that depend on it.
        unserved: Decode batches without a FULL graph, and the capture size that they need; or empty.
        ignored: Settings of `--speculative-config` that the model runner does not read.
        refused: Why vLLM or the plugin would not start this engine; or empty.
    """

    command: str
    device: str
    described: str = ""
    uses: Mapping[str, Use] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unserved: str = ""
    ignored: Sequence[str] = ()
    refused: str = ""


def plan(command: str, kind: str, gpu: str | None, build: str) -> Planned:
    """Derive the features of an engine from vLLM's configuration for a command.

    Args:
        command: A command line that starts a server, or a file for `--config`.
        kind: This host's platform: `cuda`, `musa` or `cpu`.
        gpu: The compute capability to assume; None: this host's device, if vLLM's build supports it.
        build: Distribution and version of vLLM.

    Raises:
        NotPlanned: The command cannot be read.
    """
    variables, words = _serve_arguments(command)
    if gpu is None and kind == "cpu" and "cpu" not in build:
        gpu = ASSUMED_CAPABILITY
    device = {"cpu": "this host's CPU"}.get(kind, f"this host's {kind.upper()} device")
    if gpu is not None:
        device = f"an NVIDIA GPU of compute capability {gpu} with {_ASSUMED_MEMORY >> 30} GiB (assumed)"
    with tempfile.TemporaryDirectory(prefix="vllm-hwplugin-") as folder:
        answer = Path(folder) / "answer.json"
        job = json.dumps({"words": words, "gpu": gpu, "answer": str(answer)})
        # A separate cache: this process's run record must not look like an engine's.
        environ = {**os.environ, **variables, "VLLM_HWPLUGIN_CACHE_DIR": folder, "VLLM_NO_USAGE_STATS": "1"}
        child = f"from {__name__} import answer; answer()"
        done = subprocess.run([sys.executable, "-c", child, job], env=environ, capture_output=True, text=True)
        if not answer.exists():
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no output"]
            raise NotPlanned(f"vLLM cannot read `{command}`: {last[0].strip()}")
        fields = json.loads(answer.read_text(encoding="utf-8"))
    return Planned(command, device, **fields)


def _serve_arguments(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command sets, and vLLM's arguments."""
    # `Path.is_file` raises for a name that is too long.
    if os.path.isfile(command):
        return {}, ["--config", command]
    try:
        words = shlex.split(command, comments=True)
    except ValueError as error:
        raise NotPlanned(f"`{command}` is not a valid command line: {error}") from error
    variables = {}
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    for at, word in enumerate(words):
        if Path(word).name == "vllm" or word in _SERVERS or word.endswith("api_server.py"):
            rest = words[at + 1 :]
            return variables, rest[1:] if rest[:1] == ["serve"] else rest
    raise NotPlanned(f"`{command}` is not a file or a server command; expected e.g. 'vllm serve MODEL'")


# -- in the child process ---------------------------------------------------------------------------------------------


def answer() -> None:
    """Write the fields of :class:`Planned` to the job's answer file."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    if job["gpu"] is not None:
        _assume_gpu(job["gpu"])
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs.from_cli_args(_parsed(job["words"]))
    try:
        fields = _foreseen(arguments, job["gpu"] is not None)
    except OSError:
        # A missing model, or the network: the parent reports that nothing is known.
        raise
    except (ValueError, AssertionError, NotImplementedError, HwpluginError) as error:
        fields = {"refused": f"{type(error).__name__}: {error}"}
    Path(job["answer"]).write_text(json.dumps(fields), encoding="utf-8")


def _parsed(words: Sequence[str]) -> Any:
    """Parse the arguments as `vllm serve` does."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *words])
    if getattr(parsed, "model_tag", None) is not None:
        parsed.model = parsed.model_tag
    return parsed


def _foreseen(arguments: Any, assumed: bool) -> dict[str, Any]:
    from vllm.config import SpeculativeConfig
    from vllm.usage.usage_lib import UsageContext

    if assumed:
        # Without a GPU vLLM finds no Triton driver, and it chooses the model runner by that.
        for name in ("vllm.triton_utils", "vllm.config.vllm"):
            vars(sys.modules[name])["HAS_TRITON"] = True
    given = arguments.speculative_config if isinstance(arguments.speculative_config, dict) else {}
    # vLLM adds to this dict.
    named = [name for name, value in given.items() if value != getattr(SpeculativeConfig, name, None)]
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    from ..base import run_records
    from ..patching import current_plan, find_installed
    from ..spec_decode import ignored_settings, planned_engine
    from ..spec_decode.capture_sizes import UNSERVED, uses_v2

    entry, spec, v2 = run_records.current(), config.speculative_config, uses_v2(config)
    drafts = "no speculation" if spec is None else f"{spec.method} k={spec.num_speculative_tokens}"
    runner = f"Model Runner {'V2' if v2 else 'V1'}"
    described = f"{runner}, {drafts}, cudagraph_mode {config.compilation_config.cudagraph_mode.name}"
    if entry is None or entry.off:
        return {"described": f"{described}; the plugin is off"}
    foreseen = planned_engine.foresee(config, entry)
    root = find_installed().root

    plan = current_plan()

    def read(path: str) -> str | None:
        if plan is not None and path in plan.files:
            return plan.files[path].text
        file = root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    unknown: dict[str, list[str]] = {}
    for name, feature in foreseen.items():
        for reason in feature.unknown:
            unknown.setdefault(reason, []).append(name)
    return {
        "described": described,
        "uses": {name: feature.use for name, feature in foreseen.items()},
        "left": {
            f"{name} {part}": reason for name, feature in foreseen.items() for part, reason in feature.left.items()
        },
        "unknown": unknown,
        "unserved": entry.decisions.get(UNSERVED, ""),
        "ignored": [
            f"{field}: {runner} does not read it" for field in ignored_settings.ignored(named, v2=v2, read=read)
        ],
    }


def _assume_gpu(capability: str) -> None:
    """Make vLLM find an NVIDIA GPU for its configuration."""
    import types

    # The extensions need a driver, and nothing here calls them.
    for name in _EXTENSIONS:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    import vllm.platforms as platforms

    builtin = platforms.builtin_platform_plugins
    builtin.update({name: lambda: None for name in builtin} | {"cuda": lambda: "vllm.platforms.cuda.CudaPlatform"})
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(*map(int, capability.split("."))),
        "get_device_total_memory": _ASSUMED_MEMORY,
        "get_device_name": "NVIDIA GPU",
        "device_count": 8,
    }
    for name, value in answers.items():
        setattr(type(platforms.current_platform), name, classmethod(lambda cls, *_, value=value, **__: value))
    from vllm.model_executor.models import registry

    # vLLM inspects model classes in child processes without this assumption, and imports kernels to save the answers.
    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda *_: None
