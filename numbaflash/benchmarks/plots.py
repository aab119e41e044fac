"""Speed over sequence length: a panel for each head dim and mask, a line for each library."""

from __future__ import annotations

from pathlib import Path

from . import records
from .peers import LABELS, LIBRARIES, OURS, OURS_DETERMINISTIC, OURS_PLAIN
from .tables import SHORT, by_cell, name_of

COLOURS = {OURS: "#d1382f", OURS_DETERMINISTIC: "#e8998f", "fa4": "#1f5fa8", "cudnn": "#3f9142", "fa2": "#8a63b5", "dense": "#7a7a7a"}
COLOURS |= {"sdpa": "#1f5fa8", "numpy": "#b0a080", "efficient": "#c7a13c", "flex": "#4fb3bf", "flashinfer": "#5d6d7e", OURS_PLAIN: "#f3c7c2"}
SOURCE = "Source"
"""What a PNG calls the digest of its records."""
MARKERS = {OURS: "o", OURS_DETERMINISTIC: "o", "fa4": "s", "cudnn": "^", "fa2": "D", "dense": "x"}
TITLES = {
    "forward": "Attention forward",
    "backward": "Attention backward",
    "forward+backward": "Attention forward and backward, torch autograd",
    "decode": "Decoding with a cache",
}


def figures(recs) -> dict[tuple, list[dict]]:
    """Records with a time, grouped by what one figure shows: (dtype, "mha" or "H/Hk")."""
    groups = {}
    for record in recs:
        if record["ms"] is not None and record["tflops"] is not None:
            heads, kv_heads = record["heads"], record["kv_heads"]
            kind = "mha" if heads == kv_heads else f"{heads}/{kv_heads}"
            groups.setdefault((record["dtype"], kind), []).append(record)
    return groups


def plot(recs, path) -> list[Path]:
    """Draw one PNG for each dtype and kind of heads.

    Parameters
    ----------
    recs : list of dict
        Records of one run in one direction.
    path : path-like
        Of the results; a figure is named like it, with the dtype and the heads behind.

    Returns
    -------
    list of Path
        The files written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path, written, order = Path(path), [], list(LIBRARIES)
    for (dtype, kind), group in figures(recs).items():
        dims = sorted({r["head_dim"] for r in group})
        masks = sorted({r["causal"] for r in group}, key=str)
        libraries = sorted({r["library"] for r in group}, key=lambda name: order.index(name) if name in order else len(order))
        cells = by_cell(group)
        figure = Figure(figsize=(1.2 + 3.9 * len(dims), 1.6 + 3.0 * len(masks)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(masks), len(dims), squeeze=False, sharey=True)
        for row, mask in enumerate(masks):
            for column, dim in enumerate(dims):
                _panel(panels[row][column], cells, dim, mask, libraries)
            panels[row][0].set_ylabel("TFLOP/s")
        panels[0][0].set_ylim(0, 1.06 * max(r["tflops"] for r in group))  # shared by all
        for panel in panels[-1]:
            panel.set_xlabel("sequence length")
        lines = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
        names = [LABELS.get(name, name) for name in libraries]
        figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=len(names), frameon=False)
        heads = "equal query and key/value heads" if kind == "mha" else f"{kind} query/key-value heads"
        figure.suptitle(f"{TITLES.get(group[0]['direction'], group[0]['direction'])}, {SHORT.get(dtype, dtype)}, {heads}, {group[0]['gpu']}")
        target = path.with_name(f"{path.stem}-{SHORT.get(dtype, dtype)}-{kind.replace('/', '-')}.png")
        save(figure, target, recs)
        written.append(target)
    return written


def save(figure, path, recs) -> None:
    """Write a figure as a PNG that tells the `records.digest` of what it was drawn of."""
    figure.savefig(path, dpi=130, metadata={SOURCE: records.digest(recs)})


def source_of(path) -> str | None:
    """The digest that `save` wrote into a PNG."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info.get(SOURCE)


def _panel(panel, cells, dim, mask, libraries):
    mine = {}
    for cell, place in cells.items():
        values = records.fields_of(cell)
        if (values["head_dim"], values["causal"]) == (dim, mask):
            mine[values["seqlen_q"]] = place
    lengths = sorted(mine)
    for name in libraries:
        points = [(n, mine[length][name]["tflops"]) for n, length in enumerate(lengths) if name in mine[length]]
        ours = name == OURS
        panel.plot(
            [n for n, _ in points],
            [y for _, y in points],
            label=LABELS.get(name, name),
            color=COLOURS.get(name),
            marker=MARKERS.get(name, "."),
            linewidth=2.4 if ours else 1.4,
            markersize=6 if ours else 5,
            zorder=3 if ours else 2,
        )
    panel.set_title(f"D = {dim}, {'causal' if mask is True else 'full' if mask is False else mask}")
    panel.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    panel.grid(axis="y", color="#dddddd", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def plot_bars(recs, path) -> list[Path]:
    """Draw one PNG with the time of each library, a group of bars for each cell: of cells that differ in more than their length.

    Parameters
    ----------
    recs : list of dict
        Records of one run in one direction.
    path : path-like
        The figure is named like it.

    Returns
    -------
    list of Path
        The file written; none where nothing has a time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = {cell: place for cell, place in by_cell(recs).items() if place}
    if not cells:
        return []
    libraries = list(dict.fromkeys(record["library"] for record in recs if record["ms"] is not None))
    figure = Figure(figsize=(9, 1.2 + 0.24 * sum(len(place) + 1 for place in cells.values())), layout="constrained")
    FigureCanvasAgg(figure)
    panel, at, ticks = figure.subplots(), 0, []
    for cell, place in cells.items():
        names = [name for name in libraries if name in place]
        ticks.append((at + (len(names) - 1) / 2, name_of(cell)))
        for name in names:
            times = place[name]
            error = [[times["ms"] - times["ms_q1"]], [times["ms_q3"] - times["ms"]]] if "ms_q1" in times else None
            panel.barh(at, times["ms"], xerr=error, color=COLOURS.get(name, "#b0b0b0"), label=LABELS.get(name, name), height=0.8)
            at += 1
        at += 1
    panel.set_yticks(*zip(*ticks, strict=True))
    panel.invert_yaxis()
    panel.set_xlabel("ms, median and quartiles")
    panel.spines[["top", "right"]].set_visible(False)
    bars = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(bars.values(), bars.keys(), loc="outside lower center", ncols=min(4, len(bars)), frameon=False)
    figure.suptitle(f"{TITLES.get(recs[0]['direction'], recs[0]['direction'])}, {recs[0]['gpu']}")
    target = Path(f"{path}.png")
    save(figure, target, recs)
    return [target]
