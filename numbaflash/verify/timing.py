"""The third check: how long the operations take, in turns, after a warm-up."""

from __future__ import annotations

import math
from statistics import median

from ..measuring import seconds_text

LEAST_ROUNDS, MOST_ROUNDS = 5, 101


def quartiles(values) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    ordered = sorted(values)

    def at(fraction):
        place = fraction * (len(ordered) - 1)
        low = math.floor(place)
        return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    return at(0.25), median(ordered), at(0.75)


def measure(place, runs: dict, left) -> dict[str, dict[str, list[float]]]:
    """Seconds of each of some calls: of the device, and until the host had its own again.

    They take turns, beginning with another one in each round, until the time is over, but for a few rounds that are always made.

    Parameters
    ----------
    place : Place
    runs : dict of str to callable
    left : callable
        Returns the seconds that are left.
    """
    for run in runs.values():
        run()
    times = {name: {"seconds": [], "host": []} for name in runs}
    names = list(runs)
    for turn in range(MOST_ROUNDS):
        if turn >= LEAST_ROUNDS and left() <= 0:
            break
        for n in range(len(names)):
            name = names[(turn + n) % len(names)]
            device, host = place.seconds(runs[name])
            times[name]["seconds"].append(device)
            times[name]["host"].append(host)
    return times


def summary(call, times) -> tuple[str, dict]:
    """What a line of the report says of them."""
    low, middle, high = quartiles(times["seconds"])
    figures = {
        "seconds": middle,
        "seconds_q1": low,
        "seconds_q3": high,
        "rounds": len(times["seconds"]),
        "host_seconds": median(times["host"]),
    }
    text = f"{seconds_text(middle)} ({seconds_text(low)} to {seconds_text(high)})"
    if call.direction == "decode" and call.problem.left is None:  # a window leaves most of a cache alone
        read = call.input_bytes + call.cache_bytes
        figures["bytes_a_second"] = read / middle
        text += f", {read / middle / 1e9:.3g} GB/s of its cache and inputs"
    elif call.direction != "decode" and call.pairs:
        p = call.problem
        products = 2 * (p.head_dim + p.head_dim_v) if call.direction == "forward" else 2 * (3 * p.head_dim + 2 * p.head_dim_v)
        figures["flops"] = products * call.pairs / middle
        text += f", {products * call.pairs / middle / 1e12:.3g} TFLOP/s"
    return text, figures
