"""The tables and sentences of docs/performance.md, docs/performance-cpu.md and the README, from the results that they name.

A ratio is the peer's time over ours in the same run: above 1, numbaflash is faster. ``python docs/tables.py`` writes them.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from statistics import median

from numbaflash.benchmarks.cells import DTYPES
from numbaflash.benchmarks.peers import OURS, OURS_PADDED, OURS_PLAIN, OWN
from numbaflash.benchmarks.records import CELL
from numbaflash.benchmarks.tables import best_peer, by_cell, deterministic_ratio, ratio, spread

from . import varlen
from .counter_tables import table

NAMES = {"cudnn": "cuDNN", "fa4": "FA4", "fa2": "FA2", "efficient": "mem-efficient", "flex": "FlexAttention", OURS_PADDED: "padded"}
"""Libraries in short, as tables name them; the rest are called what records call them."""
SHORT = {long: short for short, long in DTYPES.items()}


# ---- what records say of themselves


def label(name: str) -> str:
    return NAMES.get(name, name)


def mask_of(record) -> str:
    return {True: "causal", False: "full"}.get(record["causal"], str(record["causal"]))


def heads_of(record) -> str:
    return "equal heads" if record["heads"] == record["kv_heads"] else f"{record['heads']}/{record['kv_heads']} heads"


def length(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def digits(value: float) -> str:
    """Three significant digits; whole numbers from 100 on."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def ranged(values, form=".2f") -> str:
    """Least and most, or the one value where these print alike."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def places(found) -> list[tuple[dict, dict[str, dict]]]:
    """(one record of it, {library: record with a time}) of each cell, by head dim, mask, heads, dtype and length."""
    whole = [(next(iter(place.values())), place) for place in by_cell(found).values() if place]
    return sorted(whole, key=lambda pair: _order(pair[0]))


def _order(r):
    return r["head_dim"], str(r["causal"]) != "False", r["heads"] != r["kv_heads"], r["dtype"], r["seqlen_q"], [str(r[name]) for name in CELL]


# ---- forward and gradients over lengths


def over_lengths(found, name_of, value_of, write) -> str:
    """A row for each name, a column for each length; a field is what ``write`` makes of the values of its cells."""
    rows = {}
    for record, place in places(found):
        value = value_of(place)
        if value is not None:
            rows.setdefault(name_of(record), {}).setdefault(record["seqlen_q"], []).append(value)
    lengths = sorted({n for row in rows.values() for n in row})
    return table(["", *map(str, lengths)], [[name, *(write(row[n]) if n in row else "-" for n in lengths)] for name, row in rows.items()])


def dim_and_mask(record) -> str:
    return f"D {record['head_dim']}, {mask_of(record)}"


def ratios_table(found) -> str:
    """Ratio to the best peer: least and most of the pairs of dtype and heads."""
    return over_lengths(found, dim_and_mask, ratio, ranged)


def deterministic_table(found) -> str:
    """Speed of deterministic gradients as a share of the others': least and most of the pairs of dtype and heads."""
    return over_lengths(found, dim_and_mask, deterministic_ratio, ranged)


def deterministic_line(found) -> str:
    shares = [share for _, place in places(found) if (share := deterministic_ratio(place)) is not None]
    return f"Least {min(shares):.2f}, median {median(shares):.2f} of {len(shares)} cells."


def speeds_table(found, dtype="bfloat16", libraries=(OURS, "cudnn", "fa4", "fa2")) -> str:
    """TFLOP/s with equal heads: numbaflash / cuDNN / FA4 / FA2."""
    equal = [r for r in found if r["dtype"] == dtype and r["heads"] == r["kv_heads"]]

    def speeds(values):
        (place,) = values
        return " / ".join(f"{place[name]['tflops']:.0f}" if name in place else "-" for name in libraries)

    return over_lengths(equal, dim_and_mask, lambda place: place, speeds)


def standing(found) -> tuple[list[dict], list[float]]:
    """The cells that have a peer, and the ratio to the best one in each."""
    cells = [place for _, place in places(found) if ratio(place) is not None]
    return cells, [ratio(place) for place in cells]


