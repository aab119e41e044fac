"""Launches in Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1): Python threads instead of a GPU, host addresses."""

from __future__ import annotations

import functools
import importlib
import sys
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


@contextmanager
def _quick_switching():
    """Let waiting threads go on at once: the simulator polls, and by default Python switches only every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Allocations(dict):
    """A block's shared arrays, where a thread that finds one missing keeps others waiting until it has put it there.

    In Numba's simulator two threads may both find it missing, and the one that is first then has an array of its own.
    """

    def __init__(self):
        super().__init__()
        self._missing = threading.Lock()

    def get(self, place):
        self._missing.acquire()
        if place in self:
            self._missing.release()
        return super().get(place)

    def __setitem__(self, place, array):
        super().__setitem__(place, array)
        self._missing.release()


@functools.cache
def allocate_once():
    """Let a block's threads have the same shared arrays, whichever of them comes first."""
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    start = FakeCUDAShared.__init__

    def start_with_a_lock(self, *args):
        start(self, *args)
        self._allocations = _Allocations()

    FakeCUDAShared.__init__ = start_with_a_lock


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
        with _ONE_AT_A_TIME, _quick_switching():
            cuda.jit(self._function)[self._grid, self._threads, 0, self._shared_bytes](*arguments)


def prepare(request: KernelRequest, parameters, *, grid, threads: int, shared_bytes: int = 0, device=None, operands=OPERANDS) -> SimulatedLaunch:
    """As `numbaflash.toolchain.prepare`, in the simulator."""
    allocate_once()
    module, _, function = request.build.partition(":")
    source = getattr(importlib.import_module(module), function)(request.config)
    if source.threads != threads:
        raise ValueError(f"threads must be the {source.threads} of the kernel; got {threads}")
    return SimulatedLaunch(source.function, tuple(parameters), grid, threads, shared_bytes, operands)
