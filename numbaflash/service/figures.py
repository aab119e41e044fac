"""What requests saw of a server: times to tokens, and how many were served well."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Limits:
    """What a request must see to count as served well, in seconds: time to the first token, and time a token after it on average."""

    first: float = 1.0
    token: float = 0.05


def summarise(requests, seconds: float, limits: Limits) -> dict:
    """The figures of a run.

    Parameters
    ----------
    requests : sequence of Request
        Served ones.
    seconds : float
        What the run took.
    limits : Limits

    Returns
    -------
    dict
        ``ttft`` and ``tpot``: time to the first token and time per output token, in milliseconds, their `QUANTILES` by "p50", ...;
        ``throughput``: tokens of answers a second; ``goodput``: requests a second that were within the limits and did not fail;
        ``errors``: the share of requests that failed.
    """
    if not requests:
        raise ValueError("there must be at least one request to summarise; got none")
    served = [each for each in requests if each.times and not each.failed]
    first = [each.times[0] - each.arrival for each in served]
    token = [(each.times[-1] - each.times[0]) / (len(each.times) - 1) for each in served if len(each.times) > 1]
    good = sum(
        each.times[0] - each.arrival <= limits.first
        and (len(each.times) == 1 or (each.times[-1] - each.times[0]) / (len(each.times) - 1) <= limits.token)
        for each in served
    )
    return {
        "ttft": _quantiles(first),
        "tpot": _quantiles(token),
        "throughput": sum(len(each.tokens) for each in served) / seconds,
        "goodput": good / seconds,
        "errors": 1 - len(served) / len(requests),
    }


def _quantiles(seconds) -> dict:
    return {f"p{n}": float(np.percentile(seconds, n)) * 1e3 if seconds else None for n in QUANTILES}
