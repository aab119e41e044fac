"""What attention is, whatever computes it: identities between calls, on every family that can run here.

Two results are compared within the sum of their tolerances (`numbaflash.testing.expected`), or bit for bit where the arithmetic is the same.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from decode_cases import any_case
from hypothesis import assume, given
from hypothesis import strategies as st

import numbaflash
from numbaflash import dispatch
from numbaflash.problem import make_problem
from numbaflash.testing import Case, compare, expected, rounded

LENGTH = st.one_of(st.integers(1, 20), st.sampled_from((63, 64, 65, 127, 128, 129, 176)), st.integers(1, 200))
OPTIONS = st.fixed_dictionaries(
    {
        "scale": st.sampled_from((None, 0.0, -0.2, 0.7)),
        "causal": st.sampled_from((False, True, "top_left")),
        "window": st.one_of(st.none(), st.tuples(st.one_of(st.none(), st.integers(0, 80)), st.one_of(st.none(), st.integers(0, 80)))),
    }
)


@pytest.fixture(scope="session", autouse=True)
def _built(target):
    """Every kernel that a GPU family needs for these properties, built in parallel."""
    bands = ({}, {"causal": True}, {"causal": "top_left", "window": (9, None)}, {"window": (9, 9)}, {"window": (9, None)})
    target.build(
        Case(dtype=dtype, seqlen_q=n, seqlen_k=n, heads=2, kv_heads=kv_heads, head_dim=dim, head_dim_v=dim, scale=scale, give_out=False, **band)
        for dtype, dim, kv_heads, n, scale, band in itertools.product(target.dtypes, (64, 128), (1, 2), (20, 200), (None, -0.2), bands)
    )


@dataclasses.dataclass
class Inputs:
    """q, k and v in float64, as the dtype holds them."""

    dtype: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def __repr__(self):
        return f"{self.dtype}: q {self.q.shape}, k {self.k.shape}, v {self.v.shape}"

    def problem(self, **options):
        return make_problem(self.q.shape, self.k.shape, self.v.shape, (self.dtype,) * 3, **options)

    def expected(self, **options):
        return expected(self.problem(**options), self.q, self.k, self.v)

    def changed(self, **arrays):
        return dataclasses.replace(self, **{name: rounded(x, self.dtype) for name, x in arrays.items()})


@st.composite
def inputs(draw, target, *, grouped=True, min_seqlen=1, dims=(8, 64, 40, 128)):
    dtype = draw(st.sampled_from(target.dtypes))
    lengths, dims = (st.integers(1, 20), (8,)) if target.small else (LENGTH, dims)
    dims = (64, 128) if target.on_gpu else dims
    seqlen_q, seqlen_k = draw(lengths), max(min_seqlen, draw(lengths))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2) if target.on_gpu else (1, 2, 3))) if grouped else 1
    batch, dim = draw(st.integers(1, 2)), draw(st.sampled_from(dims))
    dim_v = dim if target.on_gpu else draw(st.sampled_from(dims))  # each pair is a kernel to compile there
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    shapes = (batch, seqlen_q, kv_heads * group, dim), (batch, seqlen_k, kv_heads, dim), (batch, seqlen_k, kv_heads, dim_v)
    made = Inputs(dtype, *(rounded(rng.standard_normal(shape), dtype) for shape in shapes))
    assume(not dispatch.family(target.family).supports(made.problem(), target.device))
    return made


def forward(target, x, **options):
    return target.forward(x.q, x.k, x.v, x.dtype, **options)


def check(known, out, lse, *, factor=1.0):
    """Within ``factor`` times the tolerances of the exact result."""
    compare(dataclasses.replace(known, out_tolerance=factor * known.out_tolerance, lse_tolerance=factor * known.lse_tolerance), out, lse)


def merged_tolerance(whole, parts):
    """Tolerances of a merge: those of the parts by their share, an error of a part's LSE which shifts shares, and the whole's own."""
    out = 2 * whole.out_tolerance.copy()
    lse = 2 * whole.lse_tolerance.copy()
    for part in parts:
        with np.errstate(invalid="ignore"):
            share = np.where(part.lse == -np.inf, 0.0, np.exp(part.lse - whole.lse))
        lse += share * part.lse_tolerance
        share, shift = np.swapaxes(share, 1, 2)[..., None], np.swapaxes(part.lse_tolerance, 1, 2)[..., None]
        out += share * (part.out_tolerance + shift * (abs(part.out) + abs(whole.out)))
    return dataclasses.replace(whole, out_tolerance=out, lse_tolerance=lse)


@given(data=st.data())
def test_merge_of_any_split_of_the_keys_is_the_whole(target, data):
    """Parts of any size, in any order, empty ones too: the block merge of the online softmax."""
    x = data.draw(inputs(target))
    scale = data.draw(st.sampled_from((None, -0.2)))
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(x.k.shape[1])
    cuts = sorted(data.draw(st.lists(st.integers(0, x.k.shape[1]), max_size=4)))
    parts = [dataclasses.replace(x, k=x.k[:, keys], v=x.v[:, keys]) for keys in np.split(order, cuts)]
    results = [forward(target, part, scale=scale) for part in parts]
    outs = [target.array(out, x.dtype) for out, _ in results]
    lses = [target.array(lse, x.problem().lse_dtype) for _, lse in results]
    out, lse = numbaflash.merge(outs, lses)
    known = merged_tolerance(x.expected(scale=scale), [part.expected(scale=scale) for part in parts])
    compare(known, target.numpy(out), target.numpy(lse))


@given(data=st.data())
def test_merge_under_causal_and_a_right_bound(target, data):
    """Runs of keys under a right bound: the keys that follow a run widen the bound of the run by their number."""
    x = data.draw(inputs(target))
    right = data.draw(st.one_of(st.just(0), st.integers(0, 90)))
    seqlen_k = x.k.shape[1]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, seqlen_k), max_size=3))), seqlen_k]
    runs = list(zip(cuts[:-1], cuts[1:], strict=True))
    results, known = [], []
    for first, last in runs:
        part = dataclasses.replace(x, k=x.k[:, first:last], v=x.v[:, first:last])
        options = {"window": (None, right + seqlen_k - last)}
        results.append(forward(target, part, **options))
        known.append(part.expected(**options))
    outs = [target.array(out, x.dtype) for out, _ in results]
    lses = [target.array(lse, x.problem().lse_dtype) for _, lse in results]
    out, lse = numbaflash.merge(outs, lses)
    compare(merged_tolerance(x.expected(window=(None, right)), known), target.numpy(out), target.numpy(lse))


@given(data=st.data())
def test_shift_of_all_scores(target, data):
    """The same number added to every score of a row leaves ``out`` and shifts ``lse``."""
    x = data.draw(inputs(target, dims=(8, 64, 40)))
    shift = data.draw(st.sampled_from((-40.0, -8.0, 0.5, 8.0, 40.0)))
    options = data.draw(OPTIONS)
    q, k = x.q.copy(), x.k.copy()
    q[..., 0], k[..., 0] = 1, 0
    plain = x.changed(q=q, k=k)
    k[..., 0] = shift
    shifted = x.changed(q=q, k=k)
    base, moved = plain.expected(**options), shifted.expected(**options)
    scale = plain.problem(**options).scale
    out, lse = forward(target, shifted, **options)
    compare(
        dataclasses.replace(
            base,
            out_tolerance=base.out_tolerance + moved.out_tolerance,
            lse=base.lse + scale * shift,
            lse_tolerance=base.lse_tolerance + moved.lse_tolerance,
        ),
        out,
        lse,
    )


@given(data=st.data())
def test_order_of_the_keys_does_not_matter(target, data):
    x = data.draw(inputs(target))
    order = np.random.default_rng(0).permutation(x.k.shape[1])
    out, lse = forward(target, dataclasses.replace(x, k=x.k[:, order], v=x.v[:, order]))
    check(x.expected(), out, lse)


@given(data=st.data())
def test_order_of_the_queries_goes_with_the_rows(target, data):
    x = data.draw(inputs(target))
    order = np.random.default_rng(0).permutation(x.q.shape[1])
    out, lse = forward(target, dataclasses.replace(x, q=x.q[:, order]))
    back = np.argsort(order)
    check(x.expected(), out[:, back], lse[..., back])


@given(data=st.data())
def test_grouped_heads_are_repeated_heads(target, data):
    x = data.draw(inputs(target))
    options = data.draw(OPTIONS)
    group = x.q.shape[2] // x.k.shape[2]
    repeated = dataclasses.replace(x, k=np.repeat(x.k, group, axis=2), v=np.repeat(x.v, group, axis=2))
    known = x.expected(**options)
    check(known, *forward(target, x, **options))
    check(known, *forward(target, repeated, **options))


@given(data=st.data())
def test_rows_sum_to_one(target, data):
    """With v = 1 the result is 1 in every row that sees a key: the weights' own rounding is all that shows."""
    x = data.draw(inputs(target))
    options = data.draw(OPTIONS)
    ones = x.changed(v=np.ones_like(x.v))
    out, lse = forward(target, ones, **options)
    check(ones.expected(**options), out, lse)
    sees = np.swapaxes(lse > -np.inf, 1, 2)
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5, "float64": 1e-13}[x.dtype]
    assert abs(out[sees] - 1).max(initial=0) <= unit and not out[~sees].any()


