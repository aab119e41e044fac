"""Where verification computes: an array library and a device, with what making arrays, reading them, clocks and memory need there."""

from __future__ import annotations

import importlib
import importlib.util
import time
import tracemalloc
from contextlib import contextmanager

import numpy as np

from ..dispatch import CPU, Device
from ..files import dtype_of
from ..measuring import available_host_bytes, peak_host_bytes
from ..testing.libraries import gpu_libraries, to_numpy

LIBRARIES = ("numpy", "cupy", "torch", "jax")
FLUSH_BYTES = 2**29
"""Written before each timed call on a GPU: more than its L2 cache holds, and long enough for the host to queue the call behind it."""
MOST_FLUSHES = 64


class Place:
    """Arrays of NumPy, on the CPU; the others differ in what they override.

    Attributes
    ----------
    library : str
        One of `LIBRARIES`.
    testing_library : str
        As `numbaflash.testing` calls it.
    device : Device
    exact_peak : bool
        Whether `peak` counts what an allocator gave out, and not pages of the process.
    """

    library = testing_library = "numpy"
    device: Device = CPU
    exact_peak = True
    clock = "wall clock"

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    def normal(self, shape, dtype: str):
        """Standard normal numbers."""
        kind = np.float64 if dtype == "float64" else np.float32
        return self.rng.standard_normal(shape, kind).astype(dtype_of(dtype), copy=False)

    def put(self, array: np.ndarray):
        """An array of bool, int32, int64, float32 or float64."""
        return array

    def host(self, x) -> np.ndarray:
        """Values in float64."""
        return to_numpy(x)

    def exact(self, x):
        """Values for `numbaflash.testing.expected`: on the GPU where it can compute there."""
        return self.host(x)

    def ordered(self, shape, order, dtype: str):
        """Standard normal numbers in an array whose axes lie in another order in memory, the slowest first."""
        places = [order.index(axis) for axis in range(len(shape))]
        return self.normal(tuple(shape[axis] for axis in order), dtype).transpose(places)

    def padded(self, shape, extra: int, dtype: str):
        """The same with some unused elements after each row."""
        return self.normal((*shape[:-1], shape[-1] + extra), dtype)[..., : shape[-1]]

    def synchronize(self) -> None:
        """Wait for the device; NumPy's work is done when it returns."""

    def free_bytes(self) -> int | None:
        return available_host_bytes()

    @contextmanager
    def peak(self):
        """Yields a dict, which holds the peak of what was allocated within under "bytes": of NumPy, which tells `tracemalloc`."""
        peak = {}
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            yield peak
            peak["bytes"] = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    def reserve(self) -> int | None:
        """Bytes that the allocator keeps beyond what is in use; None where there is none."""
        return None

    def release(self) -> None:
        """Give back what the allocator keeps."""

    def seconds(self, call) -> tuple[float, float]:
        """(time of the device, time until the call returned to the host) of one call, the caches of a GPU cold."""
        self.synchronize()
        start = time.perf_counter()
        result = call()
        host = time.perf_counter() - start
        self.wait_for(result)
        return time.perf_counter() - start, host

    def wait_for(self, result) -> None:
        self.synchronize()


