"""What a command reports in one line instead of a traceback."""

from __future__ import annotations

from contextlib import contextmanager


class CommandError(Exception):
    """A wrong argument, file or environment; the message is for the person at the terminal."""


@contextmanager
def reported():
    """Around what depends on the person's arguments and files: its errors become one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (TypeError, ValueError, RuntimeError, ImportError, OSError) as error:  # RuntimeError: NotImplementedError, CompileError, CudaError
        raise CommandError(str(error)) from error
