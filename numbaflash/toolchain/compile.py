"""From a Numba function to PTX text that any driver of the right GPU accepts. Needs no GPU.

Everything that touches Numba-CUDA is in this file. What Numba's compiler cannot say (a tensor map as a by-value
parameter, a compile-time cluster, a register limit, an older PTX version) is written into its PTX text by small passes,
each of which checks that the text is what it expects and raises `CompileError` otherwise.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import cache
from .log import logger, timed

if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # numba-cuda 0.30 names it when imported; NumPy 2.5 has dropped it


class CompileError(RuntimeError):
    """A kernel could not be compiled, or its PTX is not what the toolchain knows how to finish."""


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """Names a kernel without importing or building it.

    Attributes
    ----------
    build : str
        "module:function"; the function takes `config` and returns a `KernelSource`.
    config : object
        Hashable, with a repr that says everything and is the same in each process (a frozen dataclass of plain values).
    arch : tuple
        Compute capability to compile for, ``(9, 0, "a")`` or ``(8, 0)``.
    """

    build: str
    config: Any
    arch: tuple

    def __post_init__(self):
        module, _, function = self.build.partition(":")
        if not module or not function:
            raise ValueError(f'build must be "module:function"; got {self.build!r}')
        if not (2 <= len(self.arch) <= 3 and all(isinstance(n, int) for n in self.arch[:2]) and all(s in ("", "a", "f") for s in self.arch[2:])):
            raise ValueError(f'arch must be (major, minor) or (major, minor, "a"); got {self.arch!r}')

    def __str__(self):
        return f"{self.build} {self.config} for {arch_name(self.arch)}"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """What a build function returns: a Python function and how to compile it.

    Attributes
    ----------
    function : callable
        The kernel, a plain Python function.
    signature : numba signature
        ``types.void(...)`` of scalars and arrays.
    threads : int
        Threads a block; launches use exactly these.
    min_blocks : int
        Blocks that a multiprocessor should hold at once.
    fastmath : bool or set of str
        True is LLVM's "fast", which may assume that no NaN and no infinity occurs; a set of LLVM flags, e.g.
        ``{"contract", "arcp"}``, is kept to those. Either makes NVVM flush denormals and use approximate division.
    tensor_maps : tuple of int
        Positions in the signature of the parameters that are 128-byte tensor maps by value. They are declared uint64 and
        inside the kernel they are the map's address.
    cluster : tuple of int or None
        Thread blocks of a cluster (x, y, z).
    max_registers : int or None
        Registers a thread at most.
    """

    function: Callable
    signature: Any
    threads: int
    min_blocks: int = 1
    fastmath: bool | frozenset | set = False
    tensor_maps: tuple[int, ...] = ()
    cluster: tuple[int, int, int] | None = None
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class Ptx:
    """Finished PTX text with one kernel, `entry`."""

    text: str
    entry: str


def arch_name(arch) -> str:
    """ "sm_90a" for ``(9, 0, "a")``."""
    return f"sm_{arch[0]}{arch[1]}{''.join(arch[2:])}"


_ready: dict[KernelRequest, Ptx] = {}
_building: dict[KernelRequest, threading.Lock] = {}


def compile_ptx(request: KernelRequest) -> Ptx:
    """PTX of a kernel: from this process, else from the disk cache, else compiled (once among threads and processes).

    Raises
    ------
    CompileError
        When Numba refuses the kernel or its PTX cannot be finished; the cause is chained.
    """
    ptx = _ready.get(request)
    if ptx is not None:
        return ptx
    with _building.setdefault(request, threading.Lock()):
        if request not in _ready:
            _ready[request] = _fetch(request)
        return _ready[request]


def adopt(request: KernelRequest, ptx: Ptx) -> None:
    """Take PTX that another process has compiled."""
    _ready.setdefault(request, ptx)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_building.clear)  # locks that other threads of the parent held


def is_cached(request: KernelRequest) -> bool:
    """Whether `compile_ptx` would not have to compile."""
    if request in _ready:
        return True
    key = cache.key(request)
    return key is not None and cache.load(key) is not None


def forget() -> None:
    """Drop the PTX held by this process (the disk cache stays)."""
    _ready.clear()


def _fetch(request):
    key = cache.key(request)
    if key is None:
        return build(request)
    found = cache.load(key)
    if found is None:
        with cache.lock(key):
            found = cache.load(key)
            if found is None:
                logger.debug("cache miss: %s", request)
                ptx = build(request, _entry_label(request, key))
                meta = {"entry": ptx.entry, "build": request.build, "config": repr(request.config), "arch": arch_name(request.arch)}
                if cache.sources_changed():
                    logger.info("not stored, a source file was edited since the process started: %s", request)
                else:
                    cache.store(key, ptx.text, meta)
                return ptx
    meta, text = found
    logger.debug("cache hit: %s", request)
    return Ptx(text, meta["entry"])


def _entry_label(request, key):
    module, _, function = request.build.partition(":")
    words = [word for word in module.split(".") if word != "kernels"] + ([] if function == "build" else [function])
    return re.sub(r"\W", "_", "_".join(words)) + "_" + key[:8]


def build(request: KernelRequest, entry: str | None = None) -> Ptx:
    """Import the kernel's module, build its source and compile it, past every cache."""
    module, _, function = request.build.partition(":")
    with timed("built %s", request):
        try:
            source = getattr(importlib.import_module(module), function)(request.config)
            text = _numba_ptx(source, request.arch)
            return finish(text, source, request.arch, entry or _entry_label(request, hashlib.sha256(repr(request).encode()).hexdigest()))
        except Exception as error:
            raise CompileError(f"could not compile {request}: {type(error).__name__}: {error}{_hint(error)}") from error


