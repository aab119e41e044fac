"""JAX: attention and its gradients as operations of XLA, so that they can be jitted and run in the order, on the stream and in the buffers of XLA.

XLA calls a handler (its FFI, a C ABI of plain structs) with the addresses of row-major buffers and, on CUDA, the stream. The handler is a
ctypes callback that looks the prepared launch up: no C++, no host synchronisation, and nothing of Python at all where XLA replays a CUDA graph.

``functions`` is what users call, ``operations`` what a traced program holds of it, ``launches`` goes from the options of an operation to a
prepared launch, ``serving`` answers the calls of XLA, ``abi`` are their structs, ``batching`` is what ``vmap`` asks for and ``shards`` what
``shard_map`` does, and ``caches`` writes to caches.
"""

from __future__ import annotations

import jax

OLDEST = (0, 6, 2)
"""The oldest JAX that has all: `jax.ffi` (0.5), handlers that are told their device (0.6), results that vary in a shard_map (0.6.2)."""

if jax.__version_info__ < OLDEST:
    raise ImportError(f"numbaflash needs JAX 0.6.2 or newer, because of its FFI; installed is {jax.__version__}. Run pip install -U jax")

from .functions import attention, attention_varlen  # noqa: E402  (they need a JAX that is new enough)

__all__ = ["attention", "attention_varlen"]
