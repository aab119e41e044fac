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
    parser.add_argument(
        "--seqlen",
        type=_list(_pair),
        help="seqlen, or seqlen_q:seqlen_k (default: 512,4096,16384, or none where there are packed sequences or caches)",
    )
    parser.add_argument("--batch", type=int, default=1, help="batch entries, or how many packed sequences there are (default: %(default)s)")
    packed = parser.add_argument_group("packed sequences")
    packed.add_argument("--total", type=_list(_pair), default=(), help="tokens of all sequences, or total_q:total_k")
    packed.add_argument("--max-seqlen", type=_list(_pair), help="of the longest sequence, or max_seqlen_q:max_seqlen_k (default: not told)")
    caches = parser.add_argument_group("caches")
    caches.add_argument("--cache", type=_list(int), default=(), help="keys that the cache of a sequence has room for, as numbaflash.decode takes it")
    caches.add_argument("--page-size", type=_list(int), help="keys of a page (default: caches are contiguous)")
    caches.add_argument("--new-tokens", type=_list(int), default="1", help="queries of a sequence (default: %(default)s)")
    caches.add_argument("--num-splits", type=int, help="parts that the keys are computed in (default: the library chooses)")
    options.add_numbers(parser.add_argument_group("numbers"))
    options.add_arrays(parser)
    calls = parser.add_argument_group("calls")
    calls.add_argument("--lse", type=_list(_yes), default="no,yes", help="of no, yes: calls that return lse (default: %(default)s)")
    calls.add_argument(
        "--direction", type=_list(str), default="forward", help="of forward, backward: attention, its gradients, or both (default: %(default)s)"
    )
    calls.add_argument("--deterministic", action="store_true", help="gradients that have the same bits each time")
    calls.add_argument("--needs", type=options.names, default="q,k,v", help="inputs with gradients, of q, k, v, bias, sinks (default: %(default)s)")
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
    if arguments.max_seqlen and not arguments.total:
        raise CommandError("--max-seqlen: for packed sequences alone, add --total")
    if (arguments.page_size or arguments.num_splits) and not arguments.cache:
        raise CommandError("--page-size and --num-splits are for caches, add --cache")
    if "backward" not in arguments.direction and (arguments.deterministic or arguments.needs != ("q", "k", "v")):
        raise CommandError("--deterministic and --needs are for gradients, add --direction backward")
    with reported():
        device = planned_device(arguments.device)
        numbers = {name: getattr(arguments, name) for name in ("scale", "softcap", "dropout")}
        try:
            report = warmup(
                dtypes=arguments.dtype,
                head_dims=arguments.head_dim,
                causal=arguments.causal,
                windows=arguments.window or (None,),
                heads=arguments.heads,
                seqlens=arguments.seqlen,
                totals=arguments.total,
                max_seqlens=arguments.max_seqlen or (None,),
                caches=arguments.cache,
                page_sizes=arguments.page_size or (None,),
                new_tokens=arguments.new_tokens,
                num_splits=arguments.num_splits,
                batch=arguments.batch,
                options=numbers | options.arrays(arguments),
                return_lse=arguments.lse,
                directions=arguments.direction,
                deterministic=arguments.deterministic,
                needs=arguments.needs,
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


def _yes(text):
    if text not in ("no", "yes"):
        raise argparse.ArgumentTypeError(f"must be of no, yes; got {text!r}")
    return text == "yes"


def _causal(text):
    values = {"no": False, "yes": True, "top_left": "top_left"}
    if text not in values:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(values)}; got {text!r}")
    return values[text]
