"""The description of a problem: the band that causal and window settle on, and every message for a wrong argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numbaflash.problem import MAX_SEQLEN, NEEDS, Problem, check_flag, check_needs, check_result, check_saved, make_problem
from numbaflash.reference import visible
from numbaflash.testing import Case
from numbaflash.testing.cases import touched

LENGTH = st.integers(0, 12)
SIDE = st.one_of(st.none(), st.integers(0, 14), st.just(2**40))
CAUSAL = st.sampled_from((False, True, "top_left"))


def problem(q=(2, 5, 4, 8), k=(2, 7, 2, 8), v=(2, 7, 2, 6), dtypes=("float32",) * 3, **options) -> Problem:
    return make_problem(q, k, v, dtypes, **options)


def masked(seqlen_q, seqlen_k, causal, window):
    """Visible pairs straight from the contract, pair by pair."""
    seen = np.zeros((seqlen_q, seqlen_k), bool)
    shift = 0 if causal == "top_left" else seqlen_k - seqlen_q
    left, right = window or (None, None)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            distance = j - (i + shift)
            seen[i, j] = (not causal or distance <= 0) and (left is None or -distance <= left) and (right is None or distance <= right)
    return seen


@given(LENGTH, LENGTH, CAUSAL, st.one_of(st.none(), st.tuples(SIDE, SIDE)))
def test_band_sees_the_pairs_of_the_contract(seqlen_q, seqlen_k, causal, window):
    p = problem((1, seqlen_q, 1, 8), (1, seqlen_k, 1, 8), (1, seqlen_k, 1, 8), causal=causal, window=window)
    want = masked(seqlen_q, seqlen_k, causal, window)
    assert (visible(p) == want).all()
    assert p.visible_pairs == want.sum()
    for i, (lo, hi) in enumerate(map(p.key_range, range(seqlen_q))):
        assert 0 <= lo <= hi <= seqlen_k
        assert (np.flatnonzero(want[i]) == np.arange(lo, hi)).all()
    queries, keys = touched(p)
    assert (queries == want.any(axis=1)).all() and (keys == want.any(axis=0)).all()


@given(LENGTH, LENGTH, CAUSAL, st.one_of(st.none(), st.tuples(SIDE, SIDE)))
def test_band_is_canonical(seqlen_q, seqlen_k, causal, window):
    """A bound that is kept excludes a pair, so that equal masks cost the same kernel, and it fits int32."""
    p = problem((1, seqlen_q, 1, 8), (1, seqlen_k, 1, 8), (1, seqlen_k, 1, 8), causal=causal, window=window)
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    if p.left is not None:
        assert (j < i + p.offset - p.left).any() and abs(p.left) < 2**31
    if p.right is not None:
        assert (j > i + p.offset + p.right).any() and abs(p.right) < 2**31
    if (p.left, p.right) == (None, None):
        assert p.offset == 0 and visible(p).all()


def test_causal_that_hides_nothing_is_no_band():
    """One query over all keys: decoding with causal=True is the plain problem, and shares its kernel."""
    plain = problem((1, 1, 1, 8), (1, 9, 1, 8), (1, 9, 1, 8))
    assert problem((1, 1, 1, 8), (1, 9, 1, 8), (1, 9, 1, 8), causal=True) == plain
    assert problem((1, 1, 1, 8), (1, 9, 1, 8), (1, 9, 1, 8), window=(8, None)) == plain
    assert problem((1, 1, 1, 8), (1, 9, 1, 8), (1, 9, 1, 8), window=(7, None)) != plain


def test_scales_of_float64():
    """Kernels compute float64 in float64, and float32's largest scales still have a finite float32 in base 2."""
    shape = (1, 1, 1, 8)
    assert problem(shape, shape, shape, dtypes=("float64",) * 3, scale=1e300).scale == 1e300
    assert problem(shape, shape, shape, dtypes=("float32",) * 3, scale=2.3e38).scale == 2.3e38


def test_properties():
    p = problem()
    assert (p.group, p.lse_dtype, p.is_empty) == (2, "float32", False)
    assert (p.q_shape, p.k_shape, p.v_shape) == ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    assert (p.out_shape, p.lse_shape, p.visible_pairs) == ((2, 5, 4, 6), (2, 4, 5), 35)
    assert problem(dtypes=("float64",) * 3).lse_dtype == "float64"
    assert p.scale == 1 / math.sqrt(8)
    assert [problem(scale=s).scale for s in (0, -2, 0.5, np.float32(0.25), np.int64(3))] == [0.0, -2.0, 0.5, 0.25, 3.0]


@pytest.mark.parametrize(
    "shapes", [((0, 5, 4, 8), (0, 7, 2, 8)), ((2, 0, 4, 8), (2, 7, 2, 8)), ((2, 5, 0, 8), (2, 7, 2, 8)), ((2, 5, 0, 8), (2, 7, 0, 8))]
)
def test_empty(shapes):
    q, k = shapes
    assert problem(q, k, k).is_empty


