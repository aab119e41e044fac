"""PyTorch: attention that autograd differentiates, in eager mode and inside torch.compile, and torch's own attention by another name.

Eager calls go through an ``autograd.Function`` straight to the kernels. Where torch records what is done (torch.compile, make_fx,
torch.jit.trace, dispatch modes), the same two steps are custom operators, which it keeps in its graph as they are.
"""

from __future__ import annotations

import math
import numbers
import threading
from contextlib import contextmanager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from . import api
from .arrays.torch import TORCH, recorded
from .dispatch import forced_family, use_family
from .problem import UnsupportedError, check_causal, check_flag, check_scale, check_window, make_problem

__all__ = ["attention", "replace_sdpa", "scaled_dot_product_attention"]

NAMES = ("q", "k", "v")
SECOND_DERIVATIVES = (
    "the gradients of numbaflash.attention cannot be differentiated again (second derivatives, as for a gradient penalty or a Hessian). "
    "Use torch.nn.functional.scaled_dot_product_attention with its MATH back end for that part of the model"
)


def attention(q, k, v, *, scale=None, causal=False, window=None, return_lse=False, deterministic=False):
    """Exact attention that torch differentiates: `numbaflash.attention` for tensors.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, heads, head_dim)
    k : Tensor, (batch, seqlen_k, kv_heads, head_dim)
    v : Tensor, (batch, seqlen_k, kv_heads, head_dim_v)
        float16, bfloat16, float32 or float64, on the CPU or a CUDA device, any strides. Any of them may require a gradient; what needs none
        costs nothing in the backward. Under ``torch.autocast`` they are cast as torch casts the arguments of its own attention.
    scale, causal, window
        As in `numbaflash.forward`.
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
    for name, x in zip(NAMES, (q, k, v), strict=True):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
    deterministic = check_flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled()
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (_autocast(x, dtype) for x in (q, k, v))
    if not torch.compiler.is_dynamo_compiling():
        _refuse_transformations(q, k, v)
    if recorded() or device == "meta":
        out, lse = _operator(q, k, v, scale, causal, window, deterministic)
        return (out, lse) if check_flag("return_lse", return_lse) else out
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return api.forward(q, k, v, scale=scale, causal=causal, window=window, return_lse=return_lse)
    return _Attention.apply(q, k, v, scale, causal, window, return_lse, deterministic)


def _autocast(x, dtype):
    """What autocast does to the arguments of scaled_dot_product_attention: floating point, except float64, becomes its dtype."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _refuse_transformations(q, k, v):
    if torch._C._are_functorch_transforms_active():
        for name, x in zip(NAMES, (q, k, v), strict=True):
            if torch._C._functorch.is_functorch_wrapped_tensor(x) or (torch.is_grad_enabled() and x.requires_grad):
                raise TypeError(
                    f"{name} is traced by torch.func (vmap, grad, jvp, ...), and numbaflash.attention cannot be transformed by it. "
                    "Use autograd (torch.autograd.grad, backward()), and the batch axis in place of vmap"
                )
    if getattr(forward_ad, "_current_level", -1) >= 0:
        for name, x in zip(NAMES, (q, k, v), strict=True):
            if forward_ad.unpack_dual(x).tangent is not None:
                raise UnsupportedError(f"{name} carries a tangent: numbaflash.attention has no forward-mode derivative (jvp); use backward()")


def _saved(x):
    """What autograd can keep of ``x``: tensors of the inference mode are copied, as they have no version to notice changes by."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class _Attention(torch.autograd.Function):
    """The eager road: forward saves the LSE, backward computes the scores again."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, window, return_lse, deterministic):
        out, lse = api.forward(q, k, v, scale=scale, causal=causal, window=window, return_lse=True)
        ctx.save_for_backward(*(_saved(x) for x in (q, k, v)), out, lse)
        ctx.options = {"scale": scale, "causal": causal, "window": window, "deterministic": deterministic}
        ctx.family = forced_family()  # of this thread; autograd has its own
        ctx.set_materialize_grads(False)
        return (out, lse) if check_flag("return_lse", return_lse) else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        needs = tuple(name for name, needed in zip(NAMES, ctx.needs_input_grad[:3], strict=True) if needed)
        if dout is None and dlse is None:
            gradients = None, None, None
        elif torch.is_grad_enabled():  # create_graph=True
            gradients = _Gradients.apply(dout, dlse, *ctx.saved_tensors, needs, ctx.options, ctx.family)
        else:
            gradients = _gradients(dout, dlse, *ctx.saved_tensors, needs, ctx.options, ctx.family)
        return *gradients, None, None, None, None, None


class _Gradients(torch.autograd.Function):
    """Gradients that remember where they come from, so that differentiating them again is refused and not silently 0."""

    @staticmethod
    def forward(ctx, *arguments):
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedError(SECOND_DERIVATIVES)


