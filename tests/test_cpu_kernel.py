"""The `cpu` family from the inside: its arithmetic piece by piece, its tiles, threads, cache, and processors of other kinds.

That it computes attention, on every shape and option, is the business of test_forward.py and test_properties.py; here are
the cases that its own structure makes delicate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from numbaflash import dispatch, reference, testing
from numbaflash.kernels import cpu
from numbaflash.kernels.cpu import backward, config, convert, driver, exp2, finite, launch, microkernel, target, transpose, vector
from numbaflash.kernels.cpu.backward import arguments as backward_arguments
from numbaflash.kernels.cpu.backward import config as backward_config
from numbaflash.kernels.cpu.backward import launch as backward_launch
from numbaflash.problem import DTYPES, make_problem
from numbaflash.testing import BackwardCase, Case, Placement

ROOT = Path(__file__).resolve().parent.parent
LANES = {"float32": target.vector_bytes() // 4, "float64": target.vector_bytes() // 8}
FLOATS = {"float32": (types.float32, np.float32), "float64": (types.float64, np.float64)}


def address(array) -> int:
    return array.ctypes.data


def run(case: Case, **options) -> testing.Accuracy:
    return testing.run_case(case, "cpu", "numpy", **options)


# The arithmetic


def vector_map(emit, source, target_type, lanes, source_size, target_size):
    """Compile ``emit(builder, vector)`` over two flat arrays: load ``lanes`` of ``source``, store as ``target_type``."""

    @intrinsic
    def apply(typingctx, start, place):
        def codegen(context, builder, sig, args):
            x = builder.load(vector.pointer(builder, args[0], ir.VectorType(source, lanes)), align=1)
            builder.store(emit(builder, x), vector.pointer(builder, args[1], ir.VectorType(target_type, lanes)), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    @njit
    def over(start, place, n):
        for i in range(0, n, lanes):
            apply(start + i * source_size, place + i * target_size)

    return over


@pytest.mark.parametrize("form", ["portable", "avx512"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exp2(dtype, form):
    kind, number = FLOATS[dtype]
    lanes = LANES[dtype]
    if form == "avx512" and not exp2.has_avx512(vector.Vector(kind, lanes)):
        pytest.skip("this processor has no AVX-512")
    emit = {"portable": exp2.emit_exp2, "avx512": exp2.emit_exp2_avx512}[form]
    element = vector.element_type(kind)
    over = vector_map(lambda builder, x: emit(builder, x, kind), element, element, lanes, *[kind.bitwidth // 8] * 2)
    lowest = -126 if dtype == "float32" else -1022
    rng = np.random.default_rng(0)
    swept = [rng.uniform(lowest, 1, 2**18), rng.uniform(-2, 0, 2**17), np.linspace(-3, 3, 2**14), -np.logspace(-9, 0, 2**14)]
    special = np.array(
        [0, -0.0, 1, -1, lowest, -np.inf, np.nan, -(2.0**100), lowest - 1.5, lowest - 60, -(2.0**-90), 100, 0.5, -0.5, -1.5, 2.5], number
    )
    x = np.concatenate([np.concatenate(swept).astype(number), special])
    got = np.empty_like(x)
    over(address(x), address(got), x.size)
    exact = np.exp2(x.astype(np.longdouble))
    normal = x >= lowest
    relative = np.abs(got[normal] / exact[normal] - 1).astype(np.float64)
    assert relative.max() < (2e-7 if dtype == "float32" else 5e-16)
    places = dict(zip(special.tolist(), got[-special.size :].tolist(), strict=True))
    assert places[0] == 1 and places[1] == 2 and places[-1] == 0.5
    assert places[-np.inf] == 0 and places[-(2.0**100)] == 0 and places[lowest - 60] == 0
    assert np.isnan(got[-special.size + 6])
    assert abs(places[lowest - 1.5]) <= 2.0**lowest


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFC12345])
def test_exp2_keeps_every_nan(bits):
    element = ir.FloatType()
    over = vector_map(lambda builder, x: exp2.emit_exp2(builder, x, types.float32), element, element, 4, 4, 4)
    x = np.full(4, bits, np.uint32).view(np.float32)
    over(address(x), address(x), 4)
    assert np.isnan(x).all()


@pytest.mark.parametrize("half", [False, True], ids=["integers", "instructions"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number_is_widened_exactly(dtype, half):
    if half and not target.has_half():
        pytest.skip("this processor has no float16 instructions")
    over = vector_map(lambda builder, x: convert.emit_widen(builder, x, dtype, half), ir.IntType(16), ir.FloatType(), 8, 2, 4)
    bits = np.arange(2**16, dtype=np.uint16)
    got = np.empty(bits.size, np.float32)
    over(address(bits), address(got), bits.size)
    want = bits.view(np.float16 if dtype == "float16" else ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~np.isnan(want)].view(np.uint32), want[~np.isnan(want)].view(np.uint32))


@pytest.mark.parametrize("half", [False, True], ids=["integers", "instructions"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_16_bits(dtype, half):
    if half and not target.has_half():
        pytest.skip("this processor has no float16 instructions")
    over = vector_map(lambda builder, x: convert.emit_narrow(builder, x, dtype, half), ir.FloatType(), ir.IntType(16), 8, 4, 2)
    number = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    exact = np.arange(2**16, dtype=np.uint16).view(number).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    ties = (exact[:-1].astype(np.float64) + exact[1:].astype(np.float64)) / 2  # exactly between neighbours
    random = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 1e30, -1e30, 3.4028235e38, 1e-45, -1e-40, 2.0**-25, 2.0**-24]
    with np.errstate(over="ignore"):
        x = np.concatenate([exact, ties.astype(np.float32), np.nextafter(ties.astype(np.float32), np.float32(np.inf)), random, np.float32(special)])
    x = x[x.size % 8 :]
    got = np.empty(x.size, np.uint16)
    over(address(x), address(got), x.size)
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(number)
    np.testing.assert_array_equal(np.isnan(got.view(number).astype(np.float32)), np.isnan(x))
    np.testing.assert_array_equal(got[~np.isnan(x)], want.view(np.uint16)[~np.isnan(x)])


# The micro-kernels


@pytest.mark.parametrize(("dtype", "rows", "vectors"), [("float32", 8, 2), ("float32", 4, 3), ("float64", 4, 1), ("float16", 1, 2)])
def test_tile_product(dtype, rows, vectors):
    compute = str(convert.COMPUTE[dtype])
    lanes = LANES[compute]
    overwrite, accumulate = microkernel.tile_product(dtype, rows, vectors, lanes)

    @njit
    def both(a, row_stride, k_stride, b, b_stride, c, d, c_stride, n, factor):
        overwrite(a, row_stride, k_stride, b, b_stride, c, c_stride, n)
        accumulate(a, row_stride, k_stride, b, b_stride, d, c_stride, n, factor)

    width = vectors * lanes
    rng = np.random.default_rng(0)
    for n, transposed in ((0, False), (1, False), (7, True), (130, False)):
        a = rng.standard_normal((n, rows) if transposed else (rows, n)).astype(compute)
        a = a.T if transposed else a
        b = rng.standard_normal((n, width)).astype(dtype)
        c = np.full((rows, width + 3), np.nan, compute)
        d = rng.standard_normal((rows, width + 3)).astype(compute)
        before, factor = d.copy(), rng.standard_normal(width).astype(compute)
        both(address(a), *a.strides, address(b), b.strides[0], address(c), address(d), c.strides[0], n, address(factor))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        tolerance = 50 * np.finfo(compute).eps
        np.testing.assert_allclose(c[:, :width], exact, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(d[:, :width], before[:, :width].astype(np.float64) * factor + exact, rtol=tolerance, atol=tolerance)
        assert np.isnan(c[:, width:]).all() and np.array_equal(d[:, width:], before[:, width:])
    if target.vector_bytes() == 64:
        assembly = next(iter(both.inspect_asm().values()))
        assert assembly.count("vfmadd") >= 2 * rows * vectors and "zmm" in assembly
    if target.has_fma():
        assert "fmaf" not in next(iter(both.inspect_asm().values())), "a multiply-add became a call"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_products(dtype):
    lanes = LANES["float32"]
    dots = microkernel.dot_products(dtype, lanes)
    store = vector.Simd(types.float32, lanes).store

    @njit
    def scores(keys, key_stride, first, last, query, n, place, scratch):
        store(place, dots(keys, key_stride, first, last, query, n, scratch))

    rng = np.random.default_rng(0)
    number = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    keys = rng.standard_normal((lanes + 5, 3 * lanes)).astype(number)
    query, got, scratch = rng.standard_normal(3 * lanes).astype(np.float32), np.empty(lanes, np.float32), np.empty(lanes**2, np.float32)
    for first, last in ((0, lanes + 4), (5, lanes + 4), (3, 7)):
        scores(address(keys), keys.strides[0], first, last, address(query), 3, address(got), address(scratch))
        places = np.minimum(first + np.arange(lanes), last)
        np.testing.assert_allclose(got, keys.astype(np.float64)[places] @ query, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_to_panels_and_back(dtype):
    compute = str(convert.COMPUTE[dtype])
    lanes = LANES[compute]
    load_rows, store_rows = transpose.transposing(dtype, lanes)
    kind = FLOATS[compute][1]

    @njit
    def both(source, result, offset, panel, panel_stride, factors):
        load_rows(source, offset, kind(2.5), panel, panel_stride)
        store_rows(panel, panel_stride, factors, result, offset)

    number = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(dtype, kind)
    rows = np.random.default_rng(0).integers(-8, 8, (lanes, 2 * lanes)).astype(number)
    out = np.zeros_like(rows)
    panel, factors = np.empty((lanes, lanes), compute), np.arange(lanes).astype(compute)
    order = np.random.default_rng(1).permutation(lanes)
    listed = [np.array([address(x) + i * x.strides[0] for i in order], np.int64) for x in (rows, out)]
    both(*map(address, listed), lanes * rows.itemsize, address(panel), panel.strides[0], address(factors))
    want = rows.astype(compute)[order, lanes:] * 2.5
    np.testing.assert_array_equal(panel, want.T)
    np.testing.assert_array_equal(out[order, lanes:].astype(np.float64), (want * factors[:, None]).astype(number).astype(np.float64))
    assert not out[:, :lanes].any()


def test_finite():
    all_finite = finite.finite_test(types.float32, LANES["float32"])

    @njit
    def ask(place, stride, begin, end, columns):
        return all_finite(place, stride, begin, end, columns)

    x = np.full((5, 70), 3e38, np.float32)
    assert ask(address(x), x.strides[0], 0, 5, 70) and ask(address(x), x.strides[0], 2, 2, 70)
    for bad in (np.nan, np.inf, -np.inf):
        for column in (0, 15, 16, 69):
            y = -x
            y[3, column] = bad
            assert not ask(address(y), y.strides[0], 0, 5, 70) and not ask(address(y), y.strides[0], 3, 4, 70)
            assert ask(address(y), y.strides[0], 0, 3, 70) and ask(address(y), y.strides[0], 4, 5, 70) and ask(address(y), y.strides[0], 0, 5, column)


# Attention where the tiles make it delicate

ROWS = {"one row": dict(seqlen_q=1), "four rows": dict(seqlen_q=2, heads=4, kv_heads=2), "a vector": dict(seqlen_q=16), "panels": dict(seqlen_q=150)}
STRIDED = {"k": Placement(step=(1, -2, 1, 3)), "v": Placement(order=(0, 3, 2, 1)), "out": Placement(step=(1, 1, 1, 2))}
EDGES = {
    "full": dict(seqlen_k=200),
    "causal": dict(seqlen_k=200, causal=True),
    "narrow window": dict(seqlen_k=333, window=(3, 2)),
    "no keys": dict(seqlen_k=0),
    "one key": dict(seqlen_k=1),
    "a key more than a tile": dict(seqlen_k=65, head_dim=13, head_dim_v=21),
    "rows without keys": dict(seqlen_k=20, causal=True, window=(7, None)),
    "top left": dict(seqlen_k=90, causal="top_left"),
    "strided": dict(seqlen_k=70, head_dim=48, head_dim_v=40, **STRIDED),
    "wide": dict(seqlen_k=80, head_dim=256, head_dim_v=250, causal=True),
}


FORMS = [("float32", rows) for rows in ROWS] + [(dtype, rows) for dtype in DTYPES if dtype != "float32" for rows in ("one row", "panels")]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("dtype", "rows"), FORMS)
def test_forms_and_edges(dtype, rows, edge):
    run(Case(dtype=dtype, **(dict(batch=2, heads=2, kv_heads=2) | ROWS[rows] | EDGES[edge])))


@pytest.mark.parametrize("hidden", ["nan", "inf"])
@pytest.mark.parametrize("rows", ROWS)
def test_nan_and_inf_that_only_some_queries_of_a_tile_see(rows, hidden):
    shape = dict(batch=1, heads=2, kv_heads=2, seqlen_k=200) | ROWS[rows]
    for options in (dict(causal=True), dict(window=(9, 4)), dict(causal="top_left")):
        for values in ("nan", "normal"):
            for seed in range(3):
                run(Case(hidden=hidden, values=values, seed=seed, **shape, **options))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_values_reach_exactly_the_rows_that_see_them(bad):
    """One value after the other along a causal triangle, so that each border of each tile is met."""
    n, d = 150, 8
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(np.float32) for _ in range(3))
    clean = attend(q, k, v, causal=True)[0]
    for key in range(0, n, 7):
        spoiled = v.copy()
        spoiled[0, key, 0, 3] = bad
        out = attend(q, k, spoiled, causal=True)[0]
        np.testing.assert_allclose(out[:, :key], clean[:, :key], rtol=1e-5, atol=1e-6)
        assert not np.isfinite(out[:, key:, :, 3]).any()
        np.testing.assert_allclose(np.delete(out, 3, axis=3), np.delete(clean, 3, axis=3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 40])
def test_infinite_queries(rows):
    """Scores of -inf weigh nothing, even where there is nothing else; one of +inf makes its row NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 24)).astype(np.float32) for n in (rows, 70, 70))
    k[..., 5], k[..., 20] = -abs(k[..., 5]) - 1, 1
    q[:, 0, :, 5] = np.inf
    out, lse = attend(q, k, v)
    assert not out[:, 0].any() and np.isneginf(lse[..., 0]).all()
    q[:, 0, :, 20] = np.inf
    k[:, 3:, :, 20] = 0
    out, lse = attend(q, k, v)
    assert np.isnan(out[:, 0]).all() and np.isnan(lse[..., 0]).all()
    assert np.isfinite(out[:, 1:]).all() and np.isfinite(lse[..., 1:]).all()


