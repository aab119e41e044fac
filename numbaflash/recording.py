"""Record the calls of a program, for ``numbaflash verify`` to take its shapes from: one line of JSON a call, without values of arrays."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from ._version import __version__

__all__ = ["record"]

FORMAT = 1
"""Of the lines; the first one of a file tells it."""

active: Recorder | None = None
"""Where calls are recorded now. This is all that a call looks at while nothing is."""

_starting = threading.Lock()
_thread = threading.local()


@contextmanager
def record(path):
    """Within the context, write a line of JSON for each call of the functions that compute attention, of the whole process.

    A line tells the function, its array library and device, the shape, dtype and kind of strides of each array, the other options by value, and how
    many calls of that kind there have been. What arrays hold is never written. Calls that raise leave no line, and what a function calls itself
    leaves none beside its own; the backward of `attention` is a call of `backward`. A function that JAX compiles is recorded when it is traced.

    Parameters
    ----------
    path : str or os.PathLike
        File to write. A trace that is there is replaced; another file is not.

    Raises
    ------
    OSError
        When the file cannot be written. If that happens in the middle, the program goes on and the error comes at the end; the lines until
        then are whole.
    ValueError
        When ``path`` is a file that is no trace.
    RuntimeError
        When calls are being recorded already.

    See Also
    --------
    numbaflash verify : ``numbaflash verify --trace calls.jsonl`` checks and times these calls.

    Examples
    --------
    >>> import numpy as np, os, tempfile
    >>> import numbaflash as nf
    >>> path = os.path.join(tempfile.mkdtemp(), "calls.jsonl")
    >>> q, k, v = np.zeros((3, 1, 16, 2, 32), np.float32)
    >>> with nf.record(path):
    ...     out = nf.forward(q, k, v, causal=True)
    >>> len(open(path).readlines())
    2
    """
    global active
    with _starting:
        if active is not None:
            raise RuntimeError(f"numbaflash.record is recording already, to {active.path}; leave that block before another one begins")
        recorder = active = Recorder(Path(path))
    try:
        yield
    finally:
        active = None
        failure = recorder.close()
    if failure is not None:
        raise OSError(failure.errno, f"the trace ends early, {os.strerror(failure.errno or 0)}", str(recorder.path)) from failure


def is_outermost() -> bool:
    """Whether this thread is in no recorded call."""
    return not getattr(_thread, "inside", False)


def noted(function, arguments: dict, more: dict | None = None):
    """Call a function and record it; what it calls itself is not recorded. ``more`` are arguments that it has had before."""
    recorder = active
    _thread.inside = True
    try:
        result = function(**arguments)
    finally:
        _thread.inside = False
    if recorder is not None:
        recorder.note(function.__qualname__, arguments | (more or {}))
    return result


class Recorder:
    """An open trace. A line is written whole, in one go, or not at all."""

    def __init__(self, path: Path):
        self.path = path
        if path.exists() and path.stat().st_size and not _is_trace(path):
            raise ValueError(f"path must be a new file or a trace, which is replaced; {path} holds something else")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        self._process, self._lock = os.getpid(), threading.Lock()
        self._counts: dict[str, int] = {}
        self._failure: OSError | None = None
        self._size = 0
        self._write(json.dumps({"numbaflash": __version__, "trace": FORMAT}))
        if self._failure is not None:
            raise self._failure

    def note(self, function: str, arguments: dict) -> None:
        """Write the line of a call."""
        kind = json.dumps(describe_call(function, arguments))
        with self._lock:
            if self._file is None or os.getpid() != self._process:  # a forked child has the file, and is not who records
                return
            self._counts[kind] = count = self._counts.get(kind, 0) + 1
            self._write(f'{kind[:-1]}, "count": {count}}}')

    def close(self) -> OSError | None:
        """End the trace; returns the error that ended it before, if one did."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None
            return self._failure

    def _write(self, line):
        data = f"{line}\n".encode()
        try:
            written = os.write(self._file, data)
            if written < len(data):  # no room: take the half line back
                os.ftruncate(self._file, self._size)
                os.write(self._file, data)
            self._size += len(data)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            os.close(self._file)
            self._file, self._failure = None, error


def _is_trace(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(4096)
    try:
        return "trace" in json.loads(first)
    except (ValueError, TypeError):
        return False


def describe_call(function: str, arguments: dict) -> dict:
    """What the line of a call holds, but for its count."""
    arrays, options, library, device = {}, {}, None, None
    for name, x in arguments.items():
        if name in ("self", "stream") or x is None:
            continue
        if _is_mask(x):
            arrays["block_mask"] = {"shape": list(x.shape)}
        elif hasattr(x, "shape") and hasattr(x, "dtype"):
            arrays[name] = {"shape": [int(n) for n in x.shape], "dtype": _dtype(x), "strides": _strides(x)}
            if library is None:
                library, device = _library(x), _device(x)
        else:
            options[name] = _plain(x)
    direction = {"forward": "forward", "backward": "backward", "attention": "forward"}.get(function.partition("_")[0], "decode")
    return {"function": function, "direction": direction, "library": library, "device": device, "arrays": arrays, "options": options}


def _is_mask(x) -> bool:
    return hasattr(x, "to_dense") and hasattr(x, "words")


def _dtype(x) -> str:
    return getattr(x.dtype, "name", None) or str(x.dtype).removeprefix("torch.")


def _library(x) -> str:
    return type(x).__module__.partition(".")[0].removesuffix("lib")


def _device(x) -> str:
    """ "cpu" or "cuda", as far as the array tells."""
    if hasattr(x, "__cuda_array_interface__"):
        return "cuda"
    told = str(getattr(x, "device", "cpu")).lower()
    return "cuda" if told.startswith(("cuda", "gpu")) else "cpu"


def _strides(x) -> str:
    """The kind of strides: "contiguous"; "order" and the axes, the slowest first, of an array that is so in another order; "broadcast" and the axes
    that repeat one element; "strided"; "unknown"."""
    shape = tuple(int(n) for n in x.shape)
    steps = _steps(x)
    if steps is None:
        return "unknown"
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    if 0 in shape or not axes:
        return "contiguous"
    repeated = [axis for axis in axes if steps[axis] == 0]
    if repeated:
        return f"broadcast {','.join(map(str, repeated))}"
    order, size = sorted(axes, key=lambda axis: (-steps[axis], axis)), 1
    for axis in reversed(order):
        if steps[axis] != size:
            return "strided"
        size *= shape[axis]
    if order == axes:
        return "contiguous"
    places = iter(order)
    return f"order {','.join(str(next(places) if axis in axes else axis) for axis in range(len(shape)))}"


def _steps(x) -> tuple[int, ...] | None:
    """Strides in elements, None where the array does not tell."""
    try:
        told = x.stride() if callable(getattr(x, "stride", None)) else x.strides
        size = 1 if callable(getattr(x, "stride", None)) else x.dtype.itemsize
        return tuple(int(step) // size for step in told)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # a trace, a lender of memory, a tensor without storage
        return None


def _plain(x):
    """A value as JSON has it."""
    if isinstance(x, (bool, str)):
        return x
    if isinstance(x, (tuple, list)):
        return [_plain(each) for each in x]
    for kind in (int, float):
        try:
            if x == kind(x):
                return kind(x)
        except (TypeError, ValueError, OverflowError):
            continue
    return None if x is None else type(x).__name__
