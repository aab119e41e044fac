"""Every array library that a CPU has: results in the same library, any strides, bfloat16, and arrays that must be refused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from attention import TOLERANCE, assert_attention

import numbaflash
from numbaflash import arrays, call, dispatch
from numbaflash.arrays import numpy as host
from numbaflash.arrays.borrowed import borrow
from numbaflash.arrays.streams import stream_handle

ml_dtypes = pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 9, 4, 16), np.float32)
K, V = RNG.standard_normal((2, 13, 2, 16), np.float32), RNG.standard_normal((2, 13, 2, 24), np.float32)


class Exporter:
    """A library that knows nothing but DLPack; ``old`` is one from before DLPack 1.0."""

    def __init__(self, x, old=False):
        self.x, self.old, self.asked = x, old, []

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        if self.old and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.x.__dlpack__(**arguments)


def from_bits(x, dtype):
    """A torch tensor: NumPy cannot export bfloat16 through DLPack."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))


LIBRARIES = {
    "numpy": (lambda x, dtype: x.astype(host.dtype_of(dtype)), np.ndarray),
    "torch": (from_bits, torch.Tensor),
    "dlpack": (lambda x, dtype: Exporter(from_bits(x, dtype)), np.ndarray),
    "old dlpack": (lambda x, dtype: Exporter(from_bits(x, dtype), old=True), np.ndarray),
}


def numbers(x):
    if isinstance(x, Exporter):
        x = x.x
    return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library(library, dtype):
    make, kind = LIBRARIES[library]
    q, k, v = (make(x, dtype) for x in (Q, K, V))
    values = [numbers(x) for x in (q, k, v)]
    out, lse = numbaflash.forward(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, kind) and isinstance(lse, kind)
    lse_dtype = "float64" if dtype == "float64" else "float32"
    assert str(out.dtype).removeprefix("torch.") == dtype and str(lse.dtype).removeprefix("torch.") == lse_dtype
    assert_attention((numbers(out), numbers(lse)), *values, dtype, causal=True)

    given, given_lse = make(np.full(out.shape, np.nan), dtype), make(np.full(lse.shape, np.nan), lse_dtype)
    result = numbaflash.forward(q, k, v, causal=True, return_lse=True, out=given, lse=given_lse)
    assert result[0] is given and result[1] is given_lse
    np.testing.assert_array_equal(numbers(given), numbers(out))
    np.testing.assert_array_equal(numbers(given_lse), numbers(lse))

    parts = [numbaflash.forward(q, make(K[:, cut], dtype), make(V[:, cut], dtype), return_lse=True) for cut in (slice(0, 5), slice(5, 13))]
    if kind is np.ndarray and library != "numpy":
        parts = [tuple(make(numbers(x), str(x.dtype)) for x in part) for part in parts]
    merged = numbaflash.merge(*(list(x) for x in zip(*parts, strict=True)))
    assert isinstance(merged[0], kind) and str(merged[0].dtype).removeprefix("torch.") == dtype
    assert_attention([numbers(x) for x in merged], *values, dtype)
    assert numbaflash.explain(q, k, v).plan.family == "cpu"


VIEWS = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "reversed": lambda x: np.ascontiguousarray(x[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1],
    "sliced": lambda x: np.repeat(x, 2, axis=3)[..., ::2],
    "fortran": np.asfortranarray,
    "broadcast": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
    "readonly": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "unaligned": lambda x: _unaligned(x),
    "memmap": lambda x: _memmap(x),
}


def _unaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)
    odd = raw[1:].view(x.dtype).reshape(x.shape)
    odd[...] = x
    return odd


def _memmap(x):
    import tempfile

    with tempfile.TemporaryFile() as file:
        made = np.memmap(file, x.dtype, "w+", shape=x.shape)
    made[...] = x
    return made


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_numpy_views(view, operand):
    arguments = {"q": Q, "k": K, "v": V}
    arguments[operand] = VIEWS[view](arguments[operand])
    before = {name: x.copy() for name, x in arguments.items()}
    assert_attention(numbaflash.forward(**arguments, return_lse=True), **before)
    for name, x in arguments.items():
        np.testing.assert_array_equal(x, before[name])
    assert type(numbaflash.forward(**arguments)) is np.ndarray


