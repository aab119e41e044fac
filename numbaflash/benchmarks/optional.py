"""Options beside the plain kernel and beside the libraries that have them.

FA2 is the one that torch has: windows and ALiBi are reached below ``scaled_dot_product_attention``. Its derivative there knows no ALiBi, and softcap
is no argument of it, so FA4 and FlexAttention alone stand beside our softcap. Dropout masks differ from library to library, so nothing stands beside
our dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from ..problem import ITEMSIZE, Problem, make_problem
from ..testing import accuracy as rule
from . import peers, running
from .accuracy import WRONG, fault_of
from .cells import Cell, problem_fields
from .passes import Backward, Forward
from .peers import OURS, OURS_PLAIN, Numbaflash

CAP, DROPPED, DOCUMENTS, SEED = 30.0, 0.1, 8, 1
BLOCK, PREFIX, NEAR, GLOBAL = 256, 1024, 256, 64
WINDOW = 1024
"""Keys that a query sees with the option "window", or a quarter of them where there are not four times as many."""


@dataclass(frozen=True)
class Scenario:
    """One use of the options.

    Attributes
    ----------
    cell : Cell
    make : callable
        ``make(torch, cell)`` returns the options of `numbaflash.forward`.
    peers : tuple of str
        Those of `Peers` that have it.
    needs : tuple of str
        Gradients that are computed.
    rule : str
        Of `RULES`: what a mask shows.
    """

    cell: Cell
    make: Callable = lambda torch, cell: {}
    peers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("q", "k", "v")
    rule: str = "documents"


RULES = {
    "documents": lambda documents, i, j: documents[i] == documents[j],
    "block causal": lambda documents, i, j: j // BLOCK <= i // BLOCK,
    "prefix": lambda documents, i, j: (j <= i) | (j < PREFIX),
    "sliding": lambda documents, i, j: (abs(i - j) <= NEAR) | (j < GLOBAL) | (i < GLOBAL),
}
"""What block masks of the scenarios show: of document numbers, queries and keys."""


def document_ids(torch, cell, device="cuda"):
    """Which document each token belongs to: so many of equal lengths."""
    return torch.arange(cell.seqlen, device=device) * DOCUMENTS // cell.seqlen


class Peers:
    """Attention of other libraries under the options of a scenario: ``peers.bind(name, scenario, options, q, k, v)``."""

    def __init__(self):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._torch, self._scope = torch, sdpa_kernel
        self._backends = {
            "sdpa": None,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "fa2": SDPBackend.FLASH_ATTENTION,
        }

    def bind(self, name, scenario, options, q, k, v):
        """A function without arguments that returns out, (batch, seqlen, heads, head_dim)."""
        if name == "fa2" and {"window", "alibi_slopes"} & set(options):
            return self._fa2(scenario, options, q, k, v)
        if name in self._backends:
            return self._sdpa(self._backends[name], scenario, options, q, k, v)
        return (self._fa4 if name == "fa4" else self._flex_attention)(scenario, options, q, k, v)

    def _sdpa(self, backend, scenario, options, q, k, v):
        attention, scope, cell = self._torch.nn.functional.scaled_dot_product_attention, self._scope, scenario.cell
        added, causal = options.get("bias", options.get("mask")), cell.causal
        if added is not None:
            if causal:  # it takes either a mask or the word
                seen = self._torch.ones(cell.seqlen, cell.seqlen, dtype=self._torch.bool, device=q.device).tril_()
                added, causal = added & seen if "mask" in options else added.masked_fill(~seen, float("-inf")), False
            added = added.expand(cell.batch, cell.heads, cell.seqlen, cell.seqlen)
        grouped = {"enable_gqa": True} if cell.heads != cell.kv_heads else {}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def call():
            with nullcontext() if backend is None else scope(backend):
                return attention(q, k, v, added, options.get("dropout", 0.0), causal, **grouped).transpose(1, 2)

        return call

    def _fa2(self, scenario, options, q, k, v):
        attention, cell, slopes = self._torch.ops.aten._flash_attention_forward, scenario.cell, options.get("alibi_slopes")
        if slopes is not None and q.requires_grad:
            raise NotImplementedError("torch's derivative of FA2 knows no ALiBi")
        left, right = options.get("window", (None, None))
        more = {"window_size_left": left, "window_size_right": right, "alibi_slopes": slopes}
        return lambda: attention(q, k, v, None, None, cell.seqlen, cell.seqlen, 0.0, cell.causal, False, **more)[0]

    def _fa4(self, scenario, options, q, k, v):
        from flash_attn.cute import flash_attn_func

        more = {"window_size": options["window"]} if "window" in options else {}
        more |= {"softcap": options["softcap"]} if "softcap" in options else {}

        def call():
            result = flash_attn_func(q, k, v, causal=scenario.cell.causal, **more)
            return result[0] if isinstance(result, tuple) else result

        return call

    def _flex_attention(self, scenario, options, q, k, v):
        from torch.nn.attention.flex_attention import create_block_mask

        torch, cell = self._torch, scenario.cell
        flex, documents = peers.compiled_flex(torch), document_ids(torch, cell, q.device)
        slopes, bias = options.get("alibi_slopes"), options.get("bias")

        def score(score, b, h, i, j):
            if "softcap" in options:
                score = CAP * torch.tanh(score / CAP)
            if slopes is not None:
                score = score - slopes[h] * (i - j)
            return score if bias is None else score + bias[0, h, i, j]

        def visible(b, h, i, j):
            seen = RULES[scenario.rule](documents, i, j) if "mask" in options else i >= 0
            if "window" in options:
                seen = seen & (i - j <= options["window"][0])
            return seen & (i >= j) if cell.causal else seen

        hides = cell.causal or "mask" in options
        block_mask = create_block_mask(visible, None, None, cell.seqlen, cell.seqlen, device=q.device) if hides else None
        scores = score if {"softcap", "alibi_slopes", "bias"} & set(options) else None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return lambda: flex(q, k, v, score_mod=scores, block_mask=block_mask, enable_gqa=cell.heads != cell.kv_heads).transpose(1, 2)


OPTIONS = {
    "softcap": ("fa4", "flex"),
    "alibi": ("fa2", "flex"),
    "sinks": (),
    "window": ("fa2", "fa4", "flex"),
    "bias": ("sdpa", "cudnn", "efficient", "flex"),
    "mask": ("sdpa", "cudnn", "efficient", "flex"),
    "lengths": (),
    "dropout": (),
}
"""Options that are measured, each with the libraries that have it."""


@dataclass(frozen=True, slots=True)
class OptionCell(Cell):
    """A cell with one of `OPTIONS`."""

    option: str

    @property
    def plain(self) -> Cell:
        """The same without it."""
        return Cell(self.dtype, self.batch, self.seqlen, self.heads, self.kv_heads, self.head_dim, self.causal)

    @property
    def drawn_as(self) -> Cell:
        """So that the plain kernel computes from the same."""
        return self.plain

    @property
    def window(self) -> tuple[int, int] | None:
        return (max(1, min(WINDOW, self.seqlen // 4)) - 1, 0) if self.option == "window" else None

    @property
    def problem(self) -> Problem:
        return self.problem_of(self.batch, self.heads, self.kv_heads)

    def problem_of(self, batch: int, heads: int, kv_heads: int) -> Problem:
        """Of so many entries and heads."""
        q, kv = (batch, self.seqlen, heads, self.head_dim), (batch, self.seqlen, kv_heads, self.head_dim)
        square = (self.seqlen, self.seqlen)
        more = {
            "softcap": {"softcap": CAP},
            "alibi": {"alibi_slopes": ((heads,), "float32")},
            "sinks": {"sinks": ((heads,), "float64" if self.dtype == "float64" else "float32")},
            "window": {"window": self.window},
            "bias": {"bias": ((1, heads, *square), self.dtype)},
            "mask": {"mask": (square, "bool")},
            "lengths": dict.fromkeys(("seqlens_q", "seqlens_k"), ((batch,), "int32")),
            "dropout": {"dropout": DROPPED},
        }[self.option]
        return make_problem(q, kv, kv, (self.dtype,) * 3, causal=self.causal, **more)

    @property
    def structure(self) -> OptionCell:
        return self

    def count(self, of_problem) -> int:
        """What a mask hides or a length leaves out is counted."""
        p = self.plain.problem
        return of_problem(make_problem(p.q_shape, p.k_shape, p.v_shape, (self.dtype,) * 3, causal=self.causal, window=self.window))

    def fields(self) -> dict:
        return problem_fields(self.problem, self.causal) | {"option": self.option}

    def __str__(self) -> str:
        return f"{self.plain} {self.option}"


@functools.lru_cache(maxsize=1)
def values(cell: OptionCell, device) -> dict:
    """Arguments of `numbaflash.forward` that are the option, as torch has them."""
    import torch

    generator = torch.Generator(device=device).manual_seed(SEED)

    def normal(*shape, dtype):
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    wide = torch.float64 if cell.dtype == "float64" else torch.float32
    if cell.option == "softcap":
        return {"softcap": CAP}
    if cell.option == "alibi":
        return {"alibi_slopes": torch.linspace(0.01, 1, cell.heads, device=device, dtype=torch.float32)}
    if cell.option == "sinks":
        return {"sinks": normal(cell.heads, dtype=wide)}
    if cell.option == "window":
        return {"window": cell.window}
    if cell.option == "bias":
        return {"bias": normal(1, cell.heads, cell.seqlen, cell.seqlen, dtype=getattr(torch, cell.dtype))}
    if cell.option == "mask":
        documents = document_ids(torch, cell, device)
        return {"mask": documents[:, None] == documents[None, :]}
    if cell.option == "lengths":
        lengths = torch.linspace(0.25, 1, cell.batch, device=device).mul(cell.seqlen).ceil().int()
        return {"seqlens_q": lengths, "seqlens_k": lengths}
    return {"dropout": DROPPED, "seed": SEED}


class Ours(Numbaflash):
    """numbaflash with the option of a cell."""

    def bind(self, q, k, v, cell):
        forward, options = self._numbaflash.forward, values(cell, q.device)
        return lambda: forward(q, k, v, causal=cell.causal, **options)

    def bind_backward(self, dout, q, k, v, cell):
        options = values(cell, q.device)
        out, lse = self._numbaflash.forward(q, k, v, causal=cell.causal, return_lse=True, **options)
        backward = self._numbaflash.backward
        return lambda: backward(dout, q, k, v, out, lse, causal=cell.causal, **options)

    def evidence(self, q, k, v, cell, direction="forward"):
        return self._explained(q, k, v, causal=cell.causal, direction=direction, **values(cell, q.device))


class Plain(Numbaflash):
    """numbaflash without the option, which takes turns with the others so that it tells what the option costs."""

    name = OURS_PLAIN

    def has(self, cell):
        return False


class Other(peers.Library):
    """Another library with the option of a cell."""

    def __init__(self, name):
        super().__init__()
        self.name, self._peers = name, Peers()
        if name == "fa4":
            self.version = peers.Fa4().version

    def has(self, cell):
        return self.name in OPTIONS[cell.option]

    def bind(self, q, k, v, cell):
        return self._peers.bind(self.name, Scenario(cell), values(cell, q.device), q, k, v)


LIBRARIES = {OURS: Ours, OURS_PLAIN: Plain} | {name: functools.partial(Other, name) for name in ("fa4", "cudnn", "fa2", "efficient", "sdpa", "flex")}
NAMES = tuple(LIBRARIES)


class Sample:
    """Exact results of the first key/value head of the first entry, and of the last one of the last; of dropout, whose numbers go by entry and
    head, of the first alone.

    Parameters
    ----------
    cell : OptionCell
    *arrays : torch.Tensor
        Inputs of the cell.
    """

    results, compute, compare = ("out",), staticmethod(rule.expected), staticmethod(rule.compare)

    def __init__(self, cell, *arrays):
        options, group = values(cell, arrays[-1].device), cell.heads // cell.kv_heads
        self._shapes = {name: cell.problem.shape_of(name) for name in self.results}
        chosen = {(0, 0)} if cell.option == "dropout" else {(0, 0), (cell.batch - 1, cell.kv_heads - 1)}
        self._parts = []
        for b, head in sorted(chosen):
            entry, heads, keys = slice(b, b + 1), slice(head * group, (head + 1) * group), slice(head, head + 1)
            of_part = {name: _part(name, x, entry, heads) for name, x in options.items() if name not in ("softcap", "window", "dropout")}
            given = [x[entry, :, keys if n >= len(arrays) - 2 else heads] for n, x in enumerate(arrays)]
            known = self.compute(cell.problem_of(1, group, 1), *given, **of_part)
            self._parts.append((entry, heads, keys, known))

    def judge(self, found) -> tuple[float, str | None]:
        """As that of the samples of batches."""
        found = dict(zip(self.results, found if isinstance(found, (tuple, list)) else (found,), strict=False))
        fault = fault_of(found, self._shapes)
        if fault:
            return float("inf"), fault
        worst = 0.0
        try:
            for entry, heads, keys, known in self._parts:
                error = self.compare(known, *(x[entry, :, keys if name in ("dk", "dv") else heads] for name, x in found.items()))
                worst = max(worst, *(getattr(error, name) for name in found))
        except rule.AccuracyError as error:
            return float("inf"), f"{WRONG}: {error}"
        return worst, None


class GradientSample(Sample):
    """The same of dq, dk and dv."""

    results = ("dq", "dk", "dv")
    compute, compare = staticmethod(rule.expected_gradients), staticmethod(rule.compare_gradients)


def _part(name, x, entry, heads):
    """What of an option belongs to some heads of an entry."""
    if name in ("alibi_slopes", "sinks"):
        return x[heads]
    if name == "bias":
        return x[:, heads]
    return x[entry] if name.startswith("seqlens") else x


class _Optional:
    """Of cells with an option, whose array is beside q, k and v."""

    bench = "options"
    kind, classes, libraries, known = OptionCell, LIBRARIES, NAMES, NAMES

    @classmethod
    def room(cls, cell, l2_bytes):
        p = cell.problem
        pairs = p.seqlen_q * p.seqlen_k
        more = {"mask": pairs, "bias": pairs * p.heads * ITEMSIZE[cell.dtype]}.get(cell.option, 0)
        return super().room(cell, l2_bytes) + 4 * more  # torch expands it for a peer, and gradients have one more


class OptionForward(_Optional, Forward):
    """Attention with an option."""

    sample, plain = Sample, Forward


class OptionBackward(_Optional, Backward):
    """The gradients of q, k and v with an option."""

    sample, plain = GradientSample, Backward


class Run(running.Run):
    """A run in which the plain kernel takes turns with the libraries."""

    def __init__(self, what, options, libraries, common, device, built=()):
        super().__init__(what, options, libraries, common, device, built)
        self.plain = running.Run(what.plain, options, {OURS: Numbaflash()}, common, device)

    def admit(self, cell, note):
        admitted = super().admit(cell, note)
        if OURS in admitted and OURS_PLAIN in self.libraries:
            for call in self.plain.admit(cell.plain, note).values():
                admitted[OURS_PLAIN] = call
        return admitted
