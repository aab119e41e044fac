"""What a launch of the gradients tells the compiled code, and how its workspace is laid out."""

from __future__ import annotations

import numpy as np

from ....dispatch import BACKWARD_OPERANDS, OPTION_OPERANDS
from ....problem import DIFFERENTIABLE_OPTIONS
from ..arguments import CACHE_LINE, UNBOUNDED
from ..config import packed_tiles, round_up
from ..convert import COMPUTE
from ..scores import OPTION_INTEGERS, OPTION_NUMBERS, TILES, record_at, score_scale, set_option_arguments, tile_sizes
from ..vector import jit
from .config import BackwardConfig

SCRATCH = (
    *("keys", "values", "dkeys", "dvalues"),
    *("queries", "douts", "queries_t", "douts_t", "scores", "dscores"),
    *("query_rows", "dout_rows", "result_rows", "first", "last", "ranges", "spans", "ones", "scales", "zeros", "spare"),
    *(*TILES, "part_lse", "part_delta", "slots", "bias_sums"),
)
"""Parts of a thread's scratch memory."""

WORKSPACE = ("lse2", "delta", "dq_sum", "turns", "sink_terms")
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
    *(f"at_{region}" for region in (*SCRATCH, *WORKSPACE) if region not in TILES),
    "scratch",
    *OPTION_INTEGERS,
    *("row_tiles", "key_tiles", "phases", "needs_bias", "needs_sinks", "dsinks_head", "part_queries", "sum_stride"),
    *(f"{what}_{axis}" for what in ("dbias", "by") for axis in ("batch", "head", "row", "key")),
)
ARGUMENTS = np.dtype(
    [
        *((name, np.float64) for name in ("score_scale", "scale")),
        *((name, np.int64) for name in _INT64),
        *((name, np.float64) for name in OPTION_NUMBERS),
    ]
)
"""
``score_scale`` is what the products of queries and keys are multiplied by; ``q_tiles`` and ``kv_tiles`` count the tiles of a key/value head;
``key_columns`` and ``value_columns`` are the padded head dims, ``key_stride``, ``value_stride`` and
``score_stride`` the rows of packed matrices in bytes; ``row_tiles`` and ``key_tiles`` count the tiles of packed sequences
that are listed; ``needs_*`` is 1 for the gradients to compute; ``{operand}_{axis}`` are strides;
``at_{region}`` places in a thread's scratch memory, of ``scratch`` bytes, or in the workspace. ``by_{axis}`` is 1 for the axes
that the bias is not broadcast along; ``part_queries`` are the queries of a part of its gradient and ``sum_stride`` the bytes of a row of its sums.
"""

OPTIONAL = (*OPTION_OPERANDS, *(f"d{name}" for name in DIFFERENTIABLE_OPTIONS))
ADDRESSES = np.dtype([(operand, np.int64) for operand in (*BACKWARD_OPERANDS, *OPTIONAL)])
"""0 for what there is none of; the seed of dropout is itself."""


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
    tiles = problem.kv_heads * head_tiles(problem, config.q_tile) * (1 if problem.packed else problem.batch)
    rows = tiles * config.q_tile
    sizes = {"lse2": rows * itemsize, "delta": rows * itemsize, "dq_sum": 0, "turns": 0, "sink_terms": rows * itemsize if problem.sinks else 0}
    if needs_q:
        sizes["dq_sum"] = rows * padded(problem.head_dim, config.kernel) * itemsize
        sizes["turns"] = tiles * 8
    return {region: round_up(size, CACHE_LINE) for region, size in sizes.items()}


def head_tiles(problem, q_tile: int) -> int:
    """Tiles of rows of a key/value head, in a batch entry or, where sequences are packed, in all of them at most."""
    return packed_tiles(problem, q_tile) if problem.packed else -(-problem.seqlen_q * problem.group // q_tile)


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
        **tile_sizes(kernel, config.kv_block, q_tile, with_slopes=True),
        "part_lse": q_tile * itemsize if args["needs_bias"] else 0,
        "part_delta": q_tile * itemsize if args["needs_bias"] else 0,
        "slots": q_tile * 4 if args["needs_bias"] else 0,
        "bias_sums": config.kv_tile * int(args["sum_stride"]) if args["needs_bias"] else 0,
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
    args["score_scale"] = score_scale(problem, kernel)
    set_option_arguments(args, problem, layouts, kernel)
    args["q_tile"], args["kv_block"], args["kv_tile"] = config.q_tile, config.kv_block, config.kv_tile
    if problem.packed:
        args["seqlen_q"], args["seqlen_k"] = problem.total_q, problem.total_k
    args["q_tiles"] = head_tiles(problem, config.q_tile)
    args["kv_tiles"] = -(-problem.seqlen_k // config.kv_tile)
    for name, columns in (("key", problem.head_dim), ("value", problem.head_dim_v)):
        args[f"{name}_columns"] = padded(columns, kernel)
        args[f"{name}_stride"] = odd_lines(padded(columns, kernel) * itemsize)
    args["score_stride"] = odd_lines(config.q_tile * itemsize)
    for operand in (*_TENSORS, *_ROWS):
        layout = getattr(layouts, operand)
        if layout is not None:
            axes = ("batch", "head", "row") if operand in _ROWS else _AXES
            for axis, stride in zip(axes[problem.packed :], layout.strides, strict=True):
                args[f"{operand}_{axis}"] = stride
    for name in "qkv":
        args[f"needs_{name}"] = getattr(layouts, f"d{name}") is not None
    args["phases"] = 2
    if layouts.dbias is not None:
        args["phases"], args["needs_bias"] = 3, 1
        for axis, stride, n in zip(("batch", "head", "row", "key"), layouts.dbias.strides, problem.bias, strict=True):
            args[f"dbias_{axis}"], args[f"by_{axis}"] = stride, n != 1
        args["part_queries"] = max(1, config.q_tile // problem.group)
        args["sum_stride"] = odd_lines(max(config.q_tile, problem.group) * itemsize)
    if layouts.dsinks is not None:
        args["phases"], args["needs_sinks"] = 3, 1
        args["dsinks_head"] = layouts.dsinks.strides[0]
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


arguments_at, addresses_at = record_at(ARGUMENTS), record_at(ADDRESSES)


@jit
def keys_of_tile(args, entry, q_tile):
    """Keys in the band of some row of a tile of queries: (first, one past the last), equal when there are none."""
    length_q, length_k, offset, queries = entry[:4]
    rows = queries * args.group
    query = q_tile * args.q_tile // args.group
    last_query = min(length_q - 1, (min(rows, (q_tile + 1) * args.q_tile) - 1) // args.group)
    query = max(query, -offset - args.right)  # those before it end before the first key, those after the last begin
    last_query = min(last_query, length_k - 1 - offset + args.left)  # past the last key
    if query > last_query:
        return 0, 0
    first = max(0, query + offset - args.left)
    return first, max(first, min(length_k, last_query + offset + args.right + 1))