def attend(q, k, v, *, threads=None, with_lse=True, choice=None, **options):
    """Run the family on contiguous NumPy arrays, optionally with other tiles than it would choose."""
    dtype = str(q.dtype)
    problem = make_problem(q.shape, k.shape, v.shape, (dtype,) * 3, **options)
    out, lse = np.full(problem.out_shape, np.nan, dtype), np.full(problem.lse_shape, np.nan, problem.lse_dtype)
    layouts = dispatch.Layouts(*(dispatch.Layout(x.shape, x.strides, x.itemsize) for x in (q, k, v, out, lse)))
    plan = cpu.plan(problem, layouts, dispatch.CPU)
    if choice is not None:
        plan = dispatch.Plan("cpu", problem, dispatch.CPU, layouts, choice(plan.config), threads=threads or plan.threads)
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads or before, numba.config.NUMBA_NUM_THREADS))
    try:
        cpu.prepare(plan)((*map(address, (q, k, v, out)), address(lse) if with_lse else 0), 0)
    finally:
        numba.set_num_threads(before)
    return out, lse


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_parts_of_the_keys_are_merged(rows, splits):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 2, 24)).astype(np.float32) for n in (rows, 330, 330))
    for options in ({}, {"causal": True}, {"window": (20, 0)}, {"causal": "top_left"}):
        whole, whole_lse = attend(q, k, v, **options)
        out, lse = attend(q, k, v, choice=lambda chosen: config.CpuConfig(chosen.kernel, chosen.q_tile, 64, splits), threads=2, **options)
        np.testing.assert_allclose(out, whole, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(lse, whole_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 100])