def _hint(error) -> str:
    """What to do when NVIDIA's compiler libraries are not installed."""
    missing = type(error).__name__ in ("DynamicLibNotFoundError", "NvvmSupportError", "NvrtcSupportError")
    return ". Hint: the compiler's CUDA parts are missing; pip install 'numba-cuda[cu13]', or [cu12] for an older driver" if missing else ""


def _numba_ptx(source, arch) -> str:
    from numba import config as numba_config
    from numba import cuda

    if numba_config.ENABLE_CUDASIM:
        raise CompileError("the CUDA simulator (NUMBA_ENABLE_CUDASIM=1) has no compiler; unset the variable to compile kernels")
    _import_without_scipy()
    fastmath = set(source.fastmath) if isinstance(source.fastmath, (set, frozenset)) else source.fastmath
    with _collection_paused():
        text, _ = cuda.compile(
            source.function,
            source.signature,
            debug=False,
            opt=True,
            device=False,
            abi="numba",
            cc=tuple(arch),
            output="ptx",
            fastmath=fastmath,
            launch_bounds=(source.threads, source.min_blocks),
        )
    return text if isinstance(text, str) else text.decode()


@contextmanager
def _collection_paused():
    """Numba makes hundreds of thousands of objects; with the heap of torch or JAX beside them, collections would take as long as compiling."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _import_without_scipy() -> None:
    """Import Numba-CUDA's array functions, which would import SciPy (0.3 s) just to find out whether `numpy.convolve` has a BLAS."""
    if "scipy.linalg" in sys.modules or "numba.cuda.np.arraymath" in sys.modules:
        return
    try:
        from numba.cuda.np import linalg
    except ImportError:  # not where numba-cuda 0.30 has it
        return
    ensure = getattr(linalg, "ensure_blas", None)

    def refuse():
        raise ImportError

    linalg.ensure_blas = refuse
    try:
        importlib.import_module("numba.cuda.np.arraymath")
    finally:
        linalg.ensure_blas = ensure


def finish(text: str, source: KernelSource, arch, entry: str) -> Ptx:
    """Apply the text passes that a source asks for."""
    text = drop_environments(rename_entry(text, entry))
    text = lower_version(text, arch)
    if source.tensor_maps:
        text = maps_by_value(text, entry, _ptx_positions(source))
    if source.cluster is not None:
        text = set_cluster(text, entry, source.cluster)
    if source.max_registers is not None:
        text = limit_registers(text, entry, source.max_registers)
    return Ptx(text, entry)


def _ptx_positions(source):
    """Positions of the tensor maps among the PTX parameters: an array takes 5 + 2 ndim of them in Numba's ABI."""
    starts, position = [], 0
    for kind in source.signature.args:
        starts.append(position)
        ndim = getattr(kind, "ndim", None)
        position += 1 if ndim is None else 5 + 2 * ndim
    for index in source.tensor_maps:
        if not 0 <= index < len(starts) or str(source.signature.args[index]) != "uint64":
            raise CompileError(f"tensor map parameter {index} must be declared uint64 in the signature; got {source.signature}")
    return [starts[index] for index in source.tensor_maps]


# ---- passes over the PTX text

