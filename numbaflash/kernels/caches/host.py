"""New keys and values to the cache, on the CPU: NumPy, 16-bit elements as bits where bfloat16 has no dtype."""

from __future__ import annotations

import numpy as np

from ...problem.caches import Append


def append(what: Append, arrays: dict) -> None:
    """See `numbaflash.append_kv`.

    Parameters
    ----------
    what : Append
    arrays : dict of str to ndarray
        By argument, bfloat16 as uint16; "rotated" is where rotated queries go.
    """
    positions = np.asarray(arrays["seqlens_k"], np.int64)[:, None] + np.arange(what.tokens)
    limit = min(what.capacity, what.positions) if what.rotary_dim else what.capacity
    entry, token = np.nonzero((positions >= 0) & (positions < limit))
    position = positions[entry, token]
    if what.rotary_dim:
        cos, sin = (_floats(arrays[name], what.angles) for name in ("cos", "sin"))
    if what.heads:
        rotated = arrays["rotated"]
        rotated[...] = 0
        here = (positions >= 0) & (positions < what.positions)
        e, t = np.nonzero(here)
        rotated[e, t] = _rotate(what, arrays["q"][e, t], cos[positions[e, t]], sin[positions[e, t]])
    row, slot = entry, position
    if what.page_size:
        row, slot = arrays["page_table"][entry, position // what.page_size], position % what.page_size
        there = (row >= 0) & (row < what.pages)
        entry, token, position, row, slot = (x[there] for x in (entry, token, position, row, slot))
    keys = arrays["k_new"][entry, token]
    if what.rotary_dim:
        keys = _rotate(what, keys, cos[position], sin[position])
    arrays["k_cache"][row, slot] = keys
    if what.head_dim_v:
        arrays["v_cache"][row, slot] = arrays["v_new"][entry, token]


def _rotate(what, x, cos, sin):
    """Rows (n, heads, head_dim), turned by (n, rotary_dim / 2) angles, in float32 (float64 for float64)."""
    half, result = what.rotary_dim // 2, np.array(x)
    low, high = (slice(0, what.rotary_dim, 2), slice(1, what.rotary_dim, 2)) if what.interleaved else (slice(0, half), slice(half, 2 * half))
    one, other = _floats(x[..., low], what.dtype), _floats(x[..., high], what.dtype)
    cos, sin = cos[:, None], sin[:, None]
    with np.errstate(all="ignore"):
        result[..., low] = _elements(one * cos - other * sin, what.dtype)
        result[..., high] = _elements(other * cos + one * sin, what.dtype)
    return result


def _floats(x, dtype):
    if dtype == "bfloat16":
        return (np.asarray(x, np.uint32) << 16).view(np.float32)
    return x if dtype == "float64" else np.asarray(x, np.float32)


def _elements(x, dtype):
    """Rounded to nearest even."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