def test_lse_is_not_written_when_nobody_asked(rows):
    q, k, v = (np.random.default_rng(0).standard_normal((1, n, 2, 16)).astype(np.float32) for n in (rows, 70, 70))
    out, lse = attend(q, k, v, with_lse=False)
    assert np.isnan(lse).all()
    np.testing.assert_array_equal(out, attend(q, k, v)[0])


def test_float32_is_exact_to_1e_5():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1500, 2, 64)).astype(np.float32) for _ in range(3))
    out, lse = attend(q, k, v, causal=True)
    exact, exact_lse = exact_attention(q, k, v)
    assert np.abs(out - exact).max() <= 1e-5 * np.abs(exact).max()
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)
    assert np.median(np.abs(out / exact - 1)) < 1e-6
    out, lse = attend(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    np.testing.assert_allclose(out, exact, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-13)


def exact_attention(q, k, v):
    return reference.forward(make_problem(q.shape, k.shape, v.shape, ("float64",) * 3, causal=True), q, k, v)


# Gradients where the tiles make them delicate


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("dtype", "rows"), FORMS)
def test_gradients_of_forms_and_edges(dtype, rows, edge):
    shape = dict(batch=2, heads=2, kv_heads=2) | ROWS[rows] | EDGES[edge]
    placements = {"dk": shape["k"], "dv": shape["v"], "dout": shape["out"]} if "k" in shape else {}
    testing.run_backward_case(BackwardCase(dtype=dtype, with_dlse=True, **shape, **placements), "cpu", "numpy")


