"""`append_kv`: new keys and values to a cache, in place."""

from __future__ import annotations

import threading
from dataclasses import replace

from .arrays import ITEMSIZE, LIBRARIES, contiguous_strides, in_torch_compile, one_library
from .arrays import numpy as host
from .arrays.streams import stream_handle
from .call import MAX_CALLS, check_one_device, device_of
from .dispatch import APPEND_OPERANDS
from .memory import extent, overlaps, overlaps_itself
from .problem import check_cache_lengths, check_flag, check_page_numbers
from .problem.caches import make_append
from .switches import values_are_checked

__all__ = ["append_kv"]

_WRITTEN = ("k_cache", "v_cache")
_lock = threading.Lock()
_prepared: dict = {}


def append_kv(k_new, v_new, k_cache, v_cache, seqlens_k, page_table=None, *, q=None, cos=None, sin=None, interleaved=False, stream=None):
    """Write new keys and values of each sequence to its cache, after those that are there.

    Token i of ``k_new`` and ``v_new`` goes to position ``seqlens_k[b] + i`` of sequence b; `decode` then takes ``seqlens_k + tokens``. With ``cos``
    and ``sin``, keys (and ``q``) are first turned by their positions: rotary embedding, Su et al., "RoFormer" (2021).

    Parameters
    ----------
    k_new : array, (batch, tokens, kv_heads, head_dim)
        float16, bfloat16, float32 or float64, of any library that `decode` takes, any strides.
    v_new : array, (batch, tokens, kv_heads, head_dim_v)
    k_cache : array, (batch, capacity, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with ``page_table``
        Written in place; any strides that give each element its own place. JAX arrays are immutable: new caches are returned.
    v_cache : array, (batch, capacity, kv_heads, head_dim_v), or (pages, page_size, kv_heads, head_dim_v)
    seqlens_k : array of int32 or int64, (batch,)
        Keys of each sequence that are in the cache already, on the arrays' device; the host does not read them.
    page_table : array of int32, (batch, max_pages), optional
        As `decode` takes it; pages for the new tokens must be in it.
    q : array, (batch, tokens, heads, head_dim), optional
        Queries of the new tokens, to be turned likewise into a new array. Needs ``cos`` and ``sin``.
    cos, sin : array, (positions, rotary_dim / 2), optional
        Of each position's angles; float32 or the dtype of the keys (float64 for float64). The first ``rotary_dim`` columns of a key are turned, in
        float32 (float64 for float64) and rounded once.
    interleaved : bool, optional
        Columns 2 j and 2 j + 1 are a pair; otherwise columns j and j + rotary_dim / 2.
    stream : stream of CuPy, torch, Numba or CUDA Python, or int handle, optional
        CUDA stream to work on, as in `forward`.

    Returns
    -------
    rotated : array, (batch, tokens, heads, head_dim), or None
        q turned; None without q. With JAX arrays ``(k_cache, v_cache)`` or ``(k_cache, v_cache, rotated)``.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape, caches that are read-only or share memory with another array, several devices; with ``NUMBAFLASH_CHECK=1`` in the
        environment, for lengths beyond the capacity and page numbers that are no page, too.

    Notes
    -----
    A token whose position is below 0, past the capacity or past the rows of ``cos`` is left out, and so is one whose page number is no page: nothing
    is written elsewhere. The turned query of a position below 0 or past the rows of ``cos`` is 0. So a length of minus the tokens or less marks a
    sequence that takes no part.

    The host does not wait for the device and nothing but the turned queries is allocated, so that the call can be captured in a CUDA graph after
    one of its kind.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 6, 16, 2, 64), np.float32)  # six pages of 16 keys
    >>> pages, lengths = np.array([[4, 0], [2, 5]], np.int32), np.array([15, 3])
    >>> k, v = rng.standard_normal((2, 2, 2, 2, 64), dtype=np.float32)  # two tokens of two sequences
    >>> nf.append_kv(k, v, k_cache, v_cache, lengths, pages)
    >>> bool((k_cache[4, 15] == k[0, 0]).all() and (k_cache[0, 0] == k[0, 1]).all() and (v_cache[2, 4] == v[1, 1]).all())
    True
    """
    if in_torch_compile():
        from .torch import decoding as compiled

        more = {"q": q, "cos": cos, "sin": sin, "interleaved": interleaved, "stream": stream}
        return compiled.append_kv(k_new, v_new, k_cache, v_cache, seqlens_k, page_table, **more)
    arrays = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k}
    for name, x in arrays.items():
        if x is None:
            raise TypeError(f"{name} must be an array; got None")
    arrays |= {name: x for name, x in (("page_table", page_table), ("q", q), ("cos", cos), ("sin", sin)) if x is not None}
    library = one_library(**arrays)
    interleaved = check_flag("interleaved", interleaved)
    if library.append_kv is not None:
        return library.append_kv(arrays, interleaved=interleaved, stream=stream)
    try:
        found = {name: (library.inspect_result if name in _WRITTEN else library.inspect)(x) for name, x in arrays.items()}
    except Exception:
        for name, x in arrays.items():
            library.describe(x, name)  # says for people what is wrong
        raise
    kind = (library, interleaved, *((name, key) for name, (_, key) in found.items()))
    prepared = _prepared.get(kind) or _prepare(kind, library, arrays, interleaved)
    addresses = {name: at for name, (at, _) in found.items()}
    _check_values(library, arrays, prepared.what)
    rotated = None
    place, handle = prepared.on(stream)
    if prepared.new is not None:
        rotated = prepared.new(place)
        addresses["rotated"] = library.address(rotated)
    prepared.check(addresses)
    if not prepared.what.is_empty:
        prepared.run(addresses, handle)
    if place is not None:
        library.used_on(place, [*arrays.values(), *([] if rotated is None else [rotated])])
    for name in _WRITTEN:
        library.written(arrays[name])
    return rotated


