"""JAX on the CPU: XLA calls the kernels through its FFI, eagerly, inside jit, vmap and shard_map, and every error comes out."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from attention import TOLERANCE, assert_close, expected

import numbaflash
from numbaflash import call, dispatch, reference
from numbaflash.problem import UnsupportedError, make_problem

jax = pytest.importorskip("jax")
jnp = jax.numpy
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64  # before JAX 0.8
ROOT = Path(__file__).resolve().parent.parent

RNG = np.random.default_rng(0)
ARRAYS = (
    RNG.standard_normal((2, 9, 4, 16), np.float32),
    RNG.standard_normal((2, 13, 2, 16), np.float32),
    RNG.standard_normal((2, 13, 2, 24), np.float32),
)


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def made(dtype="float32"):
    return [jnp.asarray(x, dtype) for x in ARRAYS]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"causal": "top_left", "window": (4, 1), "scale": 0.3}])
@pytest.mark.parametrize("jitted", [False, True])
def test_forward(dtype, options, jitted):
    with enable_x64(dtype == "float64"):
        q, k, v = made(dtype)

        def run(q, k, v):
            return numbaflash.forward(q, k, v, return_lse=True, **options)

        out, lse = (jax.jit(run) if jitted else run)(q, k, v)
        assert isinstance(out, jax.Array) and out.dtype == dtype and lse.dtype == ("float64" if dtype == "float64" else "float32")
        assert_close((out, lse), expected(q, k, v, **options), dtype)
        assert_close([numbaflash.forward(q, k, v, **options)], expected(q, k, v, **options)[:1], dtype)


def test_inside_a_larger_jit_and_from_other_layouts():
    q, k, v = made()

    @jax.jit
    def model(q, k, v):
        heads_first = q.swapaxes(1, 2) * 2
        return numbaflash.forward(heads_first.swapaxes(1, 2) / 2, k[:, ::-1], v[:, ::-1]).sum(axis=1)

    np.testing.assert_allclose(model(q, k, v), expected(q, k, v)[0].sum(axis=1), rtol=1e-5, atol=1e-4)


def test_vmap_batches():
    q, k, v = made()
    stacked = jnp.stack([q, 2 * q, 0 * q])
    run = lambda q, k: numbaflash.forward(q, k, v, causal=True, return_lse=True)  # noqa: E731
    out, lse = jax.vmap(run, in_axes=(0, None))(stacked, k)
    assert out.shape == (3, 2, 9, 4, 24) and lse.shape == (3, 2, 4, 9)
    for i in range(3):
        assert_close((out[i], lse[i]), expected(stacked[i], k, v, causal=True))
    twice = jax.jit(jax.vmap(jax.vmap(run, in_axes=(0, None)), in_axes=(2, 0), out_axes=1))(jnp.stack([stacked, stacked], 2), jnp.stack([k, k + 1]))
    assert twice[0].shape == (3, 2, 2, 9, 4, 24)
    assert_close((twice[0][1, 1], twice[1][1, 1]), expected(2 * q, k + 1, v, causal=True))


def test_empty_and_no_keys():
    q, k, v = made()
    out, lse = numbaflash.forward(q, k[:, :0], v[:, :0], return_lse=True)
    assert not out.any() and bool((lse == -jnp.inf).all())
    out, lse = jax.jit(lambda q: numbaflash.forward(q, k[:0], v[:0], return_lse=True))(q[:0])
    assert out.shape == (0, 9, 4, 24) and lse.shape == (0, 4, 9)


def test_derivatives_are_refused_and_can_be_stopped():
    q, k, v = made()
    for run in (numbaflash.forward, jax.jit(numbaflash.forward)):
        with pytest.raises(
            UnsupportedError,
            match=r"cannot be differentiated; call numbaflash\.attention, which can, or keep .* with jax\.lax\.stop_gradient",
        ):
            jax.grad(lambda q, run=run: run(q, k, v).sum())(q)

    def loss(q):
        return (numbaflash.forward(jax.lax.stop_gradient(q), k, v) * q.sum()).sum()

    np.testing.assert_allclose(jax.grad(loss)(q), np.full(q.shape, expected(q, k, v)[0].sum()), rtol=1e-4)


def test_deleted():
    q, k, v = made()
    k.delete()
    for run in (numbaflash.forward, numbaflash.explain):
        with pytest.raises(ValueError, match=r"k has been deleted \(its buffer was donated to a jitted function or freed by delete\(\)\)"):
            run(q, k, v)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "out cannot be given with JAX arrays, which are immutable", {"out": jnp.zeros((2, 9, 4, 24))}),
        (ValueError, "lse cannot be given with JAX arrays, which are immutable", {"lse": jnp.zeros((2, 4, 9))}),
        (ValueError, "stream cannot be given with JAX arrays: XLA chooses", {"stream": 0}),
        (TypeError, "must come from one array library; got q from JAX, k from NumPy, v from JAX", {"k": ARRAYS[1]}),
        (ValueError, r"v must have the same seqlen_k \(axis 1\) as k; got 12, expected 13", {"v": jnp.zeros((2, 12, 2, 24))}),
        (TypeError, "q must be one of .*; got dtype int32", {"q": jnp.zeros((2, 9, 4, 16), jnp.int32)}),
        (TypeError, "q must hold numbers; got dtype key<fry>", {"q": jax.random.key(0)}),
        (TypeError, "q must be one of .*; got dtype float8_e4m3fn", {"q": jnp.zeros((2, 9, 4, 16), jnp.float8_e4m3fn)}),
        (ValueError, "scale must be finite; got nan", {"scale": float("nan")}),
        (TypeError, "scale must be a real number or None", {"scale": jnp.float32(1)}),
        (ValueError, 'causal must be False, True .* or "top_left"; got 2', {"causal": 2}),
    ],
)
def test_bad_input(error, message, change):
    arguments = dict(zip("qkv", made(), strict=True)) | change
    arrays = {name: x for name, x in arguments.items() if name in "qkv"}
    options = {name: x for name, x in arguments.items() if name not in "qkv"}
    with pytest.raises(error, match=message):
        numbaflash.forward(**arguments)
    if not isinstance(arrays["k"], np.ndarray):  # jit would make it a JAX array
        with pytest.raises(error, match=message):
            jax.jit(lambda arrays: numbaflash.forward(**arrays, **options))(arrays)


def test_a_forced_family_reaches_xla():
    """XLA's threads do not see the caller's context: the family travels with the operation."""
    q, k, v = made()
    with dispatch.use_family("cpu"):
        numbaflash.forward(q, k, v)
    with dispatch.use_family("simt"), pytest.raises(UnsupportedError, match="simt: "):
        numbaflash.forward(q, k, v)
    with dispatch.use_family("simt"), pytest.raises(Exception, match="UnsupportedError: no kernel family can compute this problem on cpu"):
        jax.jit(lambda *arrays: numbaflash.forward(*arrays))(q, k, v).block_until_ready()


def test_an_error_in_the_kernel_comes_out(monkeypatch):
    from numbaflash.jax import serving

    def launch(*arguments):
        raise MemoryError("the kernel is out of luck")

    q, k, v = (x[:, :5] for x in made())
    monkeypatch.setattr(serving, "forward_launch", lambda *arguments: launch)
    with pytest.raises(Exception, match="MemoryError: the kernel is out of luck"):
        numbaflash.forward(q, k, v).block_until_ready()


def test_a_plan_that_wants_copies_is_refused(monkeypatch):
    from numbaflash.jax import launches

    real = call.plan_call

    def plan_call(*arguments):
        plan = real(*arguments)
        plan.copies["k"] = "a test wants it"
        return plan

    monkeypatch.setattr(launches, "plan_call", plan_call)
    q, k, v = (x[:, :6] for x in made())
    with pytest.raises(ValueError, match=r"must lie so that they need no copy, .*k: a test wants it"):
        numbaflash.forward(q, k, v)


def test_merge_eager_and_jitted():
    q, k, v = made()

    def run(q, k, v):
        parts = [numbaflash.forward(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(0, 0), slice(0, 7), slice(7, 13))]
        return numbaflash.merge(*(list(x) for x in zip(*parts, strict=True)))

    for merged in (run(q, k, v), jax.jit(run)(q, k, v)):
        assert isinstance(merged[0], jax.Array) and merged[0].dtype == jnp.float32
        assert_close(merged, expected(q, k, v))


def test_explain():
    q, k, v = made()
    assert numbaflash.explain(q, k, v, causal=True).plan.family == "cpu"
    told = []
    jax.jit(lambda *arrays: told.append(numbaflash.explain(*arrays)) or 0)(q, k, v)
    assert told[0].plan.family == "cpu" and told[0].problem.seqlen_k == 13


def test_threads():
    """Calls from many threads at once: XLA's callbacks and Python's lock must not wait for each other."""
    q, k, v = made()
    want = expected(q, k, v, causal=True)
    jitted = jax.jit(lambda *arrays: numbaflash.forward(*arrays, causal=True, return_lse=True))
    failures = []

    def work(i):
        try:
            for _ in range(20):
                assert_close((jitted if i % 2 else lambda *a: numbaflash.forward(*a, causal=True, return_lse=True))(q, k, v), want)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures


def test_several_devices():
    """Two host devices: spread arrays are refused outside shard_map and work inside; arrays on the second device stay there."""
    code = """
        import jax, jax.numpy as jnp, numpy as np, numbaflash
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        first, second = jax.devices()
        q, k, v = (jax.random.normal(key, (4, 11, 2, 16)) for key in jax.random.split(jax.random.key(0), 3))
        want = numbaflash.forward(q, k, v, causal=True)
        there = numbaflash.forward(*(jax.device_put(x, second) for x in (q, k, v)), causal=True)
        assert there.devices() == {second}
        np.testing.assert_array_equal(there, want)
        try:
            numbaflash.forward(jax.device_put(q, first), jax.device_put(k, second), v).block_until_ready()
        except ValueError as error:
            assert "incompatible devices" in str(error), error
        else:
            raise SystemExit("no error")

        mesh = Mesh(np.array(jax.devices()), ("x",))
        spread = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (q, k, v)]
        try:
            numbaflash.forward(*spread)
        except ValueError as error:
            assert "q must lie on one device; it is spread over 2" in str(error) and "jax.shard_map" in str(error), error
        else:
            raise SystemExit("no error")
        inside = jax.shard_map(lambda *a: numbaflash.forward(*a, causal=True), mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))
        np.testing.assert_array_equal(jax.jit(inside)(*spread), want)
        np.testing.assert_array_equal(inside(*spread), want)
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_structs_are_those_of_the_header(tmp_path):
    """Sizes and offsets of the ctypes structs against the header that this jaxlib ships, as a C compiler lays it out."""
    import shutil

    from numbaflash.jax import abi

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    pairs = {
        "XLA_FFI_CallFrame": (
            abi.CallFrame,
            {"api": "api", "ctx": "context", "stage": "stage", "args": "arguments", "rets": "results", "attrs": "attributes"},
        ),
        "XLA_FFI_Args": (abi.Buffers, {"size": "size", "types": "types", "args": "items"}),
        "XLA_FFI_Rets": (abi.Buffers, {"size": "size", "types": "types", "rets": "items"}),
        "XLA_FFI_Attrs": (abi.Attributes, {"size": "size", "types": "types", "names": "names", "attrs": "items"}),
        "XLA_FFI_Buffer": (abi.Buffer, {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
        "XLA_FFI_Error_Create_Args": (abi.ErrorCreate, {"message": "message", "errc": "code"}),
        "XLA_FFI_Stream_Get_Args": (abi.StreamGet, {"ctx": "context", "stream": "stream"}),
        "XLA_FFI_DeviceOrdinal_Get_Args": (abi.DeviceOrdinalGet, {"ctx": "context", "device_ordinal": "ordinal"}),
        "XLA_FFI_ByteSpan": (abi.Span, {"ptr": "data", "len": "size"}),
        "XLA_FFI_Metadata": (abi.Metadata, {"api_version": "version", "traits": "traits"}),
        "XLA_FFI_Metadata_Extension": (abi.MetadataExtension, {"metadata": "metadata"}),
        "XLA_FFI_Api_Version": (abi.Version, {"major_version": "major", "minor_version": "minor"}),
        "XLA_FFI_Api": (
            abi.Api,
            {
                "api_version": "version",
                "internal_api": "internal",
                "XLA_FFI_Error_Create": "error_create",
                "XLA_FFI_Stream_Get": "stream_get",
                "XLA_FFI_DeviceOrdinal_Get": "device_ordinal_get",
            },
        ),
    }
    lines = [f'printf("%zu\\n", offsetof({struct}, {c}));' for struct, (_, members) in pairs.items() for c in members]
    source = tmp_path / "offsets.c"
    source.write_text('#include <stdio.h>\n#include "xla/ffi/api/c_api.h"\nint main(void) {' + "\n".join(lines) + "return 0;}")
    subprocess.run([compiler, "-I", jax.ffi.include_dir(), "-o", tmp_path / "offsets", source], check=True, capture_output=True)
    told = map(int, subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.split())
    for struct, (ours, members) in pairs.items():
        for c, name in members.items():
            assert getattr(ours, name).offset == next(told), f"{struct}.{c}"


def test_metadata_is_told_without_an_api():
    """As a jaxlib before 0.9 asks for it."""
    from numbaflash.jax import abi, serving

    told = abi.Metadata()
    question = abi.MetadataExtension(type=abi.METADATA, metadata=ctypes.pointer(told))
    frame = abi.CallFrame(extension=ctypes.addressof(question))
    assert serving.handle("forward", "cpu", ctypes.addressof(frame)) is None
    assert (told.version.major, told.version.minor, told.traits) == (0, 1, abi.CAN_BE_CAPTURED)


def test_jax_that_is_too_old():
    program = """
        import jax, jax.numpy as jnp
        jax.__version__, jax.__version_info__ = "0.6.1", (0, 6, 1)
        import numbaflash
        x = jnp.ones((1, 4, 1, 8))
        try:
            numbaflash.forward(x, x, x)
        except ImportError as error:
            assert "needs JAX 0.6.2 or newer" in str(error) and "installed is 0.6.1" in str(error) and "pip install -U" in str(error), error
        else:
            raise SystemExit("computed")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Gradients


def dense(q, k, v, *, scale=None, causal=False, window=None, return_lse=False):
    """The same by JAX operations."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    score = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = reference.visible(make_problem(q.shape, k.shape, v.shape, ["float64"] * 3, causal=causal, window=window))
    some = seen.any(1)
    score = jnp.where(seen, score, -jnp.inf)
    lse = jnp.where(some, jax.nn.logsumexp(jnp.where(some[:, None], score, 0.0), axis=-1), -jnp.inf)
    weights = jnp.where(seen, jnp.exp(score - jnp.where(some, lse, 0.0)[..., None]), 0.0)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")
    return (out, lse) if return_lse else out


def assert_near(got, want, dtype="float32"):
    tolerance = 4 * TOLERANCE[dtype]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=tolerance, atol=tolerance)


def squared(attention, **options):
    """A loss of out and, where it is returned, of the LSE."""

    def loss(q, k, v):
        results = attention(q, k, v, **options)
        out, *lse = results if isinstance(results, tuple) else (results,)
        weights = jnp.linspace(-1, 1, out.size).reshape(out.shape)
        return (out.astype(weights.dtype) ** 2 * weights).sum() + sum((jnp.where(x == -jnp.inf, 0, x) ** 2).mean() for x in lse)

    return loss


OPTIONS = [{}, {"causal": True}, {"causal": "top_left", "window": (4, 1), "scale": -0.3}, {"window": (0, 2), "return_lse": True}]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("jitted", [False, True])
def test_gradients(dtype, options, jitted):
    with enable_x64(True):
        arrays = made(dtype)
        gradient = jax.grad(squared(numbaflash.attention, **options), (0, 1, 2))
        got = (jax.jit(gradient) if jitted else gradient)(*arrays)
        assert [x.dtype for x in got] == [dtype] * 3
        assert_near(got, jax.grad(squared(dense, **options), (0, 1, 2))(*(x.astype("float64") for x in arrays)), dtype)


def test_attention_forward_is_forward():
    q, k, v = made()
    for run in (numbaflash.attention, jax.jit(lambda *arrays: numbaflash.attention(*arrays))):
        np.testing.assert_array_equal(run(q, k, v), numbaflash.forward(q, k, v))
    assert_close(numbaflash.attention(q, k, v, causal=True, return_lse=True), expected(q, k, v, causal=True))


def test_rows_without_keys_and_sizes_of_zero():
    q, k, v = made()
    q = jnp.concatenate([q, q], axis=1)
    got = jax.grad(squared(numbaflash.attention, causal=True, return_lse=True), (0, 1, 2))(q, k, v)
    assert_near(got, jax.grad(squared(dense, causal=True, return_lse=True), (0, 1, 2))(q, k, v))
    assert not got[0][:, : q.shape[1] - k.shape[1]].any()
    for arrays in ((q, k[:, :0], v[:, :0]), (q[:, :0], k, v), (q[:0], k[:0], v[:0])):
        got = jax.jit(jax.grad(lambda *x: numbaflash.attention(*x).sum(), (0, 1, 2)))(*arrays)
        assert [x.shape for x in got] == [x.shape for x in arrays] and not any(x.any() for x in got)


@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("loss", [squared, lambda f: lambda *x: (f(*x, return_lse=True)[1] ** 2).sum()])
def test_nothing_is_computed_that_nobody_needs(needs, loss):
    arrays = made()
    gradient = jax.grad(loss(numbaflash.attention), needs)
    assert_near(gradient(*arrays), jax.grad(loss(dense), needs)(*arrays))
    assert json.dumps([*("qkv"[i] for i in needs)]) in str(jax.make_jaxpr(gradient)(*arrays))


def test_a_gradient_of_the_lse_only_where_there_is_one():
    arrays = made()
    for loss, there in (
        (lambda *x: numbaflash.attention(*x, return_lse=True)[0].sum(), False),
        (squared(numbaflash.attention, return_lse=True), True),
    ):
        assert ('"dlse": true' in str(jax.make_jaxpr(jax.grad(loss))(*arrays))) is there


def test_vmap_of_gradients_and_gradients_of_vmap():
    q, k, v = made()
    many = jnp.stack([q, 2 * q, 0 * q])

    def each(attention):
        return jax.vmap(jax.grad(squared(attention, causal=True, return_lse=True), (0, 1, 2)), (0, None, None))

    def through(attention):
        return jax.grad(lambda *x: jax.vmap(squared(attention, causal=True), (0, None, 1), 0)(x[0], x[1], jnp.stack([x[2]] * 3, 1)).sum(), (0, 1, 2))

    for run in (each, through):
        for jit in (lambda f: f, jax.jit):
            assert_near(jit(run(numbaflash.attention))(many, k, v), run(dense)(many, k, v))


def test_checkpoint():
    arrays = made()
    loss = squared(numbaflash.attention, causal=True)
    assert_near(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*arrays), jax.grad(loss, (0, 1, 2))(*arrays))


