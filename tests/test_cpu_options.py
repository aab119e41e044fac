"""Options of a problem in the `cpu` family: each one alone where the tiles make it delicate, all of them together, and their gradients.

`numbaflash.testing` does the checking: accuracy, guard zones, unchanged inputs, NaN and infinity wherever nobody may look.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import fields, replace

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit, types

import numbaflash
from numbaflash import reference
from numbaflash.kernels.cpu import config, scores, tanh, target, vector
from numbaflash.kernels.cpu.backward import config as backward_config
from numbaflash.problem import DTYPES, NEEDS, make_problem
from numbaflash.testing import BackwardCase, Case, Placement, placements, problems, run_backward_case, run_case

B, H, SQ, SK = 2, 6, 70, 200
"""More than two panels of queries, more than three blocks of keys, neither a whole number."""

ALONE = {
    "mask": dict(mask_shape=(B, 1, SQ, SK)),
    "mask, every head": dict(mask_shape=(B, H, SQ, SK), mask_values="blocks", hidden="nan"),
    "mask of keys": dict(mask_shape=(B, 1, 1, SK), hidden="nan"),
    "mask of queries": dict(mask_shape=(SQ, 1), hidden="nan"),
    "mask, rows without keys": dict(mask_shape=(B, H, SQ, SK), mask_values="rows", hidden="inf"),
    "mask, nothing seen": dict(mask_shape=(SQ, SK), mask_values="none", hidden="nan"),
    "mask, everything seen": dict(mask_shape=(SQ, SK), mask_values="all"),
    "mask, keys first in memory": dict(mask_shape=(SQ, SK), mask=Placement(order=(1, 0)), hidden="nan"),
    "mask, reversed": dict(mask_shape=(SQ, SK), mask=Placement(step=(-1, -2)), hidden="nan"),
    "lengths": dict(lengths_q="random", lengths_k="random", hidden="nan"),
    "lengths of keys": dict(lengths_k="edges", lengths_dtype="int64", hidden="nan"),
    "lengths of queries": dict(lengths_q="edges", hidden="inf"),
    "bias": dict(bias_shape=(B, H, SQ, SK)),
    "bias, broadcast and reversed": dict(bias_shape=(H, SQ, SK), bias=Placement(step=(1, -1, -1))),
    "bias, lowest numbers": dict(bias_shape=(H, SQ, SK), bias_values="lowest"),
    "bias, minus infinity": dict(bias_shape=(B, H, SQ, SK), bias_values="infinite", hidden="nan"),
    "bias, one for all": dict(bias_shape=()),
    "alibi": dict(alibi_shape=(H,)),
    "alibi, every batch entry": dict(alibi_shape=(B, H)),
    "softcap": dict(softcap=1.5, values="big"),
    "softcap, far away": dict(softcap=1000.0),
    "sinks": dict(with_sinks=True, seed=2),
    "dropout": dict(dropout=0.3, dropout_seed=2**64 - 5),
}  # fmt: skip
TOGETHER = dict(
    **dict(mask_shape=(B, 1, SQ, SK), bias_shape=(H, SQ, SK), alibi_shape=(H,), softcap=2.0, with_sinks=True),
    **dict(dropout=0.1, dropout_seed=77, lengths_q="edges", lengths_k="random", hidden="nan"),
)
BANDS = ({}, {"causal": True}, {"causal": "top_left", "window": (30, None)}, {"window": (40, 7)})


def shaped(options, seqlen_q):
    """The same options for another number of queries."""
    return options | {
        name: tuple(seqlen_q if n == SQ else n for n in options[name]) for name in ("mask_shape", "bias_shape") if options.get(name) is not None
    }


def needs(options):
    return NEEDS + ("bias",) * ("bias_shape" in options) + ("sinks",) * ("with_sinks" in options)


@pytest.mark.parametrize("seqlen_q", [SQ, 1], ids=["panels", "rows"])
@pytest.mark.parametrize("name", ALONE)
def test_forward(name, seqlen_q):
    for band, kv_heads in itertools.product(BANDS, (H, 2)):
        shape = dict(batch=B, heads=H, kv_heads=kv_heads, seqlen_q=seqlen_q, seqlen_k=SK, head_dim=24, head_dim_v=16)
        run_case(Case(**shape, **band, **shaped(ALONE[name], seqlen_q)), "cpu")


@pytest.mark.parametrize("name", ALONE)
def test_backward(name):
    for band, kv_heads in itertools.product(BANDS, (H, 2)):
        shape = dict(batch=B, heads=H, kv_heads=kv_heads, seqlen_q=SQ, seqlen_k=SK, head_dim=24, head_dim_v=16)
        run_backward_case(BackwardCase(**shape, **band, **ALONE[name], needs=needs(ALONE[name]), with_dlse=True), "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_together(dtype):
    for band, seed in itertools.product(BANDS, range(3)):
        shape = dict(dtype=dtype, batch=B, heads=H, kv_heads=2, seqlen_q=SQ, seqlen_k=SK, head_dim=24, head_dim_v=16, seed=seed)
        run_case(Case(**shape, **band, **TOGETHER), "cpu")
        run_backward_case(BackwardCase(**shape, **band, **TOGETHER, needs=needs(TOGETHER), with_dlse=True), "cpu")


@st.composite
def everything(draw, **options):
    """Any problem with every option, so that few kernels serve all: shapes that broadcast, and any layout."""
    case = draw(problems(dtypes=("float32",), max_seqlen=200, work=2**14, **options))
    full = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)

    def broadcast():
        return tuple(n if draw(st.booleans()) else 1 for n in full)[draw(st.sampled_from((0, 0, 1, 2))) :]

    mask_shape, bias_shape = broadcast(), broadcast()
    return replace(
        case,
        mask_shape=mask_shape,
        mask_values=draw(st.sampled_from(("random", "rows", "blocks", "all"))),
        mask=draw(placements(len(mask_shape))),
        bias_shape=bias_shape,
        bias_values=draw(st.sampled_from(("normal", "big", "lowest", "infinite"))),
        bias=draw(placements(len(bias_shape))),
        alibi_shape=draw(st.sampled_from(((case.heads,), (case.batch, case.heads)))),
        softcap=draw(st.sampled_from((0.25, 1.0, 30.0))),
        with_sinks=True,
        dropout=draw(st.sampled_from((1e-6, 0.1, 0.5, 0.9))),
        dropout_seed=draw(st.integers(0, 2**64 - 1)),
        lengths_q=draw(st.sampled_from((None, "random", "edges", "full"))),
        lengths_k=draw(st.sampled_from(("random", "edges", "full"))),
        lengths_dtype=draw(st.sampled_from(("int32", "int64"))),
    )


@settings(max_examples=60)
@given(case=everything())
def test_any_problem_with_every_option(case):
    run_case(case, "cpu")


@settings(max_examples=40)
@given(case=everything(), with_dlse=st.booleans(), data=st.data())
def test_gradients_of_any_problem_with_every_option(case, with_dlse, data):
    wanted = data.draw(st.sampled_from(((*NEEDS, "bias", "sinks"), ("q", "bias"), ("bias",), ("sinks",), ("v", "sinks"), ("k",))))
    values = {field.name: getattr(case, field.name) for field in fields(Case)} | {"return_lse": True}
    run_backward_case(BackwardCase(**values, with_dlse=with_dlse, needs=wanted), "cpu")


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(
    "axes", list(itertools.product((False, True), repeat=4)), ids=lambda axes: "".join("bhqk"[i] for i in range(4) if axes[i]) or "-"
)
def test_gradient_of_a_bias_that_is_broadcast(axes, kv_heads):
    shape = dict(batch=2, heads=6, kv_heads=kv_heads, seqlen_q=150, seqlen_k=140, head_dim=8, head_dim_v=8, causal=True)
    bias_shape = tuple(n if kept else 1 for n, kept in zip((2, 6, 150, 140), axes, strict=True))
    run_backward_case(BackwardCase(**shape, bias_shape=bias_shape, needs=("bias",)), "cpu")


def test_more_heads_in_a_group_than_rows_in_a_tile():
    heads = 2 * backward_config.Q_TILE + 3
    shape = dict(heads=heads, seqlen_q=3, seqlen_k=20, head_dim=4, head_dim_v=4)
    for bias_shape in ((heads, 3, 20), (3, 20), (heads, 1, 1)):
        run_backward_case(BackwardCase(**shape, bias_shape=bias_shape, needs=("q", "bias")), "cpu")


@pytest.mark.parametrize("seqlen_q", [1, 50])
def test_without_keys_a_row_is_its_sink(seqlen_q):
    shape = dict(batch=2, seqlen_q=seqlen_q, seqlen_k=0, heads=3, head_dim=8, head_dim_v=8, with_sinks=True)
    run_case(Case(**shape), "cpu")
    run_case(Case(**shape, lengths_q="random"), "cpu")
    run_backward_case(BackwardCase(**shape, with_dlse=True, needs=(*NEEDS, "sinks")), "cpu")


def arrays(seed=0, batch=2, seqlen_q=150, seqlen_k=330, heads=6, kv_heads=2, dim=16):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((batch, n, h, dim)).astype(np.float32) for n, h in ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)))
    options = dict(
        mask=rng.random((batch, 1, seqlen_q, seqlen_k)) < 0.5,
        bias=rng.standard_normal((1, heads, seqlen_q, seqlen_k)).astype(np.float32),
        alibi_slopes=rng.random(heads).astype(np.float32),
        softcap=3.0,
        sinks=rng.standard_normal(heads).astype(np.float32),
        **dict(dropout=0.2, seed=9, causal=True),
        seqlens_k=np.array([seqlen_k, 190], np.int32),
    )
    return q, k, v, options


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread only")
def test_the_number_of_threads_changes_no_bit():
    q, k, v, options = arrays()
    before, results = numba.get_num_threads(), []
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            out, lse = numbaflash.forward(q, k, v, return_lse=True, **options)
            gradients = numbaflash.backward(out, q, k, v, out, lse, needs=("q", "k", "v", "bias", "sinks"), **options)
            results.append(gradients)
    finally:
        numba.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)


def test_parts_of_the_keys_share_one_sink():
    rng = np.random.default_rng(0)
    for rows in (1, 20):
        q, k, v = (rng.standard_normal((1, n, 1, 16), np.float32) for n in (rows, 20000, 20000))
        sinks = np.float32([9.0])
        got, lse = numbaflash.forward(q, k, v, sinks=sinks, return_lse=True)
        problem = make_problem(q.shape, k.shape, v.shape, ("float32",) * 3, sinks=((1,), "float32"))
        want, want_lse = reference.forward(problem, q, k, v, sinks=sinks)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
        assert config.choose(problem, 2).splits == 2


def test_true_is_any_byte_but_0():
    q, k, v, _ = arrays()
    seen = np.random.default_rng(1).random((150, 330)) < 0.5
    odd = np.where(seen, 0x82, 0).astype(np.uint8).view(bool)
    np.testing.assert_array_equal(numbaflash.forward(q, k, v, mask=odd), numbaflash.forward(q, k, v, mask=seen))


def test_an_option_is_compiled_in_only_where_it_is():
    shape, full = (1, 50, 2, 16), (1, 2, 50, 50)
    kinds = {
        ("softcap",): dict(softcap=2.0),
        ("mask",): dict(mask=(full, "bool")),
        ("bias",): dict(bias=(full, "bfloat16")),
        ("lengths",): dict(seqlens_q=((1,), "int32"), seqlens_k=((1,), "int64")),
        ("dropout",): dict(dropout=0.1),
        (): {},
    }
    for names, options in kinds.items():
        problem = make_problem(shape, shape, shape, ("float32",) * 3, **options)
        for choose in (config.choose, backward_config.choose):
            kernel = choose(problem, 1).kernel
            assert kernel.options == names
            sizes = scores.tile_sizes(kernel, 64, 128, True)
            present = {"softcap": {"slope_tile"}, "mask": {"mask_tile"}, "bias": {"bias_tile"}, "dropout": {"keep_tile"}}
            expected = set().union(*(present.get(name, set()) for name in names)) | ({"lists"} if names else set())
            assert {name for name, size in sizes.items() if size} == expected


def test_blocks_that_a_mask_hides_are_skipped():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1024, 2, 64)).astype(np.float32) for _ in range(3))
    dense, sparse = np.ones((1024, 1024), bool), np.kron(np.eye(8, dtype=bool), np.ones((128, 128), bool))

    def seconds(work):
        work()
        times = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    both, before = [], numba.get_num_threads()
    numba.set_num_threads(1)  # a busy machine has no second one
    for mask in (dense, sparse):
        out, lse = numbaflash.forward(q, k, v, mask=mask, return_lse=True)
        both.append(
            (
                seconds(lambda mask=mask: numbaflash.forward(q, k, v, mask=mask)),
                seconds(lambda mask=mask, out=out, lse=lse: numbaflash.backward(out, q, k, v, out, lse, mask=mask)),
            )
        )
    numba.set_num_threads(before)
    for whole, eighth in zip(*both, strict=True):
        assert eighth < 0.5 * whole, f"an eighth of the blocks took {eighth / whole:.2f} of the time"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tanh(dtype):
    kind, number = {"float32": (types.float32, np.float32), "float64": (types.float64, np.float64)}[dtype]
    lanes = target.vector_bytes() * 8 // kind.bitwidth
    simd, of = vector.Simd(kind, lanes), tanh.tanh_of(kind, lanes)
    load, store, size = simd.load, simd.store, simd.itemsize

    @njit
    def over(start, value, derivative, n):
        for i in range(0, n * size, lanes * size):
            one, two = of(load(start + i))
            store(value + i, one)
            store(derivative + i, two)

    rng = np.random.default_rng(0)
    swept = [rng.uniform(-12, 12, 2**15), rng.uniform(-1, 1, 2**14), np.logspace(-12, 1, 2**13), -np.logspace(-12, 1, 2**13)]
    special = np.array([0, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e30, -1e30], number)
    x = np.concatenate([*swept, np.resize(special, 16)]).astype(number)
    value, derivative = np.empty_like(x), np.empty_like(x)
    over(x.ctypes.data, value.ctypes.data, derivative.ctypes.data, x.size)
    exact = np.tanh(x.astype(np.longdouble))
    epsilon = np.finfo(number).eps
    regular = np.isfinite(x) & (x != 0)
    assert np.abs(value[regular] / exact[regular] - 1).max() < 4 * epsilon
    known = regular & (np.abs(x) < 12)
    slope = np.cosh(x[known].astype(np.longdouble)) ** -2
    assert np.abs(derivative[known] / slope - 1).max() < 30 * epsilon
    zero, _, _, infinite, negative, nan, huge, _ = zip(value[-8:].tolist(), derivative[-8:].tolist(), strict=True)
    assert zero == (0, 1) and infinite == huge == (1, 0) and negative == (-1, 0) and np.isnan(nan).all()
