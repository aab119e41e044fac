"""Packed sequences on every GPU family: against the reference and against a call for each sequence, with NaN wherever no query may look.

``python tests/test_gpu_varlen.py [PROCESSES]`` runs all of it in so many processes at once, without pytest.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import packed_cases
import pytest

import numbaflash
from numbaflash import UnsupportedError, dispatch, testing
from numbaflash.testing import libraries
from numbaflash.testing.strategies import OF_SEQUENCES, PACKED

pytestmark = pytest.mark.gpu

LENGTHS = {"lengths_q": (300, 0, 1, 128, 77, 64, 520), "lengths_k": (334, 40, 200, 128, 0, 33, 480)}
SHORT = {"lengths_q": (3, 1, 0, 7, 16, 2, 1, 5, 64), "lengths_k": (5, 1, 9, 0, 30, 2, 1, 5, 65)}
EDGES = {"before": (70, 5), "after": (3, 140)}
BANDS = ({}, {"causal": True}, {"window": (50, 20)}, {"causal": "top_left", "window": (70, None)})
OPTIONS = {
    "plain": {},
    "rows of nobody": EDGES,
    "short ones": SHORT | EDGES,
    "int64": {"dtypes": ("int64", "int64"), "told": (520, 480)},
    "shared heads": {"heads": 8, "kv_heads": 1} | EDGES,
    "softcap": {"softcap": 1.0},
    "alibi": {"alibi_shape": (7, 4), "scale": -0.2},
    "sinks": {"with_sinks": True, "needs": ("q", "k", "v", "sinks")} | EDGES,
    "dropout": {"dropout": 0.3, "dropout_seed": 7},
    "together": {name: x for name, x in packed_cases.EVERYTHING.items() if name not in ("causal", "window", "before", "after")} | EDGES,
    "too large": {"boundaries": ((0, 300, 2**31 - 1), (0, 334, 2**31 - 1)), "causal": True},
    "below 0": {"boundaries": ((-(2**31), 300, 400), (-5, 334, 340))},
    "queries descend": {"boundaries": ((0, 700, 300), (0, 8, 160)), "with_sinks": True},
    "keys descend": {"boundaries": ((0, 90, 180), (300, 8, 380)), "with_sinks": True},
    "all descend": {"boundaries": ((1000, 0, 90, 2), (0, 170, 3, 190))},
}
OPTIONS["together"] |= {"alibi_shape": (7, 4)}
CAPTURED = (
    ((0, 300, 428, 700), (0, 250, 450, 650)),
    ((0, 64, 64, 690), (0, 1, 130, 600)),
    ((0, 500, 600, 600), (0, 500, 500, 640)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
)
"""Boundaries of queries and keys that take turns in one graph: the first are those it was captured with; sequences longer than was told, too."""

DIMS = ((64, 64), (128, 128), (256, 256), (96, 40), (192, 128))


FIRST = dict.fromkeys(OPTIONS, 0) | {"int64": 1, "shared heads": 2, "softcap": 3, "alibi": 4, "dropout": 3, "together": 4}
FIRST |= dict.fromkeys(("sinks", "queries descend", "keys descend"), 1)
"""Where `main` begins in the cases of an option: those that need the same kernels are alike."""


def cases(name, dtype="bfloat16", dims=DIMS):
    """Of an option: every band, heads of groups and without, in turn; one option alone has no band."""
    for number, (d, dv) in enumerate(dims):
        for place, band in enumerate(BANDS):
            given = LENGTHS | {"heads": 4, "kv_heads": (2, 4)[(number + place) % 2], "deterministic": place % 2 == 1} | band | OPTIONS[name]
            yield packed_cases.case(head_dim=d, head_dim_v=dv, dtype=dtype, **given)


def run_case(case, family, library):
    """The case, and its gradients where the family has them; an error as text, '' when all is well, None when the family cannot compute it."""
    problem, device = case.problem, libraries.device_of(library)
    if dispatch.family(family).supports(problem, device):
        return None
    try:
        packed_cases.run(case, family, library, gradients=not dispatch.family(family, "backward").supports(problem, device))
    except Exception as error:
        return f"{case!r}\n    {type(error).__name__}: {error}"
    return ""


def check_each_alone(family, library, causal=True, d=128):
    """A sequence's rows are those of a call for it alone, up to the order of sums; bits are the same from call to call."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": d, "head_dim_v": d, "dtype": "float16"}
    case = packed_cases.forward_of(packed_cases.case(**LENGTHS, **shape, causal=causal, **EDGES))
    if dispatch.family(family).supports(case.problem, libraries.device_of(library)):
        return None
    arrays = testing.Operands(case, library).arrays
    q, k, v = (arrays[name] for name in "qkv")
    with dispatch.use_family(family):

        def attend():
            return [libraries.to_numpy(x) for x in numbaflash.forward_varlen(q, k, v, **case.handed(arrays), causal=causal, return_lse=True)]

        found = attend()
        for _ in range(10):
            for a, b in zip(found, attend(), strict=True):
                np.testing.assert_array_equal(a, b)
        ends_q, ends_k = case.packed.numbers
        for b in range(case.packed.batch):
            rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
            if rows.start == rows.stop or keys.start == keys.stop:
                continue
            out, lse = numbaflash.forward(q[None, rows], k[None, keys], v[None, keys], causal=causal, return_lse=True)
            np.testing.assert_allclose(found[0][rows], libraries.to_numpy(out)[0], atol=4e-3)
            np.testing.assert_allclose(found[1][:, rows], libraries.to_numpy(lse)[0], atol=1e-4)
    return ""


