"""From a plan of the gradients to a prepared launch."""

from __future__ import annotations

import functools

import numba
import numpy as np
from numba import types
from numba.core.ccallback import CFunc

from ....dispatch import Plan, operands, plan_again
from ....toolchain.log import logger
from .. import cache, driver, packed
from .. import launch as threads_of
from ..config import Kernel
from ..scores import signed_seed
from . import config
from .arguments import ADDRESSES, ARGUMENTS, arguments, workspace_sizes
from .kernel import build

seed_place = ADDRESSES.names.index("seed")


@functools.cache
def _compile_kernel(kernel: Kernel) -> CFunc:
    function = CFunc(build(kernel).thread, ((types.int64,) * 5, types.void), {}, {"nopython": True, "error_model": "numpy"})
    function._cache = cache.KernelCache(f"backward {kernel!r}")
    function.compile()
    logger.info("%s the CPU backward kernel %s", "fetched" if function.cache_hits else "compiled", kernel)
    return function


@functools.cache
def _compile_driver():
    run = threads_of.driver_function(driver.run_backward)
    run._cache = cache.KernelCache("backward driver")
    args, addresses = (types.Array(numba.from_dtype(record), 1, "C") for record in (ARGUMENTS, ADDRESSES))
    run.compile(types.void(types.int64, args, addresses, types.int64))
    return run


def compiled(kernel: Kernel):
    """(driver, compiled kernel), each compiled at most once in the process."""
    with threads_of.compiling():
        return _compile_driver(), _compile_kernel(kernel)


def build_kernels(plan) -> dict[str, bool]:
    """Compile what a plan needs, or fetch it; by name, whether it was there already."""
    kernel, was_there = plan.config.kernel, threads_of.was_there
    with threads_of.compiling():
        return {"CPU backward driver": was_there(_compile_driver), f"CPU backward kernel {kernel}": was_there(_compile_kernel, kernel)}


def plan_for(problem, layouts, device, threads: int, choice=None) -> Plan:
    """Tiles and threads of a problem when so many threads are to be had, or those of a choice; nothing is compiled."""
    choice = choice or config.choose(problem, threads)
    kv_tiles = problem.batch * -(-problem.seqlen_k // choice.kv_tile)
    if problem.packed:  # at most
        kv_tiles = problem.total_k // choice.kv_tile + problem.batch + 2
    grid = (problem.kv_heads * kv_tiles,)
    workspace = sum(workspace_sizes(problem, choice, layouts.dq is not None).values())
    return Plan(
        *("cpu", problem, device, layouts, choice, grid),
        threads=choice.threads,
        direction="backward",
        deterministic=True,
        workspace_bytes=workspace,
    )


def prepare(plan):
    """The `Launch` of a plan, planned anew whenever ``numba.set_num_threads`` has changed what is to be had."""
    launches = {threads_of.available_threads(): _prepare(plan)}

    def launch(addresses, stream):
        threads = threads_of.available_threads()
        prepared = launches.get(threads)
        if prepared is None:
            prepared = launches[threads] = _prepare(plan_again(plan))
        prepared(addresses)

    return launch


def _prepare(plan):
    run, kernel = compiled(plan.config.kernel)
    address = kernel.address
    args = arguments(plan.problem, plan.layouts, plan.config)
    given = operands(plan.problem, "backward")
    none = len(given)  # past the addresses there is one more, which is 0
    places = [given.index(name) if name in given else none for name in ADDRESSES.names]
    has_seed = "seed" in given

    def launch(addresses):
        addresses = (*addresses, 0)
        values = [addresses[place] for place in places]
        if has_seed:
            values[seed_place] = signed_seed(values[seed_place])
        told, here = np.array([tuple(values)], ADDRESSES), args
        if plan.problem.packed:
            here, tables = _pack(plan, args, told)  # which live as long as the call
        with threads_of.using(plan.threads) as threads:
            run(address, here, told, threads)

    return launch


def _pack(plan, args, addresses):
    """(arguments of this call, tables): the sequences read, and the tables put in the place of their boundaries.

    Threads take tiles of keys in the order of their numbers: a tile of rows is waited for in that order.
    """
    problem, config = plan.problem, plan.config
    table = packed.entries(problem, *threads_of.read_boundaries(plan, addresses), config.q_tile)
    rows = packed.list_tiles(table[:, 2] * problem.group, config.q_tile)
    keys = packed.list_tiles(table[:, 3], config.kv_tile)
    tiles = np.concatenate([rows, keys[np.argsort(keys[:, 1], kind="stable")]])
    addresses["cu_seqlens_q"], addresses["cu_seqlens_k"] = table.ctypes.data, tiles.ctypes.data
    here = args.copy()
    here["row_tiles"], here["key_tiles"] = len(rows), len(keys)
    return here, (table, tiles)


def resources(plan) -> dict:
    args = arguments(plan.problem, plan.layouts, plan.config)[0]
    kernel = plan.config.kernel
    return {
        "threads": plan.threads,
        "scratch_bytes_per_thread": int(args["scratch"]),
        "workspace_bytes": plan.workspace_bytes,
        "vector": f"{kernel.lanes} x {'float64' if kernel.dtype == 'float64' else 'float32'}",
        "register_tile": f"{kernel.rows} x {kernel.panel}",
    }
