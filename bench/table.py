"""Tables from saved results: ``python -m bench.table FILE...``. ``numbaflash bench compare A B`` tells two runs apart.

A ratio is the best peer's time over numbaflash's, within one run: above 1, numbaflash is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from numbaflash.benchmarks import records
from numbaflash.benchmarks.progress import colour_wanted
from numbaflash.benchmarks.tables import METRICS, tables

from . import counter_tables


def text_of(recs, **options) -> str:
    """`numbaflash.benchmarks.tables.tables` of what was timed, then counters."""
    counted = [r for r in recs if r["bench"] == counter_tables.BENCH]
    timed = [r for r in recs if r["bench"] != counter_tables.BENCH]
    return "\n\n".join([tables(timed, **options)] * bool(timed) + [counter_tables.text_of(counted)] * bool(counted))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__.split("\n\n")[1])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (.jsonl)")
    parser.add_argument("--metric", choices=METRICS, default="tflops")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    options = parser.parse_args(arguments)
    colour = colour_wanted() and not options.markdown
    try:
        text = text_of(records.read(*options.files), metric=options.metric, markdown=options.markdown, colour=colour)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
