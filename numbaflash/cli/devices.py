"""Where a command computes: the CPU with NumPy, or a GPU with whichever array library is installed.

The commands start from NumPy arrays. On a GPU they are handed to `numbaflash.forward` as arrays of PyTorch, CuPy or Numba,
the first of them that is installed and sees the device.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from ..dense import dense_arrays
from ..dispatch import CPU, Device
from ..measuring import available_host_bytes, peak_host_bytes
from ..support import assumed_device
from .errors import CommandError


class Cpu:
    """NumPy arrays as they are."""

    name = "cpu"
    library = "NumPy"

    def put(self, array: np.ndarray):
        return array

    def get(self, array) -> np.ndarray:
        return array

    def synchronize(self) -> None:
        """NumPy's work is done when it returns."""

    def peak_bytes(self) -> AbstractContextManager:
        return peak_host_bytes()

    def free_bytes(self) -> int | None:
        return available_host_bytes()

    def dense(self, q, k, v, seen, scale):
        return dense_arrays(np, q, k, v, seen, scale)


class Torch:
    """PyTorch tensors on a CUDA device."""

    library = "PyTorch"

    def __init__(self, index: int):
        import torch

        self.torch, self.device = torch, torch.device("cuda", index)
        self.name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"

    def put(self, array):
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(self.torch.bfloat16).to(self.device)
        return self.torch.from_numpy(array).to(self.device)

    def get(self, array):
        array = array.cpu()
        if array.dtype == self.torch.bfloat16:
            from ..files import bfloat16

            return array.view(self.torch.int16).numpy().view(bfloat16())
        return array.numpy()

    def synchronize(self):
        self.torch.cuda.synchronize(self.device)

    @contextmanager
    def peak_bytes(self):
        peak = {}
        before = self.torch.cuda.memory_allocated(self.device)
        self.torch.cuda.reset_peak_memory_stats(self.device)
        yield peak
        peak["bytes"] = self.torch.cuda.max_memory_allocated(self.device) - before

    def free_bytes(self):
        return self.torch.cuda.mem_get_info(self.device)[0]

    def dense(self, q, k, v, seen, scale):
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = (q @ k.transpose(-1, -2)).mul_(scale)
        if seen is not None:
            score.masked_fill_(~self.torch.from_numpy(seen).to(self.device), float("-inf"))
        return (self.torch.softmax(score, -1) @ v).permute(0, 2, 1, 3)


class CuPy:
    """CuPy arrays."""

    library = "CuPy"

    def __init__(self, index: int):
        import cupy

        self.cupy, self.device = cupy, cupy.cuda.Device(index)
        self.name = f"cuda:{index} ({cupy.cuda.runtime.getDeviceProperties(index)['name'].decode()})"

    def put(self, array):
        with self.device:
            return self.cupy.asarray(array)

    def get(self, array):
        with self.device:
            return self.cupy.asnumpy(array)

    def synchronize(self):
        self.device.synchronize()

    @contextmanager
    def peak_bytes(self):
        pool, cupy = self.cupy.get_default_memory_pool(), self.cupy
        before, peak = pool.used_bytes(), {"bytes": 0}

        class Watch(cupy.cuda.MemoryHook):
            name = "numbaflash peak"

            def malloc_postprocess(self, **_):
                peak["bytes"] = max(peak["bytes"], pool.used_bytes() - before)

        with self.device, Watch():
            yield peak

    def free_bytes(self):
        return self.device.mem_info[0]

    def dense(self, q, k, v, seen, scale):
        with self.device:
            return dense_arrays(self.cupy, q, k, v, None if seen is None else self.cupy.asarray(seen), scale)


class NumbaCuda:
    """Numba device arrays, for a machine with no other GPU array library. It has no matrix product, so no dense attention."""

    library = "Numba"
    dense = None

    def __init__(self, index: int):
        from numba import cuda

        from .. import toolchain  # noqa: F401  it makes numba-cuda importable with NumPy 2.5

        self.cuda = cuda
        self.gpu = cuda.gpus[index]
        with self.gpu:
            name = cuda.get_current_device().name
        self.name = f"cuda:{index} ({name.decode() if isinstance(name, bytes) else name})"

    def put(self, array):
        with self.gpu:
            if array.dtype.name == "bfloat16":  # Numba cannot copy it from the host
                return self.cuda.to_device(np.ascontiguousarray(array).view(np.uint16)).view(array.dtype)
            return self.cuda.to_device(array)

    def get(self, array):
        with self.gpu:
            return array.copy_to_host()

    def synchronize(self):
        with self.gpu:
            self.cuda.synchronize()


def planned_device(name: str) -> Device:
    """The device of "cpu", "cuda:INDEX" or an architecture such as "sm_90", which need not be there."""
    if name == "cpu":
        return CPU
    if name.startswith("sm_"):
        return assumed_device(name)
    kind, _, index = name.partition(":")
    if kind != "cuda":
        raise CommandError(f"--device must be cpu, cuda:INDEX or an architecture such as sm_90 here; got {name}")
    from .. import toolchain

    return toolchain.device(int(index))


def open_device(name: str):
    """The place a command computes in.

    Parameters
    ----------
    name : str
        "cpu" or "cuda:INDEX".

    Raises
    ------
    CommandError
        When no installed library sees that GPU; the message tells what each said.
    """
    if name == "cpu":
        return Cpu()
    index = int(name.partition(":")[2])
    reasons = []
    for module, kind in (("torch", Torch), ("cupy", CuPy), ("numba_cuda", NumbaCuda)):
        if importlib.util.find_spec(module) is None:
            reasons.append(f"{kind.library} is not installed")
        else:
            try:
                return kind(index)
            except Exception as error:  # each library has its own way to say that there is no such GPU
                reasons.append(f"{kind.library}: {' '.join(str(error).split())}")
    raise CommandError(f"cannot use {name}: {'; '.join(reasons)}. numbaflash env shows what was found")
