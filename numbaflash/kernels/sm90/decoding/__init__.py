"""Decoding on Hopper GPUs: a few queries a sequence against a cache of keys and values, contiguous or in pages.

``kernel`` is the loop, ``schedule`` who computes what, ``loading`` how keys, values and queries come, ``merging`` what becomes of partial results,
and ``config`` the choice of sizes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .... import toolchain
from ....dispatch import Device, Launch, Layouts, Plan, missing, operands
from ....problem import ITEMSIZE, Problem
from ..config import unmet
from ..tensor_maps import refusal, row_major
from .config import (
    LANES,
    MERGE_TILES,
    MOST_MERGED,
    Q_TILE,
    TUNED,
    DecodeConfig,
    SharedMemory,
    Workspace,
    decode_config,
    items,
    merge_shares_of,
    row_tiles,
)
from .config import candidates as config_candidates

FEATURES = frozenset({"softcap", "alibi_slopes", "sinks", "seqlens_k", "page_table"})
"""`Problem.features` that the kernels have."""

NONFINITE_VALUES_SPREAD = True
"""As in the forward: NaN in a value that some query of a tile sees may reach the others, which multiply it by a weight of 0."""

_BUILD, _BUILD_MERGE = (f"numbaflash.kernels.sm90.decoding.kernel:{name}" for name in ("build", "build_merge"))
_ARCH = (9, 0, "a")
_TINY_SCALE = 2.0**-100  # in place of 0, whose product with a masked score of -inf would be NaN


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there."""
    reasons = missing(problem, FEATURES)
    reasons += unmet(problem, device)
    for name, n in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if n % 8:
            reasons.append(f"{name} must be a multiple of 8, which are copied at once; it is {n}")
    if problem.paged and not problem.pages:
        reasons.append("there is no page")
    tiles = problem.batch * problem.kv_heads * -(-problem.seqlen_q * problem.group // Q_TILE) * (problem.seqlen_k // LANES + 2)
    if tiles >= 2**31:
        reasons.append("it counts tiles of keys in 32 bits, and there may be more")
    return tuple(reasons)


def candidates(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None) -> tuple[DecodeConfig, ...]:
    """Configs to measure, that of `plan` first."""
    return config_candidates(problem, layouts, num_splits)


def plan(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None, *, config: DecodeConfig | None = None) -> Plan:
    """Choose sizes (or take those of a config) and grid, and which operands must be copied because they cannot be read 16 bytes at a time."""
    config = config or decode_config(problem, layouts, num_splits)
    copies, seen = {}, {}
    for name in ("q", "k", "v", "out"):
        layout = getattr(layouts, name)
        reason = refusal(layout, ITEMSIZE[problem.dtype]).replace("TMA needs", "copies of 16 bytes need")
        if reason:
            copies[name] = reason
            layout = row_major(layout, ITEMSIZE[problem.dtype])
        seen[name] = layout
    lse = layouts.lse
    if lse is not None and lse.strides != row_major(lse, 4).strides:
        copies["lse"] = "the kernel writes it row-major"
        lse = row_major(lse, 4)
    count = items(problem, config)
    most = count * (num_splits or max(1, -(-problem.seqlen_k // config.tile)))
    blocks = min(config.blocks * max(device.sm_count, 1), most)
    return Plan(
        "sm90",
        problem,
        device,
        replace(layouts, **seen, lse=lse),
        config,
        grid=(blocks,),
        threads=config.threads,
        shared_bytes=SharedMemory.of(config).total,
        copies=copies,
        direction="decode",
        workspace_bytes=Workspace.of(config, blocks, count, num_splits or 1).total,
        num_splits=num_splits,
    )


def keep_workspace(plan: Plan) -> Plan:
    """See `numbaflash.dispatch.keep_workspace`: one kernel instead of two, where an item has few parts."""
    count = items(plan.problem, plan.config)
    if plan.num_splits == 1 or plan.config.division != "keys" or (plan.num_splits or plan.grid[0] // count) > MOST_MERGED:
        return plan
    config = replace(plan.config, last_merges=True)
    return replace(plan, config=config, workspace_bytes=Workspace.of(config, plan.grid[0], count, plan.num_splits or 1).total)


def launches(plan: Plan) -> list[tuple[toolchain.KernelRequest, list, tuple, int, int]]:
    """Kernels of a plan in their order, each with its parameters, grid, threads and bytes of shared memory."""
    config, problem = plan.config, plan.problem
    main = (toolchain.KernelRequest(_BUILD, config, _ARCH), _parameters(plan), plan.grid, plan.threads, plan.shared_bytes)
    if plan.num_splits == 1 or config.last_merges:
        return [main]
    merges = plan.grid[0] if config.balanced and not config.few_items else items(problem, config)
    shared_bytes = config.merge_warps * (MERGE_TILES * LANES * 4 * config.kept + LANES * 16) + 1024
    merge = toolchain.KernelRequest(_BUILD_MERGE, config, _ARCH)
    return [main, (merge, _merge_parameters(plan), (merges * config.row_warps * merge_shares_of(config),), LANES * config.merge_warps, shared_bytes)]


def requests(plan: Plan) -> list[toolchain.KernelRequest]:
    """All kernels that a plan needs."""
    return [wanted for wanted, *_ in launches(plan)]


def prepare(plan: Plan) -> Launch:
    """Build (or fetch) and load the kernels of a plan."""
    names = operands(plan.problem, "decode")
    runs = [
        toolchain.prepare(wanted, given, grid=grid, threads=threads, shared_bytes=shared_bytes, device=plan.device, operands=names, overlapping=True)
        for wanted, given, grid, threads, shared_bytes in launches(plan)
    ]
    if len(runs) == 1:
        return runs[0]
    main, merge = runs

    def launch(addresses, stream):
        main(addresses, stream)
        merge(addresses, stream)

    return launch


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the main kernel of a plan, and the spills of all; builds them if need be."""
    return toolchain.kernel_report(*requests(plan))


def _numbers(*values) -> list[toolchain.Scalar]:
    return [toolchain.Scalar("int32", n) for n in values]


def _strides(layout) -> list[toolchain.Scalar]:
    return [toolchain.Scalar("int64", n) for n in layout.strides[:3]]


def _end(plan: Plan) -> list:
    """The scale, and what options bring."""
    options = plan.config.options
    with np.errstate(over="ignore"):
        scale = float(np.float32(math.log2(math.e) * abs(options.size_of_unit(plan.problem) or _TINY_SCALE)))
    return [toolchain.Scalar("float32", scale), *options.arguments(plan.problem, plan.layouts)]


def _partials(plan: Plan) -> list[toolchain.Pointer]:
    """What blocks have found, and their partial results."""
    at = Workspace.of(plan.config, plan.grid[0], items(plan.problem, plan.config)).slots
    return [toolchain.Pointer("workspace"), toolchain.Pointer("workspace", at)]


def _parameters(plan: Plan) -> list:
    problem, layouts = plan.problem, plan.layouts
    table = layouts.page_table.strides if problem.paged else (0, 0)
    return [
        *(toolchain.Pointer(name) for name in ("q", "k", "v", "out", "lse")),
        toolchain.Pointer("page_table" if problem.paged else "q"),
        *_partials(plan),
        *(each for name in ("q", "k", "v", "out") for each in _strides(getattr(layouts, name))),
        *(toolchain.Scalar("int64", n) for n in table),
        *_numbers(problem.seqlen_q, problem.seqlen_k, problem.offset, problem.left or 0, problem.right or 0),
        *_numbers(problem.batch, problem.kv_heads, row_tiles(problem, plan.config), max(problem.pages, 1), plan.num_splits or 1, plan.grid[0]),
        *_end(plan),
    ]


def _merge_parameters(plan: Plan) -> list:
    problem = plan.problem
    return [
        *(toolchain.Pointer(name) for name in ("out", "lse")),
        *_partials(plan),
        *_strides(plan.layouts.out),
        *_numbers(problem.seqlen_q, problem.batch, problem.kv_heads, row_tiles(problem, plan.config), plan.num_splits or 1),
        *_end(plan),
    ]


__all__ = ["FEATURES", "TUNED", "DecodeConfig", "candidates", "keep_workspace", "launches", "plan", "prepare", "requests", "resources", "supports"]
