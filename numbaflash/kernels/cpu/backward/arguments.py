"""What a launch of the gradients tells the compiled code, and how its workspace is laid out."""

from __future__ import annotations

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

from ....dispatch import BACKWARD_OPERANDS
from ..arguments import CACHE_LINE, UNBOUNDED
from ..config import round_up
from ..convert import COMPUTE
from ..vector import jit
from .config import BackwardConfig

SCRATCH = (
    *("keys", "values", "dkeys", "dvalues"),
    *("queries", "douts", "queries_t", "douts_t", "scores", "dscores"),
    *("query_rows", "dout_rows", "result_rows", "first", "last", "ranges", "spans", "ones", "scales", "zeros", "spare"),
)
"""Parts of a thread's scratch memory."""

WORKSPACE = ("lse2", "delta", "dq_sum", "turns")
"""Parts of the workspace of a call."""

_AXES = ("batch", "row", "head", "dim")
_TENSORS = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
_ROWS = ("lse", "dlse")
_INT64 = (
    *("batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v", "offset", "left", "right"),
    *("q_tile", "kv_block", "kv_tile", "q_tiles", "kv_tiles", "key_columns", "value_columns", "key_stride", "value_stride", "score_stride"),
    *("needs_q", "needs_k", "needs_v"),
    *(f"{operand}_{axis}" for operand in _TENSORS for axis in _AXES),
    *(f"{operand}_{axis}" for operand in _ROWS for axis in _AXES[:3]),
    *(f"at_{region}" for region in (*SCRATCH, *WORKSPACE)),
    "scratch",
)
ARGUMENTS = np.dtype([("score_scale", np.float64), ("scale", np.float64), *((name, np.int64) for name in _INT64)])
"""
``score_scale`` is the scale times log2(e); ``q_tiles`` and ``kv_tiles`` count the tiles of a key/value head;
``key_columns`` and ``value_columns`` are the padded head dims, ``key_stride``, ``value_stride`` and
``score_stride`` the rows of packed matrices in bytes; ``needs_*`` is 1 for the gradients to compute; ``{operand}_{axis}``
are strides; ``at_{region}`` places in a thread's scratch memory, of ``scratch`` bytes, or in the workspace.
"""

ADDRESSES = np.dtype([(operand, np.int64) for operand in BACKWARD_OPERANDS])


