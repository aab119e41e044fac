"""Masks by blocks: which blocks of queries and keys have anything to compute, found on the device, for every GPU family.

A *granule* is 64 queries by 64 keys. Its word says what a mask has there: `EMPTY`, `FULL`, or from `PARTIAL` on the number of its bits. `layout`
says where words and bits lie, `summary` finds the words of a mask of bool, `lists` makes of them the blocks that a kernel's tile steps through,
`build` makes a `numbaflash.BlockMask`, and `host` does that in NumPy.
"""
