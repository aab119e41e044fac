"""Verification on the user's machine and shapes, in the order of a careful engineer: ``numbaflash verify``.

``shapes`` says what is verified; ``configs`` and ``traces`` read it from a model's configuration and from what `numbaflash.record` wrote. ``places``
are the array libraries, ``inputs`` makes arrays and calls. ``meaning``, ``dispatching``, ``timing``, ``memory``, ``accuracy`` and ``serving`` are the
checks, ``order`` makes them one after the other, ``findings`` holds what they found, and ``report`` shows it.
"""

from __future__ import annotations

from .configs import ConfigError, read_config
from .findings import Finding, Report
from .memory import TooLargeError
from .order import verify
from .places import LIBRARIES, open_place
from .shapes import Attention, Call, calls_of
from .traces import TraceError, read_trace

__all__ = [
    "LIBRARIES",
    "Attention",
    "Call",
    "ConfigError",
    "Finding",
    "Report",
    "TooLargeError",
    "TraceError",
    "calls_of",
    "open_place",
    "read_config",
    "read_trace",
    "verify",
]
