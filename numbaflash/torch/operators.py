"""The recorded road: custom operators, which torch keeps in its graph as they are.

An operator takes plain values: causal is 0, 1 (bottom-right) or 2 (top-left), needs is three times 0 or 1. torch.compile keeps calls of both on
disk and finds them by the forward alone: a schema that refuses old calls breaks them.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ..arrays.torch import TORCH, records_operations, traced_before_dispatch
from ..block_mask import BlockMask, mask_arrays
from ..problem import (
    DIFFERENTIABLE,
    FORWARD_OPTIONS,
    NEEDS,
    PACKED,
    UnsupportedError,
    check_causal,
    check_dropout,
    check_max_seqlen,
    check_scale,
    check_seed,
    check_softcap,
    check_window,
    make_packed_problem,
    make_problem,
)
from .autograd import SECOND_DERIVATIVES, backward_of, forward_of, gradients_of, keepable, refuse_batches

CAUSAL = (False, True, "top_left")
_TENSOR_OPTIONS = tuple(name for name in FORWARD_OPTIONS if name != "block_mask") + PACKED
_TENSORS = ", ".join(f"Tensor? {name}=None" for name in _TENSOR_OPTIONS)
_NUMBERS = "float? scale, int causal, int? left, int? right, bool deterministic"
_FURTHER = (
    f"float? softcap=None, float dropout=0., Tensor? seed=None, {_TENSORS}, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? block_mask=None"
)


def record(q, k, v, **options):
    """Record the operator; options are checked here, shapes and the value of scale where it runs."""
    return torch.ops.numbaflash.attention(q, k, v, *_plain_options(**options))


def _plain_options(*, scale, causal, window, deterministic, softcap=None, dropout=0, seed=None, max_seqlen_q=None, max_seqlen_k=None, **tensors):
    """Options in the order of the operators' schemas, without defaults at the end: old calls had none."""
    numbers = plain_numbers(scale, causal, window)
    if not isinstance(seed, torch.Tensor):
        seed = check_seed(seed, check_dropout(dropout))
        seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device="cpu") if dropout else None
    further = [plain_softcap(softcap), float(check_dropout(dropout)) if dropout else 0, seed, *[tensors.get(name) for name in _TENSOR_OPTIONS]]
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        further.append(value if isinstance(value, torch.SymInt) else check_max_seqlen(name, value))
    further.append(tensors.get("block_mask"))
    while further and not isinstance(further[-1], torch.Tensor) and not further[-1]:
        further.pop()
    return *numbers, deterministic, *further


def plain_numbers(scale, causal, window):
    """(scale, causal, left, right) as operators take them; a scale that is made of sizes may have no value yet."""
    if isinstance(scale, (int, torch.SymInt)) and not isinstance(scale, bool):
        scale = torch.sym_float(scale)
    elif scale is not None and not isinstance(scale, (float, torch.SymFloat)):
        scale = check_scale(scale, 1)
    causal = check_causal(causal)
    return scale, 2 if causal == "top_left" else int(causal), *check_window(window)


def plain_softcap(softcap):
    """A softcap as operators take it: one that torch.compile does not know by its value is checked where the operator runs."""
    if isinstance(softcap, (int, torch.SymInt)) and not isinstance(softcap, bool):
        softcap = torch.sym_float(softcap)
    if not isinstance(softcap, (float, torch.SymFloat)) or not softcap > 0:
        return check_softcap(softcap)
    return softcap


def _options_of(scale, causal, left, right, deterministic, softcap=None, dropout=0.0, seed=None, *tensors):
    """(options, options that are tensors) of an operator's arguments."""
    options = {"scale": scale, "causal": CAUSAL[causal], "window": (left, right), "softcap": softcap, "dropout": dropout}
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
        refuse_to_record("forward", given)
        with _disable_current_modes():
            return forward_of(options)(q, k, v, **options, return_lse=return_lse, **given)
    check_tensors({"q": q, "k": k, "v": v}, options)
    out, lse = record(q, k, v, **options, deterministic=False)
    return (out, lse) if return_lse else out


