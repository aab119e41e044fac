"""Score options through JAX on the CPU: values and gradients against the float64 reference, under jit, vmap, shard_map and other transformations."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from attention import TOLERANCE

import numbaflash
from numbaflash import UnsupportedError, reference
from numbaflash.dispatch import BACKWARD_OPERANDS
from numbaflash.problem import DIFFERENTIABLE, NEEDS, make_problem

jax = pytest.importorskip("jax")
jnp = jax.numpy
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64  # before JAX 0.8
ROOT = Path(__file__).resolve().parent.parent

B, SQ, SK, H, HK, D, DV = 2, 19, 23, 4, 2, 16, 24
BAND = {"causal": True}


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def made(seed=0, batch=B):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in ((batch, SQ, H, D), (batch, SK, HK, D), (batch, SK, HK, DV))]


def options(name, seed=5):
    """(options that are numbers, those that are arrays); the lengths are of NumPy's default size, which JAX has only with x64."""
    rng = np.random.default_rng(seed)
    mask = rng.random((B, 1, SQ, SK)) > 0.4
    mask[0, 0, 3] = False
    arrays = {
        "mask": {"mask": mask},
        "mask of all": {"mask": mask[1, 0]},
        "bias": {"bias": rng.standard_normal((1, H, 1, SK))},
        "bias of all": {"bias": rng.standard_normal((SQ, SK))},
        "slopes": {"alibi_slopes": rng.random(H).astype(np.float32)},
        "slopes of entries": {"alibi_slopes": rng.random((B, H)).astype(np.float32)},
        "sinks": {"sinks": rng.standard_normal(H)},
        "lengths": {"seqlens_q": np.array([19, 7], np.int32), "seqlens_k": np.array([11, 23], np.int32)},
    }
    numbers = {"softcap": {"softcap": 1.5}, "dropout": {"dropout": 0.25, "seed": 2**64 - 5}}
    if name == "all":
        return BAND | numbers["softcap"] | numbers["dropout"], {key: x for each in arrays.values() for key, x in each.items()}
    return BAND | numbers.get(name, {}), arrays.get(name, {})


NAMES = ("mask", "mask of all", "bias", "bias of all", "slopes", "slopes of entries", "softcap", "sinks", "lengths", "dropout", "all")


def given(arrays, dtype="float32"):
    """As JAX arrays: bias of the dtype of q, sinks of that of the LSE."""
    dtypes = {"q": dtype, "k": dtype, "v": dtype, "bias": dtype, "sinks": "float64" if dtype == "float64" else "float32"}
    return {name: jnp.asarray(x, dtypes.get(name, x.dtype)) for name, x in arrays.items()}


def exact(arrays, numbers, dout=None, dlse=None):
    """out, lse, and gradients by name where there is dout, in float64, of arrays as they were rounded."""
    arrays = {name: np.asarray(x, np.float64 if name in DIFFERENTIABLE else None) for name, x in arrays.items()}
    seed = numbers.get("seed", 0)
    numbers = {name: x for name, x in numbers.items() if name != "seed"}
    facts = {name: (x.shape, x.dtype.name) for name, x in arrays.items() if name not in NEEDS}
    problem = make_problem(*(arrays[name].shape for name in NEEDS), ["float64"] * 3, **numbers, **facts)
    qkv, further = [arrays[name] for name in NEEDS], {name: arrays[name] for name in facts}
    out, lse = reference.forward(problem, *qkv, seed=seed, **further)
    if dout is None:
        return out, lse
    found = reference.backward(problem, dout, *qkv, dlse, seed=seed, **further)
    return out, lse, {name: x.reshape(arrays[name].shape) for name, x in zip(problem.gradients, found, strict=True)}


def assert_near(got, want, dtype="float32", times=8):
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=times * TOLERANCE[dtype], atol=times * TOLERANCE[dtype])


