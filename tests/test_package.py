"""The package as it is installed: what a wheel holds and says of itself, and what an import costs."""

from __future__ import annotations

import configparser
import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import numbaflash

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("numbaflash", "tests", "bench", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "_build", "results"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "numbaflash").rglob("*.py")}
    tables = {path.relative_to(ROOT).as_posix() for path in (ROOT / "numbaflash" / "tuned").glob("*.json")}
    assert names == sources | tables | {"numbaflash/py.typed"}
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


def test_wheel_describes_itself(wheel):
    says = metadata(wheel)
    assert says["Name"] == "numbaflash" and says["Version"] == numbaflash.__version__
    assert says["Requires-Python"] == ">=3.10" and "Apache-2.0" in (says["License-Expression"] or says["License"])
    required = says.get_all("Requires-Dist")
    base = {re.match(r"[\w-]+", text)[0] for text in required if "extra ==" not in text}
    assert base == {"numpy", "numba", "numba-cuda"}
    assert set(says.get_all("Provides-Extra")) == {"cu12", "cu13", "torch", "jax", "profile", "test", "bench", "docs"}
    assert says.get_payload().startswith("# numbaflash")


def test_wheel_has_the_command(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "numbaflash = numbaflash.__main__:main" in wheel.read(name).decode()


def test_pyproject_names_the_build_system_only():
    found = configparser.ConfigParser()
    found.read(ROOT / "pyproject.toml")
    assert found.sections() == ["build-system"]


def fresh(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick():
    code = (
        "import time, numba\n"
        "start = time.process_time()\n"
        "import numbaflash as nf\n"
        "nf.forward, nf.merge, nf.explain, nf.env, nf.warmup, nf.UnsupportedError\n"
        "print(time.process_time() - start)"
    )
    assert min(float(fresh(code)) for _ in range(3)) < 0.2  # of the processor: others may be at work


def test_import_touches_no_framework_and_no_driver():
    code = (
        "import ctypes, sys\n"
        "opened = []\n"
        "class Watch(ctypes.CDLL):\n"
        "    def __init__(self, name, *args, **options):\n"
        "        opened.append(str(name))\n"
        "        super().__init__(name, *args, **options)\n"
        "ctypes.CDLL = Watch\n"
        "import numpy as np, numbaflash as nf\n"
        "x = np.ones((1, 8, 1, 16), np.float32)\n"
        "nf.forward(x, x, x)\n"
        "nf.merge([x], [np.zeros((1, 1, 8), np.float32)])\n"
        "assert not any('cuda' in name for name in opened), opened\n"
        "loaded = {'cupy', 'torch', 'jax', 'hypothesis'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    fresh(code)


def test_public_names():
    assert set(numbaflash.__all__) <= set(dir(numbaflash))
    for name in numbaflash.__all__:
        value = getattr(numbaflash, name)
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'attension'"):
        numbaflash.attension  # noqa: B018
