# SPDX-License-Identifier: Apache-2.0
"""What a DFlash draft model makes of its weights, kept where recorded graphs read it.

Loaders write parameters in place. What the model has fused of them is neither a parameter nor a buffer: vLLM fuses anew
when the draft's weights are updated, and in some versions when it wakes up, into tensors at other addresses.
"""

from __future__ import annotations

from typing import Any

import torch


class FusedWeights:
    """The tensors that a draft model has fused when this is made.

    Args:
        model: vLLM's draft model. One with dummy weights fuses them in its first call.
    """

    def __init__(self, model: Any):
        self._model = getattr(model, "model", None)
        found = {} if self._model is None else vars(self._model)
        self._recorded = {name: value for name, value in found.items() if torch.is_tensor(value)}

    def keep_in_place(self) -> str | None:
        """Put what was fused anew where the graphs read it.

        Returns:
            Why that is not possible, or None.
        """
        for name, recorded in self._recorded.items():
            current = getattr(self._model, name)
            if current is recorded:
                continue
            if getattr(current, "shape", None) != recorded.shape or current.dtype != recorded.dtype:
                return f"the draft model's {name} has another shape or type than at capture"
            # A name for a parameter's memory is written where it was; a tensor of its own is not.
            if current.data_ptr() != recorded.data_ptr():
                recorded.copy_(current)
            setattr(self._model, name, recorded)
        return None
