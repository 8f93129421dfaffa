# SPDX-License-Identifier: Apache-2.0
"""Less work for Triton's interpreter around each operation of a kernel. The kernel's own work stays."""

import dataclasses
import functools
import inspect
import math

import numpy
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

_ADDRESS = numpy.dtype(numpy.uint64)
_NUMBERS = frozenset(("int32", "uint32", "int64", "fp32"))
_LARGEST = {"int32": (1 << 31) - 1, "uint32": (1 << 32) - 1, "int64": (1 << 63) - 1}
_ARITHMETIC = {
    "__add__": numpy.add, "__radd__": numpy.add, "__sub__": numpy.subtract, "__rsub__": numpy.subtract,
    "__mul__": numpy.multiply, "__rmul__": numpy.multiply,
}  # fmt: skip
_BITWISE = {"__and__": numpy.bitwise_and, "__or__": numpy.bitwise_or, "__xor__": numpy.bitwise_xor}
_COMPARISONS = {
    "__lt__": numpy.less, "__le__": numpy.less_equal, "__gt__": numpy.greater, "__ge__": numpy.greater_equal,
    "__eq__": numpy.equal, "__ne__": numpy.not_equal,
}  # fmt: skip
#: What numpy computes where both operands have one type.
OPERATORS = _ARITHMETIC | _BITWISE | _COMPARISONS


class _Nothing:
    """Of what was put into the language, to be taken out again."""

    restore = staticmethod(lambda: None)


def _sees_the_language():
    return tl, core


def save_time():
    """Change the interpreter of this process, before its first kernel."""
    interpreter._patch_attr = _call_without_checks
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
    interpreter.TensorHandle.__init__ = _hold
    _share_shapes()
    for name, function in OPERATORS.items():
        _shorten(name, function)


def _call_without_checks(owner, name, member, builder, scope):
    """Put a function into the language that passes the semantic on, without a look at each argument's name."""
    function = inspect.unwrap(member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _hold(self, data, dtype, attr=None):
    """Initialise a `TensorHandle` without the functions of a dataclass."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _shorten(name, function):
    """Have an operator call numpy where both operands have one type. All else is left to the interpreter."""
    usual = getattr(core.tensor, name)
    types = {"int1", *_LARGEST} if name in _BITWISE else _NUMBERS
    compares, reflected, adds = name in _COMPARISONS, name.startswith("__r"), name == "__add__"

    def made(data, kind, type):
        result = type.with_element_ty(core.int1) if compares else type
        return core.tensor(interpreter.TensorHandle(data, kind), result)

    @functools.wraps(usual)
    def operator(self, other, **kwargs):
        type, dtype, data = self.type, self.dtype, self.handle.data
        if isinstance(other, core.tensor) and not reflected:
            # A number takes the shape of the block that it meets.
            if not other.type.is_block() or (type.is_block() and type.shape is other.type.shape):
                block = type
            else:
                block = None if type.is_block() else other.type
            if block is not None and dtype is other.dtype and dtype.name in types:
                return made(function(data, other.handle.data), self.handle.dtype, block)
            if block is not None and adds and dtype.is_ptr() and other.dtype.name in ("int32", "int64"):
                handle = interpreter.interpreter_builder.create_addptr(self.handle, other.handle)
                return core.tensor(handle, block.with_element_ty(dtype))
        elif name not in _BITWISE and _fits(other, dtype.name):
            # Triton has no constant -0.0.
            number = numpy.array([other or 0], data.dtype)
            return made(function(number, data) if reflected else function(data, number), dtype, type)
        return usual(self, other, **kwargs)

    setattr(core.tensor, name, operator)


def _fits(number, dtype):
    """Whether Triton gives a number this type where it meets it; some that it does are left out."""
    if dtype == "fp32":
        return isinstance(number, float) and (not number or 2.0**-126 <= abs(number) < 2.0**127)
    return type(number) is int and 0 <= number <= _LARGEST.get(dtype, -1)


def _share_shapes():
    """Have block types of one shape share it, and operands of one type pass unchecked; check a number once."""
    shared = functools.cache(lambda shape: (core.tuple(shape), core.validate_block_shape(list(shape))))
    semantic = interpreter.TritonSemantic
    cast = semantic.cast
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def init(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel = shared(tuple(map(core._unwrap_if_constexpr, shape)))

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_between(self, input, dst_ty, fp_downcast_rounding=None):
        source, target = input.type.scalar, dst_ty.scalar
        if source is target:
            return input
        if source.name in _NUMBERS and target.name in _NUMBERS and fp_downcast_rounding is None:
            data = input.handle.data.astype(interpreter._get_np_dtype(target))
            return core.tensor(interpreter.TensorHandle(data, target), input.type.with_element_ty(target))
        return cast(self, input, dst_ty, fp_downcast_rounding)

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
    semantic.cast = functools.wraps(cast)(cast_between)
    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
