"""Exact attention on the tensor cores of Hopper GPUs (compute capability 9.0): float16 and bfloat16."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ... import toolchain
from ...dispatch import Device, Launch, Layout, Layouts, Plan, contiguous_strides
from ...problem import ITEMSIZE, Problem, trim_keys
from ..sections import choose_section
from .config import ELEMENTS, SharedMemory, forward_config, kv_blocks

NONFINITE_VALUES_SPREAD = True
"""NaN or infinity in a value that some query sees may reach other queries of its tile: the tensor core multiplies it by their weight of 0."""

_BUILD = "numbaflash.kernels.sm90.forward:build"
_ARCH = (9, 0, "a")
_L2_BYTES = 36 * 2**20  # of the H200's 60 MB, what keys and values of the heads in flight may take
_TILE_COST = 1.0  # start and end of a tile, in KV blocks
_TINY_SCALE = 2.0**-100  # in place of 0, whose product with a masked score of -inf would be NaN


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there."""
    reasons = []
    if device.kind != "cuda" or device.capability != (9, 0):
        which = "a CPU" if device.kind == "cpu" else f"compute capability {device.capability[0]}.{device.capability[1]}"
        reasons.append(f"it needs a Hopper GPU (compute capability 9.0); this is {which}")
    if problem.dtype not in ELEMENTS:
        reasons.append(f"it computes {' and '.join(ELEMENTS)}, not {problem.dtype}")
    for name, n in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if n % 8:
            reasons.append(f"{name} must be a multiple of 8 for TMA; it is {n}")
    if not trim_keys(problem)[0].seqlen_k:
        reasons.append("no query sees a key, and a tensor map cannot be empty")
    if problem.batch * problem.heads * problem.seqlen_q >= 2**31 * 64:
        reasons.append("it counts q tiles in 32 bits, and there are more")
    return tuple(reasons)


def plan(problem: Problem, layouts: Layouts, device: Device) -> Plan:
    """Choose tiles and grid, and which operands must be copied because TMA cannot read them in place."""
    trimmed, _ = trim_keys(problem)
    config = forward_config(trimmed)
    copies, seen = {}, {}
    for name in ("q", "k", "v", "out"):
        layout = getattr(layouts, name)
        reason = _tma_refuses(layout, ITEMSIZE[problem.dtype])
        if reason:
            copies[name] = reason
            layout = _contiguous(layout, ITEMSIZE[problem.dtype])
        seen[name] = layout
    lse = layouts.lse
    if lse is not None and lse.strides != _contiguous(lse, 4).strides:
        copies["lse"] = "the kernel writes it row-major"
        lse = _contiguous(lse, 4)
    tiles = len(kv_blocks(trimmed, config)) * problem.batch * problem.heads // config.pack
    return Plan(
        "sm90",
        problem,
        device,
        Layouts(**seen, lse=lse),
        config,
        grid=(max(1, min(device.sm_count, tiles)),),
        threads=config.threads,
        shared_bytes=SharedMemory.of(config).total,
        copies=copies,
    )


def request(plan: Plan) -> toolchain.KernelRequest:
    """The kernel that a plan needs."""
    return toolchain.KernelRequest(_BUILD, plan.config, _ARCH)


def prepare(plan: Plan) -> Launch:
    """Build (or fetch) and load the kernel of a plan."""
    launch = toolchain.prepare(
        request(plan), parameters(plan), grid=plan.grid, threads=plan.threads, shared_bytes=plan.shared_bytes, device=plan.device
    )
    first_key = trim_keys(plan.problem)[1]
    if not first_key:
        return launch
    skip_k, skip_v = first_key * plan.layouts.k.strides[1], first_key * plan.layouts.v.strides[1]

    def launch_trimmed(q, k, v, out, lse, stream):
        launch(q, k + skip_k, v + skip_v, out, lse, stream)

    return launch_trimmed


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the kernel of a plan; builds it if need be."""
    report = toolchain.ptxas_report(toolchain.compile_ptx(request(plan)), _ARCH)
    return {
        "registers": report.registers,
        "stack_bytes": report.stack_bytes,
        "spill_bytes": report.spill_stores + report.spill_loads,
        "notes": report.notes,
    }


def parameters(plan: Plan) -> list:
    """Kernel parameters of a plan, as the kernel lists them."""
    problem, _ = trim_keys(plan.problem)  # keys that no query sees are not even loaded: whatever they hold stays outside
    config, layouts = plan.config, plan.layouts
    blocks_of_tile = kv_blocks(problem, config)
    columns = problem.batch * problem.heads // config.pack
    column_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype] // max(1, problem.group // config.pack)
    costs = tuple((blocks_of_tile + _TILE_COST).tolist())
    section = choose_section(costs, columns, plan.grid[0], column_bytes, _L2_BYTES)
    scale_log2 = abs(problem.scale or _TINY_SCALE) * math.log2(math.e)
    integers = (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.offset,
        problem.left or 0,
        problem.right or 0,
        problem.heads // config.pack,
        problem.group // config.pack,
        len(costs),
        columns,
        section,
        len(costs) * columns,
    )
    with np.errstate(over="ignore"):
        scale = float(np.float32(scale_log2))
    return [
        _rows_map("q", problem.dtype, layouts.q, config.pack),
        _keys_map("k", problem.dtype, layouts.k, problem.seqlen_k, config.kv_block),
        _keys_map("v", problem.dtype, layouts.v, problem.seqlen_k, config.kv_block),
        _rows_map("out", problem.dtype, layouts.out, config.pack),
        toolchain.Pointer("lse"),
        *(toolchain.Scalar("int32", n) for n in integers),
        toolchain.Scalar("float32", scale),
    ]


def _rows_map(name, dtype, layout: Layout, pack: int) -> toolchain.TensorMap:
    """Map of q or out over (head dim, heads of a tile, queries, tile heads, batch); a box is one consumer's 64 rows."""
    batch, seqlen, heads, dim = layout.shape
    of_batch, of_query, of_head, _ = _strides(layout)
    return toolchain.TensorMap(
        name, dtype, (dim, pack, seqlen, heads // pack, batch), (of_head, of_query, of_head * pack, of_batch), (64, pack, 64 // pack, 1, 1)
    )  # fmt: skip


def _keys_map(name, dtype, layout: Layout, seqlen: int, kv_block: int) -> toolchain.TensorMap:
    """Map of k or v over (head dim, keys, heads, batch)."""
    batch, _, heads, dim = layout.shape
    of_batch, of_key, of_head, _ = _strides(layout)
    return toolchain.TensorMap(name, dtype, (dim, seqlen, heads, batch), (of_key, of_head, of_batch), (64, kv_block, 1, 1))


def _strides(layout: Layout):
    """Strides where an axis of one element, which may have any, has a stride that TMA takes."""
    return tuple(stride if n > 1 else 16 for n, stride in zip(layout.shape, layout.strides, strict=True))


def _tma_refuses(layout: Layout, itemsize: int) -> str:
    """Why TMA cannot read or write an operand in place; empty when it can."""
    *outer, inner = _strides(layout)
    if inner != itemsize and layout.shape[-1] > 1:
        return "TMA needs a contiguous head dim"
    if layout.alignment < 16:
        return "TMA needs an address that is a multiple of 16 bytes"
    if any(stride % 16 or not 0 <= stride < 2**40 for stride in outer):
        return "TMA needs strides that are multiples of 16 bytes and not negative"
    return ""


def _contiguous(layout: Layout, itemsize: int) -> Layout:
    return replace(layout, strides=contiguous_strides(layout.shape, itemsize), alignment=16)
