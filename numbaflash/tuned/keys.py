"""Which problems share a tuned choice, and on which device."""

from __future__ import annotations

import functools
import platform
from contextlib import suppress


def key_of(problem, layouts, device, how: tuple = ()) -> str:
    """The key of a problem: words that say all that a choice of tiles depends on, lengths and numbers of heads up to powers of two.

    Parameters
    ----------
    problem : Problem
    layouts : Layouts or BackwardLayouts
    device : Device
    how : tuple
        As in `numbaflash.tuned.find`.
    """
    p = problem
    words = [
        p.dtype,
        f"d{p.head_dim}" if p.head_dim == p.head_dim_v else f"d{p.head_dim}:{p.head_dim_v}",
        f"group{p.group}",
        _band(p),
        f"q{bucket(p.seqlen_q)}",
        f"k{bucket(p.seqlen_k)}",
        f"columns{bucket(p.batch * p.kv_heads)}",
        *sorted(p.features),
    ]
    if p.bias_dtype is not None:
        words.append(f"bias:{p.bias_dtype}")
    if p.paged:
        words.append(f"page{p.page_size}")
    if hasattr(layouts, "dout"):
        wanted = [name for name in ("dq", "dk", "dv", "dbias", "dsinks") if getattr(layouts, name) is not None]
        words.append(",".join(wanted))
        if any(how) and device.kind != "cpu":
            words.append("deterministic")
    elif any(n is not None for n in how):
        words.append(f"splits{how[0]}")
    if device.kind == "cpu":
        import numba

        words.append(f"threads{numba.get_num_threads()}")
    return " ".join(words)


def bucket(n: int) -> int:
    """The least power of two that is not below a number; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def _band(p) -> str:
    if p.left is None and p.right is None:
        return "full"
    bounds = "causal" if (p.left, p.right) == (None, 0) else f"window{_bound(p.left)}:{_bound(p.right)}"
    aligned = p.offset_per_entry or p.offset == p.seqlen_k - p.seqlen_q
    return bounds if aligned else f"{bounds}@top_left" if p.offset == 0 else f"{bounds}@other"


def _bound(n) -> str:
    return "" if n is None else str(bucket(n))


def model_of(device) -> str:
    """What tables are kept by: the GPU as its driver calls it, or the processor as its system does."""
    return device.name if device.kind == "cuda" else _processor()


@functools.cache
def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"
