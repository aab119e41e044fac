"""Draws the figures of the README and the documentation: ``python docs/figures/draw.py`` writes every SVG beside this file.

Numbers and masks in the figures are computed, the masks by numbaflash's own reference, the budgets of kernels from their configurations.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from numbaflash import BlockMask, reference
from numbaflash.plotting import _picture
from numbaflash.problem import make_packed_problem, make_problem
from numbaflash.reference import visible

DOCS = str(Path(__file__).resolve().parent.parent)
if DOCS not in sys.path:
    sys.path.append(DOCS)

import budgets  # noqa: E402

INK, SOFT, LINE = "#1b2430", "#5b6775", "#c3cad3"
SKIPPED, BORDER, INSIDE, PLAIN = "#f0f2f5", "#f2b266", "#5b9bd5", "#dfe7f1"
Q_COLOR, K_COLOR, V_COLOR, STATE = "#8fc6a4", "#d9a5c7", "#e3d08a", "#fdf6ea"


class Svg:
    """A drawing of rectangles, lines and text on white, so that it reads on a dark page too."""

    def __init__(self, width: int, height: int):
        self.size = width, height
        self.parts = []

    def rect(self, x, y, w, h, fill, stroke=LINE, width=1.0, radius=2):
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="{width:g}"/>')

    def text(self, x, y, words, size=14, color=INK, anchor="start", weight="normal", mono=False):
        family = "Menlo, Consolas, DejaVu Sans Mono, monospace" if mono else "Helvetica, Arial, sans-serif"
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        font = f'font-family="{family}" font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {font} fill="{color}" xml:space="preserve">{words}</text>')

    def line(self, x1, y1, x2, y2, color=SOFT, width=1.5, arrow=False):
        extra = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="{width:g}"{extra}/>')

    def __str__(self):
        width, height = self.size
        shape = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
        arrow = f'<marker id="arrow" {shape}><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        return "\n".join([head, f"<defs>{arrow}</defs>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *self.parts, "</svg>", ""])


def tiling() -> Svg:
    """Left: the tiles of the score matrix, of which one exists at a time. Right: the state that a row keeps between them."""
    svg = Svg(1060, 452)
    _score_tiles(svg, 20, 20)
    _online_softmax(svg, 530, 20)
    return svg


def _score_tiles(svg, x0, y0):
    tile, rows, cols, chosen = 42, 6, 8, 3
    left, top = x0 + 92, y0 + 92
    seen = visible(make_problem((1, rows * 8, 1, 1), (1, cols * 8, 1, 1), (1, cols * 8, 1, 1), ("float32",) * 3, causal=True))
    svg.text(x0, y0 + 12, "The scores, tile by tile", 17, weight="bold")
    svg.text(left + cols * tile / 2, y0 + 42, "keys and values", 13, SOFT, "middle")
    svg.text(x0, top - 12, "queries", 13, SOFT)
    for col in range(cols):
        svg.rect(left + col * tile + 2, top - 38, tile - 4, 12, K_COLOR)
        svg.rect(left + col * tile + 2, top - 23, tile - 4, 12, V_COLOR)
    svg.text(left + cols * tile + 6, top - 28, "K", 12, SOFT)
    svg.text(left + cols * tile + 6, top - 13, "V", 12, SOFT)
    for row in range(rows):
        svg.rect(x0 + 50, top + row * tile + 3, 22, tile - 6, Q_COLOR, INK if row == chosen else LINE, 2 if row == chosen else 1)
        for col in range(cols):
            block = seen[row * 8 : row * 8 + 8, col * 8 : col * 8 + 8]
            fill = INSIDE if block.all() else BORDER if block.any() else SKIPPED
            svg.rect(left + col * tile + 1, top + row * tile + 1, tile - 2, tile - 2, fill)
    last = max(col for col in range(cols) if seen[chosen * 8 : chosen * 8 + 8, col * 8 : col * 8 + 8].any())
    middle = top + chosen * tile + tile / 2
    svg.rect(left - 2, top + chosen * tile - 2, (last + 1) * tile + 4, tile + 4, "none", INK, 2.5, 4)
    svg.line(left + 12, middle, left + (last + 1) * tile - 10, middle, INK, 2, arrow=True)
    svg.text(x0, middle + 5, "q_tile", 13)
    svg.text(left, top + rows * tile + 22, "A tile of queries stays on chip; the loop brings in the", 13, SOFT)
    svg.text(left, top + rows * tile + 40, "keys and values block by block. Nothing of size Sq x Sk.", 13, SOFT)
    y = top + rows * tile + 54
    for x, fill, words in ((0, INSIDE, "no mask needed"), (130, BORDER, "border: masked"), (250, SKIPPED, "skipped: not even loaded")):
        svg.rect(left + x, y, 13, 13, fill)
        svg.text(left + x + 19, y + 11, words, 12)


def online_softmax(blocks, values):
    """States (m, l, acc) after each block of one row: the computation that the figure shows."""
    m, l, acc = -math.inf, 0.0, 0.0
    for scores, v in zip(blocks, values, strict=True):
        m_new = max(m, *scores)
        alpha = math.exp(m - m_new)
        p = [math.exp(s - m_new) for s in scores]
        l = alpha * l + sum(p)
        acc = alpha * acc + sum(weight * value for weight, value in zip(p, v, strict=True))
        m = m_new
        yield alpha, m, l, acc


def _online_softmax(svg, x0, y0):
    blocks, values = ((1.0, 3.0), (2.0, 5.0), (4.0, 0.0)), ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    svg.text(x0, y0 + 12, "Online softmax: what one row remembers", 17, weight="bold")
    formulas = (
        "m'   = max(m, max(s))",
        "a    = exp(m - m')",
        "l'   = a l   + sum exp(s - m')",
        "acc' = a acc + exp(s - m') v",
    )
    svg.rect(x0, y0 + 28, 510, 96, "#f7f9fb")
    for i, words in enumerate(formulas):
        svg.text(x0 + 14, y0 + 50 + 21 * i, words, 14, mono=True)
    for i, words in enumerate(("largest score so far", "rescales what is there", "sum of weights", "weighted sum of values")):
        svg.text(x0 + 320, y0 + 50 + 21 * i, words, 13, SOFT)
    columns = (0, 88, 178, 268, 324, 414)
    for x, words in zip(columns, ("scores s", "values v", "a", "m", "l", "acc"), strict=True):
        svg.text(x0 + 12 + x, y0 + 152, words, 13, SOFT)
    y = y0 + 160
    for (s, v), (alpha, m, l, acc) in zip(zip(blocks, values, strict=True), online_softmax(blocks, values), strict=True):
        svg.rect(x0, y, 510, 34, STATE)
        cells = (f"{s[0]:g}  {s[1]:g}", f"{v[0]:g}  {v[1]:g}", f"{alpha:.4f}", f"{m:g}", f"{l:.4f}", f"{acc:.4f}")
        for i, (x, words) in enumerate(zip(columns, cells, strict=True)):
            if i < 2:
                svg.rect(x0 + 6 + x, y + 6, 66, 22, K_COLOR if i == 0 else V_COLOR, "none")
            svg.text(x0 + 14 + x, y + 22, words, 14, mono=True)
        y += 42
    scores, flat = np.array(blocks).ravel(), np.array(values).ravel()
    weights = np.exp(scores)
    svg.text(x0, y + 18, "At the end", 14, weight="bold")
    svg.text(x0 + 120, y + 18, f"out = acc / l    = {acc / l:.4f}", 13, mono=True)
    svg.text(x0 + 325, y + 18, f"lse = m + ln l = {m + math.log(l):.4f}", 13, mono=True)
    svg.text(x0, y + 46, "All six at once", 14, weight="bold")
    svg.text(x0 + 120, y + 46, f"softmax(s) v     = {weights @ flat / weights.sum():.4f}", 13, mono=True)
    svg.text(x0 + 325, y + 46, f"ln(sum exp s)  = {math.log(weights.sum()):.4f}", 13, mono=True)
    svg.text(x0, y + 74, "Results over different keys merge in the same way, from (out, lse) alone.", 13, SOFT)


def band() -> Svg:
    """Which keys a query sees under each alignment, drawn from the reference."""
    cases = (
        ("causal=True", {"causal": True}, 5, 8),
        ('causal="top_left"', {"causal": "top_left"}, 5, 8),
        ("causal=True", {"causal": True}, 8, 5),
        ("window=(2, 1)", {"window": (2, 1)}, 7, 7),
        ("causal, window=(2, None)", {"causal": True, "window": (2, None)}, 7, 7),
    )
    svg = Svg(1060, 236)
    x, cell = 18, 20
    for title, options, rows, cols in cases:
        problem = make_problem((1, rows, 1, 1), (1, cols, 1, 1), (1, cols, 1, 1), ("float32",) * 3, **options)
        svg.text(x, 22, title, 13, weight="bold")
        svg.text(x, 40, f"{rows} queries, {cols} keys", 12, SOFT)
        for i, row in enumerate(visible(problem)):
            for j, sees in enumerate(row):
                svg.rect(x + j * cell, 54 + i * cell, cell - 2, cell - 2, INSIDE if sees else SKIPPED, "none")
        if not visible(problem).any(axis=1).all():
            svg.text(x + cols * cell + 6, 54 + cell * 1.7, "sees nothing:", 12, SOFT)
            svg.text(x + cols * cell + 6, 54 + cell * 1.7 + 16, "out 0, lse -inf", 12, SOFT)
        x += 200
    return svg


def backward() -> Svg:
    """Left: a tile of keys at rest, queries streaming by. Right: the turns in which tiles of causal attention add to dQ."""
    svg = Svg(1060, 424)
    tile, rows, cols, chosen = 42, 6, 6, 2
    top = 112
    seen = visible(make_problem((1, rows * 8, 1, 1), (1, cols * 8, 1, 1), (1, cols * 8, 1, 1), ("float32",) * 3, causal=True))
    blocks = [[seen[m * 8 : m * 8 + 8, n * 8 : n * 8 + 8] for n in range(cols)] for m in range(rows)]
    _keys_at_rest(svg, 20, top, tile, blocks, chosen)
    _turns(svg, 560, top, tile, blocks)
    return svg


def _keys_at_rest(svg, x0, top, tile, blocks, chosen):
    rows, cols, left = len(blocks), len(blocks[0]), x0 + 92
    svg.text(x0, 32, "Gradients: a tile of keys at rest", 17, weight="bold")
    for n in range(cols):
        for y, fill in ((top - 38, K_COLOR), (top - 23, V_COLOR)):
            svg.rect(left + n * tile + 2, y, tile - 4, 12, fill, INK if n == chosen else LINE, 2 if n == chosen else 1)
    svg.text(left + cols * tile + 6, top - 28, "K", 12, SOFT)
    svg.text(left + cols * tile + 6, top - 13, "V", 12, SOFT)
    svg.text(x0 + 34, top - 13, "Q  dO", 12, SOFT)
    svg.text(left + cols * tile + 14, top + 14, "dQ, summed", 12, SOFT)
    svg.text(left + cols * tile + 14, top + 30, "in memory", 12, SOFT)
    taking_part = [m for m in range(rows) if blocks[m][chosen].any()]
    for m in range(rows):
        for x, fill in ((x0 + 34, Q_COLOR), (x0 + 56, PLAIN)):
            svg.rect(x, top + m * tile + 3, 16, tile - 6, fill)
        for n in range(cols):
            fill = INSIDE if blocks[m][n].all() else BORDER if blocks[m][n].any() else SKIPPED
            svg.rect(left + n * tile + 1, top + m * tile + 1, tile - 2, tile - 2, fill)
        if m in taking_part:
            middle = top + m * tile + tile / 2
            svg.line(left + (chosen + 1) * tile + 4, middle, left + cols * tile + 10, middle, INK, 1.2, arrow=True)
            svg.rect(left + cols * tile + 14, top + m * tile + 3, 18, tile - 6, Q_COLOR, INK)
    x, first = left + chosen * tile, top + taking_part[0] * tile
    svg.rect(x - 2, first - 2, tile + 4, (rows - taking_part[0]) * tile + 4, "none", INK, 2.5, 4)
    svg.line(x + tile / 2, first + 10, x + tile / 2, top + rows * tile - 8, INK, 2, arrow=True)
    for y, fill in ((top + rows * tile + 6, K_COLOR), (top + rows * tile + 21, V_COLOR)):
        svg.rect(x + 2, y, tile - 4, 12, fill, INK, 2)
    svg.text(x + tile + 8, top + rows * tile + 26, "dK, dV: in registers until the last query", 13, SOFT)


def _turns(svg, x0, top, tile, blocks):
    rows, cols, left = len(blocks), len(blocks[0]), x0 + 60
    svg.text(x0, 32, "deterministic=True, causal: who adds to dQ when", 17, weight="bold")
    svg.text(left, 60, "Tiles of later keys run first. A number is the turn of a", 13, SOFT)
    svg.text(left, 78, "tile: how many have added to this block of dQ before it.", 13, SOFT)
    for n in range(cols):
        svg.rect(left + n * tile + 2, top - 20, tile - 4, 14, K_COLOR)
    for m in range(rows):
        svg.rect(left - 24, top + m * tile + 3, 18, tile - 6, Q_COLOR)
        for n in range(cols):
            svg.rect(left + n * tile + 1, top + m * tile + 1, tile - 2, tile - 2, PLAIN if blocks[m][n].any() else SKIPPED)
            if blocks[m][n].any():
                turn = sum(block.any() for block in blocks[m][n + 1 :])
                svg.text(left + n * tile + tile / 2, top + m * tile + tile / 2 + 5, str(turn), 14, INK, "middle", "bold" if turn == 0 else "normal")
    svg.text(left, top + rows * tile + 24, "Down a column, in the order in which a tile goes: it never", 13, SOFT)
    svg.text(left, top + rows * tile + 42, "waits at the first block, and later for tiles that are ahead.", 13, SOFT)


N = 10  # queries and keys of the figures of options
SHADES = 32
DROPPED = "#ffffff"


def weights_of(entry=0, causal=False, seed=0, **options):
    """(weights, seen), each (N, N): those of one head on a fixed q and k, by the reference. ``options`` as `numbaflash.forward` takes them.

    With the unit matrix for v the result of attention is its weights.
    """
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((2, 2, N, 1, 4))
    v = np.broadcast_to(np.eye(N)[:, None], (2, N, 1, N))
    arrays = {name: np.asarray(x) for name, x in options.items() if name not in ("softcap", "dropout", "scale", "window")}
    numbers = {name: x for name, x in options.items() if name not in arrays}
    described = {name: (x.shape, x.dtype.name) for name, x in arrays.items()}
    problem = make_problem(q.shape, k.shape, v.shape, ("float32",) * 3, causal=causal, **numbers, **described)
    out, _ = reference.forward(problem, q, k, v, seed=seed, **arrays)
    return out[entry, :, 0], visible(problem, entry, 0, **arrays)


def _shade(weight):
    """From pale to dark with the root of the weight, so that small ones differ, too."""
    part = round(math.sqrt(min(max(weight, 0.0), 1.0)) * SHADES) / SHADES
    pale, dark = (226, 236, 248), (15, 62, 110)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(pale, dark, strict=True))


def _weights(svg, x, y, title, words, weights, seen, dropped=None, sink=False):
    """One matrix of weights: queries downwards, keys to the right; before them, where there is a sink, what it takes."""
    cell = 18
    svg.text(x, y, title, 13, weight="bold")
    svg.text(x, y + 18, words, 12, SOFT)
    top = y + 30
    for i in range(N):
        for j in range(N):
            fill = SKIPPED if not seen[i, j] else DROPPED if dropped is not None and dropped[i, j] else _shade(weights[i, j])
            svg.rect(x + j * cell + sink * 24, top + i * cell, cell - 2, cell - 2, fill, LINE if fill == DROPPED else "none")
        if sink:
            svg.rect(x, top + i * cell, cell - 2, cell - 2, _shade(1 - weights[i].sum()), BORDER, 1.5)


def _option(*panels):
    """Matrices side by side, and what the colours mean."""
    step = 250
    svg = Svg(step * len(panels) + 20, 274)
    for n, panel in enumerate(panels):
        _weights(svg, 20 + n * step, 24, *panel)
    svg.rect(20, 246, 13, 13, SKIPPED, "none")
    svg.text(39, 257, "not seen", 12, SOFT)
    for n in range(9):
        svg.rect(110 + n * 13, 246, 13, 13, _shade((n / 8) ** 2), "none", radius=0)
    svg.text(236, 257, "weight from 0 to 1", 12, SOFT)
    return svg


CAUSAL = ("causal", f"{N} queries, {N} keys")


def window() -> Svg:
    """A window on the left, on both sides, and with causal where there are more keys than queries."""
    return _option(
        ("window=(3, 0)", "three keys before and its own", *weights_of(window=(3, 0))),
        ("window=(2, 1)", "two before, one after", *weights_of(window=(2, 1))),
        ("window=(None, 2)", "all before, two after", *weights_of(window=(None, 2))),
        ("causal=True, window=(4, 2)", "causal ends it at its own key", *weights_of(causal=True, window=(4, 2))),
    )


def mask() -> Svg:
    """Documents packed into one row, and any other mask, both with causal."""
    document = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    holes = np.random.default_rng(1).random((N, N)) < 0.6
    return _option(
        (*CAUSAL, *weights_of(causal=True)),
        ("and a mask of documents", "a query sees its own document", *weights_of(causal=True, mask=document[:, None] == document)),
        ("and any other mask", "bool, True where a query may see a key", *weights_of(causal=True, mask=holes)),
    )


def blocks() -> Svg:
    """Which blocks of masks are full, partial and empty, as `numbaflash.plot_mask` shows them."""
    tokens, like = 1280, np.zeros(1, np.float32)
    rules = (
        ("documents, causal", BlockMask.documents(np.repeat(np.arange(4), (400, 200, 380, 300))), True),
        ("block-causal", BlockMask.block_causal(tokens, block=256, like=like), False),
        ("prefix-LM", BlockMask.prefix_lm(tokens, prefix=400, like=like), False),
        ("sliding + global", BlockMask.sliding_global(tokens, window=(150, 150), n_global=100, like=like), False),
    )
    cell, step = 11, 250
    svg = Svg(step * len(rules) + 20, 292)
    for n, (title, made, causal) in enumerate(rules):
        x = 20 + n * step
        states, _ = _picture(made, 0, 0, causal, (None, None))
        seen = (states > 0).mean()
        svg.text(x, 24, title, 13, weight="bold")
        svg.text(x, 42, f"{seen:.0%} of the blocks are computed", 12, SOFT)
        for (i, j), state in np.ndenumerate(states):
            fill = {0: SKIPPED, 1: INSIDE, 2: BORDER}[int(state)]
            svg.rect(x + j * cell, 54 + i * cell, cell - 1, cell - 1, fill, "none", radius=1)
    for x, fill, words in ((20, INSIDE, "full: no mask is read"), (190, BORDER, "partial: its bits are"), (350, SKIPPED, "empty: skipped")):
        svg.rect(x, 282 - 13, 13, 13, fill, "none")
        svg.text(x + 19, 280, words, 12, SOFT)
    return svg


def bias() -> Svg:
    """A table of relative positions."""
    away = np.arange(N) - np.arange(N)[:, None]
    near = np.where(np.abs(away) <= 1, 3.0, 0.0).astype(np.float32)
    key = np.where(np.arange(N) == 3, 4.0, 0.0).astype(np.float32)
    return _option(
        ("no bias", f"{N} queries, {N} keys", *weights_of()),
        ("3 on the three middle diagonals", "bias of shape (10, 10)", *weights_of(bias=near)),
        ("4 for key 3 alone", "bias of shape (10,)", *weights_of(bias=key)),
    )


def alibi() -> Svg:
    """Three slopes."""
    slopes = (0.0, 0.5, 2.0)
    return _option(*((f"slope {m:g}", "causal", *weights_of(causal=True, alibi_slopes=np.array([m], np.float32))) for m in slopes))


def softcap() -> Svg:
    """Scores that are large, uncapped and capped."""
    return _option(
        ("no softcap", "scores with a scale of 3", *weights_of(scale=3.0)),
        ("softcap 5", "no score beyond 5", *weights_of(scale=3.0, softcap=5.0)),
        ("softcap 1", "no score beyond 1", *weights_of(scale=3.0, softcap=1.0)),
    )


def dropout() -> Svg:
    """The same call with two seeds: dropped weights are white, kept ones grow."""
    plain, seen = weights_of(causal=True)
    panels = [(*CAUSAL, plain, seen)]
    for seed in (1, 2):
        weights, _ = weights_of(causal=True, dropout=0.3, seed=seed)
        panels.append((f"dropout=0.3, seed={seed}", "white: dropped; the others / 0.7", weights, seen, (weights == 0) & seen))
    return _option(*panels)


def sinks() -> Svg:
    """What a sink takes from the keys, row by row."""
    panels = [(*CAUSAL, *weights_of(causal=True))]
    for sink in (0.0, 2.0):
        panels.append(
            (f"sink {sink:g}", "first column: what the sink takes", *weights_of(causal=True, sinks=np.array([sink], np.float32)), None, True)
        )
    return _option(*panels)


def padded() -> Svg:
    """Two batch entries of other lengths, causal aligned by them."""
    queries, keys = np.array([10, 4]), np.array([10, 7])
    return _option(
        ("entry 0: 10 queries, 10 keys", "causal", *weights_of(0, True, seqlens_q=queries, seqlens_k=keys)),
        ("entry 1: 4 queries, 7 keys", "the last query sees the last key", *weights_of(1, True, seqlens_q=queries, seqlens_k=keys)),
    )


def packed_weights(ends_q, ends_k, causal):
    """(weights, seen), each (N, N), of packed sequences, by the reference: with the unit matrix for v the result is the weights."""
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((2, N, 1, 4))
    told = {"cu_seqlens_q": np.array(ends_q), "cu_seqlens_k": np.array(ends_k)}
    described = {name: (x.shape, "int64") for name, x in told.items()}
    problem = make_packed_problem(q.shape, k.shape, (N, 1, N), ("float32",) * 3, causal=causal, **described)
    out, _ = reference.forward(problem, q, k, np.eye(N)[:, None], **told)
    return out[:, 0], out[:, 0] != 0  # an exponential is never 0


def packed() -> Svg:
    """Sequences one after the other, full and causal, and lengths that differ between queries and keys."""
    ends = (0, 4, 7, 10)
    return _option(
        ("lengths 4, 3 and 3", "cu_seqlens 0, 4, 7, 10", *packed_weights(ends, ends, False)),
        ("causal", "within each sequence", *packed_weights(ends, ends, True)),
        ("queries 2, 3, 4; keys 4, 0, 5", "causal; a row of nobody at the end", *packed_weights((0, 2, 5, 9), (0, 4, 4, 9), True)),
    )


COMPAT_ENDS = (0, 4, 7, 10)
PADDING = 3
"""Padding in front of the entry that the picture of transformers' masks shows."""


