"""Cases for the simt kernels in Numba's CUDA simulator: ``python tests/simulator_cases.py`` prints a JSON line for each.

A process of its own, because numba decides for the simulator when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

SMALL = {"seqlen_q": 19, "seqlen_k": 23, "head_dim": 8, "head_dim_v": 8}


def cases():
    """Named cases, each for one thing that the kernel does."""
    from numbaflash.testing import Case, Placement

    base = Case(**SMALL)
    strided = {"order": (0, 2, 1, 3), "step": (1, -1, 2, 1)}
    named = {
        "contiguous": base,
        "float64": replace(base, dtype="float64"),
        "float16": replace(base, dtype="float16"),
        "bfloat16": replace(base, dtype="bfloat16"),
        "odd head dims": replace(base, head_dim=7, head_dim_v=33),
        "odd head dims, float64": replace(base, dtype="float64", head_dim=17, head_dim_v=3),
        "odd head dims, bfloat16": replace(base, dtype="bfloat16", head_dim=33, head_dim_v=9),
        "largest head dims": replace(base, seqlen_q=3, seqlen_k=10, head_dim=256, head_dim_v=256),
        "grouped heads, batch": replace(base, batch=2, heads=4, kv_heads=2),
        "causal": replace(base, causal=True),
        "causal, top left": replace(base, causal="top_left"),
        "more queries than keys": replace(base, seqlen_q=30, seqlen_k=11, causal=True),
        "window": replace(base, window=(3, 2)),
        "left window": replace(base, seqlen_k=40, window=(5, None)),
        "hidden NaN in shared tiles": replace(base, seqlen_q=9, seqlen_k=40, window=(2, 1), hidden="nan"),
        "hidden infinities, causal": replace(base, seqlen_q=20, seqlen_k=20, causal="top_left", window=(4, 0), hidden="inf"),
        "NaN among what is seen": replace(base, values="nan", causal=True, seed=1),
        "big scores": replace(base, values="big", scale=-3.0),
        "scale 0": replace(base, scale=0.0),
        "no keys": replace(base, seqlen_k=0),
        "one query": replace(base, seqlen_q=1),
        "no lse": replace(base, return_lse=False),
        "any strides": replace(base, heads=2, kv_heads=2, **{name: Placement(**strided) for name in ("q", "k", "v", "out")}),
        "broadcast keys": replace(base, heads=2, kv_heads=2, k=Placement(step=(1, 1, 0, 1)), v=Placement(step=(1, 1, 0, 1))),
    }
    return named


def backward_cases():
    """The same for the gradients."""
    from numbaflash.testing import BackwardCase, Placement

    base = BackwardCase(**SMALL)
    strided = Placement(order=(0, 2, 1, 3), step=(1, -1, 2, 1))
    named = {
        "contiguous": base,
        "deterministic": replace(base, deterministic=True),
        "gradient of the LSE": replace(base, with_dlse=True),
        "float64": replace(base, dtype="float64", with_dlse=True),
        "float16": replace(base, dtype="float16", with_dlse=True),
        "bfloat16": replace(base, dtype="bfloat16"),
        "odd head dims": replace(base, head_dim=7, head_dim_v=33),
        "odd head dims, float64": replace(base, dtype="float64", head_dim=17, head_dim_v=3),
        "odd head dims, bfloat16": replace(base, dtype="bfloat16", head_dim=33, head_dim_v=9),
        "largest head dims": replace(base, seqlen_q=3, seqlen_k=10, head_dim=256, head_dim_v=256),
        "grouped heads, batch, deterministic": replace(base, batch=2, heads=4, kv_heads=2, deterministic=True),
        "causal": replace(base, causal=True),
        "causal, top left, deterministic": replace(base, causal="top_left", deterministic=True),
        "more queries than keys": replace(base, seqlen_q=30, seqlen_k=11, causal=True),
        "window": replace(base, window=(3, 2)),
        "left window, deterministic": replace(base, seqlen_k=40, window=(5, None), deterministic=True),
        "narrow window, grouped heads, deterministic": replace(base, seqlen_q=40, seqlen_k=40, window=(2, 0), heads=2, deterministic=True),
        "hidden NaN in shared tiles": replace(base, seqlen_q=9, seqlen_k=40, window=(2, 1), hidden="nan", with_dlse=True),
        "hidden NaN, rows without keys": replace(base, seqlen_q=30, seqlen_k=11, causal=True, hidden="nan"),
        "hidden infinities, causal": replace(base, seqlen_q=20, seqlen_k=20, causal="top_left", window=(4, 0), hidden="inf"),
        "NaN among what is seen": replace(base, values="nan", causal=True, seed=1),
        "big scores": replace(base, values="big", scale=-3.0),
        "scale 0": replace(base, scale=0.0),
        "no keys": replace(base, seqlen_k=0),
        "one query": replace(base, seqlen_q=1),
        "one key": replace(base, seqlen_k=1, deterministic=True),
        "any strides": replace(base, heads=2, kv_heads=2, with_dlse=True, **dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), strided)),
        "broadcast dout": replace(base, dout=Placement(step=(0, 0, 0, 0))),
    }
    for needs in (("q",), ("k",), ("v",), ("q", "v"), ("k", "v")):
        named[f"gradient of {', '.join(needs)} alone"] = replace(base, needs=needs, causal=True, deterministic=True)
    return named


def main():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    from hypothesis import HealthCheck, given, settings

    from numbaflash import testing
    from numbaflash.dispatch import CPU

    failed = False
    for name, case in cases().items():
        failed |= report(name, lambda case=case: testing.run_case(case, "simt", "numpy"))

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, max_seqlen=40, work=2**9))
    def drawn(case):
        testing.run_case(case, "simt", "numpy")

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, "backward", max_seqlen=40, work=2**9))
    def backward_drawn(case):
        testing.run_backward_case(case, "simt", "numpy")

    failed |= report("drawn by Hypothesis", drawn)
    for name, case in backward_cases().items():
        failed |= report(f"backward: {name}", lambda case=case: testing.run_backward_case(case, "simt", "numpy"))
    failed |= report("backward: drawn by Hypothesis", backward_drawn)
    return int(failed)


def report(name, check):
    """Run a check and print how it went; whether it failed."""
    try:
        check()
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps({"case": name, "error": error}), flush=True)
    return error is not None


if __name__ == "__main__":
    sys.exit(main())
