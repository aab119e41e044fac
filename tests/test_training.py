"""Training: a small GPT in torch and in JAX whose loss follows the same model on dense attention step by step, and the example in plain arrays."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import numbaflash

ROOT = Path(__file__).resolve().parent.parent
TEXT = np.frombuffer((ROOT / "docs" / "algorithm.md").read_bytes()[:2000], np.uint8)
VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, LENGTH, BATCH = 128, 32, 4, 2, 2, 40, 4
STEPS = 25


def batches(seed=0):
    """Windows of the text, one position longer than the model reads."""
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        starts = rng.integers(0, len(TEXT) - LENGTH, BATCH)
        yield TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int64) % VOCABULARY


def initial(seed=0):
    """Parameters of the model by name, float64."""
    rng = np.random.default_rng(seed)
    head_dim = WIDTH // HEADS
    shapes = {"embedding": (VOCABULARY, WIDTH), "position": (LENGTH, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.q": (WIDTH, WIDTH), f"{layer}.kv": (WIDTH, 2 * KV_HEADS * head_dim), f"{layer}.out": (WIDTH, WIDTH)}
        shapes |= {f"{layer}.up": (WIDTH, 4 * WIDTH), f"{layer}.down": (4 * WIDTH, WIDTH)}
    return {name: rng.standard_normal(shape) * (0.1 if "." not in name else shape[0] ** -0.5) for name, shape in shapes.items()}


def scores(parameters, tokens, attend, relu):
    """The model, in operations that torch and JAX share."""

    def normalize(x):
        return x / ((x**2).mean(-1, keepdims=True) + 1e-6) ** 0.5

    head_dim = WIDTH // HEADS
    x = parameters["embedding"][tokens] + parameters["position"]
    for layer in range(LAYERS):
        h = normalize(x)
        q = (h @ parameters[f"{layer}.q"]).reshape(*x.shape[:-1], HEADS, head_dim)
        kv = (h @ parameters[f"{layer}.kv"]).reshape(*x.shape[:-1], 2, KV_HEADS, head_dim)
        x = x + attend(q, kv[..., 0, :, :], kv[..., 1, :, :]).reshape(x.shape) @ parameters[f"{layer}.out"]
        x = x + relu(normalize(x) @ parameters[f"{layer}.up"]) @ parameters[f"{layer}.down"]
    return normalize(x) @ parameters["embedding"].T


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))

CLOSE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 3e-2}
"""How far the two losses may be apart, relative: rounding grows from step to step."""


def assert_same_curve(got, want, dtype):
    assert want[-1] < want[0] - 1.0, "the model learns"
    np.testing.assert_allclose(got, want, rtol=CLOSE[dtype])


def torch_curve(attend, dtype, device="cpu", compiled=False):
    torch = pytest.importorskip("torch")
    parameters = {name: torch.tensor(x, dtype=dtype, device=device).requires_grad_() for name, x in initial().items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)

    def loss_of(tokens, targets):
        return torch.nn.functional.cross_entropy(scores(parameters, tokens, attend, torch.relu).flatten(0, 1), targets.flatten())

    if compiled:
        torch._dynamo.reset()
        loss_of = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    losses = []
    for window in batches():
        window = torch.from_numpy(window).to(device)
        loss = loss_of(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def torch_dense(q, k, v):
    import torch

    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    score = score.masked_fill(~torch.from_numpy(CAUSAL).to(q.device), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gpt_in_torch(device, dtype, compiled):
    torch = pytest.importorskip("torch")

    def attend(q, k, v):
        return numbaflash.attention(q, k, v, causal=True)

    dtype_of = getattr(torch, dtype)
    assert_same_curve(torch_curve(attend, dtype_of, device, compiled), torch_curve(torch_dense, dtype_of, device), dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gpt_in_torch_under_autocast(device):
    """Parameters in float32, attention in bfloat16, beside torch's own attention in the same place."""
    torch = pytest.importorskip("torch")
    from numbaflash.torch import replace_sdpa

    def attend(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2).swapaxes(1, 2) for x in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q.swapaxes(1, 2), k, v, is_causal=True)
        return out.swapaxes(1, 2).float()

    with replace_sdpa():
        got = torch_curve(attend, torch.float32, device)
    assert_same_curve(got, torch_curve(attend, torch.float32, device), "bfloat16")