_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+([\w$]+)\s*\(", re.M)


def entry_name(text: str) -> str:
    """Name of the only kernel in a PTX module."""
    names = _ENTRY.findall(text)
    if len(names) != 1:
        raise CompileError(f"expected one .entry in the PTX; found {len(names)}: {', '.join(names)}")
    return names[0]


def rename_entry(text: str, name: str) -> str:
    """Give the kernel (and the parameters named after it) a short name, which profilers and errors show."""
    return text.replace(entry_name(text), name)


def drop_environments(text: str) -> str:
    """Drop Numba's unused pointers to Python globals: their names count the compilations of a process, without them the text
    is the same each time, and so is its place in the driver's own cache.
    """
    for line, name in re.findall(r"^(\.common \.global \.align 8 \.u64 (_ZN08NumbaEnv[\w$]+);\n)", text, re.M):
        if len(re.findall(rf"{re.escape(name)}\b", text)) == 1:
            text = text.replace(line, "")
    return text


# PTX that the kernels of an architecture need; drivers from CUDA 12.0 (8.0) or 12.3 (8.3) on know it.
_PTX_VERSIONS = {(9, 0): (8, 3), (10, 0): (8, 6), (10, 3): (8, 8), (11, 0): (9, 0), (12, 0): (8, 7), (12, 1): (8, 8)}


def lower_version(text: str, arch) -> str:
    """State the lowest PTX version that the architecture's kernels need, so that drivers older than the toolkit accept it.

    An unknown newer architecture keeps the version that the compiler wrote; the version is never raised.
    """
    found = re.findall(r"^\.version (\d+)\.(\d+)$", text, re.M)
    if len(found) != 1:
        raise CompileError(f"expected one .version line in the PTX; found {len(found)}")
    now = tuple(map(int, found[0]))
    want = (8, 0) if tuple(arch[:2]) < (9, 0) else _PTX_VERSIONS.get(tuple(arch[:2]), now)
    major, minor = min(now, want)
    return re.sub(r"^\.version .*$", f".version {major}.{minor}", text, flags=re.M)


def maps_by_value(text: str, entry: str, positions) -> str:
    """Turn 64-bit parameters into 128-byte tensor maps passed by value, whose loads become their generic address."""
    for position in positions:
        name = f"{entry}_param_{position}"
        text, declared = re.subn(rf"\.param \.[usb]64(?: \.ptr(?: \.\w+)*(?: \.align \d+)?)? {name}\b", f".param .align 64 .b8 {name}[128]", text)
        if declared != 1:
            raise CompileError(f"expected one 64-bit parameter {name} in the PTX; found {declared}")
        load = rf"ld\.param\.[usb]64\s+(%rd\d+), \[{name}\];"
        text = re.sub(load, rf"mov.b64 \t\1, {name};\n\tcvta.param.u64 \t\1, \1;", text)
        if re.search(rf"\[{name}\b", text):
            raise CompileError(f"the PTX reads tensor map parameter {name} in a way that is not a plain 64-bit load")
    return text


def set_cluster(text: str, entry: str, cluster) -> str:
    """Launch in clusters of exactly this shape."""
    if len(cluster) != 3 or any(not isinstance(n, int) or n < 1 for n in cluster) or cluster[0] * cluster[1] * cluster[2] > 16:
        raise CompileError(f"cluster must be three positive sizes with a product up to 16; got {cluster!r}")
    return _add_directives(text, entry, (".explicitcluster", ".reqnctapercluster " + ", ".join(map(str, cluster))))


def limit_registers(text: str, entry: str, registers: int) -> str:
    """Limit the registers of a thread."""
    if not isinstance(registers, int) or not 16 <= registers <= 255:
        raise CompileError(f"max_registers must be from 16 to 255; got {registers!r}")
    return _add_directives(text, entry, (f".maxnreg {registers}",))


_HEAD = r"(\.entry\s+{entry}\s*\([^)]*\))([^{{;]*)\{{"


def _add_directives(text, entry, directives):
    heads = re.findall(_HEAD.format(entry=re.escape(entry)), text)
    if len(heads) != 1:
        raise CompileError(f"expected one body of kernel {entry} in the PTX; found {len(heads)}")
    for directive in directives:
        if directive.split()[0] in heads[0][1].split():
            raise CompileError(f"the PTX of {entry} already has {directive.split()[0]}")
    return re.sub(_HEAD.format(entry=re.escape(entry)), lambda m: m[1] + m[2] + "\n".join(directives) + "\n{", text)


def parameter_sizes(ptx: Ptx) -> list[int]:
    """Size in bytes of each parameter of the kernel, in order."""
    head = re.search(_HEAD.format(entry=re.escape(ptx.entry)), ptx.text)
    if head is None:
        raise CompileError(f"the PTX has no kernel {ptx.entry}")
    sizes = []
    for declaration in re.findall(r"\.param\s+([^,)]*)", head[1]):
        block = re.search(r"\.b8\s+\S+\[(\d+)\]", declaration)
        scalar = re.search(r"\.[usbf](8|16|32|64)\s", declaration)
        if block is None and scalar is None:
            raise CompileError(f"cannot read parameter {declaration!r} of {ptx.entry}")
        sizes.append(int(block[1]) if block else int(scalar[1]) // 8)
    return sizes


def cluster_of(ptx: Ptx) -> tuple[int, int, int]:
    """Compile-time cluster shape of the kernel, (1, 1, 1) without one."""
    found = re.search(r"\.reqnctapercluster (\d+), (\d+), (\d+)", ptx.text)
    return tuple(map(int, found.groups())) if found else (1, 1, 1)


def launch_threads(ptx: Ptx) -> int:
    """Threads a block that the kernel was compiled for."""
    found = re.search(r"\.maxntid (\d+)((?:, \d+)*)", ptx.text)
    if found is None:
        raise CompileError(f"the PTX of {ptx.entry} states no .maxntid")
    return int(found[1])
