"""Which kernels really ran: one profiler session for a whole grid, after everything is timed."""

from __future__ import annotations

SEPARATOR = "spin_kernel"
NAME_LIMIT = 160


def kernels(calls) -> list[list[str]]:
    """Names of the kernels that each call launches, in order, each name once a call.

    Parameters
    ----------
    calls : iterable of callable
        Each runs on the current stream; made one after the other, so a generator may hold one call's arrays at a time.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    count = 0
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        for call in calls:
            torch.cuda._sleep(1000)  # what lies between two separators belongs to the call
            call()
            torch.cuda._sleep(1000)
            count += 1
        torch.cuda.synchronize()
    events = [(e.time_range.start, e.name) for e in session.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return split(events, count)


def split(events, count: int) -> list[list[str]]:
    """Kernel names between the first and second separator, the third and fourth, ..., out of (start, name) pairs.

    ValueError unless there are `count` such groups.
    """
    groups, separators = [], 0
    for _, name in sorted(events):
        if SEPARATOR in name:
            separators += 1
            if separators % 2:
                groups.append([])
        elif separators % 2 and short(name) not in groups[-1]:
            groups[-1].append(short(name))
    if separators != 2 * count:
        raise ValueError(f"the profiler saw {separators} of {2 * count} separators")
    return groups


def short(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= NAME_LIMIT else name[: NAME_LIMIT - 3] + "..."
