"""The house rules: formatting and lint, what is in the repository, and the one test command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def ruff(*arguments):
    done = subprocess.run([sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint():
    ruff("check", "--no-cache")


def test_format():
    ruff("format", "--check", "--no-cache")


def test_ci_runs_the_test_command_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^<!-- test command -->\n```bash\n(.+?)\n```$", readme, re.M | re.S)
    assert len(blocks) == 1, "README.md must have one block marked <!-- test command -->"
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extract = re.search(r"^command=\$\((.+)\)$", script, re.M)[1]
    got = subprocess.run(["bash", "-euo", "pipefail", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert got.strip() == blocks[0].strip() and "pytest" in got


SOURCES = sorted(path for folder in ("numbaflash", "tests", "bench", "docs") for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_file(path):
    text = path.read_text(encoding="utf-8")
    if not text.strip() or path.name == "_version.py":
        return
    if re.search(r"^(?:def|class|\w+\s*[:=])", text, re.M):
        assert "from __future__ import annotations" in text
    assert text.lstrip().startswith(('"""', 'r"""')), "begins with a docstring that says what it is for"
    if path.is_relative_to(ROOT / "numbaflash"):
        assert not re.search(r"^\s*#\s*(TODO|FIXME|XXX)", text, re.M)
        if not path.is_relative_to(ROOT / "numbaflash" / "testing"):
            assert not re.search(r"^\s*assert\b", text, re.M), "user input is checked with exceptions, which -O does not remove"


def test_kernels_know_no_array_library():
    for path in (ROOT / "numbaflash" / "kernels").rglob("*.py"):
        assert not re.search(r"^\s*(?:import|from)\s+(?:cupy|torch|jax|\.+arrays)\b", path.read_text(encoding="utf-8"), re.M), path


def test_only_the_toolchain_knows_the_compiler_and_the_driver():
    inside = (ROOT / "numbaflash" / "toolchain", ROOT / "numbaflash" / "ptx")
    for path in (ROOT / "numbaflash").rglob("*.py"):
        if not any(path.is_relative_to(folder) for folder in inside):
            found = re.search(
                r"numba\.cuda\.(?:cudadrv|compiler|codegen|dispatcher)|cuda\.bindings|cuda\.core|libcuda", path.read_text(encoding="utf-8")
            )
            assert found is None, f"{path} names {found[0]}"
