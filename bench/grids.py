"""`numbaflash.benchmarks.grids`, which the command ``numbaflash bench`` has too, under its name here."""

from __future__ import annotations

import sys

from numbaflash.benchmarks import grids

sys.modules[__name__] = grids
