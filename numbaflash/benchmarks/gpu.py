"""The GPU that is measured, by way of torch, or why there is none."""

from __future__ import annotations

import sys

from . import cells
from .timing import METHOD

NO_GPU = 2
"""Exit code of a benchmark that finds no GPU."""
_CALIBRATION_CYCLES = 20_000_000


def missing() -> str | None:
    """Why a benchmark cannot run here, or None."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed; it times the kernels and holds the peers: pip install 'numbaflash[bench]'"
    if not torch.cuda.is_available():
        return "no CUDA GPU was found by PyTorch"
    return None


def refuse(program: str, reason: str) -> int:
    """Say why nothing is measured, and return the exit code for it."""
    print(f"{program}: {reason}; it measures GPU kernels (bench.cpu and numbaflash bench measure the CPU)", file=sys.stderr)
    return NO_GPU


class Gpu:
    """The current CUDA device and its current stream.

    Attributes
    ----------
    kind : str
        As `numbaflash.dispatch.Device` has it.
    method : str
        How it is measured, as records tell it.

    Parameters
    ----------
    seed : int
        Of the random inputs.
    """

    kind, method = "cuda", METHOD

    def __init__(self, seed=0):
        import torch

        self._cuda = torch.cuda
        self.seed, self._generator = seed, torch.Generator(device="cuda")
        self.l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cuda._sleep(1000)  # loads the kernel
        start, end = self.event(), self.event()
        start.record()
        self._cuda._sleep(_CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        self._cycles_per_ms = _CALIBRATION_CYCLES / start.elapsed_time(end)

    def event(self):
        return self._cuda.Event(enable_timing=True)

    def spin(self, ms):
        """Queue a kernel that keeps the device busy for about so many milliseconds and touches no memory."""
        self._cuda._sleep(int(ms * self._cycles_per_ms))

    def inputs(self, cell, operands=("q", "k", "v"), number=0):
        """Random operands of a cell, the same each time; ``number`` tells sets of them apart."""
        return cells.inputs(cell, self._generator.manual_seed(cells.seed_of(cell, self.seed, number)), operands)

    def synchronize(self):
        self._cuda.synchronize()

    def free_bytes(self) -> int:
        """Free device memory, with torch's unused blocks given back."""
        self._cuda.empty_cache()
        return self._cuda.mem_get_info()[0]

    def recover(self):
        """After an error: give unused memory back; raises when the CUDA context is lost."""
        self._cuda.synchronize()
        self._cuda.empty_cache()