@pytest.mark.parametrize("needs", [("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v")], ids="".join)
@pytest.mark.parametrize("seqlen_q", [8, 150])
def test_any_subset_of_the_gradients(seqlen_q, needs):
    testing.run_backward_case(BackwardCase(seqlen_q=seqlen_q, seqlen_k=200, batch=2, heads=2, causal=True, needs=needs), "cpu", "numpy")


@pytest.mark.parametrize("hidden", ["nan", "inf"])
@pytest.mark.parametrize("rows", ROWS)
def test_gradients_beside_hidden_nan_and_inf(rows, hidden):
    shape = dict(batch=1, heads=2, kv_heads=2, seqlen_k=200) | ROWS[rows]
    for options in (dict(causal=True), dict(window=(9, 4)), dict(causal="top_left"), dict(window=(300, 30))):
        for seed in range(2):
            testing.run_backward_case(BackwardCase(hidden=hidden, seed=seed, **shape, **options), "cpu", "numpy")


def backward_inputs(seqlen_q, seqlen_k, *, dtype="float32", batch=1, heads=1, kv_heads=1, head_dim=16, head_dim_v=16, seed=0, **options):
    """(problem, [dout, q, k, v, out, lse, dlse]), contiguous and random, out and LSE from the reference."""
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((batch, seqlen_q, heads, d)).astype(dtype) for d in (head_dim, head_dim_v))
    k, v = (rng.standard_normal((batch, seqlen_k, kv_heads, d)).astype(dtype) for d in (head_dim, head_dim_v))
    problem = make_problem(q.shape, k.shape, v.shape, (dtype,) * 3, **options)
    out, lse = reference.forward(problem, q, k, v)
    dlse = rng.standard_normal(problem.lse_shape)
    return problem, [dout, q, k, v, out.astype(dtype), *(x.astype(problem.lse_dtype) for x in (lse, dlse))]


def differentiate(problem, inputs, *, threads=1, **choice):
    """Run the family's backward, optionally with other tiles than it would choose; the workspace is not written beyond its end."""
    results = [np.full(shape, np.nan, problem.dtype) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)]
    arrays = [*inputs, *results]
    layouts = dispatch.BackwardLayouts(*(dispatch.Layout(x.shape, x.strides, x.itemsize) for x in arrays))
    chosen = backward_config.choose(problem, threads)
    chosen = backward_config.BackwardConfig(**{name: choice.get(name, getattr(chosen, name)) for name in chosen.__dataclass_fields__})
    size = sum(backward_arguments.workspace_sizes(problem, chosen, True).values())
    plan = dispatch.Plan("cpu", problem, dispatch.CPU, layouts, chosen, threads=threads, direction="backward", workspace_bytes=size)
    workspace = np.full(size + 64, 0xFF, np.uint8)
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        backward_launch.prepare(plan)((*map(address, arrays), address(workspace)), 0)
    finally:
        numba.set_num_threads(before)
    assert (workspace[size:] == 0xFF).all()
    return results


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top_left"}, {"window": (70, 5)}, {"window": (None, 20)}], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_neither_tiles_of_keys_nor_threads_change_a_bit(group, options):
    """Several items add to the same dQ, on several threads too, each in its turn."""
    problem, inputs = backward_inputs(290, 530, batch=2, heads=2 * group, kv_heads=2, head_dim=40, head_dim_v=24, **options)
    whole = differentiate(problem, inputs, kv_tile=1024)
    for got, exact in zip(whole, reference.backward(problem, *inputs[:4], inputs[6]), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    for kv_tile in (64, 192, 512):
        for threads in (1, 2):
            for got, want in zip(differentiate(problem, inputs, threads=threads, kv_tile=kv_tile), whole, strict=True):
                np.testing.assert_array_equal(got, want)


def test_more_threads_than_processors():
    """Threads that wait for their turn let those run that they wait for."""
    code = """
        import sys
        import numba, numpy as np
        sys.path.insert(0, "tests")
        import test_cpu_kernel as tests
        for options in ({}, {"causal": True}):
            problem, inputs = tests.backward_inputs(300, 1000, **options)
            one, many = (tests.differentiate(problem, inputs, threads=n, kv_tile=64) for n in (1, 8))
            print(all(map(np.array_equal, one, many)))
    """
    assert python(code, NUMBA_NUM_THREADS=8).split() == ["True", "True"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 4)}], ids=str)
