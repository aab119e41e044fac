"""`backward` as a user calls it: results, needs, copies, workspaces, errors; on a fake family where only the road matters."""

from __future__ import annotations

import ctypes
import timeit

import numpy as np
import pytest
from attention import assert_close
from test_api import DTYPES, operands

import numbaflash
from numbaflash import call, dispatch, reference
from numbaflash.problem import NEEDS, UnsupportedError, make_problem

GRADIENTS = ("dq", "dk", "dv")


def saved(q, k, v, *, dlse=False, seed=1, **options):
    """dout, q, k, v, out and lse; and dlse among them if asked."""
    problem = make_problem(q.shape, k.shape, v.shape, [q.dtype.name] * 3, **options)
    out, lse = reference.forward(problem, *(x.astype(np.float64) for x in (q, k, v)))
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal(out.shape).astype(q.dtype)
    arrays = [dout, q, k, v, out.astype(q.dtype), lse.astype(problem.lse_dtype)]
    return (*arrays, rng.standard_normal(lse.shape).astype(problem.lse_dtype)) if dlse else tuple(arrays)


def wanted(dout, q, k, v, dlse=None, **options):
    problem = make_problem(q.shape, k.shape, v.shape, ["float64"] * 3, **options)
    return reference.backward(problem, dout, q, k, v, dlse)


class FakeFamily:
    """A family that computes nothing and notes what it is asked."""

    def __init__(self, copies=(), reasons=(), workspace_bytes=0):
        self.copies, self.reasons, self.workspace_bytes = dict.fromkeys(copies, "a test wants it"), reasons, workspace_bytes
        self.plans, self.launches = [], []
        self.on_launch = None

    def supports(self, problem, device):
        return self.reasons

    def plan(self, problem, layouts, device, deterministic):
        plan = dispatch.Plan(
            "simt", problem, device, layouts, direction="backward", deterministic=deterministic, workspace_bytes=self.workspace_bytes
        )
        plan.copies.update(self.copies)
        self.plans.append(plan)
        return plan

    def prepare(self, plan):
        def launch(addresses, stream):
            self.launches.append(dict(zip(dispatch.operands(plan.problem, "backward"), addresses, strict=True)) | {"stream": stream})
            if self.on_launch is not None:
                self.on_launch(self.launches[-1])

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
def test_backward(dtype, options):
    *arrays, dlse = saved(*operands(dtype=DTYPES[dtype]), dlse=True, **options)
    gradients = numbaflash.backward(*arrays, dlse=dlse, **options)
    for x, like in zip(gradients, arrays[1:4], strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape and x.flags.c_contiguous
    assert_close(gradients, wanted(*(x.astype(np.float64) for x in (*arrays[:4], dlse)), **options), dtype)


def test_gradients_are_given():
    arrays = saved(*operands())
    want = numbaflash.backward(*arrays, deterministic=True)
    given = np.full((2, 4, 9, 16), np.nan, np.float32).swapaxes(1, 2), np.full((2, 26, 2, 16), np.nan, np.float32)[:, ::-2], None
    dq, dk, dv = numbaflash.backward(*arrays, deterministic=True, dq=given[0], dk=given[1])
    assert dq is given[0] and dk is given[1]
    for mine, other in zip((dq, dk, dv), want, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_needs(fake):
    family = fake()
    arrays = saved(*operands())
    for needs in (("v",), ["v"], {"v"}, ("v", "v")):
        assert [x is None for x in numbaflash.backward(*arrays, needs=needs)] == [True, True, False]
    assert len(family.plans) == 1, "any spelling is one kind"
    layouts = family.plans[0].layouts
    assert layouts.dq is None and layouts.dk is None and layouts.dv is not None and layouts.dlse is None
    assert family.launches[0]["dq"] == 0 and family.launches[0]["dk"] == 0 and family.launches[0]["dv"] and family.launches[0]["dlse"] == 0
    numbaflash.backward(*arrays, needs=("v", "k", "q"))
    numbaflash.backward(*arrays)
    assert len(family.plans) == 2
    assert numbaflash.backward(*arrays, needs=()) == (None, None, None) and len(family.launches) == 6


def test_nothing_is_launched_where_nothing_is_seen(fake):
    family = fake()
    q, k, v = operands()
    for part in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0]), (q[:, :, :0], k, v), (q[:0], k[:0], v[:0])):
        given = {f"d{name}": np.full_like(x, np.nan) for name, x in zip(NEEDS, part, strict=True)}
        for results in ({}, given):
            gradients = numbaflash.backward(*saved(*part), **results, causal=True)
            assert all(x.shape == like.shape and not x.any() for x, like in zip(gradients, part, strict=True))
        assert [x is None for x in numbaflash.backward(*saved(*part), needs=("k",))] == [True, False, True]
    assert not family.plans


