"""The C ABI of XLA's FFI: its structs, and reading and answering its calls.

The structs are those of ``xla/ffi/api/c_api.h``, which jaxlib ships; they only grow at their ends within a major version, 0.
"""

from __future__ import annotations

import ctypes

from ..problem import UnsupportedError

_p, _size, _i64, _i32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int

Function = ctypes.CFUNCTYPE(_p, _p)
"""A function of one struct that returns an error or NULL: the handlers, and all that the API offers them."""


def _struct(name, *members):
    """A struct of XLA's FFI: its size and a list of extensions come first."""
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", _size), ("extension", _p), *members]})


Version = _struct("Version", ("major", _i32), ("minor", _i32))
Api = _struct(
    "Api",
    ("version", Version),
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
Buffers = _struct("Buffers", ("size", _i64), ("types", _p), ("items", ctypes.POINTER(_p)))
Attributes = _struct("Attributes", ("size", _i64), ("types", ctypes.POINTER(_i32)), ("names", _p), ("items", ctypes.POINTER(_p)))
CallFrame = _struct(
    "CallFrame",
    ("api", _p),
    ("context", _p),
    ("stage", _i32),
    ("arguments", Buffers),
    ("results", Buffers),
    ("attributes", Attributes),
    ("future", _p),
)
Buffer = _struct("Buffer", ("dtype", _i32), ("data", _size), ("rank", _i64), ("dims", ctypes.POINTER(_i64)))
ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("code", _i32))
StreamGet = _struct("StreamGet", ("context", _p), ("stream", _size))
DeviceOrdinalGet = _struct("DeviceOrdinalGet", ("context", _p), ("ordinal", ctypes.c_int32))


class Span(ctypes.Structure):
    _fields_ = [("data", _p), ("size", _size)]


class Metadata(ctypes.Structure):
    _fields_ = [("struct_size", _size), ("version", Version), ("traits", ctypes.c_uint32)]


class MetadataExtension(ctypes.Structure):
    _fields_ = [("struct_size", _size), ("type", _i32), ("next", _p), ("metadata", ctypes.POINTER(Metadata))]


_MAJOR, _MINOR = 0, 3  # the version of the API that is described here
METADATA = 1
EXECUTE = 3  # the last stage of a call
CAN_BE_CAPTURED = 1  # into a CUDA graph
DTYPES = {1: "bool", 4: "int32", 5: "int64", 10: "float16", 16: "bfloat16", 11: "float32", 12: "float64"}
_INVALID_ARGUMENT, _UNIMPLEMENTED, _INTERNAL = 3, 12, 13


class ApiError(Exception):
    """An error that XLA returned; ``args[0]`` is its address, which the handler hands back."""


def tell_metadata(frame, api):
    """Answer the question for the version that the handlers are made for, and for what they can do."""
    extension = MetadataExtension.from_address(frame.extension)
    if extension.type == METADATA:
        if api.version.major != _MAJOR:
            raise UnsupportedError(f"numbaflash knows version {_MAJOR} of XLA's FFI; this jaxlib has {api.version.major}.{api.version.minor}")
        metadata = extension.metadata.contents
        metadata.version.major, metadata.version.minor = _MAJOR, min(_MINOR, api.version.minor)
        metadata.traits = CAN_BE_CAPTURED


def read_buffers(buffers):
    return [Buffer.from_address(buffers.items[i]) for i in range(buffers.size)]


def read_strings(attributes):
    spans = (Span.from_address(attributes.items[i]) for i in range(attributes.size))
    return [ctypes.string_at(span.data, span.size).decode() for span in spans]


def shape_of(buffer):
    return tuple(buffer.dims[: buffer.rank])


def ask(api, function, struct, context):
    """Call a getter of the API."""
    if getattr(Api, function).offset >= api.struct_size:
        raise UnsupportedError(f"this jaxlib's FFI (version {api.version.major}.{api.version.minor}) has no {function}; install a newer JAX")
    asked = struct(struct_size=ctypes.sizeof(struct), context=context)
    error = Function(getattr(api, function))(ctypes.addressof(asked))
    if error:
        raise ApiError(error)
    return asked


def error_of(api, error):
    """Have XLA make an error object of an exception; its address."""
    code = _INTERNAL
    if isinstance(error, NotImplementedError):
        code = _UNIMPLEMENTED
    elif isinstance(error, (TypeError, ValueError)):
        code = _INVALID_ARGUMENT
    message = f"{type(error).__name__}: {error}".encode()
    asked = ErrorCreate(struct_size=ctypes.sizeof(ErrorCreate), message=message, code=code)
    return Function(api.error_create)(ctypes.addressof(asked))
