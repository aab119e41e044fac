"""`numbaflash.backward` on every family that can run here: named cases, what Hypothesis finds, and what gradients are whatever computes them.

`numbaflash.testing.run_backward_case` does the checking: accuracy, guard zones, unchanged inputs, the kind of results.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forward import DIMS, GRID, TRANSPOSED
from test_properties import OPTIONS, inputs

import numbaflash
from numbaflash import dispatch, reference
from numbaflash.problem import DTYPES, NEEDS, check_needs
from numbaflash.testing import RECIPES, BackwardCase, Placement, backward_problems, compare_gradients, expected_gradients, rounded, run_backward_case
from numbaflash.testing.arithmetic import PRECISION

GRADIENTS = ("dq", "dk", "dv")
ALONE = {
    "a gradient of lse": dict(seqlen_q=100, seqlen_k=130, heads=2, with_dlse=True, causal=True),
    "deterministic": dict(batch=2, seqlen_q=200, seqlen_k=200, heads=4, kv_heads=2, deterministic=True, causal=True),
    "deterministic, with dlse": dict(seqlen_q=65, seqlen_k=300, deterministic=True, with_dlse=True),
    "dq alone": dict(seqlen_q=130, seqlen_k=130, heads=2, needs=("q",), causal=True),
    "dk alone": dict(seqlen_q=130, seqlen_k=130, heads=2, needs=("k",)),
    "dv alone": dict(seqlen_q=130, seqlen_k=130, heads=2, needs=("v",), causal=True),
    "nothing": dict(seqlen_q=13, seqlen_k=13, needs=()),
    "of a sum": dict(seqlen_q=70, seqlen_k=90, heads=2, dout=Placement(step=(0, 0, 0, 0))),
    "dlse of a sum": dict(seqlen_q=70, seqlen_k=90, heads=2, with_dlse=True, dlse=Placement(step=(0, 0, 0))),
    "head-first gradients": dict(seqlen_q=70, seqlen_k=90, heads=2, kv_heads=2, **dict.fromkeys(("dout", "dq", "dk", "dv"), TRANSPOSED)),
    "packed gradients": dict(seqlen_q=70, seqlen_k=90, heads=2, kv_heads=2, **dict.fromkeys(GRADIENTS, Placement(pad=(0, 0, 4, 0)))),
    "reversed gradients": dict(seqlen_q=70, seqlen_k=90, **dict.fromkeys(GRADIENTS, Placement(step=(1, -2, 1, -1)))),
    "gradients off their alignment": dict(seqlen_q=70, seqlen_k=90, **dict.fromkeys(GRADIENTS, Placement(offset=1))),
    "allocated": dict(seqlen_q=70, seqlen_k=90, give_out=False),
    "very negative lse, partial tiles": dict(seqlen_q=67, seqlen_k=131, values="negative"),
    "very negative lse, one key past a tile": dict(seqlen_q=129, seqlen_k=65, values="negative", causal="top_left"),
    "very negative lse, window": dict(seqlen_q=140, seqlen_k=140, values="negative", window=(33, 5)),
    "nan in rows without keys": dict(seqlen_q=300, seqlen_k=100, causal=True, hidden="nan", with_dlse=True),
    "inf in rows without keys": dict(seqlen_q=150, seqlen_k=40, heads=4, kv_heads=2, window=(10, 10), causal=True, hidden="inf"),
    "few keys are seen": dict(seqlen_q=20, seqlen_k=150, causal="top_left", hidden="nan", values="nan"),
    "few keys are seen, from the left": dict(seqlen_q=20, seqlen_k=150, causal=True, window=(3, None), hidden="nan", values="nan"),
    "few queries see a key": dict(seqlen_q=150, seqlen_k=20, causal="top_left", window=(0, None), hidden="nan", values="nan"),
}  # fmt: skip

CASES = {f"{dtype} {name}": BackwardCase(dtype=dtype, **options) for dtype in DTYPES for name, options in (GRID | ALONE).items()}
CASES |= {
    f"{dtype} head dims {dims[0]}, {dims[1]}": BackwardCase(
        dtype=dtype, seqlen_q=70, seqlen_k=140, heads=2, kv_heads=1, head_dim=dims[0], head_dim_v=dims[1], causal=True
    )
    for dtype in DTYPES
    for dims in DIMS
}
CASES |= {
    f"{dtype} {values} values": BackwardCase(dtype=dtype, seqlen_q=90, seqlen_k=260, heads=2, values=values, causal=True, with_dlse=True, seed=3)
    for dtype in DTYPES
    for values in RECIPES
}


@pytest.fixture(scope="session")
def built(target):
    """The target, its kernels for all named cases built in parallel."""
    target.build(CASES.values())
    return target


@pytest.mark.parametrize("name", CASES)
def test_named(built, name):
    case = CASES[name]
    reasons = built.reasons(case.problem, "backward")
    if reasons and not case.problem.sees_nothing:
        pytest.skip(f"{built.family}: {reasons[0]}")
    built.run(case)


def test_random(target):
    target.run_random(target.problems("backward", work=2**15), examples=60)


@settings(max_examples=25)
@given(case=backward_problems(max_seqlen=100, work=2**13))
def test_torch_on_the_cpu(case):
    pytest.importorskip("torch")
    run_backward_case(case, "cpu", "torch")


# What gradients are

SUBSETS = (("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v"), ("v", "q"))


@pytest.fixture(scope="session", autouse=True)
def _built(target):
    """Every kernel that a GPU family needs for these properties, built in parallel."""
    bands = ({}, {"causal": True}, {"window": (9, 9)}, {"window": (9, None)})
    every = itertools.product(target.dtypes, (64, 128), bands, (False, True), (False, True), (NEEDS,))
    some = itertools.product(target.dtypes, (64, 128), bands[:2], (True,), (False, True), (n for n in SUBSETS if n == check_needs(n)))
    target.build(
        BackwardCase(
            dtype=dtype,
            seqlen_q=n,
            seqlen_k=n,
            heads=2,
            kv_heads=kv_heads,
            head_dim=dim,
            head_dim_v=dim,
            give_out=False,
            deterministic=deterministic,
            with_dlse=with_dlse,
            needs=needs,
            **band,
        )
        for dtype, dim, band, deterministic, with_dlse, needs in itertools.chain(every, some)
        for n in (20, 200)
        for kv_heads in (1, 2)
    )


@dataclasses.dataclass(repr=False)
class Backward:
    """A backward problem in float64, as the dtype holds it, with exact out and lse."""

    inputs: object
    options: dict
    dout: np.ndarray
    dlse: np.ndarray | None
    out: np.ndarray
    lse: np.ndarray

    def __repr__(self):
        return f"{self.inputs!r}, {self.options}{', dlse' if self.dlse is not None else ''}"

    @property
    def dtype(self):
        return self.inputs.dtype

    @property
    def problem(self):
        return self.inputs.problem(**self.options)

    def run(self, target, **options):
        x = self.inputs
        return target.backward(self.dout, x.q, x.k, x.v, self.out, self.lse, x.dtype, dlse=self.dlse, **self.options, **options)

    def expected(self):
        return expected_gradients(self.problem, self.dout, self.inputs.q, self.inputs.k, self.inputs.v, self.dlse)


@st.composite
def backwards(draw, target, *, options=OPTIONS, **more):
    x = draw(inputs(target, **more))
    options = draw(options)
    problem = x.problem(**options)
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    dout = rounded(rng.standard_normal(problem.out_shape), x.dtype)
    dlse = rounded(rng.standard_normal(problem.lse_shape), problem.lse_dtype) if draw(st.booleans()) else None
    out, lse = reference.forward(problem, x.q, x.k, x.v)
    return Backward(x, options, dout, dlse, rounded(out, x.dtype), rounded(lse, problem.lse_dtype))


def check(known, gradients, **extra):
    """Within the tolerances and an ``extra`` array for some of the gradients."""
    more = {f"{name}_tolerance": getattr(known, f"{name}_tolerance") + extra[name] for name in extra}
    compare_gradients(dataclasses.replace(known, **more), *gradients)


def same(one, other):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


@given(data=st.data())
def test_finite_differences(target, data):
    """The derivative of sum(dout * out) + sum(dlse * lse) along a direction, by central differences of the family's own forward."""
    if "float64" not in target.dtypes:
        pytest.skip("finite differences need float64")
    x = data.draw(backwards(target, dims=(8, 5)).filter(lambda x: x.dtype == "float64"))
    given_ = {name: getattr(x.inputs, name) for name in NEEDS}

    def loss(**moved):
        arrays = given_ | moved
        out, lse = target.forward(arrays["q"], arrays["k"], arrays["v"], "float64", **x.options)
        return (x.dout * out).sum() + (0 if x.dlse is None else (x.dlse * np.where(np.isfinite(lse), lse, 0)).sum())

    gradients = x.run(target)
    rng = np.random.default_rng(0)
    for name, gradient in zip(NEEDS, gradients, strict=True):
        along = rng.standard_normal(gradient.shape)
        along /= np.sqrt((along**2).sum())
        step = 1e-4
        slope = (loss(**{name: given_[name] + step * along}) - loss(**{name: given_[name] - step * along})) / (2 * step)
        size = 1 + np.sqrt((gradient**2).sum())
        assert abs(slope - (gradient * along).sum()) <= 1e-5 * size, name


