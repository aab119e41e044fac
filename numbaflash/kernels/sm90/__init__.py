"""Exact attention on the tensor cores of Hopper GPUs (compute capability 9.0): float16 and bfloat16."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ... import toolchain
from ...dispatch import BackwardLayouts, Device, Launch, Layouts, Plan, missing, operands
from ...problem import ITEMSIZE, Problem, trim_keys
from ..blocks.launch import Lists
from ..sections import choose_section, fitting_section
from .config import (
    TICKETS_BYTES,
    TICKETS_THREADS,
    TUNED,
    ForwardConfig,
    SharedMemory,
    candidates,
    columns,
    forward_config,
    kv_blocks,
    q_tiles,
    unmet,
)
from .options import FEATURES, Options, kernel_keys
from .tensor_maps import packed_rows_map, refusal, row_major, rows_map, with_batch

__all__ = ["FEATURES", "NONFINITE_VALUES_SPREAD", "TUNED", "candidates", "plan", "prepare", "requests", "resources", "supports"]

NONFINITE_VALUES_SPREAD = True
"""NaN or infinity in a value that some query sees may reach other queries of its tile: the tensor core multiplies it by their weight of 0."""

_BUILD = "numbaflash.kernels.sm90.forward:build"
_BUILD_TICKETS = "numbaflash.kernels.sm90.tickets:build"
_ARCH = (9, 0, "a")
_L2_BYTES = 36 * 2**20  # of the H200's 60 MB, what keys and values of the heads in flight may take
_SLOWER_PAST_L2 = 1.08  # measured on an H200, causal
_TILE_COST = 1.0  # start and end of a tile, in KV blocks
_MOST_TICKETS_PAST_THE_LAST = 2**12  # each block draws one
_TINY_SCALE = 2.0**-100  # in place of 0, whose product with a masked score of -inf would be NaN


def supports(problem: Problem, device: Device, features: frozenset[str] = FEATURES) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there."""
    reasons = missing(problem, features)
    reasons += unmet(problem, device)
    for name, n in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if n % 8:
            reasons.append(f"{name} must be a multiple of 8 for TMA; it is {n}")
    if problem.packed and not (problem.batch and problem.total_k):
        reasons.append("there is no sequence, or no key, and a tensor map cannot be empty")
    if not problem.packed and not trim_keys(problem)[0].seqlen_k:
        reasons.append("no query sees a key, and a tensor map cannot be empty")
    if problem.packed and problem.heads * (max(problem.total_q, problem.total_k) // 64 + problem.batch + 2) >= 2**31 - _MOST_TICKETS_PAST_THE_LAST:
        reasons.append("it counts tiles in 32 bits, and there may be more")
    if problem.rows_q * problem.heads >= 2**31 * 64:
        reasons.append("it counts q tiles in 32 bits, and there are more")
    return tuple(reasons)


def plan(problem: Problem, layouts: Layouts, device: Device, *, config: ForwardConfig | None = None) -> Plan:
    """Choose tiles (or take those of a config) and grid, and which operands must be copied because TMA cannot read them in place."""
    config = config or forward_config(problem, layouts)
    copies, seen = {}, {}
    for name in ("q", "k", "v", "out"):
        layout = getattr(layouts, name)
        reason = refusal(layout, ITEMSIZE[problem.dtype])
        if reason:
            copies[name] = reason
            layout = row_major(layout, ITEMSIZE[problem.dtype])
        seen[name] = layout
    lse = layouts.lse
    if lse is not None and lse.strides != row_major(lse, 4).strides:
        copies["lse"] = "the kernel writes it row-major"
        lse = row_major(lse, 4)
    tiles = q_tiles(problem, config) * columns(problem, config)
    lists = lists_of(problem, config)
    workspace_bytes = lists.end if lists else TICKETS_BYTES if problem.packed else 0
    return Plan(
        "sm90",
        problem,
        device,
        replace(layouts, **seen, lse=lse),
        config,
        grid=(max(1, min(device.sm_count, tiles)),),
        threads=config.threads,
        shared_bytes=SharedMemory.of(config).total,
        copies=copies,
        workspace_bytes=workspace_bytes,
    )


def lists_of(problem: Problem, config: ForwardConfig) -> Lists | None:
    """The lists of blocks that tiles step through, where there is a mask."""
    if not problem.masked:
        return None
    keys, first_key = kernel_keys(problem)
    return Lists(problem, keys, config.q_tile // config.pack, config.kv_block, config.pack, descending=True, first_key=first_key)


def request(plan: Plan) -> toolchain.KernelRequest:
    """The main kernel that a plan needs."""
    return toolchain.KernelRequest(_BUILD, plan.config, _ARCH)


def requests(plan: Plan) -> list[toolchain.KernelRequest]:
    """All kernels that a plan needs."""
    return [wanted for wanted, *_ in launches(plan)]


def launches(plan: Plan) -> list[tuple[toolchain.KernelRequest, list, tuple, int, int]]:
    """Kernels of a plan in their order, each with its parameters, grid, threads and bytes of shared memory."""
    lists = lists_of(plan.problem, plan.config)
    before = lists.launches(plan.layouts, _ARCH, False) if lists else ticket_launches(plan.problem, plan.layouts, plan.config.options)
    main = (request(plan), parameters(plan), plan.grid, plan.threads, plan.shared_bytes)
    return [*((wanted, given, (blocks,), threads, 0) for wanted, given, blocks, threads in before), main]


def ticket_launches(problem: Problem, layouts: Layouts | BackwardLayouts, options: Options) -> list[tuple[toolchain.KernelRequest, list, int, int]]:
    """What comes before the kernels of packed sequences, as `Lists.launches` has it."""
    if not problem.packed:
        return []
    options = options.of_tickets
    return [(toolchain.KernelRequest(_BUILD_TICKETS, options, _ARCH), options.arguments(problem, layouts), 1, TICKETS_THREADS)]


def prepare(plan: Plan) -> Launch:
    """Build (or fetch) and load the kernels of a plan."""
    names = operands(plan.problem)
    *before, launch = (
        toolchain.prepare(wanted, given, grid=grid, threads=threads, shared_bytes=shared_bytes, device=plan.device, operands=names)
        for wanted, given, grid, threads, shared_bytes in launches(plan)
    )
    first_key = kernel_keys(plan.problem)[1]
    if not first_key and not before:
        return launch
    skip_k, skip_v = first_key * plan.layouts.k.strides[1], first_key * plan.layouts.v.strides[1]

    def launch_trimmed(addresses, stream):
        for run in before:
            run(addresses, stream)
        q, k, v, *others = addresses
        launch((q, k + skip_k, v + skip_v, *others), stream)

    return launch_trimmed


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the kernel of a plan, and the spills of all; builds them if need be."""
    *others, main = requests(plan)
    return toolchain.kernel_report(main, *others)


def parameters(plan: Plan) -> list:
    """Kernel parameters of a plan, as the kernel lists them."""
    problem, first_key = kernel_keys(plan.problem)  # keys that no query sees are not even loaded: whatever they hold stays outside
    config, layouts = plan.config, plan.layouts
    tiles, heads = q_tiles(problem, config), columns(problem, config)
    scale_log2 = math.log2(math.e) * abs(config.options.size_of_unit(problem) or _TINY_SCALE)
    integers = (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.offset,
        problem.left or 0,
        problem.right or 0,
        problem.heads // config.pack,
        problem.group // config.pack,
        tiles,
        heads,
        _section(problem, config, heads, plan.grid[0]),
        tiles * heads,
    )
    with np.errstate(over="ignore"):
        scale = float(np.float32(scale_log2))
    q, k, v, out = map(with_batch, (layouts.q, layouts.k, layouts.v, layouts.out))
    keys = problem.total_k if problem.packed else problem.seqlen_k
    return [
        packed_rows_map("q", problem.dtype, q, config.pack),
        rows_map("k", problem.dtype, k, config.kv_block, rows=keys),
        rows_map("v", problem.dtype, v, config.kv_block, rows=keys),
        packed_rows_map("out", problem.dtype, out, config.pack),
        toolchain.Pointer("lse"),
        *(toolchain.Scalar("int32", n) for n in integers),
        toolchain.Scalar("float32", scale),
        *config.options.arguments(plan.problem, layouts, first_key, lists_of(plan.problem, config)),
    ]


def _section(problem, config, heads, blocks):
    """Heads whose tiles are taken together. How long tiles of packed sequences are, only the device knows."""
    column_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype] // max(1, problem.group // config.pack)
    if problem.packed:
        return fitting_section(heads, column_bytes, _L2_BYTES)
    costs = tuple((kv_blocks(problem, config) + _TILE_COST).tolist())
    return choose_section(costs, heads, blocks, column_bytes, _L2_BYTES, _SLOWER_PAST_L2, math.inf)