@given(data=st.data())
def test_keys_of_the_future_do_not_matter(target, data):
    """Under causal, rows that see none of the changed keys stay as they are, bit for bit; NaN in their place changes no number either."""
    x = data.draw(inputs(target, min_seqlen=2))
    causal = data.draw(st.sampled_from((True, "top_left")))
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    first = data.draw(st.integers(1, seqlen_k - 1))
    before = min(seqlen_q, max(0, first - (0 if causal == "top_left" else seqlen_k - seqlen_q)))
    out, lse = forward(target, x, causal=causal)
    k, v = x.k.copy(), x.v.copy()
    k[:, first:], v[:, first:] = -3 * k[:, first:], 100.0
    other_out, other_lse = forward(target, x.changed(k=k, v=v), causal=causal)
    assert (out[:, :before] == other_out[:, :before]).all() and (lse[..., :before] == other_lse[..., :before]).all()
    k[:, first:] = np.nan
    if not getattr(dispatch.family(target.family), "NONFINITE_VALUES_SPREAD", False):
        v[:, first:] = np.nan
    other_out, other_lse = forward(target, x.changed(k=k, v=v), causal=causal)
    known = x.expected(causal=causal)
    rows = dataclasses.replace(
        known,
        out=known.out[:, :before],
        out_tolerance=known.out_tolerance[:, :before],
        lse=known.lse[..., :before],
        lse_tolerance=known.lse_tolerance[..., :before],
    )
    compare(rows, other_out[:, :before], other_lse[..., :before])
    assert np.isnan(other_out[:, before:]).all() and np.isnan(other_lse[..., before:]).all()


