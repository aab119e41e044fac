"""What is appended to caches of keys and values: one frozen description, and every check of it."""

from __future__ import annotations

from dataclasses import dataclass

from .names import DTYPES, LENGTH_DTYPES, MAX_CACHE_HEAD_DIM, MAX_SEQLEN
from .shapes import check_axes, check_equal, check_head_dims, check_lengths, check_page_table

__all__ = ["Append", "make_append"]


@dataclass(frozen=True, slots=True)
class Append:
    """A validated `numbaflash.append_kv`.

    Attributes
    ----------
    dtype : str
        Of all arrays but cos, sin, the lengths and the page table.
    batch, tokens, heads, kv_heads, head_dim, head_dim_v : int
        k_new is (batch, tokens, kv_heads, head_dim), v_new (batch, tokens, kv_heads, head_dim_v), q (batch, tokens, heads, head_dim); ``heads`` is 0
        without q, and ``head_dim_v`` without values.
    lengths : str
        dtype of seqlens_k.
    capacity : int
        Keys of a sequence at most.
    pages, page_size : int
        0 where caches are contiguous.
    rotary_dim : int
        Leading columns of keys and queries that are rotated; 0 is none.
    positions : int
        Rows of cos and sin.
    interleaved : bool
        Pairs are neighbours, not columns half of ``rotary_dim`` apart.
    angles : str or None
        dtype of cos and sin.
    """

    dtype: str
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    lengths: str
    capacity: int
    pages: int = 0
    page_size: int = 0
    rotary_dim: int = 0
    positions: int = 0
    interleaved: bool = False
    angles: str | None = None

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch, self.tokens) or not (self.kv_heads or self.heads)


def make_append(given: dict, interleaved: bool) -> Append:
    """Check arrays by (shape, dtype), and describe what is appended.

    Parameters
    ----------
    given : dict
        Of k_new, k_cache and seqlens_k, both or none of v_new and v_cache, and those of page_table, q, cos and sin that there are.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape, or arguments that do not go together.
    """
    shapes, dtypes = ({name: each[i] for name, each in given.items()} for i in (0, 1))
    dtype = dtypes["k_new"]
    if dtype not in DTYPES:
        raise TypeError(f"k_new must be one of {', '.join(DTYPES)}; got dtype {dtype}")
    for name in ("v_new", "k_cache", "v_cache", "q"):
        if name in given and dtypes[name] != dtype:
            raise TypeError(f"{name} must have the dtype of k_new, {dtype}; got {dtypes[name]}")
    leading = "pages, page_size" if "page_table" in given else "batch, capacity"
    pairs = [("k", "head_dim"), *([("v", "head_dim_v")] if "v_new" in given else [])]
    for x, dim in pairs:
        check_axes(f"{x}_new", shapes[f"{x}_new"], f"(batch, tokens, kv_heads, {dim})")
        check_axes(f"{x}_cache", shapes[f"{x}_cache"], f"({leading}, kv_heads, {dim})")
    batch, tokens, kv_heads, head_dim = map(int, shapes["k_new"])
    check_head_dims(3, {f"{x}_new": int(shapes[f"{x}_new"][3]) for x, _ in pairs}, MAX_CACHE_HEAD_DIM)
    if tokens > MAX_SEQLEN:
        raise ValueError(f"k_new must have at most {MAX_SEQLEN} tokens (axis 1); got {tokens}")
    for x, _ in pairs:
        for axis, what in enumerate(("batch", "tokens", "kv_heads")):
            check_equal(f"{what} (axis {axis})", f"{x}_new", shapes[f"{x}_new"][axis], "k_new", shapes["k_new"][axis])
        check_equal("kv_heads (axis 2)", f"{x}_cache", shapes[f"{x}_cache"][2], f"{x}_new", kv_heads)
        check_equal("head dim (axis 3)", f"{x}_cache", shapes[f"{x}_cache"][3], f"{x}_new", shapes[f"{x}_new"][3])
        for axis, what in enumerate(leading.split(", ")):
            check_equal(f"{what} (axis {axis})", f"{x}_cache", shapes[f"{x}_cache"][axis], "k_cache", shapes["k_cache"][axis])
    first, second = map(int, shapes["k_cache"][:2])
    pages = page_size = 0
    if "page_table" in given:
        pages, page_size = first, second
        if not page_size:
            raise ValueError(
                f"k_cache must have pages of at least one key (axis 1) where there is a page_table; got shape {tuple(shapes['k_cache'])}"
            )
        capacity = check_page_table(given["page_table"], batch, pages) * page_size
    else:
        check_equal("batch (axis 0)", "k_cache", first, "k_new", batch)
        capacity = second
    if capacity > MAX_SEQLEN:
        raise ValueError(f"k_cache must have a capacity of at most {MAX_SEQLEN} keys; got {capacity}")
    if dtypes["seqlens_k"] not in LENGTH_DTYPES:
        raise TypeError(f"seqlens_k must be int32 or int64; got dtype {dtypes['seqlens_k']}")
    lengths = check_lengths("seqlens_k", given["seqlens_k"], batch)
    heads = 0
    if "q" in given:
        if "cos" not in given:
            raise ValueError("q was given without cos and sin; it is only rotated, so leave it out where there is nothing to rotate by")
        check_axes("q", shapes["q"], "(batch, tokens, heads, head_dim)")
        for axis, what in ((0, "batch"), (1, "tokens"), (3, "head_dim")):
            check_equal(f"{what} (axis {axis})", "q", shapes["q"][axis], "k_new", shapes["k_new"][axis])
        heads = int(shapes["q"][2])
    rotary = {}
    if ("cos" in given) != ("sin" in given):
        raise ValueError(f"cos and sin must be given together; got {'cos' if 'cos' in given else 'sin'} alone")
    if "cos" in given:
        rotary = _check_rotary(shapes, dtypes, dtype, head_dim, interleaved)
    return Append(
        dtype=dtype,
        batch=batch,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=int(shapes["v_new"][3]) if "v_new" in given else 0,
        lengths=lengths,
        capacity=capacity,
        pages=pages,
        page_size=page_size,
        **rotary,
    )


def _check_rotary(shapes, dtypes, dtype, head_dim, interleaved):
    full = "float64" if dtype == "float64" else "float32"
    for name in ("cos", "sin"):
        if dtypes[name] not in (full, dtype):
            raise TypeError(f"{name} must be {full}{'' if full == dtype else f' or {dtype}'} for keys of {dtype}; got dtype {dtypes[name]}")
        if len(shapes[name]) != 2:
            raise ValueError(f"{name} must have shape (positions, rotary_dim / 2); got {tuple(shapes[name])}")
    if dtypes["cos"] != dtypes["sin"] or tuple(shapes["cos"]) != tuple(shapes["sin"]):
        raise ValueError(
            f"cos and sin must have one shape and dtype; got {tuple(shapes['cos'])} of {dtypes['cos']} and {tuple(shapes['sin'])} of {dtypes['sin']}"
        )
    positions, half = map(int, shapes["cos"])
    if not half >= 1 or 2 * half > head_dim:
        raise ValueError(f"cos must have from 1 to head_dim / 2 = {head_dim // 2} columns, of which each turns two of a key; got {half}")
    return {"rotary_dim": 2 * half, "positions": positions, "interleaved": interleaved, "angles": dtypes["cos"]}
