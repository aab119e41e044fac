"""Prepared launches: the arguments are described once, a call fills in addresses and launches.

A call costs about 1 us of Python beside the driver's own time, and 0.5 us more for each tensor map whose address changed
(measured with a driver that does nothing).
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from ..dispatch import ALL_OPERANDS, OPERANDS, Device
from .compile import KernelRequest, cluster_of, launch_threads, parameter_sizes
from .driver import driver, load, pointer, pushed, shared_limit

_ELEMENT = {  # CUtensorMapDataType, bytes
    "uint8": (0, 1),
    "uint16": (1, 2),
    "uint32": (2, 4),
    "int32": (3, 4),
    "uint64": (4, 8),
    "int64": (5, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
}
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTION = {0: 0, 64: 1, 128: 2, 256: 3}
_SCALAR = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d"}
_MAP_BYTES = 128


_NAMES = ALL_OPERANDS


def _check_operand(operand):
    if operand not in _NAMES:
        raise ValueError(f"operand must be one of {', '.join(_NAMES)}; got {operand!r}")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A 128-byte tensor map, passed by value.

    Attributes
    ----------
    operand : str
        One of the operands of the launch; its address, with the offset, must be a multiple of 16 bytes.
    dtype : str
    shape : tuple of int
        Elements along each axis, the contiguous axis first; 1 to 5 axes.
    strides : tuple of int
        Bytes between neighbours along each axis but the first: multiples of 16, from 0 to below 2**40.
    box : tuple of int
        Elements of a tile along each axis, 1 to 256.
    swizzle : int
        0, 32, 64 or 128 bytes; a row of the box is no longer than that.
    promotion : int
        L2 sector promotion: 0, 64, 128 or 256 bytes.
    offset : int
        Bytes from the operand's address to the first element.
    """

    operand: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    promotion: int = 256
    offset: int = 0

    def __post_init__(self):
        _check_operand(self.operand)
        name = f"tensor map of {self.operand}"
        if self.dtype not in _ELEMENT:
            raise TypeError(f"{name}: dtype must be one of {', '.join(_ELEMENT)}; got {self.dtype!r}")
        rank, itemsize = len(self.shape), _ELEMENT[self.dtype][1]
        if not 1 <= rank <= 5:
            raise ValueError(f"{name}: shape must have 1 to 5 axes; got {self.shape}")
        if len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError(f"{name}: {rank} axes need {rank - 1} strides and {rank} box sizes; got {self.strides} and {self.box}")
        if any(not 1 <= n <= 2**32 for n in self.shape):
            raise ValueError(f"{name}: shape must be from 1 to 2**32 along each axis; got {self.shape}")
        if any(n % 16 or not 0 <= n < 2**40 for n in self.strides):
            raise ValueError(f"{name}: strides must be multiples of 16 bytes from 0 to below 2**40; got {self.strides}")
        if any(not 1 <= n <= 256 for n in self.box):
            raise ValueError(f"{name}: box must be from 1 to 256 along each axis; got {self.box}")
        if self.swizzle not in _SWIZZLE:
            raise ValueError(f"{name}: swizzle must be 0, 32, 64 or 128; got {self.swizzle}")
        if self.promotion not in _PROMOTION:
            raise ValueError(f"{name}: promotion must be 0, 64, 128 or 256; got {self.promotion}")
        row = self.box[0] * itemsize
        if row % 16 or (self.swizzle and row > self.swizzle):
            limit = f" and at most the swizzle of {self.swizzle}" if self.swizzle else ""
            raise ValueError(f"{name}: a row of the box must be a multiple of 16 bytes{limit}; got {self.box[0]} {self.dtype} = {row} bytes")


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of an operand, ``offset`` bytes further, as uint64; of a number in the place of an address, the sum modulo 2**64."""

    operand: str
    offset: int = 0

    def __post_init__(self):
        _check_operand(self.operand)


@dataclass(frozen=True, slots=True)
class Array:
    """An operand as a Numba array of layout "A".

    Attributes
    ----------
    operand, dtype : str
    shape : tuple of int
    strides : tuple of int
        In bytes, any sign.
    offset : int
        Bytes from the operand's address to the first element.
    """

    operand: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __post_init__(self):
        _check_operand(self.operand)
        if self.dtype not in _ELEMENT:
            raise TypeError(f"array {self.operand}: dtype must be one of {', '.join(_ELEMENT)}; got {self.dtype!r}")
        if len(self.shape) != len(self.strides):
            raise ValueError(f"array {self.operand}: shape and strides must have the same length; got {self.shape} and {self.strides}")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A constant of the plan.

    Attributes
    ----------
    kind : str
        int32, uint32, int64, uint64, float32 or float64.
    value : int or float
    """

    kind: str
    value: int | float

    def __post_init__(self):
        if self.kind not in _SCALAR:
            raise TypeError(f"scalar kind must be one of {', '.join(_SCALAR)}; got {self.kind!r}")
        self.packed()

    def packed(self) -> bytes:
        try:
            return struct.pack("=" + _SCALAR[self.kind], self.value)
        except (struct.error, OverflowError):
            raise ValueError(f"scalar value must fit {self.kind}; got {self.value!r}") from None


