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

from . import api, varlen
from .arrays.torch import TORCH, recorded
from .block_mask import BlockMask, given_mask, mask_arrays
from .dispatch import forced_family, use_family
from .problem import (
    CONSTANT_OPTIONS,
    DIFFERENTIABLE,
    NEEDS,
    OPTIONS,
    PACKED,
    UnsupportedError,
    check_causal,
    check_dropout,
    check_flag,
    check_max_seqlen,
    check_scale,
    check_seed,
    check_softcap,
    check_window,
    gradient_missing,
    make_packed_problem,
    make_problem,
)

__all__ = ["attention", "attention_varlen", "replace_sdpa", "scaled_dot_product_attention"]

SECOND_DERIVATIVES = (
    "the gradients of numbaflash.attention cannot be differentiated again (second derivatives, as for a gradient penalty or a Hessian). "
    "Use torch.nn.functional.scaled_dot_product_attention with its MATH back end for that part of the model"
)


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
    if not (softcap is mask is bias is alibi_slopes is sinks is seed is seqlens_q is seqlens_k is None and dropout == 0):
        options |= {"softcap": softcap, "dropout": dropout, "seed": seed}
    if getattr(q, "is_nested", False) or getattr(k, "is_nested", False) or getattr(v, "is_nested", False):
        return _attend_nested(q, k, v, options, more, return_lse, deterministic)
    return _attend(q, k, v, options, more, return_lse, deterministic)


def _attend_nested(q, k, v, options, more, return_lse, deterministic):
    """Attention of jagged tensors, (batch, ragged, heads, head_dim): their values are packed sequences, their offsets the boundaries."""
    for name, x in zip(NEEDS, (q, k, v), strict=True):
        if not (isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.jagged):
            got = f"a nested tensor with layout={x.layout}" if getattr(x, "is_nested", False) else type(x).__name__
            raise TypeError(f"{name} must be a nested tensor with layout=torch.jagged, as q, k and v are all or none; got {got}")
        if x.dim() != 4 or x._ragged_idx != 1:
            raise ValueError(f"{name} must have the axes (batch, ragged sequence, heads, head_dim); got shape {tuple(x.shape)}")
        if x.lengths() is not None:
            raise ValueError(f"{name} must be contiguous: its sequences have gaps between them. Call {name}.contiguous() first")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v must have the sequence lengths of k, made from the same offsets; got {tuple(v.shape)} and {tuple(k.shape)}")
    for name in ("mask", "bias", "seqlens_q", "seqlens_k"):
        if more[name] is not None:
            raise ValueError(f"{name} is not for nested tensors, whose sequences have lengths of their own; leave it out")
    more = {"alibi_slopes": more["alibi_slopes"], "sinks": more["sinks"], "cu_seqlens_q": q.offsets(), "cu_seqlens_k": k.offsets()}
    options = {"softcap": None, "dropout": 0, "seed": None, "max_seqlen_q": None, "max_seqlen_k": None} | options
    found = _attend(q.values(), k.values(), v.values(), options, more, return_lse, deterministic)
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
    """Both of them; ``more`` are the options that are tensors, None for those that there are not."""
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
        _refuse_transformations(q, k, v)
    if "seed" in options:
        _check_constant(more)
        if options["seed"] is None and options["dropout"]:
            options["seed"] = draw_seed()
    if recorded() or device == "meta":
        out, lse = _operator(q, k, v, **options, **more, deterministic=deterministic)
        return (out, lse) if check_flag("return_lse", return_lse) else out
    bias, sinks = more.get("bias"), more.get("sinks")
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, bias, sinks))):
        return _forward_of(more)(q, k, v, **options, **more, return_lse=return_lse)
    constant = {name: more[name] for name in CONSTANT_OPTIONS + PACKED if more.get(name) is not None}
    return _Attention.apply(q, k, v, bias, sinks, constant, options, return_lse, deterministic)


def _forward_of(tensors):
    """The forward that takes these options."""
    if PACKED[0] in tensors:
        return varlen.forward_varlen
    return api.forward if tensors.get("block_mask") is None else lambda q, k, v, **options: api.forward(q, k, v, **given_mask(options, q, k))


