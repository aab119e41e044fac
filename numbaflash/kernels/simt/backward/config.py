"""Tiles of the simt backward: a frozen description, and pure functions that choose one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from numbaflash.dispatch import BackwardLayouts, Device
from numbaflash.problem import ITEMSIZE, Problem

from ..config import UNITS, Elements, round_up, rows_in_vectors, shared_limit
from ..options import Options


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block holds: ``kv_tile`` keys for good, ``q_tile`` queries at a time; p and ds in ``buffers`` places, two or one."""

    warps: int
    q_tile: int
    kv_tile: int
    buffers: int = 2
    min_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """How the threads of a block divide a product among them: a grid of warps, a grid of lanes in each, ``rows`` x ``columns``
    results a lane. Warps beyond the grid do the same as those within it once more."""

    warps_m: int
    warps_n: int
    lanes_m: int
    lanes_n: int
    rows: int
    columns: int


def choose_share(warps: int, lanes_m: int, lanes_n: int, m: int, n: int, unit: int) -> Share:
    """The division of m x n results, columns in whole units, that reads least of shared memory for each multiplication."""
    while warps:
        shares = []
        for warps_m in (2**i for i in range(warps.bit_length())):
            warps_n = warps // warps_m
            if m % (warps_m * lanes_m) == 0 and n % (warps_n * lanes_n * unit) == 0:
                shares.append(Share(warps_m, warps_n, lanes_m, lanes_n, m // (warps_m * lanes_m), n // (warps_n * lanes_n)))
        if shares:
            return min(shares, key=lambda share: (share.rows + share.columns, share.rows))  # fewer rows take fewer registers
        warps //= 2
    raise ValueError(f"{m} x {n} results are no multiple of {lanes_m} x {lanes_n} lanes of {unit} columns")


@dataclass(frozen=True, slots=True)
class Config(Elements):
    """Everything that is built into the kernels of a problem.

    Attributes
    ----------
    dtype : str
        Elements of the operands and gradients.
    dim, dim_v : int
        Head dims as shared memory and registers hold them, zeros beyond the arrays' own.
    depth, depth_v : int
        Head dims in whole turns of the inner loops: what the scores are summed over.
    warps, warp_size, lanes_m, q_tile, kv_tile, buffers, min_blocks : int
        As in `Tile`; the lanes of a warp form a grid of ``lanes_m`` rows. ``warp_size`` is 32, or less in the simulator.
    vectors : bool
        Rows of q, v and dout are read in units of `vector` elements; otherwise element by element, whatever the strides.
    result_vectors : bool
        The same for writing the gradients.
    asynchronous : bool
        Tiles are copied by cp.async (compute capability 8.0).
    bounded_left, bounded_right : bool
        Whether the band has that bound.
    with_dlse : bool
    with_dq, with_dk, with_dv : bool
        Which gradients are computed.
    ordered : bool
        Blocks add to dq in the order of their keys.
    with_dbias, with_dsinks : bool
    dbias_axes : tuple of bool
        Whether the gradient of the bias has an axis of queries, and one of keys, along which it is not summed.
    options : Options
        What there is beside q, k, v and the band.
    """

    dtype: str
    dim: int
    dim_v: int
    depth: int
    depth_v: int
    warps: int
    warp_size: int
    lanes_m: int
    q_tile: int
    kv_tile: int
    buffers: int
    min_blocks: int
    vectors: bool
    result_vectors: bool
    asynchronous: bool
    bounded_left: bool
    bounded_right: bool
    with_dlse: bool
    with_dq: bool
    with_dk: bool
    with_dv: bool
    ordered: bool
    with_dbias: bool = False
    with_dsinks: bool = False
    dbias_axes: tuple[bool, bool] = (True, True)
    options: Options = Options()

    @property
    def with_ds(self) -> bool:
        """Whether the gradient of the scores is needed for the products."""
        return self.with_dq or self.with_dk

    @property
    def with_delta(self) -> bool:
        return self.with_ds or self.with_dbias or self.with_dsinks

    @property
    def with_products(self) -> bool:
        return self.with_ds or self.with_dv

    @property
    def walks_down(self) -> bool:
        """Whether a block begins at the last queries that see its keys; not with options, where that has not run on a GPU yet."""
        return self.ordered and (self.bounded_left or self.bounded_right) and not self.options

    @property
    def scores(self) -> Share:
        """Of q k^T and dout v^T: queries x keys. A lane's rows, and its columns, are as far apart as the lanes are many."""
        return choose_share(self.warps, self.lanes_m, self.lanes_n, self.q_tile, self.kv_tile, 1)

    @property
    def dq(self) -> Share:
        """Of ds k: queries x head dim. A lane's rows lie as those of the scores, its columns in units of 16 bytes."""
        return choose_share(self.warps, self.lanes_m, self.lanes_n, self.q_tile, self.dim, self.vector)

    @property
    def dk(self) -> Share:
        """Of ds^T q: keys x head dim. A lane's rows, too, lie in units of 16 bytes, as far as it has so many."""
        return choose_share(self.warps, self.lanes_m, self.lanes_n, self.kv_tile, self.dim, self.vector)

    @property
    def dv(self) -> Share:
        """Of p^T dout: keys x head dim of v, as `dk`."""
        return choose_share(self.warps, self.lanes_m, self.lanes_n, self.kv_tile, self.dim_v, self.vector)

    # Swizzle of shared memory: unit c of a row lies at c ^ (row & mask).

    @property
    def q_mask(self) -> int:
        """Of q, dout, p and ds: rows that lanes touch together are lanes_m neighbours."""
        return self.lanes_m - 1

    @property
    def k_mask(self) -> int:
        """Of k and v: rows that lanes read together are lanes_n neighbours; eight units fill the banks."""
        return min(8, self.lanes_n) - 1

    @property
    def sums(self) -> int:
        """Elements of dq that a thread adds to the workspace for a tile of queries."""
        return self.dq.rows * self.dq.columns

    @property
    def shared_elements(self) -> int:
        return _shared_elements(self, self.dim, self.dim_v)

    @property
    def shared_bytes(self) -> int:
        return self.shared_elements * ITEMSIZE[self.compute]

    @property
    def of_rows(self) -> Config:
        """What the kernels before and after the products depend on."""
        names = ("vectors", "asynchronous", "bounded_left", "bounded_right", "with_dk", "with_dv", "with_dbias", "with_dsinks")
        kept = {"dbias_axes": (True, True), "options": self.options.of_packing}
        return replace(self, depth=0, depth_v=0, min_blocks=1, **kept, **dict.fromkeys(names, False))

    @property
    def of_sinks(self) -> Config:
        """What the kernel of the sinks' gradients depends on."""
        return replace(self.of_rows, result_vectors=False, with_dlse=False, with_dq=False, ordered=False, options=self.options.of_rows)

    @property
    def of_products(self) -> Config:
        """What the kernel of the products depends on."""
        return replace(self, with_dbias=False, with_dsinks=False, dbias_axes=(True, True), options=self.options.of_products)

    @property
    def of_bias(self) -> Config:
        """What the kernel of the bias's gradient depends on."""
        plain = dict.fromkeys(("result_vectors", "with_dlse", "with_dq", "with_dk", "with_dv", "with_dsinks", "ordered"), False)
        return replace(self, min_blocks=1, options=self.options.of_products, **plain)


def _shared_elements(tile, dim, dim_v):
    """Of tiles of k and v, q and dout, p and ds."""
    return (tile.kv_tile + tile.q_tile) * (dim + dim_v) + tile.buffers * tile.q_tile * tile.kv_tile


# (largest head dim, tile), the preferred one first.
#
# Accumulators of dk and dv take kv_tile * (D + Dv) registers of the block, and stay; scores, their gradients, or a tile of dq come
# and go beside them. What a lane does of a product is bound by reads of shared memory as in the forward (see `simt.config`), so one
# block of large tiles a multiprocessor comes first, then two of smaller ones.
_FLOAT32_TILES = (
    (64, Tile(warps=8, q_tile=128, kv_tile=128, buffers=1)),  # 64 accumulators, scores 8 x 8, 8 x 4 the others; 192 KiB at D = 64
    (128, Tile(warps=8, q_tile=64, kv_tile=128, buffers=1)),  # 128 accumulators, 8 x 8, 8 x 4 the others; 224 KiB at D = 128
    (64, Tile(warps=4, q_tile=64, kv_tile=64, min_blocks=2)),  # 64 accumulators, 8 x 4 a product; 96 KiB at D = 64
    (128, Tile(warps=4, q_tile=32, kv_tile=64, min_blocks=2)),  # 128 accumulators, 8 x 8, scores 4 x 4; 112 KiB at D = 128
    (256, Tile(warps=8, q_tile=32, kv_tile=64)),  # 128 accumulators; 208 KiB at D = 256
    (64, Tile(warps=4, q_tile=64, kv_tile=32, min_blocks=2)),  # 64 KiB
    (64, Tile(warps=4, q_tile=32, kv_tile=32, min_blocks=2)),  # 40 KiB
    (128, Tile(warps=4, q_tile=32, kv_tile=32)),  # 72 KiB at D = 128
    (256, Tile(warps=8, q_tile=32, kv_tile=32)),  # 136 KiB at D = 256
    (128, Tile(warps=4, q_tile=16, kv_tile=32)),  # 52 KiB at D = 128
    (256, Tile(warps=4, q_tile=16, kv_tile=16)),  # 66 KiB at D = 256
    (256, Tile(warps=4, q_tile=8, kv_tile=16)),  # 49 KiB at D = 256
)
_FLOAT64_TILES = (
    (64, Tile(warps=4, q_tile=32, kv_tile=32, min_blocks=2)),  # 32 accumulators; 80 KiB at D = 64
    (128, Tile(warps=4, q_tile=16, kv_tile=32)),  # 64 accumulators; 104 KiB at D = 128
    (256, Tile(warps=8, q_tile=16, kv_tile=16)),  # 32 accumulators; 132 KiB at D = 256
    (64, Tile(warps=4, q_tile=32, kv_tile=16)),  # 56 KiB at D = 64
    (256, Tile(warps=4, q_tile=8, kv_tile=16)),  # 98 KiB at D = 256
    (256, Tile(warps=4, q_tile=4, kv_tile=8)),  # 48.5 KiB at D = 256
)
_SMALLEST_GOOD = 32  # keys of a tile; smaller ones are only for want of shared memory
_MOST_SCORES = 32  # of a lane with options, which has p and ds at once: 64 would spill 80 to 700 bytes (and 32 with mask and dropout 160)

_SIMULATOR_TILE = Tile(warps=2, q_tile=8, kv_tile=8, buffers=1)
_SIMULATOR_WARP = 8


def padded_dims(tile: Tile, compute: str, head_dim: int, head_dim_v: int, warp_size: int = 32) -> tuple[int, int]:
    """Head dims in shared memory: 8 units of 16 bytes for the swizzle and the lanes, more where more threads copy a row."""
    vector = 16 // ITEMSIZE[compute]
    unit = max(8, tile.warps * warp_size // min(tile.q_tile, tile.kv_tile)) * vector
    return round_up(head_dim, unit), round_up(head_dim_v, unit)


def fitting_tiles(compute: str, head_dim: int, head_dim_v: int, limit: int) -> tuple[Tile, ...]:
    """The tiles of the tables whose registers (by the head dims) and shared memory (bytes) suffice, the preferred one first."""
    fitting = []
    for largest, tile in _FLOAT64_TILES if compute == "float64" else _FLOAT32_TILES:
        dims = padded_dims(tile, compute, head_dim, head_dim_v)
        if max(dims) <= largest and _shared_elements(tile, *dims) * ITEMSIZE[compute] <= limit:
            fitting.append(tile)
    if not fitting:
        raise ValueError(f"no tile for {compute}, head dims {head_dim} and {head_dim_v} within {limit} bytes of shared memory")
    return tuple(tile for tile in fitting if tile.kv_tile >= _SMALLEST_GOOD) or tuple(fitting)


def useful_tiles(problem: Problem, device: Device) -> tuple[Tile, ...]:
    """The fitting tiles that are not mostly empty and do not spill with the problem's options, or the smallest one."""
    compute = "float64" if problem.dtype == "float64" else "float32"
    tiles = fitting_tiles(compute, problem.head_dim, problem.head_dim_v, shared_limit(device))
    if Options.of(problem).of_products:
        options = Options.of(problem)
        crowded = options.mask and options.dropout and max(problem.head_dim, problem.head_dim_v) > 64
        most = _MOST_SCORES // 2 if crowded else _MOST_SCORES
        tiles = tuple(tile for tile in tiles if tile.q_tile * tile.kv_tile <= most * 32 * tile.warps)
    return tuple(tile for tile in tiles if tile.kv_tile < 2 * problem.seqlen_k) or tiles[-1:]


def choose_tile(problem: Problem, device: Device) -> Tile:
    """The first useful tile that gives every multiprocessor a block; else the one with most blocks."""
    tiles = useful_tiles(problem, device)

    def blocks(tile):
        return problem.batch * problem.kv_heads * -(-problem.seqlen_k // tile.kv_tile)

    return next((tile for tile in tiles if blocks(tile) >= device.sm_count), max(tiles, key=blocks))


def choose_config(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool) -> Config:
    """The kernels of a problem; a pure function of its arguments."""
    if device.kind == "cpu":
        return config_of_tile(_SIMULATOR_TILE, problem, layouts, device, deterministic, _SIMULATOR_WARP)
    return config_of_tile(choose_tile(problem, device), problem, layouts, device, deterministic)


TUNED = ("warps", "q_tile", "kv_tile", "buffers", "min_blocks")
"""Fields in which `candidates` differ."""


def candidates(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool) -> tuple[Config, ...]:
    """What is worth measuring: `choose_config` first, then the other useful tiles of the tables."""
    default = choose_config(problem, layouts, device, deterministic)
    if device.kind == "cpu":
        return (default,)
    others = (config_of_tile(tile, problem, layouts, device, deterministic) for tile in useful_tiles(problem, device))
    return tuple(dict.fromkeys((default, *others)))


def config_of_tile(tile: Tile, problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool, warp_size: int = 32) -> Config:
    """The kernels of a problem with a given tile; warps of less than 32 are the simulator's."""
    compute = "float64" if problem.dtype == "float64" else "float32"
    dim, dim_v = padded_dims(tile, compute, problem.head_dim, problem.head_dim_v, warp_size)
    itemsize, vector = ITEMSIZE[problem.dtype], 16 // ITEMSIZE[compute]
    results = [layout for layout in (layouts.dq, layouts.dk, layouts.dv) if layout is not None]
    ordered = deterministic and layouts.dq is not None and (problem.total_k if problem.packed else problem.seqlen_k) > tile.kv_tile
    options = Options.of(problem)
    return Config(
        dtype=problem.dtype,
        dim=dim,
        dim_v=dim_v,
        depth=round_up(problem.head_dim, UNITS * vector),
        depth_v=round_up(problem.head_dim_v, UNITS * vector),
        warps=tile.warps,
        warp_size=warp_size,
        lanes_m=4 if warp_size == 32 else 2,
        q_tile=tile.q_tile,
        kv_tile=tile.kv_tile,
        buffers=tile.buffers,
        min_blocks=tile.min_blocks,
        vectors=all(rows_in_vectors(layout, itemsize, vector) for layout in (layouts.q, layouts.v, layouts.dout)),
        result_vectors=all(rows_in_vectors(layout, itemsize, vector) for layout in results),
        asynchronous=warp_size == 32 and itemsize == ITEMSIZE[compute] and device.capability >= (8, 0),
        bounded_left=problem.left is not None,
        bounded_right=problem.right is not None,
        with_dlse=layouts.dlse is not None,
        with_dq=layouts.dq is not None,
        with_dk=layouts.dk is not None,
        with_dv=layouts.dv is not None,
        ordered=ordered,
        with_dbias=layouts.dbias is not None,
        with_dsinks=layouts.dsinks is not None,
        dbias_axes=(True, True) if layouts.dbias is None else tuple(n > 1 for n in layouts.dbias.shape[2:]),
        options=replace(options, ranked=ordered and options.masked),
    )
