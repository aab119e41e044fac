"""Score options through torch on the CPU: gradients against autograd in float64, every road to the kernels, torch's own attention."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import numbaflash.torch  # noqa: E402
from numbaflash import UnsupportedError  # noqa: E402
from numbaflash.torch import attention, scaled_dot_product_attention  # noqa: E402

B, SQ, SK, H, HK, D = 2, 19, 23, 4, 2, 16


def made(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, D)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def options(name, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand((B, 1, SQ, SK), generator=generator) > 0.4
    mask[0, 0, 3] = False
    lengths = {"seqlens_q": torch.tensor([19, 7]), "seqlens_k": torch.tensor([11, 23])}
    found = {
        "mask": {"mask": mask},
        "bias": {"bias": torch.randn((1, H, 1, SK), generator=generator, dtype=dtype).requires_grad_()},
        "alibi": {"alibi_slopes": torch.rand(H, generator=generator), "causal": True},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": torch.randn(H, generator=generator, dtype=dtype).requires_grad_()},
        "lengths": lengths | {"causal": True},
    }
    found["all"] = {key: value for each in found.values() for key, value in each.items()}
    return found[name]


OPTIONS = ("mask", "bias", "alibi", "softcap", "sinks", "lengths", "all")
NEAR = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerances of float32, whose kernels other tests compile, too; all options at once are held to float64's."""


def dtype_of(name):
    return torch.float64 if name == "all" else torch.float32


def dense(q, k, v, *, causal=False, mask=None, bias=None, alibi_slopes=None, softcap=None, sinks=None, seqlens_q=None, seqlens_k=None):
    """The definition, which torch differentiates."""
    k, v = (x.repeat_interleave(H // HK, 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    length_q = torch.full((B,), SQ) if seqlens_q is None else seqlens_q
    length_k = torch.full((B,), SK) if seqlens_k is None else seqlens_k
    i, j = torch.arange(SQ)[:, None], torch.arange(SK)[None, :]
    place = i + (length_k - length_q)[:, None, None, None]
    if alibi_slopes is not None:
        score = score - alibi_slopes.to(score.dtype)[None, :, None, None] * (place - j).abs()
    if bias is not None:
        score = score + bias
    seen = ((i < length_q[:, None, None, None]) & (j < length_k[:, None, None, None])).expand_as(score)
    if causal:
        seen = seen & (j <= place)
    if mask is not None:
        seen = seen & mask
    score = score.masked_fill(~seen, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None, None].expand(B, H, SQ, 1).where(i < length_q[:, None, None, None], -math.inf)], -1)
    alive = (score > -math.inf).any(-1, keepdim=True)
    weights = torch.softmax(score.masked_fill(~alive, 0.0), -1).masked_fill(~alive, 0.0)[..., :SK]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def gradients(function, arrays, more):
    leaves = [*arrays, *(x for x in more.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    out = function(*arrays, **more)
    return out, torch.autograd.grad(out.square().sum(), leaves)


def doubled(x):
    return x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad else x


@pytest.mark.parametrize("name", OPTIONS)
def test_against_the_definition(name):
    dtype = dtype_of(name)
    arrays, more = made(dtype), options(name, dtype)
    out, found = gradients(attention, arrays, more)
    known, wanted = gradients(dense, [doubled(x) for x in arrays], {key: doubled(x) for key, x in more.items()})
    near = NEAR if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-9}
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), known, **near)
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), exact, **near)


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_is_eager(name):
    torch._dynamo.reset()
    arrays, more = made(dtype_of(name)), options(name, dtype_of(name))
    _, eager = gradients(attention, arrays, more)
    _, compiled = gradients(torch.compile(attention, backend="aot_eager", fullgraph=True), arrays, more)
    for mine, own in zip(compiled, eager, strict=True):
        torch.testing.assert_close(mine, own)


def test_dropout_comes_from_torchs_generator():
    q, k, v = (x.detach() for x in made(torch.float32))
    torch.manual_seed(3)
    first, second = attention(q, k, v, dropout=0.3), attention(q, k, v, dropout=0.3)
    torch.manual_seed(3)
    assert torch.equal(first, attention(q, k, v, dropout=0.3)) and not torch.equal(first, second)
    assert torch.equal(attention(q, k, v, dropout=0.3, seed=2**64 - 1), numbaflash.forward(q, k, v, dropout=0.3, seed=2**64 - 1))
    torch._dynamo.reset()
    run = torch.compile(lambda *x: attention(*x, dropout=0.3), backend="aot_eager", fullgraph=True)
    assert not torch.equal(run(q, k, v), run(q, k, v)), "a new mask in each call"


