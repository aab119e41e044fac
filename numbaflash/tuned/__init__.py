"""Tile choices that were measured: ``numbaflash tune`` makes tables of them, one for each model of GPU or processor, and dispatch looks them up.

``keys`` says which problems share a choice, ``store`` reads and writes tables, ``search`` measures. Tables that come with the package lie in this
folder as ``*.json``; those of the user are preferred to them. A choice replaces the family's own only where it is among the `candidates` of that
very problem, so that a table can make a call slower and never wrong.
"""

from __future__ import annotations

from typing import Any

from .keys import key_of, model_of
from .store import Origin, table_of

__all__ = ["Origin", "find", "values_of"]


def find(package, family: str, direction: str, problem, layouts, device, how: tuple = ()) -> tuple[Any, Origin] | None:
    """The config that a table has for a problem, and where it comes from; None where there is none, or it is no candidate here.

    Parameters
    ----------
    package : Family, BackwardFamily or DecodeFamily
    family, direction : str
    problem : Problem
    layouts : Layouts or BackwardLayouts
    device : Device
    how : tuple
        What the family's ``plan`` takes beyond these: ``deterministic``, or ``num_splits``.
    """
    if not hasattr(package, "candidates"):
        return None
    table = table_of(model_of(device))
    if not table:
        return None
    entry, origin = table.get((family, direction, key_of(problem, layouts, device, how)), (None, None))
    if entry is None:
        return None
    for config in package.candidates(problem, layouts, device, *how):
        if values_of(package, config) == entry.config:
            return config, origin
    return None


def values_of(package, config) -> dict[str, Any]:
    """What a table keeps of a config: the fields in which candidates differ."""
    return {name: getattr(config, name) for name in package.TUNED}
