"""From a plan to a prepared launch: compilation, threads and their lock."""

from __future__ import annotations

import contextlib
import functools
import os
import threading

import numba
from numba import types

from . import cache
from .config import Kernel
from .forward import ARGUMENTS, arguments, build

_compiling = threading.Lock()
_launching = threading.Lock()


def _renew_locks():
    """A fork may happen while another thread holds a lock; the child has only the forking thread."""
    global _compiling, _launching
    _compiling, _launching = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def available_threads() -> int:
    """Threads that Numba would use here: ``numba.set_num_threads`` of this thread, else ``NUMBA_NUM_THREADS``."""
    return numba.get_num_threads()


@functools.cache
def _build(kernel: Kernel):
    run = build(kernel).run
    cache.attach(run, kernel)
    record = numba.from_dtype(ARGUMENTS)
    run.compile(types.void(types.Array(record, 1, "C"), *[types.int64] * 6))
    return run


def compiled(kernel: Kernel):
    """The entry of a kernel, compiled at most once in the process."""
    with _compiling:
        return _build(kernel)


def _thread_guard():
    """Numba's own thread pool ("workqueue") ends the process when two threads use it at once; TBB and OpenMP do not."""
    return _launching if numba.threading_layer() == "workqueue" else contextlib.nullcontext()


def prepare(plan):
    """The `Launch` of a plan."""
    run = compiled(plan.config.kernel)
    args = arguments(plan.problem, plan.layouts, plan.config)
    most = plan.threads

    def launch(q, k, v, out, lse, stream):
        threads = 1 if most == 1 else min(most, numba.get_num_threads())
        if threads == 1:
            run(args, q, k, v, out, lse, 1)
        else:
            with _thread_guard():
                run(args, q, k, v, out, lse, threads)

    return launch


def resources(plan) -> dict:
    args = arguments(plan.problem, plan.layouts, plan.config)[0]
    kernel = plan.config.kernel
    return {
        "threads": plan.threads,
        "workspace_bytes_per_thread": int(args["workspace"]),
        "partial_result_bytes": int(args["items"] * args["partial"]) if plan.config.splits > 1 else 0,
        "vector": f"{kernel.lanes} x {'float64' if kernel.dtype == 'float64' else 'float32'}",
        "register_tile": f"{kernel.rows} x {kernel.panel}",
    }
