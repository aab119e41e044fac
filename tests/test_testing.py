"""`numbaflash.testing` itself: a check must let the correct pass and must catch small faults, in every dtype."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from numbaflash import BlockMask, dispatch, reference, testing
from numbaflash.problem import DTYPES, UnsupportedError, make_problem
from numbaflash.testing import (
    Accuracy,
    AccuracyError,
    BackwardCase,
    Cache,
    Case,
    DecodeCase,
    Packed,
    Placement,
    WriteError,
    backward_problems,
    check_backward,
    check_forward,
    decode_problems,
    expected,
    expected_gradients,
    problems,
    run_backward_case,
    run_case,
    run_decode_case,
)
from numbaflash.testing.ahead import plan_of
from numbaflash.testing.strategies import FEATURES, OF_DECODING, OF_SEQUENCES, PACKED
from numbaflash.testing.values import RECIPES, decode, encode, rounded
from numbaflash.testing.visibility import taking_part, visible_pairs


def inputs(case):
    memory = case.memory()
    return [memory[name].decoded() for name in "qkv"]


def flash(problem, q, k, v, *, tile=32, fault=""):
    """Algorithm 1 in float32, weights rounded to the dtype as tensor cores take them; ``fault`` plants a mistake."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _flash(problem, q, k, v, tile, fault)