def test_bad_rows_reach_exactly_the_gradients_that_depend_on_them(options, bad):
    """One row after the other along the band, so that each border of each tile is met."""
    n = 150
    problem, inputs = backward_inputs(n, n, **options)
    clean, seen = differentiate(problem, inputs), reference.visible(problem)
    same = dict(rtol=1e-5, atol=1e-6)
    for row in range(0, n, 7):
        for spoiled in (0, 1):  # dout, q: the query's own dQ, and the keys that it sees
            changed = [x.copy() for x in inputs]
            changed[spoiled][0, row, 0, 3] = bad
            if spoiled == 1:
                changed[5][0, 0, row] = np.nan
            dq, dk, dv = differentiate(problem, changed)
            np.testing.assert_allclose(np.delete(dq, row, axis=1), np.delete(clean[0], row, axis=1), **same)
            for got, want in ((dk, clean[1]), (dv, clean[2])):
                np.testing.assert_allclose(got[:, ~seen[row]], want[:, ~seen[row]], **same)
                assert not np.isfinite(got[0, seen[row], 0]).all(axis=1).any()
        changed = [x.copy() for x in inputs]
        changed[2][0, row, 0, 3] = bad  # k: dQ of the queries that see it
        changed[5][0, 0, seen[:, row]] = np.nan
        dq = differentiate(problem, changed)[0]
        np.testing.assert_allclose(dq[:, ~seen[:, row]], clean[0][:, ~seen[:, row]], **same)
        assert not np.isfinite(dq[0, seen[:, row], 0]).all(axis=1).any()


def test_bad_gradients_of_a_panel_that_is_one_query_reach_no_key_beside_those_it_sees():
    """All rows of the panel see the same keys, which are no whole register tile."""
    problem, inputs = backward_inputs(1, 10, heads=64, causal="top_left")
    inputs[0][:] = np.nan
    _, dk, dv = differentiate(problem, inputs)
    for gradient in (dk, dv):
        assert np.isnan(gradient[:, 0]).all() and (gradient[:, 1:] == 0).all()


def test_rows_whose_scores_are_all_minus_infinity_have_no_gradient():
    problem, inputs = backward_inputs(40, 70)
    _, q, k, v, *_ = inputs
    k[..., 5] = -abs(k[..., 5]) - 1
    q[:, 3, :, 5] = np.inf
    out, lse = reference.forward(problem, q, k, v)
    inputs[4:6] = out.astype(np.float32), lse.astype(np.float32)
    assert np.isneginf(lse[..., 3]).all()
    dq, dk, dv = differentiate(problem, inputs)
    assert not dq[:, 3].any() and all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("seqlen_k", [1, 63, 65, 130])
def test_very_negative_lse(seqlen_k):
    """A key past the end has a score of 0, and exp(0 - lse) is infinite."""
    problem, inputs = backward_inputs(50, seqlen_k, scale=1.0)
    inputs[1][..., 0], inputs[2][..., 0] = -40, 40
    out, lse = reference.forward(problem, *inputs[1:4])
    assert lse.max() < -1500
    inputs[4:6] = out.astype(np.float32), lse.astype(np.float32)
    exact = reference.backward(problem, *inputs[:4], inputs[6])
    for got, want in zip(differentiate(problem, inputs), exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


# Threads


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread only")
@pytest.mark.parametrize("causal", [False, True])
def test_the_number_of_threads_changes_no_bit(causal):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 300, 3, 32)).astype(np.float32) for _ in range(3))
    tiles = lambda chosen: config.CpuConfig(chosen.kernel, chosen.kernel.panel, 64)  # noqa: E731
    one, two = (attend(q, k, v, causal=causal, choice=tiles, threads=n) for n in (1, 2))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])


def test_a_plan_asks_for_as_many_threads_as_numba_gives():
    shape = (2, 2048, 8, 64)
    problem = make_problem(shape, shape, shape, ("float32",) * 3)
    layouts = dispatch.Layouts(*(dispatch.Layout(shape, (8, 8, 8, 4)) for _ in range(4)))
    before = numba.get_num_threads()
    try:
        for threads in {1, before}:
            numba.set_num_threads(threads)
            assert cpu.plan(problem, layouts, dispatch.CPU).threads == threads
    finally:
        numba.set_num_threads(before)


