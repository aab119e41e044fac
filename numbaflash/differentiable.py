"""`numbaflash.attention`: the forward whose derivative the caller's library knows."""

from __future__ import annotations

from . import api
from .arrays import LIBRARIES, in_torch_compile, one_library
from .problem import check_flag, no_dropout

__all__ = ["attention"]


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    mask=None,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0,
    seed=None,
    seqlens_q=None,
    seqlens_k=None,
    return_lse=False,
    deterministic=False,
):
    """Exact attention that PyTorch and JAX differentiate.

    The backward computes the scores again from q, k and the log-sum-exp (Algorithm 4 of Dao et al., "FlashAttention", 2022): nothing of size
    seqlen_q x seqlen_k is kept.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads, head_dim)
    k : array, (batch, seqlen_k, kv_heads, head_dim)
    v : array, (batch, seqlen_k, kv_heads, head_dim_v)
        As `forward` takes them. PyTorch tensors of which any may require a gradient, in eager mode, under ``torch.autocast``, in checkpoints and
        inside ``torch.compile``; JAX arrays and tracers, under ``grad``, ``jit``, ``vmap``, ``checkpoint`` and ``shard_map``. Arrays of other
        libraries have no derivative: there this is `forward`, and `backward` is called by hand.
    scale : float, optional
        Factor of the scores; ``None`` is ``1 / sqrt(head_dim)``.
    causal : bool or "top_left", optional
        As in `forward`.
    window : (int or None, int or None), optional
        As in `forward`.
    softcap, mask, alibi_slopes, dropout, seqlens_q, seqlens_k
        As in `forward`.
    bias, sinks : array, optional
        As in `forward`, and differentiated like q, k and v.
    seed : int, optional
        Of the dropout mask. In PyTorch None draws one from torch's generator of the CPU; elsewhere it is needed with dropout.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores, which is differentiable too.
    deterministic : bool, optional
        The same inputs give the same gradients, bit for bit; slower. (The forward always does.) PyTorch's
        ``torch.use_deterministic_algorithms(True)`` turns it on as well.

    Returns
    -------
    out : array, (batch, seqlen_q, heads, head_dim_v)
    lse : array, (batch, heads, seqlen_q), only with ``return_lse``
        As from `forward`.

    Raises
    ------
    TypeError
        For a wrong kind or dtype, and under torch.func transformations.
    ValueError
        For a wrong shape or value.
    UnsupportedError
        For a problem or gradients that no kernel family can compute, and for second derivatives.

    Examples
    --------
    >>> import jax
    >>> import numbaflash as nf
    >>> q, k, v = (jax.random.normal(key, (1, 32, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
    >>> dq, dk, dv = jax.grad(lambda *arrays: nf.attention(*arrays, causal=True).sum(), (0, 1, 2))(q, k, v)
    >>> dq.shape
    (1, 32, 4, 16)
    """
    options = {"scale": scale, "causal": causal, "window": window, "return_lse": return_lse}
    if not (softcap is mask is bias is alibi_slopes is sinks is seed is seqlens_q is seqlens_k is None and no_dropout(dropout)):
        options |= {"softcap": softcap, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
        options |= {"dropout": dropout, "seed": seed, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    if in_torch_compile():
        from .torch import attention

        return attention(q, k, v, **options, deterministic=deterministic)
    library = LIBRARIES.get(type(q))
    if library is None or LIBRARIES.get(type(k)) is not library or LIBRARIES.get(type(v)) is not library:
        library = one_library(q=q, k=k, v=v)
    deterministic = check_flag("deterministic", deterministic)
    if library.attention is not None:
        return library.attention(q, k, v, **options, deterministic=deterministic)
    return api.forward(q, k, v, **options)
