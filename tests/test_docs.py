"""The README and the documentation: their examples run, their figures and tables are what the code says, their pages build.

A Python block runs after those above it on its page. ``<!-- needs: gpu cupy -->`` above a block names what it needs beyond
NumPy; without that it is only compiled. Lines that start with ``>>>`` are checked against the output below them.
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- needs: (?P<needs>[\w ,]+) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Example:
    page: Path
    line: int
    needs: tuple[str, ...]
    code: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"

    def missing(self) -> list[str]:
        return [need for need in self.needs if not available(need)]

    def run(self, names: dict) -> None:
        if self.code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(self.code, names, str(self), str(self.page), self.line)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            report = []
            assert runner.run(test, out=report.append, clear_globs=False).failed == 0, "".join(report)
            names.update(test.globs)
        else:
            exec(compile("\n" * self.line + self.code, self.page, "exec"), names)


def available(need: str) -> bool:
    if need == "gpu":
        from numbaflash.toolchain import device_count

        return device_count() > 0
    return importlib.util.find_spec(need) is not None


def examples(page: Path) -> list[Example]:
    text = page.read_text(encoding="utf-8")
    return [
        Example(page, text.count("\n", 0, found.start("code")), tuple(re.findall(r"\w+", found["needs"] or "")), found["code"])
        for found in BLOCK.finditer(text)
    ]


def runnable_pages():
    return [page for page in PAGES if examples(page)]


@pytest.mark.parametrize("page", runnable_pages(), ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for example in examples(page):
        if not example.missing():
            example.run(names)


@pytest.mark.parametrize("example", [e for page in PAGES for e in examples(page) if e.needs], ids=str)
def test_examples_with_needs(example):
    if example.code.startswith(">>>"):
        assert doctest.DocTestParser().get_examples(example.code)
    else:
        compile(example.code, str(example), "exec")
    if example.missing():
        pytest.skip(f"compiled only: needs {', '.join(example.missing())}")


def test_every_python_block_is_an_example():
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```python") == len(examples(page)), f"{page.name} has a Python block that no test runs"


def modules_with_examples():
    return [path for path in sorted((ROOT / "numbaflash").rglob("*.py")) if "\n    >>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", modules_with_examples(), ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_docstrings(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for need in ("jax", "torch", "transformers"):
        if f"import {need}" in path.read_text(encoding="utf-8") or f"from {need}" in path.read_text(encoding="utf-8"):
            pytest.importorskip(need)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("option-*.md")) + [ROOT / "docs" / name for name in ("packed.md", "decoding.md", "compat.md")], ids=str
)
def test_every_feature_has_an_example_and_a_picture(page):
    shown = re.findall(r"^!\[[^]]+\]\(figures/(\w+)\.svg\)$", page.read_text(encoding="utf-8"), re.M)
    assert examples(page) and shown and set(shown) <= set(figures())


def figures():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "figures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FIGURES


@pytest.mark.parametrize("name", figures())
def test_figures_are_drawn_by_the_code(name):
    drawn = str(figures()[name]())
    assert (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8") == drawn, "run: python docs/figures/draw.py"


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "support"), ("docs/start.md", "support"), ("docs/start.md", "options"), ("docs/start.md", "caches")]
)
def test_support_tables_are_what_the_families_say(page, name):
    from numbaflash.support import features_markdown, markdown

    found = re.search(rf"<!-- numbaflash {name} -->\n(.*?)\n<!-- end -->", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert found is not None, f"{page} has no table of {name}"
    tables = {"support": markdown, "options": features_markdown, "caches": lambda: markdown("decode")}
    assert found[1].strip() == tables[name](), "run: python docs/tables.py"


def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_measurements_are_those_of_the_results():
    made = tables()
    marked = {page: [found["name"] for found in re.finditer(f"^{made.MARK}$", page.read_text(encoding="utf-8"), re.M)] for page in PAGES}
    assert {page for page, names in marked.items() if names} == set(made.PAGES)
    assert set(itertools.chain(*marked.values())) == made.TABLES
    for page in made.PAGES:
        text = page.read_text(encoding="utf-8")
        assert made.written(text) == text, f"{page.name}: run: python docs/tables.py"


def test_what_the_page_on_profiling_says_was_counted():
    made = tables()
    found = made.results(made.named((ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")))
    main = {r["case"]: r for r in itertools.chain(*found.values()) if r["main"]}
    forward, decode = (main[name]["counters"] for name in ("forward-d128-causal", "decode-64-of-8k"))
    pipes = ("xu_pct", "fma_pct", "alu_pct", "lsu_pct", "uniform_pct", "issue_pct", "dram_pct", "l2_pct", "l1_pct")
    assert all(forward["tensor_pct"] > 1.25 * forward[name] for name in pipes), "bound by the tensor pipe"
    assert forward["issue_pct"] < 50 and forward["dram_pct"] < 20
    assert decode["l2_pct"] > decode["dram_pct"] > 80 and max(decode["tensor_pct"], decode["issue_pct"]) < 20
    assert decode["dram_bytes_per_s"] * decode["ns"] / 1e9 < 1.02 * 2147e6
    stalls = {name: main[name]["stalls"] for name in main}
    assert max(stalls["forward-d128-causal"].values()) < forward["cycles_per_issue"] / 2
    assert stalls["decode-64-of-8k"]["long_scoreboard"] > decode["cycles_per_issue"] / 2


def documented_workspaces():
    """The functions of docs/numerics.md."""
    names = {}
    exec(next(example.code for example in examples(ROOT / "docs" / "numerics.md") if "def sm90_workspace" in example.code), names)
    return names["sm90_workspace"], names["simt_workspace"]


@pytest.mark.parametrize("family, dtype", [("sm90", "bfloat16"), ("simt", "float16"), ("simt", "float64")])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (64, 128), (96, 64), (128, 256), (256, 64)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_workspace_formulas(family, dtype, dims, deterministic):
    from numbaflash import dispatch, support
    from numbaflash.arrays import contiguous_strides
    from numbaflash.problem import ITEMSIZE, make_problem

    sm90_workspace, simt_workspace = documented_workspaces()
    head_dim, head_dim_v = dims
    for seqlen in (100, 4096):
        problem = make_problem((3, seqlen, 4, head_dim), (3, seqlen, 2, head_dim), (3, seqlen, 2, head_dim_v), (dtype,) * 3)

        def layout(shape, itemsize=ITEMSIZE[dtype]):
            return dispatch.Layout(shape, contiguous_strides(shape, itemsize))

        layouts = dispatch.BackwardLayouts(
            **{name: layout(getattr(problem, f"{name[-1]}_shape")) for name in ("q", "k", "v", "dq", "dk", "dv")},
            dout=layout(problem.out_shape),
            out=layout(problem.out_shape),
            lse=layout(problem.lse_shape, ITEMSIZE[problem.lse_dtype]),
        )
        with dispatch.use_family(family):
            plan = dispatch.make_backward_plan(problem, layouts, support.assumed_device("sm_90"), deterministic)
        sizes = (problem.batch, problem.heads, seqlen)
        if family == "sm90":
            expected = sm90_workspace(*sizes, *dims, deterministic)
        else:
            config = plan.config
            in_turn = deterministic and seqlen > config.kv_tile
            expected = simt_workspace(*sizes, 8 if dtype == "float64" else 4, config.q_tile, config.dim, in_turn)
        assert plan.workspace_bytes == expected


def test_pictures_of_measurements_are_drawn_of_the_results():
    from numbaflash.benchmarks import plots, records

    pytest.importorskip("PIL")
    made, found = tables(), {path.name: plots.source_of(path) for path in records.RESULTS.glob("*.png")}
    for name, (_, files) in made.PICTURES.items():
        source, stem = records.digest(made.drawn_of(files)), name.removesuffix(".png")
        mine = [picture for picture in found if picture.startswith(stem)]
        assert mine and all(found.pop(picture) == source for picture in mine), "run: python docs/tables.py"
    assert not found, "of these pictures nothing is known"


def test_links_between_pages():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_modules_names_every_one():
    named = set(re.findall(r"`numbaflash\.(\w+)`", (ROOT / "docs" / "call.md").read_text(encoding="utf-8").split("## Modules")[1]))
    found = {path.stem for path in (ROOT / "numbaflash").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert named == {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("module", ["numbaflash", "numbaflash.torch", "numbaflash.jax", "numbaflash.verify"])
def test_public_names_are_in_the_reference(module):
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\.\. auto\w+:: (?:[\w.]+\.)?(\w+)$", text, re.M)) | {
        name for members in re.findall(r"^   :members: (.+)$", text, re.M) for name in members.split(", ")
    }
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    (public,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    assert {name for name in public if not name.startswith("_") and not name.isupper()} <= told


def test_pages_build(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees", ROOT / "docs", tmp_path / "html"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "html" / "index.html").stat().st_size > 5000


def message_templates() -> list[str]:
    """All texts in the package, with … for what is put into them."""
    found = []
    for path in sorted((ROOT / "numbaflash").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%s|%r", "…", node.value))
    return found


def test_messages_of_troubleshooting_are_those_of_the_code():
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    templates = message_templates()
    unknown = [message for message in quoted if not any(message in template for template in templates)]
    assert len(quoted) > 20 and not unknown
