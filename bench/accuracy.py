"""`numbaflash.benchmarks.accuracy`, which the command ``numbaflash bench`` has too, under its name here."""

from __future__ import annotations

import sys

from numbaflash.benchmarks import accuracy

sys.modules[__name__] = accuracy
