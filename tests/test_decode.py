"""`numbaflash.decode`: the meaning, the errors, every family against the reference, and the libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
from attention import TOLERANCE, assert_close
from decode_cases import CASES, DecodeCase
from hypothesis import given
from hypothesis import strategies as st

import numbaflash
from numbaflash import dispatch, reference
from numbaflash.dispatch import CPU
from numbaflash.problem import PAGE_TABLE, make_decode_problem, make_problem
from numbaflash.support import contiguous_layouts

HERE = "every family that can run here"
OPTIONS = ({}, {"causal": True}, {"causal": True, "window": (6, None)}, {"softcap": 1.5, "scale": 0.3}, {"window": (3, 1)})


def arrays(lengths=(40, 0, 17), page_size=8, seqlen_q=2, heads=4, kv_heads=2, head_dim=16, head_dim_v=24, dtype=np.float32, seed=0):
    """q, k_cache, v_cache, seqlens_k and page_table, with NaN wherever no sequence has a key."""
    case = DecodeCase(lengths, page_size, 1, 0, seqlen_q, heads, kv_heads, head_dim, head_dim_v, np.dtype(dtype).name, seed=seed)
    return [case.arrays()[name] for name in ("q", "k_cache", "v_cache", "seqlens_k", "page_table")]


def gathered(cache, table, lengths):
    """A contiguous cache, 0 where no sequence has a key."""
    pages = np.clip(table, 0, len(cache) - 1)
    found = cache[pages].reshape(len(table), -1, *cache.shape[2:])
    return np.where((np.arange(found.shape[1]) < lengths[:, None])[..., None, None], found, 0).astype(cache.dtype)


# What is computed


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages_are_a_contiguous_cache(options, page_size):
    q, k, v, lengths, table = arrays((70, 0, 33, 1), page_size)
    contiguous = [gathered(x, table, lengths) for x in (k, v)]
    want, want_lse = numbaflash.forward(q, *contiguous, seqlens_k=lengths, return_lse=True, **options)
    for splits in (None, 1, 2, 5):
        for caches, pages in (((k, v), table), (contiguous, None)):
            out, lse = numbaflash.decode(q, *caches, lengths, pages, num_splits=splits, return_lse=True, **options)
            assert_close((out, lse), (want, want_lse))
            again = numbaflash.decode(q, *caches, lengths, pages, num_splits=splits, return_lse=True, **options)
            assert out.tobytes() == again[0].tobytes() and lse.tobytes() == again[1].tobytes()


def test_the_order_of_pages_changes_no_bit():
    q, k, v, lengths, table = arrays((70, 33))
    out = numbaflash.decode(q, k, v, lengths, table, num_splits=2)
    order = np.random.default_rng(1).permutation(len(k))
    moved = np.argsort(order).astype(np.int32)[np.clip(table, 0, len(k) - 1)]
    assert out.tobytes() == numbaflash.decode(q, k[order], v[order], lengths, moved, num_splits=2).tobytes()


@pytest.mark.parametrize("hidden", [np.nan, np.inf, 1e30, -7.0])
def test_unused_slots_and_entries_change_no_bit(hidden):
    case = DecodeCase((70, 0, 33, 5), page_size=8, seqlen_q=2, shared=1, hidden=0.0, with_sinks=True)
    want = case.run("cpu")
    assert case.values["page_table"].min() < 0
    for got, one in zip(replace(case, hidden=hidden).run("cpu"), want, strict=True):
        np.testing.assert_array_equal(got, one)


def test_one_by_one_is_the_prefill():
    """Token after token, each written into its page, gives the rows of a causal forward."""
    rng = np.random.default_rng(3)
    n, heads, kv_heads, dim, size = 37, 4, 2, 16, 8
    q = rng.standard_normal((2, n, heads, dim), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, n, kv_heads, dim), dtype=np.float32)
    table = rng.permutation(12)[:10].reshape(2, 5).astype(np.int32)
    k_cache, v_cache = np.full((2, 12, size, kv_heads, dim), np.nan, np.float32)
    want, want_lse = numbaflash.forward(q, k, v, causal=True, return_lse=True)
    for step in (1, 4):
        for first in range(0, n, step):
            new = slice(first, min(first + step, n))
            for b, i in np.ndindex(2, n):
                if new.start <= i < new.stop:
                    k_cache[table[b, i // size], i % size], v_cache[table[b, i // size], i % size] = k[b, i], v[b, i]
            lengths = np.full(2, new.stop, np.int32)
            out, lse = numbaflash.decode(q[:, new], k_cache, v_cache, lengths, table, causal=True, return_lse=True)
            assert_close((out, lse), (want[:, new], want_lse[:, :, new]))


@given(st.data())
def test_reference_of_pages(data):
    """The reference in pages is the one of a contiguous cache, by itself for each sequence."""
    size, options = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(OPTIONS))
    lengths = tuple(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)))
    case = DecodeCase(lengths, size, 1, data.draw(st.integers(0, 2)), 2, 2, 1, 4, 4, "float64", options=options)
    others = {name: x for name, x in case.values.items() if name not in ("q", "k", "v")}
    q, k, v = (case.values[name] for name in "qkv")
    out, lse = reference.forward(case.problem, q, k, v, **others)
    for b, length in enumerate(lengths):
        one = [gathered(x, case.values["page_table"][b, None], np.array([length]))[:, :length] for x in (k, v)]
        problem = make_problem(q[b, None].shape, *(x.shape for x in one), ("float64",) * 3, **options)
        want, want_lse = reference.forward(problem, q[b, None], *one)
        np.testing.assert_allclose(out[b], want[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[b], want_lse[0], rtol=1e-12)


# Every family


def skip_what_it_has_not(target, case):
    reasons = target.reasons(case.problem, "decode")
    if reasons and not case.problem.is_empty:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("name", CASES)
def test_cases(target, name):
    case = CASES[name]
    skip_what_it_has_not(target, case)
    try:
        case.run(target.family, target.library, results=name in ("plain", "everything", "float64"))
    except numbaflash.UnsupportedError:
        assert target.family == "simt" and (case.num_splits or 1) > 1


@st.composite
def decode_cases(draw):
    """Any cache of a few sequences."""
    group, kv_heads = draw(st.sampled_from([1, 2, 4, 7])), draw(st.integers(1, 3))
    dim, dim_v = draw(st.sampled_from([(16, 16), (64, 64), (64, 32), (40, 8), (128, 128), (33, 7)]))
    lengths = draw(st.lists(st.one_of(st.sampled_from([0, 1, 16, 64]), st.integers(0, 150)), min_size=1, max_size=4))
    size = draw(st.one_of(st.none(), st.sampled_from([1, 2, 16, 64]), st.integers(1, 70)))
    left, right = (draw(st.one_of(st.none(), st.integers(0, 60))) for _ in range(2))
    options = {"causal": draw(st.sampled_from([False, True, "top_left"])), "window": (left, right)}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 20.0]))
    return DecodeCase(
        lengths=tuple(lengths),
        page_size=size,
        spare=draw(st.integers(0, 3)),
        shared=draw(st.integers(0, 3)),
        seqlen_q=draw(st.one_of(st.just(1), st.integers(1, 12))),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"])),
        lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        options=options,
        with_sinks=draw(st.booleans()),
        alibi_per_batch=draw(st.sampled_from([None, False, True])),
        num_splits=draw(st.one_of(st.none(), st.integers(1, 6))),
        hidden=draw(st.sampled_from([np.nan, np.inf, -np.inf])),
        seed=draw(st.integers(0, 99)),
    )


@given(decode_cases())
def test_any_cache(case):
    case.run("cpu")


@pytest.mark.parametrize("splits", [None, 1, 4])
def test_threads_change_no_bit_of_a_number_of_parts(splits):
    import numba

    q, k, v, lengths, table = arrays((900, 3), page_size=16, heads=4)
    results = []
    for threads in (1, numba.get_num_threads()):
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            results.append(numbaflash.decode(q, k, v, lengths, table, num_splits=splits))
        finally:
            numba.set_num_threads(before)
    if splits is None:
        assert_close(results[:1], results[1:])
    else:
        assert results[0].tobytes() == results[1].tobytes()


def test_parts_are_no_more_than_there_are_keys():
    problem = make_decode_problem(
        *[(1, 1, 4, 64), (9, 16, 4, 64), (9, 16, 4, 64)], ("float32",) * 3, seqlens_k=((1,), "int32"), page_table=((1, 9), "int32")
    )
    plans = [dispatch.make_decode_plan(problem, contiguous_layouts(problem), CPU, n) for n in (1, 2, 10**9)]
    assert [plan.config.splits for plan in plans] == [1, 2, 3] and [plan.num_splits for plan in plans] == [1, 2, 10**9]


def test_many_rows_of_pages_are_tiles():
    """All queries of a key/value head would not fit in a cache."""
    case = DecodeCase((130, 70), seqlen_q=20, heads=8, kv_heads=1, options={"causal": True}, num_splits=2)
    plan = dispatch.make_decode_plan(case.problem, contiguous_layouts(case.problem), CPU, 2)
    assert plan.config.kernel.form == "rows" and plan.config.q_tile == 64
    case.run("cpu")


def test_no_pages_at_all():
    q, k, v, lengths, table = arrays()
    out, lse = numbaflash.decode(q, k[:0], v[:0], lengths, table, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()
    out, lse = numbaflash.decode(q[:, :0], k, v, lengths, table, return_lse=True)
    assert out.shape == (3, 0, 4, 24) and lse.shape == (3, 4, 0)


def test_page_numbers_out_of_range_are_the_nearest():
    q, k, v, lengths, table = arrays((40, 40))
    k, v = (np.nan_to_num(x) for x in (k, v))
    wrong, right = table.copy(), table.copy()
    wrong[0, 1], right[0, 1], wrong[1, 2], right[1, 2] = -7, 0, 2**31 - 1, len(k) - 1
    np.testing.assert_array_equal(numbaflash.decode(q, k, v, lengths, wrong), numbaflash.decode(q, k, v, lengths, right))


# Errors


BAD = {
    "page table of int64": (lambda a: {"page_table": a["page_table"].astype(np.int64)}, TypeError, "page_table must be int32; got dtype int64"),
    "page table of floats": (lambda a: {"page_table": a["page_table"].astype(np.float32)}, TypeError, "page_table must be int32"),
    "page table of one axis": (lambda a: {"page_table": a["page_table"][0]}, ValueError, r"page_table must have shape \(batch, max_pages\)"),
    "page table of another batch": (lambda a: {"page_table": a["page_table"][:2]}, ValueError, r"page_table .* batch being q's 3; got \(2, "),
    "page table that is a list": (lambda a: {"page_table": a["page_table"].tolist()}, TypeError, "page_table must be an array"),
    "other pages of v": (lambda a: {"v_cache": a["v_cache"][1:]}, ValueError, r"v_cache must have the same number of pages \(axis 0\) as k_cache"),
    "other page size of v": (lambda a: {"v_cache": a["v_cache"][:, 1:]}, ValueError, r"v_cache must have the same page_size \(axis 1\) as k_cache"),
    "other heads of v": (lambda a: {"v_cache": a["v_cache"][:, :, 1:]}, ValueError, r"v_cache must have the same kv_heads \(axis 2\) as k_cache"),
    "other head dim of k": (lambda a: {"k_cache": a["k_cache"][..., 1:]}, ValueError, r"k_cache must have the same head_dim \(axis 3\) as q"),
    "pages of no key": (lambda a: {"k_cache": a["k_cache"][:, :0], "v_cache": a["v_cache"][:, :0]}, ValueError, "pages of at least one key"),
    "cache of three axes": (lambda a: {"k_cache": a["k_cache"][0]}, ValueError, r"k_cache must have 4 axes \(pages, page_size, kv_heads, head_dim\)"),
    "paged cache without a table": (lambda a: {"page_table": None}, ValueError, r"k_cache must have the same batch \(axis 0\) as q"),
    "caches of two dtypes": (lambda a: {"v_cache": a["v_cache"].astype(np.float16)}, TypeError, "q, k_cache and v_cache must have one dtype"),
    "integers": (lambda a: {"k_cache": np.nan_to_num(a["k_cache"]).astype(np.int32)}, TypeError, "k_cache must be one of float16"),
    "q too long": (lambda a: {"q": np.zeros((3, 65, 4, 16), np.float32)}, ValueError, r"q must have at most 64 tokens a sequence \(axis 1\); got 65"),
    "head dim too large": (
        lambda a: {
            "q": np.zeros((3, 1, 4, 577), np.float32),
            "k_cache": np.zeros((5, 8, 2, 577), np.float32),
            "v_cache": np.zeros((5, 8, 2, 8), np.float32),
        },
        ValueError,
        r"q must have a head dim \(axis 3\) from 1 to 576; got 577",
    ),
    "head dim of v too large": (
        lambda a: {"v_cache": np.zeros((*a["v_cache"].shape[:3], 600), np.float32)},
        ValueError,
        "v_cache must have a head dim",
    ),
    "heads that do not divide": (lambda a: {"q": np.zeros((3, 1, 5, 16), np.float32)}, ValueError, "multiple of the heads of k and v"),
    "no lengths": (lambda a: {"seqlens_k": None}, TypeError, "seqlens_k must be an array of int32 or int64"),
    "lengths of floats": (lambda a: {"seqlens_k": a["seqlens_k"].astype(np.float32)}, TypeError, "seqlens_k must be int32 or int64"),
    "lengths of another batch": (lambda a: {"seqlens_k": a["seqlens_k"][:2]}, ValueError, r"seqlens_k must have shape \(batch,\)"),
    "no parts": (lambda a: {"num_splits": 0}, ValueError, "num_splits must be from 1 to 256"),
    "half a part": (lambda a: {"num_splits": 1.5}, TypeError, "num_splits must be an integer or None"),
    "parts that are a truth": (lambda a: {"num_splits": True}, TypeError, "num_splits must be an integer or None"),
    "wrong out": (lambda a: {"out": np.zeros((3, 2, 4, 16), np.float32)}, ValueError, r"out must have shape \(3, 2, 4, 24\)"),
    "out in the cache": (lambda a: {"out": a["v_cache"].reshape(-1)[: 3 * 2 * 4 * 24].reshape(3, 2, 4, 24)}, ValueError, "share memory with v_cache"),
    "wrong lse": (lambda a: {"lse": np.zeros((3, 4, 2), np.float64)}, TypeError, "lse must have dtype float32"),
    "wrong sinks": (lambda a: {"sinks": np.zeros(3, np.float32)}, ValueError, r"sinks must have shape \(heads,\)"),
    "wrong slopes": (lambda a: {"alibi_slopes": np.zeros(4, np.float16)}, TypeError, "alibi_slopes must be float32"),
    "wrong softcap": (lambda a: {"softcap": 0.0}, ValueError, "softcap must be finite and positive"),
    "wrong window": (lambda a: {"window": (-1, 0)}, ValueError, "window left must not be negative"),
    "wrong causal": (lambda a: {"causal": 1}, ValueError, "causal must be False"),
    "wrong flag": (lambda a: {"return_lse": 1}, TypeError, "return_lse must be True or False"),
    "stream on the CPU": (lambda a: {"stream": 7}, ValueError, "stream is for arrays on a CUDA device"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    given = dict(zip(("q", "k_cache", "v_cache", "seqlens_k", "page_table"), arrays(), strict=True))
    change, error, message = BAD[name]
    with pytest.raises(error, match=message):
        numbaflash.decode(**given | change(given))


def test_a_capacity_that_is_too_large():
    shapes = (1, 1, 1, 8), (4, 2**20, 1, 8), (4, 2**20, 1, 8)
    told = {"seqlens_k": ((1,), "int32"), "page_table": ((1, 2**11), "int32")}
    with pytest.raises(ValueError, match=r"capacity \(max_pages \* page_size\) of at most 1073741824 keys"):
        make_decode_problem(*shapes, ("float16",) * 3, **told)
    with pytest.raises(ValueError, match="k_cache must have a capacity"):
        make_decode_problem((1, 1, 1, 8), *[(1, 2**31, 1, 8)] * 2, ("float16",) * 3, seqlens_k=((1,), "int32"))
    with pytest.raises(ValueError, match="at most 2147483647 pages"):
        make_decode_problem((1, 1, 1, 8), *[(2**31, 1, 1, 8)] * 2, ("float16",) * 3, seqlens_k=((1,), "int32"), page_table=((1, 2), "int32"))


def test_several_libraries_are_refused():
    import torch

    q, k, v, lengths, table = arrays()
    with pytest.raises(TypeError, match="q, k_cache, v_cache, seqlens_k and page_table must come from one array library"):
        numbaflash.decode(q, k, v, lengths, torch.from_numpy(table))


def test_values_are_checked_where_asked(monkeypatch):
    q, k, v, lengths, table = arrays((40, 0, 17))
    want = numbaflash.decode(q, k, v, lengths, table)
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    np.testing.assert_array_equal(numbaflash.decode(q, k, v, lengths, table), want)  # garbage in unused entries is right
    capacity = 8 * table.shape[1]
    for wrong in (capacity + 1, -1):
        with pytest.raises(ValueError, match=rf"seqlens_k must be from 0 to the capacity of {capacity} keys; got {wrong} \(sequence 2\)"):
            numbaflash.decode(q, k, v, np.array([3, 0, wrong]), table)
    for wrong in (-1, len(k)):
        bad = table.copy()
        bad[0, 4] = wrong
        with pytest.raises(ValueError, match=rf"page_table must hold page numbers from 0 to {len(k) - 1} .* got {wrong} \(sequence 0, entry 4\)"):
            numbaflash.decode(q, k, v, lengths, bad)
    contiguous = [gathered(x, table, lengths) for x in (k, v)]
    with pytest.raises(ValueError, match="seqlens_k must be from 0"):
        numbaflash.decode(q, *contiguous, lengths + capacity)


def test_no_family_says_why():
    problem = make_decode_problem((1, 1, 1, 8), *[(1, 4, 1, 8)] * 2, ("float32",) * 3, seqlens_k=((1,), "int32"))
    with pytest.raises(numbaflash.UnsupportedError, match="sm90: .*Hopper"), dispatch.use_family("sm90"):
        dispatch.make_decode_plan(problem, contiguous_layouts(problem), CPU)


# The problem


def test_problem_of_pages():
    case = CASES["everything"]
    problem = case.problem
    assert problem.paged and problem.features == ("softcap", "alibi_slopes", "sinks", "seqlens_k", PAGE_TABLE) and problem.offset_per_entry
    assert problem.seqlen_k == problem.max_pages * problem.page_size and problem.k_shape == (problem.pages, 16, 2, 64)
    assert (problem.shape_of(PAGE_TABLE), problem.dtype_of(PAGE_TABLE)) == ((3, problem.max_pages), "int32")
    assert dispatch.operands(problem, "decode") == ("q", "k", "v", "out", "lse", *problem.options, "workspace")
    contiguous = CASES["contiguous"].problem
    assert not contiguous.paged and contiguous.k_shape[1] == contiguous.seqlen_k and contiguous.options == ("seqlens_k",)
    with pytest.raises(ValueError, match="the problem has no page_table"):
        contiguous.shape_of(PAGE_TABLE)


@pytest.mark.parametrize("causal", [False, True])
def test_one_query_stands_beside_the_last_key(causal):
    """Causal is no bound then: one kernel serves both."""
    problem = make_decode_problem((1, 1, 1, 8), *[(1, 4, 1, 8)] * 2, ("float32",) * 3, seqlens_k=((1,), "int32"), causal=causal)
    assert (problem.left, problem.right, problem.offset_per_entry) == (None, None, False)


# Libraries


def test_torch():
    import torch

    given = [torch.from_numpy(x) for x in arrays()]
    want, want_lse = numbaflash.decode(*arrays(), causal=True, return_lse=True)
    out, lse = numbaflash.decode(*given, causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.numpy().tobytes() == want.tobytes() and lse.numpy().tobytes() == want_lse.tobytes()
    room = torch.full((3, 2, 4, 24), torch.nan)
    version = room._version
    assert numbaflash.decode(*given, causal=True, out=room) is room and torch.equal(room, out) and room._version > version
    with pytest.raises(ValueError, match="k_cache takes part in automatic differentiation"):
        numbaflash.decode(given[0], given[1].clone().requires_grad_(), *given[2:])
    half = [x.bfloat16() if x.is_floating_point() else x for x in given]
    assert_close([numbaflash.decode(*half, causal=True).float()], [want], "bfloat16")


@pytest.mark.parametrize("paged", [False, True])
def test_a_plan_looks_at_torch_tensors_at_once(paged, monkeypatch):
    """In every mode of torch the second run takes the quick way, and whatever is not as planned still meets the checks."""
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad

    from numbaflash.arrays import torch as adapter

    q, k, v, lengths, table = arrays()
    made = [q, k, v, lengths, table] if paged else [q, *(gathered(x, table, lengths) for x in (k, v)), lengths]
    given = [torch.from_numpy(x.copy()) for x in made]
    plan = numbaflash.plan_decode(*given)
    want = numbaflash.decode(*given)
    assert plan._at is not None
    looked = []
    monkeypatch.setattr(plan, "_at_q", lambda x: looked.append(x) or x.data_ptr())
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            plan.run(*given)  # learns what the arrays look like in this mode
            looked.clear()
            assert torch.equal(plan.run(*given), want) and not looked
    q, *rest = given
    learner = q.clone().requires_grad_()
    plan = numbaflash.plan_decode(*given)
    for wrong, told in (
        (q.half(), "dtype"),
        (q[:, :, :1], "shape"),
        (learner, "takes part in automatic differentiation"),
        (torch._neg_view(q), "pending negation"),
        (torch.nn.Parameter(q), "takes part in automatic differentiation"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=told):
                plan.run(wrong, *rest)
    with torch.no_grad():
        assert torch.equal(plan.run(learner, *rest), want)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="takes part in automatic differentiation"):
        plan.run(forward_ad.make_dual(q, q), *rest)
    turned = q.clone()
    turned.transpose_(0, 1)
    with pytest.raises(ValueError, match="shape|strides"):
        plan.run(turned, *rest)
    gone = q.clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        plan.run(gone, *rest)
    bytes_of = torch.empty(q.numel() * 4 + 4, dtype=torch.uint8)
    uneven = bytes_of[4:].view(q.dtype).view(q.shape)
    with pytest.raises(ValueError, match="address"):
        plan.run(uneven, *rest)
    assert torch.equal(plan.run(*given), want)
    with pytest.raises(ValueError, match="page_table"):
        plan.run(*(given[:4] if paged else [*given, torch.from_numpy(table)]))
    monkeypatch.setattr(adapter, "_guards", lambda tensors: None)  # a torch without them
    plan = numbaflash.plan_decode(*given)
    assert plan._at is None and torch.equal(plan.run(*given), want)


def test_the_result_of_a_plan_is_its_own():
    torch = pytest.importorskip("torch")
    for convert in (np.array, torch.from_numpy):
        q, *rest = [convert(x) for x in arrays(head_dim=16, head_dim_v=16)]
        plan = numbaflash.plan_decode(q, *rest)
        plan.run(q, *rest)
        with pytest.raises(ValueError, match="q must not be the plan's own result"):
            plan.run(plan.out, *rest)
        plan.run(plan.out, *rest, out=plan.out.copy() if convert is np.array else plan.out.clone())
    plan.out.data = torch.zeros_like(plan.out)
    with pytest.raises(ValueError, match="out or lse of the plan was given other memory"):
        plan.run(q, *rest)


def test_a_plan_keeps_no_tensor_of_a_run():
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(x.copy()) for x in arrays()]
    plan, q = numbaflash.plan_decode(*given), given[0].clone()
    gone = weakref.ref(q)
    plan.run(q, *given[1:])
    del q
    assert gone() is None


def test_jax():
    import jax
    import jax.numpy as jnp

    host = arrays()
    given = [jnp.asarray(x) for x in host]
    want, want_lse = numbaflash.decode(*host, causal=True, return_lse=True)
    for decode in (numbaflash.decode, jax.jit(numbaflash.decode, static_argnames=("causal", "return_lse"))):
        out, lse = decode(*given, causal=True, return_lse=True)
        assert isinstance(out, jax.Array)
        assert_close((out, lse), (want, want_lse))
    parts = jax.jit(lambda *x: numbaflash.decode(*x, causal=True, num_splits=2))(*given)
    assert_close([parts], [want])
    for name, more in (("out", {"out": given[0]}), ("lse", {"lse": given[0]}), ("stream", {"stream": 1})):
        with pytest.raises(ValueError, match=f"{name} cannot be given with JAX arrays"):
            numbaflash.decode(*given, **more)
    with pytest.raises(numbaflash.UnsupportedError, match="decode cannot be differentiated"):
        jax.grad(lambda q: numbaflash.decode(q, *given[1:]).sum())(given[0])
    with pytest.raises(TypeError, match="page_table must be int32"):
        jax.jit(numbaflash.decode)(*given[:4], given[4].astype(jnp.int16))


@pytest.mark.parametrize("paged", [True, False])
def test_jax_vmap(paged):
    import jax
    import jax.numpy as jnp

    q, k, v, lengths, table = arrays()
    if not paged:
        k, v = (gathered(x, table, lengths) for x in (k, v))
    more = (jnp.asarray(table),) if paged else ()
    queries, counts = np.stack([q, 2 * q]), np.stack([lengths, lengths // 2])
    found = jax.vmap(lambda q, n: numbaflash.decode(q, jnp.asarray(k), jnp.asarray(v), n, *more, causal=True))(queries, counts)
    for out, one, n in zip(found, queries, counts, strict=True):
        assert_close([out], [numbaflash.decode(one, k, v, n, *([table] if paged else []), causal=True)])


class Lent:
    """An array of a library that nobody knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_borrowed_arrays(monkeypatch):
    host = arrays()
    want = numbaflash.decode(*host, causal=True, num_splits=2)
    lent = [Lent(x) for x in host]
    assert isinstance(out := numbaflash.decode(*lent, causal=True, num_splits=2), np.ndarray) and out.tobytes() == want.tobytes()
    room = Lent(np.full_like(want, np.nan))
    assert numbaflash.decode(*lent, causal=True, num_splits=2, out=room) is room and room.array.tobytes() == want.tobytes()
    contiguous = [gathered(x, host[4], host[3]) for x in host[1:3]]
    assert_close([numbaflash.decode(lent[0], *map(Lent, contiguous), lent[3], causal=True)], [want])
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    with pytest.raises(ValueError, match="seqlens_k must be from 0"):
        numbaflash.decode(*lent[:3], Lent(host[3] + 1000), lent[4])


