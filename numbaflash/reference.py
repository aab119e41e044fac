"""The contract in float64 NumPy: what every kernel must compute. Slow, plain, and of size Sq x Sk.

For each batch entry and query head,

    ``score = softcap(scale * q @ k.T) + alibi + bias``, -inf where the query may not see the key,
    ``weights = exp(score - lse)`` with ``lse = log(sum(exp(score)) + exp(sink))``,
    ``out = (weights * kept / (1 - dropout)) @ v``,

where ``softcap(x) = c * tanh(x / c)`` and ``alibi = -slope * abs(i + offset - j)``. What a query may see is decided by the band (causal, window),
the mask and the lengths, and by nothing else: a score of -inf, of a bias for example, is a weight of 0 for a key that is seen. What no query
sees is selected away, never multiplied by 0. Packed sequences are the entries of a padded batch, with their lengths, and pages are brought together
to contiguous caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .block_mask import BlockMask
from .problem import DROPOUT_STEPS, MASKS, NEEDS, PACKED, PAGE_TABLE, Problem


def forward(problem: Problem, q, k, v, *, seed: int = 0, **options) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64.

    Parameters
    ----------
    problem : Problem
    q, k, v : array_like
        Shapes of the problem, any float dtype.
    seed : int
        Of dropout, from 0 to below 2**64.
    **options : array_like
        The arrays that `Problem.options` names, of the shapes that the user gave or those of `Problem.shape_of`: mask, block_mask (a `BlockMask`, or
        the array of bool that it stands for), bias, alibi_slopes, sinks, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, page_table.

    Returns
    -------
    out : ndarray, (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v) of packed sequences, float64
    lse : ndarray, (batch, heads, seqlen_q), or (heads, total_q), float64
        Natural logarithm of the sum of exponentiated scores, the sink's included, before dropout. -inf in a row beyond its length, and in one
        that sees no key (or only scores of -inf) where there is no sink; out is 0 there, and in a row that has nothing but a sink.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    options = check_options(problem, options)
    if problem.packed:
        packing = Packing.of(problem, options)
        out, lse = forward(packing.padded, *packing.pad(q=q, k=k, v=v), seed=seed, **packing.options)
        return packing.rows(out, "q", 0.0), packing.rows(lse.transpose(0, 2, 1), "q", -np.inf).T
    if problem.paged:
        problem, k, v = without_pages(problem, k, v, options.pop(PAGE_TABLE))
    out = np.zeros(problem.out_shape)
    lse = np.full(problem.lse_shape, -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):  # what is masked out may hold anything; what is seen propagates
        for b, h in np.ndindex(problem.batch, problem.heads):
            row = _softmax(problem, b, h, q, k, options)
            lse[b, h] = row.lse
            weights = row.weights * kept(problem, b, h, seed)
            out[b, :, h] = _weighted_sum(weights, row.pairs, v[b, :, h // problem.group])
    return out, lse


def backward(problem: Problem, dout, q, k, v, dlse=None, *, seed: int = 0, **options) -> tuple[np.ndarray, ...]:
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
    seed : int
        Of dropout, as in the forward.
    **options : array_like
        As in `forward`.

    Returns
    -------
    dq : ndarray, (batch, seqlen_q, heads, head_dim), float64
    dk : ndarray, (batch, seqlen_k, kv_heads, head_dim), float64
        Summed over the query heads that share a key head.
    dv : ndarray, (batch, seqlen_k, kv_heads, head_dim_v), float64
    dbias : ndarray, the 4 axes of `Problem.bias`, float64, only with a bias
        Summed over the axes along which the bias is broadcast.
    dsinks : ndarray, (heads,), float64, only with sinks
        A row that sees no key has the sink for its LSE, and so passes ``dlse`` on to it.
    """
    dout, q, k, v = (np.asarray(x, dtype=np.float64) for x in (dout, q, k, v))
    dlse = np.zeros(problem.lse_shape) if dlse is None else np.asarray(dlse, dtype=np.float64)
    if problem.packed:
        packing = Packing.of(problem, check_options(problem, options))
        (dlse,) = packing.pad(q=dlse.T)
        gradients = backward(packing.padded, *packing.pad(q=dout), *packing.pad(q=q, k=k, v=v), dlse.transpose(0, 2, 1), seed=seed, **packing.options)
        return *(packing.rows(x, name, 0.0) for name, x in zip("qkk", gradients[:3], strict=True)), *gradients[3:]
    out, _ = forward(problem, q, k, v, seed=seed, **options)
    options = check_options(problem, options)
    gradients = {name: np.zeros(problem.shape_of(name)) for name in problem.gradients}
    dq, dk, dv = (gradients[name] for name in NEEDS)
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h in np.ndindex(problem.batch, problem.heads):
            hk = h // problem.group
            row, keep = _softmax(problem, b, h, q, k, options), kept(problem, b, h, seed)
            dweights = (dout[b, :, h] @ v[b, :, hk].T) * keep
            delta = (dout[b, :, h] * out[b, :, h]).sum(axis=1) - dlse[b, h]
            dscore = np.where(row.pairs, row.weights * (dweights - delta[:, None]), 0.0)
            dproduct = np.where(row.pairs, dscore * row.slope, 0.0)
            dq[b, :, h] = problem.scale * _weighted_sum(dproduct, row.pairs, k[b, :, hk])
            dk[b, :, hk] += problem.scale * _weighted_sum(dproduct.T, row.pairs.T, q[b, :, h])
            dv[b, :, hk] += _weighted_sum((row.weights * keep).T, row.pairs.T, dout[b, :, h])
            if problem.bias:
                _add_to_broadcast(gradients["bias"], b, h, dscore)
            if problem.sinks:
                gradients["sinks"][h] -= np.where(row.alive, row.sink_weights * delta, 0.0).sum()
    return tuple(gradients.values())


