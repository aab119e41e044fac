"""Calls for the elements of a ``vmap``: one for all of them, where they can join the batch, or one after the other.

Operands lie row-major in memory with the axes of ``vmap`` first, each of full size, or 1 where every element has the same. Elements that join the
batch are further batch entries, which a mask, for example, must count as well. Dropout draws by the number of the batch entry: were elements to
join, each would be dropped as no call by itself would drop it.
"""

from __future__ import annotations

import math

from ..dispatch import contiguous_strides

__all__ = ["join", "steps"]

_AXES = {"mask": 4, "block_mask": 3, "bias": 4, "alibi_slopes": 2}
"""Options whose first axes may be missing."""


def join(shapes: dict[str, tuple[int, ...]], axes: tuple[int, ...], dropout: bool) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the operands of one call for all elements, None where there is no such call.

    Parameters
    ----------
    shapes : dict of str to tuple of int
        Of every operand, gradients among them, with the axes of ``vmap`` first.
    axes : tuple of int
        Full sizes of those axes.
    dropout : bool
        Whether weights are dropped.
    """
    elements = math.prod(axes)
    if elements == 1:
        return {name: shape[len(axes) :] for name, shape in shapes.items()}
    if dropout:
        return None
    batch = shapes["q"][len(axes)]
    joined = {}
    for name, shape in shapes.items():
        outer, own = shape[: len(axes)], shape[len(axes) :]
        primal = name.removeprefix("d")
        own = (1,) * (_AXES.get(primal, 0) - len(own)) + own
        if outer == axes and primal != "sinks" and own[0] == batch:
            joined[name] = (elements * batch, *own[1:])
        elif math.prod(outer) == 1 and (primal == "sinks" or (primal in _AXES and own[0] == 1)):
            joined[name] = own[1:] if primal == "alibi_slopes" else own
        else:
            return None
    return joined if joined.get("dbias") in (None, joined.get("bias")) else None  # a shared bias has a gradient for each element


def steps(shape: tuple[int, ...], axes: int, itemsize: int) -> tuple[int, ...]:
    """Bytes from an operand's element to the next one, along each of the first ``axes`` axes; 0 where every element has the same."""
    return tuple(0 if n == 1 else step for n, step in zip(shape[:axes], contiguous_strides(shape, itemsize), strict=False))
