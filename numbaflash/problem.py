"""What is computed: one frozen description of an attention problem, and every check of the user's arguments.

Arrays are known here only by shape and dtype name, so that the same checks and the same messages serve every array
library. The alignment of ``causal`` and ``window`` is settled here too: a kernel sees only the band

    ``i + offset - left <= j <= i + offset + right``

of keys ``j`` that query ``i`` may see, where a bound that excludes nothing is ``None``.
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
"""Inputs that have gradients."""

MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**30  # row and key numbers, and their sums with the offset, stay within int32
MAX_SCALE = {"float32": (2 - 2**-23) * 2.0**127 / math.log2(math.e), "float64": math.nextafter(sys.float_info.max / math.log2(math.e), 0)}
"""By the dtype that scores are computed in."""
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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
        Keys visible to the left and to the right of that place, inclusive; ``None`` where the bound excludes nothing.
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

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def is_empty(self) -> bool:
        """No output element: nothing to launch. (No *keys* is not empty: those rows are 0 and -inf.)"""
        return 0 in (self.batch, self.seqlen_q, self.heads)

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def q_shape(self):
        return (self.batch, self.seqlen_q, self.heads, self.head_dim)

    @property
    def k_shape(self):
        return (self.batch, self.seqlen_k, self.kv_heads, self.head_dim)

    @property
    def v_shape(self):
        return (self.batch, self.seqlen_k, self.kv_heads, self.head_dim_v)

    @property
    def out_shape(self):
        return (self.batch, self.seqlen_q, self.heads, self.head_dim_v)

    @property
    def lse_shape(self):
        return (self.batch, self.heads, self.seqlen_q)

    def shape_of(self, operand: str) -> tuple[int, ...]:
        """Shape of an operand of a forward or backward call, one of `numbaflash.dispatch.BACKWARD_OPERANDS` but the workspace."""
        return getattr(self, f"{_primal(operand)}_shape")

    def dtype_of(self, operand: str) -> str:
        """Element type of an operand."""
        return self.lse_dtype if _primal(operand) == "lse" else self.dtype

    @property
    def sees_nothing(self) -> bool:
        """There is no pair of a query and a key (where there are both, some query sees some key): every gradient is 0 or has no element."""
        return self.is_empty or not self.seqlen_k

    @property
    def visible_pairs(self) -> int:
        """Number of (query, key) pairs a head computes, the basis of every FLOP count."""
        if self.left is None and self.right is None:
            return self.seqlen_q * self.seqlen_k
        return sum(max(0, hi - lo) for lo, hi in map(self.key_range, range(self.seqlen_q)))

    def key_range(self, query: int) -> tuple[int, int]:
        """First visible key of a query, and one past its last (an empty range when it sees none)."""
        lo = 0 if self.left is None else max(0, query + self.offset - self.left)
        hi = self.seqlen_k if self.right is None else min(self.seqlen_k, query + self.offset + self.right + 1)
        return lo, max(lo, hi)


def _primal(operand):
    """A gradient has the shape and element type of what it is the gradient of."""
    return operand.removeprefix("d")


def make_problem(q_shape, k_shape, v_shape, dtypes, *, scale=None, causal=False, window=None) -> Problem:
    """Check the user's arguments and describe the problem.

    Parameters
    ----------
    q_shape, k_shape, v_shape : tuple of int
    dtypes : sequence of str
        dtype names of q, k and v.
    scale, causal, window
        As `numbaflash.forward` takes them.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value.
    """
    dtype = _check_dtypes(dtypes)
    for name, shape, axes in (
        ("q", q_shape, "(batch, seqlen_q, heads, head_dim)"),
        ("k", k_shape, "(batch, seqlen_k, kv_heads, head_dim)"),
        ("v", v_shape, "(batch, seqlen_k, kv_heads, head_dim_v)"),
    ):
        if len(shape) != 4:
            raise ValueError(f"{name} must have 4 axes {axes}; got {len(shape)} axes, shape {tuple(shape)}")
        if min(shape) < 0:  # no array has such a shape, but a person may type one
            raise ValueError(f"{name} must have no negative size {axes}; got shape {tuple(shape)}")
    batch, seqlen_q, heads, head_dim = (int(n) for n in q_shape)
    _, seqlen_k, kv_heads, _ = (int(n) for n in k_shape)
    head_dim_v = int(v_shape[3])
    _check_equal("batch (axis 0)", "k", k_shape[0], "q", batch)
    _check_equal("batch (axis 0)", "v", v_shape[0], "q", batch)
    _check_equal("head_dim (axis 3)", "k", k_shape[3], "q", head_dim)
    _check_equal("seqlen_k (axis 1)", "v", v_shape[1], "k", seqlen_k)
    _check_equal("kv_heads (axis 2)", "v", v_shape[2], "k", kv_heads)
    if (kv_heads == 0 and heads != 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"heads of q must be a multiple of the heads of k and v (grouped-query attention); got {heads} query heads and {kv_heads} key/value heads"
        )
    for name, n in (("q", head_dim), ("v", head_dim_v)):
        if not 1 <= n <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must have a head dim (axis 3) from 1 to {MAX_HEAD_DIM}; got {n}")
    for name, n in (("q", seqlen_q), ("k", seqlen_k)):
        if n > MAX_SEQLEN:
            raise ValueError(f"{name} must have at most {MAX_SEQLEN} rows (axis 1); got {n}")
    offset, left, right = _band(seqlen_q, seqlen_k, causal, window)
    return Problem(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=_check_range(check_scale(scale, head_dim), dtype),
        offset=offset,
        left=left,
        right=right,
    )


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


def _band(seqlen_q, seqlen_k, causal, window):
    """(offset, left, right); a bound that excludes no pair becomes None, so it costs nothing and fits int32."""
    causal = check_causal(causal)
    left, right = check_window(window)
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and left >= seqlen_q - 1 + offset:
        left = None
    if right is not None and right >= seqlen_k - 1 - offset:
        right = None
    if left is None and right is None:
        offset = 0
    elif not seqlen_q or not seqlen_k:
        offset, left, right = 0, None, None
    return offset, left, right


def check_needs(needs) -> tuple[str, ...]:
    """The inputs whose gradients are wanted, in the order q, k, v."""
    if isinstance(needs, (str, bytes, Mapping)):
        raise TypeError(f'needs must be a tuple of "q", "k" and "v"; got {needs!r}')
    try:
        names = list(needs)
    except TypeError:
        raise TypeError(f'needs must be a tuple of "q", "k" and "v"; got {needs!r}') from None
    for name in names:
        if not isinstance(name, str) or name not in NEEDS:
            raise ValueError(f'needs must hold nothing but "q", "k" and "v"; got {name!r}')
    return tuple(name for name in NEEDS if name in names)


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
    """The same problem over only those keys that some query sees, and the number of keys before them.

    What no query may see then lies outside the problem: whatever it holds cannot reach a result.
    """
    if not problem.seqlen_q or not problem.seqlen_k:
        return problem, 0
    first = 0 if problem.left is None else min(max(0, problem.offset - problem.left), problem.seqlen_k)
    end = problem.seqlen_k if problem.right is None else max(0, min(problem.seqlen_k, problem.seqlen_q + problem.offset + problem.right))
    end = max(first, end)
    return replace(problem, seqlen_k=end - first, offset=problem.offset - first), first
