"""Writes the support table into the README and the documentation: ``python docs/tables.py``."""

from __future__ import annotations

import re
from pathlib import Path

from numbaflash.support import markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md")

if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"(<!-- numbaflash support -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{markdown()}\n{found[2]}", text, flags=re.S)
        page.write_text(text, encoding="utf-8")
