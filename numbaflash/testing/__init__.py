"""Attention problems to test kernels with: complete cases, the exact results, the accuracy rule, and random search.

Needs NumPy alone, except the strategies and `fuzz`, which need Hypothesis (``pip install hypothesis``).

`Case`
    One problem with everything that decides a run; plain data, the same bits everywhere.
`BackwardCase`
    The same for gradients.
`DecodeCase`, `Cache`
    The same for decoding, and how the keys of its sequences lie in the caches: contiguous, or in pages.
`Packed`
    The sequences of a case that is packed.
`run_case`, `run_backward_case`, `run_decode_case`
    Run a case on a kernel family, in an array library, or through your own kernel, and check everything.
`expected`, `check_forward`, `compare`, `spread_nonfinite`
    Exact results and the accuracy rule, which `numbaflash.testing.accuracy` states.
`expected_gradients`, `check_backward`, `compare_gradients`
    The same for gradients.
`problems`, `backward_problems`, `decode_problems`, `problems_for`, `placements`
    Hypothesis strategies of cases, and of the layouts in them. Masks, biases, packed sequences and the like are drawn when ``options`` asks for them.
`fuzz`, `replay`
    Random search on the present machine (``numbaflash fuzz`` on the command line), and a failing case run again.

Examples
--------
>>> from numbaflash.testing import Case, check_forward
>>> import numpy as np
>>> case = Case(seqlen_q=1, seqlen_k=1, head_dim=2, head_dim_v=2)
>>> v = case.memory()["v"].decoded()
>>> check_forward(case, v.astype(np.float32)).out
0.0
"""

from __future__ import annotations

from .accuracy import (
    Accuracy,
    AccuracyError,
    GradientAccuracy,
    check_backward,
    check_forward,
    compare,
    compare_gradients,
)
from .cases import BackwardCase, Case, DecodeCase
from .exact import Expected, ExpectedGradients, expected, expected_gradients, spread_nonfinite
from .fuzzing import fuzz, load, replay
from .libraries import LIBRARIES, Operands, gpu_libraries, to_float64
from .memory import Memory, Placement
from .runner import WriteError, run_backward_case, run_case, run_decode_case
from .sequences import Cache, Packed
from .values import HIDDEN, RECIPES, SENTINEL, rounded

_STRATEGIES = ("backward_problems", "decode_problems", "placements", "problems", "problems_for")

__all__ = [
    "HIDDEN",
    "LIBRARIES",
    "RECIPES",
    "SENTINEL",
    "Accuracy",
    "AccuracyError",
    "BackwardCase",
    "Cache",
    "Case",
    "DecodeCase",
    "Expected",
    "ExpectedGradients",
    "GradientAccuracy",
    "Memory",
    "Operands",
    "Packed",
    "Placement",
    "WriteError",
    "check_backward",
    "check_forward",
    "compare",
    "compare_gradients",
    "expected",
    "expected_gradients",
    "fuzz",
    "gpu_libraries",
    "load",
    "replay",
    "rounded",
    "run_backward_case",
    "run_case",
    "run_decode_case",
    "spread_nonfinite",
    "to_float64",
    *_STRATEGIES,
]


def __getattr__(name):
    if name in _STRATEGIES:
        from . import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
