"""Exact attention on CUDA cores: every NVIDIA GPU from compute capability 7.0, every dtype, head dim and stride.

float32 is computed as float32 (no TF32), float64 as float64. Set NUMBA_ENABLE_CUDASIM=1 before numba is imported to run
the same kernels on CPU arrays in Numba's CUDA simulator.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numbaflash import toolchain
from numbaflash.dispatch import Device, Launch, Layout, Layouts, Plan, missing, operands
from numbaflash.problem import ITEMSIZE, Problem
from numbaflash.toolchain import simulator

from .config import Config, choose_config

FEATURES = frozenset()
"""`Problem.features` that the kernel has."""

_BUILD = "numbaflash.kernels.simt.forward:build"
_MOST_TILES = 2**31 - 1
_L2_BYTES = 16 * 2**20  # keys and values of the heads that run together; the L2 caches of data-centre GPUs hold more


def supports(problem: Problem, device: Device, features: frozenset[str] = FEATURES) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there."""
    reasons = missing(problem, features)
    if device.kind == "cpu":
        if not simulator.is_active():
            reasons.append("it needs an NVIDIA GPU (CPU arrays run only in Numba's CUDA simulator, NUMBA_ENABLE_CUDASIM=1)")
    elif device.capability < (7, 0):
        reasons.append(f"it needs compute capability 7.0 or later; this GPU has {device.capability[0]}.{device.capability[1]}")
    if problem.right is not None and problem.seqlen_q + problem.offset + problem.right >= 2**31 - 256:
        reasons.append("the last query's last key, seqlen_q + offset + right, must stay within int32")
    if problem.batch * problem.heads * -(-problem.seqlen_q // 8) > _MOST_TILES:
        reasons.append(f"batch * heads * seqlen_q / 8 must be at most {_MOST_TILES}")
    return tuple(reasons)


def plan(problem: Problem, layouts: Layouts, device: Device) -> Plan:
    """Choose tiles and grid."""
    config = choose_config(problem, layouts, device, simulated=device.kind == "cpu")
    tiles = -(-problem.seqlen_q // config.q_tile) * problem.batch * problem.heads
    return Plan("simt", problem, device, layouts, config, (tiles,), config.threads, config.shared_bytes)


def request(plan: Plan) -> toolchain.KernelRequest:
    """The kernel that a plan needs."""
    return toolchain.KernelRequest(_BUILD, plan.config, plan.device.capability)


def prepare(plan: Plan) -> Launch:
    """Build (or fetch) and load the kernel of a plan."""
    make = simulator.prepare if plan.device.kind == "cpu" else toolchain.prepare
    return make(
        request(plan),
        parameters(plan),
        grid=plan.grid,
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        device=plan.device,
        operands=operands(plan.problem),
    )


def parameters(plan: Plan) -> list:
    """Kernel parameters of a plan, as `forward.build` lists them."""
    problem, config, layouts = plan.problem, plan.config, plan.layouts
    bits = config.dtype if config.dtype == config.compute else "uint16"
    arrays = [_array(name, bits, getattr(layouts, name)) for name in ("q", "k", "v", "out")]
    empty = Layout((0, 0, 0), (0, 0, 0))
    arrays.append(_array("lse", config.compute, layouts.lse or empty))
    q_blocks, heads = -(-problem.seqlen_q // config.q_tile), problem.batch * problem.heads
    return [
        *arrays,
        toolchain.Scalar(config.compute, _factor(problem, config)),
        toolchain.Scalar("int32", 0 if problem.left is None else problem.offset - problem.left),
        toolchain.Scalar("int32", 0 if problem.right is None else problem.offset + problem.right),
        toolchain.Scalar("int32", q_blocks),
        toolchain.Scalar("int32", heads),
        toolchain.Scalar("int32", problem.group),
        toolchain.Scalar("int32", _section(problem, heads)),
    ]


def _array(name, dtype, layout):
    return toolchain.Array(name, dtype, layout.shape, layout.strides)


def _factor(problem: Problem, config: Config) -> float:
    """Factor of q, so that the kernel's exponential of a score is the weight: base 2 in float32, base e in float64."""
    if config.compute == "float64":
        return problem.scale
    with np.errstate(over="ignore"):
        return float(np.float32(problem.scale * math.log2(math.e)))


def _section(problem: Problem, heads: int) -> int:
    """Query heads that run together: as many as share keys and values that fit in the L2 cache, in whole groups."""
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return min(heads, problem.group * max(1, _L2_BYTES // max(1, head_bytes)))


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the kernel of a plan; builds it if need be."""
    return {"simulator": "no machine code"} if plan.device.kind == "cpu" else toolchain.kernel_report(request(plan))
