"""The functions that users call."""

from __future__ import annotations

from .arrays import LIBRARIES, one_library
from .arrays.streams import stream_handle
from .call import find, prepare
from .dispatch import forced_family
from .explanation import Explanation
from .explanation import explain as _explain
from .merging import merge as _merge
from .problem import check_causal, check_flag, check_scale, check_window

__all__ = ["Explanation", "explain", "forward", "merge"]


def forward(q, k, v, *, scale=None, causal=False, window=None, return_lse=False, out=None, lse=None, stream=None):
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
    return_lse : bool, optional
        Also return the logarithm of the sum of exponentiated scores.
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

    The result is not differentiable. A torch tensor that torch would differentiate is refused; call under ``torch.no_grad()``. In JAX,
    use ``jax.lax.stop_gradient``.

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

    if stream is None:
        place, handle = None, call.current_stream()
    else:
        if call.index is None:
            raise ValueError("stream is for arrays on a CUDA device; these are on the CPU")
        place = handle = stream_handle(stream, call.index)
    if out_key is None:
        out = call.new_out(place)
        out_at = library.address(out)
    if with_lse and lse_key is None:
        lse = call.new_lse(place)
        lse_at = library.address(lse)

    apart = call.apart
    if (
        call.simple
        and (q_at and k_at and v_at and out_at)
        and (apart(q_at, k_at, v_at, out_at, lse_at) if apart is not None else not (out_at | lse_at) & 15)
    ):
        call.launch(q_at, k_at, v_at, out_at, lse_at, handle)
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


def _present(**arrays) -> dict:
    return {name: x for name, x in arrays.items() if x is not None}


def merge(outs, lses):
    """Merge attention over parts of the keys into attention over all of them: the block merge of the online softmax.

    With ``m`` the largest LSE of a row, ``lse = m + log(sum_i exp(lse_i - m))`` and ``out = sum_i exp(lse_i - lse) * out_i``: the
    rescaling step of Algorithm 1 in Dao et al., "FlashAttention" (2022), for blocks of any size and any order.

    Parameters
    ----------
    outs : sequence of array, each (batch, seqlen_q, heads, head_dim_v)
        One or more partial results of the same queries; float16, bfloat16, float32 or float64 of one library and device, any strides.
    lses : sequence of array, each (batch, heads, seqlen_q)
        Their LSE: float32 (float64 for float64 outs). A row of -inf has seen no key and changes nothing, whatever its out holds.

    Returns
    -------
    out : array, (batch, seqlen_q, heads, head_dim_v)
        dtype and library of ``outs``, computed in float32 (float64 for float64). 0 in a row that no part has a key for.
        Arrays that only lend their memory get NumPy arrays on the CPU and Numba device arrays on CUDA, as from `forward`.
    lse : array, (batch, heads, seqlen_q)
        -inf in such a row.

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


def explain(q, k, v, *, scale=None, causal=False, window=None, return_lse=False, out=None, lse=None):
    """Say how `forward` would run these arguments: which kernel, which tiles, and why not another. Nothing is run.

    Parameters
    ----------
    q, k, v, scale, causal, window, return_lse, out, lse
        As `forward` takes them; with the same checks. The values in the arrays are not read.

    Returns
    -------
    Explanation
        Print it, or read ``plan`` (family, tile configuration, grid, threads, shared memory, copies with their reasons), ``resources``
        (registers, spills; the kernel is compiled for them if it has not been) and ``families`` (why each other one was not chosen).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `forward`.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> x = np.zeros((1, 128, 4, 64), np.float32)
    >>> nf.explain(x, x, x, causal=True).plan.family
    'cpu'
    """
    return _explain(q, k, v, scale=scale, causal=causal, window=window, return_lse=return_lse, out=out, lse=lse)
