"""`numbaflash.benchmarks.records`, which the command ``numbaflash bench`` has too, under its name here."""

from __future__ import annotations

import sys

from numbaflash.benchmarks import records

sys.modules[__name__] = records
