"""``numbaflash cache``: the kernels kept on disk."""

from __future__ import annotations

import argparse
import time

from ..measuring import bytes_text
from .errors import reported


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("cache", help="list, measure or clear the kernels kept on disk")
    parser.add_argument("action", choices=("list", "size", "clear"), help="list the kernels, the last used first; tell their size; delete them")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from ..toolchain import cache

    with reported():
        if arguments.action == "clear":
            print(f"{cache.clear()} kernels deleted from {cache.directory()}")
            return 0
        entries = cache.entries()
        if arguments.action == "list":
            for entry in entries:
                used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
                print(f"{used}  {bytes_text(entry.bytes):>10}  {entry.arch:8}  {entry.build}  {entry.config}")
        print(f"{len(entries)} kernels, {bytes_text(cache.size())} of at most {bytes_text(cache.limit_bytes())} in {cache.directory()}")
    return 0