class _Prepared:
    """A kind of call: checked, and ready to launch."""

    def __init__(self, library, arrays, interleaved):
        self.facts = {name: library.describe(x, name) for name, x in arrays.items()}
        self.what = make_append({name: (each.shape, each.dtype) for name, each in self.facts.items()}, interleaved)
        if library.one_device:
            check_one_device(self.facts)
        for name in _WRITTEN:
            each = self.facts[name]
            if each.readonly:
                raise ValueError(f"{name} must be writable; got a read-only array")
            if overlaps_itself(each.shape, each.strides, ITEMSIZE[each.dtype]):
                raise ValueError(f"{name} must give every element a place of its own; got strides {each.strides} (bytes) for shape {each.shape}")
        first = self.facts["k_new"]
        self.index = (first.index or 0) if first.kind == "cuda" else None
        self._extents = {name: extent(0, each.shape, each.strides, ITEMSIZE[each.dtype]) for name, each in self.facts.items()}
        self.new, self._stream, self._launch = None, int, None
        if "q" in self.facts:
            self.new = library.allocator(arrays["q"], self.facts["q"].shape, self.what.dtype)
        if self.index is not None:
            self._stream = library.current_stream(self.index)
            if not self.what.is_empty:
                from .kernels.caches.launch import prepare

                layouts = {name: (each.shape, each.strides) for name, each in self.facts.items()}
                if self.new is not None:
                    layouts["rotated"] = self.facts["q"].shape, contiguous_strides(self.facts["q"].shape, ITEMSIZE[self.what.dtype])
                self._launch = prepare(self.what, layouts, device_of(first))

    def on(self, stream):
        """(handle of the caller's stream or None, handle of the stream to work on)."""
        if stream is None:
            return None, self._stream()
        if self.index is None:
            raise ValueError("stream is for arrays on a CUDA device; these are on the CPU")
        handle = stream_handle(stream, self.index)
        return handle, handle

    def check(self, addresses):
        """Caches must not touch what is read, nor each other; arrays with elements must have memory."""
        for name, each in self.facts.items():
            if not addresses[name] and 0 not in each.shape:
                raise ValueError(f"{name} has no memory: it was deleted or released before the call")
        for n, one in enumerate(_WRITTEN):
            low, high = (addresses[one] + end for end in self._extents[one])
            for other, (other_low, other_high) in self._extents.items():
                if other == one or other in _WRITTEN[:n] or not (low < addresses[other] + other_high and addresses[other] + other_low < high):
                    continue
                places = [(addresses[name], (f := self.facts[name]).shape, f.strides, ITEMSIZE[f.dtype]) for name in (one, other)]
                if overlaps(*places):
                    raise ValueError(
                        f"{one} must not share memory with {other}, which is {'written' if other in _WRITTEN else 'read'} in the same call"
                    )

    def run(self, addresses, handle):
        if self._launch is not None:
            self._launch(tuple(addresses.get(name, 0) for name in APPEND_OPERANDS), handle)
            return
        from .kernels.caches.host import append

        views = {name: host.bits_view(replace(each, address=addresses[name])) for name, each in self.facts.items()}
        if self.new is not None:
            q = self.facts["q"]
            strides = contiguous_strides(q.shape, ITEMSIZE[q.dtype])
            views["rotated"] = host.bits_view(replace(q, address=addresses["rotated"], strides=strides, readonly=False))
        append(self.what, views)


def _prepare(kind, library, arrays, interleaved):
    made = _Prepared(library, arrays, interleaved)
    with _lock:
        while len(_prepared) >= MAX_CALLS:
            del _prepared[next(iter(_prepared))]
        _prepared[kind] = made
    return made


def _check_values(library, arrays, what):
    if not values_are_checked():
        return
    lengths = LIBRARIES[type(arrays["seqlens_k"])].values(arrays["seqlens_k"])
    if lengths is None:
        return
    ends = [int(n) + what.tokens if n >= 0 else 0 for n in lengths]
    check_cache_lengths(ends, what.capacity)
    if "page_table" in arrays:
        table = library.values(arrays["page_table"])
        if table is not None:
            check_page_numbers(table, ends, what.page_size, what.pages)