def _gradients(dout, dlse, q, k, v, out, lse, needs, options, family=None):
    """dq, dk, dv; None for those not needed."""
    _refuse_batches(dout, dlse)
    # Without a gradient of the result, zeros that take no memory.
    dout = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape) if dout is None else dout.resolve_neg()
    with use_family(family or forced_family()):
        return api.backward(dout, q, k, v, out, lse, dlse=dlse, needs=needs, **options)


def _refuse_batches(*gradients):
    for x in gradients:
        if x is not None and (torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)):
            raise TypeError(
                "the gradient of numbaflash.attention is batched by vmap (is_grads_batched=True, vectorize=True, or torch.vmap over "
                "torch.autograd.grad), which is not supported. Call torch.autograd.grad for one gradient after the other (retain_graph=True), "
                "or pass vectorize=False"
            )


# Where torch records. An operator takes plain values: causal is 0, 1 (bottom-right) or 2 (top-left), needs is three times 0 or 1.
# torch.compile keeps calls of both on disk and finds them by the forward alone: a schema that refuses old calls breaks them.

_CAUSAL = (False, True, "top_left")


def _operator(q, k, v, scale, causal, window, deterministic):
    """Record the operator; options are checked here, shapes and the value of scale where it runs."""
    options = _plain_options(scale, causal, window, deterministic)
    return torch.ops.numbaflash.attention(q, k, v, *options)


def _plain_options(scale, causal, window, deterministic):
    if isinstance(scale, (int, torch.SymInt)) and not isinstance(scale, bool):
        scale = torch.sym_float(scale)
    elif scale is not None and not isinstance(scale, (float, torch.SymFloat)):  # made of sizes, it may have no value yet
        scale = check_scale(scale, 1)
    causal = check_causal(causal)
    left, right = check_window(window)
    return scale, 2 if causal == "top_left" else int(causal), left, right, deterministic


def recorded_forward(q, k, v, *, scale, causal, window, return_lse, out, lse, stream):
    """`numbaflash.forward` where torch records."""
    given = {"out": out, "lse": lse, "stream": stream}
    if any(x is not None for x in given.values()):
        _refuse_to_record("forward", given)
        with _disable_current_modes():
            return api.forward(q, k, v, scale=scale, causal=causal, window=window, return_lse=return_lse, **given)
    for name, x in zip(NAMES, (q, k, v), strict=True):
        TORCH.check(x, name)
    out, lse = _operator(q, k, v, scale, causal, window, False)
    return (out, lse) if return_lse else out


def recorded_backward(dout, q, k, v, out, lse, *, scale, causal, window, dlse, deterministic, dq, dk, dv, needs, stream):
    """`numbaflash.backward` where torch records."""
    given = {"dq": dq, "dk": dk, "dv": dv, "stream": stream}
    if any(x is not None for x in given.values()):
        _refuse_to_record("backward", given)
        options = {"scale": scale, "causal": causal, "window": window, "dlse": dlse, "deterministic": deterministic, "needs": needs}
        with _disable_current_modes():
            return api.backward(dout, q, k, v, out, lse, **options, **given)
    for name, x in {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}.items():
        if x is not None:
            TORCH.check(x, name)
    needs = [int(name in needs) for name in NAMES]
    options = _plain_options(scale, causal, window, deterministic)
    gradients = iter(torch.ops.numbaflash.attention_backward(dout, dlse, q, k, v, out, lse, needs, *options))
    return tuple(next(gradients) if needed else None for needed in needs)


def _refuse_to_record(function, given):
    """A trace would not contain what is written into the caller's arrays. Other modes watch what really runs, and may miss it."""
    traces = FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode
    if torch._C._is_tracing() or any(isinstance(mode, traces) for mode in _get_current_dispatch_mode_stack()):
        names = ", ".join(name for name, x in given.items() if x is not None)
        raise TypeError(
            f"numbaflash.{function} is traced by torch (make_fx, torch.jit.trace, FakeTensorMode), and no trace can contain {names}. "
            f"Leave {names} out while tracing, or call {function} outside of the trace"
        )


