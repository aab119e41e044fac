"""`merge`: any number of states of any shape, its kernel, and its derivatives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numbaflash as nf
from numbaflash import toolchain
from numbaflash.kernels.states.launch import request


def states(count, shape=(2, 5, 3, 7), dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    *leading, rows, heads, _ = shape
    outs = [rng.standard_normal(shape).astype(dtype) for _ in range(count)]
    lses = [(3 * rng.standard_normal((*leading, heads, rows))).astype(np.float64 if dtype == np.float64 else np.float32) for _ in range(count)]
    for n, lse in enumerate(lses):  # rows without a key, which hold anything; one that no part has a key for
        lse[..., n % rows] = -np.inf
        lse[..., 0, -1] = -np.inf
    for out, lse in zip(outs, lses, strict=True):
        out[np.swapaxes(lse, -1, -2) == -np.inf] = np.nan
    return outs, lses


def expected(outs, lses):
    wide = [x.astype(np.float64) for x in lses]
    lse = np.logaddexp.reduce(wide)
    base = np.where(lse == -np.inf, 0, lse)
    total = 0
    for out, part in zip(outs, wide, strict=True):
        weight = np.swapaxes(np.exp(part - base), -1, -2)[..., None]
        total = total + np.where(weight == 0, 0, out.astype(np.float64)) * weight
    return total, lse


def check(got, want, rtol):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (9, 3, 7), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_any_number_of_states(count, shape):
    outs, lses = states(count, shape)
    check(nf.merge(outs, lses), expected(outs, lses), 1e-5)


def test_states_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="or 3 \\(total_q, heads, head_dim_v\\) where sequences are packed; got 2 axes"):
        nf.merge([np.zeros((2, 3), np.float32)], [np.zeros(2, np.float32)])


def test_packed_parts_are_the_whole():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 12, 4, 16))
    ends = np.array([0, 5, 5, 12])
    parts = []
    for keys in (slice(0, 3), slice(3, 5)):  # of the first sequence, whose keys are cut in two; the last one's are in the first part
        cut = np.concatenate([np.arange(12)[keys], np.arange(5, 12) if keys.start == 0 else []]).astype(int)
        n = keys.stop - keys.start
        parts.append(nf.forward_varlen(q, k[cut], v[cut], ends, np.array([0, n, n, len(cut)]), return_lse=True))
    check(nf.merge(*zip(*parts, strict=True)), nf.forward_varlen(q, k, v, ends, ends, return_lse=True), 1e-12)


@pytest.mark.parametrize("count", [1, 3])
def test_torch_differentiates_it_twice(count):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    outs, lses = states(count, dtype=np.float64)
    outs = [np.nan_to_num(x) for x in outs]  # gradcheck's numbers must be finite
    lses = [np.where(x == -np.inf, -1e3, x) for x in lses]
    tensors = [torch.from_numpy(x).requires_grad_() for x in (*outs, *lses)]

    def merged(*tensors):
        return nf.merge(tensors[:count], tensors[count:])

    assert torch.autograd.gradcheck(merged, tensors) and torch.autograd.gradgradcheck(merged, tensors)


def test_rows_without_a_key_have_no_gradient_in_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    outs, lses = ([torch.from_numpy(x).requires_grad_() for x in side] for side in states(3))
    out, lse = nf.merge(outs, lses)
    (out.sum() + torch.where(lse == -torch.inf, 0.0, lse).sum()).backward()
    for part, part_lse in zip(outs, lses, strict=True):
        unseen = (part_lse == -torch.inf).transpose(-1, -2)
        assert (part.grad[unseen] == 0).all() and (part_lse.grad[part_lse == -torch.inf] == 0).all()
        assert torch.isfinite(part.grad).all() and torch.isfinite(part_lse.grad).all() and part.grad[~unseen].abs().min() > 0
    only = torch.from_numpy(states(3)[0][0]).requires_grad_()
    nf.merge([only, *(x.detach() for x in outs[1:])], [x.detach() for x in lses])[0].sum().backward()
    assert torch.equal(only.grad, outs[0].grad)


def test_jax_differentiates_it():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    outs, lses = states(3)

    def loss(outs, lses):
        out, lse = nf.merge(outs, lses)
        return (out**2).sum() + jax.numpy.where(lse == -np.inf, 0.0, lse).sum()

    got = jax.jit(jax.grad(loss, (0, 1)))([jax.numpy.asarray(x) for x in outs], [jax.numpy.asarray(x) for x in lses])
    tensors = [[torch.from_numpy(x).requires_grad_() for x in side] for side in (outs, lses)]
    out, lse = nf.merge(*tensors)
    ((out**2).sum() + torch.where(lse == -torch.inf, 0.0, lse).sum()).backward()
    for side, other in zip(got, tensors, strict=True):
        check(side, [x.grad.numpy() for x in other], 1e-5)


@pytest.mark.parametrize("arch", [(8, 0), (9, 0)])
def test_the_kernel_compiles_without_spills(arch):
    for dtype, result, parts in (("bfloat16", "bfloat16", 2), ("float16", "float32", 16), ("float64", "float64", 3), ("float32", "bfloat16", 4)):
        wanted = request(dtype, result, parts, arch)
        report = toolchain.ptxas_report(toolchain.compile_ptx(wanted), arch)
        assert (report.stack_bytes, report.spill_stores, report.spill_loads) == (0, 0, 0)


SIMULATED = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
import ml_dtypes
import test_merge as cases
from numbaflash.kernels.states.launch import prepare
from numbaflash.toolchain import simulator
for dtype, result, count, shape in [
    ("float32", "float32", 3, (2, 3, 2, 5)), ("float64", "float64", 2, (4, 3, 7)),
    ("bfloat16", "float32", 2, (1, 3, 2, 5)), ("float16", "float16", 4, (1, 2, 3, 9)),
]:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    outs, lses = cases.states(count, shape, np.float64 if dtype == "float64" else np.float32)
    outs = [x.astype(kind) for x in outs]
    want = cases.expected(outs, lses)
    out, lse = np.full(shape, np.nan, result), np.full_like(lses[0], np.nan)
    views = [x.swapaxes(0, 1).copy().swapaxes(0, 1) for x in outs]
    layouts = [[(x.shape, x.strides) for x in side] for side in (views, lses, (out, lse))]
    launch = prepare(dtype, result, *layouts[:2], *layouts[2], make=simulator.prepare)
    launch(tuple(x.ctypes.data for x in (*views, *lses, out, lse)), 0)
    cases.check((out, lse), want, 1e-3 if result == "float16" else 1e-5)
print("as expected")
"""


def test_the_kernel_in_the_simulator():
    code = SIMULATED.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, timeout=300)
    assert "as expected" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch", "numba"])
def test_on_a_gpu(library):
    for count, dtype in ((1, np.float32), (2, np.float16), (40, np.float16), (3, np.float64)):
        outs, lses = states(count, dtype=dtype)
        if library == "torch":
            torch = pytest.importorskip("torch", reason="PyTorch is not installed")
            got = nf.merge(*([torch.from_numpy(x).cuda() for x in side] for side in (outs, lses)))
            got = [x.cpu().numpy() for x in got]
        elif library == "cupy":
            cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
            got = [cupy.asnumpy(x) for x in nf.merge(*([cupy.asarray(x) for x in side] for side in (outs, lses)))]
        else:
            from numba import cuda

            made = nf.merge(*([cuda.to_device(x) for x in side] for side in (outs, lses)))
            cuda.synchronize()
            got = [x.copy_to_host() for x in made]
        check(got, expected(outs, lses), 1e-2 if dtype == np.float16 else 1e-5)
