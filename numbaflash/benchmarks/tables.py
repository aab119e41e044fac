"""Tables of results.

A ratio is the best peer's time over numbaflash's, within one run: above 1, numbaflash is faster.
"""

from __future__ import annotations

from statistics import median

from . import records
from .cells import DTYPES
from .peers import OURS, OURS_DETERMINISTIC, OURS_PADDED, OURS_PLAIN, OWN

BASELINE = "dense"
COLUMNS = {OURS_DETERMINISTIC: "deterministic", OURS_PADDED: "padded", OURS_PLAIN: "plain"}
BEYOND_WIDTH = 26
METRICS = {"tflops": "TFLOP/s", "ms": "ms"}
GREEN, YELLOW, RED, RESET = "\033[32m", "\033[33m", "\033[31m", "\033[0m"
SHORT = {long: short for short, long in DTYPES.items()}


def by_cell(recs) -> dict[tuple, dict[str, dict]]:
    """Records with a time, as {cell: {library: record}}; of several for one place, the last one counts.

    Raises
    ------
    ValueError
        When libraries got other inputs in the same cell.
    """
    cells = {}
    for record in recs:
        place = cells.setdefault(records.cell_of(record), {})
        if record["ms"] is not None:
            place[record["library"]] = record
        else:
            place.pop(record["library"], None)
    for cell, place in cells.items():
        told = [record for record in place.values() if record.get("inputs") is not None]
        for record in told[1:]:
            if record["inputs"] != told[0]["inputs"]:
                raise ValueError(f"{name_of(cell)}: the inputs of {told[0]['library']} and {record['library']} differ, so they are not compared")
    return cells


def best_peer(place) -> str | None:
    """The fastest library of a cell that is not numbaflash; dense attention counts too."""
    return min((name for name in place if name not in OWN), key=lambda name: place[name]["ms"], default=None)


def ratio(place) -> float | None:
    """Best peer's time over numbaflash's; None where either is missing."""
    peer = best_peer(place)
    return place[peer]["ms"] / place[OURS]["ms"] if peer and OURS in place else None


def deterministic_ratio(place) -> float | None:
    """numbaflash's time over that of its deterministic gradients; None where either is missing."""
    return place[OURS]["ms"] / place[OURS_DETERMINISTIC]["ms"] if OURS in place and OURS_DETERMINISTIC in place else None


def spread(place) -> float | None:
    """Half the interquartile range of numbaflash's time, relative to the median; None where it was not saved."""
    mine = place.get(OURS)
    return (mine["ms_q3"] - mine["ms_q1"]) / 2 / mine["ms"] if mine and "ms_q1" in mine else None


def cell_table(recs, *, metric="tflops", markdown=False, colour=False) -> str:
    """One line a cell: every library, the ratio to the best peer, and the spread of numbaflash's time.

    Where deterministic gradients were measured, a column "det" has numbaflash's time over theirs.

    Parameters
    ----------
    recs : list of dict
        Records of one direction, usually of one run.
    metric : str
        "tflops" or "ms".
    markdown : bool
    colour : bool
        Colour the ratio: green from 1.00, yellow from 0.93, red below.
    """
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}; got {metric!r}")
    cells = by_cell(recs)
    libraries = list(dict.fromkeys(record["library"] for record in recs))
    libraries.sort(key=lambda name: (name != OURS, name not in OWN, name == BASELINE))
    more = ["det"] if OURS_DETERMINISTIC in libraries else []
    host = ["host us"] if any("host_us" in record for record in recs if record["library"] == OURS) else []
    beyond = ["of"] if any(_beyond(records.fields_of(cell)) for cell in cells) else []
    head = ["D", "mask", "seqlen", *beyond, *(COLUMNS.get(name, name) for name in libraries), *host, *more, "ratio", "+-%"]
    lines, section = [], None
    for cell in sorted(cells, key=_order):
        values, place = records.fields_of(cell), cells[cell]
        title = f"{SHORT.get(values['dtype'], values['dtype'])}, {_heads(values)}, {METRICS[metric]}"
        if title != section:
            section = title
            lines += _heading(title, head, markdown)
        mark = best_peer(place)
        numbers = [(_number(place[name][metric], metric) + "*" * (name == mark)) if name in place else "-" for name in libraries]
        wobble = spread(place)
        row = [_dims(values), _mask(values), _lengths(values), *[_beyond(values) for _ in beyond], *numbers]
        row += [*[_host(place) for _ in host], *[_ratio(deterministic_ratio(place)) for _ in more]]
        row += [_ratio(ratio(place)), "-" if wobble is None else f"{100 * wobble:.1f}"]
        lines.append(_line(row, head, markdown, ratio(place) if colour else None))
    return "\n".join(lines)


def _order(cell):
    values = records.fields_of(cell)
    return values["dtype"], -values["kv_heads"] / max(1, values["heads"]), values["head_dim"], str(values["causal"]), values["seqlen_q"], cell