def test_dlse_is_read_when_there_is_one(fake):
    family = fake()
    *arrays, dlse = saved(*operands(), dlse=True)
    numbaflash.backward(*arrays, dlse=dlse)
    numbaflash.backward(*arrays)
    assert [plan.layouts.dlse is None for plan in family.plans] == [False, True]
    assert [launch["dlse"] for launch in family.launches] == [dlse.ctypes.data, 0]


def test_determinism_is_another_kind(fake):
    family = fake()
    arrays = saved(*operands())
    for deterministic in (False, True, np.True_):
        numbaflash.backward(*arrays, deterministic=deterministic)
    assert [plan.deterministic for plan in family.plans] == [False, True]


def test_forward_and_backward_of_equal_arrays_are_two_kinds(fake):
    family = fake()
    x = np.zeros((1, 4, 1, 8), np.float32)
    numbaflash.backward(x, x, x, x, x, np.zeros((1, 1, 4), np.float32))
    assert len(family.launches) == 1 and family.launches[0]["q"] == x.ctypes.data


@pytest.mark.parametrize("size", [1, 4, 1000, 4096])
def test_workspace(fake, size):
    """Of the caller's library, aligned, and large enough: writing all of it harms nothing."""
    family = fake(workspace_bytes=size)
    family.on_launch = lambda at: ctypes.memset(at["workspace"], 255, size)
    arrays = saved(*operands())
    for _ in range(20):
        numbaflash.backward(*arrays)
    assert all(launch["workspace"] % 256 == 0 and launch["workspace"] for launch in family.launches)


@pytest.mark.parametrize("name", [*dispatch.BACKWARD_OPERANDS[:-1]])
def test_copies_are_made_where_the_plan_says(fake, name):
    family = fake(copies=(name,))
    *arrays, dlse = (np.asarray(x[..., ::-1]) for x in saved(*operands(head_dim=16, head_dim_v=16), dlse=True))
    read = dict(zip(("dout", "q", "k", "v", "out", "lse"), arrays, strict=True)) | {"dlse": dlse}
    given = {f"d{x}": np.zeros((*read[x].shape[:3], 32), np.float32)[..., ::2] for x in NEEDS}
    held = {}

    def on_launch(at):
        array = (read | given)[name]
        memory = np.ctypeslib.as_array((ctypes.c_float * array.size).from_address(at[name]))
        if name in read:
            held[name] = memory.copy()
        else:
            memory[:] = np.arange(array.size)

    family.on_launch = on_launch
    for _ in range(2):
        numbaflash.backward(*arrays, dlse=dlse, **given)
    assert len(family.plans) == 1
    for other, x in (read | given).items():
        assert (family.launches[-1][other] == x.ctypes.data) == (other != name)
    if name in read:
        np.testing.assert_array_equal(held[name], read[name].ravel())
    else:
        np.testing.assert_array_equal(given[name].ravel(), np.arange(given[name].size))


