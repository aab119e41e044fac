"""Progress and colour for people at a terminal; plain lines everywhere else."""

from __future__ import annotations

import os
import sys
import time


def colour_wanted(stream=None) -> bool:
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Progress:
    """One line that says how far a run is: a tqdm bar on a terminal, else a plain line every few seconds.

    Parameters
    ----------
    total : int
        Steps in all.
    title : str
    every : float
        Seconds between plain lines; the last step always gets one.
    """

    def __init__(self, total, title, *, every=10.0, stream=None):
        self.total, self.title, self.every = total, title, every
        self.stream = sys.stderr if stream is None else stream
        self.count, self.start = 0, time.monotonic()
        self.last = self.start
        self.bar = _tqdm(total, title, self.stream)

    def step(self, text=""):
        """One more step is done; `text` says what it was."""
        self.count += 1
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
            return
        now = time.monotonic()
        if self.count >= self.total or now - self.last >= self.every:
            self.last = now
            print(f"{self.title} {self.count}/{self.total} ({now - self.start:.0f} s) {text}".rstrip(), file=self.stream, flush=True)

    def note(self, text):
        """A line of its own that does not break the bar."""
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def _tqdm(total, title, stream):
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=title, file=stream, dynamic_ncols=True, leave=False)
