"""The calls that a command is about: of options, of a model's configuration, or of a trace; `numbaflash verify` and `numbaflash tune` share them."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..problem import DTYPES
from . import options
from .errors import CommandError

USUAL = {
    "cpu": {"seqlen": (1024,), "heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "requests": 8, "context": 2048},
    "cuda": {"seqlen": (8192,), "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "requests": 64, "context": 8192},
}
LONGEST = {"cpu": 1024, "cuda": 8192}
"""Of prefill, where a model's configuration would have longer sequences."""
MOST_KINDS = 24
"""Of calls in a trace."""


def add_sources(parser: argparse.ArgumentParser) -> None:
    """--config, --trace, and the options that shapes are made of."""
    usual = USUAL["cpu"]
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument("--config", metavar="FILE", help="config.json of a Hugging Face model, or its folder")
    sources.add_argument("--trace", metavar="FILE", help="calls that numbaflash.record wrote")
    shape = parser.add_argument_group("shape", f"Defaults on the CPU; on a GPU: {_told(USUAL['cuda'])}.")
    shape.add_argument("--batch", type=positive, help="sequences of prefill and of gradients (default: 1)")
    shape.add_argument("--seqlen", type=lengths, metavar="N[,N...]", help=f"of prefill and of gradients (default: {usual['seqlen'][0]})")
    shape.add_argument(
        "--context", type=positive, metavar="N", help=f"keys in the cache of each request that is decoded (default: {usual['context']})"
    )
    shape.add_argument("--requests", type=positive, metavar="N", help=f"decoded together, beside one alone (default: {usual['requests']})")
    shape.add_argument("--page-size", type=positive, metavar="N", help="keys of a page of their cache (default: 64)")
    shape.add_argument("--heads", type=positive, help=f"query heads (default: {usual['heads']})")
    shape.add_argument(
        "--kv-heads", type=positive, help=f"key and value heads (default: {usual['kv_heads']}, or as many as --heads where that is given)"
    )
    shape.add_argument("--head-dim", type=positive, help=f"of q and k (default: {usual['head_dim']})")
    shape.add_argument("--head-dim-v", type=positive, help="of v (default: that of q and k)")
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


def calls_of(arguments: argparse.Namespace, kind: str) -> tuple[list, str]:
    """(kinds of calls, where they come from) on a kind of device."""
    from .. import verify as verification

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


def check_sources(arguments: argparse.Namespace) -> None:
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


def _told(usual) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {x[0] if isinstance(x, tuple) else x}" for name, x in usual.items())


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def lengths(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; got {text}")
    return value