def test_scan_over_layers():
    q, k, v = (x[..., :4, :16] for x in made())
    k, v = jnp.repeat(k, 2, 2)[:, :9], jnp.repeat(v, 2, 2)[:, :9]

    def model(attention):
        return lambda q, k, v: (jax.lax.scan(lambda x, _: (x + attention(x, k, v, causal=True), None), q, None, length=3)[0] ** 2).mean()

    arrays = q, k, v
    assert_near(jax.jit(jax.grad(model(numbaflash.attention), (0, 1, 2)))(*arrays), jax.grad(model(dense), (0, 1, 2))(*arrays))


def test_other_derivatives_are_refused():
    q, k, v = made()
    loss = squared(numbaflash.attention)
    twice = jax.grad(lambda q: jax.grad(loss)(q, k, v).sum())
    for run in (twice, jax.jit(twice)):
        with pytest.raises(UnsupportedError, match=r"the gradients of numbaflash\.attention cannot be differentiated again \(second derivatives"):
            run(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: numbaflash.attention(q, k, v), (q,), (q,))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "q must be one of .*; got dtype int32", {"q": jnp.zeros((2, 9, 4, 16), jnp.int32)}),
        (ValueError, r"v must have the same seqlen_k \(axis 1\) as k; got 12, expected 13", {"v": jnp.zeros((2, 12, 2, 24))}),
        (TypeError, "q, k and v must have one dtype", {"k": jnp.zeros((2, 13, 2, 16), jnp.float16)}),
        (TypeError, "must come from one array library; got q from JAX, k from NumPy", {"k": ARRAYS[1]}),
        (ValueError, "scale must be finite", {"scale": float("nan")}),
        (ValueError, "causal must be", {"causal": "left"}),
        (ValueError, "window left must not be negative", {"window": (-1, 0)}),
        (TypeError, "return_lse must be True or False", {"return_lse": 1}),
        (TypeError, "deterministic must be True or False", {"deterministic": 1}),
    ],
)
def test_bad_input_of_attention(error, message, change):
    arguments = dict(zip("qkv", made(), strict=True)) | change
    with pytest.raises(error, match=message):
        numbaflash.attention(**arguments)
    if "q" not in change:
        others = {name: x for name, x in arguments.items() if name != "q"}
        with pytest.raises(error, match=message):
            jax.grad(lambda q: numbaflash.attention(q, **others).sum())(arguments["q"])


