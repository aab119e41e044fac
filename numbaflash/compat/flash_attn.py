"""The functions of flash_attn, with its signatures and its meaning.

In place of ``from flash_attn import flash_attn_func`` write ``from numbaflash.compat.flash_attn import flash_attn_func``. On any device and in
any dtype that numbaflash has, with head dims of the value that may differ. Of the varlen functions, the one of three tensors is here; that of caches
takes any page size.

Two results differ: the LSE of a row that sees no key is -inf, where flash_attn has +inf; and the LSE has a gradient, where flash_attn takes it
for a constant.
"""

from __future__ import annotations

import functools
import numbers
import operator

import torch

from ..api import forward
from ..caches import append_kv
from ..decoding import decode
from ..problem import MAX_NEW_TOKENS, UnsupportedError, check_flag, no_dropout
from ..torch import attention, attention_varlen

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """``flash_attn.flash_attn_func``.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, heads, head_dim)
    k, v : Tensor, (batch, seqlen_k, kv_heads, head_dim)
        As `numbaflash.torch.attention` takes them, differentiable; heads is a multiple of kv_heads.
    dropout_p : float, optional
        Probability, below 1, that a weight is dropped; the seed comes from torch's generator of the CPU.
    softmax_scale : float, optional
        ``None`` is ``1 / sqrt(head_dim)``.
    causal : bool, optional
        Aligned at the bottom right: query i sees key j where ``j <= i + seqlen_k - seqlen_q``.
    window_size : (int, int), optional
        Keys seen to the left and to the right of that place, inclusive; -1 is unbounded.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``; 0 or below is no cap.
    alibi_slopes : Tensor of float32, (heads,) or (batch, heads), optional
        ``-slope * abs(i + seqlen_k - seqlen_q - j)`` is added to the scores.
    deterministic : bool, optional
        The same inputs give the same gradients, bit for bit.
    return_attn_probs : bool, optional
        Return three tensors; without dropout alone.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, heads, head_dim)
    softmax_lse : Tensor of float32, (batch, heads, seqlen_q), only with ``return_attn_probs``
    S_dmask : Tensor, (0,), only with ``return_attn_probs``
        Empty, as that of flash_attn is without dropout: the weights are nowhere.

    Raises
    ------
    TypeError, ValueError
        For a wrong kind, dtype, shape or value.
    UnsupportedError
        With both ``return_attn_probs`` and dropout: what it asks for is a matrix of seqlen_q x seqlen_k. And as `numbaflash.torch.attention`.

    Examples
    --------
    >>> import torch
    >>> from numbaflash.compat.flash_attn import flash_attn_func
    >>> q = torch.randn(2, 10, 4, 16)
    >>> flash_attn_func(q, q, q, causal=True, window_size=(3, -1)).shape
    torch.Size([2, 10, 4, 16])
    """
    attend = functools.partial(attention, q, k, v)
    return _run(attend, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def _run(attend, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs):
    return_attn_probs = check_flag("return_attn_probs", return_attn_probs)
    if return_attn_probs and not no_dropout(dropout_p):
        raise UnsupportedError(
            "return_attn_probs with dropout_p asks for the weights that were kept, a matrix of seqlen_q x seqlen_k, which is never computed as a "
            "whole. Leave out one of the two"
        )
    options = {"scale": softmax_scale, "causal": check_flag("causal", causal), "window": _window(window_size), "softcap": _softcap(softcap)}
    if not no_dropout(dropout_p):
        options["dropout"] = dropout_p
    found = attend(**options, alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=return_attn_probs)
    if not return_attn_probs:
        return found
    out, lse = found
    return out, lse, out.new_empty(0)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """``flash_attn.flash_attn_kvpacked_func``: `flash_attn_func` with keys and values in one tensor, which is read where it lies.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, heads, head_dim)
    kv : Tensor, (batch, seqlen_k, 2, kv_heads, head_dim)
        Keys, then values.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As `flash_attn_func` takes them.

    Returns
    -------
    out, or out, softmax_lse and S_dmask
        As from `flash_attn_func`, with the same errors.
    """
    k, v = _unpacked("kv", kv, 2, "(batch, seqlen_k, 2, kv_heads, head_dim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """``flash_attn.flash_attn_qkvpacked_func``: `flash_attn_func` with all three in one tensor, which is read where it lies.

    Parameters
    ----------
    qkv : Tensor, (batch, seqlen, 3, heads, head_dim)
        Queries, keys, values.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As `flash_attn_func` takes them.

    Returns
    -------
    out, or out, softmax_lse and S_dmask
        As from `flash_attn_func`, with the same errors.
    """
    q, k, v = _unpacked("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """``flash_attn.flash_attn_varlen_func``: `flash_attn_func` of packed sequences.

    Parameters
    ----------
    q : Tensor, (total_q, heads, head_dim)
    k, v : Tensor, (total_k, kv_heads, head_dim)
        As `numbaflash.torch.attention_varlen` takes them, differentiable; heads is a multiple of kv_heads.
    cu_seqlens_q, cu_seqlens_k : Tensor of int32 (or int64), (batch + 1,)
        Where each sequence begins, and where the last one ends.
    max_seqlen_q, max_seqlen_k : int
        Length of the longest sequence. Rows beyond it are computed as well, where flash_attn leaves them out.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As `flash_attn_func` takes them; slopes (heads,) or (batch, heads).
    block_table : None
        Keys and values in pages are refused.

    Returns
    -------
    out : Tensor, (total_q, heads, head_dim)
    softmax_lse : Tensor of float32, (heads, total_q), only with ``return_attn_probs``
    S_dmask : Tensor, (0,), only with ``return_attn_probs``

    Raises
    ------
    TypeError, ValueError
        For a wrong kind, dtype, shape or value.
    UnsupportedError
        For a ``block_table``; and as `flash_attn_func`.

    Examples
    --------
    >>> import torch
    >>> from numbaflash.compat.flash_attn import flash_attn_varlen_func
    >>> q, ends = torch.randn(10, 4, 16), torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, ends, ends, 7, 7, causal=True).shape
    torch.Size([10, 4, 16])
    """
    if block_table is not None:
        raise UnsupportedError("block_table: keys and values in pages are not supported here. Gather them first, and leave block_table out")
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    attend = functools.partial(attention_varlen, q, k, v, cu_seqlens_q, cu_seqlens_k, **lengths)
    return _run(attend, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    page_table=None,
):
    """``flash_attn.flash_attn_with_kvcache``: new keys and values are written to a cache, and attention is computed over it. Without gradients.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, heads, head_dim)
    k_cache : Tensor, (batch_cache, capacity, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with ``block_table``
        As `numbaflash.decode` takes them, any strides and page sizes.
    v_cache : Tensor, (batch_cache, capacity, kv_heads, head_dim_v), or (pages, page_size, kv_heads, head_dim_v)
    k, v : Tensor, (batch, seqlen_new, kv_heads, head_dim) and (batch, seqlen_new, kv_heads, head_dim_v), optional
        Written to the caches at positions ``cache_seqlens`` and following. What does not fit is left out.
    rotary_cos, rotary_sin : Tensor, (positions, rotary_dim / 2), optional
        Of at least as many positions as the cache has. The first ``rotary_dim`` columns of k are turned by their positions, and those of q: by
        ``cache_seqlens`` and following where there is ``causal`` or a window, otherwise all by ``cache_seqlens``.
    cache_seqlens : Tensor of int32 (or int64), (batch,), or int, optional
        Keys of each sequence that are in the cache already. None: all of it.
    cache_batch_idx : Tensor of int32, (batch,), optional
        Which entry of a cache without pages belongs to each sequence; None is its own number.
    cache_leftpad : None
        Padding in front of the keys is refused.
    block_table : Tensor of int32, (batch, max_pages), optional
        ``page_table`` of `numbaflash.decode`.
    softmax_scale, window_size, softcap, alibi_slopes
        As `flash_attn_func` takes them.
    causal : bool, optional
        Aligned at the end: query i sees key j where ``j <= i + keys - seqlen_q``, with the new keys counted.
    rotary_interleaved : bool, optional
        Columns 2 j and 2 j + 1 are a pair; otherwise columns j and j + rotary_dim / 2.
    num_splits : int, optional
        Parts in which the keys are computed; 0 leaves that to the library.
    return_softmax_lse : bool, optional
        Return two tensors.
    page_table : Tensor of int32, (batch, max_pages), optional
        What later versions of flash_attn call ``block_table``.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, heads, head_dim_v)
    softmax_lse : Tensor of float32, (batch, heads, seqlen_q), only with ``return_softmax_lse``

    Raises
    ------
    TypeError, ValueError
        For a wrong kind, dtype, shape or value.
    UnsupportedError
        For ``cache_leftpad``; for more than 64 queries over pages with a window that ends to the right of a query, or with ALiBi and no ``causal``;
        and as `numbaflash.decode`.

    Examples
    --------
    >>> import torch
    >>> from numbaflash.compat.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 2, 100, 2, 16)
    >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    >>> lengths = torch.tensor([7, 0], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> bool((k_cache[0, 7] == k[0, 0]).all())
    True
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 axes; got shape {tuple(x.shape)}")
    if cache_leftpad is not None:
        raise UnsupportedError("cache_leftpad: padding in front of the keys of a cache is not supported. Leave it out, and let keys begin at 0")
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are two names of one thing; give one of them")
    causal, return_lse = check_flag("causal", causal), check_flag("return_softmax_lse", return_softmax_lse)
    window, table = _window(window_size), block_table if page_table is None else page_table
    if table is not None and (not isinstance(table, torch.Tensor) or table.dim() != 2):
        told = f"shape {tuple(table.shape)}" if isinstance(table, torch.Tensor) else type(table).__name__
        raise (ValueError if isinstance(table, torch.Tensor) else TypeError)(f"block_table must be a torch tensor (batch, max_pages); got {told}")
    if cache_batch_idx is not None:
        table = _entries(cache_batch_idx, table, q)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    lengths = _lengths(cache_seqlens, capacity, q, k)
    for name, x in (("k", k), ("v", v)):
        if x is not None and not (isinstance(x, torch.Tensor) and x.dim() == 4):
            raise TypeError(f"{name} must be a torch tensor (batch, seqlen_new, kv_heads, head_dim); got {getattr(x, 'shape', type(x).__name__)}")
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together; got {'v' if k is None else 'k'} alone")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin turn new keys and the queries; got no k and v")
    if k is not None:
        in_turn = causal or window != (None, None)
        interleaved = check_flag("rotary_interleaved", rotary_interleaved)
        q = _append(q, k, v, k_cache, v_cache, lengths, capacity, table, rotary_cos, rotary_sin, interleaved, in_turn)
        lengths = lengths + k.shape[1]
    options = {"scale": softmax_scale, "softcap": _softcap(softcap), "alibi_slopes": alibi_slopes, "return_lse": return_lse}
    splits = _splits(num_splits)
    if q.shape[1] <= MAX_NEW_TOKENS:
        return decode(q, k_cache, v_cache, lengths, table, causal=causal, window=window, num_splits=splits, **options)
    if table is None:
        return forward(q, k_cache, v_cache, seqlens_k=lengths, causal=causal, window=window, **options)
    return _decode_many(q, k_cache, v_cache, lengths, table, causal, window, splits, options)


