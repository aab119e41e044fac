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
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .arrays import Facts, contiguous_strides
from .arrays.jax import JAX, local_gpus
from .call import MAX_CALLS, WORKSPACE_ALIGNMENT, device_of, plan_backward_call, plan_call
from .dispatch import BACKWARD_OPERANDS, family, forced_family, use_family
from .problem import ITEMSIZE, NEEDS, UnsupportedError, check_causal, check_flag, check_scale, check_window, make_problem

OLDEST = (0, 6, 2)
"""The oldest JAX that has all: `jax.ffi` (0.5), handlers that are told their device (0.6), results that vary in a shard_map (0.6.2)."""

if jax.__version_info__ < OLDEST:
    raise ImportError(f"numbaflash needs JAX 0.6.2 or newer, because of its FFI; installed is {jax.__version__}. Run pip install -U jax")

import jax.ffi  # noqa: E402  (a submodule that not every JAX has)

__all__ = ["attention"]

TARGETS = {"forward": "numbaflash_forward", "backward": "numbaflash_backward"}


def attention(q, k, v, *, scale=None, causal=False, window=None, return_lse=False, deterministic=False):
    """Exact attention that JAX differentiates (reverse mode): `numbaflash.attention` for JAX arrays.

    Parameters
    ----------
    q : Array, (batch, seqlen_q, heads, head_dim)
    k : Array, (batch, seqlen_k, kv_heads, head_dim)
    v : Array, (batch, seqlen_k, kv_heads, head_dim_v)
        float16, bfloat16, float32 or (with x64 enabled) float64, on the CPU or a CUDA device, eagerly and under ``jit``, ``grad``, ``vmap``,
        ``checkpoint`` and ``shard_map``. What no derivative is taken of costs nothing in the backward.
    scale, causal, window
        As in `numbaflash.forward`. They are part of the program: Python values, not traced ones.
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
        For a wrong kind or dtype, and from JAX under ``jvp``: there is no forward-mode derivative.
    ValueError
        For a wrong shape or value.
    UnsupportedError
        For a problem or gradients that no kernel family can compute, and when the gradients are differentiated again. Where XLA runs the
        operation by itself, under ``jit``, its own error has this one's message.

    Notes
    -----
    Saved for the backward are q, k, v, out and the log-sum-exp; scores are computed again (Dao et al., "FlashAttention", 2022, Algorithm 4).
    ``vmap`` adds to the batch: one launch for all.

    Examples
    --------
    >>> import jax
    >>> import numbaflash.jax
    >>> q, k, v = (jax.random.normal(key, (1, 32, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
    >>> dv = jax.grad(lambda v: numbaflash.jax.attention(q, k, v, causal=True).sum())(v)
    >>> dv.shape
    (1, 32, 4, 16)
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} must be a JAX array; got {type(x).__name__}. Convert it with jax.numpy.asarray")
    scale = None if scale is None else check_scale(scale, 1)
    return_lse, deterministic = check_flag("return_lse", return_lse), check_flag("deterministic", deterministic)
    options = _options(scale, check_causal(causal), check_window(window), deterministic=deterministic)
    _build_early(options, return_lse, q, k, v)
    return _differentiable(options, return_lse)(*_varying_alike(q, k, v))


def forward(q, k, v, *, scale, causal, window, return_lse):
    """`numbaflash.forward` for JAX arrays and tracers, with checked options."""
    options = _options(scale, causal, window)
    _build_early(options, return_lse, q, k, v)
    return _operation(options, return_lse, _FORWARD_ONLY)(*_varying_alike(q, k, v))


def _options(scale, causal, window, **more) -> str:
    """What travels with an operation; it is hashable, and XLA keeps it."""
    return json.dumps({"scale": scale, "causal": causal, "window": window, "family": forced_family(), **more})


def _build_early(options, with_lse, q, k, v):
    """Errors and compilation come here, in the caller's thread, rather than in XLA's."""
    facts = {name: JAX.describe(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    if not any(isinstance(x, jax.core.Tracer) for x in (q, k, v)):
        shapes, dtypes = tuple(each.shape for each in facts.values()), tuple(each.dtype for each in facts.values())
        _launch(options, with_lse, shapes, dtypes, facts["q"].kind, facts["q"].index, 16)


_FORWARD_ONLY = (
    "numbaflash.forward cannot be differentiated; call numbaflash.attention, which can, or keep its arguments out of the derivative with "
    "jax.lax.stop_gradient"
)
_ONLY_ONCE = "the gradients of numbaflash.attention cannot be differentiated again (second derivatives, as for a gradient penalty or a Hessian)"


@functools.lru_cache(MAX_CALLS)
def _differentiable(options: str, with_lse: bool):
    """The forward operation with its reverse-mode derivative."""

    @jax.custom_vjp
    def attention(q, k, v):
        return _operation(options, with_lse, _ONLY_ONCE)(q, k, v)

    def save(q, k, v):
        needs = _Needs(tuple(name for name, x in zip(NEEDS, (q, k, v), strict=True) if x.perturbed))
        q, k, v = q.value, k.value, v.value
        out, lse = _operation(options, True, _ONLY_ONCE)(q, k, v)
        return (out, lse) if with_lse else out, (needs, q, k, v, out, lse)

    def differentiate(saved, cotangents):
        needs, q, k, v, out, lse = saved
        dout, dlse = cotangents if with_lse else (cotangents, None)
        if isinstance(dlse, SymbolicZero):
            dlse = None
        if isinstance(dout, SymbolicZero):
            dout, _ = _varying_alike(jnp.zeros_like(out), out)
        told = options if dlse is None else json.dumps(json.loads(options) | {"dlse": True})
        gradients = _gradients(told, needs.names)(dout, q, k, v, out, lse, *(() if dlse is None else (dlse,)))
        found = dict(zip(needs.names, gradients, strict=True))
        return tuple(found.get(name) for name in NEEDS)

    attention.defvjp(save, differentiate, symbolic_zeros=True)
    return attention


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Needs:
    """The inputs that are differentiated: known when the forward is traced, used when the backward is."""

    names: tuple[str, ...]


@functools.lru_cache(MAX_CALLS)
def _operation(options: str, with_lse: bool, refusal: str):
    """The jitted forward operation of an option set; ``refusal`` is what a derivative of it says."""

    def attention(q, k, v):
        problem = _problem(options, *_kind(q, k, v))
        names = ("out", "lse")[: 1 + with_lse]
        results = _zeros(problem, names, q) if problem.is_empty else _call("forward", _results(problem, names), (q, k, v), options)
        return results if with_lse else results[0]

    return jax.jit(_refusing(attention, refusal))


@functools.lru_cache(MAX_CALLS)
def _gradients(options: str, needs: tuple[str, ...]):
    """The jitted backward operation: of dout, q, k, v, out, lse and, where there is one, dlse."""

    def gradients(*arrays):
        shapes, dtypes = _kind(*arrays[1:4])
        problem = _problem(options, shapes, dtypes)
        names = tuple(f"d{name}" for name in needs)
        if problem.sees_nothing or not needs:
            return _zeros(problem, names, arrays[0])
        told = json.dumps(json.loads(options) | {"needs": needs})
        size = _workspace_bytes(told, shapes, dtypes)
        workspace = [((size,), jnp.dtype("uint8"))] if size else []
        return _call("backward", _results(problem, names) + workspace, arrays, told)[: len(needs)]

    return jax.jit(_refusing(gradients, _ONLY_ONCE))


def _refusing(function, refusal):
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def differentiate(primals, tangents):
        raise UnsupportedError(refusal)

    return guarded


def _kind(*arrays):
    return tuple(tuple(x.shape) for x in arrays), tuple(jnp.dtype(x.dtype).name for x in arrays)


def _results(problem, names):
    return [(problem.shape_of(name), jnp.dtype(problem.dtype_of(name))) for name in names]


def _zeros(problem, names, like):
    return tuple(_varying_alike(jnp.zeros(*each), like)[0] for each in _results(problem, names))


def _call(direction, results, arrays, options):
    _register()
    results = tuple(jax.ShapeDtypeStruct(*each) for each in results)
    results = jax.ffi.ffi_call(TARGETS[direction], results, vmap_method="broadcast_all")(*arrays, options=options)
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
    told = json.loads(options)
    return make_problem(*shapes, dtypes, scale=told["scale"], causal=told["causal"], window=told["window"])


@functools.lru_cache(MAX_CALLS)
def _launch(options: str, with_lse: bool, shapes, dtypes, kind: str, index: int, alignment: int):
    """The prepared launch of row-major arrays on a device; None when there is nothing to launch."""
    problem = _problem(options, shapes, dtypes)
    if problem.is_empty:
        return None
    facts = _facts(problem, NEEDS, kind, index, alignment)
    with use_family(json.loads(options)["family"]):
        plan = plan_call(problem, facts, with_lse, device_of(facts["q"]))
    _refuse_copies(plan)
    return family(plan.family).prepare(plan)


@functools.lru_cache(MAX_CALLS)
def _backward_plan(options: str, shapes, dtypes, kind: str, index: int, alignment: int):
    told = json.loads(options)
    problem = _problem(options, shapes, dtypes)
    given = BACKWARD_OPERANDS[: 7 if told.get("dlse") else 6]
    facts = _facts(problem, given, kind, index, alignment)
    with use_family(told["family"]):
        plan = plan_backward_call(problem, facts, tuple(told["needs"]), told["deterministic"], device_of(facts["q"]))
    _refuse_copies(plan)
    return plan


@functools.lru_cache(MAX_CALLS)
def _backward_launch(*kind):
    """The prepared launch of the same, and the bytes of its workspace."""
    plan = _backward_plan(*kind)
    return family(plan.family, "backward").prepare(plan), plan.workspace_bytes


def _workspace_bytes(options, shapes, dtypes) -> int:
    """What the backward needs on any GPU of this process: where a traced program is going to run is not known. The CPU's is allocated there."""
    sizes = [0]
    for index in local_gpus():
        try:
            sizes.append(_backward_plan(options, shapes, dtypes, "cuda", index, 16).workspace_bytes)
        except UnsupportedError:  # said where it runs; it may run on the CPU
            continue
    return max(sizes) and max(sizes) + WORKSPACE_ALIGNMENT