def test_importing_costs_nothing():
    code = "import sys, numbaflash; numbaflash.decode; assert 'numba' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


# Plans

ARGUMENTS = ("q", "k_cache", "v_cache", "seqlens_k", "page_table")


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_a_call(target, name):
    case = CASES[name]
    skip_what_it_has_not(target, case)
    given = case.arrays(target.library)
    more = {"num_splits": case.num_splits, "return_lse": True, **case.options}
    with dispatch.use_family(target.family):
        try:
            want = numbaflash.decode(**given, **more)
        except numbaflash.UnsupportedError:
            pytest.skip("no such parts")
        plan = numbaflash.plan_decode(**given, **more)
    for _ in range(2):
        out, lse = plan.run(**{name: x for name, x in given.items() if name in ARGUMENTS})
        assert out is plan.out and lse is plan.lse
        for got, one in zip((out, lse), want, strict=True):
            np.testing.assert_array_equal(target.numpy(got), target.numpy(one))


def planned(**options):
    given = arrays()
    return numbaflash.plan_decode(*given, causal=True, **options), given


def test_lengths_and_pages_may_change_from_run_to_run():
    plan, (q, k, v, lengths, table) = planned()
    filled = [np.nan_to_num(x) for x in (k, v)]
    for change in (0, 1, 5):
        want = numbaflash.decode(q, *filled, lengths + change, table[::-1].copy(), causal=True)
        np.testing.assert_array_equal(plan.run(q, *filled, lengths + change, table[::-1].copy()), want)


