"""Packed sequences: the meaning, the errors, the CPU's kernels against the reference, and the libraries."""

from __future__ import annotations

import numpy as np
import packed_cases
import pytest
from conftest import PROFILE
from hypothesis import given
from hypothesis import strategies as st

import numbaflash
from numbaflash import dispatch, reference
from numbaflash.kernels.simt import grid
from numbaflash.problem import check_boundaries, make_packed_problem, make_problem
from numbaflash.testing.strategies import OF_SEQUENCES, PACKED


def problem_of(q=(12, 4, 8), k=(11, 2, 8), v=(11, 2, 6), n=3, dtypes=("float64",) * 3, kinds=("int32", "int64"), **options):
    shapes = {"cu_seqlens_q": ((n + 1,), kinds[0]), "cu_seqlens_k": ((n + 1,), kinds[1])}
    return make_packed_problem(q, k, v, dtypes, **shapes | options)


# What is computed


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top_left"}, {"window": (2, 1)}])
def test_each_sequence_is_attention_by_itself(options):
    rng = np.random.default_rng(0)
    problem = problem_of(**options)
    q, k, v, dout = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape))
    ends_q, ends_k = np.array([0, 3, 3, 10]), np.array([0, 5, 9, 9])
    told = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    out, lse = reference.forward(problem, q, k, v, **told)
    gradients = reference.backward(problem, dout, q, k, v, **told)
    for b in range(3):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        alone = [x[None] for x in (q[rows], k[keys], v[keys])]
        one = make_problem(*(x.shape for x in alone), ("float64",) * 3, **options)
        wanted, wanted_lse = reference.forward(one, *alone)
        np.testing.assert_allclose(out[rows], wanted[0])
        np.testing.assert_allclose(lse[:, rows], wanted_lse[0])
        for part, got, want in zip((rows, keys, keys), gradients, reference.backward(one, dout[rows][None], *alone), strict=True):
            np.testing.assert_allclose(got[part], want[0], atol=1e-12)
    assert (out[10:] == 0).all() and (lse[:, 10:] == -np.inf).all()
    assert all((x[end:] == 0).all() for x, end in zip(gradients, (10, 9, 9), strict=True))


def test_packed_is_padded():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 7, 2, 8), dtype=np.float32) for _ in range(3))
    lengths, ends = np.array([4, 7]), np.array([0, 4, 11])
    out, lse = numbaflash.forward(q, k, v, seqlens_q=lengths, seqlens_k=lengths, causal=True, return_lse=True)
    rows = [np.concatenate([x[0, :4], x[1]]) for x in (q, k, v)]
    packed_out, packed_lse = numbaflash.forward_varlen(*rows, ends, ends, causal=True, return_lse=True)
    np.testing.assert_allclose(packed_out, np.concatenate([out[0, :4], out[1]]), atol=1e-6)
    np.testing.assert_allclose(packed_lse, np.concatenate([lse[0, :, :4], lse[1]], axis=1), atol=1e-6)


