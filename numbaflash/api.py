"""The functions that users call."""

from __future__ import annotations

from . import recording
from .arrays import LIBRARIES, one_library
from .block_mask import mask_arrays
from .call import aligned_workspace, find, prepare, prepare_backward, run
from .dispatch import BACKWARD_OPERANDS, forced_family
from .explanation import explain as _explain
from .merging import merge as _merge
from .problem import (
    NEEDS,
    check_causal,
    check_dropout,
    check_flag,
    check_max_seqlen,
    check_needed,
    check_needs,
    check_num_splits,
    check_scale,
    check_seed,
    check_softcap,
    check_window,
)

__all__ = ["backward", "explain", "forward", "merge"]


def forward(
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
    out=None,
    lse=None,
    stream=None,
):
    """Exact attention, ``softmax(scale * q @ k.T, masked) @ v`` for every batch entry and head, without the matrix of scores.

    Tiling and the online softmax are Algorithm 1 of Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
    IO-Awareness" (2022), in the order of loops and with the late division of Dao, "FlashAttention-2: Faster Attention with Better
    Parallelism and Work Partitioning" (2023).

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads, head_dim)
        float16, bfloat16, float32 or float64, of NumPy, CuPy, PyTorch, JAX, Numba, or anything with ``__dlpack__`` or
        ``__cuda_array_interface__``. Any strides, 0 and negative included: pass a transposed view for other orders of axes.
        Accumulation and softmax are in float32 (float64 for float64).
    k : array, (batch, seqlen_k, kv_heads, head_dim)
        Same library, device and dtype. ``heads`` is a multiple of ``kv_heads`` (grouped-query attention); head dims are 1 to 256.
    v : array, (batch, seqlen_k, kv_heads, head_dim_v)
    scale : float, optional
        Factor of the scores; ``None`` is ``1 / sqrt(head_dim)``.
    causal : bool or "top_left", optional
        True: query i sees key j where ``j <= i + seqlen_k - seqlen_q`` (the last query sees every key).
        "top_left": where ``j <= i``.
    window : (int or None, int or None), optional
        Keys seen to the left and to the right of the place that ``causal`` aligns to, inclusive, so ``(w, 0)`` sees w + 1 keys; a side of
        ``None`` is unbounded.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)`` before anything is added to them.
    mask : array of bool, broadcast to (batch, heads, seqlen_q, seqlen_k), or BlockMask, optional
        True where a query may see a key, and causal, window and lengths let it. Up to 4 axes, any strides; never copied or expanded. Blocks of
        nothing but False are skipped; a `BlockMask` knows them beforehand, and needs no array of this size.
    bias : array, broadcast likewise, optional
        float16, bfloat16 or float32 (or float64 for q of float64); added to the scores. -inf is a weight of 0; unlike
        a mask it does not keep NaN in the key out. A row of nothing but numbers as low as finfo.min has no right gradients: its LSE has no room.
    alibi_slopes : array of float32, (heads,) or (batch, heads), optional
        ``-slope * abs(i + offset - j)`` is added to the score of query i and key j, where ``i + offset`` is the place that ``causal`` aligns to
        (Press et al., "Train Short, Test Long", 2022).
    sinks : array, (heads,), optional
        float32 (float64 for q of float64): one more logit a head, which joins the softmax of every query as a key without a value would.
    dropout : float, optional
        Probability, from 0 to below 1, that a weight is dropped after the softmax; kept ones are divided by ``1 - dropout``. It is taken to the
        nearest multiple of 2**-14 above 0 and below 1 (0 stays 0). The LSE is that without dropout.
    seed : int, optional
        Of the dropout mask, from 0 to below 2**64; needed with dropout. The mask depends on it and on batch entry, head, query and key alone, so
        it is the same in every kernel, and in `backward`.
    seqlens_q, seqlens_k : array of int32 or int64, (batch,), optional
        Lengths of padded batches, on the arrays' device; the host does not read them. Queries and keys from there on take no part, whatever they
        hold; rows of such queries are 0, their LSE -inf. ``causal``, ``window`` and ALiBi then align by these lengths.
    return_lse : bool, optional
        Also return the logarithm of the sum of exponentiated scores, sinks included.
    out : array, (batch, seqlen_q, heads, head_dim_v), optional
        Where to write the result: q's library, dtype and device, any strides that give each element its own place, no memory shared with
        the other arrays. Not for JAX.
    lse : array, (batch, heads, seqlen_q), optional
        Where to write the LSE, float32 (float64 for float64); it is filled whether or not it is returned. Not for JAX.
    stream : stream of CuPy, torch, Numba or CUDA Python, or int handle, optional
        CUDA stream to work on; by default the library's current stream on the arrays' device. Not for arrays on the CPU, nor for JAX.

    Returns
    -------
    out : array, (batch, seqlen_q, heads, head_dim_v)
        q's library, dtype and device, row-major if it is new. 0 in a row that sees no key. Arrays that only lend their memory (DLPack,
        ``__cuda_array_interface__``, Numba) get NumPy arrays on the CPU and Numba device arrays on CUDA.
    lse : array, (batch, heads, seqlen_q), only with ``return_lse``
        Natural logarithm; float32 (float64 for float64); -inf in a row that sees no key.

    Raises
    ------
    TypeError
        For a wrong kind or dtype: lists, integers, several libraries, torch.func tracing.
    ValueError
        For a wrong shape or value: several devices, deleted or read-only memory, a torch tensor that would be differentiated.
    UnsupportedError
        For a legal problem that no kernel family can compute; the message gives each one's reason.

    Notes
    -----
    The host does not wait for the device, and everything is allocated by the caller's library: a call can be captured in a CUDA graph
    (after one call of its kind, which loads the kernel). NaN and infinity in keys and values that no query may see have no effect.

    The result is not differentiable: `attention` is, in PyTorch and JAX, and `backward` computes the gradients by hand. A torch tensor that
    torch would differentiate is refused; call under ``torch.no_grad()``. In JAX, use ``jax.lax.stop_gradient``.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 100, 8, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 300, 2, 64), dtype=np.float32)
    >>> out, lse = nf.forward(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 100, 8, 64), (2, 8, 100))
    """
    if recording.active is not None and recording.is_outermost():
        return recording.noted(forward, locals())
    library = LIBRARIES.get(type(q))
    if library is None or LIBRARIES.get(type(k)) is not library or LIBRARIES.get(type(v)) is not library:
        library = one_library(q=q, k=k, v=v)
    if (out is not None and LIBRARIES.get(type(out)) is not library) or (lse is not None and LIBRARIES.get(type(lse)) is not library):
        one_library(**_present(q=q, out=out, lse=lse))
    if scale is not None and type(scale) is not float:
        scale = check_scale(scale, 1)
    if causal is not False and causal is not True:
        causal = check_causal(causal)
    if window is not None:
        window = check_window(window)
    if return_lse is not False and return_lse is not True:
        return_lse = check_flag("return_lse", return_lse)
    if not (softcap is mask is bias is alibi_slopes is sinks is seed is seqlens_q is seqlens_k is None and type(dropout) is float and dropout == 0.0):
        others = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
        arrays = mask_arrays(mask, q, k) | others
        options, seed = _check_options(library, q, arrays, scale, causal, window, softcap, dropout, seed)
        if library.forward is not None:
            more = {"seed": seed, "return_lse": return_lse, "out": out, "lse": lse, "stream": stream}
            return library.forward(q, k, v, **options, mask=mask, **others, **more)
        wanted = ("out", "lse") if return_lse else ("out",)
        found = run("forward", library, {"q": q, "k": k, "v": v} | arrays, {"out": out, "lse": lse}, wanted, options, stream, seed=seed)
        return (found["out"], found["lse"]) if return_lse else found["out"]
    if library.forward is not None:
        return library.forward(q, k, v, scale=scale, causal=causal, window=window, return_lse=return_lse, out=out, lse=lse, stream=stream)

    inspect = library.inspect
    out_key = lse_key = None
    lse_at = 0
    try:
        q_at, q_key = inspect(q)
        k_at, k_key = inspect(k)
        v_at, v_key = inspect(v)
        if out is not None:
            out_at, out_key = library.inspect_result(out)
        if lse is not None:
            lse_at, lse_key = library.inspect_result(lse)
    except Exception:
        for name, x in _present(q=q, k=k, v=v, out=out, lse=lse).items():
            library.describe(x, name)  # says for people what is wrong
        raise
    with_lse = return_lse or lse is not None
    key = (library, q_key, k_key, v_key, scale, causal, window, with_lse, out_key, lse_key, forced_family())
    call = find(key)
    if call is None:
        options = {"scale": scale, "causal": causal, "window": window}
        call = prepare(key, library, _present(q=q, k=k, v=v, out=out, lse=lse), options, with_lse)

    place, handle = (None, call.current_stream()) if stream is None else call.on(stream)
    if out_key is None:
        out = call.new["out"](place)
        out_at = library.address(out)
    if with_lse and lse_key is None:
        lse = call.new["lse"](place)
        lse_at = library.address(lse)

    apart = call.apart
    if (
        call.simple
        and (q_at and k_at and v_at and out_at)
        and (apart(q_at, k_at, v_at, out_at, lse_at) if apart is not None else not (out_at | lse_at) & 15)
    ):
        call.launch((q_at, k_at, v_at, out_at, lse_at), handle)
    elif call.launch is not None:
        if (out_key is None and out_at & 15) or (lse_key is None and lse_at & 15):  # less than every plan takes for granted: another kind
            options = {"scale": scale, "causal": causal, "window": window}
            return forward(q, k, v, **options, return_lse=return_lse, out=out, lse=lse, stream=stream)
        arrays = _present(q=q, k=k, v=v, out=out, lse=lse)
        addresses = {"q": q_at, "k": k_at, "v": v_at, "out": out_at, "lse": lse_at}
        call.launch_checked(library, arrays, addresses, place, handle)
    if place is not None:
        library.used_on(place, _present(q=q, k=k, v=v, out=out, lse=lse).values())
    if out_key is not None:
        library.written(out)
    if lse_key is not None:
        library.written(lse)
    return (out, lse) if return_lse else out


def backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
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
    dlse=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    dbias=None,
    dsinks=None,
    needs=NEEDS,
    stream=None,
):
    """Gradients of exact attention with respect to q, k and v, from what `forward` returned, without the matrix of scores.

    The weights are computed again from q, k and the saved LSE: Algorithm 2 of Dao, "FlashAttention-2: Faster Attention with Better
    Parallelism and Work Partitioning" (2023), Algorithm 4 of Dao et al., "FlashAttention" (2022). With ``p = exp(scale * q @ k.T - lse)``
    and ``delta = rowsum(dout * out) - dlse``, they are ``dv = p.T @ dout``, ``ds = p * (dout @ v.T - delta)``, ``dq = scale * ds @ k`` and
    ``dk = scale * ds.T @ q``.

    Parameters
    ----------
    dout : array, (batch, seqlen_q, heads, head_dim_v)
        Gradient of the loss with respect to ``out``: q's library, device and dtype, any strides, 0 (the gradient of a sum) included.
    q : array, (batch, seqlen_q, heads, head_dim)
        q, k, v and the options are those of the `forward` call.
    k : array, (batch, seqlen_k, kv_heads, head_dim)
    v : array, (batch, seqlen_k, kv_heads, head_dim_v)
    out : array, (batch, seqlen_q, heads, head_dim_v)
        What `forward` returned. The results of a merge over several parts of the keys serve as well: each part's gradients then add up to
        those of the whole.
    lse : array, (batch, heads, seqlen_q)
        What `forward` returned with ``return_lse=True``: float32 (float64 for float64).
    scale, causal, window, softcap, mask, bias, alibi_slopes, sinks, dropout, seed, seqlens_q, seqlens_k
        As `forward` takes them.
    dlse : array, (batch, heads, seqlen_q), optional
        Gradient of the loss with respect to the returned LSE, of the dtype of ``lse``.
    deterministic : bool, optional
        The same inputs give the same bits, at some cost of time and workspace. Otherwise sums may be taken in any order.
    dq : array, (batch, seqlen_q, heads, head_dim), optional
        Where to write the gradient of q: q's library, dtype and device, any strides that give each element its own place, no memory shared
        with the other arrays. What it holds is replaced, not added to.
    dk : array, (batch, seqlen_k, kv_heads, head_dim), optional
    dv : array, (batch, seqlen_k, kv_heads, head_dim_v), optional
    dbias : array of the shape and dtype of ``bias``, optional
    dsinks : array, (heads,), optional
    needs : tuple of "q", "k", "v", "bias" and "sinks", optional
        The inputs whose gradients are wanted; the others are not computed. The last two must be named, and are returned only then.
    stream : stream of CuPy, torch, Numba or CUDA Python, or int handle, optional
        CUDA stream to work on, as in `forward`.

    Returns
    -------
    dq : array, (batch, seqlen_q, heads, head_dim), or None
        q's library, dtype and device, row-major if it is new; None when not in ``needs``. Sums are in float32 (float64 for float64) and
        rounded once. 0 in a row that sees no key.
    dk : array, (batch, seqlen_k, kv_heads, head_dim), or None
        Summed over the query heads that share the key head. 0 for a key that no query sees.
    dv : array, (batch, seqlen_k, kv_heads, head_dim_v), or None
    dbias : array, shape and dtype of ``bias``, only with "bias" in ``needs``
        Summed over the axes that the bias is broadcast along.
    dsinks : array, (heads,), dtype of ``sinks``, only with "sinks" in ``needs``

    Raises
    ------
    TypeError
        For a wrong kind or dtype: integers, ``lse`` of None, several libraries, JAX arrays (differentiate `numbaflash.jax.attention`).
    ValueError
        For a wrong shape or value: ``out`` or ``lse`` of another problem, an unknown name in ``needs``, a gradient that is given and not
        needed.
    UnsupportedError
        For a legal problem whose gradients no kernel family can compute; the message gives each one's reason.

    Notes
    -----
    The host does not wait for the device, and everything, a workspace that grows with the lengths and not with their product included, is
    allocated by the caller's library: a call can be captured in a CUDA graph after one call of its kind. NaN and infinity in keys and values
    that no query sees, and in rows of q, out and dout that see no key, have no effect.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 100, 8, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 300, 2, 64), dtype=np.float32)
    >>> out, lse = nf.forward(q, k, v, causal=True, return_lse=True)
    >>> dout = np.broadcast_to(np.float32(1), out.shape)  # of loss = out.sum()
    >>> dq, dk, dv = nf.backward(dout, q, k, v, out, lse, causal=True)
    >>> dq.shape, dk.shape, dv.shape
    ((2, 100, 8, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    >>> nf.backward(dout, q, k, v, out, lse, causal=True, needs=("v",))[:2]
    (None, None)
    """
    if recording.active is not None and recording.is_outermost():
        return recording.noted(backward, locals())
    kind = LIBRARIES.get
    library = kind(type(q))
    if library is None or not (library is kind(type(dout)) is kind(type(k)) is kind(type(v)) is kind(type(out)) is kind(type(lse))):
        for name, x in (("out", out), ("lse", lse)):
            if x is None:
                raise TypeError(f"{name} is missing: the backward needs the {name} that numbaflash.forward(..., return_lse=True) returned; got None")
        library = one_library(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    if needs != NEEDS:
        needs = check_needs(needs, [name for name, x in (("bias", bias), ("sinks", sinks)) if x is not None])
    if dlse is not None and kind(type(dlse)) is not library:
        one_library(q=q, dlse=dlse)
    for name, given in (("q", dq), ("k", dk), ("v", dv), ("bias", dbias), ("sinks", dsinks)):
        if given is not None:
            check_needed(name, needs)
            if kind(type(given)) is not library:
                one_library(q=q, **{f"d{name}": given})
    if scale is not None and type(scale) is not float:
        scale = check_scale(scale, 1)
    if causal is not False and causal is not True:
        causal = check_causal(causal)
    if window is not None:
        window = check_window(window)
    if deterministic is not False and deterministic is not True:
        deterministic = check_flag("deterministic", deterministic)
    if not (softcap is mask is bias is alibi_slopes is sinks is seed is seqlens_q is seqlens_k is None and type(dropout) is float and dropout == 0.0):
        others = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
        arrays = mask_arrays(mask, q, k) | others
        options, seed = _check_options(library, q, arrays, scale, causal, window, softcap, dropout, seed)
        results = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
        more = {"seed": seed, "deterministic": deterministic, "needs": needs}
        if library.backward is not None:
            more |= {"dlse": dlse, "stream": stream}
            return library.backward(dout, q, k, v, out, lse, **options, mask=mask, **others, **results, **more)
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse} | arrays
        found = run("backward", library, arrays, results, tuple(f"d{name}" for name in needs), options, stream, **more)
        return (*map(found.get, ("dq", "dk", "dv")), *(found[f"d{name}"] for name in needs if name not in NEEDS))
    options = {"scale": scale, "causal": causal, "window": window}
    if library.backward is not None:
        more = {"dlse": dlse, "deterministic": deterministic, "dq": dq, "dk": dk, "dv": dv, "needs": needs, "stream": stream}
        return library.backward(dout, q, k, v, out, lse, **options, **more)

    inspect = library.inspect
    dlse_key = dq_key = dk_key = dv_key = None
    dlse_at = dq_at = dk_at = dv_at = workspace_at = 0
    try:
        dout_at, dout_key = inspect(dout)
        q_at, q_key = inspect(q)
        k_at, k_key = inspect(k)
        v_at, v_key = inspect(v)
        out_at, out_key = inspect(out)
        lse_at, lse_key = inspect(lse)
        if dlse is not None:
            dlse_at, dlse_key = inspect(dlse)
        if dq is not None:
            dq_at, dq_key = library.inspect_result(dq)
        if dk is not None:
            dk_at, dk_key = library.inspect_result(dk)
        if dv is not None:
            dv_at, dv_key = library.inspect_result(dv)
    except Exception:
        for name, x in _present(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, dq=dq, dk=dk, dv=dv).items():
            library.describe(x, name)
        raise
    inputs = (dout_key, q_key, k_key, v_key, out_key, lse_key, dlse_key)
    key = (library, inputs, dq_key, dk_key, dv_key, scale, causal, window, deterministic, needs, forced_family())
    call = find(key)
    if call is None:
        arrays = _present(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, dq=dq, dk=dk, dv=dv)
        call = prepare_backward(key, library, arrays, options, needs, deterministic)

    place, handle = (None, call.current_stream()) if stream is None else call.on(stream)
    new = call.new
    if dq_key is None and "q" in needs:
        dq = new["dq"](place)
        dq_at = library.address(dq)
    if dk_key is None and "k" in needs:
        dk = new["dk"](place)
        dk_at = library.address(dk)
    if dv_key is None and "v" in needs:
        dv = new["dv"](place)
        dv_at = library.address(dv)
    if call.workspace is not None:
        workspace = call.workspace(place)
        workspace_at = aligned_workspace(library.address(workspace))

    addresses = dout_at, q_at, k_at, v_at, out_at, lse_at, dlse_at, dq_at, dk_at, dv_at, workspace_at
    apart = call.apart
    if (
        call.simple
        and (dout_at and q_at and k_at and v_at and out_at and lse_at and (dlse_at or dlse_key is None))
        and (apart(*addresses) if apart is not None else not (dq_at | dk_at | dv_at) & 15)
    ):
        call.launch(addresses, handle)
    else:
        arrays = _present(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, dq=dq, dk=dk, dv=dv)
        if call.launch is None:
            call.check_addresses(dict(zip(BACKWARD_OPERANDS, addresses, strict=True)))
            for x in (dq, dk, dv):
                if x is not None:
                    library.clear(x, place)
        elif (dq_key is None and dq_at & 15) or (dk_key is None and dk_at & 15) or (dv_key is None and dv_at & 15):
            more = {"dlse": dlse, "deterministic": deterministic, "needs": needs, "stream": stream}  # another kind, as in `forward`
            return backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options, **more)
        else:
            call.launch_checked(library, arrays, dict(zip(BACKWARD_OPERANDS, addresses, strict=True)), place, handle)
    if place is not None:
        library.used_on(place, _present(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, dq=dq, dk=dk, dv=dv).values())
    if dq_key is not None:
        library.written(dq)
    if dk_key is not None:
        library.written(dk)
    if dv_key is not None:
        library.written(dv)
    return dq, dk, dv


