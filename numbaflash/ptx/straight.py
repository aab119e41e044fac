"""Straight-line code over register tuples, written once for the GPU and for the CUDA simulator.

A *body* is a Python function that spells a computation out over constant indices: ``x + y``, ``ops.fma(a, b, c)``. On the
GPU, `straight_line` runs it once, at compile time, and what it spells becomes unrolled LLVM code in which every element
of a tuple is a register (`operations`). In the simulator, the same body runs with NumPy scalars whenever the kernel calls it (`simulated`).

Tuples come in as lists and are returned as lists. Arrays come in with ``shape``, and are read and written through
`GpuOps.load` and its relatives.
"""

from __future__ import annotations

from llvmlite import ir
from numba import config
from numba.cuda import types

from .inline import make_intrinsic
from .operations import GpuOps, Register, RegisterArray
from .simulated import simulated

SIMULATED = bool(config.ENABLE_CUDASIM)
"""Whether kernels run in Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1 when numba was imported)."""


def straight_line(result, argtypes, body):
    """A function for kernels out of a straight-line body.

    Parameters
    ----------
    result : numba type
        A scalar, a `UniTuple`, a `Tuple` of such, or `void`.
    argtypes : sequence of numba types
        Scalars, tuples of scalars and arrays; scalar arguments are cast to them.
    body : callable
        ``body(ops, *args)`` returns the result.

    Returns
    -------
    callable
        An ``@intrinsic``, or in the simulator a Python function.
    """
    if SIMULATED:
        return simulated(argtypes, body)

    def generate(builder, args, llvm_result):
        value = body(GpuOps(builder), *(_open(builder, kind, arg) for kind, arg in zip(argtypes, args, strict=True)))
        return None if result is types.void else _close(builder, llvm_result, value)

    return make_intrinsic(result, argtypes, generate)


def _open(builder, kind, value):
    if isinstance(kind, types.BaseTuple):
        return [_open(builder, member, builder.extract_value(value, i)) for i, member in enumerate(kind)]
    return RegisterArray(builder, kind, value) if isinstance(kind, types.Array) else Register(builder, value)


def _close(builder, llvm_type, value):
    if isinstance(value, Register):
        return value.value
    members = llvm_type.elements if hasattr(llvm_type, "elements") else [llvm_type.element] * len(value)
    aggregate = ir.Constant(llvm_type, ir.Undefined)
    for i, (member, element) in enumerate(zip(members, value, strict=True)):
        aggregate = builder.insert_value(aggregate, _close(builder, member, element), i)
    return aggregate