@given(st.lists(st.integers(-20, 40), min_size=1, max_size=6), st.integers(0, 30))
def test_boundaries_of_any_numbers(numbers, total):
    bounds = reference.boundaries(numbers, total)
    assert (np.diff(bounds) >= 0).all() and bounds[0] >= 0 and bounds[-1] <= total
    if sorted(numbers) == numbers:
        assert bounds.tolist() == [min(max(n, 0), total) for n in numbers]


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 9), st.integers(0, 9), st.sampled_from((1, 2, 8, 64)))
def test_numbers_of_tiles(lengths, before, after, tile):
    """No two tiles of the simt kernels have one number, and the grid has them all."""
    bounds = np.concatenate([[0, before], before + np.cumsum(lengths, dtype=int), [before + sum(lengths) + after]])
    entries = enumerate(zip(bounds, bounds[1:], strict=False))
    numbers = [first // tile + e + t for e, (first, end) in entries for t in range(-(-(end - first) // tile))]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= n < grid.most_tiles(int(bounds[-1]), len(lengths), tile) for n in numbers)


def test_a_problem_of_sequences():
    problem = problem_of(causal=True)
    assert problem.packed and problem.batch == 3 and problem.offset_per_entry
    assert (problem.seqlen_q, problem.seqlen_k) == (4, 4)
    assert (problem.lse_shape, problem.out_shape) == ((4, 12), (12, 4, 6))
    assert problem.features == ("packed sequences",) and problem.options == ("cu_seqlens_q", "cu_seqlens_k")
    assert (problem_of(max_seqlen_q=7, max_seqlen_k=99).seqlen_q, problem_of(max_seqlen_k=99).seqlen_k) == (7, 11)
    assert (problem_of(max_seqlen_q=0, max_seqlen_k=0).seqlen_q, problem_of(q=(0, 4, 8), max_seqlen_q=0).seqlen_q) == (1, 0), "rows are of a sequence"
    assert problem_of(q=(0, 4, 8)).is_empty and problem_of(n=0).sees_nothing and not problem_of(n=0).is_empty
    plain = problem_of(window=(11, 12))
    assert plain.left is None and plain.right is None and not plain.offset_per_entry, "bounds that exclude nothing cost nothing"


# Errors


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"q": (1, 12, 4, 8)}, ValueError, r"q must have 3 axes \(total_q, heads, head_dim\); got 4 axes"),
        ({"k": (11, 2, 9)}, ValueError, r"k must have the same head_dim \(axis 2\) as q; got 9, expected 8"),
        ({"v": (10, 2, 8)}, ValueError, r"v must have the same total_k \(axis 0\) as k; got 10, expected 11"),
        ({"k": (11, 3, 8), "v": (11, 3, 8)}, ValueError, "heads of q must be a multiple of the heads of k and v"),
        ({"cu_seqlens_q": ((5,), "int32")}, ValueError, r"one shape, \(batch \+ 1,\); got \(5,\) and \(4,\)"),
        ({"cu_seqlens_k": ((4, 1), "int32")}, ValueError, r"cu_seqlens_k must have shape \(batch \+ 1,\): where each sequence begins"),
        ({"cu_seqlens_k": ((0,), "int32")}, ValueError, r"cu_seqlens_k must have shape \(batch \+ 1,\)"),
        ({"cu_seqlens_q": ((4,), "float32")}, TypeError, "cu_seqlens_q must be int32 or int64; got dtype float32"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must not be negative"),
        ({"max_seqlen_k": 2.0}, TypeError, "max_seqlen_k must be an integer or None"),
        ({"alibi_slopes": ((2, 4), "float32")}, ValueError, r"\(batch, heads\) = \(3, 4\); got \(2, 4\)"),
        ({"v": (11, 2, 300)}, ValueError, r"v must have a head dim \(axis 2\) from 1 to 256; got 300"),
    ],
)
def test_errors(changes, kind, message):
    with pytest.raises(kind, match=message):
        problem_of(**changes)


@pytest.mark.parametrize(
    ("values", "longest", "message"),
    [
        ([1, 5, 9], None, "cu_seqlens_q must begin with 0; got 1"),
        ([0, 5, 4], None, r"must not descend; got 5 followed by 4 \(elements 1 and 2\)"),
        ([0, 5, 13], None, "cu_seqlens_q must end within the 12 rows of q; got 13"),
        ([0, 5, 12], 6, "max_seqlen_q must be at least the longest length; got 6, and sequence 1 has 7"),
    ],
)
def test_values_are_checked_on_demand(values, longest, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        check_boundaries("cu_seqlens_q", values, 12, longest)
    q = np.zeros((12, 1, 8), np.float32)
    ends = np.array([0, 5, 12])
    numbaflash.forward_varlen(q, q, q, np.array(values), ends, max_seqlen_q=longest)
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        numbaflash.forward_varlen(q, q, q, np.array(values), ends, max_seqlen_q=longest)
    with pytest.raises(ValueError, match=message):
        numbaflash.backward_varlen(q, q, q, q, q, np.zeros((1, 12), np.float32), np.array(values), ends, max_seqlen_q=longest)
    numbaflash.forward_varlen(q, q, q, ends, ends, max_seqlen_q=7)


def test_values_of_keys_are_checked_too(monkeypatch):
    q, k, ends = np.zeros((12, 1, 8), np.float32), np.zeros((9, 1, 8), np.float32), np.array([0, 5, 12])
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    for numbers, message in (
        ([0, 5, 10], "cu_seqlens_k must end within the 9 rows of k and v; got 10"),
        ([0, 7, 5], r"cu_seqlens_k must not descend; got 7 followed by 5 \(elements 1 and 2\)"),
        ([-1, 5, 9], "cu_seqlens_k must begin with 0; got -1"),
    ):
        for dtype in (np.int32, np.int64):
            for function in (numbaflash.forward_varlen, numbaflash.attention_varlen):
                with pytest.raises(ValueError, match=message):
                    function(q, k, k, ends, np.array(numbers, dtype))


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "cu_seqlens_q must be int32 or int64; got dtype float32", {"cu_seqlens_q": np.array([0, 5, 12], np.float32)}),
        (TypeError, "cu_seqlens_k must be int32 or int64; got dtype bool", {"cu_seqlens_k": np.array([0, 1, 1], bool)}),
        (
            ValueError,
            r"alibi_slopes must have shape \(heads,\) = \(1,\) or .* = \(2, 1\); got \(3, 1\)",
            {"alibi_slopes": np.ones((3, 1), np.float32)},
        ),
        (ValueError, r"sinks must have shape \(heads,\) = \(1,\); got \(2,\)", {"sinks": np.zeros(2, np.float32)}),
        (ValueError, "dropout must be at least 0 and below 1; got 1.0", {"dropout": 1.0, "seed": 1}),
        (ValueError, r"seed must be at least 0 and below 2\*\*64; got 18446744073709551616", {"dropout": 0.5, "seed": 2**64}),
    ],
)
def test_bad_input_is_told_at_every_entry(error, message, options):
    q, ends = np.zeros((12, 1, 8), np.float32), np.array([0, 5, 12])
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} | options
    saved = (q, q, q, q, q, np.zeros((1, 12), np.float32))
    for function, arrays in (
        (numbaflash.forward_varlen, (q, q, q)),
        (numbaflash.attention_varlen, (q, q, q)),
        (numbaflash.backward_varlen, saved),
        (numbaflash.explain, (q, q, q)),
    ):
        with pytest.raises(error, match=message):
            function(*arrays, **options)


