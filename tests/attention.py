"""What the tests of the public functions compare with: the float64 reference, and how close each dtype must come."""

from __future__ import annotations

import numpy as np

from numbaflash import reference
from numbaflash.problem import make_problem

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}
"""Relative and absolute, for values of about 1; `numbaflash.testing` has the exact rule."""


def expected(q, k, v, **options):
    """out and lse in float64."""
    problem = make_problem(q.shape, k.shape, v.shape, ["float64"] * 3, **options)
    return reference.forward(problem, *(np.asarray(x).astype(np.float64) for x in (q, k, v)))


def assert_close(result, want, dtype="float32"):
    """Compare arrays, each of which NumPy can read, with the exact ones."""
    for got, exact in zip(result, want, strict=True):
        np.testing.assert_allclose(np.asarray(got).astype(np.float64), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def assert_attention(result, q, k, v, dtype="float32", **options):
    """Compare out and lse with the reference."""
    assert_close(result, expected(q, k, v, **options), dtype)
