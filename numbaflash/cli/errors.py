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
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise CommandError(f"this needs the package {package}, which is not installed: pip install {package}") from error
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)) from error
    except (TypeError, ValueError, RuntimeError, ImportError) as error:  # RuntimeError: NotImplementedError, CompileError, CudaError
        raise CommandError(str(error)) from error
