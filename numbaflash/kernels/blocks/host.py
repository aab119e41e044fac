"""Words of block masks in NumPy: built, read again, counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...problem import GRANULE
from . import layout
from .layout import BITS, EMPTY, FULL, PARTIAL, granules
from .rules import Rule

CHUNK = 1 << 22  # pairs that are looked at together


def of_rule(shape, rule: Rule, offset: int, numbers: dict[str, int], of_queries, of_keys) -> np.ndarray:
    """The words of a rule.

    Parameters
    ----------
    shape : tuple of int
        (batch or 1, heads or 1, seqlen_q, seqlen_k).
    rule : Rule
    offset : int
        Query i stands beside key ``i + offset``.
    numbers : dict of str to int
        Those of the rule.
    of_queries, of_keys : ndarray or None
        (batch or 1, seqlen_q or 1) and (batch or 1, seqlen_k), where the rule reads them.
    """
    keys = np.arange(shape[3])[None, :]

    def pairs(batch, head, first, end):
        place = np.arange(first, end)[:, None] + offset
        of_query = None if of_queries is None else _entry(of_queries, batch)[_rows(of_queries, first, end)][:, None]
        of_key = None if of_keys is None else _entry(of_keys, batch)[None, :]
        return np.broadcast_to(rule.shows(place, keys, numbers, of_query, of_key), (end - first, shape[3]))

    return build(shape, pairs)


def _entry(array, batch):
    return array[batch if array.shape[0] > 1 else 0]


def _rows(array, first, end):
    return slice(None) if array.shape[1] == 1 else slice(first, end)


def of_mask(shape, mask) -> np.ndarray:
    """The words of a mask of bool with 4 axes, each of full size or 1."""
    mask = np.broadcast_to(mask, (*mask.shape[:2], *shape[2:]))
    return build(shape, lambda batch, head, first, end: mask[batch, head, first:end])


def build(shape, pairs: Callable) -> np.ndarray:
    """Words (batch or 1, heads or 1, words) of what ``pairs(batch, head, first, end)`` shows to queries first to end, (end - first, seqlen_k)."""
    batch, heads, seqlen_q, seqlen_k = shape
    rows, columns = granules(seqlen_q), granules(seqlen_k)
    at_once = max(1, CHUNK // max(1, GRANULE * seqlen_k))
    words, bits = np.zeros((batch, heads, rows * columns), np.int32), {}
    for b, h in np.ndindex(batch, heads):
        found, count = [np.zeros((0, BITS), np.int32)], 0
        for first in range(0, rows, at_once):
            end = min(rows, first + at_once)
            shown = np.zeros((GRANULE * (end - first), GRANULE * columns), bool)
            there = pairs(b, h, GRANULE * first, min(seqlen_q, GRANULE * end))
            shown[: there.shape[0], :seqlen_k] = there
            blocks = shown.reshape(end - first, GRANULE, columns, GRANULE).swapaxes(1, 2).reshape(-1, GRANULE, GRANULE)
            state = _states(blocks, _sizes(seqlen_q, first, end)[:, None] * _sizes(seqlen_k, 0, columns))
            partial = state == PARTIAL
            state[partial] += count + np.arange(int(partial.sum()), dtype=np.int32)
            count += int(partial.sum())
            words[b, h, first * columns : end * columns] = state
            found.append(_bits(blocks[partial]))
        bits[b, h] = np.concatenate(found)
    most = max((len(each) for each in bits.values()), default=0)
    result = np.zeros((batch, heads, layout.words(seqlen_q, seqlen_k, most)), np.int32)
    result[..., : rows * columns] = words
    for (b, h), each in bits.items():
        at = layout.bits_at(seqlen_q, seqlen_k)
        result[b, h, at : at + each.size] = each.reshape(-1)
    return result


def _sizes(length, first, end):
    """Rows of granules ``first`` to ``end`` that there are."""
    return np.clip(length - GRANULE * np.arange(first, end), 0, GRANULE)


def _states(blocks, sizes):
    """What granules are, each of which has so many pairs."""
    count = blocks.sum(axis=(1, 2))
    state = np.full(len(blocks), PARTIAL, np.int32)
    state[count == sizes.reshape(-1)] = FULL
    state[count == 0] = EMPTY
    return state


def _bits(blocks):
    """(granules, BITS) of (granules, 64, 64) of bool."""
    both = np.stack([blocks, blocks.swapaxes(1, 2)], axis=1)
    return np.packbits(both, axis=-1, bitorder="little").reshape(len(blocks), 4 * BITS).view("<i4").astype(np.int32, copy=False)


def states(words, shape) -> np.ndarray:
    """(batch or 1, heads or 1, granules of queries, granules of keys): EMPTY, FULL or PARTIAL."""
    batch, heads, seqlen_q, seqlen_k = shape
    rows, columns = granules(seqlen_q), granules(seqlen_k)
    return np.minimum(words[..., : rows * columns], PARTIAL).reshape(batch, heads, rows, columns)


def dense(words, shape) -> np.ndarray:
    """The mask as an array of bool, (batch or 1, heads or 1, seqlen_q, seqlen_k)."""
    batch, heads, seqlen_q, seqlen_k = shape
    rows, columns = granules(seqlen_q), granules(seqlen_k)
    mask = np.zeros((batch, heads, rows * GRANULE, columns * GRANULE), bool)
    for b, h in np.ndindex(batch, heads):
        of_granules = words[b, h, : rows * columns]
        bits = words[b, h, layout.bits_at(seqlen_q, seqlen_k) :].reshape(-1, BITS)[:, : BITS // 2]
        blocks = np.repeat(of_granules == FULL, GRANULE * GRANULE).reshape(-1, GRANULE, GRANULE)
        partial = of_granules >= PARTIAL
        chosen = np.ascontiguousarray(bits[of_granules[partial] - PARTIAL], "<i4").view(np.uint8)
        blocks[partial] = np.unpackbits(chosen, axis=-1, bitorder="little").reshape(-1, GRANULE, GRANULE).astype(bool)
        mask[b, h] = blocks.reshape(rows, columns, GRANULE, GRANULE).swapaxes(1, 2).reshape(rows * GRANULE, columns * GRANULE)
    return mask[:, :, :seqlen_q, :seqlen_k]


def visible_pairs(words, shape) -> int:
    """Pairs of a query and a key that the mask shows, over batch entries and heads that it tells apart."""
    batch, heads, seqlen_q, seqlen_k = shape
    rows, columns = granules(seqlen_q), granules(seqlen_k)
    sizes = (_sizes(seqlen_q, 0, rows)[:, None] * _sizes(seqlen_k, 0, columns)).reshape(-1)
    total = 0
    for b, h in np.ndindex(batch, heads):
        of_granules = words[b, h, : rows * columns]
        total += int(sizes[of_granules == FULL].sum())
        numbers = of_granules[of_granules >= PARTIAL] - PARTIAL
        bits = words[b, h, layout.bits_at(seqlen_q, seqlen_k) :].reshape(-1, BITS)[numbers, : BITS // 2]
        total += int(_ONES[np.ascontiguousarray(bits).view(np.uint8)].sum())
    return total


_ONES = np.array([bin(n).count("1") for n in range(256)], np.int64)
"""Bits of a byte; NumPy counts them itself from 2.0 on."""
