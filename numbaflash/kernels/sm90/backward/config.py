"""Tile sizes of the Hopper backward kernels: a frozen configuration, chosen by pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ....dispatch import BackwardLayouts
from ....problem import ITEMSIZE, Problem
from ...packing import most_tiles
from ..config import ALIGNMENT, ELEMENTS, MAX_SHARED, PLACE_BYTES, Warpgroups
from ..options import Access, Options

TICKET_BYTES = 256  # before the turns
ROW_THREADS = 256  # of a block of the kernel that prepares the rows
SINK_THREADS = 1024  # of a block of the kernel of the sinks' gradients: all warps have a sum
PART_ROWS = 64  # of dq that a consumer warpgroup computes in a step
L2_BYTES = 36 * 2**20  # of the H200's 60 MB, what the query heads in flight may read and add to


@dataclass(frozen=True, slots=True)
class BackwardConfig(Warpgroups):
    """Everything that is compiled into a backward kernel.

    Attributes
    ----------
    element : str
        PTX element type, "f16" or "bf16".
    head_dim, head_dim_v : int
    q_block : int
        Queries of a step of the main loop: 64, or 128 for head dims up to 64.
    kv_tile : int
        Keys of a block's tile: 128, or 64 for head dims above 128.
    registers : (int, int)
        A thread of the producer warpgroup keeps the first number, a consumer thread gets the second.
    stages : int
        Blocks of Q and dO in flight.
    left, right : bool
        Whether the band is bounded there.
    with_dq, with_dk, with_dv : bool
        Gradients that somebody needs.
    deterministic : bool
        Tiles add their parts of dq in the order of their keys.
    last_keys_first : bool
        That order is from the last keys to the first, and tiles run in it.
    with_dbias, with_dsinks : bool
    dbias_axes : (bool, bool)
        Whether the gradient of the bias has an axis of queries, and one of keys, along which it is not summed.
    options : Options
        What there is beside q, k, v and the band.
    """

    element: str
    head_dim: int
    head_dim_v: int
    q_block: int
    registers: tuple[int, int]
    kv_tile: int = 128
    stages: int = 2
    left: bool = False
    right: bool = False
    with_dq: bool = True
    with_dk: bool = True
    with_dv: bool = True
    deterministic: bool = False
    last_keys_first: bool = False
    with_dbias: bool = False
    with_dsinks: bool = False
    dbias_axes: tuple[bool, bool] = (True, True)
    options: Options = Options()

    consumers = 2

    @property
    def one_tile(self) -> bool:
        """A block has one tile, and the hardware evens out what is uneven: where only the device knows how long a tile is, and where tiles wait for
        those that have started before."""
        return self.deterministic or self.options.lengths

    @property
    def bounded(self) -> bool:
        """Some query may not see some key, as the band has it."""
        return self.left or self.right

    @property
    def columns_apart(self) -> bool:
        """The consumers share the tile's keys, and each has half of the columns (`by_columns`), instead of half of the keys (`by_keys`)."""
        return self.kv_tile == 64

    @property
    def crowded(self) -> bool:
        """So much is read or drawn for each pair that no registers are left for products under way meanwhile."""
        return self.options.reads and (self.options.dropout or self.options.terms > 2)

    @property
    def fma_exponentials(self) -> int:
        """Of eight exponentials so many are left to FMA units: where products are short, a tanh beside each keeps the special-function unit busy."""
        return 2 if self.options.softcap == "low" and self.padded_head_dim <= 64 else 0

    @property
    def draws_ahead(self) -> bool:
        """Random bits of dropout are drawn a block ahead, while products are under way: with scores about there are no registers for it."""
        return self.options.dropout and not self.options.reads and not self.columns_apart

    @property
    def overlap(self) -> bool:
        """The product for dK of a block of queries waits, to run beside the probabilities of the next block.

        Measured on an H200: 2 to 7% faster with `columns_apart`, 3 to 10% slower without, where it also spills under a band.
        """
        return self.columns_apart and self.with_dq and self.with_dk and self.with_dv and not self.crowded

    @property
    def kv_arrivals(self) -> tuple[int, int]:
        """How many say that K, and that V, may be loaded anew: each warp, and each consumer; of consumers that share keys, one thread for all."""
        return (1, 1) if self.columns_apart else (4 * self.consumers, self.consumers)

    @property
    def part_columns(self) -> int:
        """Columns of a part of dq; with `columns_apart`, of dk too."""
        return 128 if self.head_dim > 128 else 64

    @property
    def part_columns_v(self) -> int:
        """With `columns_apart`, columns of dv of a consumer."""
        return 128 if self.head_dim_v > 128 else 64

    @property
    def parts(self) -> int:
        """Parts of dq in a step: one a consumer, or one in all."""
        return 2 if self.columns_apart else self.q_block // PART_ROWS * -(-self.head_dim // 64)

    @property
    def deterministic_step(self) -> int:
        """Direction of a deterministic tile's walk through blocks of queries; either way it is behind those before it, and seldom waits.

        Last keys first, it goes up from the diagonal. First keys first, it goes down from the end under a right bound: all tiles of a head
        begin there, so those in flight read about the same queries.
        """
        return -1 if self.right and not self.last_keys_first else 1

    @property
    def with_ds(self) -> bool:
        """Whether the gradient of the scores is needed for the products."""
        return self.with_dq or self.with_dk

    @property
    def with_products(self) -> bool:
        return self.with_ds or self.with_dv

    @property
    def with_deltas(self) -> bool:
        return self.with_ds or self.with_dbias or self.with_dsinks

    @property
    def of_products(self) -> BackwardConfig:
        """What the main kernel depends on."""
        return replace(self, with_dbias=False, with_dsinks=False, dbias_axes=(True, True), options=self.options.of_products)

    @property
    def of_bias(self) -> BackwardConfig:
        """What the kernel of the bias's gradient depends on."""
        others = dict.fromkeys(("with_dq", "with_dk", "with_dv", "with_dsinks", "deterministic", "last_keys_first"), False)
        return replace(self, q_block=BiasMemory.q_block, kv_tile=BiasMemory.kv_tile, registers=(0, 0), options=self.options.of_products, **others)

    @property
    def behind_sink(self) -> bool:
        """Queries that see no key may be known by neither the band nor their LSE, which is that of a sink."""
        return self.options.sinks and self.options.hides

    @property
    def may_hide_keys(self) -> bool:
        """A tile may hold keys that no query sees, whose gradients are 0 whatever comes of the products."""
        return self.bounded or self.options.masked or self.options.lengths

    @property
    def may_hide_queries(self) -> bool:
        """A block may hold queries that see no key."""
        return self.bounded or self.options.hides

    @property
    def cleans_queries(self) -> bool:
        """A block may hold queries that see no key, which only the device knows."""
        return self.options.hides

    @property
    def cleans_plain_queries(self) -> bool:
        """Even where neither mask nor band nor lengths hide anything: a bias may be -inf."""
        return self.options.bias is not None

    @property
    def cleans_keys(self) -> bool:
        """A tile may hold keys that no query sees, which only the device knows."""
        return self.with_dq and (self.options.masked or self.options.lengths)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Where things lie in a block's shared memory: offsets and sizes in bytes.

    K and V once, Q and dO and the shift and delta of their rows and dS (with P before it where the consumers share keys) by stage, dQ by
    consumer; its ticket, and the place of a tile of packed sequences. Matrices are rows of panels of 64 columns, of which only those that hold
    columns of the operand are loaded.
    """

    loaded_qk_panels: int
    loaded_v_panels: int
    q_panel_bytes: int
    kv_panel_bytes: int
    q_bytes: int
    dout_bytes: int
    ds_bytes: int
    part_bytes: int
    row_bytes: int
    k: int
    v: int
    q: int
    dout: int
    ds: int
    dq: int
    shifts: int
    deltas: int
    barriers: int
    ticket: int
    place: int
    total: int

    @classmethod
    def of(cls, config: BackwardConfig) -> SharedMemory:
        loaded_qk, loaded_v = -(-config.head_dim // 64), -(-config.head_dim_v // 64)
        qk_panels, v_panels = loaded_qk, loaded_v
        if config.columns_apart:
            qk_panels, v_panels = config.part_columns // 32, config.part_columns_v // 32
        q_panel, kv_panel = config.q_block * 128, config.kv_tile * 128
        q_bytes, dout_bytes = qk_panels * q_panel, v_panels * q_panel
        ds_bytes, part_bytes, row_bytes = config.q_block * config.kv_tile * 2, PART_ROWS * config.part_columns * 4, config.q_block * 4
        if config.columns_apart:
            ds_bytes *= 2
        staged = config.with_dq and not config.columns_apart
        v = qk_panels * kv_panel
        q = v + v_panels * kv_panel
        dout = q + config.stages * q_bytes
        ds = dout + config.stages * dout_bytes
        dq = ds + (config.stages * ds_bytes if config.with_ds or config.columns_apart else 0)
        shifts = dq + (config.consumers * part_bytes if staged else 0)
        deltas = shifts + config.stages * row_bytes
        barriers = deltas + config.stages * row_bytes
        ticket = barriers + 8 * (3 + 6 * config.stages)
        place = -(-(ticket + 16) // 16) * 16
        return cls(
            loaded_qk, loaded_v, q_panel, kv_panel, q_bytes, dout_bytes, ds_bytes, part_bytes, row_bytes,
            k=0, v=v, q=q, dout=dout, ds=ds, dq=dq, shifts=shifts, deltas=deltas, barriers=barriers,
            ticket=ticket, place=place, total=place + (PLACE_BYTES if config.options.packed else 0) + ALIGNMENT,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BiasMemory:
    """Of the kernel of the bias's gradient: what a block is, and offsets and sizes in its shared memory. The sums take the place of the operands."""

    qk_panels: int
    v_panels: int
    q_panel_bytes: int
    kv_panel_bytes: int
    row_bytes: int
    k: int
    v: int
    q: int
    dout: int
    shifts: int
    deltas: int
    barrier: int
    total: int

    q_block: ClassVar[int] = 64
    kv_tile: ClassVar[int] = 128
    threads: ClassVar[int] = 256

    @classmethod
    def of(cls, config: BackwardConfig) -> BiasMemory:
        qk_panels, v_panels = -(-config.head_dim // 64), -(-config.head_dim_v // 64)
        q_panel, kv_panel, row = cls.q_block * 128, cls.kv_tile * 128, cls.q_block * 4
        v = qk_panels * kv_panel
        q = v + v_panels * kv_panel
        dout = q + qk_panels * q_panel
        shifts = dout + v_panels * q_panel
        barrier = shifts + 2 * row
        return cls(
            qk_panels, v_panels, q_panel, kv_panel, row,
            k=0, v=v, q=q, dout=dout, shifts=shifts, deltas=shifts + row, barrier=barrier, total=barrier + 16 + ALIGNMENT,
        )  # fmt: skip


def backward_config(problem: Problem, layouts: BackwardLayouts, *, blocks: int, deterministic: bool) -> BackwardConfig:
    """The tuning choice for a problem, where it lies and the number of blocks that run at a time: a pure function of them."""
    widest = max(problem.head_dim, problem.head_dim_v)
    with_dq, with_dk, with_dv, with_dbias, with_dsinks = (getattr(layouts, f"d{name}") is not None for name in ("q", "k", "v", "bias", "sinks"))
    stored = tuple(name for name, wanted in (("dk", with_dk), ("dv", with_dv)) if wanted)
    options = Options.of(problem, layouts, access_of=Access.of_gradients, stored=stored)
    tiles = {"q_block": 128 if widest <= 64 else 64, "kv_tile": 128 if widest <= 128 else 64}
    deterministic = deterministic and with_dq
    options = replace(options, ranked=deterministic and options.masked)
    if options.terms or options.dropout:  # with each score there is something to do
        tiles = option_tiles(widest, options, deterministic or problem.left is not None)
    return BackwardConfig(
        element=ELEMENTS[problem.dtype],
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        registers=_registers(_is_roomy(options, deterministic, **tiles)),
        left=problem.left is not None,
        right=problem.right is not None,
        with_dq=with_dq,
        with_dk=with_dk,
        with_dv=with_dv,
        deterministic=deterministic,
        last_keys_first=deterministic and problem.right is not None and _fits_though_apart(problem, tiles["kv_tile"], blocks),
        with_dbias=with_dbias,
        with_dsinks=with_dsinks,
        dbias_axes=tuple(n > 1 for n in layouts.dbias.shape[2:]) if with_dbias else (True, True),
        options=options,
        **tiles,
    )


TUNED = ("q_block", "kv_tile", "stages", "last_keys_first")
"""Fields in which `candidates` differ."""


def candidates(problem: Problem, layouts: BackwardLayouts, *, blocks: int, deterministic: bool) -> tuple[BackwardConfig, ...]:
    """What is worth measuring: `backward_config` first. With options, tiles are never larger than the chosen ones, which do not spill."""
    default = backward_config(problem, layouts, blocks=blocks, deterministic=deterministic)
    widest, tiles = max(problem.head_dim, problem.head_dim_v), [(default.q_block, default.kv_tile)]
    if widest <= 64:
        tiles.append((64, 128))
    elif widest <= 128:
        tiles.append((64, 64))
    found = [default]
    for q_block, kv_tile in tiles:
        roomy = _is_roomy(default.options, default.deterministic, q_block, kv_tile)
        for stages in (2, 3):
            for last_first in sorted({default.last_keys_first, default.deterministic and default.right}):
                sizes = {"q_block": q_block, "kv_tile": kv_tile, "stages": stages, "last_keys_first": last_first}
                found.append(replace(default, registers=_registers(roomy), **sizes))
    return tuple(dict.fromkeys(config for config in found if SharedMemory.of(config).total <= MAX_SHARED))


def _is_roomy(options: Options, deterministic: bool, q_block: int, kv_tile: int) -> bool:
    """The producer's warps spill what they know of a panel more, of the turns of entries with lengths, or of where a sequence lies, beyond 24.
    Beside blocks of 128 queries they may: measured on an H200, that costs nothing, and consumers that spill instead are 20% slower."""
    return kv_tile == 64 or ((deterministic and options.lengths or options.packed) and q_block == 64)


def _registers(roomy):
    return (40, 232) if roomy else (24, 240)


def option_tiles(widest: int, options: Options, bookkeeping: bool) -> dict:
    """The tiles where there are options: what is read or drawn for a pair takes registers. Where there is much of it, those of consumers that own
    keys suffice for narrow head dims only. Beside dropout anything is much, be it ``bookkeeping`` of turns or of a left bound."""
    much = options.terms > 1 or (options.dropout and (bookkeeping or options.lengths or options.terms > 0))
    return {"q_block": 64, "kv_tile": 64 if widest > (64 if much else 128) else 128}


def column_bytes(problem: Problem) -> int:
    """What is read of the query heads that share keys, and added to, once for each tile of those keys."""
    return problem.group * problem.seqlen_q * ((problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype] + 4 * problem.head_dim)


def _fits_though_apart(problem, kv_tile, blocks):
    """Whether the L2 cache holds all that tiles in flight read when each is at other queries: of half of a head's tiles at a time, about."""
    columns_in_flight = max(1, 2 * blocks * kv_tile // max(1, problem.seqlen_k))
    return columns_in_flight * column_bytes(problem) <= L2_BYTES


def visible_queries(problem: Problem) -> tuple[int, int]:
    """First query that may see a key, and how many from there on may; of packed sequences, among all rows."""
    if problem.packed:
        return 0, problem.total_q
    if problem.offset_per_entry:
        return 0, problem.seqlen_q
    first = 0 if problem.right is None else max(0, -problem.offset - problem.right)
    end = problem.seqlen_q if problem.left is None else min(problem.seqlen_q, problem.seqlen_k - problem.offset + problem.left)
    return first, end - first


def q_blocks(problem: Problem, config: BackwardConfig) -> int:
    """Blocks of queries of a head; of packed sequences, over all of them."""
    return most_tiles(problem.total_q, problem.batch, config.q_block) if problem.packed else -(-problem.seqlen_q // config.q_block)


def kv_tiles(problem: Problem, config: BackwardConfig) -> int:
    """Tiles of keys likewise."""
    return most_tiles(problem.total_k, problem.batch, config.kv_tile) if problem.packed else -(-problem.seqlen_k // config.kv_tile)


def q_blocks_of_tiles(problem: Problem, config: BackwardConfig) -> np.ndarray:
    """Blocks of queries that each tile of keys of a head steps through, first tile to last: the cost of the tile, as the kernel has it."""
    tile = np.arange(-(-problem.seqlen_k // config.kv_tile))
    first, end = np.zeros_like(tile), np.full_like(tile, -(-problem.seqlen_q // config.q_block))
    if config.right:
        first = np.clip((tile * config.kv_tile - problem.offset - problem.right) // config.q_block, 0, end)
    if config.left:
        last_key = np.minimum((tile + 1) * config.kv_tile, problem.seqlen_k) - 1
        end = np.clip((last_key - problem.offset + problem.left) // config.q_block + 1, first, end)
    return end - first