def _flash(problem, q, k, v, tile, fault):
    accumulate = np.float64 if problem.dtype == "float64" else np.float32
    out, lse = np.zeros(problem.out_shape), np.full(problem.lse_shape, -np.inf)
    seen = reference.visible(problem)
    scale = problem.scale * (1.01 if fault == "scale" else 1)
    if fault == "mask":
        seen = np.roll(seen, 1, axis=1) | seen
    if fault == "dropped key":
        seen = seen.copy()
        seen[:, problem.seqlen_k // 2] = False
    for b, h in np.ndindex(problem.batch, problem.heads):
        query, key, value = (x.astype(accumulate) for x in (q[b, :, h], k[b, :, h // problem.group], v[b, :, h // problem.group]))
        top = np.full(problem.seqlen_q, -np.inf, accumulate)
        total = np.zeros(problem.seqlen_q, accumulate)
        sums = np.zeros((problem.seqlen_q, problem.head_dim_v), accumulate)
        for j in range(0, problem.seqlen_k, tile):
            keys = slice(j, j + tile)
            source = slice(j - tile, j) if fault == "stale tile" and j == tile else keys
            score = np.where(seen[:, keys], accumulate(scale) * (query @ key[source].T)[:, : seen[:, keys].shape[1]], -np.inf).astype(accumulate)
            new = np.maximum(top, score.max(axis=1))
            finite = np.where(new == -np.inf, 0, new)
            weights = np.exp(score - finite[:, None])
            rescale = np.ones_like(top) if fault == "no rescale" else np.exp(np.where(top == -np.inf, finite, top) - finite)
            total = total * rescale + weights.sum(axis=1)
            if problem.dtype in ("float16", "bfloat16"):
                weights = rounded(weights, problem.dtype).astype(accumulate)
            finite_part = np.where(np.isfinite(value[source]), value[source], 0)[: weights.shape[1]]
            sums = sums * rescale[:, None] + weights @ (value[source] if fault == "nan leaks" else finite_part)
            for column in np.flatnonzero(~np.isfinite(value[source]).all(axis=1)):  # select, never multiply by 0
                sums[seen[:, j + column]] += np.where(np.isfinite(value[source][column]), 0, value[source][column])
            top = new
        rows = total != 0
        out[b, :, h][rows] = sums[rows] / total[rows, None]
        lse[b, h, rows] = top[rows] + np.log(total[rows])
    if fault == "lse in base 2":
        lse = lse * np.log2(np.e)
    if fault == "swapped rows":
        out[:, [0, 1]] = out[:, [1, 0]]
    if fault == "wrong head":
        out = np.roll(out, 1, axis=2)
    return rounded(out, problem.dtype), lse


FAULTS = ("scale", "mask", "dropped key", "stale tile", "no rescale", "lse in base 2", "swapped rows", "wrong head", "nan leaks")


def faulty(dtype, fault):
    """A case of moderate size that the fault cannot spare."""
    return Case(
        dtype=dtype,
        seqlen_q=100,
        seqlen_k=100,
        heads=4,
        kv_heads=2,
        head_dim=64,
        head_dim_v=64,
        causal=fault == "mask",
        window=(10, 10) if fault == "nan leaks" else None,
        values="nan" if fault == "nan leaks" else "normal",
        seed=2,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(dtype, fault):
    case = faulty(dtype, fault)
    values = inputs(case)
    known = expected(case.problem, *values)
    accuracy = check_forward(case, *flash(case.problem, *values), known=known)
    assert accuracy.out < 0.5 and accuracy.lse < 0.5, "the correct result passes with room to spare"
    out, lse = flash(case.problem, *values, fault=fault)
    with pytest.raises(AccuracyError):
        check_forward(case, out, lse, known=known)
    if fault != "lse in base 2":
        with pytest.raises(AccuracyError, match="out"):
            check_forward(case, out, known=known)
    if fault not in ("swapped rows", "wrong head", "nan leaks"):
        with pytest.raises(AccuracyError, match="lse"):
            testing.compare(dataclasses.replace(known, out=out), out, lse)


@settings(max_examples=60)
@given(problems(dtypes=("float16", "bfloat16", "float32"), max_seqlen=100, work=2**13))
def test_the_rule_lets_an_honest_kernel_pass(case):
    values = inputs(case)
    check_forward(case, *flash(case.problem, *values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_unit_in_the_last_place_is_not_an_error_but_some_are(dtype):
    case = Case(dtype=dtype, seqlen_q=8, seqlen_k=8)
    known = expected(case.problem, *inputs(case))
    bits = encode(known.out, dtype)
    assert check_forward(case, decode(bits + 1, dtype), known=known).out <= 1
    with pytest.raises(AccuracyError):
        check_forward(case, decode(bits + {"float16": 40, "bfloat16": 40, "float32": 2000, "float64": 4000}[dtype], dtype), known=known)


def test_rows_without_keys_are_exact():
    case = Case(seqlen_q=3, seqlen_k=2, causal=True)
    out, lse = reference.forward(case.problem, *inputs(case))
    check_forward(case, out, lse)
    for index, value in ((0, 1e-30), (0, np.nan)):
        wrong = out.copy()
        wrong[0, index] = value
        with pytest.raises(AccuracyError, match=r"out\[b=0, i=0, h=0, d=0\] is .*, expected 0 with a tolerance of 0"):
            check_forward(case, wrong, lse)
    for value in (-1e30, np.nan, np.inf):
        wrong = lse.copy()
        wrong[0, 0, 0] = value
        with pytest.raises(AccuracyError, match=r"lse\[b=0, h=0, i=0\] is .*, expected -inf"):
            check_forward(case, out, wrong)


def test_nan_must_stand_where_the_reference_has_it():
    case = Case(seqlen_q=9, seqlen_k=9, causal=True, values="nan", seed=1)
    out, lse = reference.forward(case.problem, *inputs(case))
    at = np.argwhere(np.isnan(out))
    assert 0 < len(at) < out.size
    check_forward(case, out, lse)
    with pytest.raises(AccuracyError, match="expected nan"):
        check_forward(case, np.nan_to_num(out), lse)
    out[tuple(np.argwhere(~np.isnan(out))[0])] = np.nan
    with pytest.raises(AccuracyError, match="is nan, expected"):
        check_forward(case, out, lse)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_values_that_spread_free_their_column_and_nothing_else(library):
    case = Case(seqlen_q=20, seqlen_k=16, heads=4, kv_heads=2, head_dim=8, head_dim_v=8, window=(3, 0))
    q, k, v = inputs(case)
    v[0, 7, 1, 5] = np.inf  # seen
    v[0, 15, 0, 2] = np.nan  # seen by the last query alone
    values = (q, k, v) if library == "numpy" else tuple(map(pytest.importorskip("torch").from_numpy, (q, k, v)))
    known = expected(case.problem, *values)
    spread = testing.spread_nonfinite(known, case.problem, v)
    free = np.asarray(spread.out_free)
    want = np.zeros((1, 20, 4, 8), bool)
    want[0, 4:, 2:, 5], want[0, 4:, :2, 2] = True, True  # the first four queries see no key
    assert (free == want).all()
    out = np.array(known.out.tolist())
    out[want] = np.nan
    testing.compare(spread, out, known.lse)
    with pytest.raises(AccuracyError):
        testing.compare(known, out, known.lse)
    for at in ((0, 0, 2, 5), (0, 8, 0, 5), (0, 8, 2, 4)):
        wrong = out.copy()
        wrong[at] = np.nan
        with pytest.raises(AccuracyError):
            testing.compare(spread, wrong, known.lse)
    with pytest.raises(AccuracyError, match="lse"):
        testing.compare(spread, out, known.lse * np.nan)


def test_values_that_no_query_sees_do_not_spread():
    case = Case(seqlen_q=4, seqlen_k=16, causal="top_left")
    q, k, v = inputs(case)
    v[:, 4:] = np.nan
    assert not testing.spread_nonfinite(expected(case.problem, q, k, v), case.problem, v).out_free.any()


def test_a_family_that_spreads_says_so(monkeypatch):
    """`run_case` lets NaN spread where the module of the family that computes says it may, and nowhere else."""
    case = Case(seqlen_q=100, seqlen_k=100, window=(10, 10), values="nan", seed=2)
    assert np.isnan(case.memory()["v"].decoded()).any()
    out, lse = flash(case.problem, *inputs(case), fault="nan leaks")
    monkeypatch.setattr(testing.runner, "_forward", lambda case, q, k, v, given: _into(given, out, lse))
    with pytest.raises(AccuracyError, match="out"):
        run_case(case, "cpu")
    monkeypatch.setattr(dispatch.family("cpu"), "NONFINITE_VALUES_SPREAD", True, raising=False)
    for family in ("cpu", None):
        run_case(case, family)


def _into(given, out, lse):
    given["out"][...], given["lse"][...] = out, lse
    return given["out"], given["lse"]


def test_shapes_are_checked():
    case = Case(seqlen_q=3, seqlen_k=2)
    with pytest.raises(AccuracyError, match=r"out must have shape \(1, 3, 1, 64\); got \(1, 3, 64\)"):
        check_forward(case, np.zeros((1, 3, 64)))


# Cases


@given(problems())
def test_cases_survive_json_and_repr(case):
    assert Case.from_json(case.to_json()) == case
    assert eval(repr(case), {"Case": Case, "Placement": Placement}) == case
    assert case.work <= 2**18


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not a case"),
        ("[1]", "expected a JSON object, got list"),
        ('{"length": 3}', "unknown fields length"),
        ('{"dtype": "int8"}', "dtype must be one of .*; got 'int8'"),
        ('{"q": {"stride": 3}}', "not a case: .*stride"),
        ('{"q": 3}', "not a case"),
        ('{"out": {"step": [0, 1, 1, 1]}}', "out must not be broadcast"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ValueError, match=message):
        Case.from_json(text)


@settings(max_examples=60)
@given(problems(max_seqlen=50, work=2**12))
def test_memory_is_laid_out_as_asked(case):
    """Strides as the placement says, hidden values where nothing visible lies, and every element where it belongs."""
    for name, memory in case.memory().items():
        view, placement = memory.view(), getattr(case, name)
        assert view.shape == getattr(case.problem, f"{name}_shape")
        outside = memory.outside()
        assert outside[: testing.memory.GUARD].all() and outside[-testing.memory.GUARD :].all()
        distinct = [n for n, s in zip(view.shape, memory.strides, strict=True) if s]
        assert (~outside).sum() == (0 if 0 in view.shape else np.prod(distinct))
        if view.size:
            for axis, step in enumerate(placement.step):
                assert np.sign(memory.strides[axis]) == np.sign(step)
            if not placement.step and not placement.order and not any(placement.pad):
                assert view.flags.c_contiguous
        if name in ("out", "lse"):
            assert np.isnan(memory.decoded()).all()
    again = case.memory()
    assert all((again[name].bits == memory.bits).all() for name, memory in case.memory().items()), "the same bits every time"


def test_placement_of_known_strides():
    assert Placement().resolve((2, 3, 4, 5)) == (120, 0, (60, 20, 5, 1))
    assert Placement(order=(0, 2, 1, 3)).resolve((2, 3, 4, 5)) == (120, 0, (60, 5, 15, 1))
    assert Placement(step=(1, -1, 2, 0), offset=3).resolve((2, 3, 4, 5)) == (51, 3 + 16, (24, -8, 2, 0))
    assert Placement(pad=(0, 0, 0, 3)).resolve((2, 3, 4, 5)) == (192, 0, (96, 32, 8, 1))
    with pytest.raises(ValueError, match="does not fit an operand of 4 axes"):
        Placement(order=(0, 1)).resolve((2, 3, 4, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recipes_hold_what_they_say(dtype):
    def case(**options):
        return Case(dtype=dtype, seqlen_q=70, seqlen_k=90, head_dim=32, head_dim_v=32, **options)

    results = {name: reference.forward(case().problem, *inputs(case(values=name))) for name in RECIPES if name != "nan"}
    assert all(np.isfinite(out).all() and np.isfinite(lse).all() for out, lse in results.values())
    assert results["negative"][1].max() < -300
    assert np.abs(results["big"][1]).max() > 100
    assert np.ptp(results["constant"][0], axis=1).max() < 1e-6
    q, k, v = inputs(case(values="subnormal"))
    smallest = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}[dtype]
    assert 0 < np.abs(v).max() < smallest
    q, k, v = inputs(case(values="nan", seed=3))
    assert np.isnan(v).any()
    masked = case(hidden="nan", window=(2, 2))
    q, k, v = inputs(masked)
    assert np.isnan(k[:, 85:90]).sum() == 0 and np.isnan(k).any(), "the window is at the end of the keys: earlier ones are hidden"
    assert np.isfinite(reference.forward(masked.problem, q, k, v)[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(dtype):
    values = np.array([0.0, -0.0, 1.0, -2.5, 1 / 3, 65504.0, 2.0**-24, np.inf, -np.inf, np.nan, 3.3895e38])
    again = decode(encode(values, dtype), dtype)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    with np.errstate(over="ignore"):
        assert np.array_equal(again, values.astype(kind).astype(float), equal_nan=True)
    assert np.isnan(decode(testing.SENTINEL[dtype] * np.ones(1, np.uint64), dtype)).all()


# Running


def own(fault=""):
    """A kernel of the user's own."""

    def kernel(q, k, v, scale, causal, window):
        values = [np.asarray(testing.to_float64(x)) for x in (q, k, v)]
        dtype = str(q.dtype).removeprefix("torch.")
        problem = make_problem(q.shape, k.shape, v.shape, (dtype,) * 3, scale=scale, causal=causal, window=window)
        return flash(problem, *values, fault=fault)

    return kernel


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_own_kernels(library):
    pytest.importorskip(library)
    case = Case(dtype="float32", seqlen_q=40, seqlen_k=70, heads=2, causal=True, hidden="nan", q=Placement(order=(0, 2, 1, 3), step=(1, -2, 1, 1)))
    accuracy = run_case(case, library=library, kernel=own())
    assert isinstance(accuracy, Accuracy) and 0 < accuracy.out < 0.5
    with pytest.raises(AccuracyError, match="lse|out"):
        run_case(case, library=library, kernel=own("stale tile"))


def test_stray_writes_are_caught():
    case = Case(dtype="float32", seqlen_q=4, seqlen_k=4, k=Placement(pad=(0, 1, 0, 0)))

    def writes_input(q, k, v, **options):
        result = own()(q, k, v, **options)
        ctypes.c_float.from_address(k.ctypes.data).value += 1  # k says that it is read-only
        return result

    with pytest.raises(WriteError, match="1 elements .* of k, which must stay as it is, were written"):
        run_case(case, kernel=writes_input)


def test_results_are_watched(monkeypatch):
    """`numbaflash.forward` replaced by one that is wrong in what it writes."""
    import numbaflash

    case = Case(dtype="float32", seqlen_q=6, seqlen_k=6, head_dim=8, head_dim_v=8, heads=2, out=Placement(pad=(0, 0, 0, 4)))

    def forward(change):
        def run(q, k, v, *, out, lse, return_lse, **options):
            good_out, good_lse = own()(q, k, v, **options)
            out[...], lse[...] = good_out, good_lse
            changed = change(out, lse)
            return (out, lse) if changed is None else changed

        return run

    def widened(array):
        return np.lib.stride_tricks.as_strided(array, (*array.shape[:-1], array.shape[-1] + 1), array.strides)

    def past_the_row(out, lse):
        widened(out)[0, 0, 0, -1] = 7

    def forgotten(out, lse):
        out.view(np.uint32)[0, 1, 1, 3] = testing.SENTINEL["float32"]

    faults = {
        "1 elements .* outside out .* were written": past_the_row,
        r"out\[b=0, i=1, h=1, d=3\] is nan": forgotten,
        "out returned must be the out handed in; got another ndarray": lambda out, lse: (out.copy(), lse),
        "return_lse=True must decide whether lse is returned": lambda out, lse: out,
    }
    monkeypatch.setattr(numbaflash, "forward", forward(lambda out, lse: None))
    run_case(case)
    for message, change in faults.items():
        monkeypatch.setattr(numbaflash, "forward", forward(change))
        with pytest.raises(AssertionError, match=message):
            run_case(case)


def test_never_written_where_nan_is_right(monkeypatch):
    """A kernel that skips elements whose right value is NaN passes the numbers, not the memory check."""
    import numbaflash

    case = Case(dtype="float32", seqlen_q=6, seqlen_k=6, head_dim=8, head_dim_v=8, values="nan")

    def run(q, k, v, *, out, lse, return_lse, **options):
        good_out, good_lse = own()(q, k, v, **options)
        right = ~np.isnan(good_out)
        out[right], lse[...] = good_out[right], good_lse
        return out, lse

    monkeypatch.setattr(numbaflash, "forward", run)
    with pytest.raises(WriteError, match="of 48 elements of out were never written, the first at"):
        run_case(case)


def test_unknown_library():
    with pytest.raises(ValueError, match="library must be one of numpy, .*; got 'tensorflow'"):
        run_case(Case(), library="tensorflow")


# Gradients


def gradient_inputs(case):
    memory = case.memory()
    return {name: memory[name].decoded() for name in ("dout", *"qkv", "out", "lse", "dlse") if name in memory}


def flash_backward(problem, dout, q, k, v, out, lse, dlse=None, *, fault=""):
    """Algorithm 2 in float32 on one tile, weights and dS rounded to the dtype as tensor cores take them; ``fault`` plants a mistake."""
    accumulate = np.float64 if problem.dtype == "float64" else np.float32
    low = (lambda x: rounded(x, problem.dtype).astype(accumulate)) if problem.dtype in ("float16", "bfloat16") else (lambda x: x)
    seen = reference.visible(problem)
    if fault == "mask":
        seen = np.roll(seen, 1, axis=1) | seen
    results = {name: np.zeros(problem.shape_of(name), accumulate) for name in ("dq", "dk", "dv")}
    scale = accumulate(problem.scale)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(problem.batch, problem.heads):
            g = h // problem.group
            rows, keys = lse[b, h] != -np.inf, seen.any(axis=0)
            query, grad, result = (np.where(rows[:, None], x[b, :, h], 0).astype(accumulate) for x in (q, dout, out))
            key, value = (np.where(keys[:, None], x[b, :, g], 0).astype(accumulate) for x in (k, v))
            top = np.where(rows, lse[b, h], 0).astype(accumulate)
            p = np.where(seen & rows[:, None], np.exp(scale * (query @ key.T) - top[:, None]), 0)
            delta = (grad * result).sum(axis=1) - (0 if dlse is None else np.where(rows, dlse[b, h], 0).astype(accumulate))
            if fault in ("no delta", "no dlse"):
                delta = 0 if fault == "no delta" else (grad * result).sum(axis=1)
            s = np.where(seen & rows[:, None], p * (grad @ value.T - delta[..., None] if fault != "no delta" else grad @ value.T), 0)
            results["dq"][b, :, h] = np.where(rows[:, None], scale * (low(s) @ key), 0)
            if fault == "last head alone" and h % problem.group:
                results["dk"][b, :, g] = 0
            results["dk"][b, :, g] += np.where(keys[:, None], (1 if fault == "dk unscaled" else scale) * (low(s).T @ query), 0)
            results["dv"][b, :, g] += np.where(keys[:, None], low(p).T @ grad, 0)
    if fault == "dropped query":
        results["dv"] -= results["dv"] * 0.03
    return tuple(rounded(x, problem.dtype) for x in results.values())


GRADIENT_FAULTS = {
    "mask": "dq|dk|dv",
    "no delta": "dq|dk",
    "no dlse": "dq|dk",
    "last head alone": "dk",
    "dk unscaled": "dk",
    "dropped query": "dv",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_faults_in_gradients_are_caught(dtype, fault):
    case = BackwardCase(dtype=dtype, seqlen_q=100, seqlen_k=100, heads=4, kv_heads=2, causal=fault == "mask", with_dlse=True, seed=2)
    values = gradient_inputs(case)
    accuracy = check_backward(case, *flash_backward(case.problem, **values))
    assert max(accuracy.dq, accuracy.dk, accuracy.dv) < 0.6, "the correct result passes with room to spare"
    with pytest.raises(AccuracyError, match=rf"^({GRADIENT_FAULTS[fault]})\["):
        check_backward(case, *flash_backward(case.problem, **values, fault=fault))


@settings(max_examples=60)
@given(backward_problems(max_seqlen=100, work=2**12))
def test_the_rule_lets_honest_gradients_pass(case):
    check_backward(case, *flash_backward(case.problem, **gradient_inputs(case)))


def test_gradients_of_what_sees_nothing_are_exact():
    case = BackwardCase(seqlen_q=5, seqlen_k=9, causal="top_left", window=(1, None), head_dim=4, head_dim_v=4)
    known = expected_gradients(case.problem, *(gradient_inputs(case)[name] for name in ("dout", *"qkv")))
    assert (known.dk_tolerance[:, 5:] == 0).all() and (known.dk[:, 5:] == 0).all()
    dk = known.dk.copy()
    dk[0, 6, 0, 1] = 1e-30
    with pytest.raises(AccuracyError, match=r"dk\[b=0, j=6, hk=0, d=1\]"):
        check_backward(case, dk=dk, known=known)
    dk[0, 6, 0, 1] = np.nan
    with pytest.raises(AccuracyError, match="dk"):
        check_backward(case, dk=dk, known=known)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_gradients_of_sinks_without_keys(library):
    """Of dlse alone; NaN in dout is NaN there, as it is beside keys."""
    case = BackwardCase(batch=2, seqlen_q=3, seqlen_k=0, heads=2, with_sinks=True, needs=("sinks",), with_dlse=True, seed=1)
    arrays, options = option_inputs(case)
    arrays = {name: arrays[name] for name in ("dout", *"qkv", "dlse")}
    convert = pytest.importorskip("torch").tensor if library == "torch" else np.array
    exact = reference.backward(case.problem, **arrays, **options)[3]
    known = expected_gradients(case.problem, **{name: convert(x) for name, x in arrays.items()}, **options)
    np.testing.assert_allclose(known.dsinks, exact)
    arrays["dout"][1, 2, 0, 5] = np.nan
    known = expected_gradients(case.problem, **{name: convert(x) for name, x in arrays.items()}, **options)
    assert np.isnan(known.dsinks[0]) and known.dsinks[1] == pytest.approx(exact[1])
    del arrays["dlse"]
    assert (expected_gradients(case.problem, **arrays | {"dout": np.ones_like(arrays["dout"])}, **options).dsinks == 0).all()


def test_nan_in_gradients_stays_with_its_batch_entry_and_head():
    case = BackwardCase(batch=2, seqlen_q=6, seqlen_k=6, heads=4, kv_heads=2, head_dim=4, head_dim_v=4, causal=True)
    values = {name: x for name, x in gradient_inputs(case).items() if name not in ("out", "lse")}
    values["v"][1, 3, 0, 2] = np.nan
    known = expected_gradients(case.problem, **values)
    exact = [known.dq, known.dk, known.dv]
    assert np.isnan(known.dq[1, 3:, :2]).all() and np.isfinite(known.dq[1, :3]).all()
    check_backward(case, *exact, known=known)
    wide = [x.copy() for x in exact]
    wide[0][1, :, :2], wide[2][1, :, 0] = np.nan, np.nan
    check_backward(case, *wide, known=known)
    for n, at in ((0, (0, 0, 0, 0)), (0, (1, 0, 2, 0)), (1, (1, 0, 1, 0)), (2, (0, 5, 0, 0))):
        wrong = [x.copy() for x in exact]
        wrong[n][at] = np.nan
        with pytest.raises(AccuracyError):
            check_backward(case, *wrong, known=known)
    lost = exact[0].copy()
    lost[1, 4, 0] = 0.0
    with pytest.raises(AccuracyError, match="dq"):
        check_backward(case, dq=lost, known=known)


def test_a_gradient_beyond_the_dtype_may_be_infinite():
    case = BackwardCase(dtype="float16", seqlen_q=2, seqlen_k=1, head_dim=2, head_dim_v=2)
    values = {name: gradient_inputs(case)[name] for name in ("dout", *"qkv")}
    values["dout"][...] = 40000.0
    known = expected_gradients(case.problem, **values)
    assert (known.dv == 80000).all()
    check_backward(case, dv=np.full_like(known.dv, np.inf), known=known)
    for wrong in (-np.inf, np.nan, 60000.0):
        with pytest.raises(AccuracyError, match="dv"):
            check_backward(case, dv=np.full_like(known.dv, wrong), known=known)
    values["dout"][...] = 20000.0
    with pytest.raises(AccuracyError, match="dv"):
        check_backward(case, dv=np.full_like(known.dv, np.inf), known=expected_gradients(case.problem, **values))


@given(backward_problems(max_seqlen=30, work=2**9))
def test_backward_cases_survive_json_and_repr(case):
    assert BackwardCase.from_json(case.to_json()) == case
    assert eval(repr(case), {"BackwardCase": BackwardCase, "Placement": Placement}) == case


def test_backward_cases_of_wrong_fields():
    for text, message in (
        ('{"needs": ["k", "q"]}', "needs must be a tuple in the order q, k, v"),
        ('{"needs": ["x"]}', 'needs must hold nothing but "q", "k" and "v"'),
        ('{"dq": {"step": [0, 1, 1, 1]}}', "dq must not be broadcast"),
    ):
        with pytest.raises(ValueError, match=message):
            BackwardCase.from_json(text)
    with pytest.raises(ValueError, match="unknown fields needs"):
        Case.from_json('{"needs": ["q"]}')


def own_backward(fault=""):
    """`flash_backward` as a kernel of one's own."""

    def kernel(dout, q, k, v, out, lse, *, scale, causal, window, dlse, deterministic, needs):
        dtype = str(q.dtype)
        problem = make_problem(q.shape, k.shape, v.shape, (dtype,) * 3, scale=scale, causal=causal, window=window)
        arrays = (np.asarray(x).astype(np.float64) for x in (dout, q, k, v, out, lse))
        results = flash_backward(problem, *arrays, None if dlse is None else np.asarray(dlse).astype(np.float64), fault=fault)
        return tuple(x.astype(q.dtype) if name in needs else None for name, x in zip("qkv", results, strict=True))

    return kernel


def test_own_backward_kernels():
    case = BackwardCase(dtype="float32", seqlen_q=33, seqlen_k=40, heads=4, kv_heads=2, with_dlse=True, deterministic=True, needs=("q", "v"))
    accuracy = run_backward_case(case, kernel=own_backward())
    assert accuracy.dk is None and 0 < accuracy.dq < 1 and 0 < accuracy.dv < 1
    with pytest.raises(AccuracyError, match="dq"):
        run_backward_case(case, kernel=own_backward("no delta"))


def test_backward_results_are_watched(monkeypatch):
    """`numbaflash.backward` replaced by one that is wrong in what it writes."""
    import numbaflash

    padded = Placement(pad=(0, 0, 0, 4))
    case = BackwardCase(dtype="float32", seqlen_q=6, seqlen_k=6, head_dim=8, head_dim_v=8, heads=2, dq=padded, deterministic=True)
    kernel, calls = own_backward(), []

    def backward(change):
        def run(*arrays, dq=None, dk=None, dv=None, **options):
            results = kernel(*arrays, **options)
            if dq is None:
                calls.append(1)
                return tuple(x + len(calls) if change == "restless" else x for x in results)
            for target, result in zip((dq, dk, dv), results, strict=True):
                target[...] = result
            return change(dq, dk, dv) if callable(change) else (dq, dk, dv)

        return run

    def past_the_row(dq, dk, dv):
        np.lib.stride_tricks.as_strided(dq, (*dq.shape[:-1], 9), dq.strides)[0, 0, 0, -1] = 7
        return dq, dk, dv

    faults = {
        "1 elements .* outside dq .* were written": past_the_row,
        "dk returned must be the dk handed in": lambda dq, dk, dv: (dq, dk.copy(), dv),
        "must decide whether dv is computed; got NoneType": lambda dq, dk, dv: (dq, dk, None),
        "dq must be the same every time; 96 of 96 elements differed the second time": "restless",
    }
    monkeypatch.setattr(numbaflash, "backward", backward(None))
    run_backward_case(case)
    for message, change in faults.items():
        monkeypatch.setattr(numbaflash, "backward", backward(change))
        with pytest.raises(AccuracyError if "outside" not in message else WriteError, match=message):
            run_backward_case(case)


def test_backward_takes_no_jax():
    with pytest.raises(ValueError, match="library must not be jax"):
        run_backward_case(BackwardCase(), library="jax")


# Options


def option_inputs(case):
    """(arrays of the call, options as the reference takes them)."""
    memory = case.memory()
    return {name: memory[name].decoded() for name in ("dout", *"qkv", "out", "lse", "dlse") if name in memory}, case.given_options(memory)


HONEST = tuple(name for name in RECIPES if name != "nan")


class FlashWithOptions:
    """Scores of one head in float32, natural units, as a kernel computes them; ``fault`` plants a mistake."""

    def __init__(self, problem, b, h, q, k, v, options, fault=""):
        self.kind = np.float64 if problem.dtype == "float64" else np.float32
        self.low = (lambda x: rounded(x, problem.dtype).astype(self.kind)) if problem.dtype in ("float16", "bfloat16") else (lambda x: x)
        arrays = {name: x for name, x in options.items() if name != "seed"}
        shaped = reference.check_options(problem, arrays)
        self.seen = reference.visible(
            problem, b, h, **({name: x for name, x in arrays.items()} if fault != "mask" else arrays | {"mask": 1 - arrays["mask"]})
        )
        length_q, length_k = reference.lengths(problem, b, **shaped)
        queries, keys = self.seen.any(axis=1), self.seen.any(axis=0)
        g = h // problem.group
        self.q = np.where(queries[:, None], q[b, :, h], 0).astype(self.kind)
        self.k, self.v = (np.where(keys[:, None], x[b, :, g], 0).astype(self.kind) for x in (k, v))
        score, self.slope = self.kind(problem.scale) * (self.q @ self.k.T), self.kind(1)
        if problem.softcap is not None and fault != "softcap":
            t = np.tanh(score / self.kind(problem.softcap)).astype(self.kind)
            t = t * self.kind(1 + (2**-11.5 if self.low(self.kind(1 / 3)) != self.kind(1 / 3) else 0))  # the special-function unit's
            score, self.slope = self.kind(problem.softcap) * t, 1 - t * t
        if problem.alibi:
            offset = length_k - length_q if problem.offset_per_entry else problem.offset
            distance = abs(np.arange(problem.seqlen_q)[:, None] + (0 if fault == "alibi" else offset) - np.arange(problem.seqlen_k))
            score = score - shaped["alibi_slopes"][b if problem.alibi[0] > 1 else 0, h].astype(self.kind) * distance.astype(self.kind)
        if problem.bias:
            bias = shaped["bias"]
            score = score + bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0].astype(self.kind) * self.kind(
                1.01 if fault == "bias" else 1
            )
        self.score = np.where(self.seen, score, -np.inf).astype(self.kind)
        self.sink = np.full(problem.seqlen_q, -np.inf, self.kind)
        if problem.sinks and fault != "sink":
            self.sink[: problem.seqlen_q if fault == "padded sink" else length_q] = shaped["sinks"][h]
        self.keep = reference.kept(problem, b, h, options.get("seed", 0) + (fault == "seed")).astype(self.kind)


def flash_with_options(problem, arrays, options, fault=""):
    out, lse = np.zeros(problem.out_shape), np.full(problem.lse_shape, -np.inf)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(problem.batch, problem.heads):
            x = FlashWithOptions(problem, b, h, arrays["q"], arrays["k"], arrays["v"], options, fault)
            top = np.maximum(x.score.max(axis=1, initial=-np.inf), x.sink)
            top = np.where(top == -np.inf, 0, top).astype(x.kind)
            weights = np.exp(x.score - top[:, None])
            total = weights.sum(axis=1) + np.exp(x.sink - top)
            divisor = np.where(total == 0, 1, total)
            sums = reference._weighted_sum(x.low(weights * (x.keep > 0)), x.seen, x.v)
            out[b, :, h] = sums / divisor[:, None] * (1 if fault == "unscaled" else x.keep.max(initial=1))
            lse[b, h] = np.where(total == 0, -np.inf, top + np.log(divisor))
    return rounded(out, problem.dtype), lse


def flash_backward_with_options(problem, arrays, options, fault=""):
    results = {name: np.zeros(problem.shape_of(name)) for name in problem.gradients}
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(problem.batch, problem.heads):
            x = FlashWithOptions(problem, b, h, arrays["q"], arrays["k"], arrays["v"], options, fault)
            lse = arrays["lse"][b, h].astype(x.kind)
            alive = lse != -np.inf
            safe = np.where(alive, lse, 0)
            dout, out = (np.where(alive[:, None], arrays[name][b, :, h], 0).astype(x.kind) for name in ("dout", "out"))
            dlse = np.where(alive, arrays["dlse"][b, h], 0).astype(x.kind) if "dlse" in arrays else 0
            delta = (dout * out).sum(axis=1) - dlse
            pairs = x.seen & alive[:, None]
            p = np.where(pairs, np.exp(x.score - safe[:, None]), 0)
            dscore = np.where(pairs, p * ((dout @ x.v.T) * x.keep - delta[:, None]), 0)
            inner = x.low(np.where(pairs, dscore * (1 if fault == "slope" else x.slope), 0))
            scale, g = x.kind(problem.scale), h // problem.group
            results["q"][b, :, h] = scale * (inner @ x.k)
            results["k"][b, :, g] += scale * (inner.T @ x.q)
            results["v"][b, :, g] += x.low(p * x.keep).T @ dout
            if problem.bias:
                reference._add_to_broadcast(results["bias"], b, h, dscore if fault != "dbias" else inner * 0.9)
            if problem.sinks:
                results["sinks"][h] -= np.where(alive, np.exp(x.sink - safe) * (delta if fault != "dsinks" else delta + dlse), 0).sum()
    return tuple(rounded(x, problem.dtype_of(name)) for name, x in results.items())


@settings(max_examples=100)
@given(problems(max_seqlen=100, work=2**12, options=FEATURES))
def test_the_rule_lets_options_pass(case):
    arrays, options = option_inputs(case)
    check_forward(case, *flash_with_options(case.problem, arrays, options))


@settings(max_examples=100)
@given(backward_problems(max_seqlen=60, work=2**11, values=HONEST, options=FEATURES))
def test_the_rule_lets_gradients_of_options_pass(case):
    arrays, options = option_inputs(case)
    results = dict(zip(case.problem.gradients, flash_backward_with_options(case.problem, arrays, options), strict=True))
    check_backward(case, **{f"d{name}": x for name, x in results.items()})


def with_options(kind, dtype, **changes):
    """A case that no fault in an option can be spared."""
    lengths = {"lengths_q": "random", "lengths_k": "random", "lengths_dtype": "int64"}
    shapes = {"mask_shape": (1, 70, 90), "bias_shape": (2, 1, 70, 90), "alibi_shape": (4,)}
    numbers = {"softcap": 1.0, "dropout": 0.3, "dropout_seed": 5, "with_sinks": True, "causal": True, "seed": 6}
    sizes = {"dtype": dtype, "batch": 2, "seqlen_q": 70, "seqlen_k": 90, "heads": 4, "kv_heads": 2, "head_dim": 32, "head_dim_v": 32}
    return kind(**(sizes | lengths | shapes | numbers | changes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["mask", "softcap", "alibi", "bias", "sink", "padded sink", "seed", "unscaled"])
def test_faults_in_options_are_caught(dtype, fault):
    case = with_options(Case, dtype, **({"softcap": None, "bias_values": "big"} if fault == "bias" else {}))
    arrays, options = option_inputs(case)
    known = expected(case.problem, *(arrays[name] for name in "qkv"), **options)
    found = check_forward(case, *flash_with_options(case.problem, arrays, options), known=known)
    assert max(found.out, found.lse) < 0.75, "the correct result passes with room to spare"
    with pytest.raises(AccuracyError):
        check_forward(case, *flash_with_options(case.problem, arrays, options, fault), known=known)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["mask", "softcap", "alibi", "seed", "slope", "dbias", "dsinks"])
def test_faults_in_gradients_of_options_are_caught(dtype, fault):
    case = with_options(BackwardCase, dtype, needs=("q", "k", "v", "bias", "sinks"), with_dlse=True, softcap=2.0)
    arrays, options = option_inputs(case)
    found = check_backward(case, *flash_backward_with_options(case.problem, arrays, options))
    assert max(found.dq, found.dk, found.dv, found.dbias, found.dsinks) < 0.7, "the correct result passes with room to spare"
    with pytest.raises(AccuracyError, match={"slope": "^d[qk]", "dbias": "^dbias", "dsinks": "^dsinks"}.get(fault, "^d")):
        check_backward(case, *flash_backward_with_options(case.problem, arrays, options, fault))


@settings(max_examples=60)
@given(backward_problems(max_seqlen=40, work=2**10, options=FEATURES))
def test_cases_with_options(case):
    """They survive JSON and repr, make the same bits every time, and hide what takes no part, and nothing else."""
    assert BackwardCase.from_json(case.to_json()) == case
    assert eval(repr(case), {"BackwardCase": BackwardCase, "Placement": Placement}) == case
    memory, again = case.memory(), case.memory()
    assert set(memory) == set(case.present) and all((memory[name].bits == again[name].bits).all() for name in memory)
    for name, each in memory.items():
        assert each.shape == case.shape_of(name) and each.dtype == ("bool" if name == "mask" else case.problem.dtype_of(name))
        assert each.outside()[: testing.memory.GUARD].all()
    options = case.given_options(memory)
    queries, keys = taking_part(case.problem, **options)
    if case.values != "nan":
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            values = memory[name].decoded()
            assert np.isfinite(values[rows]).all()
            if case.hidden != "finite" and 0 not in memory[name].strides:
                assert not np.isfinite(values[~rows]).any()
    if "bias" in memory:
        seen = visible_pairs(case.problem, **options)
        assert not np.isnan(np.broadcast_to(memory["bias"].decoded(), seen.shape)[seen]).any()


def test_recipes_of_options():
    case = Case(
        seqlen_q=100, seqlen_k=130, batch=3, heads=2, kv_heads=1, lengths_q="edges", lengths_k="random", mask_shape=(100, 130), bias_shape=(100, 130)
    )  # fmt: skip

    def values(name, **changes):
        return dataclasses.replace(case, **changes).memory()[name].decoded()

    assert values("mask", mask_values="all").all() and not values("mask", mask_values="none").any()
    assert 0.4 < values("mask").mean() < 0.6
    rows = values("mask", mask_values="rows").any(axis=1)
    assert rows.any() and not rows.all()
    blocks = values("mask", mask_values="blocks")
    assert (blocks[:32, :32] == blocks[0, 0]).all() and (blocks[96:, 128:] == blocks[96, 128]).all() and 0 < blocks.mean() < 1
    for dtype in ("float16", "bfloat16", "float32"):
        lowest = values("bias", bias_values="lowest", bias_dtype=dtype) == testing.values.LOWEST[dtype]
        assert lowest.all(axis=1).any() and not lowest.all() and np.isfinite(testing.values.LOWEST[dtype])
        assert encode(testing.values.LOWEST[dtype], dtype) == {"float16": 0xFBFF, "bfloat16": 0xFF7F, "float32": 0xFF7FFFFF}[dtype]
    infinite = values("bias", bias_values="infinite") == -np.inf
    assert infinite.all(axis=1).any() and not infinite.all()
    assert values("bias", bias_values="big").std() > 20
    lengths = np.concatenate([values("seqlens_q", seed=seed, lengths_dtype="int64") for seed in range(30)])
    assert {0, 1, 100, 101, 2**40} < set(lengths) and lengths.min() < 0
    assert (values("seqlens_k", lengths_k="full") == 130).all() and set(np.diff(values("seqlens_k"))) != {0}
    assert values("seqlens_q", lengths_dtype="int32").max() < 2**31


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(mask_values="dense"), "mask_values must be one of random, .*; got 'dense'"),
        (dict(bias_values="dense"), "bias_values must be one of normal, .*; got 'dense'"),
        (dict(bias_dtype="int8"), "bias_dtype must be one of None, float16, .*; got 'int8'"),
        (dict(lengths_q="long"), "lengths_q must be one of None, random, .*; got 'long'"),
        (dict(lengths_dtype="uint8"), "lengths_dtype must be one of int32, int64; got 'uint8'"),
    ],
)
def test_options_of_cases_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Case(**fields)


def test_needs_of_cases():
    assert BackwardCase(bias_shape=(64, 64), needs=("q", "bias")).results == ("dq", "dk", "dv", "dbias")
    assert "dbias" not in BackwardCase(bias_shape=(64, 64)).present
    with pytest.raises(ValueError, match='needs holds "sinks", but no sinks was given'):
        BackwardCase(bias_shape=(64, 64), needs=("sinks",))


def test_strategies_draw_options_when_asked():
    def search(options):
        found = set()

        @settings(max_examples=200)
        @given(problems(max_seqlen=10, work=50, options=options))
        def note(case):
            found.update(case.problem.features)

        note()
        return found

    assert search(()) == set() and search(("mask", "dropout")) == {"mask", "dropout"}
    assert search(FEATURES) == set(FEATURES) and search((PACKED, "bias")) == {"bias", "packed sequences"}
    with pytest.raises(ValueError, match="options must be of mask, .*, packed; got masks"):
        search(("masks",))


# Packed sequences


SEQUENCES = Packed((20, 0, 45, 1), (33, 7, 30, 0), before=(2, 0), after=(3, 40))


def packed_case(kind, dtype="float32", **changes):
    """A case that no fault can be spared: sequences of both lengths, and none; rows of nobody; NaN wherever no query looks."""
    sizes = {"dtype": dtype, "heads": 4, "kv_heads": 2, "head_dim": 32, "head_dim_v": 16, "hidden": "nan", "causal": True, "seed": 3}
    options = {"softcap": 2.0, "alibi_shape": (4, 4), "with_sinks": True, "dropout": 0.3, "dropout_seed": 5}
    return kind(**(sizes | options | {"packed": SEQUENCES} | changes))


def as_batch(case):
    """(padded problem, arrays with a batch axis, options) of a packed case, and the way back."""
    arrays, options = option_inputs(case)
    packing = reference.Packing.of(case.problem, reference.check_options(case.problem, {name: x for name, x in options.items() if name != "seed"}))
    turned = {name: x.T if name in ("lse", "dlse") else x for name, x in arrays.items()}
    padded = {name: packing.pad(**{"k" if name in "kv" else "q": x})[0] for name, x in turned.items()}
    padded |= {name: np.moveaxis(padded[name], 1, 2) for name in ("lse", "dlse") if name in padded}
    seed = {"seed": options["seed"]} if "seed" in options else {}
    return packing, padded, packing.options | seed


def flash_packed(case, fault="", sequence_fault=""):
    packing, arrays, options = as_batch(case)
    out, lse = flash_with_options(packing.padded, arrays, options, fault)
    out, lse = packing.rows(out, "q", 0.0), packing.rows(np.moveaxis(lse, 1, 2), "q", -np.inf).T
    if sequence_fault == "a row further":
        out = np.roll(out, 1, axis=0)
    if sequence_fault == "rows of nobody":
        out[0] = 1e-3
    if sequence_fault == "lse of nobody":
        lse[:, -1] = 0
    return out, lse


def flash_packed_backward(case, fault="", sequence_fault=""):
    packing, arrays, options = as_batch(case)
    found = flash_backward_with_options(packing.padded, arrays, options, fault)
    dq, dk, dv = (packing.rows(x, name, 0.0) for name, x in zip("qkk", found[:3], strict=True))
    if sequence_fault == "another sequence's keys":
        dk[33:40] = dk[:7]
    if sequence_fault == "keys of nobody":
        dv[-1] = 1e-3
    return dq, dk, dv, *found[3:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["softcap", "alibi", "sink", "seed", "a row further", "rows of nobody", "lse of nobody"])
def test_faults_in_packed_sequences_are_caught(dtype, fault):
    case = packed_case(Case, dtype)
    found = check_forward(case, *flash_packed(case))
    assert max(found.out, found.lse) < 0.75, "the correct result passes with room to spare"
    with pytest.raises(AccuracyError):
        check_forward(case, *flash_packed(case, fault, fault))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["alibi", "slope", "dsinks", "another sequence's keys", "keys of nobody"])
def test_faults_in_gradients_of_packed_sequences_are_caught(dtype, fault):
    case = packed_case(BackwardCase, dtype, needs=("q", "k", "v", "sinks"), with_dlse=True)

    def judge(*faults):
        dq, dk, dv, dsinks = flash_packed_backward(case, *faults)
        return check_backward(case, dq, dk, dv, dsinks=dsinks)

    found = judge()
    assert max(found.dq, found.dk, found.dv, found.dsinks) < 0.75, "the correct result passes with room to spare"
    with pytest.raises(AccuracyError, match=r"dk\[j=3\d, hk=" if fault.startswith("another") else "^d"):
        judge(fault, fault)


@settings(max_examples=60)
@given(problems(max_seqlen=60, work=2**11, options=(PACKED, *OF_SEQUENCES)))
def test_the_rule_lets_packed_sequences_pass(case):
    if case.packed is not None:
        check_forward(case, *flash_packed(case))


@settings(max_examples=60)
@given(backward_problems(max_seqlen=40, work=2**10, values=HONEST, options=(PACKED, *OF_SEQUENCES)))
def test_the_rule_lets_gradients_of_packed_sequences_pass(case):
    if case.packed is not None:
        results = dict(zip(case.problem.gradients, flash_packed_backward(case), strict=True))
        check_backward(case, **{f"d{name}": x for name, x in results.items()})


@settings(max_examples=60)
@given(backward_problems(max_seqlen=40, work=2**10, options=(PACKED, *OF_SEQUENCES)))
def test_packed_cases(case):
    """They survive JSON and repr, hide what takes no part, and nothing else, and tell of themselves as any case."""
    assert BackwardCase.from_json(case.to_json()) == case
    assert eval(repr(case), {"BackwardCase": BackwardCase, "Placement": Placement, "Packed": Packed}) == case
    memory = case.memory()
    if case.packed is None or case.values == "nan":
        return
    assert case.problem.packed and case.problem.batch == case.packed.batch
    assert case.work == case.packed.batch * case.heads * np.prod(case.packed.longest)
    for name, numbers in zip(("cu_seqlens_q", "cu_seqlens_k"), case.packed.numbers, strict=True):
        assert memory[name].view().view(case.problem.dtype_of(name)).tolist() == list(numbers)
    queries, keys = taking_part(case.problem, **case.given_options(memory))
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        values = memory[name].decoded()
        assert np.isfinite(values[rows]).all()
        if case.hidden != "finite" and 0 not in memory[name].strides:
            assert not np.isfinite(values[~rows]).any()


def test_what_takes_part_in_packed_sequences():
    case = packed_case(BackwardCase, causal="top_left", window=(None, 0), with_sinks=False)
    queries, keys = taking_part(case.problem, **case.given_options(case.memory()))
    assert queries[:, 0].nonzero()[0].tolist() == [*range(2, 22), *range(22, 67)], "the last sequence has no key"
    assert keys[:, 0].nonzero()[0].tolist() == [*range(20), *range(40, 70)], "20 queries see 20 keys"
    beside = packed_case(Case, alibi_shape=None, packed=Packed((4, 2), (4, 2), boundaries=((0, 5, 3), (0, 4, 6))))
    assert beside.packed.longest == (0, 4) and not taking_part(beside.problem, **beside.given_options(beside.memory()))[0].any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(mask_shape=(3, 3)), r"mask_shape must be None for packed sequences; got \(3, 3\)"),
        (dict(lengths_k="random"), "lengths_k must be None for packed sequences; got 'random'"),
    ],
)
def test_packed_sequences_have_no_mask_and_no_lengths(fields, message):
    with pytest.raises(ValueError, match=message):
        Case(packed=SEQUENCES, **fields)


def test_sequences_of_cases_are_checked():
    with pytest.raises(ValueError, match=r"lengths and rows must not be negative; got Packed\(lengths_q=\(1, -1\)"):
        Packed((1, -1), (1, 1))
    with pytest.raises(ValueError, match="as many sequences of queries as of keys"):
        Packed((1, 2), (1,))
    with pytest.raises(ValueError, match="dtypes must be of int32, int64; got 'int16'"):
        Packed((1,), (1,), dtypes=("int32", "int16"))
    with pytest.raises(ValueError, match="not a case: .*lengths_k"):
        Case.from_json('{"packed": {"lengths_q": [1]}}')


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_own_kernels_get_sequences(library):
    """Values may be NaN; the exact results of torch's arrays are those of NumPy's."""
    torch = pytest.importorskip("torch") if library == "torch" else None
    seen = []

    def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, **options):
        seen.append((cu_seqlens_q.tolist(), max_seqlen_k, sorted(options)))
        out, lse = flash_packed(case)
        return (torch.tensor(out, dtype=torch.float32), torch.tensor(lse)) if torch else (out.astype(np.float32), lse)

    case = packed_case(Case, packed=dataclasses.replace(SEQUENCES, max_seqlens=(None, 40)), values="nan")
    run_case(case, library=library, kernel=forward)
    names = ["alibi_slopes", "causal", "dropout", "scale", "seed", "sinks", "softcap", "window"]
    assert seen == [([2, 22, 22, 67, 68], 40, names)]
    with pytest.raises(AccuracyError):
        run_case(packed_case(Case, seed=9), library=library, kernel=lambda *_, **__: forward(*_, **{"max_seqlen_k": None} | __))


@pytest.mark.parametrize("values", ["normal", "nan"])
def test_exact_results_of_packed_torch_arrays(values):
    torch = pytest.importorskip("torch")
    case = packed_case(BackwardCase, needs=("q", "k", "v", "sinks"), with_dlse=True, values=values)
    arrays, options = option_inputs(case)
    arrays = {name: x for name, x in arrays.items() if name not in ("out", "lse")}
    known = expected_gradients(case.problem, **arrays, **options)
    again = expected_gradients(case.problem, **{name: torch.tensor(x) for name, x in arrays.items()}, **options)
    for field in dataclasses.fields(known):
        a, b = getattr(known, field.name), getattr(again, field.name)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-15)
    q, k, v = (arrays[name] for name in "qkv")
    known, again = expected(case.problem, q, k, v, **options), expected(case.problem, *(torch.tensor(x) for x in (q, k, v)), **options)
    for name in ("out", "lse", "out_tolerance", "lse_tolerance"):
        np.testing.assert_allclose(getattr(known, name), getattr(again, name), rtol=1e-9, atol=1e-15)


def test_values_that_spread_stay_in_their_sequence():
    case = packed_case(Case, causal=False, dropout=0.0, with_sinks=False, softcap=None, alibi_shape=None)
    memory = case.memory()
    q, k, v = (memory[name].decoded() for name in "qkv")
    v[41, 0, 3] = np.nan  # of the third sequence
    options = case.given_options(memory)
    known = expected(case.problem, q, k, v, **options)
    free = testing.spread_nonfinite(known, case.problem, v, **options).out_free
    assert sorted(set(free.nonzero()[0])) == list(range(22, 67)) and set(free.nonzero()[1]) == {0, 1} and set(free.nonzero()[2]) == {3}


def test_fuzz_of_packed_sequences(tmp_path):
    failure, text = tmp_path / "failure.json", io.StringIO()
    options = {"max_seqlen": 20, "work": 2**8, "dtypes": ("float32",), "head_dims": (8,), "options": (PACKED,), "file": text}
    assert testing.fuzz(0.05, seed=1, family="cpu", direction="both", failure=failure, **options) == 0
    assert "packed sequences" in text.getvalue()

    def overlooks_sequences(q, k, v, *, cu_seqlens_q=None, **_):
        if cu_seqlens_q is None:
            raise NotImplementedError
        return np.zeros((len(q), q.shape[1], v.shape[2]), q.dtype)

    assert testing.fuzz(0.5, seed=1, library="numpy", kernel=overlooks_sequences, failure=failure, **options) == 1
    case, _ = testing.load(failure)
    assert case.packed is not None and "from numbaflash.testing import Case, Packed, Placement, run_case" in text.getvalue()
    assert testing.replay(failure, file=text) == 0, "numbaflash itself computes it"


# Decoding


def own_decode(fault=""):
    """A kernel of one's own that decodes, in float64; ``fault`` plants a mistake."""

    def kernel(q, k, v, *, seqlens_k, page_table=None, scale, causal, window, softcap=None, alibi_slopes=None, sinks=None):
        dtype, k_rows, v_rows = q.dtype, k, v
        q, k_rows, v_rows = (np.asarray(x).astype(np.float64) for x in (q, k, v))
        out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        left, right = (None, None) if window is None else window
        right = right if not causal else 0 if right is None else min(right, 0)
        for b, h in np.ndindex(q.shape[0], q.shape[2]):
            if page_table is None:
                keys, values = k_rows[b], v_rows[b]
            else:
                table = page_table[b].astype(np.int64)
                table = np.clip(table, 0, len(k) - 1) if fault != "modulo" else table % max(len(k), 1)
                table = np.sort(table) if fault == "order" else np.roll(table, b) if fault == "table" else table
                keys, values = (x[table if len(k) else table[:0]].reshape(-1, *x.shape[2:]) for x in (k_rows, v_rows))
            length = min(max(int(seqlens_k[b]), 0), len(keys))
            end = min(len(keys), length + (fault == "slot")) - (fault == "key" and length > 1)
            keys, values = (x[:end, h // max(1, q.shape[2] // k.shape[2])] for x in (keys, values))
            j = np.arange(end)
            for i in range(q.shape[1]):
                place = i if causal == "top_left" else i - q.shape[1] + (length if fault != "place" else k_rows.shape[1])
                seen = (j >= place - left if left is not None else j >= 0) & (j <= place + right if right is not None else j >= 0)
                score = scale * (keys[seen] @ q[b, i, h])
                if softcap and fault != "softcap":
                    score = softcap * np.tanh(score / softcap)
                if alibi_slopes is not None:
                    slope = alibi_slopes[(b, h) if alibi_slopes.ndim > 1 else h]
                    score = score - float(slope) * abs(place + (fault == "alibi") * (length > 0) - j[seen])
                sink = -np.inf if sinks is None or (fault == "sink" and not len(score)) else float(sinks[h])
                top = max(score.max(initial=-np.inf), sink) if not np.isnan(score).any() else np.nan
                top = 0.0 if top == -np.inf else top
                p = np.exp(score - top)
                total = p.sum() + np.exp(sink - top)
                if total or fault == "empty":
                    out[b, i, h], lse[b, h, i] = p @ values[seen] / total, top + np.log(total)
        return out.astype(dtype), lse

    def quiet(*arrays, **options):
        with np.errstate(all="ignore"):
            return kernel(*arrays, **options)

    return quiet


def decode_case(**changes):
    plain = {"dtype": "float32", "seqlen_k": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "head_dim_v": 8, "hidden": "nan"}
    cache = Cache((48, 0, 21, 5), page_size=4, order="random", shared=2, spare=3)
    return DecodeCase(**(plain | {"cache": cache} | changes))


DECODING_FAULTS = {
    "order": {},
    "table": {},
    "slot": {},
    "key": {},
    "empty": {},
    "modulo": {"cache": Cache((48, 40), page_size=4, spare=2, wrong=True), "hidden": "finite"},
    "place": {"seqlen_q": 3, "causal": True},
    "softcap": {"softcap": 0.25},
    "alibi": {"alibi_shape": (4,), "seqlen_q": 2, "causal": True},
    "sink": {"with_sinks": True},
}


@pytest.mark.parametrize("fault", DECODING_FAULTS)
def test_faults_in_decoding_are_caught(fault):
    case = decode_case(**DECODING_FAULTS[fault])
    accuracy = run_decode_case(case, kernel=own_decode())
    assert accuracy.out < 1 and accuracy.lse < 1
    with pytest.raises(AccuracyError):
        run_decode_case(case, kernel=own_decode(fault))


@settings(max_examples=60)
@given(decode_problems(max_seqlen=60, work=2**10, options=OF_DECODING))
def test_the_rule_lets_honest_decoding_pass(case):
    run_decode_case(case, kernel=own_decode())


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_decoding_in_other_libraries(library):
    pytest.importorskip(library)
    run_decode_case(decode_case(latent=True, num_splits=3), family="cpu", library=library)


@settings(max_examples=60)
@given(decode_problems(max_seqlen=40, work=2**9, options=OF_DECODING))
def test_decode_cases(case):
    """They survive JSON and repr, lie as they say, and hold what they say in slots and entries that are used and that are not."""
    assert DecodeCase.from_json(case.to_json()) == case and eval(repr(case)) == case
    compile(case.snippet(family="cpu"), "snippet", "exec")
    operands = testing.Operands(case)
    for name in case.present:
        array = operands.arrays[name] if name != "v" else case.keys_and_values(operands.arrays)[1]
        _, strides = case.place_of(name)
        assert array.shape == case.shape_of(name) and (not array.size or array.strides == strides or 1 in array.shape)
    cache, options = case.cache, case.given_options(operands.memory)
    assert options["seqlens_k"].tolist() == list(cache.lengths)
    if cache.page_size is not None:
        pages, counts = cache.pages(case.seqlen_k), cache.counts(case.seqlen_k)
        used = [row[:count].astype(int).tolist() for row, count in zip(options["page_table"], counts, strict=True)]
        if not cache.wrong:
            assert all(0 <= page < pages for row in used for page in row)
            own = [page for row in used for page in row[cache.shared :]]
            assert len(set(own)) == len(own), "what is not shared is a sequence's own"
            assert all(a == b for row in used for a, b in zip(row[: cache.shared], max(used, key=len), strict=False))
            assert pages == len({page for row in used for page in row}) + cache.spare
    _, keys = taking_part(case.problem, **options)
    strides = operands.memory["k"].strides
    if case.hidden == "nan" and case.values != "nan" and 0 not in strides[:3] and not case.problem.is_empty:
        hidden = np.isnan(operands.memory["k"].decoded())
        assert (hidden == ~keys[..., None]).all(), "NaN wherever no query looks, and nowhere else"


def test_what_takes_part_in_pages():
    """The same slots as in contiguous caches, found through the table."""
    case = decode_case(seqlen_q=2, causal=True, window=(9, None))
    options = case.given_options(case.memory())
    queries, keys = taking_part(case.problem, **options)
    table = options.pop("page_table").astype(int)
    flat = dataclasses.replace(case, cache=Cache(case.cache.lengths))
    want_queries, want_keys = taking_part(flat.problem, **options)
    np.testing.assert_array_equal(queries, want_queries)
    found = np.zeros_like(keys)
    for b, n in np.ndindex(4, 12):
        if 4 * n < case.cache.lengths[b]:
            found[table[b, n]] |= want_keys[b, 4 * n : 4 * n + 4]
    np.testing.assert_array_equal(keys, found)
    assert keys.any() and not keys.all()


def test_values_that_spread_in_pages_stay_with_their_sequence():
    case = decode_case(cache=Cache((48, 0, 21, 5), page_size=4, spare=1), hidden="finite")
    memory = case.memory()
    options = case.given_options(memory)
    q, k, v = (memory[name].decoded() for name in "qkv")
    v[12, 1, 1, 3] = np.nan  # slot 1 of the first page of the third sequence
    assert options["page_table"][2, 0] == 12
    free = testing.spread_nonfinite(expected(case.problem, q, k, v, **options), case.problem, v, **options).out_free
    assert np.argwhere(free).tolist() == [[2, 0, 2, 3], [2, 0, 3, 3]]


def test_plans_of_decode_cases():
    plan = plan_of(decode_case(num_splits=2), dispatch.CPU, "cpu", "numpy")
    assert (plan.family, plan.direction) == ("cpu", "decode") and plan.problem.paged
    latent = decode_case(latent=True, head_dim=16, k=Placement(pad=(0, 0, 0, 3)))
    assert latent.place_of("v") == latent.place_of("k") and latent.place_of("v")[1] == (4 * 2 * 19 * 4, 2 * 19 * 4, 19 * 4, 4)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mask_shape": (1, 48)}, "mask_shape must be None in decoding"),
        ({"lengths_k": "full"}, "lengths_k must be None in decoding"),
        ({"dropout": 0.5}, "dropout must be 0 in decoding"),
        ({"seqlen_k": 47}, "seqlen_k, the capacity, must be a multiple of page_size, 4; got 47"),
        ({"latent": True, "head_dim_v": 9}, "head_dim_v must be at most head_dim"),
        ({"num_splits": 0}, "num_splits must be from 1 to 256"),
    ],
)
def test_fields_of_decode_cases_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        decode_case(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"page_size": 0}, "page_size must be at least 1, or None; got 0"),
        ({"page_size": 4, "order": "sorted"}, "order must be one of ascending, descending, random; got 'sorted'"),
        ({"page_size": 4, "spare": -1}, "shared and spare must not be negative"),
        ({"shared": 1}, "only caches in pages have an order"),
    ],
)
def test_caches_of_cases_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Cache((3, 4), **fields)


