"""The "numbaflash" logger. ``NUMBAFLASH_LOG`` (a level name, a level number, or 1 for everything) sends it to stderr."""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager

logger = logging.getLogger("numbaflash")
logger.addHandler(logging.NullHandler())


def configure(value: str | None = None) -> None:
    """Set the logger up as ``NUMBAFLASH_LOG`` says (read when `value` is None); an empty value or 0 leaves it alone.

    Raises
    ------
    ValueError
        For a value that is neither a level name nor a number.
    """
    value = os.environ.get("NUMBAFLASH_LOG", "") if value is None else value
    value = value.strip().upper()
    if value in ("", "0"):
        return
    if value in ("1", "TRUE", "ON", "YES"):
        level = logging.DEBUG
    elif value.isdigit():
        level = int(value)
    else:
        level = logging.getLevelName(value)
        if not isinstance(level, int):
            raise ValueError(f"NUMBAFLASH_LOG must be 1 or a logging level such as DEBUG, INFO or WARNING; got {value!r}")
    if not any(getattr(handler, "numbaflash", False) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d numbaflash %(levelname)s %(message)s", "%H:%M:%S"))
        handler.numbaflash = True
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


@contextmanager
def timed(message: str, *args):
    """Log `message` with the milliseconds that the block took, at level INFO."""
    start = time.perf_counter()
    yield
    logger.info(message + " in %.1f ms", *args, (time.perf_counter() - start) * 1e3)