def _heads(values):
    return "equal heads" if values["heads"] == values["kv_heads"] else f"{values['heads']}/{values['kv_heads']} heads"


def _dims(values):
    d, dv = values["head_dim"], values["head_dim_v"]
    return str(d) if d == dv else f"{d}/{dv}"


def _mask(values):
    return {True: "causal", False: "full"}.get(values["causal"], str(values["causal"]))


def _lengths(values):
    q, k = values["seqlen_q"], values["seqlen_k"]
    return str(q) if q == k else f"{q}/{k}"


def _beyond(values) -> str:
    """What more there is to say of a cell: kind of lengths, pages, an option."""
    pages = values["page_size"] and f"pages of {values['page_size']}"
    return ", ".join(str(x) for x in (values["lengths"], pages, values["option"]) if x)


def _host(place) -> str:
    return _number(place.get(OURS, {}).get("host_us"), "ms")


def _number(value, metric):
    if value is None:
        return "-"
    return f"{value:.0f}" if metric == "tflops" and value >= 99.5 else f"{value:.3g}"


def _ratio(value):
    return "-" if value is None else f"{value:.2f}"


def _heading(title, head, markdown):
    if markdown:
        return ["", f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "--:|" * len(head)]
    return ["", title, _line(head, head, False, None)]


def _line(row, head, markdown, shade):
    if markdown:
        return "| " + " | ".join(row) + " |"
    widths = [BEYOND_WIDTH if name == "of" else max(len(name), 6) for name in head]
    cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
    if shade is not None:
        cells[-2] = (GREEN if shade >= 1 else YELLOW if shade >= 0.93 else RED) + cells[-2] + RESET
    return " ".join(cells)


def summary(recs, *, bar=1.0, listed=8) -> str:
    """How many cells reach the bar, the least and the middle ratio, and the cells below the bar, worst first."""
    ratios = _ratios(recs)
    if ratios:
        reached = sum(r >= bar for r in ratios.values())
        least, middle = min(ratios.values()), median(ratios.values())
        lines = [f"{reached} of {len(ratios)} cells at {bar:.2f} x the best peer or above; least {least:.2f}, median {middle:.2f}"]
    else:
        lines = ["no cell has both numbaflash and a peer"]
    below = sorted((r, cell) for cell, r in ratios.items() if r < bar)
    lines += [f"  {r:.2f}  {name_of(cell)}" for r, cell in below[:listed]]
    if len(below) > listed:
        lines.append(f"  and {len(below) - listed} more")
    slower = {cell: r for cell, place in by_cell(recs).items() if (r := deterministic_ratio(place)) is not None}
    if slower:
        worst = min(slower, key=slower.get)
        lines.append(f"deterministic: {slower[worst]:.2f} x the speed of the other at least ({name_of(worst)}), median {median(slower.values()):.2f}")
    return "\n".join(lines)


def name_of(cell) -> str:
    """A cell as a phrase."""
    values = records.fields_of(cell)
    dtype = SHORT.get(values["dtype"], values["dtype"])
    heads = f"{values['heads']}/{values['kv_heads']} heads"
    beyond = _beyond(values)
    return f"{dtype} D{_dims(values)} {_mask(values)} {heads} {values['batch']}x{_lengths(values)}" + (f", {beyond}" if beyond else "")


def _ratios(recs):
    return {cell: r for cell, place in by_cell(recs).items() if (r := ratio(place)) is not None}


def latency_table(recs, *, markdown=False) -> str:
    """Records of `bench.latency`, and the like of `bench.training`: one line a quantity."""
    head = ["quantity", "library", "case", "median", "q1", "q3", "unit"]
    rows = [
        [r["quantity"], r["library"], r["case"], *(f"{r[key]:.4g}" for key in ("value", "q1", "q3")), r["unit"]]
        for r in recs
        if r.get("quantity") and not r.get("skipped")
    ]
    if markdown:
        return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * 3 + ["--:"] * 3 + ["---"], *rows])
    return "\n".join(aligned([head, *rows], right=(3, 4, 5)))


def aligned(rows, right=()) -> list[str]:
    """Lines of a table whose columns stand under each other, some of them at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row):
        return " ".join(text.rjust(w) if n in right else text.ljust(w) for n, (text, w) in enumerate(zip(row, widths, strict=True))).rstrip()

    return [line(row) for row in rows]


def tables(recs, *, metric="tflops", markdown=False, colour=False) -> str:
    """What there is to show of some records: the cells of each direction and their summary, then other quantities."""
    timed = [r for r in recs if not r.get("quantity")]
    directions, parts = list(dict.fromkeys(r["direction"] for r in timed)), []
    for direction in directions:
        part = [r for r in timed if r["direction"] == direction]
        parts += [f"# {direction}"] * (len(directions) > 1) + [cell_table(part, metric=metric, markdown=markdown, colour=colour), summary(part)]
    if len(timed) < len(recs):
        parts.append(latency_table(recs, markdown=markdown))
    return "\n\n".join(parts)
