"""Launches of the merge on a GPU, or in the CUDA simulator (nothing here imports numba.cuda)."""

from __future__ import annotations

from ... import toolchain
from ...dispatch import MOST_PARTS, STATE_OPERANDS

_BUILD = "numbaflash.kernels.states.kernel:build"
_SIMULATED_THREADS = 4  # each is a thread of Python


def request(dtype: str, result: str, parts: int, arch, threads: int | None = None) -> toolchain.KernelRequest:
    """The kernel that merges so many parts."""
    from .kernel import THREADS, MergeConfig

    return toolchain.KernelRequest(_BUILD, MergeConfig(dtype, result, parts, threads or THREADS), arch)


def prepare(dtype: str, result: str, outs: list, lses: list, out, lse, device=None, make=None):
    """A function of addresses and a stream: those of the parts' outputs, of their LSE, of the merged output and LSE.

    Parameters
    ----------
    dtype, result : str
        Of the parts' outputs, and of the merged one.
    outs, lses : list of (shape, strides in bytes)
        `MOST_PARTS` at most. With an axis less than (batch, rows, heads, columns), there is one batch entry.
    out, lse : (shape, strides in bytes)
    device : Device, optional
    make : callable, optional
        In place of `numbaflash.toolchain.prepare`, for the simulator.
    """
    count = len(outs)
    wanted = request(dtype, result, count, device.capability if device else (9, 0), None if make is None else _SIMULATED_THREADS)
    compute, bits = wanted.config.compute, {"float16": "uint16", "bfloat16": "uint16"}
    names, lse_names = STATE_OPERANDS[:count], STATE_OPERANDS[MOST_PARTS : MOST_PARTS + count]
    parameters = [_array(name, bits.get(dtype, dtype), 4, x) for name, x in zip(names, outs, strict=True)]
    parameters += [_array(name, compute, 3, x) for name, x in zip(lse_names, lses, strict=True)]
    merged = _array("out", bits.get(result, result), 4, out)
    batch, rows, heads, _ = merged.shape
    run = make or toolchain.prepare
    return run(
        wanted,
        [merged, _array("lse", compute, 3, lse), *parameters],
        grid=(batch * rows * heads,),
        threads=wanted.config.threads,
        device=device,
        operands=(*names, *lse_names, "out", "lse"),
    )


def _array(name, dtype, axes, layout):
    shape, strides = layout
    missing = axes - len(shape)  # packed ones have no axis of batch entries
    return toolchain.Array(name, dtype, (1,) * missing + tuple(shape), (0,) * missing + tuple(strides))
