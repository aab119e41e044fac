"""Array libraries on a GPU: results, streams, graphs, devices, lifetimes, and the host's cost of a call."""

from __future__ import annotations

import gc
import os
import statistics
import time

import numpy as np
import pytest
from attention import TOLERANCE, assert_attention, expected

import numbaflash
from numbaflash import call, toolchain

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other libraries need memory too

pytestmark = pytest.mark.skipif(toolchain.unavailable_reason() is not None, reason=f"no GPU: {toolchain.unavailable_reason()}")
ml_dtypes = pytest.importorskip("ml_dtypes")

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 130, 4, 64), np.float32)
K, V = RNG.standard_normal((2, 200, 2, 64), np.float32), RNG.standard_normal((2, 200, 2, 64), np.float32)
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


class Lib:
    """One library: to its arrays, from its arrays, and its name for a dtype."""

    def __init__(self, name, device=0):
        self.name, self.device = name, device
        if name in ("cupy", "interface", "dlpack"):
            self.cp = pytest.importorskip("cupy")
        elif name == "torch":
            self.torch = pytest.importorskip("torch")
            if not self.torch.cuda.is_available():
                pytest.skip("this torch has no CUDA")
        elif name == "jax":
            self.jax = pytest.importorskip("jax")
            try:
                self.where = self.jax.devices("cuda")[device]
            except RuntimeError:
                pytest.skip("this JAX has no CUDA")
        elif name == "numba":
            self.cuda = pytest.importorskip("numba.cuda")

    def make(self, x, dtype="float32"):
        host = np.ascontiguousarray(x).astype(NUMPY[dtype])
        if self.name == "torch":
            plain = host.view(np.int16) if dtype == "bfloat16" else host
            made = self.torch.from_numpy(plain.copy()).to(f"cuda:{self.device}")
            return made.view(self.torch.bfloat16) if dtype == "bfloat16" else made
        if self.name == "jax":
            return self.jax.device_put(host, self.where)
        if self.name == "numba":
            with self.cuda.gpus[self.device]:
                if dtype == "bfloat16":  # Numba cannot copy it from the host
                    return self.cuda.to_device(host.view(np.uint16)).view(host.dtype)
                return self.cuda.to_device(host)
        with self.cp.cuda.Device(self.device):
            made = self.cp.asarray(host)
        return {"cupy": lambda x: x, "interface": Interface, "dlpack": Exporter}[self.name](made)

    def host(self, x):
        if isinstance(x, (Interface, Exporter)):
            x = x.x
        if hasattr(x, "copy_to_host"):
            return x.copy_to_host().astype(np.float64)
        if hasattr(x, "get"):
            return x.get().astype(np.float64)
        if self.name == "torch":
            return x.double().cpu().numpy()
        return np.asarray(x).astype(np.float64)


