"""Tiles of the simt kernels: a frozen description, and pure functions that choose one."""

from __future__ import annotations

from dataclasses import dataclass

from numbaflash.dispatch import Device, Layout, Layouts
from numbaflash.problem import ITEMSIZE, Problem

from .options import Options, score_unit

SHARED_LIMITS = {(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
"""Shared memory (KiB) that a block may ask for, by compute capability; 99 elsewhere (8.6, 8.9, 12.x)."""

UNITS = 2
"""16-byte units that a turn of the inner loops takes: enough to make up for counting and branching, few enough for the
instruction cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a block of threads divides a tile of scores among its lanes.

    The lanes of a warp form a grid of ``lanes_m`` rows; a lane holds ``rows`` x ``columns`` scores, and ``rows`` rows of
    the output.
    """

    warps: int
    lanes_m: int
    rows: int
    columns: int
    min_blocks: int = 1

    @property
    def q_tile(self) -> int:
        """Queries of a block."""
        return self.warps * self.lanes_m * self.rows


class Elements:
    """What follows from the dtype and the threads of a config."""

    __slots__ = ()

    @property
    def compute(self) -> str:
        """dtype of everything in shared memory and registers."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def unit(self) -> float:
        """What natural scores are multiplied by to be the kernel's."""
        return score_unit(self.compute, self.options)

    @property
    def guarded(self) -> bool:
        """Tiles hold what no query may see, and it may be NaN or infinity."""
        return self.bounded_left or self.bounded_right or self.options.hides

    @property
    def vector(self) -> int:
        """Elements of a 16-byte unit of shared memory."""
        return 16 // ITEMSIZE[self.compute]

    @property
    def step(self) -> int:
        """Elements of a row that a turn of the inner loops takes."""
        return UNITS * self.vector

    @property
    def threads(self) -> int:
        return self.warps * self.warp_size

    @property
    def lanes_n(self) -> int:
        return self.warp_size // self.lanes_m


@dataclass(frozen=True, slots=True)
class Config(Elements):
    """Everything that is built into one kernel.

    Attributes
    ----------
    dtype : str
        Elements of q, k, v and out.
    dim, dim_v : int
        Head dims as shared memory and registers hold them, zeros beyond the arrays' own.
    depth : int
        Head dim of q and k in whole turns of the inner loop: what is multiplied.
    warps, warp_size, lanes_m, rows, columns, min_blocks : int
        As in `Tile`. ``warp_size`` is 32, or less in the simulator, where every thread is dear.
    vectors : bool
        Rows of k and v are read in units of `vector` elements; otherwise element by element, whatever the strides.
    asynchronous : bool
        k and v are copied by cp.async (compute capability 8.0).
    bounded_left, bounded_right : bool
        Whether the band has that bound.
    write_lse : bool
    options : Options
        What there is beside q, k, v and the band.
    """

    dtype: str
    dim: int
    dim_v: int
    depth: int
    warps: int
    warp_size: int
    lanes_m: int
    rows: int
    columns: int
    min_blocks: int
    vectors: bool
    asynchronous: bool
    bounded_left: bool
    bounded_right: bool
    write_lse: bool
    options: Options = Options()

    @property
    def q_tile(self) -> int:
        """Queries of a block."""
        return self.warps * self.lanes_m * self.rows

    @property
    def kv_tile(self) -> int:
        """Keys of a step."""
        return self.lanes_n * self.columns

    # Swizzle of shared memory: 16-byte unit c of a row lies at c ^ key, so that rows which lanes touch together lie in
    # different banks. The key of a row of q or k is row & mask, of a row of p (lane_m * step) & mask.

    @property
    def q_mask(self) -> int:
        """Rows of q that lanes read together are lanes_m neighbours."""
        return self.lanes_m - 1

    @property
    def k_mask(self) -> int:
        """Rows of k that lanes read together are lanes_n neighbours; eight units fill the banks."""
        return min(8, self.lanes_n) - 1

    @property
    def p_step(self) -> int:
        """Lanes write lanes_n neighbours of a row of p, those of the next row the units behind."""
        return max(1, self.lanes_n // self.vector)

    @property
    def p_mask(self) -> int:
        return self.kv_tile // self.vector - 1

    @property
    def shared_elements(self) -> int:
        return shared_elements(self, self.dim, self.dim_v, self.warp_size)

    @property
    def shared_bytes(self) -> int:
        return self.shared_elements * ITEMSIZE[self.compute]


def shared_elements(tile, dim, dim_v, warp_size):
    """Tiles of q, k, v and the probabilities."""
    kv_tile = warp_size // tile.lanes_m * tile.columns
    return tile.q_tile * dim + kv_tile * (dim + dim_v + tile.q_tile)


# (largest head_dim_v, tile), the preferred one first.
#
# The inner loops are bound by the FFMA pipe and, next to it, by reads of shared memory: a lane's share of rows x columns
# needs (rows + columns) 16-byte reads for 4 * rows * columns FFMAs, each read two cycles of the unit that four schedulers
# share. 8 x 8 keeps that unit half busy, 8 x 4 three quarters. The rest is registers (scores + output + 40 below 255) and
# shared memory (two blocks a multiprocessor: 113 KiB each on compute capability 9.0).
_FLOAT32_TILES = (
    (64, Tile(warps=4, lanes_m=4, rows=8, columns=8, min_blocks=2)),  # 128 x 64; 64 + 64 accumulators; 96 KiB at D = 64
    (128, Tile(warps=4, lanes_m=4, rows=8, columns=4, min_blocks=2)),  # 128 x 32; 32 + 128 accumulators; 112 KiB at D = 128
    (256, Tile(warps=8, lanes_m=4, rows=4, columns=4)),  # 128 x 32; 16 + 128 accumulators; 208 KiB at D = 256
    (64, Tile(warps=4, lanes_m=2, rows=8, columns=4, min_blocks=2)),  # 64 x 64; 32 + 32 accumulators
    (256, Tile(warps=4, lanes_m=4, rows=4, columns=4)),  # 64 x 32; 136 KiB at D = 256, 72 KiB at D = 128
    (64, Tile(warps=4, lanes_m=2, rows=4, columns=4)),  # 32 x 64
    (128, Tile(warps=4, lanes_m=2, rows=4, columns=2)),  # 32 x 32; 52 KiB at D = 128
    (256, Tile(warps=4, lanes_m=2, rows=4, columns=1)),  # 32 x 16; 66 KiB at D = 256
    (256, Tile(warps=4, lanes_m=2, rows=2, columns=1)),  # 16 x 16; 49 KiB at D = 256
)
# A double takes two registers and half of a 16-byte read.
_FLOAT64_TILES = (
    (64, Tile(warps=4, lanes_m=4, rows=4, columns=4)),  # 64 x 32; 16 + 32 accumulators
    (128, Tile(warps=4, lanes_m=2, rows=4, columns=4)),  # 32 x 64; 16 + 32 accumulators
    (256, Tile(warps=4, lanes_m=2, rows=4, columns=2)),  # 32 x 32; 8 + 64 accumulators
    (256, Tile(warps=4, lanes_m=2, rows=2, columns=1)),  # 16 x 16
    (256, Tile(warps=2, lanes_m=4, rows=1, columns=1)),  # 8 x 8; 49 KiB at D = 256
)
_SMALLEST_GOOD = 32  # queries of a tile; smaller ones are only for want of shared memory
# A thread of the simulator is a thread of Python: few of them, and warps small enough to have more than one.
SIMULATOR_TILE = Tile(warps=2, lanes_m=2, rows=2, columns=2)
SIMULATOR_WARP = 8


def round_up(n, unit):
    return -(-n // unit) * unit


def padded_dims(tile: Tile, compute: str, head_dim: int, head_dim_v: int, warp_size: int = 32) -> tuple[int, int]:
    """Head dims in shared memory: 8 units of 16 bytes for the swizzle, and one unit for each thread of a row that is copied, and for each lane of a
    row of the output."""
    vector, lanes_n = 16 // ITEMSIZE[compute], warp_size // tile.lanes_m
    units = max(8, tile.warps * warp_size // (lanes_n * tile.columns))
    return round_up(head_dim, units * vector), round_up(head_dim_v, max(units, lanes_n) * vector)


def fitting_tiles(compute: str, head_dim: int, head_dim_v: int, shared_limit: int) -> tuple[Tile, ...]:
    """The tiles of the tables whose registers (by head_dim_v) and shared memory (bytes) suffice, the preferred one first."""
    fitting = []
    for largest, tile in _FLOAT64_TILES if compute == "float64" else _FLOAT32_TILES:
        dims = padded_dims(tile, compute, head_dim, head_dim_v)
        if dims[1] <= largest and shared_elements(tile, *dims, 32) * ITEMSIZE[compute] <= shared_limit:
            fitting.append(tile)
    if not fitting:
        raise ValueError(f"no tile for {compute}, head dims {head_dim} and {head_dim_v} within {shared_limit} bytes of shared memory")
    return tuple(tile for tile in fitting if tile.q_tile >= _SMALLEST_GOOD) or tuple(fitting)


def choose_tile(problem: Problem, device: Device) -> Tile:
    """The first fitting tile that is not mostly empty and gives every multiprocessor a block; else the one with most blocks."""
    compute = "float64" if problem.dtype == "float64" else "float32"
    tiles = fitting_tiles(compute, problem.head_dim, problem.head_dim_v, shared_limit(device))
    tiles = tuple(tile for tile in tiles if tile.q_tile < 2 * problem.seqlen_q) or tiles[-1:]

    def blocks(tile):
        return problem.batch * problem.heads * -(-problem.seqlen_q // tile.q_tile)

    return next((tile for tile in tiles if blocks(tile) >= device.sm_count), max(tiles, key=blocks))


def shared_limit(device: Device) -> int:
    """Bytes of shared memory that a block may have on the device."""
    return SHARED_LIMITS.get(device.capability, 99) * 1024


def rows_in_vectors(layout: Layout, itemsize: int, vector: int) -> bool:
    """Whether every row of an operand is contiguous, aligned to ``vector`` elements and a whole number of them."""
    unit = vector * itemsize
    return (
        layout.strides[-1] == itemsize
        and layout.shape[-1] % vector == 0
        and layout.alignment % min(unit, 16) == 0
        and all(stride % unit == 0 for n, stride in zip(layout.shape[:-1], layout.strides[:-1], strict=True) if n > 1)
    )


def choose_config(problem: Problem, layouts: Layouts, device: Device, simulated: bool = False) -> Config:
    """The kernel of a problem; a pure function of its arguments."""
    if simulated:
        return config_of_tile(SIMULATOR_TILE, problem, layouts, device, SIMULATOR_WARP)
    return config_of_tile(choose_tile(problem, device), problem, layouts, device)


def config_of_tile(tile: Tile, problem: Problem, layouts: Layouts, device: Device, warp_size: int = 32) -> Config:
    """The kernel of a problem with a given tile; warps of less than 32 are the simulator's."""
    compute = "float64" if problem.dtype == "float64" else "float32"
    dim, dim_v = padded_dims(tile, compute, problem.head_dim, problem.head_dim_v, warp_size)
    itemsize, vector = ITEMSIZE[problem.dtype], 16 // ITEMSIZE[compute]
    return Config(
        dtype=problem.dtype,
        dim=dim,
        dim_v=dim_v,
        depth=round_up(problem.head_dim, UNITS * vector),
        warps=tile.warps,
        warp_size=warp_size,
        lanes_m=tile.lanes_m,
        rows=tile.rows,
        columns=tile.columns,
        min_blocks=tile.min_blocks,
        vectors=all(rows_in_vectors(layout, itemsize, vector) for layout in (layouts.k, layouts.v)),
        asynchronous=warp_size == 32 and itemsize == ITEMSIZE[compute] and device.capability >= (8, 0),
        bounded_left=problem.left is not None,
        bounded_right=problem.right is not None,
        write_lse=layouts.lse is not None,
        options=Options.of(problem),
    )
