"""PyTorch tensors, on the CPU and on CUDA devices."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nested._internal.nested_tensor import NestedTensor

from ..problem import UnsupportedError
from .base import Facts, Library
from .streams import LEGACY_DEFAULT


def adopt(x, name):
    if not isinstance(x, torch.Tensor):
        return None
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        return TRACED
    if isinstance(x, NestedTensor):
        return NESTED
    if getattr(type(x), "__torch_dispatch__", _PLAIN) is not _PLAIN:
        raise TypeError(
            f"{name} must be a plain torch tensor; got {type(x).__name__}, which computes by its own rules and has no memory of its own to read. "
            "Unwrap it first (for a DTensor, to_local())"
        )
    return TORCH


_PLAIN = torch.Tensor.__torch_dispatch__

_active_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def recorded() -> bool:
    """Whether torch may be recording operations, of which kernels that are given addresses would be none.

    So it is under torch.compile, in ``torch.jit.trace`` and in any dispatch mode (``make_fx``, ``FakeTensorMode``, selective checkpoints, ...).
    """
    return is_dynamo_compiling() or records_operations()


def records_operations() -> bool:
    """The same, but for torch.compile."""
    return _active_modes() > 0 or _is_tracing() or _included(_PRE_DISPATCH)


def traced_before_dispatch() -> bool:
    """Whether a mode of ``make_fx(pre_dispatch=True)`` or torch.export is active: those lie on a stack of their own."""
    return _included(_PRE_DISPATCH)


def _current_stream_function():
    """A raw handle without building a Stream object, where this version of torch has it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw if raw is not None else lambda index: torch.cuda.current_stream(index).cuda_stream


def _untraced(name, *arrays, **options):
    from .. import api, varlen

    module, name = (varlen, f"{name}_varlen") if "cu_seqlens_q" in options else (api, name)
    return torch.compiler.disable(getattr(module, name))(*arrays, **options)


def _unplanned(*arrays, **options):
    raise UnsupportedError(
        "numbaflash.plan_decode and DecodePlan.run cannot be recorded by torch (make_fx, torch.jit.trace, FakeTensorMode and other dispatch modes): "
        "a plan writes into memory of its own. Call numbaflash.decode there"
    )


def _operator(name):
    from ..torch import decoding, operators

    return getattr(operators if name in ("forward", "backward") else decoding, f"recorded_{name}")


def _where_recorded(name):
    """An operator where torch records, else None; torch.compile has been given another before it looks here."""
    return property(lambda self: _operator(name) if recorded() else None)


def _recorded_merge(outs, lses):
    from ..torch.merging import merge

    return merge(outs, lses)


def _differentiated(x) -> bool:
    """Whether torch would expect an operation on ``x`` to be recorded for a derivative."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return getattr(forward_ad, "_current_level", -1) >= 0 and forward_ad.unpack_dual(x).tangent is not None


def not_recorded(name) -> ValueError:
    """What is said of a tensor that torch would differentiate through a call that it does not know."""
    return ValueError(
        f"{name} takes part in automatic differentiation, and numbaflash.forward, backward, decode, cascade and append_kv record nothing: their "
        "results would be cut from the graph. Call numbaflash.attention, which torch differentiates; without a derivative, call under "
        f"torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
    )


def _guards(tensors):
    """A function that tells in one call whether other tensors have the type, dtype, device, shape, strides and dispatch keys of these, and want a
    derivative as these do: torch.compile guards its code with it. None where this version of torch has another one."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except (ImportError, TypeError, RuntimeError):
        return None


