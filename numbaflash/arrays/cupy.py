"""CuPy arrays."""

from __future__ import annotations

from contextlib import ExitStack

import cupy

from .base import Facts, Library
from .numpy import dtype_name, dtype_of


def adopt(x, name):
    return CUPY if isinstance(x, cupy.ndarray) else None


class CuPy(Library):
    name = "CuPy"
    namespace = cupy
    builds_on_device = True

    def inspect(self, x):
        data = x.data
        at = data.ptr
        return at, (x.shape, x.strides, x.dtype, data.device_id, at & 15)

    def describe(self, x, name):
        return Facts(x.data.ptr, x.shape, x.strides, dtype_name(x.dtype), "cuda", x.data.device_id)

    def address(self, x):
        return x.data.ptr

    def current_stream(self, index):
        current = cupy.cuda.get_current_stream
        return lambda: current(index).ptr

    def allocator(self, like, shape, dtype):
        index, dtype = like.data.device_id, dtype_of(dtype, like.dtype)
        new, current_device = cupy.ndarray, cupy.cuda.runtime.getDevice

        def allocate(stream):
            if stream is None and current_device() == index:
                return new(shape, dtype)
            with _on(index, stream):
                return new(shape, dtype)

        return allocate

    def contiguous(self, x, stream):
        with _on(x.data.device_id, stream):
            return x.copy(order="C")

    def assign(self, target, source, stream):
        with _on(target.data.device_id, stream):
            cupy.copyto(target, source)

    def clear(self, x, stream):
        with _on(x.data.device_id, stream):
            x.fill(0)

    def values(self, x):
        return cupy.asnumpy(x)

    def from_host(self, like, array):
        with _on(like.data.device_id, None):
            return cupy.asarray(array)

    def row_major(self, x):
        return self.namespace.asarray(x, order="C")

    def cast(self, x, dtype):
        return x.astype(dtype_of(dtype, x.dtype), copy=False)

    def on_device(self, x):
        return cupy.cuda.Device(x.data.device_id)


def _on(index, stream):
    """Device and stream current: the pool gives memory in the order of the stream that is current when it is asked."""
    context = ExitStack()
    context.enter_context(cupy.cuda.Device(index))
    if stream is not None:
        context.enter_context(cupy.cuda.ExternalStream(stream, index))
    return context


CUPY = CuPy()
