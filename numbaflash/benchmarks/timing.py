"""Device time of short GPU calls, several libraries in one run.

The launches of a measurement are queued behind a kernel that only spins, so that the device never waits for the host:
what lies between the two events is device time, however slow the host side of a library is. A start event that has
already happened when the last launch was queued shows that the spin was too short; the measurement is then repeated
behind a longer one. Libraries take turns within each round, in an order that rotates, since a power-limited card drifts.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import median

METHOD = "CUDA events around a batch of calls queued behind a spinning kernel; libraries interleaved, order rotated, inputs rotated past the L2 cache"
MAX_LAUNCHES = 64  # the launch queue holds about a thousand kernels, and a call may be ten
MAX_SPIN_MS = 250.0
L2_MULTIPLE = 3


@dataclass
class Times:
    """Measurements of one library.

    Attributes
    ----------
    ms : list of float
        Milliseconds a call, one for each round.
    launches : int
        Calls in each measurement.
    host_bound : bool
        True when no spin was long enough, because the call itself waits for the device: the times then hold host time too.
    spin_ms : float
        Length of the spin that the launches are queued behind.
    host_us : list of float
        Microseconds that a call kept the host meanwhile, one for each round: the device was busy with the spin, so nothing was waited for, but where
        the library itself waits.
    """

    ms: list[float] = field(default_factory=list)
    launches: int = 1
    host_bound: bool = False
    spin_ms: float = 1.0
    host_us: list[float] = field(default_factory=list)

    def summary(self) -> dict:
        """Median, quartiles and least, as fields of a record."""
        q1, q2, q3 = quartiles(self.ms)
        return {
            "ms": q2,
            "ms_q1": q1,
            "ms_q3": q3,
            "ms_min": min(self.ms),
            "rounds": len(self.ms),
            "launches": self.launches,
            "host_bound": self.host_bound,
            **({"host_us": median(self.host_us)} if self.host_us else {}),
        }


def quartiles(values) -> tuple[float, float, float]:
    """First quartile, median and third quartile, interpolated between the measurements."""
    ordered = sorted(values)

    def at(fraction):
        place = fraction * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.25), median(ordered), at(0.75)


def input_sets(input_bytes: int, l2_bytes: int) -> int:
    """Input sets to rotate among, so that a call never finds its inputs in the L2 cache."""
    return max(1, math.ceil(L2_MULTIPLE * l2_bytes / input_bytes))


def batch(clock, call, launches: int, times: Times) -> tuple[float, float]:
    """Milliseconds of the device and of the host a call of one batch; lengthens ``times.spin_ms`` until the device stays behind the host."""
    while True:
        start, end = clock.event(), clock.event()
        clock.spin(times.spin_ms)
        start.record()
        began = time.perf_counter()
        for _ in range(launches):
            call()
        host = time.perf_counter() - began
        end.record()
        overtaken = start.query()
        end.synchronize()
        if overtaken and not times.host_bound:
            times.host_bound = times.spin_ms >= MAX_SPIN_MS
            times.spin_ms = 0.0 if times.host_bound else min(2 * times.spin_ms, MAX_SPIN_MS)
            continue
        return start.elapsed_time(end) / launches, 1e3 * host / launches


def measure(clock, calls: dict, *, rounds: int, target_ms: float) -> dict[str, Times]:
    """Time several functions side by side.

    Parameters
    ----------
    clock : numbaflash.benchmarks.gpu.Gpu
        Has ``event()`` and ``spin(ms)``.
    calls : dict of str to callable
        Functions without arguments that launch work on the current stream.
    rounds : int
        Measurements of each.
    target_ms : float
        Device milliseconds of a measurement; decides how many calls it holds, 1 at least and `MAX_LAUNCHES` at most.

    Returns
    -------
    dict of str to Times
    """
    result = {name: Times() for name in calls}
    for name, call in calls.items():
        times = result[name]
        call()  # warm
        guess, _ = batch(clock, call, 2, times)
        times.launches = max(1, min(MAX_LAUNCHES, round(target_ms / guess))) if guess > 0 else MAX_LAUNCHES
        batch(clock, call, times.launches, times)  # settles the spin and the clocks
    names = list(calls)
    for turn in range(rounds):
        for k in range(len(names)):
            name = names[(turn + k) % len(names)]
            device, host = batch(clock, calls[name], result[name].launches, result[name])
            result[name].ms.append(device)
            result[name].host_us.append(1e3 * host)
    return result


class Budget:
    """Shares the seconds of a run among its cells, learning from each cell what the next ones will cost.

    Parameters
    ----------
    seconds : float
        For everything, counted from now.
    cells : int
    rounds : int
    reserve : float
        Seconds kept for what follows the last cell.
    floor_ms, ceiling_ms : float
        Bounds of a measurement. The floor is kept even when the time is over: no cell is dropped.
    now : callable
    """

    def __init__(self, seconds, cells, rounds, *, reserve=0.0, floor_ms=1.0, ceiling_ms=40.0, now=time.monotonic):
        self._end = now() + seconds - reserve
        self._left, self._rounds, self._now = cells, rounds, now
        self._floor, self._ceiling = floor_ms, ceiling_ms
        self._overhead, self._factor, self._seen = 0.3, 2.0, 1  # first guesses, weighted as one cell

    def target_ms(self, libraries: int) -> float:
        """Milliseconds of a measurement in the next cell."""
        share = (self._end - self._now()) / max(1, self._left)
        measured = (share - self._overhead) / self._factor
        return min(self._ceiling, max(self._floor, 1e3 * measured / max(1, self._rounds * libraries)))

    def cell_done(self, libraries: int, target_ms: float, measuring: float, total: float):
        """Tell what a cell took: seconds of `measure`, and in all."""
        nominal = self._rounds * libraries * target_ms / 1e3
        self._left -= 1
        self._seen += 1
        self._overhead += (total - measuring - self._overhead) / self._seen
        if nominal:
            self._factor += (measuring / nominal - self._factor) / self._seen

    @property
    def overrun(self) -> float:
        """Seconds past the end; negative while there is time."""
        return self._now() - self._end