def _backward_of(tensors):
    if PACKED[0] in tensors:
        return varlen.backward_varlen
    if tensors.get("block_mask") is None:
        return api.backward
    return lambda dout, q, k, *others, **options: api.backward(dout, q, k, *others, **given_mask(options, q, k))


def draw_seed():
    """A new seed from torch's generator of the CPU: a tensor where torch.compile traces, which must not read its value."""
    seed = torch.randint(0, 2**63 - 1, ())
    return seed if torch.compiler.is_dynamo_compiling() else int(seed)


def _check_constant(tensors):
    for name, x in tensors.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
        if name in CONSTANT_OPTIONS and x is not None and x.requires_grad and torch.is_grad_enabled():
            raise gradient_missing(name, f"{name}.detach()")


def _autocast(x, dtype):
    """What autocast does to the arguments of scaled_dot_product_attention: floating point, except float64, becomes its dtype."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _refuse_transformations(q, k, v):
    if torch._C._are_functorch_transforms_active():
        for name, x in zip(NEEDS, (q, k, v), strict=True):
            if torch._C._functorch.is_functorch_wrapped_tensor(x) or (torch.is_grad_enabled() and x.requires_grad):
                raise TypeError(
                    f"{name} is traced by torch.func (vmap, grad, jvp, ...), and numbaflash.attention cannot be transformed by it. "
                    "Use autograd (torch.autograd.grad, backward()), and the batch axis in place of vmap"
                )
    if getattr(forward_ad, "_current_level", -1) >= 0:
        for name, x in zip(NEEDS, (q, k, v), strict=True):
            if forward_ad.unpack_dual(x).tangent is not None:
                raise UnsupportedError(f"{name} carries a tangent: numbaflash.attention has no forward-mode derivative (jvp); use backward()")


def _saved(x):
    """What autograd can keep of ``x``: tensors of the inference mode are copied, as they have no version to notice changes by."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class _Attention(torch.autograd.Function):
    """The eager road: forward saves the LSE, backward computes the scores again."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, constant, options, return_lse, deterministic):
        given = constant | {name: x for name, x in (("bias", bias), ("sinks", sinks)) if x is not None}
        out, lse = _forward_of(given)(q, k, v, **options, **given, return_lse=True)
        ctx.save_for_backward(*(_saved(x) for x in (q, k, v)), out, lse, *(_saved(x) for x in given.values()))
        ctx.names, ctx.options = tuple(given), options | {"deterministic": deterministic}
        ctx.family = forced_family()  # of this thread; autograd has its own
        ctx.set_materialize_grads(False)
        return (out, lse) if check_flag("return_lse", return_lse) else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        needs = tuple(name for name, needed in zip(DIFFERENTIABLE, ctx.needs_input_grad[:5], strict=True) if needed)
        if dout is None and dlse is None:
            gradients = (None,) * 5
        else:
            compute = _Gradients.apply if torch.is_grad_enabled() else _gradients  # create_graph=True
            gradients = compute(dout, dlse, *ctx.saved_tensors, needs, ctx.names, ctx.options, ctx.family)
        return *gradients, None, None, None, None


class _Gradients(torch.autograd.Function):
    """Gradients that remember where they come from, so that differentiating them again is refused and not silently 0."""

    @staticmethod
    def forward(ctx, *arguments):
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedError(SECOND_DERIVATIVES)


def _gradients(dout, dlse, q, k, v, out, lse, *more):
    """dq, dk, dv, dbias, dsinks; None for those not needed. ``more`` are the options that are tensors, then needs, their names, those that are
    numbers, and a forced family."""
    *tensors, needs, names, options, family = more
    _refuse_batches(dout, dlse)
    # Without a gradient of the result, zeros that take no memory.
    dout = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape) if dout is None else dout.resolve_neg()
    given = dict(zip(names, tensors, strict=True))
    with use_family(family or forced_family()):
        gradients = _backward_of(given)(dout, q, k, v, out, lse, dlse=dlse, needs=needs, **options, **given)
    further = dict(zip((name for name in needs if name not in NEEDS), gradients[3:], strict=True))
    return *gradients[:3], further.get("bias"), further.get("sinks")


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


_TENSOR_OPTIONS = tuple(name for name in OPTIONS if name != "block_mask") + PACKED
_TENSORS = ", ".join(f"Tensor? {name}=None" for name in _TENSOR_OPTIONS)
_NUMBERS = "float? scale, int causal, int? left, int? right, bool deterministic"
_FURTHER = (
    f"float? softcap=None, float dropout=0., Tensor? seed=None, {_TENSORS}, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? block_mask=None"
)


def _operator(q, k, v, **options):
    """Record the operator; options are checked here, shapes and the value of scale where it runs."""
    return torch.ops.numbaflash.attention(q, k, v, *_plain_options(**options))


def _plain_options(*, scale, causal, window, deterministic, softcap=None, dropout=0, seed=None, max_seqlen_q=None, max_seqlen_k=None, **tensors):
    """Options in the order of the operators' schemas, without defaults at the end: old calls had none."""
    if isinstance(scale, (int, torch.SymInt)) and not isinstance(scale, bool):
        scale = torch.sym_float(scale)
    elif scale is not None and not isinstance(scale, (float, torch.SymFloat)):  # made of sizes, it may have no value yet
        scale = check_scale(scale, 1)
    causal = check_causal(causal)
    left, right = check_window(window)
    if not isinstance(seed, torch.Tensor):
        seed = check_seed(seed, check_dropout(dropout))
        seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed) if dropout else None
    numbers = scale, 2 if causal == "top_left" else int(causal), left, right, deterministic
    further = [check_softcap(softcap), float(check_dropout(dropout)) if dropout else 0, seed, *[tensors.get(name) for name in _TENSOR_OPTIONS]]
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        further.append(value if isinstance(value, torch.SymInt) else check_max_seqlen(name, value))
    further.append(tensors.get("block_mask"))
    while further and not isinstance(further[-1], torch.Tensor) and not further[-1]:
        further.pop()
    return *numbers, *further


