"""What numbaflash needs to know and do with the arrays of a library."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..dispatch import contiguous_strides
from ..problem import ITEMSIZE

__all__ = ["ITEMSIZE", "Facts", "Library", "contiguous_strides"]


@dataclass(frozen=True, slots=True)
class Facts:
    """One array as the rest of the package sees it.

    Attributes
    ----------
    address : int
        Of the first element (not the lowest address when a stride is negative).
    shape : tuple of int
    strides : tuple of int
        In bytes, any sign.
    dtype : str
        "float16", "bfloat16", "float32" or "float64"; anything else is the library's own name, for the error message.
    kind : str
        "cpu" or "cuda".
    index : int or None
        CUDA device ordinal, 0 on the CPU; None for an array without memory whose library does not tell.
    readonly : bool
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    kind: str = "cpu"
    index: int | None = 0
    readonly: bool = False

    @property
    def place(self) -> str:
        return "the CPU" if self.kind == "cpu" else f"cuda:{self.index}"


class Library:
    """The arrays of one library; a singleton each, found by `numbaflash.arrays.library`.

    `inspect`, `address`, `current_stream` and what `allocator` returns run in every call, everything else in the first of a kind.
    A ``stream`` is a CUstream handle, or None for the library's current stream on the array's device.
    """

    name = ""
    forward: Any = None
    """Set where a call takes another road than address and launch (JAX, arrays that are borrowed first)."""
    attention: Any = None
    """Set where `numbaflash.attention` is differentiable: a function of q, k, v and the options."""
    backward: Any = None
    """Likewise for `numbaflash.backward`."""
    attention_varlen: Any = None
    """Likewise for `numbaflash.attention_varlen`. (`forward` and `backward` take packed sequences too.)"""
    decode: Any = None
    """Likewise for `numbaflash.decode`: a function of q, the caches, lengths, page table and the options."""
    cascade: Any = None
    """Likewise for `numbaflash.cascade`."""
    no_plans = ""
    """Why there is no `numbaflash.DecodePlan` for these arrays, where there is none."""
    lends = False
    """Whether arrays are borrowed first, by `numbaflash.arrays.borrowed.Lender.borrowed`."""
    append_kv: Any = None
    """Set where `numbaflash.append_kv` takes another road: a function of its arrays, ``interleaved`` and ``stream``."""
    merge: Any = None
    """Set where `numbaflash.merge` cannot use array operations."""
    namespace: Any = None
    """Module of the array operations: exp, log, maximum, where, swapaxes."""
    builds_on_device = False
    """Whether CUDA memory is allocated by the library, and ordered by its stream, so that kernels of our own can fill it outside of a call."""
    one_device = True
    """Whether to check that all arrays of a call lie on one device; False where the library does."""

    moves = False
    """Whether the owner of an array can give it other memory."""

    def joins(self, other) -> bool:
        """Whether arrays of another library may stand beside those of this one, which then answers for all."""
        return False

    def inspect(self, x) -> tuple[int, tuple]:
        """Address of the first element, and a hashable key: arrays of equal keys have equal facts, the address aside."""
        raise NotImplementedError

    def same_kind(self, x):
        """A function of an array of this library: its address, 0 where the keys of `inspect` differ."""
        inspect, (_, key) = self.inspect, self.inspect(x)

        def address(other):
            at, other_key = inspect(other)
            return at if other_key == key else 0

        return address

    def same_kinds(self, arrays):
        """A function of arrays (None where one of these is): their addresses, 0 for None, or None where `same_kind` may have to look at each.

        None where there is no quicker way than that.
        """
        return None

    def inspect_result(self, x) -> tuple[int, tuple]:
        """The same for an array that will be written: its key tells read-only from writable."""
        return self.inspect(x)

    def describe(self, x, name: str) -> Facts:
        """Every fact, with a clear error (naming the argument) for an array that cannot be used."""
        raise NotImplementedError

    def address(self, x) -> int:
        raise NotImplementedError

    def current_stream(self, index: int):
        """A function without arguments that returns the handle of the stream now current on a CUDA device."""
        raise NotImplementedError

    def allocator(self, like, shape: tuple[int, ...], dtype: str):
        """A function of a stream that returns a new row-major array on the device of ``like``."""
        raise NotImplementedError

    def contiguous(self, x, stream: int | None):
        """A new row-major copy of ``x``."""
        raise NotImplementedError

    def assign(self, target, source, stream: int | None) -> None:
        """Copy ``source`` into ``target``."""
        raise NotImplementedError

    def clear(self, x, stream: int | None) -> None:
        """Set every element of ``x`` to 0."""
        raise NotImplementedError

    def used_on(self, stream: int, arrays) -> None:
        """Tell the allocator that a stream other than the current one works on these arrays."""

    def written(self, x) -> None:
        """Tell the library that the caller's array ``x`` has new contents."""

    def values(self, x):
        """What ``x`` holds, as a NumPy array on the host, which waits for the device; None where that is not known, as in a trace."""
        raise NotImplementedError

    def from_host(self, like, array):
        """A NumPy array as one of the library, on the device of ``like``."""
        raise NotImplementedError

    def row_major(self, x):
        """``x``, copied where its elements do not follow one another."""
        return x

    def cast(self, x, dtype: str):
        """``x`` in another dtype."""
        raise NotImplementedError

    def constant(self, x):
        """``x``, through which nothing is differentiated."""
        return x

    def on_device(self, x) -> AbstractContextManager:
        """A context in which the library's own operations run on the device of ``x``."""
        return nullcontext()