def test_errors_of_a_call():
    q, ends = np.zeros((12, 1, 8), np.float32), np.array([0, 5, 12])
    with pytest.raises(TypeError, match="cu_seqlens_q must be an array of NumPy"):
        numbaflash.forward_varlen(q, q, q, [0, 5, 12], ends)
    with pytest.raises(TypeError, match="cu_seqlens_k must be an array of int32 or int64"):
        numbaflash.forward_varlen(q, q, q, ends, None)
    with pytest.raises(ValueError, match="dropout needs a seed"):
        numbaflash.forward_varlen(q, q, q, ends, ends, dropout=0.5)
    with pytest.raises(ValueError, match=r"out must have shape \(12, 1, 8\)"):
        numbaflash.forward_varlen(q, q, q, ends, ends, out=q[None])
    with pytest.raises(TypeError, match=r"lse is missing.*forward_varlen"):
        numbaflash.backward_varlen(q, q, q, q, q, None, ends, ends)
    with pytest.raises(ValueError, match='dk was given, but "k" is not in needs'):
        numbaflash.backward_varlen(q, q, q, q, q, np.zeros((1, 12), np.float32), ends, ends, dk=q.copy(), needs=("q",))
    with dispatch.use_family("sm90"), pytest.raises(numbaflash.UnsupportedError, match="sm90: it needs a Hopper GPU"):
        numbaflash.forward_varlen(q, q, q, ends, ends)


def test_explain():
    q, ends = np.zeros((12, 1, 8), np.float32), np.array([0, 5, 12])
    told = numbaflash.explain(q, q, q, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=7)
    assert told.plan.family == "cpu" and "it needs a Hopper GPU" in str(told.families["sm90"])
    assert "cu_seqlens_q  int64 (3,)" in str(told) and "query i sees keys j <= i + length_k - length_q" in str(told)
    backward = numbaflash.explain(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, direction="backward")
    assert backward.plan.direction == "backward"
    with pytest.raises(ValueError, match="need both cu_seqlens_q and cu_seqlens_k; got cu_seqlens_k, max_seqlen_q alone"):
        numbaflash.explain(q, q, q, cu_seqlens_k=ends, max_seqlen_q=3)
    with pytest.raises(ValueError, match="packed sequences have no mask, seqlens_q; leave them out"):
        numbaflash.explain(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, mask=ends, seqlens_q=ends)


# The kernels of the CPU, and of every family


