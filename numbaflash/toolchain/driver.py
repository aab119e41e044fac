"""The little of the CUDA driver that is needed, through ctypes.

Nothing is loaded before the first call of a function here. ctypes rather than cuda.bindings for the sake of the launch: a
call whose arguments are all prepared takes 0.45 us in ctypes, ``cuda.bindings.driver.cuLaunchKernel`` 0.75 to 0.9 us
(both measured with a driver function that does nothing).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass

from ..dispatch import Device
from .compile import KernelRequest, Ptx, arch_name, compile_ptx
from .log import timed

MINIMUM_DRIVER = 12000

# numbers of cuda.h
_SM_COUNT, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97
_FUNCTION_ATTRIBUTES = {"max_threads": 0, "shared_bytes": 1, "local_bytes": 3, "registers": 4, "ptx_version": 5, "binary_version": 6}
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6
_CAPTURE_RELAXED = 2
_POINTER_DEVICE = 9

_HINTS = {
    2: "the GPU is out of memory; free arrays, or use a smaller batch",
    3: "CUDA cannot be used in a process that was forked after CUDA was used; start processes with the 'spawn' method",
    100: "no CUDA GPU is visible; see CUDA_VISIBLE_DEVICES and nvidia-smi",
    101: "there is no such device; see CUDA_VISIBLE_DEVICES",
    201: "the stream or the kernel belongs to a context that is gone or is not the device's primary context",
    209: "the kernel was compiled for another architecture",
    218: "the driver's compiler refused the kernel's PTX",
    222: "the driver is too old for the kernel's PTX; install a newer NVIDIA driver",
    400: "the stream belongs to another device, or was destroyed",
    700: "a kernel accessed memory out of bounds (this one or one launched before it); the process must be restarted",
    701: "too many threads, registers or shared memory for this GPU",
    709: "the device's context was reset (cuda.close() or cudaDeviceReset) after the kernel was loaded; restart the process",
    716: "a kernel accessed a misaligned address (this one or one launched before it); the process must be restarted",
    719: "a kernel failed (this one or one launched before it); the process must be restarted",
    803: "the driver's library and kernel module differ in version; restart the machine",
    900: "this is not permitted while a CUDA graph is captured; call once before the capture, so that the kernel is loaded",
    912: "the cluster is too large for this GPU",
}


class CudaError(RuntimeError):
    """The CUDA driver refused something.

    Attributes
    ----------
    code : int
        The CUresult, or 0 when there is no usable driver at all.
    """

    def __init__(self, message, code=0):
        super().__init__(message)
        self.code = code


_p = ctypes.c_void_p
_int, _uint, _u32, _u64, _size, _str = ctypes.c_int, ctypes.c_uint, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_char_p


def _ref(kind):
    return ctypes.POINTER(kind)


_SIGNATURES = {
    "cuInit": (_uint,),
    "cuDriverGetVersion": (_ref(_int),),
    "cuGetErrorName": (_int, _ref(_str)),
    "cuGetErrorString": (_int, _ref(_str)),
    "cuDeviceGetCount": (_ref(_int),),
    "cuDeviceGet": (_ref(_int), _int),
    "cuDeviceGetName": (_p, _int, _int),
    "cuDeviceGetAttribute": (_ref(_int), _int, _int),
    "cuDevicePrimaryCtxRetain": (_ref(_p), _int),
    "cuCtxPushCurrent_v2": (_p,),
    "cuCtxPopCurrent_v2": (_ref(_p),),
    "cuThreadExchangeStreamCaptureMode": (_ref(_int),),
    "cuModuleLoadDataEx": (_ref(_p), _str, _uint, _ref(_int), _ref(_p)),
    "cuModuleGetFunction": (_ref(_p), _p, _str),
    "cuFuncSetAttribute": (_p, _int, _int),
    "cuFuncGetAttribute": (_ref(_int), _int, _p),
    "cuPointerGetAttribute": (_p, _int, _u64),
    "cuTensorMapReplaceAddress": (_p, _p),
    "cuTensorMapEncodeTiled": (_p, _int, _u32, _p, _ref(_u64), _ref(_u64), _ref(_u32), _ref(_u32), _int, _int, _int, _int),
}

# cuLaunchKernelEx and cuCtxGetCurrent have no signature: a launch calls them with arguments made by `pointer`. A call
# releases the GIL, as a launch must, which may wait for room in the stream's queue; these return at once and keep it.
_KEEP_GIL = frozenset(("cuTensorMapReplaceAddress", "cuCtxGetCurrent"))


def pointer(address: int):
    """A prepared pointer argument: ctypes passes it on without a conversion. The address itself is never read."""
    return ctypes.byref(ctypes.c_char.from_address(address))


class Driver:
    """Driver functions as attributes, bound when first used.

    Parameters
    ----------
    find : callable
        ``find(name, keeps_gil)`` gives the ctypes function, or raises AttributeError.
    """

    def __init__(self, find):
        self._find = find

    def __getattr__(self, name):
        try:
            function = self._find(name, name in _KEEP_GIL)
        except AttributeError:
            raise CudaError(f"the NVIDIA driver has no {name}: it is older than CUDA 12.0; install driver 525 or newer") from None
        if name in _SIGNATURES:
            function.argtypes = _SIGNATURES[name]
        setattr(self, name, function)
        return function

    def check(self, result: int, call: str, about: str = "") -> None:
        """Raise `CudaError` unless the result is CUDA_SUCCESS."""
        if result:
            raise self.error(result, call, about)

    def error(self, result: int, call: str, about: str = "") -> CudaError:
        name, text = _str(), _str()
        known = self.cuGetErrorName(result, ctypes.byref(name)) == 0 and self.cuGetErrorString(result, ctypes.byref(text)) == 0
        words = f"{name.value.decode()} ({text.value.decode()})" if known else f"unknown CUresult {result}"
        message = f"{call} failed: {words}"
        if about:
            message += f"; {about}"
        if result in _HINTS:
            message += f". Hint: {_HINTS[result]}"
        return CudaError(message, result)


_lock = threading.RLock()
_driver: Driver | None = None


def driver() -> Driver:
    """The CUDA driver, loaded and initialised.

    Raises
    ------
    CudaError
        When there is no usable driver; the message says what is missing.
    """
    global _driver
    if _driver is None:
        with _lock:
            if _driver is None:
                _driver = _open()
    return _driver


def _open():
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        releasing, keeping = ctypes.CDLL(name), ctypes.PyDLL(name)
    except OSError as error:
        raise CudaError(f"no NVIDIA driver: {name} cannot be loaded ({error}); install one, or use arrays on the CPU") from None
    found = Driver(lambda function, keeps_gil: getattr(keeping if keeps_gil else releasing, function))
    found.check(found.cuInit(0), "cuInit")
    version = _int()
    found.check(found.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    if version.value < MINIMUM_DRIVER:
        raise CudaError(f"the NVIDIA driver supports CUDA {_dotted(version.value)} only; CUDA 12.0 (driver 525) or newer is needed")
    return found


def _dotted(version):
    return f"{version // 1000}.{version % 1000 // 10}"


def unavailable_reason() -> str | None:
    """Why no CUDA device can be used here; None when one can."""
    try:
        return None if _count(driver()) else "no CUDA device is visible"
    except CudaError as error:
        return str(error)


def _count(cuda):
    count = _int()
    cuda.check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return count.value


def device_count() -> int:
    """Number of visible CUDA devices; 0 without a usable driver."""
    try:
        return _count(driver())
    except CudaError:
        return 0


def driver_version() -> str:
    """Newest CUDA version that the driver supports, such as "13.0"."""
    version = _int()
    cuda = driver()
    cuda.check(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    return _dotted(version.value)


@dataclass(frozen=True, slots=True)
class _Gpu:
    device: Device
    shared_optin: int


_gpus: dict[int, _Gpu] = {}
_contexts: dict[int, int] = {}


def _gpu(index) -> _Gpu:
    if index not in _gpus:
        cuda = driver()
        count = _count(cuda)
        if not 0 <= index < count:
            raise ValueError(f"device must be from 0 to {count - 1}; got {index}")
        handle, name = _int(), ctypes.create_string_buffer(256)
        cuda.check(cuda.cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
        cuda.check(cuda.cuDeviceGetName(name, len(name), handle), "cuDeviceGetName")

        def attribute(number):
            value = _int()
            cuda.check(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle), "cuDeviceGetAttribute")
            return value.value

        described = Device("cuda", index, (attribute(_MAJOR), attribute(_MINOR)), attribute(_SM_COUNT), name.value.decode())
        _gpus[index] = _Gpu(described, attribute(_SHARED_OPTIN))
    return _gpus[index]


def device(index: int = 0) -> Device:
    """Describe a CUDA device.

    Raises
    ------
    CudaError
        Without a usable driver.
    ValueError
        When there is no device of that index.
    """
    return _gpu(index).device


def device_of_address(address: int) -> int:
    """Index of the device whose memory holds an address.

    Raises
    ------
    CudaError
        When it is not an address that CUDA knows.
    """
    cuda, index = driver(), _int()
    cuda.check(cuda.cuPointerGetAttribute(ctypes.byref(index), _POINTER_DEVICE, address), "cuPointerGetAttribute", f"address {address:#x}")
    return index.value


def shared_limit(index: int) -> int:
    """Bytes of dynamic shared memory that a block can ask for."""
    return _gpu(index).shared_optin


def context(index: int) -> int:
    """Handle of a device's primary context, which every array library uses."""
    found = _contexts.get(index)
    if found is None:
        with _lock:
            if index not in _contexts:
                _gpu(index)
                cuda, handle, retained = driver(), _int(), _p()
                cuda.check(cuda.cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
                cuda.check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(retained), handle), "cuDevicePrimaryCtxRetain", f"device {index}")
                _contexts[index] = retained.value
            found = _contexts[index]
    return found


