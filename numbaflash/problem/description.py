"""`Problem`: what is computed, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .names import DIFFERENTIABLE_OPTIONS, NEEDS, OPTIONS, PACKED, PACKED_FEATURE


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
        Probability of a weight to be dropped, a multiple of 2**-14; kept ones are divided by ``1 - dropout``. 0 is none. The seed is no part of
        the problem.
    seqlens_q, seqlens_k : str or None
        dtype of the (batch,) lengths, int32 or int64. Queries and keys from there on take no part; the values are known to the device alone.
    cu_seqlens_q, cu_seqlens_k : str or None
        dtype of the (batch + 1,) boundaries of packed sequences, int32 or int64; both or neither. ``batch`` counts the sequences, and ``seqlen_q``
        and ``seqlen_k`` are how long to expect one to be, by the caller's ``max_seqlen`` or on average: they choose tiles, no result depends on them.
    total_q, total_k : int
        Rows of packed arrays: q is (total_q, heads, head_dim), k (total_k, kv_heads, head_dim), v (total_k, kv_heads, head_dim_v), out
        (total_q, heads, head_dim_v), lse (heads, total_q). 0 where nothing is packed.
    pages, page_size, max_pages : int
        Of paged caches, 0 where there are none: k is (pages, page_size, kv_heads, head_dim), v (pages, page_size, kv_heads, head_dim_v), and key j of
        batch entry b lies in row ``j % page_size`` of page ``page_table[b, j // page_size]``; page_table is (batch, max_pages), int32. `seqlen_k` is
        the capacity, ``max_pages * page_size`` (0 without a page). Page numbers that are used and out of range count as the nearest one.
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
    pages: int = 0
    page_size: int = 0
    max_pages: int = 0

    @property
    def masked(self) -> bool:
        """There is a mask, of either kind."""
        return self.mask is not None or self.block_mask is not None

    @property
    def packed(self) -> bool:
        """Sequences lie one after the other in arrays without a batch axis."""
        return self.cu_seqlens_q is not None

    @property
    def paged(self) -> bool:
        """Keys and values lie in pages that sequences may share."""
        return self.page_size > 0

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
        if self.paged and operand == "k":
            return self.pages, self.page_size
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
            "page_table": ((self.batch, self.max_pages), "int32") if self.paged else None,
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


def trim_keys(problem: Problem) -> tuple[Problem, int]:
    """The same problem over only those keys that some query may see, and the number of keys before them.

    What no query may see then lies outside the problem: whatever it holds cannot reach a result. A mask and a bias are cut like the keys (their
    shapes here say so); dropout goes on counting keys from the first of all. Where the place of a query depends on lengths, sequences are packed or
    caches paged, nothing is cut.
    """
    if not problem.seqlen_q or not problem.seqlen_k or problem.offset_per_entry or problem.packed or problem.paged:
        return problem, 0
    first = 0 if problem.left is None else min(max(0, problem.offset - problem.left), problem.seqlen_k)
    end = problem.seqlen_k if problem.right is None else max(0, min(problem.seqlen_k, problem.seqlen_q + problem.offset + problem.right))
    end = max(first, end)

    def cut(shape):
        return shape if shape is None or shape[3] == 1 else (*shape[:3], end - first)

    return replace(problem, seqlen_k=end - first, offset=problem.offset - first, mask=cut(problem.mask), bias=cut(problem.bias)), first
