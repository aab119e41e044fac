"""``numbaflash env``: what numbaflash finds on this machine."""

from __future__ import annotations

import argparse
import json


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "env",
        help="versions, GPUs, compilers and caches found on this machine",
        description="Each line is a probe of its own: one that fails says why and the others go on.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--import", action="store_true", dest="import_frameworks", help="also import CuPy, PyTorch and JAX and ask for their GPUs")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from ..environment import env

    found = env(import_frameworks=arguments.import_frameworks)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return 0