def test_options_are_read_in_each_run():
    sinks, slopes = np.zeros(4, np.float32), np.full(4, 0.1, np.float32)
    plan, given = planned(sinks=sinks, alibi_slopes=slopes)
    before = plan.run(*given).copy()
    sinks[:], slopes[:] = 3, 0.2
    want = numbaflash.decode(*given, causal=True, sinks=sinks, alibi_slopes=slopes)
    np.testing.assert_array_equal(plan.run(*given), want)
    assert not np.array_equal(before, want)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_options_that_moved_are_found_again(name):
    """``parameter.data = ...``, as torch and what loads weights do it, leaves a plan with memory that is free."""
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(x) for x in planned()[1]]
    option = torch.ones(given[0].shape[2])
    plan = numbaflash.plan_decode(*given, **{name: option})
    plan.run(*given)
    option.data = torch.linspace(0, 3, len(option))
    assert torch.equal(plan.run(*given), numbaflash.decode(*given, **{name: option}))
    option.data = option.double()
    with pytest.raises(ValueError, match=f"{name} must have the planned dtype float32; got float64"):
        plan.run(*given)
    option.data = option.float()
    option.requires_grad_()
    with pytest.raises(ValueError, match=f"{name} takes part in automatic differentiation"):
        plan.run(*given)
    option.detach_().requires_grad_(False).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{name} has no memory"):
        plan.run(*given)
    with pytest.raises(TypeError, match="q is traced by torch.func"):
        torch.vmap(lambda q: plan.run(q, *given[1:]))(torch.stack([given[0]] * 2))


