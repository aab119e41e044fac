"""numbaflash.torch: gradients in eager mode and under torch.compile, autocast, and torch's own attention by its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from attention import TOLERANCE

import numbaflash
from numbaflash import api, dispatch
from numbaflash.problem import UnsupportedError

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import numbaflash.torch  # noqa: E402
from numbaflash.torch import attention, replace_sdpa, scaled_dot_product_attention  # noqa: E402

F = torch.nn.functional
ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 24))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def made(device="cpu", dtype=torch.float32, shapes=SHAPES, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(requires_grad) for shape in shapes]


def dense(q, k, v, *, scale=None, causal=False, window=None, return_lse=False):
    """The same by torch operations in the dtype of the arguments, differentiable any number of times."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    place = torch.arange(q.shape[1])[:, None] + (0 if causal == "top_left" else k.shape[1] - q.shape[1])
    key = torch.arange(k.shape[1])[None]
    left, right = window or (None, None)
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        seen &= key <= place
    if left is not None:
        seen &= key >= place - left
    if right is not None:
        seen &= key <= place + right
    seen = seen.to(q.device)
    some = seen.any(1)
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.masked_fill(~some[:, None], 0.0).logsumexp(-1).masked_fill(~some, -torch.inf)
    weights = torch.where(seen, (score - lse.masked_fill(~some, 0.0)[..., None]).exp(), 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return (out, lse) if return_lse else out


def exact(arrays):
    return [x.detach().double().requires_grad_(x.requires_grad) for x in arrays]


def assert_near(got, want, dtype=torch.float32):
    tolerance = 4 * TOLERANCE[str(dtype).removeprefix("torch.")]
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def compiled(function):
    torch._dynamo.reset()  # its limit of recompilations counts over all tests
    return torch.compile(function, backend="aot_eager", fullgraph=True)


OPTIONS = [{}, {"causal": True}, {"causal": "top_left", "scale": -0.3}, {"window": (2, 1)}, {"causal": True, "window": (4, None)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients(device, dtype, options):
    arrays = made(device, dtype)
    out, lse = numbaflash.attention(*arrays, return_lse=True, **options)
    assert out.dtype is dtype and lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    wanted = exact(arrays)
    want, want_lse = dense(*wanted, return_lse=True, **options)
    assert_near((out, lse), (want, want_lse), dtype)
    dout, dlse = (
        torch.linspace(-1, 1, out.numel(), device=device).view_as(out).to(dtype),
        torch.linspace(0, 1, lse.numel(), device=device).view_as(lse),
    )
    got = torch.autograd.grad((out, lse), arrays, (dout, dlse.to(lse.dtype)))
    assert [x.dtype for x in got] == [dtype] * 3
    assert_near(got, torch.autograd.grad((want, want_lse), wanted, (dout.double(), dlse.double())), dtype)


@pytest.mark.parametrize("options", [*OPTIONS, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
def test_gradcheck(device, options, return_lse):
    arrays = made(device, torch.float64, ((2, 4, 4, 5), (2, 6, 2, 5), (2, 6, 2, 3)))
    some_order = device == "cuda" and "deterministic" not in options  # of the sums
    assert torch.autograd.gradcheck(lambda *x: attention(*x, return_lse=return_lse, **options), arrays, nondet_tol=1e-12 if some_order else 0.0)


def test_gradcheck_of_rows_without_keys():
    q, k, v = made("cpu", torch.float64, ((1, 5, 2, 4), (1, 3, 1, 4), (1, 3, 1, 4)))
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True), (q, k, v))
    attention(q, k, v, causal=True).sum().backward()
    assert not q.grad[:, :2].any() and q.grad[:, 3:].any()


@pytest.mark.parametrize("keys", [0, 13])
@pytest.mark.parametrize("queries", [0, 9])
def test_sizes_of_zero(device, queries, keys):
    q, k, v = made(device)
    arrays = [x.detach().requires_grad_() for x in (q[:, :queries], k[:, :keys], v[:, :keys])]
    attention(*arrays).sum().backward()
    assert all(x.grad.shape == x.shape for x in arrays)
    assert (queries and keys) or not any(x.grad.any() for x in arrays)


@pytest.fixture
def calls(monkeypatch):
    """Options of the backward calls that a test makes."""
    told, real = [], api.backward

    def backward(*arrays, **options):
        told.append(options)
        return real(*arrays, **options)

    monkeypatch.setattr(api, "backward", backward)
    return told


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_nothing_is_computed_that_nobody_needs(calls, needs, run):
    arrays = made(requires_grad=False)
    for name, x in zip("qkv", arrays, strict=True):
        x.requires_grad_(name in needs)
    function = compiled(attention) if run == "compiled" else attention
    function(*arrays, causal=True).square().sum().backward()
    wanted = exact(arrays)
    dense(*wanted, causal=True).square().sum().backward()
    assert_near([x.grad for x in arrays], [x.grad for x in wanted])
    assert [call["needs"] for call in calls] == [tuple(needs)]


def test_nothing_is_recorded_without_need(calls):
    q, k, v = made(requires_grad=False)
    assert attention(q, k, v).grad_fn is None
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not attention(q.clone().requires_grad_(), k, v).requires_grad
    out, lse = attention(q.requires_grad_(), k, v, return_lse=True)
    assert torch.autograd.grad((out.detach() * q.sum()).sum(), q, allow_unused=True)[0] is not None
    assert not calls


def test_either_result_alone():
    for pick in (0, 1):
        arrays = made()
        attention(*arrays, return_lse=True)[pick].square().sum().backward()
        wanted = exact(arrays)
        dense(*wanted, return_lse=True)[pick].square().sum().backward()
        assert_near([x.grad for x in arrays], [x.grad if x.grad is not None else torch.zeros_like(x) for x in wanted])


@pytest.mark.parametrize(
    "loss", [lambda x: x.sum(), lambda x: x[:, ::2].transpose(1, 3).sum(), lambda x: x.swapaxes(1, 2).flatten(2).square().mean()]
)
def test_strides_of_the_incoming_gradient(loss):
    arrays = made()
    loss(attention(*arrays)).backward()
    wanted = exact(arrays)
    loss(dense(*wanted)).backward()
    assert_near([x.grad for x in arrays], [x.grad for x in wanted])


def test_strides_of_the_arguments():
    q, k, v = made()
    wanted = exact((q, k, v))

    def views(q, k, v):
        return q.swapaxes(1, 2).contiguous().swapaxes(1, 2), k.flip(1)[..., ::1], v[:, :1].expand(v.shape)

    attention(*views(q, k, v), causal=True).square().sum().backward()
    dense(*views(*wanted), causal=True).square().sum().backward()
    assert_near((q.grad, k.grad, v.grad), [x.grad for x in wanted])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    arrays = made(device)

    def block(q, k, v):
        return attention(q.sin(), k, v, causal=True).square()

    block(*arrays).sum().backward()
    want = [x.grad.clone() for x in arrays]
    for x in arrays:
        x.grad = None
    checkpoint(block, *arrays, use_reentrant=reentrant).sum().backward()
    assert_near([x.grad for x in arrays], want)


def test_backward_twice_over_one_graph():
    arrays = made()
    out = attention(*arrays)
    first = torch.autograd.grad(out.sum(), arrays, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(out.sum(), arrays), strict=True):
        assert torch.equal(one, other)


def test_a_saved_tensor_that_was_changed_is_noticed():
    q, k, v = made()
    scaled = k * 2
    out = attention(q, scaled, v)
    with torch.no_grad():
        scaled.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused():
    arrays = made()
    gradients = torch.autograd.grad(attention(*arrays).square().sum(), arrays, create_graph=True)
    wanted = exact(arrays)
    assert_near(gradients, torch.autograd.grad(dense(*wanted).square().sum(), wanted))
    for inputs in (arrays[0], arrays[2]):
        with pytest.raises(UnsupportedError, match=r"cannot be differentiated again \(second derivatives"):
            torch.autograd.grad(gradients[0].square().sum(), inputs, retain_graph=True)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "jacrev", "vjp over what is not an argument"])
def test_torch_func_is_refused(transform):
    q, k, v = made(requires_grad=False)
    recorded = q.clone().requires_grad_()
    run = {
        "vmap": lambda: torch.vmap(lambda x: attention(x, k, v))(q[None]),
        "grad": lambda: torch.func.grad(lambda x: attention(x, k, v).sum())(q),
        "jvp": lambda: torch.func.jvp(lambda x: attention(x, k, v), (q,), (q,)),
        "jacrev": lambda: torch.func.jacrev(lambda x: attention(x, k, v))(q),
        "vjp over what is not an argument": lambda: torch.func.vjp(lambda x: attention(recorded, k, v) * x, q.new_ones(())),
    }[transform]
    with pytest.raises(TypeError, match=r"q is traced by torch\.func .* cannot be transformed by it\. Use autograd"):
        run()


def test_forward_mode_is_refused():
    q, k, v = made(requires_grad=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, k)
        with pytest.raises(UnsupportedError, match=r"k carries a tangent: .* no forward-mode derivative \(jvp\); use backward"):
            attention(q, dual, v)
        assert attention(q, k, v).shape == (2, 9, 4, 24)


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes", "mask"])
def test_options_that_are_transformed_are_refused_likewise(name):
    arrays = made(requires_grad=False)
    option = torch.zeros(13) if name == "bias" else torch.ones(13, dtype=torch.bool) if name == "mask" else torch.zeros(4)
    transform = torch.vmap if name == "mask" else torch.func.grad
    with pytest.raises(TypeError, match=rf"{name} is traced by torch\.func .* cannot be transformed by it\. Use autograd"):
        transform(lambda x: attention(*arrays, **{name: x}).sum())(option[None] if name == "mask" else option)
    if name != "mask":
        for given in (arrays, made()):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(option, option)
                with pytest.raises(UnsupportedError, match=rf"{name} carries a tangent"):
                    attention(*given, **{name: dual})


def test_gradients_that_torch_has_not_negated_yet():
    arrays = made()
    results = attention(*arrays, return_lse=True)
    lazy = [torch.complex(x, x).conj().imag for x in map(torch.randn_like, results)]
    assert all(x.is_neg() for x in lazy)
    found = torch.autograd.grad(results, arrays, lazy, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(results, arrays, [x.resolve_neg() for x in lazy]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "q must be a torch tensor; got ndarray", {"q": np.zeros(SHAPES[0], np.float32)}),
        (TypeError, "k must be a torch tensor; got list", {"k": [1.0]}),
        (TypeError, "q must be one of .*; got dtype int32", {"q": torch.zeros(SHAPES[0], dtype=torch.int32)}),
        (TypeError, "q, k and v must have one dtype", {"k": torch.zeros(SHAPES[1], dtype=torch.float16)}),
        (ValueError, r"k must have 4 axes .*; got 3 axes", {"k": torch.zeros(SHAPES[1][1:])}),
        (ValueError, "k must have the same head_dim", {"k": torch.zeros(2, 13, 2, 8)}),
        (ValueError, "scale must be finite", {"scale": float("inf")}),
        (ValueError, 'causal must be False, True .* or "top_left"', {"causal": "left"}),
        (ValueError, "window left must not be negative", {"window": (-1, 0)}),
        (TypeError, "return_lse must be True or False", {"return_lse": 1}),
        (TypeError, "deterministic must be True or False", {"deterministic": None}),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bad_input(error, message, change, requires_grad):
    arguments = dict(zip("qkv", made(requires_grad=requires_grad), strict=True)) | change
    with pytest.raises(error, match=message):
        attention(**arguments)


def test_the_message_of_forward_points_here():
    q, k, v = made()
    with pytest.raises(ValueError, match=r"q takes part in automatic differentiation, .* Call numbaflash\.attention, which torch differentiates"):
        numbaflash.forward(q, k, v)


def test_a_forced_family_reaches_the_backward():
    q, k, v = made()
    with dispatch.use_family("cpu"):
        out = attention(q, k, v)
    with dispatch.use_family("simt"):  # of the forward, not of the thread that happens to run the backward
        out.sum().backward()
    with dispatch.use_family("simt"), pytest.raises(UnsupportedError, match="simt: "):
        attention(q, k, v)


def test_deterministic_algorithms(calls):
    arrays = made()
    attention(*arrays).sum().backward()
    attention(*arrays, deterministic=True).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        attention(*arrays).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call["deterministic"] for call in calls] == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_autocast(device, dtype, run):
    arrays = made(device)
    function = compiled(attention) if run == "compiled" else attention
    with torch.autocast(device, dtype=dtype):
        out = function(*arrays, causal=True)
        heads_first = [x.repeat_interleave(4 // x.shape[2], 2).swapaxes(1, 2) for x in arrays]
        assert out.dtype is dtype is F.scaled_dot_product_attention(*heads_first).dtype
        mixed = function(arrays[0].half(), arrays[1].bfloat16(), arrays[2])
        assert mixed.dtype is dtype
    out.float().square().sum().backward()
    assert all(x.grad.dtype is torch.float32 for x in arrays)
    wanted = exact(arrays)
    dense(*wanted, causal=True).square().sum().backward()
    assert_near([x.grad for x in arrays], [x.grad for x in wanted], torch.bfloat16)


def test_autocast_leaves_float64():
    arrays = made(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*arrays).dtype is torch.float64
    with torch.autocast("cpu", enabled=False):
        assert attention(*made()).dtype is torch.float32


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compile(device, options):
    def model(q, k, v):
        out, lse = numbaflash.attention(q.sin(), k, v.swapaxes(0, 1).swapaxes(0, 1), return_lse=True, **options)
        return out.cos(), lse.exp()

    arrays = made(device)
    got, wanted = compiled(model)(*arrays), model(*arrays)
    gradients = [torch.autograd.grad(results[0].sum() + results[1].square().sum(), arrays) for results in (got, wanted)]
    assert_near(got, wanted)
    assert_near(*gradients)


def test_compile_with_dynamic_shapes():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda q, k, v: attention(q * 1, k, v, causal=True), backend=counter, fullgraph=True, dynamic=True)
    for length in (5, 8, 13):
        arrays = made(shapes=((2, length, 4, 16), (2, length + 2, 2, 16), (2, length + 2, 2, 24)))
        got = torch.autograd.grad(run(*arrays).square().sum(), arrays)
        assert_near(got, torch.autograd.grad(attention(*arrays, causal=True).square().sum(), arrays))
    assert counter.frame_count == 1


def test_compile_a_scale_made_of_sizes():
    for scale in (lambda q: 1.0 / q.shape[-1], lambda q: q.shape[1], lambda q: q.shape[1] ** -0.5):
        torch._dynamo.reset()
        run = torch.compile(lambda q, k, v, scale=scale: attention(q, k, v, scale=scale(q)), backend="aot_eager", fullgraph=True, dynamic=True)
        for length in (5, 8):
            arrays = made(shapes=((2, length, 4, 2 * length), (2, 7, 2, 2 * length), (2, 7, 2, 24)))
            assert_near([run(*arrays)], [attention(*arrays, scale=scale(arrays[0]))])
    with pytest.raises(Exception, match="scale must be finite; got inf"):
        compiled(lambda *x: attention(*x, scale=float("inf")))(*made())


def test_compile_a_checkpoint():
    arrays = made()

    def block(q, k, v):
        return attention(q.sin(), k, v, causal=True)

    run = compiled(lambda *x: checkpoint(block, *x, use_reentrant=False))
    got = torch.autograd.grad(run(*arrays).square().sum(), arrays)
    assert_near(got, torch.autograd.grad(block(*arrays).square().sum(), arrays))


def test_compile_errors():
    q, k, v = made()
    with pytest.raises(Exception, match=r"k must have 4 axes \(batch, seqlen, heads, head_dim\); got 3 axes"):
        compiled(lambda *x: attention(*x))(q, k[0], v)
    with pytest.raises(Exception, match="window left must not be negative"):
        compiled(lambda *x: attention(*x, window=(-1, 0)))(q, k, v)
    with pytest.raises(Exception, match="q must have the same head_dim|k must have the same head_dim"):
        compiled(lambda *x: attention(*x))(q, k[..., :8], v)


def test_operators_keep_what_torch_asks_of_them():
    q, k, v = made()
    torch.library.opcheck(torch.ops.numbaflash.attention.default, (q, k, v, None, 1, 3, None, False))
    out, lse = attention(q, k, v, return_lse=True)
    tensors = [x.detach() for x in (out, lse, q, k, v, out, lse)]
    for needs in ([1, 1, 1], [0, 1, 0], [True, False, True]):
        torch.library.opcheck(torch.ops.numbaflash.attention_backward.default, (*tensors, needs, 0.3, 0, None, None, True))


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return numbaflash.attention(q, k, v, causal="top_left")

    arrays = made(requires_grad=False)
    program = torch.export.export(Model(), tuple(arrays))
    assert_near([program.module()(*arrays)], [dense(*arrays, causal="top_left")])


def run_python(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_call_may_be_compiled():
    """Nothing of numbaflash has met torch before torch.compile traces it."""
    run_python("""
        import torch, numbaflash
        q, k, v = torch.randn(3, 1, 20, 2, 16, requires_grad=True)
        out = torch.compile(lambda *x: numbaflash.attention(*x, causal=True), backend="aot_eager", fullgraph=True)(q, k, v)
        torch.testing.assert_close(out, numbaflash.attention(q, k, v, causal=True))
    """)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler on the CPU")
def test_inductor():
    run_python("""
        import torch, numbaflash
        q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3))
        model = lambda *x: numbaflash.attention(x[0].sin(), *x[1:], causal=True).cos().sum()
        got = torch.autograd.grad(torch.compile(model, fullgraph=True)(q, k, v), (q, k, v))
        torch.testing.assert_close(got, torch.autograd.grad(model(q, k, v), (q, k, v)))
    """)


# Where torch records


MODES = ("real", "fake", "symbolic")


def traced(function, arrays, mode):
    """A trace of ``function``; "jit" is torch.jit.trace, the others are modes of make_fx."""
    if mode == "jit":
        return torch.jit.trace(function, tuple(arrays))
    return make_fx(function, tracing_mode=mode)(*arrays)


def others(arrays):
    """Other values than those that were traced."""
    return [(x.detach() * 2 - 0.1).requires_grad_(x.requires_grad) for x in arrays]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", [*MODES, "jit"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_trace_contains_attention(device, mode, requires_grad):
    arrays = made(device, requires_grad=requires_grad)

    def function(*arrays):
        out, lse = numbaflash.attention(*arrays, causal=True, scale=0.3, return_lse=True)
        return out + 0, lse

    trace = traced(function, arrays, mode)
    arrays = others(arrays)
    got, want = trace(*arrays), function(*arrays)
    assert_near(got, want)
    if requires_grad:
        assert_near(*(torch.autograd.grad(x[0].square().sum() + x[1].sum(), arrays) for x in (got, want)))


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_contains_the_backward(mode):
    def function(*arrays):
        arrays = [x.detach().requires_grad_() for x in arrays]
        return torch.autograd.grad(attention(*arrays, causal=True).sin().sum(), arrays)

    arrays = made(requires_grad=False)
    trace = traced(function, arrays, mode)
    assert_near(trace(*others(arrays)), function(*others(arrays)))
    if mode == "symbolic":
        longer = made(shapes=((2, 11, 4, 16), (2, 20, 2, 16), (2, 20, 2, 24)), requires_grad=False)
        assert_near(trace(*longer), function(*longer))


def test_a_trace_contains_the_backward_of_what_was_not_traced():
    arrays = made()
    out = attention(*arrays)
    dout = torch.linspace(-1, 1, out.numel()).view_as(out)

    def function(dout):
        return torch.autograd.grad(out, arrays, dout, retain_graph=True)

    trace = make_fx(function)(torch.zeros_like(dout))
    assert_near(trace(dout), function(dout))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", [*MODES, "jit"])
def test_a_trace_contains_forward_merge_and_backward(mode):
    def function(q, k, v):
        out, lse = numbaflash.merge(*zip(*(numbaflash.forward(q, k[:, keys], v[:, keys], return_lse=True) for keys in HALVES), strict=True))
        dq, dk, dv = numbaflash.backward(out.cos(), q, k, v, out, lse, dlse=lse * 2, needs=("v", "q"))
        assert dk is None
        return out, lse, dq, dv

    arrays = made(requires_grad=False)
    assert_near(traced(function, arrays, mode)(*others(arrays)), function(*others(arrays)))


HALVES = (slice(0, 6), slice(6, None))


def test_a_trace_cannot_contain_results_of_the_caller():
    q, k, v = made(requires_grad=False)
    out, lse = numbaflash.forward(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match=r"numbaflash\.forward is traced by torch .*, and no trace can contain out, lse\. Leave"):
        make_fx(lambda q: numbaflash.forward(q, k, v, out=torch.empty_like(out), lse=torch.empty_like(lse)))(q)
    with pytest.raises(TypeError, match=r"numbaflash\.backward is traced by torch .*, and no trace can contain dk\. Leave"):
        make_fx(lambda q: numbaflash.backward(out, q, k, v, out, lse, dk=torch.empty_like(k)))(q)
    with pytest.raises(ValueError, match="q takes part in automatic differentiation"):
        make_fx(lambda q: numbaflash.forward(q, k, v))(q.clone().requires_grad_())


class Watching(TorchDispatchMode):
    """Runs everything, and remembers its name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen.append(str(function))
        return function(*arguments, **(options or {}))


def test_dispatch_modes_see_operators():
    arrays = made()
    with Watching() as mode, Watching():
        out, lse = attention(*arrays, return_lse=True)
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), arrays, create_graph=True)
    assert "numbaflash.attention.default" in mode.seen and "numbaflash.attention_backward.default" in mode.seen
    assert_near(gradients, torch.autograd.grad(sum(x.pow(n).sum() for x, n in zip(attention(*arrays, return_lse=True), (2, 1), strict=True)), arrays))
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        torch.autograd.grad(gradients[0].sum(), arrays[0])
    q, k, v = (x.detach() for x in arrays)
    out, lse = out.detach(), lse.detach()
    with Watching():
        into = [torch.empty_like(x) for x in (out, q)]
        numbaflash.forward(q, k, v, out=into[0])
        numbaflash.backward(out, q, k, v, out, lse, dq=into[1])
    assert_near(into, (out, numbaflash.backward(out, q, k, v, out, lse)[0]))


def test_selective_checkpoint_keeps_attention():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    arrays = made()
    ran = []

    def block(q, k, v):
        return attention(q.sin(), k, v).square().sum()

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.numbaflash.attention.default])

    with pytest.MonkeyPatch.context() as patch:
        real = api.forward
        patch.setattr(api, "forward", lambda *x, **options: ran.append(1) or real(*x, **options))
        loss = checkpoint(block, *arrays, use_reentrant=False, context_fn=contexts)
        got = torch.autograd.grad(loss, arrays)
    assert len(ran) == 1
    assert_near(got, torch.autograd.grad(block(*arrays), arrays))


def test_fake_tensors():
    with FakeTensorMode():
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in SHAPES)
        out, lse = numbaflash.attention(q, k, v, return_lse=True)
        (out.float().sum() + lse.sum()).backward()
        out, lse = numbaflash.merge([out.detach()], [numbaflash.forward(q.detach(), k.detach(), v.detach(), return_lse=True)[1]])
        with pytest.raises(ValueError, match="k must have the same head_dim"):
            attention(q, k[..., :8], v)
    assert out.shape == (2, 9, 4, 24) and out.dtype is torch.bfloat16 and lse.shape == (2, 4, 9) and lse.dtype is torch.float32
    assert [x.grad.shape for x in (q, k, v)] == list(SHAPES)
    assert attention(q, k, v).shape == (2, 9, 4, 24) == numbaflash.attention(q, k, v).shape  # outside of the mode too
    with pytest.raises(TypeError, match="q from a trace of PyTorch, k from PyTorch"):
        numbaflash.forward(q.detach(), *made(requires_grad=False)[1:])


def test_meta_tensors():
    q, k, v = made("meta")
    out = attention(q, k, v)
    assert out.device.type == "meta" and out.shape == (2, 9, 4, 24)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == list(SHAPES)
    with pytest.raises(ValueError, match="k must have the same head_dim"):
        attention(q, k[..., :8], v)
    with pytest.raises(ValueError, match="q must lie on the CPU or a CUDA device; got device meta"):
        numbaflash.forward(q, k, v)


@pytest.mark.parametrize("where", ["eager", "in a mode"])  # torch.compile has a message of its own
def test_batched_gradients_are_refused(where):
    arrays = made()
    with Watching() if where == "in a mode" else nullcontext():
        out = attention(*arrays)
    douts = out.new_ones(3, *out.shape)
    message = r"batched by vmap \(is_grads_batched=True.* Call torch\.autograd\.grad for one"
    with pytest.raises(TypeError, match=message):
        torch.vmap(lambda dout: torch.autograd.grad(out, arrays, dout, retain_graph=True))(douts)
    with pytest.raises(TypeError, match=message):
        torch.autograd.grad(out, arrays, douts, is_grads_batched=True)


def test_vmap_is_refused_inside_of_a_compiled_function():
    q, k, v = made(requires_grad=False)
    with pytest.raises(Exception, match="batched by vmap, which is not supported"):
        compiled(lambda q: torch.vmap(lambda x: attention(x, k, v))(q))(q[None])


def test_jacobian():
    q, k, v = made(dtype=torch.float64, shapes=((1, 2, 1, 3), (1, 3, 1, 3), (1, 3, 1, 2)), requires_grad=False)
    got, want = (torch.autograd.functional.jacobian(partial(function, k=k, v=v), q) for function in (attention, dense))
    torch.testing.assert_close(got, want)
    with pytest.raises(TypeError, match="which is not supported.*or pass vectorize=False"):
        torch.autograd.functional.jacobian(lambda x: attention(x, k, v), q, vectorize=True)


@pytest.mark.parametrize("frozen", ["kv", "qk", "v"])
def test_tensors_of_the_inference_mode(frozen):
    arrays = made()
    with torch.inference_mode():
        mixed = [x.detach().clone() if name in frozen else x for name, x in zip("qkv", arrays, strict=True)]
    wanted = [x for name, x in zip("qkv", arrays, strict=True) if name not in frozen]
    assert_near(*(torch.autograd.grad(attention(*x).square().sum(), wanted) for x in (mixed, arrays)))
    heads_first = [x.swapaxes(1, 2) for x in mixed]
    got = scaled_dot_product_attention(*heads_first, enable_gqa=True).swapaxes(1, 2)
    assert_near(torch.autograd.grad(got.square().sum(), wanted), torch.autograd.grad(attention(*arrays).square().sum(), wanted))


# torch's own attention


SDPA_SHAPES = [
    ((5, 8), (7, 8), (7, 6)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    ((2, 3, 5, 8), (1, 1, 7, 8), (1, 1, 7, 6)),
    ((1, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    ((2, 3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 6)),
    ((2, 2, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 6)),
    ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 1, 2, 3, 9, 8), (2, 2, 1, 3, 7, 8), (2, 3, 7, 6)),
    ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 6)),
]
SDPA_GROUPED = [
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
    ((4, 5, 8), (2, 7, 8), (2, 7, 6)),
    ((2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 6)),
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 6)),
    ((2, 12, 5, 8), (2, 4, 7, 8), (2, 6, 7, 6)),
    ((3, 2, 4, 5, 8), (1, 2, 2, 7, 8), (3, 1, 2, 7, 6)),
]


@pytest.mark.parametrize("shapes", [*SDPA_SHAPES, *SDPA_GROUPED], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_sdpa_is_torchs(shapes, options):
    grouped = {"enable_gqa": True} if shapes in SDPA_GROUPED else {}
    arrays = made(dtype=torch.float64, shapes=shapes)
    got, want = (function(*arrays, **options, **grouped) for function in (scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert got.shape == want.shape and got.dtype is want.dtype
    gradients = [torch.autograd.grad(x.square().sum(), arrays, allow_unused=True) for x in (got, want)]
    if shapes[1][-2]:  # without keys, torch's own gradients are NaN in some versions
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*gradients)
    else:
        assert not got.any() and not any(x.any() for x in gradients[0])


def test_sdpa_copies_nothing():
    q, k, v = made(requires_grad=False, shapes=((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16)))
    seen = []
    real = api.forward

    def forward(*arrays, **options):
        seen.extend(x.data_ptr() for x in arrays)
        return real(*arrays, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "forward", forward)
        scaled_dot_product_attention(q, k, v)
    assert seen == [x.data_ptr() for x in (q, k, v)]


def test_sdpa_signature():
    """Positions and names as torch has them."""
    q, k, v = made(dtype=torch.float64, shapes=((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, None, 0.0, True), F.scaled_dot_product_attention(q, k, v, None, 0.0, True))
    named = {"query": q, "key": k, "value": v, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    torch.testing.assert_close(scaled_dot_product_attention(**named), F.scaled_dot_product_attention(**named))
    with pytest.raises(TypeError):
        scaled_dot_product_attention(q, k, v, None, 0.0, False, 0.3)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, r"dropout_p must be at least 0 and below 1; got -0\.1", {"dropout_p": -0.1}),
        (ValueError, r"dropout_p must be at least 0 and below 1; got 1\.5", {"dropout_p": 1.5}),
        (TypeError, "dropout_p must be a real number; got None", {"dropout_p": None}),
        (TypeError, "key must be a torch tensor; got NoneType", {"key": None}),
        (ValueError, r"query must have at least 2 axes \(\.\.\., seqlen, head_dim\); got shape \(8,\)", {"query": torch.zeros(8)}),
        (ValueError, r"key must have the same head_dim \(the last axis\) as query; got 9, expected 8", {"key": torch.zeros(2, 4, 7, 9)}),
        (ValueError, r"value must have the same seqlen_k .* as key; got 6, expected 7", {"value": torch.zeros(2, 4, 6, 8)}),
        (ValueError, r"heads .*enable_gqa=True.* must broadcast; got \(4,\) of query, \(2,\) of key", {"key": torch.zeros(2, 2, 7, 8)}),
        (ValueError, "leading axes .* must broadcast", {"query": torch.zeros(3, 4, 5, 8)}),
        (ValueError, r"multiple of the heads of key .*; got 4 and 3", {"key": torch.zeros(2, 3, 7, 8), "enable_gqa": True}),
        (ValueError, r"at least 3 axes \(\.\.\., heads, seqlen, head_dim\)", {"query": torch.zeros(5, 8), "enable_gqa": True}),
        (TypeError, "is_causal must be True or False", {"is_causal": 1}),
        (TypeError, "scale must be a real number", {"scale": "1"}),
    ],
)
def test_sdpa_bad_input(error, message, change):
    arguments = {"query": torch.zeros(2, 4, 5, 8), "key": torch.zeros(2, 4, 7, 8), "value": torch.zeros(2, 4, 7, 8)}
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**arguments | change)


def test_sdpa_compiled():
    arrays = made(shapes=((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)))
    run = compiled(lambda *x: scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True))
    torch.testing.assert_close(run(*arrays), F.scaled_dot_product_attention(*arrays, is_causal=True, enable_gqa=True))


def test_replacing_nests_and_ends():
    theirs = F.scaled_dot_product_attention
    with replace_sdpa():
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
        with pytest.raises(ZeroDivisionError), replace_sdpa():
            1 / 0  # noqa: B018
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
    assert F.scaled_dot_product_attention is theirs

    @replace_sdpa()
    def decorated():
        return F.scaled_dot_product_attention

    assert decorated() is scaled_dot_product_attention is decorated() and F.scaled_dot_product_attention is theirs


def test_replacing_inside_of_a_compiled_function():
    theirs = F.scaled_dot_product_attention
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    def function(q):
        with replace_sdpa():
            ours = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return ours, F.scaled_dot_product_attention(q, q, q)

    q = made(shapes=((2, 3, 5, 8),), requires_grad=False)[0]
    torch._dynamo.reset()
    got = torch.compile(function, backend=backend, fullgraph=True)(q)
    torch.testing.assert_close(got, function(q))
    assert len(graphs) == 1 and graphs[0].count("ops.numbaflash.attention") == 1 == graphs[0].count("_nn.scaled_dot_product_attention")
    assert F.scaled_dot_product_attention is theirs
    with replace_sdpa():
        torch.compile(function, backend=backend, fullgraph=True)(q)
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
    assert F.scaled_dot_product_attention is theirs


def test_replacing_in_threads_that_overlap():
    theirs = F.scaled_dot_product_attention
    inside, leave = threading.Event(), threading.Event()

    def other():
        with replace_sdpa():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other, daemon=True)
    with replace_sdpa():
        thread.start()
        assert inside.wait(60)
    assert F.scaled_dot_product_attention is scaled_dot_product_attention  # the other thread is still inside
    leave.set()
    thread.join(60)
    assert F.scaled_dot_product_attention is theirs


def test_a_model_of_torch_trains_on_these_kernels(calls):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 16)
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with replace_sdpa():
        out = model(x)
        got = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        assert len(calls) == 1
        masked = model(x, src_mask=torch.nn.Transformer.generate_square_subsequent_mask(9))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(masked, model(x, src_mask=torch.nn.Transformer.generate_square_subsequent_mask(9)), rtol=1e-4, atol=1e-5)