def test_decode_results_are_watched(monkeypatch):
    """`numbaflash.decode` replaced by one that is wrong in what it writes, and in what its parts make."""
    import numbaflash

    case, calls = decode_case(out=Placement(pad=(0, 0, 0, 4)), num_splits=3), []

    def decoding(change):
        def run(q, k, v, *, out, lse, return_lse, num_splits, **options):
            calls.append(num_splits)
            out[...], lse[...] = own_decode()(q, k, v, **options)
            change(k, out, lse)
            return out, lse

        return run

    def input_written(k, out, lse):
        ctypes.c_float.from_address(k.ctypes.data).value += 1

    def past_the_row(k, out, lse):
        np.lib.stride_tricks.as_strided(out, (*out.shape[:-1], 9), out.strides)[0, 0, 0, -1] = 7

    def sum_of_parts(k, out, lse):
        lse += np.log(2)

    monkeypatch.setattr(numbaflash, "decode", decoding(lambda *_: None))
    run_decode_case(case)
    assert calls == [3]
    for message, change in (
        ("1 elements .* of k, which must stay", input_written),
        ("outside out .* were written", past_the_row),
        ("lse", sum_of_parts),
    ):
        monkeypatch.setattr(numbaflash, "decode", decoding(change))
        with pytest.raises(AssertionError, match=message):
            run_decode_case(decode_case(out=Placement(pad=(0, 0, 0, 4)), num_splits=3, hidden="finite"))


