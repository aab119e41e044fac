"""Nested tensors with ``layout=torch.jagged``, (batch, ragged, heads, head_dim): their values are packed sequences, their offsets the boundaries."""

from __future__ import annotations

import torch

from ..problem import NEEDS


def packed_of(q, k, v, more):
    """(q, k and v packed, the options that are tensors, boundaries among them) of nested q, k and v.

    Raises
    ------
    TypeError
        For tensors among them that are not nested, or in another layout.
    ValueError
        For other axes, gaps between the sequences, values that are not as long as the keys, and options that nested tensors do not have.
    """
    for name, x in zip(NEEDS, (q, k, v), strict=True):
        if not (isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.jagged):
            got = f"a nested tensor with layout={x.layout}" if getattr(x, "is_nested", False) else type(x).__name__
            raise TypeError(f"{name} must be a nested tensor with layout=torch.jagged, as q, k and v are all or none; got {got}")
        if x.dim() != 4 or x._ragged_idx != 1:
            raise ValueError(f"{name} must have the axes (batch, ragged sequence, heads, head_dim); got shape {tuple(x.shape)}")
        if x.lengths() is not None:
            raise ValueError(f"{name} must be contiguous: its sequences have gaps between them. Call {name}.contiguous() first")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v must have the sequence lengths of k, made from the same offsets; got {tuple(v.shape)} and {tuple(k.shape)}")
    for name in ("mask", "bias", "seqlens_q", "seqlens_k"):
        if more[name] is not None:
            raise ValueError(f"{name} is not for nested tensors, whose sequences have lengths of their own; leave it out")
    boundaries = {"cu_seqlens_q": q.offsets(), "cu_seqlens_k": k.offsets()}
    return (q.values(), k.values(), v.values()), {"alibi_slopes": more["alibi_slopes"], "sinks": more["sinks"]} | boundaries