def _options_of(scale, causal, left, right, deterministic, softcap=None, dropout=0.0, seed=None, *tensors):
    """(options, options that are tensors) of an operator's arguments."""
    options = {"scale": scale, "causal": _CAUSAL[causal], "window": (left, right), "softcap": softcap, "dropout": dropout}
    if seed is not None:
        options["seed"] = int(seed) % 2**64
    given = {name: x for name, x in zip(_TENSOR_OPTIONS, tensors, strict=False) if x is not None}
    *_, block_mask = (None, *tensors[len(_TENSOR_OPTIONS) + 2 :])
    if block_mask is not None:
        given["block_mask"] = block_mask
    if PACKED[0] in given:
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), tensors[len(_TENSOR_OPTIONS) :], strict=False))
    return options, given


def recorded_forward(q, k, v, *, return_lse, out, lse, stream, **options):
    """`numbaflash.forward` where torch records."""
    if isinstance(options.get("mask"), BlockMask):
        options |= mask_arrays(options["mask"], q, k)
    given = {"out": out, "lse": lse, "stream": stream}
    if any(x is not None for x in given.values()):
        _refuse_to_record("forward", given)
        with _disable_current_modes():
            return _forward_of(options)(q, k, v, **options, return_lse=return_lse, **given)
    _check_tensors({"q": q, "k": k, "v": v}, options)
    out, lse = _operator(q, k, v, **options, deterministic=False)
    return (out, lse) if return_lse else out