def _facts(problem, names, kind, index, alignment):
    """Row-major arrays at addresses of an alignment, at worst."""
    facts = {}
    for name in names:
        shape, dtype = problem.shape_of(name), problem.dtype_of(name)
        facts[name] = Facts(alignment, shape, contiguous_strides(shape, ITEMSIZE[dtype]), dtype, kind, index)
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
_DTYPES = {10: "float16", 16: "bfloat16", 11: "float32", 12: "float64"}
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
    arguments, results = _read(frame.arguments), _read(frame.results)
    span = _Span.from_address(frame.attributes.items[0])
    options = ctypes.string_at(span.data, span.size).decode()
    index = 0 if platform == "cpu" else _ask(api, "device_ordinal_get", _DeviceOrdinalGet, frame.context).ordinal
    execute = frame.stage == _EXECUTE
    stream = _ask(api, "stream_get", _StreamGet, frame.context).stream if execute and platform != "cpu" else 0
    (_run_forward if direction == "forward" else _run_backward)(options, arguments, results, platform, index, stream, execute)


def _run_forward(options, arguments, results, platform, index, stream, execute):
    addresses = [buffer.data for buffer in (*arguments, *results)]
    shapes, dtypes = tuple(_folded(_shape(buffer)) for buffer in arguments), tuple(_DTYPES[buffer.dtype] for buffer in arguments)
    launch = _launch(options, len(results) == 2, shapes, dtypes, platform, index, _alignment(addresses))
    if execute and launch is not None:
        launch((*addresses[:4], addresses[4] if len(results) == 2 else 0), stream)


