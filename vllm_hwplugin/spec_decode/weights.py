# SPDX-License-Identifier: Apache-2.0
"""Keep weights where captured graphs read them, even if vLLM or a user replaces them.

Loaders write parameters in place. A DFlash draft also fuses some of them into tensors that are neither parameters nor
buffers. When the draft's weights are updated, and in some versions when it wakes up, vLLM fuses again, at other
addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves


class Parameters:
    """The parameters of modules that vLLM calls in each step and the plugin's graphs hold.

    Args:
        modules: with all their submodules; None is passed over.
        places: owner and attribute of further modules, which may be replaced as a whole; with the owner's own tensors.
    """

    def __init__(self, *modules: torch.nn.Module | None, places: Iterable[tuple[Any, str]] = ()):
        self._places = [(_attributes(owner, name), owner, name, getattr(owner, name)) for owner, name in places]
        roots = (module for module in (*modules, *(place[3] for place in self._places)) if module is not None)
        below = (owner for root in roots for owner in root.modules())
        owners = {id(owner): owner for owner in (*below, *(place[1] for place in self._places))}
        self._recorded = [
            (tensors, type(owner).__name__, name, tensor.data_ptr())
            for owner in owners.values()
            if isinstance(owner, torch.nn.Module)
            for tensors in (owner._parameters, owner._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]

    def moved(self) -> str | None:
        """Return why graphs read other memory than vLLM does, or None."""
        for attributes, owner, name, module in self._places:
            if attributes.get(name) is not module:
                return f"the {name} of a {type(owner).__name__} is another module than at capture"
        for tensors, owner_name, name, address in self._recorded:
            current = tensors.get(name)
            if current is None or current.data_ptr() != address:
                return f"the {name} of a {owner_name} is another tensor than at capture"
        return None


def _attributes(owner: Any, name: str) -> Mapping[str, Any]:
    """Return the dict in which `owner` keeps the attribute."""
    children: Mapping[str, Any] = getattr(owner, "_modules", {})
    return children if name in children else vars(owner)


#: What drafts make of the target's hidden states before their first pass.
_COMBINING: Final = ("fc", "fc_norm", "input_norm", "hidden_norm", "aux_hidden_norms")


def around_graphs(model: Any) -> list[tuple[Any, str]]:
    """Return owners and attributes that vLLM reads outside of a model's graphs.

    No hook sees a head that is passed by name, or to another method than `forward`. A model that takes images has its
    head in a `language_model`.
    """
    draft = getattr(model, "model", None)
    heads = [(model, "lm_head"), (getattr(model, "language_model", None), "lm_head")]
    places = [*heads, *((draft, name) for name in _COMBINING)]
    return [(owner, name) for owner, name in places if getattr(owner, name, None) is not None]


class Touched:
    """Collect the modules that a capture calls, or passes to a module that it calls.

    Args:
        graphed: a model whose passes vLLM has in its own graphs. Modules that these call are left out: vLLM would not
            notice a replacement either.
    """

    def __init__(self, graphed: Any = None):
        self._graphed, self._passes = graphed, 0
        self._modules: dict[int, torch.nn.Module] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = [register_module_forward_pre_hook(self._begin), register_module_forward_hook(self._end)]

    def __exit__(self, *failure: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, module: torch.nn.Module, arguments: Any) -> None:
        self._passes += module is self._graphed
        if not self._passes:
            self._modules |= {id(part): part for part in (module, *arguments) if isinstance(part, torch.nn.Module)}

    def _end(self, module: torch.nn.Module, *_: Any) -> None:
        self._passes -= module is self._graphed

    def places(self, *models: Any) -> list[tuple[torch.nn.Module, str]]:
        """Return owner and attribute of each collected module in these models."""
        return [
            (owner, name)
            for model in models
            if isinstance(model, torch.nn.Module)
            for owner in model.modules()
            for name, child in owner._modules.items()
            if id(child) in self._modules
        ]


class FusedWeights:
    """The tensors that a draft model or its head has fused. A model with dummy weights fuses them in its first call."""

    def __init__(self, model: Any):
        draft = getattr(model, "model", None)
        owners = [] if draft is None else [draft, *(draft.children() if isinstance(draft, torch.nn.Module) else ())]
        self._recorded = [
            (owner, name, value)
            for owner in owners
            for name, value in vars(owner).items()
            if name not in ("_parameters", "_buffers") and _tensors(value)
        ]

    def keep_in_place(self) -> str | None:
        """Copy newly fused weights to the graphs' tensors, or return why not."""
        for owner, name, recorded in self._recorded:
            current = getattr(owner, name)
            if current is recorded:
                continue
            before, after = _tensors(recorded), _tensors(current)
            if [(old.shape, old.dtype) for old in before] != [(new.shape, new.dtype) for new in after]:
                return f"the draft model's {name} has another shape or type than at capture"
            for old, new in zip(before, after, strict=True):
                # A view of a parameter was updated in place already; only a tensor with its own memory is copied.
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
            setattr(owner, name, recorded)
        return None


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value that holds only tensors, else nothing."""
    leaves = tree_leaves(value)
    return leaves if all(torch.is_tensor(leaf) for leaf in leaves) else []
