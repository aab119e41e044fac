"""``numbaflash support``: what each kernel family can compute."""

from __future__ import annotations

import argparse


def add_parser(commands) -> argparse.ArgumentParser:
    return commands.add_parser("support", help="tables of what each kernel family can compute, as in README.md")


def run(arguments: argparse.Namespace) -> int:
    from ..support import features_markdown, markdown

    print(markdown(), features_markdown(), markdown("decode"), sep="\n\n")
    return 0
