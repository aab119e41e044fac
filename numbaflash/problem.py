"""What is computed: one frozen description of an attention problem, and every check of the user's arguments.

Arrays are known here only by shape and dtype name, so that the same checks and the same messages serve every array
library. The alignment of ``causal`` and ``window`` is settled here too: a kernel sees only the band

    ``i + offset - left <= j <= i + offset + right``

of keys ``j`` that query ``i`` may see, where a bound that excludes nothing is ``None``.

**Alignment.** Query i stands beside key ``i + offset``: causal, window and ALiBi all count from there. The last query of a batch entry stands
beside its last key, ``offset = length_k - length_q``, so that a query sees the same keys whether or not padding follows; only
``causal="top_left"`` stands the first query beside the first key, ``offset = 0``. The lengths are ``seqlen_q`` and ``seqlen_k``, or those that
``seqlens_q`` and ``seqlens_k`` hold for the entry: then each entry has an offset of its own, which only the device knows
(`Problem.offset_per_entry`). A length above the capacity of the array counts as the capacity, a negative one as 0.

**Packed sequences** lie one after the other, without padding: sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. Each is a batch entry
whose length is that difference, so everything said of entries holds for them. Rows before the first sequence and after the last belong to nobody:
their results are 0 (LSE: -inf). Numbers below 0 count as 0, numbers beyond the rows as their count; where the numbers are then not in ascending
order, there is no sequence at all.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

DTYPES = ("float16", "bfloat16", "float32", "float64")
NEEDS = ("q", "k", "v")
"""Inputs that always have gradients."""

OPTIONS = ("mask", "block_mask", "bias", "alibi_slopes", "sinks", "seqlens_q", "seqlens_k")
"""Arrays that a problem may have beyond q, k and v. ``block_mask`` is what a `numbaflash.BlockMask` holds, which users pass as ``mask``."""

MASKS = ("mask", "block_mask")
"""Those that hide pairs one by one; a problem has one of them at most."""

PACKED = ("cu_seqlens_q", "cu_seqlens_k")
"""Arrays that packed sequences bring."""

DIFFERENTIABLE_OPTIONS = ("bias", "sinks")
"""Those of `OPTIONS` that have gradients."""

DIFFERENTIABLE = NEEDS + DIFFERENTIABLE_OPTIONS
"""Inputs that may have gradients."""

CONSTANT_OPTIONS = tuple(name for name in OPTIONS if name not in DIFFERENTIABLE_OPTIONS)
"""Arrays that have none."""

FEATURES = ("softcap", *OPTIONS, "dropout")
"""What a problem may have beyond q, k, v and a band, by the names of the arguments."""

PACKED_FEATURE = "packed sequences"
"""What a problem of `make_packed_problem` has beyond that."""

GRANULE = 64
"""Queries, and keys, of the smallest block that a `numbaflash.BlockMask` tells apart."""

MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**30  # row and key numbers, and their sums with the offset, stay within int32
MAX_SCALE = {"float32": (2 - 2**-23) * 2.0**127 / math.log2(math.e), "float64": math.nextafter(sys.float_info.max / math.log2(math.e), 0)}
"""By the dtype that scores are computed in."""
MIN_SOFTCAP = 2.0**-126  # kernels hold softcap * log2(e) and scale / softcap in float32, but for float64
DROPOUT_STEPS = 2**16
"""Dropout draws 16 bits for each pair, so the probability is a multiple of ``1 / DROPOUT_STEPS``."""

LENGTH_DTYPES = ("int32", "int64")
ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


class UnsupportedError(NotImplementedError):
    """A legal problem that no kernel family can compute; the message names each family and its reason."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A validated attention problem.

    Attributes
    ----------
    dtype : str
        Element type of q, k, v and out: one of `DTYPES`.
    batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v : int
        q is (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim),
        v (batch, seqlen_k, kv_heads, head_dim_v), out (batch, seqlen_q, heads, head_dim_v),
        lse (batch, heads, seqlen_q).
    scale : float
        Factor of the scores, finite.
    offset : int
        Query i stands beside key i + offset: seqlen_k - seqlen_q, or 0 for ``causal="top_left"``.
    left, right : int or None
        Keys visible to the left and to the right of that place, inclusive; ``None`` where the bound excludes nothing, whatever the lengths.
    offset_per_entry : bool
        The place depends on ``seqlens_q`` and ``seqlens_k``: the offset of a batch entry is its ``length_k - length_q``, and `offset` is that of
        full lengths. Never without a bound or ALiBi.
    softcap : float or None
        Scores become ``softcap * tanh(score / softcap)`` before anything is added to them.
    mask : tuple of int or None
        4 axes (batch, heads, seqlen_q, seqlen_k), each of full size or 1; bool, True where the query may see the key.
    block_mask : tuple of int or None
        In its place the words of a `numbaflash.BlockMask`: (batch or 1, heads or 1, words), int32.
    bias : tuple of int or None
        Likewise; added to the scores.
    bias_dtype : str or None
    alibi : tuple of int or None
        (1, heads) or (batch, heads) slopes, float32: ``-slope * abs(i + offset - j)`` is added to the scores.
    sinks : bool
        There is one more logit a head, (heads,) of `lse_dtype`: it joins the softmax of each query as a key without a value would, and is
        neither capped, biased nor dropped.
    dropout : float
        Probability of a weight to be dropped, a multiple of 2**-16; kept ones are divided by ``1 - dropout``. 0 is none. The seed is no part of
        the problem.
    seqlens_q, seqlens_k : str or None
        dtype of the (batch,) lengths, int32 or int64. Queries and keys from there on take no part; the values are known to the device alone.
    cu_seqlens_q, cu_seqlens_k : str or None
        dtype of the (batch + 1,) boundaries of packed sequences, int32 or int64; both or neither. ``batch`` counts the sequences, and ``seqlen_q``
        and ``seqlen_k`` are how long to expect one to be, by the caller's ``max_seqlen`` or on average: they choose tiles, no result depends on them.
    total_q, total_k : int
        Rows of packed arrays: q is (total_q, heads, head_dim), k (total_k, kv_heads, head_dim), v (total_k, kv_heads, head_dim_v), out
        (total_q, heads, head_dim_v), lse (heads, total_q). 0 where nothing is packed.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    offset: int = 0
    left: int | None = None
    right: int | None = None
    offset_per_entry: bool = False
    softcap: float | None = None
    mask: tuple[int, int, int, int] | None = None
    block_mask: tuple[int, int, int] | None = None
    bias: tuple[int, int, int, int] | None = None
    bias_dtype: str | None = None
    alibi: tuple[int, int] | None = None
    sinks: bool = False
    dropout: float = 0.0
    seqlens_q: str | None = None
    seqlens_k: str | None = None
    cu_seqlens_q: str | None = None
    cu_seqlens_k: str | None = None
    total_q: int = 0
    total_k: int = 0

    @property
    def masked(self) -> bool:
        """There is a mask, of either kind."""
        return self.mask is not None or self.block_mask is not None

    @property
    def packed(self) -> bool:
        """Sequences lie one after the other in arrays without a batch axis."""
        return self.cu_seqlens_q is not None

    @property
    def rows_q(self) -> int:
        """Queries of a head, over the batch."""
        return self.total_q if self.packed else self.batch * self.seqlen_q

    @property
    def rows_k(self) -> int:
        """Keys of a head, over the batch."""
        return self.total_k if self.packed else self.batch * self.seqlen_k

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def is_empty(self) -> bool:
        """No output element: nothing to launch. (No *keys* is not empty: those rows are 0 and -inf.)"""
        return 0 in (self.rows_q, self.heads)

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def q_shape(self):
        return (*self._rows_of("q"), self.heads, self.head_dim)

    @property
    def k_shape(self):
        return (*self._rows_of("k"), self.kv_heads, self.head_dim)

    @property
    def v_shape(self):
        return (*self._rows_of("k"), self.kv_heads, self.head_dim_v)

    @property
    def out_shape(self):
        return (*self._rows_of("q"), self.heads, self.head_dim_v)

    @property
    def lse_shape(self):
        return (self.heads, self.total_q) if self.packed else (self.batch, self.heads, self.seqlen_q)

    def _rows_of(self, operand):
        """The leading axes of an array of queries or of keys."""
        if self.packed:
            return (self.total_q if operand == "q" else self.total_k,)
        return self.batch, self.seqlen_q if operand == "q" else self.seqlen_k

    @property
    def options(self) -> tuple[str, ...]:
        """The arrays of `OPTIONS` and `PACKED` that the problem has."""
        return tuple(name for name in OPTIONS + PACKED if self._option(name) is not None)

    @property
    def features(self) -> tuple[str, ...]:
        """What the problem has beyond q, k, v and a band, of `FEATURES` and `PACKED_FEATURE`: its kernels must have it, too."""
        named = (name for name in self.options if name not in PACKED)
        return (*(("softcap",) if self.softcap else ()), *named, *(("dropout",) if self.dropout else ()), *((PACKED_FEATURE,) if self.packed else ()))

    @property
    def gradients(self) -> tuple[str, ...]:
        """Inputs that have gradients, in the order in which they are returned."""
        return NEEDS + tuple(name for name in self.options if name in DIFFERENTIABLE_OPTIONS)

    def _option(self, name):
        """(shape, dtype) of one of `OPTIONS` or `PACKED`, None when the problem has none."""
        return {
            "mask": self.mask and (self.mask, "bool"),
            "block_mask": self.block_mask and (self.block_mask, "int32"),
            "bias": self.bias and (self.bias, self.bias_dtype),
            "alibi_slopes": self.alibi and (self.alibi, "float32"),
            "sinks": ((self.heads,), self.lse_dtype) if self.sinks else None,
            "seqlens_q": self.seqlens_q and ((self.batch,), self.seqlens_q),
            "seqlens_k": self.seqlens_k and ((self.batch,), self.seqlens_k),
            "cu_seqlens_q": self.cu_seqlens_q and ((self.batch + 1,), self.cu_seqlens_q),
            "cu_seqlens_k": self.cu_seqlens_k and ((self.batch + 1,), self.cu_seqlens_k),
        }[name]

    def shape_of(self, operand: str) -> tuple[int, ...]:
        """Shape of an operand of a forward or backward call but the workspace, a gradient too; mask and bias with all 4 axes, block masks with 3,
        ALiBi slopes with 2."""
        name = _primal(operand)
        return self._present_option(name)[0] if name in OPTIONS + PACKED else getattr(self, f"{name}_shape")

    def dtype_of(self, operand: str) -> str:
        """Element type of an operand."""
        name = _primal(operand)
        return self._present_option(name)[1] if name in OPTIONS + PACKED else self.lse_dtype if name == "lse" else self.dtype

    def _present_option(self, name):
        found = self._option(name)
        if found is None:
            raise ValueError(f"the problem has no {name}")
        return found

    @property
    def sees_nothing(self) -> bool:
        """There is no pair of a query and a key, whatever masks and lengths hold: every gradient is 0 or has no element.

        Not so with sinks: without keys they are the whole softmax, so ``dlse`` reaches them.
        """
        return self.is_empty or not (self.rows_k or self.sinks) or (self.packed and not self.batch)

    @property
    def visible_pairs(self) -> int:
        """Number of (query, key) pairs a head computes, the basis of every FLOP count: those in the band of a batch entry of full lengths. Masks and
        lengths, which the host does not know, leave at most as many; so do the boundaries of packed sequences no longer than expected."""
        if self.left is None and self.right is None:
            return self.seqlen_q * self.seqlen_k
        return sum(max(0, hi - lo) for lo, hi in (self._keys(query, self.offset, self.offset) for query in range(self.seqlen_q)))

    def key_range(self, query: int) -> tuple[int, int]:
        """First key that a query may see, and one past the last (an empty range when it sees none): with lengths or a mask, no key outside is
        visible in any batch entry; which ones inside are, only the device knows."""
        if not self.offset_per_entry:
            return self._keys(query, self.offset, self.offset)
        shortest_q = query + 1 if self.seqlens_q else self.seqlen_q  # of the entries that have this query
        return self._keys(query, (0 if self.seqlens_k else self.seqlen_k) - self.seqlen_q, self.seqlen_k - shortest_q)

    def _keys(self, query, first_offset, last_offset):
        """Keys in the band of a query, for any offset from the first to the last."""
        lo = 0 if self.left is None else max(0, query + first_offset - self.left)
        hi = self.seqlen_k if self.right is None else min(self.seqlen_k, query + last_offset + self.right + 1)
        return lo, max(lo, hi)


