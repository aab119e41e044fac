"""JAX: attention as an operation of XLA, so that it can be jitted and runs in the order, on the stream and in the buffers of XLA.

XLA calls a handler (its FFI, a C ABI of plain structs) with the addresses of row-major buffers and, on CUDA, the stream. The handler is a
ctypes callback that looks the prepared launch up: no C++, no host synchronisation, and nothing of Python at all where XLA replays a CUDA graph.
The structs are those of ``xla/ffi/api/c_api.h``, which jaxlib ships; they only grow at their ends within a major version, 0.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math

import jax
import jax.numpy as jnp

from .arrays import Facts, contiguous_strides
from .arrays.jax import JAX
from .call import MAX_CALLS, device_of, plan_call
from .dispatch import family, forced_family, use_family
from .problem import ITEMSIZE, UnsupportedError, make_problem

OLDEST = (0, 6, 2)
"""The oldest JAX that has all: `jax.ffi` (0.5), handlers that are told their device (0.6), results that vary in a shard_map (0.6.2)."""

if jax.__version_info__ < OLDEST:
    raise ImportError(f"numbaflash needs JAX 0.6.2 or newer, because of its FFI; installed is {jax.__version__}. Run pip install -U jax")

import jax.ffi  # noqa: E402  (a submodule that not every JAX has)

TARGET = "numbaflash_forward"


def forward(q, k, v, *, scale, causal, window, return_lse):
    """`numbaflash.forward` for JAX arrays and tracers, with checked options."""
    options = json.dumps({"scale": scale, "causal": causal, "window": window, "family": forced_family()})
    facts = {name: JAX.describe(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    if not any(isinstance(x, jax.core.Tracer) for x in (q, k, v)):
        # Errors and compilation come here, in the caller's thread, rather than in XLA's.
        _launch(options, return_lse, *_kind(facts), facts["q"].kind, facts["q"].index, 16)
    return _operation(options, return_lse)(q, k, v)


def _kind(facts):
    return tuple(facts[name].shape for name in "qkv"), tuple(facts[name].dtype for name in "qkv")


@functools.lru_cache(MAX_CALLS)
def _operation(options: str, with_lse: bool):
    """The jitted operation of an option set."""

    @jax.custom_jvp
    def attention(q, k, v):
        problem = _problem(options, *_kind({"q": _aval(q), "k": _aval(k), "v": _aval(v)}))
        shapes = [(problem.out_shape, q.dtype), (problem.lse_shape, jnp.dtype(problem.lse_dtype))][: 1 + with_lse]
        results = tuple(jnp.zeros(*each) for each in shapes) if problem.is_empty else _call(shapes, q, k, v, options)
        return results if with_lse else results[0]

    @attention.defjvp
    def differentiate(primals, tangents):
        raise UnsupportedError("numbaflash.forward cannot be differentiated; keep its arguments out of the derivative with jax.lax.stop_gradient")

    return jax.jit(attention)


def _aval(x):
    return Facts(0, tuple(x.shape), (), jnp.dtype(x.dtype).name)


def _call(shapes, q, k, v, options):
    _register()
    varying = frozenset().union(*(getattr(jax.typeof(x), "vma", frozenset()) for x in (q, k, v))) if hasattr(jax, "typeof") else frozenset()
    extra = {"vma": varying} if varying else {}  # axes of a shard_map along which devices differ
    results = tuple(jax.ShapeDtypeStruct(shape, dtype, **extra) for shape, dtype in shapes)
    return tuple(jax.ffi.ffi_call(TARGET, results, vmap_method="broadcast_all")(q, k, v, options=options))


def _problem(options, shapes, dtypes):
    told = json.loads(options)
    return make_problem(*shapes, dtypes, scale=told["scale"], causal=told["causal"], window=told["window"])


@functools.lru_cache(MAX_CALLS)
def _launch(options: str, with_lse: bool, shapes, dtypes, kind: str, index: int, alignment: int):
    """The prepared launch of row-major arrays on a device; None when there is nothing to launch."""
    problem = _problem(options, shapes, dtypes)
    if problem.is_empty:
        return None
    itemsize = ITEMSIZE[problem.dtype]
    facts = {}
    for name, shape in zip("qkv", shapes, strict=True):
        facts[name] = Facts(alignment, shape, contiguous_strides(shape, itemsize), problem.dtype, kind, index)  # such an address, at worst
    with use_family(json.loads(options)["family"]):
        plan = plan_call(problem, facts, with_lse, device_of(facts["q"]))
    if plan.copies:
        told = "; ".join(f"{name}: {reason}" for name, reason in plan.copies.items())
        raise ValueError(f"the arrays must lie so that they need no copy, as XLA allocates them; pass jax.numpy.copy of them ({told})")
    return family(plan.family).prepare(plan)


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


def _handle(platform: str, frame_address: int) -> int | None:
    """Serve one call of XLA: returns None, or the address of an error object."""
    frame = _CallFrame.from_address(frame_address)
    # The jaxlibs of version 0.1 (before 0.9) ask for metadata without an API.
    api = _Api.from_address(frame.api) if frame.api else _Api(version=_Version(major=0, minor=1))
    try:
        if frame.extension:
            _tell_metadata(frame, api)
        else:
            _run(platform, frame, api)
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


def _run(platform, frame, api):
    arguments, results = _read(frame.arguments), _read(frame.results)
    span = _Span.from_address(frame.attributes.items[0])
    options = ctypes.string_at(span.data, span.size).decode()
    index = 0 if platform == "cpu" else _ask(api, "device_ordinal_get", _DeviceOrdinalGet, frame.context).ordinal
    addresses = [buffer.data for buffer in (*arguments, *results)]
    # vmap puts its axes first; they are more batch entries.
    shapes = tuple(_folded(tuple(buffer.dims[: buffer.rank])) for buffer in arguments)
    dtypes = tuple(_DTYPES[buffer.dtype] for buffer in arguments)
    together = functools.reduce(int.__or__, addresses)
    alignment = min(16, together & -together or 16)
    launch = _launch(options, len(results) == 2, shapes, dtypes, platform, index, alignment)
    if frame.stage == _EXECUTE and launch is not None:
        stream = 0 if platform == "cpu" else _ask(api, "stream_get", _StreamGet, frame.context).stream
        lse = addresses[4] if len(results) == 2 else 0
        launch(*addresses[:4], lse, stream)


def _read(buffers):
    return [_Buffer.from_address(buffers.items[i]) for i in range(buffers.size)]


def _folded(shape):
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


_handlers = {platform: ctypes.CFUNCTYPE(_p, _p)(functools.partial(_handle, platform)) for platform in ("cpu", "cuda")}


@functools.lru_cache(1)
def _register():
    """Make the operation known to XLA, once a process."""
    cpu, cuda = (jax.ffi.pycapsule(ctypes.cast(_handlers[platform], _p).value) for platform in ("cpu", "cuda"))
    jax.ffi.register_ffi_target(TARGET, {"execute": cpu}, platform="cpu")
    # The initialize stage loads the kernel before a graph is captured.
    jax.ffi.register_ffi_target(TARGET, {"execute": cuda, "initialize": cuda}, platform="CUDA")
