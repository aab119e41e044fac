"""Masks that know their blocks: what is hidden wholly is never computed, what is seen wholly costs no mask."""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np

from .arrays import Facts, Library, library, one_library
from .kernels.blocks import host, layout, rules
from .problem import GRANULE, LENGTH_DTYPES, MAX_SEQLEN, check_window

__all__ = ["BlockMask", "Counts", "given_mask", "host_values", "mask_arrays"]

UNBOUNDED = 2**30
"""A side of a window that excludes nothing."""


class Counts(NamedTuple):
    """Blocks of 64 queries by 64 keys, over the batch entries and heads that a mask tells apart."""

    full: int
    partial: int
    empty: int


class BlockMask:
    """A mask that is kept by blocks of 64 queries and 64 keys, for ``mask=`` of `numbaflash.forward`, `backward` and `attention`.

    A block is empty (nothing is computed there), full (nothing of the mask is read there) or partial (its 64 x 64 bits are kept). Attention then
    costs what the mask keeps, and there is no array of size seqlen_q x seqlen_k: 4 bytes a block, and 1 KiB a partial one. Build one with

    - `from_mask`, of an array of bool;
    - `block_causal`, `documents`, `prefix_lm`, `dilated`, `sliding_global`, of a rule, on the device of its arrays or of ``like``.

    Building waits for the device once, to know how many blocks are partial; keep the mask for all layers and steps that share it. ``causal``,
    ``window`` and lengths of a call hold besides.

    Attributes
    ----------
    shape : tuple of int
        (batch or 1, heads or 1, seqlen_q, seqlen_k), broadcast like any mask; heads are those of q.
    words : array, (batch or 1, heads or 1, words) of int32
        What is kept, as `numbaflash.kernels.blocks.layout` says, in the library and on the device of the arrays that it is for.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 256, 4, 32), dtype=np.float32)
    >>> ids = np.repeat([0, 1, 2, 3], 64)
    >>> mask = nf.BlockMask.documents(ids)
    >>> mask.counts
    Counts(full=4, partial=0, empty=12)
    >>> out = nf.forward(q, k, v, causal=True, mask=mask)
    >>> bool(np.allclose(out, nf.forward(q, k, v, causal=True, mask=ids[:, None] == ids), atol=1e-6))
    True
    """

    __slots__ = ("_counts", "shape", "words")

    def __init__(self, words, shape, counts: Counts | None = None):
        self.words, self.shape, self._counts = words, tuple(shape), counts

    # ---- building

    @classmethod
    def from_mask(cls, mask, *, seqlen_q=None, seqlen_k=None) -> BlockMask:
        """Of an array of bool, True where a query may see a key.

        Parameters
        ----------
        mask : array of bool, broadcast to (batch, heads, seqlen_q, seqlen_k)
            Up to 4 axes, any strides, of any library.
        seqlen_q, seqlen_k : int, optional
            Full size of an axis of the mask that has one element or is missing.

        Raises
        ------
        TypeError, ValueError
            For another dtype, more axes, or lengths that do not fit.
        """
        home = library(mask, "mask")
        facts = home.describe(mask, "mask")
        if facts.dtype != "bool":
            raise TypeError(f"mask must be bool, True where a query may see a key; got dtype {facts.dtype}")
        if len(facts.shape) > 4:
            raise ValueError(f"mask must have at most 4 axes (batch, heads, seqlen_q, seqlen_k); got {len(facts.shape)} axes, shape {facts.shape}")
        own = (1,) * (4 - len(facts.shape)) + tuple(facts.shape)
        sizes = [_full_size(name, given, n) for name, given, n in (("seqlen_q", seqlen_q, own[2]), ("seqlen_k", seqlen_k, own[3]))]
        shape = (*own[:2], *sizes)
        if _by_kernels(home, facts):
            return _on_device(cls, home, mask, facts, shape, rules.Pairs("bool"), 0, {}, {"mask": (mask, facts)})
        values = host_values(home, mask, "mask")
        return cls._of_host(home, mask, host.of_mask(shape, values.reshape(own)), shape)

    @classmethod
    def block_causal(cls, seqlen_q, seqlen_k=None, *, block, offset=None, like) -> BlockMask:
        """Causal by blocks: a query sees the keys of its own block of tokens and of all blocks before.

        Parameters
        ----------
        seqlen_q, seqlen_k : int
            ``seqlen_k`` is ``seqlen_q`` where it is not given.
        block : int
            Tokens of a block.
        offset : int, optional
            Query i stands beside key ``i + offset``: None is ``seqlen_k - seqlen_q``, as ``causal=True`` aligns, 0 is ``"top_left"``.
        like : array
            Of the library and on the device that the mask is for: q, for example.

        Raises
        ------
        TypeError, ValueError
            For a wrong kind or value.
        """
        shape, offset = _lengths(seqlen_q, seqlen_k, offset)
        return cls._of_rule(shape, rules.BlockCausal(block=_count("block", block, 1)), offset, like=like)

    @classmethod
    def documents(cls, ids_q, ids_k=None) -> BlockMask:
        """Several documents in a row: a query sees the keys of its own document, in whatever order documents lie.

        Parameters
        ----------
        ids_q : array of int32 or int64, (seqlen_q,) or (batch, seqlen_q)
            The document of each query. A negative one belongs to none: it sees nothing, and nobody sees it.
        ids_k : array, (seqlen_k,) or (batch, seqlen_k), optional
            Of each key, of the same dtype; ``ids_q`` where it is not given.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or shape, and arrays of several libraries.
        """
        ids_k = ids_q if ids_k is None else ids_k
        home = one_library(ids_q=ids_q, ids_k=ids_k)
        given = {}
        for name, x in (("ids_q", ids_q), ("ids_k", ids_k)):
            facts = home.describe(x, name)
            if facts.dtype not in LENGTH_DTYPES:
                raise TypeError(f"{name} must be int32 or int64, the document of each token; got dtype {facts.dtype}")
            if len(facts.shape) not in (1, 2):
                raise ValueError(f"{name} must have shape (seqlen,) or (batch, seqlen); got {facts.shape}")
            given[name] = (x, _with_batch(facts))
        (_, of_q), (_, of_k) = given.values()
        if of_q.dtype != of_k.dtype:
            raise TypeError(f"ids_q and ids_k must have one dtype; got {of_q.dtype} and {of_k.dtype}")
        batches = {of_q.shape[0], of_k.shape[0]} - {1}
        if len(batches) > 1:
            raise ValueError(f"ids_q and ids_k must have one batch size; got {of_q.shape[0]} and {of_k.shape[0]}")
        shape, _ = _lengths(of_q.shape[1], of_k.shape[1], 0)
        shape = (max(batches, default=1), *shape[1:])
        return cls._of_rule(shape, rules.Documents(of_q.dtype), 0, like=ids_q, of_queries=given["ids_q"], of_keys=given["ids_k"])

    @classmethod
    def prefix_lm(cls, seqlen_q, seqlen_k=None, *, prefix, offset=None, like=None) -> BlockMask:
        """Causal, and a prefix of keys that every query sees.

        Parameters
        ----------
        seqlen_q, seqlen_k, offset
            As in `block_causal`.
        prefix : int, or array of int32 or int64, (batch,)
            Keys of the prefix; of each batch entry.
        like : array, optional
            As in `block_causal`; not needed with an array for ``prefix``.

        Raises
        ------
        TypeError, ValueError
            For a wrong kind, dtype, shape or value.
        """
        shape, offset = _lengths(seqlen_q, seqlen_k, offset)
        if isinstance(prefix, (int, np.integer)) and not isinstance(prefix, bool):
            if like is None:
                raise TypeError("like must be an array of the library and on the device that the mask is for, such as q; got None")
            home = library(like, "like")
            prefix = home.from_host(like, np.array([_count("prefix", prefix, 0, MAX_SEQLEN)], np.int32))
        home = library(prefix, "prefix")
        facts = home.describe(prefix, "prefix")
        if facts.dtype not in LENGTH_DTYPES:
            raise TypeError(f"prefix must be an integer, or an array of int32 or int64; got dtype {facts.dtype}")
        if len(facts.shape) != 1:
            raise ValueError(f"prefix must have shape (batch,); got {facts.shape}")
        if like is not None:
            one_library(like=like, prefix=prefix)
        shape = (facts.shape[0], *shape[1:])
        column = Facts(facts.address, (*facts.shape, 1), (*facts.strides, 0), facts.dtype, facts.kind, facts.index, facts.readonly)
        return cls._of_rule(shape, rules.PrefixLM(facts.dtype), offset, like=prefix, of_queries=(prefix, column))

    @classmethod
    def dilated(cls, seqlen_q, seqlen_k=None, *, dilation, window=None, offset=None, like) -> BlockMask:
        """Every ``dilation``-th key, counted from the query's own place, within a window.

        Parameters
        ----------
        seqlen_q, seqlen_k, offset, like
            As in `block_causal`.
        dilation : int
            Keys from one that is seen to the next.
        window : (int or None, int or None), optional
            Keys to the left and to the right of that place, inclusive, as `numbaflash.forward` takes it. Without one every block is partial for a
            small dilation.

        Raises
        ------
        TypeError, ValueError
            For a wrong kind or value.
        """
        shape, offset = _lengths(seqlen_q, seqlen_k, offset)
        return cls._of_rule(shape, rules.Dilated(dilation=_count("dilation", dilation, 1)), offset, _sides(window), like=like)

    @classmethod
    def sliding_global(cls, seqlen_q, seqlen_k=None, *, window, n_global, offset=None, like) -> BlockMask:
        """A sliding window and global tokens: the first ones, which every query sees, and which see every key.

        Parameters
        ----------
        seqlen_q, seqlen_k, offset, like
            As in `block_causal`.
        window : (int or None, int or None)
            As `numbaflash.forward` takes it.
        n_global : int
            How many tokens are global. With ``causal=True`` in the call as well, they are keys that stay in sight.

        Raises
        ------
        TypeError, ValueError
            For a wrong kind or value.
        """
        shape, offset = _lengths(seqlen_q, seqlen_k, offset)
        if window is None:
            raise TypeError("window must be a pair (left, right); got None")
        numbers = _sides(window) | {"n_global": _count("n_global", n_global, 0, MAX_SEQLEN)}
        return cls._of_rule(shape, rules.SlidingGlobal(), offset, numbers, like=like)

    @classmethod
    def _of_rule(cls, shape, rule, offset, numbers=None, *, like, of_queries=None, of_keys=None) -> BlockMask:
        home, numbers = library(like, "like"), numbers or {}
        facts = home.describe(getattr(like, "detach", lambda: like)(), "like")
        given = {name: x for name, x in (("of_queries", of_queries), ("of_keys", of_keys)) if x is not None}
        if len({(each.kind, each.index) for _, each in given.values()}) > 1:
            raise ValueError("ids_q and ids_k must lie on one device; got " + " and ".join(each.place for _, each in given.values()))
        if _by_kernels(home, facts):
            return _on_device(cls, home, like, facts, shape, rule, offset, numbers, given)
        values = {name: host_values(home, x, "an array of the rule").reshape(each.shape) for name, (x, each) in given.items()}
        words = host.of_rule(shape, rule, offset, numbers, values.get("of_queries"), values.get("of_keys"))
        return cls._of_host(home, like, words, shape)

    @classmethod
    def _of_host(cls, home, like, words, shape) -> BlockMask:
        return cls(home.from_host(like, words), shape, _count_states(host.states(words, shape)))

    # ---- looking at it

    @property
    def counts(self) -> Counts:
        """Blocks that are full, partial and empty. Where they are not known yet, the host waits for the device."""
        if self._counts is None:
            self._counts = _count_states(self.states())
        return self._counts

    @property
    def density(self) -> float:
        """Share of the pairs of a query and a key that are seen; the host waits for the device."""
        pairs = int(np.prod(self.shape, dtype=np.int64))
        return host.visible_pairs(self._host_words(), self.shape) / pairs if pairs else 0.0

    def states(self) -> np.ndarray:
        """What each block is: 0 empty, 1 full, 2 partial, (batch or 1, heads or 1, blocks of queries, blocks of keys) in int32."""
        return host.states(self._host_words(), self.shape)

    def to_dense(self):
        """The mask as an array of bool, (batch or 1, heads or 1, seqlen_q, seqlen_k), of the same library and on the same device."""
        home = library(self.words, "mask")
        return home.from_host(self.words, host.dense(self._host_words(), self.shape))

    def _host_words(self):
        return host_values(library(self.words, "mask"), self.words, "mask")

    def __repr__(self):
        batch, heads, seqlen_q, seqlen_k = self.shape
        known = ""
        if self._counts is not None:
            full, partial, empty = self._counts
            known = f"; blocks of {GRANULE}: {full} full, {partial} partial, {empty} empty"
        return f"BlockMask({seqlen_q} queries x {seqlen_k} keys, batch {batch}, heads {heads}{known})"


