# SPDX-License-Identifier: Apache-2.0
"""Triton's language on the host, some twenty times as fast as Triton's interpreter: kernels run as the Python that they
are, on NumPy's arrays, and what they load and store is the memory of the tensors that they are given.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import types
from functools import partial
from typing import Any

import numpy as np
import torch

_TYPES = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint64: np.uint64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
_OPTIONS = ("num_warps", "num_stages")


class Value(np.ndarray):
    """What kernels reckon with; scalars are arrays without a dimension."""

    def to(self, dtype: Any) -> Value:
        return self.astype(dtype)


def _value(number: Any) -> Value:
    return np.asarray(number).view(Value)


class Pointer:
    """Addresses of elements of one type."""

    __array_ufunc__ = None

    def __init__(self, address: Any, dtype: Any) -> None:
        self.address, self.of = np.asarray(address).astype(np.int64), np.dtype(dtype)

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.address + np.asarray(elements).astype(np.int64) * self.of.itemsize, self.of)

    __radd__ = __add__

    def __sub__(self, elements: Any) -> Pointer:
        return self + -np.asarray(elements)

    @property
    def dtype(self) -> _PointerType:
        return _PointerType(self.of)

    def to(self, dtype: Any) -> Pointer:
        return Pointer(self.address, dtype)

    def element(self) -> np.ndarray:
        """Of a pointer to one: its memory."""
        return np.frombuffer((ctypes.c_char * self.of.itemsize).from_address(int(self.address)), self.of)

    def memory(self, mask: Any) -> tuple[np.ndarray, Any, Any]:
        """Some memory, where in it the elements are, and which of them are not masked out."""
        address = self.address
        taken = np.broadcast_to(True if mask is None else np.asarray(mask), address.shape)
        wanted = address[taken]
        if not wanted.size:
            return np.zeros(0, self.of), wanted, taken
        first, size = int(wanted.min()), self.of.itemsize
        buffer = (ctypes.c_char * (int(wanted.max()) - first + size)).from_address(first)
        return np.frombuffer(buffer, self.of), (wanted - first) // size, taken


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Value:
    if not pointer.address.ndim:
        taken = mask is None or bool(mask)
        return _value(pointer.element()[0] if taken else pointer.of.type(0 if other is None else other))
    memory, places, taken = pointer.memory(mask)
    found = np.full(taken.shape, 0 if other is None else other, dtype=pointer.of)
    found[taken] = memory[places]
    return found.view(Value)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    if not pointer.address.ndim:
        if mask is None or mask:
            pointer.element()[0] = value
        return
    memory, places, taken = pointer.memory(mask)
    if places.size:
        memory[places] = np.broadcast_to(np.asarray(value), taken.shape)[taken].astype(pointer.of)


def _atomic(change: Any) -> Any:
    def at(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
        memory, places, taken = pointer.memory(mask)
        change.at(memory, places, np.broadcast_to(np.asarray(value), taken.shape)[taken].astype(pointer.of))

    return at


class Kernel:
    """A function that is launched on a grid, or called from another kernel."""

    program: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()

    def __init__(self, function: Any) -> None:
        self._function = function
        self.arg_names = list(inspect.signature(function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        given = [_argument(one) for one in args]
        named = {name: _argument(one) for name, one in kwargs.items() if name not in _OPTIONS}
        Kernel.grid = grid
        for Kernel.program in itertools.product(*map(range, grid)):
            self._function(*given, **named)


def _argument(one: Any) -> Any:
    return Pointer(one.data_ptr(), _TYPES[one.dtype]) if isinstance(one, torch.Tensor) else one


def _max(values: Value, axis: int | None = None, return_indices: bool = False) -> Any:
    best = _value(np.max(values, axis))
    return (best, _value(np.argmax(values, axis))) if return_indices else best


def _cast(value: Any, dtype: Any) -> Any:
    return Pointer(value, dtype.element_ty) if isinstance(dtype, _PointerType) else value.to(dtype)


class _PointerType:
    def __init__(self, element_ty: Any) -> None:
        self.element_ty = element_ty


#: `triton.language`.
LANGUAGE = types.SimpleNamespace(
    constexpr=lambda value: value,
    program_id=lambda axis: _value(Kernel.program[axis]),
    num_programs=lambda axis: _value(Kernel.grid[axis]),
    arange=lambda first, end: np.arange(first, end, dtype=np.int32).view(Value),
    range=range,
    static_range=range,
    zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Value),
    full=lambda shape, value, dtype: np.full(shape, value, dtype).view(Value),
    load=load,
    store=store,
    atomic_add=_atomic(np.add),
    atomic_or=_atomic(np.bitwise_or),
    debug_barrier=lambda: None,
    cast=_cast,
    cdiv=lambda one, other: -(-one // other),
    pointer_type=_PointerType,
    multiple_of=lambda value, _: value,
    where=lambda condition, one, other: np.where(condition, one, other).view(Value),
    minimum=lambda one, other: np.minimum(one, other).view(Value),
    maximum=lambda one, other: np.maximum(one, other).view(Value),
    max=_max,
    argmax=lambda values, axis: _value(np.argmax(values, axis)),
    sum=lambda values, axis=None: _value(np.sum(values, axis)),
    exp=np.exp,
    log=np.log,
    int1=np.bool_,
    int32=np.int32,
    int64=np.int64,
    uint32=np.uint32,
    uint64=np.uint64,
    float32=np.float32,
    float64=np.float64,
)
