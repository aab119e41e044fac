"""Inline PTX in Numba-CUDA: the few lines of LLVM plumbing under every other file here."""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

U16, U32, U64, I32, F32, F64 = types.uint16, types.uint32, types.uint64, types.int32, types.float32, types.float64
VOID = types.void

llvm_f32, llvm_i32 = ir.FloatType(), ir.IntType(32)
_LLVM = {
    types.int16: ir.IntType(16),
    types.uint16: ir.IntType(16),
    types.int32: llvm_i32,
    types.uint32: llvm_i32,
    types.int64: ir.IntType(64),
    types.uint64: ir.IntType(64),
    types.float32: llvm_f32,
    types.float64: ir.DoubleType(),
}
_REGISTER = {
    types.int16: "h",
    types.uint16: "h",
    types.int32: "r",
    types.uint32: "r",
    types.int64: "l",
    types.uint64: "l",
    types.float32: "f",
    types.float64: "d",
}


def emit(builder, result, args, text, constraints, *, pure=False):
    """Emit one inline-assembly call; ``pure`` lets LLVM move or drop it."""
    function = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=not pure), args)


def unpack(builder, aggregate, n):
    """The n values of an LLVM aggregate."""
    return [builder.extract_value(aggregate, i) for i in range(n)]


def pack(builder, llvm_type, values):
    """An LLVM aggregate of the values."""
    aggregate = ir.Constant(llvm_type, ir.Undefined)
    for i, value in enumerate(values):
        aggregate = builder.insert_value(aggregate, value, i)
    return aggregate


def make_intrinsic(result, argtypes, generate):
    """An ``@intrinsic`` with a fixed signature.

    Parameters
    ----------
    result : numba type
    argtypes : sequence of numba types
        Scalar arguments are cast to them.
    generate : callable
        ``generate(builder, args, llvm_result)`` returns the LLVM value, or None for a void result.
    """
    signature = result(*argtypes)

    def codegen(context, builder, given, args):
        args = [context.cast(builder, arg, have, want) if have != want else arg for arg, have, want in zip(args, given.args, argtypes, strict=True)]
        value = generate(builder, args, None if result is VOID else context.get_value_type(result))
        return context.get_dummy_value() if result is VOID else value

    # An intrinsic's typing function needs as many named parameters as the call has arguments.
    names = ", ".join(["typingctx", *(f"a{i}" for i in range(len(argtypes)))])
    scope = {"signature": signature, "codegen": codegen}
    exec(f"def stub({names}):\n    return signature, codegen\n", scope)
    return intrinsic(scope["stub"])


def instruction(text, result, *argtypes, pure=False, early=False):
    """An intrinsic of one PTX instruction, or a small block, over scalars.

    Parameters
    ----------
    text : str
        PTX; ``$0`` is the result, or the first argument when the result is void.
    result, *argtypes : numba types
    pure : bool
        Without side effects: may be moved, merged or dropped. Otherwise it is ordered with memory accesses.
    early : bool
        The result is written before the arguments have all been read.
    """
    constraints = [] if result is VOID else [("=&" if early else "=") + _REGISTER[result]]
    constraints += [_REGISTER[t] for t in argtypes]
    constraints += [] if pure else ["~{memory}"]
    llvm_result = ir.VoidType() if result is VOID else _LLVM[result]
    return make_intrinsic(result, argtypes, lambda builder, args, _: emit(builder, llvm_result, args, text, ",".join(constraints), pure=pure))
