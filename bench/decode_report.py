"""What a run of `bench.decode` says: a line a cell, what a launch costs, and how the cells stand to the bars."""

from __future__ import annotations

from .decode_timing import DECODE, PLAN_RUN, REPLAY
from .peers import OURS

LABELS = {PLAN_RUN: "plan.run", DECODE: "decode", REPLAY: "graph"}
PEERS = ("fa4", "fa2", "cudnn", "efficient", "flashinfer")


def places(found) -> dict[tuple, dict[str, dict]]:
    """{(lengths, heads, kv_heads, head_dim, page_size, seqlen_q): {library: record}}."""
    cells = {}
    for r in found:
        cells.setdefault((r["lengths"], r["heads"], r["kv_heads"], r["head_dim"], r["page_size"], r["seqlen_q"]), {})[r["library"]] = r
    return cells


def ratio(place, name) -> float | None:
    """The time of a library over ours; None where either is missing."""
    ours, theirs = (place.get(each, {}).get("ms") for each in (OURS, name))
    return theirs / ours if ours and theirs else None


def best_peer(place) -> tuple[float, str] | None:
    """The time of the fastest peer over ours, and its name."""
    return min(((r, name) for name in place if name != OURS and (r := ratio(place, name)) is not None), default=None)


def of_equal(ours) -> float | None:
    """Our time of mixed lengths over that of the same bytes at equal lengths, which took turns with it."""
    equal = ours.get("equal")
    return ours["ms"] / equal["ms"] * equal["bytes"] / ours["bytes"] if equal and ours["ms"] else None


def _spread(ours) -> str:
    return f"{50 * (ours['ms_q3'] - ours['ms_q1']) / ours['ms']:.1f}" if "ms_q1" in ours else "-"


def _number(value) -> str:
    return "-" if value is None else f"{value:.2f}"


def _start(key) -> str:
    lengths, heads, kv_heads, dim, page, tokens = key
    return f"{lengths:17}{f'{heads}/{kv_heads}':7}{dim:>4}{page or '-':>6}{tokens:>3}"


def name_of(key) -> str:
    """A cell as a phrase."""
    lengths, heads, kv_heads, dim, page, tokens = key
    pages = f"pages of {page}" if page else "contiguous"
    return f"{lengths}, {heads}/{kv_heads}, D {dim}, {pages}" + (f", {tokens} tokens" if tokens > 1 else "")


def table(found) -> str:
    """A line a cell: our time and its spread (half the interquartile range), bytes a second, their share of the copy, the best peer and every one."""
    others = [name for name in PEERS if any(r["library"] == name and r["ms"] for r in found)]
    columns = "".join(f"{name:>11}" for name in others)
    head = f"{'lengths':17}{'heads':7}{'D':>4}{'page':>6}{'q':>3}"
    lines = [f"{head}{'us':>10}{'+-%':>6}{'TB/s':>7}{'of copy':>9}{'of equal':>10}{'best peer':>11}{columns}"]
    for key, place in places(found).items():
        ours = place.get(OURS, {})
        if not ours.get("ms"):
            lines.append(f"{_start(key)}  {ours.get('skipped', 'not measured')}")
            continue
        best = best_peer(place)
        numbers = f"{ours['ms'] * 1e3:10.2f}{_spread(ours):>6}{ours['tb_per_s']:7.2f}{ours['share_of_copy']:9.0%}{_number(of_equal(ours)):>10}"
        ratios = "".join(f"{_number(ratio(place, name)):>11}" for name in others)
        lines.append(f"{_start(key)}{numbers}{_number(best and best[0]):>11}{ratios}")
    return "\n".join([*lines, *launches(found), "", *bars(found)])


def launches(found) -> list[str]:
    """What a call keeps the host, a line a cell in which that was measured: median, and quartiles in brackets."""
    told = {key: place[OURS]["host_us"] for key, place in places(found).items() if place.get(OURS, {}).get("host_us")}
    if not told:
        return []
    lines = ["", f"{'host us a call':37}" + "".join(f"{LABELS[name]:>22}" for name in LABELS)]
    for key, host in told.items():
        values = (f"{host[name][1]:.2f} ({host[name][0]:.2f}-{host[name][2]:.2f})" if name in host else "-" for name in LABELS)
        lines.append(_start(key) + "".join(f"{value:>22}" for value in values))
    return lines


def bars(found) -> list[str]:
    """How the cells stand to what must be reached: a line each, as far as it was measured, of the worst cell that it is about."""
    cells = {key: place for key, place in places(found).items() if place.get(OURS, {}).get("ms")}

    def line(what, lengths, value_of, bar, at_most=False, pages=None):
        wanted = {
            key: value
            for key, place in cells.items()
            if key[:4] == (lengths, 32, 8, 128) and key[5] == 1 and (pages is None or pages(key[4])) and (value := value_of(place[OURS])) is not None
        }
        if not wanted:
            return []
        worst = (max if at_most else min)(wanted, key=wanted.get)
        value = wanted[worst]
        reached = value <= bar if at_most else value >= bar
        verdict = "reached" if reached else f"missed by {abs(value - bar):.2f}"
        return [f"{what}: {value:.2f} ({name_of(worst)}), {'at most' if at_most else 'at least'} {bar:.2f}: {verdict}"]

    def share(ours):
        return ours["share_of_copy"]

    def graph_us(ours):
        return ours["ms"] * 1e3 if ours.get("in_graph") else None

    def host_us(ours):
        return ours["host_us"][PLAN_RUN][1] if "host_us" in ours else None

    lines = [
        *line("batch 64 of 8k, contiguous and pages from 16, share of the copy", "64 of 8k", share, 0.9, pages=lambda n: n == 0 or n >= 16),
        *line("the same in pages of 1", "64 of 8k", share, 0.6, pages=lambda n: n == 1),
        *line("one request of 128k, share of the copy", "one of 128k", share, 0.8),
        *line("one request of 1k in a graph, us", "one of 1k", graph_us, 8.0, True),
        *line("mixed lengths, batch 64, over the same bytes at equal lengths", "64 mixed", of_equal, 1.1, True),
        *line("host cost of plan.run, us", "one of 1k", host_us, 8.0, True),
    ]
    compared = {key: best for key, place in cells.items() if (best := best_peer(place)) is not None}
    if not compared:
        return [*lines, "no cell has both numbaflash and a peer"]
    behind = sorted((best, key) for key, best in compared.items() if best[0] < 1)
    verdict = f"missed in {len(behind)}" if behind else "reached"
    lines.append(f"{len(compared) - len(behind)} of {len(compared)} cells at or above every peer; ahead in every cell: {verdict}")
    return lines + [f"  {r:.2f} {name}: {name_of(key)}" for (r, name), key in behind]
