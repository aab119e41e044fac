"""Decoding: attention of a few new queries of each sequence over the keys and values in its cache."""

from __future__ import annotations

import os

import numpy as np

from .arrays import LIBRARIES, one_library
from .call import run
from .problem import (
    check_cache_lengths,
    check_causal,
    check_flag,
    check_num_splits,
    check_page_numbers,
    check_scale,
    check_softcap,
    check_window,
)

__all__ = ["decode"]


def decode(
    q,
    k_cache,
    v_cache,
    seqlens_k,
    page_table=None,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    out=None,
    lse=None,
    num_splits=None,
    stream=None,
):
    """Attention of a few queries of each sequence over a cache of its keys and values, contiguous or paged.

    The keys of a sequence are computed in parts at once, which the block merge of the online softmax puts together: "Flash-Decoding" (Dao, Haziza,
    Massa and Sizov, 2023). Pages are those of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads, head_dim)
        The last ``seqlen_q`` tokens of each sequence, 0 to 64. Libraries, dtypes and strides as in `forward`.
    k_cache : array, (batch, capacity, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with ``page_table``
        Same library, device and dtype; head dims are 1 to 576. Any page size from 1 up. Slots after the length of a sequence hold anything.
    v_cache : array, (batch, capacity, kv_heads, head_dim_v), or (pages, page_size, kv_heads, head_dim_v)
        May be a view of ``k_cache``, as in a latent cache, whose values are the first part of its keys.
    seqlens_k : array of int32 or int64, (batch,)
        Valid keys of each sequence, those of the present q included, on the arrays' device; the host does not read them. A length above the capacity
        counts as the capacity, a negative one as 0.
    page_table : array of int32, (batch, max_pages), optional
        Key j of sequence b lies in row ``j % page_size`` of page ``page_table[b, j // page_size]``, so the capacity is ``max_pages * page_size``.
        Pages may come in any order and belong to several sequences. Entries that no key of the sequence is in hold anything; a number that is used
        and no page counts as the nearest one. ``NUMBAFLASH_CHECK=1`` in the environment checks lengths and page numbers in each call, at the price
        of waiting for the device.
    scale, softcap, sinks, alibi_slopes
        As in `forward`.
    causal : bool or "top_left", optional
        True: query i sees key j where ``j <= i + seqlens_k[b] - seqlen_q``. No matter with one query, which stands beside the last key.
    window : (int or None, int or None), optional
        As in `forward`, counted from the same place.
    return_lse : bool, optional
        Also return the logarithm of the sum of exponentiated scores, sinks included.
    out : array, (batch, seqlen_q, heads, head_dim_v), optional
        Where to write the result, as in `forward`. Not for JAX.
    lse : array, (batch, heads, seqlen_q), optional
        Where to write the LSE, as in `forward`. Not for JAX.
    num_splits : int, optional
        Into how many equal parts the keys of each sequence are divided, 1 to 256. None lets the library choose, on a GPU so that all of it is busy
        whatever the lengths are. The same inputs and number give the same bits; with a number given, a sequence's do not depend on the others.
    stream : stream of CuPy, torch, Numba or CUDA Python, or int handle, optional
        CUDA stream to work on, as in `forward`.

    Returns
    -------
    out : array, (batch, seqlen_q, heads, head_dim_v)
        q's library, dtype and device, row-major if it is new. 0 in a row that sees no key.
    lse : array, (batch, heads, seqlen_q), only with ``return_lse``
        Natural logarithm; float32 (float64 for float64); -inf in such a row.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value; with ``NUMBAFLASH_CHECK=1`` for lengths beyond the capacity and numbers that are no page, too.
    UnsupportedError
        For a legal problem that no kernel family can compute; the message gives each one's reason.

    See Also
    --------
    forward : for more queries, of caches without pages: its ``seqlens_k`` means the same.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = rng.standard_normal((2, 6, 16, 2, 64), dtype=np.float32)  # six pages of 16 keys
    >>> pages = np.array([[4, 0, 5], [2, 4, -1]], np.int32)  # page 4 is shared; -1 is not used
    >>> q = rng.standard_normal((2, 1, 8, 64), dtype=np.float32)
    >>> out = nf.decode(q, k_cache, v_cache, np.array([40, 32]), pages)
    >>> out.shape
    (2, 1, 8, 64)
    >>> k, v = (x[[4, 0, 5]].reshape(1, 48, 2, 64)[:, :40] for x in (k_cache, v_cache))
    >>> bool(np.allclose(out[:1], nf.forward(q[:1], k, v), atol=1e-6))
    True
    """
    arrays = {"q": q, "k": k_cache, "v": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    arrays |= {"alibi_slopes": alibi_slopes, "sinks": sinks}
    library = _library(arrays | {"out": out, "lse": lse})
    options = {
        "scale": None if scale is None else check_scale(scale, 1),
        "causal": check_causal(causal),
        "window": check_window(window),
        "softcap": check_softcap(softcap),
    }
    return_lse, num_splits = check_flag("return_lse", return_lse), check_num_splits(num_splits)
    _check_values(arrays)
    if library.decode is not None:
        more = {"seqlens_k": seqlens_k, "page_table": page_table, "alibi_slopes": alibi_slopes, "sinks": sinks, "num_splits": num_splits}
        return library.decode(q, k_cache, v_cache, **more, **options, return_lse=return_lse, out=out, lse=lse, stream=stream)
    wanted = ("out", "lse") if return_lse else ("out",)
    found = run("decode", library, arrays, {"out": out, "lse": lse}, wanted, options, stream, num_splits=num_splits)
    return (found["out"], found["lse"]) if return_lse else found["out"]


def _library(arrays):
    if arrays["seqlens_k"] is None:
        raise TypeError("seqlens_k must be an array of int32 or int64, (batch,): the valid keys of each sequence; got None")
    names = {"k": "k_cache", "v": "v_cache"}
    return one_library(**{names.get(name, name): x for name, x in arrays.items() if x is not None or name in ("q", "k", "v")})


def _check_values(arrays):
    """Check lengths and page numbers where ``NUMBAFLASH_CHECK`` asks for it and their values are there: not in a trace."""
    if os.environ.get("NUMBAFLASH_CHECK", "0") in ("", "0"):
        return
    cache = LIBRARIES[type(arrays["k"])].describe(arrays["k"], "k_cache").shape
    lengths, table = (_values(arrays[name], axes) for name, axes in (("seqlens_k", 1), ("page_table", 2)))
    if len(cache) != 4 or lengths is None or (table is None) != (arrays["page_table"] is None):
        return  # said when the call is prepared
    check_cache_lengths(lengths, cache[1] * (1 if table is None else table.shape[1]))
    if table is not None and len(table) == len(lengths):
        check_page_numbers(table, lengths, cache[1], cache[0])


def _values(x, axes):
    """What an array of integers holds; None where that is not known, or it is another array."""
    values = None if x is None else LIBRARIES[type(x)].values(x)
    return values if values is not None and values.ndim == axes and np.issubdtype(values.dtype, np.integer) else None
