"""A few small calls of every GPU family, to run under compute-sanitizer: ``compute-sanitizer --tool racecheck python tests/sanitizer_cases.py``.

Between them they take each road of the Hopper kernels: two, three and four consumers, packed heads, bands, the output in parts and in Q's
place; gradients of keys apart and of columns apart, in turn and in any order.
"""

from __future__ import annotations

import sys

import numpy as np

import numbaflash

CASES = (  # dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, options
    ("float16", 2, 150, 300, 2, 1, 64, {"causal": True}),
    ("float16", 1, 130, 900, 1, 1, 64, {}),
    ("float16", 1, 200, 300, 2, 2, 128, {"window": (70, 10)}),
    ("float16", 1, 130, 200, 2, 2, 256, {}),
    ("float16", 1, 130, 1100, 1, 1, 256, {}),
    ("float16", 1, 130, 200, 2, 1, 256, {"causal": True}),
    ("float32", 1, 100, 150, 2, 1, 64, {"causal": True}),
)


def main() -> int:
    import cupy

    rng = np.random.default_rng(0)
    for number, (dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, options) in enumerate(CASES):
        shapes = [(batch, seqlen_q, heads, head_dim), *[(batch, seqlen_k, kv_heads, head_dim)] * 2]
        q, k, v = (cupy.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype) for shape in shapes)
        # initcheck does not see what TMA stores: results start as NaN, which must be gone.
        out, dq, dk, dv = (cupy.full(x.shape, cupy.nan, dtype) for x in (q, q, k, v))
        lse = cupy.full((batch, heads, seqlen_q), cupy.nan, np.float32)
        numbaflash.forward(q, k, v, out=out, lse=lse, **options)
        gradients = numbaflash.backward(out, q, k, v, out, lse, deterministic=number % 2 == 0, dq=dq, dk=dk, dv=dv, **options)
        finite = all(bool(cupy.isfinite(x).all()) for x in (out, lse, *gradients))
        print(numbaflash.explain(q, k, v, **options).plan.family, dtype, head_dim, "finite" if finite else "NOT FINITE", flush=True)
        if not finite:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