CONCURRENT = """
    import threading
    import numba, numpy as np
    import numbaflash
    rng = np.random.default_rng(0)
    jobs = []
    for n in (1, 40, 700, 900):
        q, k, v = (rng.standard_normal((1, m, 4, 32)).astype(np.float32) for m in (n, 900, 900))
        out, lse = numbaflash.forward(q, k, v, return_lse=True)
        jobs.append((q, k, v, lse, out, *numbaflash.backward(out, q, k, v, out, lse)))
    wrong = []
    def work(seed):
        for turn in range(12):
            q, k, v, lse, *want = jobs[(seed + turn) % len(jobs)]
            got = numbaflash.forward(q, k, v), *numbaflash.backward(want[0], q, k, v, want[0], lse)
            if not all(map(np.array_equal, got, want)):
                wrong.append((seed, turn))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(numba.threading_layer(), len(wrong))
"""


def python(code, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in environment.items()}}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_calls_from_many_threads(layer):
    """Numba's workqueue ends the process when two threads use it at once, so this test is about living, too."""
    try:
        output = python(CONCURRENT, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS=2)
    except AssertionError as error:
        if "No threading layer could be loaded" in str(error):
            pytest.skip(f"no {layer}")
        raise
    assert output.split() == [layer, "0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_a_forked_child_computes(layer):
    code = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import numpy as np, numbaflash
        q = np.random.default_rng(0).standard_normal((2, 600, 4, 32)).astype(np.float32)
        want, lse = numbaflash.forward(q, q, q, return_lse=True)
        gradients = numbaflash.backward(q, q, q, q, want, lse)
        child = os.fork()
        if child == 0:
            same = np.allclose(numbaflash.forward(q, q, q), want)
            same &= all(map(np.array_equal, numbaflash.backward(q, q, q, q, want, lse), gradients))
            os._exit(0 if same else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    try:
        output = python(code, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS=2)
    except AssertionError as error:
        if "No threading layer could be loaded" in str(error):
            pytest.skip(f"no {layer}")
        raise
    assert output.split() == ["0"]


def test_the_gil_is_released():
    """A Python thread goes on counting while another one computes."""
    shape = (4, 3000, 4, 64)
    q = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    attend(q[:, :600], q, q)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (attend(q, q, q), done.set()))
    ticks = 0
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 3


# The cache on disk

FIRST_CALL = """
    import json, time
    import numpy as np, numba, numbaflash
    from numbaflash.kernels.cpu import config, launch
    from numbaflash.kernels.cpu.backward import launch as backward_launch
    from numbaflash.kernels.cpu.backward.config import choose_kernel
    q = np.random.default_rng(0).standard_normal((1, 4, 1, 16)).astype(np.float32)
    start = time.perf_counter()
    out, lse = numbaflash.forward(q, q, q, return_lse=True)
    dq, dk, dv = numbaflash.backward(q, q, q, q, out, lse)
    seconds = time.perf_counter() - start
    _, kernel = launch.compiled(config.choose_kernel("float32", 4))
    _, backward_kernel = backward_launch.compiled(choose_kernel("float32", 4))
    print(json.dumps([kernel.cache_hits + backward_kernel.cache_hits, seconds, float((out + dq + dk + dv).sum())]))
"""

FORWARD_CALL = """
    import numpy as np, numbaflash
    from numbaflash.kernels.cpu import config, launch
    q = np.random.default_rng(0).standard_normal((1, 4, 1, 16)).astype(np.float32)
    out = numbaflash.forward(q, q, q)
    _, kernel = launch.compiled(config.choose_kernel("float32", 4))
    print(kernel.cache_hits, bool(np.isfinite(out).all()))
"""
"""Half of that, where compiling again is the point."""


@pytest.fixture(scope="module")
def first_process(tmp_path_factory):
    """(a cache that one process has filled, what it printed)"""
    folder = tmp_path_factory.mktemp("cache")
    return folder, json.loads(python(FIRST_CALL, NUMBAFLASH_CACHE_DIR=folder))


def test_the_second_process_does_not_compile(first_process, tmp_path):
    filled, (hits, cold, total) = first_process
    assert hits == 0
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    entries = sorted(tmp_path.iterdir())
    assert len(entries) == 4, "driver and kernel of each direction"
    hits, warm, again = json.loads(python(FIRST_CALL, NUMBAFLASH_CACHE_DIR=tmp_path))
    assert hits == 2 and again == total and warm < cold / 2
    for path in entries:
        path.write_bytes(path.read_bytes()[:-100])
    assert python(FORWARD_CALL, NUMBAFLASH_CACHE_DIR=tmp_path).splitlines()[0] == "0 True", "damaged entries are built anew"
    assert python(FORWARD_CALL, NUMBAFLASH_CACHE_DIR=tmp_path).splitlines() == ["1 True"]


def test_warmup_tells_what_it_compiled(tmp_path):
    """Each of four problems with an LSE and without."""
    code = """
        import json, numbaflash
        from numbaflash.problem import make_problem
        problems = [make_problem(*[(1, n, 2, 16)] * 3, ("float32",) * 3, causal=causal) for n in (2, 6) for causal in (False, True)]
        for report in (numbaflash.warmup(problems, device="cpu"), numbaflash.warmup(problems, device="cpu")):
            print(json.dumps([report.plans, len(report.built), len(report.cached)]))
    """
    assert python(code, NUMBAFLASH_CACHE_DIR=tmp_path).splitlines() == ["[8, 2, 0]", "[8, 0, 2]"]
    assert python(code, NUMBAFLASH_CACHE_DIR=tmp_path).splitlines() == ["[8, 0, 2]", "[8, 0, 2]"]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert python(FORWARD_CALL, NUMBAFLASH_CACHE_DIR=tmp_path / "file").splitlines()[0] == "0 True"


def test_importing_compiles_nothing():
    code = """
        from numba.core import event
        with event.install_recorder("numba:compile") as recorder:
            import numbaflash.kernels.cpu.launch
            import numbaflash.kernels.cpu.backward.launch
        print(len(recorder.buffer))
    """
    assert python(code).split() == ["0"]


# Other processors

PROCESSORS = {
    "avx2": ("haswell", "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+cx16,+lzcnt", 32),
    "sse2": ("x86-64", "+sse,+sse2,+cx8", 16),
}


@pytest.mark.skipif(not target.is_x86(), reason="about x86")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_x86_processors(processor):
    """The code for processors with narrower vectors, without FMA and without float16, on this one."""
    name, features, width = PROCESSORS[processor]
    if not set(features.replace("+", "").split(",")) <= target.features():
        pytest.skip("this processor is older")
    code = f"""
        from numbaflash.kernels.cpu import target
        from numbaflash.testing import BackwardCase, Case, run_backward_case, run_case
        assert target.vector_bytes() == {width}
        for dtype in ("float32", "float16"):
            for seqlen_q in (1, 70):
                for options in (dict(), dict(causal=True, hidden="nan"), dict(head_dim=19, head_dim_v=7, window=(3, 3))):
                    shape = dict(dtype=dtype, seqlen_q=seqlen_q, seqlen_k=150, heads=2, kv_heads=2)
                    run_case(Case(**shape, **options), "cpu", "numpy")
                    if dtype == "float32" or seqlen_q == 70:  # as a panel of one vector, float16 has nothing of its own
                        run_backward_case(BackwardCase(**shape, **options), "cpu", "numpy")
        print("ok")
    """
    assert python(code, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features).split() == ["ok"]


# The choice of tiles


@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 9),
    seqlen_q=st.integers(1, 5000),
    seqlen_k=st.integers(0, 100000),
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 256),
    threads=st.integers(1, 128),
)
def test_tiles(dtype, batch, seqlen_q, seqlen_k, kv_heads, group, head_dim, threads):
    kv = (batch, seqlen_k, kv_heads, head_dim)
    problem = make_problem((batch, seqlen_q, kv_heads * group, head_dim), kv, kv, (dtype,) * 3)
    choice = config.choose(problem, threads)
    items = config.work_items(problem, choice)
    assert choice.q_tile % choice.kernel.panel == 0 and 0 < choice.q_tile <= max(choice.kernel.panel, config.MAX_Q_TILE)
    assert choice.kv_tile % choice.kernel.key_step == 0 and choice.kernel.lanes * convert.COMPUTE[dtype].bitwidth == 8 * target.vector_bytes()
    assert 1 <= choice.threads <= min(threads, items)
    assert choice.splits == 1 or seqlen_k // choice.splits >= config.PART_KEYS
    assert hash(choice) == hash(config.choose(problem, threads))