@pytest.mark.parametrize("view", ["transposed", "reversed", "sliced", "fortran", "unaligned"])
@pytest.mark.parametrize("operand", ["out", "lse"])
def test_numpy_result_views(view, operand):
    given = {operand: VIEWS[view](np.full((2, 9, 4, 24) if operand == "out" else (2, 4, 9, 1), np.nan, np.float32))}
    if operand == "lse":
        given["lse"] = given["lse"][..., 0]
    out, lse = numbaflash.forward(Q, K, V, return_lse=True, **given)
    assert_attention((out, lse), Q, K, V)


TORCH_VIEWS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
    "sliced": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(type("Named", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("view", TORCH_VIEWS)
def test_torch_views(view):
    q, k, v = (TORCH_VIEWS[view](torch.from_numpy(x)) for x in (Q, K, V))
    out, lse = numbaflash.forward(q, k, v, return_lse=True)
    assert type(out) is torch.Tensor
    assert_attention((out.numpy(), lse.numpy()), *(x.detach().numpy() for x in (q, k, v)))


# Torch tensors that are more than memory


def test_torch_tensors_that_would_be_differentiated():
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    for name in "qkv":
        arguments = {"q": q, "k": k, "v": v}
        arguments[name] = arguments[name].clone().requires_grad_()
        message = rf"{name} takes part in automatic differentiation, .* torch\.no_grad\(\) or torch\.inference_mode\(\), or pass {name}\.detach\(\)"
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                numbaflash.forward(**arguments)
            with torch.no_grad():
                assert not numbaflash.forward(**arguments).requires_grad
        with torch.inference_mode():
            numbaflash.forward(**arguments)
        numbaflash.forward(**{other: x.detach() for other, x in arguments.items()})
    with pytest.raises(ValueError, match="out takes part in automatic differentiation"):
        numbaflash.forward(q, k, v, out=torch.zeros(2, 9, 4, 24, requires_grad=True))
    assert numbaflash.merge([torch.zeros(2, 9, 4, 24, requires_grad=True)], [torch.zeros(2, 4, 9)])[0].requires_grad, "merge is differentiated"


def test_torch_forward_mode():
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(ValueError, match="q takes part in automatic differentiation"):
            numbaflash.forward(dual, k, v)
        numbaflash.forward(q, k, v)


def _fake(x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(x.shape)


def _released(x):
    y = x.clone()
    y.untyped_storage().resize_(0)
    return y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, r"q must be a dense tensor; got layout torch\.sparse_coo\. Convert it first \(q\.to_dense\(\)\)", lambda x: x.to_sparse()),
        (TypeError, r"q must not be quantized; got dtype torch\.qint8", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        (ValueError, r"q must lie on the CPU or a CUDA device; got device meta", lambda x: x.to("meta")),
        (ValueError, r"q has a pending negation or conjugation .*resolve_neg", lambda x: torch.complex(x, x).conj().imag),
        (TypeError, r"q must be a dense tensor; got a nested tensor", lambda x: torch.nested.nested_tensor([x[0], x[1]])),
        (TypeError, r"q from a trace of PyTorch, k from PyTorch", _fake),
        (ValueError, r"q has no memory: it was deleted or released before the call", _released),
        (TypeError, r"q must be one of .*; got dtype complex64", lambda x: x.to(torch.complex64)),
        (TypeError, r"q must be one of .*; got dtype int64", lambda x: x.long()),
        (TypeError, r"q must be one of .*; got dtype float8_e4m3fn", lambda x: x.to(torch.float8_e4m3fn)),
    ],
)
def test_torch_tensors_that_are_refused(error, message, change):
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    numbaflash.forward(q, k, v)
    for _ in range(2):
        with pytest.raises(error, match=message):
            numbaflash.forward(change(q), k, v)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_torch_func(transform):
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    run = {
        "vmap": lambda: torch.vmap(lambda x: numbaflash.forward(x, k, v))(q[None]),
        "grad": lambda: torch.func.grad(lambda x: numbaflash.forward(x, k, v).sum())(q),
        "jvp": lambda: torch.func.jvp(lambda x: numbaflash.forward(x, k, v), (q,), (q,)),
    }[transform]
    with pytest.raises(TypeError, match=r"q is traced by torch\.func"):
        run()


def test_torch_knows_that_out_was_written():
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    out, lse = torch.empty(2, 9, 4, 24), torch.empty(2, 4, 9)
    versions = out._version, lse._version
    numbaflash.forward(q, k, v, out=out, lse=lse)
    assert (out._version, lse._version) == (versions[0] + 1, versions[1] + 1)
    with torch.inference_mode():
        numbaflash.forward(q, k, v, out=torch.empty(2, 9, 4, 24))


def test_torch_compile_breaks_the_graph_there():
    """In a process of its own, where the first call of all is a traced one."""
    in_subprocess("""
        import numpy as np, torch, numbaflash
        q, k, v = torch.randn(3, 1, 20, 2, 16)

        @torch.compile(backend="eager")
        def model(q, k, v):
            out, lse = numbaflash.forward(q * 2, k, v, causal=True, return_lse=True)
            return numbaflash.merge([out + 1], [lse])

        with torch.no_grad():
            for _ in range(2):
                out, lse = model(q, k, v)
            want = numbaflash.forward(q * 2, k, v, causal=True, return_lse=True)
        torch.testing.assert_close(out, want[0] + 1)
        torch.testing.assert_close(lse, want[1])
    """)


def test_torch_default_device_and_dtype_do_not_matter():
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    call.forget()
    with torch.device("meta"):
        assert numbaflash.forward(q, k, v, return_lse=True)[1].device.type == "cpu"


# Several libraries


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_mixed_libraries(name):
    arguments = {"q": Q, "k": K, "v": V, "out": np.empty((2, 9, 4, 24), np.float32), "lse": np.empty((2, 4, 9), np.float32)}
    arguments[name] = torch.from_numpy(arguments[name])
    for run in (numbaflash.forward, numbaflash.explain):
        with pytest.raises(TypeError, match=r"must come from one array library; got .*PyTorch.*Convert them to one library first"):
            run(**arguments)
    with pytest.raises(TypeError, match=r"outs\[0\] from NumPy, lses\[0\] from PyTorch"):
        numbaflash.merge([Q], [torch.zeros(2, 4, 9)])


def test_two_foreign_libraries_do_not_mix():
    other = type("Other", (Exporter,), {"__module__": "elsewhere.array"})
    with pytest.raises(TypeError, match="k from elsewhere"):
        numbaflash.forward(Exporter(Q), other(K), Exporter(V))


# DLPack


def test_dlpack_strides_and_readonly():
    views = [VIEWS[view](x) for view, x in (("transposed", Q), ("sliced", K), ("reversed", V))]
    assert_attention(numbaflash.forward(*map(Exporter, views), return_lse=True), Q, K, V)
    out = np.empty((2, 9, 4, 24), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable; got a read-only array"):
        numbaflash.forward(Exporter(Q), Exporter(K), Exporter(V), out=Exporter(out))
    frozen = Q.copy()
    frozen.flags.writeable = False
    assert_attention(numbaflash.forward(Exporter(frozen), Exporter(K), Exporter(V), return_lse=True), Q, K, V)


class Unsigned(Exporter):
    """Divides negative strides by the itemsize as unsigned numbers, as CuPy 14 does."""

    def __dlpack__(self, **arguments):
        from numbaflash.arrays import borrowed

        capsule = self.x.__dlpack__()
        tensor = borrowed._Tensor.from_address(borrowed._capsule_pointer(capsule, b"dltensor"))
        for i, stride in enumerate(self.x.strides):
            tensor.strides[i] = stride % 2**64 // self.x.itemsize
        return capsule


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dlpack_negative_strides_as_unsigned_numbers(dtype):
    reverse = VIEWS["reversed"]
    q, k, v, out = (reverse(x.astype(dtype)) for x in (Q, K, V, np.full((2, 9, 4, 24), np.nan)))
    assert min(q.strides) < 0 and borrow(Unsigned(q), "q", None).facts.strides == borrow(Exporter(q), "q", None).facts.strides == q.strides
    given = Unsigned(out)
    result, lse = numbaflash.forward(*map(Unsigned, (q, k, v)), out=given, return_lse=True)
    assert result is given
    assert_attention((out, lse), q, k, v, dtype)


def test_dlpack_gives_the_memory_back():
    import gc
    import weakref

    q, k, v = (x.copy() for x in (Q, K, V))
    held = weakref.ref(q)
    call.forget()
    numbaflash.forward(Exporter(q), Exporter(k), Exporter(v))
    del q
    gc.collect()
    assert held() is None


class Elsewhere(Exporter):
    def __dlpack_device__(self):
        return (8, 0)  # Metal


class Unwilling(Exporter):
    def __dlpack__(self, **arguments):
        raise BufferError("not today")


class Nowhere(Exporter):
    def __dlpack_device__(self):
        return None


class Describes:
    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, "k must lie on the CPU or a CUDA device; got DLPack device type 8", Elsewhere),
        (ValueError, "k cannot be read through DLPack: not today", Unwilling),
        (TypeError, "k.__dlpack_device__ must return", Nowhere),
        (TypeError, "k.__cuda_array_interface__ must be a dict as its protocol says; KeyError", lambda x: Describes({"shape": (1,)})),
        (TypeError, "k.__cuda_array_interface__ must be a dict", lambda x: Describes(5)),
        (TypeError, "k.__cuda_array_interface__ must be a dict", lambda x: Describes({"shape": (1,), "typestr": "zz", "data": (0, False)})),
        (TypeError, "k must be one of .*; got dtype int32", lambda x: Exporter(x.astype(np.int32))),
        (TypeError, "k must be one of .*; got dtype bool8", lambda x: Exporter(x > 0)),
        (TypeError, "k must have __dlpack__ and __dlpack_device__", lambda x: type("Half", (), {"__dlpack__": None, "__module__": __name__})()),
    ],
)
def test_dlpack_that_is_refused(error, message, make):
    with pytest.raises(error, match=message):
        numbaflash.forward(Exporter(Q), make(K), Exporter(V))


