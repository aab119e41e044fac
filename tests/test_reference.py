"""The float64 reference, and the exact results of the accuracy rule, against two computations that share nothing with them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings

from numbaflash import reference
from numbaflash.testing import RECIPES, BackwardCase, Case, accuracy, backward_problems, expected, expected_gradients, problems

SMALL = problems(dtypes=("float64",), max_seqlen=20, work=200, head_dims=(1, 2, 3, 5, 8))


def inputs(case):
    memory = case.memory()
    return tuple(memory[name].decoded() for name in "qkv")


def same(a, b, tolerance=1e-12):
    """Equal up to rounding, NaN and infinities included."""
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * 300, equal_nan=True)


def brute_force(case, q, k, v):
    """The definition, number by number, with exactly rounded sums."""
    batch, seqlen_q, heads, dims = q.shape
    seqlen_k, kv_heads, dims_v = v.shape[1:]
    scale = 1 / math.sqrt(dims) if case.scale is None else case.scale
    left, right = case.window or (None, None)
    shift = 0 if case.causal == "top_left" else seqlen_k - seqlen_q
    out = np.zeros((batch, seqlen_q, heads, dims_v))
    lse = np.full((batch, heads, seqlen_q), -math.inf)
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            for i in range(seqlen_q):
                keys = [
                    j
                    for j in range(seqlen_k)
                    if (not case.causal or j <= i + shift) and (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
                ]
                if not keys:
                    continue
                scores = [scale * _sum(q[b, i, h, d] * k[b, j, g, d] for d in range(dims)) for j in keys]
                top = math.nan if any(math.isnan(s) for s in scores) else max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = _sum(weights)
                lse[b, h, i] = top + math.log(total)
                for d in range(dims_v):
                    out[b, i, h, d] = _sum(w / total * v[b, j, g, d] for w, j in zip(weights, keys, strict=True))
    return out, lse


def _sum(terms):
    terms = list(terms)
    return math.nan if any(math.isnan(t) for t in terms) else math.fsum(terms)


@given(SMALL)
def test_brute_force(case):
    q, k, v = inputs(case)
    out, lse = reference.forward(case.problem, q, k, v)
    brute_out, brute_lse = brute_force(case, q, k, v)
    assert same(lse, brute_lse)
    condition = max(1.0, np.abs(np.nan_to_num(brute_lse, neginf=0)).max(initial=0))  # a score's own rounding, where scores are large
    assert same(out, brute_out, 1e-12 * condition)


NUMBERS = tuple(name for name in RECIPES if name != "nan")


@given(problems(dtypes=("float64",), max_seqlen=40, work=3000, values=NUMBERS, hidden=("finite",)))
def test_torch(case):
    """torch's attention in float64 on the CPU, with an explicit mask of the pairs that are seen."""
    torch = pytest.importorskip("torch")
    p = case.problem
    q, k, v = inputs(case)
    out, lse = reference.forward(p, q, k, v)
    if p.is_empty or not p.seqlen_k:
        assert not out.any()
        return
    seen = reference.visible(p)
    heads_first = (torch.from_numpy(np.repeat(x, n, axis=2).swapaxes(1, 2).copy()) for x, n in ((q, 1), (k, p.group), (v, p.group)))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=torch.from_numpy(seen), scale=p.scale).numpy().swapaxes(1, 2)
    rows = seen.any(axis=1)
    assert not out[:, ~rows].any()
    condition = max(1.0, np.abs(lse[..., rows]).max(initial=0))
    assert same(out[:, rows], theirs[:, rows], 1e-12 * condition)


@given(problems(max_seqlen=40, work=4000))
def test_exact_results_of_the_accuracy_rule(case):
    """`expected` in NumPy is the reference; in torch, by other formulas, it is equal to it."""
    torch = pytest.importorskip("torch")
    values = inputs(case)
    out, lse = reference.forward(case.problem, *values)
    known = expected(case.problem, *values)
    theirs = expected(case.problem, *map(torch.from_numpy, values))
    assert np.array_equal(known.out, out, equal_nan=True) and np.array_equal(known.lse, lse, equal_nan=True)
    condition = max(1.0, np.abs(np.nan_to_num(lse, neginf=0)).max(initial=0))
    for mine, other in ((out, theirs.out), (lse, theirs.lse)):
        assert same(mine, other.numpy(), 1e-12 * condition)
    ours = known.out_tolerance, known.lse_tolerance
    for mine, other in zip(ours, (theirs.out_tolerance, theirs.lse_tolerance), strict=True):
        assert np.allclose(mine, other.numpy(), rtol=1e-3, atol=1e-300, equal_nan=True)


