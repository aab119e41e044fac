"""The last check: what attention is worth to those who wait for tokens, in the loop of `numbaflash.service`, with weights that are random."""

from __future__ import annotations

import importlib.util

from .places import Place
from .shapes import Call

ENGINES = ("numbaflash", "torch", "none")
"""In turns; "none" computes no attention, which bounds what any could gain."""
SIZES = {
    "cpu": {"layers": 2, "hidden": 256, "vocabulary": 1000, "requests": 6, "prompt": 128, "answer": 16, "slots": 4, "rate": 20.0, "rounds": 1},
    "cuda": {"layers": 4, "hidden": 4096, "vocabulary": 32000, "requests": 32, "prompt": 2048, "answer": 64, "slots": 32, "rate": 32.0, "rounds": 2},
}
"""A small model, and a load that takes a few seconds."""
LEAST_SECONDS = 8.0


def why_not(calls: list[Call], left: float) -> str | None:
    """Why nothing is served; None where something is."""
    if importlib.util.find_spec("torch") is None:
        return "the server needs PyTorch, which is not installed"
    if left < LEAST_SECONDS:
        return "no time left (--budget)"
    return None if served_shape(calls) else "the server's model has causal attention over equal head dims, and none of these calls is that"


def served_shape(calls: list[Call]) -> Call | None:
    """The first call whose heads the server's model can have."""
    for call in calls:
        p = call.problem
        if not call.latent and p.head_dim == p.head_dim_v and p.head_dim % 2 == 0 and call.dtype != "float64" and call.direction != "backward":
            return call
    return None


def serve(calls: list[Call], place: Place, say) -> tuple[str, dict]:
    """Serve a load with each engine.

    Parameters
    ----------
    calls : list of Call
    place : Place
        Its device is served on.
    say : callable
        Told of an engine that cannot be used, which is left out.

    Returns
    -------
    (str, dict)
        The medians of the rounds by engine are under "engines".
    """
    import torch

    from .. import service

    p, size = served_shape(calls).problem, SIZES[place.device.kind]
    device = torch.device("cuda", place.device.index) if place.on_gpu else torch.device("cpu")
    heads = {"heads": p.heads, "kv_heads": p.kv_heads, "head_dim": p.head_dim}
    shape = service.Shape(layers=size["layers"], hidden=size["hidden"], feed_forward=size["hidden"] * 11 // 4, vocabulary=size["vocabulary"], **heads)
    load, capacity = service.Load(*(size[name] for name in ("requests", "prompt", "answer", "rate"))), size["prompt"] + size["answer"]
    model = service.Model(shape, capacity, device, getattr(torch, p.dtype))
    servers, found = {}, {}
    for name in ENGINES:
        try:
            servers[name] = service.Server(model, service.ENGINES[name](model, size["slots"], capacity), chunk=size["prompt"] // 2)
            servers[name].warm_up(load)
            found[name] = []
        except Exception as error:
            servers.pop(name, None)
            if name == "numbaflash":
                raise
            say(name, f"{type(error).__name__}: {' '.join(str(error).split())}")
    for _ in range(size["rounds"]):
        for name, server in servers.items():
            requests = service.arrivals(load, shape.vocabulary)
            found[name].append(service.summarise(requests, server.run(requests), service.Limits()))
    engines = {name: _medians(rounds) for name, rounds in found.items()}
    if engines["numbaflash"]["errors"]:
        raise AssertionError(f"{engines['numbaflash']['errors']:.0%} of the requests failed: a logit was no number")
    return _told(engines), {"engines": engines, "model": vars(shape), "load": vars(load), "status": "info"}


def _medians(rounds) -> dict[str, float]:
    def middle(values):
        ordered = sorted(values)
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    found = {f"{name}_ms": middle([each[name]["p50"] for each in rounds]) for name in ("ttft", "tpot")}
    return found | {name: middle([each[name] for each in rounds]) for name in ("throughput", "goodput", "errors")}


def _told(engines) -> str:
    lines = [
        f"{name} first token {each['ttft_ms']:.3g} ms, {each['tpot_ms']:.3g} ms a token, {each['throughput']:.3g} tokens/s, "
        f"{each['goodput']:.3g} good requests/s, {each['errors']:.0%} errors"
        for name, each in engines.items()
    ]
    for quantity, words in (("ttft_ms", "time to the first token"), ("tpot_ms", "time a token")):
        least = engines.get("none", {}).get(quantity)
        if least:
            ours = engines["numbaflash"][quantity]
            share = max(0.0, 1 - least / ours)
            lines.append(f"attention is {share:.0%} of the {words} with numbaflash, which bounds any gain from it to {ours / least:.2f} times")
    return "; ".join(lines)
