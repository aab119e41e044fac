"""The properties of attention on the simt kernels without a GPU: `test_properties` again, in Numba's CUDA simulator.

A process of its own, because numba decides for the simulator when it is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numba
import pytest

FOLDER = Path(__file__).resolve().parent


@pytest.mark.skipif(bool(numba.config.ENABLE_CUDASIM), reason="this process is the simulator already")
def test_properties_in_the_simulator():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", str(FOLDER / "test_properties.py")]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "HYPOTHESIS_PROFILE": "simulator"}
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 16 and "skipped" not in done.stdout, done.stdout