def test_results_that_a_run_is_given():
    plan, given = planned(return_lse=True)
    want, want_lse = (x.copy() for x in plan.run(*given))
    for with_lse in (True, False):
        for _ in range(2):
            out, lse = np.full_like(want, np.nan), np.full_like(want_lse, np.nan) if with_lse else None
            plan.lse[:] = np.nan
            found = plan.run(*given, out=out, lse=lse)
            assert found[0] is out and found[1] is (lse if with_lse else plan.lse)
            assert out.tobytes() == want.tobytes() and found[1].tobytes() == want_lse.tobytes()
    q, k, v, lengths, table = given
    memory = np.zeros(v.size + 8, np.float32)
    inside = memory[: v.size].reshape(v.shape)
    overlapping = memory[: want.size].reshape(want.shape)
    bad = {
        r"out must have shape \(3, 2, 4, 24\)": {"out": want[:2]},
        "out must be row-major": {"out": np.empty((4, 2, 3, 24), np.float32).transpose(2, 1, 0, 3)},
        "an address that 16 bytes divide": {"out": memory[1 : 1 + want.size].reshape(want.shape)},
        "out must be writable": {"out": np.broadcast_to(np.float32(0), want.shape)},
        "out must not share memory with v_cache": {"v_cache": inside, "out": overlapping},
    }
    for message, change in bad.items():
        for _ in range(2):  # what is refused is not remembered
            with pytest.raises(ValueError, match=message):
                plan.run(**dict(zip(ARGUMENTS, given, strict=True)) | change)
    with pytest.raises(TypeError, match="lse must have dtype float32"):
        plan.run(*given, lse=want_lse.astype(np.float64))
    with pytest.raises(ValueError, match="the plan computes none"):
        numbaflash.plan_decode(*given).run(*given, lse=want_lse)


