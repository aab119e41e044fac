"""``numbaflash verify``: the order of checks of a careful engineer, on this machine and these shapes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

from .._version import __version__
from ..dispatch import FAMILIES
from ..problem import DTYPES
from . import options
from .errors import CommandError, reported

USUAL = {
    "cpu": {"seqlen": (1024,), "heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "requests": 8, "context": 2048},
    "cuda": {"seqlen": (8192,), "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "requests": 64, "context": 8192},
}
CHECKS = ("meaning", "dispatch", "time", "memory", "accuracy", "service")
BUDGET = {"cpu": 80.0, "cuda": 220.0}
LONGEST = {"cpu": 1024, "cuda": 8192}
"""Of prefill, where a model's configuration would have longer sequences."""
MOST_KINDS = 24
"""Of calls in a trace."""


def add_parser(commands) -> argparse.ArgumentParser:
    usual = USUAL["cpu"]
    parser = commands.add_parser(
        "verify",
        help="check meaning, dispatch, time, memory and accuracy of your shapes on this machine",
        description="Checks, in this order: the same meaning as the float64 reference; which kernel runs, and why not a faster one; time after a "
        "warm-up of prefill, one-request decode and batched decode; peak memory; very long inputs and special masks; a small server. Exit status 1 "
        "when a check failed. Shapes come from options, from a model's config.json, or from a trace of numbaflash.record.",
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument("--config", metavar="FILE", help="config.json of a Hugging Face model, or its folder")
    sources.add_argument("--trace", metavar="FILE", help="calls that numbaflash.record wrote")
    shape = parser.add_argument_group("shape", f"Defaults on the CPU; on a GPU: {_told(USUAL['cuda'])}.")
    shape.add_argument("--batch", type=_positive, help="sequences of prefill and of gradients (default: 1)")
    shape.add_argument("--seqlen", type=_lengths, metavar="N[,N...]", help=f"of prefill and of gradients (default: {usual['seqlen'][0]})")
    shape.add_argument(
        "--context", type=_positive, metavar="N", help=f"keys in the cache of each request that is decoded (default: {usual['context']})"
    )
    shape.add_argument("--requests", type=_positive, metavar="N", help=f"decoded together, beside one alone (default: {usual['requests']})")
    shape.add_argument("--page-size", type=_positive, metavar="N", help="keys of a page of their cache (default: 64)")
    shape.add_argument("--heads", type=_positive, help=f"query heads (default: {usual['heads']})")
    shape.add_argument(
        "--kv-heads", type=_positive, help=f"key and value heads (default: {usual['kv_heads']}, or as many as --heads where that is given)"
    )
    shape.add_argument("--head-dim", type=_positive, help=f"of q and k (default: {usual['head_dim']})")
    shape.add_argument("--head-dim-v", type=_positive, help="of v (default: that of q and k)")
    shape.add_argument("--dtype", choices=DTYPES, help=f"element type (default: {usual['dtype']})")
    shape.add_argument("--no-backward", action="store_true", help="leave gradients out")
    attention = parser.add_argument_group("attention")
    attention.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=None, help="query i sees key j where j <= i + seqlen_k - seqlen_q (default: yes)"
    )
    attention.add_argument("--window", type=options.window, metavar="LEFT,RIGHT", help='inclusive; "none" is unbounded')
    attention.add_argument("--scale", type=float, help="factor of the scores (default: 1/sqrt(head_dim))")
    attention.add_argument("--softcap", type=float, help="scores become SOFTCAP * tanh(score / SOFTCAP) (default: no cap)")
    attention.add_argument("--alibi-slopes", action="store_true", help="a slope a head")
    attention.add_argument("--sinks", action="store_true", help="a sink a head")
    how = parser.add_argument_group("where and how")
    how.add_argument(
        "--library", choices=("numpy", "cupy", "torch", "jax"), help="whose arrays (default: torch or CuPy where they reach a GPU, else numpy)"
    )
    how.add_argument("--device", type=int, default=0, metavar="INDEX", help="CUDA device, where the library reaches one (default: %(default)s)")
    how.add_argument("--family", choices=FAMILIES, help="force a kernel family (default: the best that can)")
    how.add_argument("--budget", type=_seconds, metavar="SECONDS", help="time for all of it (default: 80 on the CPU, 220 on a GPU)")
    how.add_argument(
        "--check", type=options.names, metavar="NAMES", default=CHECKS, help=f"only these, of {', '.join(CHECKS)} (default: all of them)"
    )
    how.add_argument("--seed", type=int, default=0, help="of the random numbers (default: %(default)s)")
    result = parser.add_argument_group("report")
    result.add_argument("--json", metavar="FILE", help="write all findings and figures")
    result.add_argument("--html", metavar="FILE", help="write a page with plots, which needs no other file")
    return parser


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    from .. import verify as verification
    from ..verify import report as shown
    from ..verify.findings import Report

    _check_sources(arguments)
    if unknown := set(arguments.check) - set(CHECKS):
        raise CommandError(f"--check must be of {', '.join(CHECKS)}; got {', '.join(sorted(unknown))}")
    with reported():
        for path in (arguments.json, arguments.html):
            _check_writable(path)
        place = verification.open_place(arguments.library, arguments.seed, arguments.device)
        calls, source = _calls(arguments, place.device.kind, verification)
        report = Report(arguments.budget or BUDGET[place.device.kind], say=lambda line: print(line, flush=True), began=began)
        report.settings = _settings(arguments, place, source, report.seconds)
        for name, x in report.settings.items():
            print(f"{name}: {x}")
        for call in calls:
            print(f"  {call}" + (f" ({call.count} times)" if call.count > 1 else ""))
        print(flush=True)
        verification.verify(calls, place, report, family=arguments.family, checks=arguments.check)
        print("", shown.table(report), sep="\n")
        if arguments.json:
            _write(arguments.json, json.dumps(report.to_dict(), indent=1, default=str) + "\n")
        if arguments.html:
            _write(arguments.html, shown.page(report))
    return 1 if report.failed or not any(finding.status in ("pass", "info") for finding in report.findings) else 0


