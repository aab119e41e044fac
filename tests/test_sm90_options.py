"""Options of the Hopper kernel without a GPU.

Straight-line bodies are run on NumPy arrays, all threads at once, put together as the kernels do, and held to the definition; and representative
plans compile without spills.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import packed_cases
import pytest

from numbaflash import dispatch, reference, testing, toolchain
from numbaflash.block_mask import BlockMask
from numbaflash.dispatch import BackwardLayouts, Device, Layout, Layouts, contiguous_strides
from numbaflash.kernels import bands, dropout, packing, sm90
from numbaflash.kernels.bands import Band, KeyBand
from numbaflash.kernels.blocks.launch import Lists
from numbaflash.kernels.sm90 import backward
from numbaflash.kernels.sm90 import packed as sequences
from numbaflash.kernels.sm90 import scores as bodies
from numbaflash.kernels.sm90.backward import bias, passes
from numbaflash.kernels.sm90.backward import scores as key_scores
from numbaflash.kernels.sm90.backward.config import kv_tiles, visible_queries
from numbaflash.kernels.sm90.backward.scores import KeyScores
from numbaflash.kernels.sm90.config import MAX_SHARED, SharedMemory, forward_config
from numbaflash.kernels.sm90.options import KEYS_OF_A_DRAW, ROUND_KEYS, kernel_keys
from numbaflash.kernels.sm90.scores import LOG2E, Scores
from numbaflash.problem import ITEMSIZE, make_packed_problem, make_problem, trim_keys
from numbaflash.ptx import fragment, operations
from numbaflash.ptx.simulated import SimulatorOps
from numbaflash.testing import BackwardCase, Case, Placement
from numbaflash.testing.exact import spread_nonfinite
from numbaflash.toolchain.launch import check_launch

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")


class VectorOps(SimulatorOps):
    """Bodies on all threads of a warpgroup at once: an array for each register."""

    truth = staticmethod(lambda condition: np.asarray(condition).astype(np.int32))
    narrow = staticmethod(lambda x: np.asarray(x).astype(np.int32))
    real = staticmethod(lambda dtype, x: np.asarray(x).astype(dtype))
    as_float = staticmethod(lambda word: np.asarray(word, np.int32).view(np.float32))
    memory = []  # (first address, bytes) of what may be read

    @classmethod
    def halves(cls, x):
        return [cls.narrow(x), cls.narrow(np.asarray(x) >> 32)]

    @staticmethod
    def select(condition, a, b):
        return np.where(condition, a, np.asarray(b, np.asarray(a).dtype))

    @staticmethod
    def wide_product(a, b):
        product = (np.asarray(a).astype(np.int64) & 0xFFFFFFFF).astype(np.uint64) * np.uint64(int(b) & 0xFFFFFFFF)
        return [np.asarray(x).astype(np.uint32).view(np.int32) for x in (product & np.uint64(0xFFFFFFFF), product >> np.uint64(32))]

    @staticmethod
    def pair(dtype, word):
        halves = np.asarray(word, np.int32)[..., None].view(np.uint16)
        values = halves.view(np.float16).astype(np.float32) if dtype == "float16" else (halves.astype(np.uint32) << 16).view(np.float32)
        return [values[..., 0], values[..., 1]]

    @classmethod
    def places(cls, address, size):
        """Indices of addresses in the bytes of the one operand in which they all lie."""
        address = np.atleast_1d(address)
        for base, room in cls.memory:
            at = address - base
            if ((at >= 0) & (at + size <= room.size)).all():
                return room, at
        raise IndexError("an address lies outside of every operand")

    @classmethod
    def fetch(cls, kind, address, step, count=None, bound=0):
        given, result = {"u8": ("u1", "i4"), "u16": ("u2", "i4"), "b32": ("i4", "i4"), "s64": ("i8", "i8"), "f32": ("f4", "f4")}[kind]
        size, address = np.dtype(given).itemsize, np.asarray(address) + step
        valid = np.broadcast_to(True if count is None else np.asarray(count) > bound, address.shape)
        found = np.zeros(address.shape, result)
        if valid.any():
            room, at = cls.places(address[valid], size)
            found[valid] = room[at[:, None] + np.arange(size)].view(given)[:, 0].astype(result)
        return found if found.ndim else found[()]

    @classmethod
    def load_at(cls, address, valid):
        return cls.fetch("f32", *np.broadcast_arrays(address, 0)[:1], 0, np.asarray(valid).astype(np.int32))

    @classmethod
    def store_at(cls, address, value, valid):
        address, value, valid = (np.atleast_1d(x) for x in np.broadcast_arrays(address, np.float32(value), valid))
        if valid.any():
            room, at = cls.places(address[valid], 4)
            room[at[:, None] + np.arange(4)] = value[valid][:, None].view(np.uint8)

    @staticmethod
    def exchange(values, mask):
        return [np.asarray(x)[np.arange(np.size(x)) ^ mask] if np.ndim(x) else x for x in values]


def vectorised(result, argtypes, body):
    def function(*args):
        with np.errstate(all="ignore"):
            return body(VectorOps, *args)

    return function


@pytest.fixture
def vectors(monkeypatch):
    """Bodies become functions of arrays."""
    for module in (bodies, bands, key_scores, passes, bias, sequences):
        monkeypatch.setattr(module, "straight_line", vectorised)
    found = {"zero": lambda: np.int32(0), "following": lambda n: n + 1, "within_warp": lambda thread: thread & 31, "rows": FakeRows()}
    found |= {"warp": SimpleNamespace(ballot=np.any), "unseen": SimpleNamespace(queries_that_see=queries_that_see)}
    for name, value in found.items():
        monkeypatch.setattr(passes, name, value)
    return monkeypatch


def queries_that_see(config):
    """What `numbaflash.kernels.sm90.backward.unseen` does, of any number of queries."""
    sees = Scores(64, config.of_products.options).sees(1, config.left, config.right)

    def sees_a_key(query, lane, batch, head, bounds, options):
        keys = np.arange(bounds[1], dtype=np.int32)
        found = {n: bool(len(keys)) and sees(n, keys, batch, head, bounds, options).any() for n in np.unique(query)}
        return np.int32([found[n] for n in query])

    return sees_a_key, None


def lay_out(problem, memory, kind=Layouts):
    """The operands of a case as the dispatcher describes them."""
    found = {}
    for name, each in memory.items():
        view, shape = each.view(), problem.shape_of(name)
        strides = (0,) * (len(shape) - view.ndim) + view.strides
        strides = tuple(0 if n == 1 else step for n, step in zip((1,) * (len(shape) - view.ndim) + view.shape, strides, strict=True))
        address = view.ctypes.data
        found[name] = Layout(shape, strides, math.gcd(address, 16))
    return kind(**found)


def operands_of(case):
    """The memory of a case; in the place of a mask that is handed over as a `BlockMask`, its words."""
    memory = case.memory()
    if case.as_blocks and "mask" in memory:
        mask = memory.pop("mask").decoded().astype(bool)
        words = BlockMask.from_mask(mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k).words
        memory["block_mask"] = SimpleNamespace(view=lambda: words, bits=words.reshape(-1))
    return memory


def seen_pairs(case):
    """``f(batch, head)``: which keys queries see, by definition."""
    given = {name: x for name, x in case.given_options(case.memory()).items() if name != "seed"}
    return lambda batch, head: reference.visible(case.problem, batch, head, **given)


def lists_of(problem):
    """Lists of tiles of 64 keys, of which only the parameters matter here."""
    return Lists(problem, problem, 64, 64, problem.group, of_keys=True, ranked=True) if problem.masked else None


THREAD = np.arange(128)
LANE = np.int32(THREAD % 32)


def readable(*arrays):
    """What `VectorOps` may read."""
    return [(x.ctypes.data, x.view(np.uint8)) for x in arrays]


def argument(parameter, case, memory):
    """A kernel's parameter; an address is 0 where there is no operand."""
    if isinstance(parameter, toolchain.Scalar):
        return {"int32": np.int32, "int64": np.int64, "float32": np.float32}[parameter.kind](parameter.value)
    if parameter.operand == "seed":
        return np.uint64((case.dropout_seed + parameter.offset) % 2**64).view(np.int64)
    return np.int64(memory[parameter.operand].view().ctypes.data + parameter.offset if parameter.operand in memory else 0)


def padded(x, rows):
    return np.concatenate([x, np.zeros((rows - len(x), x.shape[1]), x.dtype)])


