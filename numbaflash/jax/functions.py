"""What users call: attention that JAX differentiates, and the forward of `numbaflash.forward` for JAX arrays."""

from __future__ import annotations

import jax

from .. import recording
from ..arrays.jax import JAX
from ..block_mask import mask_arrays
from ..problem import (
    NEEDS,
    OPTIONS,
    PACKED,
    check_causal,
    check_dropout,
    check_flag,
    check_max_seqlen,
    check_scale,
    check_seed,
    check_softcap,
    check_window,
)
from .launches import forward_launch, write_options
from .operations import DECODING, FORWARD_ONLY, differentiable, operation
from .shards import varying_alike


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
    dropout=0.0,
    seed=None,
    seqlens_q=None,
    seqlens_k=None,
    return_lse=False,
    deterministic=False,
):
    """Exact attention that JAX differentiates (reverse mode): `numbaflash.attention` for JAX arrays.

    Parameters
    ----------
    q : Array, (batch, seqlen_q, heads, head_dim)
    k : Array, (batch, seqlen_k, kv_heads, head_dim)
    v : Array, (batch, seqlen_k, kv_heads, head_dim_v)
        float16, bfloat16, float32 or (with x64 enabled) float64, on the CPU or a CUDA device, eagerly and under ``jit``, ``grad``, ``vmap``,
        ``checkpoint`` and ``shard_map``. What no derivative is taken of costs nothing in the backward.
    scale, causal, window, softcap, dropout
        As in `numbaflash.forward`. They are part of the program: Python values, not traced ones.
    mask, alibi_slopes, seqlens_q, seqlens_k : Array, optional
        As in `numbaflash.forward`; a `BlockMask` may be an argument of a jitted function, and is built outside of it.
    bias, sinks : Array, optional
        As in `numbaflash.forward`, and differentiated like q, k and v.
    seed : int, optional
        Of the dropout mask, from 0 to below 2**64; needed with dropout. It is part of the program as well: a jitted function is compiled again for
        another seed (``static_argnames``), and drops the same weights in every call otherwise.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores, which is differentiable too.
    deterministic : bool, optional
        The same inputs give the same gradients, bit for bit. The forward always does.

    Returns
    -------
    out : Array, (batch, seqlen_q, heads, head_dim_v)
    lse : Array, (batch, heads, seqlen_q), only with ``return_lse``
        float32 (float64 for float64).

    Raises
    ------
    TypeError
        For a wrong kind or dtype, a traced seed among them, and from JAX under ``jvp``: there is no forward-mode derivative.
    ValueError
        For a wrong shape or value.
    UnsupportedError
        For a problem or gradients that no kernel family can compute, for ALiBi slopes that are differentiated, and when the gradients are
        differentiated again. Where XLA runs the operation by itself, under ``jit``, its own error has this one's message.

    Notes
    -----
    Saved for the backward are q, k, v, out and the log-sum-exp; scores are computed again (Dao et al., "FlashAttention", 2022, Algorithm 4).
    ``vmap`` adds to the batch: one launch for all. Where an option does not allow that, there is one for each element: sinks that differ, a mask
    or bias of several batch entries that leaves the batch axis out, and dropout, which gives each element the mask that it has by itself.

    Examples
    --------
    >>> import jax
    >>> import numbaflash.jax
    >>> q, k, v = (jax.random.normal(key, (1, 32, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
    >>> dv = jax.grad(lambda v: numbaflash.jax.attention(q, k, v, causal=True).sum())(v)
    >>> dv.shape
    (1, 32, 4, 16)
    """
    if recording.active is not None and recording.is_outermost():
        return recording.noted(attention, locals())
    arrays = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    arrays = mask_arrays(mask, q, k) | arrays
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": dropout, "deterministic": deterministic}
    return _attend({"q": q, "k": k, "v": v} | arrays, options, seed, return_lse)


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
    dropout=0.0,
    seed=None,
    return_lse=False,
    deterministic=False,
):
    """Exact attention of packed sequences that JAX differentiates: `numbaflash.attention_varlen` for JAX arrays.

    Parameters
    ----------
    q : Array, (total_q, heads, head_dim)
    k : Array, (total_k, kv_heads, head_dim)
    v : Array, (total_k, kv_heads, head_dim_v)
        As in `attention`, but for the axes. Under ``vmap`` there is a launch for each element.
    cu_seqlens_q, cu_seqlens_k : Array of int32 or int64, (batch + 1,)
        As in `numbaflash.forward_varlen`; traced under ``jit``: one program serves all boundaries of as many sequences.
    max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, alibi_slopes
        As in `numbaflash.forward_varlen`. Numbers are part of the program.
    sinks, dropout, seed, return_lse, deterministic
        As in `attention`.

    Returns
    -------
    out : Array, (total_q, heads, head_dim_v)
    lse : Array, (heads, total_q), only with ``return_lse``
        float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import jax
    >>> import numbaflash.jax
    >>> q, k, v = (jax.random.normal(key, (12, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
    >>> ends = jax.numpy.array([0, 5, 12])
    >>> dv = jax.grad(lambda v: numbaflash.jax.attention_varlen(q, k, v, ends, ends, causal=True).sum())(v)
    >>> dv.shape
    (12, 4, 16)
    """
    if recording.active is not None and recording.is_outermost():
        return recording.noted(attention_varlen, locals())
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": dropout, "deterministic": deterministic}
    options |= {"max_seqlen_q": check_max_seqlen("max_seqlen_q", max_seqlen_q), "max_seqlen_k": check_max_seqlen("max_seqlen_k", max_seqlen_k)}
    arrays = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "sinks": sinks}
    packing = _present({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    return _attend(arrays | packing, options, seed, return_lse)


def _attend(arrays, options, seed, return_lse):
    """Both of them; ``arrays`` in the order of operands, None for an option that there is not."""
    arrays = _present({name: x for name, x in arrays.items() if name in NEEDS or x is not None})
    if isinstance(seed, jax.Array):
        raise TypeError(
            f"seed must be an integer, known before the program runs; got {'a traced' if isinstance(seed, jax.core.Tracer) else 'a JAX'} array. "
            "Make it a static argument of the jitted function, or read it outside of it: int(jax.random.bits(key))"
        )
    scale, causal, window, softcap, dropout = (options.pop(name) for name in ("scale", "causal", "window", "softcap", "dropout"))
    scale, dropout = None if scale is None else check_scale(scale, 1), check_dropout(dropout)
    return_lse, options["deterministic"] = check_flag("return_lse", return_lse), check_flag("deterministic", options["deterministic"])
    options = write_options(arrays, scale, check_causal(causal), check_window(window), check_softcap(softcap), dropout, **options)
    seed = check_seed(seed, dropout)
    _build_early(options, return_lse, arrays)
    return differentiable(options, seed if dropout else 0, return_lse)(*varying_alike(*arrays.values()))


def forward(q, k, v, *, scale, causal, window, return_lse, softcap=None, dropout=0.0, seed=0, max_seqlen_q=None, max_seqlen_k=None, **arrays):
    """`numbaflash.forward` and `numbaflash.forward_varlen` for JAX arrays and tracers, with checked options."""
    arrays |= mask_arrays(arrays.get("mask"), q, k)
    arrays = {"q": q, "k": k, "v": v} | {name: arrays[name] for name in OPTIONS + PACKED if arrays.get(name) is not None}
    more = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k} if PACKED[0] in arrays else {}
    options = write_options(arrays, scale, causal, window, softcap, dropout, **more)
    _build_early(options, return_lse, arrays)
    return operation(options, seed if dropout else 0, return_lse, FORWARD_ONLY)(*varying_alike(*arrays.values()))


def decode(q, k_cache, v_cache, *, scale, causal, window, softcap, return_lse, num_splits, **arrays):
    """`numbaflash.decode` for JAX arrays and tracers, with checked options."""
    arrays = {"q": q, "k": k_cache, "v": v_cache} | {name: arrays[name] for name in OPTIONS if arrays.get(name) is not None}
    options = write_options(arrays, scale, causal, window, softcap, 0.0, num_splits=num_splits)
    _build_early(options, return_lse, arrays)
    return operation(options, 0, return_lse, DECODING)(*varying_alike(*arrays.values()))


def _present(arrays):
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} must be a JAX array; got {type(x).__name__}. Convert it with jax.numpy.asarray")
    return arrays


def _build_early(options, with_lse, arrays):
    """Errors and compilation come here, in the caller's thread, rather than in XLA's."""
    facts = {name: JAX.describe(x, name) for name, x in arrays.items()}
    if not any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        shapes, dtypes = tuple(each.shape for each in facts.values()), tuple(each.dtype for each in facts.values())
        forward_launch(options, with_lse, shapes, dtypes, facts["q"].kind, facts["q"].index, ())
