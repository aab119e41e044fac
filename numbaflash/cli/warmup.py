"""``numbaflash warmup``: build kernels before they are needed."""

from __future__ import annotations

import argparse

from ..problem import DTYPES
from . import options
from .errors import CommandError, reported


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "warmup",
        help="build kernels into the disk cache, in parallel",
        description="Builds the kernel of every combination of the given values. Lists are separated by commas; "
        "a pair of different numbers is written first:second.",
    )
    parser.add_argument("--dtype", type=_list(_dtype), default="float16,bfloat16", help="default: %(default)s")
    parser.add_argument("--head-dim", type=_list(_pair), default="64,128", help="head_dim, or head_dim:head_dim_v (default: %(default)s)")
    parser.add_argument("--causal", type=_list(_causal), default="no,yes", help="of no, yes, top_left (default: %(default)s)")
    parser.add_argument(
        "--window", action="append", type=options.window, metavar="LEFT,RIGHT", help='may be given several times; "none" is unbounded'
    )
    parser.add_argument("--heads", type=_list(_pair), default="16", help="heads, or heads:kv_heads (default: %(default)s)")
    parser.add_argument("--seqlen", type=_list(_pair), default="512,4096,16384", help="seqlen, or seqlen_q:seqlen_k (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--workers", type=int, help="compiler processes (default: one a core)")
    parser.add_argument(
        "--device",
        type=options.device_name,
        default="cuda:0",
        help="cpu, cuda:INDEX, or an architecture such as sm_90 to fill the cache on a machine without that GPU (default: %(default)s)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    from ..toolchain.warmup import WarmupError, warmup
    from .devices import planned_device

    if arguments.workers is not None and arguments.workers < 1:
        raise CommandError(f"--workers must be at least 1; got {arguments.workers}")
    with reported():
        device = planned_device(arguments.device)
        try:
            report = warmup(
                dtypes=arguments.dtype,
                head_dims=arguments.head_dim,
                causal=arguments.causal,
                windows=arguments.window or (None,),
                heads=arguments.heads,
                seqlens=arguments.seqlen,
                batch=arguments.batch,
                device=device,
                workers=arguments.workers,
                load=not arguments.device.startswith("sm_"),
            )
        except WarmupError as error:
            print(error.report)
            return 1
    print(report)
    return 0


def _list(one):
    def values(text):
        return [one(part.strip()) for part in text.split(",")]

    return values


def _pair(text):
    try:
        numbers = tuple(map(int, text.split(":")))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"must be a number or first:second; got {text!r}")
    return numbers * (3 - len(numbers))


def _dtype(text):
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(DTYPES)}; got {text!r}")
    return text


def _causal(text):
    values = {"no": False, "yes": True, "top_left": "top_left"}
    if text not in values:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(values)}; got {text!r}")
    return values[text]
