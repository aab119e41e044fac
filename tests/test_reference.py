"""The float64 reference, and the exact results of the accuracy rule, against two computations that share nothing with them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings

from numbaflash import reference
from numbaflash.problem import make_problem
from numbaflash.testing import RECIPES, BackwardCase, Case, arithmetic, backward_problems, expected, expected_gradients, problems
from numbaflash.testing.strategies import FEATURES

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
    before = arithmetic.CHUNK["numpy"]
    arithmetic.CHUNK["numpy"] = 64
    try:
        parts = expected(case.problem, *values)
    finally:
        arithmetic.CHUNK["numpy"] = before
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
    before = arithmetic.CHUNK["numpy"]
    arithmetic.CHUNK["numpy"] = 64
    try:
        parts = expected_gradients(case.problem, **given_)
    finally:
        arithmetic.CHUNK["numpy"] = before
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


# Options


def everything(case):
    """q, k, v (and dout, dlse), and the options."""
    memory = case.memory()
    return {name: memory[name].decoded() for name in ("dout", *"qkv", "dlse") if name in memory}, case.given_options(memory)


def brute_force_with_options(case, q, k, v, seed=0, mask=None, bias=None, alibi_slopes=None, sinks=None, seqlens_q=None, seqlens_k=None):
    """The definition again, with every option, straight from the contract."""
    batch, seqlen_q, heads, dims = q.shape
    seqlen_k, kv_heads, dims_v = v.shape[1:]
    scale = 1 / math.sqrt(dims) if case.scale is None else case.scale
    left, right = case.window or (None, None)
    full = (batch, heads, seqlen_q, seqlen_k)
    mask = np.broadcast_to(True if mask is None else mask != 0, full)
    bias = np.broadcast_to(0.0 if bias is None else bias, full)
    slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, (batch, heads))
    out = np.zeros((batch, seqlen_q, heads, dims_v))
    lse = np.full((batch, heads, seqlen_q), -math.inf)
    for b in range(batch):
        rows = seqlen_q if seqlens_q is None else int(min(max(seqlens_q[b], 0), seqlen_q))
        keys = seqlen_k if seqlens_k is None else int(min(max(seqlens_k[b], 0), seqlen_k))
        shift = 0 if case.causal == "top_left" else keys - rows
        for h in range(heads):
            g = h * kv_heads // heads
            for i in range(rows):
                scores, values, kept = [], [], []
                for j in range(keys):
                    hidden = (case.causal and j > i + shift) or (left is not None and j < i + shift - left)
                    if hidden or (right is not None and j > i + shift + right) or not mask[b, h, i, j]:
                        continue
                    score = scale * _sum(q[b, i, h, d] * k[b, j, g, d] for d in range(dims))
                    if case.softcap is not None:
                        score = case.softcap * math.tanh(score / case.softcap)
                    scores.append(score - slopes[b, h] * abs(i + shift - j) + bias[b, h, i, j])
                    values.append(v[b, j, g])
                    kept.append(keeps(case, seed, b, h, i, j))
                logits = scores + ([] if sinks is None else [sinks[h]])
                top = math.nan if any(math.isnan(x) for x in logits) else max(logits, default=-math.inf)
                if top == -math.inf:
                    continue
                total = _sum(math.exp(x - top) for x in logits)
                lse[b, h, i] = top + math.log(total)
                for d in range(dims_v):
                    terms = zip(scores, values, kept, strict=True)
                    out[b, i, h, d] = _sum(math.exp(x - top) / total * keep * value[d] for x, value, keep in terms)
    return out, lse


def keeps(case, seed, b, h, i, j):
    """What dropout multiplies a weight by, from the published generator and the documented place of a pair in it."""
    p = case.problem.dropout
    if not p:
        return 1.0
    words = reference.philox((j // 32 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, h, b), seed)
    w = [int(word).to_bytes(4, "little") for word in words]
    n, own = j // 8 % 4, 2 * (i // 8 % 2) + j % 2
    of_others = {0: w[2][own] ^ w[3][own], 1: w[2][own] ^ w[3][(own + 1) % 4], 2: w[0][own] ^ w[1][own], 3: w[0][own] ^ w[1][(own + 1) % 4]}
    return 1 / (1 - p) if w[n][own] % 64 * 256 + of_others[n] >= 2**14 * p else 0.0


@settings(max_examples=60)
@given(problems(dtypes=("float64",), max_seqlen=20, work=150, head_dims=(1, 2, 3), options=FEATURES))
def test_brute_force_with_options(case):
    arrays, options = everything(case)
    out, lse = reference.forward(case.problem, **arrays, **options)
    plain = {"mask" if name == "block_mask" else name: x for name, x in options.items()}
    brute_out, brute_lse = brute_force_with_options(case, **arrays, **plain)
    assert same(lse, brute_lse)
    condition = max(1.0, np.abs(np.nan_to_num(brute_lse, neginf=0)).max(initial=0))
    assert same(out, brute_out, 1e-12 * min(condition, 1e6))


@settings(max_examples=60)
@given(backward_problems(dtypes=("float64",), max_seqlen=20, work=400, values=("normal", "constant"), options=FEATURES))
def test_gradients_of_torch_with_options(case):
    """torch's autograd through the definition, every option and combination; what is hidden is selected away there too."""
    torch = pytest.importorskip("torch")
    arrays, options = everything(case)
    p = case.problem
    mine = reference.backward(p, **arrays, **options)
    if p.is_empty or not p.seqlen_k:
        return
    shaped = reference.check_options(p, {name: x for name, x in options.items() if name != "seed"})
    pairs = [[reference.visible(p, b, h, **{n: x for n, x in options.items() if n != "seed"}) for h in range(p.heads)] for b in range(p.batch)]
    seen = torch.from_numpy(np.array(pairs))
    leaves = {name: torch.from_numpy(np.nan_to_num(arrays[name], posinf=0, neginf=0)).requires_grad_() for name in "qkv"}
    leaves |= {name: torch.from_numpy(np.nan_to_num(shaped[name], nan=0, posinf=0, neginf=-np.inf)).requires_grad_() for name in p.gradients[3:]}
    keys, values = (leaves[name].repeat_interleave(p.group, dim=2) for name in "kv")
    score = p.scale * torch.einsum("bihd,bjhd->bhij", leaves["q"], keys)
    if p.softcap is not None:
        score = p.softcap * torch.tanh(score / p.softcap)
    lengths = torch.tensor([reference.lengths(p, b, shaped.get("seqlens_q"), shaped.get("seqlens_k")) for b in range(p.batch)])
    if p.alibi:
        offset = (lengths[:, 1] - lengths[:, 0] if p.offset_per_entry else torch.full((p.batch,), p.offset))[:, None, None, None]
        distance = torch.arange(p.seqlen_q)[:, None] + offset - torch.arange(p.seqlen_k)
        score = score - torch.from_numpy(shaped["alibi_slopes"])[..., None, None] * distance.abs()
    if p.bias:
        score = score + leaves["bias"]
    real = seen & (score != -math.inf)
    top = torch.where(real, score, -math.inf).amax(-1).detach()
    sink = torch.full(p.lse_shape, -math.inf, dtype=torch.float64)
    if p.sinks:
        within = torch.arange(p.seqlen_q) < lengths[:, :1]
        sink = torch.where(within[:, None], leaves["sinks"][:, None], -math.inf)
        top = torch.maximum(top, sink.detach())
    alive = top != -math.inf
    top = torch.where(alive, top, 0.0)
    weight = torch.where(real, torch.exp(torch.where(real, score, 0.0) - torch.where(real, top[..., None], 0.0)), 0.0)
    total = torch.where(alive, weight.sum(-1) + torch.exp(sink - top), 1.0)
    keep = torch.from_numpy(np.array([[reference.kept(p, b, h, case.dropout_seed) for h in range(p.heads)] for b in range(p.batch)]))
    out = torch.einsum("bhij,bjhd->bihd", weight / total[..., None] * keep, values)
    loss = (out * torch.from_numpy(np.nan_to_num(arrays["dout"], posinf=0, neginf=0))).sum()
    if "dlse" in arrays:
        loss = loss + (torch.where(alive, top + torch.log(total), 0.0) * torch.from_numpy(np.nan_to_num(arrays["dlse"], posinf=0, neginf=0))).sum()
    loss.backward()
    for name, gradient in zip(p.gradients, mine, strict=True):
        theirs = leaves[name].grad.numpy()
        assert np.allclose(gradient, np.nan_to_num(theirs), rtol=1e-9, atol=1e-9 * (1 + abs(gradient).max(initial=0))), name