def test_strategies_draw_caches():
    """Each kind that decoding has is drawn, and only the options asked for."""
    seen = set()

    @settings(max_examples=150)
    @given(decode_problems(max_seqlen=40, work=2**8, options=("sinks",)))
    def note(case):
        cache = case.cache
        seen.update({"pages" if cache.page_size else "contiguous", cache.order, f"{case.num_splits} parts", *case.problem.features})
        seen.update({"shared"} if cache.shared else ())
        seen.update({"wrong"} if cache.wrong else ())
        seen.update({"latent"} if case.latent else ())
        seen.update({"tokens"} if case.seqlen_q > 1 else ())
        seen.update({"empty"} if 0 in cache.lengths else ())
        seen.update({"outside"} if any(not 0 <= n <= case.seqlen_k for n in cache.lengths) else ())
        seen.update({"head dim of a latent cache"} if case.head_dim > 256 else ())

    note()
    kinds = {"pages", "contiguous", "ascending", "descending", "random", "None parts", "3 parts", "256 parts", "shared", "wrong", "latent", "tokens"}
    assert seen >= kinds | {"empty", "outside", "head dim of a latent cache", "sinks", "seqlens_k", "page_table"}, seen
    assert not seen & {"softcap", "alibi_slopes"}

    @given(decode_problems(options=("sinks", "packed", "bias")))
    def wrong(case):
        raise AssertionError("no case can be drawn")

    with pytest.raises(ValueError, match="options must be of alibi_slopes, softcap, sinks in decoding; got bias, packed"):
        wrong()


