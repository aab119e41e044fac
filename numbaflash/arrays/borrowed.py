"""Arrays of any other library, borrowed through DLPack or ``__cuda_array_interface__``; Numba's device arrays among them.

Such a library cannot be asked for new memory, so results are NumPy arrays for host memory and Numba device arrays for CUDA memory
(unless ``out`` and ``lse`` are given). Keep borrowed CUDA arrays alive until the stream has done its work: their owner does not know of it.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..block_mask import BlockMask, given_mask, mask_arrays
from ..dispatch import ALL_OPERANDS
from ..problem import PACKED, UnsupportedError
from . import numpy as host
from .base import ITEMSIZE, Facts, Library, contiguous_strides
from .streams import LEGACY_DEFAULT, stream_handle


def adopt(x, name):
    if isinstance(x, type) or not (hasattr(type(x), "__dlpack__") or hasattr(x, "__cuda_array_interface__")):
        return None
    module = type(x).__module__.partition(".")[0]
    return _LENDERS.setdefault(module, Lender("Numba" if _is_numba(x) else module))


def _is_numba(x):
    return type(x).__module__.partition(".")[0] in ("numba", "numba_cuda")


@dataclass(frozen=True, slots=True, eq=False)
class Borrowed:
    """Somebody else's memory, as `Facts` describes it.

    ``stream`` is the one its contents are ordered on (None: no order needed); ``owner`` keeps the memory alive.
    """

    facts: Facts
    stream: int | None
    owner: Any

    @property
    def shape(self):
        return self.facts.shape


class Lender(Library):
    """A library whose arrays are borrowed for the length of a call."""

    lends = True

    def __init__(self, name):
        self.name = name

    def forward(self, q, k, v, *, stream, **options):
        from .. import api, varlen

        forward = varlen.forward_varlen if PACKED[0] in options else api.forward
        return self._call(forward, {"q": q, "k": k, "v": v}, stream, options)

    def backward(self, dout, q, k, v, out, lse, *, stream, **options):
        from .. import api, varlen

        backward = varlen.backward_varlen if PACKED[0] in options else api.backward
        return self._call(backward, {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}, stream, options)

    def decode(self, q, k_cache, v_cache, *, stream, **options):
        from .. import decoding

        return self._call(decoding.decode, {"q": q, "k_cache": k_cache, "v_cache": v_cache}, stream, options)

    def append_kv(self, arrays, *, interleaved, stream):
        from ..caches import append_kv, check_values

        check_values(self, arrays, interleaved)
        with self.borrowed(arrays, stream) as (lent, stream):
            return append_kv(**lent, interleaved=interleaved, stream=stream)

    def _call(self, function, given: dict, stream, options: dict):
        given |= {name: options.pop(name) for name in ALL_OPERANDS if name in options and name != "seed"}
        if isinstance(given.get("mask"), BlockMask):
            given |= mask_arrays(given["mask"], given["q"], given["k"])
        with self.borrowed(given, stream) as (lent, stream):
            result = function(stream=stream, **given_mask(lent, lent["q"], lent.get("k")), **options)
        return _as_given(result, {lent[name]: x for name, x in given.items() if x is not None})

    @contextmanager
    def borrowed(self, given: dict, stream=None):
        """Borrow every array that is not None, for work on the one stream that is told beside them (as given for host memory).

        That stream waits for the streams that arrays are bound to, and they for it afterwards; the host waits for nothing.
        """
        target = None if stream is None else stream_handle(stream) or LEGACY_DEFAULT
        lent = {name: None if x is None else borrow(x, name, target) for name, x in given.items()}
        on_device = [b for b in lent.values() if b is not None and b.facts.kind == "cuda"]
        if not on_device:
            yield lent, stream
            return
        if target is None:
            target = next((b.stream for b in on_device if b.stream is not None), LEGACY_DEFAULT)
        index = next((b.facts.index for b in on_device if b.facts.index is not None), 0)
        others = {b.stream for b in on_device} - {None, target}
        for other in others:
            device().wait(index, target, other)
        yield lent, target
        for other in others:
            device().wait(index, other, target)

    def describe(self, x, name):
        return borrow(x, name, None).facts

    def values(self, x):
        with self.borrowed({"array": x}) as (lent, stream):
            array = lent["array"]
            if array.facts.kind == "cpu":
                return host.typed_view(array.facts).copy()
            return MEMORY.contiguous(array, stream).copy_to_host().view(array.facts.dtype)

    def from_host(self, like, array):
        facts = borrow(like, "like", None).facts
        if facts.kind == "cpu":
            return array
        if self.name != "Numba":
            raise UnsupportedError(
                f"{self.name} cannot be asked for memory on the GPU, which a BlockMask needs; pass arrays of CuPy, PyTorch, JAX or Numba"
            )
        made = device().empty(facts.index or 0, array.shape, array.dtype, None)
        made.copy_to_device(array)
        return made

    def merge(self, outs, lses):
        from .. import merging

        with self.borrowed(merging.named(outs, lses)) as (lent, stream):
            states = list(lent.values())
            states = states[: len(outs)], states[len(outs) :]
            if merging.check(MEMORY, *states)["outs[0]"].kind == "cuda":
                return merging.merge_states(MEMORY, *states, stream)
            return merging.merge(*([host.typed_view(x.facts) for x in each] for each in states))


def device():
    """The module that works on CUDA memory: imported late, because it imports numba.cuda."""
    return importlib.import_module(".device", __package__)


def _as_given(result, originals):
    if isinstance(result, tuple):
        return tuple(_as_given(x, originals) for x in result)
    return originals.get(result, result) if isinstance(result, Borrowed) else result


def borrow(x, name: str, stream: int | None) -> Borrowed:
    """Read one array through DLPack, else through ``__cuda_array_interface__``."""
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _through_dlpack(x, name, stream)
    if hasattr(x, "__cuda_array_interface__"):
        return _through_interface(x, name)
    raise TypeError(f"{name} must have __dlpack__ and __dlpack_device__, or __cuda_array_interface__; got {type(x).__name__}")


# DLPack: https://dmlc.github.io/dlpack/latest/c_api.html


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_size_t),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_READONLY = 1
_KINDS = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_capsule_has_name = ctypes.pythonapi.PyCapsule_IsValid
_capsule_has_name.argtypes, _capsule_has_name.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int


def _through_dlpack(x, name, stream):
    try:
        device_type, index = x.__dlpack_device__()
    except Exception as error:
        raise TypeError(f"{name}.__dlpack_device__ must return (device type, index); {error!r}") from error
    kind = _KINDS.get(int(device_type))
    if kind is None:
        raise ValueError(f"{name} must lie on the CPU or a CUDA device; got DLPack device type {int(device_type)}")
    ready = None if kind == "cpu" else (stream or LEGACY_DEFAULT)
    try:
        capsule = _export(x, ready)
    except TypeError as error:
        raise TypeError(f"{name} cannot be read through DLPack: {error}") from error
    except (BufferError, ValueError, RuntimeError) as error:  # what the array's library refuses, read-only memory for one
        raise ValueError(f"{name} cannot be read through DLPack: {error}") from error
    if _capsule_has_name(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise TypeError(f"{name} must be a DLPack tensor of version 1 or older; got version {managed.major}.{managed.minor}")
        tensor, readonly = managed.tensor, bool(managed.flags & _READONLY)
    elif _capsule_has_name(capsule, b"dltensor"):
        tensor, readonly = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    else:
        raise TypeError(f"{name}.__dlpack__ must return a new DLPack capsule; got {capsule!r}")
    dtype = _CODES.get(tensor.dtype.code, "opaque") + str(tensor.dtype.bits)
    if tensor.dtype.lanes != 1:
        dtype += f"x{tensor.dtype.lanes}"
    shape = tuple(tensor.shape[: tensor.ndim])
    itemsize = -(-tensor.dtype.bits * tensor.dtype.lanes // 8)
    strides = tuple(_signed(n * itemsize) for n in tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape, itemsize)
    facts = Facts(tensor.data + tensor.byte_offset, shape, strides, dtype, kind, int(index) if kind == "cuda" else 0, readonly)
    # The capsule stays unconsumed: its own destructor gives the memory back when the call is over.
    return Borrowed(facts, ready, (x, capsule))


def _signed(n):
    """Bytes as the address arithmetic of 64 bits sees them: CuPy 14 divides a negative stride by the itemsize as an unsigned number."""
    return (n + 2**63) % 2**64 - 2**63


def _export(x, stream):
    arguments = {} if stream is None else {"stream": stream}
    try:
        return x.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # an exporter from before DLPack 1.0
        return x.__dlpack__(**arguments)


# https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html


def _through_interface(x, name):
    told = x.__cuda_array_interface__
    try:
        masked = told.get("mask") is not None
        address, readonly = told["data"]
        address, shape = int(address or 0), tuple(map(int, told["shape"]))
        dtype = _interface_dtype(x, told["typestr"], name)
        strides = told.get("strides")
        if strides is None and _is_numba(x):  # Numba calls an array contiguous whose other axes are broadcast
            strides = x.strides
        strides = contiguous_strides(shape, ITEMSIZE.get(dtype, 1)) if strides is None else tuple(map(int, strides))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TypeError(f"{name}.__cuda_array_interface__ must be a dict as its protocol says; {error!r}") from error
    if masked:
        raise TypeError(f"{name} must be a plain array; its __cuda_array_interface__ has a mask")
    index = None
    if address:  # the protocol does not tell the device, but the driver knows whose memory it is
        from .. import toolchain

        index = toolchain.device_of_address(address)
    return Borrowed(Facts(address, shape, strides, dtype, "cuda", index, bool(readonly)), told.get("stream"), x)


def _interface_dtype(x, typestr, name) -> str:
    """bfloat16 has no letter in the protocol: it shows as two opaque bytes, and only the array's own dtype tells."""
    dtype = np.dtype(typestr)
    if dtype.kind != "V":
        return host.dtype_name(dtype)
    told = getattr(getattr(x, "dtype", None), "name", typestr)
    if dtype.itemsize == 2 and told != "bfloat16":
        return f"{typestr} (if this is bfloat16, its dtype must be ml_dtypes.bfloat16, or hand it over through DLPack)"
    return told