def _check_options(library, q, arrays, scale, causal, window, softcap, dropout, seed):
    """(options that are numbers, seed), checked as far as they can be without a look at the arrays but for their libraries."""
    for name, x in arrays.items():
        if x is not None and LIBRARIES.get(type(x)) is not library:
            one_library(q=q, **{"mask" if name == "block_mask" else name: x})
    dropout = check_dropout(dropout)
    options = {"scale": scale, "causal": causal, "window": window, "softcap": check_softcap(softcap), "dropout": dropout}
    return options, check_seed(seed, dropout)


def _present(**arrays) -> dict:
    return {name: x for name, x in arrays.items() if x is not None}


def merge(outs, lses):
    """Merge attention over parts of the keys into attention over all of them: the block merge of the online softmax.

    With ``m`` the largest LSE of a row, ``lse = m + log(sum_i exp(lse_i - m))`` and ``out = sum_i exp(lse_i - lse) * out_i``: the
    rescaling step of Algorithm 1 in Dao et al., "FlashAttention" (2022), for blocks of any size and any order.

    Parameters
    ----------
    outs : sequence of array, each (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v) of packed sequences
        One or more partial results of the same queries; float16, bfloat16, float32 or float64 of one library and device, any strides.
    lses : sequence of array, each (batch, heads, seqlen_q), or (heads, total_q)
        Their LSE: float32 (float64 for float64 outs). A row of -inf has seen no key and changes nothing, whatever its out holds.

    Returns
    -------
    out : array, shape of each of ``outs``
        Their dtype and library, computed in float32 (float64 for float64). 0 in a row that no part has a key for.
        Arrays that only lend their memory get NumPy arrays on the CPU and Numba device arrays on CUDA, as from `forward`.
    lse : array, shape of each of ``lses``
        -inf in such a row. PyTorch and JAX differentiate both results; a part's row without a key has gradients of 0.

    Raises
    ------
    TypeError
        For a wrong kind or dtype, or several libraries.
    ValueError
        For no part at all, a wrong shape, or several devices.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 60, 2, 32), dtype=np.float32)
    >>> parts = [nf.forward(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 20), slice(20, 60))]
    >>> out, lse = nf.merge(*zip(*parts))
    >>> bool(np.allclose(out, nf.forward(q, k, v), atol=1e-5))
    True
    """
    return _merge(outs, lses)


