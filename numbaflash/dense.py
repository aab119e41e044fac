"""Attention with the whole matrix of scores, of size seqlen_q x seqlen_k a head, in memory once: what time and memory are set beside."""

from __future__ import annotations

import numpy as np


def dense_arrays(xp, q, k, v, seen, scale):
    """``softmax(scale * q @ k.T) @ v``; 16-bit elements are computed in float32.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    q : array, (batch, seqlen_q, heads, head_dim)
    k : array, (batch, seqlen_k, kv_heads, head_dim)
    v : array, (batch, seqlen_k, kv_heads, head_dim_v)
    seen : array of bool, broadcast to (batch, heads, seqlen_q, seqlen_k), or None
        True where a query sees a key; each sees one at least.
    scale : float

    Returns
    -------
    array, (batch, seqlen_q, heads, head_dim_v)
    """
    if q.dtype.itemsize == 2:
        q, k, v = (x.astype(xp.float32) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(0, 2, 1, 3), xp.repeat(k.transpose(0, 2, 3, 1), group, 1), xp.repeat(v.transpose(0, 2, 1, 3), group, 1)
    score = xp.matmul(q, k)
    score *= q.dtype.type(scale)
    if seen is not None:
        xp.copyto(score, q.dtype.type(-np.inf), where=~seen)
    score -= score.max(-1, keepdims=True)
    xp.exp(score, out=score)
    score /= score.sum(-1, keepdims=True)
    return xp.matmul(score, v).transpose(0, 2, 1, 3)
