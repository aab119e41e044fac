"""CUDA streams of any library, as driver handles."""

from __future__ import annotations

import operator

LEGACY_DEFAULT = 1
"""CU_STREAM_LEGACY, the default stream that synchronises with every other blocking stream."""


def stream_handle(stream, index: int | None = None) -> int:
    """The CUstream handle of a stream object of CuPy, torch, Numba, CUDA Python, or of an integer.

    Parameters
    ----------
    stream : int or object
        An object tells its handle by ``__cuda_stream__`` (CUDA Python's protocol), ``cuda_stream`` (torch), ``ptr`` (CuPy) or ``handle`` (Numba).
    index : int, optional
        CUDA device that the stream must belong to, checked where the object tells its own.

    Raises
    ------
    TypeError
        For anything else.
    ValueError
        For a negative number, or a stream of another device.
    """
    found = _handle(stream)
    if found is None:
        raise TypeError(f"stream must be a CUDA stream (of CuPy, torch, Numba or CUDA Python) or its handle as an integer; got {stream!r}")
    if found < 0:
        raise ValueError(f"stream must be a CUstream handle, which is not negative; got {found}")
    device = _device(stream)
    if index is not None and device is not None and device != index:
        raise ValueError(f"stream must belong to the arrays' device cuda:{index}; got a stream of cuda:{device}")
    return found


def _handle(stream) -> int | None:
    if isinstance(stream, bool):
        return None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        told = protocol() if callable(protocol) else protocol
        return int(told[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        told = getattr(stream, attribute, None)
        if told is not None:
            told = getattr(told, "value", told)  # a ctypes handle
            return 0 if told is None else int(told)
    try:
        return operator.index(stream)
    except TypeError:
        return None


def _device(stream) -> int | None:
    told = getattr(stream, "device_id", None)  # CuPy: -1 for the default streams, which every device has
    if told is None:
        device = getattr(stream, "device", None)
        told = getattr(device, "index", getattr(device, "device_id", None))  # torch, CUDA Python
    return told if isinstance(told, int) and told >= 0 else None
