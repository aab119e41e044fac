"""What the host does for masks by blocks: where lists lie in a workspace, and the launches that make them (nothing here imports numba.cuda)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ... import toolchain
from ...dispatch import Layout
from ...problem import GRANULE, Problem
from .layout import bits_at, granules, words_of_list
from .layout import words as words_of

_BUILD = "numbaflash.kernels.blocks."
_PAGE = 256  # bytes that parts of the workspace are multiples of


def _whole(size):
    return -(-size // _PAGE) * _PAGE


LIST_THREADS, RANK_THREADS, SUMMARY_THREADS = 64, 32, 128
_SIMULATED_THREADS = 4  # each is a thread of Python


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of a problem's tiles.

    Attributes
    ----------
    whole : Problem
    problem : Problem
        The same over the keys that the kernel counts.
    q_size, k_size : int
        Queries and keys of a tile and a block.
    heads : int
        Query heads that share a tile.
    of_keys : bool
        Tiles are of keys, and step through blocks of queries.
    descending : bool
        Entries are in descending order.
    ranked, last_first : bool
        There are ranks; tiles of larger keys come first in them.
    first_key : int
        Keys before the first one that the kernel counts, a multiple of 64.
    offset : int
        Where all of it begins in the workspace.
    """

    whole: Problem
    problem: Problem
    q_size: int
    k_size: int
    heads: int
    of_keys: bool = False
    descending: bool = False
    ranked: bool = False
    last_first: bool = False
    first_key: int = 0
    offset: int = 0

    @property
    def _mask(self) -> tuple[int, ...]:
        return self.problem.mask or self.problem.block_mask

    @property
    def q_blocks(self) -> int:
        return -(-self.problem.seqlen_q // self.q_size)

    @property
    def k_blocks(self) -> int:
        return -(-self.problem.seqlen_k // self.k_size)

    @property
    def tiles(self) -> int:
        return self.k_blocks if self.of_keys else self.q_blocks

    @property
    def words(self) -> int:
        """Of a list."""
        return words_of_list(self.q_blocks if self.of_keys else self.k_blocks)

    @property
    def entries(self) -> int:
        """Lists along the batch: one for each entry where its lengths, too, decide what is in them."""
        return self.problem.batch if self.problem.seqlens_q or self.problem.seqlens_k else self._mask[0]

    @property
    def columns(self) -> int:
        """Lists along heads."""
        return self.problem.heads // self.heads if self._mask[1] > 1 else 1

    @property
    def steps(self) -> tuple[int, int, int]:
        """(lists from a batch entry to the next, from a tile's heads to the next, words of a list)."""
        return (
            self.columns * self.tiles if self.entries > 1 else 0,
            self.tiles if self.columns > 1 else 0,
            self.words,
        )

    # ---- the workspace: the words of a mask of bool, lists, ranks

    @property
    def _summary(self) -> tuple[int, int, int, int]:
        """Granules of a mask of bool: of batch entries, heads, queries and keys."""
        if not self.problem.mask:
            return 0, 0, 0, 0
        batch, heads, rows, columns = self.problem.mask
        return batch, heads, granules(rows), granules(columns)

    @property
    def lists_at(self) -> int:
        return self.offset + _whole(4 * math.prod(self._summary))

    @property
    def ranks_at(self) -> int:
        return self.lists_at + _whole(4 * self.entries * self.columns * self.tiles * self.words)

    @property
    def end(self) -> int:
        """Bytes of the workspace up to the end of all this."""
        return self.ranks_at + (_whole(4 * self.entries * self.columns * self.q_blocks * self.k_blocks) if self.ranked else 0)

    @property
    def array_of_lists(self) -> toolchain.Array:
        """A row a list."""
        return self._array(self.lists_at, self.entries * self.columns * self.tiles, self.words)

    @property
    def array_of_ranks(self) -> toolchain.Array:
        """A row a tile of keys, a column a block of queries."""
        return self._array(self.ranks_at, self.entries * self.columns * self.k_blocks, self.q_blocks)

    @staticmethod
    def _array(offset, rows, columns):
        return toolchain.Array("workspace", "int32", (rows, columns), (4 * columns, 4), offset)

    # ---- launches

    def launches(self, layouts, arch, simulated: bool) -> list[tuple[toolchain.KernelRequest, list, int, int]]:
        """Kernels in their order, each with its parameters, number of blocks and threads."""
        found = []
        if self.problem.mask:
            found.append(self._summarise(layouts.mask, arch, _SIMULATED_THREADS if simulated else SUMMARY_THREADS))
        found.append(self._make("lists:build_lists", self.lists_at, layouts, arch, _SIMULATED_THREADS if simulated else LIST_THREADS))
        if self.ranked:
            found.append(self._make("lists:build_ranks", self.ranks_at, layouts, arch, _SIMULATED_THREADS if simulated else RANK_THREADS))
        return found

    def _summarise(self, layout: Layout, arch, threads):
        from .summary import SummaryConfig

        strides = tuple(step if n > 1 else 0 for n, step in zip(layout.shape, layout.strides, strict=True))
        batch, heads, rows, columns = self._summary
        _, _, queries, keys = self.problem.mask
        start = self.first_key * strides[3]
        fours = strides[3] == 1 and keys % 4 == 0 and layout.alignment % 4 == 0 and not any(step % 4 for step in (start, *strides[:3]))
        parameters = [
            toolchain.Pointer("mask", start),
            *(toolchain.Scalar("int64", step) for step in strides),
            toolchain.Pointer("workspace", self.offset),
            *(toolchain.Scalar("int32", n) for n in (heads, rows, columns, queries, keys)),
        ]
        request = toolchain.KernelRequest(_BUILD + "summary:build", SummaryConfig(fours, threads), arch)
        return request, parameters, batch * heads * rows * columns, threads

    def _make(self, build, at, layouts, arch, threads):
        from .lists import ListsConfig

        problem, of_ranks = self.problem, build.endswith("ranks")
        config = ListsConfig(
            q_size=self.q_size,
            k_size=self.k_size,
            of_keys=self.of_keys,
            descending=self.last_first if of_ranks else self.descending,
            left=problem.left is not None,
            right=problem.right is not None,
            seqlens_q=problem.seqlens_q,
            seqlens_k=problem.seqlens_k,
            per_entry=problem.offset_per_entry,
            threads=threads,
        )
        parameters = [*self._words(layouts)]
        for name in ("seqlens_q", "seqlens_k"):
            layout = getattr(layouts, name)
            parameters += [
                toolchain.Pointer(name) if layout else toolchain.Scalar("uint64", 0),
                toolchain.Scalar("int64", layout.strides[0] if layout else 0),
            ]
        sizes = (problem.seqlen_q, problem.seqlen_k, problem.offset, problem.left or 0, problem.right or 0)
        heads = self.heads if self._mask[1] > 1 else 1
        parameters += [
            toolchain.Pointer("workspace", at),
            *(toolchain.Scalar("int32", n) for n in (*sizes, self.columns, heads, self.q_blocks, self.k_blocks)),
        ]
        blocks = self.entries * self.columns * (-(-self.q_blocks // threads) if of_ranks else self.tiles)
        return toolchain.KernelRequest(_BUILD + build, config, arch), parameters, blocks, threads

    def _words(self, layouts):
        """Address and strides, in bytes, of the words of granules, along batch, heads, queries and keys."""
        if self.problem.mask:
            batch, heads, rows, columns = self._summary
            strides = (heads * rows * columns, rows * columns, columns, 1)
            full = self.problem.mask
            strides = tuple(0 if n == 1 else 4 * step for n, step in zip(full, strides, strict=True))
            return [toolchain.Pointer("workspace", self.offset), *(toolchain.Scalar("int64", step) for step in strides)]
        of_batch, of_head, _ = (step if n > 1 else 0 for n, step in zip(self.problem.block_mask, layouts.block_mask.strides, strict=True))
        row = 4 * granules(self.whole.seqlen_k)
        return [
            toolchain.Pointer("block_mask", 4 * (self.first_key // GRANULE)),
            *(toolchain.Scalar("int64", step) for step in (of_batch, of_head, row, 4)),
        ]


def build(home, like, facts, shape, rule, offset, numbers, given, make=None):
    """(words, counts) of a `numbaflash.BlockMask` of a rule, made on the GPU of ``like``; the host waits for the device once.

    Parameters
    ----------
    home : Library
    like : array
        Of which new arrays have the library and the device, as ``facts`` has it.
    shape : tuple of int
        (batch or 1, heads or 1, seqlen_q, seqlen_k).
    rule : Rule
    offset : int
    numbers : dict of str to int
    given : dict
        Of "of_queries" and "of_keys", or "mask", (array, `Facts`): their axes are (batch, seqlen), of a mask up to 4.
    make : callable, optional
        In place of `numbaflash.toolchain.prepare`.
    """
    from ...block_mask import Counts
    from .build import COUNTERS, THREADS, BuildConfig

    batch, heads, seqlen_q, seqlen_k = shape
    rows, columns = granules(seqlen_q), granules(seqlen_k)
    masks, config = batch * heads, BuildConfig(rule, "mask" in given)
    blocks, states_of_mask = masks * rows * columns, bits_at(seqlen_q, seqlen_k)
    states, counters = (home.allocator(like, (n,), "int32")(None) for n in (masks * states_of_mask, max(1, masks) * COUNTERS))
    home.clear(counters, None)
    if not blocks:
        words = home.allocator(like, (batch, heads, words_of(seqlen_q, seqlen_k, 0)), "int32")(None)
        home.clear(words, None)
        return words, Counts(0, 0, 0)
    names = ("mask", "of_queries", "of_keys", "lists", "counters", "block_mask")
    addresses = {name: home.address(x) for name, (x, _) in given.items()}
    addresses |= {"lists": home.address(states), "counters": home.address(counters)}
    common = []
    for name, axes in (("mask" if config.pairs else "of_queries", 4), ("of_keys", 4)):
        strides = _strides_of(given[name][1], name) if name in given else (0,) * axes
        common += [toolchain.Pointer(name) if name in given else toolchain.Scalar("uint64", 0), *(toolchain.Scalar("int64", n) for n in strides)]
    values = [numbers[name] for name in rule.numbers]
    common += [toolchain.Scalar("int32", n) for n in (heads, rows, columns, seqlen_q, seqlen_k, offset, *values, *[0] * (3 - len(values)))]
    device = toolchain.device(facts.index or 0) if make is None else None
    make, arch = make or toolchain.prepare, device.capability if device else (9, 0)
    stream = home.current_stream(facts.index or 0)() if device else 0

    def launch(build, parameters):
        request = toolchain.KernelRequest(_BUILD + "build:" + build, config, arch)
        run = make(request, [*common, *parameters], grid=(blocks,), threads=THREADS, device=device, operands=names)
        run(tuple(addresses.get(name, 0) for name in names), stream)

    written = [toolchain.Pointer("lists"), toolchain.Scalar("int32", states_of_mask)]
    launch("build_states", [*written, toolchain.Array("counters", "int32", (masks * COUNTERS,), (4,))])
    found = home.values(counters).reshape(masks, COUNTERS)
    words = home.allocator(like, (batch, heads, words_of(seqlen_q, seqlen_k, int(found[:, 0].max()))), "int32")(None)
    home.clear(words, None)
    addresses["block_mask"] = home.address(words)
    launch("build_bits", [*written, toolchain.Pointer("block_mask"), *(toolchain.Scalar("int32", n) for n in (words.shape[2], states_of_mask))])
    partial, full = (int(n) for n in found.sum(axis=0))
    return words, Counts(full, partial, blocks - full - partial)


def _strides_of(facts, name) -> tuple[int, ...]:
    """Along batch, heads, queries and keys, 0 along axes of one element."""
    own = tuple(step if n > 1 else 0 for n, step in zip(facts.shape, facts.strides, strict=True))
    if name == "mask":
        return (0,) * (4 - len(own)) + own
    of_batch, of_row = own
    return (of_batch, 0, of_row, 0) if name == "of_queries" else (of_batch, 0, 0, of_row)
