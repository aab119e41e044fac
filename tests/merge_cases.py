"""Cases of `numbaflash.merge`, and the GPU's kernel on them in Numba's CUDA simulator: ``python tests/merge_cases.py`` prints a JSON line for each.

A process of its own, because numba decides for the simulator when it is imported. Arrays of NumPy stand for those of a GPU there, so that all of the
road of a call is taken but the driver.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from unittest import mock

import numpy as np

import numbaflash
from numbaflash.testing import Memory, Placement
from numbaflash.testing.libraries import make, to_numpy
from numbaflash.testing.values import encode, rounded

STRIDED = Placement(order=(0, 2, 1, 3), step=(1, -1, 2, 1), offset=1)
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-21, "float64": 2.0**-48}
"""The largest error of what is merged, relative to the largest of its parts: a rounding in 16-bit dtypes, a few in the others."""


def reference(outs, lses):
    """(out, lse) of parts in float64. What is NaN among what is seen makes its row, or element, NaN."""
    with np.errstate(all="ignore"):
        outs, lses = np.array(outs, np.float64), np.array(lses, np.float64)
        top = lses.max(axis=0)
        base = np.where(np.isneginf(top), 0, top)
        weights = np.exp(lses - base)
        total = weights.sum(axis=0)
        columns = np.swapaxes(weights / np.where(total == 0, 1, total), -1, -2)[..., None]
        hidden = np.swapaxes(np.isneginf(lses), -1, -2)[..., None]
        return (columns * np.where(hidden, 0, outs)).sum(axis=0), base + np.log(total)


@dataclass(frozen=True)
class MergeCase:
    """One merge.

    Attributes
    ----------
    hidden : float or None
        What outs hold in rows of -inf, of which each part has some, and all parts the first ones; None: there are none.
    nan : bool
        An element of the outs that is seen, and one of the LSE, are NaN.
    packed : bool
        No axis of the batch.
    out, lse : Placement
        How the parts lie.
    """

    parts: int = 2
    dtype: str = "float32"
    batch: int = 2
    seqlen_q: int = 3
    heads: int = 2
    head_dim: int = 8
    hidden: float | None = None
    nan: bool = False
    packed: bool = False
    out: Placement = Placement()
    lse: Placement = Placement()

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def values(self):
        """(outs, lses) in float64, rounded to their dtypes."""
        rng = np.random.default_rng(0)
        batch = () if self.packed else (self.batch,)
        outs = rng.standard_normal((self.parts, *batch, self.seqlen_q, self.heads, self.head_dim))
        lses = 3 * rng.standard_normal((self.parts, *batch, self.heads, self.seqlen_q))
        if self.hidden is not None:
            flat = lses.reshape(self.parts, -1)
            for n in range(self.parts):
                flat[n, n % 3 :: 3] = -np.inf
            flat[:, :2] = -np.inf
            np.swapaxes(outs, -3, -2)[np.isneginf(lses)] = self.hidden
        if self.nan:
            outs[(-1,) * outs.ndim], lses[(0,) * (lses.ndim - 1) + (-1,)] = np.nan, np.nan
        return rounded(outs, self.dtype), rounded(lses, self.lse_dtype)

    def arrays(self, library: str = "numpy"):
        """The same of a library, as they lie."""
        made = []
        for values, dtype, placement in zip(self.values(), (self.dtype, self.lse_dtype), (self.out, self.lse), strict=True):
            made.append([])
            for x in values:
                memory = Memory.filled(dtype, x.shape, placement, encode(np.nan, dtype))
                memory.view()[...] = encode(x, dtype)
                made[-1].append(make(memory, library)[1])
        return made

    def run(self, library: str = "numpy"):
        """Merge them, and compare with the definition."""
        given = self.arrays(library)
        values = [[to_numpy(x).copy() for x in arrays] for arrays in given]
        out, lse = numbaflash.merge(*given)
        for arrays, before in zip(given, values, strict=True):
            for x, value in zip(arrays, before, strict=True):
                np.testing.assert_array_equal(to_numpy(x), value, err_msg="a part was written")
        want, want_lse = reference(*values)
        np.testing.assert_allclose(to_numpy(out), want, rtol=ROUNDING[self.dtype], atol=4 * ROUNDING[self.lse_dtype])
        np.testing.assert_allclose(to_numpy(lse), want_lse, rtol=ROUNDING[self.lse_dtype], atol=ROUNDING[self.lse_dtype])
        return out, lse


CASES = {
    "two": MergeCase(),
    "one": MergeCase(parts=1),
    "three": MergeCase(parts=3, hidden=np.nan),
    "no row": MergeCase(seqlen_q=0),
    "no column": MergeCase(head_dim=0),
    "hidden NaN": MergeCase(parts=2, hidden=np.nan),
    "hidden infinity": MergeCase(parts=5, hidden=np.inf, head_dim=12),
    "NaN among what is seen": MergeCase(parts=3, nan=True, hidden=np.nan),
    "packed": MergeCase(parts=4, packed=True, seqlen_q=7, hidden=1.0),
    "any strides": MergeCase(parts=3, out=STRIDED, lse=Placement(order=(2, 0, 1), step=(-1, 1, 2)), hidden=np.nan),
    "broadcast": MergeCase(out=Placement(step=(0, 1, 0, 1)), lse=Placement(step=(0, 1, 1)), head_dim=4),
    "as many as a launch takes": MergeCase(parts=16, hidden=np.nan),
    "one more": MergeCase(parts=17, hidden=np.nan),
    "many": MergeCase(parts=50, hidden=np.inf, head_dim=4),
}
for _dtype in ("float16", "bfloat16", "float64"):
    CASES |= {
        f"{_dtype}": MergeCase(dtype=_dtype, head_dim=16, hidden=np.nan, nan=True),
        f"{_dtype}, odd head dim": MergeCase(parts=3, dtype=_dtype, head_dim=5),
        f"{_dtype}, rows with gaps": MergeCase(parts=3, dtype=_dtype, head_dim=8, out=Placement(offset=2, pad=(0, 0, 0, 2))),
        f"{_dtype}, any strides": MergeCase(dtype=_dtype, out=STRIDED),
        f"{_dtype}, many": MergeCase(parts=35, dtype=_dtype, head_dim=12, hidden=np.nan),
    }


def simulate():
    """Run every case as on a GPU."""
    from pretended_gpu import OnGpu, Shifted, pretended

    from numbaflash import merging
    from numbaflash.kernels.states import kernel, launch

    class Wide(kernel.MergeConfig):
        def __init__(self, *, wide, **others):
            super().__init__(wide=True, **others)

    def run(case, library):
        with pretended(library, merging, launch, "Merge") as launched:
            for _ in range(2):
                case.run()
        assert len(launched) == 2 * (-(-case.parts // 16) if case.seqlen_q else 0), len(launched)

    failed = False
    for name, case in CASES.items():
        failed |= report(name, lambda case=case: run(case, OnGpu()))
    failed |= report("results at any address", lambda: run(CASES["bfloat16, many"], Shifted()))
    with mock.patch.object(kernel, "MergeConfig", Wide):
        failed |= report("rows counted in 64 bits", lambda: run(CASES["any strides"], OnGpu()))
    return failed


def report(name, check):
    """Run a check and print how it went; whether it failed."""
    try:
        check()
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps({"case": name, "error": error}), flush=True)
    return error is not None


SIMULATED = (*CASES, "results at any address", "rows counted in 64 bits")

if __name__ == "__main__":
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    sys.exit(simulate())
