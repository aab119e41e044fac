"""Gradients of exact attention on the tensor cores of Hopper GPUs: float16 and bfloat16.

Three launches: the rows' shift and delta and an empty sum of dQ (`passes`), the products (`kernel`), and dQ out of its sum; and one more for the
gradient of a bias (`bias`), or of sinks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .... import toolchain
from ....dispatch import BackwardLayouts, Device, Launch, Plan, operands
from ....problem import FORWARD_OPTIONS, ITEMSIZE, PACKED, Problem, trim_keys
from ... import sm90
from ...blocks.launch import Lists
from ...sections import choose_section, fitting_section
from ..options import FEATURES as FEATURES
from ..options import steps
from ..tensor_maps import refusal, row_major, rows_map, with_batch
from .config import (
    L2_BYTES,
    PART_ROWS,
    ROW_THREADS,
    SINK_THREADS,
    TICKET_BYTES,
    TUNED,
    BackwardConfig,
    BiasMemory,
    SharedMemory,
    backward_config,
    column_bytes,
    kv_tiles,
    q_blocks,
    q_blocks_of_tiles,
    visible_queries,
)
from .config import candidates as config_candidates

__all__ = ["FEATURES", "TUNED", "candidates", "plan", "prepare", "requests", "resources", "supports"]

_BUILD = "numbaflash.kernels.sm90.backward."
_ARCH = (9, 0, "a")
_SLOWER_PAST_L2 = 1.15  # measured on an H200 where fewer than head_dim / 32 blocks are at work on a head; with more 0 to 4% are lost
_STEPS_APART = 2  # of 2, 4 and 8, on an H200 with 4 query heads a kv head: fastest at D 256, up to 11% slower than the best at D 64 and 128
_TILES_OF_A_HEAD = 32  # of packed sequences at work at a time, on an H200: fewer, up to 8, or all there are, are as fast or 2 to 5% slower
_TILE_COST = 1.5  # start and end of a tile, in blocks of queries


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem's gradients there."""
    reasons = list(sm90.supports(problem, device))
    if problem.bias and math.prod((*problem.bias[:2], *_bias_tiles(problem))) >= 2**31:
        reasons.append(f"a bias must have fewer than 2**31 tiles of {BiasMemory.q_block} queries and {BiasMemory.kv_tile} keys")
    return tuple(reasons)


def candidates(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool) -> tuple[BackwardConfig, ...]:
    """Configs to measure, that of `plan` first."""
    return config_candidates(problem, layouts, blocks=device.sm_count, deterministic=deterministic)


def plan(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool, *, config: BackwardConfig | None = None) -> Plan:
    """Choose tiles (or take those of a config) and grid, and which operands must be copied because TMA cannot read them in place."""
    config = config or backward_config(problem, layouts, blocks=device.sm_count, deterministic=deterministic)
    copies, seen = {}, {}
    for name in ("dout", "q", "k", "v", "out", "dq", "dk", "dv"):
        layout = getattr(layouts, name)
        reason = "" if layout is None else refusal(layout, ITEMSIZE[problem.dtype])
        if reason:
            copies[name] = reason
            layout = row_major(layout, ITEMSIZE[problem.dtype])
        seen[name] = layout
    for name in ("lse", "dlse"):
        layout = getattr(layouts, name)
        if layout is not None and layout.strides != row_major(layout, 4).strides:
            copies[name] = "the kernel reads it row-major"
            layout = row_major(layout, 4)
        seen[name] = layout
    for name in (*FORWARD_OPTIONS, *PACKED, "dbias", "dsinks"):
        seen[name] = getattr(layouts, name)
    tiles = kv_tiles(problem, config) * _entries(problem) * problem.kv_heads
    return Plan(
        "sm90",
        problem,
        device,
        BackwardLayouts(**seen),
        config,
        grid=(tiles if config.one_tile else max(1, min(device.sm_count, tiles)),),
        threads=config.threads,
        shared_bytes=SharedMemory.of(config).total,
        copies=copies,
        direction="backward",
        deterministic=deterministic,
        workspace_bytes=_Workspace(problem, config).size,
    )


def _entries(problem):
    """Batch entries of the arrays."""
    return 1 if problem.packed else problem.batch


