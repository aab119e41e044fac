"""The prepared launch of `numbaflash.append_kv` on a GPU, or in the CUDA simulator (nothing here imports numba.cuda)."""

from __future__ import annotations

from ... import toolchain
from ...dispatch import APPEND_OPERANDS, Layout
from ...problem import ITEMSIZE
from ...problem.caches import Append
from ..access import Access, widest

_BUILD = "numbaflash.kernels.caches.kernel:build"
_THREADS = 128
_SIMULATED_THREADS = 4  # each is a thread of Python


def request(what: Append, layouts: dict[str, Layout], arch, threads: int = _THREADS) -> toolchain.KernelRequest:
    """The kernel for what is appended, of arrays that lie so."""
    from .kernel import AppendConfig

    half = what.rotary_dim // 2
    access = widest(what.dtype, (what.head_dim, what.head_dim_v, half), [x for name, x in layouts.items() if len(x.shape) == 4])
    angles = None
    if what.rotary_dim:
        size = widest(what.angles, (half,), [layouts["cos"], layouts["sin"]]).size
        angles = Access(what.angles, min(size, access.elements * ITEMSIZE[what.angles]))
    config = AppendConfig(access, angles, what.lengths, what.page_size, what.interleaved, threads)
    return toolchain.KernelRequest(_BUILD, config, arch)


def prepare(what: Append, layouts: dict[str, Layout], device=None, make=None):
    """A function of the addresses of `numbaflash.dispatch.APPEND_OPERANDS`, 0 for absent ones, and a stream.

    Parameters
    ----------
    what : Append
    layouts : dict of str to Layout
        By operand.
    device : Device, optional
    make : callable, optional
        In place of `numbaflash.toolchain.prepare`, for the simulator.
    """
    wanted = request(what, layouts, device.capability if device else (9, 0), _SIMULATED_THREADS if make else _THREADS)
    config = wanted.config
    angles = config.angles or Access("float32", 4)
    kinds = {"seqlens_k": (1, what.lengths), "page_table": (2, "int32"), "cos": (2, angles), "sin": (2, angles)}
    parameters = []
    for name in APPEND_OPERANDS:
        axes, kind = kinds.get(name, (4, config.access))
        layout = layouts.get(name) or Layout((0,) * axes, (0,) * axes)
        dtype, lies = (kind.word, kind.layout(layout)) if isinstance(kind, Access) else (kind, (layout.shape, layout.strides))
        parameters.append(toolchain.Array(name, dtype, *lies))
    each = 2 * config.access.elements
    of_key, of_value = (-(-n // each) for n in (what.head_dim, what.head_dim_v))
    totals = of_key * what.kv_heads, of_value * what.kv_heads, of_key * what.heads
    blocks = -(-sum(totals) // config.threads)
    numbers = (
        blocks,
        what.tokens,
        of_key,
        totals[0],
        of_value,
        totals[1],
        totals[2],
        what.rotary_dim // each,
        what.capacity,
        what.pages,
        what.positions,
    )
    parameters += [toolchain.Scalar("int32", n) for n in numbers]
    grid = (what.batch * what.tokens * blocks,)
    return (make or toolchain.prepare)(wanted, parameters, grid=grid, threads=config.threads, device=device, operands=APPEND_OPERANDS)