def _primal(operand):
    """A gradient has the shape and element type of what it is the gradient of."""
    return operand.removeprefix("d")


def make_problem(
    q_shape,
    k_shape,
    v_shape,
    dtypes,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    mask=None,
    block_mask=None,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0.0,
    seqlens_q=None,
    seqlens_k=None,
) -> Problem:
    """Check the user's arguments and describe the problem.

    Parameters
    ----------
    q_shape, k_shape, v_shape : tuple of int
    dtypes : sequence of str
        dtype names of q, k and v.
    scale, causal, window
        As `numbaflash.forward` takes them.
    softcap : float, optional
        Finite and positive. 0 is refused: some libraries mean "no cap" by it, yet the formula's limit at 0 makes every score 0.
    mask, block_mask, bias, alibi_slopes, sinks, seqlens_q, seqlens_k : (tuple of int, str), optional
        Shape and dtype of these arrays: block_mask that of `numbaflash.BlockMask.words`, mask bool and bias a float, of up to 4 axes that broadcast
        to (batch, heads, seqlen_q, seqlen_k), heads being those of q; alibi_slopes float32, (heads,) or (batch, heads); sinks float32 (float64 for
        float64), (heads,); lengths int32 or int64, (batch,).
    dropout : float, optional
        From 0 to below 1, taken to the nearest multiple of 2**-16 (but never to 0 or 1), of which results are exactly unbiased.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    """
    dtype = _check_dtypes(dtypes)
    _check_axes("q", q_shape, "(batch, seqlen_q, heads, head_dim)")
    _check_axes("k", k_shape, "(batch, seqlen_k, kv_heads, head_dim)")
    _check_axes("v", v_shape, "(batch, seqlen_k, kv_heads, head_dim_v)")
    batch, seqlen_q, heads, head_dim = (int(n) for n in q_shape)
    _, seqlen_k, kv_heads, _ = (int(n) for n in k_shape)
    head_dim_v = int(v_shape[3])
    _check_equal("batch (axis 0)", "k", k_shape[0], "q", batch)
    _check_equal("batch (axis 0)", "v", v_shape[0], "q", batch)
    _check_equal("head_dim (axis 3)", "k", k_shape[3], "q", head_dim)
    _check_equal("seqlen_k (axis 1)", "v", v_shape[1], "k", seqlen_k)
    _check_equal("kv_heads (axis 2)", "v", v_shape[2], "k", kv_heads)
    _check_heads(heads, kv_heads)
    _check_sizes(3, head_dim, head_dim_v, 1, seqlen_q, seqlen_k)
    full = (batch, heads, seqlen_q, seqlen_k)
    mask = None if mask is None else _check_mask(mask, full)
    block_mask = None if block_mask is None else _check_block_mask(block_mask, full, mask)
    bias, bias_dtype = (None, None) if bias is None else _check_bias(bias, full, dtype)
    alibi = None if alibi_slopes is None else _check_slopes(alibi_slopes, batch, heads)
    lengths = {name: given and _check_lengths(name, given, batch) for name, given in (("seqlens_q", seqlens_q), ("seqlens_k", seqlens_k))}
    offset, left, right = _band(seqlen_q, seqlen_k, causal, window, alibi is not None)
    placed = alibi is not None or left is not None or right is not None
    scale = _check_range(check_scale(scale, head_dim), dtype)
    return Problem(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
        offset=offset,
        left=left,
        right=right,
        offset_per_entry=placed and any(lengths.values()) and check_causal(causal) != "top_left" and 0 not in (seqlen_q, seqlen_k),
        softcap=_check_softcap_range(check_softcap(softcap), scale, dtype),
        mask=mask,
        block_mask=block_mask,
        bias=bias,
        bias_dtype=bias_dtype,
        alibi=alibi,
        sinks=sinks is not None and _check_sinks(sinks, heads, dtype),
        dropout=check_dropout(dropout),
        **lengths,
    )


