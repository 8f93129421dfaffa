# SPDX-License-Identifier: Apache-2.0
"""The V1 runner's accepted counts while rows move, with vLLM's released input batch and runner text."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams  # noqa: E402

from tests.released import Modules, take, texts  # noqa: E402
from vllm_hwplugin.base.versions import SUPPORTED  # noqa: E402

from ..conftest import versions  # noqa: E402
from .test_drafters import BASES  # noqa: E402

RUNNER = "vllm/v1/worker/gpu_model_runner.py"
OWN = ("vllm.v1.worker.gpu_input_batch", "vllm.v1.worker.block_table", "vllm.v1.sample", "vllm.v1.outputs")
OFF = {"VLLM_HWPLUGIN_BACKPORT_ACCEPTED_ROWS": "off"}
#: Without prefix caching vLLM has the fix from here on.
FIXED_WITHOUT_ALIGN = SUPPORTED.index("0.24.0")


class Host:
    """`mamba_utils`: the counts of a step arrive in the host's tensor when the test says so."""

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any]] = []

    def arrive(self) -> None:
        while self._copies:
            target, counts = self._copies.pop()
            target.copy_(counts)

    def postprocess_mamba(self, *_: Any) -> None:
        pass

    def postprocess_mamba_align_gpu(
        self, *, num_reqs: int, num_accepted_tokens_gpu: Any, num_accepted_tokens_cpu_tensor: Any, **_: Any
    ) -> None:
        self._copies.append((num_accepted_tokens_cpu_tensor[:num_reqs], num_accepted_tokens_gpu[:num_reqs].clone()))


class Runner:
    """What the released methods read of a `GPUModelRunner`.

    Args:
        modules: of the release, patched or not.
        mode: of the Mamba cache.
        early: whether a step's counts arrive before the next step moves rows, or when it waits for them.
        asynchronous: whether steps are scheduled ahead.
    """

    def __init__(self, modules: Modules, mode: str, *, early: bool, asynchronous: bool = True) -> None:
        text = modules.text(RUNNER)
        self._host, self._early = Host(), early
        methods = {"_update_states_after_model_execute", "_compute_prev_positions"}
        released = take(text, "GPUModelRunner", methods, given={**BASES, "mamba_utils": self._host})
        buffer = np.ones(8, dtype=np.int32)
        self._runner = runner = released()
        runner.speculative_config, runner.use_async_scheduling = object(), asynchronous
        runner.model_config = SimpleNamespace(is_hybrid=True)
        runner.cache_config = SimpleNamespace(mamba_cache_mode=mode)
        runner.num_accepted_tokens = SimpleNamespace(
            np=buffer, cpu=torch.from_numpy(buffer), gpu=torch.ones(8, dtype=torch.int32), copy_to_gpu=self._copy
        )
        runner.num_accepted_tokens_event = SimpleNamespace(record=lambda: None, synchronize=self._host.arrive)
        runner.prev_positions = SimpleNamespace(np=np.zeros(8, dtype=np.int64))
        runner.mamba_state_idx, runner.num_spec_tokens, runner.kv_cache_config, runner.requests = {}, 3, None, {}
        runner.compilation_config = SimpleNamespace(static_forward_context=None)
        runner.model = SimpleNamespace(get_mamba_state_copy_func=lambda: None)
        for name in ("_get_mamba_bufs", "_get_mamba_copy_bufs", "_get_mamba_state_copy_funcs"):
            setattr(runner, name, lambda: None)
        self.batch = runner.input_batch = _batch(modules)
        self._prepare = _counts_of_prepare_inputs(text)

    def _copy(self, *_: int) -> None:
        self._runner.num_accepted_tokens.gpu.copy_(self._runner.num_accepted_tokens.cpu)

    def sample(self, accepted: dict[str, int]) -> None:
        """Let a step end: by request, the number of tokens."""
        tokens = torch.full((len(self.batch.req_ids), 4), -1)
        for row, name in enumerate(self.batch.req_ids):
            tokens[row, : accepted[name]] = 5
        self._runner._update_states_after_model_execute(tokens, None)
        self.batch.prev_req_id_to_index = dict(self.batch.req_id_to_index)
        if self._early:
            self._host.arrive()

    def prepare(self) -> dict[str, int]:
        """Return each request's count on the device, before the device's own correction."""
        self._runner._compute_prev_positions(len(self.batch.req_ids))
        self._prepare(self._runner, len(self.batch.req_ids), self.batch.prev_req_id_to_index)
        return dict(zip(self.batch.req_ids, self._runner.num_accepted_tokens.gpu.tolist(), strict=False))


