"""`forward`, `merge` and `explain` as a user calls them: results, options, errors, caching, threads."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
import timeit

import numpy as np
import pytest
from attention import assert_attention, expected

import numbaflash
from numbaflash import call, dispatch
from numbaflash.memory import extent, overlaps, overlaps_itself
from numbaflash.problem import UnsupportedError

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def operands(batch=2, seqlen_q=9, seqlen_k=13, heads=4, kv_heads=2, head_dim=16, head_dim_v=24, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, seqlen_q, heads, head_dim), (batch, seqlen_k, kv_heads, head_dim), (batch, seqlen_k, kv_heads, head_dim_v))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


class FakeFamily:
    """A family that computes nothing and notes what it is asked."""

    def __init__(self, copies=(), reasons=()):
        self.copies, self.reasons = dict.fromkeys(copies, "a test wants it"), reasons
        self.plans, self.launches = [], []
        self.on_launch = None

    def supports(self, problem, device):
        return self.reasons

    def plan(self, problem, layouts, device):
        plain = {}
        for name in dispatch.OPERANDS:
            layout = getattr(layouts, name)
            if layout is not None and name in self.copies:
                itemsize = (
                    4 if name == "lse" and problem.dtype != "float64" else {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[problem.dtype]
                )
                layout = dispatch.Layout(layout.shape, tuple(itemsize * int(np.prod(layout.shape[i + 1 :])) for i in range(len(layout.shape))))
            plain[name] = layout
        self.plans.append(dispatch.Plan("simt", problem, device, dispatch.Layouts(**plain), copies=dict(self.copies)))
        return self.plans[-1]

    def prepare(self, plan):
        def launch(addresses, stream):
            self.launches.append((*addresses, stream))
            if self.on_launch is not None:
                self.on_launch(*addresses, stream)

        return launch

    def resources(self, plan):
        return {"registers": 1}


@pytest.fixture
def fake(monkeypatch):
    """Every call goes to a fake family; ``fake(copies=...)`` chooses which."""

    def use(**options):
        family = FakeFamily(**options)
        monkeypatch.setattr(dispatch, "family", lambda name, direction="forward": family)
        call.forget()
        return family

    yield use
    call.forget()


# Results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top_left", "window": (3, None)}, {"scale": -0.3, "window": (2, 1)}])
def test_forward(dtype, options):
    q, k, v = operands(dtype=DTYPES[dtype])
    out, lse = numbaflash.forward(q, k, v, return_lse=True, **options)
    assert out.dtype == DTYPES[dtype] and lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert out.flags.c_contiguous and lse.flags.c_contiguous
    assert_attention((out, lse), q, k, v, dtype, **options)
    assert np.array_equal(numbaflash.forward(q, k, v, **options), out)


def test_no_keys_and_empty_results():
    q, k, v = operands()
    out, lse = numbaflash.forward(q, k[:, :0], v[:, :0], return_lse=True)
    assert not out.any() and np.all(lse == -np.inf)
    for empty in (0, slice(0, 0)):
        cut = slice(0, 0) if empty == 0 else empty
        out, lse = numbaflash.forward(q[cut], k[cut], v[cut], return_lse=True)
        assert out.shape == (0, 9, 4, 24) and lse.shape == (0, 4, 9)
    assert numbaflash.forward(q[:, :0], k, v).shape == (2, 0, 4, 24)
    assert numbaflash.forward(q[:, :, :0], k, v).shape == (2, 9, 0, 24)
    given = np.empty((0, 9, 4, 24), np.float32)
    assert numbaflash.forward(q[:0], k[:0], v[:0], out=given) is given


def test_options_of_any_spelling_are_one_kind(fake):
    family = fake()
    q, k, v = operands()
    for scale in (1, 1.0, np.float32(1), np.float64(1)):
        for causal in (True, np.True_):
            for window in ((3, 0), [3, 0], (np.int64(3), np.int32(0))):
                numbaflash.forward(q, k, v, scale=scale, causal=causal, window=window)
    assert len(family.plans) == 1 and len(family.launches) == 4 * 2 * 3


def test_results_are_given():
    q, k, v = operands()
    want = numbaflash.forward(q, k, v, return_lse=True)
    out, lse = np.full((2, 4, 9, 24), np.nan, np.float32).swapaxes(1, 2), np.full((4, 9, 2), np.nan, np.float32).transpose(2, 0, 1)
    result = numbaflash.forward(q, k, v, out=out, lse=lse)
    assert result is out
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])
    lse[...] = np.nan
    got = numbaflash.forward(q, k, v, lse=lse, return_lse=True)
    assert got[1] is lse and np.array_equal(lse, want[1]) and np.array_equal(got[0], want[0])


def test_results_between_the_inputs():
    """out lies in the gaps of one buffer with q: nothing is shared, although the extents cross."""
    q, k, v = operands(head_dim=16, head_dim_v=16)
    buffer = np.zeros((2, 9, 4, 2, 16), np.float32)
    buffer[:, :, :, 0] = q
    assert numbaflash.forward(buffer[:, :, :, 0], k, v, out=buffer[:, :, :, 1]).base is buffer
    np.testing.assert_allclose(buffer[:, :, :, 1], expected(q, k, v)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(buffer[:, :, :, 0], q)


@pytest.mark.parametrize("name", dispatch.OPERANDS)
def test_copies_are_made_where_the_plan_says(fake, name):
    import ctypes

    family = fake(copies=(name,))
    q, k, v = (np.asarray(x[..., ::-1]) for x in operands(head_dim=16, head_dim_v=16))
    given = {"out": np.zeros((2, 9, 4, 32), np.float32)[..., ::2], "lse": np.zeros((2, 4, 18), np.float32)[..., ::2]}
    seen = {}

    def on_launch(*addresses):
        if name in "qkv":
            at, size = addresses["qkv".index(name)], {"q": q, "k": k, "v": v}[name].size
            seen[name] = np.ctypeslib.as_array((ctypes.c_float * size).from_address(at)).copy()
        else:
            at, size = addresses[3 if name == "out" else 4], given[name].size
            np.ctypeslib.as_array((ctypes.c_float * size).from_address(at))[:] = np.arange(size)

    family.on_launch = on_launch
    numbaflash.forward(q, k, v, **given)
    numbaflash.forward(q, k, v, **given)
    assert len(family.plans) == 1
    where = dict(zip(dispatch.OPERANDS, family.launches[-1], strict=False))
    for other, x in {"q": q, "k": k, "v": v, **given}.items():
        assert (where[other] == x.ctypes.data) == (other != name)
    if name in "qkv":
        np.testing.assert_array_equal(seen[name], {"q": q, "k": k, "v": v}[name].ravel())
    else:
        np.testing.assert_array_equal(given[name].ravel(), np.arange(given[name].size))


def test_elements_across_their_boundary_are_copied(fake):
    family = fake()
    q, k, v = operands()
    raw = np.zeros(q.nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(q.shape)
    odd[...] = q
    numbaflash.forward(odd, k, v)
    assert list(family.plans[0].copies) == ["q"] and "not aligned" in family.plans[0].copies["q"]
    assert family.plans[0].layouts.q.alignment == 16 and family.launches[0][0] % 4 == 0


def test_axes_of_one_element_have_the_strides_of_a_row_major_array(fake):
    family = fake()
    x = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (1, 1, 1, 8), (12, 20, 28, 4))
    numbaflash.forward(x, x, x)
    assert family.plans[0].layouts.q.strides == (32, 32, 32, 4)


def test_alignment_of_the_address(fake):
    family = fake()
    base = np.zeros(1024, np.float32)
    start = -(base.ctypes.data // 4) % 4
    for skip in range(5):
        q = base[start + skip :][:64].reshape(1, 8, 1, 8)
        numbaflash.forward(q, q, q)
    assert [plan.layouts.q.alignment for plan in family.plans] == [16, 4, 8, 4]


def test_an_allocator_of_little_alignment(fake, monkeypatch):
    """A new result may lie anywhere: it is then planned as if the caller had given it."""
    from numbaflash.arrays.numpy import NumPy

    family = fake()
    memory = np.zeros(4096, np.float32)
    odd = memory[(-(memory.ctypes.data // 4) % 4) + 1 :]

    def allocator(self, like, shape, dtype):
        return lambda stream: odd[: int(np.prod(shape))].reshape(shape)

    monkeypatch.setattr(NumPy, "allocator", allocator)
    q = np.zeros((1, 8, 1, 8), np.float32)
    out = numbaflash.forward(q, q, q)
    assert out.base is not None and family.plans[-1].layouts.out.alignment == 4
    assert family.launches == [(q.ctypes.data,) * 3 + (odd.ctypes.data, 0, 0)]


# Errors: DESIGN.md's row and the issue's list, by message

Q, K, V = operands()
OUT, LSE = np.zeros((2, 9, 4, 24), np.float32), np.zeros((2, 4, 9), np.float32)
READONLY = np.zeros((2, 9, 4, 24), np.float32)
READONLY.flags.writeable = False

BAD = [
    # rank and shapes
    (ValueError, r"q must have 4 axes \(batch, seqlen_q, heads, head_dim\); got 3 axes, shape \(9, 4, 16\)", (Q[0], K, V), {}),
    (ValueError, r"k must have 4 axes .*; got 5 axes", (Q, K[None], V), {}),
    (ValueError, r"v must have 4 axes .*; got 0 axes", (Q, K, np.zeros((), np.float32)), {}),
    (ValueError, r"k must have the same batch \(axis 0\) as q; got 1, expected 2", (Q, K[:1], V), {}),
    (ValueError, r"v must have the same batch \(axis 0\) as q; got 1, expected 2", (Q, K, V[:1]), {}),
    (ValueError, r"k must have the same head_dim \(axis 3\) as q; got 8, expected 16", (Q, K[..., :8], V), {}),
    (ValueError, r"v must have the same seqlen_k \(axis 1\) as k; got 12, expected 13", (Q, K, V[:, :12]), {}),
    (ValueError, r"v must have the same kv_heads \(axis 2\) as k; got 1, expected 2", (Q, K, V[:, :, :1]), {}),
    (ValueError, r"heads of q must be a multiple .*; got 3 query heads and 2 key/value heads", (Q[:, :, :3], K, V), {}),
    (ValueError, r"heads of q must be a multiple .*; got 4 query heads and 0 key/value heads", (Q, K[:, :, :0], V[:, :, :0]), {}),
    (ValueError, r"q must have a head dim \(axis 3\) from 1 to 256; got 0", (Q[..., :0], K[..., :0], V), {}),
    (ValueError, r"v must have a head dim \(axis 3\) from 1 to 256; got 0", (Q, K, V[..., :0]), {}),
    (ValueError, r"q must have a head dim \(axis 3\) from 1 to 256; got 257", (np.zeros((1, 2, 1, 257), np.float32),) * 3, {}),
    # dtypes and kinds
    (TypeError, r"q, k and v must have one dtype; got float32, float64, float32\. Cast", (Q, K.astype(np.float64), V), {}),
    (TypeError, r"q must be one of float16, bfloat16, float32, float64; got dtype int32", (Q.astype(np.int32),) * 3, {}),
    (TypeError, r"v must be one of .*; got dtype complex64", (Q, K, V.astype(np.complex64)), {}),
    (TypeError, r"k must be one of .*; got dtype object", (Q, K.astype(object), V), {}),
    (TypeError, r"q must be one of .*; got dtype bool", (Q > 0, K, V), {}),
    (TypeError, r"q must be one of .*; got dtype >f4 \(not in this machine's byte order\)", (Q.astype(">f4"), K, V), {}),
    (TypeError, r"q must be a plain array; got a masked array\. Fill it first \(q\.filled\(0\.0\)\)", (np.ma.masked_array(Q), K, V), {}),
    (TypeError, r"q must be an array of NumPy, .*; got list\. Convert it first, for example with numpy\.asarray", (Q.tolist(), K, V), {}),
    (TypeError, r"v must be an array of NumPy, .*; got NoneType", (Q, K, None), {}),
    (TypeError, r"k must be an array of NumPy, .*; got float32", (Q, np.float32(3), V), {}),
    (ValueError, r"q must have 4 axes .*; got 2 axes", (Q[0, 0].view(np.matrix), K, V), {}),
    # options
    (TypeError, r"scale must be a real number or None .*; got 'big'", (Q, K, V), {"scale": "big"}),
    (TypeError, r"scale must be a real number or None .*; got True", (Q, K, V), {"scale": True}),
    (TypeError, r"scale must be a real number or None .*; got 1j", (Q, K, V), {"scale": 1j}),
    (TypeError, r"scale must be a real number or None .*; got array\(1\.\)", (Q, K, V), {"scale": np.array(1.0)}),
    (ValueError, r"scale must be finite; got nan", (Q, K, V), {"scale": float("nan")}),
    (ValueError, r"scale must be finite; got inf", (Q, K, V), {"scale": float("inf")}),
    (ValueError, r"scale must be finite; got a number beyond the range of float64", (Q, K, V), {"scale": 10**400}),
    (ValueError, r'causal must be False, True \(bottom-right\) or "top_left"; got \'bottom\'', (Q, K, V), {"causal": "bottom"}),
    (ValueError, r"causal must be False, True .*; got 1", (Q, K, V), {"causal": 1}),
    (ValueError, r"causal must be False, True .*; got None", (Q, K, V), {"causal": None}),
    (ValueError, r"window left must not be negative .*; got -1", (Q, K, V), {"window": (-1, 0)}),
    (ValueError, r"window right must not be negative .*; got -2", (Q, K, V), {"window": (None, -2)}),
    (TypeError, r"window must be None or a pair \(left, right\); got 3", (Q, K, V), {"window": 3}),
    (TypeError, r"window must be None or a pair \(left, right\); got \(1, 2, 3\)", (Q, K, V), {"window": (1, 2, 3)}),
    (TypeError, r"window left must be an integer or None .*; got 1\.5", (Q, K, V), {"window": (1.5, 0)}),
    (TypeError, r"window right must be an integer or None .*; got True", (Q, K, V), {"window": (1, True)}),
    (TypeError, r"return_lse must be True or False; got 1", (Q, K, V), {"return_lse": 1}),
    (ValueError, r"dropout needs a seed", (Q, K, V), {"dropout": 0.1}),
    (TypeError, r"dropout must be a real number.*; got False", (Q, K, V), {"dropout": False}),
    (TypeError, r"dropout must be a real number.*; got array\(0.\)", (Q, K, V), {"dropout": np.array(0.0)}),
    # out, lse and stream
    (ValueError, r"out must have shape \(2, 9, 4, 24\); got \(2, 9, 4, 16\)", (Q, K, V), {"out": OUT[..., :16]}),
    (TypeError, r"out must have dtype float32; got float64", (Q, K, V), {"out": OUT.astype(np.float64)}),
    (TypeError, r"lse must have dtype float32; got float16", (Q, K, V), {"lse": LSE.astype(np.float16)}),
    (ValueError, r"lse must have shape \(2, 4, 9\); got \(2, 9, 4\)", (Q, K, V), {"lse": LSE.swapaxes(1, 2)}),
    (ValueError, r"out must be writable; got a read-only array", (Q, K, V), {"out": READONLY}),
    (ValueError, r"lse must be writable; got a read-only array", (Q, K, V), {"lse": READONLY[..., 0].swapaxes(1, 2)}),
    (
        ValueError,
        r"out must give every element a place of its own; got strides",
        (Q, K, V),
        {"out": np.lib.stride_tricks.as_strided(OUT, OUT.shape, (0, 4, 4, 4))},
    ),
    (ValueError, r"out must not share memory with q, which is read in the same call", (OUT, OUT[:, :, :2], V), {"out": OUT}),
    (ValueError, r"out must not share memory with v, which is read in the same call", (Q, Q[:, :, :2], OUT[:, :, :2]), {"out": OUT[:, ::-1]}),
    (
        ValueError,
        r"out must not share memory with lse, which is written in the same call",
        (Q, K, V),
        {"out": OUT, "lse": OUT.reshape(-1)[:72].reshape(2, 4, 9)},
    ),
    (ValueError, r"lse must not share memory with k, which is read in the same call", (Q, K, V), {"lse": K.reshape(-1)[:72].reshape(2, 4, 9)}),
    (TypeError, r"out must be an array of NumPy, .*; got list", (Q, K, V), {"out": OUT.tolist()}),
    (ValueError, r"stream is for arrays on a CUDA device; these are on the CPU", (Q, K, V), {"stream": 0}),
]


@pytest.mark.parametrize(("error", "message", "arrays", "options"), BAD, ids=[f"{i}-{case[1][:30]}" for i, case in enumerate(BAD)])
def test_bad_input(error, message, arrays, options):
    if "share memory with q" in message:
        arrays = (arrays[0], *(np.zeros((2, 13, 2, 24), np.float32),) * 2)
    for _ in range(2):  # an error is not remembered as a success
        with pytest.raises(error, match=message):
            numbaflash.forward(*arrays, **options)


def test_bad_options_after_good_ones_of_equal_value():
    """1.0 == True and True == 1: the look-up must not take one for the other."""
    numbaflash.forward(Q, K, V, scale=1.0, causal=True, window=(1, 0))
    for options, error in (
        ({"scale": True}, TypeError),
        ({"causal": 1}, ValueError),
        ({"window": (True, 0)}, TypeError),
        ({"window": (1.0, 0)}, TypeError),
    ):
        with pytest.raises(error):
            numbaflash.forward(Q, K, V, **{"scale": 1.0, "causal": True, "window": (1, 0), **options})
    with pytest.raises(ValueError, match="read-only"):
        numbaflash.forward(Q, K, V, out=READONLY)
    numbaflash.forward(Q, K, V, out=np.empty_like(READONLY))
    with pytest.raises(ValueError, match="read-only"):
        numbaflash.forward(Q, K, V, out=READONLY)


def test_nothing_is_written_when_a_call_fails():
    out = np.full_like(OUT, 7)
    for bad in ({"lse": LSE[..., :4]}, {"scale": float("nan")}, {"lse": READONLY}):
        with pytest.raises((TypeError, ValueError)):
            numbaflash.forward(Q, K, V, out=out, **bad)
    assert np.all(out == 7)


def test_unsupported_names_each_family_and_its_reason(fake):
    fake(reasons=("it is a test", "and wants no work"))
    with pytest.raises(
        UnsupportedError, match=r"no kernel family can compute this problem on cpu:\n  sm90: it is a test; and wants no work\n  simt: "
    ):
        numbaflash.forward(Q, K, V)
    assert issubclass(UnsupportedError, NotImplementedError)


def test_a_failing_launch_fails_the_call_and_the_next_works(fake):
    family = fake()

    def refuse(*addresses):
        raise RuntimeError("the device is on fire")

    family.on_launch = refuse
    with pytest.raises(RuntimeError, match="on fire"):
        numbaflash.forward(Q, K, V)
    family.on_launch = None
    numbaflash.forward(Q, K, V)


# Preparing once


def test_later_calls_prepare_nothing(fake):
    family = fake()
    for _ in range(3):
        numbaflash.forward(Q, K, V, causal=True)
        numbaflash.forward(Q.copy(), K.copy(), V.copy(), causal=True)
    assert len(family.plans) == 1 and len(family.launches) == 6
    numbaflash.forward(Q, K, V)
    numbaflash.forward(Q, K, V, causal=True, return_lse=True)
    numbaflash.forward(Q, K, V, causal=True, lse=LSE)
    numbaflash.forward(Q.astype(np.float16), K.astype(np.float16), V.astype(np.float16), causal=True)
    numbaflash.forward(Q[:, ::-1], K, V, causal=True)
    assert len(family.plans) == 6


def test_a_forced_family_is_another_kind(fake):
    family = fake()
    numbaflash.forward(Q, K, V)
    with dispatch.use_family("simt"):
        numbaflash.forward(Q, K, V)
    assert len(family.plans) == 2


def test_prepared_calls_are_bounded(fake, monkeypatch):
    family = fake()
    monkeypatch.setattr(call, "MAX_CALLS", 5)
    for n in range(1, 12):
        x = np.zeros((1, n, 1, 8), np.float32)
        numbaflash.forward(x, x, x)
        assert len(call._prepared) <= 5
    numbaflash.forward(x, x, x)
    assert len(family.plans) == 11


def test_prepared_calls_keep_no_array_alive(fake):
    import gc
    import weakref

    fake()
    q, k, v = (x.copy().view(Watched) for x in operands())
    out = np.empty((2, 9, 4, 24), np.float32).view(Watched)
    watched = [weakref.ref(x) for x in (q, k, v, out)]
    numbaflash.forward(q, k, v, out=out)
    del q, k, v, out
    gc.collect()
    assert not any(ref() is not None for ref in watched)


class Watched(np.ndarray):
    pass


def test_threads():
    """Eight threads share calls of a few kinds, the first of each kind included."""
    call.forget()
    cases = [(operands(seqlen_q=n, seed=n), {"causal": causal}) for n in (3, 9, 17) for causal in (False, True)]
    wanted = [expected(*arrays, **options)[0] for arrays, options in cases]
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(30):
                i = rng.integers(len(cases))
                arrays, options = cases[i]
                np.testing.assert_allclose(numbaflash.forward(*arrays, **options), wanted[i], rtol=1e-5, atol=1e-5)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_host_cost(fake, record_property):
    """The Python of a later call; printed, and bounded loosely because the machine may be busy."""
    fake()
    q = np.zeros((1, 128, 1, 128), np.float32)
    out, lse = np.empty_like(q), np.empty((1, 1, 128), np.float32)
    for name, options in (("new out and lse", {"return_lse": True}), ("given out and lse", {"out": out, "lse": lse, "return_lse": True})):
        microseconds = min(timeit.repeat(lambda o=options: numbaflash.forward(q, q, q, **o), number=200, repeat=50)) / 200 * 1e6
        print(f"{name}: {microseconds:.1f} us")
        record_property(name, microseconds)
        assert microseconds < 50


def test_logging(tmp_path):
    code = "import numpy as np, numbaflash as nf; x = np.zeros((1, 4, 1, 8), np.float32); nf.forward(x, x, x); nf.forward(x, x, x)"
    for level, plans, launches in (("", 0, 0), ("INFO", 1, 0), ("DEBUG", 1, 2)):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**_environment(), "NUMBAFLASH_LOG": level}, capture_output=True, text=True, check=True
        )
        assert done.stderr.count("plan: cpu on cpu for Problem(dtype='float32', batch=1") == plans
        assert done.stderr.count("launch: cpu on cpu for Problem(") == launches


def _environment():
    import os

    return dict(os.environ)


# Merge


def parts_of(q, k, v, cuts, **options):
    edges = [0, *cuts, k.shape[1]]
    return [numbaflash.forward(q, k[:, a:b], v[:, a:b], return_lse=True, **options) for a, b in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(), (5,), (0, 4, 4, 13)])
def test_merge(dtype, cuts):
    q, k, v = operands(dtype=DTYPES[dtype])
    parts = parts_of(q, k, v, cuts)
    for order in (parts, parts[::-1]):
        out, lse = numbaflash.merge(*(list(x) for x in zip(*order, strict=True)))
        assert out.dtype == DTYPES[dtype] and lse.dtype == parts[0][1].dtype
        assert_attention((out, lse), q, k, v, dtype)


def test_merge_is_exact_for_empty_parts():
    q, k, v = operands()
    out, lse = numbaflash.forward(q, k, v, return_lse=True)
    rubbish, nothing = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for outs, lses in (([out], [lse]), ([out, rubbish], [lse, nothing]), ([rubbish, out, rubbish], [nothing, lse, nothing])):
        got = numbaflash.merge(outs, lses)
        np.testing.assert_array_equal(got[0], out)
        np.testing.assert_array_equal(got[1], lse)
    got = numbaflash.merge([rubbish, rubbish], [nothing, nothing])
    assert not got[0].any() and np.all(got[1] == -np.inf)
    some = lse.copy()
    some[:, :, 4] = -np.inf  # one row alone
    mixed = out.copy()
    mixed[:, 4] = np.inf
    got = numbaflash.merge([mixed, mixed], [some, nothing])
    assert not got[0][:, 4].any() and np.all(got[1][:, :, 4] == -np.inf)


def test_merge_far_apart_and_nan():
    out, lse = np.ones((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1), np.float32)
    for shift in (-3e38, -1000, 1000, 3e38):
        got = numbaflash.merge([out, 3 * out], [lse, lse + np.float32(shift)])
        np.testing.assert_array_equal(got[0], out if shift < 0 else 3 * out)
        np.testing.assert_array_equal(got[1], max(0, np.float32(shift)))
    assert np.isnan(numbaflash.merge([out, out], [lse, lse * np.nan])[0]).all()
    assert np.isnan(numbaflash.merge([out, out * np.nan], [lse, lse - 1])[0]).all()


def test_merge_takes_any_strides_and_writes_nothing():
    q, k, v = operands()
    parts = parts_of(q, k, v, (6,))
    outs = [np.ascontiguousarray(out.swapaxes(1, 2)).swapaxes(1, 2) for out, _ in parts]
    lses = [np.repeat(lse, 2, axis=2)[..., ::2] for _, lse in parts]
    for x in (*outs, *lses):
        x.flags.writeable = False
    assert_attention(numbaflash.merge(tuple(outs), tuple(lses)), q, k, v)


O, L = np.zeros((2, 9, 4, 24), np.float32), np.zeros((2, 4, 9), np.float32)


@pytest.mark.parametrize(
    ("error", "message", "outs", "lses"),
    [
        (ValueError, "outs must hold at least one partial result; got none", [], []),
        (ValueError, "outs and lses must have the same length; got 2 and 1", [O, O], [L]),
        (TypeError, "outs must be a list or tuple of arrays, one for each part of the keys; got ndarray", O, [L]),
        (TypeError, r"lses must be a list or tuple of arrays", [O], L),
        (ValueError, r"outs\[0\] must have 4 axes \(batch, .*\), or 3 axes \(total_q, heads, head_dim_v\); got 2 axes", [O[0, 0]], [L]),
        (ValueError, r"lses\[0\] must have shape \(4, 9\); got \(2, 4, 9\)", [O[0]], [L]),
        (ValueError, r"outs\[1\] must have shape \(2, 9, 4, 24\); got \(2, 9, 4, 23\)", [O, O[..., :23]], [L, L]),
        (ValueError, r"lses\[0\] must have shape \(2, 4, 9\); got \(2, 9, 4\)", [O], [L.swapaxes(1, 2)]),
        (TypeError, r"outs\[1\] must have dtype float32, as outs\[0\] has; got float16", [O, O.astype(np.float16)], [L, L]),
        (TypeError, r"lses\[0\] must have dtype float32, as outs of float32 have; got float64", [O], [L.astype(np.float64)]),
        (TypeError, r"lses\[0\] must have dtype float64, as outs of float64 have; got float32", [O.astype(np.float64)], [L]),
        (TypeError, r"outs\[0\] must be one of .*; got dtype int64", [O.astype(int)], [L]),
        (TypeError, r"lses\[0\] must be an array of NumPy.*; got list", [O], [L.tolist()]),
    ],
)
def test_merge_bad_input(error, message, outs, lses):
    with pytest.raises(error, match=message):
        numbaflash.merge(outs, lses)


# Explain


def test_explain_runs_nothing_and_says_what_a_call_uses(fake):
    family = fake()
    told = numbaflash.explain(Q, K, V, causal=True, return_lse=True)
    assert not family.launches and told.plan is family.plans[0] and told.resources == {"registers": 1}
    numbaflash.forward(Q, K, V, causal=True, return_lse=True)
    assert family.plans[1] == told.plan
    text = str(told)
    for part in ("float32, q (2, 9, 4, 16), k (2, 13, 2, 16), v (2, 13, 2, 24)", "query i sees keys j <= i + 4", "registers 1", "copies", "none"):
        assert part in text
    assert numbaflash.explain(Q, K, V).plan.layouts.lse is None
    assert numbaflash.explain(Q, K, V, lse=LSE).plan.layouts.lse is not None


def test_explain_names_copies_and_the_other_families(fake):
    fake(copies=("k",))
    told = numbaflash.explain(Q, K, V)
    assert "k: a test wants it" in str(told)
    assert told.families == {"sm90": ("simt is preferred",), "cpu": ("simt is preferred",)}


def test_explain_on_the_cpu():
    told = numbaflash.explain(Q, K, V, window=(2, 1))
    assert told.plan.family == "cpu" and set(told.families) == {"sm90", "simt"} and all(told.families.values())
    assert "query i sees keys i + 2 <= j <= i + 5" in str(told) and "not sm90" in str(told)


def test_explain_refuses_what_forward_refuses(fake):
    x = np.zeros((1, 4, 2, 8), np.float32)
    for function in (numbaflash.explain, numbaflash.forward):
        with pytest.raises(ValueError, match="out must not share memory with q, which is read in the same call"):
            function(x, x.copy(), x.copy(), out=x)


def test_explain_of_nothing():
    told = numbaflash.explain(Q[:0], K[:0], V[:0])
    assert told.plan is None and "the result has no element" in str(told)


MASK, BIAS = np.ones((9, 13), bool), np.zeros((4, 1, 13), np.float16)
SLOPES, SINKS, LENGTHS = np.ones((2, 4), np.float32), np.zeros(4, np.float32), np.full(2, 5, np.int64)
EVERY_OPTION = {"softcap": 30, "mask": MASK, "bias": BIAS, "alibi_slopes": SLOPES, "sinks": SINKS, "dropout": 0.25, "seed": 3}
EVERY_OPTION |= {"seqlens_q": LENGTHS, "seqlens_k": LENGTHS.astype(np.int32)}


def test_explain_takes_what_forward_and_backward_take():
    def options(function):
        return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY and name != "stream"}

    arrays = {name: None for name in ("dout", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "page_table")}
    functions = numbaflash.forward, numbaflash.backward, numbaflash.forward_varlen, numbaflash.backward_varlen, numbaflash.decode
    want = {name: default for function in functions for name, default in options(function).items()} | arrays | {"direction": "forward"}
    assert options(numbaflash.explain) == want


def test_explain_shows_every_option():
    text = str(numbaflash.explain(Q, K, V, causal=True, window=(3, None), **EVERY_OPTION))
    for line in (
        r"band +query i sees keys i \+ seqlens_k - seqlens_q - 3 <= j <= i \+ seqlens_k - seqlens_q",
        r"softcap +30",
        r"mask +bool \(1, 1, 9, 13\)",
        r"bias +float16 \(1, 4, 1, 13\)",
        r"alibi_slopes +float32 \(2, 4\)",
        r"sinks +float32 \(4,\)",
        r"seqlens_q +int64 \(2,\)",
        r"seqlens_k +int32 \(2,\)",
        r"dropout +0.25",
        r"family +cpu",
        r"not sm90 +it needs a Hopper GPU",
    ):
        assert re.search(f"^{line}", text, re.M), f"{line} in\n{text}"
    plain = str(numbaflash.explain(Q, K, V))
    assert not any(re.search(f"^{name} ", plain, re.M) for name in EVERY_OPTION)
    assert "13 - seqlens_q" in str(numbaflash.explain(Q, K, V, causal=True, seqlens_q=LENGTHS))


@pytest.mark.parametrize("name", [name for name in EVERY_OPTION if name != "seed"])
def test_explain_plans_what_a_call_uses_with_options(fake, name):
    family = fake()
    options = {name: EVERY_OPTION[name]}
    told = numbaflash.explain(Q, K, V, **options)
    numbaflash.forward(Q, K, V, **options, **({"seed": 1} if name == "dropout" else {}))
    assert told.plan.problem.features == (name,) and family.plans == [told.plan, told.plan]


def test_explain_checks_as_forward_does():
    for options, message in (
        ({"mask": MASK.astype(int)}, "mask must be bool"),
        ({"bias": BIAS[..., :5]}, "bias must broadcast"),
        ({"softcap": 0}, "None is no cap"),
        ({"dropout": 1}, "dropout must be at least 0 and below 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"dlse": LSE, "needs": ("q",)}, 'dlse, needs: for the backward alone; pass direction="backward"'),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            numbaflash.explain(Q, K, V, **options)
    with pytest.raises(ValueError, match="out must be writable"):
        numbaflash.explain(Q, K, V, out=READONLY)
    with pytest.raises(TypeError, match="got list"):
        numbaflash.explain(Q.tolist(), K, V)
    with pytest.raises(TypeError, match="return_lse"):
        numbaflash.explain(Q, K, V, return_lse=None)


BAD_OPTIONS = {
    "int mask": (TypeError, "mask must be bool, .*; got dtype int64. Compare it with 0 first: mask != 0", {"mask": MASK.astype(int)}),
    "float mask": (TypeError, "mask must be bool, .*; got dtype float32. Numbers that are added .* are a bias", {"mask": MASK.astype(np.float32)}),
    "mask shape": (ValueError, r"mask must broadcast to .* = \(2, 4, 9, 13\), .*; got shape \(9, 12\)", {"mask": MASK[:, :12]}),
    "mask of key heads": (ValueError, r"mask must broadcast to .*; got shape \(2, 9, 13\)", {"mask": np.ones((2, 9, 13), bool)}),
    "bias shape": (ValueError, r"bias must broadcast to .*; got shape \(4, 1, 5\)", {"bias": BIAS[..., :5]}),
    "bool bias": (TypeError, "bias must be one of .*; got dtype bool. Pass what hides keys as mask", {"bias": MASK}),
    "slopes": (ValueError, r"alibi_slopes must have shape \(heads,\) = \(4,\) or .* \(2, 4\); got \(3,\)", {"alibi_slopes": SLOPES[0, :3]}),
    "slopes dtype": (TypeError, "alibi_slopes must be float32; got dtype float64", {"alibi_slopes": SLOPES.astype(float)}),
    "sinks": (ValueError, r"sinks must have shape \(heads,\) = \(4,\); got \(2,\)", {"sinks": SINKS[:2]}),
    "sinks dtype": (TypeError, "sinks must be float32 for q of float32; got dtype float16", {"sinks": SINKS.astype(np.float16)}),
    "dropout of 1": (ValueError, "dropout must be at least 0 and below 1; got 1.0", {"dropout": 1.0, "seed": 1}),
    "dropout below 0": (ValueError, "dropout must be at least 0 and below 1; got -0.1", {"dropout": -0.1, "seed": 1}),
    "dropout of a string": (TypeError, "dropout must be a real number, .*; got 'half'", {"dropout": "half", "seed": 1}),
    "large seed": (ValueError, r"seed must be at least 0 and below 2\*\*64; got 18446744073709551616", {"dropout": 0.5, "seed": 2**64}),
    "negative seed": (ValueError, r"seed must be at least 0 and below 2\*\*64; got -1", {"dropout": 0.5, "seed": -1}),
    "fractional seed": (TypeError, "seed must be an integer; got 0.5", {"dropout": 0.5, "seed": 0.5}),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
@pytest.mark.parametrize("entry", ["forward", "backward", "attention", "explain"])
def test_bad_options_are_told_at_every_entry(entry, name):
    error, message, options = BAD_OPTIONS[name]
    arrays = (OUT, Q, K, V, OUT, LSE) if entry == "backward" else (Q, K, V)
    with pytest.raises(error, match=message):
        getattr(numbaflash, entry)(*arrays, **options)


# Memory


def test_extent():
    assert extent(100, (2, 3), (12, 4), 4) == (100, 124)
    assert extent(100, (2, 3), (-12, 4), 4) == (88, 112)
    assert extent(100, (2, 0), (12, 4), 4) == (100, 100)
    assert extent(100, (5, 2), (0, 4), 4) == (100, 108)


def test_overlaps_agrees_with_numpy():
    rng = np.random.default_rng(1)
    base = np.zeros(400, np.int16)
    for _ in range(300):
        views = []
        for _ in range(2):
            cuts = [
                slice(int(a), int(a + n * s), int(s))
                for a, n, s in zip(rng.integers(0, 4, 2), rng.integers(1, 5, 2), rng.integers(1, 4, 2), strict=True)
            ]
            view = base.reshape(20, 20)[tuple(cuts)]
            views.append(view[::-1] if rng.random() < 0.5 else view)
        described = [(x.ctypes.data, x.shape, x.strides, 2) for x in views]
        assert overlaps(*described) == np.shares_memory(*views)


def test_overlaps_itself():
    assert not overlaps_itself((2, 3, 4), (48, 16, 4), 4)
    assert not overlaps_itself((2, 3, 4), (4, -32, 8), 4)
    assert overlaps_itself((2, 3), (0, 4), 4)
    assert overlaps_itself((2, 3), (8, 4), 4)
    assert overlaps_itself((3,), (2,), 4)
    assert not overlaps_itself((1, 3), (0, 4), 4)
    assert not overlaps_itself((0, 3), (0, 0), 4)
