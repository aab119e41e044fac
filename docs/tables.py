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

from bench import counter_tables, records, roofline  # noqa: E402

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("start", "profiling", "performance", "performance-roofline"))]


def results(page: str) -> list[dict]:
    """Records of the result files that a page of the documentation names, in their order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return records.read(*(ROOT / file for file in dict.fromkeys(re.findall(r"`(bench/results/[\w-]+\.jsonl)`", text))))


def of_results(make, page):
    return make(results(page))


TABLES = {
    "support": markdown,
    "options": features_markdown,
    "caches": partial(markdown, "decode"),
    **{f"counters {name}": partial(of_results, make, "profiling.md") for name, make in counter_tables.TABLES.items()},
    **{f"roofline {name}": partial(of_results, make, "performance-roofline.md") for name, make in roofline.TABLES.items()},
}


def written(text: str) -> str:
    """A page with each of its tables as it is to be."""
    return re.sub(r"(<!-- numbaflash ([\w ]+) -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text, flags=re.S)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
