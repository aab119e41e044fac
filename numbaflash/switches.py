"""Environment variables that switch something on."""

from __future__ import annotations

import os


def is_on(variable: str) -> bool:
    """Whether a variable is set to anything but nothing and 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def values_are_checked() -> bool:
    """Whether calls read lengths, boundaries and page tables to check them, waiting for the device: ``NUMBAFLASH_CHECK=1``."""
    return is_on("NUMBAFLASH_CHECK")
