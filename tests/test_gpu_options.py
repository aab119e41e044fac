"""Options of the forward and the gradients on every GPU family: each one alone and all together, with every band, where tiles and lengths make it
delicate.

``python tests/test_gpu_options.py [PROCESSES]`` runs the cases of the Hopper kernels in so many processes at once.
"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from numbaflash import dispatch, testing
from numbaflash.testing import BackwardCase, Case, Placement

pytestmark = pytest.mark.gpu

B, H, SQ, SK = 2, 4, 300, 334
SCORES = (B, H, SQ, SK)
OPTIONS = {
    "softcap": dict(softcap=1.0),
    "softcap, far away": dict(softcap=1000.0, values="big"),
    "alibi": dict(alibi_shape=(H,)),
    "alibi, every entry": dict(alibi_shape=(B, H), scale=-0.2),
    "sinks": dict(with_sinks=True, scale=-0.1),
    "lengths": dict(lengths_q="random", lengths_k="random", hidden="nan"),
    "lengths, edges": dict(lengths_q="edges", lengths_k="edges", lengths_dtype="int64", hidden="inf"),
    "mask": dict(mask_shape=SCORES, hidden="nan"),
    "mask, keys": dict(mask_shape=(B, 1, 1, SK), hidden="nan", values="nan"),
    "mask, rows": dict(mask_shape=(SQ, 1), hidden="nan"),
    "mask, blocks": dict(mask_shape=(SQ, SK), mask_values="blocks", hidden="inf"),
    "mask, few keys": dict(mask_shape=SCORES, mask_values="rows", hidden="nan"),
    "mask, reversed": dict(mask_shape=(B, 1, SQ, SK), mask=Placement(pad=(0, 0, 0, 1)), hidden="nan"),
    "mask, documents": dict(mask_shape=(B, 1, SQ, SK), mask_values="documents", hidden="nan"),
    "mask, sliding": dict(mask_shape=(SQ, SK), mask_values="sliding", hidden="inf"),
    "mask, all": dict(mask_shape=SCORES, mask_values="all"),
    "mask, none": dict(mask_shape=SCORES, mask_values="none", hidden="nan"),
    "block mask": dict(mask_shape=SCORES, as_blocks=True, hidden="nan"),
    "block mask, keys": dict(mask_shape=(B, 1, 1, SK), as_blocks=True, hidden="nan", values="nan"),
    "block mask, blocks": dict(mask_shape=(1, H, SQ, SK), mask_values="blocks", as_blocks=True, hidden="inf"),
    "block mask, documents": dict(mask_shape=(B, 1, SQ, SK), mask_values="documents", as_blocks=True, hidden="nan"),
    "block mask, sliding": dict(mask_shape=(SQ, SK), mask_values="sliding", as_blocks=True, hidden="nan"),
    "block mask, few keys": dict(mask_shape=SCORES, mask_values="rows", as_blocks=True, hidden="nan"),
    "block mask, lengths": dict(
        mask_shape=(SQ, SK), mask_values="sliding", as_blocks=True, lengths_q="random", lengths_k="random", hidden="nan"
    ),
    "bias": dict(bias_shape=SCORES, bias_values="big"),
    "bias, float32": dict(bias_shape=SCORES, bias_dtype="float32", bias_values="lowest"),
    "bias, float16": dict(bias_shape=(H, SQ, SK), bias_dtype="float16", bias_values="infinite", hidden="nan"),
    "bias, heads": dict(bias_shape=(H, 1, 1)),
    "bias, keys first": dict(bias_shape=(B, 1, SQ, SK), bias=Placement(order=(0, 1, 3, 2))),
    "dropout": dict(dropout=0.3, dropout_seed=2**63 + 5, hidden="nan"),
}  # fmt: skip
TOGETHER = dict(
    **dict(mask_shape=(B, 1, SQ, SK), bias_shape=(H, 1, SK), alibi_shape=(B, H), softcap=2.0, with_sinks=True),
    **dict(dropout=0.1, dropout_seed=77, lengths_q="random", lengths_k="random", hidden="nan"),
)
OPTIONS |= {"together": TOGETHER, "together, no dropout": TOGETHER | {"dropout": 0.0, "bias_dtype": "float32", "lengths_q": "edges"}}
OPTIONS |= {f"{name}, block mask": OPTIONS[name] | {"as_blocks": True} for name in ("together", "together, no dropout")}
BANDS = ({}, {"causal": True}, {"window": (50, 20)}, {"causal": "top_left", "window": (70, None)})
DIMS = ((64, 64), (128, 128), (256, 256))


def cases(name, dims, dtype="bfloat16"):
    """Of an option: every band, with grouped heads and without, in turn."""
    for number, band in enumerate(BANDS):
        shape = dict(batch=B, seqlen_q=SQ, seqlen_k=SK, heads=H, kv_heads=(2, 4)[number % 2], head_dim=dims[0], head_dim_v=dims[1])
        yield Case(dtype=dtype, **shape, **band, **OPTIONS[name])


def gradient_case(number=0, **given):
    """With gradients of all that has one, dlse and a deterministic order in turn."""
    needs = ("q", "k", "v", *["bias"] * ("bias_shape" in given), *["sinks"] * ("with_sinks" in given))
    return BackwardCase(needs=needs, with_dlse=number % 2 == 0, deterministic=number % 4 in (1, 2), **given)


def gradient_cases(name, dims, dtype="bfloat16"):
    """The same of the gradients."""
    for number, band in enumerate(BANDS):
        shape = dict(batch=B, seqlen_q=SQ, seqlen_k=SK, heads=H, kv_heads=(4, 2)[number % 2], head_dim=dims[0], head_dim_v=dims[1])
        yield gradient_case(number, dtype=dtype, **shape, **band, **OPTIONS[name])


def some_gradients(name):
    """Only of some results, and of head dims that differ."""
    shape = dict(batch=B, seqlen_q=SQ, seqlen_k=SK, heads=H, kv_heads=2, dtype="float16", causal=True)
    options = [x for x in ("bias", "sinks") if f"{x}_shape" in OPTIONS[name] or f"with_{x}" in OPTIONS[name]]
    for needs, (d, dv) in (
        (("q",), (128, 64)),
        (("k", *options), (72, 200)),
        (("v",), (256, 256)),
        (("q", "k"), (64, 64)),
        (tuple(options), (96, 96)),
    ):
        if needs:
            yield BackwardCase(needs=needs, head_dim=d, head_dim_v=dv, **shape, **OPTIONS[name])


def long_cases(name):
    """Tiles of long sequences; few heads, as mask and bias are as large as the scores."""
    shapes = dict(batch=1, heads=2, seqlen_q=200, seqlen_k=2200)
    option = {key: tuple({SQ: 200, SK: 2200, B: 1, H: 2}.get(n, n) for n in x) if key.endswith("shape") else x for key, x in OPTIONS[name].items()}
    for (d, dv), band in (((64, 64), {}), ((128, 128), {"causal": True}), ((128, 128), {}), ((192, 128), {}), ((256, 256), {})):
        yield Case(dtype="float16", kv_heads=1, head_dim=d, head_dim_v=dv, **shapes, **band, **option)


def run_all(gpu, listed):
    listed = [case for case in listed if not gpu.reasons(case.problem, case.direction)]
    if not listed:
        pytest.skip(f"family {gpu.family} has none of these")
    gpu.build(listed)
    failures = []
    for case in listed:
        try:
            gpu.run(case)
        except AssertionError as error:
            failures.append(f"{case!r}\n    {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(listed)} cases fail:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("name", OPTIONS)
def test_each(gpu, name):
    run_all(gpu, itertools.chain.from_iterable(cases(name, dims) for dims in DIMS))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(gpu, name):
    run_all(gpu, itertools.chain.from_iterable(gradient_cases(name, dims) for dims in DIMS))


@pytest.mark.parametrize("name", OPTIONS)
def test_some_gradients(gpu, name):
    run_all(gpu, some_gradients(name))


@pytest.mark.parametrize("name", OPTIONS)
def test_long(gpu, name):
    run_all(gpu, long_cases(name))


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_other_dtypes(gpu, dtype):
    for kind in (cases, gradient_cases):
        run_all(gpu, itertools.chain.from_iterable(kind(name, (128, 64), dtype) for name in ("together", "together, no dropout")))


def test_the_same_bits_under_load(gpu):
    """A race shows as different bits: many tiles, masks and lengths of which V holds NaN where nobody looks."""
    torch = pytest.importorskip("torch")
    import numbaflash

    if "bfloat16" not in gpu.dtypes:
        pytest.skip(f"family {gpu.family} has no bfloat16")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(4, 1000, 16, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in "qkv")
    lengths = torch.tensor([1000, 3, 700, 640], device="cuda")
    for entry, length in enumerate(lengths.tolist()):
        v[entry, length:] = torch.nan
    mask = torch.rand(1, 1, 1000, 1000, device="cuda", generator=generator) < 0.5
    mask[..., 5], v[:, 5] = False, torch.nan
    for options in ({"seqlens_k": lengths, "mask": mask}, {"seqlens_k": lengths, "mask": mask, "causal": True, "dropout": 0.1, "seed": 3}):
        with dispatch.use_family(gpu.family):
            first = numbaflash.forward(q, k, v, return_lse=True, **options)
            assert all(torch.isfinite(x).logical_or(x == -torch.inf).all() for x in first)
            for _ in range(20):
                again = numbaflash.forward(q, k, v, return_lse=True, **options)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gradients_have_the_same_bits_under_load(gpu):
    """The same of the gradients, in a deterministic order; padding of q and dout holds NaN, too."""
    torch = pytest.importorskip("torch")
    import numbaflash

    if "bfloat16" not in gpu.dtypes:
        pytest.skip(f"family {gpu.family} has no bfloat16")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(4, 1000, 8, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
    bias = torch.randn(8, 1000, 1000, device="cuda", generator=generator)
    lengths = torch.tensor([1000, 3, 700, 640], device="cuda")
    for entry, length in enumerate(lengths.tolist()):
        for x in (q, k, v, dout):
            x[entry, length:] = torch.nan
    mask = torch.rand(1, 1, 1000, 1000, device="cuda", generator=generator) < 0.5
    mask[..., 5], mask[:, :, 7] = False, False
    k[:, 5], v[:, 5], q[:, 7], dout[:, 7] = (torch.nan,) * 4
    plain = {"seqlens_q": lengths, "seqlens_k": lengths, "mask": mask, "causal": True}
    for options in (plain, plain | {"dropout": 0.1, "seed": 3}, plain | {"bias": bias}):
        needs = ("q", "k", "v", "bias") if "bias" in options else ("q", "k", "v")
        with dispatch.use_family(gpu.family):
            out, lse = numbaflash.forward(q, k, v, return_lse=True, **options)
            first = numbaflash.backward(dout, q, k, v, out, lse, deterministic=True, needs=needs, **options)
            assert all(torch.isfinite(x).all() for x in first)
            for _ in range(10):
                again = numbaflash.backward(dout, q, k, v, out, lse, deterministic=True, needs=needs, **options)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_rules_on_the_device(gpu):
    """Block masks are built where their arrays lie, and are what they are on the host."""
    torch = pytest.importorskip("torch")
    from numbaflash import BlockMask

    ids, lengths = torch.arange(700, device="cuda") // 90, torch.tensor([3, 400, 700], device="cuda")
    dense = torch.rand(2, 1, 300, 700, device="cuda") < 0.5
    dense[..., :128, :256], dense[..., 128:, 256:512] = True, False

    def build(where):
        here = ids.to(where)
        return {
            "mask": BlockMask.from_mask(dense.to(where)),
            "mask, strided": BlockMask.from_mask(dense.to(where).transpose(2, 3)),
            "block causal": BlockMask.block_causal(300, 700, block=100, like=here),
            "documents": BlockMask.documents(here[None, :300].int(), here.int()),
            "documents, batch": BlockMask.documents(torch.stack([here, here // 2])),
            "prefix": BlockMask.prefix_lm(300, 700, prefix=lengths.to(where)),
            "dilated": BlockMask.dilated(300, 700, dilation=3, window=(200, 5), like=here),
            "sliding, global": BlockMask.sliding_global(300, 700, window=(100, 30), n_global=70, like=here),
        }

    for (name, found), known in zip(build("cuda").items(), build("cpu").values(), strict=True):
        assert found.words.is_cuda and found.shape == known.shape and found.counts == known.counts, name
        assert torch.equal(found.to_dense().cpu(), known.to_dense()) and found.density == known.density, name


def test_a_call_with_a_mask_can_be_captured(gpu):
    """The lists are made on the device: a graph that was captured heeds another mask in the same memory."""
    torch = pytest.importorskip("torch")
    import numbaflash

    q, k, v = (torch.randn(1, 640, 4, 64, device="cuda", dtype=torch.bfloat16 if "bfloat16" in gpu.dtypes else torch.float32) for _ in "qkv")
    mask = torch.zeros(1, 1, 640, 640, device="cuda", dtype=torch.bool)
    with dispatch.use_family(gpu.family):
        numbaflash.forward(q, k, v, mask=mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = numbaflash.forward(q, k, v, mask=mask)
        for _ in range(3):
            mask.copy_((torch.rand(10, 10, device="cuda") < 0.3).repeat_interleave(64, 0).repeat_interleave(64, 1))
            graph.replay()
            assert torch.equal(out, numbaflash.forward(q, k, v, mask=mask))


def _run(case):
    run = testing.run_case if case.direction == "forward" else testing.run_backward_case
    library = "torch-cuda" if "torch-cuda" in testing.gpu_libraries() else next(iter(testing.gpu_libraries()))
    try:
        run(case, "sm90", library)
    except Exception as error:
        return f"{case!r}\n    {type(error).__name__}: {error}"


def main(processes: int) -> int:
    start = time.monotonic()
    listed = [case for name in OPTIONS for dims in DIMS for case in cases(name, dims)][::3]
    listed += [case for name in OPTIONS for case in long_cases(name)][::2]
    listed += [case for name in OPTIONS for dims in DIMS for case in gradient_cases(name, dims)][::2]
    listed += [case for name in OPTIONS for case in some_gradients(name)][::3]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        failures = [found for found in pool.map(_run, listed, chunksize=1) if found]
    print(f"{len(listed)} cases, {len(failures)} fail, {time.monotonic() - start:.0f} s", *failures[:30], sep="\n", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
