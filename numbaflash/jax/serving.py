"""Calls of XLA: registered handlers, which look the prepared launch up for the buffers of a call, and launch it."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.ffi
import numpy as np

from ..call import MAX_CALLS, WORKSPACE_ALIGNMENT, aligned_workspace
from ..dispatch import operands_with
from ..problem import ITEMSIZE, PAGE_TABLE
from .abi import (
    DTYPES,
    EXECUTE,
    Api,
    ApiError,
    CallFrame,
    DeviceOrdinalGet,
    Function,
    StreamGet,
    Version,
    ask,
    error_of,
    read_buffers,
    read_strings,
    shape_of,
    tell_metadata,
)
from .batching import join, steps
from .launches import backward_launch, decodes, forward_launch, forward_plan, inputs_of, is_packed, operands_of, read_options

TARGETS = {"forward": "numbaflash_forward", "backward": "numbaflash_backward"}


@functools.lru_cache(1)
def register():
    """Make the operations known to XLA, once a process."""
    for direction, target in TARGETS.items():
        cpu, cuda = (jax.ffi.pycapsule(ctypes.cast(_handlers[direction, platform], ctypes.c_void_p).value) for platform in ("cpu", "cuda"))
        jax.ffi.register_ffi_target(target, {"execute": cpu}, platform="cpu")
        # The initialize stage loads the kernel before a graph is captured.
        jax.ffi.register_ffi_target(target, {"execute": cuda, "initialize": cuda}, platform="CUDA")


def handle(direction: str, platform: str, frame_address: int) -> int | None:
    """Serve one call of XLA: returns None, or the address of an error object."""
    frame = CallFrame.from_address(frame_address)
    # The jaxlibs of version 0.1 (before 0.9) ask for metadata without an API.
    api = Api.from_address(frame.api) if frame.api else Api(version=Version(major=0, minor=1))
    try:
        if frame.extension:
            tell_metadata(frame, api)
        else:
            _run(direction, platform, frame, api)
    except ApiError as error:
        return error.args[0]
    except BaseException as error:  # an exception must not leave a callback
        return error_of(api, error)
    return None


_handlers = {(direction, platform): Function(functools.partial(handle, direction, platform)) for direction in TARGETS for platform in ("cpu", "cuda")}


def _run(direction, platform, frame, api):
    options, *seed = read_strings(frame.attributes)  # sorted by name
    buffers = read_buffers(frame.arguments) + read_buffers(frame.results)
    index = 0 if platform == "cpu" else ask(api, "device_ordinal_get", DeviceOrdinalGet, frame.context).ordinal
    execute = frame.stage == EXECUTE
    stream = ask(api, "stream_get", StreamGet, frame.context).stream if execute and platform != "cpu" else 0
    serve(direction, options, int(seed[0]) if seed else 0, buffers, platform, index, stream, execute)


def serve(direction, options, seed, buffers, platform, index, stream, execute):
    addresses = [buffer.data for buffer in buffers]
    together = functools.reduce(int.__or__, addresses)
    kind = tuple(shape_of(buffer) for buffer in buffers), tuple(buffer.dtype for buffer in buffers), platform, index
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
    told = read_options(options)
    inputs = operands_of(direction, options)
    results = len(shapes) - len(inputs) - bool(told.get("workspace"))
    written = ("out", "lse")[:results] if direction == "forward" else tuple(f"d{name}" for name in told["needs"])
    names = inputs + written
    room = math.prod(shapes[-1]) if len(shapes) > len(names) else 0
    shapes, dtypes = dict(zip(names, shapes, strict=False)), {name: DTYPES[code] for name, code in zip(names, dtypes, strict=False)}
    alignments = dict.fromkeys(names, 16) if alignments is None else dict(zip(names, alignments, strict=False))
    packed = is_packed(told)
    outer = len(shapes["q"]) - (3 if packed else 4)
    axes = shapes[written[0]][:outer]
    if 0 in axes:
        return None

    def prepare(shapes, alignments):
        """(launch, bytes of its workspace)."""
        arrays = inputs_of(options)
        less = tuple((name, n) for name, n in alignments.items() if n < 16)
        kind = tuple(shapes[name] for name in arrays), tuple(dtypes[name] for name in arrays), platform, index, less
        if direction == "backward":
            return backward_launch(options, *kind)
        plan = forward_plan(options, len(written) == 2, *kind)
        return forward_launch(options, len(written) == 2, *kind), plan.workspace_bytes if plan else 0

    apart = packed or PAGE_TABLE in inputs  # several have no row-major arrays that hold them as one
    joined, offsets = (None if outer else shapes) if apart else join(shapes, axes, told["dropout"] > 0), [{}]
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
    order = operands_with(tuple(told["arrays"]), told["dropout"] > 0, "decode" if decodes(told) else direction)
    nothing = len(names) + (room > 0)
    places = {name: n for n, name in enumerate(names)} | {"seed": nothing + 1, "workspace": nothing + 2 if needed else nothing}
    return _Service(
        launch=launch,
        workspace_bytes=needed,
        order=tuple(places.get(name, nothing) for name in order),
        offsets=tuple(tuple(part.get(name, 0) for name in order) for part in offsets),
    )


def _alignment(*numbers) -> int:
    """The largest power of two, up to 16, that divides all."""
    together = functools.reduce(int.__or__, numbers)
    return min(16, together & -together or 16)
