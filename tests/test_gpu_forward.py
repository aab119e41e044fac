"""What only a GPU can show: every head dim of a family, the edges of its tiles, packed heads, large problems, large offsets.

The grids are loops inside a test, their kernels built in parallel first; all failures of a loop are reported together.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import numbaflash
from numbaflash import UnsupportedError, dispatch, testing
from numbaflash.problem import make_problem
from numbaflash.testing import Case, Placement, compare, expected

pytestmark = pytest.mark.gpu

EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 159, 160, 161, 175, 176, 177, 191, 192, 193, 255, 256, 257, 320, 385)
HALF = ("bfloat16", "float16")
BANDS = ({}, {"causal": True}, {"causal": "top_left"}, {"window": (50, 20)}, {"window": (70, None)}, {"window": (33, 0), "causal": True})


def supports(gpu, case) -> bool:
    return not dispatch.family(gpu.family).supports(case.problem, gpu.device)


def run_all(gpu, cases, **options):
    """Run cases and report every failure; at least one must be possible for the family."""
    cases = [case for case in cases if supports(gpu, case)]
    if not cases:
        pytest.skip(f"family {gpu.family} has none of these")
    gpu.build(cases)
    failures = []
    for case in cases:
        try:
            gpu.run(case, **options)
        except AssertionError as error:
            failures.append(f"{case!r}\n    {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases fail:\n" + "\n".join(failures[:20])


def torch_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32", "float64"))
def test_every_head_dim(gpu, dtype):
    """All multiples of 8 and a few that are not, with equal and different dims of the values."""
    dims = [(d, d) for d in (*range(8, 257, 8), 1, 7, 100)] if dtype in ("bfloat16", "float32") else [(d, d) for d in (64, 96, 128, 192, 256)]
    dims += [(192, 128), (128, 64), (64, 256), (256, 8), (8, 136), (96, 160), (72, 128), (40, 200)]
    run_all(gpu, (Case(dtype=dtype, seqlen_q=200, seqlen_k=330, heads=2, head_dim=d, head_dim_v=dv, causal=True, hidden="nan") for d, dv in dims))


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("dim", (64, 128, 192, 256))
def test_edges_of_tiles(gpu, dim, band):
    """Lengths on both sides of every tile size; for some, each number of queries against each number of keys."""
    every = dim == 64 and band in (BANDS[1], BANDS[3])
    lengths = itertools.product(EDGES, EDGES) if every else zip(EDGES * 3, EDGES + EDGES[7:] + EDGES[:7] + EDGES[::-1], strict=True)
    dtype = gpu.dtypes[0] if "bfloat16" not in gpu.dtypes else "bfloat16"
    run_all(
        gpu,
        (Case(dtype=dtype, seqlen_q=sq, seqlen_k=sk, head_dim=dim, head_dim_v=dim, hidden="nan", seed=sq, **band) for sq, sk in lengths),
    )


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_grouped_heads(gpu, dtype):
    """Heads that share keys, packed or not, with few queries and with many."""
    groups = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64) if dtype == "bfloat16" else (4, 6, 8)
    run_all(
        gpu,
        (
            Case(dtype=dtype, batch=2, seqlen_q=sq, seqlen_k=sk, heads=2 * group, kv_heads=2, head_dim=128, head_dim_v=128, hidden="inf", **band)
            for group in groups
            for sq, sk in ((1, 300), (2, 65), (7, 128), (16, 16), (33, 500), (130, 90))
            for band in ({}, {"causal": True}, {"window": (20, 5)})
        ),
    )


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32", "float64"))
def test_values(gpu, dtype):
    run_all(
        gpu,
        (
            Case(dtype=dtype, seqlen_q=300, seqlen_k=400, heads=2, values=values, head_dim=dim, head_dim_v=dim, scale=scale, hidden=hidden, **band)
            for values in testing.RECIPES
            for dim in (64, 128)
            for scale in (None, 0.0, -0.1, 3.0)
            for hidden, band in (("finite", {}), ("nan", {"causal": True}), ("inf", {"window": (20, 5)}))
        ),
    )


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_layouts(gpu, dtype):
    """Layouts that a kernel reads as they are, and those it must copy."""
    layouts = (
        Placement(),
        Placement(order=(0, 2, 1, 3)),
        Placement(pad=(0, 0, 0, 8)),
        Placement(pad=(0, 0, 0, 1)),
        Placement(offset=1),
        Placement(offset=8),
        Placement(step=(1, 2, 1, 1)),
        Placement(step=(1, 1, 1, 2)),
        Placement(step=(1, -1, 1, 1)),
        Placement(order=(3, 2, 1, 0)),
        Placement(pad=(1, 2, 3, 0), step=(1, 3, 1, 1), offset=64),
    )
    broadcast = (Placement(step=(0, 1, 1, 1)), Placement(step=(1, 0, 1, 1)), Placement(step=(1, 1, 0, 1)), Placement(step=(1, 1, 1, 0)))
    base = dict(dtype=dtype, batch=2, seqlen_q=150, seqlen_k=200, heads=4, kv_heads=2, causal=True, hidden="nan")
    cases = [Case(**base, **{name: layout}) for name in ("q", "k", "v", "out") for layout in layouts]
    cases += [Case(**base, **{name: layout}) for name in "qkv" for layout in broadcast]
    cases += [Case(**base, lse=layout) for layout in (Placement(order=(2, 1, 0)), Placement(step=(1, 2, 3)), Placement(offset=3, pad=(0, 0, 5)))]
    run_all(gpu, cases)


@pytest.mark.parametrize("library", ("torch-cuda", "cupy", "numba", "jax"))
def test_random(gpu, library):
    """What Hypothesis draws, through every array library that reaches the GPU."""
    if library == "jax":
        jax = pytest.importorskip("jax")
        if jax.default_backend() != "gpu":
            pytest.skip("JAX sees no GPU")
    elif library not in testing.gpu_libraries():
        pytest.skip(f"{library} does not reach a GPU here")
    missing = {"numba": "bfloat16", "jax": "float64"}.get(library)
    dtypes = tuple(dtype for dtype in gpu.dtypes if dtype != missing)
    through = type(gpu)(gpu.family, library)
    dims = (8, 64, 96, 128, 256) if library == "torch-cuda" else (64, 128)
    examples = 150 if library == "torch-cuda" else 40
    through.run_random(through.problems(dtypes=dtypes, head_dims=dims, max_seqlen=500, work=2**19), examples=examples)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("band", ({}, {"causal": True}, {"window": (1000, 0)}), ids=str)
def test_large(gpu, dtype, band):
    """Thousands of keys and all multiprocessors busy, against the reference computed by torch in float64 on the GPU."""
    torch_gpu()
    shapes = [(2, 4096, 4096, 16, 4, 128), (1, 2048, 8192, 16, 16, 64), (1, 3000, 5000, 8, 8, 256)]
    if dtype == "float32":
        shapes = shapes[:2]
    run_all(
        type(gpu)(gpu.family, "torch-cuda"),
        (
            Case(dtype=dtype, batch=b, seqlen_q=sq, seqlen_k=sk, heads=h, kv_heads=hk, head_dim=d, head_dim_v=d, **band)
            for b, sq, sk, h, hk, d in shapes
        ),
    )


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_many_batches_and_heads(gpu, dtype):
    """More of each than grid.y and grid.z can count."""
    torch_gpu()
    run_all(
        type(gpu)(gpu.family, "torch-cuda"),
        (
            Case(dtype=dtype, batch=70_000, seqlen_q=8, seqlen_k=9, causal=True),
            Case(dtype=dtype, seqlen_q=8, seqlen_k=9, heads=70_000, kv_heads=70_000),
            Case(dtype=dtype, seqlen_q=5, seqlen_k=9, heads=140_000, kv_heads=70_000, causal=True),
        ),
    )


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_very_long(gpu, dtype):
    """64k keys with O(S) memory; some rows against the reference."""
    torch = torch_gpu()
    length = 65536
    kind = getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, 64, device="cuda", generator=generator).to(kind) for _ in "qkv")
    problem = make_problem((1, 300, 1, 64), k.shape, v.shape, (dtype,) * 3)
    if dispatch.family(gpu.family).supports(problem, gpu.device):
        pytest.skip(f"family {gpu.family} has no {dtype}")
    rows = torch.linspace(0, length - 1, 300, device="cuda").long()
    with dispatch.use_family(gpu.family):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, lse = numbaflash.forward(q, k, v, return_lse=True)
        assert torch.cuda.max_memory_allocated() - before < 2 * (q.nbytes + lse.nbytes)
        compare(expected(problem, q[:, rows], k, v), out[:, rows], lse[..., rows])
        out, lse = numbaflash.forward(q, k, v, causal=True, return_lse=True)
    problem = make_problem((1, 300, 1, 64), k.shape, v.shape, (dtype,) * 3, causal=True)
    compare(expected(problem, q[:, -300:], k, v), out[:, -300:], lse[..., -300:])
    problem = make_problem((1, 300, 1, 64), (1, 300, 1, 64), (1, 300, 1, 64), (dtype,) * 3, causal=True)
    compare(expected(problem, q[:, :300], k[:, :300], v[:, :300]), out[:, :300], lse[..., :300])


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("axis", ("batch", "seqlen", "heads"))
def test_offsets_beyond_32_bits(gpu, dtype, axis):
    """One axis whose strides, in elements, carry the last entry past 2**32; nothing is written between the elements."""
    torch = torch_gpu()
    kind = getattr(torch, dtype)
    shape = {"batch": (3, 70, 2, 64), "seqlen": (1, 520, 2, 64), "heads": (1, 70, 3, 64)}[axis]
    at = {"batch": 0, "seqlen": 1, "heads": 2}[axis]
    size = 2**32 + 2**24
    if torch.cuda.mem_get_info()[0] < (size * kind.itemsize) * 3:
        pytest.skip("needs more GPU memory")
    problem = make_problem(shape, shape, shape, (dtype,) * 3, causal=True)
    if dispatch.family(gpu.family).supports(problem, gpu.device):
        pytest.skip(f"family {gpu.family} has no {dtype}")
    storage = torch.full((size,), torch.nan, dtype=kind, device="cuda")
    strides = [0, 0, 0, 1]
    step = 64
    for other in (2, 1, 0):
        if other != at:
            strides[other] = step
            step *= shape[other]
    strides[at] = -(-(2**32) // ((shape[at] - 1) * 64)) * 64
    operands = [torch.as_strided(storage, shape, strides, n * 2**20) for n in range(4)]
    assert (shape[at] - 1) * strides[at] >= 2**32
    generator = torch.Generator("cuda").manual_seed(0)
    for x in operands[:3]:
        x.copy_(torch.randn(shape, device="cuda", generator=generator))
    q, k, v, out = operands
    filled = sum(x.numel() for x in operands)
    with dispatch.use_family(gpu.family):
        result, lse = numbaflash.forward(q, k, v, causal=True, out=out, return_lse=True)
    assert result is out
    compare(expected(problem, q, k, v), out, lse)
    numbers = sum(int((~torch.isnan(part)).sum()) for part in storage.split(2**28))
    assert numbers == filled, "elements between those of out were written"


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_the_same_bits_under_load(gpu, dtype, dim):
    """A race shows as different bits: many calls in a row, all multiprocessors busy."""
    torch = torch_gpu()
    kind = getattr(torch, dtype)
    problem = make_problem((4, 1000, 16, dim), (4, 1100, 4, dim), (4, 1100, 4, dim), (dtype,) * 3)
    if dispatch.family(gpu.family).supports(problem, gpu.device):
        pytest.skip(f"family {gpu.family} has no {dtype}")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).to(kind) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    for causal in (False, True):
        with dispatch.use_family(gpu.family):
            first = numbaflash.forward(q, k, v, causal=causal, return_lse=True)
            for _ in range(20):
                again = numbaflash.forward(q, k, v, causal=causal, return_lse=True)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_torch_reference_on_the_gpu():
    """The reference that the large tests use, on the device, equals that of NumPy."""
    torch = torch_gpu()
    for case in (
        Case(dtype="bfloat16", batch=2, seqlen_q=100, seqlen_k=150, heads=4, kv_heads=2, causal=True, hidden="nan", values="nan"),
        Case(dtype="float16", seqlen_q=300, seqlen_k=100, causal=True, window=(20, None)),
        Case(dtype="float32", seqlen_q=50, seqlen_k=70, values="big", scale=-1.0),
    ):
        memory = case.memory()
        values = [memory[name].decoded() for name in "qkv"]
        known = expected(case.problem, *values)
        theirs = expected(case.problem, *(torch.from_numpy(x).cuda() for x in values))
        for name in ("out", "lse", "out_tolerance", "lse_tolerance"):
            a, b = getattr(known, name), getattr(theirs, name).cpu().numpy()
            tolerance = 1e-3 if "tolerance" in name else 1e-11
            assert np.allclose(a, b, rtol=tolerance, atol=0 if "tolerance" in name else 1e-9, equal_nan=True), name


def test_unsupported_is_said(gpu):
    """What a family cannot do is refused before anything runs, with the reason."""
    if gpu.family != "sm90":
        pytest.skip(f"family {gpu.family} takes every head dim")
    x = gpu.array(np.zeros((1, 4, 1, 63)), "bfloat16")
    with dispatch.use_family("sm90"), pytest.raises(UnsupportedError, match="sm90: .*head_dim.* multiple of 8"):
        numbaflash.forward(x, x, x)
