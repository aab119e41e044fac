"""The float64 reference, and the exact results of the accuracy rule, against two computations that share nothing with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from numbaflash import reference
from numbaflash.testing import RECIPES, Case, accuracy, expected, problems

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