def mask_arrays(mask, q, k) -> dict:
    """The arrays of a problem that ``mask=`` stands for, checked against q and k where it is a `BlockMask`."""
    if not isinstance(mask, BlockMask):
        return {"mask": mask}
    batch, heads, *lengths = mask.shape
    if len(q.shape) != 4 or len(k.shape) != 4:  # said where q and k are checked; packed sequences take no mask
        return {"mask": None, "block_mask": mask.words}
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if tuple(lengths) != full[2:] or batch not in (1, full[0]) or heads not in (1, full[1]):
        full = tuple(int(n) for n in full)
        raise ValueError(f"mask must broadcast to (batch, heads, seqlen_q, seqlen_k) = {full}, heads being those of q; got {mask!r}")
    return {"mask": None, "block_mask": mask.words}


def given_mask(options: dict, q, k) -> dict:
    """The opposite: options as the public functions take them."""
    words = options.get("block_mask")
    others = {name: x for name, x in options.items() if name != "block_mask"}
    return others if words is None else others | {"mask": BlockMask(words, (*words.shape[:2], q.shape[1], k.shape[1]))}


def _count_states(states) -> Counts:
    return Counts(*(int((states == state).sum()) for state in (layout.FULL, layout.PARTIAL, layout.EMPTY)))