def test_the_backward_drops_what_the_forward_dropped():
    arrays = made()
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, dropout=0.4, seed=7, causal=True), [x[:1, :5, :2].detach().requires_grad_() for x in arrays]
    )


@pytest.mark.parametrize("road", ["eager", "recorded", "compiled"])
@pytest.mark.parametrize("seed", [None, 7])
def test_seeds_are_of_the_cpu_whatever_the_default_device(road, seed):
    """Not of a GPU, for which the host would wait; "meta" stands for one, and has no values at all."""
    from torch.fx.experimental.proxy_tensor import make_fx

    arrays = made(torch.float32)

    def run(*x):
        return attention(*x, dropout=0.3, seed=seed)

    if road == "recorded":
        arrays = [x.detach() for x in arrays]
        with torch.device("meta"):
            run = make_fx(run)(*arrays)
    elif road == "compiled":
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.manual_seed(2)
    with torch.device("meta"):
        out = run(*arrays)
    torch.manual_seed(2)
    assert torch.equal(out, attention(*arrays, dropout=0.3, seed=seed))


@pytest.mark.parametrize("road", ["make_fx", "export", "jit.trace", "fake"])
def test_traces_draw_their_seeds_when_they_run(road):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, dropout=0.3)

    arrays = tuple(x.detach() for x in made(torch.float32))
    if road == "fake":
        with FakeTensorMode() as mode:
            assert Model()(*map(mode.from_tensor, arrays)).shape == arrays[0].shape
        return
    run = {
        "make_fx": lambda: make_fx(Model())(*arrays),
        "export": lambda: torch.export.export(Model(), arrays).module(),
        "jit.trace": lambda: torch.jit.trace(Model(), arrays, check_trace=False),
    }[road]()
    assert not torch.equal(run(*arrays), run(*arrays)), "a new mask in each call"


@pytest.mark.parametrize("kind", ["bool", "float", "dropout"])
def test_sdpa(kind):
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in made(torch.float32))
    mask = options("mask")["mask"].clone()
    mask[0, 0, 3] = True  # torch gives NaN where a query sees nothing
    given = {"bool": mask, "float": torch.randn(H, SQ, SK).requires_grad_(), "dropout": None}[kind]
    if kind == "dropout":
        torch.manual_seed(1)
        out = scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
        torch.manual_seed(1)
        assert torch.equal(out, scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True))
        return
    leaves = [q, k, v, *([given] if kind == "float" else [])]
    mine, theirs = (
        f(q, k, v, attn_mask=given, enable_gqa=True) for f in (scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    )
    torch.testing.assert_close(mine, theirs, **NEAR)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (mine, theirs)), strict=True):
        torch.testing.assert_close(a, b, **NEAR)
    wide = scaled_dot_product_attention(*(x[None].expand(3, *x.shape) for x in (q, k, v)), attn_mask=given, enable_gqa=True)
    torch.testing.assert_close(wide[2], mine)


@pytest.mark.parametrize(
    ("error", "message", "more"),
    [
        (TypeError, "mask must be a torch tensor; got list", {"mask": [True]}),
        (TypeError, "mask must be bool", {"mask": torch.ones(SQ, SK)}),
        (ValueError, "bias must broadcast", {"bias": torch.ones(SQ, SK + 1)}),
        (UnsupportedError, "alibi_slopes requires a gradient", {"alibi_slopes": torch.ones(H, requires_grad=True)}),
        (ValueError, "dropout must be at least 0 and below 1; got 1", {"dropout": 1.0}),
        (TypeError, "dropout must be a real number", {"dropout": torch.zeros(())}),
        (ValueError, "seed must be at least 0 and below 2", {"dropout": 0.1, "seed": -1}),
        (TypeError, "seqlens_k must be int32 or int64", {"seqlens_k": torch.ones(B)}),
    ],
)
def test_bad_input(error, message, more):
    with pytest.raises(error, match=message):
        attention(*made(torch.float32), **more)


def test_bad_input_of_sdpa():
    q, k, v = (x.detach().transpose(1, 2) for x in made())
    with pytest.raises(ValueError, match="attn_mask must be None with is_causal=True"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(SQ, SK, dtype=torch.bool), is_causal=True, enable_gqa=True)
    with pytest.raises(ValueError, match=r"attn_mask must broadcast to .* got shape \(5, 23\)"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(5, SK), enable_gqa=True)
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and below 1; got 1.0"):
        scaled_dot_product_attention(q, k, v, dropout_p=1.0, enable_gqa=True)
