"""Threads: one compiled function, called once on each thread, over a counter of work items that they share."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from .arguments import CACHE_LINE
from .vector import jit, pointer


@intrinsic
def next_item(typingctx, counter):
    """Take a number from a counter that threads share."""

    def codegen(context, builder, sig, args):
        word = ir.IntType(64)
        return builder.atomic_rmw("add", pointer(builder, args[0], word), word(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def _call(typingctx, function, args, q, k, v, out, lse, work, partial, counter, merging):
    """Call a function by its address: it is compiled once, not once more in every caller."""

    def codegen(context, builder, sig, values):
        address, *values = values
        word = ir.IntType(64)
        signature = ir.FunctionType(ir.VoidType(), [word] * len(values))
        builder.call(builder.inttoptr(address, signature.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


@jit
def _aligned(memory):
    """Address of the first cache line in an array of bytes."""
    return (np.int64(memory.ctypes.data) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@jit
def _call_thread(function, thread, args, q, k, v, out, lse, workspace, partial, counters, merging):
    # Arrays come here as arrays, not as addresses, so that Numba keeps them alive through the call.
    _call(
        function,
        np.int64(args.ctypes.data),
        q,
        k,
        v,
        out,
        lse,
        _aligned(workspace) + thread * args[0].workspace,
        _aligned(partial),
        np.int64(counters.ctypes.data) + merging * CACHE_LINE,
        merging,
    )


def run(function, args, q, k, v, out, lse, threads):
    """Run a launch.

    Parameters
    ----------
    function : int
        Address of the compiled ``thread`` of `numbaflash.kernels.cpu.forward.build`.
    args : ndarray
        One record of `numbaflash.kernels.cpu.arguments.ARGUMENTS`.
    q, k, v, out, lse : int
        Addresses.
    threads : int
        Threads to use; with 1 the caller's own does it all.
    """
    splits = args[0].splits
    workspace = np.empty(threads * args[0].workspace + CACHE_LINE, np.uint8)
    partial = np.empty(args[0].items * args[0].partial + CACHE_LINE if splits > 1 else 0, np.uint8)
    counters = np.zeros(2 * CACHE_LINE // 8, np.int64)
    if threads == 1:
        _call_thread(function, 0, args, q, k, v, out, lse, workspace, partial, counters, 0)
        if splits > 1:
            _call_thread(function, 0, args, q, k, v, out, lse, workspace, partial, counters, 1)
    else:
        for thread in prange(threads):
            _call_thread(function, thread, args, q, k, v, out, lse, workspace, partial, counters, 0)
        if splits > 1:
            for thread in prange(threads):
                _call_thread(function, thread, args, q, k, v, out, lse, workspace, partial, counters, 1)