def test_fuzz_of_decoding(tmp_path, monkeypatch):
    """The cpu family passes; an error planted in `numbaflash.decode` is found, made small, and fails again from the file."""
    import numbaflash

    failure, text = tmp_path / "failure.json", io.StringIO()
    only = {"direction": "decode", "family": "cpu", "dtypes": ("float32",), "head_dims": (8,), "max_seqlen": 40, "work": 2**9, "file": text}
    assert testing.fuzz(0.08, seed=1, failure=failure, **only) == 0, text.getvalue()
    assert text.getvalue().startswith("fuzz: decode, cpu, numpy, seed 1") and "no case failed" in text.getvalue()

    right = numbaflash.decode

    def reads_pages_in_order(q, k, v, *, page_table=None, **options):
        return right(q, k, v, page_table=None if page_table is None else np.sort(page_table, 1), **options)

    with monkeypatch.context() as patched:
        patched.setattr(numbaflash, "decode", reads_pages_in_order)
        assert testing.fuzz(1, seed=1, failure=failure, **only) == 1, text.getvalue()
        assert testing.replay(failure, file=text) == 1
    case, recorded = testing.load(failure)
    assert isinstance(case, DecodeCase) and recorded["error"].startswith("AccuracyError: ") and case.cache.page_size and case.heads == 1
    assert "from numbaflash.testing import DecodeCase, Cache, Placement, run_decode_case" in text.getvalue() and repr(case) in text.getvalue()
    assert f"numbaflash fuzz --family cpu --replay {failure}" in text.getvalue()
    assert testing.replay(failure, file=text) == 0, "numbaflash itself computes it"


