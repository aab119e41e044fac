"""The operations of straight-line bodies in Numba's CUDA simulator, on NumPy scalars; it has threads but no warps."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from numba.cuda import types

from .operations import GpuOps


class SimulatorOps:
    """The operations of `GpuOps` on NumPy scalars, in one thread of the simulator."""

    @staticmethod
    def constant(dtype, value):
        return np.dtype(dtype).type(value)

    @staticmethod
    def product(a, b):
        return a * b

    @staticmethod
    def fma(a, b, c):
        return a * b + c

    @staticmethod
    def wide_product(a, b):
        product = (int(a) & 0xFFFFFFFF) * (int(b) & 0xFFFFFFFF)
        return [np.uint32(x).view(np.int32) for x in (product & 0xFFFFFFFF, product >> 32)]

    @classmethod
    def wide_multiple(cls, a, factor, beside=None):
        return [*cls.wide_product(a, factor), beside]

    @staticmethod
    def permute(a, b, selector):
        bytes_of = [x >> 8 * n & 0xFF for x in (a, b) for n in range(4)]
        found = 0
        for place in range(4):
            digit = selector >> 4 * place & 15
            byte = np.choose(digit & 7, bytes_of)
            found = found | np.where(digit & 8, (byte >> 7) * 0xFF, byte).astype(np.int64) << 8 * place
        return found.astype(np.uint32).view(np.int32)[()]

    @classmethod
    def two_bytes(cls, a, b, byte):
        return GpuOps.two_bytes(cls, a, b, byte)

    @classmethod
    def next_bytes(cls, a):
        return GpuOps.next_bytes(cls, a)

    @staticmethod
    def not_below_float16(a, b):
        ends = (np.ascontiguousarray(x, np.int32)[..., None].view(np.float16) for x in (a, b))
        return np.where(np.greater_equal(*ends), np.int16(-1), np.int16(0)).view(np.int32)[..., 0]

    integer = staticmethod(np.int32)
    wide = staticmethod(np.int64)
    tanh = tanh_approx = staticmethod(np.tanh)
    absolute = staticmethod(np.abs)
    minimum = staticmethod(np.fmin)
    maximum = staticmethod(np.fmax)
    exp2 = exp2_by_fma = staticmethod(np.exp2)
    exp = staticmethod(np.exp)
    log = staticmethod(np.log)

    @staticmethod
    def narrow(x):
        return np.uint32(int(x) & 0xFFFFFFFF).view(np.int32)

    @classmethod
    def halves(cls, x):
        return [cls.narrow(x), cls.narrow(int(x) >> 32)]

    @staticmethod
    def real(dtype, x):
        return np.dtype(dtype).type(x)

    @staticmethod
    def is_negative_zero(x):
        return (x == 0) & np.signbit(x)

    @staticmethod
    def select(condition, a, b):
        return a if condition else a.dtype.type(b)

    @staticmethod
    def opaque(x):
        return x

    @staticmethod
    def truth(condition):
        return np.int32(bool(condition))

    @staticmethod
    def exchange(values, mask):
        """A barrier of the whole block, so all its threads must take part, as all lanes of a warp must on the GPU."""
        thread = threading.current_thread()
        slots = thread._manager.__dict__.setdefault("exchange_slots", {})
        slots[thread.thread_id] = values
        thread.syncthreads()
        received = slots[thread.thread_id ^ mask]
        thread.syncthreads()
        return received

    @staticmethod
    def load(memory, index, step, count):
        start = int(index) + step
        return list(memory[start : start + count])

    @staticmethod
    def store(memory, index, step, values):
        for i, x in enumerate(values):
            memory[int(index) + step + i] = x

    @staticmethod
    def place(array, indices, contiguous=False):
        return array, tuple(int(i) for i in indices)

    @staticmethod
    def moved(place, axis, step):
        array, indices = place
        axis %= len(indices)
        return array, (*indices[:axis], indices[axis] + step, *indices[axis + 1 :])

    @classmethod
    def load_row(cls, place, count, valid):
        if not valid:
            return [place[0].dtype.type(0)] * count
        return [array[indices] for array, indices in (cls.moved(place, -1, i) for i in range(count))]

    @classmethod
    def load_byte(cls, place, valid):
        return np.int32(cls.load_row(place, 1, valid)[0])

    @classmethod
    def store_row(cls, place, values, valid):
        if valid:
            for i, x in enumerate(values):
                array, indices = cls.moved(place, -1, i)
                array[indices] = x

    @staticmethod
    def add_to(place, value):
        array, indices = place
        array[indices] += value

    @staticmethod
    def put(address, value, valid):
        if valid:
            ctypes.c_int32.from_address(int(address)).value = int(value)

    @staticmethod
    def fetch(kind, address, step, count=None, bound=0):
        given, result = {"u8": ("u1", "i4"), "u16": ("u2", "i4"), "b32": ("i4", "i4"), "s64": ("i8", "i8"), "f32": ("f4", "f4")}[kind]
        if count is not None and not count > bound:
            return np.dtype(result).type(0)
        size = np.dtype(given).itemsize
        return np.frombuffer(ctypes.string_at(int(address) + step, size), given)[0].astype(result)

    @staticmethod
    def pair(dtype, word):
        halves = np.int32(word).reshape(1).view(np.uint16)
        return list(halves.view(np.float16).astype(np.float32) if dtype == "float16" else (halves.astype(np.uint32) << 16).view(np.float32))

    @staticmethod
    def as_integer(x):
        return np.float32(x).view(np.int32)

    @staticmethod
    def as_float(word):
        return np.int32(word).view(np.float32)

    @staticmethod
    def reciprocal(x):
        return np.float32(1) / x

    log2 = staticmethod(np.log2)

    @classmethod
    def copy_row(cls, memory, index, step, place, count, valid):
        cls.store(memory, index, step, cls.load_row(place, count, valid))

    @staticmethod
    def float32_of(dtype, bits):
        if dtype == "float16":
            return np.float32(np.uint16(bits).view(np.float16))
        return np.uint32(int(bits) << 16).view(np.float32)

    @staticmethod
    def bits_of(dtype, x):
        if dtype == "float16":
            return np.float16(x).view(np.uint16)
        bits = int(np.float32(x).view(np.uint32))
        return np.uint16(0x7FC0 if np.isnan(x) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF)

    @classmethod
    def word_of(cls, dtype, low, high):
        return cls.narrow(int(cls.bits_of(dtype, low)) | int(cls.bits_of(dtype, high)) << 16)


def simulated(argtypes, body):
    """A Python function that runs a body; scalar arguments are cast."""
    casts = [None if isinstance(kind, (types.BaseTuple, types.Array)) else np.dtype(str(kind)).type for kind in argtypes]

    def function(*args):
        if len(args) != len(casts):
            raise TypeError(f"expected {len(casts)} arguments; got {len(args)}")
        values = (list(arg) if isinstance(arg, (list, tuple)) else arg if cast is None else cast(arg) for cast, arg in zip(casts, args, strict=True))
        with np.errstate(all="ignore"):
            return body(SimulatorOps, *values)

    return function


def nothing():
    """What the simulator does where the GPU has to wait for what is not instantaneous there."""
