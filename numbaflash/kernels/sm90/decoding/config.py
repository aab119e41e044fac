"""What is compiled into the decode kernels, chosen by pure functions of the problem, and where things lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....dispatch import Layouts
from ....problem import Problem
from ....ptx.mma import pitch
from ..config import ELEMENTS, MAX_SHARED
from ..options import Options

Q_TILE = 16
"""Rows that a warp multiplies at once."""

LANES = 32
FOUND_BYTES = 16
"""Of what a block tells the kernel that merges about an item: `schedule.Shares.found`."""

MERGE_TILES = 4
"""Tiles of 8 columns that a block of the kernel that merges has."""

MOST_MERGED = 32
"""Parts of an item on average up to which a single block merges them."""

_FEW_ITEMS = 128
_SHARED_BYTES, _RESERVED_BYTES = 227 * 1024, 1024  # of a multiprocessor, and what the system takes of it for each block


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Everything that is compiled into the kernels that decode.

    Attributes
    ----------
    element : str
        PTX element type, "f16" or "bf16".
    head_dim, head_dim_v : int
    group : int
        Query heads of a key/value head; row r of its tile is query ``r // group``.
    rows : int
        Rows of a tile that may hold a query: 8 or 16.
    division : str
        What the warps of a block divide among them: "keys", so that each has a ring of its own; the "rows" of a larger tile; or the "columns" of the
        output, where no warp could hold them all. For rows and columns, all warps see all keys, in one ring.
    keys : int
        Keys of a step, a multiple of 16.
    warps : int
        Of a block.
    stages : int
        Steps of a ring that are in flight, or in use.
    blocks : int
        Blocks that a multiprocessor is to hold.
    shared_q : bool
        Queries stay in shared memory, where registers are short.
    left, right : bool
        Whether the band is bounded there.
    page_size : int
        Keys of a page; 0 for contiguous caches.
    balanced : bool
        Each block takes an equal share of all keys of the batch. Otherwise each sequence is cut into the same number of parts.
    few_items : bool
        There are fewer tiles of queries than multiprocessors, so that each is shared by many blocks. Then blocks that merge are launched for each of
        these, otherwise for each block that may have left one to others.
    last_merges : bool
        Who is the last to finish a part of an item merges them all, by counters that the workspace keeps from launch to launch. Otherwise a second
        kernel does.
    negative_scale : bool
        Scores are negated, so that their maximum is the scaled maximum.
    options : Options
        What there is beside q, k, v and the band.
    """

    element: str
    head_dim: int
    head_dim_v: int
    group: int
    rows: int = Q_TILE
    division: str = "keys"
    keys: int = 16
    warps: int = 4
    stages: int = 3
    blocks: int = 2
    shared_q: bool = False
    left: bool = False
    right: bool = False
    page_size: int = 0
    balanced: bool = True
    few_items: bool = True
    last_merges: bool = False
    negative_scale: bool = False
    options: Options = Options()

    @property
    def threads(self) -> int:
        return LANES * self.warps

    @property
    def depth(self) -> int:
        """Columns of q and k in memory: mma steps through them by 16."""
        return -(-self.head_dim // 16) * 16

    @property
    def columns(self) -> int:
        """Columns of v in memory."""
        return -(-self.head_dim_v // 16) * 16

    @property
    def row_warps(self) -> int:
        """Warps that have rows of their own; a tile of queries is `Q_TILE` rows for each."""
        return self.warps if self.division == "rows" else 1

    @property
    def warp_columns(self) -> int:
        """Columns of the output that a warp accumulates."""
        return -(-self.columns // (16 * self.warps)) * 16 if self.division == "columns" else self.columns

    @property
    def tile(self) -> int:
        """Keys that the warps of a block step through together: what shares of the work are counted in."""
        return self.keys * self.warps if self.division == "keys" else self.keys

    @property
    def share_tiles(self) -> int:
        """Of the tiles of 8 columns that the output has, those that a warp writes."""
        return -(-self.columns // (8 * self.warps)) if self.division == "keys" else self.warp_columns // 8

    @property
    def column_tiles(self) -> int:
        """Tiles of 8 columns of a partial result, the last of which may lie past the output."""
        return self.share_tiles if self.division == "rows" else self.share_tiles * self.warps

    @property
    def merge_warps(self) -> int:
        """Warps that take turns at the partial results of an item. Where many blocks have little to merge each, their size is what counts."""
        return 1 if self.last_merges else 8 if self.few_items else 2

    @property
    def merged_at_once(self) -> int:
        """Partial results that a warp has on their way when it merges."""
        return 8 if self.last_merges else 4

    @property
    def kept(self) -> int:
        """Elements of a tile of 8 columns that a thread keeps: those of rows that may hold a query."""
        return 4 if self.rows > 8 else 2


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Where things lie in a block's shared memory: offsets and sizes in bytes. Partial results take the place of keys and values."""

    k_pitch: int
    v_pitch: int
    v: int
    stage_bytes: int
    tile_bytes: int
    results_bytes: int
    q: int
    statistics: int
    total: int

    @classmethod
    def of(cls, config: DecodeConfig) -> SharedMemory:
        k_pitch, v_pitch = pitch(config.depth), pitch(config.columns)
        v = config.keys * k_pitch
        stage_bytes = v + config.keys * v_pitch
        tile_bytes = LANES * 4 * config.kept
        results_bytes = config.column_tiles * tile_bytes
        ring = config.stages * stage_bytes
        if config.division == "keys":
            ring = config.warps * max(ring, results_bytes)
        q_bytes = config.row_warps * Q_TILE * k_pitch if config.shared_q else 0
        statistics = ring + q_bytes
        return cls(
            k_pitch, v_pitch, v, stage_bytes, tile_bytes, results_bytes,
            q=ring, statistics=statistics, total=statistics + config.warps * LANES * 16 + 1024,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where partial results lie in global memory: offsets and sizes in bytes. Each is the columns of a warp's share after the other, in the order of
    lanes, then m and l."""

    slots: int
    slot_bytes: int
    statistics: int
    total: int

    @classmethod
    def of(cls, config: DecodeConfig, blocks: int = 1, items: int = 1, splits: int = 1) -> Workspace:
        """Of a launch of so many blocks, for so many tiles of queries of so many parts."""
        statistics = config.column_tiles * LANES * 4 * config.kept
        slot_bytes = statistics + LANES * 16
        head = (items if config.few_items else blocks) * FOUND_BYTES if config.balanced else 0
        if config.last_merges:
            head = -(-items * 4 // 512) * 512
        slots = 2 * blocks if config.balanced else items * splits if splits > 1 else 0
        return cls(head, slot_bytes, statistics, head + slots * config.row_warps * slot_bytes)


def merge_shares_of(config: DecodeConfig) -> int:
    """Blocks that merge an item."""
    return -(-config.columns // (8 * MERGE_TILES))


def row_tiles(problem: Problem, config: DecodeConfig) -> int:
    """Tiles of queries of a key/value head."""
    return -(-problem.seqlen_q * problem.group // (Q_TILE * config.row_warps))


def items(problem: Problem, config: DecodeConfig) -> int:
    """Tiles of queries of all heads and batch entries."""
    return problem.batch * problem.kv_heads * row_tiles(problem, config)


def decode_config(problem: Problem, layouts: Layouts | None = None, num_splits: int | None = None) -> DecodeConfig:
    """The tuning choice for a problem, measured on an H200 (docs/performance.md)."""
    widest, rows = max(problem.head_dim, problem.head_dim_v), problem.seqlen_q * problem.group
    if widest > 256:
        sizes = {"division": "columns", "keys": 16, "stages": 4, "blocks": 1, "shared_q": True}
    elif rows > Q_TILE:
        warps = next(n for n in (2, 4, 8) if n * Q_TILE >= rows or n == 8)
        sizes = {"division": "rows", "warps": warps, "keys": 32, "stages": 4, "blocks": {2: 3, 4: 2, 8: 1}[warps]}
        if widest > 160:
            sizes |= {"keys": 16, "shared_q": True, "blocks": min(2, sizes["blocks"])}
    elif widest <= 64:
        sizes = {"keys": 32, "stages": 2, "blocks": 3} if problem.paged else {"keys": 32, "stages": 3, "blocks": 2}
    elif widest <= 160:
        sizes = {"keys": 16, "stages": 3, "blocks": 2}
    else:
        sizes = {"keys": 16, "stages": 3, "blocks": 1, "shared_q": True}
    return config_of_sizes(sizes, problem, layouts, num_splits)


def config_of_sizes(sizes: dict, problem: Problem, layouts: Layouts | None, num_splits: int | None) -> DecodeConfig:
    """The configuration of a problem with given sizes, of as many blocks as have room."""
    rows, options = problem.seqlen_q * problem.group, Options.of(problem, layouts, problem.group)
    config = DecodeConfig(
        element=ELEMENTS[problem.dtype],
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        group=problem.group,
        rows=8 if rows <= 8 else Q_TILE,
        left=problem.left is not None,
        right=problem.right is not None,
        page_size=problem.page_size,
        balanced=num_splits is None,
        negative_scale=problem.scale < 0 and options.unit == "scale",
        options=options,
        **sizes,
    )
    room = _SHARED_BYTES // (SharedMemory.of(config).total + _RESERVED_BYTES)
    return replace(config, blocks=min(config.blocks, room), few_items=items(problem, config) < _FEW_ITEMS)


TUNED = ("keys", "stages", "blocks")
"""Fields in which `candidates` differ."""


def candidates(problem: Problem, layouts: Layouts, num_splits: int | None = None) -> tuple[DecodeConfig, ...]:
    """What is worth measuring: `decode_config` first. With a number of parts given, there is no other: what is computed for a sequence must not
    depend on the rest of the batch."""
    default = decode_config(problem, layouts, num_splits)
    if num_splits is not None:
        return (default,)
    found = [default]
    for keys in (16, 32):
        for stages in (2, 3, 4):
            for blocks in (1, 2, 3, 4):
                sizes = {name: getattr(default, name) for name in ("division", "warps", "shared_q")}
                config = config_of_sizes(sizes | {"keys": keys, "stages": stages, "blocks": blocks}, problem, layouts, num_splits)
                if config.blocks == blocks and SharedMemory.of(config).total <= MAX_SHARED and _has_registers(config):
                    found.append(config)
    return tuple(dict.fromkeys(found))


def _has_registers(config: DecodeConfig) -> bool:
    """The output, the scores and the queries of a thread leave room for the rest."""
    live = config.warp_columns // 2 + config.keys // 2 + (0 if config.shared_q else config.depth // 4)
    return live <= min(200, 65536 // (config.threads * config.blocks) - 56)
