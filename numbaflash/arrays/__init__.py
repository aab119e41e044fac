"""Every array library behind one small view: pointer, shape, strides, dtype, device, stream, allocate, copy.

An adapter is found by the type of the array, once, and kept. A framework is looked at only when the user has imported it.
"""

from __future__ import annotations

import importlib
import sys

from .base import ITEMSIZE, Facts, Library, contiguous_strides

__all__ = ["ITEMSIZE", "LIBRARIES", "Facts", "Library", "contiguous_strides", "in_torch_compile", "library", "one_library"]

ADAPTERS = (("numpy", "numpy"), ("cupy", "cupy"), ("torch", "torch"), ("jax", "jax"))
"""(module that the user has imported, adapter beside this file); whatever none of them claims may still be borrowed."""

LIBRARIES: dict[type, Library] = {}
"""Adapter of every array type met so far: the one look-up of a later call."""


def library(x, name: str) -> Library:
    """The adapter of an array.

    Parameters
    ----------
    x : array
    name : str
        The argument's name, for the error message.

    Raises
    ------
    TypeError
        When ``x`` is no array, or one that cannot be read as plain memory.
    """
    found = LIBRARIES.get(type(x))
    if found is None:
        found = LIBRARIES[type(x)] = _find(x, name)
    return found


def _find(x, name) -> Library:
    for framework, adapter in ADAPTERS:
        if framework in sys.modules:
            found = importlib.import_module(f".{adapter}", __name__).adopt(x, name)
            if found is not None:
                return found
    found = importlib.import_module(".borrowed", __name__).adopt(x, name)
    if found is not None:
        return found
    raise TypeError(
        f"{name} must be an array of NumPy, CuPy, PyTorch, JAX or Numba, or have __dlpack__ or __cuda_array_interface__; "
        f"got {type(x).__name__}. Convert it first, for example with numpy.asarray"
    )


def one_library(**arrays) -> Library:
    """The adapter that all given arrays share.

    Raises
    ------
    TypeError
        When they come from more than one library.
    """
    found = {name: library(x, name) for name, x in arrays.items()}
    first, *others = dict.fromkeys(found.values())
    if others:
        home = next((one for one in found.values() if all(other is one or one.joins(other) for other in found.values())), None)
        if home is not None:
            return home
        raise TypeError(
            f"{_listed(found)} must come from one array library; got {', '.join(f'{name} from {lib.name}' for name, lib in found.items())}. "
            "Convert them to one library first (numpy.asarray, torch.from_dlpack, ...)"
        )
    return first


def in_torch_compile() -> bool:
    """Whether torch.compile traces the caller, which then must not look a library up: that is nothing for a graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def _listed(names) -> str:
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last
