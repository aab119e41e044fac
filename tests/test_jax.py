"""JAX on the CPU: XLA calls the kernels through its FFI, eagerly, inside jit, vmap and shard_map, and every error comes out."""

from __future__ import annotations

import ctypes
import importlib
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
from numbaflash import call, dispatch
from numbaflash.problem import UnsupportedError

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
            UnsupportedError, match=r"cannot be differentiated; call numbaflash.attention, which can, or keep its arguments out of the derivative with jax\.lax\.stop_gradient"
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
    from numbaflash import jax as glue

    def launch(*arguments):
        raise MemoryError("the kernel is out of luck")

    q, k, v = (x[:, :5] for x in made())
    monkeypatch.setattr(glue, "_launch", lambda *arguments: launch)
    with pytest.raises(Exception, match="MemoryError: the kernel is out of luck"):
        numbaflash.forward(q, k, v).block_until_ready()


def test_a_plan_that_wants_copies_is_refused(monkeypatch):
    from numbaflash import jax as glue

    real = call.plan_call

    def plan_call(*arguments):
        plan = real(*arguments)
        plan.copies["k"] = "a test wants it"
        return plan

    monkeypatch.setattr(glue, "plan_call", plan_call)
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

    from numbaflash import jax as glue

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    pairs = {
        "XLA_FFI_CallFrame": (
            glue._CallFrame,
            {"api": "api", "ctx": "context", "stage": "stage", "args": "arguments", "rets": "results", "attrs": "attributes"},
        ),
        "XLA_FFI_Args": (glue._Buffers, {"size": "size", "types": "types", "args": "items"}),
        "XLA_FFI_Rets": (glue._Buffers, {"size": "size", "types": "types", "rets": "items"}),
        "XLA_FFI_Attrs": (glue._Attributes, {"size": "size", "types": "types", "names": "names", "attrs": "items"}),
        "XLA_FFI_Buffer": (glue._Buffer, {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
        "XLA_FFI_Error_Create_Args": (glue._ErrorCreate, {"message": "message", "errc": "code"}),
        "XLA_FFI_Stream_Get_Args": (glue._StreamGet, {"ctx": "context", "stream": "stream"}),
        "XLA_FFI_DeviceOrdinal_Get_Args": (glue._DeviceOrdinalGet, {"ctx": "context", "device_ordinal": "ordinal"}),
        "XLA_FFI_ByteSpan": (glue._Span, {"ptr": "data", "len": "size"}),
        "XLA_FFI_Metadata": (glue._Metadata, {"api_version": "version", "traits": "traits"}),
        "XLA_FFI_Metadata_Extension": (glue._MetadataExtension, {"metadata": "metadata"}),
        "XLA_FFI_Api_Version": (glue._Version, {"major_version": "major", "minor_version": "minor"}),
        "XLA_FFI_Api": (
            glue._Api,
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
    from numbaflash import jax as glue

    told = glue._Metadata()
    question = glue._MetadataExtension(type=glue._METADATA, metadata=ctypes.pointer(told))
    frame = glue._CallFrame(extension=ctypes.addressof(question))
    assert glue._handle("forward", "cpu", ctypes.addressof(frame)) is None
    assert (told.version.major, told.version.minor, told.traits) == (0, 1, glue._CAN_BE_CAPTURED)


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
