"""``xformers.ops.memory_efficient_attention`` with its signature and its meaning.

The objects that xformers has for masks are known by the names of their classes: xformers need not be installed, and is not imported.
"""

from __future__ import annotations

import torch

from ..problem import PACKED, UnsupportedError, no_dropout
from ..torch import attention, attention_varlen

__all__ = ["memory_efficient_attention"]


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """``xformers.ops.memory_efficient_attention``.

    Parameters
    ----------
    query : Tensor, (batch, seqlen_q, heads, head_dim), (batch, seqlen_q, head_dim) or (batch, seqlen_q, groups, heads, head_dim)
    key : Tensor, (batch, seqlen_k, heads, head_dim) or as many axes as query
    value : Tensor, (batch, seqlen_k, heads, head_dim_v) or as many axes as query
        Without an axis of heads there is one. With groups, the heads of a group that share their keys and values are expanded: of stride 0, and
        read once. All are differentiable.
    attn_bias : optional
        What is added to the scores, a Tensor of a float dtype that broadcasts to (batch, heads, seqlen_q, seqlen_k), without the axis of heads
        or with groups as query has them, and differentiable; or a mask of xformers: ``LowerTriangularMask`` (aligned at the top left),
        ``LowerTriangularMaskWithTensorBias``, ``LowerTriangularFromBottomRightMask``, ``LowerTriangularFromBottomRightLocalAttentionMask``,
        ``LocalAttentionFromBottomRightMask``; or, for sequences that lie one after the other in a batch of 1, ``BlockDiagonalMask``,
        ``BlockDiagonalCausalMask``, ``BlockDiagonalCausalFromBottomRightMask``, ``BlockDiagonalCausalLocalAttentionMask``,
        ``BlockDiagonalCausalLocalAttentionFromBottomRightMask``, computed as `numbaflash.attention_varlen` does.
    p : float, optional
        Probability, below 1, that a weight is dropped; the seed comes from torch's generator of the CPU.
    scale : float, optional
        ``None`` is ``1 / sqrt(head_dim)``.
    op : None, optional
        Chooses among the kernels of xformers, of which there is none here.
    output_dtype : torch.dtype, optional
        That of query, or None for the same.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, heads, head_dim_v), or with the axes that query has
        A row that sees no key is 0.

    Raises
    ------
    TypeError, ValueError
        For a wrong kind, dtype, shape or value.
    UnsupportedError
        For other masks of xformers (block-diagonal ones with padded, gappy or paged keys), another ``output_dtype``, and as
        `numbaflash.torch.attention`.

    Examples
    --------
    >>> import torch
    >>> from numbaflash.compat.xformers import memory_efficient_attention
    >>> q = torch.randn(2, 10, 4, 16)
    >>> memory_efficient_attention(q, q, q, attn_bias=torch.zeros(1, 4, 10, 10)).shape
    torch.Size([2, 10, 4, 16])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            raise ValueError(f"query, key and value must all have 3, 4 or 5 axes; got {query.dim()} of query and {x.dim()} of {name}")
    if op is not None:
        raise ValueError(f"op must be None: it chooses among the kernels of xformers, and these are others; got {op!r}")
    if output_dtype not in (None, query.dtype):
        raise UnsupportedError(f"output_dtype must be that of query, {query.dtype}; got {output_dtype}. Convert the result")
    axes = query.dim()
    options = _options(attn_bias, axes)
    if not no_dropout(p):
        options["dropout"] = p
    if axes == 5:
        _check_groups(query, key, value)
        if "bias" in options:
            options["bias"] = _joined_groups(options["bias"], query)
    q, k, v = _joined_heads(query), *_shared_heads(key, value)
    if "cu_seqlens_q" in options:
        _check_packed(attn_bias, query, key, value)
        boundaries = [options.pop(name).to(query.device) for name in PACKED]
        out = attention_varlen(q[0], k[0], v[0], *boundaries, scale=scale, **options).unsqueeze(0)
    else:
        out = attention(q, k, v, scale=scale, **options)
    return out[:, :, 0] if axes == 3 else out.unflatten(2, query.shape[2:4]) if axes == 5 else out


def _options(attn_bias, axes) -> dict:
    """Keyword arguments of `numbaflash.attention` that mean the same."""
    if attn_bias is None:
        return {}
    of_kind = _KINDS.get(type(attn_bias).__name__)
    if of_kind is not None:
        options = of_kind(attn_bias)
    elif isinstance(attn_bias, torch.Tensor) and not hasattr(attn_bias, "materialize") and not hasattr(attn_bias, "_materialize"):
        options = {"bias": attn_bias}
    elif hasattr(attn_bias, "materialize") or hasattr(attn_bias, "_materialize"):
        raise UnsupportedError(f"attn_bias must be None, a tensor, {', '.join(_KINDS)}; got {type(attn_bias).__name__}")
    else:
        raise TypeError(f"attn_bias must be None, a tensor or a mask of xformers; got {type(attn_bias).__name__}")
    bias = options.get("bias")
    if bias is not None:
        if not bias.is_floating_point():
            raise TypeError(f"attn_bias must be of a float dtype; got {bias.dtype}. For a mask of bool, use numbaflash.attention(mask=...)")
        if bias.dim() != axes:
            raise ValueError(f"attn_bias must have as many axes as query, {axes}; got shape {tuple(bias.shape)}")
        options["bias"] = bias.unsqueeze(1) if axes == 3 else bias
    return options


def _packed(**band):
    """Options of a block-diagonal mask, whose blocks have this band."""
    return lambda mask: {
        **{f"cu_seqlens_{name}": of.seqstart for name, of in (("q", mask.q_seqinfo), ("k", mask.k_seqinfo))},
        **{f"max_seqlen_{name}": max(of.max_seqlen, 0) for name, of in (("q", mask.q_seqinfo), ("k", mask.k_seqinfo))},
        **band,
        **({"window": (mask._window_size - 1, None)} if hasattr(mask, "_window_size") else {}),
    }


_KINDS = {
    "LowerTriangularMask": lambda mask: {"causal": "top_left"},
    "LowerTriangularMaskWithTensorBias": lambda mask: {
        "causal": "top_left",
        "bias": mask._subtensor if hasattr(mask, "_subtensor") else mask._bias,  # the latter in old versions
    },
    "LowerTriangularFromBottomRightMask": lambda mask: {"causal": True},
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda mask: {"causal": True, "window": (mask._window_size - 1, None)},
    "LocalAttentionFromBottomRightMask": lambda mask: {"window": (mask.window_left, mask.window_right)},
    "BlockDiagonalMask": _packed(),
    "BlockDiagonalCausalMask": _packed(causal="top_left"),
    "BlockDiagonalCausalFromBottomRightMask": _packed(causal=True),
    "BlockDiagonalCausalLocalAttentionMask": _packed(causal="top_left"),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _packed(causal=True),
}


def _check_packed(mask, query, key, value):
    """The host knows the boundaries of a block-diagonal mask, and xformers wants them to end where the tensors do."""
    for name, x, of in (("query", query, mask.q_seqinfo), ("key", key, mask.k_seqinfo), ("value", value, mask.k_seqinfo)):
        if x.shape[0] != 1:
            raise ValueError(f"{name} must have a batch (axis 0) of 1 with {type(mask).__name__}; got {x.shape[0]}")
        if x.shape[1] != of.seqstart_py[-1]:
            raise ValueError(f"{name} must have the {of.seqstart_py[-1]} rows (axis 1) of the sequences of attn_bias; got {x.shape[1]}")


def _check_groups(query, key, value):
    for name, x in (("key", key), ("value", value)):
        if x.shape[2:4] != query.shape[2:4]:
            raise ValueError(f"{name} must have the groups and heads (axes 2 and 3) of query, {tuple(query.shape[2:4])}; got {tuple(x.shape[2:4])}")


def _joined_groups(bias, query):
    """A bias of (batch, groups, heads, seqlen_q, seqlen_k) with one axis of heads, broadcast where it is along both."""
    groups, heads = query.shape[2:4]
    if bias.shape[1] not in (1, groups) or bias.shape[2] not in (1, heads):
        raise ValueError(f"attn_bias must broadcast to the groups and heads of query (axes 1 and 2), {(groups, heads)}; got {tuple(bias.shape)}")
    return bias[:, 0] if bias.shape[1] == bias.shape[2] == 1 else bias.expand(-1, groups, heads, -1, -1).flatten(1, 2)


def _joined_heads(x):
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def _shared_heads(key, value):
    """Keys and values with the heads that differ: one a group where both are expanded along the heads of a group."""
    if key.dim() == 5 and key.stride(3) == value.stride(3) == 0 and key.shape[3]:
        return key[:, :, :, 0], value[:, :, :, 0]
    return _joined_heads(key), _joined_heads(value)
