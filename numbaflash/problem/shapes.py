"""Checks of arrays by shape and dtype."""

from __future__ import annotations

from .names import DTYPES, GRANULE, LENGTH_DTYPES, MAX_HEAD_DIM, MAX_PAGES, MAX_SEQLEN


def check_dtypes(dtypes, names=("q", "k", "v")) -> str:
    for name, dtype in zip(names, dtypes, strict=True):
        if dtype not in DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(DTYPES)}; got dtype {dtype}")
    if len(set(dtypes)) > 1:
        q, k, v = names
        raise TypeError(f"{q}, {k} and {v} must have one dtype; got {', '.join(dtypes)}. Cast them to the same dtype first")
    return dtypes[0]


def check_axes(name, shape, axes):
    count = axes.count(",") + 1
    if len(shape) != count:
        raise ValueError(f"{name} must have {count} axes {axes}; got {len(shape)} axes, shape {tuple(shape)}")
    if min(shape) < 0:  # no array has such a shape, but a person may type one
        raise ValueError(f"{name} must have no negative size {axes}; got shape {tuple(shape)}")


def check_equal(axis, name, got, other, want):
    if got != want:
        raise ValueError(f"{name} must have the same {axis} as {other}; got {got}, expected {want}")


def check_heads(heads, kv_heads):
    if (kv_heads == 0 and heads != 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"heads of q must be a multiple of the heads of k and v (grouped-query attention); got {heads} query heads and {kv_heads} key/value heads"
        )


def check_sizes(dim_axis, head_dim, head_dim_v, row_axis, rows_q, rows_k):
    check_head_dims(dim_axis, {"q": head_dim, "v": head_dim_v}, MAX_HEAD_DIM)
    for name, n in (("q", rows_q), ("k", rows_k)):
        if n > MAX_SEQLEN:
            raise ValueError(f"{name} must have at most {MAX_SEQLEN} rows (axis {row_axis}); got {n}")


def check_head_dims(axis, dims, most):
    for name, n in dims.items():
        if not 1 <= n <= most:
            raise ValueError(f"{name} must have a head dim (axis {axis}) from 1 to {most}; got {n}")


def check_mask(mask, full):
    shape, dtype = mask
    if dtype != "bool":
        hint = "Numbers that are added to the scores are a bias" if "float" in dtype else "Compare it with 0 first: mask != 0"
        raise TypeError(f"mask must be bool, True where a query may see a key; got dtype {dtype}. {hint}")
    return check_broadcast("mask", shape, full)


def check_block_mask(block_mask, full, mask):
    shape, dtype = tuple(int(n) for n in block_mask[0]), block_mask[1]
    if mask is not None:
        raise ValueError("mask must be an array of bool or a BlockMask; got both")
    batch, heads, seqlen_q, seqlen_k = full
    granules = -(-seqlen_q // GRANULE) * -(-seqlen_k // GRANULE)
    fits = len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2] >= granules
    if dtype != "int32" or not fits:
        raise ValueError(f"mask must be a BlockMask that broadcasts to (batch, heads, seqlen_q, seqlen_k) = {full}; got words {shape} of {dtype}")
    return shape


def check_bias(bias, full, dtype):
    shape, own = bias
    allowed = DTYPES if dtype == "float64" else DTYPES[:3]
    if own not in allowed:
        hint = ". Pass what hides keys as mask" if own == "bool" else ""
        raise TypeError(f"bias must be one of {', '.join(allowed)} for q of {dtype}; got dtype {own}{hint}")
    return check_broadcast("bias", shape, full), own


def check_broadcast(name, shape, full) -> tuple[int, int, int, int]:
    """The shape with all 4 axes."""
    shape = tuple(int(n) for n in shape)
    if len(shape) > 4:
        raise ValueError(f"{name} must have at most 4 axes (batch, heads, seqlen_q, seqlen_k); got {len(shape)} axes, shape {shape}")
    padded = (1,) * (4 - len(shape)) + shape
    if any(n not in (1, m) for n, m in zip(padded, full, strict=True)):
        raise ValueError(f"{name} must broadcast to (batch, heads, seqlen_q, seqlen_k) = {full}, heads being those of q; got shape {shape}")
    return padded


def check_slopes(slopes, batch, heads):
    shape, dtype = slopes
    if dtype != "float32":
        raise TypeError(f"alibi_slopes must be float32; got dtype {dtype}")
    if tuple(shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes must have shape (heads,) = {(heads,)} or (batch, heads) = {(batch, heads)}; got {tuple(shape)}")
    return (1, heads) if len(shape) == 1 else (batch, heads)


def check_sinks(sinks, heads, dtype) -> bool:
    shape, own = sinks
    want = "float64" if dtype == "float64" else "float32"
    if own != want:
        raise TypeError(f"sinks must be {want} for q of {dtype}; got dtype {own}")
    if tuple(shape) != (heads,):
        raise ValueError(f"sinks must have shape (heads,) = {(heads,)}; got {tuple(shape)}")
    return True


def check_lengths(name, lengths, batch) -> str:
    shape, dtype = lengths
    if dtype not in LENGTH_DTYPES:
        raise TypeError(f"{name} must be int32 or int64; got dtype {dtype}")
    if tuple(shape) != (batch,):
        raise ValueError(f"{name} must have shape (batch,) = {(batch,)}; got {tuple(shape)}")
    return dtype


def check_page_table(page_table, batch, pages) -> int:
    """Entries that each sequence has."""
    shape, dtype = page_table
    if dtype != "int32":
        raise TypeError(f"page_table must be int32; got dtype {dtype}")
    if len(shape) != 2 or shape[0] != batch:
        raise ValueError(f"page_table must have shape (batch, max_pages), batch being q's {batch}; got {tuple(shape)}")
    if pages > MAX_PAGES:
        raise ValueError(f"k_cache must have at most {MAX_PAGES} pages (axis 0), which page_table counts in int32; got {pages}")
    return int(shape[1])


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
