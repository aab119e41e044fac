"""Where words and bits of granules lie, for the host (nothing here imports numba.cuda, which loads the driver).

The words of one mask, one of each batch entry and head that it tells apart, are those of its granules row by row, filled up to `ALIGNMENT`, and
then `BITS` for each partial granule: two for each of its queries, whose bits are keys, and the same transposed, two for each key.
"""

from __future__ import annotations

from ...problem import GRANULE

EMPTY, FULL, PARTIAL = 0, 1, 2
"""Words of granules; the bits of a partial one are number ``word - PARTIAL``."""

BITS = 4 * GRANULE
"""Words of a partial granule: `GRANULE` bits are two words."""

ALIGNMENT = 64
"""Words before the bits are a multiple of it: a granule's bits begin at a multiple of 256 bytes from the first word."""


LIST_START, LIST_ENDS = 2, 2
"""Words before the first entry of a list, and after the last one, so that one can be read ahead."""


def words_of_list(blocks: int) -> int:
    """Room for a list of so many blocks, its count and its ends on both sides."""
    return LIST_START + blocks + LIST_ENDS


def granules(length: int) -> int:
    """Granules along an axis."""
    return -(-length // GRANULE)


def bits_at(seqlen_q: int, seqlen_k: int) -> int:
    """Words before the bits."""
    return max(ALIGNMENT, -(-granules(seqlen_q) * granules(seqlen_k) // ALIGNMENT) * ALIGNMENT)


def capacity(partial: int) -> int:
    """Room for so many partial granules: somewhat more, so that masks of about one size have words of one shape, and calls with them are of one
    kind."""
    step = max(1, 1 << max(0, partial.bit_length() - 3))
    return -(-partial // step) * step


def words(seqlen_q: int, seqlen_k: int, partial: int) -> int:
    """Words of a mask with so many partial granules."""
    return bits_at(seqlen_q, seqlen_k) + capacity(partial) * BITS
