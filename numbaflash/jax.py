"""JAX: attention and its gradients as operations of XLA, so that they can be jitted and run in the order, on the stream and in the buffers of XLA.

XLA calls a handler (its FFI, a C ABI of plain structs) with the addresses of row-major buffers and, on CUDA, the stream. The handler is a
ctypes callback that looks the prepared launch up: no C++, no host synchronisation, and nothing of Python at all where XLA replays a CUDA graph.
The structs are those of ``xla/ffi/api/c_api.h``, which jaxlib ships; they only grow at their ends within a major version, 0.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .arrays import Facts, contiguous_strides
from .arrays.jax import JAX, local_gpus
from .batching import join, steps
from .block_mask import mask_arrays
from .call import MAX_CALLS, WORKSPACE_ALIGNMENT, aligned_workspace, device_of, plan_backward_call, plan_call
from .dispatch import BACKWARD_OPERANDS, family, forced_family, operands_with, use_family
from .problem import (
    CONSTANT_OPTIONS,
    DIFFERENTIABLE,
    ITEMSIZE,
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

OLDEST = (0, 6, 2)
"""The oldest JAX that has all: `jax.ffi` (0.5), handlers that are told their device (0.6), results that vary in a shard_map (0.6.2)."""

if jax.__version_info__ < OLDEST:
    raise ImportError(f"numbaflash needs JAX 0.6.2 or newer, because of its FFI; installed is {jax.__version__}. Run pip install -U jax")

import jax.ffi  # noqa: E402  (a submodule that not every JAX has)

__all__ = ["attention", "attention_varlen"]

TARGETS = {"forward": "numbaflash_forward", "backward": "numbaflash_backward"}


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
    dropout=0.0,
    seed=None,
    seqlens_q=None,
    seqlens_k=None,
    return_lse=False,
    deterministic=False,
):
    """Exact attention that JAX differentiates (reverse mode): `numbaflash.attention` for JAX arrays.

    Parameters
    ----------
    q : Array, (batch, seqlen_q, heads, head_dim)
    k : Array, (batch, seqlen_k, kv_heads, head_dim)
    v : Array, (batch, seqlen_k, kv_heads, head_dim_v)
        float16, bfloat16, float32 or (with x64 enabled) float64, on the CPU or a CUDA device, eagerly and under ``jit``, ``grad``, ``vmap``,
        ``checkpoint`` and ``shard_map``. What no derivative is taken of costs nothing in the backward.
    scale, causal, window, softcap, dropout
        As in `numbaflash.forward`. They are part of the program: Python values, not traced ones.
    mask, alibi_slopes, seqlens_q, seqlens_k : Array, optional
        As in `numbaflash.forward`; a `BlockMask` may be an argument of a jitted function, and is built outside of it.
    bias, sinks : Array, optional
        As in `numbaflash.forward`, and differentiated like q, k and v.
    seed : int, optional
        Of the dropout mask, from 0 to below 2**64; needed with dropout. It is part of the program as well: a jitted function is compiled again for
        another seed (``static_argnames``), and drops the same weights in every call otherwise.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores, which is differentiable too.
    deterministic : bool, optional
        The same inputs give the same gradients, bit for bit. The forward always does.

    Returns
    -------
    out : Array, (batch, seqlen_q, heads, head_dim_v)
    lse : Array, (batch, heads, seqlen_q), only with ``return_lse``
        float32 (float64 for float64).

    Raises
    ------
    TypeError
        For a wrong kind or dtype, a traced seed among them, and from JAX under ``jvp``: there is no forward-mode derivative.
    ValueError
        For a wrong shape or value.
    UnsupportedError
        For a problem or gradients that no kernel family can compute, for ALiBi slopes that are differentiated, and when the gradients are
        differentiated again. Where XLA runs the operation by itself, under ``jit``, its own error has this one's message.

    Notes
    -----
    Saved for the backward are q, k, v, out and the log-sum-exp; scores are computed again (Dao et al., "FlashAttention", 2022, Algorithm 4).
    ``vmap`` adds to the batch: one launch for all. Where an option does not allow that, there is one for each element: sinks that differ, a mask
    or bias of several batch entries that leaves the batch axis out, and dropout, which gives each element the mask that it has by itself.

    Examples
    --------
    >>> import jax
    >>> import numbaflash.jax
    >>> q, k, v = (jax.random.normal(key, (1, 32, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
    >>> dv = jax.grad(lambda v: numbaflash.jax.attention(q, k, v, causal=True).sum())(v)
    >>> dv.shape
    (1, 32, 4, 16)
    """
    arrays = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    arrays = mask_arrays(mask, q, k) | arrays
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": dropout, "deterministic": deterministic}
    return _attend({"q": q, "k": k, "v": v} | arrays, options, seed, return_lse)


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
    dropout=0.0,
    seed=None,
    return_lse=False,
    deterministic=False,
):
    """Exact attention of packed sequences that JAX differentiates: `numbaflash.attention_varlen` for JAX arrays.

    Parameters
    ----------
    q : Array, (total_q, heads, head_dim)
    k : Array, (total_k, kv_heads, head_dim)
    v : Array, (total_k, kv_heads, head_dim_v)
        As in `attention`, but for the axes. Under ``vmap`` there is a launch for each element.
    cu_seqlens_q, cu_seqlens_k : Array of int32 or int64, (batch + 1,)
        As in `numbaflash.forward_varlen`; traced under ``jit``: one program serves all boundaries of as many sequences.
    max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, alibi_slopes
        As in `numbaflash.forward_varlen`. Numbers are part of the program.
    sinks, dropout, seed, return_lse, deterministic
        As in `attention`.

    Returns
    -------
    out : Array, (total_q, heads, head_dim_v)
    lse : Array, (heads, total_q), only with ``return_lse``
        float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`.

    Examples
    --------
    >>> import jax
    >>> import numbaflash.jax
    >>> q, k, v = (jax.random.normal(key, (12, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
    >>> ends = jax.numpy.array([0, 5, 12])
    >>> dv = jax.grad(lambda v: numbaflash.jax.attention_varlen(q, k, v, ends, ends, causal=True).sum())(v)
    >>> dv.shape
    (12, 4, 16)
    """
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": dropout, "deterministic": deterministic}
    options |= {"max_seqlen_q": check_max_seqlen("max_seqlen_q", max_seqlen_q), "max_seqlen_k": check_max_seqlen("max_seqlen_k", max_seqlen_k)}
    arrays = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "sinks": sinks}
    packing = _present({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    return _attend(arrays | packing, options, seed, return_lse)


def _attend(arrays, options, seed, return_lse):
    """Both of them; ``arrays`` in the order of operands, None for an option that there is not."""
    arrays = _present({name: x for name, x in arrays.items() if name in NEEDS or x is not None})
    if isinstance(seed, jax.Array):
        raise TypeError(
            f"seed must be an integer, known before the program runs; got {'a traced' if isinstance(seed, jax.core.Tracer) else 'a JAX'} array. "
            "Make it a static argument of the jitted function, or read it outside of it: int(jax.random.bits(key))"
        )
    scale, causal, window, softcap, dropout = (options.pop(name) for name in ("scale", "causal", "window", "softcap", "dropout"))
    scale, dropout = None if scale is None else check_scale(scale, 1), check_dropout(dropout)
    return_lse, options["deterministic"] = check_flag("return_lse", return_lse), check_flag("deterministic", options["deterministic"])
    options = _options(arrays, scale, check_causal(causal), check_window(window), check_softcap(softcap), dropout, **options)
    seed = check_seed(seed, dropout)
    _build_early(options, return_lse, arrays)
    return _differentiable(options, seed if dropout else 0, return_lse)(*_varying_alike(*arrays.values()))


def forward(q, k, v, *, scale, causal, window, return_lse, softcap=None, dropout=0.0, seed=0, max_seqlen_q=None, max_seqlen_k=None, **arrays):
    """`numbaflash.forward` and `numbaflash.forward_varlen` for JAX arrays and tracers, with checked options."""
    arrays |= mask_arrays(arrays.get("mask"), q, k)
    arrays = {"q": q, "k": k, "v": v} | {name: arrays[name] for name in OPTIONS + PACKED if arrays.get(name) is not None}
    more = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k} if PACKED[0] in arrays else {}
    options = _options(arrays, scale, causal, window, softcap, dropout, **more)
    _build_early(options, return_lse, arrays)
    return _operation(options, seed if dropout else 0, return_lse, _FORWARD_ONLY)(*_varying_alike(*arrays.values()))


def _present(arrays):
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} must be a JAX array; got {type(x).__name__}. Convert it with jax.numpy.asarray")
    return arrays


def _options(arrays, scale, causal, window, softcap, dropout, **more) -> str:
    """What travels with an operation; it is hashable, and XLA keeps it. The seed goes beside it: it makes no other kernel."""
    told = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": dropout, "family": forced_family()}
    return json.dumps(told | {"arrays": [name for name in arrays if name not in NEEDS], **more})


@functools.lru_cache(MAX_CALLS)
def _told(options: str) -> dict:
    """The same read again, which nobody changes."""
    return json.loads(options)


def _inputs(options: str) -> tuple[str, ...]:
    """Names of the arrays that an operation is given: q, k, v, and the options."""
    return (*NEEDS, *_told(options)["arrays"])


def _build_early(options, with_lse, arrays):
    """Errors and compilation come here, in the caller's thread, rather than in XLA's."""
    facts = {name: JAX.describe(x, name) for name, x in arrays.items()}
    if not any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        shapes, dtypes = tuple(each.shape for each in facts.values()), tuple(each.dtype for each in facts.values())
        _launch(options, with_lse, shapes, dtypes, facts["q"].kind, facts["q"].index, ())


_FORWARD_ONLY = (
    "numbaflash.forward cannot be differentiated; call numbaflash.attention, which can, or keep its arguments out of the derivative with "
    "jax.lax.stop_gradient"
)
_ONLY_ONCE = "the gradients of numbaflash.attention cannot be differentiated again (second derivatives, as for a gradient penalty or a Hessian)"


@functools.lru_cache(MAX_CALLS)
def _differentiable(options: str, seed: int, with_lse: bool):
    """The forward operation with its reverse-mode derivative."""
    names = _inputs(options)

    @jax.custom_vjp
    def attention(*arrays):
        return _operation(options, seed, with_lse, _ONLY_ONCE)(*arrays)

    def save(*primals):
        needs = tuple(name for name, x in zip(names, primals, strict=True) if x.perturbed)
        for name in needs:
            if name in CONSTANT_OPTIONS:
                raise gradient_missing(name, f"jax.lax.stop_gradient({name})")
        arrays = tuple(x.value for x in primals)
        out, lse = _operation(options, seed, True, _ONLY_ONCE)(*arrays)
        return (out, lse) if with_lse else out, (_Needs(tuple(name for name in DIFFERENTIABLE if name in needs)), arrays, out, lse)

    def differentiate(saved, cotangents):
        needs, arrays, out, lse = saved
        dout, dlse = cotangents if with_lse else (cotangents, None)
        if isinstance(dlse, SymbolicZero):
            dlse = None
        if isinstance(dout, SymbolicZero):
            dout, _ = _varying_alike(jnp.zeros_like(out), out)
        told = options if dlse is None else json.dumps(_told(options) | {"dlse": True})
        compute = _gradients(told, seed, needs.names)
        gradients = compute(dout, *arrays[:3], out, lse, *(() if dlse is None else (dlse,)), *arrays[3:])
        found = dict(zip(needs.names, gradients, strict=True))
        return tuple(found.get(name) for name in names)

    attention.defvjp(save, differentiate, symbolic_zeros=True)
    return attention


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Needs:
    """The inputs that are differentiated: known when the forward is traced, used when the backward is."""

    names: tuple[str, ...]


@functools.lru_cache(MAX_CALLS)
def _operation(options: str, seed: int, with_lse: bool, refusal: str):
    """The jitted forward operation of an option set; ``refusal`` is what a derivative of it says."""

    def attention(*arrays):
        problem = _problem(options, *_kind(*arrays))
        results = [(problem.shape_of(name), problem.dtype_of(name)) for name in ("out", "lse")[: 1 + with_lse]]
        if problem.is_empty:
            found = _zeros(results, arrays[0])
        else:
            size = _workspace_bytes(_forward_plan, options, with_lse, *_kind(*arrays))
            told = json.dumps(_told(options) | {"workspace": True}) if size else options
            found = _call("forward", results + ([((size,), "uint8")] if size else []), arrays, told, seed)
        return tuple(found[:2]) if with_lse else found[0]

    return jax.jit(_refusing(attention, refusal))


@functools.lru_cache(MAX_CALLS)
def _gradients(options: str, seed: int, needs: tuple[str, ...]):
    """The jitted backward operation: of dout, q, k, v, out, lse, dlse where there is one, and the options."""
    told = json.dumps(_told(options) | {"needs": needs})
    names = _operands("backward", told)

    def gradients(*arrays):
        given = dict(zip(names, arrays, strict=True))
        shapes, dtypes = _kind(*(given[name] for name in _inputs(options)))
        results = [(given[name].shape, given[name].dtype) for name in needs]
        if not needs or _problem(options, shapes, dtypes).sees_nothing:
            return _zeros(results, arrays[0])
        size = _workspace_bytes(_backward_plan, told, shapes, dtypes)
        workspace = [((size,), "uint8")] if size else []
        return _call("backward", results + workspace, arrays, told, seed)[: len(needs)]

    return jax.jit(_refusing(gradients, _ONLY_ONCE))


def _operands(direction: str, options: str) -> tuple[str, ...]:
    """Names of what XLA hands in, in its order."""
    told = _told(options)
    if direction == "forward":
        return _inputs(options)
    return (*BACKWARD_OPERANDS[: 7 if told.get("dlse") else 6], *told["arrays"])


def _refusing(function, refusal):
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def differentiate(primals, tangents):
        raise UnsupportedError(refusal)

    return guarded


def _kind(*arrays):
    return tuple(tuple(x.shape) for x in arrays), tuple(jnp.dtype(x.dtype).name for x in arrays)


def _zeros(results, like):
    return tuple(_varying_alike(jnp.zeros(*each), like)[0] for each in results)


def _call(direction, results, arrays, options, seed):
    _register()
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in results)
    told = _told(options)
    # Options are not to be expanded: XLA would write them out.
    method = "expand_dims" if told["arrays"] or told["dropout"] else "broadcast_all"
    attributes = {"options": options} | ({"seed": str(seed)} if told["dropout"] else {})
    results = jax.ffi.ffi_call(TARGETS[direction], results, vmap_method=method)(*arrays, **attributes)
    return tuple(_varying_alike(x, arrays[0])[0] for x in results)


def _varying(x) -> frozenset:
    """The axes of a shard_map along which devices have different values of ``x``."""
    kind = jax.typeof(x) if hasattr(jax, "typeof") else None
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", frozenset())


def _varying_alike(*arrays):
    """Arrays that are the same on every device beside ones that are not count as different too: their gradients are then summed over devices."""
    every = frozenset().union(*map(_varying, arrays))
    return tuple(_vary(x, tuple(every - _varying(x))) for x in arrays)


def _vary(x, axes):
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)


def _problem(options, shapes, dtypes):
    told = _told(options)
    arrays = zip(told["arrays"], zip(shapes[3:], dtypes[3:], strict=True), strict=True)
    numbers = {name: told[name] for name in ("scale", "causal", "window", "softcap", "dropout")}
    if _is_packed(told):
        numbers |= {name: told[name] for name in ("max_seqlen_q", "max_seqlen_k")}
        return make_packed_problem(*shapes[:3], dtypes[:3], **numbers, **dict(arrays))
    return make_problem(*shapes[:3], dtypes[:3], **numbers, **dict(arrays))


def _is_packed(told) -> bool:
    return PACKED[0] in told["arrays"]


@functools.lru_cache(MAX_CALLS)
def _launch(options: str, with_lse: bool, shapes, dtypes, kind: str, index: int, alignments):
    """The prepared launch of row-major arrays on a device; None when there is nothing to launch.

    ``shapes`` and ``dtypes`` are those of `_inputs`, ``alignments`` pairs of an operand and the bytes that divide its address, where 16 do not.
    """
    plan = _forward_plan(options, with_lse, shapes, dtypes, kind, index, alignments)
    return None if plan is None else family(plan.family).prepare(plan)


@functools.lru_cache(MAX_CALLS)
def _forward_plan(options: str, with_lse: bool, shapes, dtypes, kind: str, index: int, alignments):
    problem = _problem(options, shapes, dtypes)
    if problem.is_empty:
        return None
    facts = _facts(problem, _operands("forward", options), kind, index, alignments)
    with use_family(_told(options)["family"]):
        plan = plan_call(problem, facts, with_lse, device_of(facts["q"]))
    _refuse_copies(plan)
    return plan


@functools.lru_cache(MAX_CALLS)
def _backward_plan(options: str, shapes, dtypes, kind: str, index: int, alignments):
    told = _told(options)
    problem = _problem(options, shapes, dtypes)
    facts = _facts(problem, _operands("backward", options), kind, index, alignments)
    with use_family(told["family"]):
        plan = plan_backward_call(problem, facts, tuple(told["needs"]), told["deterministic"], device_of(facts["q"]))
    _refuse_copies(plan)
    return plan


@functools.lru_cache(MAX_CALLS)
def _backward_launch(*kind):
    """The prepared launch of the same, and the bytes of its workspace."""
    plan = _backward_plan(*kind)
    return family(plan.family, "backward").prepare(plan), plan.workspace_bytes


def _workspace_bytes(plan_of, *kind) -> int:
    """What a call needs on any GPU of this process: where a traced program is going to run is not known. The CPU's is allocated there."""
    sizes = [0]
    for index in local_gpus():
        try:
            sizes.append(plan_of(*kind, "cuda", index, ()).workspace_bytes)
        except UnsupportedError:  # said where it runs; it may run on the CPU
            continue
    return max(sizes) and max(sizes) + WORKSPACE_ALIGNMENT


def _facts(problem, names, kind, index, alignments):
    """Row-major arrays; results are among them where their place is another than that of a new array."""
    facts, alignments = {}, dict(alignments)
    for name in dict.fromkeys((*names, *alignments)):
        shape, dtype = problem.shape_of(name), problem.dtype_of(name)
        facts[name] = Facts(alignments.get(name, 16), shape, contiguous_strides(shape, ITEMSIZE[dtype]), dtype, kind, index)
    return facts


def _refuse_copies(plan):
    if plan.copies:
        told = "; ".join(f"{name}: {reason}" for name, reason in plan.copies.items())
        raise ValueError(f"the arrays must lie so that they need no copy, as XLA allocates them; pass jax.numpy.copy of them ({told})")


# The C ABI of XLA's FFI.

_p, _size, _i64, _i32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


def _struct(name, *members):
    """A struct of XLA's FFI: its size and a list of extensions come first."""
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", _size), ("extension", _p), *members]})


_Version = _struct("Version", ("major", _i32), ("minor", _i32))
_Api = _struct(
    "Api",
    ("version", _Version),
    ("internal", _p),
    ("error_create", _p),
    ("error_get_message", _p),
    ("error_destroy", _p),
    ("handler_register", _p),
    ("stream_get", _p),
    ("type_register", _p),
    ("execution_context_get", _p),
    ("state_set", _p),
    ("state_get", _p),
    ("device_memory_allocate", _p),
    ("device_memory_free", _p),
    ("thread_pool_schedule", _p),
    ("thread_pool_num_threads", _p),
    ("future_create", _p),
    ("future_set_available", _p),
    ("future_set_error", _p),
    ("run_id_get", _p),
    ("device_ordinal_get", _p),
)
_Buffers = _struct("Buffers", ("size", _i64), ("types", _p), ("items", ctypes.POINTER(_p)))
_Attributes = _struct("Attributes", ("size", _i64), ("types", ctypes.POINTER(_i32)), ("names", _p), ("items", ctypes.POINTER(_p)))
_CallFrame = _struct(
    "CallFrame",
    ("api", _p),
    ("context", _p),
    ("stage", _i32),
    ("arguments", _Buffers),
    ("results", _Buffers),
    ("attributes", _Attributes),
    ("future", _p),
)
_Buffer = _struct("Buffer", ("dtype", _i32), ("data", _size), ("rank", _i64), ("dims", ctypes.POINTER(_i64)))
_ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("code", _i32))
_StreamGet = _struct("StreamGet", ("context", _p), ("stream", _size))
_DeviceOrdinalGet = _struct("DeviceOrdinalGet", ("context", _p), ("ordinal", ctypes.c_int32))


class _Span(ctypes.Structure):
    _fields_ = [("data", _p), ("size", _size)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", _size), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("struct_size", _size), ("type", _i32), ("next", _p), ("metadata", ctypes.POINTER(_Metadata))]


_MAJOR, _MINOR = 0, 3  # the version of the API that is described here
_METADATA = 1
_INITIALIZE, _EXECUTE = 2, 3
_STRING = 4
_CAN_BE_CAPTURED = 1  # into a CUDA graph
_DTYPES = {1: "bool", 4: "int32", 5: "int64", 10: "float16", 16: "bfloat16", 11: "float32", 12: "float64"}
_INVALID_ARGUMENT, _UNIMPLEMENTED, _INTERNAL = 3, 12, 13


class _ApiError(Exception):
    """An error that XLA returned; ``args[0]`` is its address, which the handler hands back."""


def _handle(direction: str, platform: str, frame_address: int) -> int | None:
    """Serve one call of XLA: returns None, or the address of an error object."""
    frame = _CallFrame.from_address(frame_address)
    # The jaxlibs of version 0.1 (before 0.9) ask for metadata without an API.
    api = _Api.from_address(frame.api) if frame.api else _Api(version=_Version(major=0, minor=1))
    try:
        if frame.extension:
            _tell_metadata(frame, api)
        else:
            _run(direction, platform, frame, api)
    except _ApiError as error:
        return error.args[0]
    except BaseException as error:  # an exception must not leave a callback
        return _error(api, error)
    return None


def _tell_metadata(frame, api):
    extension = _MetadataExtension.from_address(frame.extension)
    if extension.type == _METADATA:
        if api.version.major != _MAJOR:
            raise UnsupportedError(f"numbaflash knows version {_MAJOR} of XLA's FFI; this jaxlib has {api.version.major}.{api.version.minor}")
        metadata = extension.metadata.contents
        metadata.version.major, metadata.version.minor = _MAJOR, min(_MINOR, api.version.minor)
        metadata.traits = _CAN_BE_CAPTURED


def _run(direction, platform, frame, api):
    options, *seed = _read_strings(frame.attributes)  # sorted by name
    buffers = _read(frame.arguments) + _read(frame.results)
    index = 0 if platform == "cpu" else _ask(api, "device_ordinal_get", _DeviceOrdinalGet, frame.context).ordinal
    execute = frame.stage == _EXECUTE
    stream = _ask(api, "stream_get", _StreamGet, frame.context).stream if execute and platform != "cpu" else 0
    _serve(direction, options, int(seed[0]) if seed else 0, buffers, platform, index, stream, execute)


def _serve(direction, options, seed, buffers, platform, index, stream, execute):
    addresses = [buffer.data for buffer in buffers]
    together = functools.reduce(int.__or__, addresses)
    kind = tuple(_shape(buffer) for buffer in buffers), tuple(buffer.dtype for buffer in buffers), platform, index
    service = _service(direction, options, *kind, tuple(_alignment(at) for at in addresses) if together & 15 else None)
    if not execute or service is None:
        return
    addresses += [0, seed]
    if service.workspace_bytes:
        own = np.empty(service.workspace_bytes + WORKSPACE_ALIGNMENT, np.uint8) if platform == "cpu" else None
        addresses.append(aligned_workspace(buffers[-1].data if own is None else own.ctypes.data))
    for offsets in service.offsets:
        service.launch(tuple(addresses[place] + offset for place, offset in zip(service.order, offsets, strict=True)), stream)


@dataclass(frozen=True, slots=True)
class _Service:
    """What calls of a kind launch.

    Attributes
    ----------
    launch : Launch
    workspace_bytes : int
    order : tuple of int
        For each operand of the launch, the place of its address: in the list of the buffers, a 0, the seed and the workspace.
    offsets : tuple of tuple of int
        For each launch, the bytes from there to what it works on.
    """

    launch: Callable
    workspace_bytes: int
    order: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]


@functools.lru_cache(MAX_CALLS)
def _service(direction: str, options: str, shapes, dtypes, platform: str, index: int, alignments) -> _Service | None:
    """What to launch for the buffers of a call, which with the axes of ``vmap`` hold one problem or several. None when there is nothing.

    ``alignments`` are those of the buffers' addresses, None where 16 bytes divide all of them.
    """
    told = _told(options)
    inputs = _operands(direction, options)
    results = len(shapes) - len(inputs) - bool(told.get("workspace"))
    written = ("out", "lse")[:results] if direction == "forward" else tuple(f"d{name}" for name in told["needs"])
    names = inputs + written
    room = math.prod(shapes[-1]) if len(shapes) > len(names) else 0
    shapes, dtypes = dict(zip(names, shapes, strict=False)), {name: _DTYPES[code] for name, code in zip(names, dtypes, strict=False)}
    alignments = dict.fromkeys(names, 16) if alignments is None else dict(zip(names, alignments, strict=False))
    packed = _is_packed(told)
    outer = len(shapes["q"]) - (3 if packed else 4)
    axes = shapes[written[0]][:outer]
    if 0 in axes:
        return None

    def prepare(shapes, alignments):
        """(launch, bytes of its workspace)."""
        arrays = _inputs(options)
        less = tuple((name, n) for name, n in alignments.items() if n < 16)
        kind = tuple(shapes[name] for name in arrays), tuple(dtypes[name] for name in arrays), platform, index, less
        if direction == "backward":
            return _backward_launch(options, *kind)
        plan = _forward_plan(options, len(written) == 2, *kind)
        return _launch(options, len(written) == 2, *kind), plan.workspace_bytes if plan else 0

    joined, offsets = (None if outer else shapes) if packed else join(shapes, axes, told["dropout"] > 0), [{}]
    launch, needed = (None, 0) if joined is None else prepare(joined, alignments)
    # The room is that of the parts together, which need not do for all of them as one: then one after the other.
    if joined is None or (platform != "cpu" and needed and needed + WORKSPACE_ALIGNMENT > room):
        step = {name: steps(shapes[name], outer, ITEMSIZE[dtypes[name]]) for name in names}
        alignments = {name: _alignment(n, *step[name]) for name, n in alignments.items()}
        offsets = [{name: sum(i * n for i, n in zip(part, step[name], strict=True)) for name in names} for part in np.ndindex(axes)]
        launch, needed = prepare({name: shape[outer:] for name, shape in shapes.items()}, alignments)
        if platform != "cpu" and needed and needed + WORKSPACE_ALIGNMENT > room:
            raise ValueError(f"the operation needs {needed} bytes of workspace on GPU {index} and got {room}; it was traced for other GPUs")
    if launch is None:
        return None
    order = operands_with(tuple(told["arrays"]), told["dropout"] > 0, direction)
    nothing = len(names) + (room > 0)
    places = {name: n for n, name in enumerate(names)} | {"seed": nothing + 1, "workspace": nothing + 2 if needed else nothing}
    return _Service(
        launch=launch,
        workspace_bytes=needed,
        order=tuple(places.get(name, nothing) for name in order),
        offsets=tuple(tuple(part.get(name, 0) for name in order) for part in offsets),
    )


def _read(buffers):
    return [_Buffer.from_address(buffers.items[i]) for i in range(buffers.size)]


def _read_strings(attributes):
    spans = (_Span.from_address(attributes.items[i]) for i in range(attributes.size))
    return [ctypes.string_at(span.data, span.size).decode() for span in spans]


def _shape(buffer):
    return tuple(buffer.dims[: buffer.rank])


def _alignment(*numbers) -> int:
    """The largest power of two, up to 16, that divides all."""
    together = functools.reduce(int.__or__, numbers)
    return min(16, together & -together or 16)


def _ask(api, function, struct, context):
    """Call a getter of the API: a function of one struct that returns an error or NULL."""
    if getattr(_Api, function).offset >= api.struct_size:
        raise UnsupportedError(f"this jaxlib's FFI (version {api.version.major}.{api.version.minor}) has no {function}; install a newer JAX")
    asked = struct(struct_size=ctypes.sizeof(struct), context=context)
    error = ctypes.CFUNCTYPE(_p, _p)(getattr(api, function))(ctypes.addressof(asked))
    if error:
        raise _ApiError(error)
    return asked


def _error(api, error):
    code = _INTERNAL
    if isinstance(error, NotImplementedError):
        code = _UNIMPLEMENTED
    elif isinstance(error, (TypeError, ValueError)):
        code = _INVALID_ARGUMENT
    message = f"{type(error).__name__}: {error}".encode()
    asked = _ErrorCreate(struct_size=ctypes.sizeof(_ErrorCreate), message=message, code=code)
    return ctypes.CFUNCTYPE(_p, _p)(api.error_create)(ctypes.addressof(asked))


_handlers = {
    (direction, platform): ctypes.CFUNCTYPE(_p, _p)(functools.partial(_handle, direction, platform))
    for direction in TARGETS
    for platform in ("cpu", "cuda")
}


@functools.lru_cache(1)
def _register():
    """Make the operations known to XLA, once a process."""
    for direction, target in TARGETS.items():
        cpu, cuda = (jax.ffi.pycapsule(ctypes.cast(_handlers[direction, platform], _p).value) for platform in ("cpu", "cuda"))
        jax.ffi.register_ffi_target(target, {"execute": cpu}, platform="cpu")
        # The initialize stage loads the kernel before a graph is captured.
        jax.ffi.register_ffi_target(target, {"execute": cuda, "initialize": cuda}, platform="CUDA")
