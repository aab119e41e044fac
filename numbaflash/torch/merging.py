"""The merge of partial results of tensors, which autograd differentiates."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from .. import merging
from ..arrays.torch import TORCH, recorded
from .autograd import keepable


def merge(library, outs, lses):
    """`numbaflash.merge`. Where torch records, or has tangents, it meets operations of its own."""
    tensors = (*outs, *lses)
    if recorded() or any(_has_tangent(x) for x in tensors):
        facts = merging.check(library, [x.detach() for x in outs], [x.detach() for x in lses])
        return merging.by_operations(library, outs, lses, facts["outs[0]"].dtype)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return Merge.apply(len(outs), *tensors)
    return merging.merge_states(library, outs, lses)


def _has_tangent(x):
    return getattr(forward_ad, "_current_level", -1) >= 0 and forward_ad.unpack_dual(x).tangent is not None


class Merge(torch.autograd.Function):
    """The backward is made of operations that torch differentiates again."""

    @staticmethod
    def forward(ctx, count, *states):
        out, lse = merging.merge_states(TORCH, states[:count], states[count:])
        ctx.count = count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(keepable(x) for x in states), out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        """With the weights ``w_i = exp(lse_i - lse)``: ``w_i dout``, and ``w_i (dlse + sum(dout (out_i - out)))``; 0 of a row without a key."""
        *states, out, lse = ctx.saved_tensors
        outs, lses, needed = states[: ctx.count], states[ctx.count :], ctx.needs_input_grad[1:]
        gradients = [None] * len(states)
        if dout is None and dlse is None:
            return None, *gradients
        out, dout = out.to(lse.dtype), None if dout is None else dout.to(lse.dtype)
        for i, (out_i, lse_i) in enumerate(zip(outs, lses, strict=True)):
            hidden = lse_i == -torch.inf
            weight = torch.exp(torch.where(hidden, 0.0, lse_i - lse))
            if needed[i] and dout is not None:
                gradients[i] = torch.where(_column(hidden), 0.0, dout * _column(weight)).to(out_i.dtype)
            if needed[ctx.count + i]:
                change = 0.0 if dlse is None else dlse
                if dout is not None:
                    apart = torch.where(_column(hidden), 0.0, out_i.to(lse.dtype)) - out
                    change = change + (dout * apart).sum(-1).transpose(-1, -2)
                gradients[ctx.count + i] = torch.where(hidden, 0.0, weight * change)
        return None, *gradients


def _column(x):
    """(batch, heads, seqlen_q) beside (batch, seqlen_q, heads, head_dim_v)."""
    return x.transpose(-1, -2)[..., None]
