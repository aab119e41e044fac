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