OTHER = {
    "shape": (lambda a: {"q": a["q"][:, :1].copy()}, ValueError, r"q must have the planned shape \(3, 2, 4, 16\); got \(3, 1, 4, 16\)"),
    "strides": (lambda a: {"k_cache": np.repeat(a["k_cache"], 2, 2)[:, :, ::2]}, ValueError, "k_cache must have the planned strides"),
    "dtype": (lambda a: {"v_cache": a["v_cache"].astype(np.float64)}, ValueError, "v_cache must have the planned dtype float32; got float64"),
    "dtype of lengths": (lambda a: {"seqlens_k": a["seqlens_k"].astype(np.int64)}, ValueError, "seqlens_k must have the planned dtype int32"),
    "no table": (lambda a: {"page_table": None}, ValueError, "page_table: the plan has one; got none"),
    "a list": (lambda a: {"seqlens_k": [1, 2, 3]}, TypeError, "seqlens_k must be an array of NumPy, CuPy, .*; got list"),
    "None": (lambda a: {"q": None}, ValueError, "q: the plan has one; got none"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_kind_than_planned(name):
    plan, given = planned()
    given = dict(zip(ARGUMENTS, given, strict=True))
    change, error, message = OTHER[name]
    with pytest.raises(error, match=message):
        plan.run(**given | change(given))


def test_alignment_of_a_plan():
    plan, (q, k, v, lengths, table) = planned()
    want = plan.run(q, k, v, lengths, table).copy()
    room = np.zeros(q.size + 4, np.float32)
    at = (-room.ctypes.data // 4) % 4
    for skip, fits in ((at, True), ((at + 1) % 4, False)):
        moved = room[skip : skip + q.size].reshape(q.shape)
        moved[:] = q
        if fits:
            np.testing.assert_array_equal(plan.run(moved, k, v, lengths, table), want)
        else:
            with pytest.raises(ValueError, match="q must lie at an address that 16 bytes divide"):
                plan.run(moved, k, v, lengths, table)
            better = numbaflash.plan_decode(moved, k, v, lengths, table, causal=True)
            np.testing.assert_array_equal(better.run(q, k, v, lengths, table), want)


def test_a_table_that_is_not_planned_and_other_libraries():
    import torch

    q, k, v, lengths, table = arrays()
    contiguous = [gathered(x, table, lengths) for x in (k, v)]
    plan = numbaflash.plan_decode(q, *contiguous, lengths)
    with pytest.raises(ValueError, match="page_table: the plan has none; got one"):
        plan.run(q, *contiguous, lengths, table)
    with pytest.raises(TypeError, match="q must be an array of NumPy, as planned; got Tensor"):
        plan.run(torch.from_numpy(q), *contiguous, lengths)
    with pytest.raises(ValueError, match="stream is for arrays on a CUDA device"):
        plan.run(q, *contiguous, lengths, stream=3)


def test_plans_of_torch():
    import torch

    host = arrays()
    given = [torch.from_numpy(x) for x in host]
    plan = numbaflash.plan_decode(*given, causal=True, return_lse=True)
    want, want_lse = numbaflash.decode(*host, causal=True, return_lse=True)
    versions = plan.out._version
    out, lse = plan.run(*given)
    assert out.numpy().tobytes() == want.tobytes() and lse.numpy().tobytes() == want_lse.tobytes() and out._version > versions
    compiled = torch.compile(lambda *x: plan.run(*x)[0] * 2, backend="eager")
    assert torch.equal(compiled(*given), out * 2)
    with pytest.raises(ValueError, match="takes part in automatic differentiation"):
        plan.run(given[0].clone().requires_grad_(), *given[1:])
    with pytest.raises(ValueError, match="k_cache must have the planned dtype float32; got float16"):
        plan.run(given[0], given[1].half(), *given[2:])


def test_plans_of_borrowed_arrays():
    host = arrays()
    lent = [Lent(x) for x in host]
    want = numbaflash.decode(*host, causal=True)
    plan = numbaflash.plan_decode(*lent, causal=True)
    assert plan.run(*lent) is plan.out and plan.out.tobytes() == want.tobytes()
    room = Lent(np.full_like(want, np.nan))
    assert plan.run(*lent, out=room) is room and room.array.tobytes() == want.tobytes()
    with pytest.raises(TypeError, match="k_cache must be an array of .*, as planned; got ndarray"):
        plan.run(lent[0], host[1], *lent[2:])
    with pytest.raises(ValueError, match="q must have the planned shape"):
        plan.run(Lent(host[0][:, :1]), *lent[1:])


def test_no_plans_of_jax():
    import jax.numpy as jnp

    with pytest.raises(TypeError, match="q must not be an array of JAX in a plan: XLA owns memory"):
        numbaflash.plan_decode(*map(jnp.asarray, arrays()))


def test_what_a_plan_says_of_itself(monkeypatch):
    plan, given = planned(num_splits=2)
    told = plan.explain()
    assert told.plan is plan.plan and plan.plan.direction == "decode" and "page_table" in str(told)
    assert repr(plan).startswith("DecodePlan(cpu on cpu: float32, q (3, 2, 4, 16)") and "pages of 8" in repr(plan)
    empty = numbaflash.plan_decode(given[0][:, :0], *given[1:])
    assert empty.run(given[0][:, :0], *given[1:]).shape == (3, 0, 4, 24) and empty.plan is None
    assert "nothing to compute" in repr(empty) and "no element" in str(empty.explain())
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    checking = numbaflash.plan_decode(*given)
    with pytest.raises(ValueError, match="seqlens_k must be from 0"):
        checking.run(*given[:3], given[3] + 1000, given[4])


def test_a_plan_of_many_kinds_of_results():
    """Kinds that are remembered are no more than a few."""
    from numbaflash import decoding

    plan, given = planned()
    out = np.empty((decoding.MOST_KINDS_OF_RESULTS + 2, *plan.out.shape), np.float32)
    plan._apart = {n: None for n in range(decoding.MOST_KINDS_OF_RESULTS)}
    plan.run(*given, out=out[0])
    assert len(plan._apart) == 1


# Cascades


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 2.0, "scale": 0.2}, {"causal": True, "window": (None, 3)}, {"with_sinks": True}], ids=str
)
@pytest.mark.parametrize("paged", [True, False])
def test_a_cascade_is_the_flat_computation(options, paged):
    rng = np.random.default_rng(2)
    options = dict(options)
    if options.pop("with_sinks", False):
        options["sinks"] = rng.standard_normal(4, dtype=np.float32)
    q, k, v, lengths, table = arrays((40, 2, 17))
    k_prefix, v_prefix = rng.standard_normal((29, 2, 16), dtype=np.float32), rng.standard_normal((29, 2, 24), dtype=np.float32)
    contiguous = [gathered(x, table, lengths) for x in (k, v)]
    flat = [np.concatenate([np.broadcast_to(p, (3, *p.shape)), x], axis=1) for p, x in zip((k_prefix, v_prefix), contiguous, strict=True)]
    want = numbaflash.decode(q, *flat, lengths + 29, return_lse=True, **options)
    caches = ((k, v), table) if paged else (contiguous, None)
    for splits in (None, 3):
        found = numbaflash.cascade(q, k_prefix, v_prefix, *caches[0], lengths, caches[1], return_lse=True, num_splits=splits, **options)
        assert_close(found, want)
    assert_close([numbaflash.cascade(q, k_prefix, v_prefix, *caches[0], lengths, caches[1], **options)], want[:1])


