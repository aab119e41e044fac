"""Attention as a training step runs it, forward and backward through torch's autograd: ``python -m bench.training``.

- ``time``: device time of both together, beside torch's back ends, FA4 and dense attention, at the cells of the options.
- ``memory``: peak of both, results included, and beyond the results; each as a share of dense attention's.
- ``host``: microseconds that a small call keeps the host: forward, backward, both, and `numbaflash.backward` by hand.

How time is measured, and the options of its grid: `bench.grids`.
"""

from __future__ import annotations

import argparse
import sys

from numbaflash.benchmarks.cells import Cell, inputs
from numbaflash.benchmarks.passes import Training
from numbaflash.benchmarks.peers import OURS, OWN

from . import grids
from .latency import SMALL, Quantities, TorchMemory, host_microseconds

PROGRAM = "bench.training"
SECTIONS = ("time", "memory", "host")
FULL = grids.FULL | {"seqlens": "2048", "budget": 150.0}
QUICK = grids.QUICK | {"dims": "128", "seqlens": "2048", "budget": 60.0}
MEMORY = tuple(Cell("float16", 8, 4096, 32, 32, 128, causal) for causal in (False, True))
CALLS = 50  # of a block: autograd launches more kernels a call than a forward does


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cells``, ``libraries`` and ``only`` worked out."""
    parser = grids.parser(PROGRAM, Training, __doc__, FULL)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run (%(default)s)")
    options = grids.parse(parser, Training, FULL, QUICK, arguments)
    try:
        options.only = grids.choices("only", options.only, SECTIONS)
    except ValueError as error:
        parser.error(str(error))
    if "time" not in options.only:
        options.cells = []
    return options


class Costs(Quantities):
    """The sections ``memory`` and ``host``."""

    bench, direction = Training.bench, Training.direction

    def memory(self, meter, cells=MEMORY, inputs=inputs):
        """Peak memory of each library, and its share of dense attention's.

        Parameters
        ----------
        meter : bench.latency.TorchMemory
        cells : iterable of Cell
        inputs : callable
            Makes the operands of a cell.
        """
        for cell in cells:
            arrays, peaks = inputs(cell, operands=Training.operands), {}
            for name, library in self.libraries.items():

                def work(name=name, library=library, cell=cell, arrays=arrays, peaks=peaks):
                    with library.scope():
                        call = library.bind_training(*arrays, cell.causal)
                        call()  # modules and handles are loaded
                        peaks[name], outside = meter.peak(call)
                    self._memory(cell, name, "peak memory of forward and backward, results included", peaks[name])
                    self._memory(cell, name, "device memory outside the allocator", outside)
                    if name in OWN:
                        told = library.evidence(*arrays[1:], cell.causal, direction="backward")
                        self._memory(cell, name, "workspace of the backward, as planned", told["workspace_bytes"])

                self.guarded(f"memory of {name}", work)
            self._shares(cell, peaks)

    def _memory(self, cell, name, quantity, count):
        self.record(cell, name, _case(cell), quantity, [count / 2**20], "MiB")

    def _shares(self, cell, peaks):
        extra = {name: peak - cell.bytes_of("out", "dq", "dk", "dv") for name, peak in peaks.items()}
        for name, more in extra.items():
            self._memory(cell, name, "peak memory beyond out and gradients", more)
            if "dense" in peaks:
                self.record(cell, name, _case(cell), "peak memory, share of dense", [peaks[name] / peaks["dense"]], "1")
                self.record(cell, name, _case(cell), "peak memory beyond results, share of dense", [more / extra["dense"]], "1")

    def host(self, synchronize, cell=SMALL, inputs=inputs, **options):
        """Host time of a small call.

        Parameters
        ----------
        synchronize : callable
            Waits for the device.
        cell : Cell
        inputs : callable
            Makes the operands of the cell.
        options
            For `bench.latency.host_microseconds`.
        """
        arrays = inputs(cell, operands=Training.operands)
        options = {"calls": CALLS} | options
        for name, library in self.libraries.items():
            for direction, case, bind in host_calls(library, arrays, cell.causal):

                def work(name=name, library=library, direction=direction, case=case, bind=bind):
                    with library.scope():
                        values = host_microseconds(bind(), synchronize, **options)
                    self.record(cell, name, case, "host time a call", values, "us", direction)

                self.guarded(f"host time of {name}, {case}", work)


def host_calls(library, arrays, causal):
    """(direction, case, function that returns the call) of what is timed with a library."""
    import torch

    _, q, k, v = arrays
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    yield "forward", "torch, autograd, forward", lambda: library.bind_autograd(*leaves, causal)
    yield "backward", "torch, autograd, backward", lambda: autograd_backward(torch, library, arrays, causal)
    yield "forward+backward", "torch, autograd, forward and backward", lambda: library.bind_training(*arrays, causal)
    if library.name in OWN:
        yield "backward", "torch, by hand, gradients allocated", lambda: library.bind_backward(*arrays, causal)


def autograd_backward(torch, library, arrays, causal):
    """A function without arguments that runs the backward of one attention through autograd again and again."""
    dout, *operands = arrays
    leaves = [x.detach().requires_grad_() for x in operands]
    out = library.bind_autograd(*leaves, causal)()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def cupy_host(costs, cell=SMALL, **options):
    """Host time of `numbaflash.backward` with CuPy arrays, gradients allocated and given."""
    import cupy

    import numbaflash

    dout, q, k, v = (cupy.random.standard_normal(cell.problem.shape_of(name), dtype="float32").astype(cell.dtype) for name in Training.operands)
    out, lse = numbaflash.forward(q, k, v, causal=cell.causal, return_lse=True)
    given = {name: cupy.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for case, more in (("cupy, by hand, gradients allocated", {}), ("cupy, by hand, dq=, dk= and dv= given", given)):
        values = host_microseconds(
            lambda more=more: numbaflash.backward(dout, q, k, v, out, lse, causal=cell.causal, **more),
            cupy.cuda.runtime.deviceSynchronize,
            **{"calls": CALLS} | options,
        )
        costs.record(cell, OURS, case, "host time a call", values, "us", "backward")


def _case(cell):
    return f"torch, {cell.heads} heads, S {cell.seqlen}, batch {cell.batch}, {'causal' if cell.causal else 'full'}"


def measure_costs(run, note) -> list[dict]:
    """Records of the sections ``memory`` and ``host`` that the options of a run ask for."""
    import torch

    costs = Costs(run.libraries, run.common, note)
    if "memory" in run.options.only:
        costs.guarded("memory", lambda: costs.memory(TorchMemory()))
    if "host" in run.options.only:
        costs.guarded("host time with torch", lambda: costs.host(torch.cuda.synchronize))
        if OURS in run.libraries:
            costs.guarded("host time with cupy", lambda: cupy_host(costs))
    return costs.records


def main(arguments=None) -> int:
    return grids.main(PROGRAM, [Training], parse(arguments), more=measure_costs)


if __name__ == "__main__":
    sys.exit(main())
