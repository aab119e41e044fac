"""What users call: attention that autograd differentiates."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..arrays.torch import recorded
from ..block_mask import BlockMask, mask_arrays
from ..problem import CONSTANT_OPTIONS, NEEDS, PACKED, UnsupportedError, check_flag, gradient_missing, no_dropout
from .autograd import Attention, forward_of
from .nested import packed_of
from .operators import record


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
    dropout=0,  # torch.compile makes a variable of 0.0
    seed=None,
    seqlens_q=None,
    seqlens_k=None,
    return_lse=False,
    deterministic=False,
):
    """Exact attention that torch differentiates: `numbaflash.attention` for tensors.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, heads, head_dim)
    k : Tensor, (batch, seqlen_k, kv_heads, head_dim)
    v : Tensor, (batch, seqlen_k, kv_heads, head_dim_v)
        float16, bfloat16, float32 or float64, on the CPU or a CUDA device, any strides. Any of them may require a gradient; what needs none
        costs nothing in the backward. Under ``torch.autocast`` they are cast as torch casts the arguments of its own attention. Or nested tensors
        with ``layout=torch.jagged``, (batch, ragged sequence, heads, head_dim), for sequences of any lengths: then out is one too, and the LSE
        (heads, total) as of `attention_varlen`; without mask, bias and lengths.
    scale, causal, window, softcap, mask, alibi_slopes, dropout, seqlens_q, seqlens_k
        As in `numbaflash.forward`.
    bias, sinks : Tensor, optional
        As in `numbaflash.forward`; each may require a gradient.
    seed : int, optional
        Of the dropout mask. None draws one from torch's generator of the CPU (``torch.manual_seed``), anew in each call.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores, which is differentiable too.
    deterministic : bool, optional
        The same inputs give the same gradients, bit for bit. Also on while ``torch.use_deterministic_algorithms(True)`` is. The forward
        always is.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, heads, head_dim_v)
    lse : Tensor, (batch, heads, seqlen_q), only with ``return_lse``
        float32 (float64 for float64).

    Raises
    ------
    TypeError
        For a wrong kind or dtype, inside torch.func transformations (vmap, grad, jvp, ...), and for gradients batched by vmap
        (``is_grads_batched=True``).
    ValueError
        For a wrong shape or value.
    UnsupportedError
        For a problem or gradients that no kernel family can compute, in forward-mode differentiation, and when the gradients are differentiated
        again.

    Notes
    -----
    Saved for the backward are q, k, v, out and the log-sum-exp; scores are computed again (Dao et al., "FlashAttention", 2022, Algorithm 4).
    Of tensors made in inference mode a copy is saved.

    Where torch records what is done (``make_fx``, ``torch.jit.trace``, ``FakeTensorMode`` and other dispatch modes) it meets the operators
    ``torch.ops.numbaflash.attention`` and ``attention_backward``. Tensors on the meta device give results there.

    Examples
    --------
    >>> import torch
    >>> import numbaflash.torch
    >>> q, k, v = (torch.randn(1, 32, 4, 16, requires_grad=True) for _ in range(3))
    >>> numbaflash.torch.attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 32, 4, 16])
    """
    options = {"scale": scale, "causal": causal, "window": window}
    more = {"mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    if not (softcap is mask is bias is alibi_slopes is sinks is seed is seqlens_q is seqlens_k is None and no_dropout(dropout)):
        options |= {"softcap": softcap, "dropout": dropout, "seed": seed}
    if getattr(q, "is_nested", False) or getattr(k, "is_nested", False) or getattr(v, "is_nested", False):
        return _attend_nested(q, k, v, options, more, return_lse, deterministic)
    return _attend(q, k, v, options, more, return_lse, deterministic)


def _attend_nested(q, k, v, options, more, return_lse, deterministic):
    packed, more = packed_of(q, k, v, more)
    options = {"softcap": None, "dropout": 0, "seed": None, "max_seqlen_q": None, "max_seqlen_k": None} | options
    found = _attend(*packed, options, more, return_lse, deterministic)
    out, *lse = found if return_lse else (found,)
    out = torch.nested.nested_tensor_from_jagged(out, q.offsets())
    return (out, *lse) if return_lse else out


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
    dropout=0,
    seed=None,
    return_lse=False,
    deterministic=False,
):
    """Exact attention of packed sequences that torch differentiates: `numbaflash.attention_varlen` for tensors.

    Parameters
    ----------
    q : Tensor, (total_q, heads, head_dim)
    k : Tensor, (total_k, kv_heads, head_dim)
    v : Tensor, (total_k, kv_heads, head_dim_v)
        As in `attention`, but for the axes.
    cu_seqlens_q, cu_seqlens_k : Tensor of int32 or int64, (batch + 1,)
        As in `numbaflash.forward_varlen`.
    max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, alibi_slopes
        As in `numbaflash.forward_varlen`.
    sinks, dropout, seed, return_lse, deterministic
        As in `attention`.

    Returns
    -------
    out : Tensor, (total_q, heads, head_dim_v)
    lse : Tensor, (heads, total_q), only with ``return_lse``
        float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import torch
    >>> import numbaflash.torch
    >>> q, k, v = (torch.randn(12, 4, 16, requires_grad=True) for _ in range(3))
    >>> ends = torch.tensor([0, 5, 12])
    >>> numbaflash.torch.attention_varlen(q, k, v, ends, ends, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([12, 4, 16])
    """
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": dropout, "seed": seed}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    more = {"alibi_slopes": alibi_slopes, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name in PACKED:
        if more[name] is None:
            raise TypeError(f"{name} must be a torch tensor of int32 or int64, (batch + 1,); got None")
    return _attend(q, k, v, options, more, return_lse, deterministic)


def _attend(q, k, v, options, more, return_lse, deterministic):
    """All of them; ``more`` are the options that are tensors, None for those that there are not."""
    for name, x in zip(NEEDS, (q, k, v), strict=True):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
    if isinstance(more.get("mask"), BlockMask):
        more = more | mask_arrays(more["mask"], q, k)
    deterministic = check_flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled()
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (_autocast(x, dtype) for x in (q, k, v))
    if not torch.compiler.is_dynamo_compiling():
        _refuse_transformations({"q": q, "k": k, "v": v} | more)
    if "seed" in options:
        _check_constant(more)
        if options["seed"] is None and options["dropout"]:
            options["seed"] = _draw_seed()
    if recorded() or device == "meta":
        out, lse = record(q, k, v, **options, **more, deterministic=deterministic)
        return (out, lse) if check_flag("return_lse", return_lse) else out
    bias, sinks = more.get("bias"), more.get("sinks")
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, sinks))):
        return forward_of(more)(q, k, v, **options, **more, return_lse=return_lse)
    constant = {name: more[name] for name in CONSTANT_OPTIONS + PACKED if more.get(name) is not None}
    return Attention.apply(q, k, v, bias, sinks, constant, options, return_lse, deterministic)


def _draw_seed():
    """A new seed from torch's generator of the CPU, whatever the default device: a tensor where torch records, which must not read it."""
    seed = torch.randint(0, 2**63 - 1, (), device="cpu")
    return seed if recorded() else int(seed)


def _check_constant(tensors):
    for name, x in tensors.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
        if name in CONSTANT_OPTIONS and x is not None and x.requires_grad and torch.is_grad_enabled():
            raise gradient_missing(name, f"{name}.detach()")


def _autocast(x, dtype):
    """What autocast does to the arguments of scaled_dot_product_attention: floating point, except float64, becomes its dtype."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _refuse_transformations(arrays):
    """torch.func and forward-mode differentiation, of any of the tensors."""
    transformed, level = torch._C._are_functorch_transforms_active(), getattr(forward_ad, "_current_level", -1)
    if not transformed and level < 0:
        return
    for name, x in arrays.items():
        if not isinstance(x, torch.Tensor):
            continue
        if transformed and (torch._C._functorch.is_functorch_wrapped_tensor(x) or (torch.is_grad_enabled() and x.requires_grad)):
            raise TypeError(
                f"{name} is traced by torch.func (vmap, grad, jvp, ...), and numbaflash.attention cannot be transformed by it. "
                "Use autograd (torch.autograd.grad, backward()), and the batch axis in place of vmap"
            )
        if level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(f"{name} carries a tangent: numbaflash.attention has no forward-mode derivative (jvp); use backward()")
