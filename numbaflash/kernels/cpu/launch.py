"""From a plan to a prepared launch: compilation, threads and their lock."""

from __future__ import annotations

import contextlib
import functools
import os
import threading

import numba
import numpy as np
from numba import types
from numba.core.ccallback import CFunc

from ...dispatch import OPERANDS, Plan, operands, plan_again
from ...toolchain.log import logger
from . import cache, config, driver, forward, packed, rows
from .arguments import ARGUMENTS, arguments
from .config import Kernel
from .scores import OPTION_ADDRESSES, signed_seed

BUILD = {"panels": forward.build, "rows": rows.build}

_compiling = threading.Lock()
_launching = threading.Lock()
_pool_lost = False


def _after_fork():
    """The child has only the forking thread: no holder of a lock, and no pool where its parent had one.

    Numba's OpenMP layer ends a child that uses the parent's pool, and its own layer waits forever.
    """
    global _compiling, _launching, _pool_lost
    _compiling, _launching = threading.Lock(), threading.Lock()
    with contextlib.suppress(ValueError):  # no pool yet: the child makes its own
        _pool_lost = numba.threading_layer() != "tbb"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def available_threads() -> int:
    """Threads that Numba would use here: ``numba.set_num_threads`` of this thread, else ``NUMBA_NUM_THREADS``."""
    return numba.get_num_threads()


@functools.cache
def _compile_kernel(kernel: Kernel) -> CFunc:
    """The compiled thread function; it is called by its `.address`."""
    signature = (types.int64,) * 11, types.void
    function = CFunc(BUILD[kernel.form](kernel).thread, signature, {}, {"nopython": True, "error_model": "numpy"})
    function._cache = cache.KernelCache(repr(kernel))
    function.compile()
    logger.info("%s the CPU kernel %s", "fetched" if function.cache_hits else "compiled", kernel)
    return function


def driver_function(function):
    """A driver that runs in parallel where it says so and nowhere else.

    Numba is to make not even an array of zeros by several threads: a launch on one thread must not touch the pool. It empties the
    dictionary of options that it is given, so each function gets its own.
    """
    others = dict.fromkeys(("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"), False)
    return numba.njit(nogil=True, parallel={**others, "prange": True}, error_model="numpy")(function)


@functools.cache
def _compile_driver():
    run = driver_function(driver.run)
    run._cache = cache.KernelCache("driver")
    args, options = (types.Array(numba.from_dtype(record), 1, "C") for record in (ARGUMENTS, OPTION_ADDRESSES))
    run.compile(types.void(types.int64, args, *[types.int64] * 5, options, types.int64))
    return run


def compiled(kernel: Kernel):
    """(driver, compiled kernel), each compiled at most once in the process."""
    with compiling():
        return _compile_driver(), _compile_kernel(kernel)


def build_kernels(plan) -> dict[str, bool]:
    """Compile what a plan needs, or fetch it; by name, whether it was there already."""
    kernel = plan.config.kernel
    with compiling():
        return {"CPU driver": was_there(_compile_driver), f"CPU kernel {kernel}": was_there(_compile_kernel, kernel)}


def was_there(compile_once, *options) -> bool:
    """Call a cached function that compiles; whether nothing had to be compiled, since it lay in the disk cache or was called before."""
    calls = compile_once.cache_info().misses
    function = compile_once(*options)
    from_disk = function.cache_hits if isinstance(function, CFunc) else function.stats.cache_hits
    return compile_once.cache_info().misses == calls or bool(from_disk)


@contextlib.contextmanager
def compiling():
    """One thread compiles at a time, with symbols of its own."""
    with _compiling, cache.own_symbols():
        yield


@contextlib.contextmanager
def using(threads: int):
    """Yield the threads that a launch may use of those it asks for, and keep other launches off the pool where they must be.

    Numba's own pool ("workqueue") ends the process when two threads use it at once; TBB and OpenMP do not.
    """
    if threads == 1 or _pool_lost:
        yield 1
    elif numba.threading_layer() == "workqueue":
        with _launching:
            yield threads
    else:
        yield threads


def plan_for(problem, layouts, device, threads: int, direction: str = "forward", num_splits: int | None = None, choice=None) -> Plan:
    """Tiles and threads of a problem when so many threads are to be had, or those of a choice; nothing is compiled."""
    choice = choice or config.choose(problem, threads, num_splits)
    grid = (config.work_items(problem, choice),)
    return Plan("cpu", problem, device, layouts, choice, grid, threads=choice.threads, direction=direction, num_splits=num_splits)


def prepare(plan):
    """The `Launch` of a plan, planned anew whenever ``numba.set_num_threads`` has changed what is to be had."""
    launches = {available_threads(): _prepare(plan)}

    def launch(addresses, stream):
        threads = available_threads()
        prepared = launches.get(threads)
        if prepared is None:
            prepared = launches[threads] = _prepare(plan_again(plan))
        prepared(addresses)

    return launch


def _prepare(plan):
    run, kernel = compiled(plan.config.kernel)
    address = kernel.address
    args = arguments(plan.problem, plan.layouts, plan.config)
    given = [name for name in operands(plan.problem, plan.direction)[len(OPERANDS) :] if name != "workspace"]  # which the plan has none of
    if not given:
        none = np.zeros(1, OPTION_ADDRESSES)

        def launch(addresses):
            with using(plan.threads) as threads:
                run(address, args, *addresses, none, threads)

        return launch

    def launch_with_options(addresses):
        options, here = np.zeros(1, OPTION_ADDRESSES), args
        for name, value in zip(given, addresses[len(OPERANDS) :], strict=False):
            options[name] = signed_seed(value)
        if plan.problem.packed:
            here, tables = _pack(plan, args, options)  # which live as long as the call
        with using(plan.threads) as threads:
            run(address, here, *addresses[: len(OPERANDS)], options, threads)

    return launch_with_options


def _pack(plan, args, options):
    """(arguments of this call, tables): the sequences read, and the tables put in the place of their boundaries."""
    problem, q_tile = plan.problem, plan.config.q_tile
    table = packed.entries(problem, *read_boundaries(plan, options), q_tile)
    tiles = packed.longest_first(problem, table, packed.list_tiles(table[:, 2] * problem.group, q_tile), q_tile)
    options["cu_seqlens_q"], options["cu_seqlens_k"] = table.ctypes.data, tiles.ctypes.data
    here = args.copy()
    here["items"] = len(tiles) * problem.kv_heads * plan.config.splits
    return here, (table, tiles)


def read_boundaries(plan, options):
    """Where the sequences of queries and of keys begin and end; ``options`` is a record with the addresses of the arrays."""
    problem, layouts = plan.problem, plan.layouts
    for name, total in (("cu_seqlens_q", problem.total_q), ("cu_seqlens_k", problem.total_k)):
        yield packed.boundaries(int(options[name][0]), getattr(layouts, name), getattr(problem, name), total)


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