class Exporter:
    """A library that knows nothing but DLPack."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **arguments):
        return self.x.__dlpack__(**arguments)


class Interface:
    """A library that knows nothing but ``__cuda_array_interface__``."""

    def __init__(self, x):
        self.x, self.dtype = x, x.dtype

    @property
    def __cuda_array_interface__(self):
        return self.x.__cuda_array_interface__


NAMES = ["cupy", "torch", "jax", "numba", "interface", "dlpack"]


@pytest.fixture(params=NAMES)
def lib(request):
    return Lib(request.param)


@pytest.fixture
def cupy():
    return Lib("cupy").cp


@pytest.fixture
def torch():
    return Lib("torch").torch


def result_kind(lib, x):
    module = type(x).__module__.partition(".")[0].removesuffix("lib").removesuffix("_cuda")
    return module == {"interface": "numba", "dlpack": "numba"}.get(lib.name, lib.name)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_library(lib, dtype):
    if lib.name == "jax" and dtype == "float64":
        lib.jax.config.update("jax_enable_x64", True)
    q, k, v = (lib.make(x, dtype) for x in (Q, K, V))
    values = [lib.host(x) for x in (q, k, v)]
    out, lse = numbaflash.forward(q, k, v, causal=True, return_lse=True)
    assert result_kind(lib, out) and result_kind(lib, lse)
    assert str(out.dtype).removeprefix("torch.") == dtype
    assert_attention((lib.host(out), lib.host(lse)), *values, dtype, causal=True)
    if lib.name != "jax":
        lse_dtype = "float64" if dtype == "float64" else "float32"
        given, given_lse = lib.make(np.full(out.shape, np.nan), dtype), lib.make(np.full(lse.shape, np.nan), lse_dtype)
        result = numbaflash.forward(q, k, v, causal=True, return_lse=True, out=given, lse=given_lse)
        assert result[0] is given and result[1] is given_lse
        np.testing.assert_array_equal(lib.host(given), lib.host(out))
        np.testing.assert_array_equal(lib.host(given_lse), lib.host(lse))
    assert numbaflash.explain(q, k, v, causal=True).plan.device.kind == "cuda"
    print(numbaflash.explain(q, k, v, causal=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_merge(lib, dtype):
    if lib.name == "jax" and dtype == "float64":
        lib.jax.config.update("jax_enable_x64", True)
    q = lib.make(Q, dtype)
    parts = [numbaflash.forward(q, lib.make(K[:, cut], dtype), lib.make(V[:, cut], dtype), return_lse=True) for cut in (slice(0, 90), slice(90, 200))]
    nothing = numbaflash.forward(q, lib.make(K[:, :0], dtype), lib.make(V[:, :0], dtype), return_lse=True)
    outs, lses = (list(x) for x in zip(nothing, *parts, nothing, strict=True))
    out, lse = numbaflash.merge(outs, lses)
    assert result_kind(lib, out) and str(out.dtype).removeprefix("torch.") == dtype
    values = [np.asarray(x).astype(NUMPY[dtype]) for x in (Q, K, V)]
    assert_attention((lib.host(out), lib.host(lse)), *values, dtype)
    empty = numbaflash.merge([nothing[0], nothing[0]], [nothing[1], nothing[1]])
    assert not lib.host(empty[0]).any() and np.all(lib.host(empty[1]) == -np.inf)


def test_sizes_of_zero(lib):
    q, k, v = (lib.make(x) for x in (Q, K, V))
    out, lse = numbaflash.forward(q, lib.make(K[:, :0]), lib.make(V[:, :0]), return_lse=True)
    assert not lib.host(out).any() and np.all(lib.host(lse) == -np.inf)
    out, lse = numbaflash.forward(lib.make(Q[:, :0]), k, v, return_lse=True)
    assert out.shape == (2, 0, 4, 64) and lse.shape == (2, 4, 0)


VIEWS = {
    "transposed": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "reversed": lambda x: x[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1],
    "sliced": lambda x: x.repeat(2, axis=3)[..., ::2],
    "broadcast": None,
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("wrap", ["cupy", "interface", "dlpack", "numba"])
def test_strides(cupy, view, wrap, dtype):
    made = [cupy.asarray(x.astype(dtype)) for x in (Q, K, V)]
    views = [cupy.broadcast_to(x[:1, :, :1], x.shape) if view == "broadcast" else VIEWS[view](x) for x in made]
    values = [x.get() for x in views]
    wrapped = {
        "cupy": lambda x: x,
        "interface": Interface,
        "dlpack": Exporter,
        "numba": lambda x: pytest.importorskip("numba.cuda").as_cuda_array(x),
    }[wrap]
    result = numbaflash.forward(*(wrapped(x) for x in views), return_lse=True)
    lib = Lib("cupy")
    assert_attention([lib.host(x) for x in result], *values, dtype)
    if view != "broadcast":
        out = VIEWS[view](cupy.full((2, 130, 4, 64), cupy.nan, dtype))
        numbaflash.forward(*(wrapped(x) for x in views), out=wrapped(out))
        np.testing.assert_array_equal(out.get(), lib.host(result[0]))


@pytest.mark.parametrize("operand", ["q", "k", "v", "out", "lse"])
@pytest.mark.parametrize("name", ["cupy", "torch", "numba", "interface", "dlpack"])
def test_copies(monkeypatch, name, operand):
    """Every operand through its copy, by pretending that no kernel may read it as it lies."""
    lib = Lib(name)
    real = call._layout
    arrays = {
        "q": lib.make(Q),
        "k": lib.make(K),
        "v": lib.make(V),
        "out": lib.make(np.zeros((2, 130, 4, 64))),
        "lse": lib.make(np.zeros((2, 4, 130))),
    }
    shape = tuple(arrays[operand].x.shape if name in ("interface", "dlpack") else arrays[operand].shape)
    monkeypatch.setattr(call, "_layout", lambda facts, itemsize: None if facts.shape == shape else real(facts, itemsize))
    call.forget()
    assert operand in numbaflash.explain(**arrays).plan.copies
    numbaflash.forward(**arrays)
    call.forget()
    assert_attention((lib.host(arrays["out"]), lib.host(arrays["lse"])), Q, K, V)


# Streams


def sleep(torch, seconds):
    torch.cuda._sleep(int(seconds * 1.5e9))


def test_current_stream_of_torch(torch):
    """On the current stream: behind a slow write of q, before a later one."""
    q, k, v = (torch.from_numpy(x).cuda() for x in (Q, K, V))
    numbaflash.forward(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        sleep(torch, 0.5)
        late.copy_(q)
        out = numbaflash.forward(late, k, v)
        late.zero_()
    assert time.perf_counter() - start < 0.25, "the host waited"
    stream.synchronize()
    np.testing.assert_allclose(out.cpu().numpy(), expected(Q, K, V)[0], rtol=1e-5, atol=1e-5)


def test_current_stream_of_cupy(cupy):
    q, k, v = (cupy.asarray(x) for x in (Q, K, V))
    late = cupy.zeros_like(q)
    want = numbaflash.forward(late, k, v)
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.ptds):
        late[...] = 0
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(200):
                late += q / 200
            out = numbaflash.forward(late, k, v)
            late[...] = 0
        stream.synchronize()
        np.testing.assert_allclose(out.get(), expected(Q, K, V)[0], rtol=1e-4, atol=1e-4)
        assert not np.array_equal(out.get(), want.get())


@pytest.mark.parametrize("spelling", ["object", "handle", "foreign"])
def test_stream_of_torch(torch, spelling):
    """A given stream, while the current one is asleep; inputs are dropped and their memory is used again at once."""
    q, k, v = (torch.from_numpy(x).cuda() for x in (Q, K, V))
    numbaflash.forward(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    given = {"object": lambda: stream, "handle": lambda: stream.cuda_stream, "foreign": lambda: foreign(stream)}[spelling]()
    with torch.cuda.stream(stream):
        sleep(torch, 0.3)
    out, lse = numbaflash.forward(q, k, v, return_lse=True, stream=given)
    del q, k, v
    torch.full_like(torch.empty(Q.shape, device="cuda"), 7.0)  # takes the memory of q if it has been given back too early
    stream.synchronize()
    assert_attention((out.cpu().numpy(), lse.cpu().numpy()), Q, K, V)


def foreign(stream):
    return pytest.importorskip("cupy").cuda.ExternalStream(stream.cuda_stream)


@pytest.mark.parametrize("name", ["cupy", "numba", "interface", "dlpack"])
def test_stream_given(cupy, name):
    lib = Lib(name)
    q, k, v = (lib.make(x) for x in (Q, K, V))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    for given in (stream, stream.ptr):
        out, lse = numbaflash.forward(q, k, v, return_lse=True, stream=given)
        stream.synchronize()
        assert_attention((lib.host(out), lib.host(lse)), Q, K, V)
    numba = pytest.importorskip("numba.cuda").stream()
    out, lse = numbaflash.forward(q, k, v, return_lse=True, stream=numba)
    numba.synchronize()
    assert_attention((lib.host(out), lib.host(lse)), Q, K, V)


def test_numba_arrays_bound_to_streams():
    cuda = pytest.importorskip("numba.cuda")
    streams = [cuda.stream() for _ in range(3)]
    q, k, v = (cuda.to_device(x, stream=stream) for x, stream in zip((Q, K, V), streams, strict=True))
    out, lse = numbaflash.forward(q, k, v, return_lse=True)
    assert int(out.__cuda_array_interface__["stream"]) == q.__cuda_array_interface__["stream"]
    streams[0].synchronize()
    assert_attention((out.copy_to_host(), lse.copy_to_host()), Q, K, V)


# Graphs


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_graph_of_torch(torch, given, dtype):
    q, k, v = (torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in (Q, K, V))
    results = {"out": torch.empty_like(q), "lse": torch.empty(2, 4, 130, device="cuda")} if given else {}
    numbaflash.forward(q, k, v, return_lse=True, **results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = numbaflash.forward(q, k, v, return_lse=True, **results)
    for factor in (1, 2):
        q.copy_(torch.from_numpy(factor * Q))
        graph.replay()
        torch.cuda.synchronize()
        assert_attention([x.double().cpu().numpy() for x in (out, lse)], *(x.double().cpu().numpy() for x in (q, k, v)), dtype)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_graph_of_cupy(cupy, given, first):
    """Also where the captured call is the first of its kind, which loads the kernel."""
    call.forget()
    q, k, v = (cupy.asarray(x) for x in (Q, K, V))
    results = {"out": cupy.empty_like(q), "lse": cupy.empty((2, 4, 130), cupy.float32)} if given else {}
    if not first:
        numbaflash.forward(q, k, v, return_lse=True, **results)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out, lse = numbaflash.forward(q, k, v, return_lse=True, **results)
        graph = stream.end_capture()
    for factor in (1, 2):
        q[...] = cupy.asarray(factor * Q)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_attention((out.get(), lse.get()), factor * Q, K, V)


def test_pools_of_cupy(cupy):
    """Results come from whatever allocator is set, and go back to it."""
    q, k, v = (cupy.asarray(x) for x in (Q, K, V))
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        out, lse = numbaflash.forward(q, k, v, return_lse=True)
        assert pool.used_bytes() >= out.nbytes + lse.nbytes
        del out, lse
        assert pool.used_bytes() == 0


# Devices


def two_devices():
    if toolchain.device_count() < 2:
        pytest.skip("one GPU only")


@pytest.mark.parametrize("name", NAMES)
def test_second_device(name):
    two_devices()
    lib = Lib(name, device=1)
    q, k, v = (lib.make(x) for x in (Q, K, V))
    out, lse = numbaflash.forward(q, k, v, return_lse=True)
    told = numbaflash.explain(q, k, v)
    assert told.plan.device.index == 1
    assert_attention((lib.host(out), lib.host(lse)), Q, K, V)
    merged = numbaflash.merge([out, out], [lse, lse])
    np.testing.assert_allclose(lib.host(merged[0]), lib.host(out), rtol=1e-5, atol=1e-6)
    if name == "cupy":
        assert out.device.id == 1 and lib.cp.cuda.Device().id == 0
    if name == "torch":
        assert out.device.index == 1 and lib.torch.cuda.current_device() == 0
    if name != "jax":
        with pytest.raises(ValueError, match="all arrays must lie on one device; got q on cuda:1, k on cuda:0"):
            numbaflash.forward(q, Lib(name).make(K), v)
    if name in ("cupy", "torch"):
        stream = lib.cp.cuda.Stream() if name == "cupy" else lib.torch.cuda.Stream(0)
        with pytest.raises(ValueError, match="stream must belong to the arrays' device cuda:1; got a stream of cuda:0"):
            numbaflash.forward(q, k, v, stream=stream)


# Arrays that must be refused


def test_torch_errors(torch):
    q, k, v = (torch.from_numpy(x).cuda() for x in (Q, K, V))
    with pytest.raises(ValueError, match="all arrays must lie on one device; got q on the CPU, k on cuda:0"):
        numbaflash.forward(q.cpu(), k, v)
    with pytest.raises(ValueError, match="v takes part in automatic differentiation"):
        numbaflash.forward(q, k, v.requires_grad_())
    gone = q.clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="q has no memory"):
        numbaflash.forward(gone, k, v.detach())
    with pytest.raises(ValueError, match="out must not share memory with q"):
        numbaflash.forward(q, k, v.detach(), out=q)


def test_cupy_errors(cupy):
    q, k, v = (cupy.asarray(x) for x in (Q, K, V))
    numbaflash.forward(q, k, v)
    gone = cupy.ndarray(Q.shape, np.float32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0))
    with pytest.raises(ValueError, match="q has no memory: it was deleted or released before the call"):
        numbaflash.forward(gone, k, v)
    with pytest.raises(TypeError, match="got q from CuPy, k from NumPy"):
        numbaflash.forward(q, K, v)
    with pytest.raises(ValueError, match="out must give every element a place of its own"):
        numbaflash.forward(q, k, v, out=cupy.lib.stride_tricks.as_strided(q.copy(), q.shape, (0, 0, 0, 4)))
    with pytest.raises(ValueError, match=r"out must have shape .*"):
        numbaflash.forward(q, k, v, out=cupy.empty((2, 130, 4, 65), np.float32))


def test_memory_of_other_kinds(cupy):
    """Managed memory under CuPy, and pinned memory, which is the host's."""
    old = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
    try:
        result = numbaflash.forward(*(cupy.asarray(x) for x in (Q, K, V)), return_lse=True)
        assert_attention([x.get() for x in result], Q, K, V)
    finally:
        cupy.cuda.set_allocator(old)
    pinned = pytest.importorskip("cupyx").empty_pinned(Q.shape, np.float32)
    pinned[...] = Q
    assert isinstance(numbaflash.forward(pinned, K, V), np.ndarray)


