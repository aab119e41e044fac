"""The CPU that is measured, with the clock and the memory that `gpu.Gpu` has."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from pathlib import Path

from ..measuring import available_host_bytes
from . import cells

METHOD = "wall time of a batch of calls, results allocated; libraries interleaved, order rotated, inputs rotated past the last cache"
_CACHE_BYTES = _MOST_CACHE_BYTES = 32 * 2**20  # where the system does not tell; what a process may expect of a cache for many cores


class Cpu:
    """Tensors on the host, or NumPy arrays where PyTorch is not installed.

    Parameters
    ----------
    seed : int
        Of the random inputs.
    """

    kind, method = "cpu", METHOD

    def __init__(self, seed=0):
        self.l2_bytes, self.seed = last_cache_bytes(), seed

    def event(self):
        return _Moment()

    def spin(self, ms):
        """Nothing runs beside the host."""

    def inputs(self, cell, operands=("q", "k", "v"), number=0):
        """Random operands of a cell, the same each time; ``number`` tells sets of them apart."""
        return cells.host_inputs(cell, operands, cells.seed_of(cell, self.seed, number))

    def synchronize(self):
        """A call has ended when it returns."""

    def free_bytes(self) -> int | None:
        return available_host_bytes()

    def recover(self):
        """After an error there is nothing to do."""


class _Moment:
    """An event that has happened as soon as it is recorded, and never too early."""

    def record(self):
        self.at = time.perf_counter()

    def query(self) -> bool:
        return False

    def synchronize(self):
        pass

    def elapsed_time(self, other) -> float:
        return 1e3 * (other.at - self.at)


def last_cache_bytes() -> int:
    """Size of the largest cache, as Linux tells it, or as much of it as counts."""
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            text = path.read_text().strip()
            found.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] if text[-1] in "KM" else int(text))
    return min(max(found, default=_CACHE_BYTES), _MOST_CACHE_BYTES)


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