def _calls(arguments, kind, verification):
    """(kinds of calls, where they come from)."""
    if arguments.trace is not None:
        from ..verify.order import same_kinds

        found = same_kinds(verification.read_trace(arguments.trace))
        more = f", the {MOST_KINDS} most frequent of {len(found)} kinds" if len(found) > MOST_KINDS else ""
        return found[:MOST_KINDS], f"{arguments.trace}: {sum(call.count for call in found)} calls{more}"
    usual, longest = USUAL[kind], None
    if arguments.config is not None:
        layers, longest = verification.read_config(arguments.config)
        if arguments.dtype is not None:
            layers = [replace(each, dtype=arguments.dtype) for each in layers]
        source = arguments.config
    else:
        heads = arguments.heads or usual["heads"]
        kv_heads = arguments.kv_heads or (heads if arguments.heads else usual["kv_heads"])
        head_dim = arguments.head_dim or usual["head_dim"]
        numbers = {name: getattr(arguments, name) for name in ("window", "scale", "softcap")}
        causal = arguments.causal is not False
        of = {"causal": causal, "alibi": arguments.alibi_slopes, "sinks": arguments.sinks}
        dtype = arguments.dtype or usual["dtype"]
        layers = [verification.Attention(heads, kv_heads, head_dim, arguments.head_dim_v or head_dim, dtype, **of, **numbers)]
        source = "the command line"
    most = min(longest or LONGEST[kind], LONGEST[kind])
    seqlens = arguments.seqlen or ((most,) if arguments.config is not None else usual["seqlen"])
    context = arguments.context or (max(seqlens) if arguments.config is not None or arguments.seqlen else usual["context"])
    more = {"batch": arguments.batch or 1, "requests": arguments.requests or usual["requests"], "page_size": arguments.page_size or 64}
    found = []
    for layer in layers:
        found += verification.calls_of(layer, seqlens=seqlens, context=context, backward=not arguments.no_backward, **more)
    for call in found:
        call.problem  # noqa: B018  whether the shapes fit
    return found, source


def _check_sources(arguments):
    """What a trace, or a configuration, says already is not to be said again."""
    attention = ("heads", "kv_heads", "head_dim", "head_dim_v", "causal", "window", "scale", "softcap")
    shapes = ("batch", "seqlen", "context", "requests", "page_size", "dtype")
    given = [name for name in attention if getattr(arguments, name) is not None]
    given += [name for name in ("alibi_slopes", "sinks") if getattr(arguments, name)]
    if arguments.trace is not None:
        given += [name for name in shapes if getattr(arguments, name) is not None] + (["no_backward"] if arguments.no_backward else [])
    source = "--trace" if arguments.trace is not None else "--config" if arguments.config is not None else None
    if source and given:
        raise CommandError(f"{source} says these already; leave out {', '.join('--' + name.replace('_', '-') for name in given)}")


def _settings(arguments, place, source, seconds):
    return {
        "numbaflash": f"{__version__}, Python {platform.python_version()}",
        "device": place.device.name if place.on_gpu else f"the CPU ({platform.machine()}, {platform.system()})",
        "arrays": place.library,
        "shapes": source,
        "family": arguments.family or "the best that can",
        "budget": f"{seconds:g} s",
        "seed": arguments.seed,
    }


def _check_writable(path):
    """Known before anything is computed."""
    if path is not None and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
        raise CommandError(f"{path} cannot be written: it must be a file in a folder that there is")


def _write(path, text):
    """The whole file or none."""
    beside = Path(f"{path}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _told(usual) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {x[0] if isinstance(x, tuple) else x}" for name, x in usual.items())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; got {text}")
    return value