def test_elements_across_their_boundary_are_copied(fake):
    family = fake()
    arrays = list(saved(*operands()))
    raw = np.zeros(arrays[0].nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(arrays[0].shape)
    odd[...] = arrays[0]
    numbaflash.backward(odd, *arrays[1:])
    assert list(family.plans[0].copies) == ["dout"] and family.launches[0]["dout"] % 4 == 0


def test_any_strides_of_dout(fake):
    family = fake()
    _, *arrays = saved(*operands())
    numbaflash.backward(np.broadcast_to(np.float32(1), arrays[3].shape), *arrays)
    assert family.plans[0].layouts.dout.strides == (0, 0, 0, 0)


def test_an_allocator_of_little_alignment(fake, monkeypatch):
    """A new gradient may lie anywhere: it is then planned as if the caller had given it."""
    from numbaflash.arrays.numpy import NumPy

    family = fake()
    memory = np.zeros(4096, np.float32)
    odd = memory[(-(memory.ctypes.data // 4) % 4) + 1 :]
    monkeypatch.setattr(NumPy, "allocator", lambda self, like, shape, dtype: lambda stream: odd[: int(np.prod(shape))].reshape(shape))
    x = np.zeros((1, 8, 1, 8), np.float32)
    _, dk, _ = numbaflash.backward(x, x, x, x, x, np.zeros((1, 1, 8), np.float32), needs=("k",))
    assert dk.base is not None and family.plans[-1].layouts.dk.alignment == 4
    assert len(family.launches) == 1 and family.launches[0]["dk"] == odd.ctypes.data


# Other libraries


def test_torch():
    torch = pytest.importorskip("torch")
    *arrays, dlse = saved(*operands(), dlse=True, causal=True)
    tensors = [torch.from_numpy(x) for x in arrays]
    gradients = numbaflash.backward(*tensors, dlse=torch.from_numpy(dlse), causal=True)
    assert all(isinstance(x, torch.Tensor) for x in gradients)
    assert_close([x.numpy() for x in gradients], wanted(*arrays[:4], dlse, causal=True))
    ones = torch.ones(()).expand(tensors[4].shape)
    assert_close(
        [x.numpy() for x in numbaflash.backward(ones, *tensors[1:], causal=True)], wanted(np.ones_like(arrays[4]), *arrays[1:4], causal=True)
    )
    dq = torch.empty_like(tensors[1])
    before = dq._version
    assert numbaflash.backward(*tensors, dq=dq, needs=("q",))[0] is dq and dq._version > before
    assert not numbaflash.backward(*(x[:, :0] if x.ndim == 4 else x[..., :0] for x in tensors))[1].any()


def test_torch_that_would_differentiate():
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x) for x in saved(*operands())]
    tensors[1].requires_grad_()
    with pytest.raises(ValueError, match=r"q takes part in automatic differentiation, and numbaflash\.forward, backward, .* record nothing"):
        numbaflash.backward(*tensors)
    with torch.no_grad():
        numbaflash.backward(*tensors)


class Lent:
    """An array that only lends its memory."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_borrowed_memory():
    *arrays, dlse = saved(*operands(), dlse=True)
    want = numbaflash.backward(*arrays, dlse=dlse, deterministic=True)
    dk = np.full_like(arrays[2], np.nan)
    given = Lent(dk)
    gradients = numbaflash.backward(*map(Lent, arrays), dlse=Lent(dlse), dk=given, deterministic=True)
    assert gradients[1] is given
    for mine, other in zip((gradients[0], dk, gradients[2]), want, strict=True):
        assert isinstance(mine, np.ndarray) and np.array_equal(mine, other)
    dq, none, _ = numbaflash.backward(*(Lent(x[:, :0]) if x.ndim == 4 and n in (2, 3) else Lent(x) for n, x in enumerate(arrays)), needs=("q",))
    assert none is None and dq.shape == arrays[1].shape and not dq.any()


def test_jax_arrays_are_told_what_to_do():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match=r"must not be JAX arrays.*numbaflash\.jax\.attention"):
        numbaflash.backward(*(jnp.asarray(x) for x in saved(*operands())))


# Errors

DOUT, Q, K, V, OUT, LSE, DLSE = saved(*operands(), dlse=True)
READONLY = np.zeros_like(Q)
READONLY.flags.writeable = False
SHARED = np.lib.stride_tricks.as_strided(Q.copy(), Q.shape, (0, 4, 4, 4))
INTEGERS = tuple(np.ones(x.shape, np.int32) for x in (DOUT, Q, K, V, OUT))


def with_(n, x):
    arrays = [DOUT, Q, K, V, OUT, LSE]
    arrays[n] = x
    return arrays


BAD = [
    # what the forward saved
    (TypeError, r"lse is missing: the backward needs the lse that numbaflash.forward\(..., return_lse=True\) returned; got None", with_(5, None), {}),
    (TypeError, r"out is missing: the backward needs the out", with_(4, None), {}),
    (TypeError, r"missing 1 required positional argument: 'lse'", (DOUT, Q, K, V, OUT), {}),
    (ValueError, r"lse must have shape \(2, 4, 9\), as numbaflash.forward returned it .*; got \(2, 9, 4\)", with_(5, LSE.swapaxes(1, 2)), {}),
    (TypeError, r"lse must have dtype float32, as numbaflash.forward returned it for this q, k and v; got float16", with_(5, LSE.astype("f2")), {}),
    (ValueError, r"out must have shape \(2, 9, 4, 24\), as numbaflash.forward returned it .*; got \(2, 9, 4, 16\)", with_(4, OUT[..., :16]), {}),
    (TypeError, r"out must have dtype float32, as numbaflash.forward returned it .*; got float64", with_(4, OUT.astype(float)), {}),
    # gradients of the results
    (TypeError, r"dout must have dtype float32, as out has; got float64", with_(0, DOUT.astype(float)), {}),
    (ValueError, r"dout must have shape \(2, 9, 4, 24\), as out has; got \(2, 9, 4, 1\)", with_(0, DOUT[..., :1]), {}),
    (TypeError, r"dout must be an array of NumPy, .*; got float", with_(0, 1.0), {}),
    (ValueError, r"dlse must have shape \(2, 4, 9\), as lse has; got \(2, 4, 8\)", with_(0, DOUT), {"dlse": DLSE[..., 1:]}),
    (TypeError, r"dlse must have dtype float32, as lse has; got float64", with_(0, DOUT), {"dlse": DLSE.astype(float)}),
    (TypeError, r"dlse must be an array of NumPy, .*; got list", with_(0, DOUT), {"dlse": DLSE.tolist()}),
    # inputs
    (TypeError, r"q must be one of float16, bfloat16, float32, float64; got dtype int32", (*INTEGERS, LSE), {}),
    (ValueError, r"k must have the same batch \(axis 0\) as q; got 1, expected 2", with_(2, K[:1]), {}),
    (TypeError, r"q, k and v must have one dtype", with_(3, V.astype(float)), {}),
    (TypeError, r"k must be an array of NumPy, .*; got list", with_(2, K.tolist()), {}),
    # needs and deterministic
    (ValueError, r'needs must hold nothing but "q", "k" and "v"; got \'x\'', with_(0, DOUT), {"needs": ("q", "x")}),
    (ValueError, r'needs must hold nothing but "q", "k" and "v"; got \'dq\'', with_(0, DOUT), {"needs": ("dq",)}),
    (TypeError, r'needs must be a tuple of "q", "k" and "v"; got \'qk\'', with_(0, DOUT), {"needs": "qk"}),
    (TypeError, r'needs must be a tuple of "q", "k" and "v"; got None', with_(0, DOUT), {"needs": None}),
    (ValueError, r'dk was given, but "k" is not in needs; got needs=\(\'q\', \'v\'\)', with_(0, DOUT), {"needs": ("v", "q"), "dk": np.empty_like(K)}),
    (TypeError, r"deterministic must be True or False; got 1", with_(0, DOUT), {"deterministic": 1}),
    (ValueError, r"scale must be finite; got nan", with_(0, DOUT), {"scale": float("nan")}),
    (ValueError, r"window left must not be negative", with_(0, DOUT), {"window": (-1, 0)}),
    (ValueError, r"dropout needs a seed", with_(0, DOUT), {"dropout": 0.1}),
    # gradients given
    (TypeError, r"dq must have dtype float32; got float64", with_(0, DOUT), {"dq": np.empty(Q.shape)}),
    (ValueError, r"dv must have shape \(2, 13, 2, 24\); got \(2, 13, 2, 16\)", with_(0, DOUT), {"dv": np.empty_like(K)}),
    (ValueError, r"dq must be writable; got a read-only array", with_(0, DOUT), {"dq": READONLY}),
    (ValueError, r"dq must give every element a place of its own", with_(0, DOUT), {"dq": SHARED}),
    (ValueError, r"dq must not share memory with q, which is read in the same call", with_(0, DOUT), {"dq": Q}),
    (ValueError, r"dk must not share memory with k, which is read in the same call", with_(0, DOUT), {"dk": K[:, ::-1]}),
    (ValueError, r"dv must not share memory with v, which is read in the same call", with_(0, DOUT), {"dv": V}),
    (TypeError, r"dq must be an array of NumPy, .*; got list", with_(0, DOUT), {"dq": Q.tolist()}),
    (ValueError, r"stream is for arrays on a CUDA device; these are on the CPU", with_(0, DOUT), {"stream": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "arrays", "options"), BAD, ids=[f"{i}-{case[1][:30]}" for i, case in enumerate(BAD)])
def test_bad_input(error, message, arrays, options):
    for _ in range(2):  # an error is not remembered as a success
        with pytest.raises(error, match=message):
            numbaflash.backward(*arrays, **options)


def test_gradients_that_touch_each_other_or_what_is_read():
    both = np.zeros((2, 26, 2, 16), np.float32)
    with pytest.raises(ValueError, match="dq must not share memory with dk, which is written in the same call"):
        numbaflash.backward(DOUT, Q, K, V, OUT, LSE, dq=both.reshape(-1)[: Q.size].reshape(Q.shape), dk=both[:, :13])
    numbaflash.backward(DOUT, Q, K, V, OUT, LSE, dk=both[:, :13])  # of the same kind
    square = [np.zeros((1, 8, 1, 16), np.float32) for _ in range(5)] + [np.zeros((1, 1, 8), np.float32)]
    for name, x in zip(("dout", "q", "k", "v", "out"), square, strict=False):
        with pytest.raises(ValueError, match=f"dv must not share memory with {name}, which is read"):
            numbaflash.backward(*square, dv=x)
    memory = np.zeros(128, np.float32)
    with pytest.raises(ValueError, match="dk must not share memory with dlse, which is read"):
        numbaflash.backward(*square, dlse=memory[:8].reshape(1, 1, 8), dk=memory.reshape(1, 8, 1, 16))


def test_results_between_the_inputs():
    """dk and dv lie in the gaps of one buffer with k and v: nothing is shared, although the extents cross."""
    dout, q, k, v, out, lse = saved(*operands(head_dim=16, head_dim_v=16))
    buffer = np.zeros((2, 13, 2, 4, 16), np.float32)
    buffer[..., 0, :], buffer[..., 1, :] = k, v
    kept, dk, dv = buffer[..., :2, :].copy(), buffer[..., 2, :], buffer[..., 3, :]
    numbaflash.backward(dout, q, buffer[..., 0, :], buffer[..., 1, :], out, lse, dk=dk, dv=dv)
    assert_close((dk, dv), wanted(dout, q, k, v)[1:])
    np.testing.assert_array_equal(buffer[..., :2, :], kept)


def test_nothing_is_written_when_a_call_fails():
    dq = np.full_like(Q, 7)
    for bad in ({"dlse": DLSE[..., :4]}, {"scale": float("nan")}, {"dk": K}):
        with pytest.raises((TypeError, ValueError)):
            numbaflash.backward(DOUT, Q, K, V, OUT, LSE, dq=dq, **bad)
    assert np.all(dq == 7)


def test_unsupported_names_each_family_and_its_reason(fake):
    fake(reasons=("it is a test",))
    with pytest.raises(UnsupportedError, match=r"no kernel family can compute this problem's gradients on cpu:\n  sm90: it is a test\n  simt: "):
        numbaflash.backward(DOUT, Q, K, V, OUT, LSE)


def test_later_calls_prepare_nothing(fake):
    family = fake()
    for _ in range(3):
        numbaflash.backward(DOUT, Q, K, V, OUT, LSE, causal=True)
        numbaflash.backward(*(x.copy() for x in (DOUT, Q, K, V, OUT, LSE)), causal=True)
    assert len(family.plans) == 1 and len(family.launches) == 6
    numbaflash.backward(DOUT, Q, K, V, OUT, LSE)
    numbaflash.backward(DOUT[:, ::-1], Q, K, V, OUT, LSE)
    numbaflash.backward(DOUT, Q, K, V, OUT, LSE, dq=np.empty_like(Q))
    with dispatch.use_family("simt"):
        numbaflash.backward(DOUT, Q, K, V, OUT, LSE)
    assert len(family.plans) == 5


def test_host_cost(fake, record_property):
    """The Python of a later call; printed, and bounded loosely because the machine may be busy."""
    fake(workspace_bytes=4096)
    x, lse = np.zeros((1, 128, 1, 128), np.float32), np.zeros((1, 1, 128), np.float32)
    given = {name: np.empty_like(x) for name in GRADIENTS}
    for name, options in (("new gradients", {}), ("given gradients", given)):
        microseconds = min(timeit.repeat(lambda o=options: numbaflash.backward(x, x, x, x, x, lse, **o), number=200, repeat=50)) / 200 * 1e6
        print(f"{name}: {microseconds:.1f} us")
        record_property(name, microseconds)
        assert microseconds < 60


# Explain


def test_explain_of_the_backward(fake):
    family = fake(workspace_bytes=1024)
    told = numbaflash.explain(Q, K, V, causal=True, direction="backward", deterministic=True)
    assert not family.launches and told.plan is family.plans[0] and told.plan.deterministic
    numbaflash.backward(DOUT, Q, K, V, OUT, LSE, causal=True, deterministic=True)
    assert family.plans[1] == told.plan
    assert "backward, deterministic" in str(told) and "1024 bytes" in str(told)
    assert told.families == {"sm90": ("simt is preferred",), "cpu": ("simt is preferred",)}
    told = numbaflash.explain(Q, K, V, direction="backward", out=OUT.swapaxes(1, 2).copy().swapaxes(1, 2), lse=LSE)
    assert told.plan.layouts.out.strides != OUT.strides and not told.plan.deterministic


def test_explain_of_the_backward_takes_all_of_its_arguments(fake):
    family = fake(workspace_bytes=64)
    bias, sinks = np.zeros((4, 9, 13), np.float32), np.zeros(4, np.float32)
    given = {"dlse": LSE.copy(), "dq": np.empty(Q.shape[::-1], Q.dtype).T, "dbias": np.empty_like(bias), "needs": ("q", "bias", "sinks")}
    options = {"bias": bias, "sinks": sinks, "softcap": 20.0}
    told = numbaflash.explain(Q, K, V, direction="backward", dout=DOUT[:, ::-1], **options, **given)
    numbaflash.backward(DOUT[:, ::-1], Q, K, V, OUT, LSE, **options, **given)
    assert family.plans == [told.plan, told.plan]
    assert told.plan.layouts.dk is None and told.plan.layouts.dq.strides == given["dq"].strides
    assert numbaflash.explain(Q, K, V, direction="backward", needs=()).plan is None
    with pytest.raises(ValueError, match='dv was given, but "v" is not in needs'):
        numbaflash.explain(Q, K, V, direction="backward", dv=np.empty_like(V), needs=("q",))
    with pytest.raises(ValueError, match='needs holds "bias", but no bias was given'):
        numbaflash.explain(Q, K, V, direction="backward", needs=("bias",))


def test_explain_of_gradients_of_nothing():
    told = numbaflash.explain(Q[:, -2:], K[:, :0], V[:, :0], direction="backward")
    assert told.plan is None and "no query sees a key, so every gradient is 0" in str(told)


def test_explain_checks_as_backward_does():
    with pytest.raises(ValueError, match="lse must have shape"):
        numbaflash.explain(Q, K, V, direction="backward", lse=LSE[..., :4])
    with pytest.raises(ValueError, match='direction must be "forward", "backward" or "decode"; got \'both\''):
        numbaflash.explain(Q, K, V, direction="both")
    with pytest.raises(TypeError, match="deterministic must be True or False"):
        numbaflash.explain(Q, K, V, deterministic=None)