class _Workspace:
    """Offsets in the workspace, multiples of 256 bytes.

    For each query head and block of queries: a ``shift`` and a ``delta`` a row in float32, the ``sum`` of dq in float32, and
    for a deterministic result a ``turn`` a part in int32. That is ``4 * rows * (2 + columns)`` bytes, with the rows rounded up to whole blocks
    and the columns to 64 (to 256 above 128). With a mask, the lists of blocks come after that.
    """

    def __init__(self, problem: Problem, config: BackwardConfig):
        self.q_blocks = q_blocks(problem, config)
        self.blocks = _entries(problem) * problem.heads * self.q_blocks
        self.parts = config.parts
        self.size = 0
        self._place(sm90.TICKETS_BYTES if problem.packed else 0)  # the first of all, as `Options.arguments` has it
        self.shifts = self._place(4 * self.blocks * config.q_block)
        self.deltas = self._place(4 * self.blocks * config.q_block if config.with_deltas else 0)
        self.sums = self._place(self.blocks * self.parts * SharedMemory.of(config).part_bytes if config.with_dq else 0)
        self.turns = self._place(TICKET_BYTES + 4 * self.blocks * self.parts) + TICKET_BYTES if config.deterministic else 0
        self.lists = None
        if problem.masked:
            order = {"ranked": config.deterministic, "last_first": config.last_keys_first}
            self.lists = Lists(problem, problem, config.q_block, config.kv_tile, problem.group, of_keys=True, offset=self.size, **order)
            self.size = self.lists.end

    def _place(self, size):
        offset = self.size
        self.size += -(-size // 256) * 256
        return offset


def requests(plan: Plan) -> list[toolchain.KernelRequest]:
    """The kernels that a plan needs."""
    return [wanted for wanted, *_ in launches(plan)]


def launches(plan: Plan) -> list[tuple[toolchain.KernelRequest, list, tuple, int, int]]:
    """Kernels of a plan in their order, each with its parameters, grid, threads and bytes of shared memory."""
    config = plan.config
    workspace = _Workspace(plan.problem, config)

    def kernel(build, config=config):
        return toolchain.KernelRequest(_BUILD + build, config, _ARCH)

    tickets = sm90.ticket_launches(plan.problem, plan.layouts, config.options)
    steps = [(wanted, given, (blocks,), threads, 0) for wanted, given, blocks, threads in tickets]
    steps.append((kernel("passes:build_rows"), _row_parameters(plan, workspace), (workspace.blocks,), ROW_THREADS, 0))
    if config.with_products:
        before = workspace.lists.launches(plan.layouts, _ARCH, False) if workspace.lists else []
        steps += [(wanted, given, (blocks,), threads, 0) for wanted, given, blocks, threads in before]
        steps.append((kernel("kernel:build", config.of_products), _parameters(plan, workspace), plan.grid, plan.threads, plan.shared_bytes))
    if config.with_dq:
        threads, shared_bytes = 128 * workspace.parts, 1024 + 2 * PART_ROWS * config.part_columns * workspace.parts
        steps.append((kernel("passes:build_dq"), _dq_parameters(plan, workspace), (workspace.blocks,), threads, shared_bytes))
    if config.with_dbias and 0 not in plan.problem.bias:
        blocks = math.prod(plan.layouts.dbias.shape[:2])
        blocks *= math.prod(n for n, wanted in zip(_bias_tiles(plan.problem), config.dbias_axes, strict=True) if wanted)
        parameters, shared_bytes = _bias_parameters(plan, workspace), BiasMemory.of(config).total
        steps.append((kernel("bias:build", config.of_bias), parameters, (blocks,), BiasMemory.threads, shared_bytes))
    if config.with_dsinks:
        steps.append((kernel("passes:build_dsinks"), _sink_parameters(plan, workspace), (plan.problem.heads,), SINK_THREADS, 0))
    return steps


def _row_parameters(plan, workspace):
    layouts, problem = plan.layouts, plan.problem
    strides = [*with_batch(layouts.dout).strides[:3], *with_batch(layouts.out).strides[:3]]
    given = []
    if plan.config.options:
        given = [toolchain.Pointer("q"), *(toolchain.Scalar("int64", n) for n in with_batch(layouts.q).strides[:3])]
        given += plan.config.options.of_rows.arguments(problem, layouts)
        given += _search_parameters(plan)
    return [
        *(toolchain.Pointer(name) for name in ("dout", "out", "lse", "dlse")),
        *(toolchain.Pointer("workspace", offset) for offset in (workspace.shifts, workspace.deltas, workspace.sums, workspace.turns)),
        *(toolchain.Scalar("int64", n) for n in strides),
        *(toolchain.Scalar("int32", n) for n in (_rows(problem), problem.heads, workspace.q_blocks)),
        *given,
    ]


def _rows(problem):
    """Queries of a head in a batch entry of the arrays."""
    return problem.total_q if problem.packed else problem.seqlen_q


def _bias_tiles(problem):
    """Blocks of queries and tiles of keys of a head."""
    return -(-problem.seqlen_q // BiasMemory.q_block), -(-problem.seqlen_k // BiasMemory.kv_tile)


def _bias_parameters(plan, workspace):
    problem, config, layouts = plan.problem, plan.config, plan.layouts
    dtype, dbias = problem.dtype, layouts.dbias
    keys, first_key = trim_keys(problem)
    first_query, queries = visible_queries(problem)
    integers = (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.offset,
        problem.left or 0,
        problem.right or 0,
        first_query,
        first_key,
        problem.batch,
        problem.heads,
        problem.group,
        *_bias_tiles(problem),
        workspace.q_blocks * config.q_block,
    )
    return [
        rows_map("q", dtype, layouts.q, BiasMemory.q_block, first_query, queries),
        rows_map("k", dtype, layouts.k, BiasMemory.kv_tile, first_key, keys.seqlen_k),
        rows_map("v", dtype, layouts.v, BiasMemory.kv_tile, first_key, keys.seqlen_k),
        rows_map("dout", dtype, layouts.dout, BiasMemory.q_block, first_query, queries),
        toolchain.Array("dbias", "float32" if problem.bias_dtype == "float32" else "uint16", dbias.shape, dbias.strides),
        *(toolchain.Pointer("workspace", offset) for offset in (workspace.shifts, workspace.deltas)),
        *(toolchain.Scalar("int32", n) for n in integers),
        toolchain.Scalar("float32", _in_base_2(problem, config)),
        *config.of_products.options.arguments(problem, layouts, lists=workspace.lists),
    ]


def _in_base_2(problem, config):
    """What scores are multiplied by."""
    with np.errstate(over="ignore"):
        return float(np.float32(math.log2(math.e) * config.options.size_of_unit(problem)))


def _sink_parameters(plan, workspace):
    problem, (stride,) = plan.problem, plan.layouts.dsinks.strides
    integers = (problem.batch, _rows(problem), problem.heads, workspace.q_blocks * plan.config.q_block)
    return [
        toolchain.Pointer("dsinks"),
        toolchain.Scalar("int64", stride),
        toolchain.Pointer("lse"),
        toolchain.Pointer("workspace", workspace.deltas),
        *(toolchain.Scalar("int32", n) for n in integers),
        *plan.config.options.of_rows.arguments(problem, plan.layouts),
    ]


def _parameters(plan, workspace):
    problem, config, layouts = plan.problem, plan.config, plan.layouts
    dtype = problem.dtype
    trimmed, first_key = trim_keys(problem)  # what nobody sees is not even loaded: whatever it holds stays outside
    keys = problem.total_k if problem.packed else trimmed.seqlen_k
    first_query, queries = visible_queries(problem)
    columns, tiles = _entries(problem) * problem.kv_heads, kv_tiles(problem, config)
    section = _section(problem, config, columns, plan.device.sm_count)
    integers = (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.offset,
        problem.left or 0,
        problem.right or 0,
        first_query,
        first_key,
        problem.heads,
        problem.kv_heads,
        problem.group,
        workspace.q_blocks,
        tiles,
        columns,
        section,
        tiles * columns,
    )
    layout = {name: each and with_batch(each) for name in ("q", "k", "v", "dout", "dk", "dv") for each in [getattr(layouts, name)]}
    with np.errstate(over="ignore"):
        factors = [_in_base_2(problem, config), float(np.float32(problem.scale))]
    return [
        rows_map("q", dtype, layout["q"], config.q_block, first_query, queries),
        rows_map("k", dtype, layout["k"], config.kv_tile, first_key, keys),
        rows_map("v", dtype, layout["v"], config.kv_tile, first_key, keys),
        rows_map("dout", dtype, layout["dout"], config.q_block, first_query, queries),
        # A gradient that nobody needs is never stored, but its place must hold a map.
        *(rows_map(name, dtype, layout[name], 64) if layout[name] else rows_map(other, dtype, layout[other], 64)
          for name, other in (("dk", "k"), ("dv", "v"))),
        *(toolchain.Pointer("workspace", offset) for offset in (workspace.shifts, workspace.deltas, workspace.sums, workspace.turns)),
        *(toolchain.Scalar("int32", n) for n in integers),
        *(toolchain.Scalar("float32", x) for x in factors),
        *config.of_products.options.arguments(problem, layouts, lists=workspace.lists),
    ]  # fmt: skip


def _section(problem, config, columns, blocks):
    """Heads whose tiles are taken together. How long tiles of packed sequences are, only the device knows."""
    if problem.packed:
        return max(1, min(columns, blocks // _TILES_OF_A_HEAD))
    costs = tuple((q_blocks_of_tiles(problem, config) * problem.group + _TILE_COST).tolist())
    if config.deterministic and config.deterministic_step < 0:
        # Tiles of a head that start this far apart find the one before them ahead, but not so far that what it has read is forgotten.
        return max(1, min(columns, -(-_STEPS_APART * 2 * blocks // (problem.group * len(costs)))))
    if config.deterministic:  # tickets even tiles out; neighbours of a head, of which one waits for the other, had better not start together
        return fitting_section(columns, column_bytes(problem), L2_BYTES)
    blocks, enough_sharers = min(blocks, len(costs) * columns), max(problem.head_dim, problem.head_dim_v) / 32
    return choose_section(costs[::-1], columns, blocks, column_bytes(problem), L2_BYTES, _SLOWER_PAST_L2, enough_sharers, in_step=True)


def _dq_parameters(plan, workspace):
    problem = plan.problem
    with np.errstate(over="ignore"):
        scale = float(np.float32(problem.scale))
    dq, stored = with_batch(plan.layouts.dq), []
    if problem.packed:
        stored = [toolchain.Pointer("dq"), *(toolchain.Scalar("int64", n) for n in steps(dq)[1:3])]
    return [
        rows_map("dq", problem.dtype, dq, PART_ROWS),
        *(toolchain.Pointer("workspace", offset) for offset in (workspace.sums, workspace.shifts)),
        toolchain.Scalar("int32", problem.heads),
        toolchain.Scalar("int32", workspace.q_blocks),
        toolchain.Scalar("float32", scale),
        *_search_parameters(plan, problem.packed),
        *stored,
    ]


def _search_parameters(plan, always=False):
    """What a search for the keys that a query sees needs, where there may be one."""
    problem, config = plan.problem, plan.config
    if not (config.behind_sink or always):
        return []
    integers = (problem.seqlen_q, problem.seqlen_k, problem.offset, problem.left or 0, problem.right or 0)
    return [
        *(toolchain.Scalar("int32", n) for n in integers),
        *config.of_products.options.arguments(problem, plan.layouts, lists=_Workspace(problem, config).lists),
    ]


def prepare(plan: Plan) -> Launch:
    """Build (or fetch) and load the kernels of a plan."""
    names = operands(plan.problem, "backward")
    prepared = tuple(
        toolchain.prepare(wanted, parameters, grid=grid, threads=threads, shared_bytes=shared_bytes, device=plan.device, operands=names)
        for wanted, parameters, grid, threads, shared_bytes in launches(plan)
    )

    def launch(addresses, stream):
        for run in prepared:
            run(addresses, stream)

    return launch


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the main kernel of a plan, and the spills of all; builds them if need be."""
    main, *others = sorted(requests(plan), key=lambda each: each.build != _BUILD + "kernel:build")
    return toolchain.kernel_report(main, *others)