def _count(name, value, least, most=MAX_SEQLEN) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be from {least} to {most}; got {number}")
    return number


def _lengths(seqlen_q, seqlen_k, offset):
    """((1, 1, seqlen_q, seqlen_k), offset)."""
    seqlen_q = _count("seqlen_q", seqlen_q, 0)
    seqlen_k = seqlen_q if seqlen_k is None else _count("seqlen_k", seqlen_k, 0)
    offset = seqlen_k - seqlen_q if offset is None else _count("offset", offset, -MAX_SEQLEN)
    return (1, 1, seqlen_q, seqlen_k), offset


def _full_size(name, given, own) -> int:
    if given is None:
        return own
    given = _count(name, given, 0)
    if own not in (1, given):
        raise ValueError(f"{name} must be the size of the mask's axis where that is not 1; got {given}, and the axis has {own}")
    return given


def _sides(window) -> dict[str, int]:
    left, right = check_window(window)
    return {name: UNBOUNDED if side is None else min(side, UNBOUNDED) for name, side in (("left", left), ("right", right))}


def _with_batch(facts: Facts) -> Facts:
    if len(facts.shape) == 2:
        return facts
    return Facts(facts.address, (1, *facts.shape), (0, *facts.strides), facts.dtype, facts.kind, facts.index, facts.readonly)


def host_values(home: Library, x, name):
    found = home.values(x)
    if found is None:
        raise TypeError(f"{name} is traced: its values are not known, and a BlockMask depends on them. Build the mask outside of the traced function")
    return found


def _by_kernels(home: Library, facts: Facts) -> bool:
    """Whether the mask is built on its GPU: where the library lends its allocator and stream."""
    return facts.kind == "cuda" and home.builds_on_device


def _on_device(cls, home, like, facts, shape, rule, offset, numbers, given) -> BlockMask:
    from .kernels.blocks.launch import build

    words, counts = build(home, like, facts, shape, rule, offset, numbers, given)
    return cls(words, shape, counts)
