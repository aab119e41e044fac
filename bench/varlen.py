"""Packed sequences on a GPU beside FA2, FA4 and cuDNN, beside a padded batch, and beside the plain kernel's rate: ``python -m bench.varlen``.

64k tokens in sequences of several lengths, forward and gradients. The ideal is the time in which the plain kernel would do the same operations, those
of each sequence by itself, at the rate that it has in the same rounds on a batch of sequences of 4k with the same heads, head dim and mask. How it is
measured: `bench.grids`.
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import product

from numbaflash.benchmarks import records, running
from numbaflash.benchmarks.cells import DTYPES, PackedCell, heads_of
from numbaflash.benchmarks.packed import BESIDE
from numbaflash.benchmarks.passes import PackedBackward, PackedForward
from numbaflash.benchmarks.peers import OURS, OURS_PADDED, Numbaflash
from numbaflash.benchmarks.tables import SHORT

from . import grids

PROGRAM = "bench.varlen"
TOKENS, SEED = 65536, 1
PLAIN, PLAIN_SEQLEN = "plain", 4096
DIRECTIONS = {what.direction: what for what in (PackedForward, PackedBackward)}
DEFAULTS = {"budget": 150.0, "rounds": 5}
BARS = {"fa2": 1.0, "fa4": 1.0}
IDEAL_BAR = 1.1


def uniform_lengths(tokens: int = TOKENS, least: int = 64, most: int = 4096, seed: int = SEED) -> tuple[int, ...]:
    """Lengths drawn uniformly until they have so many tokens; the last one is cut to fit."""
    rng, lengths = random.Random(seed), []
    while tokens:
        lengths.append(min(tokens, rng.randint(least, most)))
        tokens -= lengths[-1]
    return tuple(lengths)


LENGTHS = {
    "uniform": uniform_lengths(),
    "equal": (2048,) * (TOKENS // 2048),
    "uneven": (128,) * (TOKENS // 512) + (TOKENS // 2,) + (128,) * (TOKENS // 512),
}
"""Scenarios: lengths from 64 to 4096; all of 2k; one of 32k amid many of 128, last, as checking it takes longest."""


class Run(running.Run):
    """A run in which the plain kernel takes turns with the libraries, so that it tells what is ideal."""

    def __init__(self, what, options, libraries, common, device, built=()):
        super().__init__(what, options, libraries, common, device, built)
        self.plain = running.Run(what.plain, options, {OURS: Numbaflash()}, common, device, built)

    @staticmethod
    def tasks(what, cells, libraries):
        yardsticks = dict.fromkeys(map(plain_cell, cells))
        return running.Run.tasks(what, cells, libraries) + running.Run.tasks(what.plain, yardsticks, [OURS])

    def admit(self, cell, note):
        admitted = super().admit(cell, note)
        plain = self.plain.admit(plain_cell(cell), note) if OURS in admitted else {}
        return {PLAIN: plain[OURS], **admitted} if plain else admitted  # ahead of our record, which tells of it

    def timed(self, cell, name, times, facts, note):
        if name == PLAIN:
            return self.plain.timed(plain_cell(cell), OURS, times, facts, note)
        record = super().timed(cell, name, times, facts, note)
        if name == OURS:
            record |= beside(record, self.plain.records[-1])
        return record


def plain_cell(cell):
    """As many tokens in sequences of 4k."""
    return cell.batch_of(max(1, cell.tokens // PLAIN_SEQLEN), PLAIN_SEQLEN)


def beside(record, plain) -> dict:
    """What the record of the plain kernel adds to ours: itself, but for what both have, and the ideal time, where there is one."""
    shared = {name for name, value in plain.items() if record.get(name) == value}
    found = {"plain": {name: value for name, value in plain.items() if name not in shared}}
    if plain["ms"] is not None:
        found["ideal_ms"] = record["ms"] * record["tflops"] / plain["tflops"]
    return found


def table(found) -> str:
    """A line a cell and direction: our time, its ratio to the ideal one, and the time of everything else over ours."""
    others = [name for name in BESIDE if any(r["library"] == name for r in found)]
    columns = "".join(f"{'padded' if name == OURS_PADDED else name:>8}" for name in others)
    lines = [f"{'lengths':9}{'dtype':6}{'D':>4} {'heads':7}{'mask':8}{'direction':10}{'ms':>9}{'TFLOP/s':>9}{'of ideal':>10}{columns}"]
    for key, place in places(found).items():
        lengths, direction, *cell = key
        values = dict(zip(records.CELL, cell, strict=True))
        heads = f"{values['heads']}/{values['kv_heads']}"
        start = f"{lengths:9}{SHORT.get(values['dtype'], values['dtype']):6}{values['head_dim']:>4} {heads:7}"
        start += f"{'causal' if values['causal'] else 'full':8}{direction:10}"
        ours = place[OURS]
        if ours["ms"] is None:
            lines.append(f"{start}{'-':>9}  {ours['skipped']}")
            continue
        share = ideal_share(ours)
        ratios = "".join(f"{_number(ratio(place, name)):>8}" for name in others)
        lines.append(f"{start}{ours['ms']:9.3f}{ours['tflops']:9.0f}{_number(share):>10}{ratios}")
    return "\n".join([*lines, "", *bars(found)])


def places(found) -> dict[tuple, dict[str, dict]]:
    """{(lengths, direction, *cell): {library: record}} where numbaflash has a record."""
    cells = {}
    for record in found:
        cells.setdefault((record["lengths"], record["direction"], *(record[name] for name in records.CELL)), {})[record["library"]] = record
    return {key: place for key, place in cells.items() if OURS in place}


def ratio(place, name) -> float | None:
    """The time of a library over ours; None where either is missing."""
    ours, theirs = (place.get(each, {}).get("ms") for each in (OURS, name))
    return theirs / ours if ours and theirs else None


def ideal_share(ours) -> float | None:
    """Our time over the ideal one; None where either is missing."""
    return ours["ms"] / ours["ideal_ms"] if ours["ms"] and "ideal_ms" in ours else None


def bars(found) -> list[str]:
    """How the uniform lengths stand to the bars: a line each, as far as there is something to compare."""
    cells = [place for (lengths, *_), place in places(found).items() if lengths == "uniform"]
    compared = {
        **{f"at least {bar:.2f} x {name}": [r >= bar for place in cells if (r := ratio(place, name)) is not None] for name, bar in BARS.items()},
        f"at most {IDEAL_BAR:.2f} x the ideal": [r <= IDEAL_BAR for place in cells if (r := ideal_share(place[OURS])) is not None],
    }
    return [f"uniform lengths, {what}: {sum(reached)} of {len(reached)}" for what, reached in compared.items() if reached]


def _number(value) -> str:
    return "-" if value is None else f"{value:.2f}"


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cells``, ``directions`` and ``libraries`` worked out."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default=",".join(LENGTHS), help="lengths (%(default)s)")
    parser.add_argument("--directions", default=",".join(DIRECTIONS), help="(%(default)s)")
    parser.add_argument("--libraries", default=",".join(BESIDE), help="what is measured beside packed sequences (%(default)s)")
    parser.add_argument("--dims", default="128,64", help="head dims (%(default)s)")
    parser.add_argument("--heads", default="mha,gqa", help='of mha (heads * D = 2048), gqa (32/8), or "H/Hk" (%(default)s)')
    parser.add_argument("--causal", default=",".join(grids.MASKS), help="(%(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"), help="(%(default)s)")
    grids.add_run_options(parser, DEFAULTS, "cells that are not reached by then are recorded as left out")
    parser.set_defaults(**DEFAULTS)
    options = parser.parse_args(arguments)
    try:
        lengths = grids.choices("only", options.only, LENGTHS)
        options.directions = grids.choices("directions", options.directions, DIRECTIONS)
        options.libraries = [OURS, *grids.choices("libraries", options.libraries, BESIDE)]
        masks = [grids.MASKS[name] for name in grids.choices("causal", options.causal, grids.MASKS)]
        dims, kinds = grids.integers("dims", options.dims, 256), grids.words("heads", options.heads)
        options.cells = [
            PackedCell(DTYPES[options.dtype], name, LENGTHS[name], *heads_of(kind, dim), dim, causal)
            for name, dim, kind, causal in product(lengths, dims, kinds, masks)
        ]
        grids.check_run_options(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def report(runs, path, seconds) -> int:
    """Table and the place of the file; exit code 1 when numbaflash failed or was wrong in a cell."""
    found = [record for run in runs for record in run.records]
    print(table(found))
    print(f"\n{seconds:.0f} s; {path}")
    return running.verdict([record for record in found if record["library"] == OURS])


def main(arguments=None) -> int:
    options = parse(arguments)
    return grids.main(PROGRAM, [DIRECTIONS[name] for name in options.directions], options, make=Run, report=report, drop=True)


if __name__ == "__main__":
    sys.exit(main())