def test_fuzz_of_a_kernel_that_decodes(tmp_path):
    failure, text = tmp_path / "failure.json", io.StringIO()
    only = {"direction": "decode", "library": "numpy", "dtypes": ("float32",), "head_dims": (8,), "max_seqlen": 30, "work": 2**8, "file": text}
    assert testing.fuzz(0.03, seed=1, kernel=own_decode(), options=OF_DECODING, failure=failure, **only) == 0, text.getvalue()
    assert testing.fuzz(0.5, seed=1, kernel=own_decode("empty"), failure=failure, **only) == 1
    case, _ = testing.load(failure)
    assert len(case.cache.lengths) == 1 and case.seqlen_q == 1, "small"
    assert testing.replay(failure, kernel=own_decode("empty"), file=text) == 1
    assert testing.replay(failure, kernel=own_decode(), file=text) == 0
    with pytest.raises(ValueError, match="options must be of alibi_slopes, softcap, sinks in decoding; got mask"):
        testing.fuzz(0.1, kernel=own_decode(), options=("mask",), failure=failure, **only)


def own_with_options(fault=""):
    """Kernels of one's own that take options by keyword."""

    def problem_of(q, k, v, options):
        options = {name: x.to_dense() if isinstance(x, BlockMask) else x for name, x in options.items()}
        described = {name: (x.shape, str(x.dtype)) for name, x in options.items() if isinstance(x, np.ndarray)}
        plain = {name: x for name, x in options.items() if name not in described and name != "seed"}
        return make_problem(q.shape, k.shape, v.shape, (str(q.dtype),) * 3, **plain, **described), {
            name: np.asarray(x).astype(np.float64) if name in described else x for name, x in options.items() if name in (*described, "seed")
        }

    def forward(q, k, v, **options):
        problem, given_ = problem_of(q, k, v, options)
        return flash_with_options(problem, {"q": q, "k": k, "v": v}, given_, fault)

    def backward(dout, q, k, v, out, lse, *, dlse, deterministic, needs, **options):
        problem, given_ = problem_of(q, k, v, options)
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        results = dict(zip(problem.gradients, flash_backward_with_options(problem, arrays, given_, fault), strict=True))
        names = ("q", "k", "v", *(name for name in problem.gradients[3:] if name in needs))
        return tuple(results[name].astype(problem.dtype_of(name)) if name in needs else None for name in names)

    return forward, backward


