"""`numbaflash.benchmarks.timing`, which the command ``numbaflash bench`` has too, under its name here."""

from __future__ import annotations

import sys

from numbaflash.benchmarks import timing

sys.modules[__name__] = timing