def make_packed_problem(
    q_shape,
    k_shape,
    v_shape,
    dtypes,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0.0,
) -> Problem:
    """The same for packed sequences.

    Parameters
    ----------
    q_shape, k_shape, v_shape : tuple of int
        (total_q, heads, head_dim), (total_k, kv_heads, head_dim) and (total_k, kv_heads, head_dim_v).
    dtypes : sequence of str
        dtype names of q, k and v.
    cu_seqlens_q, cu_seqlens_k : (tuple of int, str)
        Shape and dtype: (batch + 1,), int32 or int64.
    max_seqlen_q, max_seqlen_k : int, optional
        How long the longest sequence is, as far as the caller knows.
    scale, causal, window, softcap, dropout
        As `make_problem` takes them.
    alibi_slopes, sinks : (tuple of int, str), optional
        Likewise; a batch entry is a sequence.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    """
    dtype = _check_dtypes(dtypes)
    _check_axes("q", q_shape, "(total_q, heads, head_dim)")
    _check_axes("k", k_shape, "(total_k, kv_heads, head_dim)")
    _check_axes("v", v_shape, "(total_k, kv_heads, head_dim_v)")
    total_q, heads, head_dim = (int(n) for n in q_shape)
    total_k, kv_heads, _ = (int(n) for n in k_shape)
    head_dim_v = int(v_shape[2])
    _check_equal("head_dim (axis 2)", "k", k_shape[2], "q", head_dim)
    _check_equal("total_k (axis 0)", "v", v_shape[0], "k", total_k)
    _check_equal("kv_heads (axis 1)", "v", v_shape[1], "k", kv_heads)
    _check_heads(heads, kv_heads)
    _check_sizes(2, head_dim, head_dim_v, 0, total_q, total_k)
    batch = _check_boundaries(cu_seqlens_q, cu_seqlens_k)
    seqlen_q, seqlen_k = (
        -(-total // max(batch, 1)) if given is None else min(check_max_seqlen(name, given), total)
        for name, given, total in (("max_seqlen_q", max_seqlen_q, total_q), ("max_seqlen_k", max_seqlen_k, total_k))
    )
    alibi = None if alibi_slopes is None else _check_slopes(alibi_slopes, batch, heads)
    # No sequence brings a pair further from its place than one of all rows would.
    _, left, right = _band(total_q, total_k, causal, window)
    placed = alibi is not None or left is not None or right is not None
    per_entry = placed and check_causal(causal) != "top_left" and 0 not in (total_q, total_k)
    scale = _check_range(check_scale(scale, head_dim), dtype)
    return Problem(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
        offset=seqlen_k - seqlen_q if per_entry else 0,
        left=left,
        right=right,
        offset_per_entry=per_entry,
        softcap=_check_softcap_range(check_softcap(softcap), scale, dtype),
        alibi=alibi,
        sinks=sinks is not None and _check_sinks(sinks, heads, dtype),
        dropout=check_dropout(dropout),
        cu_seqlens_q=cu_seqlens_q[1],
        cu_seqlens_k=cu_seqlens_k[1],
        total_q=total_q,
        total_k=total_k,
    )


def _check_boundaries(cu_seqlens_q, cu_seqlens_k) -> int:
    """The number of sequences."""
    for name, (shape, dtype) in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if dtype not in LENGTH_DTYPES:
            raise TypeError(f"{name} must be int32 or int64; got dtype {dtype}")
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"{name} must have shape (batch + 1,): where each sequence begins, and where the last one ends; got {tuple(shape)}")
    (n_q,), (n_k,) = cu_seqlens_q[0], cu_seqlens_k[0]
    if n_q != n_k:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one shape, (batch + 1,); got {(n_q,)} and {(n_k,)}")
    if n_q - 1 > MAX_SEQLEN:
        raise ValueError(f"there must be at most {MAX_SEQLEN} sequences; got {n_q - 1}")
    return int(n_q) - 1