class Memory(Library):
    """Borrowed arrays, and the NumPy and Numba arrays that are made beside them."""

    name = "borrowed memory"
    builds_on_device = True

    def inspect(self, x):
        facts = x.facts
        return facts.address, (facts.shape, facts.strides, facts.dtype, facts.kind, facts.index, facts.readonly, facts.address & 15)

    def describe(self, x, name):
        return x.facts

    def address(self, x):
        if isinstance(x, Borrowed):
            return x.facts.address
        if isinstance(x, np.ndarray):
            return host.address(x)
        return int(x.__cuda_array_interface__["data"][0] or 0)

    def current_stream(self, index):
        return lambda: LEGACY_DEFAULT

    def allocator(self, like, shape, dtype):
        dtype = host.dtype_of(dtype)
        if like.facts.kind == "cpu":
            return lambda stream: np.empty(shape, dtype)
        index, empty = like.facts.index or 0, device().empty
        return lambda stream: empty(index, shape, dtype, stream)

    def contiguous(self, x, stream):
        facts = x.facts
        if facts.kind == "cpu":
            return np.array(host.bits_view(facts), order="C")
        made = device().empty(facts.index, facts.shape, np.dtype(f"u{ITEMSIZE[facts.dtype]}"), stream)  # the bits are copied, whatever they mean
        device().copy(_row_major(facts, self.address(made)), facts, stream)
        return made

    def values(self, x):
        if isinstance(x, Borrowed):
            return None  # its lender told them
        return x if isinstance(x, np.ndarray) else x.copy_to_host()

    def assign(self, target, source, stream):
        facts = target.facts
        row_major = _row_major(facts, self.address(source))
        if facts.kind == "cpu":
            np.copyto(host.bits_view(facts), host.bits_view(row_major))
        else:
            device().copy(facts, row_major, stream)

    def clear(self, x, stream):
        if isinstance(x, np.ndarray):
            x[...] = 0
        elif isinstance(x, Borrowed) and x.facts.kind == "cpu":
            host.bits_view(x.facts)[...] = 0
        else:
            device().clear(x.facts if isinstance(x, Borrowed) else _through_interface(x, "result").facts, stream)


def _row_major(facts, address):
    """Facts of a row-major array of the same shape, dtype and device."""
    return Facts(address, facts.shape, contiguous_strides(facts.shape, ITEMSIZE[facts.dtype]), facts.dtype, facts.kind, facts.index)


MEMORY = Memory()
_LENDERS: dict[str, Lender] = {}
sys.modules[__package__].LIBRARIES[Borrowed] = MEMORY
