"""The functions of flash_attn, with its signatures and its meaning.

In place of ``from flash_attn import flash_attn_func`` write ``from numbaflash.compat.flash_attn import flash_attn_func``. On any device and in
any dtype that numbaflash has, with head dims of the value that may differ. Of the varlen functions, the one of three tensors is here.

Two results differ: the LSE of a row that sees no key is -inf, where flash_attn has +inf; and the LSE has a gradient, where flash_attn takes it
for a constant.
"""

from __future__ import annotations

import functools
import numbers
import operator

import torch

from ..problem import UnsupportedError, check_flag, no_dropout
from ..torch import attention, attention_varlen

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"]


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
