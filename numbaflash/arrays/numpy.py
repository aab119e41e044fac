"""NumPy arrays, with bfloat16 from ml_dtypes."""

from __future__ import annotations

import ctypes

import numpy as np

from .base import Facts, Library


def adopt(x, name):
    if not isinstance(x, np.ndarray):
        return None
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array; got a masked array. Fill it first ({name}.filled(0.0))")
    return NUMPY


def _address_function():
    """The data pointer is the first field after the object head in NumPy's stable C ABI; reading it takes a tenth of ``x.ctypes.data``."""
    head = object.__basicsize__
    read = ctypes.c_size_t.from_address
    probe = np.empty((2, 3))[1:]
    if read(id(probe) + head).value == probe.ctypes.data:
        return lambda x: read(id(x) + head).value
    return lambda x: x.ctypes.data  # another ABI than CPython's


address = _address_function()


def dtype_name(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else f"{dtype.str} (not in this machine's byte order)"


def dtype_of(name: str, like: np.dtype | None = None) -> np.dtype:
    """The NumPy dtype of a name; bfloat16 is whatever dtype ``like`` carries, else that of ml_dtypes."""
    if like is not None and like.name == name:
        return like
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError("a NumPy array of bfloat16 needs the package ml_dtypes (pip install ml_dtypes), or give out=") from None
    return np.dtype(ml_dtypes.bfloat16)


def bits_view(facts: Facts) -> np.ndarray:
    """A view of host memory, where bfloat16 comes as uint16. Whoever calls keeps the memory alive."""

    class Memory:
        __array_interface__ = {
            "version": 3,
            "data": (facts.address, facts.readonly),
            "shape": facts.shape,
            "strides": facts.strides,
            "typestr": np.dtype(np.uint16 if facts.dtype == "bfloat16" else facts.dtype).str,
        }

    return np.asarray(Memory())


def typed_view(facts: Facts) -> np.ndarray:
    """A view of host memory in its own dtype."""
    return bits_view(facts).view(dtype_of(facts.dtype))


class NumPy(Library):
    name = "NumPy"
    namespace = np
    address = staticmethod(address)

    def inspect(self, x):
        at = address(x)
        return at, (x.shape, x.strides, x.dtype, at & 15)

    def inspect_result(self, x):
        at = address(x)
        return at, (x.shape, x.strides, x.dtype, at & 15, x.flags.writeable)

    def describe(self, x, name):
        return Facts(address(x), x.shape, x.strides, dtype_name(x.dtype), readonly=not x.flags.writeable)

    def allocator(self, like, shape, dtype):
        empty, dtype = np.empty, dtype_of(dtype, like.dtype)
        return lambda stream: empty(shape, dtype)

    def contiguous(self, x, stream):
        return np.array(x, order="C", copy=True, subok=False)

    def assign(self, target, source, stream):
        np.copyto(target, source)

    def clear(self, x, stream):
        x[...] = 0

    def values(self, x):
        return x

    def from_host(self, like, array):
        return array

    def row_major(self, x):
        return np.asarray(x, order="C")

    def cast(self, x, dtype):
        return x.astype(dtype_of(dtype, x.dtype), copy=False)


NUMPY = NumPy()
