"""The command line. Each command is a module with ``add_parser(commands)`` and ``run(arguments) -> exit status``.

Exit status: 0 done, 1 a comparison, a verification, a tuned candidate, a benchmark or a fuzzed case failed, 2 a wrong argument or file (one line on
stderr), 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback

from .._version import __version__
from . import bench, cache, demo, env, explain, fuzz, run, support, tune, verify, warmup
from .errors import CommandError

COMMANDS = (run, demo, verify, tune, bench, explain, env, cache, warmup, fuzz, support)


class Parser(argparse.ArgumentParser):
    """Tells a wrong argument in one line, as every other error."""

    def error(self, message):
        self.exit(2, f"numbaflash: error: {message} ({self.prog} --help lists the options)\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="numbaflash",
        description="Exact attention (FlashAttention) on the CPU and on NVIDIA GPUs.",
        epilog="numbaflash COMMAND --help tells the options of a command.",
    )
    top.add_argument("--version", action="version", version=f"numbaflash {__version__}")
    top.add_argument("--traceback", action="store_true", help="show where an error came from instead of one line")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands).set_defaults(run=command.run)
    return top


def main(argv=None) -> int:
    """Run one command and return its exit status."""
    arguments = parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("numbaflash: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more when it flushes at exit
        return 141
    except (CommandError, MemoryError) as error:
        if arguments.traceback:
            traceback.print_exc()
        else:
            print(f"numbaflash: error: {one_line(error)}", file=sys.stderr)
        return 2


def _joined(argv) -> list[str]:
    """``--window -1,0`` as ``--window=-1,0``: argparse takes what begins with a minus, and is no plain number, for an option."""
    joined = []
    for word in argv:
        if joined and re.fullmatch(r"--[a-z-]+", joined[-1]) and re.match(r"-[\d.]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def one_line(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    return " ".join(str(error).split())
