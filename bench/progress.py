"""`numbaflash.benchmarks.progress`, which the command ``numbaflash bench`` has too, under its name here."""

from __future__ import annotations

import sys

from numbaflash.benchmarks import progress

sys.modules[__name__] = progress
