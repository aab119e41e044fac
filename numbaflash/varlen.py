"""Packed sequences: `forward_varlen`, `backward_varlen` and `attention_varlen`."""

from __future__ import annotations

import numpy as np

from . import recording
from .arrays import LIBRARIES, in_torch_compile, one_library
from .call import run
from .problem import (
    NEEDS,
    PACKED,
    check_boundaries,
    check_causal,
    check_dropout,
    check_flag,
    check_max_seqlen,
    check_needed,
    check_needs,
    check_scale,
    check_seed,
    check_softcap,
    check_window,
)
from .switches import values_are_checked

__all__ = ["attention_varlen", "backward_varlen", "forward_varlen"]


def forward_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    max_seqlen_q=None,
    max_seqlen_k=None,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0.0,
    seed=None,
    return_lse=False,
    out=None,
    lse=None,
    stream=None,
):
    """`forward` of sequences of any lengths that lie one after the other, without padding.

    Sequence b has the queries ``cu_seqlens_q[b]`` to before ``cu_seqlens_q[b + 1]`` and the keys likewise, and sees nothing of the others.
    ``causal``, ``window`` and ALiBi count within a sequence, with its own lengths, which may differ between queries and keys, and be 0.

    Parameters
    ----------
    q : array, (total_q, heads, head_dim)
        As `forward` takes it, but for the axes: dtypes, libraries, strides.
    k : array, (total_k, kv_heads, head_dim)
    v : array, (total_k, kv_heads, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : array of int32 or int64, (batch + 1,)
        Where each sequence begins, and where the last one ends: 0 at first, then ascending, at most ``total_q`` and ``total_k``. On the arrays'
        device; the host does not read them. Whatever they hold, nothing outside of the arrays is touched: numbers count as the nearest one from 0
        to the total, and where they descend then, every sequence is empty. ``NUMBAFLASH_CHECK=1`` in the environment checks them in each call, at
        the price of waiting for the device.
    max_seqlen_q, max_seqlen_k : int, optional
        Length of the longest sequence. It helps to choose tiles, and changes no result; the average length is taken otherwise.
    scale, causal, window, softcap, alibi_slopes, sinks, dropout, seed, return_lse, stream
        As in `forward`, with the sequences for batch entries: slopes are (heads,) or (batch, heads).
    out : array, (total_q, heads, head_dim_v), optional
        Where to write the result, as in `forward`.
    lse : array, (heads, total_q), optional
        Where to write the LSE, float32 (float64 for float64); it is filled whether or not it is returned.

    Returns
    -------
    out : array, (total_q, heads, head_dim_v)
        0 in a row that sees no key, and in rows past the last sequence.
    lse : array, (heads, total_q), only with ``return_lse``
        Natural logarithm; float32 (float64 for float64); -inf in such rows.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    UnsupportedError
        For a legal problem that no kernel family can compute; the message gives each one's reason.

    See Also
    --------
    attention_varlen : the same, differentiable in PyTorch and JAX.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 12, 4, 64), dtype=np.float32)  # three sequences of 5, 0 and 7 tokens
    >>> ends = np.array([0, 5, 5, 12], np.int32)
    >>> out, lse = nf.forward_varlen(q, k, v, ends, ends, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((12, 4, 64), (4, 12))
    >>> bool(np.allclose(out[5:], nf.forward(q[None, 5:], k[None, 5:], v[None, 5:], causal=True)[0], atol=1e-6))
    True
    """
    if recording.active is not None and recording.is_outermost():
        return recording.noted(forward_varlen, locals())
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arrays |= {"alibi_slopes": alibi_slopes, "sinks": sinks}
    library = _library(arrays | {"out": out, "lse": lse})
    options, seed = _options(max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, dropout, seed)
    return_lse = check_flag("return_lse", return_lse)
    _check_values(arrays, options)
    if library.forward is not None:
        return library.forward(**arrays, **options, seed=seed, return_lse=return_lse, out=out, lse=lse, stream=stream)
    wanted = ("out", "lse") if return_lse else ("out",)
    found = run("forward", library, arrays, {"out": out, "lse": lse}, wanted, options, stream, seed=seed)
    return (found["out"], found["lse"]) if return_lse else found["out"]