def check_many_tiles(family, library, sequences=3000):
    """More tiles than blocks, and boundaries of which each thread of a block checks several."""
    lengths = tuple(map(int, np.random.default_rng(0).integers(0, 12, sequences)))
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, "head_dim_v": 64, "dtype": "float16"}
    return run_case(packed_cases.case(lengths, lengths[::-1], causal=True, **shape), family, library)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(gpu, name):
    dtype = "bfloat16" if "bfloat16" in gpu.dtypes else "float32"
    report([run_case(case, gpu.family, gpu.library) for case in cases(name, dtype, DIMS[:3])])


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_dtypes(gpu, dtype):
    if dtype not in gpu.dtypes:
        pytest.skip(f"family {gpu.family} has no {dtype}")
    report([run_case(case, gpu.family, gpu.library) for name in ("short ones", "together") for case in cases(name, dtype)])


@pytest.mark.parametrize("causal", (False, True))
def test_each_sequence_alone(gpu, causal):
    check_each_alone(gpu.family, gpu.library, causal)


def test_many_tiles(gpu):
    report([check_many_tiles(gpu.family, gpu.library)])


def check_captured(family, library, dtype, causal=True):
    """A graph of attention and its gradients heeds the boundaries that lie in the captured memory when it runs; the host has no part in them.

    None without torch, whose graphs these are.
    """
    if library != "torch-cuda":
        return None
    import torch

    def random(*shape):
        return torch.randn(shape, device="cuda").to(getattr(torch, dtype))

    q, k, v, dout = random(700, 4, 64), random(650, 2, 64), random(650, 2, 64), random(700, 4, 64)
    ends_q, ends_k = (torch.tensor(ends, device="cuda", dtype=torch.int32) for ends in CAPTURED[0])
    given = {"causal": causal, "max_seqlen_q": 300, "max_seqlen_k": 300}

    def attend(q, k, v, dout, ends_q, ends_k):
        out, lse = numbaflash.forward_varlen(q, k, v, ends_q, ends_k, return_lse=True, **given)
        return out, lse, *numbaflash.backward_varlen(dout, q, k, v, out, lse, ends_q, ends_k, deterministic=True, **given)

    with dispatch.use_family(family):
        before = attend(q, k, v, dout, ends_q, ends_k)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend(q, k, v, dout, ends_q, ends_k)
        for number, ends in enumerate(CAPTURED):
            for held, new in zip((ends_q, ends_k), ends, strict=True):
                held.copy_(torch.tensor(new, dtype=torch.int32))
            for x in found:
                x.fill_(torch.nan)  # what a replay does not write is seen
            graph.replay()
            wanted = attend(q, k, v, dout, *(torch.tensor(new, device="cuda", dtype=torch.int32) for new in ends))
            assert all(map(torch.equal, found, wanted)), f"boundaries {ends}"
            assert torch.equal(found[0], before[0]) == (number == 0), "other boundaries give other results"
            last_q, last_k = ends[0][-1], ends[1][-1]
            assert not found[0][last_q:].any() and found[1][:, last_q:].isneginf().all() and not found[2][last_q:].any()
            assert not found[3][last_k:].any() and not found[4][last_k:].any()
    return ""


