"""``numbaflash fuzz``: search this machine for a problem that a kernel gets wrong."""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

from ..dispatch import FAMILIES
from ..problem import DECODE_FEATURES, DTYPES, FEATURES
from .errors import CommandError, reported

OPTIONS = (*FEATURES, "packed")
"""What may be drawn, as `numbaflash.testing.problems` calls it."""

OF_DECODING = tuple(name for name in FEATURES if name in DECODE_FEATURES and name != "seqlens_k")
"""The same of `numbaflash.testing.decode_problems`, whose lengths are always there."""


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "fuzz",
        help="search this machine for a problem that a kernel gets wrong",
        description="Runs random problems (shapes, strides, dtypes, options, nasty values) and compares each with the float64 reference. "
        "A failing one is made small and written to a file for --replay. Exit status 1 when one failed.",
    )
    parser.add_argument("--minutes", type=float, help="time to search (default: 1)")
    parser.add_argument("--family", choices=FAMILIES, help="kernel family to force (default: the best that can)")
    parser.add_argument("--library", help="array library to call through (default: the quickest that reaches a GPU, else numpy)")
    parser.add_argument("--device", type=int, default=0, metavar="INDEX", help="CUDA device (default: %(default)s)")
    search = parser.add_argument_group("search")
    search.add_argument(
        "--direction", choices=("forward", "backward", "both", "decode"), help="attention, its gradients, both, or decoding (default: forward)"
    )
    search.add_argument("--seed", type=int, help="of the search, to repeat it (default: drawn and printed)")
    search.add_argument("--dtype", action="append", choices=DTYPES, help="only this element type; may be given several times")
    search.add_argument("--head-dim", action="append", type=int, help="only this head dim; may be given several times")
    search.add_argument(
        "--option",
        action="append",
        choices=("all", *OPTIONS),
        help="about half of the cases have this option, or are packed sequences; may be given several times (default: none of them); "
        f"decoding has {', '.join(OF_DECODING)}, and always draws caches with and without pages",
    )
    search.add_argument("--max-seqlen", type=int, help="longest sequence (default: 400)")
    search.add_argument("--failure", metavar="FILE", help="where a failing case goes (default: numbaflash-fuzz.json)")
    parser.add_argument("--replay", metavar="FILE", help="run the case in FILE again instead of searching")
    return parser


def run(arguments: argparse.Namespace) -> int:
    chosen = {
        name: getattr(arguments, option)
        for name, option in (
            ("minutes", "minutes"),
            ("direction", "direction"),
            ("seed", "seed"),
            ("dtypes", "dtype"),
            ("head_dims", "head_dim"),
            ("max_seqlen", "max_seqlen"),
            ("failure", "failure"),
        )
        if getattr(arguments, option) is not None
    }
    if arguments.option is not None:
        every = OF_DECODING if arguments.direction == "decode" else OPTIONS
        chosen["options"] = every if "all" in arguments.option else tuple(arguments.option)
    with reported():
        from .. import testing

        if arguments.replay is not None:
            if chosen:
                raise CommandError(f"--replay runs one case, without a search; leave out {', '.join(chosen)}")
            return testing.replay(arguments.replay, arguments.family, arguments.library, device=arguments.device)
        with _ending_at_once(Path(f"{arguments.failure or 'numbaflash-fuzz.json'}.running")):
            return testing.fuzz(family=arguments.family, library=arguments.library, device=arguments.device, **chosen)


@contextmanager
def _ending_at_once(running: Path):
    """An interrupt ends the process where it is: Hypothesis loses a KeyboardInterrupt that comes in one of its callbacks."""

    def end(number, frame):
        with suppress(OSError):
            running.unlink()
        os.write(2, b"numbaflash: interrupted\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
