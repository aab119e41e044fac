"""Disk cache of compiled kernels: PTX, and the object code of the CPU family in base64.

One file an entry in ``NUMBAFLASH_CACHE_DIR``, else ``$XDG_CACHE_HOME/numbaflash``, else ``~/.cache/numbaflash``. The key
is a sha256 of everything that PTX depends on: the sources of the package's kernels, the compiler's versions, the
architecture and the kernel's options; so an entry is never out of date, only unused. Files are written to a temporary
name and renamed, carry a checksum, and are rebuilt when damaged. Where nothing can be written, kernels live in memory.

The folder is kept below ``NUMBAFLASH_CACHE_MB`` megabytes (default 512; an entry takes 0.05 to 0.5) by dropping what was
used longest ago.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .._version import __version__
from .log import logger

try:
    import fcntl
except ImportError:  # Windows: atomic renames alone keep the cache whole, at worst a kernel is built twice
    fcntl = None

_MAGIC = b"numbaflash-ptx-1"
_SUFFIX = ".ptx"
_COMPILERS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc-cu13")
_SOURCES = ("kernels", "ptx", "toolchain")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A kernel in the disk cache. ``used`` is a time in seconds since 1970."""

    key: str
    build: str
    config: str
    arch: str
    bytes: int
    used: float


def directory() -> Path:
    """Folder of the cache (it need not exist)."""
    chosen = os.environ.get("NUMBAFLASH_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # no home folder
        return (Path(base) if base else Path.home() / ".cache") / "numbaflash"
    return Path(tempfile.gettempdir()) / f"numbaflash-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def limit_bytes() -> int:
    """Size above which old entries are dropped."""
    value = os.environ.get("NUMBAFLASH_CACHE_MB", "512")
    try:
        return int(float(value) * 1e6)
    except ValueError:
        raise ValueError(f"NUMBAFLASH_CACHE_MB must be a number of megabytes; got {value!r}") from None


def key(request) -> str | None:
    """Key of a `KernelRequest`; None for a kernel whose source is in no file (a notebook's), which cannot be told from its
    next edition. Of a kernel outside this package, only the module of its build function counts, not what that imports.
    """
    source = _outside_source(request.build)
    if source is None:
        return None
    parts = (fingerprint(), source, request.build, repr(request.config), repr(tuple(request.arch)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _sources_digest() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    for folder in _SOURCES:
        for path in sorted((package / folder).rglob("*.py")):
            with suppress(FileNotFoundError):  # removed while we look
                data = path.read_bytes()
                digest.update(f"{path.relative_to(package).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


_sources = _sources_digest()  # now, before any kernel's module is imported: of what this process will run


def sources_changed() -> bool:
    """Whether a source file was edited since this process started: what it builds may then not be what its keys say."""
    return _sources_digest() != _sources


@functools.cache
def fingerprint() -> str:
    """Digest of the package's kernel sources and the versions of Python and of the compilers."""
    parts = [__version__, _sources, f"python {sys.version_info[:2]}", f"{os.environ.get('CUDA_HOME')} {os.environ.get('CUDA_PATH')}"]
    for name in _COMPILERS:
        with suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{name} {importlib.metadata.version(name)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def _outside_source(build) -> str | None:
    """Digest of the module of a kernel that does not live in this package, "" of one that does."""
    module = build.partition(":")[0]
    if module.startswith(__package__.partition(".")[0] + "."):
        return ""
    loaded = sys.modules.get(module)
    path = getattr(loaded, "__file__", None)
    if path is None:
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module)
            path = spec.origin if spec else None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and os.path.isfile(path) else None


def load(key: str) -> tuple[dict, str] | None:
    """Description and text of an entry; None when it is not there or damaged (it is then removed)."""
    path = directory() / (key + _SUFFIX)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    found = _decode(data)
    if found is None:
        logger.warning("cache entry %s is damaged and will be rebuilt", path)
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):
        os.utime(path)
    return found


def _encode(meta, text) -> bytes:
    body = json.dumps(meta).encode() + b"\n" + text.encode()
    return _MAGIC + b" " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(data):
    head, _, body = data.partition(b"\n")
    if head != _MAGIC + b" " + hashlib.sha256(body).hexdigest().encode():
        return None
    meta, _, text = body.partition(b"\n")
    return json.loads(meta), text.decode()


def store(key: str, text: str, meta: dict) -> None:
    """Write an entry, atomically. Where that is not possible, say so once in the log and go on."""
    folder = directory()
    try:
        write_whole(folder / (key + _SUFFIX), _encode(meta, text))
    except OSError as error:
        _warn_once(str(folder), error)
        return
    _shrink(folder, key)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that whoever reads it finds the old one or the new one, whole. Makes its folder.

    Raises
    ------
    OSError
        When that is not possible; nothing is left behind.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise


@functools.cache
def _warned(folder):
    return []


def _warn_once(folder, error):
    if not _warned(folder):
        _warned(folder).append(error)
        hint = "kernels are kept in memory only; set NUMBAFLASH_CACHE_DIR to a writable folder"
        logger.warning("cannot write to the kernel cache %s (%s); %s", folder, error, hint)


@contextmanager
def lock(key: str):
    """Exclusive among the processes that share the folder; no lock where the folder cannot be written."""
    with lock_file(directory() / (key + ".lock")):
        yield


@contextmanager
def lock_file(path: Path):
    """The same by a file of that name, which is removed afterwards."""
    handle = _acquire(path) if fcntl else None
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                path.unlink()
            os.close(handle)


def _acquire(path):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(handle), os.stat(path)):  # else the holder before us has removed it
                    return handle
            except FileNotFoundError:
                pass
            except OSError:  # a file system without locks
                os.close(handle)
                raise
            os.close(handle)
    except OSError as error:
        logger.debug("no lock at %s (%s)", path, error)
        return None


def _files(folder):
    with suppress(OSError), os.scandir(folder) as found:
        for item in found:
            with suppress(OSError):
                yield item, item.stat()


def _shrink(folder, keep):
    items = [(info.st_mtime, info.st_size, item) for item, info in _files(folder) if item.name.endswith(_SUFFIX)]
    excess = sum(size for _, size, _ in items) - limit_bytes()
    for _, size, item in sorted(items, key=lambda each: each[0]):
        if excess <= 0:
            return
        if item.name != keep + _SUFFIX:
            with suppress(OSError):
                os.unlink(item.path)
                excess -= size


def entries() -> list[CacheEntry]:
    """Every whole entry of the disk cache, the last used first."""
    found = []
    for item, info in _files(directory()):
        if item.name.endswith(_SUFFIX):
            with suppress(OSError):
                decoded = _decode(Path(item.path).read_bytes())
                if decoded:
                    meta = decoded[0]
                    found.append(CacheEntry(item.name[: -len(_SUFFIX)], meta["build"], meta["config"], meta["arch"], info.st_size, info.st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def size() -> int:
    """Bytes that the entries take on disk, damaged ones included."""
    return sum(info.st_size for item, info in _files(directory()) if item.name.endswith(_SUFFIX))


def clear() -> int:
    """Delete every entry, and what killed processes have left behind; returns the number of entries deleted.

    Raises
    ------
    OSError
        When an entry cannot be deleted.
    """
    deleted = 0
    for item, info in _files(directory()):
        if item.name.endswith(_SUFFIX):
            os.unlink(item.path)
            deleted += 1
        elif item.name.endswith(".tmp") and info.st_mtime < time.time() - 3600:
            with suppress(OSError):
                os.unlink(item.path)
    return deleted
