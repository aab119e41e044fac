"""Tables from saved results: ``python -m bench.table FILE...`` and ``python -m bench.table compare A B``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from numbaflash.benchmarks import table
from numbaflash.benchmarks.peers import OURS
from numbaflash.benchmarks.progress import colour_wanted
from numbaflash.benchmarks.table import GREEN, METRICS, RED, SHORT, by_cell, cell_table, compare, latency_table, name_of, summary

from . import counter_tables, records

__all__ = ["GREEN", "METRICS", "OURS", "RED", "SHORT", "by_cell", "cell_table", "compare", "latency_table", "name_of", "summary", "tables"]


def tables(recs, *, metric="tflops", markdown=False, colour=False) -> str:
    """What there is to show of some records, and counters last of all."""
    counted = [r for r in recs if r["bench"] == counter_tables.BENCH]
    others = [r for r in recs if r["bench"] != counter_tables.BENCH]
    parts = [table.tables(others, metric=metric, markdown=markdown, colour=colour)] if others else []
    return "\n\n".join([*parts, counter_tables.text_of(counted)] if counted else parts)


def main(arguments=None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    comparing = arguments[:1] == ["compare"]
    parser = argparse.ArgumentParser(prog="python -m bench.table" + " compare" * comparing, description=__doc__)
    if comparing:
        parser.add_argument("before", type=Path, help="results of the earlier run (.jsonl)")
        parser.add_argument("after", type=Path, help="results of the later run (.jsonl)")
    else:
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help='results (.jsonl), or "compare A B"')
        parser.add_argument("--metric", choices=METRICS, default="tflops")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    options = parser.parse_args(arguments[1:] if comparing else arguments)
    colour = colour_wanted() and not options.markdown
    try:
        if comparing:
            text = compare(records.read(options.before), records.read(options.after), markdown=options.markdown, colour=colour)
        else:
            text = tables(records.read(*options.files), metric=options.metric, markdown=options.markdown, colour=colour)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