@given(data=st.data())
def test_window_is_an_explicit_mask(target, data):
    """Dense softmax in float64 under a mask written down pair by pair."""
    x = data.draw(inputs(target))
    options = data.draw(OPTIONS)
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    place = np.arange(seqlen_q)[:, None] + (0 if options["causal"] == "top_left" else seqlen_k - seqlen_q)
    key = np.arange(seqlen_k)[None, :]
    left, right = options["window"] or (None, None)
    mask = np.ones((seqlen_q, seqlen_k), bool)
    if options["causal"]:
        mask &= key <= place
    if left is not None:
        mask &= key >= place - left
    if right is not None:
        mask &= key <= place + right
    group = x.q.shape[2] // x.k.shape[2]
    k, v = np.repeat(x.k, group, axis=2), np.repeat(x.v, group, axis=2)
    score = x.problem(**options).scale * np.einsum("bihd,bjhd->bhij", x.q, k)
    weight = np.where(mask, np.exp(np.where(mask, score, 0)), 0)
    total = weight.sum(axis=-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    out = np.einsum("bhij,bjhd->bihd", weight / np.where(total == 0, 1, total)[..., None], v)
    known = x.expected(**options)
    check(dataclasses.replace(known, out=out, lse=lse), *forward(target, x, **options), factor=1.01)


@given(data=st.data())
def test_alignments_agree_on_a_square(target, data):
    x = data.draw(inputs(target))
    n = min(x.q.shape[1], x.k.shape[1])
    square = dataclasses.replace(x, q=x.q[:, :n], k=x.k[:, :n], v=x.v[:, :n])
    for a, b in zip(forward(target, square, causal=True), forward(target, square, causal="top_left"), strict=True):
        assert (a == b).all()
    for a, b in zip(forward(target, square, causal=True), forward(target, square, window=(None, 0)), strict=True):
        assert (a == b).all()


@given(data=st.data())
def test_the_same_bits_every_time(target, data):
    x = data.draw(inputs(target))
    options = data.draw(OPTIONS)
    first = forward(target, x, **options)
    for _ in range(3):
        for a, b in zip(first, forward(target, x, **options), strict=True):
            assert (a == b).all()


@given(data=st.data())
def test_scale_of_zero_is_the_mean(target, data):
    x = data.draw(inputs(target))
    causal = data.draw(st.sampled_from((False, "top_left")))
    known = x.expected(scale=0, causal=causal)
    out, lse = forward(target, x, scale=0, causal=causal)
    n = np.minimum(np.arange(1, x.q.shape[1] + 1), x.k.shape[1]) if causal else np.full(x.q.shape[1], x.k.shape[1])
    means = np.cumsum(x.v, axis=1)[:, n - 1] / n[:, None, None]
    group = x.q.shape[2] // x.k.shape[2]
    exact = dataclasses.replace(known, out=np.repeat(means, group, axis=2), lse=np.broadcast_to(np.log(n), known.lse.shape))
    check(exact, out, lse, factor=1.01)


@given(data=st.data())
def test_results_given_are_results_allocated(target, data):
    """The same bits, whether numbaflash allocates them or not."""
    x = data.draw(inputs(target))
    options = data.draw(OPTIONS)
    problem = x.problem(**options)
    out, lse = target.array(np.full(problem.out_shape, np.nan), x.dtype), target.array(np.full(problem.lse_shape, np.nan), problem.lse_dtype)
    own = forward(target, x, **options)
    given_out, given_lse = forward(target, x, out=out, lse=lse, **options)
    assert (own[0] == given_out).all() and (own[1] == given_lse).all()
    assert (target.numpy(out) == given_out).all() and (target.numpy(lse) == given_lse).all()


@given(data=st.data())
def test_batch_entries_and_heads_are_apart(target, data):
    """NaN in one batch entry and one head reaches no other."""
    x = data.draw(inputs(target, grouped=False))
    known = x.expected()
    for axis in (0, 2):
        arrays = {name: getattr(x, name).copy() for name in "qkv"}
        for array in arrays.values():
            array[(slice(None),) * axis + (0,)] = np.nan
        out, lse = forward(target, x.changed(**arrays))
        out, lse = np.take(out, range(1, out.shape[axis]), axis), np.take(lse, range(1, out.shape[axis]), axis // 2)
        rest = [
            np.take(a, range(1, a.shape[i]), i)
            for a, i in ((known.out, axis), (known.lse, axis // 2), (known.out_tolerance, axis), (known.lse_tolerance, axis // 2))
        ]
        compare(dataclasses.replace(known, out=rest[0], lse=rest[1], out_tolerance=rest[2], lse_tolerance=rest[3]), out, lse)


@given(data=st.data())
def test_what_nobody_uses_of_a_cache_changes_no_bit(target, data):
    """In any pages and any number of parts: NaN or a number in slots that no sequence uses."""
    if target.on_gpu:
        pytest.skip("each of these is a kernel to compile; test_gpu_decode has some of all kinds")
    few = {"most_keys": 40, "most_queries": 4, "most_heads": 1} if target.small else {"dtypes": ("float32",)}  # each is a kernel to compile, too
    case = data.draw(any_case(dims=((8, 8),), **few))
    assume(not target.reasons(case.problem, "decode"))
    results = [dataclasses.replace(case, hidden=hidden).run(target.family, target.library) for hidden in (case.hidden, 2.0)]
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


@given(data=st.data())
def test_values_are_taken_linearly(target, data):
    """attention(v) with v doubled is doubled, bit for bit: a power of two changes no rounding."""
    x = data.draw(inputs(target))
    out, lse = forward(target, x)
    twice, same = forward(target, x.changed(v=2 * x.v))
    normal = abs(out) > (1e-4 if x.dtype == "float16" else 0)  # below, float16 rounds to its subnormal grid
    assert (2 * out[normal] == twice[normal]).all() and (lse == same).all()


def test_merge_of_nothing_seen(target):
    """Parts without keys change nothing, whatever their out holds, and a row that no part has a key for is 0 and -inf."""
    dtype = target.dtypes[0]
    lse_dtype = "float64" if dtype == "float64" else "float32"
    rng = np.random.default_rng(0)
    out, lse = rounded(rng.standard_normal((1, 3, 2, 4)), dtype), rounded(rng.standard_normal((1, 2, 3)), lse_dtype)
    lse[0, 0, 0] = -np.inf
    nothing = np.full_like(lse, -np.inf)
    arrays = [target.array(x, dtype) for x in (np.full_like(out, np.nan), out, np.zeros_like(out))]
    lses = [target.array(x, lse_dtype) for x in (nothing, lse, nothing)]
    merged_out, merged_lse = (target.numpy(x) for x in numbaflash.merge(arrays, lses))
    want = out.copy()
    want[0, 0, 0] = 0
    assert (merged_out == want).all() and (merged_lse == lse).all()


def test_merge_needs_parts():
    with pytest.raises(ValueError, match="outs must hold at least one partial result; got none"):
        numbaflash.merge([], [])