@given(data=st.data())
def test_gradients_of_parts_of_the_keys_add_up(target, data):
    """With out and lse of the whole, each part's dk and dv are those of its keys, and the dq add up: parts of any size, in any order."""
    x = data.draw(backwards(target, options=st.fixed_dictionaries({"scale": st.sampled_from((None, -0.2))})))
    dlse, x.dlse = x.dlse, None
    seqlen_k = x.inputs.k.shape[1]
    order = np.random.default_rng(0).permutation(seqlen_k)
    cuts = sorted(data.draw(st.lists(st.integers(0, seqlen_k), max_size=3)))
    dq, dk, dv = np.zeros(x.problem.q_shape), np.full(x.problem.k_shape, np.nan), np.full(x.problem.v_shape, np.nan)
    rounding = np.zeros_like(dq)
    for keys in np.split(order, cuts):
        part = dataclasses.replace(x, inputs=dataclasses.replace(x.inputs, k=x.inputs.k[:, keys], v=x.inputs.v[:, keys]), dlse=dlse)
        part_dq, dk[:, keys], dv[:, keys] = part.run(target)
        dq += part_dq
        rounding += 2 * PRECISION[x.dtype].unit * abs(part_dq)
    whole = dataclasses.replace(x, dlse=dlse)
    known = whole.expected()
    check(known, (dq, dk, dv), dq=rounding + (len(cuts) + 1) * known.dq_tolerance)


