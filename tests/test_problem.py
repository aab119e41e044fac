"""The description of a problem: the band that causal and window settle on, and every message for a wrong argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numbaflash.problem import (
    FORWARD_OPTIONS,
    MAX_SEQLEN,
    NEEDS,
    Problem,
    check_dropout,
    check_flag,
    check_needs,
    check_result,
    check_saved,
    check_seed,
    make_problem,
    trim_keys,
)
from numbaflash.reference import visible
from numbaflash.testing import Case
from numbaflash.testing.visibility import touched

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


# Options

MASK, BIAS, SLOPES, SINKS = ((2, 4, 5, 7), "bool"), ((5, 7), "float32"), ((4,), "float32"), ((4,), "float32")
LENGTHS = ((2,), "int32")


def test_options_are_absent_by_default():
    p = problem()
    assert p.options == p.features == () and p.gradients == NEEDS and (p.softcap, p.dropout, p.sinks, p.offset_per_entry) == (None, 0.0, False, False)
    assert p == problem(softcap=None, dropout=0, mask=None, bias=None, alibi_slopes=None, sinks=None, seqlens_q=None, seqlens_k=None)
    assert hash(p) == hash(problem(dropout=0.0)) and p != problem(softcap=30.0)


def test_operands_of_options():
    p = problem(mask=MASK, bias=BIAS, alibi_slopes=SLOPES, sinks=SINKS, seqlens_q=LENGTHS, seqlens_k=((2,), "int64"), softcap=50, dropout=0.25)
    arrays = tuple(name for name in FORWARD_OPTIONS if name != "block_mask")  # which is a mask in another form
    assert p.options == arrays and set(p.features) == {*arrays, "softcap", "dropout"} and p.gradients == (*NEEDS, "bias", "sinks")
    want = {
        "mask": ((2, 4, 5, 7), "bool"),
        "bias": ((1, 1, 5, 7), "float32"),
        "alibi_slopes": ((1, 4), "float32"),
        "sinks": ((4,), "float32"),
        "seqlens_q": ((2,), "int32"),
        "seqlens_k": ((2,), "int64"),
    }
    for name, (shape, dtype) in want.items():
        assert (p.shape_of(name), p.dtype_of(name)) == (shape, dtype)
        with pytest.raises(ValueError, match=f"the problem has no {name}"):
            problem().shape_of(name)
    assert p.shape_of("dbias") == (1, 1, 5, 7) and p.dtype_of("dbias") == "float32" and p.shape_of("dsinks") == (4,)
    double = problem(dtypes=("float64",) * 3, bias=((7,), "float16"), sinks=((4,), "float64"))
    assert (double.dtype_of("bias"), double.dtype_of("dsinks"), double.shape_of("bias")) == ("float16", "float64", (1, 1, 1, 7))
    assert problem(alibi_slopes=((2, 4), "float32")).alibi == (2, 4) and problem(mask=((), "bool")).mask == (1, 1, 1, 1)


WRONG_OPTIONS = {
    "int mask": (dict(mask=((5, 7), "int32")), TypeError, "mask must be bool, .*; got dtype int32. Compare it with 0 first: mask != 0"),
    "float mask": (dict(mask=((5, 7), "float32")), TypeError, "mask must be bool, .*; got dtype float32. Numbers .* are a bias"),
    "mask shape": (
        dict(mask=((5, 6), "bool")),
        ValueError,
        r"mask must broadcast to .* = \(2, 4, 5, 7\), heads being those of q; got shape \(5, 6\)",
    ),
    "mask of kv heads": (dict(mask=((2, 2, 5, 7), "bool")), ValueError, r"mask must broadcast to .*; got shape \(2, 2, 5, 7\)"),
    "mask axes": (dict(mask=((1, 2, 4, 5, 7), "bool")), ValueError, "mask must have at most 4 axes .*; got 5 axes"),
    "bool bias": (dict(bias=((5, 7), "bool")), TypeError, "bias must be one of .* for q of float32; got dtype bool. Pass what hides keys as mask"),
    "double bias": (dict(bias=((5, 7), "float64")), TypeError, "bias must be one of float16, bfloat16, float32 for q of float32; got dtype float64"),
    "bias shape": (dict(bias=((7, 5), "float16")), ValueError, r"bias must broadcast to .*; got shape \(7, 5\)"),
    "slopes dtype": (dict(alibi_slopes=((4,), "float16")), TypeError, "alibi_slopes must be float32; got dtype float16"),
    "slopes shape": (dict(alibi_slopes=((2,), "float32")), ValueError, r"alibi_slopes must have shape \(heads,\) = \(4,\) or .*\(2, 4\); got \(2,\)"),
    "sinks dtype": (dict(sinks=((4,), "float64")), TypeError, "sinks must be float32 for q of float32; got dtype float64"),
    "sinks shape": (dict(sinks=((2,), "float32")), ValueError, r"sinks must have shape \(heads,\) = \(4,\); got \(2,\)"),
    "lengths dtype": (dict(seqlens_k=((2,), "uint32")), TypeError, "seqlens_k must be int32 or int64; got dtype uint32"),
    "lengths shape": (dict(seqlens_q=((2, 1), "int32")), ValueError, r"seqlens_q must have shape \(batch,\) = \(2,\); got \(2, 1\)"),
    "softcap 0": (dict(softcap=0), ValueError, r"softcap must be finite and positive; got 0\. None is no cap"),
    "softcap negative": (dict(softcap=-1.0), ValueError, "softcap must be finite and positive; got -1.0$"),
    "softcap nan": (dict(softcap=math.nan), ValueError, "softcap must be finite and positive; got nan$"),
    "softcap huge": (dict(softcap=10**5000), ValueError, "softcap must be finite and positive"),
    "softcap bool": (dict(softcap=True), TypeError, "softcap must be a real number or None"),
    "softcap beyond float32": (dict(softcap=1e39), ValueError, "softcap must be from .* for float32, .*; got 1e\\+39"),
    "softcap below float32": (dict(softcap=1e-39), ValueError, "softcap must be from .* for float32, .*; got 1e-39"),
    "softcap and scale": (dict(softcap=1e-20, scale=1e20), ValueError, "scale / softcap must be at most .* for float32; got scale 1e\\+20"),
    "dropout 1": (dict(dropout=1), ValueError, "dropout must be at least 0 and below 1; got 1"),
    "dropout negative": (dict(dropout=-0.1), ValueError, "dropout must be at least 0 and below 1; got -0.1"),
    "dropout nan": (dict(dropout=math.nan), ValueError, "dropout must be at least 0 and below 1; got nan"),
    "dropout bool": (dict(dropout=True), TypeError, "dropout must be a real number, .*; got True"),
    "dropout text": (dict(dropout="0.1"), TypeError, "dropout must be a real number, .*; got '0.1'"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_messages_of_options(name):
    arguments, kind, message = WRONG_OPTIONS[name]
    with pytest.raises(kind, match=message) as caught:
        problem(**arguments)
    assert caught.type is kind


def test_softcap_of_float64():
    assert problem(dtypes=("float64",) * 3, softcap=1e-300, scale=1e200).softcap == 1e-300


def test_dropout_is_drawn_in_14_bits():
    assert [check_dropout(p) for p in (0, 0.0, -0.0, 0.5, 1e-9, 1 - 1e-12)] == [0.0, 0.0, 0.0, 0.5, 2**-14, 1 - 2**-14]
    assert abs(check_dropout(np.float32(0.1)) - 0.1) <= 2**-15 and check_dropout(0.1) * 2**14 == round(0.1 * 2**14)
    assert problem(dropout=0.5) == problem(dropout=0.5 + 1e-9) != problem(dropout=0.25)


def test_seeds():
    assert [check_seed(seed, 0.5) for seed in (0, 2**64 - 1, np.int64(7), np.uint64(2**63))] == [0, 2**64 - 1, 7, 2**63]
    assert check_seed(None, 0.0) == 0 and check_seed(3, 0.0) == 3
    for seed, kind, message in (
        (None, ValueError, "dropout needs a seed, .*; got seed=None"),
        (-1, ValueError, r"seed must be at least 0 and below 2\*\*64; got -1"),
        (2**64, ValueError, r"seed must be at least 0 and below 2\*\*64; got 18446744073709551616"),
        (1.0, TypeError, "seed must be an integer; got 1.0"),
        (True, TypeError, "seed must be an integer; got True"),
        (np.array(3), TypeError, "seed must be an integer; got array"),
    ):
        with pytest.raises(kind, match=message):
            check_seed(seed, 0.5)


def test_needs_of_options():
    assert check_needs(("sinks", "bias", "k"), ("bias", "sinks", "mask")) == ("k", "bias", "sinks")
    for name in ("bias", "sinks"):
        with pytest.raises(ValueError, match=f'needs holds "{name}", but no {name} was given'):
            check_needs(("q", name))
    with pytest.raises(ValueError, match='needs must hold nothing but "q", "k", "v" and "bias"; got \'mask\''):
        check_needs(("mask",), ("bias", "mask"))


def test_alibi_keeps_its_alignment():
    """Without a band only ALiBi asks where a query stands."""
    assert (problem(alibi_slopes=SLOPES).offset, problem(alibi_slopes=SLOPES, causal="top_left").offset, problem().offset) == (2, 0, 0)


def test_the_offset_of_an_entry():
    for options in ({"causal": True}, {"window": (1, None)}, {"alibi_slopes": SLOPES}):
        for lengths in ({"seqlens_q": LENGTHS}, {"seqlens_k": LENGTHS}, {"seqlens_q": LENGTHS, "seqlens_k": LENGTHS}):
            assert problem(**options, **lengths).offset_per_entry and problem(**options, **lengths).offset == 2
            assert not problem(**options | {"causal": "top_left"}, **lengths).offset_per_entry
        assert not problem(**options).offset_per_entry
    assert not problem(seqlens_q=LENGTHS, seqlens_k=LENGTHS, window=(6, 4)).offset_per_entry, "no bound excludes anything"


LENGTH_KINDS = st.sampled_from((("seqlens_q",), ("seqlens_k",), ("seqlens_q", "seqlens_k")))


@given(st.integers(1, 6), st.integers(1, 6), CAUSAL, st.one_of(st.none(), st.tuples(SIDE, SIDE)), LENGTH_KINDS)
def test_bounds_hold_for_all_lengths(seqlen_q, seqlen_k, causal, window, kinds):
    """Whatever the lengths are: what may be seen lies in the key range, and in the trimmed problem; full lengths have the most pairs."""
    lengths = {name: ((1,), "int64") for name in kinds}
    sizes = (1, seqlen_q, 1, 8), (1, seqlen_k, 1, 8), (1, seqlen_k, 1, 8)
    p = problem(*sizes, causal=causal, window=window, mask=((seqlen_q, seqlen_k), "bool"), **lengths)
    everywhere, union = np.ones((seqlen_q, seqlen_k), bool), np.zeros((seqlen_q, seqlen_k), bool)
    trimmed, first = trim_keys(p)
    for n in range(-1, seqlen_q + 2) if "seqlens_q" in kinds else [None]:
        for m in range(-1, seqlen_k + 2) if "seqlens_k" in kinds else [None]:
            given_ = {name: [x] for name, x in (("seqlens_q", n), ("seqlens_k", m)) if x is not None}
            seen = visible(p, mask=everywhere, **given_)
            rows, keys = (full if x is None else min(max(x, 0), full) for x, full in ((n, seqlen_q), (m, seqlen_k)))
            want = np.zeros_like(seen)
            want[:rows, :keys] = masked(rows, keys, causal, window)
            assert (seen == want).all()
            union |= seen
            assert seen.sum() <= p.visible_pairs
            cut = {name: [x[0] - first] if name == "seqlens_k" else x for name, x in given_.items()}
            assert not seen[:, :first].any() and not seen[:, first + trimmed.seqlen_k :].any()
            if trimmed.seqlen_k:
                assert (
                    visible(trimmed, mask=everywhere[:, first : first + trimmed.seqlen_k], **cut) == seen[:, first : first + trimmed.seqlen_k]
                ).all()
    assert p.visible_pairs == masked(seqlen_q, seqlen_k, causal, window).sum()
    for i in range(seqlen_q):
        lo, hi = p.key_range(i)
        assert not union[i, :lo].any() and not union[i, hi:].any()


def test_trimming_cuts_masks_and_biases():
    p = problem((2, 3, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8), causal=True, window=(2, 0), mask=((20,), "bool"), bias=((3, 1), "float32"))
    trimmed, first = trim_keys(p)
    assert first == 15 and trimmed.seqlen_k == 5 and trimmed.mask == (1, 1, 1, 5) and trimmed.bias == (1, 1, 3, 1)


def test_sinks_see_where_there_are_no_keys():
    nothing = dict(k=(2, 0, 2, 8), v=(2, 0, 2, 6))
    assert problem(**nothing).sees_nothing and not problem(**nothing, sinks=SINKS).sees_nothing
    assert problem(q=(0, 5, 4, 8), k=(0, 7, 2, 8), v=(0, 7, 2, 6), sinks=SINKS).sees_nothing