class Torch(Library):
    name = "PyTorch"
    namespace = torch
    builds_on_device = True
    moves = True

    @property
    def forward(self):
        """None, except where torch records. torch.compile breaks its graph at the call, others meet an operator of torch."""
        if is_dynamo_compiling():
            return partial(_untraced, "forward")
        return _operator("forward") if records_operations() else None

    def attention(self, q, k, v, **options):
        from ..torch import attention

        return attention(q, k, v, **options)

    def attention_varlen(self, *arrays, **options):
        from ..torch import attention_varlen

        return attention_varlen(*arrays, **options)

    def values(self, x):
        if records_operations() or x.device.type not in ("cpu", "cuda") or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return None
        return x.detach().cpu().numpy()

    @property
    def backward(self):
        """Like `forward`."""
        if is_dynamo_compiling():
            return partial(_untraced, "backward")
        return _operator("backward") if records_operations() else None

    decode, cascade, append_kv = map(_where_recorded, ("decode", "cascade", "append_kv"))

    def untraced(self, function):
        """A function that torch does not look into: torch.compile breaks its graph there, other recorders are refused."""
        return torch.compiler.disable(function) if is_dynamo_compiling() else _unplanned

    @property
    def merge(self):
        """None, except where torch records: torch.compile breaks its graph at the call, others meet what they can record."""
        if is_dynamo_compiling():
            return partial(_untraced, "merge")
        return _recorded_merge if torch.is_grad_enabled() or records_operations() else None

    def inspect(self, x):
        at = x.data_ptr()
        return at, (x.shape, x.stride(), x.dtype, x.device, at & 15, x.is_neg(), _differentiated(x))

    def same_kind(self, x):
        shape, stride, dtype, device, alignment, negative, differentiated = self.inspect(x)[1]
        if negative or differentiated:
            return super().same_kind(x)

        def address(other):
            # As `inspect` has it, without making a key; what may be differentiated is looked at again by who finds 0.
            if (
                other.shape == shape
                and other.stride() == stride
                and other.dtype is dtype
                and other.device == device
                and not (other.requires_grad or other.is_neg() or getattr(forward_ad, "_current_level", -1) >= 0)
            ):
                try:
                    at = other.data_ptr()
                except RuntimeError:  # within torch.func, say
                    return 0
                return at if at & 15 == alignment else 0
            return 0

        return address

    def same_kinds(self, arrays):
        *four, last = arrays  # those of decoding, of which only the page table may be absent
        given = four if last is None else arrays
        check = None if any(x.is_neg() or _differentiated(x) for x in given) else _guards(given)
        if check is None or not hasattr(forward_ad, "_current_level"):
            return None
        alignments = [x.data_ptr() & 15 for x in given]

        def addresses(a, b, c, d, e):
            if e is None or not check(a, b, c, d, e) or forward_ad._current_level >= 0:
                return None
            found = a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr()
            return found if all(found) and [at & 15 for at in found] == alignments else None

        def addresses_of_four(a, b, c, d, e):
            if e is not None or not check(a, b, c, d) or forward_ad._current_level >= 0:
                return None
            found = a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr()
            return (*found, 0) if all(found) and [at & 15 for at in found] == alignments else None

        return addresses_of_four if last is None else addresses

    def describe(self, x, name):
        self.check(x, name)
        size = x.element_size()
        return Facts(
            address=self.address(x),
            shape=tuple(x.shape),
            strides=tuple(step * size for step in x.stride()),
            dtype=str(x.dtype).removeprefix("torch."),
            kind=x.device.type,
            index=x.device.index or 0,
        )

    def check(self, x, name):
        """A clear error for a tensor that cannot be used."""
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise TypeError(f"{name} is traced by torch.func (vmap, grad, jvp, ...); numbaflash reads memory here and cannot be transformed by it")
        if x.is_nested:
            raise TypeError(f"{name} must be a dense tensor; got a nested tensor. Pad it first ({name}.to_padded_tensor(0.0))")
        if x.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor; got layout {x.layout}. Convert it first ({name}.to_dense())")
        if x.is_quantized:
            raise TypeError(f"{name} must not be quantized; got dtype {x.dtype}. Convert it first ({name}.dequantize())")
        if x.device.type == "cuda" and torch.version.hip:
            raise ValueError(f"{name} must lie on the CPU or an NVIDIA GPU; got an AMD GPU (a ROCm build of torch)")
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} must lie on the CPU or a CUDA device; got device {x.device}")
        if _differentiated(x):
            raise not_recorded(name)
        if x.is_neg() or x.is_conj():
            raise ValueError(f"{name} has a pending negation or conjugation (torch.imag and conj views); pass {name}.resolve_neg().resolve_conj()")

    def address(self, x):
        return x.data_ptr()

    def current_stream(self, index):
        raw = _current_stream_function()
        return lambda: raw(index)

    def allocator(self, like, shape, dtype):
        empty, dtype, device = torch.empty, getattr(torch, dtype), like.device

        def allocate(stream):
            if stream is None:
                return empty(shape, dtype=dtype, device=device)
            with _on(device, stream):
                return empty(shape, dtype=dtype, device=device)

        return allocate

    def contiguous(self, x, stream):
        with _on(x.device, stream):
            return x.clone(memory_format=torch.contiguous_format)

    def assign(self, target, source, stream):
        with _on(target.device, stream):
            target.copy_(source)

    def clear(self, x, stream):
        with _on(x.device, stream):
            x.zero_()

    def used_on(self, stream, arrays):
        for x in arrays:
            external = _external(stream, x.device)
            if external.cuda_stream != torch.cuda.current_stream(x.device).cuda_stream:
                x.record_stream(external)

    def written(self, x):
        torch.autograd.graph.increment_version(x)

    def from_host(self, like, array):
        return torch.from_numpy(array).to(like.device)

    def row_major(self, x):
        return x.contiguous()

    def cast(self, x, dtype):
        return x.to(getattr(torch, dtype))

    def on_device(self, x):
        return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _external(stream, device):
    return torch.cuda.ExternalStream(0 if stream == LEGACY_DEFAULT else stream, device)


def _on(device, stream):
    """The given stream current; every torch operation is on the device of its tensors anyway."""
    return nullcontext() if stream is None else torch.cuda.stream(_external(stream, device))


class Traced(Torch):
    """Tensors of a trace: shapes without memory, of which only an operator of torch can make others."""

    name = "a trace of PyTorch"

    def joins(self, other):
        """Constants of what is traced: torch.export leaves a module's tensors that are no buffers as they are."""
        return other is TORCH and records_operations()

    def address(self, x):
        return 0

    forward, backward, decode, cascade, append_kv = (
        property(lambda self, name=name: _operator(name)) for name in ("forward", "backward", "decode", "cascade", "append_kv")
    )


class Nested(Library):
    """Nested tensors with ``layout=torch.jagged``, which hold packed sequences and their boundaries: `attention` alone takes them."""

    name = "PyTorch (nested)"

    def attention(self, *arrays, **options):
        from ..torch import attention

        return attention(*arrays, **options)

    def _refuse(self, *arrays, **options):
        raise TypeError(
            "q is a nested tensor, which numbaflash.attention takes alone. Call forward_varlen or backward_varlen with q.values(), k.values(), "
            "v.values(), q.offsets() and k.offsets()"
        )

    forward = backward = attention_varlen = decode = describe = _refuse


TORCH = Torch()
TRACED = Traced()
NESTED = Nested()