def _unrecorded():
    """Within an operator nothing is to be recorded again, even where a mode did not step aside for it."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


@torch.library.custom_op(
    "numbaflash::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float? scale, int causal, int? left, int? right, bool deterministic) -> (Tensor, Tensor)",
)
def _attention_operator(q, k, v, scale, causal, left, right, deterministic):
    with _unrecorded():
        return api.forward(q, k, v, scale=scale, causal=_CAUSAL[causal], window=(left, right), return_lse=True)


@_attention_operator.register_fake
def _attention_shapes(q, k, v, scale, causal, left, right, deterministic):
    for name, x in zip(NAMES, (q, k, v), strict=True):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 axes (batch, seqlen, heads, head_dim); got {x.dim()} axes, shape {tuple(x.shape)}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if all(type(n) is int for shape in shapes for n in shape):  # symbolic sizes would be bound to this call's by the checks
        make_problem(*shapes, [str(x.dtype).removeprefix("torch.") for x in (q, k, v)])
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return out, lse


@torch.library.custom_op(
    "numbaflash::attention_backward",
    mutates_args=(),
    schema="(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int[] needs, "
    "float? scale, int causal, int? left, int? right, bool deterministic) -> Tensor[]",
)
def _backward_operator(dout, dlse, q, k, v, out, lse, needs, scale, causal, left, right, deterministic):
    options = {"scale": scale, "causal": _CAUSAL[causal], "window": (left, right), "deterministic": deterministic}
    wanted = tuple(name for name, needed in zip(NAMES, needs, strict=True) if needed)
    with _unrecorded():
        return [x for x in _gradients(dout, dlse, q, k, v, out, lse, wanted, options) if x is not None]


@_backward_operator.register_fake
def _backward_shapes(dout, dlse, q, k, v, out, lse, needs, *options):
    return [x.new_empty(x.shape) for x, needed in zip((q, k, v), needs, strict=True) if needed]


def _save(ctx, inputs, output):
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(*(_saved(x) for x in (q, k, v)), *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    _refuse_batches(dout, dlse)
    needs = [int(needed) for needed in ctx.needs_input_grad[:3]]
    gradients = iter(())
    if dout is not None or dlse is not None:
        gradients = iter(torch.ops.numbaflash.attention_backward(dout, dlse, *ctx.saved_tensors, needs, *ctx.options))
    return *(next(gradients, None) if needed else None for needed in needs), None, None, None, None, None


def _refuse_second_derivatives(*unused):
    raise UnsupportedError(SECOND_DERIVATIVES)


_attention_operator.register_autograd(_differentiate, setup_context=_save)
_backward_operator.register_autograd(_refuse_second_derivatives)


@_attention_operator.register_vmap
def _refuse_vmap(*unused):
    raise TypeError("numbaflash.attention is batched by vmap, which is not supported. Use the batch axis of q, k and v in its place")


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """``torch.nn.functional.scaled_dot_product_attention``: its arguments and its meaning, with these kernels.

    Parameters
    ----------
    query : Tensor, (..., heads, seqlen_q, head_dim)
    key : Tensor, (..., heads, seqlen_k, head_dim)
    value : Tensor, (..., heads, seqlen_k, head_dim_v)
        Leading axes broadcast against each other, heads too, and may be missing: (seqlen, head_dim) is one head. dtypes, devices, gradients and
        autocast as for `attention`.
    attn_mask : None
        Masks are not here yet: anything else is refused.
    dropout_p : float, optional
        Dropout is not here yet: anything but 0 is refused.
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
        For a mask or dropout, and as `attention`.

    Notes
    -----
    Up to four axes, nothing is copied. Of more, the leading ones are joined, which copies where their strides do not allow it.
    """
    if attn_mask is not None:
        raise UnsupportedError(
            "attn_mask must be None: masks are not here yet. Use is_causal=True, or numbaflash.torch.attention with causal= or window=, "
            "or torch's own scaled_dot_product_attention"
        )
    if not isinstance(dropout_p, numbers.Real):
        raise TypeError(f"dropout_p must be a real number; got {dropout_p!r}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be from 0 to 1; got {dropout_p}")
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p must be 0: dropout is not here yet; got {dropout_p}. Use torch's own scaled_dot_product_attention")
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
        if x.dim() < 2 + enable_gqa:
            axes = "(..., heads, seqlen, head_dim)" if enable_gqa else "(..., seqlen, head_dim)"
            raise ValueError(f"{name} must have at least {2 + enable_gqa} axes {axes}; got shape {tuple(x.shape)}")
    _check_same("head_dim (the last axis)", "key", key.shape[-1], "query", query.shape[-1])
    _check_same("seqlen_k (the last axis but one)", "value", value.shape[-2], "key", key.shape[-2])

    axes = max(query.dim(), key.dim(), value.dim())
    query, key, value = (x[(None,) * (max(axes, 4) - x.dim())] for x in (query, key, value))
    query, key, value = _join_heads(query, key, value, enable_gqa)
    lead = _broadcast("leading axes", *(x.shape[:-3] for x in (query, key, value)))
    q, k, v = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4).transpose(1, 2) for x in (query, key, value))
    out = attention(q, k, v, scale=scale, causal="top_left" if is_causal else False).transpose(1, 2)
    return out.unflatten(0, lead) if axes > 4 else out[(0,) * (4 - axes)]


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
    """Within the context, ``torch.nn.functional.scaled_dot_product_attention`` is `scaled_dot_product_attention` of this module.

    Models that call torch's function by its full name (``F.scaled_dot_product_attention``, ``torch.nn.MultiheadAttention`` in training)
    then run these kernels, without a change. A call that these kernels do not serve (a mask, dropout) raises; nothing goes back to torch's.

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
