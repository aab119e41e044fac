"""A case's operands as arrays of each library, and results back as NumPy or torch numbers in float64.

Naming a library here is what imports it; nothing is imported otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace

import numpy as np

from ..dispatch import CPU, Device
from .cases import Case
from .memory import Memory

LIBRARIES = ("numpy", "torch", "torch-cuda", "cupy", "numba", "jax")
"""numpy and torch lie on the CPU, torch-cuda, cupy and numba (device arrays) on the GPU, jax wherever JAX puts them."""

NEGATIVE_STRIDES = ("numpy", "cupy", "numba")
"""Libraries whose arrays may run backwards; the others get the same memory walked forwards."""


class Operands:
    """The operands of a case as arrays of one library.

    Attributes
    ----------
    memory : dict of str to Memory
        What every operand's memory held at first.
    arrays : dict of str to array
        The strided arrays to hand to a kernel, inputs read-only in NumPy. Results are absent for jax, whose arrays cannot be written.
    """

    def __init__(self, case: Case, library: str = "numpy", device: int = 0):
        if library not in LIBRARIES:
            raise ValueError(f"library must be one of {', '.join(LIBRARIES)}; got {library!r}")
        case = laid_out(case, library)
        self.library = library
        self.memory = case.memory()
        self.arrays = {}
        self._storage = {}
        for name, memory in self.memory.items():
            if library == "jax" and name in case.results:
                continue
            self._storage[name], self.arrays[name] = make(memory, library, device)
            if library == "numpy" and name not in case.results:
                self.arrays[name].flags.writeable = False

    def bits(self, name: str) -> np.ndarray:
        """The flat memory of an operand as it is now."""
        memory, storage = self.memory[name], self._storage[name]
        if self.library in ("numpy", "jax"):
            return storage
        if self.library in ("torch", "torch-cuda"):
            storage = storage.cpu().numpy()
        elif self.library == "cupy":
            storage = storage.get()
        else:
            storage = storage.copy_to_host()
        return storage.view(memory.bits.dtype)


def make(memory: Memory, library: str, device: int = 0):
    """(storage, array): a copy of the memory where the library wants it, and the strided array in it."""
    return _MAKERS[library](memory, device)


def laid_out(case: Case, library: str) -> Case:
    """The case with layouts that the library can have."""
    if library in NEGATIVE_STRIDES:
        return case
    return replace(case, **{name: getattr(case, name).without_negative() for name in case.operands})


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's dtype of that name; bfloat16 is that of `ml_dtypes`."""
    if dtype == "bfloat16":
        try:
            return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError:
            raise ImportError("bfloat16 in NumPy needs ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(dtype)


def _numpy(memory: Memory, device):
    bits = _aligned_copy(memory.bits)
    return bits, memory.view(bits, numpy_dtype(memory.dtype))


def _aligned_copy(bits):
    room = np.empty(bits.nbytes + 64, np.uint8)
    skip = -room.ctypes.data % 64
    copy = room[skip : skip + bits.nbytes].view(bits.dtype)
    copy[:] = bits
    return copy


def _jax(memory: Memory, device):
    jnp = importlib.import_module("jax.numpy")
    if memory.dtype == "float64" and not sys.modules["jax"].config.jax_enable_x64:
        raise ValueError("float64 in JAX needs jax.config.update('jax_enable_x64', True)")
    bits, view = _numpy(memory, device)
    return bits, jnp.asarray(np.ascontiguousarray(view))


def _torch(memory: Memory, device):
    return _torch_on(memory, "cpu")


def _torch_cuda(memory: Memory, device):
    return _torch_on(memory, f"cuda:{device}")


def _torch_on(memory: Memory, where):
    torch = importlib.import_module("torch")
    signed = memory.bits.dtype.name.removeprefix("u")
    storage = torch.from_numpy(_aligned_copy(memory.bits).view(signed)).to(where)
    return storage, torch.as_strided(storage.view(getattr(torch, memory.dtype)), memory.shape, memory.strides, memory.first)


def _cupy(memory: Memory, device):
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(device):
        storage = cupy.asarray(memory.bits)
    itemsize = storage.itemsize
    strides = tuple(s * itemsize for s in memory.strides)
    start = storage.data + memory.first * itemsize
    return storage, cupy.ndarray(memory.shape, numpy_dtype(memory.dtype), start, strides)


def _numba(memory: Memory, device):
    cuda = importlib.import_module("numba.cuda")
    with cuda.gpus[device]:
        storage = cuda.to_device(memory.bits)
    if memory.dtype == "bfloat16":
        raise ValueError("Numba device arrays have no bfloat16")
    itemsize = memory.bits.itemsize
    description = {
        "version": 3,
        "shape": memory.shape,
        "typestr": np.dtype(memory.dtype).str,
        "data": (storage.__cuda_array_interface__["data"][0] + memory.first * itemsize, False),
        "strides": tuple(s * itemsize for s in memory.strides),
        "stream": None,
    }
    return storage, cuda.from_cuda_array_interface(description, owner=storage, sync=False)


_MAKERS = {"numpy": _numpy, "torch": _torch, "torch-cuda": _torch_cuda, "cupy": _cupy, "numba": _numba, "jax": _jax}


def to_float64(array):
    """An array of any library as float64: a torch tensor stays a tensor on its device, everything else becomes NumPy."""
    kind = type(array).__module__.split(".")[0]
    if kind == "torch":
        return array.detach().to(sys.modules["torch"].float64)
    if kind == "cupy":
        array = array.get()
    elif hasattr(array, "copy_to_host"):
        array = _numba_to_host(array)
    return np.asarray(array).astype(np.float64)


def _numba_to_host(array):
    """Numba copies no negative strides: copy the bytes that the array spans, and stride there."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    first, end = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + array.dtype.itemsize
    address = array.__cuda_array_interface__["data"][0] + first
    span = {"version": 3, "shape": (end - first,), "typestr": "|u1", "data": (address, False), "strides": None, "stream": None}
    copied = importlib.import_module("numba.cuda").from_cuda_array_interface(span, owner=array, sync=False).copy_to_host()
    return np.ndarray(array.shape, array.dtype, buffer=copied, offset=-first, strides=array.strides)


def to_numpy(array) -> np.ndarray:
    """An array of any library in float64 (exact for every dtype) as NumPy."""
    values = to_float64(array)
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def device_of(library: str, index: int = 0) -> Device:
    """The device on which `make` puts the arrays of a library."""
    if library in ("numpy", "torch") or (library == "jax" and importlib.import_module("jax").default_backend() == "cpu"):
        return CPU
    from .. import toolchain

    return toolchain.device(index)


def gpu_libraries() -> tuple[str, ...]:
    """Libraries of `LIBRARIES` that can reach a CUDA device here, the quickest to call first."""
    found = []
    if importlib.util.find_spec("cupy"):
        cupy = importlib.import_module("cupy")
        try:
            if cupy.cuda.runtime.getDeviceCount():
                found.append("cupy")
        except cupy.cuda.runtime.CUDARuntimeError:
            pass
    if importlib.util.find_spec("torch") and importlib.import_module("torch").cuda.is_available():
        found.append("torch-cuda")
    if not importlib.import_module("numba").config.ENABLE_CUDASIM and importlib.import_module("numba.cuda").is_available():
        found.append("numba")
    return tuple(found)