def odd_lines(n_bytes: int) -> int:
    """Bytes of a matrix row, in an odd number of cache lines, so that a column of lines spreads over all sets of a cache."""
    lines = -(-n_bytes // CACHE_LINE)
    return (lines | 1) * CACHE_LINE


def padded(columns: int, kernel) -> int:
    """A head dim in whole vectors and whole register tiles."""
    return round_up(columns, max(kernel.lanes, kernel.rows))


def workspace_sizes(problem, config: BackwardConfig, needs_q: bool) -> dict[str, int]:
    """Bytes of each part of the workspace: all O(S)."""
    itemsize = COMPUTE[problem.dtype].bitwidth // 8
    heads = problem.batch * problem.kv_heads
    tiles = heads * -(-problem.seqlen_q * problem.group // config.q_tile)
    rows = tiles * config.q_tile
    sizes = {"lse2": rows * itemsize, "delta": rows * itemsize, "dq_sum": 0, "turns": 0}
    if needs_q:
        sizes["dq_sum"] = rows * padded(problem.head_dim, config.kernel) * itemsize
        sizes["turns"] = tiles * 8
    return {region: round_up(size, CACHE_LINE) for region, size in sizes.items()}


def scratch_sizes(args, config: BackwardConfig, itemsize: int) -> dict[str, int]:
    """Bytes of each part of a thread's scratch memory."""
    kernel, q_tile = config.kernel, config.q_tile
    key_stride, value_stride = int(args["key_stride"]), int(args["value_stride"])
    scores = config.kv_block * int(args["score_stride"])
    return {
        "keys": config.kv_tile * key_stride,
        "values": config.kv_tile * value_stride,
        "dkeys": config.kv_tile * key_stride,
        "dvalues": config.kv_tile * value_stride,
        "queries": q_tile * key_stride,
        "douts": q_tile * value_stride,
        "queries_t": q_tile * int(args["key_columns"]) * itemsize,
        "douts_t": q_tile * int(args["value_columns"]) * itemsize,
        "scores": scores,
        "dscores": scores,
        "query_rows": q_tile * 8,
        "dout_rows": q_tile * 8,
        "result_rows": q_tile * 8,
        "first": q_tile * 4,
        "last": q_tile * 4,
        "ranges": q_tile // kernel.panel * 6 * 8,
        "spans": config.kv_block // kernel.rows * 2 * 8,
        "ones": kernel.panel * itemsize,
        "scales": kernel.panel * itemsize,
        "zeros": max(key_stride, value_stride),
        "spare": key_stride,
    }


def arguments(problem, layouts, config: BackwardConfig) -> np.ndarray:
    """The prepared arguments of a launch, an array of one record of `ARGUMENTS`."""
    kernel = config.kernel
    itemsize = COMPUTE[problem.dtype].bitwidth // 8
    result = np.zeros(1, ARGUMENTS)
    args = result[0]
    for name in ("batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v", "offset", "scale"):
        args[name] = getattr(problem, name)
    args["left"] = UNBOUNDED if problem.left is None else problem.left
    args["right"] = UNBOUNDED if problem.right is None else problem.right
    args["score_scale"] = problem.scale * np.log2(np.e)
    args["q_tile"], args["kv_block"], args["kv_tile"] = config.q_tile, config.kv_block, config.kv_tile
    args["q_tiles"] = -(-problem.seqlen_q * problem.group // config.q_tile)
    args["kv_tiles"] = -(-problem.seqlen_k // config.kv_tile)
    for name, columns in (("key", problem.head_dim), ("value", problem.head_dim_v)):
        args[f"{name}_columns"] = padded(columns, kernel)
        args[f"{name}_stride"] = odd_lines(padded(columns, kernel) * itemsize)
    args["score_stride"] = odd_lines(config.q_tile * itemsize)
    for operand in (*_TENSORS, *_ROWS):
        layout = getattr(layouts, operand)
        if layout is not None:
            axes = ("batch", "head", "row") if operand in _ROWS else _AXES
            for axis, stride in zip(axes, layout.strides, strict=True):
                args[f"{operand}_{axis}"] = stride
    for name in "qkv":
        args[f"needs_{name}"] = getattr(layouts, f"d{name}") is not None
    sizes = scratch_sizes(args, config, itemsize)
    args["scratch"] = _place(args, SCRATCH, sizes)
    _place(args, WORKSPACE, workspace_sizes(problem, config, bool(args["needs_q"])))
    return result


def _place(args, regions, sizes) -> int:
    end = 0
    for region in regions:
        args[f"at_{region}"] = end
        end += round_up(sizes[region], CACHE_LINE)
    return end


def _record_at(dtype):
    @intrinsic
    def record_at(typingctx, address):
        record = from_dtype(dtype)
        return record(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], context.get_value_type(record))

    return record_at


arguments_at, addresses_at = _record_at(ARGUMENTS), _record_at(ADDRESSES)


@jit
def keys_of_tile(args, q_tile):
    """Keys that some row of a tile of queries sees: (first, one past the last), equal when there are none."""
    rows = args.seqlen_q * args.group
    query = q_tile * args.q_tile // args.group
    last_query = (min(rows, (q_tile + 1) * args.q_tile) - 1) // args.group
    query = max(query, -args.offset - args.right)  # those before it end before the first key, those after the last begin
    last_query = min(last_query, args.seqlen_k - 1 - args.offset + args.left)  # past the last key
    if query > last_query:
        return 0, 0
    first = max(0, query + args.offset - args.left)
    return first, max(first, min(args.seqlen_k, last_query + args.offset + args.right + 1))