def standing_line(found) -> str:
    """How the cells stand to the best peer, which that is, and in how many we are level with or ahead of each."""
    cells, ratios = standing(found)
    good, best = sum(r >= 1 for r in ratios), Counter(best_peer(place) for place in cells)
    peers = sorted({name for place in cells for name in place} - set(OWN), key=lambda name: -best[name])
    ahead = {name: [place[name]["ms"] >= place[OURS]["ms"] for place in cells if name in place] for name in peers}
    return (
        f"Against the best peer of each cell: at least 1.00 in {good} of {len(cells)} cells, median {median(ratios):.2f}, "
        f"least {min(ratios):.2f}, most {max(ratios):.2f}. The best peer is {', '.join(f'{label(name)} in {n}' for name, n in best.most_common())}. "
        f"numbaflash is level or ahead of {', '.join(f'{label(name)} in {sum(some)} of {len(some)}' for name, some in ahead.items())}."
    )


def headline(found) -> str:
    """The README's sentences: forward, gradients, decoding."""
    parts = []
    for bench in ("forward", "backward"):
        _, ratios = standing([r for r in found if r["bench"] == bench])
        good = sum(r >= 1 for r in ratios)
        parts.append(f"{min(ratios):.2f} to {max(ratios):.2f} times (median of {len(ratios)} shapes {median(ratios):.2f}, at least 1.00 in {good})")
    cached = decode_places([r for r in found if r["bench"] == "decode"], 8)["64 of 8k"]
    shares = [100 * record["share_of_copy"] for (_, name), record in cached.items() if name == OURS]
    return (
        f"On an {found[0]['gpu'].removeprefix('NVIDIA ')} the forward is {parts[0]} as fast\n"
        "as the best of cuDNN, FlashAttention 2 and FlashAttention 4 in the same run, and the gradients are\n"
        f"{parts[1]} as fast.\n"
        f"Decoding 64 sequences of 8k with 8 key heads reads the cache at {min(shares):.0f} to {max(shares):.0f}% of the speed of a copy\n"
        "on the device, contiguous or in pages of 1 to 256."
    )


def behind_table(found) -> str:
    """The cells below 1.00: where, by how much, who is ahead, and the spread of our own time, half its interquartile range."""
    rows = {}
    for record, place in places(found):
        if (r := ratio(place)) is not None and r < 1:
            name = f"D {record['head_dim']} {mask_of(record)}, {record['dtype']}, {heads_of(record)}"
            rows.setdefault((name, label(best_peer(place))), []).append((length(record["seqlen_q"]), f"{r:.3f}", f"{100 * spread(place):.1f}"))
    lines = [[name, *map(", ".join, zip(*some, strict=True)), peer] for (name, peer), some in rows.items()]
    return table(["cells", "lengths", "ratio", "+-%", "ahead of us"], lines)


BLOCKS, TILE = 132, 128
"""Blocks at a time, and keys of a tile, of the model that `steps_table` fits."""


def steps_table(found, libraries=(OURS, "fa4"), dims=(64, 128)) -> str:
    """What a tile and a step take: ``time = tiles / 132 * (tile + steps * step)``, fitted to the lengths of each line by relative errors."""
    rows, worst = {}, 0.0
    for name, head_dim in product(libraries, dims):
        lines = {}
        for record, place in places(found):
            if record["head_dim"] == head_dim and name in place:
                lines.setdefault((heads_of(record), record["dtype"], record["causal"]), []).append(place[name])
        for (heads, *_), some in lines.items():
            tile, step, error = fitted(some)
            worst = max(worst, error)
            rows.setdefault(f"D {head_dim}, {heads}", {}).setdefault(name, []).append((tile, step))
    text = {name: {lib: ", ".join(map(ranged_us, zip(*values, strict=True))) for lib, values in row.items()} for name, row in rows.items()}
    head = ["microseconds: a tile's start and end, a step of 128 queries", *map(label, libraries)]
    rows = [[name, *(row.get(lib, "-") for lib in libraries)] for name, row in text.items()]
    return f"{table(head, rows)}\n\nThe model meets every cell within {worst:.0%}."


def ranged_us(values) -> str:
    return ranged(values, ".1f" if max(values) >= 5 else ".2f")