@contextmanager
def pushed(handle: int):
    """Make a context current in this thread, and the one before it afterwards."""
    cuda = driver()
    cuda.check(cuda.cuCtxPushCurrent_v2(handle), "cuCtxPushCurrent")
    try:
        yield
    finally:
        popped = _p()
        cuda.check(cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)), "cuCtxPopCurrent")


@contextmanager
def _capture_allowed():
    """Loading a kernel touches no stream, so a capture that is going on in this thread need not forbid it."""
    cuda, mode = driver(), _int(_CAPTURE_RELAXED)
    cuda.check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        cuda.check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")


class Function:
    """A kernel loaded on a device. It stays loaded for the life of the process."""

    def __init__(self, ptx: Ptx, index: int, about: str):
        self.ptx, self.index, self.about = ptx, index, about
        self.context = context(index)
        self.dynamic_shared = 0
        self._lock = threading.Lock()
        cuda, module, function = driver(), _p(), _p()
        with timed("loaded %s on device %d", ptx.entry, index), pushed(self.context), _capture_allowed():
            log = ctypes.create_string_buffer(8192)
            options = (_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
            values = (_p * 2)(ctypes.addressof(log), len(log))
            # The whole text at once: a linker (nvJitLink, cuLink) would compile it as a relocatable unit, 9 times slower.
            result = cuda.cuModuleLoadDataEx(ctypes.byref(module), ptx.text.encode(), 2, options, values)
            if result:
                said = log.value.decode(errors="replace").strip()
                raise cuda.error(result, "cuModuleLoadData", f"{about}; driver supports CUDA {driver_version()}" + (f"; {said}" if said else ""))
            cuda.check(cuda.cuModuleGetFunction(ctypes.byref(function), module, ptx.entry.encode()), "cuModuleGetFunction", about)
        self.handle = function.value

    def _set(self, attribute, value):
        cuda = driver()
        with pushed(self.context), _capture_allowed():
            cuda.check(cuda.cuFuncSetAttribute(self.handle, attribute, value), "cuFuncSetAttribute", self.about)

    def allow_shared(self, size: int) -> None:
        """Permit launches with that much dynamic shared memory."""
        with self._lock:
            if size > self.dynamic_shared:
                self._set(_MAX_DYNAMIC_SHARED, size)
                self.dynamic_shared = size

    def allow_large_cluster(self) -> None:
        """Permit clusters of more than 8 blocks."""
        self._set(_NON_PORTABLE_CLUSTER, 1)

    def attributes(self) -> dict[str, int]:
        """Registers, local memory and the like, as the driver counts them after its own compilation."""
        cuda, found = driver(), {}
        with pushed(self.context):
            for name, number in _FUNCTION_ATTRIBUTES.items():
                value = _int()
                cuda.check(cuda.cuFuncGetAttribute(ctypes.byref(value), number, self.handle), "cuFuncGetAttribute", self.about)
                found[name] = value.value
        return found


def _check_arch(arch, on):
    exact = len(arch) > 2 and arch[2] == "a"
    if (on.capability != tuple(arch[:2])) if exact else (on.capability < tuple(arch[:2])):
        name = f"{on.name} (compute capability {on.capability[0]}.{on.capability[1]})"
        raise ValueError(f"a kernel for {arch_name(arch)} cannot run on device {on.index}, {name}")


_functions: dict[tuple[KernelRequest, int], Function] = {}
_loading: dict[tuple[KernelRequest, int], threading.Lock] = {}


def load(request: KernelRequest, index: int) -> Function:
    """Compile or fetch a kernel and load it on a device, once among threads.

    Raises
    ------
    CompileError, CudaError
    """
    key = request, index
    found = _functions.get(key)
    if found is None:
        with _loading.setdefault(key, threading.Lock()):
            if key not in _functions:
                _check_arch(request.arch, device(index))
                ptx = compile_ptx(request)
                _functions[key] = Function(ptx, index, f"kernel {ptx.entry}: {request}")
            found = _functions[key]
    return found


def _after_fork():
    """Handles of the parent mean nothing in a forked child, nor do locks that another of its threads held."""
    global _lock, _driver
    _lock, _driver = threading.RLock(), None
    for store in (_functions, _loading, _contexts, _gpus):
        store.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