@given(data=st.data())
def test_gradients_through_a_merge(target, data):
    """forward on parts, merge, backward on parts with what was merged: the gradients of attention over all keys."""
    if not {"float32", "float64"} & set(target.dtypes):
        pytest.skip("16-bit results are rounded on the way")
    x = data.draw(backwards(target, options=st.just({})).filter(lambda x: x.dtype in ("float32", "float64")))
    cuts = [x.inputs.k.shape[1] // 3, x.inputs.k.shape[1] // 2]
    q, dout = (target.array(a, x.dtype) for a in (x.inputs.q, x.dout))
    keys, values = ([target.array(part, x.dtype) for part in np.split(a, cuts, axis=1)] for a in (x.inputs.k, x.inputs.v))
    pieces = list(zip(keys, values, strict=True))
    dlse = None if x.dlse is None else target.array(x.dlse, x.problem.lse_dtype)
    with dispatch.use_family(target.family):
        out, lse = numbaflash.merge(*zip(*(numbaflash.forward(q, *piece, return_lse=True) for piece in pieces), strict=True))
        gradients = [numbaflash.backward(dout, q, *piece, out, lse, dlse=dlse) for piece in pieces]
    got = sum(target.numpy(g[0]) for g in gradients), *(np.concatenate([target.numpy(g[n]) for g in gradients], axis=1) for n in (1, 2))
    known = x.expected()
    for name, mine in zip(GRADIENTS, got, strict=True):
        exact = getattr(known, name)
        tolerance = {"float32": 2e-4, "float64": 1e-11}[x.dtype]
        assert np.allclose(mine, exact, rtol=tolerance, atol=tolerance * (1 + abs(exact).max())), name


@given(data=st.data())
def test_grouped_heads_are_repeated_heads_summed(target, data):
    x = data.draw(backwards(target))
    group = x.problem.group
    repeated = dataclasses.replace(x.inputs, k=np.repeat(x.inputs.k, group, axis=2), v=np.repeat(x.inputs.v, group, axis=2))
    dq, dk, dv = dataclasses.replace(x, inputs=repeated).run(target)

    def summed(gradient):
        return gradient.reshape(*gradient.shape[:2], -1, group, gradient.shape[3]).sum(axis=3)

    known = x.expected()
    check(known, x.run(target))
    unit = 2 * PRECISION[x.dtype].unit
    check(known, (dq, summed(dk), summed(dv)), dk=unit * summed(abs(dk)) + known.dk_tolerance, dv=unit * summed(abs(dv)) + known.dv_tolerance)


@given(data=st.data())
def test_rows_without_keys_have_no_gradient(target, data):
    """Whatever q, dout, out and dlse hold in them; and keys that nobody sees likewise."""
    x = data.draw(backwards(target))
    seen = reference.visible(x.problem)
    rows, keys = ~seen.any(axis=1), ~seen.any(axis=0)
    plain = x.run(target, deterministic=True)
    assert not plain[0][:, rows].any() and not plain[1][:, keys].any() and not plain[2][:, keys].any()
    poison = data.draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    arrays = {name: getattr(x.inputs, name).copy() for name in NEEDS}
    dout, out, dlse = x.dout.copy(), x.out.copy(), None if x.dlse is None else x.dlse.copy()
    for array, hidden in ((arrays["q"], rows), (dout, rows), (out, rows), (arrays["k"], keys), (arrays["v"], keys)):
        array[:, hidden] = poison
    if dlse is not None:
        dlse[..., rows] = poison
    poisoned = dataclasses.replace(x, inputs=dataclasses.replace(x.inputs, **arrays), dout=dout, out=out, dlse=dlse)
    compare_gradients(x.expected(), *poisoned.run(target))


@given(data=st.data())
def test_needs_choose_and_change_nothing(target, data):
    """Every subset gives the bits of the full call, and None for the rest."""
    x = data.draw(backwards(target, options=st.sampled_from(({}, {"causal": True}))))
    full = x.run(target, deterministic=True)
    for needs in SUBSETS:
        some = x.run(target, deterministic=True, needs=needs)
        for name, mine, whole in zip(NEEDS, some, full, strict=True):
            assert (mine is None) == (name not in needs)
            assert mine is None or (mine == whole).all(), (needs, name)


@given(data=st.data())
def test_the_same_bits_every_time(target, data):
    x = data.draw(backwards(target))
    first = x.run(target, deterministic=True)
    for _ in range(4):
        assert same(first, x.run(target, deterministic=True))


@given(data=st.data())
def test_gradients_are_linear_in_those_of_the_results(target, data):
    """dout and dlse doubled double every gradient, bit for bit: a power of two changes no rounding."""
    x = data.draw(backwards(target))
    twice = dataclasses.replace(x, dout=2 * x.dout, dlse=None if x.dlse is None else 2 * x.dlse)
    for mine, doubled in zip(x.run(target, deterministic=True), twice.run(target, deterministic=True), strict=True):
        if x.dtype == "float16":  # below, it rounds to its subnormal grid
            assert np.allclose(2 * mine, doubled, rtol=2**-8, atol=2**-12 * (1 + abs(doubled).max(initial=0)))
        else:
            assert (2 * mine == doubled).all()


@given(data=st.data())
def test_a_broadcast_dout_is_its_copy(target, data):
    x = data.draw(backwards(target))
    q, k, v, out = (target.array(a, x.dtype) for a in (x.inputs.q, x.inputs.k, x.inputs.v, x.out))
    lse = target.array(x.lse, x.problem.lse_dtype)
    one = target.array(np.full((1, 1, 1, 1), 0.5), x.dtype)
    whole = target.array(np.full(x.problem.out_shape, 0.5), x.dtype)
    spread = one.expand(whole.shape) if target.library.startswith("torch") else _broadcast(one, whole.shape)
    known = dataclasses.replace(x, dout=np.full(x.problem.out_shape, 0.5), dlse=None).expected()
    for dout in (spread, whole):
        with dispatch.use_family(target.family):
            compare_gradients(known, *numbaflash.backward(dout, q, k, v, out, lse, **x.options))


def _broadcast(array, shape):
    if type(array).__module__.startswith("cupy"):
        import cupy

        return cupy.broadcast_to(array, shape)
    if isinstance(array, np.ndarray):
        return np.broadcast_to(array, shape)
    pytest.skip(f"{type(array).__name__} has no broadcast views")


@given(data=st.data())
def test_a_sum_of_gradients(target, data):
    """Shifting all scores of a row shifts lse alone, so what dq does along the shift is what dlse says: sum_j of ds is dlse."""
    x = data.draw(backwards(target, dims=(8, 64)))
    k = x.inputs.k.copy()
    k[..., 0] = 1
    moved = x.inputs.changed(k=k)
    out, lse = reference.forward(moved.problem(**x.options), moved.q, moved.k, moved.v)
    y = dataclasses.replace(x, inputs=moved, out=rounded(out, x.dtype), lse=rounded(lse, x.problem.lse_dtype))
    dq, _, _ = y.run(target)
    known = y.expected()
    dlse = np.zeros(y.problem.lse_shape) if y.dlse is None else y.dlse
    want = np.where(lse == -np.inf, 0, y.problem.scale * dlse).swapaxes(1, 2)
    assert (abs(dq[..., 0] - want) <= known.dq_tolerance[..., 0] + 1e-12).all()


def test_threads_do_not_disturb_each_other(target):
    """Several threads, each with problems of its own, at once: workspaces are apart."""
    cases = [
        BackwardCase(dtype=target.dtypes[0], seqlen_q=60 + 7 * n, seqlen_k=100, heads=2, causal=bool(n % 2), deterministic=n > 1, seed=n)
        for n in range(4)
    ]
    target.run_in_threads(cases)