def check_options(problem: Problem, options: dict) -> dict:
    """The arrays in float64 (mask and lengths: bool and int) with the axes of `Problem.shape_of`; ValueError when they are not the problem's."""
    check_names(problem, options)
    options = dict(options)
    block_mask = options.pop("block_mask", None)
    kinds = {"mask": bool, **dict.fromkeys(("seqlens_q", "seqlens_k", PAGE_TABLE, *PACKED), np.int64)}
    found = {name: np.asarray(x).astype(kinds.get(name, np.float64)).reshape(problem.shape_of(name)) for name, x in options.items()}
    if block_mask is not None:
        dense = np.asarray(block_mask.to_dense() if isinstance(block_mask, BlockMask) else block_mask).astype(bool)
        lengths = problem.seqlen_q, problem.seqlen_k
        own = (1,) * (4 - dense.ndim) + dense.shape
        found["block_mask"] = np.broadcast_to(dense.reshape(own), (*own[:2], *lengths))
    return found


def check_names(problem: Problem, options) -> None:
    if set(options) != set(problem.options):
        raise ValueError(f"the problem has the options {', '.join(problem.options) or 'none'}; got {', '.join(options) or 'none'}")


@dataclass(frozen=True)
class Packing:
    """Where packed sequences lie, and the padded problem that they are: ``bounds`` of the sequences of "q" and "k", and its options."""

    padded: Problem
    bounds: dict[str, np.ndarray]
    totals: dict[str, int]
    options: dict

    @classmethod
    def of(cls, problem: Problem, options: dict) -> Packing:
        totals = {"q": problem.total_q, "k": problem.total_k}
        bounds = {name: boundaries(options[f"cu_seqlens_{name}"], total) for name, total in totals.items()}
        lengths = {name: np.diff(each) for name, each in bounds.items()}
        sizes = {f"seqlen_{name}": int(each.max(initial=0)) for name, each in lengths.items()}
        nothing = {"cu_seqlens_q": None, "cu_seqlens_k": None, "total_q": 0, "total_k": 0}
        padded = replace(problem, **sizes, **nothing, seqlens_q="int64", seqlens_k="int64")
        others = {name: x for name, x in options.items() if name not in PACKED}
        return cls(padded, bounds, totals, others | {f"seqlens_{name}": each for name, each in lengths.items()})

    def pad(self, **arrays) -> list[np.ndarray]:
        """(batch, seqlen, ...) of (total, ...), zeros in the padding."""
        padded = []
        for name, x in arrays.items():
            bounds, x = self.bounds["q" if name == "q" else "k"], np.asarray(x, np.float64)
            entries = np.zeros((len(bounds) - 1, int(np.diff(bounds).max(initial=0)), *x.shape[1:]))
            for entry, first, end in zip(entries, bounds, bounds[1:], strict=False):
                entry[: end - first] = x[first:end]
            padded.append(entries)
        return padded

    def rows(self, entries, name: str, nobody: float) -> np.ndarray:
        """The opposite, with ``nobody`` in rows of no sequence."""
        bounds = self.bounds[name]
        x = np.full((self.totals[name], *entries.shape[2:]), nobody)
        for entry, first, end in zip(entries, bounds, bounds[1:], strict=False):
            x[first:end] = entry[: end - first]
        return x


