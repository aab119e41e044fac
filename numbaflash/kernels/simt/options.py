"""Which options a problem has, and the kernel parameters that they bring; what they mean to a kernel is in `scores`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np

from numbaflash import toolchain
from numbaflash.dispatch import BackwardLayouts, Layouts
from numbaflash.problem import PACKED, PACKED_FEATURE, PAGE_TABLE, Problem

from ..blocks.launch import Lists
from ..blocks.layout import bits_at, granules

FEATURES = frozenset({"softcap", "mask", "block_mask", "bias", "alibi_slopes", "sinks", "dropout", "seqlens_q", "seqlens_k", PACKED_FEATURE})
"""What the kernels can do; of `numbaflash.problem.Problem.features`."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is built into a kernel beyond q, k, v and a band. What is absent costs nothing.

    Attributes
    ----------
    softcap, mask, block_mask, alibi, sinks, dropout : bool
        A ``block_mask`` is a mask that is a `numbaflash.BlockMask`.
    ranked : bool
        Blocks take turns by the ranks of `numbaflash.kernels.blocks.lists`.
    bias : str or None
        Its dtype.
    seqlens_q, seqlens_k : str or None
        Their dtypes.
    per_entry : bool
        Each batch entry has an offset of its own, ``length_k - length_q``.
    cu_seqlens_q, cu_seqlens_k : str or None
        The dtypes of the boundaries of packed sequences.
    page_size : int
        Keys of a page, 0 where k and v are contiguous.
    stacked : bool
        The rows of a tile are heads of one query, which share keys and values: they stand at one place, and have slopes and sinks of their own.
    split : bool
        Each part of the keys has a block of its own, which leaves what it finds to the merge (`parts`).
    """

    softcap: bool = False
    mask: bool = False
    block_mask: bool = False
    ranked: bool = False
    bias: str | None = None
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    seqlens_q: str | None = None
    seqlens_k: str | None = None
    per_entry: bool = False
    cu_seqlens_q: str | None = None
    cu_seqlens_k: str | None = None
    page_size: int = 0
    stacked: bool = False
    split: bool = False

    @classmethod
    def of(cls, problem: Problem) -> Options:
        return cls(
            softcap=problem.softcap is not None,
            mask=problem.mask is not None,
            block_mask=problem.block_mask is not None,
            bias=problem.bias_dtype,
            alibi=problem.alibi is not None,
            sinks=problem.sinks,
            dropout=problem.dropout > 0,
            seqlens_q=problem.seqlens_q,
            seqlens_k=problem.seqlens_k,
            per_entry=problem.offset_per_entry,
            cu_seqlens_q=problem.cu_seqlens_q,
            cu_seqlens_k=problem.cu_seqlens_k,
            page_size=problem.page_size,
        )

    def __bool__(self) -> bool:
        """There is more than a band. (Packed sequences are not: within a sequence nothing is different.)"""
        return self != replace(self.of_packing, per_entry=self.packed and self.per_entry)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def of_packing(self) -> Options:
        """What remains where nothing but the rows of each sequence is needed."""
        return Options(cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k)

    @property
    def lengths(self) -> bool:
        return bool(self.seqlens_q or self.seqlens_k)

    @property
    def changes(self) -> bool:
        """A score is more than a product."""
        return self.softcap or self.alibi or self.bias is not None

    @property
    def masked(self) -> bool:
        """There is a mask, so that tiles step through lists of blocks (`numbaflash.kernels.blocks.lists`)."""
        return self.mask or self.block_mask

    @property
    def hides(self) -> bool:
        """Pairs may be hidden that the band holds."""
        return self.masked or self.lengths

    @property
    def of_products(self) -> Options:
        """What remains for the gradients' products: they know of sinks by the LSE."""
        return replace(self, sinks=False)

    @property
    def of_rows(self) -> Options:
        """What remains where no scores are computed."""
        nothing = dict.fromkeys(("softcap", "mask", "block_mask", "ranked", "alibi", "dropout", "per_entry"), False)
        return replace(self, bias=None, **nothing)

    def parameters(self, compute: str) -> tuple[tuple[str, str, int], ...]:
        """(name, dtype, axes) of what the options add to the parameters of a kernel, in their order; scalars have no axes.

        ``compute`` is the dtype of the kernel's scores; dtypes of 16 bits are bits here.
        """
        found = []
        if self.softcap:
            found += [("cap", compute, 0), ("inverse_cap", compute, 0)]
        if self.mask:
            found.append(("mask", "uint8", 4))
        if self.block_mask:
            found += [("block_mask", "int32", 3), ("block_columns", "int32", 0), ("block_bits", "int32", 0)]
        if self.masked:
            found += [("lists", "int32", 2), ("lists_batch", "int32", 0), ("lists_head", "int32", 0)]
        if self.ranked:
            found.append(("ranks", "int32", 2))
        if self.bias:
            found.append(("bias", as_bits(self.bias), 4))
        if self.alibi:
            found.append(("alibi_slopes", "float32", 3 if self.stacked else 2))
            if not self.per_entry:
                found.append(("offset", "int32", 0))
        if self.sinks:
            found.append(("sinks", compute, 2 if self.stacked else 1))
        found += [(name, dtype, 1) for name, dtype in (("seqlens_q", self.seqlens_q), ("seqlens_k", self.seqlens_k)) if dtype]
        if self.dropout:
            found += [("seed", "uint64", 0), ("keep_limit", "int32", 0), ("keep_factor", compute, 0)]
        if self.page_size:
            found += [(PAGE_TABLE, "int32", 2), ("capacity", "int32", 0)]
        if self.split:
            found.append(("parts", "int32", 0))
        if self.packed:  # at the end, where `packed` finds them
            found += [(name, getattr(self, name), 1) for name in PACKED]
        return tuple(found)

    def arguments(
        self, problem: Problem, layouts: Layouts | BackwardLayouts, compute: str, unit: float, lists: Lists | None = None, parts: int = 1
    ) -> list:
        """The same as the toolchain takes them; ``unit`` is that of the scores, see `config.Elements.unit`."""
        values = {"offset": problem.offset, "capacity": problem.seqlen_k, "parts": parts}
        if self.softcap:
            values |= {"cap": problem.softcap * unit, "inverse_cap": min(1.0 / problem.softcap, sys.float_info.max)}
        if self.dropout:
            from ..dropout import keep_limit

            values |= {"keep_limit": keep_limit(problem.dropout), "keep_factor": 1.0 / (1.0 - problem.dropout)}
        if self.masked:
            values |= {"lists_batch": lists.steps[0], "lists_head": lists.steps[1]}
        if self.block_mask:
            values |= {"block_columns": granules(problem.seqlen_k), "block_bits": bits_at(problem.seqlen_q, problem.seqlen_k)}
        found = []
        for name, dtype, axes in self.parameters(compute):
            if name in ("lists", "ranks"):
                found.append(getattr(lists, f"array_of_{name}"))
            elif name == "block_mask":
                found.append(toolchain.Array(name, dtype, (problem.batch, problem.heads, problem.block_mask[2]), layouts.block_mask.strides))
            elif name == "seed":
                found.append(toolchain.Pointer("seed"))  # the number itself, in the place of an address
            elif name in ("sinks", PAGE_TABLE):
                layout = getattr(layouts, name)
                found.append(toolchain.Array(name, dtype, layout.shape, layout.strides))
            elif axes:
                full = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)[:axes] if axes > 1 else problem.shape_of(name)
                found.append(toolchain.Array(name, dtype, full, getattr(layouts, name).strides))  # 0 along broadcast axes
            else:
                found.append(toolchain.Scalar(dtype, values[name]))
        return found


def as_bits(dtype: str) -> str:
    """How kernels see elements: those of 16 bits as bits."""
    return "uint16" if dtype in ("float16", "bfloat16") else dtype


def score_unit(compute: str, options: Options) -> float:
    """What natural scores are multiplied by. The exponential of float32 is one of base 2, but a bias as low as numbers go must stay one."""
    return math.log2(math.e) if compute == "float32" and options.bias is None else 1.0


def product_factor(problem: Problem, compute: str, options: Options) -> float:
    """Factor of q k^T: the scale, in the unit of the scores unless there is a cap on them first."""
    factor = problem.scale * (1.0 if options.softcap else score_unit(compute, options))
    if compute == "float64":
        return factor
    with np.errstate(over="ignore"):
        return float(np.float32(factor))