def compat_panels() -> dict[str, tuple]:
    """What queries see through the functions of other libraries: by title, some words and (weights, seen), each (N, N)."""
    sequence = np.searchsorted(COMPAT_ENDS, np.arange(N), "right")
    return {
        "window_size=(3, 1)": ("flash_attn", *weights_of(window=(3, 1))),
        "BlockDiagonalCausalMask": ("xformers, lengths 4, 3 and 3", *packed_weights(COMPAT_ENDS, COMPAT_ENDS, "top_left")),
        "padding on the left": ("transformers, 3 tokens of it", *weights_of(causal=True, mask=np.arange(N) >= PADDING)),
        "sliding_window=3, packed": (
            "transformers, by position_ids",
            *weights_of(causal=True, window=(2, 0), mask=sequence[:, None] == sequence),
        ),
    }


def compat() -> Svg:
    """The same, side by side."""
    return _option(*((title, *panel) for title, panel in compat_panels().items()))


PAGE, TABLE, CACHED = 4, np.array([[3, 0, 5], [3, 1, -1]]), (10, 6)
"""The page table of the picture: two sequences whose first page is the same one; how many keys each has."""

SEQUENCES = ("#5b9bd5", "#8fc6a4")


def pages() -> Svg:
    """A page table, and the pool that it points into: what belongs to which sequence, and what nobody reads."""
    svg = Svg(1060, 330)
    cell, gap, pool_y = 34, 26, 206
    pool_x = 60
    svg.text(20, 28, "page_table", 15, weight="bold")
    svg.text(560, 28, "seqlens_k", 15, weight="bold")
    used = {}
    for b, row in enumerate(TABLE):
        y = 44 + b * 46
        svg.text(20, y + 22, f"sequence {b}", 13, SOFT)
        for n, page in enumerate(row):
            in_use = n * PAGE < CACHED[b]
            svg.rect(120 + n * 140, y, 120, 32, SEQUENCES[b] if in_use else SKIPPED)
            svg.text(120 + n * 140 + 60, y + 21, f"{page}" if in_use else f"{page}: not used", 14, INK if in_use else SOFT, "middle", mono=True)
            for slot in range(min(PAGE, max(0, CACHED[b] - n * PAGE))):
                used.setdefault((int(page), slot), []).append((b, n * PAGE + slot))
        svg.rect(560, y, 50, 32, STATE)
        svg.text(585, y + 21, str(CACHED[b]), 14, INK, "middle", mono=True)
        words = ", ".join(str(page) for page in row[: -(-CACHED[b] // PAGE)])
        svg.text(630, y + 21, f"keys 0 to {CACHED[b] - 1} in pages {words}", 13, SOFT)
    svg.text(20, pool_y - 30, "the pool: k_cache and v_cache, 6 pages of 4 keys", 15, weight="bold")
    for page in range(6):
        left = pool_x + page * (PAGE * cell + gap)
        svg.text(left, pool_y - 8, f"page {page}", 13, SOFT)
        for slot in range(PAGE):
            owners = used.get((page, slot), [])
            x = left + slot * cell
            svg.rect(x, pool_y, cell - 2, cell - 2, SKIPPED)
            height = (cell - 2) / max(1, len(owners))
            for n, (b, key) in enumerate(owners):
                svg.rect(x, pool_y + n * height, cell - 2, height, SEQUENCES[b])
                svg.text(x + cell / 2 - 1, pool_y + (n + 0.5) * height + 4, str(key), 12, INK, "middle")
    y = pool_y + 58
    for x, fill, words in (
        (20, SEQUENCES[0], "a key of sequence 0, by its position"),
        (300, SEQUENCES[1], "of sequence 1"),
        (440, SKIPPED, "nobody's: may hold anything, NaN too"),
    ):
        svg.rect(x, y, 13, 13, fill, "none")
        svg.text(x + 19, y + 11, words, 12, SOFT)
    svg.text(
        20, y + 44, "Page 3 is in both rows: a prefix that two sequences share lies in memory once. New tokens go to pages of their own.", 13, SOFT
    )
    return svg


PART_COLORS = {
    **{"Q": Q_COLOR, "K": K_COLOR, "V": V_COLOR, "O": INSIDE, "S": BORDER, "P": "#f8dcb4", "P, dS": "#f8dcb4", "dS": "#e39a6f", "dP": "#c3a5dd"},
    **{"dO": "#a9bfe3", "dQ": "#4f9a70", "dK": "#b5719c", "dV": "#b89d3c", "Q^T": "#c4e3d0", "dO^T": "#d0dcf0", "m, l": "#b9c3cf"},
    **{"sums": INSIDE, "loaded": Q_COLOR, "broadcast": K_COLOR},
}
"""Of what lies in memory and registers; all else is pale."""

BAR = 28


def _kind(name):
    """Of a part: its name without the number of whose it is."""
    return name.rstrip("0123456789 ")


def _parts(svg, x, y, height, parts, scale):
    """Parts side by side, their names where there is room; returns where they end."""
    for part in parts:
        width = part.size * scale
        svg.rect(x, y, width, height, PART_COLORS.get(_kind(part.name), SKIPPED), LINE if width > 4 else "none", 0.7, 0)
        size = min(12, height - 3)
        if part.name != "rest" and width > 0.62 * size * len(part.name) + 3:
            svg.text(x + width / 2, y + height / 2 + 0.35 * size, part.name, size, INK, "middle")
        x += width
    return x


def _role(svg, x, y, role, scale):
    """The registers of a role's warps: what is kept, and beneath each other what takes turns; returns where they end."""
    width, scale = 32 * role.warps * role.registers * scale, 32 * role.warps * scale
    svg.rect(x, y, width, BAR, SKIPPED, LINE, 0.7, 0)
    after = _parts(svg, x, y, BAR, role.parts, scale)
    for n, phase in enumerate(role.phases):
        height = BAR / len(role.phases)
        _parts(svg, after, y + n * height, height, phase, scale)
    svg.rect(x, y, width, BAR, "none", INK, 1.2, 0)
    return x + width


def _legend(svg, x, y, cases, others):
    """The colours that are in the budgets, and what they are of; ``others`` by their names."""
    names = dict.fromkeys(part.name for _, budget in cases for part in budget.memory)
    names |= dict.fromkeys(part.name for _, budget in cases for role in budget.roles for part in (*role.parts, *sum(role.phases, ())))
    for name in dict.fromkeys(_kind(name) for name in names if name not in ("rest", "P, dS")):
        svg.rect(x, y, 13, 13, PART_COLORS[name], "none")
        svg.text(x + 18, y + 11, name, 12)
        x += 34 + 7.5 * len(name)
    for name, fill in others.items():
        svg.rect(x, y, 13, 13, fill)
        svg.text(x + 18, y + 11, name, 12)
        x += 34 + 6 * len(name)


def _budgets(cases) -> Svg:
    """What the blocks on a multiprocessor have of its shared memory and of its registers, to scale: (lines, budget) downwards."""
    left, middle, right, step = 192, 690, 1044, 62
    svg = Svg(1060, 76 + step * len(cases) + 34)
    bytes_scale, registers_scale = (middle - left) / budgets.SM_SHARED, (right - middle - 30) / budgets.SM_REGISTERS
    svg.text(left, 26, "Shared memory", 15, weight="bold")
    svg.text(left, 44, f"of a multiprocessor: {budgets.SM_SHARED // 1024} KiB", 12, SOFT)
    svg.text(middle + 30, 26, "Registers", 15, weight="bold")
    svg.text(middle + 30, 44, f"of a multiprocessor: {budgets.SM_REGISTERS}", 12, SOFT)
    for n, (lines, budget) in enumerate(cases):
        y = 62 + n * step
        for i, words in enumerate(lines):
            svg.text(20, y + 12 + 16 * i, words, 13 if i == 0 else 12, INK if i == 0 else SOFT, weight="bold" if i == 0 else "normal")
        svg.rect(left, y, middle - left, BAR, "none", LINE, 1, 0)
        svg.rect(middle + 30, y, right - middle - 30, BAR, "none", LINE, 1, 0)
        x, at = left, middle + 30
        for _ in range(budget.blocks):
            start, x = x, _parts(svg, x, y, BAR, budget.memory, bytes_scale)
            svg.rect(start, y, x - start, BAR, "none", INK, 1.2, 0)
            x += budgets.RESERVED * bytes_scale
            for role in budget.roles:
                at = _role(svg, at, y, role, registers_scale)
        many = f"{budget.blocks} blocks of {budget.kib}" if budget.blocks > 1 else budget.kib
        svg.text(left, y + BAR + 15, many, 12, SOFT)
        told = dict.fromkeys(f"{role.registers} a {_kind(role.name)} thread".replace("  ", " ") for role in budget.roles)
        svg.text(middle + 30, y + BAR + 15, ", ".join(told), 12, SOFT)
    _legend(svg, 20, 62 + step * len(cases) + 10, cases, {"barriers, statistics, addresses, and all else": SKIPPED, "free": "none"})
    return svg


def budget_sm90_forward() -> Svg:
    """The tiles of the Hopper forward."""
    cases = []
    for dim, budget in dict.fromkeys((dim, budget) for (dim, _, _), budget in budgets.sm90_forward_cases()):
        q_tile, kv_block, _ = budget.tile
        cases.append(((f"head dim {dim}", f"{q_tile} queries x {kv_block} keys"), budget))
    return _budgets(cases)


def budget_sm90_gradients() -> Svg:
    """Of its gradients."""
    return _budgets([((f"head dim {dim}", f"{b.tile[0]} keys x {b.tile[1]} queries"), b) for dim, b in budgets.sm90_gradients_cases()])


def budget_sm90_decode() -> Svg:
    """Of decoding on Hopper."""
    cases = [((f"D {dims}", f"{rows} rows, by {b.tile[0]}"), b) for (dims, rows), b in budgets.sm90_decode_cases()]
    return _budgets(cases)


def budget_simt_forward() -> Svg:
    """Of the forward on CUDA cores."""
    return _budgets([((f"{dtype}, D {dim}", f"{b.tile[0]} scores"), b) for (dtype, dim), b in budgets.simt_forward_cases()])


def budget_simt_gradients() -> Svg:
    """Of its gradients."""
    return _budgets([((f"{dtype}, D {dim}", f"{b.tile[0]} scores"), b) for (dtype, dim), b in budgets.simt_gradients_cases()])


def budget_cpu() -> Svg:
    """A thread's memory on the CPU to scale, and what the vector registers of processors hold."""
    cases = [(case, budget) for case, budget in budgets.cpu_cases() if case[1] == "float32"]
    registers = list(budgets.cpu_register_cases())
    left, middle, step, cell = 158, 724, 46, 17
    most = max(budget.bytes for _, budget in cases)
    svg = Svg(1060, 62 + step * len(cases) + 34)
    svg.text(left, 26, "Memory of a thread", 15, weight="bold")
    svg.text(left, 44, "float32, on a processor with AVX-512", 12, SOFT)
    for n, ((name, _, dim), budget) in enumerate(cases):
        y = 62 + n * step
        svg.text(20, y + 12, f"{name}, D {dim}", 13, weight="bold")
        svg.text(20, y + 28, ", ".join(budget.tile[:1]), 12, SOFT)
        end = _parts(svg, left, y, BAR, budget.memory, (middle - left - 74) / most)
        svg.rect(left, y, end - left, BAR, "none", INK, 1.2, 0)
        svg.text(end + 6, y + 19, budget.kib, 12, SOFT)
    _legend(svg, 20, 62 + step * len(cases) + 8, cases, {"lists, statistics, addresses": SKIPPED})
    svg.text(middle + 30, 26, "Vector registers", 15, weight="bold")
    svg.text(middle + 30, 44, "in the loop of a product, float32", 12, SOFT)
    y = 62
    for name, kernel, parts in registers:
        svg.text(middle + 30, y + 10, name, 13, weight="bold")
        svg.text(middle + 126, y + 10, f"{kernel.rows} x {kernel.vectors} sums of {kernel.lanes} numbers", 12, SOFT)
        names = [part.name for part in parts for _ in range(part.size)]
        for i, kind in enumerate(names):
            svg.rect(middle + 30 + i % 16 * cell, y + 18 + i // 16 * cell, cell - 2, cell - 2, PART_COLORS.get(kind, SKIPPED), LINE, 0.7)
        y += 36 + cell * -(-len(names) // 16)
    x = middle + 30
    for kind in ("sums", "loaded", "broadcast", "free"):
        svg.rect(x, y - 4, 13, 13, PART_COLORS.get(kind, SKIPPED), LINE, 0.7)
        svg.text(x + 18, y + 7, kind, 12)
        x += 38 + 6.5 * len(kind)
    return svg


FIGURES = {"tiling": tiling, "band": band, "backward": backward, "mask": mask, "blocks": blocks, "bias": bias, "alibi": alibi, "softcap": softcap}
FIGURES |= {"dropout": dropout, "sinks": sinks, "padded": padded, "packed": packed, "window": window, "compat": compat, "pages": pages}
FIGURES |= {"budget-sm90-forward": budget_sm90_forward, "budget-sm90-gradients": budget_sm90_gradients, "budget-sm90-decode": budget_sm90_decode}
FIGURES |= {"budget-simt-forward": budget_simt_forward, "budget-simt-gradients": budget_simt_gradients, "budget-cpu": budget_cpu}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(str(draw()), encoding="utf-8")
