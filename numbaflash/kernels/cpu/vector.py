"""SIMD vectors for Numba kernels: ``<16 x float>`` and its kin as values, with the arithmetic that attention needs.

LLVM's own vectoriser is not asked for anything: a kernel that is written with vectors is compiled to vectors, of the full
width that was asked for (left alone, LLVM prefers 256 bits on processors that have 512), on every processor that LLVM
knows. `Simd` holds the operations that need to be told their width::

    simd = Simd(types.float32, 16)
    load, splat = simd.load, simd.splat

    @njit
    def scale(address, factor):
        x = load(address) * splat(factor)

Operations on vectors alone (``+ - *``, `fma`, `maximum`, `select`, comparisons) take their width from their arguments.
Addresses are plain integers, in bytes.
"""

from __future__ import annotations

import functools
import operator

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from . import target

INT32 = ir.IntType(32)

jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For functions that only compiled code calls."""


class Vector(types.Type):
    """``lanes`` numbers of one type (int16, int32, int64, float32, float64), or of ``types.boolean``: a mask."""

    def __init__(self, dtype, lanes):
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(element_type(fe_type.dtype), fe_type.lanes))


def element_type(dtype) -> ir.Type:
    """LLVM type of a Numba scalar type."""
    if dtype == types.boolean:
        return ir.IntType(1)
    if dtype == types.float32:
        return ir.FloatType()
    if dtype == types.float64:
        return ir.DoubleType()
    return ir.IntType(dtype.bitwidth)


def llvm_type(vector: Vector) -> ir.VectorType:
    return ir.VectorType(element_type(vector.dtype), vector.lanes)


def pointer(builder, address, pointee, offset=0):
    """Pointer to ``address + offset`` bytes, from an integer or a byte pointer."""
    if isinstance(address.type, ir.IntType):
        address = builder.inttoptr(address, ir.IntType(8).as_pointer())
    if not isinstance(offset, int) or offset:
        offset = ir.Constant(ir.IntType(64), offset) if isinstance(offset, int) else offset
        address = builder.gep(address, [offset])
    return builder.bitcast(address, pointee.as_pointer())


def broadcast(builder, scalar, lanes):
    """A vector of ``lanes`` copies of a scalar."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, INT32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(INT32, lanes), None))


def emit_fma(builder, a, b, c):
    """``a * b + c`` on scalars or vectors, rounded once where the processor can."""
    if not target.has_fma():
        return builder.fadd(builder.fmul(a, b), c)
    element = getattr(a.type, "element", a.type)
    suffix = "f64" if isinstance(element, ir.DoubleType) else "f32"
    if element is not a.type:
        suffix = f"v{a.type.count}{suffix}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), f"llvm.fma.{suffix}")
    return builder.call(function, [a, b, c])


# operators


def _arithmetic(operation, floating, integer):
    @infer_global(operation)
    class _Typing(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)

    @lower_builtin(operation, Vector, Vector)
    def lower(context, builder, sig, args):
        emit = floating if isinstance(sig.args[0].dtype, types.Float) else integer
        return getattr(builder, emit)(*args)


