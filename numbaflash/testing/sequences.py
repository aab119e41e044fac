"""Lengths of packed sequences, and caches with their pages, as a case describes them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .. import reference
from ..problem import LENGTH_DTYPES
from .plain import short_repr, tuples

ORDERS = ("ascending", "descending", "random")
"""Of the pages that sequences take."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences that lie one after the other in the arrays of a case. Where there are two of something, it is that of q and that of k and v.

    Attributes
    ----------
    lengths_q, lengths_k : tuple of int
        How long each sequence is.
    before, after : tuple of int
        Rows before the first sequence and past the last one, which are nobody's.
    dtypes : tuple of str
        Of the boundaries: int32 or int64.
    max_seqlens : tuple of int or None
        ``max_seqlen_q`` and ``max_seqlen_k`` of the call.
    boundaries : tuple of tuple of int, or None
        What the boundaries hold in the place of those that the lengths make, wrong ones too.

    Examples
    --------
    >>> packed = Packed((3, 0, 2), (1, 4, 2), before=(0, 5))
    >>> packed.totals, packed.numbers[1]
    ((5, 12), (5, 6, 10, 12))
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    dtypes: tuple[str, str] = ("int32", "int32")
    max_seqlens: tuple[int | None, int | None] = (None, None)
    boundaries: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __post_init__(self):
        if min((*self.lengths_q, *self.lengths_k, *self.before, *self.after), default=0) < 0:
            raise ValueError(f"lengths and rows must not be negative; got {self!r}")
        for dtype in self.dtypes:
            if dtype not in LENGTH_DTYPES:
                raise ValueError(f"dtypes must be of {', '.join(LENGTH_DTYPES)}; got {dtype!r}")
        if len(self.numbers[0]) != len(self.numbers[1]):
            raise ValueError(f"there must be as many sequences of queries as of keys; got {self!r}")

    @property
    def totals(self) -> tuple[int, int]:
        """Rows of q, and of k and v."""
        return tuple(b + sum(n) + a for b, n, a in zip(self.before, (self.lengths_q, self.lengths_k), self.after, strict=True))

    @property
    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the boundaries hold."""
        made = (tuple(accumulate(n, initial=b)) for b, n in zip(self.before, (self.lengths_q, self.lengths_k), strict=True))
        return self.boundaries or tuple(made)

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.numbers[0]) - 1

    @property
    def longest(self) -> tuple[int, int]:
        """Of the sequences that a call sees, whatever the boundaries hold."""
        read = (np.diff(reference.boundaries(n, total)) for n, total in zip(self.numbers, self.totals, strict=True))
        return tuple(int(lengths.max(initial=0)) for lengths in read)

    @classmethod
    def from_json(cls, data: dict) -> Packed:
        """Of what `dataclasses.asdict` makes, as JSON returns it."""
        return cls(**{name: tuples(x) for name, x in data.items()})

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, slots=True)
class Cache:
    """How the keys of the sequences of a `DecodeCase` lie in its caches.

    Attributes
    ----------
    lengths : tuple of int
        What ``seqlens_k`` holds: a length a sequence, 0 too, negative, or beyond the capacity.
    page_size : int or None
        Keys of a page; None for contiguous caches.
    order : str
        Of the pages that the sequences take one after the other: one of `ORDERS`.
    shared : int
        Pages that all sequences begin with, as far as they have them.
    spare : int
        Pages that no sequence has.
    wrong : bool
        Some of the page numbers in use are none, and so count as the nearest one.

    Examples
    --------
    >>> cache = Cache((40, 0, 20), page_size=16, shared=1, spare=3)
    >>> cache.counts(64), cache.pages(64)
    ((3, 0, 2), 7)
    """

    lengths: tuple[int, ...] = (64,)
    page_size: int | None = None
    order: str = "ascending"
    shared: int = 0
    spare: int = 0
    wrong: bool = False

    def __post_init__(self):
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {self.order!r}")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, or None; got {self.page_size}")
        if min(self.shared, self.spare) < 0:
            raise ValueError(f"shared and spare must not be negative; got {self!r}")
        if self.page_size is None and (self.order, self.shared, self.spare, self.wrong) != (ORDERS[0], 0, 0, False):
            raise ValueError(f"only caches in pages have an order of them, shared, spare and wrong ones; got {self!r}")

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    def counts(self, capacity: int) -> tuple[int, ...]:
        """Pages of each sequence."""
        return tuple(-(-min(max(n, 0), capacity) // self.page_size) for n in self.lengths)

    def pages(self, capacity: int) -> int:
        """Pages of the pool."""
        counts = self.counts(capacity)
        common = min(self.shared, max(counts, default=0))
        return common + sum(max(0, n - common) for n in counts) + self.spare

    def table(self, capacity: int, rng: np.random.Generator) -> np.ndarray:
        """The page table; entries that nobody uses hold anything."""
        counts, pages = self.counts(capacity), self.pages(capacity)
        order = {"ascending": np.arange(pages), "descending": np.arange(pages)[::-1], "random": rng.permutation(pages)}[self.order]
        wrong = np.array([-1, pages, 2**31 - 1, -(2**31)])
        table = rng.choice(np.append(wrong, 0), (self.batch, capacity // self.page_size))
        common = min(self.shared, max(counts, default=0))
        first = common
        for row, count in zip(table, counts, strict=True):
            own = max(0, count - common)
            row[:count] = [*order[:common][:count], *order[first : first + own]]
            first += own
            if self.wrong:
                row[:count] = np.where(rng.random(count) < 0.25, rng.choice(wrong, count), row[:count])
        return table

    @classmethod
    def from_json(cls, data: dict) -> Cache:
        """Of what `dataclasses.asdict` makes, as JSON returns it."""
        return cls(**{name: tuples(x) for name, x in data.items()})

    def __repr__(self) -> str:
        return short_repr(self)