@pytest.mark.parametrize("causal", (False, True))
def test_a_packed_call_can_be_captured(gpu, causal):
    if "torch-cuda" not in testing.gpu_libraries():
        pytest.skip("needs PyTorch with CUDA")
    check_captured(gpu.family, "torch-cuda", "bfloat16" if "bfloat16" in gpu.dtypes else "float32", causal)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_random(gpu, direction):
    dims = (8, 64, 96, 128, 256)
    gpu.run_random(gpu.problems(direction, head_dims=dims, max_seqlen=500, work=2**17, options=(PACKED, *OF_SEQUENCES)), examples=100)


def test_what_a_family_lacks(gpu):
    """It says so in time."""
    case = packed_cases.forward_of(packed_cases.case((), (), after=(9, 5), dtype="float16"))
    if gpu.reasons(case.problem):
        with pytest.raises(UnsupportedError):
            gpu.run(case)
    else:
        gpu.run(case)


def report(found):
    ran = [x for x in found if x is not None]
    failures = [x for x in ran if x]
    assert not failures, f"{len(failures)} of {len(ran)} cases fail:\n" + "\n".join(failures[:20])


def _library():
    found = testing.gpu_libraries()
    return "torch-cuda" if "torch-cuda" in found else found[0]


def _work(job):
    """(family, error) of a job; a job that is no case is a function of family and library."""
    family, what = job
    try:
        return family, what(family, _library()) if callable(what) else run_case(what, family, _library())
    except Exception as error:
        return family, f"{what}\n    {type(error).__name__}: {error}"


def main(processes: int) -> int:
    start = time.monotonic()
    jobs = [("sm90", case) for name in OPTIONS for case in list(cases(name))[FIRST[name] :: 5]]
    jobs += [("sm90", case) for name in ("short ones", "together") for case in list(cases(name, "float16"))[4::5]]
    jobs += [("simt", case) for name in OPTIONS for case in list(cases(name, "float32", DIMS[:2]))[FIRST[name] % 3 :: 5]]
    jobs += [("simt", case) for case in list(cases("together", "bfloat16"))[::10]]
    for family, dtype in (("sm90", "bfloat16"), ("simt", "float32")):
        jobs += [(family, partial(check_captured, dtype=dtype, causal=causal)) for causal in (False, True)]
    for family in ("sm90", "simt"):
        jobs += [(family, partial(check_each_alone, causal=causal)) for causal in (False, True)] + [(family, check_many_tiles)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(_work, jobs, chunksize=1))
    for family in ("sm90", "simt"):
        errors = [error for each, error in found if each == family]
        failures = [error for error in errors if error]
        skipped = errors.count(None)
        print(f"{family}: {len(errors)} jobs, {len(failures)} fail, {skipped} it cannot compute", *failures[:20], sep="\n", flush=True)
    print(f"{time.monotonic() - start:.0f} s")
    return int(any(error != "" for _, error in found))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