def fitted(line: list[dict]) -> tuple[float, float, float]:
    """Microseconds of a tile and of a step, by least squares of the relative errors, and the largest of these."""
    import numpy as np

    terms = []
    for r in line:
        blocks, group = -(-r["seqlen_k"] // TILE), r["heads"] // r["kv_heads"]
        tiles, steps = r["batch"] * r["kv_heads"] * blocks, group * ((blocks + 1) / 2 if r["causal"] else blocks)
        terms.append([tiles / BLOCKS / (1e3 * r["ms"]), tiles * steps / BLOCKS / (1e3 * r["ms"])])
    terms = np.array(terms)
    found, *_ = np.linalg.lstsq(terms, np.ones(len(line)), rcond=None)
    return float(found[0]), float(found[1]), float(abs(terms @ found - 1).max())


# ---- options


def options_table(found) -> str:
    """Of each option our time, the plain kernel's over it, and the best peer's over it, forward and backward; a table for each head dim."""
    dims = dict.fromkeys(r["head_dim"] for r in found)
    return "\n\n".join(_options_of([r for r in found if r["head_dim"] == dim], dim) for dim in dims)


def _options_of(found, dim) -> str:
    at = {}
    for r in found:
        if r["ms"] is not None:
            at.setdefault((r["option"], r["direction"]), {})[r["library"]] = r["ms"]
    rows = []
    for option in dict.fromkeys(r["option"] for r in found):
        row = [option]
        for direction in ("forward", "backward"):
            place = at.get((option, direction), {})
            plain = place.get(OURS_PLAIN) or at.get(("full plain" if option.startswith("full ") else "plain", direction), {}).get(OURS)
            comparable = plain and OURS in place and "window" not in option  # which is of another length
            peer = min((name for name in place if name not in (*OWN, OURS_PLAIN)), key=place.get, default=None)
            row.append(f"{place[OURS]:.3f}" if OURS in place else "-")
            row.append(f"{plain / place[OURS]:.2f}" if comparable else "-")
            row.append(f"{place[peer] / place[OURS]:.2f} {label(peer)}" if peer and OURS in place else "-")
        rows.append(row)
    return table([f"D {dim}", "forward, ms", "share", "ratio", "backward, ms", "share", "ratio"], rows)


# ---- packed sequences


def packed_table(found) -> str:
    """Uniform lengths: our time, its ratio to the ideal one, and the time of everything else over ours; full, causal."""
    uniform = {key: place for key, place in varlen.places(found).items() if key[0] == "uniform"}
    others = {name: label(name) for name in (OURS_PADDED, "fa4", "fa2") if any(r["library"] == name for r in found)}
    rows = {}
    for place in uniform.values():
        ours = place[OURS]
        ratios = [varlen.ideal_share(ours), *(varlen.ratio(place, name) for name in others)]
        fields = [digits(ours["ms"]) if ours["ms"] else "-", *("-" if value is None else f"{value:.2f}" for value in ratios)]
        rows.setdefault(f"{ours['direction']}, D {ours['head_dim']}, {heads_of(ours)}", {})[ours["causal"]] = fields
    lines = [[name, *map(", ".join, zip(*(row[mask] for mask in sorted(row)), strict=True))] for name, row in rows.items()]
    return table(["full, causal", "ms", "of the ideal time", *others.values()], lines)


def packed_line(found) -> str:
    return "\n".join(f"- {line}" for line in varlen.bars(found))


# ---- decoding


def decode_places(found, kv_heads) -> dict[str, dict[tuple[int, str], dict]]:
    """{lengths: {(page size, library): record with a time}} of 32 query heads."""
    rows = {}
    for r in found:
        if r["kv_heads"] == kv_heads:
            row = rows.setdefault(r["lengths"], {})
            if r["ms"] is not None:
                row[r["page_size"], r["library"]] = r
    return rows


def _over(row, page, name) -> str:
    return f"{row[page, name]['ms'] / row[page, OURS]['ms']:.2f}" if (page, name) in row and (page, OURS) in row else "-"


def _share(row, page) -> str:
    return f"{row[page, OURS]['share_of_copy']:.0%}" if (page, OURS) in row else "-"


def decode_table(found, kv_heads=8) -> str:
    """Our time and share of the copy, contiguous and in pages, and the peers' times over ours."""
    rows = []
    for lengths, row in decode_places(found, kv_heads).items():
        us = digits(1e3 * row[0, OURS]["ms"]) if (0, OURS) in row else "-"
        peers = [_over(row, page, name) for name, page in (("fa4", 0), ("fa4", 16), ("fa2", 0), ("cudnn", 0))]
        rows.append([lengths, us, *(_share(row, page) for page in (0, 16, 1)), *peers])
    head = [f"32 query heads, {kv_heads} key heads", "contiguous, us", "of the copy", "pages of 16", "pages of 1"]
    return table([*head, "FA4, contiguous", "FA4, pages of 16", "FA2", "cuDNN"], rows)


def decode_line(found, kv_heads=8) -> str:
    """In how many cells, contiguous and paged, we are level with or ahead of every peer that has a time."""
    ratios = []
    for row in decode_places(found, kv_heads).values():
        for page in {page for page, _ in row}:
            peers = [record["ms"] for (size, name), record in row.items() if size == page and name not in OWN]
            if peers and (page, OURS) in row:
                ratios.append(min(peers) / row[page, OURS]["ms"])
    return f"Level with or ahead of every peer in {sum(r >= 1 for r in ratios)} of {len(ratios)} cells that have one, the least {min(ratios):.2f}."


# ---- serving, training, host


def _medians(found, key) -> dict:
    values = {}
    for r in found:
        values.setdefault(key(r), []).append(r["value"])
    return {name: median(some) for name, some in values.items()}


def serving_table(found) -> str:
    """Times to the first token and of those after it, and throughput: medians of the rounds."""
    value = _medians(found, lambda r: (r["library"], r["quantity"]))
    names = {
        "ttft p50": "to the first token, p50",
        "ttft p99": "p99",
        "tpot p50": "a token after it, p50",
        "tpot p99": "p99",
        "throughput": "tokens a second",
    }
    engines = dict.fromkeys(r["library"] for r in found)
    rows = [["no attention" if engine == "none" else engine, *(digits(value[engine, name]) for name in names)] for engine in engines]
    return table(["ms", *names.values()], rows)


def serving_line(found) -> str:
    value = _medians(found, lambda r: (r["library"], r["quantity"]))

    def gains(quantity):
        return [value["torch", quantity] / value[engine, quantity] for engine in (OURS, "none")]

    first, after = gains("ttft p50"), gains("tpot p50")
    shares = [100 * (1 - value["none", "tpot p50"] / value[engine, "tpot p50"]) for engine in (OURS, "torch")]
    return (
        f"The first token comes {first[0]:.2f} times as fast as with torch, of at most {first[1]:.2f} without any attention; "
        f"tokens after it {after[0]:.2f} times, of at most {after[1]:.2f}. "
        f"Attention is {shares[0]:.0f}% of a token's time with numbaflash, {shares[1]:.0f}% with torch."
    )


def training_table(found) -> str:
    """Forward and backward through autograd: ratio to the best of torch's back ends, and to FA4."""
    rows = {}
    for record, place in places([r for r in found if not r.get("quantity")]):
        torchs = [place[name]["ms"] for name in ("cudnn", "fa2", "efficient") if name in place]
        ours = place[OURS]["ms"]
        text = f"{min(torchs) / ours:.2f}, " + (f"{place['fa4']['ms'] / ours:.2f}" if "fa4" in place else "-")
        column = mask_of(record) + ("" if record["heads"] == record["kv_heads"] else f", {heads_of(record)}")
        rows.setdefault((record["dtype"], record["head_dim"]), {})[column] = text
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return table(["torch's best, FA4", *columns], [[f"{dtype}, D {dim}", *(row.get(c, "-") for c in columns)] for (dtype, dim), row in rows.items()])


def quantities_table(found, quantity: str) -> str:
    """One quantity: a row for each case, a column for each library; median, and quartiles where there are."""
    some = [r for r in found if r.get("quantity") == quantity and not r.get("skipped")]
    rows, libraries = {}, list(dict.fromkeys(label(r["library"]) for r in some))
    for r in some:
        text = digits(r["value"])
        if r.get("q1") is not None and r["q1"] != r["q3"]:
            text += f" ({digits(r['q1'])} to {digits(r['q3'])})"
        rows.setdefault(r["case"], {})[label(r["library"])] = text
    return table([f"{quantity}, {some[0]['unit']}", *libraries], [[case, *(row.get(name, "-") for name in libraries)] for case, row in rows.items()])


# ---- other families


def dense_table(found) -> str:
    """`simt` over lengths: speed, times as fast as dense, deterministic gradients, and at the longest its time, and memory of a call of both."""
    rows = {}
    for record, place in places(found):
        if OURS in place:
            name = dim_and_mask(record) + (f", {length(record['seqlen_q'])}" if record["seqlen_q"] > LONG else "")
            rows.setdefault(name, []).append(place)
    lines = []
    for name, some in rows.items():
        last = some[-1]
        fields = [
            ranged([place[OURS]["tflops"] for place in some], ".1f"),
            _ranged_over([(place, "dense", OURS) for place in some], ".1f"),
            _ranged_over([(place, OURS, "deterministic") for place in some], ".2f"),
            digits(last[OURS]["ms"]),
        ]
        memory = [f"{last[lib]['peak_bytes'] / 1e9:.2f} GB" if last.get(lib, {}).get("peak_bytes") else "-" for lib in (OURS, "dense")]
        lines.append([name, *fields, *memory])
    head = ["", "TFLOP/s", "times as fast as dense", "deterministic: share of the speed", "ms at the longest", "memory of its call"]
    return table([*head, "dense's"], lines)


def _ranged_over(pairs, form) -> str:
    """Range of one library's time over another's, of the cells that have both."""
    found = [place[a]["ms"] / place[b]["ms"] for place, a, b in pairs if a in place and b in place]
    return ranged(found, form) if found else "-"


LONG = 16384
"""Cells have 16k tokens; what is longer is a sequence by itself."""


def cpu_table(found, peer="torch") -> str:
    """`cpu` beside torch: a line a cell."""
    rows = []
    for record, place in places(found):
        times = [digits(place[name]["ms"]) if name in place else "-" for name in (OURS, peer)]
        r, wobble = ratio(place), spread(place)
        cell = [str(record["head_dim"]), mask_of(record), str(record["seqlen_q"])]
        rows.append([*cell, *times, "-" if r is None else f"{r:.2f}", "-" if wobble is None else f"{100 * wobble:.1f}"])
    return table(["D", "mask", "seqlen", "numbaflash, ms", f"{peer}, ms", "ratio", "+-%"], rows)


# ---- where from


def sources(found_of: dict[str, list[dict]]) -> str:
    """The commands of result files: on what, when, at which commit."""
    lines = []
    for file, found in found_of.items():
        runs = dict.fromkeys((told(r), r.get("commit"), r["gpu"], r.get("driver"), r["date"][:10]) for r in found)
        for command, commit, gpu, driver, date in runs:
            on = ", ".join(
                [
                    gpu,
                    *([f"driver {driver}"] if driver else []),
                    date,
                    *([f"commit {commit}"] if re.fullmatch(r"[0-9a-f]{7,}\+?", commit or "") else []),
                ]
            )
            lines.append(f"- `bench/results/{file}.jsonl` ({on}): {command}")
    return "\n".join(lines)


def told(record) -> str:
    """A record's command without the options that say where it ran; what stands for it where there was none."""
    if not record.get("command"):
        return record.get("source", "not recorded")
    return "`" + re.sub(r" --(?:out|commit) \S+", "", record["command"]).replace("python3 ", "python ", 1) + "`"


TABLES = {
    "headline": headline,
    "standing": standing_line,
    "ratios": ratios_table,
    "speeds": speeds_table,
    "behind": behind_table,
    "steps": steps_table,
    "deterministic": lambda found: f"{deterministic_line(found)}\n\n{deterministic_table(found)}",
    "options": options_table,
    "packed": lambda found: f"{packed_table(found)}\n\n{packed_line(found)}",
    "decoding": lambda found: "\n\n".join(
        f"{decode_table(found, kv_heads)}\n\n{decode_line(found, kv_heads)}" for kv_heads in dict.fromkeys(r["kv_heads"] for r in found)
    ),
    "serving": lambda found: f"{serving_table(found)}\n\n{serving_line(found)}",
    "training": training_table,
    "training memory": lambda found: quantities_table(found, "peak memory of forward and backward, results included"),
    "host time": lambda found: quantities_table(found, "host time a call"),
    "first call": lambda found: quantities_table(found, "first call of a process"),
    "dense": dense_table,
    "on the CPU": cpu_table,
}
"""By name; ``<!-- numbaflash NAME: FILE... -->`` on a page of the documentation has one of results/FILE.jsonl."""
