"""``numbaflash explain``: which kernel would compute a problem, how, and why not another."""

from __future__ import annotations

import argparse

from . import options
from .errors import CommandError, reported


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "explain",
        help="which kernel would compute a problem, with which tiles, and why not another",
        description="Plans a problem on contiguous arrays without computing it. A GPU architecture such as sm_90 needs no GPU.",
    )
    options.add_shape(parser, seqlen=4096, heads=16, head_dim=128)
    options.add_attention(parser)
    options.add_arrays(parser)
    options.add_choice(parser, device="cpu", device_help="cpu, cuda:INDEX, or an architecture such as sm_90", dtype="float32")
    caches = parser.add_argument_group("caches")
    caches.add_argument(
        "--decode", action="store_true", help="plan numbaflash.decode: --seqlen-q new tokens (default: 1) beside caches of --seqlen-k keys"
    )
    caches.add_argument("--page-size", type=int, metavar="N", help="with --decode: keys of a page (default: caches are contiguous)")
    caches.add_argument(
        "--num-splits", type=int, metavar="N", help="with --decode: parts that the keys are computed in (default: the library chooses)"
    )
    parser.add_argument("--lse", action="store_true", help="plan for a call that also returns lse")
    parser.add_argument("--backward", action="store_true", help="plan the gradients")
    parser.add_argument(
        "--needs", type=options.names, metavar="NAMES", help="with --backward: inputs with gradients, of q, k, v, bias, sinks (default: q,k,v)"
    )
    parser.add_argument("--deterministic", action="store_true", help="with --backward: the same bits each time")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from ..dispatch import make_backward_plan, make_decode_plan, make_plan, use_family
    from ..explanation import explain_plan
    from ..problem import NEEDS, check_needs, check_num_splits, check_seed
    from ..support import contiguous_backward_layouts, contiguous_layouts
    from .devices import planned_device

    if arguments.needs and not arguments.backward:
        raise CommandError("--needs is for gradients, add --backward")
    if arguments.deterministic and not arguments.backward:
        raise CommandError("--deterministic is for gradients, add --backward; the forward gives the same bits each time")
    if arguments.decode and arguments.backward:
        raise CommandError("--decode has no gradients; leave --backward out")
    for name in ("page_size", "num_splits"):
        if getattr(arguments, name) is not None and not arguments.decode:
            raise CommandError(f"--{name.replace('_', '-')} is for caches, add --decode")
    with reported(), use_family(arguments.family):
        check_seed(arguments.seed or 0, 0)
        problem = options.cache_problem(arguments) if arguments.decode else options.problem(arguments)
        if problem.sees_nothing if arguments.backward else problem.is_empty:
            print("nothing to compute: " + ("the result has no element" if problem.is_empty else "no query sees a key, so every gradient is 0"))
            return 0
        device = planned_device(arguments.device)
        if arguments.decode:
            plan = make_decode_plan(problem, contiguous_layouts(problem, lse=arguments.lse), device, check_num_splits(arguments.num_splits))
        elif arguments.backward:
            needs = check_needs(arguments.needs or NEEDS, problem.gradients)
            plan = make_backward_plan(problem, contiguous_backward_layouts(problem, needs), device, arguments.deterministic)
        else:
            plan = make_plan(problem, contiguous_layouts(problem, lse=arguments.lse), device)
        print(explain_plan(plan))
    return 0
