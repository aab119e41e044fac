"""Problems of packed sequences, and the checks of their boundaries."""

from __future__ import annotations

from .checks import check_max_seqlen
from .description import Problem
from .names import LENGTH_DTYPES, MAX_SEQLEN
from .plain import band, describe
from .shapes import check_axes, check_dtypes, check_equal, check_heads, check_sizes, check_slopes


def make_packed_problem(
    q_shape,
    k_shape,
    v_shape,
    dtypes,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0.0,
) -> Problem:
    """`make_problem` for packed sequences.

    Parameters
    ----------
    q_shape, k_shape, v_shape : tuple of int
        (total_q, heads, head_dim), (total_k, kv_heads, head_dim) and (total_k, kv_heads, head_dim_v).
    dtypes : sequence of str
        dtype names of q, k and v.
    cu_seqlens_q, cu_seqlens_k : (tuple of int, str)
        Shape and dtype: (batch + 1,), int32 or int64.
    max_seqlen_q, max_seqlen_k : int, optional
        How long the longest sequence is, as far as the caller knows.
    scale, causal, window, softcap, dropout
        As `make_problem` takes them.
    alibi_slopes, sinks : (tuple of int, str), optional
        Likewise; a batch entry is a sequence.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    """
    dtype = check_dtypes(dtypes)
    check_axes("q", q_shape, "(total_q, heads, head_dim)")
    check_axes("k", k_shape, "(total_k, kv_heads, head_dim)")
    check_axes("v", v_shape, "(total_k, kv_heads, head_dim_v)")
    total_q, heads, head_dim = (int(n) for n in q_shape)
    total_k, kv_heads, _ = (int(n) for n in k_shape)
    head_dim_v = int(v_shape[2])
    check_equal("head_dim (axis 2)", "k", k_shape[2], "q", head_dim)
    check_equal("total_k (axis 0)", "v", v_shape[0], "k", total_k)
    check_equal("kv_heads (axis 1)", "v", v_shape[1], "k", kv_heads)
    check_heads(heads, kv_heads)
    check_sizes(2, head_dim, head_dim_v, 0, total_q, total_k)
    batch = _check_boundaries(cu_seqlens_q, cu_seqlens_k)
    seqlen_q, seqlen_k = (
        -(-total // max(batch, 1)) if given is None else min(max(check_max_seqlen(name, given), 1), total)
        for name, given, total in (("max_seqlen_q", max_seqlen_q, total_q), ("max_seqlen_k", max_seqlen_k, total_k))
    )
    alibi = None if alibi_slopes is None else check_slopes(alibi_slopes, batch, heads)
    # No sequence brings a pair further from its place than one of all rows would.
    _, left, right, lengths_matter = band(total_q, total_k, causal, window, alibi is not None)
    return describe(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
        offset=seqlen_k - seqlen_q if lengths_matter else 0,
        left=left,
        right=right,
        offset_per_entry=lengths_matter,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        dropout=dropout,
        cu_seqlens_q=cu_seqlens_q[1],
        cu_seqlens_k=cu_seqlens_k[1],
        total_q=total_q,
        total_k=total_k,
    )


def _check_boundaries(cu_seqlens_q, cu_seqlens_k) -> int:
    """The number of sequences."""
    for name, (shape, dtype) in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if dtype not in LENGTH_DTYPES:
            raise TypeError(f"{name} must be int32 or int64; got dtype {dtype}")
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"{name} must have shape (batch + 1,): where each sequence begins, and where the last one ends; got {tuple(shape)}")
    (n_q,), (n_k,) = cu_seqlens_q[0], cu_seqlens_k[0]
    if n_q != n_k:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one shape, (batch + 1,); got {(n_q,)} and {(n_k,)}")
    if n_q - 1 > MAX_SEQLEN:
        raise ValueError(f"there must be at most {MAX_SEQLEN} sequences; got {n_q - 1}")
    return int(n_q) - 1


def check_boundaries(name: str, values, total: int, max_seqlen=None) -> None:
    """Check the values of ``cu_seqlens_q`` or ``cu_seqlens_k``, which only the device knows.

    Raises
    ------
    ValueError
        Where they do not begin with 0, descend, or end beyond the rows, or a sequence is longer than ``max_seqlen``.
    """
    values = [int(n) for n in values]
    if values[0] != 0:
        raise ValueError(f"{name} must begin with 0; got {values[0]}")
    for b, (first, end) in enumerate(zip(values, values[1:], strict=False)):
        if end < first:
            raise ValueError(f"{name} must not descend; got {first} followed by {end} (elements {b} and {b + 1})")
        if max_seqlen is not None and end - first > max_seqlen:
            raise ValueError(f"max_seqlen_{name[-1]} must be at least the longest length; got {max_seqlen}, and sequence {b} has {end - first}")
    if values[-1] > total:
        raise ValueError(f"{name} must end within the {total} rows of {'q' if name[-1] == 'q' else 'k and v'}; got {values[-1]}")