# CUDA memory that need not exist: addresses go through to a fake kernel


class Interface:
    """A ``__cuda_array_interface__`` without a GPU behind it."""

    def __init__(self, shape, address, typestr="<f4", **told):
        self.__cuda_array_interface__ = {"version": 3, "shape": shape, "typestr": typestr, "data": (address, False), **told}


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that do not exist, one a terabyte of addresses each, and a family that notes its launches."""
    from numbaflash import toolchain

    launches, plans = [], []

    class Family:
        @staticmethod
        def supports(problem, device):
            return ()

        @staticmethod
        def plan(problem, layouts, device):
            plans.append(dispatch.Plan("simt", problem, device, layouts))
            return plans[-1]

        @staticmethod
        def prepare(plan):
            return lambda addresses, stream: launches.append((plan.device.index, *addresses, stream))

    monkeypatch.setattr(toolchain, "device_of_address", lambda address: address >> 40)
    monkeypatch.setattr(toolchain, "device", lambda index: dispatch.Device("cuda", index, (9, 0), 132, f"fake {index}"))
    monkeypatch.setattr(dispatch, "family", lambda name, direction="forward": Family)
    call.forget()
    yield launches, plans
    call.forget()


GPU = 1 << 40


def on_gpu(**told):
    shapes = {"q": (2, 9, 4, 16), "k": (2, 13, 2, 16), "v": (2, 13, 2, 24), "out": (2, 9, 4, 24), "lse": (2, 4, 9)}
    return {name: Interface(shape, GPU + 0x100000 * (i + 1), **told) for i, (name, shape) in enumerate(shapes.items())}


def test_cuda_array_interface(gpus):
    launches, plans = gpus
    arguments = on_gpu()
    assert numbaflash.forward(**arguments) is arguments["out"]
    assert launches == [(1, *(GPU + 0x100000 * (i + 1) for i in range(5)), 1)]
    assert plans[0].device.name == "fake 1" and plans[0].layouts.k.strides == (13 * 2 * 64, 128, 64, 4)
    numbaflash.forward(**arguments, stream=77)
    assert launches[-1][-1] == 77 and len(plans) == 1
    out, lse = numbaflash.forward(**on_gpu(stream=5), return_lse=True)
    assert launches[-1][-1] == 5 and isinstance(out, Interface)


def test_cuda_streams_of_the_arrays_are_waited_for(gpus, monkeypatch):
    from numbaflash.arrays import device

    launches, waits = gpus[0], []
    monkeypatch.setattr(device, "wait", lambda *arguments: waits.append(arguments))
    arguments = on_gpu(stream=5)
    arguments["v"].__cuda_array_interface__["stream"] = 6
    arguments["k"].__cuda_array_interface__["stream"] = None
    numbaflash.forward(**arguments)
    assert launches[-1][-1] == 5 and waits == [(1, 5, 6), (1, 6, 5)]
    waits.clear()
    numbaflash.forward(**arguments, stream=9)
    assert launches[-1][-1] == 9 and sorted(waits) == [(1, 5, 9), (1, 6, 9), (1, 9, 5), (1, 9, 6)]


class OnGpu(Exporter):
    """Tells CUDA as its device, whatever lies behind."""

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, *, stream, **arguments):
        self.asked.append(stream)
        return self.x.__dlpack__(**arguments)


def test_dlpack_on_cuda_is_told_the_stream(gpus):
    launches = gpus[0]
    given = [OnGpu(x) for x in (Q, K, V, np.empty((2, 9, 4, 24), np.float32))]
    numbaflash.forward(*given[:3], out=given[3])
    numbaflash.forward(*given[:3], out=given[3], stream=33)
    numbaflash.forward(*given[:3], out=given[3], stream=0)
    assert [launch[-1] for launch in launches] == [1, 33, 1]
    assert all(x.asked == [1, 33, 1] for x in given)
    assert launches[0][1:4] == tuple(x.ctypes.data for x in (Q, K, V))


@pytest.mark.parametrize("name", ["k", "v", "out", "lse"])
def test_two_devices(gpus, name):
    arguments = on_gpu()
    arguments[name].__cuda_array_interface__["data"] = (0x900000, False)
    with pytest.raises(ValueError, match=rf"all arrays must lie on one device; got q on cuda:1, .*{name} on cuda:0"):
        numbaflash.forward(**arguments)
    assert not gpus[0]


def test_cpu_and_cuda(gpus):
    with pytest.raises(ValueError, match=r"all arrays must lie on one device; got q on the CPU, k on cuda:1, v on the CPU"):
        numbaflash.forward(Exporter(Q), OnGpu(K), Exporter(V))


@pytest.mark.parametrize(
    ("error", "message", "name", "told"),
    [
        (ValueError, "q has no memory: it was deleted or released before the call", "q", {"data": (0, False)}),
        (ValueError, "lse has no memory", "lse", {"data": (0, False)}),
        (ValueError, "out must be writable; got a read-only array", "out", {"data": (GPU + 0x900000, True)}),
        (TypeError, "k must be a plain array; its __cuda_array_interface__ has a mask", "k", {"mask": object()}),
        (TypeError, r"v must be one of .*; got dtype <V2 \(if this is bfloat16, its dtype must be ml_dtypes.bfloat16, .*\)", "v", {"typestr": "<V2"}),
        (ValueError, "out must give every element a place of its own", "out", {"strides": (0, 384, 96, 4)}),
        (ValueError, "out must not share memory with v", "out", {"data": (GPU + 0x300000, False)}),
    ],
)
def test_cuda_array_interface_that_is_refused(gpus, error, message, name, told):
    arguments = on_gpu()
    arguments[name].__cuda_array_interface__ |= told
    if name == "q":
        for other in ("k", "v", "out", "lse"):
            arguments[other].__cuda_array_interface__["data"] = (arguments[other].__cuda_array_interface__["data"][0] & 0xFFFFFF, False)
    with pytest.raises(error, match=message):
        numbaflash.forward(**arguments)
    assert not gpus[0]


def test_an_array_without_elements_may_not_know_its_device(gpus):
    arguments = on_gpu()
    for name in "kv":
        told = arguments[name].__cuda_array_interface__
        told["shape"], told["data"] = (2, 0, *told["shape"][2:]), (0, False)
    numbaflash.forward(**arguments)
    assert gpus[0][0][:4] == (1, GPU + 0x100000, 0, 0)


def test_bfloat16_in_the_cuda_array_interface_is_told_by_the_dtype(gpus):
    arguments = on_gpu(typestr="<V2")
    arguments["lse"].__cuda_array_interface__["typestr"] = "<f4"
    for name in ("q", "k", "v", "out"):
        arguments[name].dtype = np.dtype(ml_dtypes.bfloat16)
    numbaflash.forward(**arguments)
    assert gpus[1][0].problem.dtype == "bfloat16" and gpus[1][0].layouts.q.strides[-1] == 2


def numba_array(shape, address, dtype):
    """A Numba device array whose memory does not exist."""
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    strides = arrays.contiguous_strides(shape, np.dtype(dtype).itemsize)
    return DeviceNDArray(shape, strides, dtype, gpu_data=SimpleNamespace(device_ctypes_pointer=ctypes.c_void_p(address)))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_numba_device_arrays(gpus, monkeypatch, dtype):
    from numbaflash.arrays import device

    launches, plans = gpus
    monkeypatch.setattr(device, "empty", lambda index, shape, dtype, stream: numba_array(shape, (index << 40) + 0x900000, dtype))
    told = {name: x.__cuda_array_interface__ for name, x in on_gpu().items()}
    dtype = host.dtype_of(dtype)
    q, k, v = (numba_array(told[name]["shape"], told[name]["data"][0], np.dtype(f"u{dtype.itemsize}")).view(dtype) for name in "qkv")
    out = numbaflash.forward(q, k, v)
    assert plans[0].problem.dtype == dtype.name and plans[0].layouts.q.strides[-1] == dtype.itemsize
    assert type(out) is type(q) and out.dtype == dtype and out.shape == (2, 9, 4, 24)
    assert launches == [(1, *(told[name]["data"][0] for name in "qkv"), GPU + 0x900000, 0, 1)]
    assert numbaflash.forward(q, k, v, out=out) is out


def test_a_broadcast_numba_device_array_keeps_its_strides(gpus):
    """Numba's interface calls it contiguous when it looks so but for the strides of 0."""
    told = {name: x.__cuda_array_interface__ for name, x in on_gpu().items()}
    q, k, v, out = (numba_array(told[name]["shape"], told[name]["data"][0], np.dtype("float32")) for name in ("q", "k", "v", "out"))
    v = type(v)(v.shape, (0, 8, 4, 0), v.dtype, gpu_data=v.gpu_data)
    assert v.__cuda_array_interface__["strides"] is None
    numbaflash.forward(q, k, v, out=out)
    assert gpus[1][0].layouts.v.strides == (0, 8, 4, 0)


