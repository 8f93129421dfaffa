# SPDX-License-Identifier: Apache-2.0
"""When an engine core leaves out the plugin's graphs: its memory is short, or that of another rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm import envs
from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.utils.network_utils import get_open_port

from vllm_hwplugin.base import gates
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode.kv_cache_room import leave_graphs, with_room

from ..conftest import versions
from ..released import Modules, texts

#: Bytes for the KV cache beside all graphs, that graphs of the plugin take, and for one request.
AVAILABLE, GRAPHS, NEEDED = 100, 50, 120


class Core:
    """An engine core of two workers, and what vLLM makes of their memory."""

    def __init__(self, needed: int = NEEDED, freed: int = GRAPHS, **parallel: Any):
        self.needed, self.freed, self.asked, self.told = needed, freed, list[list[int]](), list[Any]()
        self.model_executor = SimpleNamespace(collective_rpc=self.collective_rpc)
        self.states = False
        given = {"distributed_executor_backend": "mp", "data_parallel_size": 1, "enable_elastic_ep": False, **parallel}
        self.config = SimpleNamespace(
            parallel_config=SimpleNamespace(has_unfinished_dp=lambda group, short: group(short), **given),
            scheduler_config=SimpleNamespace(max_num_seqs=AVAILABLE + 1),
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        )

    def collective_rpc(self, call: Any) -> list[int]:
        self.told.append(call)
        return [self.freed] * 2

    def get_kv_cache_configs(self, config: Any, specs: Any, memory: list[int]) -> list[Any]:
        assert config is self.config
        self.asked.append(memory)
        if min(memory) < self.needed:
            raise ValueError("vLLM's")
        return [SimpleNamespace(num_blocks=size, has_mamba_layers=self.states) for size in memory]

    def start(self) -> list[int]:
        configs = with_room(self, self.get_kv_cache_configs)(self.config, [{}, {}], [AVAILABLE] * 2)
        return [config.num_blocks for config in configs]


def test_a_start_with_memory_for_all_graphs_is_left_alone() -> None:
    core = Core(needed=AVAILABLE)
    assert core.start() == [AVAILABLE] * 2
    assert (len(core.asked), core.told) == (1, [])


def test_graphs_are_left_out_where_no_request_fits() -> None:
    core = Core()
    assert core.start() == [AVAILABLE + GRAPHS] * 2
    assert core.told == [leave_graphs]


def test_graphs_are_left_out_where_requests_have_no_state() -> None:
    core = Core(needed=AVAILABLE)
    core.states = True
    assert core.start() == [AVAILABLE + GRAPHS] * 2


@pytest.mark.parametrize("needed", [(NEEDED, AVAILABLE), (AVAILABLE, NEEDED), (AVAILABLE, AVAILABLE)])
def test_ranks_that_share_experts_leave_them_out_together(needed: tuple[int, int]) -> None:
    """They ask each other over vLLM's own group of such ranks."""
    port = get_open_port()

    def start(rank: int) -> list[int]:
        core: Any = Core(needed=needed[rank], data_parallel_size=2)
        core.config.parallel_config.has_unfinished_dp = ParallelConfig.has_unfinished_dp
        core.dp_group = stateless_init_torch_distributed_process_group("127.0.0.1", port, rank, 2, backend="gloo")
        blocks: list[int] = core.start()
        return blocks

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(start, range(2), timeout=60))
    assert found == [[AVAILABLE + GRAPHS if NEEDED in needed else AVAILABLE] * 2] * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"freed": 0},
        {"distributed_executor_backend": "external_launcher"},
        {"enable_elastic_ep": True},
        {"data_parallel_size": 2},
    ],
)
def test_vllm_ends_the_start_if_nothing_helps_or_ranks_cannot_agree(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="vLLM's"):
        Core(**settings).start()


@pytest.mark.parametrize(
    "version", versions("vllm/v1/worker/startup_plan.py", among=SUPPORTED[SUPPORTED.index("0.29.0") :])
)
def test_a_startup_plan_is_not_of_other_patches(vllm_tree: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the memory that a start without these graphs left for the KV cache."""
    name = "vllm.v1.worker.startup_plan"
    platform = mock.Mock(get_device_capability=str, get_device_name=str, get_device_total_memory=int)
    module = Modules(texts(vllm_tree(version)), [name], stand_ins={"current_platform": platform})(name)
    keys = set()
    for patches in ("none", "none", "some"):
        monkeypatch.setitem(envs.environment_variables, gates.FINGERPRINT, lambda patches=patches: patches)
        keys.add(module.compute_plan_fingerprint(SimpleNamespace(compute_hash=str), 0, 1))
    assert len(keys) == 2