def test_what_the_tiles_are_for():
    def choice(seqlen_q, seqlen_k, heads, threads, kv_heads=None):
        kv = (1, seqlen_k, kv_heads or heads, 64)
        return config.choose(make_problem((1, seqlen_q, heads, 64), kv, kv, ("float32",) * 3), threads)

    assert choice(8192, 8192, 8, 2).q_tile >= 256, "long problems use large tiles, which pack keys and values less often"
    assert choice(64, 64, 1, 8).threads == 1, "a small problem runs in the calling thread"
    assert choice(1, 65536, 1, 4).splits == 4, "one query keeps every thread busy"
    assert choice(1, 65536, 32, 4).splits == 1, "where there are heads enough, keys are not split"
    assert choice(1, 4096, 32, 4, kv_heads=8).kernel.form == "rows" and choice(1, 4096, 32, 4, kv_heads=8).q_tile == 4
    assert choice(64, 64, 1, 1).kernel.form == "panels"


@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 9),
    seqlen_q=st.integers(1, 5000),
    seqlen_k=st.integers(0, 100000),
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 256),
    head_dim_v=st.integers(1, 256),
    threads=st.integers(1, 128),
)
def test_tiles_of_the_gradients(dtype, batch, seqlen_q, seqlen_k, kv_heads, group, head_dim, head_dim_v, threads):
    kv = (batch, seqlen_k, kv_heads)
    problem = make_problem((batch, seqlen_q, kv_heads * group, head_dim), (*kv, head_dim), (*kv, head_dim_v), (dtype,) * 3)
    choice, one = backward_config.choose(problem, threads), backward_config.choose(problem, 1)
    assert choice.q_tile % choice.kernel.panel == 0 and choice.kv_block % choice.kernel.rows == 0 and choice.kv_tile % choice.kv_block == 0
    assert (choice.kernel, choice.q_tile, choice.kv_block) == (one.kernel, one.q_tile, one.kv_block), "what decides the bits knows no threads"
    assert 1 <= choice.threads <= max(1, min(threads, batch * kv_heads * -(-seqlen_k // choice.kv_tile)))
    size = sum(backward_arguments.workspace_sizes(problem, choice, True).values())
    assert size == sum(backward_arguments.workspace_sizes(problem, one, True).values()), "every thread count shares a workspace"
    number, rows = convert.COMPUTE[dtype].bitwidth // 8, seqlen_q * group + choice.q_tile
    assert size <= batch * kv_heads * rows * (head_dim + 16 + 3) * number + 4 * 64, "O(S)"


def test_the_plan_of_the_gradients():
    shape = (1, 300, 2, 64)
    problem = make_problem(shape, shape, shape, ("float32",) * 3)
    assert backward.supports(problem, dispatch.CPU) == ()
    assert "H200" in backward.supports(problem, dispatch.Device("cuda", name="H200"))[0]
    tensor, rows = dispatch.Layout(shape, (153600, 512, 256, 4)), dispatch.Layout((1, 2, 300), (2400, 1200, 4))
    whole = backward.plan(problem, dispatch.BackwardLayouts(*[tensor] * 5, rows, rows, *[tensor] * 3), dispatch.CPU, False)
    assert whole.deterministic and whole.direction == "backward" and whole.threads <= launch.available_threads()
    assert whole.workspace_bytes >= 2 * 300 * (64 + 2) * 4
    without_q = backward.plan(problem, dispatch.BackwardLayouts(*[tensor] * 5, rows, None, None, tensor, tensor), dispatch.CPU, True)
    assert without_q.workspace_bytes < whole.workspace_bytes / 20, "only LSE and delta"
    resources = backward.resources(whole)
    assert resources["workspace_bytes"] == whole.workspace_bytes and resources["threads"] == whole.threads
    assert resources["scratch_bytes_per_thread"] > 4 * 64 * 64 * 4


def test_waiting_ends_when_the_word_is_released():
    wait = njit(nogil=True)(lambda words, value: driver.wait_until(np.int64(words.ctypes.data), value))
    release = njit(lambda words, value: driver.store_release(np.int64(words.ctypes.data), value))
    words, done = np.zeros(1, np.int64), threading.Event()
    wait(words, 0)
    release(words, 1)
    assert words[0] == 1
    thread = threading.Thread(target=lambda: (wait(words, 2), done.set()))
    thread.start()
    assert not done.wait(0.05)
    release(words, 2)
    assert done.wait(30)
    thread.join()


def test_supports_and_resources():
    problem = make_problem((1, 300, 2, 64), (1, 300, 2, 64), (1, 300, 2, 64), ("float32",) * 3)
    assert cpu.supports(problem, dispatch.CPU) == ()
    assert "H200" in cpu.supports(problem, dispatch.Device("cuda", name="H200"))[0]
    layouts = dispatch.Layouts(*(dispatch.Layout((1, 300, 2, 64), (153600, 512, 256, 4)) for _ in range(4)))
    plan = cpu.plan(problem, layouts, dispatch.CPU)
    resources = cpu.resources(plan)
    assert resources["threads"] == plan.threads and resources["workspace_bytes_per_thread"] > 64 * 300 * 4 // plan.threads
    assert plan.grid == (config.work_items(problem, plan.config),) and plan.threads == launch.available_threads()


def test_kernels_that_different_processes_cached_keep_apart(first_process, tmp_path):
    """Kernels of one factory have like-named symbols; loaded side by side, each must call its own."""
    one = """
        import os
        import numpy as np
        import numbaflash
        from numbaflash import reference
        from numbaflash.problem import make_problem

        for dtype in os.environ["DTYPES"].split():
            q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 32)).astype(dtype)
            out = numbaflash.forward(q, k, v)
            expected, _ = reference.forward(make_problem(q.shape, k.shape, v.shape, [dtype] * 3), q, k, v)
            assert np.abs(out - expected).max() < (1e-2 if dtype == "float16" else 1e-4), dtype
        """
    shutil.copytree(first_process[0], tmp_path, dirs_exist_ok=True)
    python(one, NUMBAFLASH_CACHE_DIR=tmp_path, DTYPES="float16")
    before = sorted(tmp_path.iterdir())
    assert len(before) == 5, "float32 of one process, float16 of another"
    for dtypes in ("float16 float32", "float32 float16"):
        python(one, NUMBAFLASH_CACHE_DIR=tmp_path, DTYPES=dtypes)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread")
def test_a_kind_first_called_on_one_thread_takes_more_when_they_come(monkeypatch):
    q = np.random.default_rng(0).standard_normal((1, 2048, 2, 32)).astype(np.float32)
    import numbaflash

    made = []
    plan_for = launch.plan_for
    monkeypatch.setattr(launch, "plan_for", lambda *args: made.append(plan_for(*args)) or made[-1])
    before = numba.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 1, 2):
            numba.set_num_threads(threads)
            results.append(numbaflash.forward(q, q, q, scale=0.123))
    finally:
        numba.set_num_threads(before)
    assert [plan.threads for plan in made] == [1, 2]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-6)
