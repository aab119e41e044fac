"""Options of the Hopper kernel without a GPU.

Its straight-line bodies are run thread by thread on NumPy scalars, put together as the kernel does, and held to the definition; and every kind of
plan compiles without spills.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from numbaflash import dispatch, testing, toolchain
from numbaflash.dispatch import Device, Layout, Layouts, contiguous_strides
from numbaflash.kernels import bands, sm90
from numbaflash.kernels.bands import Band
from numbaflash.kernels.sm90 import scores as bodies
from numbaflash.kernels.sm90.config import MAX_SHARED, SharedMemory, forward_config
from numbaflash.kernels.sm90.options import KEYS_OF_A_DRAW, kernel_keys
from numbaflash.kernels.sm90.scores import LOG2E, Scores
from numbaflash.problem import ITEMSIZE, make_problem
from numbaflash.ptx import straight
from numbaflash.testing import Case, Placement
from numbaflash.testing.accuracy import spread_nonfinite
from numbaflash.toolchain.launch import check_launch

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")


@pytest.fixture
def simulated(monkeypatch):
    """Bodies become Python functions on scalars. A thread's quad has its sums in the first lane."""
    for module in (bodies, bands):
        monkeypatch.setattr(module, "straight_line", lambda result, argtypes, body: straight._simulated(argtypes, body))
    monkeypatch.setattr(straight.SimulatorOps, "exchange", staticmethod(lambda values, mask: [np.float32(0)] * len(values)))


def lay_out(problem, memory):
    """The operands of a case as the dispatcher describes them."""
    found = {}
    for name, each in memory.items():
        view, shape = each.view(), problem.shape_of(name)
        strides = (0,) * (len(shape) - view.ndim) + view.strides
        strides = tuple(0 if n == 1 else step for n, step in zip((1,) * (len(shape) - view.ndim) + view.shape, strides, strict=True))
        address = view.ctypes.data
        found[name] = Layout(shape, strides, math.gcd(address, 16))
    return Layouts(**found)


