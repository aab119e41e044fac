"""Launches in Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1): Python threads instead of a GPU, host addresses."""

from __future__ import annotations

import functools
import importlib
import random
import threading
from contextlib import contextmanager

import numpy as np

from ..dispatch import OPERANDS
from .compile import CompileError, KernelRequest
from .launch import Array, Pointer, Scalar

_ONE_AT_A_TIME = threading.Lock()  # the simulator keeps the running kernel in a global variable
_DTYPES = {"float16": "uint16", "bfloat16": "uint16"}  # kernels see the bits


def is_active() -> bool:
    """Whether `numba` was imported for the simulator."""
    from numba import config

    return bool(config.ENABLE_CUDASIM)


class _Memory:
    """Somebody's memory, for `numpy.asarray`."""

    def __init__(self, address, dtype, shape, strides):
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": np.dtype(dtype).str,
            "shape": tuple(shape),
            "strides": tuple(strides),
        }


def view(address: int, dtype: str, shape, strides) -> np.ndarray:
    """An array over memory that its owner keeps alive; float16 and bfloat16 as uint16."""
    dtype = _DTYPES.get(dtype, dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.asarray(_Memory(address, dtype, shape, strides))


@functools.cache
def _block_in_turns():
    """Numba's blocks, with threads that run one at a time from barrier to barrier: in an order drawn anew each time, the same in every run.

    By itself, Numba's simulator polls its threads, which takes as long as their work; and two of them may make a shared array each.
    """
    from numba.cuda.simulator.kernel import BlockManager, BlockThread

    class Thread(BlockThread):
        def __init__(self, *args):
            super().__init__(*args)
            self.turn = threading.Lock()
            self.turn.acquire()

        def run(self):
            self.turn.acquire()
            try:
                if not self.abort:
                    super().run()
            finally:
                self._manager.ended(self)

        def syncthreads(self):
            self._manager.arrived(self)
            self.turn.acquire()
            if self.abort:
                raise RuntimeError("another thread of the block has failed")

    class Block(BlockManager):
        def run(self, grid_point, *args):
            self._order, self._waiting, self._error = random.Random(repr(grid_point)), [], None
            self._over = threading.Lock()
            self._over.acquire()
            points = np.ndindex(*self._block_dim)
            self._threads = [Thread(lambda: self._f(*args), self, grid_point, point, self._debug) for point in points]
            self._ready = self._shuffled(self._threads)
            for thread in self._threads:
                thread.start()
            self._pass_on()
            self._over.acquire()
            for thread in self._threads:
                thread.join()
            if self._error is not None:
                error, trace = self._error
                raise error.with_traceback(trace)

        def _shuffled(self, threads):
            return self._order.sample(threads, len(threads))

        def arrived(self, thread):
            self._waiting.append(thread)
            self._pass_on()

        def ended(self, thread):
            if thread.exception and self._error is None:
                self._error = thread.exception
                for each in self._threads:
                    each.abort = True
            self._pass_on()

        def _pass_on(self):
            if not self._ready:
                self._ready, self._waiting = self._shuffled(self._waiting), []
            (self._ready.pop().turn if self._ready else self._over).release()

    return Block


@contextmanager
def taking_turns():
    """Let the threads of a block run one after the other from barrier to barrier, in kernels launched meanwhile."""
    from numba.cuda.simulator import kernel

    before = kernel.BlockManager
    kernel.BlockManager = _block_in_turns()
    try:
        yield
    finally:
        kernel.BlockManager = before


class SimulatedLaunch:
    """A kernel in the simulator with its prepared arguments; calls from several threads take turns."""

    def __init__(self, function, parameters, grid, threads, shared_bytes, operands):
        self._function, self._parameters, self._operands = function, parameters, operands
        self._grid, self._threads, self._shared_bytes = grid, threads, shared_bytes

    def __call__(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launch with the addresses of the operands, in their order."""
        from numba import cuda
        from numba.cuda.cudadrv.devicearray import FakeCUDAArray

        addresses = dict(zip(self._operands, addresses, strict=True))
        arguments = []
        for parameter in self._parameters:
            if isinstance(parameter, Scalar):
                arguments.append(np.dtype(parameter.kind).type(parameter.value))
            elif isinstance(parameter, Pointer):
                arguments.append(np.uint64(addresses[parameter.operand] + parameter.offset))
            elif isinstance(parameter, Array):
                array = view(addresses[parameter.operand] + parameter.offset, parameter.dtype, parameter.shape, parameter.strides)
                arguments.append(FakeCUDAArray(array))  # an ndarray would be copied in and out
            else:
                raise CompileError(f"the CUDA simulator has no {type(parameter).__name__} parameters")
        with _ONE_AT_A_TIME, taking_turns():
            cuda.jit(self._function)[self._grid, self._threads, 0, self._shared_bytes](*arguments)


def prepare(request: KernelRequest, parameters, *, grid, threads: int, shared_bytes: int = 0, device=None, operands=OPERANDS) -> SimulatedLaunch:
    """As `numbaflash.toolchain.prepare`, in the simulator."""
    module, _, function = request.build.partition(":")
    source = getattr(importlib.import_module(module), function)(request.config)
    if source.threads != threads:
        raise ValueError(f"threads must be the {source.threads} of the kernel; got {threads}")
    return SimulatedLaunch(source.function, tuple(parameters), grid, threads, shared_bytes, operands)
