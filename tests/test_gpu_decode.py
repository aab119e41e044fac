"""Decoding on every GPU family, by the API against the reference in float64: NaN in all slots that no sequence uses, garbage in entries of page
tables that no key is in.

``python tests/test_gpu_decode.py [PROCESSES]`` runs all of it in so many processes at once, without pytest.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context

import numpy as np
import pytest
from decode_cases import CASES, DecodeCase

import numbaflash
from numbaflash import dispatch, testing
from numbaflash.testing import Placement, libraries

pytestmark = pytest.mark.gpu

LENGTHS = (334, 0, 1, 128, 77, 64, 520, 15)
PAGES = (None, 1, 3, 16, 64, 256)
BANDS = ({}, {"causal": True}, {"causal": True, "window": (50, None)}, {"window": (70, 2)}, {"causal": "top_left"})
DIMS = (8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 136, 160, 168, 192, 200, 256)
GROUPS = (1, 3, 4, 7, 8, 32)
TOKENS = (1, 2, 3, 5, 8, 15, 16, 17, 33, 64)
LATENT = {"heads": 16, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
OPTIONS = {
    "softcap": {"options": {"softcap": 1.5}},
    "softcap, far away": {"options": {"softcap": 1000.0}},
    "alibi": {"alibi_per_batch": False},
    "alibi of each sequence": {"alibi_per_batch": True, "options": {"scale": -0.2}},
    "sinks": {"with_sinks": True},
    "scale 0": {"options": {"scale": 0.0}, "with_sinks": True},
    "negative scale": {"options": {"scale": -0.3}},
    "window": {"options": {"causal": True, "window": (100, 0)}},
    "together": {"options": {"causal": True, "window": (300, None), "softcap": 3.0}, "with_sinks": True, "alibi_per_batch": True},
}


def _pages():
    for n, size in enumerate(PAGES):
        for place, dim in enumerate((64, 128)):
            yield DecodeCase(LENGTHS, size, seqlen_q=1 + place * 2, head_dim=dim, head_dim_v=dim, options=BANDS[(n + place) % 5], shared=place)


def _dims():
    for n, dim in enumerate(DIMS):
        yield DecodeCase(LENGTHS, PAGES[n % 6], head_dim=dim, head_dim_v=dim, seqlen_q=1 + n % 3)
    for n, (d, dv) in enumerate(((64, 128), (128, 64), (192, 128), (8, 256), (256, 8), (576, 512), (512, 512), (320, 64), (64, 320))):
        yield DecodeCase(LENGTHS, PAGES[n % 6], head_dim=d, head_dim_v=dv)


def _latent():
    for n, size in enumerate(PAGES):
        yield DecodeCase(LENGTHS, size, seqlen_q=1 + n % 2, options=BANDS[n % 2], num_splits=(None, 2)[n % 2], **LATENT)
    yield DecodeCase(LENGTHS, 64, **LATENT | {"heads": 128})


def _groups():
    for n, group in enumerate(GROUPS):
        for kv_heads in (1, 3):
            yield DecodeCase(LENGTHS, PAGES[n], heads=group * kv_heads, kv_heads=kv_heads, seqlen_q=1 + n % 2, head_dim=128, head_dim_v=128)


def _tokens():
    for n, new in enumerate(TOKENS):
        yield DecodeCase(LENGTHS, PAGES[n % 6], seqlen_q=new, head_dim=128, head_dim_v=128, options=BANDS[n % 5])
        yield DecodeCase(LENGTHS, 16, seqlen_q=new, options={"causal": True}, heads=7, kv_heads=1)


def _options():
    for name, given in OPTIONS.items():
        for n, size in enumerate((None, 16)):
            yield DecodeCase(LENGTHS, size, seqlen_q=1 + 3 * n, head_dim=128, head_dim_v=128, **given)
        yield DecodeCase(LENGTHS, 3, num_splits=3, **given)
        if name == "together":
            yield DecodeCase(LENGTHS, 16, seqlen_q=5, **given | LATENT)
            yield DecodeCase(LENGTHS, 16, head_dim=256, head_dim_v=256, **given)


def _parts():
    for n, parts in enumerate((1, 2, 3, 7, 64, 256)):
        yield DecodeCase(LENGTHS, PAGES[n], num_splits=parts, head_dim=128, head_dim_v=128, with_sinks=n % 2 == 0)
        yield DecodeCase((5000, 3, 0), 16, num_splits=parts, seqlen_q=4, options={"causal": True})


def _lengths():
    for n, lengths in enumerate(((0,), (0, 0, 0), (1,), (1, 1, 1, 1), (16, 17, 15), (-5, 700, 64), (), (31, 32, 33, 63, 64, 65, 127, 128, 129))):
        for size in (None, 16):
            spare = 0 if 700 in lengths else 2
            yield DecodeCase(lengths, size, spare, lengths_dtype=("int32", "int64")[n % 2], head_dim=128, head_dim_v=128, with_sinks=n % 3 == 0)
    yield DecodeCase((0, 0), 16, spare=0)


def _many():
    """Many sequences, of which each lane of a warp looks at several; more heads than multiprocessors."""
    rng = np.random.default_rng(0)
    mixed = tuple(map(int, rng.integers(0, 90, 300)))
    yield DecodeCase(mixed, 16)
    yield DecodeCase(mixed, None, heads=2, kv_heads=2, lengths_dtype="int64")
    yield DecodeCase(tuple(n * (n > 70) for n in mixed), 3, with_sinks=True)
    yield DecodeCase((0,) * 299 + (2000,), 16)
    yield DecodeCase((2000,) + (0,) * 299, 16, num_splits=5)
    yield DecodeCase(mixed[:129], 16, num_splits=2)
    yield DecodeCase(mixed[:40], 16, heads=64, kv_heads=64)
    yield DecodeCase((200, 3, 77), 64, heads=256, kv_heads=256, head_dim=64)


def _long():
    """One sequence for all multiprocessors, and one among short ones."""
    yield DecodeCase((40_000,), 16, head_dim=128, head_dim_v=128)
    yield DecodeCase((40_001,), None, heads=4, kv_heads=1, seqlen_q=2, options={"causal": True}, head_dim=128, head_dim_v=128)
    yield DecodeCase((3, 20_000, 0, 700, 64), 1, heads=4, kv_heads=1)
    yield DecodeCase((3, 20_000, 0, 700, 64), 64, heads=4, kv_heads=1, num_splits=8, options={"causal": True, "window": (9000, None)})
    yield DecodeCase((9000, 5), 16, **LATENT)


def _strides():
    for n, placement in enumerate(
        (
            Placement(order=(0, 2, 1, 3)),
            Placement(pad=(0, 0, 8, 0)),
            Placement(pad=(1, 2, 1, 8)),
            Placement(step=(1, 1, 1, 2)),
            Placement(order=(2, 0, 1, 3), pad=(0, 3, 0, 8)),
            Placement(step=(1, -1, 1, 1)),
        )
    ):
        yield DecodeCase(LENGTHS, (16, None, 3)[n % 3], cache=placement, head_dim=128, head_dim_v=128)


KINDS = {
    "pages": _pages,
    "head dims": _dims,
    "latent": _latent,
    "groups": _groups,
    "tokens": _tokens,
    "options": _options,
    "parts": _parts,
    "lengths": _lengths,
    "many": _many,
    "long": _long,
    "strides": _strides,
}


def cases(kind, dtypes):
    """Of a kind, each in one of the dtypes in turn."""
    for n, case in enumerate(KINDS[kind]()):
        yield replace(case, dtype=dtypes[n % len(dtypes)], seed=n)


def laid_out(case, library):
    return case if library in libraries.NEGATIVE_STRIDES else replace(case, cache=case.cache.without_negative())


def run_case(case, family, library):
    """The case, twice: with results that the library makes, and given ones; an error as text, '' when all is well, None when the family cannot."""
    if not case.problem.is_empty and dispatch.family(family, "decode").supports(case.problem, libraries.device_of(library)):
        return None
    case = laid_out(case, library)
    try:
        first, again = (case.run(family, library, results=results) for results in (False, True))
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other, err_msg="the same call has other bits")
    except Exception as error:
        if isinstance(error, numbaflash.UnsupportedError) and (case.num_splits or 1) > 1:
            return None  # said when the parts are planned
        return f"{case!r}\n    {type(error).__name__}: {error}"
    return ""


def check_order(family, library, dtype):
    """Which page a key lies in changes no bit, nor what else the pool holds."""
    case = DecodeCase(LENGTHS, 16, seqlen_q=2, options={"causal": True}, head_dim=128, head_dim_v=128, dtype=dtype)
    if dispatch.family(family, "decode").supports(case.problem, libraries.device_of(library)):
        return None
    first, values = case.run(family, library), case.values
    order = np.random.default_rng(1).permutation(len(values["k"]))
    moved = replace(case, seed=case.seed)
    used = (
        (values["page_table"] >= 0)
        & (values["page_table"] < len(order))
        & (np.arange(values["page_table"].shape[1]) * 16 < values["seqlens_k"][:, None])
    )
    table = np.where(used, np.argsort(order)[np.where(used, values["page_table"], 0)], 7)
    vars(moved)["values"] = values | {"k": values["k"][order], "v": values["v"][order], "page_table": table}  # what the cached property would make
    for one, other in zip(first, moved.run(family, library), strict=True):
        np.testing.assert_array_equal(one, other)
    return ""


def check_alone(family, library, dtype):
    """With a number of parts, the bits of a sequence do not depend on the others."""
    case = DecodeCase(LENGTHS, 16, num_splits=3, head_dim=128, head_dim_v=128, dtype=dtype)
    if run_case(case, family, library) is None:
        return None
    out, lse = case.run(family, library)
    for b in range(case.batch):
        one = replace(case, lengths=LENGTHS[b : b + 1])
        names = ("q", "seqlens_k", "page_table")
        vars(one)["values"] = {name: x[b : b + 1] if name in names else x for name, x in case.values.items()}
        alone = one.run(family, library)
        np.testing.assert_array_equal(alone[0][0], out[b])
        np.testing.assert_array_equal(alone[1][0], lse[b])
    return ""


def check_numbers_that_are_no_page(family, library, dtype):
    """Used and out of range: the nearest page is read, as on the CPU."""
    case = DecodeCase(LENGTHS, 16, shared=2, hidden=0.5, head_dim=128, head_dim_v=128, dtype=dtype)
    if dispatch.family(family, "decode").supports(case.problem, libraries.device_of(library)):
        return None
    values = dict(case.values)
    table = values["page_table"].copy()
    table[0, 1], table[3, 0], table[6, 5] = -(2**31), 2**31 - 1, -1
    wrong, clamped = replace(case), replace(case)
    vars(wrong)["values"] = values | {"page_table": table}
    vars(clamped)["values"] = values | {"page_table": np.clip(table, 0, len(values["k"]) - 1)}
    for one, other in zip(wrong.run(family, library), clamped.run(family, library), strict=True):
        np.testing.assert_array_equal(one, other)
    return ""


def check_under_load(family, library, dtype):
    """A race shows as different bits: many repetitions, with lengths that give blocks unequal pieces. None without torch."""
    if library != "torch-cuda":
        return None
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    kind, ran = getattr(torch, dtype), False
    for size, dim, batch, splits in ((16, 128, 40, None), (None, 128, 40, None), (1, 64, 40, None), (16, 256, 20, None), (64, 128, 40, 4)):
        lengths = torch.randint(0, 3000, (batch,), device="cuda", generator=generator, dtype=torch.int32)
        rows = (batch, 3000) if size is None else (batch * -(-3000 // size), size)
        table = None if size is None else torch.randperm(rows[0], device="cuda", generator=generator).reshape(batch, -1).int()
        q = torch.randn(batch, 2, 16, dim, device="cuda", generator=generator).to(kind)
        k, v = (torch.randn(*rows, 4, dim, device="cuda", generator=generator).to(kind) for _ in "kv")
        with dispatch.use_family(family):
            try:
                first = numbaflash.decode(q, k, v, lengths, table, causal=True, num_splits=splits, return_lse=True)
            except numbaflash.UnsupportedError:
                continue
            ran = True
            assert all(torch.isfinite(x).logical_or(x == -torch.inf).all() for x in first)
            for _ in range(30):
                again = numbaflash.decode(q, k, v, lengths, table, causal=True, num_splits=splits, return_lse=True)
                assert all(map(torch.equal, first, again)), f"page size {size}, head dim {dim}: other bits"
    return "" if ran else None


CHECKS = {
    "the order of pages": check_order,
    "a sequence alone": check_alone,
    "numbers that are no page": check_numbers_that_are_no_page,
    "the same bits under load": check_under_load,
}


def dtypes_of(family):
    return ("bfloat16", "float16") if family == "sm90" else ("float32", "float32", "float64")


@cache
def library_here():
    """That reaches the GPU."""
    here = testing.gpu_libraries()
    return "torch-cuda" if "torch-cuda" in here else here[0]


def report(results):
    ran = [x for x in results if x is not None]
    if not ran:
        pytest.skip("this family has no decode kernel for any of these cases on this GPU")
    failures = [x for x in ran if x]
    assert not failures, f"{len(failures)} of {len(ran)} cases fail:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("kind", KINDS)
def test_grid(gpu, kind):
    report([run_case(case, gpu.family, gpu.library) for case in cases(kind, dtypes_of(gpu.family))])


@pytest.mark.parametrize("check", CHECKS)
def test_checks(gpu, check):
    report([CHECKS[check](gpu.family, gpu.library, dtypes_of(gpu.family)[0])])


@pytest.mark.parametrize("library", ["cupy", "torch-cuda", "numba", "jax"])
def test_libraries(gpu, library):
    """One case of all kinds of arrays in each library; JAX has no results that are given."""
    if library != "jax" and library not in testing.gpu_libraries():
        pytest.skip(f"needs {library}")
    if library == "jax":
        jax = pytest.importorskip("jax")
        if jax.default_backend() != "gpu":
            pytest.skip("this JAX has no GPU")
    for case in (CASES["everything"], CASES["parts, contiguous"]):
        case = replace(case, dtype="float16" if gpu.family == "sm90" else "float32")
        if gpu.reasons(case.problem, "decode"):
            continue
        case.run(gpu.family, library)


def _work(job):
    """(family, error) of a job: a case, or a function of family and library."""
    family, what = job
    try:
        return family, what(family, library_here()) if callable(what) else run_case(what, family, library_here())
    except Exception as error:
        return family, f"{what}\n    {type(error).__name__}: {error}"


def jobs_of(family):
    """Everything of a family, long ones first."""
    dtypes = dtypes_of(family)
    first = [(family, partial(check, dtype=dtypes[0])) for check in CHECKS.values()]
    return first + [(family, case) for kind in reversed(KINDS) for case in cases(kind, dtypes)]


def main(processes: int) -> int:
    start = time.monotonic()
    families = [name for name in dispatch.FAMILIES if name != "cpu"]
    jobs = [job for family in families for job in jobs_of(family)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(_work, jobs, chunksize=1))
    for family in families:
        errors = [error for each, error in results if each == family]
        failures = [error for error in errors if error]
        print(f"{family}: {len(errors)} jobs, {len(failures)} fail, {errors.count(None)} it cannot compute", *failures[:20], sep="\n", flush=True)
    print(f"{time.monotonic() - start:.0f} s")
    return int(any(error for _, error in results))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