def _entries(cache_batch_idx, table, q):
    """A page table of a cache without pages: each entry is one page."""
    if table is not None:
        raise ValueError("cache_batch_idx is for caches without pages; got a block_table, too")
    if not isinstance(cache_batch_idx, torch.Tensor) or cache_batch_idx.dtype not in (torch.int32, torch.int64):
        told = getattr(cache_batch_idx, "dtype", type(cache_batch_idx).__name__)
        raise TypeError(f"cache_batch_idx must be a torch tensor of int32 or int64; got {told}")
    if tuple(cache_batch_idx.shape) != (q.shape[0],):
        raise ValueError(f"cache_batch_idx must have shape {(q.shape[0],)}, one number for each sequence; got {tuple(cache_batch_idx.shape)}")
    return cache_batch_idx.int()[:, None]


def _lengths(cache_seqlens, capacity, q, k):
    """Keys in the cache before the new ones, as a tensor."""
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens must say where k and v go; got None")
        cache_seqlens = capacity
    try:
        length = operator.index(cache_seqlens)
    except TypeError:
        raise TypeError(f"cache_seqlens must be a torch tensor or an int; got {type(cache_seqlens).__name__}") from None
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens must be from 0 to the capacity of {capacity} keys; got {length}")
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _append(q, k, v, k_cache, v_cache, lengths, capacity, table, cos, sin, interleaved, in_turn):
    """Write new keys and values; q, turned if there is something to turn it by."""
    if cos is None:
        append_kv(k, v, k_cache, v_cache, lengths, table)
        return q
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] < capacity:
            raise ValueError(f"{name} must have a row for each of the {capacity} positions of the cache; got {x.shape[0]}")
    given = {"cos": cos, "sin": sin, "interleaved": interleaved}
    if q.shape[1] == k.shape[1] and (in_turn or q.shape[1] == 1):
        return append_kv(k, v, k_cache, v_cache, lengths, table, q=q, **given)
    append_kv(k, v, k_cache, v_cache, lengths, table, **given)
    positions = lengths[:, None] + torch.arange(q.shape[1], device=q.device) * int(in_turn)
    return _turned(q, cos, sin, positions.clamp(0, cos.shape[0] - 1), interleaved)