def test_numba_device_array_of_two_opaque_bytes(gpus):
    """What `numba.cuda.as_cuda_array` makes of another library's bfloat16."""
    q, k, v = (numba_array(x.__cuda_array_interface__["shape"], GPU, np.dtype("V2")) for x in list(on_gpu().values())[:3])
    with pytest.raises(TypeError, match=r"q must be one of .*; got dtype \|V2 \(if this is bfloat16, its dtype must be ml_dtypes.bfloat16"):
        numbaflash.forward(q, k, v)


def test_cuda_memory_without_a_driver():
    if _driver():
        pytest.skip("there is a driver")
    from numbaflash.toolchain import CudaError

    with pytest.raises(CudaError, match="driver"):
        numbaflash.forward(**on_gpu())


def _driver():
    from numbaflash import toolchain

    return toolchain.unavailable_reason() is None


# Streams


class Told:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (np.int64(7), 7),
        (Told(ptr=8, device_id=-1), 8),
        (Told(ptr=8, device_id=1), 8),
        (Told(cuda_stream=9, device=Told(index=1)), 9),
        (Told(handle=10), 10),
        (Told(handle=ctypes.c_void_p(11)), 11),
        (Told(handle=ctypes.c_void_p(None)), 0),
        (Told(__cuda_stream__=lambda: (0, 12)), 12),
        (Told(__cuda_stream__=(0, 13)), 13),
    ],
)
def test_stream_handle(stream, handle):
    assert stream_handle(stream, 1) == handle