def backward_varlen(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    max_seqlen_q=None,
    max_seqlen_k=None,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0.0,
    seed=None,
    dlse=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    dsinks=None,
    needs=NEEDS,
    stream=None,
):
    """Gradients of `forward_varlen`, from what it returned: `backward` of sequences that lie one after the other.

    Parameters
    ----------
    dout : array, (total_q, heads, head_dim_v)
        Gradient of the loss with respect to ``out``.
    q : array, (total_q, heads, head_dim)
    k : array, (total_k, kv_heads, head_dim)
    v : array, (total_k, kv_heads, head_dim_v)
    out : array, (total_q, heads, head_dim_v)
        What `forward_varlen` returned.
    lse : array, (heads, total_q)
        What `forward_varlen` returned with ``return_lse=True``.
    cu_seqlens_q, cu_seqlens_k : array of int32 or int64, (batch + 1,)
    max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, alibi_slopes, sinks, dropout, seed
        Those of the `forward_varlen` call.
    dlse : array, (heads, total_q), optional
        Gradient of the loss with respect to the returned LSE.
    deterministic, stream
        As in `backward`.
    dq : array, (total_q, heads, head_dim), optional
        Where to write the gradient of q, as in `backward`.
    dk : array, (total_k, kv_heads, head_dim), optional
    dv : array, (total_k, kv_heads, head_dim_v), optional
    dsinks : array, (heads,), optional
    needs : tuple of "q", "k", "v" and "sinks", optional
        The inputs whose gradients are wanted. The last must be named, and is returned only then.

    Returns
    -------
    dq : array, (total_q, heads, head_dim), or None
        None when not in ``needs``; 0 in a row that sees no key, and in rows past the last sequence.
    dk : array, (total_k, kv_heads, head_dim), or None
    dv : array, (total_k, kv_heads, head_dim_v), or None
    dsinks : array, (heads,), only with "sinks" in ``needs``

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `backward`.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 12, 4, 64), dtype=np.float32)
    >>> ends = np.array([0, 5, 5, 12])
    >>> out, lse = nf.forward_varlen(q, k, v, ends, ends, return_lse=True)
    >>> dq, dk, dv = nf.backward_varlen(dout, q, k, v, out, lse, ends, ends)
    >>> dk.shape
    (12, 4, 64)
    """
    if recording.active is not None and recording.is_outermost():
        return recording.noted(backward_varlen, locals())
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    for name in ("out", "lse"):
        if given[name] is None:
            raise TypeError(f"{name} is missing: the backward needs the {name} that forward_varlen(..., return_lse=True) returned; got None")
    given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes, "sinks": sinks}
    results = {"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}
    library = _library(given | {"dlse": dlse} | results)
    needs = check_needs(needs, ("sinks",) if sinks is not None else ())
    for name, x in results.items():
        if x is not None:
            check_needed(name[1:], needs)
    options, seed = _options(max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, dropout, seed)
    more = {"seed": seed, "needs": needs, "deterministic": check_flag("deterministic", deterministic)}
    _check_values(given, options)
    if library.backward is not None:
        return library.backward(**given, **options, **more, dlse=dlse, **results, stream=stream)
    found = run("backward", library, given | {"dlse": dlse}, results, tuple(f"d{name}" for name in needs), options, stream, **more)
    return (*map(found.get, ("dq", "dk", "dv")), *(found[f"d{name}"] for name in needs if name not in NEEDS))


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    max_seqlen_q=None,
    max_seqlen_k=None,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0,  # torch.compile makes a variable of 0.0
    seed=None,
    return_lse=False,
    deterministic=False,
):
    """`attention` of sequences that lie one after the other: `forward_varlen`, which PyTorch and JAX differentiate.

    Parameters
    ----------
    q : array, (total_q, heads, head_dim)
    k : array, (total_k, kv_heads, head_dim)
    v : array, (total_k, kv_heads, head_dim_v)
        As `attention` takes them, but for the axes. Under ``jax.vmap`` there is a launch for each element.
    cu_seqlens_q, cu_seqlens_k : array of int32 or int64, (batch + 1,)
        As in `forward_varlen`.
    max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, alibi_slopes
        As in `forward_varlen`.
    sinks, dropout, seed, deterministic
        As in `attention`.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores, which is differentiable too.

    Returns
    -------
    out : array, (total_q, heads, head_dim_v)
    lse : array, (heads, total_q), only with ``return_lse``
        As from `forward_varlen`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import torch
    >>> import numbaflash as nf
    >>> q, k, v = (torch.randn(12, 4, 64, requires_grad=True) for _ in range(3))
    >>> ends = torch.tensor([0, 5, 5, 12])
    >>> nf.attention_varlen(q, k, v, ends, ends, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([12, 4, 64])
    """
    options = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "scale": scale, "causal": causal, "window": window, "softcap": softcap}
    options |= {"alibi_slopes": alibi_slopes, "sinks": sinks, "dropout": dropout, "seed": seed, "return_lse": return_lse}
    if in_torch_compile():
        from .torch import attention_varlen

        return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options, deterministic=deterministic)
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    library = _library(arrays)
    deterministic = check_flag("deterministic", deterministic)
    if library.attention_varlen is not None:
        _check_values(arrays, options)
        return library.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options, deterministic=deterministic)
    return forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)


def _library(arrays):
    for name in PACKED:
        if name in arrays and arrays[name] is None:
            raise TypeError(f"{name} must be an array of int32 or int64, (batch + 1,); got None")
    return one_library(**{name: x for name, x in arrays.items() if x is not None or name in NEEDS})


def _options(max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, dropout, seed):
    """(options that are numbers, seed), checked as far as they can be without a look at the arrays."""
    dropout = check_dropout(dropout)
    options = {
        "scale": None if scale is None else check_scale(scale, 1),
        "causal": check_causal(causal),
        "window": check_window(window),
        "softcap": check_softcap(softcap),
        "dropout": dropout,
        "max_seqlen_q": check_max_seqlen("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": check_max_seqlen("max_seqlen_k", max_seqlen_k),
    }
    return options, check_seed(seed, dropout)


def _check_values(arrays, options):
    """Check the boundaries where ``NUMBAFLASH_CHECK`` asks for it and their values are there: not in a trace."""
    if not values_are_checked():
        return
    for name, rows, longest in (("cu_seqlens_q", "q", "max_seqlen_q"), ("cu_seqlens_k", "k", "max_seqlen_k")):
        library = LIBRARIES[type(arrays[name])]
        values = library.values(arrays[name])
        if values is not None and values.ndim == 1 and len(values) and np.issubdtype(values.dtype, np.integer):
            (total, *_) = library.describe(arrays[rows], rows).shape or (0,)
            check_boundaries(name, values.tolist(), total, options[longest])
