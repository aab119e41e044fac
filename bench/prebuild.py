"""`numbaflash.benchmarks.prebuild`, which the command ``numbaflash bench`` has too, under its name here."""

from __future__ import annotations

import sys

from numbaflash.benchmarks import prebuild

sys.modules[__name__] = prebuild
