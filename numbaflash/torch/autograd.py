"""The eager road: an ``autograd.Function`` straight to the kernels."""

from __future__ import annotations

import torch

from .. import api, varlen
from ..block_mask import given_mask
from ..dispatch import forced_family, use_family
from ..problem import DIFFERENTIABLE, NEEDS, PACKED, UnsupportedError, check_flag

SECOND_DERIVATIVES = (
    "the gradients of numbaflash.attention cannot be differentiated again (second derivatives, as for a gradient penalty or a Hessian). "
    "Use torch.nn.functional.scaled_dot_product_attention with its MATH back end for that part of the model"
)


def forward_of(tensors):
    """The forward that takes these options."""
    if PACKED[0] in tensors:
        return varlen.forward_varlen
    return api.forward if tensors.get("block_mask") is None else lambda q, k, v, **options: api.forward(q, k, v, **given_mask(options, q, k))


def backward_of(tensors):
    if PACKED[0] in tensors:
        return varlen.backward_varlen
    if tensors.get("block_mask") is None:
        return api.backward
    return lambda dout, q, k, *others, **options: api.backward(dout, q, k, *others, **given_mask(options, q, k))


class Attention(torch.autograd.Function):
    """The eager road: forward saves the LSE, backward computes the scores again."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, constant, options, return_lse, deterministic):
        given = constant | {name: x for name, x in (("bias", bias), ("sinks", sinks)) if x is not None}
        out, lse = forward_of(given)(q, k, v, **options, **given, return_lse=True)
        ctx.save_for_backward(*(keepable(x) for x in (q, k, v)), out, lse, *(keepable(x) for x in given.values()))
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
            compute = Gradients.apply if torch.is_grad_enabled() else gradients_of  # create_graph=True
            gradients = compute(dout, dlse, *ctx.saved_tensors, needs, ctx.names, ctx.options, ctx.family)
        return *gradients, None, None, None, None


class Gradients(torch.autograd.Function):
    """Gradients that remember where they come from, so that differentiating them again is refused and not silently 0."""

    @staticmethod
    def forward(ctx, *arguments):
        return gradients_of(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedError(SECOND_DERIVATIVES)


def gradients_of(dout, dlse, q, k, v, out, lse, *more):
    """dq, dk, dv, dbias, dsinks; None for those not needed. ``more`` are the options that are tensors, then needs, their names, those that are
    numbers, and a forced family."""
    *tensors, needs, names, options, family = more
    refuse_batches(dout, dlse)
    # Without a gradient of the result, zeros that take no memory.
    dout = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape) if dout is None else dout.resolve_neg()
    dlse = None if dlse is None else dlse.resolve_neg()
    given = dict(zip(names, tensors, strict=True))
    with use_family(family or forced_family()):
        gradients = backward_of(given)(dout, q, k, v, out, lse, dlse=dlse, needs=needs, **options, **given)
    further = dict(zip((name for name in needs if name not in NEEDS), gradients[3:], strict=True))
    return *gradients[:3], further.get("bias"), further.get("sinks")


def refuse_batches(*gradients):
    for x in gradients:
        if x is not None and (torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)):
            raise TypeError(
                "the gradient of numbaflash.attention is batched by vmap (is_grads_batched=True, vectorize=True, or torch.vmap over "
                "torch.autograd.grad), which is not supported. Call torch.autograd.grad for one gradient after the other (retain_graph=True), "
                "or pass vectorize=False"
            )


def keepable(x):
    """What autograd can keep of ``x``: tensors of the inference mode are copied, as they have no version to notice changes by."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x
