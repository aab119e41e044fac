"""What borrowed CUDA memory needs and no library does for it: allocate, order and copy, through Numba's public interface."""

from __future__ import annotations

import math

import numpy as np

from .. import toolchain  # noqa: F401  first: it lets numba-cuda be imported beside NumPy 2.5

# isort: split
from numba import cuda

from .base import ITEMSIZE, Facts
from .streams import LEGACY_DEFAULT

THREADS = 256
MAX_BLOCKS = 4096  # the rest is a stride loop


def empty(index: int, shape, dtype: np.dtype, stream: int | None):
    """A new Numba device array, bound to the stream."""
    with cuda.gpus[index]:
        return cuda.device_array(shape, dtype, stream=_external(stream))


def wait(index: int, stream: int, other: int) -> None:
    """Let ``stream`` wait for what ``other`` has been given so far; the host goes on."""
    with cuda.gpus[index]:
        event = cuda.event(timing=False)
        event.record(_external(other))
        event.wait(_external(stream))


def copy(target: Facts, source: Facts, stream: int | None) -> None:
    """Copy the elements of one strided array into another."""
    count = math.prod(target.shape)
    if count:
        with cuda.gpus[target.index]:
            bits = f"u{ITEMSIZE[target.dtype]}"
            _copy[_blocks(count), THREADS, _external(stream)](_flat_view(target, bits), _flat_view(source, bits))


def clear(target: Facts, stream: int | None) -> None:
    """Set every element of a strided array to 0."""
    count = math.prod(target.shape)
    if count:
        with cuda.gpus[target.index]:
            _zero[_blocks(count), THREADS, _external(stream)](_flat_view(target, f"u{ITEMSIZE[target.dtype]}"))


def _external(stream):
    return cuda.external_stream(stream or LEGACY_DEFAULT)


def _blocks(count):
    return min(-(-count // THREADS), MAX_BLOCKS)


def _view(facts: Facts, typestr: str | None = None):
    """A Numba array over borrowed memory; bfloat16 comes as uint16 bits."""

    class Interface:
        __cuda_array_interface__ = {
            "version": 3,
            "data": (facts.address, False),
            "shape": facts.shape,
            "strides": facts.strides,
            "typestr": typestr or np.dtype(np.uint16 if facts.dtype == "bfloat16" else facts.dtype).str,
        }

    return cuda.as_cuda_array(Interface())


def _flat_view(facts, bits):
    """Four axes whatever the array has, so that one kernel copies them all."""
    lead = 4 - len(facts.shape)
    padded = Facts(facts.address, (1,) * lead + facts.shape, (0,) * lead + facts.strides, facts.dtype, facts.kind, facts.index)
    return _view(padded, np.dtype(bits).str)


@cuda.jit
def _copy(target, source):
    _, n1, n2, n3 = target.shape
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        rest, i3 = divmod(i, n3)
        rest, i2 = divmod(rest, n2)
        i0, i1 = divmod(rest, n1)
        target[i0, i1, i2, i3] = source[i0, i1, i2, i3]


@cuda.jit
def _zero(target):
    _, n1, n2, n3 = target.shape
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        rest, i3 = divmod(i, n3)
        rest, i2 = divmod(rest, n2)
        i0, i1 = divmod(rest, n1)
        target[i0, i1, i2, i3] = 0
