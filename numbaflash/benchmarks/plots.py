"""Speed over sequence length: a panel for each head dim and mask, a line for each library."""

from __future__ import annotations

from pathlib import Path

from . import records
from .peers import LABELS, LIBRARIES, OURS, OURS_DETERMINISTIC
from .tables import SHORT, by_cell

COLOURS = {OURS: "#d1382f", OURS_DETERMINISTIC: "#e8998f", "fa4": "#1f5fa8", "cudnn": "#3f9142", "fa2": "#8a63b5", "dense": "#7a7a7a"}
MARKERS = {OURS: "o", OURS_DETERMINISTIC: "o", "fa4": "s", "cudnn": "^", "fa2": "D", "dense": "x"}
TITLES = {"forward": "Attention forward", "backward": "Attention backward", "forward+backward": "Attention forward and backward, torch autograd"}


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
        figure.savefig(target, dpi=130)
        written.append(target)
    return written


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