def test_attention_of_jax_takes_jax_arrays():
    from numbaflash.jax import attention

    q, k, v = made()
    with pytest.raises(TypeError, match="k must be a JAX array; got ndarray"):
        attention(q, np.asarray(k), v)


def test_gradients_from_many_threads():
    arrays = made()
    want = jax.grad(squared(dense, causal=True), (0, 1, 2))(*arrays)
    gradient = jax.jit(jax.grad(squared(numbaflash.attention, causal=True), (0, 1, 2)))
    failures = []

    def work():
        try:
            for _ in range(10):
                assert_near(gradient(*arrays), want)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures


def test_gradients_in_a_shard_map():
    """Two host devices; keys that every device has the same get the sum of the gradients of all."""
    code = """
        import jax, jax.numpy as jnp, numpy as np, numbaflash
        from jax.sharding import Mesh, PartitionSpec as P

        q, k, v = (jax.random.normal(key, (4, 11, 2, 16)) for key in jax.random.split(jax.random.key(0), 3))
        mesh = Mesh(np.array(jax.devices()), ("x",))
        attention = lambda *a: numbaflash.attention(*a, causal=True)
        for specs, arrays in ((("x", "x", "x"), (q, k, v)), (("x", None, None), (q, k[:1], v[:1])), ((None, None, "x"), (q[:1], k[:1], v))):
            inside = jax.shard_map(lambda *a: attention(*(jnp.broadcast_to(x, (2, *x.shape[1:])) for x in a)), mesh=mesh,
                                   in_specs=tuple(map(P, specs)), out_specs=P("x"))
            got = jax.jit(jax.grad(lambda *a: (inside(*a) ** 2).sum(), (0, 1, 2)))(*arrays)
            want = jax.grad(lambda *a: (attention(*(jnp.broadcast_to(x, (4, *x.shape[1:])) for x in a)) ** 2).sum(), (0, 1, 2))(*arrays)
            for one, other in zip(got, want):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


class FakeGpuCall:
    """A call of the backward as XLA makes it for a GPU: arrays in host memory, and launches that only take notes."""

    def __init__(self, monkeypatch, *, batches, needed, room):
        from numbaflash.jax import abi, serving

        self.abi, self.serving, self.launches = abi, serving, []
        lead, shapes = batches[:-1], [(9, 4, 24), (9, 4, 16), (13, 2, 16), (13, 2, 24), (9, 4, 24)]
        self.memory = [np.zeros((*batches, *shape), np.float32) for shape in shapes] + [np.zeros((*batches, 4, 9), np.float32)]
        self.results = [np.zeros((*batches, 9, 4, 16), np.float32), np.zeros((*batches, 13, 2, 24), np.float32), np.zeros((*lead, room), np.uint8)]

        def prepared(options, shapes, dtypes, kind, index, alignments):
            assert kind == "cuda" and index == 0 and dtypes == ("float32",) * 3
            return (lambda *call: self.launches.append((shapes[0], *call))), needed(shapes[0][0])

        monkeypatch.setattr(serving, "backward_launch", prepared)

    def run(self):
        self.kept = []

        def buffer(x):
            dims = (ctypes.c_int64 * x.ndim)(*x.shape)
            self.kept.append(dims)
            return self.abi.Buffer(dtype=11 if x.dtype == np.float32 else 6, data=x.ctypes.data, rank=x.ndim, dims=dims)

        options = json.dumps({"needs": ["q", "v"], "arrays": [], "dropout": 0.0, "family": None, "deterministic": False})
        self.serving._service.cache_clear()
        self.serving.serve("backward", options, 0, [buffer(x) for x in (*self.memory, *self.results)], "cuda", 0, 77, True)
        self.serving._service.cache_clear()
        return self.launches


def addresses_of(call, part=slice(None)):
    inputs = [x[part].ctypes.data for x in call.memory]
    dq, dv = (x[part].ctypes.data for x in call.results[:2])
    return [*inputs, 0, dq, 0, dv]


def test_workspace_of_a_gpu_call(monkeypatch):
    call = FakeGpuCall(monkeypatch, batches=(2,), needed=lambda batch: 1000 * batch, room=2256)
    ((shape, addresses, stream),) = call.run()
    assert shape == (2, 9, 4, 16) and stream == 77 and list(addresses[:-1]) == addresses_of(call)
    workspace, room = addresses[-1], call.results[2]
    assert workspace % 256 == 0 and room.ctypes.data <= workspace <= room.ctypes.data + room.nbytes - 2000


def test_vmap_on_a_gpu_is_one_launch_where_the_workspace_does(monkeypatch):
    call = FakeGpuCall(monkeypatch, batches=(3, 2), needed=lambda batch: 1000 * batch, room=2256)
    ((shape, addresses, _),) = call.run()
    assert shape == (6, 9, 4, 16) and list(addresses[:-1]) == addresses_of(call)


def test_vmap_on_a_gpu_goes_part_by_part_where_it_does_not(monkeypatch):
    call = FakeGpuCall(monkeypatch, batches=(3, 2), needed=lambda batch: 500 * batch**2, room=2256)
    launches = call.run()
    assert [shape for shape, _, _ in launches] == [(2, 9, 4, 16)] * 3
    assert [list(addresses[:-1]) for _, addresses, _ in launches] == [addresses_of(call, part) for part in range(3)]


def test_a_workspace_for_another_gpu_is_refused(monkeypatch):
    call = FakeGpuCall(monkeypatch, batches=(2,), needed=lambda batch: 2001, room=2256)
    with pytest.raises(ValueError, match="the operation needs 2001 bytes of workspace on GPU 0 and got 2256; it was traced for other GPUs"):
        call.run()
