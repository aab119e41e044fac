"""New keys and values to the cache, on GPUs: one kernel, in which a thread moves two accesses of a row, and turns what is in them.

The threads of a token have its keys first, then its values, then its queries. Rotary positions turn pairs of columns, (x, y) to
(x cos - y sin, y cos + x sin), in float32, or float64 for float64; each product and sum is rounded by itself, as on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda import types
from numba.cuda.types import int32, void

from ...problem import MAX_SEQLEN
from ...ptx.straight import straight_line
from ...toolchain import KernelSource
from ..access import Access


@dataclass(frozen=True, slots=True)
class AppendConfig:
    """What is compiled in; see `numbaflash.problem.caches.Append`.

    Attributes
    ----------
    access : Access
        Of keys, values and queries. Half of the columns that are turned are a multiple of its elements.
    angles : Access or None
        Of cos and sin, with no more elements; None where nothing is turned.
    lengths : str
    page_size : int
    interleaved : bool
    threads : int
    """

    access: Access
    angles: Access | None
    lengths: str
    page_size: int
    interleaved: bool
    threads: int


@dataclass(frozen=True, slots=True)
class _Bodies:
    """Straight-line bodies, and what they are made of."""

    config: AppendConfig

    # ---- a thread's key, value and query; ``a_row`` are the threads of a row, of which the first ``turning`` turn what they move

    def key(self, ops, new, cache, lengths, table, cos, sin, entry, token, unit, a_row, turning, capacity, pages, positions):
        head, unit = unit // a_row, unit % a_row
        places, turns = self._places(ops, new, unit, turning)
        words = self._load(ops, new, entry, token, head, places)
        position = self._position(ops, lengths, entry, token)
        if self.config.angles is not None:
            capacity, known = ops.minimum(capacity, positions), (position >= 0) & (position < positions)
            words = self._turn(ops, words, cos, sin, position, unit, turns, known)
        row, slot, there = self._slot(ops, table, entry, position, capacity, pages)
        self._store(ops, cache, row, slot, head, places, words, there)

    def value(self, ops, new, cache, lengths, table, entry, token, unit, a_row, capacity, pages):
        head, unit = unit // a_row, unit % a_row
        places, _ = self._places(ops, new, unit, None)
        words = self._load(ops, new, entry, token, head, places)
        row, slot, there = self._slot(ops, table, entry, self._position(ops, lengths, entry, token), capacity, pages)
        self._store(ops, cache, row, slot, head, places, words, there)

    def query(self, ops, q, rotated, lengths, cos, sin, entry, token, unit, a_row, turning, positions):
        head, unit = unit // a_row, unit % a_row
        places, turns = self._places(ops, q, unit, turning)
        words = self._load(ops, q, entry, token, head, places)
        position = self._position(ops, lengths, entry, token)
        known = (position >= 0) & (position < positions)
        words = self._turn(ops, words, cos, sin, position, unit, turns, known)
        words = [[ops.select(known, x, 0) for x in some] for some in words]
        self._store(ops, rotated, entry, token, head, places, words, token >= 0)

    # ---- where

    def _position(self, ops, lengths, entry, token):
        """Negative, or beyond every capacity, for lengths that are so."""
        (length,) = ops.load_row(ops.place(lengths, (entry,)), 1, token >= 0)
        if self.config.lengths == "int32":
            return ops.minimum(ops.maximum(length, ops.integer(-MAX_SEQLEN)), ops.integer(MAX_SEQLEN)) + token
        lowest, highest = (ops.wide(ops.integer(n)) for n in (-MAX_SEQLEN, MAX_SEQLEN))
        return ops.narrow(ops.minimum(ops.maximum(length, lowest), highest)) + token

    def _slot(self, ops, table, entry, position, capacity, pages):
        """(row of the cache, slot in it, whether there is one)."""
        there, size = (position >= 0) & (position < capacity), self.config.page_size
        if not size:
            return entry, position, there
        column = position // size
        (page,) = ops.load_row(ops.place(table, (entry, column)), 1, there)
        return page, position - column * size, there & (page >= 0) & (page < pages)

    def _places(self, ops, array, unit, turning):
        """(columns of a thread's two accesses, in words, with whether they are in a row; whether they are turned)."""
        words = self.config.access.words
        first, second, turns = unit * (2 * words), unit * (2 * words) + words, None
        if turning is not None and self.config.angles is not None:
            turns = unit < turning
            if not self.config.interleaved:  # a pair has one column in each
                first = ops.select(turns, unit * words, first)
                second = ops.select(turns, unit * words + turning * words, second)
        return [(column, column < array.shape[3]) for column in (first, second)], turns

    def _place(self, ops, array, row, slot, head, column):
        return ops.place(array, (row, slot, head, column), contiguous=self.config.access.words > 1)

    # ---- what

    def _load(self, ops, array, row, slot, head, places):
        return [self.config.access.load(ops, self._place(ops, array, row, slot, head, column), inside) for column, inside in places]

    def _store(self, ops, array, row, slot, head, places, words, there):
        for (column, inside), some in zip(places, words, strict=True):
            ops.store_row(self._place(ops, array, row, slot, head, column), some, there & inside)

    def _angles(self, ops, array, position, unit, valid):
        """A thread's cosines, or sines."""
        access, compute = self.config.angles, "float64" if self.config.access.dtype == "float64" else "float32"
        runs = self.config.access.elements // access.elements
        at = ops.place(array, (position, unit * (runs * access.words)), contiguous=access.words > 1)
        found = [access.numbers(ops, access.load(ops, ops.moved(at, -1, n * access.words), valid)) for n in range(runs)]
        return [ops.real(compute, x) for run in found for x in run]

    def _turn(self, ops, words, cos, sin, position, unit, turns, known):
        access, interleaved = self.config.access, self.config.interleaved
        cos, sin = (self._angles(ops, x, position, unit, turns & known) for x in (cos, sin))
        one, other = (access.numbers(ops, some) for some in words)
        if interleaved:
            both = one + other
            one, other = both[0::2], both[1::2]
        first = [ops.product(x, c) - ops.product(y, s) for x, y, c, s in zip(one, other, cos, sin, strict=True)]
        second = [ops.product(y, c) + ops.product(x, s) for x, y, c, s in zip(one, other, cos, sin, strict=True)]
        if interleaved:
            both = [x for pair in zip(first, second, strict=True) for x in pair]
            first, second = both[: access.elements], both[access.elements :]
        turned = [access.rounded(ops, numbers) for numbers in (first, second)]
        return [[ops.select(turns, x, y) for x, y in zip(*pair, strict=True)] for pair in zip(turned, words, strict=True)]


def build(config: AppendConfig) -> KernelSource:
    """The kernel. Its parameters: the arrays of `numbaflash.dispatch.APPEND_OPERANDS`, absent ones without elements; blocks of a token, tokens of a
    sequence; threads of a key's row, of all keys of a token, of a value's row, of all values, and of all queries; those of a row that turn; capacity,
    pages, and rows of cos and sin."""
    word, angle = config.access.word, config.angles.word if config.angles else "float32"
    four, two = types.Array(getattr(types, word), 4, "A"), types.Array(getattr(types, angle), 2, "A")
    length, table = types.Array(getattr(types, config.lengths), 1, "A"), types.Array(int32, 2, "A")
    turned, bodies, threads = config.angles is not None, _Bodies(config), config.threads

    def find(ops, block, thread, blocks, tokens):
        token = block // blocks
        return [token // tokens, token % tokens, block % blocks * threads + thread]

    find = straight_line(types.UniTuple(int32, 3), (int32,) * 4, find)
    key = straight_line(void, (four, four, length, table, two, two, *[int32] * 8), bodies.key)
    value = straight_line(void, (four, four, length, table, *[int32] * 6), bodies.value)
    query = straight_line(void, (four, four, length, two, two, *[int32] * 6), bodies.query) if turned else None

    def append_kv(
        k_new, v_new, k_cache, v_cache, lengths, table, cos, sin, q, rotated,
        blocks, tokens, of_key, of_keys, of_value, of_values, of_queries, turning, capacity, pages, positions,
    ):  # fmt: skip
        entry, token, unit = find(cuda.blockIdx.x, cuda.threadIdx.x, blocks, tokens)
        if unit < of_keys:
            key(k_new, k_cache, lengths, table, cos, sin, entry, token, unit, of_key, turning, capacity, pages, positions)
        elif unit < of_keys + of_values:
            limit = min(capacity, positions) if turned else capacity
            value(v_new, v_cache, lengths, table, entry, token, unit - of_keys, of_value, limit, pages)
        elif turned:
            query_unit = unit - of_keys - of_values
            if query_unit < of_queries:
                query(q, rotated, lengths, cos, sin, entry, token, query_unit, of_key, turning, positions)

    signature = types.void(*[four] * 4, length, table, two, two, four, four, *[int32] * 11)
    return KernelSource(append_kv, signature, threads=threads)
