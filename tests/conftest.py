"""What the whole suite shares: Hypothesis profiles, and the kernel families that can run on this machine.

``HYPOTHESIS_PROFILE=fuzz pytest`` searches at random instead of repeating the same examples. Where Numba's CUDA simulator is active
(``NUMBA_ENABLE_CUDASIM=1``), the one family is simt on CPU arrays, with small problems.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is there: the reference's products are small, and their threads wait by looping
os.environ.setdefault("NUMBAFLASH_TUNE", "0")  # tests look at the families' own choices, whatever has been tuned on this machine

import contextlib
import functools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import hypothesis
import numba
import numpy as np
import pytest

import numbaflash
from numbaflash import dispatch, testing
from numbaflash.testing import ahead, libraries
from numbaflash.testing.values import encode

SHARED = {"deadline": None, "database": None, "suppress_health_check": list(hypothesis.HealthCheck), "print_blob": True}
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=25, **SHARED)
hypothesis.settings.register_profile("fuzz", derandomize=False, max_examples=2000, **SHARED)
hypothesis.settings.register_profile("simulator", derandomize=True, max_examples=4, **SHARED)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(PROFILE)

NO_GPU = "no CUDA device"


SIMULATOR = bool(numba.config.ENABLE_CUDASIM)


@dataclass(frozen=True)
class Target:
    """A kernel family, and the array library through which the tests reach it; ``small`` where it is too slow for much."""

    family: str
    library: str
    small: bool = False

    @property
    def device(self) -> dispatch.Device:
        if self.library in ("numpy", "torch"):
            return dispatch.CPU
        from numbaflash import toolchain

        return toolchain.device(0)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that the family has here."""
        from numbaflash.problem import DTYPES, make_problem

        shape = (1, 1, 1, 64)
        return tuple(dtype for dtype in DTYPES if not self.reasons(make_problem(shape, shape, shape, (dtype,) * 3)))

    def reasons(self, problem, direction: str = "forward") -> tuple[str, ...]:
        """Why the family cannot compute a problem here."""
        return dispatch.family(self.family, direction).supports(problem, self.device)

    def problems(self, direction: str = "forward", **options):
        """Hypothesis strategy of the cases that this family can compute."""
        bounds = {"max_seqlen": 24, "work": 2**9} if self.small else {}
        return testing.problems_for(self.family, self.device, direction, **(bounds | options))

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    def build(self, cases) -> None:
        """Build the kernels of many cases in parallel; nothing on the CPU, where a few kernels serve all."""
        if self.on_gpu:
            ahead.build(cases, self.device, self.family, self.library)

    def run(self, case, **options) -> testing.Accuracy | testing.GradientAccuracy:
        run = testing.run_case if case.direction == "forward" else testing.run_backward_case
        return run(case, self.family, self.library, **options)

    def run_in_threads(self, cases, times: int = 5) -> None:
        """Each case in a thread of its own, again and again, all at once."""
        for case in cases:
            self.run(case)
        together = threading.Barrier(len(cases), timeout=60)

        def work(case):
            together.wait()
            for _ in range(times):
                self.run(case)

        with ThreadPoolExecutor(len(cases)) as pool:
            list(pool.map(work, cases))

    def run_random(self, strategy, *, examples: int, seed: int = 0) -> None:
        """`run` on cases that Hypothesis draws, the kernels of all of them built in parallel first."""
        examples = max(examples, hypothesis.settings().max_examples) if PROFILE == "fuzz" else examples
        seed = seed if PROFILE != "fuzz" else random.SystemRandom().randrange(2**32)
        if self.on_gpu:
            self.build(ahead.draw(strategy, seed, examples))

        @hypothesis.seed(seed)
        @hypothesis.settings(ahead.search_settings(), max_examples=examples)
        @hypothesis.given(strategy)
        def run(case):
            try:
                self.run(case)
            except numbaflash.UnsupportedError:
                assert self.reasons(case.problem, case.direction), "what a family cannot do, it says itself"

        run()

    def array(self, values, dtype: str):
        """An array of the library holding float64 values rounded to a dtype."""
        values = np.asarray(values)
        memory = testing.Memory.filled(dtype, values.shape, testing.Placement(), 0)
        memory.view()[...] = encode(values, dtype)
        return libraries.make(memory, self.library)[1]

    def forward(self, q, k, v, dtype: str, **options):
        """`numbaflash.forward` on float64 NumPy values: ``out`` and ``lse`` as NumPy arrays of the results' own bits."""
        arrays = (self.array(x, dtype) for x in (q, k, v))
        # No tensor map holds no keys: dispatch knows who can.
        with dispatch.use_family(self.family) if k.shape[1] else contextlib.nullcontext():
            out, lse = numbaflash.forward(*arrays, return_lse=True, **options)
        return self.numpy(out), self.numpy(lse)

    def backward(self, dout, q, k, v, out, lse, dtype: str, *, dlse=None, **options):
        """`numbaflash.backward` on float64 NumPy values: (dq, dk, dv) as NumPy arrays of the results' own bits, None where not needed."""
        lse_dtype = "float64" if dtype == "float64" else "float32"
        arrays = [self.array(x, dtype) for x in (dout, q, k, v, out)]
        dlse = None if dlse is None else self.array(dlse, lse_dtype)
        with dispatch.use_family(self.family):
            gradients = numbaflash.backward(*arrays, self.array(lse, lse_dtype), dlse=dlse, **options)
        return tuple(None if x is None else self.numpy(x) for x in gradients)

    def numpy(self, array) -> np.ndarray:
        """An array of the library in float64 (exact for every dtype)."""
        return libraries.to_numpy(array)


@functools.cache
def gpu_library() -> str | None:
    """The library that reaches a GPU here."""
    found = testing.gpu_libraries()
    return "torch-cuda" if "torch-cuda" in found else next(iter(found), None)


def gpu_target(family: str) -> Target | None:
    """The target of a GPU family, None where it cannot run."""
    if gpu_library() is None:
        return None
    target = Target(family, gpu_library())
    return target if target.dtypes else None


GPU_FAMILIES = tuple(name for name in dispatch.FAMILIES if name != "cpu")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")


FIRST = ("test_simt_simulator.py", "test_cpu_options.py", "test_simt_kernel.py", "test_cpu_kernel.py", "test_sm90_options.py")
"""Files that go first: the last one of a run should not keep one worker busy while the others have nothing to do. And what
``test_cpu_options.py`` compiles, the files of the documentation, of the libraries and of the command line find in the cache.
"""


def pytest_collection_modifyitems(items):
    place = {name: n for n, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    for item in items:
        if "gpu" in item.keywords and gpu_library() is None:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(params=["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_FAMILIES)], scope="session")
def target(request) -> Target:
    """Every family that can run here, one after the other."""
    if SIMULATOR:
        return Target("simt", "numpy", small=True)
    if request.param == "cpu":
        return Target("cpu", "numpy")
    return _present(request.param)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu) for name in GPU_FAMILIES], scope="session")
def gpu(request) -> Target:
    """Every GPU family that can run here."""
    return _present(request.param)


def _present(family) -> Target:
    found = gpu_target(family)
    if found is None:
        pytest.skip(f"family {family} has no kernel for this GPU")
    return found
