# SPDX-License-Identifier: Apache-2.0
"""Keep weights where recorded graphs read them, also when vLLM or a user puts others in their place.

Loaders write parameters in place. A DFlash draft also fuses some of them into tensors that are neither parameters nor
buffers. When the draft's weights are updated, and in some versions when it wakes up, vLLM fuses anew, at other
addresses.
"""

from __future__ import annotations

from typing import Any

import torch


class Parameters:
    """The parameters of modules that stock vLLM calls in each step, and graphs of the plugin hold.

    Args:
        modules: with all that is below them; None is passed over.
    """

    def __init__(self, *modules: torch.nn.Module | None):
        self._recorded = [
            (owner, name, parameter.data_ptr())
            for module in modules
            if module is not None
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]

    def moved(self) -> str | None:
        """Why graphs read other memory than vLLM does, or None."""
        for owner, name, address in self._recorded:
            current = owner._parameters.get(name)
            if current is None or current.data_ptr() != address:
                return f"the {name} of a {type(owner).__name__} is another tensor than at capture"
        return None


def around_graphs(model: Any) -> list[torch.nn.Module | None]:
    """What vLLM itself calls of a target or a draft outside of its graphs: the head, and an Eagle3 draft's `fc`.

    A model that takes images has its head in a `language_model`.
    """
    heads = [getattr(one, "lm_head", None) for one in (model, getattr(model, "language_model", None))]
    return [*heads, getattr(getattr(model, "model", None), "fc", None)]


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
            # A view of a parameter was updated in place already; only a tensor with memory of its own has to be copied.
            if current.data_ptr() != recorded.data_ptr():
                recorded.copy_(current)
            setattr(self._model, name, recorded)
        return None
