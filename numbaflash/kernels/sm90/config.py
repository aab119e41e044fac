"""Tile sizes of the Hopper kernels: a frozen configuration, chosen by pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...dispatch import Device, Layouts
from ...problem import Problem
from ..packing import most_tiles
from .options import Options, kernel_keys

MAX_SHARED = 232448  # bytes of shared memory that a block may have on sm_90
ALIGNMENT = 1024  # of every tile: the 128-byte swizzle repeats every eight rows of 128 bytes
ELEMENTS = {"float16": "f16", "bfloat16": "bf16"}
REGISTERS = {2: (24, 240), 3: (32, 160), 4: (24, 112)}  # of producer and consumer threads, by number of consumers
TICKETS_BYTES, TICKETS_THREADS = 8, 256  # of the workspace, and of the kernel that prepares them
TILES_POSTED = 2  # places of tiles that a block's producer posts ahead: `tickets`
PLACE_BYTES = 32  # of a place of a tile in shared memory: `packed.post`
INSPECTORS = 3  # warps of the producer's warpgroup that issue no loads; see `unseen`
OPTION_REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}  # the same where there are options: more than loads may be the producer's warps' to do
CAP_TILES = {  # by head dim up to which, measured on an H200: 8 and 5% faster than the tiles without a cap
    64: {"q_tile": 256, "kv_block": 64, "stages": 4, "q_stages": 2, "hold": 0},
    128: {"q_tile": 192, "kv_block": 80, "hold": 0},
}
SPARE = 32  # registers of a consumer thread beside scores, packed P and the accumulator, that candidates leave
Q_TILES, BLOCKS, HOLDS = (128, 192, 256), (64, 80, 96, 112, 128, 144, 160, 176), (0, 8, 16)  # to measure
ROOMS = tuple(  # what shared memory may be used for, the preferred way first
    {"stages": stages, "q_stages": q_stages, "out_in_q": out_in_q, "out_parts": out_parts}
    for q_stages, out_in_q, out_parts in ((2, False, 1), (1, False, 1), (1, False, 2), (1, False, 3), (1, True, 1))
    for stages in (4, 3, 2)
)
MASK_REGISTERS = (56, 224)  # the same of two consumers where blocks come from lists, of which the producer reads ahead
ROOMY_PRODUCER = (40, 232)  # where the addresses of many panels would spill from 24 registers


def unmet(problem: Problem, device: Device) -> list[str]:
    """Reasons why no kernel of the family runs there, or for elements of this kind."""
    reasons = []
    if device.kind != "cuda" or device.capability != (9, 0):
        which = "a CPU" if device.kind == "cpu" else f"compute capability {device.capability[0]}.{device.capability[1]}"
        reasons.append(f"it needs a Hopper GPU (compute capability 9.0); this is {which}")
    if problem.dtype not in ELEMENTS:
        reasons.append(f"it computes {' and '.join(ELEMENTS)}, not {problem.dtype}")
    return reasons


class Warpgroups:
    """What follows from the ``consumers``, ``head_dim`` and ``head_dim_v`` of a configuration."""

    __slots__ = ()

    @property
    def threads(self) -> int:
        """Of a block: the producer warpgroup's and the consumers'."""
        return 128 * (self.consumers + 1)

    @property
    def padded_head_dim(self) -> int:
        """wgmma steps through K by 16; TMA fills the columns past the head dim with zeros."""
        return -(-self.head_dim // 16) * 16

    @property
    def padded_head_dim_v(self) -> int:
        return -(-self.head_dim_v // 16) * 16


@dataclass(frozen=True, slots=True)
class ForwardConfig(Warpgroups):
    """Everything that is compiled into a forward kernel.

    Attributes
    ----------
    element : str
        PTX element type, "f16" or "bf16".
    head_dim, head_dim_v : int
    q_tile : int
        Rows of a block's query tile, 64 a consumer warpgroup.
    kv_block : int
        Keys of a step of the main loop, a multiple of 16.
    registers : (int, int)
        A producer thread keeps the first number, a consumer thread gets the second.
    stages : int
        K and V blocks in flight.
    q_stages : int
        Q tiles in flight: with 2, the next tile's Q comes while the present one is still in use.
    left, right : bool
        Whether the band is bounded there.
    pack : int
        Query heads of a group that share a tile, neighbouring rows being one query's heads; 1 is none.
    out_in_q : bool
        The output is staged in Q's shared memory (the next tile's Q then waits for it), else in its own.
    out_parts : int
        The output is stored in so many parts, to need that much less shared memory.
    pingpong : bool
        Consumer warpgroups take turns at the tensor cores.
    hold : int
        Exponentials of a row that are computed before the wait for P V; 0 leaves the place to ptxas.
    rescale_first : bool
        The accumulator is rescaled between the issue of Q K^T and that of P V, not after the exponentials.
    negative_scale : bool
        Scores are negated, so that their maximum is the scaled maximum.
    fma_exponentials : int
        Of eight exponentials so many are left to FMA units, where the special-function unit has a tanh to compute beside each one.
    draws_behind : bool
        Random bits of dropout are drawn behind the issue of Q K^T, which keeps the turn that much longer, not before the turn.
    options : Options
        What there is beside q, k, v and the band.
    """

    element: str
    head_dim: int
    head_dim_v: int
    q_tile: int
    kv_block: int
    registers: tuple[int, int] = REGISTERS[2]
    stages: int = 2
    q_stages: int = 1
    left: bool = False
    right: bool = False
    pack: int = 1
    out_in_q: bool = False
    out_parts: int = 1
    pingpong: bool = True
    hold: int = 16
    rescale_first: bool = False
    negative_scale: bool = False
    fma_exponentials: int = 0
    draws_behind: bool = False
    options: Options = Options()

    @property
    def consumers(self) -> int:
        return self.q_tile // 64

    @property
    def inspected(self) -> bool:
        """Blocks of V may hold rows of keys that no query sees."""
        return bool(self.options.masked or self.options.lengths or (self.options.dropout and self.left))

    @property
    def inspected_everywhere(self) -> bool:
        """Any block of V may; else the first and the last one of a tile."""
        return self.options.masked


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Where things lie in a block's shared memory: offsets and sizes in bytes.

    Q and the output lie by consumer warpgroup (64 rows each, ``q_stride`` and ``out_stride`` apart), Q and K and V by stage;
    each of these is a row of panels of 64 columns.
    """

    qk_panels: int
    v_panels: int
    out_panels: int
    rows_panel_bytes: int
    kv_panel_bytes: int
    q_bytes: int
    q_stride: int
    out_stride: int
    k_bytes: int
    v_bytes: int
    q: int
    k: int
    v: int
    out: int
    barriers: int
    scratch: int
    places: int
    total: int

    @classmethod
    def of(cls, config: ForwardConfig) -> SharedMemory:
        qk_panels, v_panels = -(-config.head_dim // 64), -(-config.head_dim_v // 64)
        rows_panel, kv_panel = 64 * 128, config.kv_block * 128
        out_panels = -(-v_panels // config.out_parts)
        q_bytes, out_bytes = qk_panels * rows_panel, out_panels * rows_panel
        k_bytes, v_bytes = qk_panels * kv_panel, v_panels * kv_panel
        q_stride = max(q_bytes, out_bytes) if config.out_in_q else config.q_stages * q_bytes
        out_stride = q_stride if config.out_in_q else out_bytes
        k = config.consumers * q_stride
        v = k + config.stages * k_bytes
        after = v + config.stages * v_bytes
        out = 0 if config.out_in_q else after
        barriers = after if config.out_in_q else after + config.consumers * out_bytes
        scratch = barriers + 8 * (2 * config.q_stages * config.consumers + (4 + config.inspected) * config.stages)
        places = -(-(scratch + 16) // 16) * 16  # and the barriers of that ring
        end = places + TILES_POSTED * (PLACE_BYTES + 16) if config.options.packed else scratch + 16
        return cls(
            qk_panels, v_panels, out_panels, rows_panel, kv_panel, q_bytes, q_stride, out_stride, k_bytes, v_bytes,
            q=0, k=k, v=v, out=out, barriers=barriers, scratch=scratch, places=places, total=end + ALIGNMENT,
        )  # fmt: skip


def kv_blocks(problem: Problem, config: ForwardConfig) -> np.ndarray:
    """KV blocks that each q tile of a head steps through, first tile to last: the cost of the tile, as the kernel has it."""
    rows = problem.seqlen_q * config.pack
    tile = np.arange(-(-rows // config.q_tile))
    first = np.zeros_like(tile)
    end = np.full_like(tile, -(-problem.seqlen_k // config.kv_block))
    if config.right:
        last_query = np.minimum((tile + 1) * config.q_tile - 1, rows - 1) // config.pack
        end = np.clip((last_query + problem.offset + problem.right) // config.kv_block + 1, 0, end)
    if config.left:
        first_query = tile * config.q_tile // config.pack
        first = np.clip((first_query + problem.offset - problem.left) // config.kv_block, 0, end)
    return end - first


def q_tiles(problem: Problem, config: ForwardConfig) -> int:
    """Tiles of queries of a head, or of heads that share tiles; of packed sequences, over all of them."""
    if problem.packed:
        return most_tiles(problem.total_q, problem.batch, config.q_tile // config.pack)
    return -(-problem.seqlen_q * config.pack // config.q_tile)


def columns(problem: Problem, config: ForwardConfig) -> int:
    """Heads, or heads that share tiles, over the batch."""
    return (1 if problem.packed else problem.batch) * problem.heads // config.pack


def packed_heads(problem: Problem, q_tile: int) -> int:
    """Query heads of a group that share a tile: a power of two up to 64.

    Packing fills tiles that the end of a sequence leaves half empty, and with a band a tile of fewer queries sees fewer keys
    in vain.
    """
    pack = min(64, problem.group & -problem.group)
    if problem.left is not None or problem.right is not None:
        return pack
    apart, packed = pack * -(-problem.seqlen_q // q_tile), -(-problem.seqlen_q * pack // q_tile)
    return pack if packed * 50 < apart * 49 else 1


def forward_config(problem: Problem, layouts: Layouts | None = None) -> ForwardConfig:
    """The tuning choice for a problem: a pure function of it and of how its options lie (without layouts: row-major), measured on an H200
    (docs/performance.md), but for options: their tiles are those that do not spill."""
    return config_of_tiles(choose_tiles(problem, layouts), problem, layouts)


def choose_tiles(problem: Problem, layouts: Layouts | None = None) -> dict:
    """The fields of `ForwardConfig` that `forward_config` chooses."""
    problem, whole = kernel_keys(problem)[0], problem
    widest = max(problem.head_dim, problem.head_dim_v)
    banded = problem.left is not None or problem.right is not None
    tiles = {"q_tile": 128, "kv_block": 128, "q_stages": 2}
    if widest <= 64 and problem.seqlen_k <= 768:
        # Four consumers and short blocks: a short sequence has no rows to waste, and few steps to fill.
        tiles = {"q_tile": 256, "kv_block": 64, "stages": 4, "q_stages": 2, "hold": 0}
    elif widest <= 64:
        # Three consumers: the exponentials, not the products, are the bottleneck, and more warps hide them.
        tiles = {"q_tile": 192, "kv_block": 128, "stages": 3, "q_stages": 2, "hold": 8}
    elif widest <= 96:
        # Three consumers and shorter blocks where a tile has many steps, or has few queries because heads of a group share it.
        # Options want more registers than those have.
        if not problem.features and (problem.seqlen_k >= 8192 or (banded and problem.group > 1)):
            tiles = {"q_tile": 192, "kv_block": 96, "hold": 0}
    elif widest <= 128:
        # Long sequences have the steps to fill a longer block; a band wants finer ones.
        if not banded and problem.seqlen_k >= 2048:
            tiles = {"q_tile": 128, "kv_block": 160}
    elif widest <= 192:
        tiles = {"q_tile": 128, "kv_block": 96, "out_parts": 3, "rescale_first": True}
    elif problem.seqlen_k <= (2048 if banded else 1024):
        # Finer blocks waste less on the diagonal and at the end, and leave room for the output beside Q.
        tiles = {"q_tile": 128, "kv_block": 64, "out_parts": 2, "rescale_first": True}
    else:
        tiles = {"q_tile": 128, "kv_block": 80, "out_in_q": True, "rescale_first": True}
    if problem.features:
        tiles = option_tiles(problem, tiles, Options.of(whole, layouts, 1).of_forward(problem))
    return tiles


def config_of_tiles(tiles: dict, problem: Problem, layouts: Layouts | None = None) -> ForwardConfig:
    """The configuration of a problem with given tiles."""
    problem, whole = kernel_keys(problem)[0], problem
    d, dv = problem.head_dim, problem.head_dim_v
    widest = max(d, dv)
    pack = 1 if problem.dropout else packed_heads(problem, tiles["q_tile"])  # random bits serve two queries of a head
    options = Options.of(whole, layouts, pack).of_forward(problem)
    registers = ROOMY_PRODUCER if widest > 128 and d != dv else REGISTERS[tiles["q_tile"] // 64]
    if options and not _only_drops(problem, options):
        registers = MASK_REGISTERS if options.masked else OPTION_REGISTERS[tiles["q_tile"] // 64]
    return ForwardConfig(
        element=ELEMENTS[problem.dtype],
        head_dim=d,
        head_dim_v=dv,
        left=problem.left is not None,
        right=problem.right is not None,
        registers=registers,
        pack=pack,
        negative_scale=problem.scale < 0 and options.unit == "scale",
        fma_exponentials=2 if options.bounded and widest <= 64 else 0,
        draws_behind=options.dropout and widest > 64,
        options=options,
        **tiles,
    )


TUNED = ("q_tile", "kv_block", "stages", "q_stages", "out_in_q", "out_parts", "hold")
"""Fields in which `candidates` differ."""


def candidates(problem: Problem, layouts: Layouts, device: Device) -> tuple[ForwardConfig, ...]:
    """What is worth measuring: `forward_config` first, then other tiles that fit shared memory and leave a consumer thread the registers that the
    chosen ones leave it. Where there are options, only shorter blocks than the chosen ones are sure not to spill."""
    default, keys = forward_config(problem, layouts), kernel_keys(problem)[0]
    found = [default]
    if keys.features:
        step = 64 if default.options.masked else 32 if keys.dropout else 16
        found += [replace(default, kv_block=n, hold=min(default.hold, n // 4)) for n in range(default.kv_block - step, 63, -step)]
        return tuple(found)
    for q_tile in Q_TILES:
        of_tile = config_of_tiles({"q_tile": q_tile, "kv_block": BLOCKS[0], "rescale_first": default.rescale_first}, problem, layouts)
        for kv_block in BLOCKS:
            live = kv_block // 2 + kv_block // 4 + of_tile.padded_head_dim_v // 2
            roomy = (replace(of_tile, kv_block=kv_block, **room) for room in ROOMS)
            fitting = next((config for config in roomy if SharedMemory.of(config).total <= MAX_SHARED), None)
            if live <= of_tile.registers[1] - SPARE and fitting is not None:
                found += [replace(fitting, hold=hold) for hold in HOLDS if hold <= kv_block // 4]
    return tuple(dict.fromkeys(found))


def _only_drops(problem: Problem, options: Options) -> bool:
    """Dropout is all there is to do beside the plain kernel of a simple band."""
    return options.dropout and not (options.hides or options.changes or options.sinks or problem.left is not None)


def option_tiles(problem: Problem, tiles: dict, options: Options) -> dict:
    """The tiles where there are options: what is read or drawn for a block takes registers, and random bits of dropout are drawn for 32 keys."""
    widest, most = max(problem.head_dim, problem.head_dim_v), tiles["kv_block"]
    if options.only_bounded and widest <= 128:  # a tanh beside each exponential: more warps, as where exponentials alone are the bottleneck
        return dict(CAP_TILES[64 if widest <= 64 else 128])
    crowded = options.packed and tiles["q_tile"] == 256  # four consumers have no registers for where a sequence lies
    if widest <= 64 and (options.masked or options.dropout or crowded):
        tiles, most = {"q_tile": 128, "q_stages": 2}, 128
    if options.masked:  # blocks are those of the mask
        most = min(128 if most >= 128 else 64, 128 if widest <= 128 else 64)
    apart = any(access and not access.pairs for access in (options.mask, options.bias))  # an address for each element
    if options.dropout and options.reads:
        most = min(most, 64 if widest <= (128 if apart else 192) else 32)
    elif options.dropout:
        most = min(most, 64 if widest > 128 else 96 if widest > 64 and not _only_drops(problem, options) else 128)
    elif options.mask and apart and 64 < widest <= 128:
        most = min(most, 64)
    return tiles | {"kv_block": most, "hold": min(tiles.get("hold", 16), most // 4)}
