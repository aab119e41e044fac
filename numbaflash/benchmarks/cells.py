"""What is measured: the cells of a benchmark grid."""

from __future__ import annotations

import importlib.util
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod

from ..problem import ITEMSIZE, Problem, make_packed_problem, make_problem

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WIDTH = 2048  # heads * head_dim of the "mha" cells
GQA = (32, 8)


class AnyCell:
    """What follows from the dtype, the heads, the head dim, the mask and the problem of a cell."""

    __slots__ = ()

    @property
    def drawn_as(self) -> AnyCell:
        """The cell whose random inputs these are."""
        return self

    @property
    def config(self) -> tuple:
        """What a compiled kernel usually depends on: everything but the batch and the length."""
        return self.dtype, self.head_dim, self.causal, self.heads, self.kv_heads

    def bytes_of(self, *operands) -> int:
        """Bytes of operands, named as in `numbaflash.dispatch.BACKWARD_OPERANDS`."""
        p = self.problem
        return sum(ITEMSIZE[p.dtype_of(name)] * prod(p.shape_of(name)) for name in operands)

    def fields(self) -> dict:
        """The cell as the fields of a record."""
        return problem_fields(self.problem, self.causal)

    def __str__(self) -> str:
        name = next((short for short, long in DTYPES.items() if long == self.dtype), self.dtype)
        mask = "causal" if self.causal else "full"
        return f"{name} D{self.head_dim} {mask} {self.heads}/{self.kv_heads} heads {self.size}"


@dataclass(frozen=True, slots=True)
class Cell(AnyCell):
    """One attention problem with equal query and key lengths and head_dim_v = head_dim."""

    dtype: str
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def problem(self) -> Problem:
        q, kv = (self.batch, self.seqlen, self.heads, self.head_dim), (self.batch, self.seqlen, self.kv_heads, self.head_dim)
        return make_problem(q, kv, kv, (self.dtype,) * 3, causal=self.causal)

    @property
    def size(self) -> str:
        return f"{self.batch}x{self.seqlen}"

    @property
    def structure(self) -> bool:
        """What the operands do not show: the mask."""
        return self.causal

    def count(self, of_problem) -> int:
        """Floating-point operations that a function counts for a problem."""
        return of_problem(self.problem)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass."""
        return self.count(forward_flops)

    @property
    def input_bytes(self) -> int:
        return self.bytes_of("q", "k", "v")


@dataclass(frozen=True, slots=True)
class PackedCell(AnyCell):
    """Sequences of several lengths that lie one after the other, as many keys as queries in each; ``name`` says what kind of lengths they are."""

    dtype: str
    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where each sequence begins, and where the last one ends."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def problem(self) -> Problem:
        q, kv = (self.tokens, self.heads, self.head_dim), (self.tokens, self.kv_heads, self.head_dim)
        ends = ((len(self.lengths) + 1,), "int32")
        bounds = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends) | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), self.longest)
        return make_packed_problem(q, kv, kv, (self.dtype,) * 3, causal=self.causal, **bounds)

    @property
    def size(self) -> str:
        return f"{self.name} {self.tokens}"

    def batch_of(self, batch: int, seqlen: int) -> Cell:
        """A batch of equal sequences with the heads, the head dim and the mask of the cell."""
        return Cell(self.dtype, batch, seqlen, self.heads, self.kv_heads, self.head_dim, self.causal)

    @property
    def structure(self) -> PackedCell:
        """What the operands do not show: the mask and the lengths."""
        return self

    def count(self, of_problem) -> int:
        """Floating-point operations that a function counts for a problem, over all sequences, each by itself."""
        return sum(count * of_problem(self.batch_of(1, length).problem) for length, count in Counter(self.lengths).items())

    def fields(self) -> dict:
        """The cell as the fields of a record; ``seqlen_q`` and ``seqlen_k`` are those of the longest sequence."""
        return AnyCell.fields(self) | {"lengths": self.name, "tokens": self.tokens}


@cache
def forward_flops(problem: Problem) -> int:
    """Floating-point operations of a forward pass: 2 D for a score and 2 Dv for its value, for each visible pair."""
    return problem.batch * problem.heads * problem.visible_pairs * 2 * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: Problem) -> int:
    """Floating-point operations of the gradients: the five products of each visible pair, three over D and two over Dv."""
    p = problem
    return forward_flops(p) // (p.head_dim + p.head_dim_v) * (3 * p.head_dim + 2 * p.head_dim_v)


def problem_fields(problem: Problem, causal) -> dict:
    """The fields of a record that say what was computed."""
    names = ("dtype", "batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v")
    return {**{name: getattr(problem, name) for name in names}, "causal": causal}


def heads_of(kind: str, head_dim: int) -> tuple[int, int]:
    """Query and key/value heads of a kind: "mha" (`WIDTH` / head_dim of each), "gqa" (32/8), or "H/Hk"."""
    if kind == "mha":
        return (max(1, WIDTH // head_dim),) * 2
    if kind == "gqa":
        return GQA
    try:
        heads, kv_heads = map(int, kind.split("/"))
        if heads > 0 and kv_heads > 0 and heads % kv_heads == 0:
            return heads, kv_heads
    except ValueError:
        pass
    raise ValueError(f'heads must be "mha", "gqa" or "H/Hk" with H a multiple of Hk; got {kind!r}')


def grid(*, dtypes, dims, seqlens, causal, heads, tokens) -> list[Cell]:
    """Every combination, tokens / seqlen sequences each; cells that share kernels stand together."""
    return [
        Cell(dtype, max(1, tokens // seqlen), seqlen, *heads_of(kind, dim), dim, mask)
        for dtype in dtypes
        for kind in heads
        for dim in dims
        for mask in causal
        for seqlen in seqlens
    ]


def seed_of(cell: AnyCell, seed: int, number: int) -> int:
    """Seed of an input set: the same in every run, whichever cells were measured before."""
    return zlib.crc32(f"{cell.drawn_as} {seed} {number}".encode())


def inputs(cell: AnyCell, generator=None, operands=("q", "k", "v"), device="cuda"):
    """Random operands of a cell as torch tensors on the current CUDA device, or another."""
    import torch

    shapes = [cell.problem.shape_of(name) for name in operands]
    return [torch.randn(shape, device=device, dtype=getattr(torch, cell.dtype), generator=generator) for shape in shapes]


def host_inputs(cell: AnyCell, operands=("q", "k", "v"), seed=0):
    """The same on the CPU: torch tensors, or NumPy arrays where PyTorch is not installed."""
    import numpy as np

    from ..files import dtype_of

    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(cell.problem.shape_of(name), np.float32) for name in operands]
    if importlib.util.find_spec("torch") is None:
        return [x.astype(dtype_of(cell.dtype)) for x in arrays]
    import torch

    return [torch.from_numpy(x).to(getattr(torch, cell.dtype)) for x in arrays]
