"""``numbaflash explain``: which kernel would compute a problem, how, and why not another."""

from __future__ import annotations

import argparse

from . import options
from .errors import reported


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "explain",
        help="which kernel would compute a problem, with which tiles, and why not another",
        description="Plans a problem on contiguous arrays without computing it. A GPU architecture such as sm_90 needs no GPU.",
    )
    options.add_shape(parser, seqlen=4096, heads=16, head_dim=128)
    options.add_attention(parser)
    options.add_choice(parser, device="cpu", device_help="cpu, cuda:INDEX, or an architecture such as sm_90", dtype="float32")
    parser.add_argument("--lse", action="store_true", help="plan for a call that also returns lse")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from ..dispatch import make_plan, use_family
    from ..explanation import explain_plan
    from ..problem import make_problem
    from ..support import contiguous_layouts
    from .devices import planned_device

    with reported(), use_family(arguments.family):
        problem = make_problem(*options.shapes(arguments), (arguments.dtype,) * 3, **options.attention(arguments))
        if problem.is_empty:
            print("nothing to compute: the result has no element")
            return 0
        device = planned_device(arguments.device)
        print(explain_plan(make_plan(problem, contiguous_layouts(problem, lse=arguments.lse), device)))
    return 0
