"""The fourth check: peak memory, by what it is for, and that a call takes what its plan tells."""

from __future__ import annotations

import math

from ..call import WORKSPACE_ALIGNMENT
from ..measuring import bytes_text
from ..problem import ITEMSIZE
from .inputs import Inputs
from .shapes import Call

SLACK = {"cpu": 2**22, "cuda": 2**20}
"""What a call may take besides: on the CPU the scratch of a thread, for each; on a GPU what an allocator rounds up."""


class TooLargeError(ValueError):
    """A call needs more memory than there is; nothing has been allocated."""


def check_fits(calls: list[Call], place, plan_bytes) -> None:
    """Refuse what the device has no room for, before anything is allocated.

    Parameters
    ----------
    calls : list of Call
    place : Place
    plan_bytes : callable
        Returns the workspace of a call.

    Raises
    ------
    TooLargeError
    """
    free = place.free_bytes()
    if free is None:
        return
    for call in calls:
        parts = {"inputs": call.input_bytes, "KV cache": call.cache_bytes, "results": call.result_bytes}
        if call.direction == "forward" and place.library != "jax":
            parts["results"] *= 2  # those of chunks stand beside the whole
        if sum(parts.values()) <= 0.9 * free:
            parts["workspace"] = plan_bytes(call)
        if sum(parts.values()) > 0.9 * free:
            told = ", ".join(f"{name} {bytes_text(n)}" for name, n in parts.items() if n)
            raise TooLargeError(
                f"{call} needs {bytes_text(sum(parts.values()))} ({told}), and {bytes_text(free)} are free on {place.device.name}. "
                "Take a smaller batch, fewer requests or a shorter sequence"
            )


def split(inputs: Inputs, run):
    """Inputs, cache, workspace and reserve, and the measured peak of a call beyond its inputs."""
    call, place, plan = inputs.call, inputs.place, inputs.explain().plan
    run()
    place.synchronize()
    with place.peak() as peak:
        run()
        place.synchronize()
    workspace = plan.workspace_bytes + WORKSPACE_ALIGNMENT if plan is not None and plan.workspace_bytes else 0
    copies = sum(_bytes_of(call, name) for name in plan.copies) if plan is not None else 0
    results = call.result_bytes
    measured, reserve = peak.get("bytes"), place.reserve()
    figures = {
        "inputs": call.input_bytes,
        "kv_cache": call.cache_bytes,
        "results": results,
        "workspace": workspace,
        "copies": copies,
        "measured_peak": measured,
        "reserve": reserve,
    }
    told = [f"{name.replace('_', ' ')} {bytes_text(n)}" for name, n in figures.items() if n and name not in ("measured_peak", "reserve")]
    told.append(f"measured on top of the inputs {bytes_text(measured)}" + ("" if place.exact_peak else " of the process"))
    told.append(f"allocator reserve {'none' if reserve is None else bytes_text(reserve)}")
    text = ", ".join(told)
    known = results + workspace + copies
    allowed = known + SLACK[place.device.kind] * (1 if place.on_gpu or plan is None else plan.threads)
    if place.exact_peak and measured is not None and measured > allowed:
        raise AssertionError(f"a call takes {bytes_text(measured)} beyond its inputs; results, workspace and copies are {bytes_text(known)}")
    if not place.exact_peak or measured is None:
        figures["status"] = "info"
    return text, figures


def _bytes_of(call, name):
    p = call.problem
    return ITEMSIZE[p.dtype_of(name)] * math.prod(p.shape_of(name))