def boundaries(cu_seqlens, total: int) -> np.ndarray:
    """Where sequences begin and end, whatever the numbers are: within the rows, and all of them empty where the numbers descend."""
    bounds = np.clip(np.asarray(cu_seqlens, np.int64), 0, total)
    return bounds if (np.diff(bounds) >= 0).all() else np.zeros_like(bounds)


def without_pages(problem: Problem, k, v, page_table) -> tuple[Problem, np.ndarray, np.ndarray]:
    """The same problem of contiguous caches, and these; page numbers that are no page count as the nearest one."""
    pages = pages_of(problem, page_table)
    k, v = (np.asarray(x)[pages].reshape(problem.batch, problem.seqlen_k, *x.shape[2:]) for x in (k, v))
    return replace(problem, pages=0, page_size=0, max_pages=0), k, v


def pages_of(problem: Problem, page_table) -> np.ndarray:
    """The page that each entry of the table stands for; none where there is no page at all."""
    return np.clip(np.asarray(page_table, np.int64)[:, : problem.seqlen_k // problem.page_size], 0, max(problem.pages - 1, 0))


def lengths(problem: Problem, b: int, seqlens_q=None, seqlens_k=None, **_) -> tuple[int, int]:
    """Queries and keys of a batch entry that take part."""
    full = problem.seqlen_q, problem.seqlen_k
    return tuple(n if given is None else min(max(int(given[b]), 0), n) for n, given in zip(full, (seqlens_q, seqlens_k), strict=True))


def _place(problem, b, options):
    """(seqlen_q, 1): the key beside which each query stands."""
    length_q, length_k = lengths(problem, b, **options)
    return np.arange(problem.seqlen_q)[:, None] + (length_k - length_q if problem.offset_per_entry else problem.offset)


def visible(problem: Problem, b: int = 0, h: int = 0, **options) -> np.ndarray:
    """Boolean (seqlen_q, seqlen_k): True where the query may see the key, in a batch entry and a head; ``options`` as `forward` takes them."""
    options = check_options(problem, options)
    length_q, length_k = lengths(problem, b, **options)
    i, j = np.ogrid[: problem.seqlen_q, : problem.seqlen_k]
    place = _place(problem, b, options)
    seen = (i < length_q) & (j < length_k)
    if problem.left is not None:
        seen &= j >= place - problem.left
    if problem.right is not None:
        seen &= j <= place + problem.right
    for name in MASKS:
        if name in options:
            seen &= _of_head(options[name], b, h)
    return seen


def _of_head(array, b, h):
    """The last axes of an array whose first two are batch and heads, or 1."""
    return array[b if array.shape[0] > 1 else 0, h if array.shape[1] > 1 else 0]


@dataclass(frozen=True)
class _Softmax:
    """Of one head. ``alive``: rows of a finite sum; ``pairs``: what they see; ``slope``: derivative of the score by ``scale * q @ k.T``."""

    weights: np.ndarray
    lse: np.ndarray
    alive: np.ndarray
    pairs: np.ndarray
    slope: np.ndarray | float
    sink_weights: np.ndarray | None


def _softmax(problem, b, h, q, k, options):
    seen = visible(problem, b, h, **options)
    score, slope = problem.scale * (q[b, :, h] @ k[b, :, h // problem.group].T), 1.0
    if problem.softcap is not None:
        capped = np.tanh(score / problem.softcap)
        score, slope = problem.softcap * capped, 1.0 - capped * capped
    if problem.alibi:
        distance = np.abs(_place(problem, b, options) - np.arange(problem.seqlen_k))
        score = score - options["alibi_slopes"][b if problem.alibi[0] > 1 else 0, h] * distance
    if problem.bias:
        score = score + _of_head(options["bias"], b, h)
    score = np.where(seen, score, -np.inf)
    sink = np.full(problem.seqlen_q, -np.inf)
    if problem.sinks:
        sink[: lengths(problem, b, **options)[0]] = options["sinks"][h]

    top = np.maximum(score.max(axis=1, initial=-np.inf), sink)
    top = np.where(top == -np.inf, 0.0, top)
    p, of_sink = np.exp(score - top[:, None]), np.exp(sink - top)
    total = p.sum(axis=1) + of_sink
    alive = total != 0.0  # not so where nothing is seen, or every score is -inf
    divisor = np.where(alive, total, 1.0)
    pairs = seen & alive[:, None]
    return _Softmax(
        weights=np.where(pairs, p / divisor[:, None], 0.0),  # not NaN for what is hidden in a row that sees a NaN
        lse=np.where(alive, top + np.log(divisor), -np.inf),
        alive=alive,
        pairs=pairs,
        slope=slope,
        sink_weights=of_sink / divisor,
    )


def kept(problem: Problem, b: int, h: int, seed: int, rows: slice = slice(None)) -> np.ndarray:
    """(seqlen_q, seqlen_k), or some rows of it: what dropout multiplies the weights by, 0 or ``1 / (1 - dropout)``.

    Philox counts blocks of 16 pairs, each of which has six bits of its own and eight of others behind them: `numbaflash.kernels.dropout` says how,
    and why.
    """
    if not problem.dropout:
        return np.ones((problem.seqlen_q, problem.seqlen_k))[rows]
    i, j = np.indices((problem.seqlen_q, problem.seqlen_k), np.uint32)[:, rows]
    words = philox((j // 32 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, np.full_like(i, h), np.full_like(i, b)), seed)
    n, byte = j // 8 % 4, i // 8 % 2 * 2 + j % 2
    mine = np.choose(n, words) >> 8 * byte & 63
    other, last = np.where(n < 2, words[2], words[0]), np.where(n < 2, words[3], words[1])
    second = (other >> 8 * byte ^ last >> 8 * ((byte + n % 2) % 4)) & 255
    return np.where(mine << 8 | second >= problem.dropout * DROPOUT_STEPS, 1.0 / (1.0 - problem.dropout), 0.0)


def philox(counter, seed: int) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), element by element.

    Parameters
    ----------
    counter : sequence of four uint32 arrays
    seed : int
        64 bits, of which the low word is the first one of the key.

    Returns
    -------
    four uint32 arrays
    """
    a, b, c, d = (np.asarray(x, np.uint64) for x in counter)
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    for n in range(10):
        key = ((seed & 0xFFFFFFFF) + n * 0x9E3779B9) & 0xFFFFFFFF, ((seed >> 32) + n * 0xBB67AE85) & 0xFFFFFFFF
        one, two = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (two >> high) ^ b ^ np.uint64(key[0]), two & low, (one >> high) ^ d ^ np.uint64(key[1]), one & low
    return tuple(x.astype(np.uint32) for x in (a, b, c, d))


def _add_to_broadcast(total, b, h, values):
    """Add what belongs to one head to an array that may have 1 in the place of any axis."""
    for axis in (0, 1):
        if total.shape[2 + axis] == 1:
            values = values.sum(axis=axis, keepdims=True)
    total[b if total.shape[0] > 1 else 0, h if total.shape[1] > 1 else 0] += values


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
