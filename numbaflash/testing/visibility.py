"""Which queries see which keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import reference
from ..problem import PAGE_TABLE, Problem


def touched(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Boolean (seqlen_q,) and (seqlen_k,): queries whose band holds a key, keys that lie in the band of a query, at full lengths."""
    i = np.arange(problem.seqlen_q) + problem.offset
    lo = np.zeros_like(i) if problem.left is None else np.maximum(i - problem.left, 0)
    hi = np.full_like(i, problem.seqlen_k) if problem.right is None else np.minimum(i + problem.right + 1, problem.seqlen_k)
    sees = hi > lo
    edges = np.zeros(problem.seqlen_k + 1, np.int64)
    np.add.at(edges, lo[sees], 1)
    np.add.at(edges, hi[sees], -1)
    return sees, np.cumsum(edges)[: problem.seqlen_k] > 0


def visible_pairs(problem: Problem, **options) -> np.ndarray:
    """Boolean (batch, heads, seqlen_q, seqlen_k): which query sees which key; ``options`` as `numbaflash.reference.forward` takes them."""
    seen = np.empty((problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k), bool)
    arrays = _arrays(problem, options)
    for b, h in np.ndindex(problem.batch, problem.heads):
        seen[b, h] = reference.visible(problem, b, h, **arrays)
    return seen


def taking_part(problem: Problem, **options) -> tuple[np.ndarray, np.ndarray]:
    """Boolean (batch, seqlen_q, heads) and (batch, seqlen_k, kv_heads), or (total, heads) of packed sequences and (pages, page_size, kv_heads) of
    paged caches: queries that see a key, keys that a query of their group sees."""
    if problem.packed:
        packing = reference.Packing.of(problem, reference.check_options(problem, _arrays(problem, options)))
        return tuple(packing.rows(x, name, False) for x, name in zip(taking_part(packing.padded, **packing.options), "qk", strict=True))
    if problem.paged:
        pages = reference.pages_of(problem, options[PAGE_TABLE])
        contiguous = replace(problem, pages=0, page_size=0, max_pages=0)
        queries, seen = taking_part(contiguous, **{name: x for name, x in options.items() if name != PAGE_TABLE})
        keys = np.zeros(problem.k_shape[:3], bool)
        np.logical_or.at(keys, pages, seen.reshape(*pages.shape, problem.page_size, problem.kv_heads))
        return queries, keys
    if not {"mask", "seqlens_q", "seqlens_k"} & set(problem.options):
        queries, keys = touched(problem)
        return np.broadcast_to(queries[:, None], problem.q_shape[:3]), np.broadcast_to(keys[:, None], problem.k_shape[:3])
    seen = visible_pairs(problem, **options)
    keys = seen.any(axis=2).reshape(problem.batch, problem.kv_heads, problem.group, problem.seqlen_k).any(axis=2)
    return np.moveaxis(seen.any(axis=3), 2, 1), np.moveaxis(keys, 2, 1)


def _arrays(problem, options):
    return {name: options[name] for name in problem.options}


def rows_within_lengths(problem: Problem, **options) -> np.ndarray:
    """Boolean (batch, seqlen_q, heads), or (total_q, heads): queries that are no padding, or a sequence's."""
    if problem.packed:
        packing = reference.Packing.of(problem, reference.check_options(problem, _arrays(problem, options)))
        return packing.rows(rows_within_lengths(packing.padded, **packing.options), "q", False)
    ends = np.array([reference.lengths(problem, b, **options)[0] for b in range(problem.batch)], np.int64)
    return np.broadcast_to((np.arange(problem.seqlen_q) < ends[:, None])[..., None], problem.q_shape[:3])