def _run_backward(options, arguments, results, platform, index, stream, execute):
    told = json.loads(options)
    needs = told["needs"]
    primals = arguments[1:4]
    dtypes = tuple(_DTYPES[buffer.dtype] for buffer in primals)
    room = results[-1] if len(results) > len(needs) else None
    operands = dict(zip(BACKWARD_OPERANDS, arguments, strict=False)) | {f"d{name}": buffer for name, buffer in zip(needs, results, strict=False)}
    addresses = {name: buffer.data for name, buffer in operands.items()}

    shapes = tuple(_folded(_shape(buffer)) for buffer in primals)
    if 0 in shapes[0]:  # vmap over nothing
        return
    parts, steps = 1, {}
    launch, needed = _backward_launch(options, shapes, dtypes, platform, index, _alignment(addresses.values()))
    if platform != "cpu" and needed and needed + WORKSPACE_ALIGNMENT > _size(room):
        # Under vmap the room is that of the parts together, which need not do for all of them as one: then one after the other.
        parts = math.prod(_shape(primals[0])[:-4])
        steps = {name: _size(buffer) // parts for name, buffer in operands.items()}
        alignment = _alignment([*addresses.values(), *steps.values()])
        launch, needed = _backward_launch(options, tuple(_shape(buffer)[-4:] for buffer in primals), dtypes, platform, index, alignment)
        if needed + WORKSPACE_ALIGNMENT > _size(room):
            raise ValueError(f"the gradients need {needed} bytes of workspace on GPU {index} and got {_size(room)}; it was traced for other GPUs")
    if not execute:
        return
    if needed:
        own = np.empty(needed + WORKSPACE_ALIGNMENT, np.uint8) if platform == "cpu" else None
        addresses["workspace"] = (room.data if own is None else own.ctypes.data) + WORKSPACE_ALIGNMENT - 1 & -WORKSPACE_ALIGNMENT
    for part in range(parts):
        launch(tuple(addresses[name] + part * steps.get(name, 0) if name in addresses else 0 for name in BACKWARD_OPERANDS), stream)


def _read(buffers):
    return [_Buffer.from_address(buffers.items[i]) for i in range(buffers.size)]


def _shape(buffer):
    return tuple(buffer.dims[: buffer.rank])


def _size(buffer) -> int:
    """Bytes of a buffer; 0 for None."""
    return 0 if buffer is None else math.prod(_shape(buffer)) * ITEMSIZE.get(_DTYPES.get(buffer.dtype), 1)


def _alignment(numbers) -> int:
    together = functools.reduce(int.__or__, numbers)
    return min(16, together & -together or 16)


def _folded(shape):
    """vmap puts its axes first; they are more batch entries."""
    return (math.prod(shape[:-3]), *shape[-3:])


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
