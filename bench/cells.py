"""What is measured: the cells of a benchmark grid."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from math import prod

from numbaflash.problem import ITEMSIZE, Problem, make_problem

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WIDTH = 2048  # heads * head_dim of the "mha" cells
GQA = (32, 8)


@dataclass(frozen=True, slots=True)
class Cell:
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
    def config(self) -> tuple:
        """What a compiled kernel usually depends on: everything but the batch and the length."""
        return self.dtype, self.head_dim, self.causal, self.heads, self.kv_heads

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass."""
        return forward_flops(self.problem)

    @property
    def input_bytes(self) -> int:
        return self.bytes_of("q", "k", "v")

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
        return f"{name} D{self.head_dim} {mask} {self.heads}/{self.kv_heads} heads {self.batch}x{self.seqlen}"


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


def to_json(cells) -> list[dict]:
    return [asdict(cell) for cell in cells]


def from_json(items) -> list[Cell]:
    return [Cell(**item) for item in items]


def inputs(cell: Cell, generator=None, operands=("q", "k", "v"), device="cuda"):
    """Random operands of a cell as torch tensors on the current CUDA device, or another."""
    import torch

    shapes = [cell.problem.shape_of(name) for name in operands]
    return [torch.randn(shape, device=device, dtype=getattr(torch, cell.dtype), generator=generator) for shape in shapes]
