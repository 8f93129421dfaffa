# SPDX-License-Identifier: Apache-2.0
"""Less work for Triton's interpreter around each operation of a kernel. The kernel's own work stays."""

import dataclasses
import functools
import math

import numpy
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

_ADDRESS = numpy.dtype(numpy.uint64)
_NUMBERS = (tl.int32, tl.int64, tl.float32)


class _Nothing:
    """Of what was put into the language, to be taken out again."""

    restore = staticmethod(lambda: None)


def _sees_the_language():
    return tl, core


def save_time():
    """Change the interpreter of this process, before its first kernel."""
    # It puts its functions into the language for each kernel, and for each function that a kernel calls. Nothing is
    # compiled in this process, so once is enough.
    interpreter._patch_lang(_sees_the_language)
    interpreter._patch_lang = lambda _: _Nothing
    # Integers of 32 bits: each sum and product is made again in 64.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    # Each value has its shape as objects of the language, and they are the same for all values of the shape.
    sized = functools.cache(lambda shape: (core.constexpr(math.prod(shape)), core.tuple(map(core.constexpr, shape))))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sized(type.shape if type.is_block() else ())

    core.tensor.__init__ = init
    # It makes a table of all types for each value. A block's type cannot be hashed.
    of_scalar = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: _ADDRESS if type.scalar.is_ptr() else of_scalar(type.scalar)
    interpreter._validate_np_data_size = lambda *_: True
    unwrap = core._unwrap_if_constexpr

    def unwrapped(value):
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, (list, tuple, core.tuple)) else value

    core._unwrap_if_constexpr = unwrapped
    _share_shapes()


def _share_shapes():
    """Have block types of one shape share it, and operands of one type and one shape pass unchecked."""
    shared = functools.cache(lambda shape: (core.tuple(shape), core.validate_block_shape(list(shape))))
    semantic = interpreter.TritonSemantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def init(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel = shared(tuple(map(core._unwrap_if_constexpr, shape)))

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def binary_op_type_checking_impl(self, lhs, rhs, *args, **kwargs):
        if (
            isinstance(lhs, core.tensor)
            and isinstance(rhs, core.tensor)
            and lhs.dtype is rhs.dtype
            and lhs.dtype in _NUMBERS
        ):
            return broadcast_impl_value(self, lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    core.block_type.__init__ = init
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
