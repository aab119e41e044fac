"""`numbaflash.merge` where torch records: a function of autograd around it."""

from __future__ import annotations

import torch

from .. import merging
from ..arrays import library
from ..arrays.torch import records_operations


def merge(outs, lses):
    """`numbaflash.merge` of tensors any of which may require a gradient."""
    tensors = [x for x in (*outs, *lses) if isinstance(x, torch.Tensor)]
    if records_operations():  # which record the operations that it is made of
        home = library(outs[0], "outs[0]")
        facts = {f"{name}[{i}]": home.describe(x.detach(), f"{name}[{i}]") for name, xs in (("outs", outs), ("lses", lses)) for i, x in enumerate(xs)}
        return merging.by_operations(home, outs, lses, *merging.check(facts))
    if not any(x.requires_grad for x in tensors):
        with torch.no_grad():
            return merging.merge(outs, lses)
    return _Merge.apply(len(outs), *outs, *lses)


class _Merge(torch.autograd.Function):
    """The derivative is of torch's own operations, so that it has one, too."""

    @staticmethod
    def forward(ctx, count, *states):
        out, lse = merging.merge(list(states[:count]), list(states[count:]))
        ctx.count = count
        ctx.save_for_backward(*states, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *states, out, lse = ctx.saved_tensors
        outs, lses = states[: ctx.count], states[ctx.count :]
        douts, dlses = [], []
        for n, (part, part_lse) in enumerate(zip(outs, lses, strict=True)):
            unseen = part_lse == -torch.inf
            weight = torch.where(unseen, 0.0, (part_lse - torch.where(unseen, 0.0, lse)).exp())
            column = weight.transpose(-1, -2)[..., None]
            wide = torch.where(unseen.transpose(-1, -2)[..., None], 0.0, part.to(lse.dtype))
            if ctx.needs_input_grad[1 + n]:
                douts.append((dout.to(lse.dtype) * column).to(part.dtype))
            else:
                douts.append(None)
            if ctx.needs_input_grad[1 + ctx.count + n]:
                along = (dout.to(lse.dtype) * (wide - out.to(lse.dtype))).sum(-1).transpose(-1, -2)
                dlses.append(torch.where(unseen, 0.0, weight * (along + dlse)))
            else:
                dlses.append(None)
        return None, *douts, *dlses