def test_cascades_nest():
    """Prefix and rest may be divided anywhere, and merged in any order."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((2, 1, 4, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 60, 2, 16), dtype=np.float32)
    caches = rng.standard_normal((2, 2, 9, 2, 16), dtype=np.float32)
    lengths = np.array([9, 0])
    want = numbaflash.cascade(q, k, v, *caches, lengths, return_lse=True)
    for cut in (0, 1, 31, 60):
        rest = numbaflash.cascade(q, k[cut:], v[cut:], *caches, lengths, return_lse=True)
        first = numbaflash.forward(q, *(np.broadcast_to(x[:cut], (2, cut, 2, 16)) for x in (k, v)), return_lse=True)
        for parts in ((first, rest), (rest, first)):
            assert_close(numbaflash.merge(*zip(*parts, strict=True)), want)


def test_cascades_of_libraries():
    import jax
    import jax.numpy as jnp
    import torch

    rng = np.random.default_rng(5)
    q, k, v, lengths, table = arrays()
    prefix = rng.standard_normal((11, 2, 16), dtype=np.float32), rng.standard_normal((11, 2, 24), dtype=np.float32)
    given = (q, *prefix, k, v, lengths, table)
    want = numbaflash.cascade(*given, causal=True)
    assert want.flags.c_contiguous
    assert_close([numbaflash.cascade(*map(torch.from_numpy, given), causal=True)], [want])
    assert_close([jax.jit(lambda *x: numbaflash.cascade(*x, causal=True))(*map(jnp.asarray, given))], [want])
    with pytest.raises(numbaflash.UnsupportedError, match="cascade takes arrays of NumPy, CuPy, PyTorch or JAX"):
        numbaflash.cascade(*map(Lent, given))
    half = [x.astype(np.float16) if x.dtype == np.float32 else x for x in given]
    np.testing.assert_allclose(numbaflash.cascade(*half, causal=True), want, atol=TOLERANCE["float16"], rtol=TOLERANCE["float16"])


def test_what_a_cascade_refuses():
    q, k, v, lengths, table = arrays()
    prefix = np.zeros((5, 2, 16), np.float32), np.zeros((5, 2, 24), np.float32)
    rest = k, v, lengths, table
    with pytest.raises(numbaflash.UnsupportedError, match="window with a bound to the left"):
        numbaflash.cascade(q, *prefix, *rest, window=(4, None))
    with pytest.raises(numbaflash.UnsupportedError, match="alibi_slopes in a cascade"):
        numbaflash.cascade(q, *prefix, *rest, alibi_slopes=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="causal must be False or True"):
        numbaflash.cascade(q, *prefix, *rest, causal="top_left")
    with pytest.raises(ValueError, match=r"k_prefix must have 3 axes \(prefix, kv_heads, head_dim\)"):
        numbaflash.cascade(q, prefix[0][None], prefix[1], *rest)
    with pytest.raises(ValueError, match=r"v_prefix must have the heads and head dim of v_cache, \(2, 24\); got \(2, 16\)"):
        numbaflash.cascade(q, prefix[0], prefix[0], *rest)
    with pytest.raises(ValueError, match=r"v_prefix must have the same length \(axis 0\) as k_prefix"):
        numbaflash.cascade(q, prefix[0][1:], prefix[1], *rest)
    with pytest.raises(TypeError, match="k_prefix must have the dtype of k_cache"):
        numbaflash.cascade(q, prefix[0].astype(np.float16), prefix[1], *rest)
    with pytest.raises(TypeError, match="k_prefix must be an array"):
        numbaflash.cascade(q, None, prefix[1], *rest)
    with pytest.raises(ValueError, match="q must have at most 64 tokens"):
        numbaflash.cascade(np.zeros((3, 65, 4, 16), np.float32), *prefix, *rest)


# Explanations and warm-ups


def test_explain_says_how_decode_runs():
    q, k, v, lengths, table = arrays()
    told = numbaflash.explain(q, k, v, seqlens_k=lengths, page_table=table, direction="decode", num_splits=2, causal=True, return_lse=True)
    assert told.plan == numbaflash.plan_decode(q, k, v, lengths, table, num_splits=2, causal=True, return_lse=True).plan
    assert told.families.keys() == {"sm90", "simt"} and "num_splits" in str(told) and "i + seqlens_k - 2" in str(told)
    assert "no element" in str(numbaflash.explain(q[:, :0], k, v, seqlens_k=lengths, page_table=table, direction="decode"))


def test_what_explain_refuses_of_decode():
    q, k, v, lengths, table = arrays()
    with pytest.raises(TypeError, match="seqlens_k must be an array"):
        numbaflash.explain(q, k, v, direction="decode")
    with pytest.raises(ValueError, match="numbaflash.decode has no bias, dropout; leave them out"):
        numbaflash.explain(q, k, v, seqlens_k=lengths, page_table=table, direction="decode", bias=q, dropout=0.5)
    with pytest.raises(ValueError, match='page_table, num_splits: for decoding alone; pass direction="decode"'):
        numbaflash.explain(q, k, v, page_table=table, num_splits=2)
    with pytest.raises(ValueError, match="dq: for the backward alone"):
        numbaflash.explain(q, k, v, seqlens_k=lengths, page_table=table, direction="decode", dq=q)
    with pytest.raises(ValueError, match="k_cache must have the same batch"):
        numbaflash.explain(q, k, v, seqlens_k=lengths, direction="decode")
    with pytest.raises(ValueError, match='direction must be "forward", "backward" or "decode"'):
        numbaflash.explain(q, k, v, direction="sideways")


def test_warmup_builds_what_decode_needs():
    from numbaflash.kernels.cpu import launch

    lists = {"dtypes": ("float32",), "head_dims": (16,), "causal": (False,), "heads": ((4, 2),), "options": {"softcap": 7.0, "sinks": True}}
    report = numbaflash.warmup(**lists, caches=(40,), page_sizes=(None, 8), new_tokens=(1,), num_splits=2, batch=3, device="cpu")
    assert report.plans == 4 and not report.failed
    built = launch._compile_kernel.cache_info().misses
    q, k, v, lengths, table = arrays(seqlen_q=1, head_dim_v=16)
    more = {"softcap": 7.0, "sinks": np.zeros(4, np.float32), "num_splits": 2}
    numbaflash.decode(q, k, v, lengths, table, **more)
    numbaflash.decode(q, *(gathered(x, table, lengths) for x in (k, v)), lengths, **more)
    assert launch._compile_kernel.cache_info().misses == built
    plan = numbaflash.plan_decode(q, k, v, lengths, table, **more)
    for example in (plan.plan, plan.plan.problem):
        assert numbaflash.warmup(example, directions=("decode",), return_lse=(False,), device="cpu").plans == 1


def test_calls_are_logged(caplog):
    import logging

    from numbaflash.toolchain.log import logger

    given = arrays((40, 1, 17), seed=77)
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        numbaflash.decode(*given, scale=0.123)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    assert "plan: cpu on cpu for" in caplog.text and "launch: cpu on cpu for" in caplog.text and "page_size=8" in caplog.text


@pytest.mark.parametrize("family", dispatch.FAMILIES)
def test_the_table_of_caches_is_what_the_families_answer(family):
    from numbaflash import support

    rows = [row for row in support.rows("decode") if row.family == family]
    assert rows and {len(row.options) for row in rows} == {len(support.CACHE_COLUMNS)}
    device = CPU if family == "cpu" else support.assumed_device("sm_90")
    for row in rows:
        told = dict(zip(support.CACHE_COLUMNS, row.options, strict=True))
        case = DecodeCase(head_dim=64, head_dim_v=64, dtype=row.dtype)
        assert (told["pages"] == "yes") == (not dispatch.family(family, "decode").supports(case.problem, device))
