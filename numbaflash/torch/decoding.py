"""Decoding where torch records: custom operators, which it keeps in its graph as they are.

`decode`, `cascade` and `append_kv` are what torch.compile traces in the place of the functions of numbaflash, ``recorded_...`` what other recorders
meet. `append_kv` changes the caches, as its schema says; the others return new tensors.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import caches, decoding
from ..arrays import Facts
from ..arrays.torch import TORCH, not_recorded
from ..call import check_one_device
from ..problem import UnsupportedError, check_flag, check_num_splits, make_decode_problem
from ..problem.caches import make_append
from ..problem.shapes import check_axes
from .operators import CAUSAL, known, lse_of, name_of, plain_numbers, plain_softcap, refuse_to_record, unrecorded

_CACHES = "Tensor k_cache, Tensor v_cache, Tensor seqlens_k, Tensor? page_table"
_NUMBERS = "float? scale, int causal, int? left, int? right, float? softcap, int? num_splits"
_OPTIONAL = ("page_table", "alibi_slopes", "sinks", "q", "cos", "sin")


# What torch.compile traces


def decode(q, k_cache, v_cache, seqlens_k, page_table, *, alibi_slopes, sinks, return_lse, out, lse, stream, **numbers):
    """`numbaflash.decode` in a graph, which breaks at places to write to, at a stream, and for other arrays than tensors."""
    if not isinstance(q, torch.Tensor) or not (out is lse is stream is None):
        more = {"alibi_slopes": alibi_slopes, "sinks": sinks, "return_lse": return_lse, "out": out, "lse": lse, "stream": stream}
        return torch.compiler.disable(decoding.decode)(q, k_cache, v_cache, seqlens_k, page_table, **more, **numbers)
    cache = {"k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    _check_in_graph({"q": q} | cache | {"alibi_slopes": alibi_slopes, "sinks": sinks})
    return _decode(q, *cache.values(), alibi_slopes, sinks, check_flag("return_lse", return_lse), **numbers)


def cascade(q, k_prefix, v_prefix, k_cache, v_cache, seqlens_k, page_table, *, causal, window, alibi_slopes, sinks, return_lse, **numbers):
    """`numbaflash.cascade` in a graph."""
    cache = {"k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    if not isinstance(q, torch.Tensor):
        more = {"causal": causal, "window": window, "alibi_slopes": alibi_slopes, "sinks": sinks, "return_lse": return_lse}
        return torch.compiler.disable(decoding.cascade)(q, k_prefix, v_prefix, **cache, **more, **numbers)
    return_lse, window = check_flag("return_lse", return_lse), decoding.check_cascade(causal, window, alibi_slopes)
    _check_in_graph({"q": q, "k_prefix": k_prefix, "v_prefix": v_prefix} | cache | {"sinks": sinks})
    return _cascade(q, k_prefix, v_prefix, *cache.values(), sinks, return_lse, causal=causal, window=window, **numbers)


def append_kv(k_new, v_new, k_cache, v_cache, seqlens_k, page_table, *, q, cos, sin, interleaved, stream):
    """`numbaflash.append_kv` in a graph, which breaks at a stream and for other arrays than tensors."""
    arrays = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    arrays |= {"q": q, "cos": cos, "sin": sin}
    if stream is not None or not isinstance(k_new, torch.Tensor):
        return torch.compiler.disable(caches.append_kv)(**arrays, interleaved=interleaved, stream=stream)
    _check_in_graph(arrays)
    return _append(arrays, check_flag("interleaved", interleaved))


def _check_in_graph(arrays):
    for name, x in arrays.items():
        if x is None and name in _OPTIONAL:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor, as the others are; got {type(x).__name__}")
        if x.requires_grad and torch.is_grad_enabled():
            raise not_recorded(name)


# What other recorders meet


def recorded_decode(q, k_cache, v_cache, *, seqlens_k, page_table, alibi_slopes, sinks, return_lse, out, lse, stream, **numbers):
    """`numbaflash.decode` where torch records."""
    cache = {"k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    options = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    given = {"out": out, "lse": lse, "stream": stream}
    if any(x is not None for x in given.values()):
        refuse_to_record("decode", given)
        with _disable_current_modes():
            return decoding.decode(q, **cache, **options, **numbers, **given, return_lse=return_lse)
    _check({"q": q} | cache | options)
    return _decode(q, *cache.values(), *options.values(), return_lse, **numbers)


def recorded_cascade(q, k_prefix, v_prefix, k_cache, v_cache, seqlens_k, page_table, *, sinks, return_lse, **numbers):
    """`numbaflash.cascade` where torch records."""
    cache = {"k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    _check({"q": q, "k_prefix": k_prefix, "v_prefix": v_prefix} | cache | {"sinks": sinks})
    return _cascade(q, k_prefix, v_prefix, *cache.values(), sinks, return_lse, **numbers)


def recorded_append_kv(arrays, *, interleaved, stream):
    """`numbaflash.append_kv` where torch records."""
    if stream is not None:
        refuse_to_record("append_kv", {"stream": stream})
        with _disable_current_modes():
            return caches.append_kv(**arrays, interleaved=interleaved, stream=stream)
    _check(arrays)
    return _append(arrays, interleaved)


def _check(arrays):
    for name, x in arrays.items():
        if x is not None:
            TORCH.check(x, name)


# The operators


def _decode(*arguments, scale, causal, window, softcap, num_splits):
    found = torch.ops.numbaflash.decode(*arguments, *plain_numbers(scale, causal, window), plain_softcap(softcap), check_num_splits(num_splits))
    return tuple(found) if len(found) == 2 else found[0]


def _cascade(*arguments, scale, causal, window, softcap, num_splits):
    *arrays, return_lse = arguments
    numbers = *plain_numbers(scale, causal, window), plain_softcap(softcap), check_num_splits(num_splits)
    out, lse = torch.ops.numbaflash.cascade(*arrays, *numbers)
    return (out, lse) if return_lse else out


def _append(arrays, interleaved):
    names = "k_new", "v_new", "k_cache", "v_cache", "seqlens_k", "page_table", "q", "cos", "sin"
    rotated = torch.ops.numbaflash.append_kv(*[arrays.get(name) for name in names], interleaved)
    return None if arrays.get("q") is None else rotated


def _options(scale, causal, left, right, softcap, num_splits):
    return {"scale": scale, "causal": CAUSAL[causal], "window": (left, right), "softcap": softcap, "num_splits": num_splits}


@torch.library.custom_op(
    "numbaflash::decode",
    mutates_args=(),
    schema=f"(Tensor q, {_CACHES}, Tensor? alibi_slopes, Tensor? sinks, bool return_lse, {_NUMBERS}) -> Tensor[]",
)
def _decode_operator(q, k_cache, v_cache, seqlens_k, page_table, alibi_slopes, sinks, return_lse, *numbers):
    options = {"alibi_slopes": alibi_slopes, "sinks": sinks, "return_lse": return_lse}
    with unrecorded():
        found = decoding.decode(q, k_cache, v_cache, seqlens_k, page_table, **options, **_options(*numbers))
    return list(found) if return_lse else [found]


@_decode_operator.register_fake
def _decode_shapes(q, k_cache, v_cache, seqlens_k, page_table, alibi_slopes, sinks, return_lse, *numbers):
    options = {"seqlens_k": seqlens_k, "page_table": page_table, "alibi_slopes": alibi_slopes, "sinks": sinks}
    _check_shapes(q, k_cache, v_cache, options, _options(*numbers))
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]))
    return [out, lse_of(q)] if return_lse else [out]


@torch.library.custom_op(
    "numbaflash::cascade",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k_prefix, Tensor v_prefix, {_CACHES}, Tensor? sinks, {_NUMBERS}) -> (Tensor, Tensor)",
)
def _cascade_operator(q, k_prefix, v_prefix, k_cache, v_cache, seqlens_k, page_table, sinks, *numbers):
    with unrecorded():
        found = decoding.cascade(q, k_prefix, v_prefix, k_cache, v_cache, seqlens_k, page_table, sinks=sinks, return_lse=True, **_options(*numbers))
    return tuple(x.contiguous() for x in found)


@_cascade_operator.register_fake
def _cascade_shapes(q, k_prefix, v_prefix, k_cache, v_cache, seqlens_k, page_table, sinks, *numbers):
    options = {"seqlens_k": seqlens_k, "page_table": page_table, "sinks": sinks}
    prefix = {"k_prefix": k_prefix, "v_prefix": v_prefix}
    _check_shapes(q, k_cache, v_cache, options, _options(*numbers), **prefix)
    if known(*(x.shape for x in (*prefix.values(), k_cache, v_cache))):
        decoding.check_prefix({name: _facts(x) for name, x in prefix.items()}, _facts(k_cache), _facts(v_cache))
    return q.new_empty((*q.shape[:3], v_cache.shape[3])), lse_of(q)


@torch.library.custom_op(
    "numbaflash::append_kv",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor seqlens_k, Tensor? page_table, Tensor? q, Tensor? cos, "
    "Tensor? sin, bool interleaved) -> Tensor",
)
def _append_operator(k_new, v_new, k_cache, v_cache, seqlens_k, page_table, q, cos, sin, interleaved):
    with unrecorded():
        rotated = caches.append_kv(k_new, v_new, k_cache, v_cache, seqlens_k, page_table, q=q, cos=cos, sin=sin, interleaved=interleaved)
    return _no_queries(k_new) if q is None else rotated


@_append_operator.register_fake
def _append_shapes(k_new, v_new, k_cache, v_cache, seqlens_k, page_table, q, cos, sin, interleaved):
    arrays = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k}
    facts = {name: _facts(x) for name, x in (arrays | {"page_table": page_table, "q": q, "cos": cos, "sin": sin}).items() if x is not None}
    if known(*(each.shape for each in facts.values())):
        make_append({name: (each.shape, each.dtype) for name, each in facts.items()}, interleaved)
    check_one_device(facts)
    return _no_queries(k_new) if q is None else q.new_empty(q.shape)


def _no_queries(k_new):
    """What is returned where there is nothing to rotate: an operator returns a tensor or none, whatever its arguments."""
    return k_new.new_empty((0,))


def _check_shapes(q, k_cache, v_cache, options, numbers, **prefix):
    """What can be checked before there are values: all of it where sizes are known."""
    main = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    options = {name: _facts(x) for name, x in options.items() if x is not None}
    for name, x in main.items():
        if x.dim() != 4:
            check_axes(name, x.shape, "(batch, seqlen_q, heads, head_dim)" if name == "q" else "(batch or pages, keys, kv_heads, head_dim)")
    check_one_device({name: _facts(x) for name, x in (main | prefix).items()} | options)
    if known(*(x.shape for x in main.values()), *(each.shape for each in options.values())):
        numbers = {name: x for name, x in numbers.items() if name != "num_splits" and not isinstance(x, torch.SymFloat)}
        told = {name: (each.shape, each.dtype) for name, each in options.items()}
        make_decode_problem(*(x.shape for x in main.values()), [name_of(x) for x in main.values()], **told, **numbers)


def _facts(x) -> Facts:
    return Facts(0, tuple(x.shape), (), name_of(x), x.device.type, x.device.index or 0)


def _refuse_derivative(*unused):
    raise UnsupportedError(
        "numbaflash.decode and cascade have no derivative. Call numbaflash.attention, which torch differentiates, or detach their arguments"
    )


def _refuse_vmap(*unused):
    raise TypeError("numbaflash.decode, cascade and append_kv cannot be batched by vmap. Use the batch axis of q and the caches in its place")


for _operator in (_decode_operator, _cascade_operator):
    _operator.register_autograd(_refuse_derivative)
for _operator in (_decode_operator, _cascade_operator, _append_operator):
    _operator.register_vmap(_refuse_vmap)
