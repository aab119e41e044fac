"""Writes the tables of the README and the documentation anew, and draws the pictures of measurements: ``python docs/tables.py``.

Those of support come from the code, those of budgets from the kernels' configurations, those of measurements from the result files that a page names.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

from numbaflash.support import features_markdown, markdown

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if str(ROOT / "docs") not in sys.path:
    sys.path.append(str(ROOT / "docs"))

import budgets  # noqa: E402

from bench import counter_tables, published, roofline  # noqa: E402
from numbaflash.benchmarks import plots, records  # noqa: E402

KERNELS = ("kernels-cpu", "kernels-simt", "kernels-sm90", "kernels-sm90-backward", "kernels-sm90-decode")
NAMES = ("start", "profiling", "performance", "performance-cpu", "performance-roofline", *KERNELS)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES)]
MARK = r"<!-- numbaflash (?P<name>[\w -]+?)(?:: (?P<files>[\w -]+))? -->"

OF_CODE = {
    **{"support": markdown, "options": features_markdown, "caches": partial(markdown, "decode")},
    **{f"budget {name}": make for name, make in budgets.TABLES.items()},
}
MEASURED = {
    **{f"counters {name}": make for name, make in counter_tables.TABLES.items()},
    **{f"roofline {name}": make for name, make in roofline.TABLES.items()},
    **{f"measured {name}": make for name, make in published.TABLES.items()},
}
TABLES = {*OF_CODE, *MEASURED, "sources"}


BACKWARD = ("2026-11-30-h200-backward", "2026-11-30-h200-backward-fp16-mha", "2026-11-30-h200-backward-bf16-32-8")
DECODE = ("2026-12-01-h200-decode", "2026-12-01-h200-decode-mha-mqa")
PICTURES = {
    "2026-11-30-h200-forward": (plots.plot, ("2026-11-30-h200-forward",)),
    "2026-11-30-h200-backward": (plots.plot, BACKWARD),
    "2026-12-01-h200-roofline.png": (roofline.plot, ("2026-11-30-h200-forward", *BACKWARD, *DECODE, "2026-11-29-h200-ceilings")),
}
"""What draws the pictures in bench/results, and of which files; a name without an ending is that of several pictures."""


def named(text: str) -> list[str]:
    """The result files that a page names, in their order: ``bench/results/FILE.jsonl`` as code."""
    return list(dict.fromkeys(re.findall(r"`bench/results/([\w-]+)\.jsonl`", text)))


def results(files) -> dict[str, list[dict]]:
    """Records of result files, by file."""
    return {file: records.read(records.RESULTS / f"{file}.jsonl") for file in files}


def made(name: str, files: str | None, text: str) -> str:
    """A table, from the results that its mark names, or else from those of the whole page."""
    if name in OF_CODE:
        return OF_CODE[name]()
    found = results(files.split() if files else named(text))
    return published.sources(found) if name == "sources" else MEASURED[name]([r for some in found.values() for r in some])


def written(text: str) -> str:
    """A page with each of its tables as it is to be."""

    def table(found):
        return f"{found['mark']}\n{made(found['name'], found['files'], text)}\n<!-- end -->"

    return re.sub(rf"(?P<mark>{MARK})\n.*?<!-- end -->", table, text, flags=re.S)


def drawn_of(files) -> list[dict]:
    """Records of which a picture is drawn."""
    return [record for found in results(files).values() for record in found]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, (draw, files) in PICTURES.items():
        draw(drawn_of(files), records.RESULTS / name)