def explain(
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
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    num_splits=None,
    return_lse=False,
    out=None,
    lse=None,
    direction="forward",
    deterministic=False,
    dout=None,
    dlse=None,
    dq=None,
    dk=None,
    dv=None,
    dbias=None,
    dsinks=None,
    needs=NEEDS,
):
    """Say how `forward`, `backward` or `decode` would run these arguments: which kernel, which tiles, and why not another. Nothing is run.

    With ``cu_seqlens_q`` and ``cu_seqlens_k``, how `forward_varlen` or `backward_varlen` would. For `decode`, k and v are the caches.

    Parameters
    ----------
    q, k, v, scale, causal, window, softcap, mask, bias, alibi_slopes, sinks, dropout, seqlens_q, seqlens_k, return_lse, out, lse
        As `forward` takes them; with the same checks. The values in the arrays are not read.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k : optional
        As `forward_varlen` takes them; then mask, bias and lengths are refused, which it does not take.
    page_table, num_splits : optional
        As `decode` takes them, for ``direction="decode"`` alone.
    seed : int, optional
        Checked, and not needed: no plan depends on it.
    direction : "forward", "backward" or "decode", optional
        For "decode", what `decode` does not take is refused, and ``seqlens_k`` is needed. For "backward", ``out`` and ``lse`` are what is read; where
        they are not given, they are row-major. An LSE is part of it, whatever ``return_lse`` says.
    deterministic : bool, optional
        As `backward` takes it. `forward` always is.
    dout, dlse, dq, dk, dv, dbias, dsinks, needs : optional
        As `backward` takes them, for ``direction="backward"`` alone. dout is row-major where it is not given.

    Returns
    -------
    Explanation
        Print it, or read ``plan`` (family, tile configuration, grid, threads, shared memory, copies with their reasons), ``resources``
        (registers, spills; the kernel is compiled for them if it has not been) and ``families`` (why each other one was not chosen).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As the function that is asked about; ValueError also for an argument that it has not.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> x = np.zeros((1, 128, 4, 64), np.float32)
    >>> told = nf.explain(x, x, x, causal=True, mask=np.ones((128, 128), bool))
    >>> told.plan.family, told.families["sm90"][0]
    ('cpu', 'it needs a Hopper GPU (compute capability 9.0); this is a CPU')
    """
    arrays = {"q": q, "k": k, "v": v} | mask_arrays(mask, q, k) | {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    arrays |= {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "out": out, "lse": lse}
    gradients = {"dout": dout, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": check_dropout(dropout)}
    check_seed(0 if seed is None else seed, 0)
    caches = _present(page_table=page_table, num_splits=num_splits)
    if direction == "decode":
        given = {"mask": mask, "bias": bias, "seqlens_q": seqlens_q, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        given |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "dropout": options.pop("dropout") or None, "seed": seed}
        if others := _present(**given):
            raise ValueError(f"numbaflash.decode has no {', '.join(others)}; leave {'them' if len(others) > 1 else 'it'} out")
        if seqlens_k is None:
            raise TypeError("seqlens_k must be an array of int32 or int64, (batch,): the valid keys of each sequence; got None")
        more = {"direction": direction, "return_lse": return_lse, "deterministic": deterministic, "needs": needs}
        arrays["page_table"] = page_table
        return _explain(_present(**arrays), _present(**gradients), options, **more, num_splits=check_num_splits(num_splits))
    if caches:
        raise ValueError(f'{", ".join(caches)}: for decoding alone; pass direction="decode" as well')
    packing = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if given := _present(**packing):
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ValueError(f"packed sequences need both cu_seqlens_q and cu_seqlens_k; got {', '.join(given)} alone")
        if others := _present(mask=mask, bias=bias, seqlens_q=seqlens_q, seqlens_k=seqlens_k):
            raise ValueError(f"packed sequences have no {', '.join(others)}; leave {'them' if len(others) > 1 else 'it'} out")
        options |= {"max_seqlen_q": check_max_seqlen("max_seqlen_q", max_seqlen_q), "max_seqlen_k": check_max_seqlen("max_seqlen_k", max_seqlen_k)}
    more = {"direction": direction, "return_lse": return_lse, "deterministic": deterministic, "needs": needs}
    return _explain(_present(**arrays), _present(**gradients), options, mask=mask, **more)