def test_no_keys_is_not_empty():
    assert not problem(k=(2, 0, 2, 8), v=(2, 0, 2, 6), causal=True).is_empty


@pytest.mark.parametrize("value", [False, True, np.bool_(True), np.False_, "top_left"])
def test_causal_values(value):
    causal = value if isinstance(value, str) else bool(value)
    assert (visible(problem(causal=value)) == masked(5, 7, causal, None)).all()


@pytest.mark.parametrize("value", [None, (None, None), (3, None), [3, 2], (np.int32(3), np.int64(0)), np.array([1, 2])])
def test_window_values(value):
    left, right = (None, None) if value is None else value
    assert (visible(problem(window=value)) == masked(5, 7, False, (left, right))).all()


WRONG = {
    "rank": (dict(q=(2, 5, 8)), ValueError, r"q must have 4 axes \(batch, seqlen_q, heads, head_dim\); got 3 axes, shape \(2, 5, 8\)"),
    "rank of v": (dict(v=(2, 7, 2, 6, 1)), ValueError, r"v must have 4 axes \(batch, seqlen_k, kv_heads, head_dim_v\); got 5 axes"),
    "batch of k": (dict(k=(3, 7, 2, 8)), ValueError, r"k must have the same batch \(axis 0\) as q; got 3, expected 2"),
    "batch of v": (dict(v=(1, 7, 2, 6)), ValueError, r"v must have the same batch \(axis 0\) as q; got 1, expected 2"),
    "dims of q and k": (dict(k=(2, 7, 2, 9)), ValueError, r"k must have the same head_dim \(axis 3\) as q; got 9, expected 8"),
    "lengths of k and v": (dict(v=(2, 8, 2, 6)), ValueError, r"v must have the same seqlen_k \(axis 1\) as k; got 8, expected 7"),
    "heads of k and v": (dict(v=(2, 7, 4, 6)), ValueError, r"v must have the same kv_heads \(axis 2\) as k; got 4, expected 2"),
    "heads": (dict(q=(2, 5, 3, 8)), ValueError, r"heads of q must be a multiple of the heads of k and v .*; got 3 query heads and 2 key/value heads"),
    "no kv_heads": (dict(k=(2, 7, 0, 8), v=(2, 7, 0, 6)), ValueError, r"got 4 query heads and 0 key/value heads"),
    "head dim 0": (dict(q=(2, 5, 4, 0), k=(2, 7, 2, 0)), ValueError, r"q must have a head dim \(axis 3\) from 1 to 256; got 0"),
    "head dim 257": (dict(q=(2, 5, 4, 257), k=(2, 7, 2, 257)), ValueError, r"q must have a head dim \(axis 3\) from 1 to 256; got 257"),
    "value dim 0": (dict(v=(2, 7, 2, 0)), ValueError, r"v must have a head dim \(axis 3\) from 1 to 256; got 0"),
    "too long": (dict(q=(2, MAX_SEQLEN + 1, 4, 8)), ValueError, rf"q must have at most {MAX_SEQLEN} rows \(axis 1\); got {MAX_SEQLEN + 1}"),
    "integers": (dict(dtypes=("int32",) * 3), TypeError, r"q must be one of float16, bfloat16, float32, float64; got dtype int32"),
    "complex": (dict(dtypes=("float32", "complex64", "float32")), TypeError, r"k must be one of .*; got dtype complex64"),
    "objects": (dict(dtypes=("float32", "float32", "object")), TypeError, r"v must be one of .*; got dtype object"),
    "mixed": (dict(dtypes=("float32", "float16", "float32")), TypeError, r"q, k and v must have one dtype; got float32, float16, float32\. Cast"),
    "scale nan": (dict(scale=math.nan), ValueError, r"scale must be finite; got nan"),
    "scale inf": (dict(scale=-math.inf), ValueError, r"scale must be finite; got -inf"),
    "scale huge": (dict(scale=10**5000), ValueError, r"scale must be finite; got a number beyond the range of float64"),
    "scale beyond float64": (
        dict(dtypes=("float64",) * 3, scale=1.7e308),
        ValueError,
        r"scale must be from -1\.246e\+308 to 1\.246e\+308 for float64, .*; got 1\.7e\+308",
    ),
    "scale beyond float32": (dict(scale=-1e39), ValueError, r"scale must be from -2\.359e\+38 to 2\.359e\+38 for float32, .*; got -1e\+39"),
    "scale text": (dict(scale="0.5"), TypeError, r"scale must be a real number or None \(1/sqrt\(head_dim\)\); got '0.5'"),
    "scale bool": (dict(scale=True), TypeError, r"scale must be a real number .*; got True"),
    "scale complex": (dict(scale=1j), TypeError, r"scale must be a real number .*; got 1j"),
    "causal text": (dict(causal="bottom_right"), ValueError, r'causal must be False, True \(bottom-right\) or "top_left"; got \'bottom_right\''),
    "causal number": (dict(causal=1), ValueError, r"causal must be .*; got 1"),
    "causal None": (dict(causal=None), ValueError, r"causal must be .*; got None"),
    "window number": (dict(window=128), TypeError, r"window must be None or a pair \(left, right\); got 128"),
    "window triple": (dict(window=(1, 2, 3)), TypeError, r"window must be None or a pair \(left, right\); got \(1, 2, 3\)"),
    "window negative": (
        dict(window=(-1, 0)),
        ValueError,
        r"window left must not be negative \(None is unbounded, \(w, 0\) sees w \+ 1 keys\); got -1",
    ),
    "window right": (dict(window=(0, -2)), ValueError, r"window right must not be negative .*; got -2"),
    "window float": (dict(window=(0, 1.0)), TypeError, r"window right must be an integer or None \(unbounded\); got 1.0"),
    "window bytes": (dict(window=b"ab"), TypeError, r"window must be None or a pair \(left, right\); got b'ab'"),
    "window set": (dict(window={1, 2}), TypeError, r"window must be None or a pair \(left, right\); got {1, 2}"),
    "window bool": (dict(window=(True, 0)), TypeError, r"window left must be an integer or None \(unbounded\); got True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages(name):
    arguments, kind, message = WRONG[name]
    with pytest.raises(kind, match=message) as caught:
        problem(**arguments)
    assert caught.type is kind


def test_flag():
    assert check_flag("return_lse", np.True_) is True
    with pytest.raises(TypeError, match="return_lse must be True or False; got 1"):
        check_flag("return_lse", 1)


@pytest.mark.parametrize(
    "given_, kind, message",
    [
        (dict(dtype="float16"), TypeError, "out must have dtype float32; got float16"),
        (dict(shape=(2, 5, 4, 7)), ValueError, r"out must have shape \(2, 5, 4, 6\); got \(2, 5, 4, 7\)"),
        (dict(readonly=True), ValueError, "out must be writable; got a read-only array"),
    ],
)
def test_result_messages(given_, kind, message):
    p = problem()
    right = dict(shape=p.out_shape, dtype=p.dtype, readonly=False)
    check_result("out", **right, want_shape=p.out_shape, want_dtype=p.dtype)
    with pytest.raises(kind, match=message):
        check_result("out", **(right | given_), want_shape=p.out_shape, want_dtype=p.dtype)


def test_a_case_asks_for_its_problem():
    case = Case(seqlen_q=5, seqlen_k=7, heads=4, kv_heads=2, head_dim=8, head_dim_v=6, window=(3, 0), scale=2.0)
    assert case.problem == problem((1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 6), window=(3, 0), scale=2.0)


def test_operands_of_a_problem():
    p = make_problem((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 16), ("bfloat16",) * 3)
    shapes = {"q": p.q_shape, "k": p.k_shape, "v": p.v_shape, "out": p.out_shape, "lse": p.lse_shape}
    for name, shape in shapes.items():
        for operand in (name, f"d{name}"):
            assert p.shape_of(operand) == shape
            assert p.dtype_of(operand) == ("float32" if name == "lse" else "bfloat16")


@pytest.mark.parametrize(("sizes", "nothing"), [((2, 3, 4), False), ((2, 0, 4), True), ((2, 3, 0), True), ((0, 3, 4), True)])
def test_sees_nothing(sizes, nothing):
    batch, seqlen_q, seqlen_k = sizes
    for options in ({}, {"causal": True}, {"causal": "top_left", "window": (0, 0)}):
        p = make_problem((batch, seqlen_q, 2, 8), (batch, seqlen_k, 2, 8), (batch, seqlen_k, 2, 8), ("float32",) * 3, **options)
        assert p.sees_nothing == nothing
        assert nothing or p.visible_pairs > 0


def test_needs():
    assert check_needs(["v", "q", "v"]) == ("q", "v") and check_needs(iter(())) == () and check_needs(frozenset("kqv")) == NEEDS
    for bad in ("q", b"q", 3, None, {"q": 1}):
        with pytest.raises(TypeError, match='needs must be a tuple of "q", "k" and "v"'):
            check_needs(bad)
    for bad in (("x",), (1,), ("q", None), ("Q",)):
        with pytest.raises(ValueError, match='needs must hold nothing but "q", "k" and "v"'):
            check_needs(bad)


@pytest.mark.parametrize(
    ("name", "origin"), [("out", "numbaflash.forward returned it"), ("lse", "numbaflash.forward"), ("dout", "as out has"), ("dlse", "as lse has")]
)
def test_what_the_forward_saved(name, origin):
    check_saved(name, (2, 3), "float32", want_shape=(2, 3), want_dtype="float32")
    with pytest.raises(TypeError, match=rf"{name} must have dtype float32, .*{origin}.*; got float64"):
        check_saved(name, (2, 3), "float64", want_shape=(2, 3), want_dtype="float32")
    with pytest.raises(ValueError, match=rf"{name} must have shape \(2, 3\), .*{origin}.*; got \(3, 2\)"):
        check_saved(name, (3, 2), "float32", want_shape=(2, 3), want_dtype="float32")