# Compiling is what takes time here: of single options, the simulator of the simt kernels has the cases.
@pytest.mark.parametrize("name", [name for name in packed_cases.CASES if name not in ("softcap", "alibi", "dropout")])
def test_named(name):
    packed_cases.run(packed_cases.CASES[name], "cpu")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_random(target, direction):
    """Half of the cases are packed. On the CPU, whose compiler takes longest, they have no options and one dtype unless ``fuzz`` is the profile."""
    everything = target.on_gpu or PROFILE == "fuzz"
    bounds = {"options": (PACKED, *OF_SEQUENCES)} if everything else {"options": (PACKED,), "dtypes": ("float32",)}
    target.run_random(target.problems(direction, work=2**14, **bounds), examples=60)


def test_empty():
    ends, none = np.array([0, 0, 0]), np.zeros((0, 2, 8), np.float32)
    keys = np.ones((5, 2, 8), np.float32)
    out, lse = numbaflash.forward_varlen(none, keys, keys, ends, np.array([0, 5, 5]), return_lse=True)
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)
    gradients = numbaflash.backward_varlen(out, none, keys, keys, out, lse, ends, np.array([0, 5, 5]))
    assert [x.shape for x in gradients] == [(0, 2, 8), (5, 2, 8), (5, 2, 8)] and not any(x.any() for x in gradients)


# The libraries


def inputs(n=12):
    rng = np.random.default_rng(3)
    return [rng.standard_normal((n, heads, 16), dtype=np.float32) for heads in (4, 2, 2)]


def gradients_by_hand(q, k, v, ends, **options):
    out, lse = numbaflash.forward_varlen(q, k, v, ends, ends, return_lse=True, **options)
    return out, lse, numbaflash.backward_varlen(np.cos(out), q, k, v, out, lse, ends, ends, **options)


@pytest.mark.parametrize("compiled", [False, True])
def test_torch(compiled):
    torch = pytest.importorskip("torch")
    ends, weight = np.array([0, 5, 5, 11], np.int32), np.linspace(-1, 1, 4, dtype=np.float32)
    options = {"causal": True, "sinks": weight, "max_seqlen_q": 6}
    out, lse = numbaflash.forward_varlen(*inputs(), ends, ends, return_lse=True, **options)
    wanted = numbaflash.backward_varlen(np.cos(out), *inputs(), out, lse, ends, ends, needs=("q", "k", "v", "sinks"), **options)
    arrays = [torch.tensor(x, requires_grad=True) for x in (*inputs(), weight)]

    def attend(q, k, v, sinks, ends):
        return numbaflash.attention_varlen(q, k, v, ends, ends, causal=True, sinks=sinks, max_seqlen_q=6, return_lse=True)

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    found, found_lse = run(*arrays, torch.tensor(ends))
    np.testing.assert_array_equal(found.detach().numpy(), out)
    np.testing.assert_array_equal(found_lse.detach().numpy(), lse)
    found.sin().sum().backward()
    for x, want in zip(arrays, wanted, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), want, atol=1e-6)


def test_torch_records():
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    arrays, ends = [torch.tensor(x) for x in inputs()], torch.tensor([0, 5, 12])
    want = numbaflash.forward_varlen(*arrays, ends, ends, causal=True)
    graph = make_fx(lambda *x: numbaflash.forward_varlen(*x, causal=True))(*arrays, ends, ends)
    assert torch.equal(graph(*arrays, ends, ends), want)
    broken = torch.compile(lambda *x: numbaflash.forward_varlen(*x, causal=True), backend="eager")
    assert torch.equal(broken(*arrays, ends, ends), want)
    meta = [x.to("meta") for x in (*arrays, ends, ends)]
    assert [tuple(x.shape) for x in numbaflash.attention_varlen(*meta, return_lse=True)] == [(12, 4, 16), (4, 12)]
    with pytest.raises(ValueError, match="q must have 3 axes"):
        numbaflash.attention_varlen(meta[0][None], *meta[1:])
    with pytest.raises(TypeError, match="cu_seqlens_k must be a torch tensor"):
        numbaflash.torch.attention_varlen(*arrays, ends, None)


def test_torch_gradients_against_differences():
    torch = pytest.importorskip("torch")
    arrays, ends = [torch.tensor(x[:7, :, :4].astype(np.float64), requires_grad=True) for x in inputs()], torch.tensor([0, 3, 7])
    assert torch.autograd.gradcheck(lambda *x: numbaflash.attention_varlen(*x, ends, ends, causal=True, return_lse=True), arrays)