@settings(max_examples=10)
@given(problems(max_seqlen=40, work=4000))
def test_chunks_do_not_matter(case):
    values = inputs(case)
    whole = expected(case.problem, *values)
    before = accuracy.CHUNK["numpy"]
    accuracy.CHUNK["numpy"] = 64
    try:
        parts = expected(case.problem, *values)
    finally:
        accuracy.CHUNK["numpy"] = before
    for name in ("out", "lse", "out_tolerance", "lse_tolerance"):
        a, b = getattr(whole, name), getattr(parts, name)
        assert np.allclose(a, b, rtol=1e-3, atol=1e-300, equal_nan=True), name


def test_unseen_infinities_take_no_part():
    case = Case(dtype="float64", seqlen_q=6, seqlen_k=9, head_dim=4, head_dim_v=4, window=(1, 1))
    q, k, v = inputs(case)
    clean = reference.forward(case.problem, q, k, v)
    hidden = ~reference.visible(case.problem).any(axis=0)
    assert hidden.any()
    for poison in (np.nan, np.inf, -np.inf):
        k[:, hidden], v[:, hidden] = poison, poison
        out, lse = reference.forward(case.problem, q, k, v)
        assert np.array_equal(out, clean[0]) and np.array_equal(lse, clean[1])


def test_seen_infinities_propagate():
    case = Case(dtype="float64", seqlen_q=4, seqlen_k=4, head_dim=4, head_dim_v=2, causal=True)
    q, k, v = inputs(case)
    v[0, 2, 0, 1] = np.inf
    out, lse = reference.forward(case.problem, q, k, v)
    assert np.isfinite(out[0, :2]).all() and np.isfinite(out[..., 0]).all() and np.isfinite(lse).all()
    assert (out[0, 2:, 0, 1] == np.inf).all()
    v[0, 2, 0, 1] = 0
    k[0, 2, 0, 0] = np.nan
    out, lse = reference.forward(case.problem, q, k, v)
    assert np.isfinite(out[0, :2]).all() and np.isnan(out[0, 2:]).all() and np.isnan(lse[0, 0, 2:]).all() and np.isfinite(lse[0, 0, :2]).all()


def test_a_row_without_keys():
    case = Case(dtype="float64", seqlen_q=5, seqlen_k=2, head_dim=4, head_dim_v=3, causal=True)
    out, lse = reference.forward(case.problem, *inputs(case))
    assert not out[0, :3].any() and (lse[0, 0, :3] == -np.inf).all()
    assert np.isfinite(lse[0, 0, 3:]).all() and out[0, 3:].any()


# Gradients

TINY = backward_problems(dtypes=("float64",), max_seqlen=6, work=40, head_dims=(1, 2, 3), values=("normal", "constant", "ascending"))
GRADIENTS = ("dq", "dk", "dv")


def gradient_inputs(case):
    """dout, q, k, v and dlse."""
    memory = case.memory()
    return {name: memory[name].decoded() for name in ("dout", "q", "k", "v", "dlse") if name in memory}


@settings(max_examples=40)
@given(TINY)
def test_gradients_are_finite_differences(case):
    """Element by element, of a loss that is linear in out and lse; what is hidden is not moved."""
    given_ = gradient_inputs(case)
    problem, dout, dlse = case.problem, given_.pop("dout"), given_.pop("dlse", np.zeros(case.problem.lse_shape))
    seen = reference.visible(problem)
    dead = ~seen.any(axis=1)
    dout[:, dead], dlse[..., dead] = 0.0, 0.0  # out is 0 there, whatever q holds

    def loss(**moved):
        out, lse = reference.forward(problem, *(given_ | moved).values())
        return (dout * out).sum() + (dlse * np.where(lse == -np.inf, 0.0, lse)).sum()

    gradients = reference.backward(problem, dout, **given_, dlse=dlse)
    for name, gradient in zip("qkv", gradients, strict=True):
        assert gradient.shape == given_[name].shape
        for at in np.ndindex(gradient.shape):
            if not np.isfinite(given_[name][at]):
                assert gradient[at] == 0
                continue
            step = 1e-5 * max(1.0, abs(given_[name][at]))
            ends = []
            for way in (step, -step):
                moved = given_[name].copy()
                moved[at] += way
                ends.append(loss(**{name: moved}))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(slope - gradient[at]) <= 1e-6 * (1 + abs(gradient).max()), (name, at)


