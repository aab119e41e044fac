"""Which options a problem has, and the kernel parameters that they bring; what they mean to a kernel is in `scores`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np

from ... import toolchain
from ...dispatch import BackwardLayouts, Layout, Layouts, contiguous_strides
from ...problem import GRANULE, ITEMSIZE, PACKED_FEATURE, Problem, trim_keys
from ..blocks.launch import Lists
from ..blocks.layout import bits_at, granules

FEATURES = frozenset({"softcap", "mask", "block_mask", "bias", "alibi_slopes", "sinks", "dropout", "seqlens_q", "seqlens_k", PACKED_FEATURE})
"""`Problem.features` that the kernels have, forward and gradients."""

ROUND_KEYS = tuple((f"round{n}_low", f"round{n}_high") for n in range(10))
"""Parameters whose lower and upper words are the keys of Philox's rounds, as constants of the kernel without cost. Where mask or bias is read, only
the first are: so many parameters beside theirs take a register too many at head dim 256."""

KEYS_OF_A_DRAW = 32
"""Keys that share random bits of dropout: blocks of keys start at multiples of it."""

_AXES = {
    "mask": ("batch", "head", "query", "key"),
    "bias": ("batch", "head", "query", "key"),
    "alibi_slopes": ("batch", "head"),
    "sinks": ("head",),
    "seqlens_q": ("batch",),
    "seqlens_k": ("batch",),
    "cu_seqlens_q": ("entry",),
    "cu_seqlens_k": ("entry",),
}

_LOW_CAP = 64.0
"""Up to this softcap tanh is the special-function unit's: its error, 2**-11 of a score, is as small as 16 bits have it; see `scores.tanh`."""

_BOUNDED_CAP = 55.0
"""Up to this softcap bfloat16 has a range for P from the least score to the largest, 2 * cap * log2(e) binary orders."""
_LARGEST_POWER = 45.0
"""Then P is at most 2 to this power, which leaves as much to V, and from `_BOUNDED_CAP` at least 2**-114."""

_LEAST_SCALE = 2.0**-40
"""From this scale on ALiBi's slopes are divided by it."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a thread reads a mask or a bias.

    Attributes
    ----------
    dtype : str
    by_row, by_column : bool
        Whether the elements differ from row to row of a block of scores, and from column to column.
    pairs : bool
        Two neighbours along a row are one load.
    """

    dtype: str
    by_row: bool
    by_column: bool
    pairs: bool

    @classmethod
    def of(cls, name: str, problem: Problem, layout: Layout, pack: int) -> Access:
        dtype = problem.dtype_of(name)
        of_batch, of_head, of_query, of_key = steps(layout)
        pair = 2 * ITEMSIZE[dtype]
        return cls(
            dtype,
            by_row=of_query != 0 or (pack > 1 and of_head != 0),
            by_column=of_key != 0,
            pairs=of_key == ITEMSIZE[dtype]
            and problem.seqlen_k % 2 == kernel_keys(problem)[1] % 2 == 0
            and layout.alignment % pair == 0
            and not any(step % pair for step in (of_batch, of_head, of_query)),
        )

    @classmethod
    def of_gradients(cls, name: str, problem: Problem, layout: Layout, pack: int) -> Access:
        """Where the rows of a tile are keys: an element is a load."""
        _, _, of_query, of_key = steps(layout)
        return cls(problem.dtype_of(name), by_row=of_key != 0, by_column=of_query != 0, pairs=False)


