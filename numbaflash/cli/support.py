"""``numbaflash support``: what each kernel family can compute."""

from __future__ import annotations

import argparse


def add_parser(commands) -> argparse.ArgumentParser:
    return commands.add_parser("support", help="table of what each kernel family can compute, as in README.md")


def run(arguments: argparse.Namespace) -> int:
    from ..support import markdown

    print(markdown())
    return 0
