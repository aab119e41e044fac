"""Cases for the simt kernels in Numba's CUDA simulator: ``python tests/simulator_cases.py`` prints a JSON line for each.

A process of its own, because numba decides for the simulator when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

SMALL = {"seqlen_q": 19, "seqlen_k": 23, "head_dim": 8, "head_dim_v": 8}
SCORES = (2, 2, 19, 23)
EVERYTHING = {
    "batch": 2,
    "heads": 2,
    "causal": True,
    "softcap": 3.0,
    "mask_shape": (19, 23),
    "bias_shape": (2, 1, 23),
    "alibi_shape": (2,),
    "with_sinks": True,
    "dropout": 0.3,
    "dropout_seed": 2**63 + 12345,
    "lengths_q": "random",
    "lengths_k": "random",
    "hidden": "nan",
}
"""A case with every option."""


def option_cases(base, strided):
    """Named cases for what options do, forward and backward."""
    wide = replace(base, batch=2, heads=2)
    named = {
        "mask": replace(wide, mask_shape=SCORES),
        "mask, rows without a key, hidden NaN": replace(wide, mask_shape=(2, 1, 19, 23), mask_values="rows", hidden="nan", causal=True),
        "mask, blocks without a key": replace(base, seqlen_q=70, seqlen_k=70, mask_shape=(70, 70), mask_values="blocks", hidden="nan"),
        "mask of keys, hidden infinities": replace(wide, mask_shape=(2, 1, 1, 23), hidden="inf"),
        "mask of queries, any strides": replace(wide, mask_shape=(2, 2, 19, 1), mask=strided),
        "mask, NaN among what is seen": replace(wide, mask_shape=(19, 23), values="nan", hidden="nan"),
        "lengths": replace(base, batch=3, lengths_q="random", lengths_k="random", hidden="nan"),
        "lengths at the edges, causal, int64": replace(
            base, batch=6, lengths_q="edges", lengths_k="edges", lengths_dtype="int64", causal=True, hidden="nan"
        ),
        "lengths, window": replace(base, batch=4, lengths_q="random", lengths_k="random", window=(3, 2), hidden="inf"),
        "lengths, top left": replace(base, batch=4, lengths_q="edges", lengths_k="random", causal="top_left", hidden="nan"),
        "lengths of keys": replace(base, batch=4, lengths_k="edges", hidden="nan"),
        "lengths of queries, more queries than keys": replace(base, batch=4, seqlen_q=30, seqlen_k=11, lengths_q="random", causal=True, hidden="nan"),
        "bias": replace(wide, bias_shape=SCORES),
        "bias of keys": replace(wide, bias_shape=(2, 1, 1, 23)),
        "bias of queries": replace(wide, bias_shape=(19, 1), causal=True, hidden="nan"),
        "bias of heads": replace(wide, bias_shape=(2, 1, 1)),
        "bias, any strides": replace(wide, bias_shape=SCORES, bias=strided),
        "bias of lowest numbers": replace(wide, bias_shape=(2, 19, 23), bias_values="lowest"),
        "bias of lowest float32, float16": replace(wide, dtype="float16", bias_shape=(2, 19, 23), bias_values="lowest", bias_dtype="float32"),
        "bias of -inf, hidden NaN": replace(wide, bias_shape=(2, 19, 1), bias_values="infinite", hidden="nan", values="nan"),
        "bias in bfloat16, float64": replace(wide, dtype="float64", bias_shape=(19, 23), bias_dtype="bfloat16"),
        "alibi": replace(wide, alibi_shape=(2, 2)),
        "alibi, lengths": replace(wide, alibi_shape=(2,), lengths_q="random", lengths_k="random", hidden="nan"),
        "alibi, top left, float64": replace(wide, dtype="float64", alibi_shape=(2,), causal="top_left"),
        "softcap": replace(base, softcap=0.25),
        "softcap, float64": replace(base, softcap=0.25, dtype="float64"),
        "softcap, bfloat16, scale 0": replace(base, softcap=2.0, dtype="bfloat16", scale=0.0),
        "sinks": replace(wide, with_sinks=True),
        "sinks, rows without keys": replace(wide, with_sinks=True, seqlen_q=30, seqlen_k=11, causal=True, lengths_q="edges", batch=4, hidden="nan"),
        "sinks, no keys": replace(wide, with_sinks=True, seqlen_k=0),
        "dropout": replace(wide, dropout=0.3, dropout_seed=7),
        "dropout, many tiles": replace(base, dropout=0.9, seqlen_q=40, seqlen_k=70, dropout_seed=2**64 - 1),
        "dropout, hidden NaN": replace(wide, dropout=0.5, mask_shape=(19, 23), values="nan", hidden="nan"),
    }
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        named[f"every option, {dtype}"] = replace(base, dtype=dtype, **EVERYTHING)
    return {f"option: {name}": case for name, case in named.items()}


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
    return named | option_cases(base, Placement(**strided))


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
    for n, (name, case) in enumerate(option_cases(base, strided).items()):
        gradients = (*(("bias",) if case.bias_shape else ()), *(("sinks",) if case.with_sinks else ()))
        named[name] = replace(case, needs=("q", "k", "v", *gradients), deterministic=n % 2 == 0, with_dlse=n % 3 == 0)
    for needs in (("bias",), ("sinks",), ("q",), ("v", "bias")):
        named[f"option: every option, gradient of {', '.join(needs)} alone"] = replace(base, **EVERYTHING, needs=needs)
    return named


def main():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    from hypothesis import HealthCheck, given, settings

    from numbaflash import dispatch, testing
    from numbaflash.dispatch import CPU

    options = tuple(sorted(dispatch.family("simt").FEATURES))
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

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, max_seqlen=40, work=2**9, options=options))
    def options_drawn(case):
        testing.run_case(case, "simt", "numpy")

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, "backward", max_seqlen=40, work=2**9, options=options))
    def backward_options_drawn(case):
        testing.run_backward_case(case, "simt", "numpy")

    failed |= report("drawn by Hypothesis", drawn)
    failed |= report("options drawn by Hypothesis", options_drawn)
    for name, case in backward_cases().items():
        failed |= report(f"backward: {name}", lambda case=case: testing.run_backward_case(case, "simt", "numpy"))
    failed |= report("backward: drawn by Hypothesis", backward_drawn)
    failed |= report("backward: options drawn by Hypothesis", backward_options_drawn)
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
