"""The prepared launch of `numbaflash.append_kv` on a GPU, or in the CUDA simulator (nothing here imports numba.cuda)."""

from __future__ import annotations

from ... import toolchain
from ...dispatch import APPEND_OPERANDS
from ...problem.caches import Append

_BUILD = "numbaflash.kernels.caches.kernel:build"
_SIMULATED_THREADS = 4  # each is a thread of Python


def request(what: Append, arch, threads: int | None = None) -> toolchain.KernelRequest:
    """The kernel for what is appended."""
    from .kernel import THREADS, AppendConfig

    config = AppendConfig(
        dtype=what.dtype,
        lengths=what.lengths,
        page_size=what.page_size,
        rotary=what.rotary_dim > 0,
        interleaved=what.interleaved,
        angles=what.angles,
        queries=what.heads > 0,
        threads=threads or THREADS,
    )
    return toolchain.KernelRequest(_BUILD, config, arch)


def prepare(what: Append, layouts: dict, device=None, make=None):
    """A function of the addresses of `numbaflash.dispatch.APPEND_OPERANDS`, 0 for absent ones, and a stream.

    Parameters
    ----------
    what : Append
    layouts : dict of str to (shape, strides in bytes)
        By operand.
    device : Device, optional
    make : callable, optional
        In place of `numbaflash.toolchain.prepare`, for the simulator.
    """
    wanted = request(what, device.capability if device else (9, 0), None if make is None else _SIMULATED_THREADS)
    dtypes = {"seqlens_k": what.lengths, "page_table": "int32", "cos": what.angles or "float32", "sin": what.angles or "float32"}
    bits = {"float16": "uint16", "bfloat16": "uint16"}
    parameters = []
    for name in APPEND_OPERANDS:
        dtype = dtypes.get(name, what.dtype)
        axes = 1 if name == "seqlens_k" else 2 if name in ("page_table", "cos", "sin") else 4
        shape, strides = layouts.get(name, ((0,) * axes, (0,) * axes))
        parameters.append(toolchain.Array(name, bits.get(dtype, dtype), shape, strides))
    numbers = (what.tokens, what.kv_heads, what.heads, what.capacity, what.pages, what.rotary_dim, what.positions)
    parameters += [toolchain.Scalar("int64", n) for n in numbers]
    blocks = what.batch * what.tokens * (what.kv_heads + what.heads)
    run = make or toolchain.prepare
    return run(wanted, parameters, grid=(blocks,), threads=wanted.config.threads, device=device, operands=APPEND_OPERANDS)
