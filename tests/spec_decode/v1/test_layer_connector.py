"""Which of vLLM's KV connectors do something at each layer."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_hwplugin.spec_decode.obstacles import working_by_layer


class Late(KVConnectorBase_V1):
    """One of a user's that loads at the layers."""

    def wait_for_layer_load(self, layer_name):
        self.loaded.wait(layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Nothing to do."""


class Piecewise(Late):
    """One that says so, where it does."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return extra_config.get("by_layer", False)


def transfer(name, **options):
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **options)


def own(cls):
    return transfer(cls.__name__, kv_connector_module_path=__name__)


@pytest.mark.parametrize("name", ["OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector"])
def test_connectors_that_do_nothing_there(name):
    assert working_by_layer(transfer(name)) == ""


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ""),
        (transfer("ExampleConnector"), "ExampleConnector"),
        (own(Late), "Late"),
        # vLLM has asked it, and kept its FULL graphs.
        (own(Piecewise), ""),
    ],
)
def test_others(asked, found):
    assert working_by_layer(asked) == found


@pytest.mark.parametrize(("second", "found"), [("ExampleConnector", "ExampleConnector"), ("OffloadingConnector", "")])
def test_of_several_each_is_looked_at(second, found):
    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("OffloadingConnector", second)]
    assert working_by_layer(transfer("MultiConnector", kv_connector_extra_config={"connectors": parts})) == found