def differentiated(arrays, numbers, dout, dlse, attention=numbaflash.attention):
    """out, lse and the gradients of all that have one."""
    names = [name for name in DIFFERENTIABLE if name in arrays]
    constant = {name: x for name, x in arrays.items() if name not in names}

    def run(*leaves):
        return attention(**dict(zip(names, leaves, strict=True)), **constant, **numbers, return_lse=True)

    (out, lse), pullback = jax.vjp(run, *(arrays[name] for name in names))
    return out, lse, dict(zip(names, pullback((dout, dlse)), strict=True))


def check(arrays, numbers, dtype="float32", jitted=False):
    rng = np.random.default_rng(9)
    out, lse = exact(arrays, numbers)
    dout, dlse = (
        jnp.asarray(rng.standard_normal(out.shape), dtype),
        jnp.asarray(rng.standard_normal(lse.shape), given({"sinks": lse}, dtype)["sinks"].dtype),
    )
    run = differentiated if not jitted else jax.jit(lambda arrays, *more: differentiated(arrays, numbers, *more))
    got = run(arrays, dout, dlse) if jitted else run(arrays, numbers, dout, dlse)
    want = exact(arrays, numbers, np.asarray(dout, np.float64), np.asarray(dlse, np.float64))
    assert_near(got[0], want[0], dtype)
    assert_near(got[1], want[1], dtype)
    assert sorted(got[2]) == sorted(want[2])
    for name, gradient in got[2].items():
        assert gradient.shape == arrays[name].shape and gradient.dtype == arrays[name].dtype
        assert_near(gradient, want[2][name], dtype, 32)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_reference(name, jitted):
    numbers, arrays = options(name)
    check(given(dict(zip(NEEDS, made(), strict=True)) | arrays), numbers, jitted=jitted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    numbers, arrays = options("all")
    with enable_x64(dtype == "float64"):
        arrays |= {"seqlens_k": arrays["seqlens_k"].astype(np.int64)} if dtype == "float64" else {}
        check(given(dict(zip(NEEDS, made(), strict=True)) | arrays, dtype), numbers, dtype, jitted=True)


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_attention(name):
    numbers, arrays = options(name)
    arrays = given(dict(zip(NEEDS, made(), strict=True)) | arrays)
    want = numbaflash.attention(**arrays, **numbers)
    for run in (numbaflash.forward, jax.jit(lambda **arrays: numbaflash.forward(**arrays, **numbers))):
        got = run(**arrays) if run is not numbaflash.forward else run(**arrays, **numbers)
        np.testing.assert_array_equal(got, want)
    as_numpy = numbaflash.forward(**{name: np.asarray(x) for name, x in arrays.items()}, **numbers)
    np.testing.assert_array_equal(as_numpy, want)


def test_options_are_operands():
    """One program serves all their values."""
    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    traced = []

    @jax.jit
    def run(q, k, v, more):
        traced.append(None)
        return numbaflash.attention(q, k, v, **more, **numbers)

    numbers = options("all")[0]
    for seed in range(3):
        arrays = given(options("all", seed)[1])
        want, _ = exact({"q": q, "k": k, "v": v} | arrays, numbers)
        assert_near(run(q, k, v, arrays), want)
    assert len(traced) == 1


@pytest.mark.parametrize("needs", [("bias",), ("sinks",), ("v", "bias"), ("q", "bias", "sinks")])
def test_nothing_is_computed_that_nobody_needs(needs):
    numbers, arrays = options("all")
    arrays = given(dict(zip(NEEDS, made(), strict=True)) | arrays)

    def loss(leaves):
        return (numbaflash.attention(**(arrays | leaves), **numbers) ** 2).sum()

    leaves = {name: arrays[name] for name in needs}
    assert json.dumps(needs) in str(jax.make_jaxpr(jax.grad(loss))(leaves))
    found = jax.grad(loss)(leaves)
    out, _ = exact(arrays, numbers)
    *_, want = exact(arrays, numbers, 2 * out)
    for name in needs:
        assert_near(found[name], want[name], times=32)


def test_seeds():
    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    attention = numbaflash.attention
    assert not np.array_equal(attention(q, k, v, dropout=0.5, seed=1), attention(q, k, v, dropout=0.5, seed=2))
    assert not np.array_equal(attention(q, k, v, dropout=0.5, seed=1), attention(q, k, v, dropout=0.5, seed=1 + 2**32))
    np.testing.assert_array_equal(attention(q, k, v, dropout=0.0, seed=1), attention(q, k, v))
    jitted = jax.jit(lambda q, seed: attention(q, k, v, dropout=0.5, seed=seed), static_argnames="seed")
    for seed in (np.uint32(3), 2**64 - 1):
        np.testing.assert_array_equal(jitted(q, seed=seed), attention(q, k, v, dropout=0.5, seed=seed))
    with pytest.raises(TypeError, match=r"seed must be an integer, known before the program runs; got a traced array\. Make it a static argument"):
        jax.jit(lambda seed: attention(q, k, v, dropout=0.5, seed=seed))(3)
    with pytest.raises(TypeError, match="seed must be an integer, .*; got a JAX array"):
        attention(q, k, v, dropout=0.5, seed=jnp.int32(3))


def test_a_new_seed_prepares_no_new_launch():
    from numbaflash.jax import launches, operations

    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    jax.grad(lambda q: numbaflash.attention(q, k, v, dropout=0.5, seed=11).sum())(q)
    before = launches.forward_launch.cache_info().misses, launches.backward_plan.cache_info().misses
    jax.grad(lambda q: numbaflash.attention(q, k, v, dropout=0.5, seed=12).sum())(q)
    assert (launches.forward_launch.cache_info().misses, launches.backward_plan.cache_info().misses) == before
    for attention in (numbaflash.attention, numbaflash.forward):
        attention(q, k, v, dropout=0.0, seed=11)
        before = operations.operation.cache_info().misses
        attention(q, k, v, dropout=0.0, seed=12)
        assert operations.operation.cache_info().misses == before, "without dropout, no new program either"


def test_what_is_hidden_may_hold_anything():
    numbers, arrays = options("lengths")
    q, k, v = made()
    for b in range(B):
        q[b, arrays["seqlens_q"][b] :] = np.nan
        k[b, arrays["seqlens_k"][b] :], v[b, arrays["seqlens_k"][b] :] = np.inf, np.nan
    gradients = jax.jit(jax.grad(lambda x: numbaflash.attention(**x, **given(arrays), **numbers).sum()))(given({"q": q, "k": k, "v": v}))
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all()
        assert all((gradient[b, arrays[f"seqlens_{'q' if name == 'q' else 'k'}"][b] :] == 0).all() for b in range(B))


def test_sizes_of_zero():
    numbers, arrays = options("all")
    q, k, v = made()
    cases = {
        "no keys": ({"q": q, "k": k[:, :0], "v": v[:, :0]}, lambda x: x[..., :0] if x.ndim in (2, 4) and x.shape[-1] == SK else x),
        "no queries": ({"q": q[:, :0], "k": k, "v": v}, lambda x: x[..., :0, :] if x.ndim in (2, 4) and x.shape[-2] == SQ else x),
        "no batch": ({"q": q[:0], "k": k[:0], "v": v[:0]}, lambda x: x[:0] if x.shape[0] == B else x),
    }
    for own, cut in cases.values():
        check(given(own | {name: cut(x) for name, x in arrays.items()}), numbers, jitted=True)


def test_slopes_have_no_gradient():
    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    slopes = jnp.ones(H)

    def loss(slopes, keep=lambda x: x):
        return numbaflash.attention(q * slopes[0], k, v, alibi_slopes=keep(slopes)).sum()

    for run in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(UnsupportedError, match=r"alibi_slopes requires a gradient, .*Pass jax\.lax\.stop_gradient\(alibi_slopes\)"):
            run(slopes)
    assert jax.grad(lambda x: loss(x, jax.lax.stop_gradient))(slopes).shape == (H,)


def test_derivatives_that_are_refused():
    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    bias = jnp.zeros((SQ, SK))
    with pytest.raises(UnsupportedError, match=r"numbaflash\.forward cannot be differentiated"):
        jax.grad(lambda bias: numbaflash.forward(q, k, v, bias=bias).sum())(bias)
    once = jax.grad(lambda bias: (numbaflash.attention(q, k, v, bias=bias) ** 2).sum())
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        jax.grad(lambda bias: once(bias).sum())(bias)


def test_checkpoint_and_scan():
    numbers, arrays = options("all")
    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    more = given(arrays)
    layers = {name: jnp.stack([more.pop(name), more_again]) for name, more_again in (("bias", more["bias"] / 2), ("sinks", more["sinks"] + 1))}

    def layer(q, own):
        out = numbaflash.attention(q, k, v, **more, **own, **numbers)
        return q + out[..., :D], None

    def scanned(q, layers):
        return (jax.lax.scan(jax.checkpoint(layer), q, layers)[0] ** 2).mean()

    def unrolled(q, layers):
        for n in range(2):
            q, _ = layer(q, {name: x[n] for name, x in layers.items()})
        return (q**2).mean()

    got, want = (jax.jit(jax.grad(f, (0, 1)))(q, layers) for f in (scanned, unrolled))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# vmap


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_a_loop(name, batch, jitted):
    """Of values and gradients, whichever of the arrays differ from element to element."""
    numbers, more = options(name)
    more = {key: x[:batch] if x.shape[0] == B and key != "sinks" else x for key, x in more.items()}
    arrays = given(dict(zip(NEEDS, made(batch=batch), strict=True)) | more)

    def run(arrays):
        leaves = {key: x for key, x in arrays.items() if key in DIFFERENTIABLE}
        constant = {key: x for key, x in arrays.items() if key not in leaves}

        def loss(leaves):
            out, lse = numbaflash.attention(**leaves, **constant, **numbers, return_lse=True)
            return (out**2).sum() + jnp.where(jnp.isinf(lse), 0, lse).mean(), (out, lse)

        return jax.grad(loss, has_aux=True)(leaves)

    for differing in (set(arrays), {"q", "k", "v"}, {"q", *more}, {"k"}):
        axes = {key: 1 if key in differing else None for key in arrays}
        several = {key: jnp.stack([x, jnp.flip(x, -1), x], 1) if key in differing else x for key, x in arrays.items()}
        mapped = jax.vmap(run, (axes,))
        got = (jax.jit(mapped) if jitted else mapped)(several)
        for i in range(3):
            want = run({key: x[:, i] if key in differing else x for key, x in several.items()})
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_vmap():
    """What is the same for all elements gets the sum of their gradients."""
    numbers, arrays = options("all")
    qkv = given(dict(zip(NEEDS, made(), strict=True)))
    constant = given({name: x for name, x in arrays.items() if name not in ("bias", "sinks")})
    q = jnp.stack([qkv["q"], 2 * qkv["q"]])
    bias, sinks = given({"bias": arrays["bias"], "sinks": arrays["sinks"]}).values()

    def loss(many):
        def of(q, bias, sinks, k):
            run = lambda q, bias: (numbaflash.attention(q, k, qkv["v"], bias=bias, sinks=sinks, **constant, **numbers) ** 2).sum()  # noqa: E731
            return many(run, q, jnp.stack([bias, 2 * bias])).sum() + many(lambda q, _: run(q, bias), q, q).sum()

        return jax.grad(of, (0, 1, 2, 3))(q, bias, sinks, qkv["k"])

    got = loss(lambda run, *x: jax.vmap(run)(*x))
    want = loss(lambda run, *x: jnp.stack([run(*(each[i] for each in x)) for i in range(2)]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_vmap_within_vmap():
    numbers, arrays = options("all")
    qkv = given(dict(zip(NEEDS, made(), strict=True)))
    more = given(arrays)
    queries = jnp.stack([qkv["q"], 2 * qkv["q"], -qkv["q"]])
    sinks = jnp.stack([more["sinks"], more["sinks"] + 1])

    def run(q, sinks):
        return numbaflash.attention(q, qkv["k"], qkv["v"], **(more | {"sinks": sinks}), **numbers)

    got = jax.jit(jax.vmap(jax.vmap(run, (0, None)), (None, 0)))(queries, sinks)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(got[i, j], run(queries[j], sinks[i]), rtol=1e-5, atol=1e-6)
    assert jax.vmap(run, (0, None))(queries[:0], sinks[0]).shape == (0, B, SQ, H, DV)


@pytest.mark.parametrize("name", ["dropout", "all"])
def test_rows_of_a_jacobian(name):
    """jacrev batches the backward alone: it must drop what the forward dropped."""
    numbers, arrays = options(name)
    qkv = given(dict(zip(NEEDS, made(), strict=True)))
    more = given(arrays)
    out, pullback = jax.vjp(lambda q, v: numbaflash.attention(q, qkv["k"], v, **more, **numbers), qkv["q"], qkv["v"])
    rng = np.random.default_rng(2)
    douts = jnp.asarray(rng.standard_normal((3, *out.shape)), jnp.float32)
    got = jax.vmap(pullback)(douts)
    for i in range(3):
        for one, other in zip(got, pullback(douts[i]), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-6)


BASE = {"q": (B, 5, H, D), "k": (B, 6, HK, D)}


@pytest.mark.parametrize(
    ("shapes", "want"),
    [
        ({}, {}),
        ({"mask": (3, B, 1, 5, 6)}, {"mask": (3 * B, 1, 5, 6)}),
        ({"mask": (3, 1, 1, 5, 6)}, None),
        ({"mask": (3, 5, 6)}, None),
        ({"mask": (1, 5, 6)}, {"mask": (1, 1, 5, 6)}),
        ({"mask": (1, B, 1, 5, 6)}, None),
        ({"bias": (3, B, 1, 5, 6), "dbias": (3, B, 1, 5, 6)}, {"bias": (3 * B, 1, 5, 6), "dbias": (3 * B, 1, 5, 6)}),
        ({"bias": (1, 5, 6), "dbias": (3, 5, 6)}, None),
        ({"bias": (1,), "dbias": (3,)}, None),
        ({"alibi_slopes": (1, H)}, {"alibi_slopes": (H,)}),
        ({"alibi_slopes": (3, H)}, None),
        ({"alibi_slopes": (3, B, H)}, {"alibi_slopes": (3 * B, H)}),
        ({"alibi_slopes": (1, B, H)}, None),
        ({"sinks": (1, H)}, {"sinks": (H,)}),
        ({"sinks": (3, H)}, None),
        ({"sinks": (1, H), "dsinks": (3, H)}, None),
        ({"seqlens_k": (3, B)}, {"seqlens_k": (3 * B,)}),
        ({"seqlens_k": (1, B)}, None),
    ],
)  # fmt: skip
def test_what_joins_the_batch(shapes, want):
    from numbaflash.jax.batching import join

    base = {name: (3, *shape) for name, shape in BASE.items()}
    joined = {name: (3 * B, *shape[1:]) for name, shape in BASE.items()}
    assert join(base | shapes, (3,), False) == (None if want is None else joined | want)
    assert join(base | shapes, (3,), True) is None
    alone = {name: (1, 1, *shape[shape[0] in (1, 3) :]) for name, shape in shapes.items()}
    assert join({name: (1, 1, *shape) for name, shape in BASE.items()} | alone, (1, 1), True) == BASE | {
        name: shape[2:] for name, shape in alone.items()
    }


def test_one_entry_joins_the_batch_with_the_options_of_all():
    from numbaflash.jax.batching import join

    shapes = {"q": (3, 1, 5, H, D), "mask": (3, 5, 6), "alibi_slopes": (3, H), "bias": (1, 1, 5, 6)}
    assert join(shapes, (3,), False) == {"q": (3, 5, H, D), "mask": (3, 1, 5, 6), "alibi_slopes": (3, H), "bias": (1, 1, 5, 6)}
    assert join({"q": (3, 2, 1, 5, H, D), "k": (3, 1, 1, 5, H, D)}, (3, 2), False) is None


def test_keys_that_are_the_same_for_all_elements_are_not_copied():
    """XLA hands the handler one of them, and each launch reads it."""
    numbers, arrays = options("mask")
    qkv = given(dict(zip(NEEDS, made(), strict=True)) | arrays)
    program = jax.jit(jax.vmap(lambda q: numbaflash.attention(**(qkv | {"q": q}), **numbers))).lower(jnp.stack([qkv["q"]] * 3)).as_text()
    assert f"tensor<1x{B}x{SK}x{HK}x{D}xf32>" in program and f"tensor<3x{B}x{SK}x{HK}x{D}xf32>" not in program
    assert f"tensor<1x{B}x1x{SQ}x{SK}xi1>" in program and f"tensor<3x{B}x1x{SQ}x{SK}xi1>" not in program


# What a GPU is told


class GpuCall:
    """A call as XLA makes it for a GPU: buffers in host memory, and launches that only take notes."""

    def __init__(self, monkeypatch, needed=0):
        from numbaflash.jax import abi, serving

        self.abi, self.serving, self.launches, self.kinds, self.kept = abi, serving, [], [], []
        launch = lambda addresses, stream: self.launches.append((addresses, stream))  # noqa: E731
        monkeypatch.setattr(serving, "forward_launch", lambda *kind: self.kinds.append(kind) or launch)
        monkeypatch.setattr(serving, "forward_plan", lambda *kind: SimpleNamespace(workspace_bytes=needed))
        monkeypatch.setattr(serving, "backward_launch", lambda *kind: self.kinds.append(kind) or (launch, needed))

    def buffer(self, x):
        dims = (ctypes.c_int64 * x.ndim)(*x.shape)
        self.kept.append(dims)
        codes = {"bool": 1, "int32": 4, "uint8": 6, "float32": 11}
        return self.abi.Buffer(dtype=codes[x.dtype.name], data=x.ctypes.data, rank=x.ndim, dims=dims)

    def run(self, direction, told, inputs, results, seed=0):
        self.serving._service.cache_clear()
        self.serving.serve(direction, json.dumps(told), seed, [self.buffer(x) for x in (*inputs, *results)], "cuda", 0, 77, True)
        self.serving._service.cache_clear()
        return self.launches


def test_a_gpu_gets_addresses_in_the_order_of_the_operands(monkeypatch):
    call = GpuCall(monkeypatch)
    q, k, v, mask, sinks, out = (
        np.zeros(shape, dtype)
        for shape, dtype in (
            *(((B, SQ, H, D), "f4"), ((B, SK, HK, D), "f4"), ((B, SK, HK, DV), "f4")),
            *(((SQ, SK), "?"), ((H,), "f4"), ((B, SQ, H, DV), "f4")),
        )
    )
    told = {"arrays": ["mask", "sinks"], "dropout": 0.5}
    (addresses, stream), *others = call.run("forward", told, (q, k, v, mask, sinks), (out,), seed=2**64 - 1)
    assert stream == 77 and not others
    no_lse = no_workspace = 0
    assert addresses == (*(x.ctypes.data for x in (q, k, v, out)), no_lse, mask.ctypes.data, sinks.ctypes.data, 2**64 - 1, no_workspace)
    options, with_lse, shapes, dtypes, kind, index, _ = call.kinds[0]
    assert not with_lse and shapes == ((B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, DV), (SQ, SK), (H,)) and (kind, index) == ("cuda", 0)
    assert dtypes == ("float32",) * 3 + ("bool", "float32")


def test_elements_on_a_gpu_one_after_the_other(monkeypatch):
    """Dropout: each element draws as it would by itself; what all share is read in place, and alignments are those of every element."""
    call = GpuCall(monkeypatch, needed=1000)
    shapes = [(3, B, 5, H, DV), (3, B, 5, H, D), (1, B, 6, HK, D), (1, B, 6, HK, DV), (3, B, 5, H, DV), (3, B, H, 5)]
    inputs = [*(np.zeros(shape, np.float32) for shape in shapes), np.zeros((3, 5, 6), bool), np.zeros((1, H), np.float32)]
    results = [np.zeros((3, B, 5, H, D), np.float32), np.zeros((3, H), np.float32), np.zeros((3, 1256), np.uint8)]
    told = {"arrays": ["mask", "sinks"], "dropout": 0.5, "needs": ["q", "sinks"]}
    launches = call.run("backward", told, inputs, results, seed=9)
    (kind,) = call.kinds
    assert kind[1] == ((B, 5, H, D), (B, 6, HK, D), (B, 6, HK, DV), (5, 6), (H,))
    assert dict(kind[5])["mask"] == math.gcd(16, 30, inputs[6].ctypes.data) and "q" not in dict(kind[5])
    assert len(launches) == 3
    for i, (addresses, stream) in enumerate(launches):
        at = dict(zip((*BACKWARD_OPERANDS[:-1], "mask", "sinks", "seed", "dsinks", "workspace"), addresses, strict=True))
        for name, x in zip((*BACKWARD_OPERANDS[:6], "mask", "sinks", "dq", "dsinks"), (*inputs, *results), strict=False):
            assert at[name] == x[i if len(x) == 3 else 0].ctypes.data, name
        assert at["seed"] == 9 and at["dlse"] == at["dk"] == at["dv"] == 0 and stream == 77
        assert at["workspace"] % 256 == 0 and 0 <= at["workspace"] - results[2].ctypes.data < 256


@pytest.fixture
def on_a_gpu():
    try:
        where = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("this JAX has no CUDA")
    with jax.default_device(where):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", NAMES)
def test_gpu_against_the_reference(name):
    numbers, arrays = options(name)
    check(given(dict(zip(NEEDS, made(), strict=True)) | arrays), numbers)
    check(given(dict(zip(NEEDS, made(), strict=True)) | arrays, "bfloat16"), numbers, "bfloat16", jitted=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_a_gpu")
def test_gpu_elements_one_after_the_other():
    """More launches than XLA makes a CUDA graph of, each time with other values."""
    numbers, arrays = options("all")
    arrays = given(dict(zip(NEEDS, made(), strict=True)) | arrays)
    run = jax.jit(jax.vmap(lambda q: differentiated(arrays | {"q": q}, numbers, jnp.ones((B, SQ, H, DV)), jnp.zeros((B, H, SQ)))))
    for factor in (1.0, 0.5, 2.0):
        queries = jnp.stack([arrays["q"] * factor * i for i in range(1, 5)])
        out, lse, gradients = run(queries)
        for i, q in enumerate(queries):
            want = exact(arrays | {"q": q}, numbers, np.ones((B, SQ, H, DV)))
            assert_near(out[i], want[0])
            assert_near(lse[i], want[1])
            for key, x in gradients.items():
                assert_near(x[i], want[2][key], times=64)


# Several devices


def test_in_a_shard_map():
    """Two host devices, one option after the other; a bias and sinks that both have get the sum of their gradients."""
    code = """
        import jax, jax.numpy as jnp, numpy as np, numbaflash
        from jax.sharding import Mesh, PartitionSpec as P

        keys = jax.random.split(jax.random.key(0), 7)
        q, k, v = (jax.random.normal(key, (4, 19, 2, 16)) for key in keys[:3])
        options = {
            "bias": (jax.random.normal(keys[3], (2, 19, 19)), P()),
            "sinks": (jax.random.normal(keys[4], (2,)), P()),
            "mask": (jax.random.bernoulli(keys[5], 0.7, (4, 1, 19, 19)), P("x")),
            "seqlens_k": (jnp.array([19, 3, 17, 9]), P("x")),
            "alibi_slopes": (jax.random.uniform(keys[6], (4, 2)), P("x")),
        }
        mesh = Mesh(np.array(jax.devices()), ("x",))
        for name, (array, spec) in options.items():

            def attention(q, k, v, array):
                return numbaflash.attention(q, k, v, causal=True, **{name: array})

            inside = jax.shard_map(attention, mesh=mesh, in_specs=(P("x"), P("x"), P("x"), spec), out_specs=P("x"))
            which = (0, 1, 2, 3) if name in ("bias", "sinks") else (0, 1, 2)
            got, want = (jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), which))(q, k, v, array) for f in (inside, attention))
            for one, other in zip(got, want):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# Errors


@pytest.mark.parametrize(
    ("error", "message", "more"),
    [
        (TypeError, "mask must be a JAX array; got ndarray. Convert it with jax.numpy.asarray", {"mask": np.ones((SQ, SK), bool)}),
        (TypeError, "mask must be bool", {"mask": np.ones((SQ, SK), np.float32)}),
        (ValueError, "mask must broadcast to", {"mask": np.ones((SQ, SK + 1), bool)}),
        (ValueError, "bias must broadcast to", {"bias": np.ones((B, SQ, SK), np.float32)}),
        (TypeError, "bias must be one of", {"bias": np.ones((SQ, SK), np.int32)}),
        (ValueError, "alibi_slopes must have shape", {"alibi_slopes": np.ones(H + 1, np.float32)}),
        (TypeError, "sinks must be float32", {"sinks": np.ones(H, np.float16)}),
        (TypeError, "seqlens_k must be int32 or int64", {"seqlens_k": np.ones(B, np.int16)}),
        (ValueError, "seqlens_q must have shape", {"seqlens_q": np.ones(B + 1, np.int32)}),
        (ValueError, "softcap must be finite and positive", {"softcap": 0}),
        (TypeError, "softcap must be a real number", {"softcap": "1"}),
        (ValueError, "dropout must be at least 0 and below 1; got 1", {"dropout": 1.0}),
        (ValueError, "dropout needs a seed", {"dropout": 0.1}),
        (ValueError, "seed must be at least 0 and below 2", {"dropout": 0.1, "seed": 2**64}),
        (TypeError, "seed must be an integer", {"dropout": 0.1, "seed": 1.0}),
    ],
)  # fmt: skip
def test_bad_input(error, message, more):
    from numbaflash.jax import attention

    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    arrays = {name: x if "ndarray" in message else jnp.asarray(x) for name, x in more.items() if isinstance(x, np.ndarray)}
    numbers = {name: x for name, x in more.items() if name not in arrays}
    with pytest.raises(error, match=message):
        attention(q, k, v, **arrays, **numbers)
    with pytest.raises(error, match=message):
        jax.jit(jax.grad(lambda q: attention(q, k, v, **arrays, **numbers).sum()))(q)
    if "ndarray" not in message:
        with pytest.raises(error, match=message):
            numbaflash.forward(q, k, v, **arrays, **numbers)


def test_options_of_another_library():
    q, k, v = given(dict(zip(NEEDS, made(), strict=True))).values()
    with pytest.raises(TypeError, match="q and bias must come from one array library; got q from JAX, bias from NumPy"):
        numbaflash.forward(q, k, v, bias=np.zeros((SQ, SK), np.float32))