class _Events(Place):
    """A GPU whose library has events."""

    clock = "CUDA events, L2 cache cold"
    _flushed = None
    _flushes = 2

    def seconds(self, call):
        if self._flushed is None:
            self._flushed = self._flush_buffer(min(FLUSH_BYTES, self.free_bytes() // 4))
        while True:
            start, end = self._event(), self._event()
            self.synchronize()
            for _ in range(self._flushes):
                self._flush(self._flushed)
            self._record(start)
            began = time.perf_counter()
            call()
            host = time.perf_counter() - began
            self._record(end)
            late = self._done(start)
            self.synchronize()
            if not late or self._flushes >= MOST_FLUSHES:
                return self._elapsed(start, end), host
            self._flushes *= 2

    def release(self):
        self._flushed = None


class Torch(_Events):
    library = "torch"

    def __init__(self, index: int | None, seed: int = 0):
        super().__init__(seed)
        self.torch = torch = importlib.import_module("torch")
        self.testing_library = "torch" if index is None else "torch-cuda"
        self.where = torch.device("cpu") if index is None else torch.device("cuda", index)
        self.exact_peak = index is not None
        if index is None:
            self.clock = Place.clock
        else:
            from .. import toolchain

            self.device = toolchain.device(index)
        self.generator = torch.Generator(self.where).manual_seed(seed)

    def normal(self, shape, dtype):
        return self.torch.randn(shape, generator=self.generator, device=self.where, dtype=getattr(self.torch, dtype))

    def put(self, array):
        return self.torch.from_numpy(array).to(self.where)

    def exact(self, x):
        return x if self.on_gpu else self.host(x)

    def ordered(self, shape, order, dtype):
        return self.normal([shape[axis] for axis in order], dtype).permute([order.index(axis) for axis in range(len(shape))])

    def synchronize(self):
        if self.on_gpu:
            self.torch.cuda.synchronize(self.where)

    def free_bytes(self):
        if not self.on_gpu:
            return available_host_bytes()
        held = self.torch.cuda.memory_reserved(self.where) - self.torch.cuda.memory_allocated(self.where)
        return self.torch.cuda.mem_get_info(self.where)[0] + held

    @contextmanager
    def peak(self):
        if not self.on_gpu:
            with peak_host_bytes() as peak:
                yield peak
            return
        peak, cuda = {}, self.torch.cuda
        before = cuda.memory_allocated(self.where)
        cuda.reset_peak_memory_stats(self.where)
        yield peak
        peak["bytes"] = cuda.max_memory_allocated(self.where) - before

    def reserve(self):
        if not self.on_gpu:
            return None
        return self.torch.cuda.memory_reserved(self.where) - self.torch.cuda.memory_allocated(self.where)

    def release(self):
        super().release()
        if self.on_gpu:
            self.torch.cuda.empty_cache()

    def seconds(self, call):
        return super().seconds(call) if self.on_gpu else Place.seconds(self, call)

    def _flush_buffer(self, size):
        return self.torch.empty(size, dtype=self.torch.int8, device=self.where)

    def _flush(self, buffer):
        buffer.zero_()

    def _event(self):
        return self.torch.cuda.Event(enable_timing=True)

    def _record(self, event):
        event.record()

    def _done(self, event):
        return event.query()

    def _elapsed(self, start, end):
        return start.elapsed_time(end) / 1e3


class CuPy(_Events):
    library = testing_library = "cupy"

    def __init__(self, index: int, seed: int = 0):
        super().__init__(seed)
        from .. import toolchain

        self.cupy = importlib.import_module("cupy")
        self.device = toolchain.device(index)
        self.cupy.cuda.Device(index).use()
        self.random = self.cupy.random.default_rng(seed)

    def normal(self, shape, dtype):
        cupy = self.cupy
        x = self.random.standard_normal(shape, dtype=cupy.float64 if dtype == "float64" else cupy.float32)
        if dtype != "bfloat16":
            return x.astype(dtype, copy=False)
        bits = x.view(cupy.uint32)  # CuPy has no cast to bfloat16 in every version
        return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(cupy.uint16).view(dtype_of("bfloat16"))

    def put(self, array):
        return self.cupy.asarray(array)

    def synchronize(self):
        self.cupy.cuda.Device(self.device.index).synchronize()

    def free_bytes(self):
        pool = self.cupy.get_default_memory_pool()
        return self.cupy.cuda.Device(self.device.index).mem_info[0] + pool.total_bytes() - pool.used_bytes()

    @contextmanager
    def peak(self):
        cupy, pool = self.cupy, self.cupy.get_default_memory_pool()
        before, peak = pool.used_bytes(), {"bytes": 0}

        class Watch(cupy.cuda.MemoryHook):
            name = "numbaflash verify"

            def malloc_postprocess(self, **_):
                peak["bytes"] = max(peak["bytes"], pool.used_bytes() - before)

        with Watch():
            yield peak

    def reserve(self):
        pool = self.cupy.get_default_memory_pool()
        return pool.total_bytes() - pool.used_bytes()

    def release(self):
        super().release()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def _flush_buffer(self, size):
        return self.cupy.empty(size, self.cupy.int8)

    def _flush(self, buffer):
        buffer.data.memset_async(0, buffer.nbytes)

    def _event(self):
        return self.cupy.cuda.Event()

    def _record(self, event):
        event.record()

    def _done(self, event):
        return event.done

    def _elapsed(self, start, end):
        return self.cupy.cuda.get_elapsed_time(start, end) / 1e3


class Jax(Place):
    library = testing_library = "jax"
    exact_peak = False

    def __init__(self, index: int | None, seed: int = 0):
        super().__init__(seed)
        self.jax = importlib.import_module("jax")
        self.where = self.jax.devices("cpu")[0] if index is None else self.jax.local_devices(backend="cuda")[index]
        if index is not None:
            from .. import toolchain

            self.device = toolchain.device(index)
        self.key = self.jax.random.key(seed)

    def normal(self, shape, dtype):
        if dtype == "float64" and not self.jax.config.jax_enable_x64:
            raise ValueError("float64 in JAX needs jax_enable_x64 (JAX_ENABLE_X64=1 in the environment)")
        self.key, key = self.jax.random.split(self.key)
        with self.jax.default_device(self.where):
            return self.jax.random.normal(key, shape, dtype=dtype)

    def put(self, array):
        return self.jax.device_put(array, self.where)

    def free_bytes(self):
        if not self.on_gpu:
            return available_host_bytes()
        told = self.where.memory_stats() or {}
        return told["bytes_limit"] - told["bytes_in_use"] if "bytes_limit" in told else None

    @contextmanager
    def peak(self):
        if not self.on_gpu:
            with peak_host_bytes() as peak:
                yield peak
            return
        yield {}  # its high-water mark cannot be reset

    def wait_for(self, result):
        self.jax.block_until_ready(result)


def open_place(library: str | None, seed: int = 0, index: int = 0) -> Place:
    """The place of a library, on a GPU where it reaches one. None: the first library that reaches a GPU, else NumPy.

    Raises
    ------
    ImportError
        When the library is not installed.
    RuntimeError
        When it cannot be used here; the message says why.
    """
    if library == "numpy":
        return Place(seed)
    if library is None:
        found = gpu_libraries()
        for name in ("torch", "cupy"):  # torch's GPU computes the float64 reference, too
            if name in found or f"{name}-cuda" in found:
                return open_place(name, seed, index)
        return Place(seed)
    if library not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}; got {library!r}")
    if importlib.util.find_spec(library) is None:
        raise ImportError(f"{library} is not installed; pip install {library}, or choose another --library")
    if library == "torch":
        return Torch(index if importlib.import_module("torch").cuda.is_available() else None, seed)
    if library == "jax":
        from ..arrays.jax import local_gpus

        importlib.import_module("jax")
        return Jax(index if local_gpus() else None, seed)
    if "cupy" not in gpu_libraries():
        raise RuntimeError("cupy finds no CUDA device here; numbaflash env --import says what it does find")
    return CuPy(index, seed)
