"""The libraries that are measured, behind one small interface, each found only if it is installed.

All of them get the same (batch, seqlen, heads, head_dim) arrays, allocate their own results and return them in that layout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
from contextlib import nullcontext

from ..dense import dense_arrays

OURS, OURS_DETERMINISTIC, OURS_PADDED, OURS_PLAIN = "numbaflash", "numbaflash-deterministic", "numbaflash-padded", "numbaflash-plain"
OWN = (OURS, OURS_DETERMINISTIC, OURS_PADDED, OURS_PLAIN)
"""What is not a peer of numbaflash."""
NAMES = (OURS, "fa4", "cudnn", "fa2", "dense")
LABELS = {
    OURS: "numbaflash",
    OURS_DETERMINISTIC: "numbaflash, deterministic",
    OURS_PADDED: "numbaflash, padded batch",
    OURS_PLAIN: "numbaflash, without the option",
    "fa4": "FA4 (flash_attn.cute)",
    "cudnn": "cuDNN (torch SDPA)",
    "fa2": "FA2 (torch SDPA)",
    "efficient": "memory-efficient (torch SDPA)",
    "sdpa": "torch SDPA",
    "flex": "FlexAttention (torch.compile)",
    "flashinfer": "FlashInfer",
    "dense": "dense (torch matmul + softmax)",
    "numpy": "dense (NumPy)",
    "cupy": "dense (CuPy)",
}
PREBUILT = (*OWN, "fa4")
"""Libraries that compile a kernel at its first call and keep it on disk."""


class Library:
    """A library to be measured.

    Attributes
    ----------
    name : str
        One of `NAMES`.
    version : str
    """

    name = ""

    def __init__(self):
        import torch

        self._torch = torch
        self.version = f"torch {torch.__version__}"

    def has(self, cell) -> bool:
        """Whether there is such a thing in the library at all; where there is not, nothing is said of it."""
        return True

    def unfit(self, cell, free_bytes: int, direction: str = "forward") -> str | None:
        """Why a cell cannot be measured with so much free memory; None when it can."""
        return None

    def scope(self):
        """Context manager within which the calls of `bind` must run."""
        return nullcontext()

    def bind(self, q, k, v, causal: bool):
        """A function without arguments that computes attention and returns out, (batch, seqlen, heads, head_dim)."""
        raise NotImplementedError

    def bind_autograd(self, q, k, v, causal: bool):
        """The same, and torch records it where q, k and v require gradients."""
        return self.bind(q, k, v, causal)

    def bind_backward(self, dout, q, k, v, causal: bool):
        """A function without arguments that computes dq, dk and dv alone; attention itself runs here, once."""
        grad, leaves = self._torch.autograd.grad, _leaves(q, k, v)
        with self._torch.enable_grad():
            out = self.bind_autograd(*leaves, causal)()
        return lambda: grad(out, leaves, dout, retain_graph=True)

    def bind_training(self, dout, q, k, v, causal: bool):
        """A function without arguments that computes attention and its gradients through autograd, and returns dq, dk and dv."""
        grad, enabled, leaves = self._torch.autograd.grad, self._torch.enable_grad, _leaves(q, k, v)
        with enabled():
            attend = self.bind_autograd(*leaves, causal)

        def call():
            with enabled():
                out = attend()
            return grad(out, leaves, dout)

        return call

    def rows(self, results, structure):
        """Results in the layout of the operands, where what is called returns them in another one."""
        return results

    def evidence(self, q, k, v, causal: bool, direction: str = "forward") -> dict:
        """Fields of a record that say which kernel was chosen, as far as the library tells."""
        return {}


def _leaves(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


class Numbaflash(Library):
    name = OURS
    deterministic = False

    def __init__(self):
        import numbaflash

        if importlib.util.find_spec("torch") is not None:  # else arrays are NumPy's
            super().__init__()
        self._numbaflash = numbaflash
        self.version = numbaflash.__version__

    def bind(self, q, k, v, causal):
        forward = self._numbaflash.forward
        return lambda: forward(q, k, v, causal=causal)

    def bind_autograd(self, q, k, v, causal):
        import numbaflash.torch

        attention, deterministic = numbaflash.torch.attention, self.deterministic
        return lambda: attention(q, k, v, causal=causal, deterministic=deterministic)

    def bind_backward(self, dout, q, k, v, causal):
        out, lse = self._numbaflash.forward(q, k, v, causal=causal, return_lse=True)
        backward, deterministic = self._numbaflash.backward, self.deterministic
        return lambda: backward(dout, q, k, v, out, lse, causal=causal, deterministic=deterministic)

    def evidence(self, q, k, v, causal, direction="forward"):
        return self._explained(q, k, v, causal=causal, direction=direction, deterministic=self.deterministic and direction == "backward")

    def _explained(self, q, k, v, *, direction, **options):
        return facts_of(self._numbaflash.explain(q, k, v, direction=direction, **options))


def facts_of(told) -> dict:
    """Fields of a record that say what a `numbaflash.explain` has told."""
    plan = told.plan
    workspace = {} if plan.direction == "forward" else {"workspace_bytes": plan.workspace_bytes}
    return {
        "family": plan.family,
        "config": repr(plan.config),
        "grid": list(plan.grid),
        "threads": plan.threads,
        "shared_bytes": plan.shared_bytes,
        "copies": dict(plan.copies),
        **workspace,
        "resources": json.loads(json.dumps(told.resources, default=str)),
    }


class NumbaflashDeterministic(Numbaflash):
    """The same bits each time; its forward is that of `Numbaflash`."""

    name, deterministic = OURS_DETERMINISTIC, True


class Fa4(Library):
    name = "fa4"
    function = "flash_attn_func"

    def __init__(self):
        super().__init__()
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when it is imported
        self._forward = getattr(importlib.import_module("flash_attn.cute"), self.function)
        self.version = distribution_version("flash-attn-4")

    def bind(self, q, k, v, causal):
        return self._bound(q, k, v, causal=causal)

    def _bound(self, *arrays, **options):
        def call():
            result = self._forward(*arrays, **options)
            return result[0] if isinstance(result, tuple) else result

        return call


class Sdpa(Library):
    """torch's scaled_dot_product_attention, held to one back end."""

    backend = ""

    def __init__(self):
        super().__init__()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._kernel, self._backend = sdpa_kernel, getattr(SDPBackend, self.backend)

    def scope(self):
        return self._kernel(self._backend)

    def bind(self, q, k, v, causal):
        attention = self._torch.nn.functional.scaled_dot_product_attention
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        return lambda: attention(qt, kt, vt, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


class Cudnn(Sdpa):
    name, backend = "cudnn", "CUDNN_ATTENTION"

    def __init__(self):
        super().__init__()
        self.version = f"{self._torch.backends.cudnn.version()} ({self.version})"


class Fa2(Sdpa):
    name, backend = "fa2", "FLASH_ATTENTION"


class Efficient(Sdpa):
    name, backend = "efficient", "EFFICIENT_ATTENTION"

    def bind(self, q, k, v, causal):
        attention, heads = self._torch.nn.functional.scaled_dot_product_attention, q.shape[2]

        def call():
            rows = (x.transpose(1, 2) for x in (q, _repeated(k, heads), _repeated(v, heads)))  # it has no groups of heads
            return attention(*rows, is_causal=causal).transpose(1, 2)

        return call


class AnySdpa(Sdpa):
    """The back end that torch chooses."""

    name = "sdpa"

    def __init__(self):
        Library.__init__(self)

    def scope(self):
        return nullcontext()


def _repeated(x, heads: int):
    """So many heads, each as often as query heads share it."""
    batch, rows, kv_heads, dim = x.shape
    if heads == kv_heads:
        return x
    return x[:, :, :, None].expand(batch, rows, kv_heads, heads // kv_heads, dim).reshape(batch, rows, heads, dim)


class Flex(Library):
    """torch's FlexAttention, compiled."""

    name = "flex"

    def __init__(self):
        super().__init__()
        self._attention = compiled_flex(self._torch)

    def bind(self, q, k, v, causal):
        flex, seqlen, grouped = self._attention, q.shape[1], q.shape[2] != k.shape[2]
        mask = causal_block_mask(seqlen, q.device) if causal else None
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        return lambda: flex(qt, kt, vt, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


@functools.cache
def compiled_flex(torch):
    """FlexAttention, compiled once for all that use it."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 100  # beyond it, FlexAttention would run uncompiled
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=1)
def causal_block_mask(seqlen, device):
    """FlexAttention's causal mask, one for all input sets of a cell."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device=device)


class FlashInfer(Library):
    """FlashInfer's prefill of a batch, planned before."""

    name = "flashinfer"
    workspace_bytes = 2**27

    def __init__(self):
        super().__init__()
        self._flashinfer, self._workspace = importlib.import_module("flashinfer"), None
        self.version = distribution_version("flashinfer-python")

    def unfit(self, cell, free_bytes, direction="forward"):
        return None if direction == "forward" else "it has no gradients"

    def bind(self, q, k, v, causal):
        torch, (batch, rows, heads, dim) = self._torch, q.shape
        if self._workspace is None:  # one for all input sets, which are computed one after the other
            self._workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=q.device)
        wrapper = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD")
        ends = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
        wrapper.plan(ends, ends, heads, k.shape[2], dim, causal=causal, q_data_type=q.dtype)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        return lambda: wrapper.run(*flat).view(q.shape)


class Dense(Library):
    """Scores in memory: a matrix product, a softmax, a matrix product, all in the dtype of the arrays."""

    name = "dense"
    copies_of_scores = 3  # scores, probabilities, and what a library call may need between them; one more for gradients

    def unfit(self, cell, free_bytes, direction="forward"):
        p = cell.problem
        need = (self.copies_of_scores + (direction != "forward")) * p.batch * p.heads * p.seqlen_q * p.seqlen_k * (2 if "16" in p.dtype else 4)
        if need > 0.8 * free_bytes:
            return f"needs {need / 2**30:.0f} GiB for the scores, {free_bytes / 2**30:.0f} GiB are free"
        return None

    def bind(self, q, k, v, causal):
        hidden = hidden_keys(self._torch, q.shape[1], k.shape[1], q.device) if causal else None
        return lambda: dense(self._torch, q, k, v, hidden)


class DenseNumpy(Dense):
    """The same in NumPy, in float32 where the arrays have 16 bits; it has no gradients."""

    name = "numpy"

    def __init__(self):
        import numpy

        self._arrays = numpy
        self.version = numpy.__version__

    def unfit(self, cell, free_bytes, direction="forward"):
        if direction != "forward":
            return "it has no gradients"
        return super().unfit(cell, free_bytes, direction)

    def bind(self, q, k, v, causal):
        xp, scale = self._arrays, q.shape[3] ** -0.5
        arrays = [self._taken(x) for x in (q, k, v)]
        seen = xp.tril(xp.ones((q.shape[1], k.shape[1]), bool), k.shape[1] - q.shape[1]) if causal else None
        return lambda: dense_arrays(xp, *arrays, seen, scale)

    def rows(self, results, structure):
        return self._given(results)

    def _taken(self, x):
        return x if isinstance(x, self._arrays.ndarray) else self._arrays.from_dlpack(x)

    def _given(self, x):
        """What it returns, as arrays of the other libraries are."""
        if importlib.util.find_spec("torch") is None:
            return x
        import torch

        return torch.from_dlpack(x)


class DenseCupy(DenseNumpy):
    """The same in CuPy, on torch's stream."""

    name = "cupy"

    def __init__(self):
        import cupy

        self._arrays = cupy
        self.version = cupy.__version__

    def unfit(self, cell, free_bytes, direction="forward"):
        return "CuPy has no bfloat16" if cell.dtype == "bfloat16" else super().unfit(cell, free_bytes, direction)

    def scope(self):
        import torch

        return self._arrays.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)


def hidden_keys(torch, seqlen_q, seqlen_k, device):
    """Boolean (seqlen_q, seqlen_k), True where causal attention hides the key (bottom-right)."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).triu_(seqlen_k - seqlen_q + 1)


def dense(torch, q, k, v, hidden=None):
    """Attention by its definition, in the dtype of the arrays.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, heads, head_dim)
    k, v : tensor, (batch, seqlen_k, kv_heads, head_dim)
    hidden : tensor of bool, (seqlen_q, seqlen_k), optional
        True where a query must not see a key.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    rows = q.transpose(1, 2).reshape(batch * kv_heads, heads // kv_heads * seqlen_q, head_dim)
    keys, values = (x.transpose(1, 2).reshape(batch * kv_heads, seqlen_k, x.shape[3]) for x in (k, v))
    scores = torch.baddbmm(rows.new_empty(1, 1, 1), rows, keys.transpose(1, 2), beta=0, alpha=head_dim**-0.5)
    if hidden is not None:
        scores.view(-1, seqlen_q, seqlen_k).masked_fill_(hidden, float("-inf"))
    out = torch.bmm(scores.softmax(-1), values)
    return out.view(batch, heads, seqlen_q, v.shape[3]).transpose(1, 2)


LIBRARIES = {
    cls.name: cls
    for cls in (Numbaflash, NumbaflashDeterministic, Fa4, Cudnn, Fa2, Efficient, AnySdpa, Flex, FlashInfer, Dense, DenseNumpy, DenseCupy)
}


def find(names=NAMES, classes=LIBRARIES) -> tuple[dict[str, Library], dict[str, str]]:
    """The libraries that can be imported, by name, and why each of the others cannot."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = classes[name]()
        except Exception as error:  # an import may fail in any way; the others are still measured
            missing[name] = one_line(error)
    return found, missing


def one_line(error: BaseException, limit=200) -> str:
    """An error as one short line."""
    text = " ".join(str(error).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def distribution_version(name) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
