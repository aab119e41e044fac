"""Time and peak memory of a computation in this process."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median


def seconds(call, synchronize, *, repeats: int) -> float:
    """Median wall-clock seconds of `call`, the device's work included."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


@contextmanager
def peak_host_bytes():
    """Highest resident memory of the block above that at its start: the dict it yields holds it under "bytes" afterwards.

    Linux keeps a high-water mark that a process may reset for itself. Elsewhere nothing is measured and the dict stays empty.
    """
    peak = {}
    start = None
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        start = _status_bytes("VmRSS")
    yield peak
    if start is not None:
        with suppress(OSError):
            peak["bytes"] = max(0, _status_bytes("VmHWM") - start)


def available_host_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not tell (only Linux does)."""
    with suppress(OSError, ValueError, IndexError):
        return _kib("/proc/meminfo", "MemAvailable") * 1024
    return None


def _status_bytes(field: str) -> int:
    return _kib("/proc/self/status", field) * 1024


def _kib(path: str, field: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"{path} has no {field}")


def bytes_text(n: int | None) -> str:
    """Bytes for people: "1.5 MiB"; "not measured" for None."""
    if n is None:
        return "not measured"
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def seconds_text(t: float) -> str:
    """Seconds for people: "310 us", "11.98 ms", "1.234 s"."""
    if t < 1e-3:
        return f"{t * 1e6:.0f} us"
    return f"{t * 1e3:.2f} ms" if t < 0.1 else f"{t:.3f} s"
