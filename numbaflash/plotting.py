"""Pictures of masks."""

from __future__ import annotations

import numpy as np

from .arrays import library
from .block_mask import BlockMask, host_values
from .kernels.blocks import host
from .kernels.blocks.layout import EMPTY, FULL, PARTIAL, granules
from .problem import GRANULE, check_causal, check_window

__all__ = ["plot_mask"]

MOST_PIXELS = 1024
"""Queries and keys up to which every pair is drawn; beyond, every block is."""

COLOURS = {EMPTY: "#f2f2ee", FULL: "#1b4f72", PARTIAL: "#7fb3d5"}
NAMES = {EMPTY: "hidden", FULL: "seen", PARTIAL: "seen, in a partial block"}
BLOCK_NAMES = {EMPTY: "empty block", FULL: "full block", PARTIAL: "partial block"}


def plot_mask(mask=None, *, causal=False, window=None, seqlen_q=None, seqlen_k=None, batch=0, head=0, ax=None):
    """Draw which keys queries see: queries downwards, keys to the right.

    Up to 1024 queries and keys every pair is drawn, and what lies in partial blocks (64 queries by 64 keys, of which some pairs are hidden) is
    lighter; beyond, every block is drawn as full, partial or empty. The mask is copied to the host.

    Parameters
    ----------
    mask : BlockMask or array of bool, broadcast to (batch, heads, seqlen_q, seqlen_k), optional
        As `numbaflash.forward` takes it.
    causal, window
        As `numbaflash.forward` takes them; they hold besides.
    seqlen_q, seqlen_k : int, optional
        Lengths, where the mask does not tell them.
    batch, head : int, optional
        Which batch entry and head to draw, where the mask tells them apart.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        Without matplotlib (``pip install matplotlib``).
    TypeError, ValueError
        For a mask of another dtype or without elements, a batch entry or head that there is not, and lengths that nothing or something else tells.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> ids = np.repeat([0, 1, 2], [100, 60, 96])
    >>> ax = nf.plot_mask(nf.BlockMask.documents(ids), causal=True)  # doctest: +SKIP
    >>> ax.figure.savefig("documents.png")  # doctest: +SKIP
    """
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("plot_mask needs matplotlib: pip install matplotlib") from error
    mask = _as_block_mask(mask, seqlen_q, seqlen_k)
    picture, by_pairs = _picture(mask, batch, head, check_causal(causal), check_window(window))
    _, _, queries, keys = mask.shape
    if ax is None:
        _, ax = plt.subplots(figsize=(5, 5 * min(2.0, max(0.5, queries / max(keys, 1)))))
    colours = ListedColormap([COLOURS[each] for each in (EMPTY, FULL, PARTIAL)])
    rows, columns = (queries, keys) if by_pairs else (picture.shape[0] * GRANULE, picture.shape[1] * GRANULE)
    ax.imshow(picture, cmap=colours, vmin=-0.5, vmax=2.5, interpolation="nearest", extent=(0, columns, rows, 0), aspect="equal")
    ax.set_xlim(0, keys)
    ax.set_ylim(queries, 0)
    ax.set_xlabel("keys")
    ax.set_ylabel("queries")
    names = NAMES if by_pairs else BLOCK_NAMES
    shown = [state for state in (FULL, PARTIAL, EMPTY) if (picture == state).any()]
    handles = [Patch(facecolor=COLOURS[state], edgecolor="0.6", label=names[state]) for state in shown]
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False, fontsize="small")
    return ax


def _as_block_mask(mask, seqlen_q, seqlen_k) -> BlockMask:
    if isinstance(mask, BlockMask):
        for name, given, own in zip(("seqlen_q", "seqlen_k"), (seqlen_q, seqlen_k), mask.shape[2:], strict=True):
            if given not in (None, own):
                raise ValueError(f"{name} must be that of the BlockMask, {own}, or left out; got {given!r}")
        return mask
    if mask is None:
        if seqlen_q is None:
            raise ValueError("seqlen_q must be given where there is no mask that tells it")
        mask = np.ones((1, 1, 1, 1), bool)
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    home = library(mask, "mask")
    home.describe(mask, "mask")
    values = mask if isinstance(mask, np.ndarray) else host_values(home, mask, "mask")
    return BlockMask.from_mask(values, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def _picture(mask, batch, head, causal, window):
    """(states of pairs or of blocks, whether they are those of pairs)."""
    batches, heads, queries, keys = mask.shape
    if 0 in mask.shape:
        raise ValueError(f"mask must have something to draw; got (batch, heads, seqlen_q, seqlen_k) = {mask.shape}")
    for name, given, count in (("batch", batch, batches), ("head", head, heads)):
        if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
            raise TypeError(f"{name} must be an integer; got {given!r}")
        if given < 0 or (given >= count and count != 1):
            raise ValueError(f"{name} must be from 0 to {count - 1}; got {given!r}")
    words = mask._host_words()[batch if batches > 1 else 0, head if heads > 1 else 0][None, None]
    states = host.states(words, (1, 1, queries, keys))[0, 0]
    offset = 0 if causal == "top_left" else keys - queries
    left, right = window
    right = min(0, right) if causal and right is not None else 0 if causal else right
    blocks = np.maximum(states, _band_of_blocks(queries, keys, offset, left, right))
    blocks[(states == EMPTY) | (_band_of_blocks(queries, keys, offset, left, right) == EMPTY)] = EMPTY
    if max(queries, keys) > MOST_PIXELS:
        return blocks, False
    seen = host.dense(words, (1, 1, queries, keys))[0, 0] & _band(np.arange(queries)[:, None] + offset, np.arange(keys)[None, :], left, right)
    of_pairs = np.repeat(np.repeat(blocks, GRANULE, axis=0), GRANULE, axis=1)[:queries, :keys]
    return np.where(seen, of_pairs, EMPTY), True


def _band(place, key, left, right):
    seen = np.ones(np.broadcast_shapes(place.shape, key.shape), bool)
    if left is not None:
        seen &= key >= place - left
    if right is not None:
        seen &= key <= place + right
    return seen


def _band_of_blocks(queries, keys, offset, left, right):
    """States of the blocks of a band: some pair of it, or all of them."""
    first, key = GRANULE * np.arange(granules(queries))[:, None] + offset, GRANULE * np.arange(granules(keys))[None, :]
    last, last_key = np.minimum(first + GRANULE, queries + offset) - 1, np.minimum(key + GRANULE, keys) - 1
    some = every = np.ones((len(first), key.shape[1]), bool)
    if left is not None:
        some, every = some & (last_key >= first - left), every & (key >= last - left)
    if right is not None:
        some, every = some & (key <= last + right), every & (last_key <= first + right)
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int32)
