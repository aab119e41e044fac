"""What measures attention: the engine of ``numbaflash bench`` and of the scripts in the repository's ``bench/``."""

from __future__ import annotations

KINDS = ("prefill", "backward", "decode", "batched-decode", "options", "options-backward")
"""What ``numbaflash bench`` measures, here so that its command line loads nothing of the rest."""
