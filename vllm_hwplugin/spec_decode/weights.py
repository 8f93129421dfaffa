# SPDX-License-Identifier: Apache-2.0
"""Keep weights where recorded graphs read them, also when vLLM or a user puts others in their place.

Loaders write parameters in place. A DFlash draft also fuses some of them into tensors that are neither parameters nor
buffers. When the draft's weights are updated, and in some versions when it wakes up, vLLM fuses anew, at other
addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves


class Parameters:
    """The parameters of modules that stock vLLM calls in each step, and graphs of the plugin hold.

    Args:
        modules: with all that is below them; None is passed over.
        places: owner and attribute of further ones, which may be replaced as a whole; and what the owner itself has.
    """

    def __init__(self, *modules: torch.nn.Module | None, places: Iterable[tuple[Any, str]] = ()):
        self._places = [(_attributes(owner, name), owner, name, getattr(owner, name)) for owner, name in places]
        below = (owner for module in (*modules, *(place[3] for place in self._places)) for owner in _below(module))
        owners = {id(owner): owner for owner in (*below, *(place[1] for place in self._places))}
        self._recorded = [
            (kept, type(owner).__name__, name, tensor.data_ptr())
            for owner in owners.values()
            if isinstance(owner, torch.nn.Module)
            for kept in (owner._parameters, owner._buffers)
            for name, tensor in kept.items()
            if tensor is not None
        ]

    def moved(self) -> str | None:
        """Why graphs read other memory than vLLM does, or None."""
        for attributes, owner, name, module in self._places:
            if attributes.get(name) is not module:
                return f"the {name} of a {type(owner).__name__} is another module than at capture"
        for kept, owner_name, name, address in self._recorded:
            current = kept.get(name)
            if current is None or current.data_ptr() != address:
                return f"the {name} of a {owner_name} is another tensor than at capture"
        return None


def _below(module: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    return iter(()) if module is None else module.modules()


def _attributes(owner: Any, name: str) -> Mapping[str, Any]:
    """Where `owner` keeps what its attribute names."""
    children: Mapping[str, Any] = getattr(owner, "_modules", {})
    return children if name in children else vars(owner)


#: What drafts make of the target's hidden states before their first pass.
_COMBINING: Final = ("fc", "fc_norm", "input_norm", "hidden_norm", "aux_hidden_norms")


def around_graphs(model: Any) -> list[tuple[Any, str]]:
    """Return what vLLM reads of a target or a draft outside of its own graphs, as owners and attributes.

    No hook sees a head that is handed on by name, or to another method than `forward`. A model that takes images has
    its head in a `language_model`.
    """
    draft = getattr(model, "model", None)
    heads = [(model, "lm_head"), (getattr(model, "language_model", None), "lm_head")]
    places = [*heads, *((draft, name) for name in _COMBINING)]
    return [(owner, name) for owner, name in places if getattr(owner, name, None) is not None]


class Touched:
    """While it lasts, the modules that a recording calls, or hands to one that it calls, are taken down.

    Args:
        graphed: a model whose passes stock vLLM has in graphs of its own. What these call is left out: vLLM would not
            notice another one in its place either.
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
            self._modules |= {id(one): one for one in (module, *arguments) if isinstance(one, torch.nn.Module)}

    def _end(self, module: torch.nn.Module, *_: Any) -> None:
        self._passes -= module is self._graphed

    def places(self, *models: Any) -> list[tuple[torch.nn.Module, str]]:
        """Owner and attribute of each that is somewhere in these models."""
        return [
            (owner, name)
            for model in models
            if isinstance(model, torch.nn.Module)
            for owner in model.modules()
            for name, child in owner._modules.items()
            if id(child) in self._modules
        ]


class FusedWeights:
    """The tensors that a draft model or a head of it has fused when this is made.

    Args:
        model: vLLM's draft model. One with dummy weights fuses them in its first call.
    """

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
        """Put what was fused anew where the graphs read it.

        Returns:
            Why that is not possible, or None.
        """
        for owner, name, recorded in self._recorded:
            current = getattr(owner, name)
            if current is recorded:
                continue
            before, after = _tensors(recorded), _tensors(current)
            if [(one.shape, one.dtype) for one in before] != [(one.shape, one.dtype) for one in after]:
                return f"the draft model's {name} has another shape or type than at capture"
            for old, new in zip(before, after, strict=True):
                # A view of a parameter was updated in place already; only one with memory of its own has to be copied.
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
            setattr(owner, name, recorded)
        return None


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a tensor, or of a container of nothing else."""
    leaves = tree_leaves(value)
    return leaves if all(torch.is_tensor(leaf) for leaf in leaves) else []
