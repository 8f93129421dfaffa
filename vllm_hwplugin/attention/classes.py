# SPDX-License-Identifier: Apache-2.0
"""Subclasses of vLLM's backends whose classmethods are made from the declarations.

The methods accept any arguments: signatures grew from vLLM 0.20 to 0.33, and a declared answer depends at most on the
first argument.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .capabilities import (
    CAPABILITIES,
    GAPS,
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
    """Decorate a subclass of a backend of vLLM with declared capabilities.

    A declared value becomes the class's answer, in place of the inherited one; a declared exception limits the
    inherited one. ``validate_configuration`` is vLLM's, and its reasons also say what was expected. ``declarations`` of
    the class are those it was made from.

    Args:
        backend: a name with declarations.
        version: of the vLLM whose class is the base.
        above: a head size up to which vLLM's own kernels run, so that vLLM's answers are right where nothing is
            declared; and a name with declarations for larger heads. They apply together with the class's
            ``refuse_above``, which takes a mapping of the arguments of ``validate_configuration`` and returns reasons.

    Raises:
        ImportError: the declarations for that version are missing or incomplete. vLLM and the plugin's platforms take
            an ImportError for "this backend is not available here".
    """
    declarations = _declared(backend, version, whole=above is None)
    larger = None if above is None else (above[0], _declared(above[1], version, whole=True))

    def make(cls: _B) -> _B:
        for declaration in declarations.values():
            _give(cls, declaration, declaration.value)
        cls.declarations = declarations  # type: ignore[attr-defined]
        cls.validate_configuration = _validation(cls, declarations, larger)  # type: ignore[attr-defined]
        for name in sorted(undeclared(cls)):
            logger.warning("vLLM %s asks %s, and %s does not declare it: vLLM's default stays", version, name, backend)
        return cls

    return make


def _declared(backend: str, version: str, *, whole: bool) -> Mapping[str, Declaration]:
    declarations = declared(backend, version)
    missing = sorted(asked_in(version) - declarations.keys()) if whole else []
    if missing or not declarations:
        raise ImportError(
            f"{backend} has no declaration of {', '.join(missing) or 'anything'} for vLLM {version}; use a version in "
            "docs/compatibility.md, which have declarations, or one of vLLM's own backends"
        )
    return declarations


def undeclared(cls: type) -> set[str]:
    """Return members of a class named like capabilities, but unknown here."""
    known = {capability.method for capability in CAPABILITIES.values()} | set(GAPS)
    return {name for name in dir(cls) if name.startswith(("supports_", "is_"))} - known


def _give(cls: type, declaration: Declaration, value: Value) -> None:
    capability = CAPABILITIES[declaration.capability]
    if capability.plain:
        setattr(cls, capability.method, value)
        return
    if isinstance(value, bool):

        def answer(cls: type, *args: Any, **kwargs: Any) -> bool:
            return value

    else:
        inherited = getattr(cls.__mro__[1], capability.method, None) if isinstance(value, Vllm) else None

        def answer(cls: type, *args: Any, **kwargs: Any) -> bool:
            # The question's only argument comes first, by position or by any name.
            if not allows(value, next(iter((*args, *kwargs.values())))):
                return False
            return inherited is None or bool(inherited.__func__(cls, *args, **kwargs))

    answer.__name__ = capability.method
    answer.__qualname__ = f"{cls.__qualname__}.{capability.method}"
    answer.__doc__ = f"{declaration.value}: {declaration.reason}. {declaration.verified}."
    setattr(cls, capability.method, classmethod(answer))
    if declaration.capability == "block_sizes" and isinstance(value, Multiples):
        from vllm.v1.attention.backend import MultipleOf

        # vLLM's other method for block sizes, which divide a group's pages.
        sizes = [MultipleOf(value.of)]
        cls.get_supported_kernel_block_sizes = staticmethod(lambda *_, **__: list(sizes))  # type: ignore[attr-defined]


def _validation(
    cls: type, declarations: Mapping[str, Declaration], larger: tuple[int, Mapping[str, Declaration]] | None
) -> Any:
    inherited = cls.__mro__[1].validate_configuration  # type: ignore[attr-defined]
    signature = inspect.signature(inherited)

    def validate_configuration(cls: type, *args: Any, **kwargs: Any) -> list[str]:
        asked = signature.bind(*args, **kwargs).arguments
        if larger is not None and asked["head_size"] > larger[0]:
            return explain(larger[1], asked) or cls.refuse_above(asked)  # type: ignore[attr-defined]
        reasons: list[str] = inherited.__func__(cls, *args, **kwargs)
        if not reasons:
            return reasons
        return [*reasons, *explain(declarations, asked)]

    return classmethod(validate_configuration)
