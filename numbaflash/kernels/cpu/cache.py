"""Compiled CPU kernels on disk, beside the GPU kernels in the folder that `numbaflash.toolchain.cache` names.

Numba's own file cache looks at the source file of one function only, and writes into the package; a kernel here depends
on every file of this folder. The key is a digest of those sources, the versions of Python, Numba, llvmlite and NumPy,
the processor and its features, and the kernel's options: an entry is never out of date. Files are written under a
temporary name and renamed, carry a checksum, and are rebuilt when damaged. Where nothing can be written, kernels live in
memory.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ...toolchain.cache import directory
from ...toolchain.log import logger

SUFFIX = ".cpu"


class KernelCache(NullCache):
    """What Numba asks for a compiled function before it compiles, for one function.

    Parameters
    ----------
    description : str
        Everything that the function depends on beside sources, versions and processor.
    """

    def __init__(self, description):
        self._description = description

    def _path(self, signature, target_context) -> Path:
        parts = (fingerprint(), self._description, repr(signature), repr(target_context.codegen().magic_tuple()))
        return directory() / (hashlib.sha256("\0".join(parts).encode()).hexdigest() + SUFFIX)

    def load_overload(self, sig, target_context):
        target_context.refresh()  # defines the runtime's symbols that compiled code asks for
        path = self._path(sig, target_context)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        checksum, body = data[:32], data[32:]
        try:
            if hashlib.sha256(body).digest() != checksum:
                raise ValueError("checksum")
            result = CompileResult._rebuild(target_context, *pickle.loads(body))
        except Exception as error:  # whatever an entry that is not whole, or of another Numba, may cause
            logger.warning("cache entry %s is damaged and will be rebuilt (%r)", path, error)
            return None
        with suppress(OSError):
            os.utime(path)
        return result

    def save_overload(self, sig, data):
        path = self._path(sig, data.target_context)
        temporary = None
        try:
            body = dumps(data._reduce())
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)
            logger.warning("cannot write to the kernel cache %s (%s); CPU kernels are compiled anew in each process", path.parent, error)


@functools.cache
def fingerprint() -> str:
    """Digest of the sources of this folder and the versions that compiled code depends on."""
    versions = (sys.version_info[:3], platform.machine(), numba.__version__, llvmlite.__version__, np.__version__)
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
