"""Dataclasses of plain data, as Python expressions and from JSON."""

from __future__ import annotations

from dataclasses import MISSING, fields


def short_repr(x) -> str:
    """A Python expression that makes a dataclass again, defaults left out."""
    shown = []
    for f in fields(x):
        value = getattr(x, f.name)
        plain = f.default_factory() if callable(f.default_factory) else f.default
        if plain is MISSING or value != plain:
            shown.append(f"{f.name}={value!r}")
    return f"{type(x).__name__}({', '.join(shown)})"


def tuples(x):
    """JSON's lists as the tuples that they were."""
    return tuple(map(tuples, x)) if isinstance(x, list) else x
