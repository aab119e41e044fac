"""Two runs of the same cells: is numbaflash slower than it was?

A cell is compared by the ratio of a peer's time to numbaflash's, where both runs have that peer: a card's clock drifts from run to run more than
kernels differ, and drifts for both alike. Where they share no peer, by numbaflash's own time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from . import records
from .peers import OURS, OWN
from .running import NO_TIME
from .tables import GREEN, RED, RESET, aligned, by_cell, name_of

BY = ("ratio", "time")
NAMED = 10
"""Cells that are not in both runs, of each kind, that the table names."""


@dataclass(frozen=True)
class Change:
    """What became of a cell.

    Attributes
    ----------
    direction : str
    cell : tuple
        As `records.cell_of` makes it.
    peer : str or None
        Whose time stands over numbaflash's; None where times are compared.
    before, after : float
        Ratios, or milliseconds.
    noise : float
        Half the interquartile ranges of all times that went into it, relative to their medians, summed.
    """

    direction: str
    cell: tuple
    peer: str | None
    before: float
    after: float
    noise: float

    @property
    def speed(self) -> float:
        """Of numbaflash after, in units of that before."""
        return self.before / self.after if self.peer is None else self.after / self.before

    def regressed(self, threshold: float) -> bool:
        """Whether it is slower by more than the threshold and the noise together."""
        return self.speed < 1 - threshold - self.noise


@dataclass(frozen=True)
class Comparison:
    """Changes of the cells that both runs have, and what is not in both.

    Attributes
    ----------
    changes : list of Change
    lost : list of (str, str)
        Cells, and the reason why numbaflash has a time before and none after.
    unreached : list of str
        Cells for which the second run had no time.
    unchecked : int
        Cells of which a run does not tell the inputs.
    before_only, after_only : list of str
        Cells that the other run does not have.
    """

    changes: list[Change]
    lost: list[tuple[str, str]]
    unreached: list[str]
    unchecked: int
    before_only: list[str]
    after_only: list[str]

    def regressions(self, threshold: float) -> list[Change]:
        """The changes to something slower."""
        return [change for change in self.changes if change.regressed(threshold)]

    def failed(self, threshold: float) -> bool:
        """Whether a cell is slower, or has no time any more."""
        return bool(self.lost or self.regressions(threshold))


def compare(before: Iterable[dict], after: Iterable[dict], *, by: str | None = None, other_device: bool = False) -> Comparison:
    """What became of numbaflash between two runs.

    Parameters
    ----------
    before, after : iterable of dict
        Records.
    by : {"ratio", "time"}, optional
        Compare nothing but ratios, or nothing but times; by default ratios where both runs share a peer, and times elsewhere.
    other_device : bool
        Compare runs of two devices; only ratios then say something.

    Raises
    ------
    ValueError
        When the runs are of two devices, were measured in different ways, had other inputs in a cell, or share no cell.
    """
    if by is not None and by not in BY:
        raise ValueError(f"by must be one of {', '.join(BY)} or None; got {by!r}")
    before, after = ([record for record in recs if not record.get("quantity")] for recs in (before, after))
    devices = [_devices(recs) for recs in (before, after)]
    if devices[0] != devices[1] and not other_device and before and after:
        raise ValueError(f"the runs are of two devices, {' and '.join(devices)}; other_device (--other-device) compares them all the same")
    old, new = _by_place(before), _by_place(after)
    changes, lost, unreached, unchecked = [], [], [], 0
    for place in (key for key in old if key in new):
        ours_before, ours_after = old[place].get(OURS), new[place].get(OURS)
        if ours_before is None or ours_before["ms"] is None:
            continue
        if ours_after is None:
            lost.append((_told(place), f"there is no record of {OURS}"))
        elif ours_after.get("skipped") == NO_TIME:
            unreached.append(_told(place))
        elif ours_after["ms"] is None:
            lost.append((_told(place), str(ours_after.get("skipped"))))
        else:
            unchecked += not _check_alike(place, ours_before, ours_after)
            change = _change(place, old[place], new[place], by)
            changes += [] if change is None else [change]
    only = [[_told(place) for place in one if place not in other] for one, other in ((old, new), (new, old))]
    if not (changes or lost or unreached):
        raise ValueError(f"the two runs share no cell in which numbaflash {'and a peer have' if by == 'ratio' else 'has'} a time")
    return Comparison(changes, lost, unreached, unchecked, *only)


def _devices(recs) -> str:
    """What was measured on: a processor with so many threads is another one with more."""
    found = {(record["gpu"], record.get("threads"), record.get("torch_threads")) for record in recs}
    told = [gpu + (f" ({threads} threads, {torch_threads} of torch)" if threads else "") for gpu, threads, torch_threads in found]
    return ", ".join(sorted(told))


def _by_place(recs) -> dict[tuple, dict[str, dict]]:
    """{(direction, cell): {library: record}}, those without a time among them."""
    found = {}
    for direction in dict.fromkeys(record["direction"] for record in recs):
        part = [record for record in recs if record["direction"] == direction]
        by_cell(part)  # refuses a cell whose libraries had other inputs
        for record in part:
            found.setdefault((direction, records.cell_of(record)), {})[record["library"]] = record
    return found


def _told(place) -> str:
    direction, cell = place
    return f"{direction}, {name_of(cell)}"


def _check_alike(place, before, after) -> bool:
    """Whether both runs tell their inputs; a ValueError where these, or the way of measuring, differ."""
    for field, what in (("method", "way of measuring"), ("inputs", "inputs")):
        told = before.get(field), after.get(field)
        if None not in told and told[0] != told[1]:
            shown = f" ({told[0]}; {told[1]})" if field == "method" else ""
            raise ValueError(f"{_told(place)}: the {what} of the two runs differ, so they are not compared{shown}")
    return None not in told


def _change(place, old, new, by) -> Change | None:
    direction, cell = place
    shared = [name for name in old if name not in OWN and old[name]["ms"] is not None and new.get(name, {}).get("ms") is not None]
    if shared and by != "time":
        peer = min(shared, key=lambda name: old[name]["ms"])
        noise = sum(_spread(run[name]) for run in (old, new) for name in (OURS, peer))
        return Change(direction, cell, peer, *(run[peer]["ms"] / run[OURS]["ms"] for run in (old, new)), noise)
    if by == "ratio":
        return None
    return Change(direction, cell, None, old[OURS]["ms"], new[OURS]["ms"], _spread(old[OURS]) + _spread(new[OURS]))


def _spread(record) -> float:
    return (record["ms_q3"] - record["ms_q1"]) / 2 / record["ms"] if "ms_q1" in record else 0.0


def table(comparison: Comparison, threshold: float, *, markdown=False, colour=False) -> str:
    """A line a cell, those that became slowest first; then what is not in both, and the verdict."""
    head = ["cell", "by", "before", "after", "speed", "+-%", ""]
    rows = []
    for change in sorted(comparison.changes, key=lambda change: change.speed):
        by, form = ("ms", ".4g") if change.peer is None else (f"ratio to {change.peer}", ".2f")
        verdict = "slower" if change.regressed(threshold) else "faster" if change.speed > 1 + threshold + change.noise else ""
        values = [f"{change.before:{form}}", f"{change.after:{form}}", f"{100 * (change.speed - 1):+.1f}%", f"{100 * change.noise:.1f}", verdict]
        rows.append([_told((change.direction, change.cell)), by, *values])
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * 2 + ["--:"] * 4 + ["---"], *rows]]
    else:
        lines = aligned([head, *rows], right=(2, 3, 4, 5))
        if colour:
            shades = {"slower": RED, "faster": GREEN}
            lines = [shades[line.rsplit(" ", 1)[-1]] + line + RESET if line.rsplit(" ", 1)[-1] in shades else line for line in lines]
    lines += [f"no time any more: {cell}: {reason}" for cell, reason in comparison.lost]
    if comparison.unchecked:
        lines.append(f"{comparison.unchecked} cells whose inputs a run does not tell: whether they are the same is not known")
    named = (("not reached in the second run", comparison.unreached), ("only in the first run", comparison.before_only))
    for what, cells in (*named, ("only in the second run", comparison.after_only)):
        lines += [f"{what}: {cell}" for cell in cells[:NAMED]] + ([f"{what}: {len(cells) - NAMED} more"] if len(cells) > NAMED else [])
    return "\n".join([*lines, summary(comparison, threshold)])


def summary(comparison: Comparison, threshold: float) -> str:
    """One line."""
    if not comparison.changes:
        return f"{len(comparison.lost)} cells have no time any more; {len(comparison.unreached)} were not reached"
    speeds, worse = [change.speed for change in comparison.changes], comparison.regressions(threshold)
    told = f"{len(speeds)} cells: speed {min(speeds):.2f} to {max(speeds):.2f} of what it was, median {median(speeds):.2f}"
    slower = f"{len(worse) or 'none'} slower by more than {100 * threshold:g}% beyond the spread"
    return f"{told}; {slower}" + (f"; {len(comparison.lost)} without a time any more" if comparison.lost else "")
