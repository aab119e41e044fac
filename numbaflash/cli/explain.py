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
    options.add_choice(parser, device="cpu", device_help="cpu, cuda:INDEX, or an architecture such as sm_90")
    parser.add_argument("--lse", action="store_true", help="plan for a call that also returns lse")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from ..dispatch import use_family
    from ..problem import make_problem
    from ..support import contiguous_layouts, hypothetical_device

    with reported():
        dtype = arguments.dtype or "float32"
        problem = make_problem(*options.shapes(arguments), (dtype,) * 3, **options.attention(arguments))
        raise CommandError("todo")
