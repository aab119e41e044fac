"""Device time of short GPU calls, several libraries in one run.

The launches of a measurement are queued behind a kernel that only spins, so that the device never waits for the host:
what lies between the two events is device time, however slow the host side of a library is. A start event that has
already happened when the last launch was queued shows that the spin was too short; the measurement is then repeated
behind a longer one. Libraries take turns within each round, in an order that rotates, since a power-limited card drifts.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median

METHOD = "CUDA events around a batch of calls queued behind a spinning kernel; libraries interleaved, order rotated, inputs rotated past the L2 cache"
MAX_LAUNCHES = 64  # the launch queue holds about a thousand kernels, and a call may be ten
MAX_SPIN_MS = 250.0
L2_MULTIPLE = 3
HOST_BLOCKS, HOST_CALLS = 40, 100  # a block stays below the thousand launches that a stream queues


@dataclass
class Times:
    """Measurements of one library.

    Attributes
    ----------
    ms : list of float
        Milliseconds a call, one for each round.
    launches : int
        How often each measurement makes the call.
    count : int
        Calls of the library in one of these: more than one in a graph.
    host_bound : bool
        True when no spin was long enough, because the call itself waits for the device: the times then hold host time too.
    spin_ms : float
        Length of the spin that the launches are queued behind.
    host_us : list of float
        Microseconds that a call kept the host meanwhile, one for each round: the device was busy with the spin, so nothing was waited for, but where
        the library itself waits. None of graphs, whose launch is no call.
    error : Exception, optional
        What a call has raised; its times end there.
    """

    ms: list[float] = field(default_factory=list)
    launches: int = 1
    count: int = 1
    host_bound: bool = False
    spin_ms: float = 1.0
    host_us: list[float] = field(default_factory=list)
    error: Exception | None = None

    def summary(self) -> dict:
        """Median, quartiles and least, as fields of a record; raises what a call has raised."""
        if self.error is not None:
            raise self.error
        q1, q2, q3 = quartiles(self.ms)
        return {
            "ms": q2,
            "ms_q1": q1,
            "ms_q3": q3,
            "ms_min": min(self.ms),
            "rounds": len(self.ms),
            "launches": self.launches * self.count,
            "host_bound": self.host_bound,
            **(host_fields(self.host_us) if self.host_us else {}),
        }


@dataclass
class Call:
    """What is timed.

    Attributes
    ----------
    run : callable
        Without arguments; launches work on the current stream.
    scope : callable
        Makes the context manager within which it must run; entered once a measurement, so that it is not part of the call's host time.
    count : int
        Calls of the library that it makes: more than one where it replays a graph.
    """

    run: Callable
    scope: Callable[[], AbstractContextManager] = nullcontext
    count: int = 1

    def __call__(self):
        with self.scope():
            return self.run()


def host_fields(microseconds) -> dict:
    """Median and quartiles of host times, as fields of a record."""
    q1, q2, q3 = quartiles(microseconds)
    return {"host_us": q2, "host_us_q1": q1, "host_us_q3": q3}


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


def batch(clock, call: Call, launches: int, times: Times) -> tuple[float, float]:
    """Milliseconds of the device and of the host for a call, in one batch; lengthens ``times.spin_ms`` until the device stays behind the host."""
    run, calls = call.run, launches * call.count
    while True:
        start, end = clock.event(), clock.event()
        clock.spin(times.spin_ms)
        with call.scope():
            start.record()
            began = time.perf_counter()
            for _ in range(launches):
                run()
            host = time.perf_counter() - began
            end.record()
        overtaken = start.query()
        end.synchronize()
        if overtaken and not times.host_bound:
            times.host_bound = times.spin_ms >= MAX_SPIN_MS
            times.spin_ms = 0.0 if times.host_bound else min(2 * times.spin_ms, MAX_SPIN_MS)
            continue
        return start.elapsed_time(end) / calls, 1e3 * host / calls


def measure(clock, calls: dict, *, rounds: int, target_ms: float) -> dict[str, Times]:
    """Time several functions side by side.

    Parameters
    ----------
    clock : numbaflash.benchmarks.gpu.Gpu
        Has ``event()`` and ``spin(ms)``.
    calls : dict of str to Call
        Or to functions without arguments that launch work on the current stream.
    rounds : int
        Measurements of each.
    target_ms : float
        Device milliseconds of a measurement; decides how many calls it holds, 1 at least and `MAX_LAUNCHES` at most.

    Returns
    -------
    dict of str to Times
    """
    calls = {name: call if isinstance(call, Call) else Call(call) for name, call in calls.items()}
    result = {name: Times(count=call.count) for name, call in calls.items()}
    for name, call in calls.items():
        with _kept(result[name]):
            _settle(clock, call, result[name], target_ms)
    names = list(calls)
    for turn in range(rounds):
        for k in range(len(names)):
            name = names[(turn + k) % len(names)]
            if result[name].error is None:
                with _kept(result[name]):
                    device, host = batch(clock, calls[name], result[name].launches, result[name])
                    result[name].ms.append(device)
                    if calls[name].count == 1:
                        result[name].host_us.append(1e3 * host)
    return result


def _settle(clock, call, times, target_ms):
    """Call it until it is warm, and find how many launches a measurement has and how long its spin is."""
    call()
    guess = batch(clock, call, 2, times)[0] * call.count
    times.launches = max(1, min(MAX_LAUNCHES, round(target_ms / guess))) if guess > 0 else MAX_LAUNCHES
    batch(clock, call, times.launches, times)


@contextmanager
def _kept(times):
    """Around a library's calls: whatever it raises, the others are still measured."""
    try:
        yield
    except Exception as error:
        times.error = error


def host_microseconds(call, synchronize, *, blocks=HOST_BLOCKS, calls=HOST_CALLS, clock=time.perf_counter) -> list[float]:
    """Microseconds that a call keeps the host, one mean for each block of calls; the device is drained between blocks."""
    for _ in range(calls):
        call()
    synchronize()
    collecting = gc.isenabled()
    gc.disable()
    try:
        values = []
        for _ in range(blocks):
            start = clock()
            for _ in range(calls):
                call()
            values.append((clock() - start) / calls * 1e6)
            synchronize()
    finally:
        if collecting:
            gc.enable()
    return values


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
