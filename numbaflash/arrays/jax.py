"""JAX arrays and tracers: XLA allocates, orders and launches (see `numbaflash.jax`), so there is nothing to point at here."""

from __future__ import annotations

import functools

import jax
import numpy as np

from ..block_mask import BlockMask
from .base import Facts, Library, contiguous_strides


def adopt(x, name):
    return JAX if isinstance(x, jax.Array) else None


class JAX(Library):
    name = "JAX"
    namespace = jax.numpy
    one_device = False
    no_plans = "XLA owns memory and streams, and a jitted function is a plan already: call numbaflash.decode under jax.jit"

    def forward(self, q, k, v, *, out, lse, stream, **options):
        from ..jax.functions import forward

        _refuse_places(out, lse, stream)
        return forward(q, k, v, **options)

    def decode(self, q, k_cache, v_cache, *, out, lse, stream, **options):
        from ..jax.functions import decode

        _refuse_places(out, lse, stream)
        return decode(q, k_cache, v_cache, **options)

    def append_kv(self, arrays, *, interleaved, stream):
        from ..jax.caches import append_kv

        _refuse_places(None, None, stream)
        return append_kv(arrays, interleaved)

    def attention(self, q, k, v, **options):
        from ..jax import attention

        return attention(q, k, v, **options)

    def attention_varlen(self, *arrays, **options):
        from ..jax import attention_varlen

        return attention_varlen(*arrays, **options)

    def values(self, x):
        return None if isinstance(x, jax.core.Tracer) else np.asarray(x)

    def backward(self, *arrays, **options):
        raise TypeError(
            "dout, q, k, v, out and lse must not be JAX arrays: XLA owns their memory and its order. Differentiate numbaflash.jax.attention "
            "instead (jax.grad, jax.vjp), which runs the same kernels"
        )

    def describe(self, x, name):
        shape = tuple(x.shape)
        if not isinstance(x.dtype, np.dtype):  # PRNG keys
            raise TypeError(f"{name} must hold numbers; got dtype {x.dtype}")
        kind, index = self._place(x, name)
        strides = contiguous_strides(shape, np.dtype(x.dtype).itemsize)
        return Facts(0, shape, strides, np.dtype(x.dtype).name, kind, index, readonly=True)

    def from_host(self, like, array):
        if isinstance(like, jax.core.Tracer):
            return jax.device_put(array, _default_device())
        (device,) = like.devices()
        return jax.device_put(array, device)

    def constant(self, x):
        return jax.lax.stop_gradient(x)

    def cast(self, x, dtype):
        return x.astype(dtype)

    def _place(self, x, name):
        if isinstance(x, jax.core.Tracer):
            device = _default_device()
        else:
            if x.is_deleted():
                raise ValueError(f"{name} has been deleted (its buffer was donated to a jitted function or freed by delete())")
            devices = x.devices()
            if len(devices) > 1:
                raise ValueError(
                    f"{name} must lie on one device; it is spread over {len(devices)} ({x.sharding}). "
                    "Call numbaflash.forward inside jax.shard_map, where each device sees its part"
                )
            (device,) = devices
        if device.platform not in ("cpu", "gpu", "cuda"):
            raise ValueError(f"{name} must lie on the CPU or a CUDA device; got {device}")
        return ("cpu", 0) if device.platform == "cpu" else ("cuda", device.local_hardware_id)


def _refuse_places(out, lse, stream):
    for argument, given in (("out", out), ("lse", lse)):
        if given is not None:
            raise ValueError(f"{argument} cannot be given with JAX arrays, which are immutable; use the arrays that are returned")
    if stream is not None:
        raise ValueError("stream cannot be given with JAX arrays: XLA chooses the stream of every operation")


def _default_device():
    """Where a traced computation is going to run, as far as tracing can tell."""
    device = jax.config.jax_default_device
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device if device is not None else jax.local_devices()[0]


@functools.cache
def local_gpus() -> tuple[int, ...]:
    """Ordinals of the CUDA devices that this process runs on."""
    try:
        return tuple(device.local_hardware_id for device in jax.local_devices(backend="cuda"))
    except RuntimeError:  # none
        return ()


JAX = JAX()


def _flatten(mask):
    return (mask.words,), mask.shape


def _unflatten(shape, children):
    return BlockMask(*children, shape)


jax.tree_util.register_pytree_node(BlockMask, _flatten, _unflatten)  # an argument of jitted functions
