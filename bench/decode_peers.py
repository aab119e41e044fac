"""What `bench.decode` decodes, the libraries that do it, and whether they do it right.

Of torch's back ends cuDNN and the memory-efficient one know no pages and no lengths: they have contiguous caches, the queries and heads of a group as
rows of one head where the lengths or the tokens need a mask (bool), and of equal lengths the caches as they are. FA2 has the caches as they are for a
token of equal lengths, and gets lengths (``seqused_k``) and pages below ``scaled_dot_product_attention`` otherwise.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
from dataclasses import dataclass

from numbaflash.problem import make_problem
from numbaflash.testing import accuracy as rule

from . import timing
from .accuracy import WRONG
from .peers import OURS, one_line

SEED = 1


@dataclass(frozen=True)
class DecodeCell:
    """What is decoded."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tokens: int = 1

    @property
    def bytes(self) -> int:
        """Of the keys and values that are attended to, in 16 bits."""
        return sum(self.lengths) * self.kv_heads * self.head_dim * 2 * 2

    @property
    def capacity(self) -> int:
        return -(-max(self.lengths) // max(self.page_size, 1)) * max(self.page_size, 1)

    @property
    def cache_bytes(self) -> int:
        """Of the caches as they are allocated."""
        rows = self.pages * self.page_size if self.page_size else len(self.lengths) * self.capacity
        return rows * self.kv_heads * self.head_dim * 2 * 2

    @property
    def pages(self) -> int:
        return sum(-(-n // self.page_size) for n in self.lengths) if self.page_size else 0

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1

    def __str__(self):
        pages = f"pages of {self.page_size}" if self.page_size else "contiguous"
        return f"{self.name}, {self.heads}/{self.kv_heads}, D {self.head_dim}, {pages}" + (f", {self.tokens} tokens" if self.tokens > 1 else "")


class Inputs:
    """Arrays of a cell on the GPU: as many caches as keep the L2 cache cold."""

    def __init__(self, torch, cell: DecodeCell, l2_bytes: int, device="cuda"):
        def random_of(*shape):
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

        generator = torch.Generator(device=device).manual_seed(SEED)
        batch = len(cell.lengths)
        self.q = random_of(batch, cell.tokens, cell.heads, cell.head_dim)
        self.lengths = torch.tensor(cell.lengths, device=device, dtype=torch.int32)
        self.table = None
        rows = (batch, cell.capacity)
        if cell.page_size:
            rows = (cell.pages, cell.page_size)
            order = torch.randperm(cell.pages, generator=torch.Generator().manual_seed(SEED)).to(torch.int32)
            table = torch.zeros(batch, cell.capacity // cell.page_size, dtype=torch.int32)
            at = 0
            for b, n in enumerate(cell.lengths):
                count = -(-n // cell.page_size)
                table[b, :count] = order[at : at + count]
                at += count
            self.table = table.to(device)
        sets = timing.input_sets(cell.cache_bytes, l2_bytes)
        self.caches = [tuple(random_of(*rows, cell.kv_heads, cell.head_dim) for _ in range(2)) for _ in range(sets)]

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
            problem = make_problem(q.shape, k.shape, v.shape, ("bfloat16",) * 3, causal=True)
            self._expected.append((b, rule.expected(problem, q, k, v)))

    def judge(self, out) -> tuple[float, str | None]:
        """Largest error of a sampled element in units of its tolerance, and what is wrong with a result, or None.

        The axis of heads may be split into that of key heads and that of their groups, which spares a library a copy that is not its own.
        """
        if tuple(out.shape) not in self._shapes:
            return math.inf, f"{WRONG}: shape {tuple(out.shape)}, expected {self._shape}"
        if not bool(out.isfinite().all()):
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
    ends = torch.arange(0, (batch + 1) * tokens, tokens, device="cuda", dtype=torch.int32)
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


def sdpa_form(name, cell) -> str:
    """How torch's back end gets a cell: one of "caches as they are", "rows", "rows and mask", "lengths"."""
    if cell.equal and cell.tokens == 1 and not cell.page_size:
        return "rows" if name == "efficient" and cell.heads != cell.kv_heads else "caches as they are"
    return "lengths" if name == "fa2" else "rows and mask"


def bind_sdpa(name):
    """torch's scaled_dot_product_attention, held to a back end.

    With rows, the queries and heads of a group stand in the place of queries, which every back end takes.
    """

    def bind(torch, cell, inputs):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if cell.page_size:
            raise NotImplementedError("it knows no pages")
        attention, chosen = torch.nn.functional.scaled_dot_product_attention, getattr(SDPBackend, SDPA[name])
        q, form = inputs.q.transpose(1, 2), sdpa_form(name, cell)
        if form == "caches as they are":

            def call(k, v):
                with sdpa_kernel(chosen):
                    return attention(q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=cell.heads != cell.kv_heads).transpose(1, 2)

            return call
        split = (len(cell.lengths), cell.tokens, cell.kv_heads, cell.heads // cell.kv_heads, cell.head_dim)
        rows = inputs.q.view(split).transpose(1, 2).flatten(2, 3)
        mask = visible(torch, cell, inputs) if form == "rows and mask" else None

        def of_rows(k, v):
            with sdpa_kernel(chosen):
                out = attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
            return out.unflatten(2, split[1:4:2]).transpose(1, 2)

        return of_rows

    return bind


def visible(torch, cell, inputs):
    """Boolean mask of rows (queries by heads of a group) and slots of a contiguous cache, which broadcasts where it can."""
    slots = torch.arange(cell.capacity, device=inputs.q.device)
    last = inputs.lengths[:, None] - cell.tokens + torch.arange(cell.tokens, device=inputs.q.device)
    mask = slots <= last[..., None]
    return (mask if cell.tokens == 1 else mask.repeat_interleave(cell.heads // cell.kv_heads, 1))[:, None]


def bind_fa2(torch, cell, inputs):
    """FA2 of torch, below scaled_dot_product_attention where it needs lengths or pages."""
    if sdpa_form("fa2", cell) != "lengths":
        return bind_sdpa("fa2")(torch, cell, inputs)
    attention, (batch, tokens) = torch.ops.aten._flash_attention_forward, inputs.q.shape[:2]

    def ends(length):
        return torch.arange(0, (batch + 1) * length, length, device=inputs.q.device, dtype=torch.int32)

    q, ends_q, ends_k = inputs.q.flatten(0, 1), ends(tokens), ends(cell.capacity)
    more = {"seqused_k": inputs.lengths} | ({"block_table": inputs.table} if cell.page_size else {})

    def call(k, v):
        if not cell.page_size:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        return attention(q, k, v, ends_q, ends_k, tokens, cell.capacity, 0.0, True, False, **more)[0].view(inputs.q.shape)

    return call


def bind_flashinfer(torch, cell, inputs):
    import flashinfer

    if not cell.page_size or cell.tokens > 1:
        raise NotImplementedError("its wrapper of batches has pages, and a token each")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(2**27, dtype=torch.uint8, device="cuda"), "NHD")
    counts = torch.tensor([-(-n // cell.page_size) for n in cell.lengths], dtype=torch.int32)
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)])
    numbers = torch.cat([inputs.table[b, :n] for b, n in enumerate(counts.tolist())])
    last = torch.tensor([(n - 1) % cell.page_size + 1 for n in cell.lengths], dtype=torch.int32)
    wrapper.plan(ends.cuda(), numbers, last.cuda(), cell.heads, cell.kv_heads, cell.head_dim, cell.page_size, q_data_type=torch.bfloat16)
    q = inputs.q[:, 0]
    return lambda k, v: wrapper.run(q, (k, v)).view(inputs.q.shape)


SDPA = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
BIND = {
    OURS: bind_numbaflash,
    "fa4": bind_fa4,
    "fa2": bind_fa2,
    "cudnn": bind_sdpa("cudnn"),
    "efficient": bind_sdpa("efficient"),
    "flashinfer": bind_flashinfer,
}


def admit(torch, cell, inputs, names, note, bind=BIND, sample=None, recover=lambda: None) -> dict:
    """{library: (function of caches, error in units of its tolerance)} of those that can do the cell and do it right."""
    calls, sample = {}, sample or Sample(cell, inputs)
    for name in names:
        try:
            call = bind[name](torch, cell, inputs)
            error, fault = sample.judge(call(*inputs.caches[0]))
        except Exception as raised:  # of a library that is not ours anything may come
            note(name, one_line(raised))
            recover()
            continue
        if fault:
            note(name, fault)
        else:
            calls[name] = call, error
    return calls


def versions(common) -> dict[str, str]:
    """Of every library, as records have it."""
    import numbaflash

    def installed(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    torch = f"torch {common['torch']}"
    ours = {OURS: numbaflash.__version__, "fa4": installed("flash-attn-4"), "flashinfer": installed("flashinfer-python")}
    return ours | {"fa2": torch, "efficient": torch, "cudnn": f"{common['cudnn']} ({torch})"}
