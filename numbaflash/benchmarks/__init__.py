"""What measures attention: the engine of ``numbaflash bench`` and of the scripts in the repository's ``bench/``."""

from __future__ import annotations
