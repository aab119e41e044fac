"""Decoding on CUDA cores: the kernel of the forward pass, whose keys come from caches, contiguous or in pages, and in parts that a second kernel
merges.

``paging`` says where keys lie, ``parts`` what becomes of partial results, and ``config`` chooses sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numbaflash import toolchain
from numbaflash.dispatch import Device, Launch, Layout, Layouts, Plan, contiguous_strides, operands
from numbaflash.kernels import simt
from numbaflash.problem import DECODE_FEATURES, ITEMSIZE, Problem
from numbaflash.problem.names import MAX_SPLITS
from numbaflash.toolchain import simulator

from .. import config as forward
from .config import MergeConfig, Workspace, choose_config, choose_tile, number_of_parts, stacked

__all__ = ["FEATURES", "launches", "plan", "prepare", "requests", "resources", "supports"]

FEATURES = frozenset(DECODE_FEATURES)
"""`Problem.features` that the kernels have."""

_BUILD, _BUILD_MERGE = "numbaflash.kernels.simt.forward:build", "numbaflash.kernels.simt.decoding.parts:build_merge"
_MOST_BLOCKS = 2**31 - 1
_SIMULATOR_THREADS = 4


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there."""
    reasons = list(simt.supports(problem, device, FEATURES))
    if device.kind != "cpu":
        limit = forward.shared_limit(device)
        if choose_tile(problem, limit) is None:
            dims = f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} in {problem.dtype}"
            reasons.append(f"no tile of {dims} fits the registers and the {limit // 1024} KiB of shared memory that a block has on this GPU")
    if problem.batch * problem.heads * problem.seqlen_q * MAX_SPLITS > _MOST_BLOCKS:
        reasons.append(f"batch * heads * seqlen_q must be at most {_MOST_BLOCKS // MAX_SPLITS}")
    return tuple(reasons)


def plan(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None) -> Plan:
    """Choose tiles, parts and grid."""
    config = choose_config(problem, layouts, device, split=False)
    count = number_of_parts(problem, config, device, num_splits)
    if count > 1:
        config = choose_config(problem, layouts, device, split=True)
    seen, _ = stacked(problem, layouts)
    tiles = seen.batch * seen.heads * -(-seen.seqlen_q // config.q_tile)
    return Plan(
        "simt",
        problem,
        device,
        layouts,
        config,
        (tiles * count,),
        config.threads,
        config.shared_bytes,
        direction="decode",
        workspace_bytes=Workspace.of(seen, config, count).total if count > 1 else 0,
        num_splits=num_splits,
    )


def launches(plan: Plan) -> list[tuple[toolchain.KernelRequest, list, int, int, int]]:
    """Kernels of a plan in their order, each with its parameters, blocks, threads and bytes of shared memory."""
    problem, layouts = stacked(plan.problem, plan.layouts)
    config, arch = plan.config, plan.device.capability
    main = toolchain.KernelRequest(_BUILD, config, arch)
    if not config.options.split:
        given = simt.parameters(replace(plan, problem=problem, layouts=layouts))
        return [(main, given, plan.grid[0], plan.threads, plan.shared_bytes)]
    count = plan.grid[0] // (problem.batch * problem.heads * -(-problem.seqlen_q // config.q_tile))
    workspace = Workspace.of(problem, config, count)
    sums, statistics = (
        toolchain.Array("workspace", config.compute, shape, contiguous_strides(shape, ITEMSIZE[config.compute]), offset)
        for shape, offset in ((workspace.sums, 0), (workspace.statistics, workspace.begin))
    )
    given = simt.parameters(replace(plan, problem=problem, layouts=layouts), sums, statistics, count)
    return [(main, given, plan.grid[0], plan.threads, plan.shared_bytes), _merge(plan, problem, layouts, sums, statistics, count)]


def _merge(plan, problem, layouts, sums, statistics, count):
    config, simulated = plan.config, plan.device.kind == "cpu"
    threads = _SIMULATOR_THREADS if simulated else min(128, forward.round_up(problem.head_dim_v, 32))
    of_merge = MergeConfig(config.dtype, threads, problem.sinks, layouts.lse is not None)
    nothing = Layout((0,) * 3, (0,) * 3)
    sinks = Layout((0, 0), (0, 0))
    if problem.sinks:
        sinks = layouts.sinks
        if len(sinks.shape) == 1:  # the same one for all rows
            sinks = Layout((problem.heads, problem.seqlen_q), (sinks.strides[0], 0))
    given = [
        simt.array("out", simt.as_bits(config.dtype), layouts.out, problem),
        simt.array("lse", config.compute, layouts.lse or nothing, problem),
        sums,
        statistics,
        simt.array("sinks" if problem.sinks else "lse", config.compute, sinks, problem),
        toolchain.Scalar("int32", count),
    ]
    wanted = toolchain.KernelRequest(_BUILD_MERGE, of_merge, plan.device.capability)
    return wanted, given, problem.batch * problem.seqlen_q * problem.heads, threads, 0


def requests(plan: Plan) -> list[toolchain.KernelRequest]:
    """All kernels that a plan needs."""
    return [wanted for wanted, *_ in launches(plan)]


def prepare(plan: Plan) -> Launch:
    """Build (or fetch from the cache) and load the kernels of a plan."""
    make, names = simulator.prepare if plan.device.kind == "cpu" else toolchain.prepare, operands(plan.problem, "decode")
    runs = [
        make(wanted, given, grid=(blocks,), threads=threads, shared_bytes=shared_bytes, device=plan.device, operands=names)
        for wanted, given, blocks, threads, shared_bytes in launches(plan)
    ]
    return runs[0] if len(runs) == 1 else simt.Launches(runs)


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the main kernel of a plan, and the spills of all; builds them if need be."""
    return {"simulator": "no machine code"} if plan.device.kind == "cpu" else toolchain.kernel_report(*requests(plan))