def recorded_backward(dout, q, k, v, out, lse, *, dlse, deterministic, needs, stream, **options):
    """`numbaflash.backward` where torch records."""
    if isinstance(options.get("mask"), BlockMask):
        options |= mask_arrays(options["mask"], q, k)
    given = {f"d{name}": options.pop(f"d{name}", None) for name in DIFFERENTIABLE} | {"stream": stream}
    if any(x is not None for x in given.values()):
        refuse_to_record("backward", given)
        given = {name: x for name, x in given.items() if x is not None}
        with _disable_current_modes():
            return backward_of(options)(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, needs=needs, **options, **given)
    check_tensors({"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}, options)
    needed = [int(name in needs) for name in DIFFERENTIABLE]
    told = _plain_options(**options, deterministic=deterministic)
    gradients = iter(torch.ops.numbaflash.attention_backward(dout, dlse, q, k, v, out, lse, needed[: 5 if any(needed[3:]) else 3], *told))
    found = [next(gradients) if each else None for each in needed]
    return (*found[:3], *(x for x in found[3:] if x is not None))


def check_tensors(arrays, options):
    for name, x in (arrays | {name: options.get(name) for name in _TENSOR_OPTIONS}).items():
        if x is not None:
            TORCH.check(x, name)


def refuse_to_record(function, given):
    """A trace would not contain what is written into the caller's arrays. Other modes watch what really runs, and may miss it."""
    traces = FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode
    if torch._C._is_tracing() or traced_before_dispatch() or any(isinstance(mode, traces) for mode in _get_current_dispatch_mode_stack()):
        names = ", ".join(name for name, x in given.items() if x is not None)
        raise TypeError(
            f"numbaflash.{function} is traced by torch (make_fx, torch.jit.trace, FakeTensorMode), and no trace can contain {names}. "
            f"Leave {names} out while tracing, or call {function} outside of the trace"
        )


def unrecorded():
    """Within an operator nothing is to be recorded again, even where a mode did not step aside for it."""
    return _disable_current_modes() if records_operations() else nullcontext()


@torch.library.custom_op(
    "numbaflash::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_NUMBERS}, {_FURTHER}) -> (Tensor, Tensor)"
)
def _attention_operator(q, k, v, *arguments):
    options, tensors = _options_of(*arguments)
    with unrecorded():
        return forward_of(tensors)(q, k, v, **options, **tensors, return_lse=True)


@_attention_operator.register_fake
def _attention_shapes(q, k, v, *arguments):
    _, tensors = _options_of(*arguments[:7], None, *arguments[8:])
    if PACKED[0] in tensors:
        return _packed_shapes(q, k, v, tensors)
    for name, x in zip(NEEDS, (q, k, v), strict=True):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 axes (batch, seqlen, heads, head_dim); got {x.dim()} axes, shape {tuple(x.shape)}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if known(*shapes):
        make_problem(*shapes, [name_of(x) for x in (q, k, v)])
    return q.new_empty((*q.shape[:3], v.shape[3])), lse_of(q)


def _packed_shapes(q, k, v, tensors):
    for name, x in zip(NEEDS, (q, k, v), strict=True):
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 axes (total, heads, head_dim); got {x.dim()} axes, shape {tuple(x.shape)}")
    shapes, boundaries = [tuple(x.shape) for x in (q, k, v)], {name: (tuple(tensors[name].shape), name_of(tensors[name])) for name in PACKED}
    if known(*shapes, *(each for each, _ in boundaries.values())):
        make_packed_problem(*shapes, [name_of(x) for x in (q, k, v)], **boundaries)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[2])), lse


def lse_of(q):
    """Room for the LSE of q, (batch, seqlen_q, heads, head_dim)."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)


def known(*shapes) -> bool:
    """Whether sizes can be checked: symbolic ones would be bound to this call's by that."""
    return all(type(n) is int for shape in shapes for n in shape)


def name_of(x):
    return str(x.dtype).removeprefix("torch.")


@torch.library.custom_op(
    "numbaflash::attention_backward",
    mutates_args=(),
    schema=f"(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int[] needs, {_NUMBERS}, {_FURTHER}) -> Tensor[]",
)
def _backward_operator(dout, dlse, q, k, v, out, lse, needs, *arguments):
    options, tensors = _options_of(*arguments)
    options["deterministic"] = arguments[4]
    with unrecorded():
        return [
            x for x in gradients_of(dout, dlse, q, k, v, out, lse, *tensors.values(), _wanted(needs), tuple(tensors), options, None) if x is not None
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
    ctx.save_for_backward(*(keepable(x) for x in (q, k, v)), *output, *(keepable(x) for x in tensors if x is not None))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    refuse_batches(dout, dlse)
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
