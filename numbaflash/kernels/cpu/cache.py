"""Compiled CPU kernels in the disk cache of `numbaflash.toolchain.cache`, beside the GPU kernels.

Numba's own file cache looks at the source file of one function only, and writes into the package; a kernel here depends
on every file of this folder. The key is a digest of those sources, the versions of Python, Numba, llvmlite and NumPy,
the processor and its features, and the kernel's options: an entry is never out of date.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import pickle
import platform
import secrets
import sys
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ...toolchain import cache
from ...toolchain.log import logger


class KernelCache(NullCache):
    """What Numba asks for a compiled function before it compiles, for one function.

    Parameters
    ----------
    description : str
        Everything that the function depends on beside sources, versions and processor.
    """

    def __init__(self, description):
        self._description = description

    def _key(self, signature, target_context) -> str:
        parts = (FINGERPRINT, self._description, repr(signature), repr(target_context.codegen().magic_tuple()))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def load_overload(self, sig, target_context):
        target_context.refresh()  # defines the runtime's symbols that compiled code asks for
        found = cache.load(self._key(sig, target_context))
        if found is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(base64.b64decode(found[1])))
        except Exception as error:  # whatever an entry of a changed Numba of the same version may cause
            logger.warning("the cache entry of CPU kernel %s cannot be loaded and will be rebuilt (%r)", self._description, error)
            return None

    def save_overload(self, sig, data):
        processor = data.target_context.codegen().magic_tuple()[1]
        meta = {"build": "numbaflash.kernels.cpu", "config": self._description, "arch": processor}
        cache.store(self._key(sig, data.target_context), base64.b64encode(dumps(data._reduce())).decode(), meta)


@contextlib.contextmanager
def own_symbols():
    """What is compiled within has symbols that no other process gives to something else.

    Numba numbers functions from 1 in each process and names symbols after function and number. Functions made by one
    factory for two kernels share their name: cached by two processes and loaded by a third, they could share a symbol
    too, and the one loaded first would be called for both.
    """
    numbers = FunctionIdentity._unique_ids
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))
    try:
        yield
    finally:
        FunctionIdentity._unique_ids = numbers


def _fingerprint() -> str:
    """Digest of the sources of this folder and the versions that compiled code depends on."""
    versions = (sys.version_info[:3], platform.machine(), numba.__version__, llvmlite.__version__, np.__version__)
    digest = hashlib.sha256(repr(versions).encode())
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


FINGERPRINT = _fingerprint()
"""Taken when the sources are imported, as later they may be edited ones."""
