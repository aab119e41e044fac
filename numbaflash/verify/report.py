"""The report of a verification: a table for the terminal, JSON, and a page of HTML that holds all it shows."""

from __future__ import annotations

import html
import math

from ..measuring import bytes_text, seconds_text
from .findings import FAIL, INFO, PASS, SKIP, Report

TITLES = {
    "meaning": "Same meaning: mask, scale, dtype and head dim against the float64 reference",
    "dispatch": "What was dispatched, and why nothing that is preferred to it",
    "time": "Time of the operations after a warm-up",
    "memory": "Peak memory",
    "accuracy": "Very long inputs and special masks",
    "service": "A server's loop",
}
PARTS = {"inputs": "#1b4f72", "kv_cache": "#2e86c1", "results": "#7fb3d5", "workspace": "#d68910", "copies": "#c0392b", "reserve": "#bfc9ca"}
COLOURS = {PASS: "#1e8449", FAIL: "#c0392b", SKIP: "#b9770e", INFO: "#2e86c1"}


def table(report: Report) -> str:
    """Findings by check and status, then all that failed."""
    checks = [check for check in TITLES if any(finding.check == check for finding in report.findings)]
    width = max(map(len, checks), default=0)
    lines = [f"{'check':{width}}  pass  FAIL  skip  info  seconds"]
    for check in checks:
        of = [finding for finding in report.findings if finding.check == check]
        counts = "  ".join(f"{sum(finding.status == status for finding in of):4}" for status in (PASS, FAIL, SKIP, INFO))
        lines.append(f"{check:{width}}  {counts}  {sum(finding.seconds for finding in of):7.1f}")
    failed = [finding for finding in report.findings if finding.status == FAIL]
    if not failed and not any(finding.status in (PASS, INFO) for finding in report.findings):
        verdict = "nothing was verified"
    else:
        verdict = f"{len(failed)} of {len(report.findings)} findings FAILED" if failed else "no check failed"
        late = sum(finding.status == SKIP for finding in report.findings)
        verdict += f", {late} skipped" if late else ""
    lines += ["", f"{verdict}, in {report.elapsed:.0f} s"]
    return "\n".join(lines + [f"  {finding.check}: {finding.name}" for finding in failed])


def page(report: Report) -> str:
    """One page of HTML, with its styles and plots, that needs nothing else."""
    verdict = "a check FAILED" if report.failed else "no check failed"
    settings = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in report.settings.items())
    sections = []
    for check, title in TITLES.items():
        of = [finding for finding in report.findings if finding.check == check]
        if of:
            plot = {"time": _times, "memory": _memory, "meaning": _errors, "accuracy": _errors}.get(check, lambda findings: "")(of)
            sections.append(f"<h2>{_text(title)}</h2>\n{plot}\n{_rows(of)}")
    return _PAGE.format(verdict=verdict, colour=COLOURS[FAIL if report.failed else PASS], settings=settings, sections="\n".join(sections))


def _text(x) -> str:
    return html.escape(str(x))


def _rows(findings) -> str:
    rows = (
        f'<tr><td style="color:{COLOURS[finding.status]}"><b>{finding.status}</b></td><td>{_text(finding.name)}</td><td>{_text(finding.text)}</td>'
        f"<td>{finding.seconds:.1f} s</td></tr>"
        for finding in findings
    )
    return f"<table><tr><th></th><th>what</th><th>found</th><th>took</th></tr>{''.join(rows)}</table>"


LABEL, WIDE, ROW = 340, 520, 24
"""Sizes of plots, in pixels: names, the plot beside them, and a line."""


def _plot(lines: int, body: list[str], title: str) -> str:
    width, height = LABEL + WIDE + 130, ROW * lines + 34
    return (
        f'<svg role="img" aria-label="{_text(title)}" viewBox="0 0 {width} {height}" width="{width}" font-size="12" font-family="sans-serif">'
        f'<text x="0" y="14" font-weight="bold">{_text(title)}</text>{"".join(body)}</svg>'
    )


def _name(n: int, name: str) -> str:
    return f'<text x="{LABEL - 8}" y="{ROW * n + 42}" text-anchor="end">{_text(name if len(name) < 50 else name[:47] + "...")}</text>'