def check_max_seqlen(name: str, value) -> int | None:
    """How long the longest sequence is, as far as the caller knows."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer or None (not known); got {value!r}") from None
    if number < 0:
        raise ValueError(f"{name} must not be negative (None is not known); got {number}")
    return number


def check_boundaries(name: str, values, total: int, max_seqlen=None) -> None:
    """Check the values of ``cu_seqlens_q`` or ``cu_seqlens_k``, which only the device knows.

    Raises
    ------
    ValueError
        Where they do not begin with 0, descend, or end beyond the rows, or a sequence is longer than ``max_seqlen``.
    """
    values = [int(n) for n in values]
    if values[0] != 0:
        raise ValueError(f"{name} must begin with 0; got {values[0]}")
    for b, (first, end) in enumerate(zip(values, values[1:], strict=False)):
        if end < first:
            raise ValueError(f"{name} must not descend; got {first} followed by {end} (elements {b} and {b + 1})")
        if max_seqlen is not None and end - first > max_seqlen:
            raise ValueError(f"max_seqlen_{name[-1]} must be at least the longest length; got {max_seqlen}, and sequence {b} has {end - first}")
    if values[-1] > total:
        raise ValueError(f"{name} must end within the {total} rows of {'q' if name[-1] == 'q' else 'k and v'}; got {values[-1]}")


def _check_axes(name, shape, axes):
    count = axes.count(",") + 1
    if len(shape) != count:
        raise ValueError(f"{name} must have {count} axes {axes}; got {len(shape)} axes, shape {tuple(shape)}")
    if min(shape) < 0:  # no array has such a shape, but a person may type one
        raise ValueError(f"{name} must have no negative size {axes}; got shape {tuple(shape)}")


def _check_heads(heads, kv_heads):
    if (kv_heads == 0 and heads != 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"heads of q must be a multiple of the heads of k and v (grouped-query attention); got {heads} query heads and {kv_heads} key/value heads"
        )


def _check_sizes(dim_axis, head_dim, head_dim_v, row_axis, rows_q, rows_k):
    for name, n in (("q", head_dim), ("v", head_dim_v)):
        if not 1 <= n <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must have a head dim (axis {dim_axis}) from 1 to {MAX_HEAD_DIM}; got {n}")
    for name, n in (("q", rows_q), ("k", rows_k)):
        if n > MAX_SEQLEN:
            raise ValueError(f"{name} must have at most {MAX_SEQLEN} rows (axis {row_axis}); got {n}")


def _check_dtypes(dtypes) -> str:
    for name, dtype in zip("qkv", dtypes, strict=True):
        if dtype not in DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(DTYPES)}; got dtype {dtype}")
    if len(set(dtypes)) > 1:
        raise TypeError(f"q, k and v must have one dtype; got {', '.join(dtypes)}. Cast them to the same dtype first")
    return dtypes[0]


def _check_equal(axis, name, got, other, want):
    if got != want:
        raise ValueError(f"{name} must have the same {axis} as {other}; got {got}, expected {want}")


def check_scale(scale, head_dim) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):  # an array is refused: reading it could wait for a device
        raise TypeError(f"scale must be a real number or None (1/sqrt(head_dim)); got {scale!r}")
    try:
        value = float(scale)
    except OverflowError:  # without its digits, which Python may refuse to print
        raise ValueError("scale must be finite; got a number beyond the range of float64") from None
    if not math.isfinite(value):
        raise ValueError(f"scale must be finite; got {scale!r}")
    return value


def _check_range(scale: float, dtype: str) -> float:
    """Kernels hold scale * log2(e) in the dtype of the scores."""
    scores = "float64" if dtype == "float64" else "float32"
    most = MAX_SCALE[scores]
    if abs(scale) > most:
        raise ValueError(f"scale must be from -{most:.4g} to {most:.4g} for {dtype}, whose scores are computed in {scores}; got {scale!r}")
    return scale


def check_softcap(softcap) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a real number or None (no cap); got {softcap!r}")
    try:
        value = float(softcap)
    except OverflowError:
        raise ValueError("softcap must be finite and positive; got a number beyond the range of float64") from None
    if not (math.isfinite(value) and value > 0):
        hint = ". None is no cap" if value == 0 else ""
        raise ValueError(f"softcap must be finite and positive; got {softcap!r}{hint}")
    return value


def _check_softcap_range(softcap, scale, dtype):
    if softcap is None or dtype == "float64":
        return softcap
    most = MAX_SCALE["float32"]
    if not MIN_SOFTCAP <= softcap <= most:
        raise ValueError(f"softcap must be from {MIN_SOFTCAP:.4g} to {most:.4g} for {dtype}, whose scores are computed in float32; got {softcap!r}")
    if abs(scale) / softcap > most:
        raise ValueError(f"scale / softcap must be at most {most:.4g} for {dtype}; got scale {scale!r} and softcap {softcap!r}")
    return softcap


def check_dropout(dropout) -> float:
    """The probability as it is drawn: the nearest multiple of 2**-16 that is neither 0 nor 1, and 0 for 0."""
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise TypeError(f"dropout must be a real number, the probability of a weight to be dropped; got {dropout!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout!r}")
    return min(max(round(float(dropout) * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1) / DROPOUT_STEPS if dropout else 0.0


def check_seed(seed, dropout: float) -> int:
    """The 64-bit seed of a dropout mask; without dropout it may be None.

    Raises
    ------
    TypeError
        For anything but an integer on the host: reading an array could wait for a device.
    ValueError
        For one that has no 64 bits, and for None with dropout.
    """
    if seed is None:
        if dropout:
            raise ValueError("dropout needs a seed, an integer that is a new one for each call and the same for its backward; got seed=None")
        return 0
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an integer; got {seed!r}")
    value = int(seed)
    if not 0 <= value < 2**64:
        raise ValueError(f"seed must be at least 0 and below 2**64; got {seed!r}")
    return value


def _check_broadcast(name, shape, full) -> tuple[int, int, int, int]:
    """The shape with all 4 axes."""
    shape = tuple(int(n) for n in shape)
    if len(shape) > 4:
        raise ValueError(f"{name} must have at most 4 axes (batch, heads, seqlen_q, seqlen_k); got {len(shape)} axes, shape {shape}")
    padded = (1,) * (4 - len(shape)) + shape
    if any(n not in (1, m) for n, m in zip(padded, full, strict=True)):
        raise ValueError(f"{name} must broadcast to (batch, heads, seqlen_q, seqlen_k) = {full}, heads being those of q; got shape {shape}")
    return padded


def _check_mask(mask, full):
    shape, dtype = mask
    if dtype != "bool":
        hint = "Numbers that are added to the scores are a bias" if "float" in dtype else "Compare it with 0 first: mask != 0"
        raise TypeError(f"mask must be bool, True where a query may see a key; got dtype {dtype}. {hint}")
    return _check_broadcast("mask", shape, full)


def _check_block_mask(block_mask, full, mask):
    shape, dtype = tuple(int(n) for n in block_mask[0]), block_mask[1]
    if mask is not None:
        raise ValueError("mask must be an array of bool or a BlockMask; got both")
    batch, heads, seqlen_q, seqlen_k = full
    granules = -(-seqlen_q // GRANULE) * -(-seqlen_k // GRANULE)
    fits = len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2] >= granules
    if dtype != "int32" or not fits:
        raise ValueError(f"mask must be a BlockMask that broadcasts to (batch, heads, seqlen_q, seqlen_k) = {full}; got words {shape} of {dtype}")
    return shape


def _check_bias(bias, full, dtype):
    shape, own = bias
    allowed = DTYPES if dtype == "float64" else DTYPES[:3]
    if own not in allowed:
        hint = ". Pass what hides keys as mask" if own == "bool" else ""
        raise TypeError(f"bias must be one of {', '.join(allowed)} for q of {dtype}; got dtype {own}{hint}")
    return _check_broadcast("bias", shape, full), own


def _check_slopes(slopes, batch, heads):
    shape, dtype = slopes
    if dtype != "float32":
        raise TypeError(f"alibi_slopes must be float32; got dtype {dtype}")
    if tuple(shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes must have shape (heads,) = {(heads,)} or (batch, heads) = {(batch, heads)}; got {tuple(shape)}")
    return (1, heads) if len(shape) == 1 else (batch, heads)


def _check_sinks(sinks, heads, dtype) -> bool:
    shape, own = sinks
    want = "float64" if dtype == "float64" else "float32"
    if own != want:
        raise TypeError(f"sinks must be {want} for q of {dtype}; got dtype {own}")
    if tuple(shape) != (heads,):
        raise ValueError(f"sinks must have shape (heads,) = {(heads,)}; got {tuple(shape)}")
    return True


def _check_lengths(name, lengths, batch) -> str:
    shape, dtype = lengths
    if dtype not in LENGTH_DTYPES:
        raise TypeError(f"{name} must be int32 or int64; got dtype {dtype}")
    if tuple(shape) != (batch,):
        raise ValueError(f"{name} must have shape (batch,) = {(batch,)}; got {tuple(shape)}")
    return dtype


def check_flag(name, value) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name} must be True or False; got {value!r}")


def check_causal(causal):
    if isinstance(causal, str):
        if causal == "top_left":
            return causal
    elif isinstance(causal, bool) or type(causal).__name__ in ("bool_", "bool"):
        return bool(causal)
    raise ValueError(f'causal must be False, True (bottom-right) or "top_left"; got {causal!r}')


def check_window(window):
    if window is None:
        return None, None
    try:
        if isinstance(window, (bytes, bytearray, Set, Mapping)):  # pairs of integers to Python, but never meant as one
            raise TypeError
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window must be None or a pair (left, right); got {window!r}") from None
    sides = []
    for side, value in (("left", left), ("right", right)):
        if value is not None:
            try:
                if isinstance(value, bool):
                    raise TypeError
                value = operator.index(value)
            except TypeError:
                raise TypeError(f"window {side} must be an integer or None (unbounded); got {value!r}") from None
            if value < 0:
                raise ValueError(f"window {side} must not be negative (None is unbounded, (w, 0) sees w + 1 keys); got {value}")
        sides.append(value)
    return tuple(sides)


def _band(seqlen_q, seqlen_k, causal, window, placed=False):
    """(offset, left, right); a bound that excludes no pair becomes None, so it costs nothing and fits int32.

    Shorter lengths bring no pair further from its place than full lengths do, so what excludes nothing there never does. ``placed`` keeps the
    offset for ALiBi.
    """
    causal = check_causal(causal)
    left, right = check_window(window)
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and left >= seqlen_q - 1 + offset:
        left = None
    if right is not None and right >= seqlen_k - 1 - offset:
        right = None
    if left is None and right is None and not placed:
        offset = 0
    elif not seqlen_q or not seqlen_k:
        offset, left, right = 0, None, None
    return offset, left, right


def check_needs(needs, options=()) -> tuple[str, ...]:
    """The inputs whose gradients are wanted, in the order q, k, v, bias, sinks. The last two only where they are among the options of the call."""
    if isinstance(needs, (str, bytes, Mapping)):
        raise TypeError(f'needs must be a tuple of "q", "k" and "v"; got {needs!r}')
    try:
        names = list(needs)
    except TypeError:
        raise TypeError(f'needs must be a tuple of "q", "k" and "v"; got {needs!r}') from None
    allowed = tuple(name for name in DIFFERENTIABLE if name in NEEDS or name in options)
    for name in names:
        if isinstance(name, str) and name in DIFFERENTIABLE_OPTIONS and name not in allowed:
            raise ValueError(f'needs holds "{name}", but no {name} was given; got needs={needs!r}')
        if not isinstance(name, str) or name not in allowed:
            listed = ", ".join(f'"{each}"' for each in allowed[:-1])
            raise ValueError(f'needs must hold nothing but {listed} and "{allowed[-1]}"; got {name!r}')
    return tuple(name for name in allowed if name in names)


def check_needed(name: str, needs: tuple[str, ...]) -> None:
    """A gradient that the caller gives an array for (``dq=``, ...) must be one that is wanted."""
    if name not in needs:
        raise ValueError(f'd{name} was given, but "{name}" is not in needs; got needs={needs!r}. Add it, or leave d{name} out')


def gradient_missing(name: str, instead: str) -> UnsupportedError:
    """The error for an array that would be differentiated and has no gradient; ``instead`` is what to pass in its place."""
    return UnsupportedError(f"{name} requires a gradient, which numbaflash.attention does not compute. Pass {instead}")


def check_saved(name, shape, dtype, *, want_shape, want_dtype):
    """Check an input of the backward that must fit q, k and v: dout, out, lse or dlse."""
    origin = {"out": ", as numbaflash.forward returned it for this q, k and v", "lse": ", as numbaflash.forward returned it for this q, k and v"}.get(
        name, f", as {name.removeprefix('d')} has"
    )
    if dtype != want_dtype:
        raise TypeError(f"{name} must have dtype {want_dtype}{origin}; got {dtype}")
    if tuple(shape) != tuple(want_shape):
        raise ValueError(f"{name} must have shape {tuple(want_shape)}{origin}; got {tuple(shape)}")


def check_result(name, shape, dtype, *, want_shape, want_dtype, readonly):
    """Check an output array that the caller hands in (``out=``, ``lse=``, or a gradient)."""
    if dtype != want_dtype:
        raise TypeError(f"{name} must have dtype {want_dtype}; got {dtype}")
    if tuple(shape) != tuple(want_shape):
        raise ValueError(f"{name} must have shape {tuple(want_shape)}; got {tuple(shape)}")
    if readonly:
        raise ValueError(f"{name} must be writable; got a read-only array")


def trim_keys(problem: Problem) -> tuple[Problem, int]:
    """The same problem over only those keys that some query may see, and the number of keys before them.

    What no query may see then lies outside the problem: whatever it holds cannot reach a result. A mask and a bias are cut like the keys (their
    shapes here say so); dropout goes on counting keys from the first of all. Where the place of a query depends on lengths, or sequences are packed,
    nothing is cut.
    """
    if not problem.seqlen_q or not problem.seqlen_k or problem.offset_per_entry or problem.packed:
        return problem, 0
    first = 0 if problem.left is None else min(max(0, problem.offset - problem.left), problem.seqlen_k)
    end = problem.seqlen_k if problem.right is None else max(0, min(problem.seqlen_k, problem.seqlen_q + problem.offset + problem.right))
    end = max(first, end)

    def cut(shape):
        return shape if shape is None or shape[3] == 1 else (*shape[:3], end - first)

    return replace(problem, seqlen_k=end - first, offset=problem.offset - first, mask=cut(problem.mask), bias=cut(problem.bias)), first
