"""What `by_keys` and `by_columns` hand to the kernel: what the consumers do with a tile, step by step."""

from __future__ import annotations

from collections import namedtuple

Work = namedtuple("Work", "prepare zero_dk zero_dv enter masked_step plain_step finish leave enters_with_a_step clean_keys")
"""A step is a block of queries of one head. What is done with a tile:

- ``prepare(...) -> my``: what a step needs beside its state;
- ``enter(dk, dv, place, m, member, number, ring, sums, my) -> (carried, dk, dv, place)``: before the first step, or with ``enters_with_a_step`` the
  first;
- ``masked_step`` and ``plain_step(carried, dk, dv, place, m, member, number, ring, sums, my)``, with the same results;
- ``finish(carried, dk, dv, place, ring, my) -> (dk, dv, place)``: after the last step;
- ``leave(...)``: dK and dV are stored;
- ``clean_keys(...)``: `unseen.keys`, or None.

``carried`` is what a step leaves to the next, ``m`` the block in its head and ``number`` over all heads, ``member`` the head among those that share
the keys.
"""