def _turned(x, cos, sin, positions, interleaved):
    """Rotary embedding of (batch, seqlen, heads, head_dim) at (batch, seqlen) positions, in float32 or float64."""
    kind = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (y[positions].to(kind)[:, :, None] for y in (cos, sin))
    n = cos.shape[-1]
    turning, rest = x[..., : 2 * n].to(kind), x[..., 2 * n :]
    a, b = turning.unflatten(-1, (n, 2)).unbind(-1) if interleaved else turning.split(n, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _splits(num_splits):
    """None for flash_attn's 0; what is no number is refused by `decode`."""
    return None if isinstance(num_splits, numbers.Integral) and not isinstance(num_splits, bool) and num_splits == 0 else num_splits


def _decode_many(q, k_cache, v_cache, lengths, table, causal, window, splits, options):
    """More queries than `decode` takes, over pages: piece by piece."""
    n = q.shape[1]
    if not causal and (window != (None, None) or options["alibi_slopes"] is not None):
        raise UnsupportedError(
            f"over pages, a window or ALiBi without causal is not supported for more than {MAX_NEW_TOKENS} queries a sequence; got {n}. Hand "
            "over fewer at once, or a cache without pages"
        )
    parts = []
    for start in range(0, n, MAX_NEW_TOKENS):
        piece = q[:, start : start + MAX_NEW_TOKENS]
        # To a causal query, keys that follow it are as good as not there yet.
        of_piece = (lengths - (n - start - piece.shape[1])).clamp_min(0) if causal else lengths
        parts.append(decode(piece, k_cache, v_cache, of_piece, table, causal=causal, window=window, num_splits=splits, **options))
    if not options["return_lse"]:
        return torch.cat(parts, 1)
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


def _unpacked(name, packed, n, axes):
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor; got {type(packed).__name__}")
    if packed.dim() != 5 or packed.shape[2] != n:
        raise ValueError(f"{name} must have 5 axes {axes}; got shape {tuple(packed.shape)}")
    return packed.unbind(2)  # whose derivative joins the gradients in one copy


def _window(window_size):
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be a pair of integers (left, right), -1 for unbounded; got {window_size!r}") from None
    if min(left, right) < -1:
        raise ValueError(f"window_size must be -1 (unbounded) or at least 0 on each side; got {window_size!r}")
    return tuple(None if side == -1 else side for side in (left, right))


def _softcap(softcap):
    """None for no cap; what is no number is refused where all softcaps are."""
    return None if isinstance(softcap, numbers.Real) and not isinstance(softcap, bool) and softcap <= 0 else softcap