def test_results_keep_nothing_alive(cupy):
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        q, k, v = (cupy.asarray(x) for x in (Q, K, V))
        numbaflash.forward(q, k, v, out=cupy.empty_like(q))
        del q, k, v
        gc.collect()
        assert pool.used_bytes() == 0


# JAX


def test_jax_inside_jit_and_command_buffers():
    lib = Lib("jax")
    jax, jnp = lib.jax, lib.jax.numpy
    q, k, v = (lib.make(x) for x in (Q, K, V))

    @jax.jit
    def model(q, k, v):
        for _ in range(12):  # enough for XLA to make a CUDA graph of it
            q = numbaflash.forward(q, k, v, causal=True) + q
        return q

    want = jnp.asarray(Q)
    for _ in range(12):
        want = want + jnp.asarray(expected(np.asarray(want), K, V, causal=True)[0], jnp.float32)
    for _ in range(5):
        np.testing.assert_allclose(np.asarray(model(q, k, v)), np.asarray(want), rtol=1e-3, atol=1e-3)


def test_jax_does_not_wait():
    lib = Lib("jax")
    jax = lib.jax
    q, k, v = (lib.make(np.tile(x, (8, 8, 2, 1)), "float16") for x in (Q, K, V))
    run = jax.jit(lambda q, k, v: numbaflash.forward(q, k, v))
    run(q, k, v).block_until_ready()
    start = time.perf_counter()
    outs = [run(q, k, v) for _ in range(20)]
    handed_over = time.perf_counter() - start
    outs[-1].block_until_ready()
    print(f"JAX: handed over in {handed_over * 1e3:.2f} ms, done after {(time.perf_counter() - start) * 1e3:.2f} ms")


# The host's cost


def test_host_cost(record_property):
    """Printed for the record: run with -s."""
    for name in ("cupy", "torch", "jax", "numba"):
        try:
            lib = Lib(name)
        except pytest.skip.Exception:
            continue
        x = lib.make(np.zeros((1, 128, 1, 128)), "float16")
        options = {"new out and lse": {"return_lse": True}}
        if name != "jax":
            options["given out and lse"] = {"out": lib.make(np.zeros(x.shape), "float16"), "lse": lib.make(np.zeros((1, 1, 128)), "float32")}
        for what, given in options.items():
            for _ in range(20):
                numbaflash.forward(x, x, x, **given)
            times = []
            for _ in range(40):
                synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    numbaflash.forward(x, x, x, **given)
                times.append((time.perf_counter() - start) / 50 * 1e6)
            print(f"{name}, {what}: {statistics.median(times):.1f} us a call (best {min(times):.1f})")
            record_property(f"{name}, {what}", statistics.median(times))


def synchronize():
    pytest.importorskip("numba.cuda").synchronize()
