"""torch's own attention by its name and with its meaning: `scaled_dot_product_attention`, and `replace_sdpa` to put it in torch's place."""

from __future__ import annotations

import math
import numbers
import threading
from contextlib import contextmanager, nullcontext

import torch

from ..problem import check_flag, no_dropout
from .functions import attention


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """``torch.nn.functional.scaled_dot_product_attention``: its arguments and its meaning, with these kernels.

    Parameters
    ----------
    query : Tensor, (..., heads, seqlen_q, head_dim)
    key : Tensor, (..., heads, seqlen_k, head_dim)
    value : Tensor, (..., heads, seqlen_k, head_dim_v)
        Leading axes broadcast against each other, heads too, and may be missing: (seqlen, head_dim) is one head. dtypes, devices, gradients and
        autocast as for `attention`.
    attn_mask : Tensor of bool or of a float dtype, broadcast to (..., heads, seqlen_q, seqlen_k), optional
        True where a query may see a key, or what is added to the scores, which may require a gradient; not together with ``is_causal``. A query
        that sees no key gets 0.
    dropout_p : float, optional
        Probability, below 1, that a weight is dropped; the seed comes from torch's generator of the CPU (``torch.manual_seed``).
    is_causal : bool, optional
        Query i sees key j where ``j <= i`` (top left), whatever the lengths: ``causal="top_left"`` of `attention`, not ``causal=True``.
    scale : float, optional
        ``None`` is ``1 / sqrt(head_dim)``.
    enable_gqa : bool, optional
        The heads of key and of value may be fewer than those of query, which is then a multiple of each.

    Returns
    -------
    out : Tensor, (..., heads, seqlen_q, head_dim_v)
        A transposed view of a row-major (..., seqlen_q, heads, head_dim_v) tensor.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    UnsupportedError
        As `attention`.

    Notes
    -----
    Up to four axes, nothing is copied. Of more, the leading ones are joined, which copies where their strides do not allow it.
    """
    if not isinstance(dropout_p, numbers.Real):
        raise TypeError(f"dropout_p must be a real number; got {dropout_p!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and below 1; got {dropout_p}")
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
        if x.dim() < 2 + enable_gqa:
            axes = "(..., heads, seqlen, head_dim)" if enable_gqa else "(..., seqlen, head_dim)"
            raise ValueError(f"{name} must have at least {2 + enable_gqa} axes {axes}; got shape {tuple(x.shape)}")
    _check_same("head_dim (the last axis)", "key", key.shape[-1], "query", query.shape[-1])
    _check_same("seqlen_k (the last axis but one)", "value", value.shape[-2], "key", key.shape[-2])

    if attn_mask is not None:
        if is_causal:
            raise ValueError("attn_mask must be None with is_causal=True, as in torch; got both. Make the causal mask part of attn_mask")
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask must be a torch tensor or None; got {type(attn_mask).__name__}")

    axes = max(query.dim(), key.dim(), value.dim())
    query, key, value = (x[(None,) * (max(axes, 4) - x.dim())] for x in (query, key, value))
    query, key, value = _join_heads(query, key, value, enable_gqa)
    lead = _broadcast("leading axes", *(x.shape[:-3] for x in (query, key, value)))
    q, k, v = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4).transpose(1, 2) for x in (query, key, value))
    options = {} if no_dropout(dropout_p) else {"dropout": dropout_p}
    if attn_mask is not None:
        name = "mask" if attn_mask.dtype is torch.bool else "bias"
        options[name] = _mask_of_batch(attn_mask, (*lead, query.shape[-3], query.shape[-2], key.shape[-2]))
    out = attention(q, k, v, scale=scale, causal="top_left" if is_causal else False, **options).transpose(1, 2)
    return out.unflatten(0, lead) if axes > 4 else out[(0,) * (4 - axes)]


def _mask_of_batch(mask, full):
    """A mask of any number of leading axes as one of a batch; broadcast axes stay so where there is only one leading axis."""
    try:
        torch.broadcast_shapes(mask.shape, full)
        if mask.dim() > len(full):
            raise RuntimeError
    except RuntimeError:
        raise ValueError(f"attn_mask must broadcast to (..., heads, seqlen_q, seqlen_k) = {tuple(full)}; got shape {tuple(mask.shape)}") from None
    if len(full) > 4 and mask.dim() > 3:
        mask = mask.expand(*full[:-3], *mask.shape[-3:]).flatten(0, -4)
    return mask


def _check_same(axis, name, got, other, want):
    if got != want:
        raise ValueError(f"{name} must have the same {axis} as {other}; got {got}, expected {want}")


def _join_heads(query, key, value, enable_gqa):
    """Heads as `attention` wants them: as many values as keys, and queries a multiple of that."""
    heads, key_heads, value_heads = (x.shape[-3] for x in (query, key, value))
    if enable_gqa:
        for name, n in (("key", key_heads), ("value", value_heads)):
            if n == 0 or heads % n:
                raise ValueError(f"query must have a multiple of the heads of {name} (axis -3, enable_gqa=True); got {heads} and {n}")
        if key_heads != value_heads:
            joint = math.lcm(key_heads, value_heads)  # divides the heads of query
            key, value = key.repeat_interleave(joint // key_heads, -3), value.repeat_interleave(joint // value_heads, -3)
        return query, key, value
    (heads,) = _broadcast("heads (axis -3; pass enable_gqa=True for grouped heads)", (heads,), (key_heads,), (value_heads,))
    joint = 1 if key_heads == value_heads == 1 else heads
    return tuple(x.expand(*x.shape[:-3], n, *x.shape[-2:]) for x, n in ((query, heads), (key, joint), (value, joint)))


def _broadcast(what, *shapes):
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        told = ", ".join(f"{tuple(shape)} of {name}" for name, shape in zip(("query", "key", "value"), shapes, strict=True))
        raise ValueError(f"{what} of query, key and value must broadcast; got {told}") from None


_replacing = threading.Lock()
_depth = 0
_original = None


def _lock():
    return nullcontext() if torch.compiler.is_dynamo_compiling() else _replacing  # torch.compile knows no locks, and traces in one thread


@contextmanager
def replace_sdpa():
    """Within the context, ``torch.nn.functional.scaled_dot_product_attention`` is `numbaflash.torch.scaled_dot_product_attention`.

    Models that call torch's function by its full name (``F.scaled_dot_product_attention``, ``torch.nn.MultiheadAttention`` in training)
    then run these kernels, without a change. A call that these kernels do not serve raises; nothing goes back to torch's.

    Contexts nest, and the last to be left restores torch's function, after an exception too. Usable as a decorator.

    Notes
    -----
    It replaces an attribute of a module: every thread of the process sees it, not the calling thread alone. Names bound before
    (``from torch.nn.functional import scaled_dot_product_attention``) keep torch's function. What torch.compile has traced inside the
    context keeps these kernels outside of it. Inside of a compiled function, the context holds for what is traced in it.

    Examples
    --------
    >>> import torch
    >>> import numbaflash.torch
    >>> q = torch.randn(1, 4, 32, 16)
    >>> with numbaflash.torch.replace_sdpa():
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> out.shape
    torch.Size([1, 4, 32, 16])
    """
    global _depth, _original
    functional = torch.nn.functional
    with _lock():
        if _depth == 0:
            _original = functional.scaled_dot_product_attention
        _depth += 1
        functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        with _lock():
            _depth -= 1
            if _depth == 0:
                functional.scaled_dot_product_attention = _original
                _original = None
