"""`numbaflash.forward` on every family that can run here: a grid of cases that a person would ask about, then what Hypothesis finds.

`numbaflash.testing.run_case` does the checking: accuracy, guard zones, unchanged inputs, the kind of results.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbaflash
from numbaflash import dispatch
from numbaflash.problem import DTYPES
from numbaflash.testing import RECIPES, Case, Placement, problems, run_case

TRANSPOSED = Placement(order=(0, 2, 1, 3))
GRID = {
    "square": dict(seqlen_q=256, seqlen_k=256),
    "causal": dict(seqlen_q=256, seqlen_k=256, causal=True),
    "short queries": dict(seqlen_q=17, seqlen_k=300, causal=True),
    "one query": dict(batch=3, seqlen_q=1, seqlen_k=333, heads=4, causal=True),
    "one key": dict(seqlen_q=130, seqlen_k=1),
    "one of each": dict(seqlen_q=1, seqlen_k=1),
    "no keys": dict(batch=2, seqlen_q=70, seqlen_k=0, heads=3),
    "long queries": dict(seqlen_q=300, seqlen_k=100, causal=True),
    "top left": dict(seqlen_q=100, seqlen_k=300, causal="top_left"),
    "top left, long queries": dict(seqlen_q=300, seqlen_k=100, causal="top_left"),
    "window": dict(seqlen_q=300, seqlen_k=300, window=(40, 20)),
    "one-key window": dict(seqlen_q=200, seqlen_k=200, window=(0, 0)),
    "left window, causal": dict(seqlen_q=300, seqlen_k=350, window=(64, None), causal=True),
    "right window": dict(seqlen_q=200, seqlen_k=150, window=(None, 33)),
    "window, rows without keys": dict(seqlen_q=300, seqlen_k=150, window=(30, 10), causal="top_left"),
    "edges of tiles": dict(seqlen_q=129, seqlen_k=177, causal=True, window=(127, 0)),
    "grouped": dict(batch=2, seqlen_q=65, seqlen_k=129, heads=6, kv_heads=2, causal=True),
    "one kv head": dict(batch=2, seqlen_q=5, seqlen_k=257, heads=16, kv_heads=1, causal=True),
    "many heads": dict(batch=5, seqlen_q=33, seqlen_k=33, heads=12, kv_heads=12),
    "head-first layout": dict(batch=2, seqlen_q=100, seqlen_k=100, heads=3, kv_heads=3, q=TRANSPOSED, k=TRANSPOSED, v=TRANSPOSED, out=TRANSPOSED),
    "packed qkv": dict(seqlen_q=90, seqlen_k=90, heads=2, kv_heads=2, **{name: Placement(pad=(0, 0, 4, 0)) for name in "qkv"}),
    "broadcast": dict(batch=2, seqlen_q=40, seqlen_k=50, heads=2, k=Placement(step=(0, 1, 0, 1)), v=Placement(step=(1, 0, 1, 1))),
    "nan behind the mask": dict(seqlen_q=200, seqlen_k=200, window=(5, 0), hidden="nan", values="nan", seed=4),
    "inf behind the mask": dict(seqlen_q=100, seqlen_k=300, causal="top_left", hidden="inf"),
    "scale 0": dict(seqlen_q=70, seqlen_k=130, scale=0.0, causal=True),
    "negative scale": dict(seqlen_q=70, seqlen_k=130, scale=-0.3),
}


DIMS = ((1, 1), (8, 8), (17, 5), (32, 32), (40, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (255, 1), (8, 256))

CASES = {f"{dtype} {name}": Case(dtype=dtype, **options) for dtype in DTYPES for name, options in GRID.items()}
CASES |= {
    f"{dtype} head dims {dims[0]}, {dims[1]}": Case(
        dtype=dtype, seqlen_q=70, seqlen_k=140, heads=2, kv_heads=1, head_dim=dims[0], head_dim_v=dims[1], causal=True
    )
    for dtype in DTYPES
    for dims in DIMS
}
CASES |= {
    f"{dtype} {values} values": Case(dtype=dtype, seqlen_q=90, seqlen_k=260, heads=2, values=values, causal=True, seed=3)
    for dtype in DTYPES
    for values in RECIPES
}


@pytest.fixture(scope="session")
def built(target):
    """The target, its kernels for all named cases built in parallel."""
    target.build(CASES.values())
    return target


@pytest.mark.parametrize("name", CASES)
def test_named(built, name):
    reasons = dispatch.family(built.family).supports(CASES[name].problem, built.device)
    if reasons:
        pytest.skip(f"{built.family}: {reasons[0]}")
    built.run(CASES[name])


def test_random(target):
    target.run_random(target.problems(work=2**17), examples=80)


@pytest.mark.parametrize("library", ["torch", "jax"])
@settings(max_examples=30)
@given(data=st.data())
def test_other_libraries_on_the_cpu(library, data):
    pytest.importorskip(library)
    dtypes = DTYPES if library == "torch" else ("float16", "bfloat16", "float32")
    run_case(data.draw(problems(dtypes=dtypes, max_seqlen=100, work=2**14)), "cpu", library)


def test_lse_is_filled_when_given_and_not_asked_for(target):
    case = Case(dtype=target.dtypes[0], seqlen_q=50, seqlen_k=60, heads=2)
    arrays = [target.array(np.random.default_rng(0).standard_normal(getattr(case.problem, f"{name}_shape")), case.dtype) for name in "qkv"]
    lse = target.array(np.full(case.problem.lse_shape, np.nan), case.problem.lse_dtype)
    with dispatch.use_family(target.family):
        out = numbaflash.forward(*arrays, lse=lse)
        again, want = numbaflash.forward(*arrays, return_lse=True)
    assert (target.numpy(out) == target.numpy(again)).all()
    assert (target.numpy(lse) == target.numpy(want)).all()


def test_threads_do_not_disturb_each_other(target):
    """Several threads, each with problems of its own, at once."""
    cases = [Case(dtype=target.dtypes[0], seqlen_q=60 + 7 * n, seqlen_k=100, heads=2, causal=bool(n % 2), seed=n) for n in range(4)]
    target.run_in_threads(cases)
