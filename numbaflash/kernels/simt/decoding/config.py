"""What is compiled into the kernels that decode, and into how many parts keys are split: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

from numbaflash.dispatch import Device, Layout, Layouts
from numbaflash.problem import ITEMSIZE, Problem

from .. import config as forward
from ..config import Config, Tile
from ..options import Options, score_unit

_SHAPES = ((4, 4), (4, 2), (2, 2), (1, 2), (1, 1), (4, 1), (2, 1))
"""(warps, rows of a lane) of tiles of 4 rows of lanes. Fewer warps with more rows each read shared memory less often."""

_COLUMNS = (4, 2, 1)
_ACCUMULATORS = 128
"""Registers of a lane for its share of the output."""

_GOOD_WARPS = 8
"""Warps that a multiprocessor should hold, so that loads of some are under way while others compute. So many have 255 registers a thread."""

_LONGEST_PART = 4096
"""Keys. One block alone needs long for more, and the host does not know which sequences have them."""

_SHORTEST_PART = 128
"""Keys: fewer are not worth a partial result."""

_MOST_PARTS = 128
_GOOD_FILL = 0.85


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Everything that is built into a kernel that merges parts.

    Attributes
    ----------
    dtype : str
        Elements of the output.
    threads : int
    sinks, write_lse : bool
    """

    dtype: str
    threads: int
    sinks: bool
    write_lse: bool

    @property
    def compute(self) -> str:
        """dtype of the parts."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def unit(self) -> float:
        """Of m, as `config.Elements.unit`."""
        return score_unit(self.compute, Options())


@dataclass(frozen=True, slots=True)
class Workspace:
    """What parts leave, as arrays one after the other, row-major: sums (parts * batch, rows, heads, columns) and statistics (parts * batch, heads,
    2 * rows); where these begin, and the bytes of all."""

    sums: tuple[int, int, int, int]
    statistics: tuple[int, int, int]
    begin: int
    total: int

    @classmethod
    def of(cls, problem: Problem, config: Config, parts: int) -> Workspace:
        """Of a problem as the kernels see it."""
        entries, itemsize = parts * problem.batch, ITEMSIZE[config.compute]
        sums = entries, problem.seqlen_q, problem.heads, config.dim_v
        begin = forward.round_up(entries * problem.seqlen_q * problem.heads * config.dim_v * itemsize, 256)
        statistics = entries, problem.heads, 2 * problem.seqlen_q
        return cls(sums, statistics, begin, begin + entries * problem.heads * 2 * problem.seqlen_q * itemsize)


def stacked(problem: Problem, layouts: Layouts) -> tuple[Problem, Layouts]:
    """The problem as the kernels see it: the heads of a group, which share keys and values, as so many rows of one head, where they have one query
    each. (More queries fill tiles without that.) Operands stay where they are."""
    if not is_stacked(problem):
        return problem, layouts
    group, kv_heads = problem.group, problem.kv_heads

    def rows_of(layout: Layout, axis: int, row_axis: int | None) -> Layout:
        """Heads along an axis, as key/value heads there and rows along another one, which has a single query, or is new at the end."""
        shape, strides = list(layout.shape), list(layout.strides)
        step = strides[axis]
        shape[axis], strides[axis] = kv_heads, step * group
        if row_axis is None:
            return replace(layout, shape=(*shape, group), strides=(*strides, step))
        shape[row_axis], strides[row_axis] = group, step
        return replace(layout, shape=tuple(shape), strides=tuple(strides))

    found = {name: rows_of(getattr(layouts, name), 2, 1) for name in ("q", "out")}
    for name, axis, row_axis in (("lse", 1, 2), ("alibi_slopes", 1, None), ("sinks", 0, None)):
        if getattr(layouts, name) is not None:
            found[name] = rows_of(getattr(layouts, name), axis, row_axis)
    return replace(problem, seqlen_q=group, heads=kv_heads), replace(layouts, **found)


def is_stacked(problem: Problem) -> bool:
    """Whether `stacked` changes the problem."""
    return problem.seqlen_q == 1 and problem.group > 1


def rows_of_head(problem: Problem) -> int:
    """Rows of a head as the kernels see it."""
    return problem.group if is_stacked(problem) else problem.seqlen_q


def resident_blocks(shared_bytes: int, warps: int, limit: int) -> int:
    """Blocks that a multiprocessor holds at once, of as many registers as a thread can have."""
    return max(1, min((limit + 1024) // (shared_bytes + 1024), _GOOD_WARPS // warps))


def choose_tile(problem: Problem, limit: int) -> Tile | None:
    """The tile of a problem, by the shared memory (bytes) that a block may have; None where there is none.

    As many rows as there are, or the next more; then the most keys with which a multiprocessor still holds enough warps.
    """
    compute = "float64" if problem.dtype == "float64" else "float32"
    fitting = []
    for (warps, rows), columns in ((shape, n) for shape in _SHAPES for n in _COLUMNS):
        tile = Tile(warps=warps, lanes_m=4, rows=rows, columns=columns)
        dims = forward.padded_dims(tile, compute, problem.head_dim, problem.head_dim_v)
        shared_bytes = forward.shared_elements(tile, *dims, 32) * ITEMSIZE[compute]
        registers = rows * dims[1] // 8 * ITEMSIZE[compute] // 4
        whole = 8 * columns % (forward.UNITS * 16 // ITEMSIZE[compute]) == 0  # turns of the inner loops
        if shared_bytes <= limit and registers <= _ACCUMULATORS and whole:
            fitting.append((tile, resident_blocks(shared_bytes, warps, limit) * warps))
    if not fitting:
        return None
    wanted = rows_of_head(problem)
    sizes = {tile.q_tile for tile, _ in fitting}
    size = min((n for n in sizes if n >= wanted), default=max(sizes))
    fitting = [each for each in fitting if each[0].q_tile == size]
    return next((tile for tile, warps in fitting if warps >= _GOOD_WARPS), max(fitting, key=lambda each: each[1])[0])


def choose_config(problem: Problem, layouts: Layouts, device: Device, split: bool) -> Config:
    """The kernel of a problem and layouts, both as the caller has them."""
    simulated = device.kind == "cpu"
    tile = forward.SIMULATOR_TILE if simulated else choose_tile(problem, forward.shared_limit(device))
    if tile is None:
        raise ValueError(f"no tile for {problem.dtype}, head dims {problem.head_dim} and {problem.head_dim_v} on {device.name}")
    seen, layouts = stacked(problem, layouts)
    config = forward.config_of_tile(tile, seen, layouts, device, forward.SIMULATOR_WARP if simulated else 32)
    options = replace(config.options, stacked=is_stacked(problem), split=split, sinks=config.options.sinks and not split)
    return replace(config, options=options, write_lse=config.write_lse and not split)


def number_of_parts(problem: Problem, config: Config, device: Device, num_splits: int | None) -> int:
    """Into how many parts the keys of each sequence are split: as many as asked for, of those that may have keys, else by the capacity.

    Then each multiprocessor has enough blocks, the last ones as well as the first, and no part is very long or very short.
    """
    capacity = problem.seqlen_k
    if num_splits is not None:
        return max(1, min(num_splits, -(-capacity // config.kv_tile)))
    heads = problem.kv_heads if is_stacked(problem) else problem.heads
    tiles = problem.batch * heads * -(-rows_of_head(problem) // config.q_tile)
    slots = device.sm_count * resident_blocks(config.shared_bytes, config.warps, forward.shared_limit(device))
    most = max(1, min(_MOST_PARTS, capacity // _SHORTEST_PART))
    least = min(most, -(-capacity // _LONGEST_PART) or 1)
    if tiles * least >= _GOOD_FILL * slots:
        return least

    def fill(n):
        return tiles * n / slots / -(-tiles * n // slots)

    choices = range(least, most + 1)
    best = max(map(fill, choices))
    return next(n for n in choices if fill(n) >= _GOOD_FILL * best)