def test_jax():
    jax = pytest.importorskip("jax")
    ends = np.array([0, 5, 5, 11], np.int32)
    out, lse, wanted = gradients_by_hand(*inputs(), ends, causal=True)
    arrays = [*map(jax.numpy.asarray, inputs()), jax.numpy.asarray(ends)]

    def attend(q, k, v, ends):
        return numbaflash.attention_varlen(q, k, v, ends, ends, causal=True, return_lse=True)

    for run in (attend, jax.jit(attend), jax.jit(lambda q, k, v, ends: numbaflash.forward_varlen(q, k, v, ends, ends, causal=True, return_lse=True))):
        found, found_lse = run(*arrays)
        np.testing.assert_array_equal(found, out)
        np.testing.assert_array_equal(found_lse, lse)
    found = jax.jit(jax.grad(lambda *x: jax.numpy.sin(attend(*x)[0]).sum(), (0, 1, 2)))(*arrays)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    others = jax.numpy.asarray([ends, [0, 3, 8, 12]], np.int32)
    each = jax.vmap(attend, (None, None, None, 0))(*arrays[:3], others)[0]
    for got, rows in zip(each, others, strict=True):
        np.testing.assert_array_equal(got, numbaflash.forward_varlen(*inputs(), np.array(rows), np.array(rows), causal=True))
    with pytest.raises(TypeError, match="cu_seqlens_k must be a JAX array"):
        numbaflash.jax.attention_varlen(*arrays, [0, 5])


def test_lent_memory(monkeypatch):
    class Lent:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    ends = np.array([0, 5, 12])
    want = numbaflash.forward_varlen(*inputs(), ends, ends, causal=True)
    np.testing.assert_array_equal(numbaflash.forward_varlen(*map(Lent, (*inputs(), ends, ends)), causal=True), want)
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q must begin with 0; got 1"):
        numbaflash.forward_varlen(*map(Lent, (*inputs(), ends + 1, ends)))
    np.testing.assert_array_equal(numbaflash.attention_varlen(*inputs(), ends, ends, causal=True), want)


# ---- torch's nested tensors


def jagged(torch, lengths, heads=2, **options):
    parts = [torch.randn(n, heads, 16) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, **options)


def test_nested_tensors_are_packed_sequences():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k = jagged(torch, (3, 0, 5), heads=4, requires_grad=True), jagged(torch, (4, 2, 6), requires_grad=True)
    v = torch.nested.nested_tensor_from_jagged(torch.randn(12, 2, 16), k.offsets())
    slopes = torch.rand(4)
    out, lse = numbaflash.attention(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True)
    values, ends = [x.detach().values().requires_grad_() for x in (q, k)], (q.offsets(), k.offsets())
    wanted, wanted_lse = numbaflash.attention_varlen(*values, v.values(), *ends, causal=True, alibi_slopes=slopes, return_lse=True)
    assert out.shape == q.shape and torch.equal(out.values(), wanted) and torch.equal(lse, wanted_lse)
    weights = torch.randn(8, 4, 16)
    (out.values() * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert torch.equal(q.grad.values(), values[0].grad) and torch.equal(k.grad.values(), values[1].grad)


def test_nested_tensors_that_are_refused():
    torch = pytest.importorskip("torch")
    q, other = jagged(torch, (3, 5)), jagged(torch, (3, 5))
    strided = torch.nested.nested_tensor([torch.randn(3, 2, 16)])
    attention = numbaflash.attention
    for call, kind, message in (
        (lambda: attention(strided, strided, strided), TypeError, r"layout=torch.jagged, as q, k and v are all or none; got .* layout=torch.strided"),
        (lambda: attention(q, q, other), ValueError, "v must have the sequence lengths of k, made from the same offsets"),
        (lambda: attention(q.transpose(1, 2), q, q), ValueError, r"q must have the axes \(batch, ragged sequence, heads, head_dim\)"),
        (lambda: attention(q, q, q, mask=torch.ones(1, dtype=bool)), ValueError, "mask is not for nested tensors"),
        (lambda: attention(q, q, q.values()), TypeError, "must come from one array library"),
        (lambda: numbaflash.forward(q, q, q), TypeError, "which numbaflash.attention takes alone. Call forward_varlen"),
        (lambda: numbaflash.explain(q, q, q), TypeError, "which numbaflash.attention takes alone"),
    ):
        with pytest.raises(kind, match=message):
            call()
