# SPDX-License-Identifier: Apache-2.0
"""Backend classes of vLLM whose classmethods are made from the declarations.

The made methods take any arguments that a version of vLLM passes: signatures grew from 0.20 to 0.33, and an answer that
is data depends on the first argument at most.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .capabilities import (
    CAPABILITIES,
    GAPS,
    VLLM,
    Declaration,
    Multiples,
    Value,
    Vllm,
    allows,
    asked_in,
    declared,
    explain,
)

logger = logging.getLogger("vllm.hwplugin")

_B = TypeVar("_B", bound=type)


def declares(backend: str, version: str, above: tuple[int, str] | None = None) -> Callable[[_B], _B]:
    """Decorate a subclass of one of vLLM's backends: its capabilities are those that are declared under a name.

    A declared value becomes the class's answer, in place of what it inherits. If vLLM's own answer is declared, the
    inherited one stays, except for what is excepted. ``validate_configuration`` is vLLM's; beside vLLM's reasons it
    says what was expected.

    ``declarations`` of the class are what it was made from.

    Args:
        backend: a name with declarations.
        version: of the vLLM whose class is the base.
        above: a head size and a name. The name's declarations judge a layer with larger heads, together with the
            class's ``refuse_above``, which takes the arguments of ``validate_configuration`` by name and gives reasons.

    Raises:
        ImportError: nothing is declared for that version, or not all that it asks for. It is an ImportError because
            vLLM and the plugin's platforms take it for "this backend is not to be had here".
    """
    declarations = _complete(backend, version)
    larger = None if above is None else (above[0], _complete(above[1], version))

    def make(cls: _B) -> _B:
        for item in declarations.values():
            if item.value != VLLM:
                _give(cls, item, item.value)
        cls.declarations = declarations  # type: ignore[attr-defined]
        cls.validate_configuration = _validation(cls, declarations, larger)  # type: ignore[attr-defined]
        for name in sorted(undeclared(cls)):
            logger.warning(
                "vLLM %s asks %s, of which %s declares nothing: vLLM's default stands", version, name, backend
            )
        return cls

    return make


def _complete(backend: str, version: str) -> Mapping[str, Declaration]:
    declarations = declared(backend, version)
    missing = sorted(asked_in(version) - declarations.keys())
    if missing or not declarations:
        raise ImportError(
            f"{backend} has no declaration of {', '.join(missing) or 'anything'} for vLLM {version}; the declarations "
            "are for the versions that docs/compatibility.md lists, so use one of those, or a backend of vLLM's own"
        )
    return declarations


def undeclared(cls: type) -> set[str]:
    """The members of a class with the name of a capability that the plugin knows nothing of."""
    known = {item.method for item in CAPABILITIES.values()} | set(GAPS)
    return {name for name in dir(cls) if name.startswith(("supports_", "is_"))} - known


def _give(cls: type, item: Declaration, value: Value) -> None:
    capability = CAPABILITIES[item.capability]
    if capability.plain:
        setattr(cls, capability.method, value)
        return
    if isinstance(value, bool):

        def answer(cls: type, *args: Any, **kwargs: Any) -> bool:
            return value

    else:
        inherited = getattr(cls.__mro__[1], capability.method, None) if isinstance(value, Vllm) else None

        def answer(cls: type, *args: Any, **kwargs: Any) -> bool:
            # The one thing that is asked about comes first, by position or by a name that is the caller's to choose.
            if not allows(value, next(iter((*args, *kwargs.values())))):
                return False
            return inherited is None or bool(inherited.__func__(cls, *args, **kwargs))

    answer.__name__ = capability.method
    answer.__qualname__ = f"{cls.__qualname__}.{capability.method}"
    answer.__doc__ = f"{item.value}: {item.reason}. {item.verified}."
    setattr(cls, capability.method, classmethod(answer))
    if item.capability == "block_sizes" and isinstance(value, Multiples):
        setattr(cls, "get_supported_kernel_block_sizes", staticmethod(_kernel_block_sizes(value.of)))  # noqa: B010


def _kernel_block_sizes(of: int) -> Callable[..., list[Any]]:
    """vLLM's other way to ask for block sizes, which it divides a group's pages by."""

    def get_supported_kernel_block_sizes(*args: Any, **kwargs: Any) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(of)]

    return get_supported_kernel_block_sizes


def _validation(
    cls: type, declarations: Mapping[str, Declaration], larger: tuple[int, Mapping[str, Declaration]] | None
) -> Any:
    inherited = cls.__mro__[1].validate_configuration  # type: ignore[attr-defined]
    signature = inspect.signature(inherited)

    def validate_configuration(cls: type, *args: Any, **kwargs: Any) -> list[str]:
        asked = signature.bind(*args, **kwargs).arguments
        if larger is not None and asked["head_size"] > larger[0]:
            return explain(larger[1], asked) or cls.refuse_above(**asked)  # type: ignore[attr-defined]
        reasons: list[str] = inherited.__func__(cls, *args, **kwargs)
        if not reasons:
            return reasons
        return [*reasons, *explain(declarations, asked)]

    return classmethod(validate_configuration)