class Model:
    """One consumer warpgroup of the forward kernel, all of its threads at once; tiles of 64 rows and blocks of 32 keys."""

    def __init__(self, case, **changes):
        self.memory = operands_of(case)
        self.seen = seen_pairs(case) if case.problem.masked else None
        self.prepare(case, case.problem, lay_out(case.problem, self.memory), **changes)

    def prepare(self, case, problem, layouts, **changes):
        self.case, self.problem, self.layouts = case, problem, layouts
        self.config = config = replace(forward_config(self.problem, self.layouts), q_tile=64, kv_block=32, **changes)
        self.plain, self.first = kernel_keys(self.problem)
        VectorOps.memory = readable(*(each.bits for each in self.memory.values()))
        self.options = [
            argument(x, case, self.memory) for x in config.options.arguments(self.problem, self.layouts, self.first, sm90.lists_of(problem, config))
        ]
        self.of = of = Scores(config.kv_block, config.options)
        pack = config.pack
        self.band = Band(64, config.kv_block, pack, config.left, config.right, padded=config.options.seqlens_q is not None)
        self.of_tile, self.of_warpgroup, self.limits = self.band.of_tile(), self.band.of_warpgroup(), self.band.limits()
        self.bounds_of_entry, self.take_seat, self.finish = of.bounds_of_entry(config.right), of.take_seat(pack), of.finish(pack)
        self.fetch = {guarded: of.fetch(guarded) for guarded in (False, True)}
        self.change, self.hide, self.draw, self.drop = of.change(), of.hide(pack), of.draw(), of.drop()
        self.fetch_mask, self.limits_anew = of.fetch_mask(pack), self.band.limits_of_thread()
        self.seen_keys, self.sees = of.seen_keys(config.left), of.sees(pack, config.left, config.right)
        self.scale_log2 = np.float32(LOG2E * abs(config.options.size_of_unit(self.plain) or sm90._TINY_SCALE))
        self.row, self.column = np.int32(THREAD // 32 * 16 + THREAD % 32 // 4), np.int32(THREAD % 4 * 2)
        self.at = [(self.row + 8 * (i >> 1 & 1), self.column + 8 * (i >> 2) + (i & 1)) for i in range(config.kv_block // 2)]

    def run(self):
        problem, config = self.problem, self.config
        q, k, v = (self.memory[name].decoded().astype(np.float32) for name in "qkv")
        self.k, self.v = (x[:, self.first : self.first + self.plain.seqlen_k] for x in (k, v))
        out, lse = np.full(problem.out_shape, np.nan), np.full(problem.lse_shape, np.nan)
        for batch, head in itertools.product(range(problem.batch), range(problem.heads // config.pack)):
            for tile in range(-(-problem.seqlen_q * config.pack // 64)):
                for row, (o, end) in enumerate(zip(*self.tile(q, batch, head, tile), strict=True)):
                    query, query_head = divmod(tile * 64 + row, config.pack)
                    if query < problem.seqlen_q:
                        out[batch, query, head * config.pack + query_head] = o
                        lse[batch, head * config.pack + query_head, query] = end
        return out, lse

    @property
    def whole(self):
        plain = self.plain
        return list(np.int32([plain.seqlen_q, plain.seqlen_k, plain.offset, plain.left or 0, plain.right or 0]))

    def tile(self, q, batch, head, tile, bounds=None, sequence=None):
        """(output, LSE) of a tile of a batch entry's rows; packed ones have bounds, and a number that is not that of the entry in the arrays."""
        plain, config, options = self.plain, self.config, self.options
        batch, head, tile = np.int32(batch), np.int32(head), np.int32(tile)
        entry = batch if sequence is None else sequence
        if bounds is None:
            bounds = [np.int32(x) for x in self.bounds_of_entry(batch, self.whole, options)] if config.options.lengths else self.whole
        first, end, my_first, my_end, left_border, right_border, _ = (int(x) for x in self.of_warpgroup(tile, np.int32(0), bounds))
        assert (first, end) == tuple(self.of_tile(tile, bounds))
        assert first <= my_first <= my_end <= end or my_first == my_end
        mine = np.zeros((64, plain.head_dim), np.float32)
        for row in range(64):
            query, query_head = divmod(tile * 64 + row, config.pack)
            if query < q.shape[1]:
                mine[row] = q[batch, query, head * config.pack + query_head]
        kv_head, row = head // (plain.group // config.pack), tile * np.int32(64) + self.row
        limits = self.limits(row, self.column, bounds)
        seat = self.take_seat(row, self.column, entry, head, np.int32(plain.seqlen_q) if sequence is None else bounds[0], bounds, options)
        m, l, o = np.full(64, -np.inf, np.float32), np.zeros(64, np.float32), np.zeros((64, plain.head_dim_v), np.float32)
        listed = config.options.masked
        for j in map(np.int32, reversed(range(my_first, my_end))):
            if listed:
                some, every = self.listed(batch, head, tile, j)
                if not some:
                    continue
            partial = listed and not every
            inside = slice(j * config.kv_block, (j + 1) * config.kv_block)
            keys, values = (padded(x[batch, inside, kv_head], config.kv_block) for x in (self.k, self.v))
            if config.inspected:
                self.inspect(values, j, partial, tile, batch, head, bounds)
            with np.errstate(all="ignore"):
                products = mine @ keys.T
            s = [products[at] for at in self.at]
            words = self.fetch[j == my_end - 1](seat, j, options) if config.options.bias else [np.int32(0)]
            if config.negative_scale:
                s = [-x for x in s]
            if config.options.changes:
                s = self.change(s, words, seat, j, options)
            if partial:
                assert [(np.asarray(a) == b).all() for a, b in zip(self.limits_anew(row, LANE, bounds), limits, strict=True)] == [True] * 4
            if partial if listed else j >= right_border or j < left_border or j == my_end - 1:
                for i in range(len(s)):
                    r, column = i >> 1 & 1, 8 * (i >> 2) + (i & 1) + j * config.kv_block
                    hidden = column > limits[2 + r]
                    if config.left:
                        hidden = hidden | (column < limits[r])
                    s[i] = np.where(hidden, np.float32(-np.inf), s[i])
            if partial:
                mask_words = self.fetch_mask(row, LANE, j, batch, head, bounds[0], options)
                s = self.hide(s, mask_words, row, LANE, j, batch, head, bounds[0], bounds[1], options)
            # What `fragment.online_softmax` does, in another order.
            scores, scale, before = self.gathered(s), self.scale_log2, m
            with np.errstate(all="ignore"):
                if config.options.falls:
                    rows = self.of.fall_to()(seat, j, options)
                    scores = self.gathered([x + rows[i >> 1 & 1] for i, x in enumerate(s)])
                if config.options.bounded:
                    before = m = np.full(64, self.of.start()(options)[0])
                else:
                    m = np.fmax(m, np.fmax.reduce(scores, axis=1))
                base = np.where(m == -np.inf, np.float32(0), m)
                shifted = (scores - base[:, None]) * scale if config.options.lowest_scores else scores * scale - (base * scale)[:, None]
                p, a = np.exp2(shifted), np.exp2((before - base) * scale)
                l = l * a + p.sum(axis=1)
                if config.options.dropout:
                    kept = self.drop([np.full(128, -1, np.int32)] * (config.kv_block // 4), self.draw(seat, j, options), options)
                    p = p * self.gathered([kept[i >> 1] >> 16 * (i & 1) & 1 for i in range(config.kv_block // 2)])
                o = o * a[:, None] + p @ values
        of_quad = THREAD % 4 == 0
        ones = np.ones(128, np.float32)
        statistics = [*(m[self.row + r] for r in (0, 8)), *(np.where(of_quad, l[self.row + r], np.float32(0)) for r in (0, 8)), ones, ones]
        ends = self.finish(statistics, row, head, bounds[0], self.scale_log2, options)
        self.statistics = ends
        lse, factor = np.empty(64), np.empty(64, np.float32)
        for r in (0, 1):
            lse[self.row + 8 * r], factor[self.row + 8 * r] = ends[r], ends[4 + r]
        with np.errstate(all="ignore"):
            return np.where(factor[:, None] == 0, 0, o * factor[:, None]), lse

    def gathered(self, s):
        """The block of which a fragment is made."""
        block = np.full((64, self.config.kv_block), np.nan, np.float32)
        for at, x in zip(self.at, s, strict=True):
            block[at] = x
        return block

    def listed(self, batch, head, tile, j):
        """Whether some pair of a tile and a block is seen, and whether all are that there are."""
        pack, block = self.config.pack, self.config.kv_block
        rows = [divmod(row, pack) for row in range(tile * 64, min((tile + 1) * 64, self.plain.seqlen_q * pack))]
        keys = slice(self.first + j * block, self.first + (j + 1) * block)
        seen = np.array([self.seen(batch, head * pack + query_head)[query, keys] for query, query_head in rows])
        return seen.any(), seen.all() and seen.shape[1] == block

    def inspect(self, values, j, partial, tile, batch, head, bounds):
        first, end = self.seen_keys(j, bounds)
        if self.config.options.masked and not partial:
            return
        if not self.config.options.masked and first <= 0 and end >= self.config.kv_block:
            return
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1)):
            seen = first <= row < end
            if seen and self.config.options.masked:
                key = np.int32(j * self.config.kv_block + row)
                seen = self.sees(np.int32(tile * 64 + np.arange(64)), key, batch, head, bounds, self.options).any()
            if not seen:
                values[row] = 0


B, H, SQ, SK = 2, 4, 35, 74
ALONE = {
    "mask": dict(mask_shape=(B, 1, SQ, SK)),
    "mask, every head": dict(mask_shape=(B, H, SQ, SK), mask_values="blocks", hidden="nan"),
    "mask of keys": dict(mask_shape=(B, 1, 1, SK), hidden="nan"),
    "mask of queries": dict(mask_shape=(SQ, 1), hidden="nan"),
    "mask, rows without keys": dict(mask_shape=(B, H, SQ, SK), mask_values="rows", hidden="inf"),
    "mask, nothing seen": dict(mask_shape=(SQ, SK), mask_values="none", hidden="nan"),
    "mask, keys first in memory": dict(mask_shape=(SQ, SK), mask=Placement(order=(1, 0)), hidden="nan"),
    "mask, reversed": dict(mask_shape=(SQ, SK), mask=Placement(step=(-1, -2)), hidden="nan"),
    "mask, odd rows": dict(mask_shape=(SQ, SK), mask=Placement(pad=(0, 1)), hidden="nan"),
    "block mask": dict(mask_shape=(B, H, SQ, SK), as_blocks=True, hidden="nan"),
    "block mask, one head": dict(mask_shape=(SQ, SK), mask_values="sliding", as_blocks=True, hidden="nan"),
    "block mask of keys": dict(mask_shape=(B, 1, 1, SK), as_blocks=True, hidden="nan"),
    "lengths": dict(lengths_q="random", lengths_k="random", hidden="nan"),
    "lengths of keys": dict(lengths_k="edges", lengths_dtype="int64", hidden="nan"),
    "lengths of queries": dict(lengths_q="edges", hidden="inf"),
    "bias": dict(bias_shape=(B, H, SQ, SK)),
    "bias, float16": dict(bias_shape=(B, H, SQ, SK), bias_dtype="float16"),
    "bias, float32": dict(bias_shape=(H, SQ, SK), bias_dtype="float32"),
    "bias, broadcast and reversed": dict(bias_shape=(H, SQ, SK), bias=Placement(step=(1, -1, -1))),
    "bias, lowest numbers": dict(bias_shape=(H, SQ, SK), bias_values="lowest", bias_dtype="float32"),
    "bias, minus infinity": dict(bias_shape=(B, H, SQ, SK), bias_values="infinite", hidden="nan"),
    "bias of heads": dict(bias_shape=(H, 1, 1)),
    "alibi": dict(alibi_shape=(H,)),
    "alibi, every batch entry": dict(alibi_shape=(B, H)),
    "softcap": dict(softcap=1.5, values="big"),
    "softcap, far away": dict(softcap=1000.0),
    "softcap, farther": dict(softcap=1e30, scale=-3.0),
    "sinks": dict(with_sinks=True, seed=2, scale=-1.0),
    "dropout": dict(dropout=0.3, dropout_seed=2**64 - 5, hidden="nan"),
}  # fmt: skip
TOGETHER = dict(
    **dict(mask_shape=(B, 1, SQ, SK), bias_shape=(H, SQ, SK), alibi_shape=(H,), softcap=2.0, with_sinks=True),
    **dict(dropout=0.1, dropout_seed=77, lengths_q="edges", lengths_k="random", hidden="nan"),
)
ALONE |= {"together": TOGETHER, "together, no dropout": TOGETHER | {"dropout": 0.0, "bias_dtype": "float32"}}
BANDS = ({}, {"causal": True}, {"causal": "top_left", "window": (30, None)}, {"window": (12, 7)})


def check(case, **changes):
    out, lse = Model(case, **changes).run()
    memory = case.memory()
    given = case.given_options(memory)
    known = testing.expected(case.problem, *(memory[name].decoded() for name in "qkv"), **given)
    v = memory["v"].decoded()
    if not np.isfinite(v).all():
        known = spread_nonfinite(known, case.problem, v, **given)
    testing.compare(known, out, lse)


LENGTHS = dict(batch=6, heads=1, kv_heads=1, seqlen_q=20, lengths_q="random", lengths_k="random", hidden="nan")
EDGES = {
    "dropout counts keys from the first of all": dict(seqlen_k=160, window=(12, 7), dropout=0.3, hidden="nan"),
    "dropout, an even cut": dict(seqlen_k=160, window=(5, 7), dropout=0.5, mask_shape=(SQ, 160), hidden="nan"),
    "block mask of a cut": dict(seqlen_k=300, window=(5, 7), mask_shape=(B, 1, SQ, 300), as_blocks=True, hidden="nan"),
    "block mask, many heads a tile": dict(heads=32, kv_heads=1, batch=1, seqlen_q=3, mask_shape=(32, 3, SK), as_blocks=True, hidden="nan"),
    "mask of a cut": dict(seqlen_k=140, window=(5, 7), mask_shape=(B, 1, SQ, 140), bias_shape=(SQ, 140), hidden="nan"),
    "more queries than keys": dict(seqlen_k=20, causal=True, mask_shape=(SQ, 20), alibi_shape=(H,), hidden="nan"),
    "many heads a tile": dict(heads=32, kv_heads=1, batch=1, seqlen_q=3, alibi_shape=(32,), with_sinks=True, bias_shape=(32, 3, 1), lengths_q="full"),
    **{f"lengths {n}": dict(LENGTHS, seed=n) for n in range(4)},
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_edges(vectors, name):
    shape = dict(dtype="float16", batch=B, heads=H, kv_heads=2, seqlen_q=SQ, seqlen_k=SK, head_dim=8, head_dim_v=8)
    for band in BANDS if "lengths" in name else ({},):
        check(Case(**shape | EDGES[name] | band))


@pytest.mark.parametrize("name", ALONE)
def test_bodies_are_what_is_defined(vectors, name):
    for band, kv_heads in itertools.product(BANDS, (H, 2)):
        shape = dict(dtype="bfloat16", batch=B, heads=H, kv_heads=kv_heads, seqlen_q=SQ, seqlen_k=SK, head_dim=8, head_dim_v=8)
        check(Case(**shape, **band, **ALONE[name]))


# ---- gradients


class FakeRows:
    """What `numbaflash.ptx.rows` does, on all threads."""

    @staticmethod
    def dot(element):
        def elements(address, valid):
            words = [VectorOps.fetch("b32", address, 4 * n, np.asarray(valid)) for n in range(4)]
            dtype = {"f16": "float16", "bf16": "bfloat16"}[element]
            return np.stack([x for word in words for x in VectorOps.pair(dtype, word)])

        def dot(a, b, valid):
            with np.errstate(all="ignore"):
                return (elements(np.asarray(a).astype(np.int64), valid) * elements(np.asarray(b).astype(np.int64), valid)).sum(axis=0)

        return dot

    @staticmethod
    def zero(address):
        pass


class PackedModel(Model):
    """The same of packed sequences: every number of a tile, in arrays of which each row may be another sequence's."""

    def __init__(self, case, **changes):
        problem, memory = case.problem, case.memory()
        # Rows of 1 are where a result is stored: an address is then a row.
        layouts = replace(lay_out(problem, memory), out=Layout(problem.out_shape, (problem.heads, 1, 0)))
        self.memory = {name: each for name, each in memory.items() if name not in case.results}
        self.values = {name: each.decoded() for name, each in self.memory.items()}
        self.out = np.full((problem.total_q * problem.heads, problem.head_dim_v), np.nan)
        self.lse = np.full(problem.lse_shape, np.nan, np.float32)
        self.prepare(case, problem, layouts, **changes)
        VectorOps.memory += readable(self.lse.reshape(-1))

    def run(self):
        problem, config, options = self.problem, self.config, self.options
        side = sequences.Sequences(config.options, "q", 64 // config.pack, config.right)
        place, bisect, ascend, entries = side.place(), side.bisect(), side.ascend(), int(side.entries()(options))
        write_lse, is_whole = sequences.write_lse(config.options, config.pack), sequences.is_whole(64 // config.pack)
        address_of = sequences.address_of(config.options, "out", config.pack)
        order = np.bitwise_and.reduce([int(ascend(np.int32(entry), options)) for entry in range(entries)]) & sequences.ALL_ASCEND
        q, k, v = (np.concatenate([self.values[name], np.zeros_like(self.values[name][:1])]).astype(np.float32)[None] for name in "qkv")
        for number, head in itertools.product(
            range(packing.most_tiles(problem.total_q, problem.batch, 64 // config.pack)), range(problem.heads // config.pack)
        ):
            low, high = np.int32(0), np.int32(entries)
            while high - low > 1:
                low, high = (np.int32(x) for x in bisect(low, high, np.int32(number), options))
            (sequence, tile, first, stored, first_k), bounds = (
                [np.int32(x) for x in part] for part in place(low, np.int32(number), np.int32(order), self.whole, options)
            )
            assert 0 <= sequence < problem.batch and tile >= 0 and 0 <= first <= problem.total_q and 0 <= first_k <= problem.total_k
            assert stored <= problem.total_q - first and bounds[1] <= problem.total_k - first_k
            self.k, self.v = k[:, first_k:], v[:, first_k:]
            out, _ = self.tile(q[:, first:], 0, head, tile, bounds, sequence)
            row, lane = tile * np.int32(64) + self.row, np.int32(THREAD % 32)
            write_lse(np.int64(self.lse.ctypes.data), row, lane, first, stored, np.int32(head), self.statistics, options)
            query = tile * np.int32(64 // config.pack)
            count = 64 // config.pack if is_whole(query, stored) else stored - query
            address, of_row, of_head = address_of(first + query, np.int32(head), options)
            for r in range(64):
                if r // config.pack < count:
                    at = address + r // config.pack * of_row + r % config.pack * of_head
                    assert np.isnan(self.out[at]).all(), "a row is stored once"
                    self.out[at] = out[r]
        return self.out.reshape(problem.out_shape), self.lse


LONG = dict(lengths_q=(70, 130, 0, 64, 3), lengths_k=(140, 65, 33, 0, 64), before=(5, 70), after=(66, 1), dtypes=("int64", "int32"))
PACKED_CASES = {name: case for name, case in packed_cases.CASES.items() if name not in ("no sequence", "no key", "float64", "strides")}
PACKED_CASES |= {
    "long": packed_cases.case(**LONG),
    "long, heads of a group share tiles": packed_cases.case(**LONG, causal=True, heads=8, kv_heads=1),
    "long, window": packed_cases.case(**LONG, window=(40, 9), heads=4, kv_heads=2, scale=-0.3, with_sinks=True),
    "long, every option": packed_cases.case(**LONG | packed_cases.EVERYTHING | {"alibi_shape": (5, 2)}),
}


@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_sequences(vectors, name):
    case = packed_cases.forward_of(replace(PACKED_CASES[name], dtype="bfloat16"))
    testing.check_forward(case, *PackedModel(case).run())


class FakeCuda:
    """Where a thread stands: all of a block."""

    def __init__(self, threads):
        self.threadIdx, self.blockIdx = SimpleNamespace(x=np.arange(threads, dtype=np.int32)), SimpleNamespace(x=np.int32(0))


class GradientModel:
    """The kernels of the gradients on all threads of a warpgroup at once; tiles of 64 keys, blocks of ``q_block`` queries in fragments of
    ``columns``."""

    def __init__(self, patch, case, q_block, columns):
        self.patch, self.case, self.memory, self.problem = patch, case, operands_of(case), case.problem
        self.seen = seen_pairs(case) if case.problem.masked else None
        problem = self.problem
        self.layouts = lay_out(problem, self.memory, BackwardLayouts)
        made = backward.plan(problem, self.layouts, H200, False)
        self.config = config = replace(made.config, q_block=q_block, kv_tile=64)
        self.columns, self.options_of = columns, config.options
        self.q_blocks = -(-problem.seqlen_q // q_block)
        self.blocks = problem.batch * problem.heads * self.q_blocks
        self.work = {name: np.full(self.blocks * q_block, np.nan, np.float32) for name in ("shifts", "deltas")}
        self.dsinks = np.full(problem.heads, np.nan, np.float32)
        VectorOps.memory = readable(*(each.bits for each in self.memory.values()), *self.work.values(), self.dsinks)

    def rows(self):
        """The shifts and deltas, and the gradients of sinks."""
        config, plan = self.config, SimpleNamespace(config=self.config, layouts=self.layouts, problem=self.problem)
        places = dict(shifts="shifts", deltas="deltas", sums=None, turns=None)
        workspace = SimpleNamespace(q_blocks=self.q_blocks, **places)
        given = []
        for parameter in backward._row_parameters(plan, workspace):
            if isinstance(parameter, toolchain.Pointer) and parameter.operand == "workspace":
                known = self.work.get(parameter.offset)  # lists of blocks are not read here
                given.append(np.int64(0 if known is None else known.ctypes.data))
            else:
                given.append(argument(parameter, self.case, self.memory))
        fake = FakeCuda(passes.ROW_THREADS)
        self.patch.setattr(passes, "cuda", fake)
        kernel = passes.build_rows(config).function
        for tile in range(self.blocks):
            fake.blockIdx.x = np.int32(tile)
            kernel(*given)
        if config.with_dsinks:
            with self.patch.context() as patch:
                self.sinks(patch)

    def sinks(self, patch):
        """The kernel of the sinks' gradients, in a block of one thread."""
        problem, config = self.problem, self.config
        options = [argument(x, self.case, self.memory) for x in config.options.of_rows.arguments(problem, self.layouts)]
        fake = FakeCuda(1)
        fake.threadIdx.x = np.int32(0)
        fake.shared, fake.syncthreads = SimpleNamespace(array=lambda n, kind: np.zeros(n, np.float32)), lambda: None
        found = {"cuda": fake, "SINK_THREADS": 1, "WARP": 1, "zero": lambda: 0, "following": lambda n: n + 1}
        for name, value in (found | dict.fromkeys(("within_warp", "warp_of"), lambda thread: 0)).items():
            patch.setattr(passes, name, value)
        patch.setattr(VectorOps, "exchange", staticmethod(lambda values, mask: [np.float32(0)] * len(values)))
        kernel = passes.build_dsinks(config).function
        addresses = (self.dsinks.ctypes.data, 4, self.memory["lse"].view().ctypes.data, self.work["deltas"].ctypes.data)
        counts = problem.batch, backward._rows(problem), problem.heads, self.q_blocks * config.q_block
        for head in range(problem.heads):
            fake.blockIdx.x = np.int32(head)
            kernel(*(np.int64(x) for x in addresses), *(np.int32(x) for x in counts), *options)

    def run(self):
        problem, config = self.problem, self.config
        self.rows()
        options = [argument(x, self.case, self.memory) for x in config.of_products.options.arguments(problem, self.layouts, lists=lists_of(problem))]
        bounds_of_entry = Scores(64, config.of_products.options).bounds_of_entry(False)
        first_query, queries = visible_queries(problem)
        trimmed, first_key = trim_keys(problem)
        q, k, v, dout = (self.memory[name].decoded().astype(np.float32) for name in ("q", "k", "v", "dout"))
        q, dout = (self.outside(x, first_query, first_query + queries) for x in (q, dout))
        k, v = (self.outside(x, first_key, first_key + trimmed.seqlen_k) for x in (k, v))
        dq, dk, dv = (np.zeros(shape, np.float32) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
        whole = np.int32([problem.seqlen_q, problem.seqlen_k, problem.offset, problem.left or 0, problem.right or 0])
        scale_log2 = self.scale_log2
        shifts, deltas = (self.work[name].reshape(problem.batch, problem.heads, self.q_blocks, config.q_block) for name in ("shifts", "deltas"))
        for batch, kv_head, n in itertools.product(range(problem.batch), range(problem.kv_heads), range(-(-problem.seqlen_k // 64))):
            bounds = bounds_of_entry(np.int32(batch), whole, options) if config.options.lengths else list(whole)
            tile_dk, tile_dv = self.tile(q, k, v, dout, dq, shifts, deltas, batch, kv_head, n, bounds)
            dk[batch, n * 64 : n * 64 + 64, kv_head] = (tile_dk * np.float32(problem.scale))[: problem.seqlen_k - n * 64]
            dv[batch, n * 64 : n * 64 + 64, kv_head] = tile_dv[: problem.seqlen_k - n * 64]
        if config.bounded or config.options.hides:
            dead = np.isinf(shifts).reshape(problem.batch, problem.heads, -1)[..., : problem.seqlen_q]
            dq[np.moveaxis(dead, 1, 2)] = 0
        sinks, of_bias = self.dsinks if config.with_dsinks else None, None
        if config.with_dbias:
            of_bias = self.bias(q, k, v, dout, bounds_of_entry, whole, options, scale_log2)
        return dq * np.float32(problem.scale), dk, dv, of_bias, sinks

    @property
    def scale_log2(self):
        return np.float32(LOG2E * self.config.options.size_of_unit(self.problem))

    def tile(self, q, k, v, dout, dq, shifts, deltas, batch, kv_head, n, bounds, sequence=None):
        """(dK, dV) of a tile of keys, and what it adds to dQ; packed sequences have a number that is not that of the entry in the arrays."""
        problem, config, scale_log2 = self.problem, self.config, self.scale_log2
        options = [argument(x, self.case, self.memory) for x in config.of_products.options.arguments(problem, self.layouts, lists=lists_of(problem))]
        band = KeyBand(64, config.q_block, config.left, config.right, padded=config.options.lengths)
        walk, seen_keys, limits_of = band.walk(), band.seen(), band.limits()
        of, plain_of = KeyScores(self.columns, config.q_block, config.of_products.options, config.left), Scores(64, config.of_products.options)
        sees = plain_of.sees(1, config.left, config.right)
        take_seat, fetch, fetch_mask = of.take_seat(), of.fetch(), of.fetch_mask() if of.options.masked else None
        weigh, differentiate = ({masked: f(masked) for masked in (False, True)} for f in (of.weigh, of.differentiate))
        keys, values = (padded(x[batch, n * 64 : n * 64 + 64, kv_head], 64) for x in (k, v))
        is_seen = np.array([self.is_seen(j, batch, kv_head, bounds, seen_keys, sees, options) for j in range(n * 64, n * 64 + 64)])
        if config.cleans_keys:
            keys[~np.isfinite(keys).all(axis=1) & ~is_seen] = 0
        key = np.int32(n * 64 + THREAD // 32 * 16 + THREAD % 32 // 4)
        m, plain, border, steps = (int(x) for x in walk(np.int32(n), problem.group, 1, bounds))
        tile_dk, tile_dv = np.zeros((64, problem.head_dim), np.float32), np.zeros((64, problem.head_dim_v), np.float32)
        for step in range(steps):
            block, head = np.int32(m + step // problem.group), kv_head * problem.group + step % problem.group
            inside = slice(int(block) * config.q_block, (int(block) + 1) * config.q_block)
            rows, gradients = (padded(x[batch, inside, head], config.q_block) for x in (q, dout))
            shift, delta = shifts[batch, head, block], deltas[batch, head, block]
            masked = not plain <= step < border
            if self.seen:
                there = self.seen(batch, head)[inside, n * 64 : n * 64 + 64]
                if not self.seen_of_group(batch, kv_head)[inside, n * 64 : n * 64 + 64].any():
                    continue
                masked = not there.all() or there.shape[1] < 64
            if config.cleans_queries if masked else config.cleans_plain_queries:
                rows[np.isinf(shift)], gradients[np.isinf(shift)] = 0, 0
            with np.errstate(all="ignore"):
                s, dp = keys @ rows.T, values @ gradients.T
            p, ds = (np.full((64, config.q_block), np.nan, np.float32) for _ in "pd")
            for first in range(0, config.q_block, self.columns):
                column = np.int32(first + THREAD % 4 * 2)
                limits = limits_of(key, column, bounds)
                seat = take_seat(key, column, np.int32(batch if sequence is None else sequence), np.int32(problem.seqlen_k), bounds, options)
                words = fetch(seat, block, np.int32(head), options) if of.fetches else [np.int32(0)]
                at = [(key + 8 * (i >> 1 & 1) - n * 64, column + 8 * (i >> 2) + (i & 1)) for i in range(self.columns // 2)]
                of_columns = [column + 8 * (i // 2) + i % 2 for i in range(self.columns // 4)]
                mask_words = [np.int32(0)]
                if masked and fetch_mask:
                    place = np.int32(batch), np.int32(head), bounds[0], np.int32(problem.seqlen_k)
                    mask_words = fetch_mask(key, column, block, *place, options)
                given = (
                    [s[x] for x in at],
                    [shift[x] for x in of_columns],
                    words,
                    mask_words,
                    seat,
                    block,
                    np.int32(head),
                    limits,
                    scale_log2,
                    options,
                )
                weights, signed = weigh[masked](*given)
                kept = of.no_kept()() if not config.options.dropout else of.draw()(seat, block, np.int32(head), options)
                found = differentiate[masked](signed, [dp[x] for x in at], kept, [delta[x] for x in of_columns], options)
                if config.options.dropout:
                    weights = [x * (kept[i >> 1] >> 16 * (i & 1) & 1) for i, x in enumerate(weights)]
                for x, weight, gradient in zip(at, weights, found, strict=True):
                    p[x], ds[x] = weight, gradient
            with np.errstate(all="ignore"):
                tile_dv += p @ gradients
                tile_dk += ds @ rows
                dq[batch, inside, head] += (ds.T @ keys)[: dq.shape[1] - inside.start]
        if config.bounded or config.options.masked or config.options.lengths:
            tile_dk[~is_seen], tile_dv[~is_seen] = 0, 0
        if config.options.dropout:
            tile_dv *= of.keep_factor()(options)
        return tile_dk, tile_dv

    def seen_of_group(self, batch, kv_head):
        group = self.problem.group
        return np.logical_or.reduce([self.seen(batch, head) for head in range(kv_head * group, (kv_head + 1) * group)])

    def bias(self, q, k, v, dout, bounds_of_entry, whole, options, scale_log2):
        """The kernel of the bias's gradient: what each of its blocks comes to."""
        problem, config, layout = self.problem, self.config, self.layouts.dbias
        found = np.full(layout.shape, np.nan, np.float32)
        parts = bias.Parts(*config.dbias_axes, config.left, config.right)
        own_part, shares_of, part_of_turn, is_work = parts.own(), parts.shares(), parts.of_turn(), parts.is_work()
        of = KeyScores(64, 64, config.of_products.options, config.left, of_bias=True)
        take_seat, fetch, weigh, differentiate = of.take_seat(), of.fetch(), of.weigh(True), of.differentiate(True)
        fetch_mask = of.fetch_mask() if of.options.masked else lambda *place: [np.int32(0)]
        limits_of = KeyBand(bias.KV_TILE, bias.Q_BLOCK, config.left, config.right).limits()
        q_blocks, kv_tiles = backward._bias_tiles(problem)
        rows = {name: padded(x.reshape(problem.batch * problem.heads, -1).T, 64 * q_blocks).T for name, x in self.work.items()}
        rows["shifts"][:, self.q_blocks * config.q_block :] = np.inf
        numbers = [np.int32(n) for n in (*layout.shape[:2], problem.batch, problem.heads, q_blocks, kv_tiles)]
        blocks = math.prod(layout.shape[:2]) * math.prod(n for n, wanted in zip((q_blocks, kv_tiles), config.dbias_axes, strict=True) if wanted)
        for tile in range(blocks):
            own = own_part(np.int32(tile), numbers[1], *numbers[4:])
            shares = shares_of(*numbers)
            total = np.zeros((bias.KV_TILE, bias.Q_BLOCK), np.float32)
            for turn in range(int(shares[4])):
                batch, head, m, n = part_of_turn(np.int32(turn), own, shares)
                bounds = bounds_of_entry(batch, whole, options) if config.options.lengths else list(whole)
                if not is_work(m, n, bounds):
                    continue
                of_keys, of_queries = slice(int(n) * 128, int(n) * 128 + 128), slice(int(m) * 64, int(m) * 64 + 64)
                keys, values = (padded(x[batch, of_keys, head // problem.group], 128) for x in (k, v))
                queries, gradients = (padded(x[batch, of_queries, head], 64) for x in (q, dout))
                shift, delta = (rows[name][batch * problem.heads + head, of_queries] for name in ("shifts", "deltas"))
                with np.errstate(all="ignore"):
                    s, dp = keys @ queries.T, values @ gradients.T
                for first in (0, 64):
                    row, column = np.int32(first + THREAD // 32 * 16 + THREAD % 32 // 4), np.int32(THREAD % 4 * 2)
                    key = n * np.int32(bias.KV_TILE) + row
                    seat = take_seat(key, column, batch, np.int32(problem.seqlen_k), bounds, options)
                    at = [(row + 8 * (i >> 1 & 1), column + 8 * (i >> 2) + (i & 1)) for i in range(32)]
                    of_columns = [column + 8 * (i // 2) + i % 2 for i in range(16)]
                    limits, words = limits_of(key, column, bounds), fetch(seat, m, head, options)
                    shifts, deltas = ([x[c] for c in of_columns] for x in (shift, delta))
                    mask_words = fetch_mask(key, column, m, batch, head, bounds[0], np.int32(problem.seqlen_k), options)
                    _, p = weigh([s[x] for x in at], shifts, words, mask_words, seat, m, head, limits, scale_log2, options)
                    kept = of.draw()(seat, m, head, options) if config.options.dropout else of.no_kept()()
                    for x, ds in zip(at, differentiate(p, [dp[x] for x in at], kept, deltas, options), strict=True):
                        total[x] += ds
            part = total.T
            place = [np.s_[int(own[0])], np.s_[int(own[1])]]
            for axis, (first, size, wanted) in enumerate(zip(own[2:], (bias.Q_BLOCK, bias.KV_TILE), config.dbias_axes, strict=True)):
                part = part if wanted else part.sum(axis=axis, keepdims=True)
                place.append(np.s_[int(first) * size : (int(first) + 1) * size])
            shape = found[tuple(place)].shape
            found[tuple(place)] = part[: shape[0], : shape[1]]
        return found

    @staticmethod
    def outside(x, first, end):
        """Zeros where a tensor map does not reach."""
        x = x.copy()
        x[:, :first], x[:, end:] = 0, 0
        return x

    def is_seen(self, key, batch, kv_head, bounds, seen_keys, sees, options):
        found = bool(seen_keys(np.int32(key), bounds)[0])
        if not found or not self.config.options.masked:
            return found
        heads, query = range(kv_head * self.problem.group, (kv_head + 1) * self.problem.group), np.arange(bounds[0], dtype=np.int32)
        return any(sees(query, np.int32(key), np.int32(batch), np.int32(head), bounds, options).any() for head in heads)


class PackedGradientModel(GradientModel):
    """The same of packed sequences."""

    seen = None

    def __init__(self, patch, case, q_block, columns):
        self.patch, self.case, self.memory, self.problem = patch, case, case.memory(), case.problem
        problem, self.values = case.problem, {name: each.decoded() for name, each in self.memory.items()}
        self.layouts = lay_out(problem, self.memory, BackwardLayouts)
        config = backward.plan(problem, self.layouts, H200, False).config
        stored = replace(config.options, stored=())  # by functions that only a GPU has
        self.config = replace(config, q_block=q_block, kv_tile=64, options=stored)
        self.columns, self.q_blocks = columns, packing.most_tiles(problem.total_q, problem.batch, q_block)
        self.blocks = problem.heads * self.q_blocks
        self.work = {name: np.full(self.blocks * q_block, np.nan, np.float32) for name in ("shifts", "deltas")}
        self.dsinks = np.full(problem.heads, np.nan, np.float32)
        VectorOps.memory = readable(*(each.bits for each in self.memory.values()), *self.work.values(), self.dsinks)

    def run(self):
        problem, config = self.problem, self.config
        found = {"inline": lambda f: f, "zero": lambda: np.int32(0), "following": lambda n: n + np.int32(1)}
        options = [argument(x, self.case, self.memory) for x in config.of_products.options.arguments(problem, self.layouts, lists=lists_of(problem))]
        sides = {name: sequences.Sequences(config.of_products.options, name, n) for name, n in (("q", config.q_block), ("k", 64))}
        ascend = sides["q"].ascend()
        order = np.int32(np.bitwise_and.reduce([int(ascend(np.int32(entry), options)) for entry in range(problem.batch + 2)]) & 3)
        self.patch.setattr(passes.tickets, "order_of", lambda options: lambda given: order)
        for name, value in found.items():
            self.patch.setattr(sequences, name, value)
        self.rows()
        seek_q, seek_k = (sequences.seek(sides[name]) for name in "qk")
        whole = list(np.int32([problem.seqlen_q, problem.seqlen_k, problem.offset, problem.left or 0, problem.right or 0]))
        q, k, v, dout = (self.values[name].astype(np.float32)[None] for name in ("q", "k", "v", "dout"))
        dq = np.zeros(problem.q_shape, np.float32)
        dk, dv = (np.full(shape, np.nan, np.float32) for shape in (problem.k_shape, problem.v_shape))
        shifts, deltas = (self.work[name].reshape(1, problem.heads, self.q_blocks, config.q_block) for name in ("shifts", "deltas"))
        for number, kv_head in itertools.product(range(packing.most_tiles(problem.total_k, problem.batch, 64)), range(problem.kv_heads)):
            (sequence, n, first_k, stored, first_q), bounds = seek_k(np.int32(number), order, whole, options)
            bounds, n = [np.int32(x) for x in bounds], int(n)
            base = first_q // config.q_block + sequence + 1
            own = dq[None, first_q : first_q + bounds[0]], shifts[:, :, base:], deltas[:, :, base:]
            tile_dk, tile_dv = self.tile(q[:, first_q:], k[:, first_k:], v[:, first_k:], dout[:, first_q:], *own, 0, kv_head, n, bounds, sequence)
            count = max(0, min(64, stored - n * 64))
            inside = slice(first_k + n * 64, first_k + n * 64 + count)
            assert np.isnan(dk[inside, kv_head]).all() and count <= problem.total_k - first_k
            dk[inside, kv_head], dv[inside, kv_head] = (tile_dk * np.float32(problem.scale))[:count], tile_dv[:count]
        written = np.zeros(problem.total_q, int)
        for number in range(self.q_blocks):
            (_, m, first, stored, _), _ = seek_q(np.int32(number), order, whole, options)
            for row in range(max(0, min(config.q_block, stored - m * config.q_block))):
                query = first + m * config.q_block + row
                written[query] += 1
                dq[query, np.isinf(shifts[0, :, number, row])] = 0
        assert (written == 1).all()
        return dq * np.float32(problem.scale), dk, dv, self.dsinks


@pytest.mark.parametrize("name", PACKED_CASES)
def test_gradients_of_packed_sequences(vectors, name):
    case = replace(PACKED_CASES[name], dtype="bfloat16", needs=("q", "k", "v", *["sinks"] * PACKED_CASES[name].with_sinks))
    dq, dk, dv, dsinks = PackedGradientModel(vectors, case, 32, (32, 16)[case.causal is True]).run()
    testing.check_backward(case, dq, dk, dv, dsinks=dsinks if case.with_sinks else None)


def check_gradients(patch, case, q_block=32, columns=32):
    testing.check_backward(case, *GradientModel(patch, case, q_block, columns).run())


def gradient_case(**given):
    needs = ("q", "k", "v", *["bias"] * ("bias_shape" in given), *["sinks"] * ("with_sinks" in given))
    return BackwardCase(**dict(dtype="bfloat16", batch=B, heads=H, seqlen_q=SQ, seqlen_k=SK, head_dim=8, head_dim_v=16, needs=needs) | given)


@pytest.mark.parametrize("name", ALONE)
def test_gradients_are_what_is_defined(vectors, name):
    for number, band in enumerate(BANDS):
        fragments = ((64, 64), (64, 32)) if "as_blocks" in ALONE[name] else ((32, 32), (32, 16))  # bits are read in words
        kv_heads, (q_block, columns) = (H, 2)[number % 2], fragments[number % 2]
        check_gradients(vectors, gradient_case(kv_heads=kv_heads, with_dlse=number % 2 == 0, **band, **ALONE[name]), q_block, columns)


# ---- plans

S = 512


def arrays(problem, step=1):
    """Layouts of the options' arrays; with a step, elements of mask and bias lie so far apart."""
    found = {}
    for name in problem.options:
        shape = problem.shape_of(name)
        strides = contiguous_strides(shape, ITEMSIZE[problem.dtype_of(name)] * (step if len(shape) == 4 else 1))
        found[name] = Layout(shape, tuple(0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)))
    return found


def plan(head_dim, head_dim_v=None, *, seqlen_k=S, batch=2, heads=8, kv_heads=8, dtype="bfloat16", step=1, **options):
    q, k = (batch, S, heads, head_dim), (batch, seqlen_k, kv_heads, head_dim)
    problem = make_problem(q, k, (*k[:3], head_dim_v or head_dim), [dtype] * 3, **options)
    sizes = {"q": 2, "k": 2, "v": 2, "out": 2, "lse": 4}
    plain = {name: Layout(problem.shape_of(name), contiguous_strides(problem.shape_of(name), size)) for name, size in sizes.items()}
    return sm90.plan(problem, Layouts(**plain, **arrays(problem, step)), H200)


PLANS = {
    "softcap": dict(softcap=30.0),
    "high softcap": dict(softcap=1000.0),
    "alibi": dict(alibi_slopes=((8,), "float32")),
    "sinks": dict(sinks=((8,), "float32")),
    "lengths": dict(seqlens_q=((2,), "int32"), seqlens_k=((2,), "int64")),
    "mask": dict(mask=((2, 8, S, S), "bool")),
    "strided mask": dict(mask=((2, 8, S, S), "bool"), step=3),
    "mask of keys": dict(mask=((2, 1, 1, S), "bool")),
    "block mask": dict(block_mask=((2, 8, 4096), "int32")),
    "bias": dict(bias=((2, 8, S, S), "bfloat16")),
    "float32 bias": dict(bias=((8, S, S), "float32")),
    "float16 bias": dict(bias=((8, S, S), "float16")),
    "dropout": dict(dropout=0.1),
}
EVERY = dict(PLANS["softcap"] | PLANS["alibi"] | PLANS["sinks"] | PLANS["lengths"] | PLANS["mask"] | PLANS["float32 bias"])
PLANS |= {"every option": EVERY | {"dropout": 0.1}, "every option, strided": EVERY | {"dropout": 0.1, "step": 3}, "every option but dropout": EVERY}
BACKWARDS = (
    ("high softcap", 256, {"window": (100, 50)}),
    ("lengths", 128, {"causal": True, "deterministic": True}),
    ("mask", 128, {"window": (100, 50)}),
    ("float32 bias", 128, {"causal": True}),
    ("dropout", 64, {}),
    ("every option", 64, {"window": (100, 50), "deterministic": True}),
    ("every option", 128, {"causal": True}),
    ("every option", 256, {"deterministic": True}),
    ("block mask", 64, {"causal": True}),
    ("block mask", 128, {"causal": True, "deterministic": True}),
    ("block mask", 256, {"deterministic": True}),
    ("every option but dropout", 64, {"causal": True}),
    ("every option but dropout", 128, {}),
    ("every option but dropout", 256, {"window": (100, 50), "deterministic": True}),
)
FORWARDS = (
    ("softcap", 64, {"causal": True}),
    ("softcap", 96, {"window": (100, 50)}),
    ("softcap", 128, {"seqlen_k": 2048}),
    ("softcap", 128, {"causal": True, "kv_heads": 2}),
    ("block mask", 64, {"causal": True}),
    ("block mask", 128, {}),
    ("block mask", 256, {"window": (100, 50)}),
    ("mask", 64, {"seqlen_k": 2048}),
    ("float32 bias", 128, {"window": (100, 50)}),
    ("dropout", 192, {}),
    ("every option", 64, {"causal": True, "seqlen_k": 2048}),
    ("every option", 256, {}),
    ("every option, strided", 128, {"window": (100, 50)}),
    ("every option but dropout", 128, {"seqlen_k": 2048}),
    ("every option but dropout", 256, {"seqlen_k": 2048}),
)
"""Plans in which registers are scarce, of each family of tiles: compiling takes seconds. ``tests/test_gpu_options.py`` runs all the others."""


def fitted(options, seqlen_k):
    """Mask and bias for another number of keys."""
    return {name: ((*x[0][:-1], seqlen_k), x[1]) if name in ("mask", "bias") else x for name, x in options.items()}


def assert_compiles(request, parameters, grid, threads, shared_bytes, spills=0):
    ptx = toolchain.compile_ptx(request)
    check_launch(ptx, tuple(parameters), grid, threads, shared_bytes, MAX_SHARED)
    report = toolchain.ptxas_report(ptx, request.arch)
    assert report.spill_stores <= spills and report.spill_loads <= spills and report.notes == (), (request, report)
    assert spills or (report.stack_bytes, report.spill_stores, report.spill_loads) == (0, 0, 0), (request, report)


@pytest.mark.parametrize(("name", "head_dim", "options"), FORWARDS, ids=str)
def test_plans_compile_without_spills(name, head_dim, options):
    made = plan(head_dim, **options, **fitted(PLANS[name], options.get("seqlen_k", S)))
    for launch in sm90.launches(made):
        assert_compiles(*launch)


PACKED_PLANS = (
    (64, {"causal": True, "kv_heads": 2}),
    (128, {"window": (100, 50), "softcap": 30.0, "alibi_slopes": ((8, 8), "float32"), "sinks": ((8,), "float32"), "dropout": 0.1}),
    (256, {"kinds": ("int64", "int32")}),
)


def packed_plan(head_dim, head_dim_v=None, *, total=32768, batch=8, heads=8, kv_heads=8, kinds=("int32", "int32"), **options):
    q, k, v = (total, heads, head_dim), (total, kv_heads, head_dim), (total, kv_heads, head_dim_v or head_dim)
    boundaries = {f"cu_seqlens_{side}": ((batch + 1,), kind) for side, kind in zip("qk", kinds, strict=True)}
    problem = make_packed_problem(q, k, v, ["bfloat16"] * 3, **boundaries, **options)
    names = ("q", "k", "v", "out", "lse", *problem.options)
    layouts = {name: Layout(problem.shape_of(name), contiguous_strides(problem.shape_of(name), ITEMSIZE[problem.dtype_of(name)])) for name in names}
    return sm90.plan(problem, Layouts(**layouts), H200)


@pytest.mark.parametrize(("head_dim", "options"), PACKED_PLANS, ids=str)
def test_packed_plans_compile_without_spills(head_dim, options):
    made = packed_plan(head_dim, **options)
    assert not sm90.supports(made.problem, H200)
    before, main = sm90.launches(made)
    assert before[0].build.endswith("tickets:build") and before[2] == (1,) and made.workspace_bytes
    for launch in (before, main):
        assert_compiles(*launch)


PACKED_BACKWARDS = (
    (128, {"window": (100, 50), "softcap": 30.0, "alibi_slopes": ((8, 8), "float32"), "sinks": ((8,), "float32"), "kinds": ("int64", "int32")}),
    (256, {"causal": True, "dropout": 0.1, "deterministic": True}),
)


def packed_backward_plan(head_dim, *, deterministic=False, needs="qkv", **given):
    forward = packed_plan(head_dim, **given)
    problem, layouts = forward.problem, forward.layouts
    operands = {name: getattr(layouts, name) for name in ("q", "k", "v", "out", "lse", *problem.options)}
    operands |= {f"d{name}": operands[name] for name in (*needs, *(["sinks"] if problem.sinks else []))}
    return backward.plan(problem, BackwardLayouts(dout=layouts.out, **operands), H200, deterministic)


@pytest.mark.parametrize(("head_dim", "options"), PACKED_BACKWARDS, ids=str)
def test_gradients_of_packed_plans_compile_without_spills(head_dim, options):
    made = packed_backward_plan(head_dim, **options)
    assert not backward.supports(made.problem, H200)
    for launch in backward.launches(made):
        assert_compiles(*launch)


@pytest.mark.parametrize("bounds", [{"causal": True}, {"window": (100, 50), "deterministic": True}], ids=str)
def test_producers_of_narrow_sequences_may_spill(bounds):
    """Of all its warps' registers those of the consumers are worth more: measured, in docs/performance.md."""
    for made in (packed_backward_plan(64, **bounds), backward_plan(64, **bounds, **PLANS["lengths"])):
        for launch in backward.launches(made):
            assert_compiles(*launch, spills=144 if launch[0].build.endswith("kernel:build") else 0)


def test_gradients_of_sequences_have_a_tile_a_block():
    """Only the device knows how long tiles are: what is uneven is evened out as blocks start."""
    for made in (packed_backward_plan(128), backward_plan(128, **PLANS["lengths"])):
        (grid,) = (launch[2] for launch in backward.launches(made) if launch[0].build.endswith("kernel:build"))
        assert made.grid == grid == (kv_tiles(made.problem, made.config) * (1 if made.problem.packed else 2) * made.problem.kv_heads,)
    assert backward_plan(128, batch=8).grid == (H200.sm_count,)


def test_packed_plans_fit_the_hardware():
    for options in ({}, {"causal": True, "max_seqlen_k": 500}, {"dropout": 0.1, "window": (9, 9)}):
        for d, dv in itertools.product(range(8, 257, 24), repeat=2):
            config = packed_plan(d, dv, **options).config
            assert SharedMemory.of(config).total <= MAX_SHARED and config.q_tile % config.pack == 0, config
            for *_, shared_bytes in backward.launches(packed_backward_plan(d, head_dim_v=dv, **options)):
                assert shared_bytes <= MAX_SHARED


def test_many_packed_sequences_that_may_be_long():
    """Rows are counted, not sequences times the longest."""
    q, boundaries = (2**24, 32, 64), ((2**16 + 1,), "int32")
    problem = make_packed_problem(q, q, q, ("float16",) * 3, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, max_seqlen_q=2**24)
    assert sm90.supports(problem, H200) == ()


def test_what_packed_sequences_lack():
    for changes, reason in (({"batch": 0}, "there is no sequence"), ({"heads": 2**16, "batch": 2**15}, "in 32 bits")):
        shape = (1024, changes.get("heads", 8), 64)
        boundaries = {f"cu_seqlens_{side}": ((changes.get("batch", 8) + 1,), "int32") for side in "qk"}
        problem = make_packed_problem(shape, shape, shape, ["float16"] * 3, **boundaries)
        (found,) = sm90.supports(problem, H200)
        assert reason in found


def backward_plan(head_dim, head_dim_v=None, *, needs="qkv", deterministic=False, **given):
    """The gradients of `plan`, of everything that has one."""
    forward = plan(head_dim, head_dim_v, **given)
    problem, layouts = forward.problem, forward.layouts
    operands = {name: getattr(layouts, name) for name in ("q", "k", "v", "out", "lse", *problem.options)}
    wanted = [*needs, *(name for name in ("bias", "sinks") if name in problem.options)]
    operands |= {f"d{name}": operands[name] for name in wanted}
    return backward.plan(problem, BackwardLayouts(dout=layouts.out, **operands), H200, deterministic)


@pytest.mark.parametrize(("name", "head_dim", "options"), BACKWARDS, ids=str)
def test_gradients_compile_without_spills(name, head_dim, options):
    for launch in backward.launches(backward_plan(head_dim, **options, **PLANS[name])):
        if name == "every option" or not launch[0].build.endswith((":build_rows", ":build_dq")):
            assert_compiles(*launch)


@pytest.mark.parametrize("name", PLANS)
def test_gradients_of_every_head_dim_fit_the_hardware(name):
    for d, dv in itertools.product(range(8, 257, 24), repeat=2):
        made = backward_plan(d, dv, **PLANS[name])
        producer, consumer = made.config.registers
        assert 128 * producer + 256 * consumer <= 168 * made.config.threads, made.config
        assert made.config.q_block % 64 == 0 and made.config.kv_tile % KEYS_OF_A_DRAW == 0
        for _, _, _, _, shared_bytes in backward.launches(made):
            assert shared_bytes <= MAX_SHARED, made.config


@pytest.mark.parametrize("name", PLANS)
def test_every_head_dim_fits_the_hardware(name):
    for options in ({}, {"causal": True}, {"seqlen_k": 4096}):
        for d, dv in itertools.product(range(8, 257, 24), repeat=2):
            config = plan(d, dv, **options, **fitted(PLANS[name], options.get("seqlen_k", S))).config
            assert SharedMemory.of(config).total <= MAX_SHARED, config
            producer, consumer = config.registers
            launched = 65536 // config.threads // 8 * 8  # what the block has to share out
            assert producer + config.consumers * consumer <= (config.consumers + 1) * launched, config
            assert config.kv_block // 2 + config.kv_block // 4 + config.padded_head_dim_v // 2 <= consumer - 24, config
            assert config.kv_block % (KEYS_OF_A_DRAW if config.options.dropout else 16) == 0 and config.hold <= config.kv_block // 4


def test_absent_options_cost_nothing():
    """A kernel without options has no more parameters, barriers or code than before there were any."""
    made = plan(128)
    assert not made.config.options and not made.config.inspected
    assert len(sm90.parameters(made)) == 17
    ptx = toolchain.compile_ptx(sm90.request(made)).text
    assert "ld.global" not in ptx and "fma.rn.bf16x2" not in ptx
    made = backward_plan(128)
    assert not made.config.options and not made.config.cleans_queries and not made.config.cleans_keys
    (_, rows, *_), (main, products, *_), _ = backward.launches(made)
    assert (len(rows), len(products)) == (17, 27)
    assert "ld.global" not in toolchain.compile_ptx(main).text


def test_an_option_is_read_as_it_lies():
    """Loads of a mask: pairs where they lie side by side, a row where all rows are one; nothing is copied."""
    for name, load, share in (("mask", "u16", 4), ("strided mask", "u8", 2), ("mask of keys", "u16", 8)):
        made = plan(128, **PLANS[name])
        assert not made.copies
        loads = toolchain.compile_ptx(sm90.request(made)).text.count(f"ld.global.nc.{load}")
        assert round(loads * share / made.config.kv_block) == 2, "of the first block, and of the others"


@pytest.mark.parametrize("name", PLANS)
def test_supports_every_option(name):
    problem = plan(64, **PLANS[name]).problem
    assert not sm90.supports(problem, H200)
    assert not dispatch.family("sm90", "backward").supports(problem, H200)


def test_the_kernel_has_a_key_for_each_round():
    """The parameters hold what a kernel would compute of the seed, wherever the words overflow."""
    assert len(ROUND_KEYS) == dropout.ROUNDS
    for name, seed in itertools.product(("dropout", "every option"), (0, 5, 2**32 - 1, 2**63 + 12345, 2**64 - 1)):
        made = plan(128, **PLANS[name])
        options = made.config.options
        named = {
            key: argument(each, SimpleNamespace(dropout_seed=seed), {})
            for (key, _), each in zip(options.parameters(), options.arguments(made.problem, made.layouts, lists=lists_of(made.problem)), strict=True)
        }
        with np.errstate(over="ignore"):
            found = bodies.round_keys_of(VectorOps, named)
            wanted = dropout.round_keys([np.int32(word) for word in dropout.seed_words(seed)])
        assert [[int(word) for word in pair] for pair in found] == [[int(word) for word in pair] for pair in wanted], (name, seed)


def test_random_bits_keep_heads_apart():
    grouped = {"heads": 8, "kv_heads": 2, "causal": True}
    assert plan(128, **grouped).config.pack == 4
    assert plan(128, **grouped, dropout=0.1).config.pack == 1


def test_the_polynomial_of_exp2():
    """The steps of `operations.exp2_by_fma`, in float32."""
    x = np.float32(np.concatenate([np.linspace(-126, 0, 200_001), [-127, -126.9, -1e30, -np.inf, np.nan]]))
    bits = np.float32(1.5 * 2**23)
    with np.errstate(invalid="ignore"):
        clamped = np.where(np.isnan(x), x, np.maximum(x, np.float32(-127)))
        sums = clamped + bits
        rest, y = clamped - (sums - bits), np.float32(operations.EXP2_TERMS[-1])
    for term in operations.EXP2_TERMS[-2::-1]:
        y = y * rest + np.float32(term)
    power = ((sums.view(np.int32).astype(np.int64) << 23) + 0x3F800000 & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
    got = y * power
    assert np.abs(got[:-5] / np.exp2(x[:-5].astype(np.float64)) - 1).max() < 7.6e-5
    assert (got[-5:-1] == 0).all() and np.isnan(got[-1]), "0 below, and NaN stays"


@pytest.mark.parametrize("of_eight", range(9))
def test_exponentials_by_fma_are_spread_evenly(of_eight):
    chosen = [fragment.is_by_fma(i, of_eight) for i in range(64)]
    assert sum(chosen) == 8 * of_eight and all(sum(chosen[i : i + 8]) == of_eight for i in range(0, 64, 8))


@pytest.mark.parametrize("cap", [2.0, 1e6, 1e37])
def test_softcap_far_above_the_scores_is_exact(cap):
    """The formula of high caps, in float32 and for any argument."""
    x = np.float32([0, -0.0, 1e-30, 1e-6, 0.01, 0.1, 1, 5, -20, 88, 1e4, -1e30, np.inf, -np.inf])
    named = {"cap_slope": np.float32(0.5 / cap), "cap_exponent": np.float32(LOG2E / cap)}
    with np.errstate(all="ignore"):
        got = np.array([bodies.tanh(SimulatorOps, "high", each, named) * np.float32(cap) for each in x], np.float64)
        exact = cap * np.tanh(0.5 * x.astype(np.float64) / cap)
    assert (np.abs(got - exact) <= 2e-6 * np.abs(exact) + cap * 2.0**-149).all()


@pytest.mark.parametrize(
    ("options", "scale", "unit", "size"),
    [
        ({"softcap": 30.0}, 0.1, "cap", 30.0),
        ({"softcap": 30.0}, -3.0, "cap", 30.0),
        ({"softcap": 1000.0}, 0.1, "one", 1.0),
        (PLANS["alibi"], 0.1, "scale", 0.1),
        (PLANS["alibi"], 0.0, "one", 1.0),
        (PLANS["alibi"], -0.1, "one", 1.0),
        (PLANS["alibi"], 1e-30, "one", 1.0),
        (PLANS["alibi"] | {"softcap": 30.0}, 0.1, "one", 1.0),
        (PLANS["bias"], 0.1, "one", 1.0),
        (PLANS["mask"] | PLANS["dropout"], -0.1, "scale", -0.1),
    ],
    ids=str,
)
def test_the_unit_of_scores(options, scale, unit, size):
    """A cap costs no product of its own, nor does the scale beside ALiBi, unless a slope over it could overflow."""
    made = plan(128, scale=scale, **options)
    of_kernel = made.config.options
    assert (of_kernel.unit, of_kernel.size_of_unit(made.problem)) == (unit, size)
    assert made.config.negative_scale == (unit == "scale" and scale < 0)
    lists = sm90.lists_of(made.problem, made.config)
    arguments = zip(of_kernel.parameters(), of_kernel.arguments(made.problem, made.layouts, lists=lists), strict=True)
    factors = [each.value for (name, _), each in arguments if name == "inverse_scale"]
    assert factors == ([float(np.float32(1 / size))] if "alibi_slopes" in options and unit == "scale" else [])
