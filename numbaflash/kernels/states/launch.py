"""Prepared launches of the merge, on a GPU or in the CUDA simulator (nothing here imports numba.cuda)."""

from __future__ import annotations

from ... import toolchain
from ...dispatch import STATE_OPERANDS, STATES, Layout, contiguous_strides
from ...problem import ITEMSIZE
from ..access import Access, widest

_BUILD = "numbaflash.kernels.states.kernel:build"
_THREADS = 256
_SIMULATED_THREADS = 4  # each is a thread of Python
_INT32 = 2**31


def rooms(states: int) -> int:
    """Results, in the dtype of the LSE, that the launches of a `Merge` of so many states need memory for between them."""
    return min(2, -(-states // STATES) - 1)


class Merge:
    """The launches of a merge of so many states: one, or beyond `numbaflash.dispatch.STATES` of them one after the other."""

    def __init__(self, dtype: str, outs: list[Layout], lses: list[Layout], *, aligned: bool = True, device=None, make=None):
        """
        Parameters
        ----------
        dtype : str
        outs, lses : list of Layout
            Of the states: (batch, seqlen_q, heads, head_dim_v) and (batch, heads, seqlen_q). Results, and what is carried, are row-major.
        aligned : bool
            Whether those begin at multiples of 16 bytes.
        device : Device, optional
        make : callable, optional
            In place of `numbaflash.toolchain.prepare`, for the simulator.
        """
        self._rounds = []
        for first in range(0, len(outs), STATES):
            some = slice(first, first + STATES)
            more = {"carried": first > 0, "carries": first + STATES < len(outs), "aligned": aligned, "device": device}
            self._rounds.append((some, _prepare(dtype, outs[some], lses[some], make=make or toolchain.prepare, **more)))

    def __call__(self, outs, lses, out: int, lse: int, carried, stream: int) -> None:
        """Launch, with addresses; ``carried`` holds pairs of them, of results in `rooms`."""
        before, last = (), len(self._rounds) - 1
        for n, (some, launch) in enumerate(self._rounds):
            result = (out, lse) if n == last else carried[n % 2]
            states = [[*before[i : i + 1], *each[some]] for i, each in enumerate((outs, lses))]
            room = [0] * (STATES + 1 - len(states[0]))
            launch((*result, *states[0], *room, *states[1], *room), stream)
            before = result


def _prepare(dtype, outs, lses, *, carried, carries, aligned, device, make):
    from .kernel import MergeConfig

    batch, seqlen_q, heads, columns = outs[0].shape
    access = widest(dtype, (columns,), outs) if aligned else Access(dtype, ITEMSIZE[dtype])
    vectors = max(1, columns // access.elements)
    threads = _THREADS if make is toolchain.prepare else _SIMULATED_THREADS
    rows = batch * seqlen_q * heads
    blocks = -(-rows * vectors // threads)
    config = MergeConfig(
        access=access,
        parts=max(2, 1 << (len(outs) - 1).bit_length()),
        carried=carried,
        carries=carries,
        wide=blocks * threads >= _INT32,
        threads=threads,
    )

    def array(name, each, access=None):
        """Row-major where it is a shape; an LSE without an access."""
        if isinstance(each, tuple):
            each = Layout(each, contiguous_strides(each, ITEMSIZE[config.compute if access is None else access.dtype]))
        return toolchain.Array(name, *((config.compute, each.shape, each.strides) if access is None else (access.word, *access.layout(each))))

    room = config.parts - len(outs)
    states = [*[outs[0].shape] * carried, *outs, *[(0,) * 4] * room], [*[lses[0].shape] * carried, *lses, *[(0,) * 3] * room]
    index = "int64" if config.wide else "int32"
    parameters = [
        array("out", outs[0].shape, config.result),
        array("lse", lses[0].shape),
        *(toolchain.Scalar(index, n) for n in (seqlen_q, heads, columns, vectors, rows, len(outs) + carried)),
        *(array(f"out_{n}", each, access) for n, (each, access) in enumerate(zip(states[0], config.accesses, strict=True))),
        *(array(f"lse_{n}", each) for n, each in enumerate(states[1])),
    ]
    request = toolchain.KernelRequest(_BUILD, config, device.capability if device else (9, 0))
    return make(request, parameters, grid=(blocks,), threads=threads, device=device, operands=STATE_OPERANDS)
