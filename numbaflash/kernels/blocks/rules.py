"""Rules that say which keys a query sees: one formula each, for NumPy arrays and for registers of a kernel.

``place`` is the key beside which a query stands, ``i + offset``. ``of_query`` and ``of_key`` are what an array of the rule holds for the pair, and
what is in ``numbers`` is known when the kernel is launched; fields of a rule are compiled in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule; ``arrays`` is the dtype of the arrays that it reads, None where there is none."""

    numbers: ClassVar[tuple[str, ...]] = ()
    by_query: ClassVar[bool] = False
    by_key: ClassVar[bool] = False
    narrow: ClassVar[bool] = False
    arrays: str | None = None

    def shows(self, place, key, numbers, of_query, of_key):
        """Whether the query sees the key."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Pairs(Rule):
    """What an array of bool says."""

    by_query: ClassVar[bool] = True

    def shows(self, place, key, numbers, of_query, of_key):
        return of_query != 0


@dataclass(frozen=True, slots=True)
class BlockCausal(Rule):
    """Causal by blocks of so many tokens, each of which sees the whole of its block and all blocks before."""

    block: int = 1

    def shows(self, place, key, numbers, of_query, of_key):
        return key // self.block <= place // self.block


@dataclass(frozen=True, slots=True)
class Documents(Rule):
    """Tokens of one document see each other; those whose document is negative see nothing."""

    by_query: ClassVar[bool] = True
    by_key: ClassVar[bool] = True

    def shows(self, place, key, numbers, of_query, of_key):
        return (of_query == of_key) & (of_query >= 0)


@dataclass(frozen=True, slots=True)
class PrefixLM(Rule):
    """Causal, and a prefix that everybody sees."""

    by_query: ClassVar[bool] = True
    narrow: ClassVar[bool] = True

    def shows(self, place, key, numbers, of_query, of_key):
        return (key <= place) | (key < of_query)


@dataclass(frozen=True, slots=True)
class Dilated(Rule):
    """Every ``dilation``-th key within a window."""

    numbers: ClassVar[tuple[str, ...]] = ("left", "right")
    dilation: int = 1

    def shows(self, place, key, numbers, of_query, of_key):
        distance = place - key
        return (distance % self.dilation == 0) & (distance <= numbers["left"]) & (distance >= 0 - numbers["right"])


@dataclass(frozen=True, slots=True)
class SlidingGlobal(Rule):
    """A window, and first tokens that everybody sees and that see everybody."""

    numbers: ClassVar[tuple[str, ...]] = ("left", "right", "n_global")

    def shows(self, place, key, numbers, of_query, of_key):
        distance, count = place - key, numbers["n_global"]
        near = (distance <= numbers["left"]) & (distance >= 0 - numbers["right"])
        return near | (key < count) | ((place < count) & (place >= 0))
