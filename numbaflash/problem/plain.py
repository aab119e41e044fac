"""Problems of arrays with a batch axis, and what is common to them and packed ones."""

from __future__ import annotations

from .checks import check_causal, check_dropout, check_range, check_scale, check_softcap, check_softcap_range, check_window
from .description import Problem
from .shapes import (
    check_axes,
    check_bias,
    check_block_mask,
    check_dtypes,
    check_equal,
    check_heads,
    check_lengths,
    check_mask,
    check_sinks,
    check_sizes,
    check_slopes,
)


def make_problem(
    q_shape,
    k_shape,
    v_shape,
    dtypes,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    mask=None,
    block_mask=None,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0.0,
    seqlens_q=None,
    seqlens_k=None,
) -> Problem:
    """Check the user's arguments and describe the problem.

    Parameters
    ----------
    q_shape, k_shape, v_shape : tuple of int
    dtypes : sequence of str
        dtype names of q, k and v.
    scale, causal, window
        As `numbaflash.forward` takes them.
    softcap : float, optional
        Finite and positive. 0 is refused: some libraries mean "no cap" by it, yet the formula's limit at 0 makes every score 0.
    mask, block_mask, bias, alibi_slopes, sinks, seqlens_q, seqlens_k : (tuple of int, str), optional
        Shape and dtype of these arrays: block_mask that of `numbaflash.BlockMask.words`, mask bool and bias a float, of up to 4 axes that broadcast
        to (batch, heads, seqlen_q, seqlen_k), heads being those of q; alibi_slopes float32, (heads,) or (batch, heads); sinks float32 (float64 for
        float64), (heads,); lengths int32 or int64, (batch,).
    dropout : float, optional
        From 0 to below 1, taken to the nearest multiple of 2**-14 (but never to 0 or 1), of which results are exactly unbiased.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    """
    dtype = check_dtypes(dtypes)
    check_axes("q", q_shape, "(batch, seqlen_q, heads, head_dim)")
    check_axes("k", k_shape, "(batch, seqlen_k, kv_heads, head_dim)")
    check_axes("v", v_shape, "(batch, seqlen_k, kv_heads, head_dim_v)")
    batch, seqlen_q, heads, head_dim = (int(n) for n in q_shape)
    _, seqlen_k, kv_heads, _ = (int(n) for n in k_shape)
    head_dim_v = int(v_shape[3])
    check_equal("batch (axis 0)", "k", k_shape[0], "q", batch)
    check_equal("batch (axis 0)", "v", v_shape[0], "q", batch)
    check_equal("head_dim (axis 3)", "k", k_shape[3], "q", head_dim)
    check_equal("seqlen_k (axis 1)", "v", v_shape[1], "k", seqlen_k)
    check_equal("kv_heads (axis 2)", "v", v_shape[2], "k", kv_heads)
    check_heads(heads, kv_heads)
    check_sizes(3, head_dim, head_dim_v, 1, seqlen_q, seqlen_k)
    full = (batch, heads, seqlen_q, seqlen_k)
    mask = None if mask is None else check_mask(mask, full)
    block_mask = None if block_mask is None else check_block_mask(block_mask, full, mask)
    bias, bias_dtype = (None, None) if bias is None else check_bias(bias, full, dtype)
    alibi = None if alibi_slopes is None else check_slopes(alibi_slopes, batch, heads)
    lengths = {name: given and check_lengths(name, given, batch) for name, given in (("seqlens_q", seqlens_q), ("seqlens_k", seqlens_k))}
    offset, left, right, lengths_matter = band(seqlen_q, seqlen_k, causal, window, alibi is not None)
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
        offset=offset,
        left=left,
        right=right,
        offset_per_entry=lengths_matter and any(lengths.values()),
        softcap=softcap,
        mask=mask,
        block_mask=block_mask,
        bias=bias,
        bias_dtype=bias_dtype,
        alibi=alibi,
        sinks=sinks,
        dropout=dropout,
        **lengths,
    )


def describe(*, dtype, heads, head_dim, scale, softcap, sinks, dropout, **described) -> Problem:
    """The end of both: what is said of a problem in the same words, packed or not, is checked here."""
    scale = check_range(check_scale(scale, head_dim), dtype)
    return Problem(
        dtype=dtype,
        heads=heads,
        head_dim=head_dim,
        scale=scale,
        softcap=check_softcap_range(check_softcap(softcap), scale, dtype),
        sinks=sinks is not None and check_sinks(sinks, heads, dtype),
        dropout=check_dropout(dropout),
        **described,
    )


def band(seqlen_q, seqlen_k, causal, window, has_alibi):
    """(offset, left, right, whether lengths of an entry would change the offset); a bound that excludes no pair becomes None, so it costs nothing
    and fits int32.

    Shorter lengths bring no pair further from its place than full lengths do, so what excludes nothing there never does. Without a bound, only
    ALiBi asks for the offset.
    """
    causal = check_causal(causal)
    left, right = check_window(window)
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and left >= seqlen_q - 1 + offset:
        left = None
    if right is not None and right >= seqlen_k - 1 - offset:
        right = None
    placed = has_alibi or left is not None or right is not None
    if not placed:
        offset = 0
    elif not seqlen_q or not seqlen_k:
        offset, left, right = 0, None, None
    return offset, left, right, placed and causal != "top_left" and 0 not in (seqlen_q, seqlen_k)
