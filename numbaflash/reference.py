"""The contract in float64 NumPy: what every kernel must compute. Slow, plain, and of size Sq x Sk."""

from __future__ import annotations

import numpy as np

from .problem import Problem


def visible(problem: Problem) -> np.ndarray:
    """Boolean (seqlen_q, seqlen_k): True where the query may see the key."""
    i = np.arange(problem.seqlen_q)[:, None] + problem.offset
    j = np.arange(problem.seqlen_k)[None, :]
    seen = np.ones((problem.seqlen_q, problem.seqlen_k), bool)
    if problem.left is not None:
        seen &= j >= i - problem.left
    if problem.right is not None:
        seen &= j <= i + problem.right
    return seen


def forward(problem: Problem, q, k, v) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64.

    Parameters
    ----------
    problem : Problem
    q, k, v : array_like
        Shapes of the problem, any float dtype.

    Returns
    -------
    out : ndarray, (batch, seqlen_q, heads, head_dim_v), float64
    lse : ndarray, (batch, heads, seqlen_q), float64
        Natural logarithm of the sum of exponentiated scores; -inf in a row that sees no key (or only scores of -inf), where out is 0.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    seen = visible(problem)
    out = np.zeros(problem.out_shape)
    lse = np.full(problem.lse_shape, -np.inf)
    if not problem.seqlen_k:
        return out, lse
    with np.errstate(invalid="ignore", over="ignore"):  # what is masked out may hold anything; what is seen propagates
        for b in range(problem.batch):
            for h in range(problem.heads):
                hk = h // problem.group
                score = np.where(seen, problem.scale * (q[b, :, h] @ k[b, :, hk].T), -np.inf)
                top = score.max(axis=1, keepdims=True)
                top = np.where(top == -np.inf, 0.0, top)
                p = np.exp(score - top)
                total = p.sum(axis=1, keepdims=True)
                rows = total[:, 0] != 0.0  # nothing seen, or every score -inf
                with np.errstate(divide="ignore"):
                    lse[b, h] = np.where(rows, (top + np.log(total))[:, 0], -np.inf)
                weights = p / np.where(rows[:, None], total, 1.0)
                out[b, :, h] = _weighted_sum(weights, seen, v[b, :, hk])
    return out, lse


def backward(problem: Problem, dout, q, k, v, dlse=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of attention in float64.

    Parameters
    ----------
    problem : Problem
    dout : array_like, (batch, seqlen_q, heads, head_dim_v)
        Gradient of the loss with respect to ``out``.
    q, k, v : array_like
        Shapes of the problem, any float dtype.
    dlse : array_like, (batch, heads, seqlen_q), optional
        Gradient of the loss with respect to ``lse``; none is 0.

    Returns
    -------
    dq : ndarray, (batch, seqlen_q, heads, head_dim), float64
    dk : ndarray, (batch, seqlen_k, kv_heads, head_dim), float64
        Summed over the query heads that share a key head.
    dv : ndarray, (batch, seqlen_k, kv_heads, head_dim_v), float64
    """
    dout, q, k, v = (np.asarray(x, dtype=np.float64) for x in (dout, q, k, v))
    seen = visible(problem)
    dq, dk, dv = np.zeros(problem.q_shape), np.zeros(problem.k_shape), np.zeros(problem.v_shape)
    if not problem.seqlen_k:
        return dq, dk, dv
    out, lse = forward(problem, q, k, v)
    dlse = np.zeros(problem.lse_shape) if dlse is None else np.asarray(dlse, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for b in range(problem.batch):
            for h in range(problem.heads):
                hk = h // problem.group
                rows = lse[b, h] != -np.inf
                pairs = seen & rows[:, None]
                score = problem.scale * (q[b, :, h] @ k[b, :, hk].T)
                p = np.where(pairs, np.exp(score - np.where(rows, lse[b, h], 0.0)[:, None]), 0.0)
                dp = dout[b, :, h] @ v[b, :, hk].T
                delta = (dout[b, :, h] * out[b, :, h]).sum(axis=1) - dlse[b, h]
                ds = np.where(pairs, p * (dp - delta[:, None]), 0.0)
                dq[b, :, h] = problem.scale * _weighted_sum(ds, pairs, k[b, :, hk])
                dk[b, :, hk] += problem.scale * _weighted_sum(ds.T, pairs.T, q[b, :, h])
                dv[b, :, hk] += _weighted_sum(p.T, pairs.T, dout[b, :, h])
    return dq, dk, dv


def _weighted_sum(weights, seen, values):
    """weights @ values, where an unseen value that is not finite takes no part (0 * nan is nan)."""
    if np.isfinite(values).all():
        return weights @ values
    finite = np.where(np.isfinite(values), values, 0.0)
    out = weights @ finite
    for row, col in zip(*np.nonzero(~np.isfinite(values) & seen.any(axis=0)[:, None]), strict=True):
        sees = seen[:, row]
        out[sees, col] += weights[sees, row] * values[row, col]
    return out
