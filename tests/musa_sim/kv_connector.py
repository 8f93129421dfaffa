# SPDX-License-Identifier: Apache-2.0
"""A KV connector that moves nothing, and writes down what it is shown of each step."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

#: Of each step the lengths of its requests and their tokens' slots, by layer; None without attention metadata.
SHOWN: list[dict | None] = []


class Witness(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, attn_metadata=None, num_tokens=0, **_) -> None:
        SHOWN.append(
            None
            if attn_metadata is None
            else {
                layer: [one.seq_lens.tolist(), one.slot_mapping[:num_tokens].tolist(), one.max_seq_len]
                for layer, one in attn_metadata.items()
            }
        )

    def wait_for_layer_load(self, layer_name) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **_) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens) -> None:
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()