@settings(max_examples=30)
@given(backward_problems(dtypes=("float64",), max_seqlen=6, work=40, head_dims=(1, 2), values=("normal",), options=FEATURES))
def test_gradients_with_options_are_finite_differences(case):
    """But for biases of the lowest number, beside which every step is lost."""
    if case.bias_values == "lowest":
        case = dataclasses.replace(case, bias_values="big")
    arrays, options = everything(case)
    problem, dout, dlse = case.problem, np.nan_to_num(arrays.pop("dout"), posinf=0, neginf=0), arrays.pop("dlse", np.zeros(case.problem.lse_shape))
    dlse = np.nan_to_num(dlse, posinf=0, neginf=0)
    seed = {"seed": options.pop("seed")} if "seed" in options else {}
    options = reference.check_options(problem, options)

    def loss(**moved):
        out, lse = reference.forward(problem, **(arrays | options | moved), **seed)
        return (dout * out).sum() + (dlse * np.where(lse == -np.inf, 0.0, lse)).sum()

    gradients = reference.backward(problem, dout, **arrays, dlse=dlse, **options, **seed)
    for name, gradient in zip(problem.gradients, gradients, strict=True):
        values = (arrays | options)[name]
        assert gradient.shape == values.shape
        for at in np.ndindex(gradient.shape):
            if not np.isfinite(values[at]):
                assert gradient[at] == 0, (name, at)
                continue
            ends = []
            step = 1e-5 * max(1.0, abs(values[at]))
            for way in (step, -step):
                moved = values.copy()
                moved[at] += way
                ends.append(loss(**{name: moved}))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(slope - gradient[at]) <= 1e-6 * (1 + abs(gradient).max()), (name, at)


