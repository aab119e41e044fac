"""`numbaflash.benchmarks.passes`, which the command ``numbaflash bench`` has too, under its name here."""

from __future__ import annotations

import sys

from numbaflash.benchmarks import passes

sys.modules[__name__] = passes
