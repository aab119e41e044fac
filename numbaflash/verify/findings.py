"""What verification found, and how much time it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..problem import UnsupportedError

PASS, FAIL, SKIP, INFO = "pass", "FAIL", "skip", "info"


@dataclass
class Finding:
    """One line of the report.

    Attributes
    ----------
    check : str
        "meaning", "dispatch", "time", "memory", "accuracy" or "service".
    name : str
        What was looked at.
    status : str
        "pass", "FAIL", "skip" (not looked at, the text says why) or "info" (figures without a bound).
    text : str
    figures : dict
    seconds : float
    """

    check: str
    name: str
    status: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self):
        return f"[{self.status}] {self.check:8} {self.name}: {self.text}"


class Report:
    """The findings so far, told as they come.

    Parameters
    ----------
    seconds : float
        For everything.
    say : callable, optional
        Gets a line of text for each finding.
    began : float, optional
        When the time began, by `time.monotonic`; now by default.
    """

    def __init__(self, seconds: float, say: Callable[[str], None] = print, began: float | None = None):
        self.findings: list[Finding] = []
        self.settings: dict[str, Any] = {}
        self.say = say
        self._start = time.monotonic() if began is None else began
        self.seconds = seconds
        self._until = self._start + seconds

    @property
    def failed(self) -> bool:
        return any(finding.status == FAIL for finding in self.findings)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds of the present share of the time."""
        return self._until - time.monotonic()

    def share(self, until: float) -> None:
        """What comes now ends when this part of the whole time is over."""
        self._until = self._start + until * self.seconds

    def add(self, check: str, name: str, status: str, text: str, figures: dict | None = None, seconds: float = 0.0) -> Finding:
        """Keep a finding, and tell it."""
        finding = Finding(check, name, status, text, figures or {}, round(seconds, 3))
        self.findings.append(finding)
        self.say(str(finding))
        return finding

    def step(self, check: str, name: str, look: Callable[[], tuple[str, dict] | None], *, needed: bool = False) -> bool:
        """Look at one thing. An error of accuracy is a failure, and so is any other: a check that cannot be made has not passed.

        Parameters
        ----------
        check, name : str
        look : callable
            Returns a text and figures; None to say nothing. Raises AssertionError for a failure.
        needed : bool
            Look even if the time is over.

        Returns
        -------
        bool
            Whether it did not fail.
        """
        if not needed and self.left() <= 0:
            self.add(check, name, SKIP, "no time left (--budget)")
            return True
        start = time.monotonic()
        try:
            found = look()
        except AssertionError as error:
            self.add(check, name, FAIL, " ".join(str(error).split()), seconds=time.monotonic() - start)
            return False
        except UnsupportedError as error:
            self.add(check, name, FAIL, f"no kernel can compute it: {' '.join(str(error).split())}", seconds=time.monotonic() - start)
            return False
        except Exception as error:
            self.add(check, name, FAIL, f"{type(error).__name__}: {' '.join(str(error).split())}", seconds=time.monotonic() - start)
            return False
        if found is not None:
            text, figures = found
            self.add(check, name, figures.pop("status", PASS), text, figures, time.monotonic() - start)
        return True

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "settings": self.settings,
            "failed": self.failed,
            "seconds": round(self.elapsed, 2),
            "findings": [asdict(finding) for finding in self.findings],
        }
