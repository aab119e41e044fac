"""Hopper and CUDA instructions as Numba intrinsics: one file a hardware concept.

Shared-memory addresses are 32-bit integers in the ``shared`` window, global addresses 64-bit integers.
"""
