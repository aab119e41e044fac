"""A few small calls of every GPU family, to run under compute-sanitizer: ``compute-sanitizer --tool memcheck python tests/sanitizer_cases.py``.

Between them they take each road of the Hopper kernels: two, three and four consumers, packed heads, bands, the output in parts and in Q's
place; gradients of keys apart and of columns apart, in turn and in any order.

With ``--every-lane`` the Hopper kernels are built so that every lane arrives at an mbarrier, not lane 0 for its warp. That is for racecheck,
which does not see that what a warp has done before its lane 0 arrives is done: it reports hazards without, and none with it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import types

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
OPTION_CASES = (  # the same, with the names of options
    ("float16", 2, 130, 200, 2, 1, 64, {"causal": True}, ("softcap", "alibi_slopes", "sinks", "seqlens_q", "seqlens_k")),
    ("float16", 2, 130, 200, 2, 2, 128, {}, ("mask", "bias", "seqlens_k")),
    ("float16", 1, 130, 200, 2, 1, 128, {"causal": True}, ("dropout", "mask")),
    ("float16", 1, 300, 400, 2, 1, 128, {"causal": True}, ("dropout",)),
    ("float16", 1, 130, 300, 2, 2, 64, {}, ("dropout",)),
    ("float16", 2, 70, 200, 2, 2, 256, {}, ("mask", "bias", "dropout", "seqlens_k")),
)
PACKED_CASES = ((64, {"causal": True}), (128, {}), (256, {"causal": True}))  # head_dim, options
BOUNDARIES = (0, 130, 130, 330, 340)


def let_every_lane_arrive() -> None:
    """Build the kernels so from now on, in a disk cache of their own: the package's sources do not tell them apart."""
    os.environ["NUMBAFLASH_CACHE_DIR"] = tempfile.mkdtemp()
    from llvmlite import ir

    from numbaflash.kernels.sm90 import forward
    from numbaflash.kernels.sm90.backward import by_columns, by_keys, kernel
    from numbaflash.ptx import mbarrier, pipeline
    from numbaflash.ptx.inline import I32, U32, VOID, emit, make_intrinsic

    def release(builder, args, _):
        at = pipeline.barrier_at(builder, *args[:2])
        emit(builder, ir.VoidType(), [at], "mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}")

    def changed(module, **names):
        copy = types.ModuleType(module.__name__)
        vars(copy).update(vars(module) | names)
        return copy

    forward.pipeline = by_keys.pipeline = by_columns.pipeline = changed(pipeline, release=make_intrinsic(VOID, (U32, pipeline.PLACE, I32), release))
    # Counts of warps are 4 a consumer, and 3 of those beside the producer's first; the others are of single threads.
    init_ring = mbarrier.init_ring
    forward.mbarrier = kernel.mbarrier = changed(
        mbarrier, init_ring=lambda count, arrivals: init_ring(count, arrivals * (32 if arrivals >= 3 else 1))
    )


def make_options(cupy, rng, names, batch, seqlen_q, seqlen_k, heads):
    """Options of a call by their names."""
    made = {
        "softcap": lambda: 5.0,
        "alibi_slopes": lambda: cupy.asarray(rng.random(heads, dtype=np.float32)),
        "sinks": lambda: cupy.asarray(rng.standard_normal(heads, dtype=np.float32)),
        "seqlens_q": lambda: cupy.asarray(rng.integers(1, seqlen_q + 1, batch)),
        "seqlens_k": lambda: cupy.asarray(rng.integers(1, seqlen_k + 1, batch)),
        "mask": lambda: cupy.asarray(rng.random((batch, 1, seqlen_q, seqlen_k)) < 0.7),
        "bias": lambda: cupy.asarray(rng.standard_normal((1, heads, seqlen_q, seqlen_k), dtype=np.float32)).astype("float16"),
        "dropout": lambda: 0.2,
    }
    return {name: made[name]() for name in names} | ({"seed": 1} if "dropout" in names else {})


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-lane", action="store_true")
    if parser.parse_args(arguments).every_lane:
        let_every_lane_arrive()
    import cupy

    rng = np.random.default_rng(0)
    cases = (*((*case, ()) for case in CASES), *OPTION_CASES)
    for number, (dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, options, names) in enumerate(cases):
        shapes = [(batch, seqlen_q, heads, head_dim), *[(batch, seqlen_k, kv_heads, head_dim)] * 2]
        q, k, v = (cupy.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype) for shape in shapes)
        # initcheck does not see what TMA stores: results start as NaN, which must be gone.
        options = options | make_options(cupy, rng, names, batch, seqlen_q, seqlen_k, heads)
        needs = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in names))
        out, dq, dk, dv = (cupy.full(x.shape, cupy.nan, dtype) for x in (q, q, k, v))
        lse = cupy.full((batch, heads, seqlen_q), cupy.nan, np.float32)
        numbaflash.forward(q, k, v, out=out, lse=lse, **options)
        gradients = numbaflash.backward(out, q, k, v, out, lse, deterministic=number % 2 == 0, dq=dq, dk=dk, dv=dv, needs=needs, **options)
        clean = not any(bool(cupy.isnan(x).any()) for x in (out, lse, *gradients))
        print(numbaflash.explain(q, k, v, **options).plan.family, dtype, head_dim, *names, "no NaN" if clean else "NaN", flush=True)
        if not clean:
            return 1
    return run_packed(cupy, rng)


def run_packed(cupy, rng) -> int:
    boundaries = cupy.asarray(BOUNDARIES, np.int32)
    for number, (head_dim, options) in enumerate(PACKED_CASES):
        q, k, v, out, dq, dk, dv = (cupy.zeros((BOUNDARIES[-1], heads, head_dim), "float16") for heads in (2, 1, 1, 2, 2, 1, 1))
        for x in (q, k, v):
            x[...] = cupy.asarray(rng.standard_normal(x.shape, dtype=np.float32))
        for x in (out, dq, dk, dv):
            x[...] = cupy.nan
        lse = cupy.full((2, BOUNDARIES[-1]), cupy.nan, np.float32)
        numbaflash.forward_varlen(q, k, v, boundaries, boundaries, out=out, lse=lse, **options)
        given = {"deterministic": number % 2 == 0, "dq": dq, "dk": dk, "dv": dv}
        gradients = numbaflash.backward_varlen(out, q, k, v, out, lse, boundaries, boundaries, **given, **options)
        clean = not any(bool(cupy.isnan(x).any()) for x in (out, lse, *gradients))
        print("packed", head_dim, "no NaN" if clean else "NaN", flush=True)
        if not clean:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