@settings(max_examples=60)
@given(backward_problems(max_seqlen=30, work=2000, values=NUMBERS, options=FEATURES))
def test_what_no_query_sees_reaches_nothing(case):
    """Other garbage in keys, values, queries, padding and biases that take no part changes no bit."""
    case = dataclasses.replace(case, hidden="nan")
    results = []
    for hidden in ("nan", "inf"):
        arrays, options = everything(dataclasses.replace(case, hidden=hidden))
        saved = reference.forward(case.problem, *(arrays[name] for name in "qkv"), **options)
        results.append((*saved, *reference.backward(case.problem, **arrays, **options)))
        assert not any(np.isnan(x).any() for x in results[-1])
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


def test_a_row_of_the_lowest_bias_is_the_mean():
    case = BackwardCase(dtype="float64", seqlen_q=3, seqlen_k=5, head_dim=4, head_dim_v=2, bias_shape=(3, 5))
    arrays, options = everything(case)
    options["bias"] = np.full((3, 5), float(np.finfo(np.float32).min))
    dout = arrays.pop("dout")
    out, lse = reference.forward(case.problem, **arrays, **options)
    assert np.allclose(out[0], arrays["v"][0].mean(axis=0)) and np.isfinite(lse).all()
    _, _, dv, dbias = reference.backward(case.problem, dout, **arrays, **options)
    assert np.allclose(dv[0, 0], dout[0].sum(axis=0) / 5) and abs(dbias.sum(axis=3)).max() < 1e-12


def test_a_row_of_infinite_bias_sees_its_keys_and_weighs_none():
    case = BackwardCase(dtype="float64", seqlen_q=2, seqlen_k=3, head_dim=4, head_dim_v=2, bias_shape=(2, 1))
    arrays, options = everything(case)
    options["bias"] = np.array([[-np.inf], [0.0]])
    dout = arrays.pop("dout")
    out, lse = reference.forward(case.problem, **arrays, **options)
    assert not out[0, 0].any() and lse[0, 0, 0] == -np.inf and np.isfinite(lse[0, 0, 1])
    gradients = reference.backward(case.problem, dout, **arrays, **options)
    assert all(np.isfinite(x).all() for x in gradients) and not gradients[0][0, 0].any() and gradients[3][0, 0, 0, 0] == 0


def test_a_sink_without_keys_is_the_lse():
    """Rows that see no key, a whole entry without keys, and padding, which has no sink either."""
    case = BackwardCase(
        dtype="float64", batch=3, seqlen_q=4, seqlen_k=5, heads=2, kv_heads=1, with_sinks=True, lengths_q="full", lengths_k="full", with_dlse=True
    )
    arrays, options = everything(case)
    options |= {"sinks": np.array([0.5, -1.0]), "seqlens_q": np.array([4, 2, 0]), "seqlens_k": np.array([5, 0, 3])}
    dout, dlse = arrays.pop("dout"), arrays.pop("dlse")
    out, lse = reference.forward(case.problem, **arrays, **options)
    assert (lse[1, :, :2] == options["sinks"][:, None]).all() and (lse[1, :, 2:] == -np.inf).all() and (lse[2] == -np.inf).all()
    assert not out[1:].any() and out[0].all()
    dq, dk, dv, dsinks = reference.backward(case.problem, dout, **arrays, dlse=dlse, **options)
    assert not any(x[1:].any() for x in (dq, dk, dv))
    only = reference.backward(
        case.problem, np.where(np.arange(3)[:, None, None, None] == 1, dout, 0), **arrays, dlse=dlse * [[[0]], [[1]], [[0]]], **options
    )
    assert np.allclose(only[3], dlse[1, :, :2].sum(axis=1))