def _lower(parameters, operands):
    """Kernel parameters as the driver sees them: ("map", TensorMap), ("address", (operand number, offset)) or ("bytes", value)."""
    for parameter in parameters:
        if isinstance(parameter, TensorMap):
            yield "map", parameter
        elif isinstance(parameter, Pointer):
            yield "address", (operands.index(parameter.operand), parameter.offset)
        elif isinstance(parameter, Scalar):
            yield "bytes", parameter.packed()
        elif isinstance(parameter, Array):
            items = 1
            for n in parameter.shape:
                items *= n
            for word in (0, 0, items, _ELEMENT[parameter.dtype][1]):  # meminfo, parent, nitems, itemsize
                yield "bytes", struct.pack("=q", word)
            yield "address", (operands.index(parameter.operand), parameter.offset)
            for word in (*parameter.shape, *parameter.strides):
                yield "bytes", struct.pack("=q", word)
        else:
            raise TypeError(f"a parameter must be a TensorMap, Pointer, Array or Scalar; got {parameter!r}")


# A block starts with words: a CUlaunchConfig (7 of them), the current context, the operands' addresses. Tensor maps, aligned, come next.
_WORD = 2**64 - 1
_STREAM = 4
_CONTEXT = 7
_ADDRESSES = 8
_CONFIG_FORMAT = "=8I3Q"  # grid, threads, shared memory, padding; stream, attributes, number of attributes
_OVERLAPPING = struct.pack("=iiq56x", 6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: allowed


class _Block:
    """Arguments of one launch in flight. A launch has as many as threads have been inside it at once."""

    __slots__ = ("addresses", "config", "context", "maps", "memory", "parameters", "put", "shifted", "words")

    def __init__(self, launch):
        lowered = launch.lowered
        count = sum(kind == "map" for kind, _ in lowered)
        head = -(-8 * (_ADDRESSES + len(launch.operands)) // 64) * 64
        array = head + count * _MAP_BYTES
        shifted = array + 8 * len(lowered)
        size = shifted + 8 * len(lowered)
        self.memory = ctypes.create_string_buffer(size + 64)
        skip = -ctypes.addressof(self.memory) % 64  # a tensor map must be aligned to 64 bytes
        base = ctypes.addressof(self.memory) + skip
        view = memoryview(self.memory).cast("B")[skip : skip + size]
        self.words = view.cast("Q")
        view[: len(launch.config)] = launch.config
        write = struct.Struct(f"={len(launch.operands)}Q").pack_into
        self.put = lambda addresses: write(view, 8 * _ADDRESSES, *addresses)
        self.addresses = None
        self.config = pointer(base)
        self.context = pointer(base + 8 * _CONTEXT)
        self.parameters = pointer(base + array)
        self.maps, self.shifted = [], []
        for i, (kind, value) in enumerate(lowered):
            if kind == "map":
                at = base + head + _MAP_BYTES * len(self.maps)
                self.maps.append([launch.operands.index(value.operand), at, None, value])
            elif kind == "address":
                operand, offset = value
                at = base + 8 * (_ADDRESSES + operand)
                if offset:
                    at = base + shifted + 8 * len(self.shifted)
                    self.shifted.append((shifted // 8 + len(self.shifted), operand, offset))
            else:
                at = launch.constants[i]
            self.words[array // 8 + i] = at

    def set_addresses(self, addresses, replace, about):
        self.addresses = None
        words = self.words
        self.put(addresses)
        for word, operand, offset in self.shifted:
            words[word] = addresses[operand] + offset & _WORD
        for each in self.maps:
            operand, at, last, described = each
            address = addresses[operand] + described.offset
            if address != last:
                if address & 15:
                    raise ValueError(f"{described.operand} must start at a multiple of 16 bytes; got address {address:#x} ({about})")
                if last is None:
                    _encode(described, at, address, about)
                elif result := replace(at, address):
                    raise driver().error(result, "cuTensorMapReplaceAddress", about)
                each[2] = address
        self.addresses = addresses


def _encode(described, at, address, about):
    rank = len(described.shape)
    dims, sizes = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    cuda = driver()
    result = cuda.cuTensorMapEncodeTiled(
        at,
        _ELEMENT[described.dtype][0],
        rank,
        address,
        dims(*described.shape),
        dims(*described.strides),
        sizes(*described.box),
        sizes(*[1] * rank),
        0,
        _SWIZZLE[described.swizzle],
        _PROMOTION[described.promotion],
        0,
    )
    cuda.check(result, "cuTensorMapEncodeTiled", f"{described}; {about}")


class Launch:
    """A loaded kernel with its described arguments: ``launch(addresses, stream)``, safe among threads.

    The addresses are ints in the order of the operands, `stream` is a CUstream handle. The caller's current context is left as it was.

    Attributes
    ----------
    function : Function
    grid : tuple of int
    threads, shared_bytes : int
    """

    __slots__ = (
        "_attributes",
        "_context",
        "_current",
        "_free",
        "_handle",
        "_launch",
        "_replace",
        "_store",
        "about",
        "config",
        "constants",
        "function",
        "grid",
        "lowered",
        "operands",
        "shared_bytes",
        "threads",
    )

    def __init__(self, function, parameters, grid, threads, shared_bytes, operands=OPERANDS, overlapping=False):
        self.operands = operands
        self.function, self.grid, self.threads, self.shared_bytes = function, grid, threads, shared_bytes
        self.about = f"{function.about}; device {function.index}, grid {grid}, {threads} threads, {shared_bytes} bytes of shared memory"
        self.lowered = tuple(_lower(parameters, operands))
        self._attributes = ctypes.create_string_buffer(_OVERLAPPING) if overlapping else None
        attributes = (ctypes.addressof(self._attributes), 1) if overlapping else (0, 0)
        self.config = struct.pack(_CONFIG_FORMAT, *grid, threads, 1, 1, shared_bytes, 0, 0, *attributes)
        self._store = ctypes.create_string_buffer(b"".join(value.ljust(8, b"\0") for kind, value in self.lowered if kind == "bytes") or b"\0")
        self.constants, at = {}, ctypes.addressof(self._store)
        for i, (kind, _) in enumerate(self.lowered):
            if kind == "bytes":
                self.constants[i] = at
                at += 8
        cuda = driver()
        self._context, self._handle = function.context, pointer(function.handle)
        self._launch, self._current, self._replace = cuda.cuLaunchKernelEx, cuda.cuCtxGetCurrent, cuda.cuTensorMapReplaceAddress
        self._free = []

    def __call__(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launch with the addresses of the operands, in their order."""
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(self)
        try:
            words = block.words
            words[_STREAM] = stream
            result = self._current(block.context)
            if result:
                raise driver().error(result, "cuCtxGetCurrent", self.about)
            if words[_CONTEXT] == self._context:
                if addresses != block.addresses:
                    block.set_addresses(addresses, self._replace, self.about)
                result = self._launch(block.config, self._handle, block.parameters, None)
            else:  # another context, or none: encoding a tensor map needs one as well
                with pushed(self._context):
                    if addresses != block.addresses:
                        block.set_addresses(addresses, self._replace, self.about)
                    result = self._launch(block.config, self._handle, block.parameters, None)
            if result:
                raise driver().error(result, "cuLaunchKernel", self.about)
        finally:
            self._free.append(block)


_GRID_LIMITS = (2**31 - 1, 65535, 65535)


def check_launch(ptx, parameters, grid, threads, shared_bytes, shared_most) -> tuple[int, int, int]:
    """Check a launch against its kernel's PTX and the GPU's limits; returns the grid with three axes."""
    grid = tuple(grid) + (1,) * (3 - len(grid))
    if len(grid) != 3:
        raise ValueError(f"grid must have 1 to 3 axes; got {grid}")
    for axis, n, most in zip("xyz", grid, _GRID_LIMITS, strict=True):
        if not 1 <= n <= most:
            raise ValueError(f"grid {axis} must be from 1 to {most}; got {grid}")
    cluster = cluster_of(ptx)
    if any(n % c for n, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid must be a multiple of the kernel's cluster {cluster}; got {grid}")
    if threads != launch_threads(ptx):
        raise ValueError(f"threads must be the {launch_threads(ptx)} that {ptx.entry} was compiled for; got {threads}")
    if not 0 <= shared_bytes <= shared_most:
        raise ValueError(f"shared_bytes must be from 0 to {shared_most}, the device's limit; got {shared_bytes}")
    given = [_MAP_BYTES if kind == "map" else 8 if kind == "address" else len(value) for kind, value in _lower(parameters, _NAMES)]
    wanted = parameter_sizes(ptx)
    if given != wanted:
        raise ValueError(f"{ptx.entry} takes parameters of {wanted} bytes; the launch describes {given}: {parameters}")
    return grid


def prepare(
    request: KernelRequest,
    parameters,
    *,
    grid,
    threads: int,
    shared_bytes: int = 0,
    device: Device | int = 0,
    operands=OPERANDS,
    overlapping: bool = False,
) -> Launch:
    """Build or fetch a kernel, load it on a device and prepare its launch.

    Parameters
    ----------
    request : KernelRequest
    parameters : sequence of TensorMap, Pointer, Array and Scalar
        In kernel order.
    grid : tuple of int
        1 to 3 axes; x up to 2**31 - 1, y and z up to 65535; whole clusters.
    threads, shared_bytes : int
        Threads and dynamic shared memory of a block.
    device : Device or int
    operands : tuple of str
        Names of the arrays whose addresses a launch gets, in their order: `numbaflash.dispatch.operands` of a problem.
    overlapping : bool
        The launch may begin before the one ahead of it on the stream is over: `numbaflash.ptx.dependent`.

    Raises
    ------
    CompileError, CudaError
    ValueError, TypeError
        When the description does not fit the kernel or the hardware.
    """
    index = device.index if isinstance(device, Device) else device
    function = load(request, index)
    parameters = tuple(parameters)
    grid = check_launch(function.ptx, parameters, grid, threads, shared_bytes, shared_limit(index))
    if shared_bytes:
        function.allow_shared(shared_bytes)
    x, y, z = cluster_of(function.ptx)
    if x * y * z > 8:
        function.allow_large_cluster()
    return Launch(function, parameters, grid, threads, shared_bytes, operands, overlapping)
