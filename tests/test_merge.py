"""`numbaflash.merge`: states of any shape in every library, the GPU's kernel in the CUDA simulator, and derivatives in PyTorch and JAX."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import merge_cases
import numpy as np
import pytest
from merge_cases import CASES, MergeCase

import numbaflash as nf
from numbaflash import toolchain
from numbaflash.kernels.access import Access, widest
from numbaflash.kernels.states.kernel import MergeConfig


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_cases(name, library):
    case = CASES[name]
    if library == "torch":
        case = replace(case, **{part: getattr(case, part).without_negative() for part in ("out", "lse")})
    case.run(library)


@pytest.fixture(scope="module")
def simulator():
    """Error (or None) of every case in the simulator."""
    path = Path(merge_cases.__file__)
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join([str(path.parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment)
    return {line["case"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}, done


@pytest.mark.parametrize("name", merge_cases.SIMULATED)
def test_the_kernel_in_the_simulator(simulator, name):
    results, done = simulator
    assert name in results, done.stderr[-4000:]
    assert results[name] is None, results[name]


CONFIGS = [
    *(MergeConfig(Access(dtype, 16), parts, False, False, False, 256) for dtype in ("bfloat16", "float32", "float64") for parts in (2, 16)),
    *(
        MergeConfig(Access(dtype, size), 4, False, False, False, 256)
        for dtype, size in (("float16", 2), ("bfloat16", 4), ("float16", 8), ("float64", 8))
    ),
    MergeConfig(Access("bfloat16", 16), 16, True, True, False, 256),
    MergeConfig(Access("float16", 16), 8, True, False, True, 256),
]


@pytest.mark.parametrize("arch", [(7, 5), (9, 0)])
def test_kernels_compile_without_spills(arch):
    for config in CONFIGS:
        request = toolchain.KernelRequest("numbaflash.kernels.states.kernel:build", config, arch)
        ptx = toolchain.compile_ptx(request)
        report = toolchain.ptxas_report(ptx, arch)
        assert (report.stack_bytes, report.spill_stores, report.spill_loads) == (0, 0, 0), config
        assert ("ld.global.v4" in ptx.text) == (config.access.size == 16 and config.access.dtype != "float64")


@pytest.mark.parametrize("parts", [2, 16, 40])
def test_launches_describe_what_kernels_take(parts):
    from numbaflash.dispatch import STATE_OPERANDS, Device, Layout, contiguous_strides
    from numbaflash.kernels.states.launch import Merge
    from numbaflash.toolchain.launch import check_launch

    made = []

    def checked(request, parameters, *, grid, threads, device, operands):
        made.append(request.config)
        check_launch(toolchain.compile_ptx(request), parameters, grid, threads, 0, 0)
        assert operands == STATE_OPERANDS

    shape, lse_shape = (1, 7, 3, 64), (1, 3, 7)
    states = [[Layout(x, contiguous_strides(x, size))] * parts for x, size in ((shape, 2), (lse_shape, 4))]
    with mock.patch.object(toolchain, "prepare", checked):
        Merge("bfloat16", *states, device=Device("cuda", 0, (9, 0)))
    assert [(each.parts, each.carried, each.carries) for each in made] == {
        2: [(2, False, False)],
        16: [(16, False, False)],
        40: [(16, False, True), (16, True, True), (8, True, False)],
    }[parts]


def test_the_widest_access():
    from numbaflash.dispatch import Layout, contiguous_strides

    def of(dtype, shape, strides=None, alignment=16):
        size = {"float16": 2, "float32": 4, "float64": 8}[dtype]
        return widest(dtype, shape[-1:], [Layout(shape, strides or contiguous_strides(shape, size), alignment)]).size

    assert [of(dtype, (3, 16)) for dtype in ("float16", "float32", "float64")] == [16, 16, 16]
    assert [of("float16", (3, n)) for n in (8, 12, 6, 5)] == [16, 8, 4, 2] and of("float64", (3, 3)) == 8
    assert of("float16", (3, 16), alignment=4) == 4 and of("float16", (3, 16), (36, 2)) == 4 and of("float16", (1, 16), (36, 2)) == 16
    assert of("float16", (3, 16), (32, 4)) == 2 and of("float16", (3, 16), (0, 2)) == 16 and of("float16", (3, 16), (-32, 2)) == 16


def test_packed_sequences():
    """The keys of each sequence in two parts."""
    rng = np.random.default_rng(0)
    lengths = (5, 0, 7)
    q = rng.standard_normal((12, 4, 16), dtype=np.float32)
    keys = [rng.standard_normal((2, n, 2, 16), dtype=np.float32) for n in lengths]

    def attend(part):
        some = [x[:, part] for x in keys]
        ends = np.cumsum([0, *(x.shape[1] for x in some)])
        return nf.forward_varlen(q, *np.concatenate(some, axis=1), np.cumsum([0, *lengths]), ends, return_lse=True)

    want = attend(slice(None))
    for cut in (0, 2, 6):
        out, lse = nf.merge(*zip(attend(slice(cut)), attend(slice(cut, None)), strict=True))
        assert out.shape == (12, 4, 16) and lse.shape == (4, 12)
        np.testing.assert_allclose(out, want[0], atol=1e-6)
        np.testing.assert_allclose(lse, want[1], atol=1e-6)


# Derivatives

DIFFERENTIATED = MergeCase(parts=3, dtype="float64", batch=1, seqlen_q=3, heads=2, head_dim=4)


def torch_states(case=DIFFERENTIATED, requires_grad=True):
    return [[x.clone().requires_grad_(requires_grad) for x in each] for each in case.arrays("torch")]


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_in_torch(packed):
    import torch

    outs, lses = torch_states(replace(DIFFERENTIATED, packed=packed))

    def merged(*states):
        return nf.merge(states[:3], states[3:])

    assert torch.autograd.gradcheck(merged, (*outs, *lses), check_forward_ad=False)
    assert torch.autograd.gradgradcheck(merged, (*outs, *lses))
    out, lse = merged(*outs, *lses)
    assert out.requires_grad and lse.grad_fn is out.grad_fn
    with torch.no_grad():
        assert not merged(*outs, *lses)[0].requires_grad


@pytest.mark.parametrize("of", ["out", "lse"])
@pytest.mark.parametrize("needed", [(0,), (4,), (1, 5)])
def test_gradients_of_some_in_torch(of, needed):
    import torch

    states = [x.detach() for each in torch_states() for x in each]
    for n in needed:
        states[n].requires_grad_()

    def merged(*some):
        given = [some[needed.index(n)] if n in needed else x for n, x in enumerate(states)]
        return nf.merge(given[:3], given[3:])[of == "lse"]

    if of == "lse" and needed == (0,):
        (gradient,) = torch.autograd.grad(merged(states[0]).sum(), states[0], allow_unused=True)
        assert gradient is None
    else:
        assert torch.autograd.gradcheck(merged, tuple(states[n] for n in needed))


def test_gradients_of_hidden_rows_in_torch():
    """They are 0, whatever the outs hold; and the others are as if the hidden rows were not there."""
    import torch

    case = replace(DIFFERENTIATED, hidden=np.nan)
    outs, lses = torch_states(case)
    weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape) for x in (outs[0], lses[0])]

    def loss(outs, lses):
        out, lse = nf.merge(outs, lses)
        return (out * weights[0]).sum() + (torch.where(lse == -torch.inf, 0, lse) * weights[1]).sum()

    gradients = torch.autograd.grad(loss(outs, lses), (*outs, *lses), create_graph=True)
    small = [torch.where(torch.isneginf(x), -1e3, x).detach().requires_grad_() for x in lses]
    zeroed = [torch.where(torch.isnan(x), 0, x).detach().requires_grad_() for x in outs]
    want = torch.autograd.grad(loss(zeroed, small), (*zeroed, *small))
    nothing = torch.isneginf(torch.stack(lses)).all(0)  # of no key in any part: their merge has no key, and theirs has
    for n, (got, expected) in enumerate(zip(gradients, want, strict=True)):
        hidden = torch.isneginf(lses[n % 3])
        rows = (lambda x: x) if n >= 3 else (lambda x: x.transpose(-3, -2))
        assert not rows(got)[hidden].any()
        torch.testing.assert_close(rows(got)[~nothing], rows(expected)[~nothing])
    second = torch.autograd.grad(sum((x * x).sum() for x in gradients), (*outs, *lses))
    assert not any(torch.isnan(x).any() for x in second)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_have_the_dtypes_of_their_states(dtype):
    import torch

    case = replace(DIFFERENTIATED, dtype=dtype)
    outs, lses = torch_states(case)
    exact = [[x.detach().double().requires_grad_() for x in each] for each in (outs, lses)]
    found = []
    for states in ((outs, lses), exact):
        out, lse = nf.merge(*states)
        found.append(torch.autograd.grad(out.double().square().sum() + lse.double().sum(), (*states[0], *states[1])))
    for got, want, state in zip(*found, (*outs, *lses), strict=True):
        assert got.dtype == state.dtype
        torch.testing.assert_close(got.double(), want, rtol=0, atol=4 * torch.finfo(getattr(torch, dtype)).eps)


def test_torch_differentiates_it_forward():
    import torch
    from torch.autograd import forward_ad

    states = [x.detach() for each in torch_states() for x in each]
    tangents = [torch.full_like(x, 0.1 * n) for n, x in enumerate(states)]

    def merged(*states):
        return nf.merge(states[:3], states[3:])

    with forward_ad.dual_level():
        found = merged(*map(forward_ad.make_dual, states, tangents))
        got = [forward_ad.unpack_dual(x).tangent for x in found]
    step = 1e-6
    ends = [merged(*(x + sign * step * t for x, t in zip(states, tangents, strict=True))) for sign in (1, -1)]
    for x, above, below in zip(got, *ends, strict=True):
        torch.testing.assert_close(x, (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


def test_torch_records_it():
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    states = [x.detach() for each in torch_states(replace(DIFFERENTIATED, hidden=np.nan)) for x in each]

    def gradients(*states):
        states = [x.detach().requires_grad_() for x in states]
        out, lse = nf.merge(states[:3], states[3:])
        return torch.autograd.grad(out.sum() + torch.where(torch.isneginf(lse), 0, lse).sum(), states)

    want = gradients(*states)
    for function in (make_fx(gradients)(*states), torch.compile(gradients, backend="eager")):
        for got, x in zip(function(*states), want, strict=True):
            torch.testing.assert_close(got, x)


def test_derivatives_in_jax():
    import jax
    import jax.numpy as jnp
    import torch

    case = replace(DIFFERENTIATED, dtype="float32", hidden=np.nan)
    outs, lses = torch_states(case)

    def loss(outs, lses, xp=jnp):
        out, lse = nf.merge(outs, lses)
        return (out * out).sum() + xp.where(lse == -xp.inf, 0.0, lse).sum()

    want = torch.autograd.grad(loss(outs, lses, torch), (*outs, *lses))
    given = [[jnp.asarray(x.detach().numpy()) for x in each] for each in (outs, lses)]
    gradients = jax.grad(loss, argnums=(0, 1))
    for found in (gradients(*given), jax.jit(gradients)(*given)):
        for got, x in zip([*found[0], *found[1]], want, strict=True):
            np.testing.assert_allclose(got, x.numpy(), rtol=1e-5, atol=1e-6)
    batched = [[jnp.stack([x, x + 1]) for x in each] for each in given]
    many = jax.vmap(gradients)(*batched)
    np.testing.assert_allclose(many[1][0][0], want[3].numpy(), rtol=1e-5, atol=1e-6)
    second = jax.grad(lambda lses: sum((x * x).sum() for x in gradients(given[0], lses)[1]))(given[1])
    assert not any(np.isnan(x).any() for x in second)


def test_derivatives_in_jax_of_high_order():
    import jax
    import jax.numpy as jnp
    from jax.test_util import check_grads

    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64  # before JAX 0.8
    values = DIFFERENTIATED.values()
    with enable_x64(True):
        check_grads(nf.merge, [[jnp.asarray(x) for x in each] for each in values], order=2, modes=("fwd", "rev"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("library", ["cupy", "torch-cuda", "numba"])
def test_cases_on_a_gpu(name, library):
    from numbaflash import testing

    case = CASES[name]
    if library not in testing.gpu_libraries():
        pytest.skip(f"{library} reaches no GPU here")
    if library == "numba" and case.dtype == "bfloat16":
        pytest.skip("Numba device arrays have no bfloat16")
    if library == "torch-cuda":
        case = replace(case, **{part: getattr(case, part).without_negative() for part in ("out", "lse")})
    case.run(library)


@pytest.mark.gpu
def test_on_a_gpu_it_can_be_captured_and_differentiated():
    import torch

    case = MergeCase(parts=20, dtype="bfloat16", head_dim=128, hidden=np.nan)
    outs, lses = case.arrays("torch-cuda")
    want = nf.merge(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = nf.merge(outs, lses)
    for x in found:
        x.fill_(7)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    outs, lses = ([x.cuda().requires_grad_() for x in each] for each in torch_states())
    assert torch.autograd.gradcheck(lambda *states: nf.merge(states[:3], states[3:]), (*outs, *lses))
    assert torch.autograd.gradgradcheck(lambda *states: nf.merge(states[:3], states[3:]), (*outs, *lses))
