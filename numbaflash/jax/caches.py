"""`numbaflash.append_kv` of JAX arrays: new caches, by XLA's own operations, under ``jax.jit`` too."""

from __future__ import annotations

import jax.numpy as jnp

from ..arrays import library
from ..call import check_one_device
from ..problem import MAX_SEQLEN
from ..problem.caches import make_append


def append_kv(arrays: dict, interleaved: bool):
    """See `numbaflash.append_kv`; ``arrays`` holds those that were given, by argument."""
    facts = {name: library(x, name).describe(x, name) for name, x in arrays.items()}
    what = make_append({name: (each.shape, each.dtype) for name, each in facts.items()}, interleaved)
    check_one_device(facts)
    lengths = jnp.clip(arrays["seqlens_k"], -MAX_SEQLEN, MAX_SEQLEN).astype(jnp.int32)  # beyond, nothing is written either way
    positions = lengths[:, None] + jnp.arange(what.tokens, dtype=jnp.int32)
    turns = (positions >= 0) & (positions < what.positions)
    there = (positions >= 0) & (positions < what.capacity)
    keys = arrays["k_new"]
    if what.rotary_dim:
        there &= turns
        keys = _rotate(what, keys, arrays, positions)
    row, slot = jnp.broadcast_to(jnp.arange(what.batch)[:, None], positions.shape), positions
    if what.page_size:
        column = jnp.clip(positions // what.page_size, 0, max(arrays["page_table"].shape[1] - 1, 0))
        row = jnp.take_along_axis(arrays["page_table"], column, axis=1) if arrays["page_table"].shape[1] else jnp.full_like(positions, -1)
        slot = positions % what.page_size
        there &= (row >= 0) & (row < what.pages)
    row = jnp.where(there, row, arrays["k_cache"].shape[0])  # what lies outside is dropped
    caches = tuple(arrays[name].at[row, slot].set(x, mode="drop") for name, x in (("k_cache", keys), ("v_cache", arrays["v_new"])))
    if not what.heads:
        return caches
    rotated = _rotate(what, arrays["q"], arrays, positions)
    return (*caches, jnp.where(turns[:, :, None, None], rotated, jnp.zeros((), rotated.dtype)))


def _rotate(what, x, arrays, positions):
    compute = jnp.float64 if what.dtype == "float64" else jnp.float32
    cos, sin = (arrays[name].astype(compute)[jnp.clip(positions, 0, max(what.positions - 1, 0))][:, :, None] for name in ("cos", "sin"))
    head, rest = x[..., : what.rotary_dim].astype(compute), x[..., what.rotary_dim :]
    half = what.rotary_dim // 2
    one, other = (head[..., 0::2], head[..., 1::2]) if what.interleaved else (head[..., :half], head[..., half:])
    turned = one * cos - other * sin, other * cos + one * sin
    head = jnp.stack(turned, axis=-1).reshape(head.shape) if what.interleaved else jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([head.astype(x.dtype), rest], axis=-1)
