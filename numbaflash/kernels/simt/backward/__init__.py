"""Gradients of exact attention on CUDA cores: for every problem whose forward the simt family computes.

Three launches: delta and an empty workspace; the products; dq out of the workspace; and one more for the gradient of a bias, or of
sinks. What nobody needs is neither launched nor compiled in. Also runs in Numba's CUDA simulator.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numbaflash import toolchain
from numbaflash.dispatch import BackwardLayouts, Device, Launch, Layout, Plan, contiguous_strides, operands
from numbaflash.kernels import simt
from numbaflash.problem import DIFFERENTIABLE_OPTIONS, ITEMSIZE, Problem
from numbaflash.toolchain import simulator

from ...blocks.launch import Lists
from .. import grid
from ..options import FEATURES, as_bits, product_factor
from .config import TUNED, Config, candidates, choose_config

__all__ = ["FEATURES", "TUNED", "candidates", "plan", "prepare", "requests", "resources", "supports"]

_BUILD = "numbaflash.kernels.simt.backward."
_MOST_TILES = 2**31 - 1
_L2_BYTES = 16 * 2**20  # what the query heads that run together read and add to; as in `simt`
OF_OPTIONS = tuple(f"d{name}" for name in DIFFERENTIABLE_OPTIONS)
_NOTHING = {rank: Layout((0,) * rank, (0,) * rank) for rank in (2, 3, 4)}


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem's gradients there."""
    reasons = list(simt.supports(problem, device, FEATURES))
    if problem.left is not None and problem.seqlen_k - problem.offset + problem.left >= 2**31 - 256:
        reasons.append("the last key's last query, seqlen_k - offset + left, must stay within int32")
    for name, heads, tiles, rows in (
        ("heads", problem.heads, grid.q_tiles(problem, 4), "q / 4"),
        ("kv_heads", problem.kv_heads, grid.kv_tiles(problem, 8), "k / 8"),
    ):
        if grid.columns(problem, heads) * tiles > _MOST_TILES:
            told = f"{name} * (total_{rows} + batch + 2)" if problem.packed else f"batch * {name} * seqlen_{rows}"
            reasons.append(f"{told} must be at most {_MOST_TILES}")
    if problem.bias and math.prod(problem.bias[:2]) * -(-problem.bias[2] // 4) * -(-problem.bias[3] // 8) > _MOST_TILES:
        reasons.append(f"a bias must have at most {_MOST_TILES} * 32 elements")
    return tuple(reasons)


def plan(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool, *, config=None) -> Plan:
    """Choose tiles and grid, or take the tiles of a config; the grid is that of the products."""
    return plan_of_config(problem, layouts, device, config or choose_config(problem, layouts, device, deterministic), deterministic)


def plan_of_config(problem: Problem, layouts: BackwardLayouts, device: Device, config: Config, deterministic: bool = False) -> Plan:
    """The plan of a given config."""
    blocks = grid.kv_tiles(problem, config.kv_tile) * grid.columns(problem, problem.kv_heads)
    return Plan(
        "simt",
        problem,
        device,
        layouts,
        config,
        (blocks,),
        config.threads,
        config.shared_bytes,
        direction="backward",
        deterministic=deterministic,
        workspace_bytes=_Workspace(problem, config).size,
    )


class _Workspace:
    """Arrays of the workspace, each at a multiple of 256 bytes: ``delta`` (batch * heads, seqlen_q), ``sums`` of dq (tiles of
    queries, elements of a tile), both in the compute dtype, ``turns`` (1 + tiles of queries) in int32. Only what is needed."""

    def __init__(self, problem: Problem, config: Config):
        heads = grid.columns(problem, problem.heads)
        self.q_tiles = grid.q_tiles(problem, config.q_tile)
        self.tiles = heads * self.q_tiles
        self.size = 0
        self.delta = self._array(config.compute, (heads, problem.total_q if problem.packed else problem.seqlen_q), config.with_delta)
        self.sums = self._array(config.compute, (self.tiles, config.sums * config.threads), config.with_dq)
        self.turns = self._array("int32", (1 + self.tiles,), config.ordered)
        self.lists = None
        if problem.masked:
            self.lists = Lists(problem, problem, config.q_tile, config.kv_tile, problem.group, of_keys=True, ranked=config.ordered, offset=self.size)
            self.size = self.lists.end

    def _array(self, dtype, shape, wanted):
        if not wanted:
            shape = (0,) * len(shape)
        itemsize, offset = np.dtype(dtype).itemsize, self.size
        self.size += -(-math.prod(shape) * itemsize // 256) * 256
        return toolchain.Array("workspace", dtype, shape, contiguous_strides(shape, itemsize), offset if wanted else 0)


def requests(plan: Plan) -> list[toolchain.KernelRequest]:
    """All kernels that a plan needs."""
    return [*simt.requests_of_lists(_lists_of(plan), plan), *(wanted for wanted, *_ in launches(plan))]


def _lists_of(plan):
    """The lists of blocks that tiles step through, where there are a mask and products."""
    return _Workspace(plan.problem, plan.config).lists if plan.grid[0] and plan.config.with_products else None


def launches(plan: Plan) -> list[tuple[toolchain.KernelRequest, list, int, int]]:
    """Kernels of a plan in their order, each with its parameters, number of blocks and bytes of shared memory."""
    problem, config, layouts = plan.problem, plan.config, plan.layouts
    workspace = _Workspace(problem, config)

    def array(name):
        layout = getattr(layouts, name) or _NOTHING[(3 if name == "dlse" else 4) - problem.packed]
        dtype = as_bits(problem.dtype_of(name))
        return toolchain.Array(name, dtype, layout.shape, layout.strides) if name in OF_OPTIONS else simt.array(name, dtype, layout, problem)

    def kernel(build, config):
        return toolchain.KernelRequest(_BUILD + build, config, plan.device.capability)

    def real(value):
        return toolchain.Scalar(config.compute, value)

    def int32(value):
        return toolchain.Scalar("int32", value)

    factor, kernels = real(product_factor(problem, config.compute, config.options)), []
    first_and_last = [int32(key) for key in simt.band(problem)]
    kv_tiles = grid.kv_tiles(problem, config.kv_tile)
    options = config.of_products.options.arguments(problem, layouts, config.compute, config.unit, workspace.lists)
    packing = config.of_rows.options.arguments(problem, layouts, config.compute, config.unit)
    if config.with_delta:
        arrays = *map(array, ("dout", "out", "lse", "dlse")), workspace.delta, workspace.sums, workspace.turns
        parameters = [*arrays, int32(workspace.q_tiles), *packing]
        kernels.append((kernel("rows:build_delta", config.of_rows), parameters, workspace.tiles, 0))
    if plan.grid[0] and config.with_products:
        columns = grid.columns(problem, problem.kv_heads)
        parameters = [
            *map(array, ("dout", "q", "k", "v", "lse", "dk", "dv")),
            workspace.delta,
            workspace.sums,
            workspace.turns,
            factor,
            real(problem.scale),
            *first_and_last,
            int32(workspace.q_tiles),
            int32(kv_tiles),
            int32(columns),
            int32(problem.group),
            int32(_section(problem, config)),
            *options,
        ]
        kernels.append((kernel("gradients:build", config.of_products), parameters, plan.grid[0], plan.shared_bytes))
    if config.with_dq:
        scale = 1.0 if config.options.softcap else 1.0 / config.unit  # what ds k, k times the factor of the scores, needs to be dq
        parameters = [array("dq"), workspace.sums, real(scale), int32(workspace.q_tiles), *packing]
        kernels.append((kernel("rows:build_dq", config.of_rows), parameters, workspace.tiles, 0))
    if config.with_dsinks:
        of_rows = config.of_sinks.options.arguments(problem, layouts, config.compute, config.unit)
        parameters = [array("dsinks"), array("lse"), workspace.delta, *of_rows]
        kernels.append((kernel("rows:build_dsinks", config.of_sinks), parameters, problem.heads, config.threads * ITEMSIZE[config.compute]))
    if config.with_dbias and 0 not in problem.bias:
        counts = [int32(workspace.q_tiles), int32(kv_tiles), int32(problem.group)]
        parameters = [*map(array, ("dout", "q", "k", "v", "lse", "dbias")), workspace.delta, factor, *first_and_last, *counts, *options]
        along = (workspace.q_tiles, kv_tiles)
        blocks = math.prod(problem.bias[:2]) * math.prod(n for n, wanted in zip(along, config.dbias_axes, strict=True) if wanted)
        kernels.append((kernel("bias:build", config.of_bias), parameters, blocks, plan.shared_bytes))
    return kernels


def _section(problem: Problem, config: Config) -> int:
    """Key/value heads that run together: as many as have queries, and gradients of them, that fit in the L2 cache."""
    itemsize = ITEMSIZE[problem.dtype]
    row_bytes = (problem.head_dim + problem.head_dim_v) * itemsize + config.dim * ITEMSIZE[config.compute]
    return min(problem.batch * problem.kv_heads, max(1, _L2_BYTES // max(1, problem.group * problem.seqlen_q * row_bytes)))


def prepare(plan: Plan) -> Launch:
    """Build (or fetch) and load the kernels of a plan."""
    make = simulator.prepare if plan.device.kind == "cpu" else toolchain.prepare
    names = operands(plan.problem, "backward")
    main = [
        make(wanted, parameters, grid=(blocks,), threads=plan.threads, shared_bytes=shared_bytes, device=plan.device, operands=names)
        for wanted, parameters, blocks, shared_bytes in launches(plan)
    ]
    return simt.Launches([*simt.prepare_lists(_lists_of(plan), plan, make), *main])


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the kernel of the products, and the spills of all; builds them if need be."""
    if plan.device.kind == "cpu":
        return {"simulator": "no machine code"}
    wanted = sorted((each for each, *_ in launches(plan)), key=lambda each: each.build != _BUILD + "gradients:build")
    return toolchain.kernel_report(*wanted) if wanted else {}
