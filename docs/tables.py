"""Writes the tables of the README and the documentation anew: ``python docs/tables.py``.

Those of support come from the code, those of measurements from the result files that a page names.
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

from bench import counter_tables, published, records, roofline  # noqa: E402

NAMES = ("start", "profiling", "performance", "performance-cpu", "performance-roofline")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES)]
MARK = r"<!-- numbaflash (?P<name>[\w ]+?)(?:: (?P<files>[\w -]+))? -->"

SUPPORT = {"support": markdown, "options": features_markdown, "caches": partial(markdown, "decode")}
MEASURED = {
    **{f"counters {name}": make for name, make in counter_tables.TABLES.items()},
    **{f"roofline {name}": make for name, make in roofline.TABLES.items()},
    **{f"measured {name}": make for name, make in published.TABLES.items()},
}
TABLES = {*SUPPORT, *MEASURED, "sources"}


def named(text: str) -> list[str]:
    """The result files that a page names, in their order: ``bench/results/FILE.jsonl`` as code."""
    return list(dict.fromkeys(re.findall(r"`bench/results/([\w-]+)\.jsonl`", text)))


def results(files) -> dict[str, list[dict]]:
    """Records of result files, by file."""
    return {file: records.read(records.RESULTS / f"{file}.jsonl") for file in files}


def made(name: str, files: str | None, text: str) -> str:
    """A table, from the results that its mark names, or else from those of the whole page."""
    if name in SUPPORT:
        return SUPPORT[name]()
    found = results(files.split() if files else named(text))
    return published.sources(found) if name == "sources" else MEASURED[name]([r for some in found.values() for r in some])


def written(text: str) -> str:
    """A page with each of its tables as it is to be."""

    def table(found):
        return f"{found['mark']}\n{made(found['name'], found['files'], text)}\n<!-- end -->"

    return re.sub(rf"(?P<mark>{MARK})\n.*?<!-- end -->", table, text, flags=re.S)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
