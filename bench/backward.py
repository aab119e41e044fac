"""Gradients of attention on a GPU beside those of cuDNN, FA2 and FA4: ``python -m bench.backward``.

Only the backward is timed, preparation and conversion of its results included: the forward of each library has run before, and its results
are given (numbaflash) or kept by autograd (the peers). numbaflash's deterministic gradients are a row of their own, and no peer. How it is
measured, and every option: `bench.grids`.
"""

from __future__ import annotations

import argparse
import sys

from numbaflash.benchmarks.passes import Backward

from . import grids

PROGRAM = "bench.backward"
FULL = grids.FULL | {"budget": 420.0}
QUICK = grids.QUICK | {"budget": 120.0}


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` and ``libraries`` worked out."""
    return grids.parse(grids.parser(PROGRAM, Backward, __doc__, FULL), Backward, FULL, QUICK, arguments)


def main(arguments=None) -> int:
    return grids.main(PROGRAM, [Backward], parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