@pytest.mark.parametrize(
    ("error", "message", "stream"),
    [
        (TypeError, r"stream must be a CUDA stream \(.*\) or its handle as an integer; got 'fast'", "fast"),
        (TypeError, r"stream must be a CUDA stream .*; got True", True),
        (TypeError, r"stream must be a CUDA stream .*; got 1\.0", 1.0),
        (ValueError, "stream must be a CUstream handle, which is not negative; got -1", -1),
        (ValueError, "stream must belong to the arrays' device cuda:1; got a stream of cuda:0", Told(ptr=5, device_id=0)),
        (ValueError, "stream must belong to the arrays' device cuda:1; got a stream of cuda:0", Told(cuda_stream=5, device=Told(index=0))),
        (ValueError, "got a stream of cuda:0", Told(__cuda_stream__=lambda: (0, 5), device=Told(device_id=0))),
    ],
)
def test_stream_that_is_refused(error, message, stream):
    with pytest.raises(error, match=message):
        stream_handle(stream, 1)


# What is imported, and when


def in_subprocess(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_touches_nothing():
    in_subprocess("""
        import sys, time
        import numba
        start = time.perf_counter()
        import numbaflash
        from numbaflash import Explanation, UnsupportedError, explain, forward, merge
        seconds = time.perf_counter() - start
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & {"cupy", "torch", "jax", "jaxlib", "ml_dtypes", "cuda"}, loaded
        assert "numba.cuda" not in sys.modules and "numbaflash.toolchain" not in sys.modules
        assert seconds < 0.3, seconds
        assert set(numbaflash.__all__) <= set(dir(numbaflash))
        for name in numbaflash.__all__:
            getattr(numbaflash, name)
        try:
            numbaflash.backwards
        except AttributeError as error:
            assert "has no attribute 'backwards'" in str(error)
        else:
            raise SystemExit("no error")
    """)


def test_a_cpu_call_touches_no_framework_and_no_driver():
    in_subprocess("""
        import sys
        import numpy as np
        sys.modules["ml_dtypes"] = sys.modules["cupy"] = sys.modules["torch"] = None  # an import would fail
        del sys.modules["cupy"], sys.modules["torch"]
        import numbaflash
        x = np.ones((1, 5, 2, 8), np.float32)
        out, lse = numbaflash.forward(x, x, x, return_lse=True)
        numbaflash.merge([out], [lse])
        print(numbaflash.explain(x, x, x))
        try:
            numbaflash.forward([x], x, x)
        except TypeError:
            pass
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & {"cupy", "torch", "jax", "jaxlib"}, loaded
        from numbaflash.toolchain import driver
        assert driver._driver is None
    """)


def test_bfloat16_results_need_ml_dtypes():
    in_subprocess("""
        import sys
        import torch
        sys.modules["ml_dtypes"] = None

        class Exporter:
            def __init__(self, x): self.x = x
            def __dlpack_device__(self): return self.x.__dlpack_device__()
            def __dlpack__(self, **arguments): return self.x.__dlpack__(**arguments)

        import numbaflash
        x = Exporter(torch.ones(1, 4, 1, 8, dtype=torch.bfloat16))
        out = Exporter(torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16))
        try:
            numbaflash.forward(x, x, x)
        except TypeError as error:
            assert "needs the package ml_dtypes" in str(error) and "out=" in str(error)
        else:
            raise SystemExit("no error")
    """)


def test_an_array_of_a_library_that_is_not_imported_is_not_looked_for():
    assert arrays.LIBRARIES[np.ndarray].name == "NumPy"
    in_subprocess("""
        import sys
        import numpy as np
        import numbaflash.arrays as arrays
        assert arrays.library(np.ones(3), "q").name == "NumPy"
        assert not any(name in sys.modules for name in ("numbaflash.arrays.torch", "numbaflash.arrays.jax", "numbaflash.arrays.cupy"))
        import torch
        assert arrays.library(torch.ones(3), "q").name == "PyTorch"
    """)


# The small kernels for borrowed CUDA memory


def test_device_kernels_in_the_simulator():
    in_subprocess(
        """
        import numpy as np
        from numbaflash.arrays import device

        q = np.random.default_rng(0).standard_normal((2, 5, 4, 16), dtype=np.float32)
        target = np.zeros_like(q)
        device._copy[2, 8](target, q)
        np.testing.assert_array_equal(target, q)
        """,
        NUMBA_ENABLE_CUDASIM="1",
    )


@pytest.mark.parametrize("arch", [(7, 5), (9, 0)])
def test_device_kernels_compile_without_a_gpu(arch):
    from numba import cuda, types

    from numbaflash.arrays import device

    def array(element, axes):
        return types.Array(element, axes, "A")

    for element in (types.uint16, types.uint32, types.uint64):
        cuda.compile_ptx(device._copy.py_func, types.void(array(element, 4), array(element, 4)), cc=arch)
