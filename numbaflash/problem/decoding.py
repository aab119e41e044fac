"""Problems of decoding: a few queries of each sequence, and the cache of its keys and values, which may be paged."""

from __future__ import annotations

from .description import Problem
from .names import MAX_CACHE_HEAD_DIM, MAX_NEW_TOKENS, MAX_SEQLEN
from .plain import band, describe
from .shapes import check_axes, check_dtypes, check_equal, check_head_dims, check_heads, check_lengths, check_page_table, check_slopes

_NAMES = ("q", "k_cache", "v_cache")


def make_decode_problem(
    q_shape,
    k_shape,
    v_shape,
    dtypes,
    *,
    seqlens_k,
    page_table=None,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
) -> Problem:
    """`make_problem` for caches.

    Parameters
    ----------
    q_shape : tuple of int
        (batch, seqlen_q, heads, head_dim), seqlen_q being 64 at most.
    k_shape, v_shape : tuple of int
        (batch, capacity, kv_heads, head_dim) and (batch, capacity, kv_heads, head_dim_v); with a page table (pages, page_size, kv_heads, head_dim)
        and (pages, page_size, kv_heads, head_dim_v).
    dtypes : sequence of str
        dtype names of q, k and v.
    seqlens_k : (tuple of int, str)
        Shape and dtype: (batch,), int32 or int64.
    page_table : (tuple of int, str), optional
        (batch, max_pages), int32.
    scale, causal, window, softcap
        As `make_problem` takes them.
    alibi_slopes, sinks : (tuple of int, str), optional
        Likewise.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    """
    dtype = check_dtypes(dtypes, _NAMES)
    leading = "batch, capacity" if page_table is None else "pages, page_size"
    check_axes("q", q_shape, "(batch, seqlen_q, heads, head_dim)")
    check_axes("k_cache", k_shape, f"({leading}, kv_heads, head_dim)")
    check_axes("v_cache", v_shape, f"({leading}, kv_heads, head_dim_v)")
    batch, seqlen_q, heads, head_dim = (int(n) for n in q_shape)
    first, second, kv_heads, _ = (int(n) for n in k_shape)
    head_dim_v = int(v_shape[3])
    if seqlen_q > MAX_NEW_TOKENS:
        hint = "numbaflash.forward takes more, and a cache without pages"
        raise ValueError(f"q must have at most {MAX_NEW_TOKENS} tokens a sequence (axis 1); got {seqlen_q}. {hint}")
    check_equal("head_dim (axis 3)", "k_cache", k_shape[3], "q", head_dim)
    check_equal("kv_heads (axis 2)", "v_cache", v_shape[2], "k_cache", kv_heads)
    check_head_dims(3, {"q": head_dim, "v_cache": head_dim_v}, MAX_CACHE_HEAD_DIM)
    if page_table is None:
        check_equal("batch (axis 0)", "k_cache", first, "q", batch)
        check_equal("batch (axis 0)", "v_cache", v_shape[0], "q", batch)
        check_equal("capacity (axis 1)", "v_cache", v_shape[1], "k_cache", second)
        capacity, paging = second, {}
    else:
        check_equal("number of pages (axis 0)", "v_cache", v_shape[0], "k_cache", first)
        check_equal("page_size (axis 1)", "v_cache", v_shape[1], "k_cache", second)
        max_pages = check_page_table(page_table, batch, first)
        if not second:
            raise ValueError(f"k_cache must have pages of at least one key (axis 1) where there is a page_table; got shape {tuple(k_shape)}")
        capacity = max_pages * second if first else 0
        paging = {"pages": first, "page_size": second, "max_pages": max_pages}
    if capacity > MAX_SEQLEN:
        told = (
            "k_cache must have a capacity (axis 1)" if page_table is None else "page_table and k_cache must have a capacity (max_pages * page_size)"
        )
        raise ValueError(f"{told} of at most {MAX_SEQLEN} keys; got {capacity}")
    check_heads(heads, kv_heads)
    alibi = None if alibi_slopes is None else check_slopes(alibi_slopes, batch, heads)
    lengths = check_lengths("seqlens_k", seqlens_k, batch)
    offset, left, right, lengths_matter = band(seqlen_q, capacity, causal, window, alibi is not None)
    return describe(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=capacity,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
        offset=offset,
        left=left,
        right=right,
        offset_per_entry=lengths_matter,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        dropout=0.0,
        seqlens_k=lengths,
        **paging,
    )


def check_cache_lengths(values, capacity: int) -> None:
    """Check the values of ``seqlens_k``, which only the device knows.

    Raises
    ------
    ValueError
        Where one is negative or beyond the capacity.
    """
    for b, length in enumerate(map(int, values)):
        if not 0 <= length <= capacity:
            raise ValueError(f"seqlens_k must be from 0 to the capacity of {capacity} keys; got {length} (sequence {b})")


def check_page_numbers(table, lengths, page_size: int, pages: int) -> None:
    """Check those values of ``page_table`` that sequences of these lengths use.

    Raises
    ------
    ValueError
        Where one is no page.
    """
    for b, (row, length) in enumerate(zip(table, map(int, lengths), strict=True)):
        for n, page in enumerate(map(int, row[: -(-length // page_size)])):
            if not 0 <= page < pages:
                raise ValueError(f"page_table must hold page numbers from 0 to {pages - 1} where they are used; got {page} (sequence {b}, entry {n})")