def jax_curve(attend, dtype):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    parameters = {name: jnp.asarray(x, dtype) for name, x in initial().items()}

    def loss_of_one(parameters, window):
        """Of one text, without a batch axis: vmap adds it, as JAX programs do."""
        guess = jax.nn.log_softmax(scores(parameters, window[:-1], lambda *arrays: attend(*(x[None] for x in arrays))[0], jax.nn.relu))
        return -jnp.take_along_axis(guess, window[1:, None], axis=-1).mean()

    def loss_of(parameters, windows):
        return jax.vmap(loss_of_one, (None, 0))(parameters, windows).mean()

    @jax.jit
    def step(parameters, velocity, windows):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, windows)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        return loss, jax.tree.map(lambda x, v: x - 0.1 * v, parameters, velocity), velocity

    velocity = jax.tree.map(jnp.zeros_like, parameters)
    losses = []
    for windows in batches():
        loss, parameters, velocity = step(parameters, velocity, jnp.asarray(windows))
        losses.append(float(loss))
    return losses


def jax_dense(q, k, v):
    import jax
    import jax.numpy as jnp

    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    score = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(CAUSAL, score, -jnp.inf)), v, precision="highest")


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gpt_in_jax(platform, dtype):
    jax = pytest.importorskip("jax")
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64  # before JAX 0.8
    try:
        device = jax.devices(platform)[0]
    except RuntimeError:
        pytest.skip(f"this JAX has no {platform}")

    def attend(q, k, v):
        return numbaflash.attention(q, k, v, causal=True)

    with enable_x64(dtype == "float64"), jax.default_device(device), jax.default_matmul_precision("highest"):
        assert_same_curve(jax_curve(attend, dtype), jax_curve(jax_dense, dtype), dtype)


def test_attention_of_other_libraries_is_forward():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4, 16), np.float32)
    options = {"scale": 0.3, "causal": "top_left", "window": (3, 1)}
    got, want = (attend(q, k, v, return_lse=True, **options) for attend in (numbaflash.attention, numbaflash.forward))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(numbaflash.attention(q, k, v, deterministic=True), numbaflash.forward(q, k, v))
    with pytest.raises(TypeError, match="deterministic must be True or False; got 1"):
        numbaflash.attention(q, k, v, deterministic=1)
    with pytest.raises(TypeError, match="k must be an array"):
        numbaflash.attention(q, [1.0], v)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_numpy", ROOT / "docs" / "examples" / "train_numpy.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_numpy"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_numpy"]


def test_gradients_of_the_example(example):
    """Every parameter's gradient, written by hand, against differences of the loss in float64, along a random direction."""
    size = example.Size(vocabulary=11, layers=2, heads=2, head_dim=6, length=9, batch=2)
    rng = np.random.default_rng(0)
    parameters = example.make_parameters(size, rng, np, "float64")
    tokens, targets = rng.integers(0, 11, (2, 2, 9))
    _, gradients = example.loss_and_gradients(parameters, tokens, targets, size, np)
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        ends = [
            example.loss_and_gradients(parameters | {name: parameters[name] + h * direction}, tokens, targets, size, np)[0] for h in (1e-6, -1e-6)
        ]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx((gradient * direction).sum(), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_the_example_learns(example, library):
    xp = pytest.importorskip(library)
    text, alphabet = example.read_text()
    assert text.max() < len(alphabet) and bytes(alphabet[token] for token in text[:200]).decode()
    size = example.Size(len(alphabet), heads=2, length=64, batch=4)
    told = []
    parameters, losses = example.train(size, text, 40, xp, report=lambda step, loss: told.append((step, loss)))
    assert told == list(enumerate(losses))
    assert losses[0] == pytest.approx(np.log(len(alphabet)), rel=0.1)
    assert np.mean(losses[-5:]) < losses[0] - 1.0
    written = example.write(parameters, [1, 2, 3], 5, size, xp)
    assert written[:3] == [1, 2, 3] and len(written) == 8 and all(0 <= token < len(alphabet) for token in written)


def test_the_example_runs(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_numpy.py", "--steps", "2"])
    monkeypatch.setattr(example, "write", lambda parameters, prompt, count, size, xp: prompt)
    example.main()
    told = capsys.readouterr().out
    assert "step    0   loss 4." in told and "step    1   loss" in told and told.rstrip().endswith("The kernel")