def test_own_kernels_get_options():
    forward, backward = own_with_options()
    strided = {"mask": Placement(step=(1, -1, 2)), "bias": Placement(order=(0, 1, 3, 2)), "seqlens_k": Placement(step=(3,))}
    run_case(with_options(Case, "float32", hidden="nan", **strided), kernel=forward)
    case = with_options(BackwardCase, "float32", hidden="inf", needs=("q", "k", "v", "bias", "sinks"), with_dlse=True, deterministic=True, **strided)
    accuracy = run_backward_case(case, kernel=backward)
    assert 0 < accuracy.dbias < 1 and 0 < accuracy.dsinks < 1
    accuracy = run_backward_case(dataclasses.replace(case, needs=("v", "sinks")), kernel=backward)
    assert accuracy.dbias is None and accuracy.dq is None and accuracy.dsinks is not None
    with pytest.raises(AccuracyError):
        run_case(with_options(Case, "float32"), kernel=own_with_options("seed")[0])
    with pytest.raises(AccuracyError, match="dbias"):
        run_backward_case(case, kernel=own_with_options("dbias")[1])


def test_nan_in_options_reaches_what_depends_on_it():
    case = with_options(
        BackwardCase, "float32", needs=("q", "k", "v", "bias", "sinks"), lengths_q="full", lengths_k="full", mask_values="all", dropout=0.0
    )
    arrays, options = option_inputs(case)
    arrays = {name: x for name, x in arrays.items() if name not in ("out", "lse")}
    options["bias"] = options["bias"].copy()
    options["bias"][1, 0, 60, 3] = np.nan
    known = expected_gradients(case.problem, **arrays, **options)
    exact = [getattr(known, f"d{name}") for name in case.problem.gradients]
    assert np.isnan(exact[0][1, 60]).all() and np.isfinite(exact[0][0]).all() and np.isnan(exact[4]).all()
    check_backward(case, *exact, known=known)
    for batch in (1, 0):
        exact[2] = np.where(np.arange(2)[:, None, None, None] == batch, np.nan, exact[2])
        if batch:
            check_backward(case, *exact, known=known)
    with pytest.raises(AccuracyError, match="dv"):
        check_backward(case, *exact, known=known)
    options["bias"][1, 0, 60, 3] = 0.0
    options["bias"][0, 0, 0, 89] = np.nan  # the first query does not see the last key
    known = expected_gradients(case.problem, **arrays, **options)
    assert all(np.isfinite(getattr(known, f"d{name}")).all() for name in case.problem.gradients)