def _times(findings) -> str:
    """Medians on a scale of decades, with the quartiles around them."""
    told = [finding for finding in findings if "seconds" in finding.figures]
    if not told:
        return ""
    low = math.floor(math.log10(max(1e-9, min(finding.figures["seconds_q1"] for finding in told))))
    high = max(low + 1, math.ceil(math.log10(max(1e-9, max(finding.figures["seconds_q3"] for finding in told)))))

    def at(seconds):
        return LABEL + WIDE * (math.log10(max(seconds, 1e-9)) - low) / (high - low)

    body = [
        f'<line x1="{at(10.0**n):.1f}" x2="{at(10.0**n):.1f}" y1="24" y2="{ROW * len(told) + 26}" stroke="#ddd"/>'
        f'<text x="{at(10.0**n) + 2:.1f}" y="30" font-size="9" fill="#777">{seconds_text(10.0**n)}</text>'
        for n in range(low, high + 1)
    ]
    for n, finding in enumerate(told):
        q1, middle, q3 = (finding.figures[name] for name in ("seconds_q1", "seconds", "seconds_q3"))
        y = ROW * n + 32
        body.append(_name(n, finding.name))
        body.append(f'<rect x="{LABEL}" y="{y}" width="{max(1.0, at(middle) - LABEL):.1f}" height="13" fill="#7fb3d5"/>')
        body.append(f'<line x1="{at(q1):.1f}" x2="{max(at(q3), at(q1) + 1):.1f}" y1="{y + 6.5}" y2="{y + 6.5}" stroke="#1b4f72" stroke-width="4"/>')
        body.append(f'<text x="{LABEL + WIDE + 8}" y="{y + 10}">{seconds_text(middle)}</text>')
    return _plot(len(told), body, "median and quartiles")


def _memory(findings) -> str:
    told = [finding for finding in findings if "inputs" in finding.figures]
    if not told:
        return ""
    totals = [sum(finding.figures.get(part) or 0 for part in PARTS) for finding in told]
    largest, body = max(1, *totals), []
    for n, finding in enumerate(told):
        x = float(LABEL)
        body.append(_name(n, finding.name))
        for part, colour in PARTS.items():
            size = WIDE * (finding.figures.get(part) or 0) / largest
            if size:
                body.append(f'<rect x="{x:.1f}" y="{ROW * n + 32}" width="{size:.1f}" height="13" fill="{colour}"><title>{part}</title></rect>')
            x += size
        body.append(f'<text x="{LABEL + WIDE + 8}" y="{ROW * n + 42}">{bytes_text(totals[n])}</text>')
    x = LABEL
    for part, colour in PARTS.items():
        body.append(f'<rect x="{x}" y="5" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="14">{part.replace("_", " ")}</text>')
        x += 92
    return _plot(len(told), body, "bytes by use")


def _errors(findings) -> str:
    """The largest error of each finding, in units of what the rule allows."""
    told = [(finding, finding.figures.get("errors") or finding.figures.get("differences")) for finding in findings]
    told = [(finding, {name: x for name, x in errors.items() if x is not None}) for finding, errors in told if errors]
    if not told:
        return ""
    body = [
        f'<line x1="{LABEL + WIDE * share / 1.1:.1f}" x2="{LABEL + WIDE * share / 1.1:.1f}" y1="24" y2="{ROW * len(told) + 26}" '
        f'stroke="{"#c0392b" if share == 1 else "#ddd"}"/>'
        f'<text x="{LABEL + WIDE * share / 1.1 + 2:.1f}" y="30" font-size="9" fill="#777">{share:g}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for n, (finding, errors) in enumerate(told):
        body.append(_name(n, finding.name))
        for name, x in errors.items():
            body.append(
                f'<circle cx="{LABEL + WIDE * min(x, 1.1) / 1.1:.1f}" cy="{ROW * n + 38}" r="4" fill="#2e86c1" fill-opacity="0.7">'
                f"<title>{_text(name)} {x:.3f}</title></circle>"
            )
    return _plot(len(told), body, "largest errors, of what is allowed")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>numbaflash verify: {verdict}</title>
<style>
body {{ font: 14px/1.45 sans-serif; margin: 2em auto; max-width: 1100px; color: #222 }}
h1 span {{ color: {colour} }}
table {{ border-collapse: collapse; width: 100%; margin: 0.5em 0 2em }}
td, th {{ text-align: left; vertical-align: top; padding: 3px 8px; border-bottom: 1px solid #eee }}
dl {{ display: grid; grid-template-columns: max-content auto; gap: 2px 16px }}
dt {{ color: #666 }}
dd {{ margin: 0 }}
svg {{ max-width: 100%; height: auto }}
</style>
</head>
<body>
<h1>numbaflash verify: <span>{verdict}</span></h1>
<dl>{settings}</dl>
{sections}
</body>
</html>
"""
