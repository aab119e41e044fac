"""Train a small transformer with nothing but arrays: forward and backward by hand, attention by numbaflash.

    python docs/examples/train_numpy.py                 NumPy, on the CPU: a few minutes
    python docs/examples/train_numpy.py --cupy          CuPy, on a GPU: the same lines

It learns to continue text, byte by byte. The text is this documentation. Each layer is a pair of functions: one returns its result and what its
gradient will need, the other takes the gradient of the result and returns that of the input.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import numbaflash as nf

DOCS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Size:
    """Of the model and its batches."""

    vocabulary: int
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    length: int = 64
    batch: int = 12

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def read_text(folder: Path = DOCS) -> tuple[np.ndarray, bytes]:
    """The pages as numbers, and the byte that each number stands for."""
    text = b"\n".join(page.read_bytes() for page in sorted(folder.glob("*.md")))
    alphabet = bytes(sorted(set(text)))
    number = np.zeros(256, np.int64)
    number[list(alphabet)] = np.arange(len(alphabet))
    return number[np.frombuffer(text, np.uint8)], alphabet


def make_parameters(size: Size, rng, xp, dtype="float32") -> dict:
    def normal(*shape, scale):
        return xp.asarray(rng.standard_normal(shape) * scale, dtype=dtype)

    width = size.width
    parameters = {"embedding": normal(size.vocabulary, width, scale=0.02), "position": normal(size.length, width, scale=0.02)}
    for layer in range(size.layers):
        parameters[f"{layer}.qkv"] = normal(width, 3 * width, scale=width**-0.5)
        parameters[f"{layer}.out"] = normal(width, width, scale=(2 * size.layers * width) ** -0.5)
        parameters[f"{layer}.up"] = normal(width, 4 * width, scale=width**-0.5)
        parameters[f"{layer}.down"] = normal(4 * width, width, scale=(8 * size.layers * width) ** -0.5)
    return parameters


def rows(x):
    """As a matrix: one large product is faster than one for each batch entry."""
    return x.reshape(-1, x.shape[-1])


def matmul(x, w):
    return (rows(x) @ w).reshape(*x.shape[:-1], -1)


def matmul_backward(dy, x, w):
    """Gradients of x and w, where y = matmul(x, w)."""
    return matmul(dy, w.T), rows(x).T @ rows(dy)


def normalize(x):
    """Each row divided by its root mean square."""
    factor = 1 / (x**2).mean(axis=-1, keepdims=True) ** 0.5
    return x * factor, factor


def normalize_backward(dy, y, factor):
    return factor * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def attend(x, w_qkv, w_out, heads):
    batch, length, width = x.shape
    h, factor = normalize(x)
    qkv = matmul(h, w_qkv).reshape(batch, length, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]  # views: any strides do
    out, lse = nf.forward(q, k, v, causal=True, return_lse=True)
    return x + matmul(out.reshape(x.shape), w_out), (h, factor, qkv, out, lse)


def attend_backward(dy, saved, w_qkv, w_out, xp):
    h, factor, qkv, out, lse = saved
    dout, dw_out = matmul_backward(dy, out.reshape(dy.shape), w_out)
    dqkv = xp.empty_like(qkv)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    dq, dk, dv = dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2]
    nf.backward(dout.reshape(out.shape), q, k, v, out, lse, causal=True, dq=dq, dk=dk, dv=dv)  # written in place
    dh, dw_qkv = matmul_backward(dqkv.reshape(*dy.shape[:2], -1), h, w_qkv)
    return dy + normalize_backward(dh, h, factor), dw_qkv, dw_out


def think(x, w_up, w_down):
    h, factor = normalize(x)
    active = matmul(h, w_up).clip(0)
    return x + matmul(active, w_down), (h, factor, active)


def think_backward(dy, saved, w_up, w_down):
    h, factor, active = saved
    dactive, dw_down = matmul_backward(dy, active, w_down)
    dh, dw_up = matmul_backward(dactive * (active > 0), h, w_up)
    return dy + normalize_backward(dh, h, factor), dw_up, dw_down


def predict(parameters, tokens, size: Size):
    """Scores of the next token, (batch, length, vocabulary), and what the backward needs."""
    x = parameters["embedding"][tokens] + parameters["position"][: tokens.shape[1]]
    saved = []
    for layer in range(size.layers):
        x, of_attention = attend(x, parameters[f"{layer}.qkv"], parameters[f"{layer}.out"], size.heads)
        x, of_thought = think(x, parameters[f"{layer}.up"], parameters[f"{layer}.down"])
        saved.append((of_attention, of_thought))
    y, factor = normalize(x)
    return matmul(y, parameters["embedding"].T), (saved, y, factor)


def loss_and_gradients(parameters, tokens, targets, size: Size, xp):
    """Mean cross-entropy in nats, and its gradient with respect to every parameter."""
    scores, (saved, y, factor) = predict(parameters, tokens, size)
    scores = scores - scores.max(axis=-1, keepdims=True)
    log_probability = scores - xp.log(xp.exp(scores).sum(axis=-1, keepdims=True))
    place = (*xp.indices(targets.shape), targets)
    loss = -log_probability[place].mean()

    dscores = xp.exp(log_probability)
    dscores[place] -= 1
    dy, dembedding_t = matmul_backward(dscores / targets.size, y, parameters["embedding"].T)
    dx = normalize_backward(dy, y, factor)
    gradients = {"embedding": xp.ascontiguousarray(dembedding_t.T)}
    for layer in reversed(range(size.layers)):
        of_attention, of_thought = saved[layer]
        up, down, qkv, out = (parameters[f"{layer}.{name}"] for name in ("up", "down", "qkv", "out"))
        dx, gradients[f"{layer}.up"], gradients[f"{layer}.down"] = think_backward(dx, of_thought, up, down)
        dx, gradients[f"{layer}.qkv"], gradients[f"{layer}.out"] = attend_backward(dx, of_attention, qkv, out, xp)
    gradients["position"] = dx.sum(axis=0)
    one_hot = xp.arange(size.vocabulary)[:, None] == tokens.reshape(-1)
    gradients["embedding"] += one_hot.astype(dx.dtype) @ rows(dx)
    return loss, gradients


class Adam:
    """Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), with a rate that rises over the first steps."""

    def __init__(self, parameters, rate=2e-3, warmup=40, decay=(0.9, 0.99), epsilon=1e-8):
        self.parameters, self.rate, self.warmup, self.decay, self.epsilon, self.step = parameters, rate, warmup, decay, epsilon, 0
        self.mean = {name: 0 * x for name, x in parameters.items()}
        self.square = {name: 0 * x for name, x in parameters.items()}

    def update(self, gradients):
        self.step += 1
        slow, slower = self.decay
        rate = self.rate * min(1.0, self.step / self.warmup)
        for name, g in gradients.items():
            self.mean[name] += (1 - slow) * (g - self.mean[name])
            self.square[name] += (1 - slower) * (g**2 - self.square[name])
            mean, square = self.mean[name] / (1 - slow**self.step), self.square[name] / (1 - slower**self.step)
            self.parameters[name] -= rate * mean / (square**0.5 + self.epsilon)


def train(size: Size, text, steps: int, xp=np, seed: int = 0, report=lambda step, loss: None):
    """Train a new model; returns its parameters and the loss of each step."""
    rng = np.random.default_rng(seed)
    parameters = make_parameters(size, rng, xp)
    optimizer = Adam(parameters)
    losses = []
    for step in range(steps):
        starts = rng.integers(0, len(text) - size.length, size.batch)
        windows = text[starts[:, None] + np.arange(size.length + 1)]
        loss, gradients = loss_and_gradients(parameters, xp.asarray(windows[:, :-1]), xp.asarray(windows[:, 1:]), size, xp)
        optimizer.update(gradients)
        losses.append(float(loss))
        report(step, losses[-1])
    return parameters, losses


def write(parameters, prompt, count: int, size: Size, xp=np, seed: int = 0, temperature: float = 0.5):
    """Continue a prompt of tokens, one drawn after the other."""
    rng = np.random.default_rng(seed)
    tokens = list(prompt)
    for _ in range(count):
        scores, _ = predict(parameters, xp.asarray([tokens[-size.length :]]), size)
        noise = xp.asarray(rng.gumbel(size=size.vocabulary))  # the largest sum is a draw by the probabilities
        tokens.append(int((scores[0, -1] / temperature + noise).argmax()))
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="training steps (default: %(default)s)")
    parser.add_argument("--cupy", action="store_true", help="train on the GPU with CuPy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    xp = __import__("cupy") if arguments.cupy else np

    text, alphabet = read_text()
    size = Size(len(alphabet))
    print(f"{len(text)} bytes of text, {len(alphabet)} different: a model that knows nothing has a loss of {np.log(len(alphabet)):.2f}")
    start = time.perf_counter()

    def report(step, loss):
        if step % 50 == 0 or step == arguments.steps - 1:
            print(f"step {step:4}   loss {loss:.3f}   {time.perf_counter() - start:5.1f} s", flush=True)

    parameters, _ = train(size, text, arguments.steps, xp, arguments.seed, report)
    prompt = [alphabet.index(byte) for byte in b"The kernel "]
    print(bytes(alphabet[token] for token in write(parameters, prompt, 300, size, xp)).decode(errors="replace"))


if __name__ == "__main__":
    main()
