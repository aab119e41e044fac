"""Threads: one compiled function, called once on each thread, over a counter of work items that they share."""

from __future__ import annotations

import os

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import target
from .arguments import CACHE_LINE
from .vector import jit, pointer

SPINS = 2000  # of some 40 cycles


@intrinsic
def next_item(typingctx, counter):
    """Take a number from a counter that threads share."""

    def codegen(context, builder, sig, args):
        word = ir.IntType(64)
        return builder.atomic_rmw("add", pointer(builder, args[0], word), word(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def load_acquire(typingctx, address):
    """Read a word that another thread releases, and with it what that thread wrote before."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(pointer(builder, args[0], ir.IntType(64)), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Write a word, and let who acquires it see all that was written before."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], pointer(builder, args[0], ir.IntType(64)), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _relax(typingctx):
    """Leave the other thread of the core alone for a moment."""

    def codegen(context, builder, sig, args):
        if target.is_x86():
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield_processor(typingctx):
    """Let another thread run, where the system has a call for it."""

    def codegen(context, builder, sig, args):
        if os.name == "posix":
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@jit
def wait_until(address, value):
    """Return when the word at an address has a value that another thread is going to release."""
    tries = 0
    while load_acquire(address) != value:
        tries += 1
        if tries < SPINS:
            _relax()
        else:  # more threads than processors: the one that is waited for may not be running
            _yield_processor()


@intrinsic
def _call(typingctx, function, args, q, k, v, out, lse, options, work, partial, counter, merging):
    """Call a function by its address: it is compiled once, not once more in every caller."""

    def codegen(context, builder, sig, values):
        address, *values = values
        word = ir.IntType(64)
        signature = ir.FunctionType(ir.VoidType(), [word] * len(values))
        builder.call(builder.inttoptr(address, signature.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), codegen


@jit
def _aligned(memory):
    """Address of the first cache line in an array of bytes."""
    return (np.int64(memory.ctypes.data) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@jit
def _call_thread(function, thread, args, q, k, v, out, lse, options, workspace, partial, counters, merging):
    # Arrays come here as arrays, not as addresses, so that Numba keeps them alive through the call.
    _call(
        function,
        np.int64(args.ctypes.data),
        q,
        k,
        v,
        out,
        lse,
        np.int64(options.ctypes.data),
        _aligned(workspace) + thread * args[0].workspace,
        _aligned(partial),
        np.int64(counters.ctypes.data) + merging * CACHE_LINE,
        merging,
    )


def run(function, args, q, k, v, out, lse, options, threads):
    """Run a launch.

    Parameters
    ----------
    function : int
        Address of the compiled ``thread`` of `numbaflash.kernels.cpu.forward.build`.
    args : ndarray
        One record of `numbaflash.kernels.cpu.arguments.ARGUMENTS`.
    q, k, v, out, lse : int
        Addresses.
    options : ndarray
        One record of `numbaflash.kernels.cpu.scores.OPTION_ADDRESSES`.
    threads : int
        Threads to use; with 1 the caller's own does it all.
    """
    splits = args[0].splits
    workspace = np.empty(threads * args[0].workspace + CACHE_LINE, np.uint8)
    partial = np.empty(args[0].items * args[0].partial + CACHE_LINE if splits > 1 else 0, np.uint8)
    counters = np.zeros(2 * CACHE_LINE // 8, np.int64)
    if threads == 1:
        _call_thread(function, 0, args, q, k, v, out, lse, options, workspace, partial, counters, 0)
        if splits > 1:
            _call_thread(function, 0, args, q, k, v, out, lse, options, workspace, partial, counters, 1)
    else:
        for thread in prange(threads):
            _call_thread(function, thread, args, q, k, v, out, lse, options, workspace, partial, counters, 0)
        if splits > 1:
            for thread in prange(threads):
                _call_thread(function, thread, args, q, k, v, out, lse, options, workspace, partial, counters, 1)


@intrinsic
def _call_backward(typingctx, function, args, addresses, work, counter, phase):
    def codegen(context, builder, sig, values):
        address, *values = values
        signature = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(values))
        builder.call(builder.inttoptr(address, signature.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@jit
def _call_backward_thread(function, thread, args, addresses, scratch, counters, phase):
    work = _aligned(scratch) + thread * args[0].scratch
    counter = np.int64(counters.ctypes.data) + phase * CACHE_LINE
    _call_backward(function, np.int64(args.ctypes.data), np.int64(addresses.ctypes.data), work, counter, phase)


def run_backward(function, args, addresses, threads):
    """Run a launch of the gradients: all threads prepare the rows, then all walk the tiles of keys, then those parts of
    the gradients of options that they have.

    Parameters
    ----------
    function : int
        Address of the compiled ``thread`` of `numbaflash.kernels.cpu.backward.kernel.build`.
    args, addresses : ndarray
        One record each, of `numbaflash.kernels.cpu.backward.arguments`: ``ARGUMENTS`` and ``ADDRESSES``.
    threads : int
        Threads to use; with 1 the caller's own does it all.
    """
    scratch = np.empty(threads * args[0].scratch + CACHE_LINE, np.uint8)
    counters = np.zeros(3 * CACHE_LINE // 8, np.int64)
    for phase in range(args[0].phases):
        if threads == 1:
            _call_backward_thread(function, 0, args, addresses, scratch, counters, phase)
        else:
            for thread in prange(threads):
                _call_backward_thread(function, thread, args, addresses, scratch, counters, phase)
