"""`append_kv`: what is written, and that nothing else is, in every library; the GPU's kernel in the CUDA simulator's arithmetic."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbaflash as nf
from numbaflash import toolchain
from numbaflash.dispatch import APPEND_OPERANDS, Device, Layout, alignment_of
from numbaflash.kernels.caches.launch import prepare, request
from numbaflash.problem.caches import make_append
from numbaflash.toolchain.launch import check_launch

ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 of its own")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def make(
    *,
    dtype="float32",
    batch=3,
    tokens=2,
    kv_heads=2,
    heads=0,
    dim=8,
    dim_v=6,
    page_size=0,
    capacity=12,
    rotary=0,
    positions=12,
    lengths=(0, 9, 4),
    wide=False,
    own_angles=False,
    strided=False,
    seed=0,
):
    """Arguments of a call: lengths of int64 where ``wide``, angles in the dtype of keys, and arrays that have gaps."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]

    def random(*shape):
        found = rng.standard_normal(shape).astype(kind)
        return found.repeat(2, axis=-1)[..., ::2] if strided else found

    given = {
        "k_new": random(batch, tokens, kv_heads, dim),
        "v_new": random(batch, tokens, kv_heads, dim_v),
        "seqlens_k": np.array(lengths, np.int64 if wide else np.int32),
    }
    if page_size:
        columns = -(-capacity // page_size)
        pages = batch * columns + 2
        given["page_table"] = rng.permutation(pages)[: batch * columns].reshape(batch, columns).astype(np.int32)
        shape = (pages, page_size)
    else:
        shape = (batch, capacity)
    given |= {"k_cache": random(*shape, kv_heads, dim), "v_cache": random(*shape, kv_heads, dim_v)}
    if rotary:
        angles = rng.uniform(0, 6, (positions, rotary // 2))
        full = kind if own_angles else np.float64 if dtype == "float64" else np.float32
        given |= {"cos": np.cos(angles).astype(full), "sin": np.sin(angles).astype(full)}
        if heads:
            given["q"] = random(batch, tokens, heads, dim)
    return given


def turned(x, cos, sin, interleaved):
    """One row, by complex numbers in float64."""
    half = cos.shape[-1]
    out = x.astype(np.float64)
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    z = (out[..., pairs[0]] + 1j * out[..., pairs[1]]) * (cos.astype(np.float64) + 1j * sin.astype(np.float64))
    out[..., pairs[0]], out[..., pairs[1]] = z.real, z.imag
    return out


def expected(given, interleaved=False):
    """(k_cache, v_cache, rotated) one token after the other."""
    k_cache, v_cache = given["k_cache"].astype(np.float64), given["v_cache"].astype(np.float64)
    rotated = np.zeros(given["q"].shape) if "q" in given else None
    table, page_size = given.get("page_table"), given["k_cache"].shape[1]
    capacity = page_size if table is None else table.shape[1] * page_size
    for b, length in enumerate(given["seqlens_k"]):
        for i in range(given["k_new"].shape[1]):
            position = int(length) + i
            k = given["k_new"][b, i].astype(np.float64)
            turns = "cos" in given and 0 <= position < len(given["cos"])
            if turns:
                k = turned(k, given["cos"][position], given["sin"][position], interleaved)
                if rotated is not None:
                    rotated[b, i] = turned(given["q"][b, i], given["cos"][position], given["sin"][position], interleaved)
            if not 0 <= position < capacity or ("cos" in given and not turns):
                continue
            row, slot = (b, position) if table is None else (int(table[b, position // page_size]), position % page_size)
            if 0 <= row < len(k_cache):
                k_cache[row, slot], v_cache[row, slot] = k, given["v_new"][b, i].astype(np.float64)
    return k_cache, v_cache, rotated


def check(got, want, dtype):
    """Exact where nothing was computed, else within a rounding."""
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=tolerance, atol=tolerance)


def run(given, **options):
    arrays = {name: x.copy() for name, x in given.items()}
    if "v_new" not in arrays:
        arrays |= {"v_new": None, "v_cache": None}
    rotated = nf.append_kv(**arrays, **options)
    for name in ("k_new", "v_new", "seqlens_k", "page_table", "cos", "sin", "q"):
        if arrays.get(name) is not None:
            assert arrays[name].tobytes() == given[name].tobytes(), f"{name} is only read"
    return arrays["k_cache"], arrays["v_cache"], rotated


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    tokens=st.integers(0, 4),
    page_size=st.sampled_from([0, 1, 3, 5]),
    rotary=st.sampled_from([0, 2, 6, 8]),
    heads=st.sampled_from([0, 4]),
    interleaved=st.booleans(),
    lengths=st.lists(st.integers(-2, 14), min_size=3, max_size=3),
    positions=st.sampled_from([1, 7, 20]),
)
def test_any_append(dtype, tokens, page_size, rotary, heads, interleaved, lengths, positions):
    given = make(dtype=dtype, tokens=tokens, page_size=page_size, rotary=rotary, heads=heads, lengths=lengths, positions=positions)
    check(run(given, interleaved=interleaved), expected(given, interleaved), dtype)


def test_page_numbers_that_are_none_write_nothing():
    given = make(page_size=4)
    given["page_table"][0, 0], given["page_table"][1, 2] = -1, 10_000
    check(run(given), expected(given), "float32")


def test_any_strides():
    given = make(dtype="float16", rotary=4, heads=4)
    buffers = np.zeros((3, 2, 2, 12, 8), np.float16)  # keys and values of a head beside each other
    views = {"k_cache": buffers[:, :, 0].swapaxes(1, 2), "v_cache": buffers[:, :, 1, :, :6].swapaxes(1, 2)}
    for name, view in views.items():
        view[...] = given[name]
    want = expected(given)
    rotated = nf.append_kv(**{**given, **views, "k_new": given["k_new"][::-1][::-1], "q": np.asfortranarray(given["q"])})
    check((views["k_cache"], views["v_cache"], rotated), want, "float16")


def test_append_then_decode_is_concatenation():
    rng = np.random.default_rng(1)
    k, v, q = rng.standard_normal((2, 20, 2, 16)), rng.standard_normal((2, 20, 2, 16)), rng.standard_normal((2, 3, 4, 16))
    k_cache, v_cache = np.full((2, 12, 4, 2, 16), np.nan)
    table, lengths = np.arange(12, dtype=np.int32).reshape(2, 6)[::-1], np.zeros(2, np.int64)
    for start, end in ((0, 9), (9, 10), (10, 17), (17, 20)):
        nf.append_kv(k[:, start:end], v[:, start:end], k_cache, v_cache, lengths, table)
        lengths += end - start
    out = nf.decode(q, k_cache, v_cache, lengths, table, causal=True)
    np.testing.assert_allclose(out, nf.forward(q, k, v, causal=True), rtol=1e-12)


BAD = {
    "integers": (lambda a: {"k_new": a["k_new"].astype(np.int32)}, TypeError, "k_new must be one of float16"),
    "another dtype": (
        lambda a: {"v_cache": a["v_cache"].astype(np.float64)},
        TypeError,
        "v_cache must have the dtype of k_new, float32; got float64",
    ),
    "no array": (lambda a: {"v_new": None}, TypeError, "v_new must be an array; got None"),
    "a list": (lambda a: {"v_new": [1.0]}, TypeError, "v_new must be an array of NumPy"),
    "axes": (lambda a: {"k_new": a["k_new"][0]}, ValueError, "k_new must have 4 axes"),
    "heads": (
        lambda a: {"k_cache": a["k_cache"][:, :, :1]},
        ValueError,
        r"k_cache must have the same kv_heads \(axis 2\) as k_new; got 1, expected 2",
    ),
    "dims": (lambda a: {"v_cache": a["v_cache"][..., :3]}, ValueError, "v_cache must have the same head dim"),
    "batch": (lambda a: {"v_new": a["v_new"][:2]}, ValueError, "v_new must have the same batch"),
    "capacity": (lambda a: {"v_cache": a["v_cache"][:, :5]}, ValueError, r"v_cache must have the same (capacity|page_size) \(axis 1\) as k_cache"),
    "lengths": (lambda a: {"seqlens_k": a["seqlens_k"].astype(np.float32)}, TypeError, "seqlens_k must be int32 or int64"),
    "lengths' shape": (lambda a: {"seqlens_k": a["seqlens_k"][:2]}, ValueError, "seqlens_k must have shape"),
    "table's dtype": (lambda a: {"page_table": np.zeros((3, 2), np.int64)}, TypeError, "page_table must be int32"),
    "table's axes": (lambda a: {"page_table": np.zeros(3, np.int32)}, ValueError, "page_table must have shape"),
    "cos alone": (lambda a: {"cos": np.zeros((4, 2), np.float32)}, ValueError, "cos and sin must be given together; got cos alone"),
    "angles' columns": (
        lambda a: dict.fromkeys(("cos", "sin"), np.zeros((4, 5), np.float32)),
        ValueError,
        "cos must have from 1 to head_dim / 2 = 4",
    ),
    "angles' dtype": (
        lambda a: dict.fromkeys(("cos", "sin"), np.zeros((4, 2))),
        TypeError,
        "cos must be float32 for keys of float32; got dtype float64",
    ),
    "q alone": (lambda a: {"q": a["k_new"]}, ValueError, "q was given without cos and sin"),
    "no values": (lambda a: {"v_new": None}, TypeError, "v_new must be an array; got None"),
    "no cache of values": (lambda a: {"v_cache": None}, TypeError, "v_cache must be an array; got None"),
    "no lengths": (lambda a: {"seqlens_k": None}, TypeError, "seqlens_k must be an array; got None"),
    "a flag": (lambda a: {"interleaved": 1}, TypeError, "interleaved must be True or False"),
    "a stream": (lambda a: {"stream": 0}, ValueError, "stream is for arrays on a CUDA device"),
    "overlap": (
        lambda a: {"v_cache": a["k_cache"][..., :6]},
        ValueError,
        "k_cache must not share memory with v_cache, which is written in the same call",
    ),
    "overlap with what is read": (lambda a: {"k_new": a["k_cache"][:, :2]}, ValueError, "k_cache must not share memory with k_new, which is read"),
    "broadcast": (lambda a: {"k_cache": np.broadcast_to(np.zeros(8, np.float32), (3, 12, 2, 8))}, ValueError, "k_cache must be writable"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, error, told = BAD[name]
    given = make()
    before = {key: x.copy() for key, x in given.items()}
    with pytest.raises(error, match=told):
        nf.append_kv(**given | change(given))
    assert all(np.array_equal(given[key], x) for key, x in before.items()), "nothing was written"


def test_values_are_checked_where_asked(monkeypatch):
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    with pytest.raises(ValueError, match="seqlens_k must be from 0 to the capacity of 12 keys; got 13"):
        run(make(lengths=(11, 0, 0)))
    given = make(page_size=4, lengths=(-1, 3, 0))
    run(given)
    given["page_table"][1, 1] = -3
    with pytest.raises(ValueError, match="page_table must hold page numbers"):
        run(given)
    with pytest.raises(ValueError, match="cos and sin must have a row for each position; got 5 rows, and keys at position 5"):
        run(make(rotary=4, positions=5, lengths=(4, 0, 0)))


@pytest.mark.parametrize("library", ["lent", "jax"])
def test_values_of_other_libraries_are_checked(library, monkeypatch):
    monkeypatch.setenv("NUMBAFLASH_CHECK", "1")
    array = Lent if library == "lent" else pytest.importorskip("jax.numpy", reason="JAX is not installed").asarray
    nf.append_kv(**{name: array(x) for name, x in make(lengths=(10, 0, 0)).items()})
    with pytest.raises(ValueError, match="seqlens_k must be from 0 to the capacity of 12 keys; got 13"):
        nf.append_kv(**{name: array(x) for name, x in make(lengths=(11, 0, 0)).items()})


class Lent:
    """An array of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_keys_alone():
    """Of a latent cache, whose values are a part of its keys."""
    given = make(page_size=4, rotary=4, heads=2)
    both, alone = ({name: x.copy() for name, x in given.items()} for _ in range(2))
    rotated = nf.append_kv(**both)
    alone |= {"v_new": None, "v_cache": None}
    assert nf.append_kv(**alone).tobytes() == rotated.tobytes() and alone["k_cache"].tobytes() == both["k_cache"].tobytes()
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    alone["k_cache"] = given["k_cache"]
    k_cache, v_cache, _ = nf.append_kv(**{name: x if x is None else jnp.asarray(x) for name, x in alone.items()})
    assert v_cache is None
    np.testing.assert_allclose(k_cache, both["k_cache"], atol=1e-6)


def test_long_lengths_do_not_wrap():
    given = make(wide=True, lengths=(2**32 + 3, -(2**32) + 3, 4))
    k_cache, _, _ = run(given)
    assert np.array_equal(k_cache[:2], given["k_cache"][:2])
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64  # before JAX 0.8
    with enable_x64(True):
        found, _ = nf.append_kv(**{name: jax.numpy.asarray(x) for name, x in given.items()})
    assert np.array_equal(found, k_cache)


def test_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    given = make(rotary=8, heads=4, page_size=5)
    arrays = {name: torch.from_numpy(x.copy()) for name, x in given.items()}
    version = arrays["k_cache"]._version
    rotated = nf.append_kv(**arrays)
    check((arrays["k_cache"], arrays["v_cache"], rotated), expected(given), "float32")
    assert arrays["k_cache"]._version > version, "autograd knows that it was written"
    half = {name: x.bfloat16() if x.dtype == torch.float32 and name not in ("cos", "sin") else x for name, x in arrays.items()}
    assert nf.append_kv(**half).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="k_new takes part in automatic differentiation"):
        nf.append_kv(**arrays | {"k_new": arrays["k_new"].clone().requires_grad_()})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [0, 5])
def test_jax(page_size, interleaved):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    given = make(rotary=6, heads=4, page_size=page_size, lengths=(-1, 11, 4))
    arrays = {name: jax.numpy.asarray(x) for name, x in given.items()}
    append = jax.jit(lambda arrays: nf.append_kv(**arrays, interleaved=interleaved))
    for got in (nf.append_kv(**arrays, interleaved=interleaved), append(arrays)):
        check(got, expected(given, interleaved), "float32")
    del arrays["q"]
    assert len(nf.append_kv(**arrays)) == 2
    with pytest.raises(ValueError, match="stream cannot be given"):
        nf.append_kv(**arrays, stream=0)


def test_borrowed_arrays():
    given = make(rotary=4, heads=2)
    rotated = nf.append_kv(**{name: Lent(x) for name, x in given.items()})
    assert isinstance(rotated, np.ndarray)


def layouts(given):
    return {name: Layout(x.shape, x.strides, alignment_of(x.ctypes.data)) for name, x in given.items()}


KERNELS = (
    ({"dtype": "bfloat16", "rotary": 64, "heads": 4, "page_size": 5, "dim": 128, "dim_v": 128}, 16),
    ({"dtype": "float64", "rotary": 4}, 16),
    ({"dtype": "float16"}, 4),
    ({"dtype": "float32", "rotary": 6, "heads": 2}, 4),
    ({"dtype": "float16", "rotary": 2, "dim": 5}, 2),
)


@pytest.mark.parametrize("arch", [(7, 5), (9, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kernels_compile_without_spills(arch, interleaved):
    for options, size in KERNELS:
        given = make(**options)
        wanted = request(make_append({name: (x.shape, x.dtype.name) for name, x in given.items()}, interleaved), layouts(given), arch)
        assert wanted.config.access.size == size
        ptx = toolchain.compile_ptx(wanted)
        report = toolchain.ptxas_report(ptx, arch)
        assert (report.stack_bytes, report.spill_stores, report.spill_loads) == (0, 0, 0)
        assert "fma" not in ptx.text, "sums are rounded as on the CPU"


def test_the_launch_describes_what_the_kernel_takes():
    def checked(wanted, parameters, *, grid, threads, device, operands):
        check_launch(toolchain.compile_ptx(wanted), parameters, grid, threads, 0, 0)
        return operands

    for options, _ in KERNELS:
        given = make(**options)
        what = make_append({name: (x.shape, x.dtype.name) for name, x in given.items()}, False)
        with mock.patch.object(toolchain, "prepare", checked):
            assert prepare(what, layouts(given), Device("cuda", 0, (9, 0))) == APPEND_OPERANDS


SIMULATED = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
import test_caches as cases
from numbaflash.dispatch import APPEND_OPERANDS
from numbaflash.kernels.caches.launch import prepare
from numbaflash.problem.caches import make_append
from numbaflash.toolchain import simulator
for n, (dtype, options, interleaved) in enumerate([
    ("bfloat16", dict(rotary=8, heads=4, page_size=5), True), ("float16", dict(rotary=6, heads=2, lengths=(-1, 11, 3)), False),
    ("float32", dict(rotary=4, page_size=1, positions=6), True), ("float64", dict(rotary=8, heads=2), False), ("float16", dict(page_size=3), False),
    ("bfloat16", dict(rotary=32, heads=2, dim=48, dim_v=16, page_size=4), False), ("float16", dict(rotary=16, dim=24, dim_v=40, heads=1), True),
    ("float32", dict(rotary=8, dim=16, dim_v=20, heads=2, lengths=(2**31 - 1, -(2**31), 5)), False),
    ("float16", dict(rotary=2, dim=3, dim_v=1), True), ("float32", dict(tokens=5, strided=True, rotary=8), False),
    ("float64", dict(rotary=12, dim=14, dim_v=2, heads=2, wide=True, lengths=(2**63 - 1, 5 - 2**32, 2**32 + 1)), True),
    ("bfloat16", dict(rotary=16, dim=16, dim_v=8, heads=2, own_angles=True, wide=True), False), ("float16", dict(rotary=8, keys_alone=True), False),
]):
    keys_alone = options.pop("keys_alone", False)
    given = cases.make(dtype=dtype, **options, seed=n)
    if keys_alone:
        del given["v_new"], given["v_cache"]
    if "page_table" in given:
        given["page_table"][0, 0] = -1
    host = cases.run(given, interleaved=interleaved)
    what = make_append({{name: (x.shape, x.dtype.name) for name, x in given.items()}}, interleaved)
    if "q" in given:
        given["rotated"] = np.full_like(given["q"], 7)
    launch = prepare(what, cases.layouts(given), make=simulator.prepare)
    launch(tuple(given[name].ctypes.data if name in given else 0 for name in APPEND_OPERANDS), 0)
    for one, other in zip((given.get(name) for name in ("k_cache", "v_cache", "rotated")), host):
        assert (one is None) == (other is None) and (one is None or one.tobytes() == other.tobytes()), (dtype, options)
print("bit for bit")

import numbaflash
from numbaflash import caches
from numbaflash.kernels.caches import launch
from pretended_gpu import OnGpu, Shifted, pretended
for library in (OnGpu(), Shifted()):
    given = cases.make(dtype="float16", rotary=16, heads=2, dim=32, dim_v=16, page_size=4)
    host = cases.run(given)
    with pretended(library, caches, launch, "prepare") as launched:
        for _ in range(2):
            found = cases.run(given)
    assert len(launched) == 2 and all(one.tobytes() == other.tobytes() for one, other in zip(found, host, strict=True))
print("as on a GPU")
"""


def test_the_kernel_is_bit_for_bit_the_host_in_the_simulator():
    code = SIMULATED.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, timeout=300)
    assert "bit for bit\nas on a GPU" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch", "numba"])
def test_on_a_gpu(library):
    for n, options in enumerate(
        ({"rotary": 8, "heads": 4, "page_size": 5}, {"dtype": "float16", "lengths": (-1, 11, 3)}, {"dtype": "float64", "rotary": 4, "page_size": 1})
    ):
        given = make(**options, seed=n)
        if library == "torch":
            torch = pytest.importorskip("torch", reason="PyTorch is not installed")
            arrays = {name: torch.from_numpy(x.copy()).cuda() for name, x in given.items()}
            rotated = nf.append_kv(**arrays)
            back = [x if x is None else x.cpu().numpy() for x in (arrays["k_cache"], arrays["v_cache"], rotated)]
        elif library == "cupy":
            cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
            arrays = {name: cupy.asarray(x) for name, x in given.items()}
            rotated = nf.append_kv(**arrays)
            back = [x if x is None else cupy.asnumpy(x) for x in (arrays["k_cache"], arrays["v_cache"], rotated)]
        else:
            from numba import cuda

            arrays = {name: cuda.to_device(x) for name, x in given.items()}
            rotated = nf.append_kv(**arrays)
            cuda.synchronize()
            back = [x if x is None else x.copy_to_host() for x in (arrays["k_cache"], arrays["v_cache"], rotated)]
        check(back, expected(given), options.get("dtype", "float32"))
        for one, other in zip(back, run(given), strict=True):
            assert one is other is None or one.tobytes() == other.tobytes(), "bit for bit the host's"