@settings(max_examples=40)
@given(backward_problems(dtypes=("float64",), max_seqlen=30, work=2000, values=NUMBERS, hidden=("finite",)))
def test_gradients_of_torch(case):
    """torch's autograd through a softmax written down with an explicit mask."""
    torch = pytest.importorskip("torch")
    p, given_ = case.problem, gradient_inputs(case)
    mine = reference.backward(p, **given_)
    if p.is_empty or not p.seqlen_k:
        assert not any(gradient.any() for gradient in mine)
        return
    q, k, v = (torch.from_numpy(given_[name].copy()).requires_grad_() for name in "qkv")
    seen = torch.from_numpy(reference.visible(p))
    grouped = (x.repeat_interleave(p.group, dim=2) for x in (k, v))
    keys, values = grouped
    score = (p.scale * torch.einsum("bihd,bjhd->bhij", q, keys)).masked_fill(~seen, -1e300)
    lse = torch.logsumexp(score, -1)
    out = torch.einsum("bhij,bjhd->bihd", torch.exp(score - lse[..., None]) * seen, values)
    rows = seen.any(-1)
    loss = (out * torch.from_numpy(given_["dout"].copy())).sum()
    if "dlse" in given_:
        loss = loss + (torch.where(rows, lse, 0.0) * torch.from_numpy(given_["dlse"].copy()) * rows).sum()
    loss.backward()
    known = expected_gradients(p, **given_)
    for name, gradient, theirs in zip(GRADIENTS, mine, (q.grad, k.grad, v.grad), strict=True):
        assert (abs(gradient - theirs.numpy()) <= getattr(known, f"{name}_tolerance") + 1e-300).all(), name


@settings(max_examples=40)
@given(backward_problems(max_seqlen=40, work=3000))
def test_exact_gradients_of_the_accuracy_rule(case):
    """`expected_gradients` in NumPy is the reference; in torch, by other formulas, it is equal to it, its tolerances too."""
    torch = pytest.importorskip("torch")
    given_ = gradient_inputs(case)
    known = expected_gradients(case.problem, **given_)
    theirs = expected_gradients(case.problem, **{name: torch.from_numpy(x.copy()) for name, x in given_.items()})
    limits = expected_gradients(make_double(case.problem), **given_)
    for name, gradient in zip(GRADIENTS, reference.backward(case.problem, **given_), strict=True):
        assert np.array_equal(getattr(known, name), gradient, equal_nan=True)
        other, tolerance = np.asarray(getattr(theirs, name)), getattr(limits, f"{name}_tolerance")
        assert ((abs(other - gradient) <= tolerance) | (np.isnan(other) & np.isnan(gradient))).all()
        ours = getattr(known, f"{name}_tolerance"), np.asarray(getattr(theirs, f"{name}_tolerance"))
        if np.isfinite(gradient).all():
            assert np.allclose(*ours, rtol=1e-2, atol=1e-300)


def make_double(problem):
    return dataclasses.replace(problem, dtype="float64")


@settings(max_examples=10)
@given(backward_problems(max_seqlen=40, work=3000))
def test_chunks_do_not_matter_to_gradients(case):
    given_ = gradient_inputs(case)
    whole = expected_gradients(case.problem, **given_)
    before = accuracy.CHUNK["numpy"]
    accuracy.CHUNK["numpy"] = 64
    try:
        parts = expected_gradients(case.problem, **given_)
    finally:
        accuracy.CHUNK["numpy"] = before
    for name in GRADIENTS:
        for kind in ("", "_tolerance"):
            a, b = getattr(whole, name + kind), getattr(parts, name + kind)
            assert np.allclose(a, b, rtol=1e-2, atol=1e-300, equal_nan=True), name


def test_gradients_of_unseen_infinities():
    case = BackwardCase(dtype="float64", seqlen_q=9, seqlen_k=12, head_dim=4, head_dim_v=3, window=(1, 0), causal="top_left", with_dlse=True)
    given_ = gradient_inputs(case)
    clean = reference.backward(case.problem, **given_)
    hidden = ~reference.visible(case.problem).any(axis=0)
    assert hidden.any()
    for poison in (np.nan, np.inf, -np.inf):
        given_["k"][:, hidden], given_["v"][:, hidden] = poison, poison
        for mine, want in zip(reference.backward(case.problem, **given_), clean, strict=True):
            assert np.array_equal(mine, want)


def test_gradients_of_rows_without_keys():
    case = BackwardCase(dtype="float64", seqlen_q=5, seqlen_k=2, head_dim=4, head_dim_v=3, causal=True, with_dlse=True, hidden="nan")
    given_ = gradient_inputs(case)
    assert np.isnan(given_["dout"][0, :3]).all() and np.isnan(given_["dlse"][0, 0, :3]).all() and np.isnan(given_["q"][0, :3]).all()
    dq, dk, dv = reference.backward(case.problem, **given_)
    assert not dq[0, :3].any() and dq[0, 3:].any()
    assert np.isfinite(dk).all() and np.isfinite(dv).all() and dv.any()


def test_gradients_of_a_nan_that_is_seen():
    case = BackwardCase(dtype="float64", seqlen_q=4, seqlen_k=4, head_dim=4, head_dim_v=2, causal=True)
    given_ = gradient_inputs(case)
    given_["v"][0, 2, 0, 1] = np.nan
    dq, dk, dv = reference.backward(case.problem, **given_)
    assert np.isfinite(dq[0, :2]).all() and np.isnan(dq[0, 2:]).all() and np.isnan(dk).all() and np.isfinite(dv).all()