def test_lengths_are_shorter_arrays():
    """A batch of padded sequences is its sequences, cut, one by one: every alignment, ALiBi and dropout included."""
    for causal, window in ((True, None), ("top_left", (2, 1)), (False, (3, 0)), (False, None)):
        case = BackwardCase(
            dtype="float64", batch=4, seqlen_q=9, seqlen_k=12, heads=2, kv_heads=1, causal=causal, window=window, alibi_shape=(4, 2), dropout=0.5,
            lengths_q="full", lengths_k="full", with_dlse=True, head_dim=4, head_dim_v=4,
        )  # fmt: skip
        arrays, options = everything(case)
        options |= {"seqlens_q": np.array([9, 4, -3, 2**40]), "seqlens_k": np.array([5, 99, 7, 0])}
        whole = *reference.forward(case.problem, *(arrays[name] for name in "qkv"), **options), *reference.backward(case.problem, **arrays, **options)
        for b, (n, m) in enumerate(((9, 5), (4, 12), (0, 7), (9, 0))):
            one = dataclasses.replace(case, batch=b + 1, seqlen_q=n, seqlen_k=m, alibi_shape=(b + 1, 2), lengths_q=None, lengths_k=None)
            rows, keys = (slice(b + 1), slice(n)), (slice(b + 1), slice(m))
            cut = {
                "dout": arrays["dout"][rows],
                "q": arrays["q"][rows],
                "k": arrays["k"][keys],
                "v": arrays["v"][keys],
                "dlse": arrays["dlse"][: b + 1, :, :n],
            }
            rest = {"alibi_slopes": options["alibi_slopes"][: b + 1], "seed": options["seed"]}
            part = *reference.forward(one.problem, cut["q"], cut["k"], cut["v"], **rest), *reference.backward(one.problem, **cut, **rest)
            for x, y, length, axis in zip(whole, part, (n, n, n, m, m), (0, 1, 0, 0, 0), strict=True):
                x, y = np.moveaxis(x[b], axis, 0), np.moveaxis(y[b], axis, 0)
                assert np.allclose(x[:length], y, atol=1e-14) and not np.where(x[length:] == -np.inf, 0, x[length:]).any()


def test_options_must_be_those_of_the_problem():
    case = BackwardCase(dtype="float64", seqlen_q=2, seqlen_k=3, bias_shape=(2, 3))
    arrays, options = everything(case)
    dout = arrays.pop("dout")
    for wrong in ({}, options | {"sinks": np.zeros(1)}):
        with pytest.raises(ValueError, match="the problem has the options bias; got"):
            reference.forward(case.problem, **arrays, **wrong)
        with pytest.raises(ValueError, match="the problem has the options bias; got"):
            reference.backward(case.problem, dout, **arrays, **wrong)
        with pytest.raises(ValueError, match="the problem has the options bias; got"):
            expected(case.problem, **arrays, **wrong)


@settings(max_examples=50)
@given(problems(max_seqlen=40, work=3000, options=FEATURES))
def test_exact_results_with_options(case):
    """`expected` in torch, by other formulas, is the reference."""
    torch = pytest.importorskip("torch")
    arrays, options = everything(case)
    out, lse = reference.forward(case.problem, **arrays, **options)
    theirs = expected(case.problem, *(torch.from_numpy(x.copy()) for x in arrays.values()), **options)
    limits = expected(make_double(case.problem), **arrays, **options)
    for mine, other, tolerance in ((out, theirs.out, limits.out_tolerance), (lse, theirs.lse, limits.lse_tolerance)):
        other = other.numpy()
        with np.errstate(invalid="ignore"):
            assert ((abs(other - mine) <= tolerance + 1e-300) | (other == mine) | (np.isnan(other) & np.isnan(mine))).all()


