"""Writes the support tables into the README and the documentation: ``python docs/tables.py``."""

from __future__ import annotations

import re
from pathlib import Path

from numbaflash.support import features_markdown, markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md")

TABLES = {"support": markdown, "options": features_markdown, "caches": lambda: markdown("decode")}

if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            text = re.sub(
                rf"(<!-- numbaflash {name} -->\n).*?(<!-- end -->)", lambda found, t=table: f"{found[1]}{t()}\n{found[2]}", text, flags=re.S
            )
        page.write_text(text, encoding="utf-8")