# Fuzzing


def test_fuzz_finds_shrinks_and_replays(tmp_path):
    """A kernel that drops a key is found, made small, and fails again from the file."""
    failure, text = tmp_path / "failure.json", io.StringIO()
    status = testing.fuzz(0.5, seed=3, library="numpy", kernel=own("dropped key"), max_seqlen=60, work=2**12, failure=failure, file=text)
    assert status == 1, text.getvalue()
    case, recorded = testing.load(failure)
    assert recorded["error"].startswith("AccuracyError: ")
    assert case.work <= 64 and case.batch == case.kv_heads == 1 and case.q == Placement(), "small, and plain"
    assert f'numbaflash.testing.replay("{failure}", kernel=...)' in text.getvalue() and repr(case) in text.getvalue()
    assert not failure.with_name("failure.json.running").exists()
    again = io.StringIO()
    assert testing.replay(failure, kernel=own("dropped key"), file=again) == 1
    assert "AccuracyError" in again.getvalue()
    assert testing.replay(failure, kernel=own(), file=again) == 0
    assert "passes: error / tolerance" in again.getvalue()


def test_fuzz_finds_a_wrong_gradient(tmp_path):
    failure, text = tmp_path / "failure.json", io.StringIO()
    options = {"direction": "backward", "library": "numpy", "max_seqlen": 40, "work": 2**10}
    status = testing.fuzz(0.5, seed=3, kernel=own_backward("dk unscaled"), failure=failure, file=text, **options)
    assert status == 1 and text.getvalue().startswith("fuzz: backward, "), text.getvalue()
    case, recorded = testing.load(failure)
    assert isinstance(case, BackwardCase) and recorded["error"].startswith("AccuracyError: dk[")
    assert "run_backward_case(BackwardCase(" in text.getvalue()
    again = io.StringIO()
    assert testing.replay(failure, kernel=own_backward("dk unscaled"), file=again) == 1
    assert testing.replay(failure, kernel=own_backward(), file=again) == 0
    assert "in dk" in again.getvalue()


def test_fuzz_of_options(tmp_path):
    failure, text = tmp_path / "failure.json", io.StringIO()
    options = {
        "library": "numpy",
        "max_seqlen": 20,
        "work": 2**8,
        "options": ("mask", "sinks"),
        "dtypes": ("float32",),
        "failure": failure,
        "file": text,
    }
    assert testing.fuzz(0.05, seed=1, kernel=own_with_options()[0], **options) == 0 and " mask " in text.getvalue(), text.getvalue()
    assert testing.fuzz(0.5, seed=1, kernel=own_with_options("sink")[0], **options) == 1
    case, _ = testing.load(failure)
    assert case.problem.sinks and case.problem.mask is None, "small: the mask is not needed to fail"


def test_fuzz_of_both_directions(tmp_path):
    text = io.StringIO()
    found = testing.fuzz(
        0.1, seed=1, direction="both", family="cpu", dtypes=("float32",), head_dims=(8,), work=2**8, failure=tmp_path / "f", file=text
    )
    assert found == 0 and " backward " in text.getvalue(), text.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "sideways"}, "direction must be one of forward, backward, both, decode; got 'sideways'"),
        ({"direction": "both", "library": "numpy", "kernel": print}, 'direction must be "forward", "backward" or "decode" for a kernel of your own'),
        ({"direction": "backward", "library": "jax"}, "library must not be jax for gradients"),
    ],
)
def test_fuzz_of_a_wrong_direction(options, message):
    with pytest.raises(ValueError, match=message):
        testing.fuzz(0.1, **options)


def test_fuzz_passes_over_what_a_kernel_cannot_do(tmp_path):
    def kernel(q, k, v, **options):
        if q.dtype != np.float32:
            raise UnsupportedError("float32 alone")
        return own()(q, k, v, **options)

    text = io.StringIO()
    assert testing.fuzz(0.05, seed=1, library="numpy", kernel=kernel, work=2**10, failure=tmp_path / "f.json", file=text) == 0
    assert "no case failed" in text.getvalue() and "unsupported" in text.getvalue() and "float32" in text.getvalue()
    assert not list(tmp_path.iterdir())


def test_fuzz_repeats_a_seed(tmp_path):
    def cases(seed):
        found = []

        def kernel(q, k, v, **options):
            found.append((q.shape, k.shape, str(q.dtype), options))
            return own()(q, k, v, **options)

        testing.fuzz(0.03, seed=seed, library="numpy", kernel=kernel, work=2**10, failure=tmp_path / "f.json", file=io.StringIO())
        return found

    runs = cases(5), cases(5), cases(6)
    shared = min(map(len, runs))
    first, second, other = (run[:shared] for run in runs)
    assert shared > 2 and first == second != other


def test_fuzz_survives_a_fault_that_does_not_repeat(tmp_path):
    calls = []

    def kernel(q, k, v, **options):
        calls.append(q)
        out, lse = own()(q, k, v, **options)
        return out + (len(calls) == 30), lse

    text, failure = io.StringIO(), tmp_path / "f.json"
    status = testing.fuzz(1, seed=1, library="numpy", kernel=kernel, dtypes=("float32",), work=2**10, failure=failure, file=text)
    assert status == 1 and failure.exists() and "case 30 fails" in text.getvalue()
    assert testing.replay(failure, kernel=own(), file=io.StringIO()) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(minutes=0), "minutes must be positive; got 0"),
        (dict(family="sm70"), "family must be one of .*; got 'sm70'"),
        (dict(library="mxnet"), "library must be one of .*; got 'mxnet'"),
        (dict(library="numba", dtypes=("bfloat16",)), "dtypes must hold one that numba has here; got bfloat16"),
    ],
)
def test_fuzz_messages(options, message, monkeypatch):
    monkeypatch.setattr(testing.fuzzing, "device_of", lambda library, index: dispatch.CPU)
    with pytest.raises(ValueError, match=message):
        testing.fuzz(**({"minutes": 1} | options))


def test_replay_messages(tmp_path):
    path = tmp_path / "case.json"
    with pytest.raises(FileNotFoundError):
        testing.replay(path)
    for text, message in (
        ("{", "holds no case"),
        ("3", "expected a JSON object, got int"),
        ('{"case": {"x": 1}}', "unknown fields x"),
        ('{"direction": ["decode"], "case": {}}', r"case.json holds no case: direction must be .*; got \['decode'\]"),
        ('{"direction": "decode", "case": {"seqlen_q": "x"}}', "case.json holds no case: "),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            testing.replay(path)


def test_import_is_light():
    """Neither Hypothesis nor a framework comes with the package; without Hypothesis the error says what to install."""
    code = (
        "import sys; import numbaflash.testing as t; "
        "assert not {'hypothesis', 'torch', 'jax', 'cupy'} & set(sys.modules), sorted(sys.modules); "
        "sys.modules['hypothesis'] = None\n"
        "try: t.problems\nexcept ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "numbaflash.testing needs Hypothesis here: pip install hypothesis"
