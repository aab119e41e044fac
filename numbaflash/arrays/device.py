"""What borrowed CUDA memory needs and no library does for it: allocate, order, copy and merge, through Numba's public interface."""

from __future__ import annotations

import math

import numpy as np

from .. import toolchain  # noqa: F401  first: it lets numba-cuda be imported beside NumPy 2.5

# isort: split
from numba import cuda
from numba.cuda import libdevice

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


def merge(outs: list[Facts], lses: list[Facts], out: Facts, lse: Facts, stream: int | None) -> None:
    """`numbaflash.merge` on one device, into new row-major arrays ``out`` and ``lse``."""
    rows = math.prod(lse.shape)
    if not rows:
        return
    with cuda.gpus[out.index]:
        external = _external(stream)
        launch = _blocks(rows), THREADS, external
        acc = cuda.device_array(out.shape, lse.dtype, stream=external)
        total = cuda.device_array(lse.shape, lse.dtype, stream=external)
        top = _view(lse)
        add, finish = MERGE[out.dtype]
        _clear[launch](acc, top, total)
        for part, part_lse in zip(outs, lses, strict=True):
            add[launch](_view(part), _view(part_lse), acc, top, total)
        finish[launch](acc, total, _view(out), top)


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


@cuda.jit
def _clear(acc, top, total):
    _, heads, seqlen_q = top.shape
    for row in range(cuda.grid(1), top.size, cuda.gridsize(1)):
        rest, i = divmod(row, seqlen_q)
        b, h = divmod(rest, heads)
        top[b, h, i] = -math.inf
        total[b, h, i] = 0
        for d in range(acc.shape[3]):
            acc[b, i, h, d] = 0


def _merge_kernels(load, store):
    """Kernels of a dtype, one thread a row: add a partial result (a block of the online softmax), and normalise.

    ``acc`` (batch, seqlen_q, heads, head_dim_v) and ``total`` (batch, heads, seqlen_q) are relative to the maximum ``top``.
    """

    @cuda.jit
    def add(out, lse, acc, top, total):
        _, heads, seqlen_q = top.shape
        for row in range(cuda.grid(1), top.size, cuda.gridsize(1)):
            rest, i = divmod(row, seqlen_q)
            b, h = divmod(rest, heads)
            part = lse[b, h, i]
            if part == -math.inf:  # an empty part: whatever its out holds takes no part
                continue
            old = top[b, h, i]
            new = old if old >= part else part  # part when either is NaN, and NaN stays through the factors below
            keep = math.exp(old - new)
            weight = math.exp(part - new)
            top[b, h, i] = new
            total[b, h, i] = total[b, h, i] * keep + weight
            for d in range(acc.shape[3]):
                acc[b, i, h, d] = acc[b, i, h, d] * keep + load(out[b, i, h, d]) * weight

    @cuda.jit
    def finish(acc, total, out, lse):
        _, heads, seqlen_q = lse.shape
        for row in range(cuda.grid(1), lse.size, cuda.gridsize(1)):
            rest, i = divmod(row, seqlen_q)
            b, h = divmod(rest, heads)
            weight = total[b, h, i]
            if weight != 0:  # else no part had a key: acc is 0 and lse -inf already
                lse[b, h, i] += math.log(weight)
            for d in range(acc.shape[3]):
                value = acc[b, i, h, d]
                out[b, i, h, d] = store(value / weight if weight != 0 else value)

    return add, finish


@cuda.jit(device=True, inline="always")
def _same(x):
    return x


@cuda.jit(device=True, inline="always")
def _from_float16(x):
    return np.float32(x)


@cuda.jit(device=True, inline="always")
def _from_bfloat16(bits):
    return libdevice.int_as_float(np.int32(np.uint32(bits) << np.uint32(16)))


@cuda.jit(device=True, inline="always")
def _to_bfloat16(x):
    """The bits of x rounded to the nearest, ties to even."""
    bits = np.uint32(libdevice.float_as_int(x))
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


_plain = _merge_kernels(_same, _same)
MERGE = {
    "float64": _plain,
    "float32": _plain,
    "float16": _merge_kernels(_from_float16, _same),
    "bfloat16": _merge_kernels(_from_bfloat16, _to_bfloat16),
}
