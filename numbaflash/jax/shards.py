"""Values inside of a ``shard_map``: JAX keeps track of the axes along which devices have different ones."""

from __future__ import annotations

import jax


def varying_alike(*arrays):
    """Arrays that are the same on every device beside ones that are not count as different too: their gradients are then summed over devices."""
    every = frozenset().union(*map(_varying, arrays))
    return tuple(_vary(x, tuple(every - _varying(x))) for x in arrays)


def _varying(x) -> frozenset:
    """The axes of a shard_map along which devices have different values of ``x``."""
    kind = jax.typeof(x) if hasattr(jax, "typeof") else None
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", frozenset())


def _vary(x, axes):
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)