def _comparison(operation, symbol):
    @infer_global(operation)
    class _Typing(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(Vector(types.boolean, args[0].lanes), *args)

    @lower_builtin(operation, Vector, Vector)
    def lower(context, builder, sig, args):
        if not isinstance(sig.args[0].dtype, types.Float):
            return builder.icmp_signed(symbol, *args)
        return (builder.fcmp_unordered if symbol == "!=" else builder.fcmp_ordered)(symbol, *args)


_arithmetic(operator.add, "fadd", "add")
_arithmetic(operator.sub, "fsub", "sub")
_arithmetic(operator.mul, "fmul", "mul")
_arithmetic(operator.truediv, "fdiv", None)
_arithmetic(operator.and_, None, "and_")
_arithmetic(operator.or_, None, "or_")
_comparison(operator.lt, "<")
_comparison(operator.le, "<=")
_comparison(operator.eq, "==")
_comparison(operator.ne, "!=")


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c``, rounded once."""
    if isinstance(a, Vector) and a == b == c:
        return a(a, b, c), lambda context, builder, sig, args: emit_fma(builder, *args)


@intrinsic
def maximum(typingctx, a, b):
    """The larger one, and ``b`` where one of them is NaN."""
    if isinstance(a, Vector) and a == b:

        def codegen(context, builder, sig, args):
            return builder.select(builder.fcmp_ordered(">", *args), *args)

        return a(a, b), codegen


@intrinsic
def select(typingctx, mask, a, b):
    """``a`` where the mask is set, else ``b``."""
    if isinstance(a, Vector) and a == b and mask == Vector(types.boolean, a.lanes):
        return a(mask, a, b), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def any_lane(typingctx, mask):
    """Whether the mask is set anywhere."""
    if isinstance(mask, Vector) and mask.dtype == types.boolean:

        def codegen(context, builder, sig, args):
            bits = ir.IntType(mask.lanes)
            return builder.icmp_unsigned("!=", builder.bitcast(args[0], bits), bits(0))

        return types.boolean(mask), codegen


def _fold(builder, x, combine):
    """Combine all lanes (a power of two of them) into each lane."""
    lanes = x.type.count
    step = lanes // 2
    while step:
        mask = ir.Constant(ir.VectorType(INT32, lanes), [INT32((j + step) % lanes) for j in range(lanes)])
        x = combine(x, builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask))
        step //= 2
    return builder.extract_element(x, INT32(0))


@intrinsic
def add_lanes(typingctx, x):
    """The sum of the lanes."""
    if isinstance(x, Vector):
        return x.dtype(x), lambda context, builder, sig, args: _fold(builder, args[0], builder.fadd)


@intrinsic
def max_lane(typingctx, x):
    """The largest lane; none may be NaN."""
    if isinstance(x, Vector):

        def codegen(context, builder, sig, args):
            return _fold(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

        return x.dtype(x), codegen


class Simd:
    """Operations on vectors of one type: ``load(address)``, ``store(address, vector)``, ``splat(scalar)``, ``lane_numbers()``,
    and ``convert(integers)`` of as many int32.

    Loads and stores need no alignment beyond that of an element; aligned addresses are as fast as if it were promised.

    Parameters
    ----------
    dtype : numba type
    lanes : int
    """

    def __new__(cls, dtype, lanes):
        return _simd(dtype, lanes)


@functools.cache
def _simd(dtype, lanes):
    self = object.__new__(Simd)
    vector = Vector(dtype, lanes)
    itemsize = max(1, dtype.bitwidth // 8)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            return builder.load(pointer(builder, args[0], llvm_type(vector)), align=itemsize)

        return vector(types.int64), codegen

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, sig, args):
            builder.store(args[1], pointer(builder, args[0], llvm_type(vector)), align=itemsize)
            return context.get_dummy_value()

        return types.void(types.int64, vector), codegen

    @intrinsic
    def splat(typingctx, scalar):
        return vector(dtype), lambda context, builder, sig, args: broadcast(builder, args[0], lanes)

    @intrinsic
    def lane_numbers(typingctx):
        def codegen(context, builder, sig, args):
            return ir.Constant(llvm_type(vector), [element_type(dtype)(lane) for lane in range(lanes)])

        return vector(), codegen

    @intrinsic
    def convert(typingctx, integers):
        return vector(Vector(types.int32, lanes)), lambda context, builder, sig, args: builder.sitofp(args[0], llvm_type(vector))

    self.dtype, self.lanes, self.vector, self.itemsize, self.bytes = dtype, lanes, vector, itemsize, lanes * itemsize
    self.load, self.store, self.splat, self.lane_numbers, self.convert = load, store, splat, lane_numbers, convert
    return self


@functools.cache
def words(dtype):
    """``load(address)`` and ``store(address, value)`` of one number, aligned to its size."""
    itemsize = dtype.bitwidth // 8

    @intrinsic
    def load(typingctx, address):
        return dtype(types.int64), lambda context, builder, sig, args: builder.load(pointer(builder, args[0], element_type(dtype)), align=itemsize)

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, sig, args):
            builder.store(args[1], pointer(builder, args[0], element_type(dtype)), align=itemsize)
            return context.get_dummy_value()

        return types.void(types.int64, dtype), codegen

    return load, store
