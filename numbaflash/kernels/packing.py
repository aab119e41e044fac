"""How the tiles of packed sequences are numbered, for the host (nothing here imports numba.cuda, which loads the driver).

Tile t of the sequence that begins at row r has the number ``r // tile + e + t``, e counting the sequences from 1. No two tiles have one number, and
no sum over the sequences is needed. Rows before the first sequence and after the last are two more entries, 0 and ``batch + 1``.
"""

from __future__ import annotations


def most_tiles(rows: int, batch: int, tile: int) -> int:
    """How many numbers there are for the tiles of a head."""
    return rows // tile + batch + 2