class Model:
    """One consumer warpgroup of the kernel on NumPy scalars; tiles of 64 rows and blocks of 32 keys."""

    def __init__(self, case, **changes):
        self.case, self.memory = case, case.memory()
        self.problem = case.problem
        self.layouts = lay_out(self.problem, self.memory)
        self.config = config = replace(forward_config(self.problem, self.layouts), q_tile=64, kv_block=32, **changes)
        self.plain, self.first = kernel_keys(self.problem)
        self.options = [self.argument(each) for each in config.options.arguments(self.problem, self.layouts)]
        of, pack = Scores(config.kv_block, config.options), config.pack
        self.band = Band(64, config.kv_block, pack, config.left, config.right, padded=config.options.seqlens_q is not None)
        self.of_tile, self.of_warpgroup, self.limits = self.band.of_tile(), self.band.of_warpgroup(), self.band.limits()
        self.bounds_of_entry, self.take_seat, self.finish = of.bounds_of_entry(config.right), of.take_seat(pack), of.finish(pack)
        self.fetch = {guarded: of.fetch(guarded) for guarded in (False, True)}
        self.change, self.hide, self.drop = of.change(), of.hide(), of.drop()
        self.seen_keys, self.sees = of.seen_keys(config.left), of.sees(pack, config.left, config.right)
        scale = 1.0 if config.options.changes else abs(self.plain.scale or sm90._TINY_SCALE)
        self.scale_log2 = np.float32(LOG2E * scale)

    def argument(self, parameter):
        if isinstance(parameter, toolchain.Scalar):
            return {"int32": np.int32, "int64": np.int64, "float32": np.float32}[parameter.kind](parameter.value)
        if parameter.operand == "seed":
            return np.uint64(self.case.dropout_seed).view(np.int64)
        return np.int64(self.memory[parameter.operand].view().ctypes.data + parameter.offset)

    def run(self):
        problem, config = self.problem, self.config
        q, k, v = (self.memory[name].decoded().astype(np.float32) for name in "qkv")
        self.k, self.v = (x[:, self.first : self.first + self.plain.seqlen_k] for x in (k, v))
        out, lse = np.full(problem.out_shape, np.nan), np.full(problem.lse_shape, np.nan)
        for batch, head in itertools.product(range(problem.batch), range(problem.heads // config.pack)):
            for tile in range(-(-problem.seqlen_q * config.pack // 64)):
                for row, (o, end) in enumerate(self.tile(q, batch, head, tile)):
                    query, query_head = divmod(tile * 64 + row, config.pack)
                    if query < problem.seqlen_q:
                        out[batch, query, head * config.pack + query_head] = o
                        lse[batch, head * config.pack + query_head, query] = end
        return out, lse

    def tile(self, q, batch, head, tile):
        plain, config = self.plain, self.config
        bounds = [plain.seqlen_q, plain.seqlen_k, plain.offset, plain.left or 0, plain.right or 0]
        if config.options.lengths:
            bounds = self.bounds_of_entry(batch, np.int32(bounds), self.options)
        bounds = [np.int32(x) for x in bounds]
        first, end, my_first, my_end, left_border, right_border, _ = (int(x) for x in self.of_warpgroup(tile, 0, bounds))
        assert (first, end) == tuple(self.of_tile(tile, bounds))
        assert first <= my_first <= my_end <= end or my_first == my_end
        rows = [divmod(tile * 64 + row, config.pack) for row in range(64)]
        mine = np.zeros((64, plain.head_dim), np.float32)
        for row, (query, query_head) in enumerate(rows):
            if query < plain.seqlen_q:
                mine[row] = q[batch, query, head * config.pack + query_head]
        kv_head = head // (plain.group // config.pack)
        threads = [self.Thread(self, tile, thread, batch, head, bounds) for thread in range(128)]
        for j in reversed(range(my_first, my_end)):
            inside = slice(j * config.kv_block, min((j + 1) * config.kv_block, plain.seqlen_k))
            keys, values = (np.zeros((config.kv_block, x.shape[-1]), np.float32) for x in (self.k, self.v))
            for block, x in ((keys, self.k), (values, self.v)):
                block[: inside.stop - inside.start] = x[batch, inside, kv_head]
            if config.inspected:
                self.inspect(values, j, tile, batch, head, bounds)
            with np.errstate(all="ignore"):
                products = mine @ keys.T
            masked = j >= right_border or j < left_border or j == my_end - 1
            for thread in threads:
                thread.step(products, j, masked, j == my_end - 1)
            p = np.zeros((64, config.kv_block), np.float32)
            for a in range(0, 128, 4):
                self.softmax(threads[a : a + 4], p)
            with np.errstate(all="ignore"):
                update = p @ values
                for thread in threads:
                    for r, row in enumerate(thread.rows):
                        thread.o[r] = thread.o[r] * thread.a[r] + update[row]
        results = [None] * 64
        for a in range(0, 128, 4):
            lead = threads[a]
            statistics = [*lead.m, *lead.l, np.float32(1), np.float32(1)]
            found = self.finish(statistics, tile * 64 + lead.rows[0], head, bounds[0], self.scale_log2, self.options)
            for r, row in enumerate(lead.rows):
                with np.errstate(all="ignore"):
                    results[row] = (np.where(found[4 + r] == 0, 0, lead.o[r] * found[4 + r]), found[r])
        return results

    def inspect(self, values, j, tile, batch, head, bounds):
        first, end = self.seen_keys(j, bounds)
        if not self.config.options.mask and first <= 0 and end >= self.config.kv_block:
            return
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1)):
            seen = first <= row < end
            if seen and self.config.options.mask:
                key = j * self.config.kv_block + row
                seen = any(self.sees(tile * 64 + n, key, batch, head, bounds, self.options) for n in range(64))
            if not seen:
                values[row] = 0

    def softmax(self, quad, p):
        """Of two rows, in a quad: what `fragment.online_softmax` does, in another order; the first lane has the sums."""
        lead, scale = quad[0], self.scale_log2
        with np.errstate(all="ignore"):
            for r in (0, 1):
                values = np.concatenate([thread.s[r] for thread in quad])
                top = np.fmax.reduce(values, initial=lead.m[r])
                base = np.float32(0) if top == -np.inf else top
                lowest = self.config.options.lowest_scores
                weights = [np.exp2((x.s[r] - base) * scale if lowest else x.s[r] * scale - base * scale) for x in quad]
                a = np.exp2((lead.m[r] - base) * scale)
                lead.l[r] = np.float32(lead.l[r] * a + sum(x.sum() for x in weights))
                for thread, x in zip(quad, weights, strict=True):
                    thread.m[r], thread.a[r], thread.p[r] = top, a, x
            for thread in quad:
                if self.config.options.dropout:
                    thread.drop()
                for r, row in enumerate(thread.rows):
                    p[row, thread.columns] = thread.p[r]

    class Thread:
        def __init__(self, model, tile, thread, batch, head, bounds):
            lane, warp, config = thread % 32, thread // 32, model.config
            self.model, row = model, warp * 16 + lane // 4
            self.rows, first = (row, row + 8), lane % 4 * 2
            self.columns = np.array([first + 8 * n + e for n in range(config.kv_block // 8) for e in (0, 1)])
            self.m, self.l, self.a = np.float32([-np.inf] * 2), np.zeros(2, np.float32), np.ones(2, np.float32)
            self.o, self.s, self.p = [np.zeros(model.plain.head_dim_v, np.float32) for _ in "01"], [None] * 2, [None] * 2
            self.limits = model.limits(tile * 64 + row, first, bounds)
            self.seat = model.take_seat(tile * 64 + row, first, batch, head, model.plain.seqlen_q, bounds, model.options)
            self.first = first

        def step(self, products, j, masked, guarded):
            model, config = self.model, self.model.config
            s = self.join([products[row, self.columns] for row in self.rows])
            words = model.fetch[guarded](self.seat, j, model.options) if config.options.reads else [np.int32(0)]
            if config.negative_scale:
                s = [-x for x in s]
            if config.options.changes:
                s = model.change(s, words, self.seat, j, model.options)
            if masked:
                for i in range(len(s)):
                    r, column = (i >> 1) & 1, 8 * (i >> 2) + (i & 1) + j * config.kv_block
                    if (column > self.limits[2 + r]) or (config.left and column < self.limits[r]):
                        s[i] = np.float32(-np.inf)
            if config.options.mask:
                s = model.hide(s, words)
            self.s, self.j = self.split(s), j

        def drop(self):
            self.p = self.split(self.model.drop(self.join(self.p), self.seat, self.j, self.model.options))

        @staticmethod
        def join(rows):
            """The elements of a fragment out of those of two rows."""
            return [np.float32(rows[(i >> 1) & 1][2 * (i >> 2) + (i & 1)]) for i in range(2 * len(rows[0]))]

        @staticmethod
        def split(s):
            return [np.float32([x for i, x in enumerate(s) if (i >> 1) & 1 == r]) for r in (0, 1)]


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
    "mask of a cut": dict(seqlen_k=140, window=(5, 7), mask_shape=(B, 1, SQ, 140), bias_shape=(SQ, 140), hidden="nan"),
    "more queries than keys": dict(seqlen_k=20, causal=True, mask_shape=(SQ, 20), alibi_shape=(H,), hidden="nan"),
    "many heads a tile": dict(heads=32, kv_heads=1, batch=1, seqlen_q=3, alibi_shape=(32,), with_sinks=True, bias_shape=(32, 3, 1), lengths_q="full"),
    **{f"lengths {n}": dict(LENGTHS, seed=n) for n in range(4)},
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_edges(simulated, name):
    shape = dict(dtype="float16", batch=B, heads=H, kv_heads=2, seqlen_q=SQ, seqlen_k=SK, head_dim=8, head_dim_v=8)
    for band in BANDS if "lengths" in name else ({},):
        check(Case(**shape | EDGES[name] | band))


@pytest.mark.parametrize("name", ALONE)
def test_bodies_are_what_is_defined(simulated, name):
    for band, kv_heads in itertools.product(BANDS, (H, 2)):
        shape = dict(dtype="bfloat16", batch=B, heads=H, kv_heads=kv_heads, seqlen_q=SQ, seqlen_k=SK, head_dim=8, head_dim_v=8)
        check(Case(**shape, **band, **ALONE[name]))


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
    "bias": dict(bias=((2, 8, S, S), "bfloat16")),
    "float32 bias": dict(bias=((8, S, S), "float32")),
    "float16 bias": dict(bias=((8, S, S), "float16")),
    "dropout": dict(dropout=0.1),
}
EVERY = dict(PLANS["softcap"] | PLANS["alibi"] | PLANS["sinks"] | PLANS["lengths"] | PLANS["mask"] | PLANS["float32 bias"])
PLANS |= {"every option": EVERY | {"dropout": 0.1}, "every option, strided": EVERY | {"dropout": 0.1, "step": 3}, "every option but dropout": EVERY}
PLACES = (((64,), {}), ((64,), {"causal": True, "seqlen_k": 2048}), ((128,), {"window": (100, 50)}), ((128,), {"seqlen_k": 2048}), ((256,), {}))
MORE_PLACES = (((64,), {"window": (100, 50)}), ((192,), {}), ((192, 128), {"causal": True}), ((256,), {"seqlen_k": 2048}), ((72, 40), {}))


def fitted(options, seqlen_k):
    """Mask and bias for another number of keys."""
    return {name: ((*x[0][:-1], seqlen_k), x[1]) if name in ("mask", "bias") else x for name, x in options.items()}


@pytest.mark.parametrize("name", PLANS)
def test_plans_compile_without_spills(name):
    for dims, options in PLACES + (MORE_PLACES if name.startswith("every") else ()):
        made = plan(*dims, **options, **fitted(PLANS[name], options.get("seqlen_k", S)))
        request = sm90.request(made)
        ptx = toolchain.compile_ptx(request)
        check_launch(ptx, tuple(sm90.parameters(made)), made.grid, made.threads, made.shared_bytes, MAX_SHARED)
        report = toolchain.ptxas_report(ptx, request.arch)
        assert (report.stack_bytes, report.spill_stores, report.spill_loads, report.notes) == (0, 0, 0, ()), (dims, options, made.config)


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
    assert dispatch.family("sm90", "backward").supports(problem, H200), "the gradients have none yet"


def test_random_bits_keep_heads_apart():
    grouped = {"heads": 8, "kv_heads": 2, "causal": True}
    assert plan(128, **grouped).config.pack == 4
    assert plan(128, **grouped, dropout=0.1).config.pack == 1


def test_softcap_far_above_the_scores_is_exact():
    """Both formulas of tanh, in float32 and for any argument."""
    x = np.float32([0, -0.0, 1e-30, 1e-6, 0.01, 0.1, 1, 5, -20, 88, 1e4, -1e30, np.inf, -np.inf])
    for cap, kind, tolerance in ((2.0, "low", 4e-7), (2.0, "high", 2e-6), (1e6, "high", 2e-6), (1e37, "high", 2e-6)):
        named = {"cap": np.float32(cap), "cap_slope": np.float32(0.5 / cap), "cap_exponent": np.float32(LOG2E / cap)}
        with np.errstate(all="ignore"):
            got = np.array([bodies.capped(straight.SimulatorOps, kind, each, named) for each in x], np.float64)
            exact = cap * np.tanh(0.5 * x.astype(np.float64) / cap)
        assert (np.abs(got - exact) <= tolerance * (cap if kind == "low" else np.abs(exact)) + cap * 2.0**-149).all(), (cap, kind)
