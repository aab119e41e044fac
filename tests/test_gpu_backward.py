"""`numbaflash.backward` through the array libraries on a GPU: results, streams, graphs, memory, and the host's cost of a call."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
from attention import TOLERANCE, assert_close
from test_gpu_arrays import NUMPY, Exporter, Interface, K, Lib, Q, V, foreign, result_kind, sleep, synchronize

import numbaflash
from numbaflash import call, dispatch, reference, testing, toolchain
from numbaflash.problem import make_problem

pytestmark = pytest.mark.skipif(toolchain.unavailable_reason() is not None, reason=f"no GPU: {toolchain.unavailable_reason()}")

NAMES = ["cupy", "torch", "numba", "interface", "dlpack"]
OPTIONS = {"causal": True}
DOUT, DLSE = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((2, 130, 4, 64), (2, 4, 130)))
GRADIENTS = ("dq", "dk", "dv")


def saved(dtype="float32", q=Q, k=K, v=V, dout=DOUT, **options):
    """dout, q, k, v, out and lse as the dtype holds them."""
    dout, q, k, v = (x.astype(NUMPY[dtype]) for x in (dout, q, k, v))
    problem = make_problem(q.shape, k.shape, v.shape, ["float64"] * 3, **options)
    out, lse = reference.forward(problem, *(x.astype(np.float64) for x in (q, k, v)))
    return dout, q, k, v, out.astype(NUMPY[dtype]), lse.astype("float64" if dtype == "float64" else "float32")


def wanted(dout, q, k, v, dlse=None, **options):
    problem = make_problem(q.shape, k.shape, v.shape, ["float64"] * 3, **options)
    return reference.backward(problem, *(x.astype(np.float64) for x in (dout, q, k, v)), dlse)


def lse_dtype(dtype):
    return "float64" if dtype == "float64" else "float32"


def on_gpu(lib, arrays, dtype="float32"):
    return [lib.make(x, dtype if x.ndim == 4 else lse_dtype(dtype)) for x in arrays]


@pytest.fixture(params=NAMES)
def lib(request):
    return Lib(request.param)


@pytest.fixture
def cupy():
    return Lib("cupy").cp


@pytest.fixture
def torch():
    return Lib("torch").torch


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_library(lib, dtype, deterministic):
    arrays = saved(dtype, **OPTIONS)
    made, dlse = on_gpu(lib, arrays, dtype), lib.make(DLSE, lse_dtype(dtype))
    gradients = numbaflash.backward(*made, dlse=dlse, deterministic=deterministic, **OPTIONS)
    assert all(result_kind(lib, x) and str(x.dtype).removeprefix("torch.") == dtype for x in gradients)
    assert_close([lib.host(x) for x in gradients], wanted(*arrays[:4], DLSE, **OPTIONS), dtype)
    given = {name: lib.make(np.full(x.shape, np.nan), dtype) for name, x in zip(GRADIENTS, gradients, strict=True)}
    result = numbaflash.backward(*made, dlse=dlse, deterministic=deterministic, **given, **OPTIONS)
    for mine, own, name in zip(result, gradients, GRADIENTS, strict=True):
        assert mine is given[name]
        if deterministic:
            np.testing.assert_array_equal(lib.host(mine), lib.host(own))
    assert_close([lib.host(x) for x in result], wanted(*arrays[:4], DLSE, **OPTIONS), dtype)
    alone = numbaflash.backward(*made, dlse=dlse, deterministic=True, needs=("k",), **OPTIONS)
    assert alone[0] is None and alone[2] is None
    assert_close([lib.host(alone[1])], [wanted(*arrays[:4], DLSE, **OPTIONS)[1]], dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_of_zero(lib, dtype):
    for cut in ({"k": K[:, :0], "v": V[:, :0]}, {"q": Q[:, :0], "dout": DOUT[:, :0]}):
        arrays = saved(dtype, **cut)
        made = on_gpu(lib, arrays, dtype)
        given = {name: lib.make(np.full(x.shape, np.nan), dtype) for name, x in zip(GRADIENTS, arrays[1:4], strict=True)}
        for results in ({}, given):
            gradients = numbaflash.backward(*made, **results)
            for name, x, like in zip(GRADIENTS, gradients, arrays[1:4], strict=True):
                assert x is results[name] if results else result_kind(lib, x)
                assert lib.host(x).shape == like.shape and not lib.host(x).any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("wrap", ["cupy", "interface", "dlpack"])
def test_strides(cupy, wrap, dtype):
    """A dout of stride 0, and gradients that run backwards and across."""
    arrays = saved(dtype, dout=np.full(DOUT.shape, 0.5, np.float32))
    wrapped = {"cupy": lambda x: x, "interface": Interface, "dlpack": Exporter}[wrap]
    made = [wrapped(cupy.asarray(x)) for x in arrays]
    made[0] = wrapped(cupy.broadcast_to(cupy.full((1, 1, 1, 1), 0.5, dtype), DOUT.shape))
    dq = cupy.full((2, 4, 130, 64), cupy.nan, dtype).swapaxes(1, 2)
    dk = cupy.full(K.shape, cupy.nan, dtype)[:, ::-1]
    dv = cupy.full((*V.shape[:3], 128), cupy.nan, dtype)[..., ::2]
    numbaflash.backward(*made, dq=wrapped(dq), dk=wrapped(dk), dv=wrapped(dv))
    assert_close([x.get().astype(np.float64) for x in (dq, dk, dv)], wanted(*arrays[:4]), dtype)


@pytest.mark.parametrize("operand", ["dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv"])
def test_copies(lib, monkeypatch, operand):
    """Every operand through its copy, by pretending that no kernel may read it as it lies."""
    arrays = saved()
    read = dict(zip(("dout", "q", "k", "v", "out", "lse"), on_gpu(lib, arrays), strict=True))
    given = {name: lib.make(np.full(x.shape, np.nan)) for name, x in zip(GRADIENTS, arrays[1:4], strict=True)}
    real, plan = call._layouts, call.plan_backward_call
    plans = []

    def layouts(problem, facts, operands):
        found, misaligned = real(problem, {name: x for name, x in facts.items() if name != operand}, operands)
        return found, [*misaligned, operand]

    monkeypatch.setattr(call, "_layouts", layouts)
    monkeypatch.setattr(call, "plan_backward_call", lambda *arguments: plans.append(plan(*arguments)) or plans[-1])
    call.forget()
    numbaflash.backward(**read, **given)
    call.forget()
    assert operand in plans[0].copies
    assert_close([lib.host(given[name]) for name in GRADIENTS], wanted(*arrays[:4]))


# Streams


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_current_stream_of_torch(torch, dtype):
    """On the current stream: behind a slow write of dout, before a later one; the host does not wait."""
    arrays = saved(dtype)
    made = on_gpu(Lib("torch"), arrays, dtype)
    numbaflash.backward(*made)
    stream, late = torch.cuda.Stream(), torch.zeros_like(made[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        sleep(torch, 0.5)
        late.copy_(made[0])
        gradients = numbaflash.backward(late, *made[1:])
        late.zero_()
    assert time.perf_counter() - start < 0.25, "the host waited"
    stream.synchronize()
    assert_close([x.double().cpu().numpy() for x in gradients], wanted(*arrays[:4]), dtype)


@pytest.mark.parametrize("spelling", ["object", "handle", "foreign"])
def test_stream_of_torch(torch, spelling):
    """A given stream, while the current one goes on: inputs and the workspace are dropped, and their memory is used again at once."""
    arrays = saved("bfloat16")
    made = on_gpu(Lib("torch"), arrays, "bfloat16")
    numbaflash.backward(*made)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    given = {"object": lambda: stream, "handle": lambda: stream.cuda_stream, "foreign": lambda: foreign(stream)}[spelling]()
    with torch.cuda.stream(stream):
        sleep(torch, 0.3)
    gradients = numbaflash.backward(*made, stream=given)
    del made
    for _ in range(4):
        torch.full((2**20,), 7.0, device="cuda")
    stream.synchronize()
    assert_close([x.double().cpu().numpy() for x in gradients], wanted(*arrays[:4]), "bfloat16")


@pytest.mark.parametrize("name", ["cupy", "numba", "interface", "dlpack"])
def test_stream_given(cupy, name):
    lib, arrays = Lib(name), saved()
    made = on_gpu(lib, arrays)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    for given in (stream, stream.ptr):
        gradients = numbaflash.backward(*made, stream=given)
        stream.synchronize()
        assert_close([lib.host(x) for x in gradients], wanted(*arrays[:4]))


# Graphs and memory


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_graph_of_torch(torch, given, dtype):
    """Forward and backward in one graph, replayed on other values."""
    dout, q, k, v, _, _ = on_gpu(Lib("torch"), saved(dtype), dtype)
    results = dict(zip(GRADIENTS, map(torch.empty_like, (q, k, v)), strict=True)) if given else {}

    def step():
        out, lse = numbaflash.forward(q, k, v, return_lse=True)
        return numbaflash.backward(dout, q, k, v, out, lse, **results)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    for factor in (1, 2):
        q.copy_(torch.from_numpy(factor * Q))
        graph.replay()
        torch.cuda.synchronize()
        values = (x.double().cpu().numpy() for x in (dout, q, k, v))
        assert_close([x.double().cpu().numpy() for x in gradients], wanted(*values), dtype)


def test_graph_of_cupy(cupy):
    arrays = saved()
    made = on_gpu(Lib("cupy"), arrays)
    numbaflash.backward(*made)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        gradients = numbaflash.backward(*made)
        graph = stream.end_capture()
    for factor in (1, 2):
        made[0][...] = cupy.asarray(factor * DOUT)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_close([x.get() for x in gradients], wanted(factor * DOUT, *arrays[1:4]))


def test_pools_of_cupy(cupy):
    """Gradients and the workspace come from whatever allocator is set, and go back to it."""
    made = on_gpu(Lib("cupy"), saved())
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        gradients = numbaflash.backward(*made)
        plan = numbaflash.explain(*made[1:4], direction="backward").plan
        assert pool.used_bytes() <= sum(x.nbytes + 512 for x in gradients), "the workspace is given back"
        assert pool.total_bytes() >= sum(x.nbytes for x in gradients) + plan.workspace_bytes
        del gradients
        assert pool.used_bytes() == 0


def test_memory_grows_with_the_length_alone(cupy):
    """The workspace has no term in seqlen_q * seqlen_k."""
    for dtype in ("float16", "float32"):
        for deterministic in (False, True):
            sizes = []
            for n in (1024, 2048, 4096):
                x = cupy.zeros((1, n, 2, 64), dtype)
                sizes.append(numbaflash.explain(x, x, x, causal=True, direction="backward", deterministic=deterministic).plan.workspace_bytes)
            print(dtype, deterministic, sizes)
            assert sizes[2] <= 2.5 * sizes[1] + 2**20 and sizes[1] <= 2.5 * sizes[0] + 2**20


# Determinism


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_deterministic_gradients_of_sm90_are_the_same_bits_100_times(head_dim, causal):
    """Many more tiles than run at once, which wait for each other. `simt` has the same in `test_simt_kernel`."""
    torch = pytest.importorskip("torch")
    if "torch-cuda" not in testing.gpu_libraries():
        pytest.skip("torch sees no GPU")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(4, 2048, heads, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator) for heads in (8, 4, 4, 8))
    with dispatch.use_family("sm90"):
        try:
            out, lse = numbaflash.forward(q, k, v, causal=causal, return_lse=True)
        except numbaflash.UnsupportedError as error:
            pytest.skip(str(error))
        first = numbaflash.backward(dout, q, k, v, out, lse, causal=causal, deterministic=True)
        for _ in range(100):
            again = numbaflash.backward(dout, q, k, v, out, lse, causal=causal, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# The host's cost


def test_host_cost(record_property):
    """Printed for the record: run with -s."""
    for name in ("cupy", "torch", "numba"):
        try:
            lib = Lib(name)
        except pytest.skip.Exception:
            continue
        x, lse = lib.make(np.zeros((1, 128, 1, 128)), "float16"), lib.make(np.zeros((1, 1, 128)), "float32")
        given = {gradient: lib.make(np.zeros((1, 128, 1, 128)), "float16") for gradient in GRADIENTS}
        for what, options in {"new gradients": {}, "given gradients": given}.items():
            for _ in range(20):
                numbaflash.backward(x, x, x, x, x, lse, **options)
            times = []
            for _ in range(40):
                synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    numbaflash.backward(x, x, x, x, x, lse, **options)
                times.append((time.perf_counter() - start) / 50 * 1e6)
            print(f"{name}, {what}: {statistics.median(times):.1f} us a call (best {min(times):.1f})")
            record_property(f"{name}, {what}", statistics.median(times))