@settings(max_examples=50)
@given(backward_problems(max_seqlen=30, work=2000, options=FEATURES))
def test_exact_gradients_with_options(case):
    torch = pytest.importorskip("torch")
    arrays, options = everything(case)
    known = expected_gradients(case.problem, **arrays, **options)
    theirs = expected_gradients(case.problem, **{name: torch.from_numpy(x.copy()) for name, x in arrays.items()}, **options)
    limits = expected_gradients(make_double(case.problem), **arrays, **options)
    for name, gradient in zip(case.problem.gradients, reference.backward(case.problem, **arrays, **options), strict=True):
        assert np.array_equal(getattr(known, f"d{name}"), gradient, equal_nan=True)
        other, tolerance = np.asarray(getattr(theirs, f"d{name}")), getattr(limits, f"d{name}_tolerance")
        assert ((abs(other - gradient) <= tolerance) | (np.isnan(other) & np.isnan(gradient))).all(), name


@settings(max_examples=20)
@given(backward_problems(max_seqlen=30, work=2000, options=FEATURES))
def test_chunks_do_not_matter_to_options(case):
    arrays, options = everything(case)

    def both():
        forward = expected(case.problem, *(arrays[name] for name in "qkv"), **options)
        return forward, expected_gradients(case.problem, **arrays, **options)

    whole, before = both(), arithmetic.CHUNK["numpy"]
    arithmetic.CHUNK["numpy"] = 64
    try:
        parts = both()
    finally:
        arithmetic.CHUNK["numpy"] = before
    for a, b in zip(whole, parts, strict=True):
        for f in dataclasses.fields(a):
            x, y = getattr(a, f.name), getattr(b, f.name)
            if isinstance(x, np.ndarray) and x.dtype != bool:
                assert np.allclose(x, y, rtol=1e-2, atol=1e-300, equal_nan=True), f.name


def test_a_nan_that_is_seen_stays_out_of_what_is_hidden():
    """In the row of a NaN, keys that it does not see, and a NaN sink, which every row within its length sees."""
    case = BackwardCase(dtype="float64", seqlen_q=4, seqlen_k=6, head_dim=4, head_dim_v=2, causal="top_left", with_sinks=True, lengths_q="full")
    arrays, options = everything(case)
    options |= {"seqlens_q": np.array([3])}
    dout = arrays.pop("dout")
    arrays["q"][0, 1, 0, 2] = np.nan
    out, lse = reference.forward(case.problem, **arrays, **options)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1]) and np.isfinite(out[0, [0, 2, 3]]).all() and lse[0, 0, 3] == -np.inf
    _, dk, dv, dsinks = reference.backward(case.problem, dout, **arrays, **options)
    assert np.isnan(dv[0, :2]).all() and np.isfinite(dv[0, 2:]).all() and np.isfinite(dk[0, 2:]).all() and np.isnan(dsinks).all()
    arrays["q"][0, 1, 0, 2], options["sinks"] = 1.0, np.array([np.nan])
    out, lse = reference.forward(case.problem, **arrays, **options)
    assert np.isnan(out[0, :3]).all() and np.isnan(lse[0, 0, :3]).all() and not out[0, 3].any() and lse[0, 0, 3] == -np.inf


def test_gradients_of_an_out_that_is_rounded_near_zero():
    """Dropout drops all but a weight of 1e-6, so that out is below the normal numbers of float16: rounding it alone is within the tolerance."""
    rng = np.random.default_rng(1)
    v, dout = (rng.standard_normal(shape).astype(np.float16).astype(np.float64) for shape in ((1, 2, 1, 154), (1, 1, 1, 154)))
    q, k = np.full((1, 1, 1, 8), 0.0), np.zeros((1, 2, 1, 8))
    q[..., 0], k[0, 0, 0, 0] = 13.6, 1.0
    problem = make_problem(q.shape, k.shape, v.shape, ("float16",) * 3, scale=1.0, dropout=0.5)
    seed, keep = next((n, kept) for n in range(100) if (kept := reference.kept(problem, 0, 0, n, slice(0, 1))[0])[0] == 0 < kept[1])
    known = expected_gradients(problem, dout, q, k, v, seed=seed)
    weights = np.exp([0.0, -13.6]) / np.exp([0.0, -13.6]).sum()
    out = (weights * keep @ v[0, :, 0]).astype(np.float16).astype(np.float64)
    assert 0 < abs(out).max() < 2**-14
    scores = weights * (keep * (v[0, :, 0] @ dout[0, 0, 0]) - dout[0, 0, 0] @ out)
    error = abs(scores @ k[0, :, 0] - known.dq[0, 0, 0])[0] / known.dq_tolerance[0, 0, 0, 0]
    assert 0.01 < error < 0.5