def _counts_of_prepare_inputs(text: str) -> Callable[..., None]:
    """Make a function of the statements of `_prepare_inputs` from the host's counts to the device's."""
    (runner,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == "GPUModelRunner")
    assert isinstance(runner, ast.ClassDef)
    (method,) = (node for node in runner.body if getattr(node, "name", None) == "_prepare_inputs")
    body = [
        node
        for node in method.body  # type: ignore[attr-defined]
        if isinstance(node, ast.If | ast.Assign)
        and any(name in ast.unparse(node) for name in ("num_accepted_tokens_event", "needs_cpu_accepted_counts"))
    ]
    assert body
    function = ast.parse("def prepare(self, num_reqs, prev_req_id_to_index): pass").body[0]
    function.body = body  # type: ignore[attr-defined]
    namespace = {"np": np}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "released _prepare_inputs", "exec"), namespace)
    return namespace["prepare"]  # type: ignore[no-any-return]


def _batch(modules: Modules) -> Any:
    module = modules("vllm.v1.worker.gpu_input_batch")
    options = {"max_num_reqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64, "device": torch.device("cpu")}
    options |= {"vocab_size": 16, "block_sizes": [16], "kernel_block_sizes": [16], "max_num_blocks_per_req": [4]}
    known = inspect.signature(module.InputBatch).parameters
    options |= {name: False for name in ("pin_memory",) if name in known}
    batch = module.InputBatch(**{name: value for name, value in options.items() if name in known})
    for name in "ABC":
        batch.add_request(_request(batch, name))
    batch.refresh_metadata()
    return batch


def _request(batch: Any, name: str) -> Any:
    return sys.modules[type(batch).__module__].CachedRequestState(
        req_id=name,
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=SamplingParams(),
        generator=None,
        block_ids=([1],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def _moves(runner: Runner) -> None:
    """A ends, D takes its row, and vLLM's reordering swaps rows."""
    batch = runner.batch
    batch.remove_request("A")
    batch.add_request(_request(batch, "D"))
    batch.condense()
    batch.swap_states(0, 2)
    batch.swap_states(0, 1)
    batch.refresh_metadata()


@pytest.fixture
def released(vllm_tree: Callable[[str], Any]) -> Callable[..., Modules]:
    return lambda version, **choices: Modules(texts(vllm_tree(version), **choices), OWN)


FILES = (RUNNER, "vllm/v1/worker/gpu_input_batch.py")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("version", versions(*FILES))
def test_counts_follow_their_requests_with_prefix_caching(
    version: str, early: bool, released: Callable[..., Modules]
) -> None:
    def counts(**choices: str) -> dict[str, int]:
        runner = Runner(released(version, **choices), "align", early=early)
        runner.sample({"A": 1, "B": 2, "C": 3})
        _moves(runner)
        return runner.prepare()

    right = {"B": 2, "C": 3, "D": 1}
    # Up to 0.21 the counts always arrive early.
    assert (counts(**OFF) == right) == (not early and SUPPORTED.index(version) >= SUPPORTED.index("0.22.0"))
    assert counts() == right


@pytest.mark.parametrize("version", versions(*FILES, each_text=False))
def test_without_prefix_caching_the_device_has_the_counts(version: str, released: Callable[..., Modules]) -> None:
    """A request whose last step had no drafts begins from its first state; the device corrects the others."""

    def counts(**choices: str) -> dict[str, int]:
        runner = Runner(released(version, **choices), "none", early=True)
        runner.sample({"A": 4, "B": 1, "C": 3})
        _moves(runner)
        return runner.prepare()

    assert (counts(**OFF)["B"] == 1) == (SUPPORTED.index(version) >= FIXED_WITHOUT_ALIGN)
    assert counts() == dict.fromkeys("BCD", 1)