def steps(layout: Layout) -> tuple[int, ...]:
    """Strides, 0 along an axis of one element."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(layout.shape, layout.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Options:
    """What is built into a kernel beyond q, k, v and a band. What is absent costs nothing.

    Attributes
    ----------
    unit : str
        What scores are multiples of, from the step on that changes them: the "scale", which leaves products as they are, the "cap", which leaves
        tanh, or "one".
    softcap : str or None
        "low" or "high": how its tanh is computed.
    mask, bias : Access or None
    block_mask : bool
        The mask is a `numbaflash.BlockMask`.
    ranked : bool
        Tiles take turns by the ranks of `numbaflash.kernels.blocks.lists`.
    alibi, sinks, dropout : bool
    bounded : bool
        No score is above a unit, and exponentials of all that there are fit into P: rows need no maximum. For the forward.
    falls : bool
        No query sees a key behind it, so that what ALiBi adds falls from column to column. For the forward.
    seqlens_q, seqlens_k : str or None
        Their dtypes.
    per_entry : bool
        Each batch entry has an offset of its own, ``length_k - length_q``.
    cu_seqlens_q, cu_seqlens_k : str or None
        dtypes of the boundaries of packed sequences.
    stored : tuple of str
        Results whose rows are written one by one where a sequence ends within a tile.
    """

    unit: str = "scale"
    softcap: str | None = None
    mask: Access | None = None
    bias: Access | None = None
    block_mask: bool = False
    ranked: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    bounded: bool = False
    falls: bool = False
    seqlens_q: str | None = None
    seqlens_k: str | None = None
    per_entry: bool = False
    cu_seqlens_q: str | None = None
    cu_seqlens_k: str | None = None
    stored: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, problem: Problem, layouts: Layouts | BackwardLayouts | None, pack: int = 1, access_of=Access.of, stored: tuple[str, ...] = ("out",)
    ) -> Options:
        """Those of a problem; without layouts, mask and bias are taken to be row-major. ``access_of`` is `Access.of` or `Access.of_gradients`,
        ``stored`` are the results that the kernel stores by tiles."""

        def access(name):
            if name not in problem.options:
                return None
            shape = problem.shape_of(name)
            layout = layouts and getattr(layouts, name) or Layout(shape, contiguous_strides(shape, ITEMSIZE[problem.dtype_of(name)]))
            return access_of(name, problem, layout, pack)

        softcap = None if problem.softcap is None else "low" if problem.softcap <= _LOW_CAP else "high"
        return cls(
            unit=_unit(problem, softcap),
            softcap=softcap,
            mask=access("mask"),
            bias=access("bias"),
            block_mask=problem.block_mask is not None,
            alibi=problem.alibi is not None,
            sinks=problem.sinks,
            dropout=problem.dropout > 0,
            seqlens_q=problem.seqlens_q,
            seqlens_k=problem.seqlens_k,
            per_entry=problem.offset_per_entry,
            cu_seqlens_q=problem.cu_seqlens_q,
            cu_seqlens_k=problem.cu_seqlens_k,
            stored=stored if problem.packed else (),
        )

    def __bool__(self) -> bool:
        return self != Options()

    @property
    def of_products(self) -> Options:
        """What remains for the gradients' products: they know of sinks by the LSE."""
        return replace(self, sinks=False)

    def of_forward(self, problem: Problem) -> Options:
        """With what the forward knows of the scores of a problem."""
        bounded = self.unit == "cap" and problem.dtype == "bfloat16" and problem.softcap <= _BOUNDED_CAP
        falls = self.alibi and self.unit == "scale" and problem.right is not None and problem.right <= 0
        return replace(self, bounded=bounded, falls=falls)

    @property
    def of_rows(self) -> Options:
        """What remains where no scores are computed."""
        return Options(
            sinks=self.sinks,
            seqlens_q=self.seqlens_q,
            per_entry=self.per_entry and self.packed,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
        )

    @property
    def of_tickets(self) -> Options:
        """What remains for the kernel that prepares tickets, at the beginning of the workspace."""
        return Options(cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def lengths(self) -> bool:
        """Batch entries have numbers of queries or keys of their own."""
        return bool(self.seqlens_q or self.seqlens_k or self.packed)

    @property
    def changes(self) -> bool:
        """A score is more than a multiple of a product."""
        return bool(self.softcap or self.alibi or self.bias)

    @property
    def masked(self) -> bool:
        """There is a mask, so that tiles step through lists of blocks (`numbaflash.kernels.blocks.lists`)."""
        return self.mask is not None or self.block_mask

    @property
    def reads(self) -> bool:
        """There is something to read for each score."""
        return bool(self.masked or self.bias)

    @property
    def terms(self) -> int:
        """How many options have to do with each score."""
        return sum(map(bool, (self.softcap, self.alibi, self.masked, self.bias)))

    @property
    def hides(self) -> bool:
        """Beyond the band, pairs may be hidden, or have scores of -inf."""
        return bool(self.masked or self.bias or self.lengths)

    @property
    def only_bounded(self) -> bool:
        """Beside sinks, nothing but a cap by which scores are bounded."""
        return self.bounded and replace(self, sinks=False) == Options(unit=self.unit, softcap=self.softcap, bounded=True)

    @property
    def lowest_scores(self) -> bool:
        """Scores may be as low as float32 goes, where their multiples in base 2 are no numbers any more."""
        return self.bias is not None and self.bias.dtype != "float16"

    def size_of_unit(self, problem: Problem) -> float:
        """What a score of 1 is in natural units."""
        return {"scale": problem.scale, "cap": problem.softcap, "one": 1.0}[self.unit]

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """(name, dtype) of what the options add to the parameters of a kernel, in their order. "pointer" is an address."""
        found = []
        if self.softcap:
            found.append(("cap_slope", "float32"))
            found += [("cap_exponent", "float32")] if self.softcap == "high" else []
            found += [("cap", "float32")] if self.unit == "one" else []
        elif self.unit == "one":
            found.append(("scale", "float32"))
        if self.bounded:
            found.append(("base", "float32"))
        if self.alibi and self.unit == "scale":
            found.append(("inverse_scale", "float32"))
        present = (self.mask, self.bias, self.alibi, self.sinks, self.seqlens_q, self.seqlens_k, self.cu_seqlens_q, self.cu_seqlens_k)
        for (name, axes), given in zip(_AXES.items(), present, strict=True):
            if given:
                found += [(name, "pointer"), *((f"{name}_{axis}", "int64") for axis in axes)]
        if self.masked:
            found += [("lists", "pointer"), ("lists_batch", "int32"), ("lists_head", "int32"), ("lists_words", "int32")]
        if self.ranked:
            found.append(("ranks", "pointer"))
        if self.block_mask:
            found += [("block_words", "pointer"), ("block_bits", "pointer"), ("block_batch", "int64"), ("block_head", "int64")]
            found += [("block_row", "int64"), ("block_last_row", "int32"), ("block_columns", "int32")]
        if self.dropout:
            found += [("first_key", "int32"), ("keep_limit", "int32"), ("keep_factor", "float32")]
            found += [(name, "pointer") for pair in (ROUND_KEYS[:1] if self.reads else ROUND_KEYS) for name in pair]
        if self.packed:
            found += [("tickets", "pointer"), ("sequences", "int32"), ("total_q", "int32"), ("total_k", "int32")]
        for name in self.stored:
            found += [(name, "pointer"), (f"{name}_row", "int64"), (f"{name}_head", "int64")]
        return tuple(found)

    def arguments(self, problem: Problem, layouts: Layouts | BackwardLayouts, first: int = 0, lists: Lists | None = None) -> list:
        """The same as the toolchain takes them, for the whole problem; the kernel counts keys from the ``first`` on, and steps through ``lists``."""
        values, pointers = {"first_key": first, "scale": _float32(problem.scale)}, {name: (name, 0) for name in self.stored}
        if self.alibi and self.unit == "scale":
            values["inverse_scale"] = _float32(1.0 / problem.scale)
        if self.softcap:
            cap, slope = problem.softcap, problem.scale / problem.softcap
            values |= {"cap": cap, "cap_slope": _float32(slope), "cap_exponent": _float32(2 * math.log2(math.e) * slope)}
            values["base"] = max(0.0, 1 - _LARGEST_POWER / (math.log2(math.e) * cap))
        if self.dropout:
            from ..dropout import WEYL, keep_limit  # which imports numba.cuda

            values |= {"keep_limit": keep_limit(problem.dropout), "keep_factor": _float32(1.0 / (1.0 - problem.dropout))}
            # The seed itself is in the place of an address. What is added to its upper word leaves the lower one alone, but not the other way round.
            sums = {name: WEYL[i] * n % 2**32 << 32 * i for n, pair in enumerate(ROUND_KEYS) for i, name in enumerate(pair)}
            pointers |= {name: ("seed", offset) for name, offset in sums.items()}
        if self.packed:
            pointers["tickets"] = "workspace", 0
            values |= {"sequences": problem.batch, "total_q": problem.total_q, "total_k": problem.total_k}
        if self.masked:
            pointers |= {"lists": ("workspace", lists.lists_at), "ranks": ("workspace", lists.ranks_at)}
            values |= dict(zip(("lists_batch", "lists_head", "lists_words"), lists.steps, strict=True))
        if self.block_mask:
            rows, columns = granules(problem.seqlen_q), granules(problem.seqlen_k)
            places = {"block_words": 4 * (first // GRANULE), "block_bits": 4 * bits_at(problem.seqlen_q, problem.seqlen_k)}
            pointers |= {name: ("block_mask", offset) for name, offset in places.items()}
            values["block_batch"], values["block_head"], _ = steps(layouts.block_mask)
            values |= {"block_row": 4 * columns, "block_last_row": rows - 1, "block_columns": columns - first // GRANULE}
        for name in self.stored:
            values[f"{name}_row"], values[f"{name}_head"], _ = steps(getattr(layouts, name))
        for name in _AXES.keys() & set(problem.options):
            strides = dict(zip(_AXES[name], steps(getattr(layouts, name)), strict=True))
            values |= {f"{name}_{axis}": step for axis, step in strides.items()}
            pointers[name] = name, first * strides.get("key", 0)
        return [
            toolchain.Pointer(*pointers[name]) if dtype == "pointer" else toolchain.Scalar(dtype, values[name]) for name, dtype in self.parameters()
        ]


def _unit(problem: Problem, softcap: str | None) -> str:
    if problem.bias is not None or (softcap and problem.alibi is not None):
        return "one"
    if softcap:
        return "cap" if softcap == "low" else "one"
    return "scale" if problem.alibi is None or problem.scale >= _LEAST_SCALE else "one"


def _float32(x: float) -> float:
    """The nearest float32, kept finite."""
    most = float(np.finfo(np.float32).max)
    return float(np.float32(min(max(x, -most), most))) if abs(x) <= sys.float_info.max else math.copysign(most, x)


def kernel_keys(problem: Problem) -> tuple[Problem, int]:
    """The problem over the keys that a kernel counts, and the number of keys before them: those that some query may see, and with dropout or a mask
    as many before them as let blocks start where its random bits or granules do."""
    trimmed, first = trim_keys(problem)
    more = first % (GRANULE if problem.masked else KEYS_OF_A_DRAW if problem.dropout else 1)
    if not more:
        return trimmed, first

    def longer(shape):
        return shape if shape is None or shape[3] == 1 else (*shape[:3], shape[3] + more)

    keys = {"seqlen_k": trimmed.seqlen_k + more, "offset": trimmed.offset + more}
    return replace(trimmed, **keys, mask=longer(trimmed.mask), bias=longer(trimmed.bias)), first - more
