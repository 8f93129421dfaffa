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
_NUMBERS = frozenset(("int32", "uint32", "int64", "fp32"))


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
    """Have block types of one shape share it, and operands of one type pass unchecked; check a number once."""
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

    # By number, its place, type and shape of the other operand, and what is checked: the operand that it becomes.
    constants = {}

    def constant_for(self, number, operand, place, *args, **kwargs):
        shape = operand.type.shape if operand.type.is_block() else ()
        key = number, type(number), place, operand.dtype.name, shape, args, *kwargs.items()
        if key not in constants:
            both = (operand, number) if place else (number, operand)
            checked = check(self, *both, *args, **kwargs)
            # Another type for both, as of an integer and a fraction, is left to the interpreter.
            constants[key] = checked[place] if checked[1 - place] is operand else None
        return constants[key]

    def binary_op_type_checking_impl(self, lhs, rhs, *args, **kwargs):
        left, right = (isinstance(one, core.tensor) and one.dtype.name in _NUMBERS for one in (lhs, rhs))
        if left and right and lhs.dtype is rhs.dtype:
            return broadcast_impl_value(self, lhs, rhs)
        constant = None
        if left and not isinstance(rhs, core.tensor):
            constant = constant_for(self, rhs, lhs, 1, *args, **kwargs)
        elif right and not isinstance(lhs, core.tensor):
            constant = constant_for(self, lhs, rhs, 0, *args, **kwargs)
        if constant is None:
            return check(self, lhs, rhs, *args, **kwargs)
        return (lhs, constant) if left else (constant, rhs)

    core.block_type.__init__ = init
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
