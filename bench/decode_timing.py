"""Decoding in CUDA graphs, whose results are checked, and what a call keeps the host with and without one."""

from __future__ import annotations

import math
from dataclasses import replace

from .latency import host_microseconds
from .timing import Times, quartiles

METHOD = (
    "CUDA events around replays of a CUDA graph of many calls (a batch of calls where in_graph is false) queued behind a spinning kernel; "
    "libraries, a copy, and the same bytes at equal lengths interleaved, order rotated, caches rotated past the L2 cache"
)
GRAPH_MS, FEWEST, MOST = 1.0, 2, 32
HOST_BLOCKS, HOST_CALLS = 20, 50
PLAN_RUN, DECODE, REPLAY = "plan.run", "decode", "replay of a graph of plan.run"


def calls_in_graph(attended: int, sets: int) -> int:
    """How many calls a graph holds: about a millisecond of them, each cache as often as another, so that a replay finds none in the L2 cache."""
    guess_ms = attended / 4e9 + 0.005
    return sets * math.ceil(max(FEWEST, min(MOST, round(GRAPH_MS / guess_ms))) / sets)


def captured(torch, call, caches, count, sample):
    """A function that replays a graph of so many calls, with the caches in turn, the first ones last.

    RuntimeError where the graph does not write what the sample wants: a library whose launches went past the capture would take no time in it.
    """
    call(*caches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(count):
            out = call(*caches[(n + 1) % len(caches)])
    out.fill_(math.nan)
    graph.replay()
    fault = sample.judge(out)[1]
    if fault:
        raise RuntimeError(f"its graph: {fault}")
    return graph.replay


def of_one_call(times: Times, count: int) -> dict:
    """Fields of a record, where what was timed is so many calls."""
    return replace(times, ms=[ms / count for ms in times.ms], launches=times.launches * count).summary()


def host_fields(calls: dict, synchronize) -> dict:
    """What each of some calls keeps the host: first quartile, median and third quartile in microseconds."""
    times = {name: host_microseconds(call, synchronize, blocks=HOST_BLOCKS, calls=HOST_CALLS) for name, call in calls.items()}
    return {"host_us": {name: list(quartiles(values)) for name, values in times.items()}}
