"""Forward attention on a GPU beside cuDNN, FA2, FA4 and dense attention: ``python -m bench.forward``.

How it is measured, and every option: `bench.grids`.
"""

from __future__ import annotations

import argparse
import sys

from numbaflash.benchmarks.passes import Forward

from . import grids

PROGRAM = "bench.forward"


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` and ``libraries`` worked out."""
    return grids.parse(grids.parser(PROGRAM, Forward, __doc__, grids.FULL), Forward, grids.FULL, grids.QUICK, arguments)


def main(arguments=None) -> int:
    return grids.main(PROGRAM, [Forward], parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
