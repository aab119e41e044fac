"""One thread for NumPy's matrix products: those of the reference are small, and the threads of OpenBLAS wait for each other by looping."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_NAMES = tuple(
    tuple(f"{prefix}openblas_{what}_num_threads{suffix}" for what in ("get", "set")) for prefix in ("scipy_", "") for suffix in ("64_", "")
)


@contextmanager
def one_thread():
    """Within the context, where NumPy comes with OpenBLAS; elsewhere nothing changes."""
    found = _functions()
    if found is None:
        yield
        return
    get, change = found
    before = get()
    change(1)
    try:
        yield
    finally:
        change(before)


def _functions():
    """(how many threads there are, what changes that) of the library that NumPy has loaded."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for path in folder.glob("*openblas*"):
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            for get, change in _NAMES:
                if hasattr(library, get) and hasattr(library, change):
                    return getattr(library, get), getattr(library, change)
    return None
