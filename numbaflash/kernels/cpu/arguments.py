"""What a launch tells the compiled code: sizes, tiles, strides and places in the workspace, in one record."""

from __future__ import annotations

import numpy as np

from .config import CpuConfig, round_up
from .convert import COMPUTE
from .packed import word_of
from .scores import OPTION_INTEGERS, OPTION_NUMBERS, TILES, record_at, score_scale, set_option_arguments, tile_sizes
from .vector import jit

CACHE_LINE = 64
UNBOUNDED = 2**40
"""A bound of the band that excludes nothing."""

REGIONS = ("queries", "keys", "values", "scores", "output", "m", "l", "alpha", "first", "last", "ranges", "addresses", "sums", *TILES)
"""Parts of a thread's workspace."""

_AXES = ("batch", "row", "head", "dim")
_INT64 = (
    *("batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v", "offset", "left", "right"),
    *("q_tile", "kv_tile", "splits", "q_blocks", "items", "key_columns", "value_columns"),
    *(f"{operand}_{axis}" for operand in ("q", "k", "v", "out") for axis in _AXES),
    *("lse_batch", "lse_head", "lse_row"),
    *(f"at_{region}" for region in REGIONS if region not in TILES),
    *("workspace", "partial"),
    *OPTION_INTEGERS,
)
ARGUMENTS = np.dtype([("score_scale", np.float64), *((name, np.int64) for name in _INT64), *((name, np.float64) for name in OPTION_NUMBERS)])
"""
``score_scale`` is what the products of queries and keys are multiplied by; ``q_blocks`` counts query tiles of a key/value head, ``items`` work items;
``key_columns`` and ``value_columns`` are the head dims of packed keys and values; ``{operand}_{axis}`` are strides,
``at_{region}`` places, ``workspace`` the size of a thread's workspace and ``partial`` that of the result of a part of the
keys, all in bytes.
"""


def arguments(problem, layouts, config: CpuConfig) -> np.ndarray:
    """The prepared arguments of a launch, an array of one record of `ARGUMENTS`."""
    kernel = config.kernel
    result = np.zeros(1, ARGUMENTS)
    args = result[0]
    for name in ("batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v", "offset"):
        args[name] = getattr(problem, name)
    args["left"] = UNBOUNDED if problem.left is None else problem.left
    args["right"] = UNBOUNDED if problem.right is None else problem.right
    args["score_scale"] = score_scale(problem, kernel)
    set_option_arguments(args, problem, layouts, kernel)
    args["q_tile"], args["kv_tile"], args["splits"] = config.q_tile, config.kv_tile, config.splits
    if problem.packed:
        args["seqlen_q"], args["seqlen_k"] = problem.total_q, problem.total_k
    args["q_blocks"] = -(-problem.seqlen_q * problem.group // config.q_tile)
    args["items"] = args["q_blocks"] * problem.batch * problem.kv_heads * config.splits
    key_columns = args["key_columns"] = round_up(problem.head_dim, kernel.key_padding)
    value_columns = args["value_columns"] = round_up(problem.head_dim_v, kernel.value_padding)
    for operand in ("q", "k", "v", "out"):
        for axis, stride in zip(_AXES[problem.packed :], getattr(layouts, operand).strides, strict=True):
            args[f"{operand}_{axis}"] = stride
    if layouts.lse is not None:
        for axis, stride in zip(("batch", "head", "row")[problem.packed :], layouts.lse.strides, strict=True):
            args[f"lse_{axis}"] = stride
    itemsize = COMPUTE[problem.dtype].bitwidth // 8
    sizes = {
        "queries": config.q_tile * int(key_columns) * itemsize,
        "keys": config.kv_tile * int(key_columns) * itemsize,
        "values": config.kv_tile * int(value_columns) * itemsize,
        "scores": config.kv_tile * kernel.panel * itemsize,
        "output": config.q_tile * int(value_columns) * itemsize,
        "m": config.q_tile * itemsize,
        "l": config.q_tile * itemsize,
        "alpha": kernel.lanes * kernel.vectors * itemsize,
        "first": config.q_tile * 4,
        "last": config.q_tile * 4,
        "ranges": config.q_tile // kernel.panel * 4 * 8,
        "addresses": kernel.panel * 8,
        "sums": kernel.lanes**2 * itemsize,
        **tile_sizes(kernel, config.kv_tile, config.q_tile),
    }
    end = 0
    for region in REGIONS:
        args[f"at_{region}"] = end
        end += round_up(sizes[region], CACHE_LINE)
    args["workspace"] = end
    args["partial"] = round_up(config.q_tile * (int(value_columns) + 2) * itemsize, CACHE_LINE)
    return result


arguments_at = record_at(ARGUMENTS)


def placing(kernel):
    """Build ``place_of(args, at, item)``: (batch entry, key/value head, first row, part of the keys) of a work item.

    The tiles of one row block follow each other, the last rows first where a right bound makes them the longest; those of packed sequences as
    they are listed.
    """
    packed = "packed" in kernel.options

    @jit
    def place_of(args, at, item):
        item, split = item // args.splits, item % args.splits
        item, kv_head = item // args.kv_heads, item % args.kv_heads
        if packed:
            return word_of(at.cu_seqlens_k, item, 2, 0), kv_head, word_of(at.cu_seqlens_k, item, 2, 1) * args.q_tile, split
        block, batch = item // args.batch, item % args.batch
        if args.right != UNBOUNDED:
            block = args.q_blocks - 1 - block
        return batch, kv_head, block * args.q_tile, split

    return place_of


@jit
def part_of_keys(args, first, last, split):
    """Keys of a part, of the keys from ``first`` until before ``last``; whole key tiles but for the last part."""
    if args.splits == 1:
        return first, last
    tiles = (max(last - first, 0) + args.kv_tile - 1) // args.kv_tile
    keys = (tiles + args.splits - 1) // args.splits * args.kv_tile
    return first + split * keys, min(last, first + (split + 1) * keys)


@jit
def row_address(args, operand, row_stride, head_stride, row):
    """Where a row of a key/value head lies: rows are its queries, and of each query the heads that share the head."""
    query = row // args.group
    return operand + query * row_stride + (row - query * args.group) * head_stride


@jit
def band(args, entry, row):
    """The keys in the band of a row of a batch entry: (first, one past the last), equal when there are none."""
    return query_band(args, entry, row // args.group)


@jit
def query_band(args, entry, query):
    """`band` of the rows of a query."""
    length_q, length_k, offset = entry[:3]
    if query >= length_q:
        return 0, 0
    first = max(0, query + offset - args.left)
    return first, max(first, min(length_k, query + offset + args.right + 1))