def recorded_backward(dout, q, k, v, out, lse, *, dlse, deterministic, needs, stream, **options):
    """`numbaflash.backward` where torch records."""
    if isinstance(options.get("mask"), BlockMask):
        options |= mask_arrays(options["mask"], q, k)
    given = {f"d{name}": options.pop(f"d{name}", None) for name in DIFFERENTIABLE} | {"stream": stream}
    if any(x is not None for x in given.values()):
        _refuse_to_record("backward", given)
        given = {name: x for name, x in given.items() if x is not None}
        with _disable_current_modes():
            return _backward_of(options)(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, needs=needs, **options, **given)
    _check_tensors({"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}, options)
    needed = [int(name in needs) for name in DIFFERENTIABLE]
    told = _plain_options(**options, deterministic=deterministic)
    gradients = iter(torch.ops.numbaflash.attention_backward(dout, dlse, q, k, v, out, lse, needed[: 5 if any(needed[3:]) else 3], *told))
    found = [next(gradients) if each else None for each in needed]
    return (*found[:3], *(x for x in found[3:] if x is not None))


def _check_tensors(arrays, options):
    for name, x in (arrays | {name: options.get(name) for name in _TENSOR_OPTIONS}).items():
        if x is not None:
            TORCH.check(x, name)


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
    "numbaflash::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_NUMBERS}, {_FURTHER}) -> (Tensor, Tensor)"
)
def _attention_operator(q, k, v, *arguments):
    options, tensors = _options_of(*arguments)
    with _unrecorded():
        return _forward_of(tensors)(q, k, v, **options, **tensors, return_lse=True)


@_attention_operator.register_fake
def _attention_shapes(q, k, v, *arguments):
    _, tensors = _options_of(*arguments[:7], None, *arguments[8:])
    if PACKED[0] in tensors:
        return _packed_shapes(q, k, v, tensors)
    for name, x in zip(NEEDS, (q, k, v), strict=True):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 axes (batch, seqlen, heads, head_dim); got {x.dim()} axes, shape {tuple(x.shape)}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if all(type(n) is int for shape in shapes for n in shape):  # symbolic sizes would be bound to this call's by the checks
        make_problem(*shapes, [_name_of(x) for x in (q, k, v)])
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return out, lse


def _packed_shapes(q, k, v, tensors):
    for name, x in zip(NEEDS, (q, k, v), strict=True):
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 axes (total, heads, head_dim); got {x.dim()} axes, shape {tuple(x.shape)}")
    shapes, boundaries = [tuple(x.shape) for x in (q, k, v)], {name: (tuple(tensors[name].shape), _name_of(tensors[name])) for name in PACKED}
    if all(type(n) is int for shape in (*shapes, *(each for each, _ in boundaries.values())) for n in shape):
        make_packed_problem(*shapes, [_name_of(x) for x in (q, k, v)], **boundaries)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[2])), lse


def _name_of(x):
    return str(x.dtype).removeprefix("torch.")


@torch.library.custom_op(
    "numbaflash::attention_backward",
    mutates_args=(),
    schema=f"(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int[] needs, {_NUMBERS}, {_FURTHER}) -> Tensor[]",
)
def _backward_operator(dout, dlse, q, k, v, out, lse, needs, *arguments):
    options, tensors = _options_of(*arguments)
    options["deterministic"] = arguments[4]
    with _unrecorded():
        return [
            x for x in _gradients(dout, dlse, q, k, v, out, lse, *tensors.values(), _wanted(needs), tuple(tensors), options, None) if x is not None
        ]


def _wanted(needs):
    return tuple(name for name, needed in zip(DIFFERENTIABLE, needs, strict=False) if needed)


@_backward_operator.register_fake
def _backward_shapes(dout, dlse, q, k, v, out, lse, needs, *arguments):
    inputs = {"q": q, "k": k, "v": v} | _options_of(*arguments[:7], None, *arguments[8:])[1]
    return [inputs[name].new_empty(inputs[name].shape) for name in _wanted(needs)]


def _save(ctx, inputs, output):
    q, k, v, *arguments = inputs
    end = 8 + len(_TENSOR_OPTIONS)
    tensors = arguments[7:end]
    ctx.numbers, ctx.lengths, ctx.present = arguments[:7], arguments[end:], [x is not None for x in tensors]
    ctx.save_for_backward(*(_saved(x) for x in (q, k, v)), *output, *(_saved(x) for x in tensors if x is not None))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    _refuse_batches(dout, dlse)
    needed = {"q": 0, "k": 1, "v": 2} | {name: 11 + _TENSOR_OPTIONS.index(name) for name in DIFFERENTIABLE[3:]}
    inputs = [None] * len(ctx.needs_input_grad)
    needs = [int(at < len(inputs) and ctx.needs_input_grad[at]) for at in needed.values()]
    if dout is not None or dlse is not None:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        saved = iter(saved)
        tensors = [next(saved) if present else None for present in ctx.present]
        gradients = iter(torch.ops.numbaflash.attention_backward(dout, dlse, q, k, v, out, lse, needs, *ctx.numbers, *tensors, *ctx.lengths))
        for at, each in zip(needed.values(), needs, strict=True):
            if each:
                inputs[at] = next(gradients)
    return tuple(inputs)


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
    options = {"dropout": dropout_p} if dropout_p else {}
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
    """Within the context, ``torch.nn.functional.scaled_dot_product_attention`` is `scaled_dot_product_attention` of this module.

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
