"""Exact attention on CUDA cores: every NVIDIA GPU from compute capability 7.0, every dtype, head dim and stride.

float32 is computed as float32 (no TF32), float64 as float64. Every option is built into the kernels that have it (see `options`
and `scores`). Set NUMBA_ENABLE_CUDASIM=1 before numba is imported to run
the same kernels on CPU arrays in Numba's CUDA simulator.
"""

from __future__ import annotations

from typing import Any

from numbaflash import toolchain
from numbaflash.dispatch import Device, Launch, Layout, Layouts, Plan, missing, operands
from numbaflash.problem import ITEMSIZE, Problem
from numbaflash.toolchain import simulator

from ..blocks.launch import Lists
from . import grid
from .config import choose_config
from .options import FEATURES, as_bits, product_factor

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
    if grid.columns(problem, problem.heads) * grid.q_tiles(problem, 8) > _MOST_TILES:
        rows = "heads * (total_q / 8 + batch + 2)" if problem.packed else "batch * heads * seqlen_q / 8"
        reasons.append(f"{rows} must be at most {_MOST_TILES}")
    return tuple(reasons)


def plan(problem: Problem, layouts: Layouts, device: Device) -> Plan:
    """Choose tiles and grid."""
    config = choose_config(problem, layouts, device, simulated=device.kind == "cpu")
    tiles = grid.q_tiles(problem, config.q_tile) * grid.columns(problem, problem.heads)
    lists = lists_of(problem, config)
    workspace = lists.end if lists else 0
    return Plan("simt", problem, device, layouts, config, (tiles,), config.threads, config.shared_bytes, workspace_bytes=workspace)


def lists_of(problem: Problem, config) -> Lists | None:
    """The lists of blocks that tiles step through, where there is a mask."""
    return Lists(problem, problem, config.q_tile, config.kv_tile, 1) if problem.masked else None


def prepare_lists(lists: Lists | None, plan: Plan, make) -> list[Launch]:
    """Launches that make lists, before others."""
    simulated = plan.device.kind == "cpu"
    listed = lists.launches(plan.layouts, plan.device.capability, simulated) if lists else []
    names = operands(plan.problem, plan.direction)
    return [make(wanted, given, grid=(blocks,), threads=threads, device=plan.device, operands=names) for wanted, given, blocks, threads in listed]


class Launches:
    """Launches one after the other."""

    def __init__(self, launches):
        self._launches = tuple(launches)

    def __call__(self, addresses: tuple[int, ...], stream: int) -> None:
        for launch in self._launches:
            launch(addresses, stream)


def request(plan: Plan) -> toolchain.KernelRequest:
    """The main kernel that a plan needs."""
    return toolchain.KernelRequest(_BUILD, plan.config, plan.device.capability)


def requests(plan: Plan) -> list[toolchain.KernelRequest]:
    """All kernels that a plan needs."""
    return [*requests_of_lists(lists_of(plan.problem, plan.config), plan), request(plan)]


def requests_of_lists(lists: Lists | None, plan: Plan) -> list[toolchain.KernelRequest]:
    """Kernels that make lists."""
    return [wanted for wanted, *_ in lists.launches(plan.layouts, plan.device.capability, False)] if lists else []


def prepare(plan: Plan) -> Launch:
    """Build (or fetch) and load the kernel of a plan."""
    make = simulator.prepare if plan.device.kind == "cpu" else toolchain.prepare
    before = prepare_lists(lists_of(plan.problem, plan.config), plan, make)
    launch = make(
        request(plan),
        parameters(plan),
        grid=plan.grid,
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        device=plan.device,
        operands=operands(plan.problem, plan.direction),
    )
    return Launches([*before, launch]) if before else launch


def parameters(plan: Plan, sums: toolchain.Array | None = None, statistics: toolchain.Array | None = None, parts: int = 1) -> list:
    """Kernel parameters of a plan, as `forward.build` lists them; with `decoding.parts`, ``sums`` and ``statistics`` in the places of out and lse."""
    problem, config, layouts = plan.problem, plan.config, plan.layouts
    bits = as_bits(config.dtype)
    arrays = [array(name, bits, getattr(layouts, name), problem) for name in ("q", "k", "v")]
    arrays.append(sums or array("out", bits, layouts.out, problem))
    nothing = Layout((0, 0, 0)[problem.packed :], (0, 0, 0)[problem.packed :])
    arrays.append(statistics or array("lse", config.compute, layouts.lse or nothing, problem))
    q_blocks, heads = grid.q_tiles(problem, config.q_tile), grid.columns(problem, problem.heads)
    return [
        *arrays,
        toolchain.Scalar(config.compute, product_factor(problem, config.compute, config.options)),
        *(toolchain.Scalar("int32", key) for key in band(problem)),
        toolchain.Scalar("int32", q_blocks),
        toolchain.Scalar("int32", heads),
        toolchain.Scalar("int32", problem.group),
        toolchain.Scalar("int32", _section(problem, heads)),
        *config.options.arguments(problem, layouts, config.compute, config.unit, lists_of(problem, config), parts),
    ]


def band(problem: Problem) -> tuple[int, int]:
    """First and last visible key of query 0, 0 for a bound that there is not; kernels add the offset where each batch entry has its own."""
    offset = 0 if problem.offset_per_entry else problem.offset
    return 0 if problem.left is None else offset - problem.left, 0 if problem.right is None else offset + problem.right


def array(name: str, dtype: str, layout: Layout, problem: Problem) -> toolchain.Array:
    """An operand as kernels see it: packed ones have a batch axis along which nothing changes."""
    if problem.packed:
        return toolchain.Array(name, dtype, (max(problem.batch, 1), *layout.shape), (0, *layout.strides))
    return toolchain.Array(name, dtype, layout.shape, layout.strides)


def _section(problem: Problem, heads: int) -> int:
    """Query heads that run together: as many as share keys and values that fit in the L2 cache, in whole groups."""
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return min(heads, problem.group * max(1, _L2_BYTES // max(1, head_bytes)))


def resources(plan: Plan) -> dict[str, Any]:
    """What ptxas says about the kernel of a plan; builds it if need be."""
    return {"simulator": "no machine code"} if plan.device.kind == "cpu" else toolchain.kernel_report(request(plan))
