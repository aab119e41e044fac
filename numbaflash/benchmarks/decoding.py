"""Decoding with a cache: cells, their arrays, and the libraries that decode, behind one small interface.

What counts is bytes: the keys and values that are attended to, over the time. Torch's back ends know no pages and no lengths: they have contiguous
caches, and a mask where lengths are mixed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass

from ..problem import ITEMSIZE, Problem, make_decode_problem, make_problem
from ..testing import accuracy as rule
from . import peers, timing
from .accuracy import WRONG, finite
from .cells import AnyCell, problem_fields
from .passes import Pass
from .peers import OURS, one_line

SEED = 1
"""Of the arrays."""


@dataclass(frozen=True)
class DecodeCell(AnyCell):
    """What is decoded: a few tokens of each sequence against all keys before them."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tokens: int = 1
    dtype: str = "bfloat16"

    causal = True

    @property
    def problem(self) -> Problem:
        q = (len(self.lengths), self.tokens, self.heads, self.head_dim)
        cache = (*self.rows, self.kv_heads, self.head_dim)
        arrays = {"seqlens_k": ((len(self.lengths),), "int32")}
        if self.page_size:
            arrays["page_table"] = ((len(self.lengths), self.capacity // self.page_size), "int32")
        return make_decode_problem(q, cache, cache, (self.dtype,) * 3, causal=True, **arrays)

    @property
    def bytes(self) -> int:
        """Of the keys and values that are attended to."""
        return sum(self.lengths) * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype] * 2

    @property
    def flops(self) -> int:
        """Floating-point operations: 2 D for a score and 2 D for its value, for each visible pair."""
        pairs = sum(max(0, n - self.tokens + i + 1) for n in self.lengths for i in range(self.tokens))
        return 4 * self.head_dim * self.heads * pairs

    @property
    def rows(self) -> tuple[int, int]:
        """First two axes of the caches."""
        return (self.pages, self.page_size) if self.page_size else (len(self.lengths), self.capacity)

    @property
    def capacity(self) -> int:
        return -(-max(self.lengths) // max(self.page_size, 1)) * max(self.page_size, 1)

    @property
    def cache_bytes(self) -> int:
        """Of the caches as they are allocated."""
        return self.rows[0] * self.rows[1] * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype] * 2

    @property
    def pages(self) -> int:
        return sum(-(-n // self.page_size) for n in self.lengths) if self.page_size else 0

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def structure(self) -> DecodeCell:
        return self

    def fields(self) -> dict:
        """The cell as the fields of a record; ``seqlen_k`` is the longest sequence."""
        p = problem_fields(self.problem, self.causal)
        return p | {"seqlen_k": max(self.lengths), "lengths": self.name, "page_size": self.page_size}

    def __str__(self):
        pages = f"pages of {self.page_size}" if self.page_size else "contiguous"
        return f"{self.name}, {self.heads}/{self.kv_heads}, D {self.head_dim}, {pages}" + (f", {self.tokens} tokens" if self.tokens > 1 else "")


class Inputs:
    """Arrays of a cell: as many caches as keep the L2 cache cold."""

    def __init__(self, torch, cell: DecodeCell, l2_bytes: int, device="cuda"):
        def random_of(*shape):
            return torch.randn(*shape, device=device, dtype=getattr(torch, cell.dtype), generator=generator)

        generator = torch.Generator(device=device).manual_seed(SEED)
        batch = len(cell.lengths)
        self.q = random_of(batch, cell.tokens, cell.heads, cell.head_dim)
        self.lengths = torch.tensor(cell.lengths, device=device, dtype=torch.int32)
        self.table = None
        if cell.page_size:
            order = torch.randperm(cell.pages, generator=torch.Generator().manual_seed(SEED)).to(torch.int32)
            table = torch.zeros(batch, cell.capacity // cell.page_size, dtype=torch.int32)
            at = 0
            for b, n in enumerate(cell.lengths):
                count = -(-n // cell.page_size)
                table[b, :count] = order[at : at + count]
                at += count
            self.table = table.to(device)
        sets = timing.input_sets(cell.cache_bytes, l2_bytes)
        self.caches = [tuple(random_of(*cell.rows, cell.kv_heads, cell.head_dim) for _ in range(2)) for _ in range(sets)]

    def cycling(self, function):
        """A call with the caches in turn."""
        caches = itertools.cycle(self.caches)
        return lambda: function(*next(caches))

    def gathered(self, b: int, n: int):
        """Keys and values of a sequence, of the first caches."""
        if self.table is None:
            return tuple(x[b, :n] for x in self.caches[0])
        pages = self.table[b, : -(-n // self.caches[0][0].shape[1])].long()
        return tuple(x[pages].flatten(0, 1)[:n] for x in self.caches[0])


class Sample:
    """Exact results of the first, the longest and the last sequence, for `numbaflash.testing`'s accuracy rule to compare with.

    Its tolerance follows the size of the results, which shrinks with the number of keys: of random values 128k keys leave hundredths, and a fixed
    tolerance that suits 1k would take zeros for right.
    """

    def __init__(self, cell, inputs):
        longest = cell.lengths.index(max(cell.lengths))
        self._shapes = {tuple(inputs.q.shape), (len(cell.lengths), cell.tokens, cell.kv_heads, cell.heads // cell.kv_heads, cell.head_dim)}
        self._shape, self._expected = tuple(inputs.q.shape), []
        for b in dict.fromkeys((0, longest, len(cell.lengths) - 1)):
            q, (k, v) = inputs.q[b : b + 1], (x[None] for x in inputs.gathered(b, cell.lengths[b]))
            problem = make_problem(q.shape, k.shape, v.shape, (cell.dtype,) * 3, causal=True)
            self._expected.append((b, rule.expected(problem, q, k, v)))

    def judge(self, out) -> tuple[float, str | None]:
        """Largest error of a sampled element in units of its tolerance, and what is wrong with a result, or None.

        The axis of heads may be split into that of key heads and that of their groups, which spares a library a copy that is not its own.
        """
        if tuple(out.shape) not in self._shapes:
            return math.inf, f"{WRONG}: shape {tuple(out.shape)}, expected {self._shape}"
        if not finite(out):
            return math.inf, f"{WRONG}: NaN or infinite elements"
        worst, out = 0.0, out.reshape(self._shape)
        for b, expected in self._expected:
            try:
                worst = max(worst, rule.compare(expected, out[b : b + 1]).out)
            except rule.AccuracyError as error:
                return math.inf, f"{WRONG}: {' '.join(str(error).split())}, of sequence {b}"
        return worst, None


# ---- libraries: each returns a function of (k_cache, v_cache), or raises what it cannot do


def bind_numbaflash(torch, cell, inputs):
    import numbaflash

    plan = numbaflash.plan_decode(inputs.q, *inputs.caches[0], inputs.lengths, inputs.table, causal=True)
    return lambda k, v: plan.run(inputs.q, k, v, inputs.lengths, inputs.table)


def bind_fa4(torch, cell, inputs):
    from flash_attn.cute import flash_attn_varlen_func

    batch, tokens = inputs.q.shape[:2]
    q = inputs.q.flatten(0, 1)
    ends = torch.arange(0, (batch + 1) * tokens, tokens, device=inputs.q.device, dtype=torch.int32)
    options = {
        "cu_seqlens_q": ends,
        "max_seqlen_q": tokens,
        "max_seqlen_k": max(cell.lengths),
        "seqused_k": inputs.lengths,
        "causal": True,
        "num_splits": 0,
    }
    if inputs.table is not None:
        options["page_table"] = inputs.table

    def call(k, v):
        found = flash_attn_varlen_func(q, k, v, **options)
        return (found[0] if isinstance(found, tuple) else found).view(inputs.q.shape)

    try:
        call(*inputs.caches[0])
    except AssertionError:  # it chose to split the keys, for which it has no kernel on Hopper
        options["num_splits"] = 1
    return call


def bind_sdpa(backend=None):
    """torch's scaled_dot_product_attention, held to one back end, or the one that it chooses. With a mask, the heads of a group stand in the place of
    queries, which every back end takes."""

    def bind(torch, cell, inputs):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if cell.page_size:
            raise NotImplementedError("it knows no pages")
        if cell.tokens > 1:
            raise NotImplementedError("it has no causal mask of the last tokens")
        attention = torch.nn.functional.scaled_dot_product_attention
        scope = nullcontext if backend is None else functools.partial(sdpa_kernel, getattr(SDPBackend, backend))
        q = inputs.q.transpose(1, 2)
        if cell.equal:

            def call(k, v):
                with scope():
                    return attention(q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=cell.heads != cell.kv_heads).transpose(1, 2)

            return call
        grouped = inputs.q.view(len(cell.lengths), cell.kv_heads, -1, cell.head_dim)
        mask = (torch.arange(cell.capacity, device=grouped.device) < inputs.lengths[:, None])[:, None, None]

        def masked(k, v):
            with scope():
                return attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask).reshape(inputs.q.shape)

        return masked

    return bind


def bind_flashinfer(torch, cell, inputs):
    import flashinfer

    if not cell.page_size or cell.tokens > 1:
        raise NotImplementedError("its wrapper of batches has pages, and a token each")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(2**27, dtype=torch.uint8, device="cuda"), "NHD")
    counts = torch.tensor([-(-n // cell.page_size) for n in cell.lengths], dtype=torch.int32)
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)])
    numbers = torch.cat([inputs.table[b, :n] for b, n in enumerate(counts.tolist())])
    last = torch.tensor([(n - 1) % cell.page_size + 1 for n in cell.lengths], dtype=torch.int32)
    wrapper.plan(ends.cuda(), numbers, last.cuda(), cell.heads, cell.kv_heads, cell.head_dim, cell.page_size, q_data_type=inputs.q.dtype)
    q = inputs.q[:, 0]
    return lambda k, v: wrapper.run(q, (k, v)).view(inputs.q.shape)


BIND = {
    OURS: bind_numbaflash,
    "fa4": bind_fa4,
    "fa2": bind_sdpa("FLASH_ATTENTION"),
    "cudnn": bind_sdpa("CUDNN_ATTENTION"),
    "efficient": bind_sdpa("EFFICIENT_ATTENTION"),
    "sdpa": bind_sdpa(),
    "flashinfer": bind_flashinfer,
}


def admit(torch, cell, inputs, names, note, bind=BIND) -> dict:
    """The calls of those libraries that can do the cell and do it right."""
    calls, sample = {}, Sample(cell, inputs)
    for name in names:
        try:
            call = bind[name](torch, cell, inputs)
            _, fault = sample.judge(call(*inputs.caches[0]))
        except Exception as error:  # of a library that is not ours anything may come
            note(name, one_line(error))
            continue
        if fault:
            note(name, fault)
        else:
            calls[name] = inputs.cycling(call)
    return calls


def copy_rate(clock, torch) -> float:
    """Bytes a second that a copy on the device reads and writes, in all."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = timing.measure(clock, {"copy": lambda: target.copy_(source)}, rounds=5, target_ms=10.0)["copy"].summary()["ms"]
    return 2 * source.numel() / ms * 1e3


class Decoder(peers.Library):
    """A library that decodes: ``bind(cell, inputs)`` returns a function of the caches."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        if name == OURS:
            import numbaflash

            self.version = numbaflash.__version__
        elif name in MODULES:
            importlib.import_module(MODULES[name][0])
            self.version = peers.distribution_version(MODULES[name][1])

    def has(self, cell):
        if self.name in (OURS, "fa4"):
            return True
        return cell.tokens == 1 and bool(cell.page_size) == (self.name == "flashinfer")

    def bind(self, cell, inputs):
        return BIND[self.name](self._torch, cell, inputs)

    def evidence(self, cell, inputs):
        if self.name != OURS:
            return {}
        import numbaflash

        plan = numbaflash.plan_decode(inputs.q, *inputs.caches[0], inputs.lengths, inputs.table, causal=True)
        return peers.facts_of(plan.explain())


MODULES = {"fa4": ("flash_attn.cute", "flash-attn-4"), "flashinfer": ("flashinfer", "flashinfer-python")}
"""What is imported of the libraries that do not come with torch, and the name by which they are installed."""

LIBRARIES = {name: functools.partial(Decoder, name) for name in BIND}


class Decode(Pass):
    """Decoding; its only operand is an `Inputs`, in which caches take turns."""

    bench = direction = "decode"
    kind = DecodeCell
    classes, libraries, known = LIBRARIES, tuple(LIBRARIES), tuple(LIBRARIES)
    sample = Sample
    autograd = False

    @staticmethod
    def inputs(device, cell, l2_bytes=None):
        import torch

        return [Inputs(torch, cell, device.l2_bytes if l2_bytes is None else l2_bytes, device.kind)]

    @classmethod
    def one_set(cls, device, cell):
        return cls.inputs(device, cell, l2_bytes=1)

    @staticmethod
    def arrays(sets):
        return sets

    @staticmethod
    def compared(sets):
        """The arrays whose bits must stay what they are."""
        return [sets[0].q, *sets[0].caches[0], sets[0].lengths]

    @staticmethod
    def calls(library, sets, cell):
        (inputs,) = sets
        call = library.bind(cell, inputs)
        return lambda: call(*inputs.caches[0]), inputs.cycling(call)

    @staticmethod
    def figures(cell, ms):
        return {"tflops": cell.flops / ms / 1e9, "bytes": cell.bytes, "tb_per_s": cell.bytes / ms / 1e9}

    @staticmethod
    def room(cell, l2_bytes):
        return cell.cache_bytes * timing.input_sets(cell.cache_bytes, l2_bytes)

    @staticmethod
    def evidence(library, sets, cell):
        return library.evidence(cell, *sets)
