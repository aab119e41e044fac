"""Generate text with a small transformer and a paged cache: several requests at once, each joining and leaving when it likes.

    python docs/examples/generate.py                    NumPy, on the CPU
    python docs/examples/generate.py --on torch-cuda    the same lines on a GPU; also cupy and, on the CPU, torch

The model has what models of today have: RMSNorm, rotary embedding, query heads in groups that share a key/value head. It is trained first, for some
seconds, on the lines below, so that there is something to read. Then requests are answered token by token. Keys and values of all requests lie in one
pool of pages; which pages are whose, only a table knows.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is there: matrices are small, and threads would wait for each other

import numpy as np

import numbaflash as nf

TEXT = b"""A query asks what all the keys have seen,
and softmax weighs the answers in between.
The weighted values, added, make the sum:
a word that tells the next one what may come.
The keys and values stay where they were written,
page after page, in order or in any;
a table knows the page of every token,
so memory is shared by few and many.
"""
PROMPTS = (b"A query asks", b"The keys and values", b"a table", b"and softmax weighs the", b"so memory", b"page after page, in")

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 2, 4, 2, 16  # a token is a byte of ASCII
WIDTH, LONGEST, EPSILON = HEADS * HEAD_DIM, 128, 1e-6
CHUNK = 16  # tokens of a prompt that are computed together: 64 is the most that decode takes


@dataclass(frozen=True)
class Arrays:
    """The array library that all of it runs on: what it cannot be asked for by the same name everywhere."""

    name: str = "numpy"
    dtype: str = "float32"  # of the cache; the rest of the model is float32

    @property
    def xp(self):
        return __import__(self.name.removesuffix("-cuda"))

    def put(self, x):
        on = {"device": "cuda"} if self.name == "torch-cuda" else {}
        return self.xp.asarray(x, **on)

    def get(self, x):
        return x.get() if self.name == "cupy" else np.asarray(x.cpu() if self.name.startswith("torch") else x)

    def cast(self, x, dtype=None):
        dtype = getattr(self.xp, dtype or self.dtype)
        return x.to(dtype) if self.name.startswith("torch") else x.astype(dtype)


# The model


def make_parameters(rng) -> dict:
    def normal(rows, columns, scale=1.0):
        return (rng.standard_normal((rows, columns)) * scale * rows**-0.5).astype(np.float32)

    parameters = {"embedding": normal(VOCABULARY, WIDTH), "gain": np.ones(WIDTH, np.float32)}
    for layer in range(LAYERS):
        parameters |= {f"{layer}.{name}": np.ones(WIDTH, np.float32) for name in ("attend gain", "think gain")}
        parameters[f"{layer}.qkv"] = normal(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        parameters[f"{layer}.out"] = normal(WIDTH, WIDTH, 0.5)
        parameters[f"{layer}.up"], parameters[f"{layer}.down"] = normal(WIDTH, 4 * WIDTH), normal(4 * WIDTH, WIDTH, 0.5)
    angles = np.arange(LONGEST)[:, None] * 100.0 ** -np.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    return parameters | {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def normalize(x):
    """RMSNorm without its gain."""
    return x / ((x**2).mean(-1, keepdims=True) + EPSILON) ** 0.5


def rotate(x, cos, sin, xp=np):
    """Rotary embedding (Su et al., 2021) of (batch, tokens, heads, head_dim): a turn by each position, so that scores know distances."""
    a, b = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def predict(p, tokens, attend, saved=None):
    """Scores of the token after each: (batch, tokens, vocabulary). ``attend(layer, q, k, v)`` knows positions, and of a cache if there is one."""
    x = p["embedding"][tokens]
    for layer in range(LAYERS):
        h = normalize(x)
        qkv = (h * p[f"{layer}.attend gain"] @ p[f"{layer}.qkv"]).reshape(*x.shape[:2], HEADS + 2 * KV_HEADS, HEAD_DIM)
        out = attend(layer, qkv[:, :, :HEADS], qkv[:, :, HEADS:-KV_HEADS], qkv[:, :, -KV_HEADS:]).reshape(x.shape)
        y = x + out @ p[f"{layer}.out"]
        g = normalize(y)
        active = (g * p[f"{layer}.think gain"] @ p[f"{layer}.up"]).clip(0)
        if saved is not None:
            saved.append((x, h, out, y, g, active))
        x = y + active @ p[f"{layer}.down"]
    if saved is not None:
        saved.append((x, normalize(x)))
    return normalize(x) * p["gain"] @ p["embedding"].T


# Generation


@dataclass
class Request:
    prompt: list
    count: int  # tokens wanted
    temperature: float = 0.0  # 0: always the likeliest token
    seed: int = 0
    tokens: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    slot: int = -1

    def __post_init__(self):
        self.size = len(self.prompt) + self.count
        self.rng = np.random.default_rng(self.seed)  # its own, so that it does not matter who else is in the batch

    @property
    def done(self):
        return len(self.tokens) == self.count

    def choose(self, scores):
        """Append the next token: the largest sum of scores and Gumbel noise is a draw by the probabilities."""
        if self.temperature:
            scores = scores / self.temperature + self.rng.gumbel(size=VOCABULARY)
        self.tokens.append(int(scores.argmax()))


class Generator:
    """Answers requests, ``slots`` of them at once, with a cache of so many pages for all."""

    def __init__(self, parameters, arrays: Arrays, slots=3, pages=24, page_size=8):
        self.arrays, self.slots, self.page_size = arrays, slots, page_size
        self.parameters = {name: arrays.put(x) for name, x in parameters.items()}
        # NaN, to show that nobody ever reads what nobody has written. The same page numbers serve all layers.
        empty = np.full((pages, page_size, KV_HEADS, HEAD_DIM), np.nan, np.float32)
        self.caches = [tuple(arrays.cast(arrays.put(empty.copy())) for _ in "kv") for _ in range(LAYERS)]
        self.free = list(range(pages))
        self.table = np.full((slots, -(-LONGEST // page_size)), -1, np.int32)  # of each slot: where its tokens' keys and values are
        self.lengths = np.zeros(slots, np.int32)

    def step(self, slots, tokens):
        """Scores after so many new tokens of each of these slots; their keys and values are in the cache from then on."""
        p, put, cast, new = self.parameters, self.arrays.put, self.arrays.cast, len(tokens[0])
        before, table = put(self.lengths[slots]), put(self.table[slots])
        after = put(self.lengths[slots] + new)  # the present tokens count: a query sees itself

        def attend(layer, q, k, v):
            cache = self.caches[layer]
            q = nf.append_kv(cast(k), cast(v), *cache, before, table, q=cast(q), cos=p["cos"], sin=p["sin"])
            # causal for the chunks of a prompt; a single query stands at the end and sees all.
            return cast(nf.decode(q, *cache, after, table, causal=True), "float32")

        scores = predict(p, put(np.asarray(tokens)), attend)
        self.lengths[slots] += new
        return self.arrays.get(scores[:, -1])

    def join(self, request, slot):
        """Give a request its pages, for all tokens that it may ever have: then none has to wait half way. Compute its prompt, a chunk at a time."""
        needed = -(-request.size // self.page_size)
        request.slot, request.pages = slot, [self.free.pop() for _ in range(needed)]
        self.table[slot], self.lengths[slot] = -1, 0
        self.table[slot, :needed] = request.pages
        for start in range(0, len(request.prompt), CHUNK):
            scores = self.step([slot], [request.prompt[start : start + CHUNK]])
        request.choose(scores[0])

    def leave(self, request):
        self.free += request.pages  # the next request finds old keys there, and never looks at them
        request.pages = []

    def run(self, requests, report=lambda words: None):
        """Continuous batching: who is done leaves at once, and the next one joins those that are half way."""
        for request in requests:
            if not request.prompt or request.count < 1 or request.size > min(LONGEST, self.page_size * len(self.free)):
                raise ValueError(f"a request needs a prompt, a token to generate, and room for all of its {request.size} tokens")
        waiting, running = list(requests), []
        while waiting or running:
            for request in [r for r in running if r.done]:
                report(f"slot {request.slot}: done, {len(request.pages)} pages are free again")
                running.remove(request)
                self.leave(request)
            # In their turn: who needs more pages than are free waits, and those behind it.
            while waiting and len(running) < self.slots and waiting[0].size <= self.page_size * len(self.free):
                running.append(waiting.pop(0))
                self.join(running[-1], min({*range(self.slots)} - {r.slot for r in running}))
                report(f"slot {running[-1].slot}: {bytes(running[-1].prompt)!r} joins, pages {running[-1].pages}")
            if active := [r for r in running if not r.done]:  # one token for all of them
                for request, row in zip(active, self.step([r.slot for r in active], [[r.tokens[-1]] for r in active]), strict=True):
                    request.choose(row)


def generate_without_cache(parameters, request, arrays: Arrays):
    """The same tokens by all of the sequence for each: what the cache saves."""
    p, cast = {name: arrays.put(x) for name, x in parameters.items()}, arrays.cast

    def attend(_, q, k, v):
        q, k = (rotate(x, p["cos"], p["sin"], arrays.xp) for x in (q, k))
        return cast(nf.forward(cast(q), cast(k), cast(v), causal=True), "float32")

    while not request.done:
        scores = predict(p, arrays.put(np.array([[*request.prompt, *request.tokens]])), attend)
        request.choose(arrays.get(scores[0, -1]))


# Training, in NumPy: docs/examples/train_numpy.py explains how


def normalize_backward(dh, h, x):
    return (dh - h * (dh * h).mean(-1, keepdims=True)) / ((x**2).mean(-1, keepdims=True) + EPSILON) ** 0.5


def loss_and_gradients(p, tokens):
    """Mean cross-entropy in nats of predicting each token from those before it, and its gradient by every parameter."""
    kept, saved, gradients = [], [], {}

    def attend(_, q, k, v):
        q, k = (rotate(x, p["cos"], p["sin"]) for x in (q, k))
        out, lse = nf.forward(q, k, v, causal=True, return_lse=True)
        kept.append((q, k, v, out, lse))
        return out

    def gain(dh, name, h):
        gradients[name] = (dh * h).sum((0, 1))
        return dh * p[name]

    def product(dy, name, x):
        gradients[name] = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
        return dy @ p[name].T

    scores = predict(p, tokens[:, :-1], attend, saved)
    place = (*np.indices(tokens[:, 1:].shape), tokens[:, 1:])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    loss = -np.log(weights[place]).mean()
    weights[place] -= 1
    dscores = weights / place[0].size
    x, h = saved.pop()
    gradients["embedding"] = dscores.reshape(-1, VOCABULARY).T @ (h * p["gain"]).reshape(-1, WIDTH)
    dx = normalize_backward(gain(dscores @ p["embedding"], "gain", h), h, x)
    for layer in reversed(range(LAYERS)):
        (x, h, out, y, g, active), (q, k, v, o, lse) = saved.pop(), kept.pop()
        dactive = product(dx, f"{layer}.down", active) * (active > 0)
        dg = gain(product(dactive, f"{layer}.up", g * p[f"{layer}.think gain"]), f"{layer}.think gain", g)
        dy = dx + normalize_backward(dg, g, y)
        dq, dk, dv = nf.backward(product(dy, f"{layer}.out", out).reshape(o.shape), q, k, v, o, lse, causal=True)
        dq, dk = (rotate(d, p["cos"], -p["sin"]) for d in (dq, dk))  # turned back
        dqkv = np.concatenate([dq, dk, dv], 2).reshape(*x.shape[:2], -1)
        dh = gain(product(dqkv, f"{layer}.qkv", h * p[f"{layer}.attend gain"]), f"{layer}.attend gain", h)
        dx = dy + normalize_backward(dh, h, x)
    np.add.at(gradients["embedding"], tokens[:, :-1], dx)
    return loss, gradients


def train(steps=150, seed=0, rate=4e-3, report=lambda words: None):
    """Parameters that know the lines above by heart, by Adam."""
    rng = np.random.default_rng(seed)
    parameters, text, moments = make_parameters(rng), np.frombuffer(TEXT * 2, np.uint8), {}
    for step in range(steps):
        starts = rng.integers(0, len(TEXT), 8)
        loss, gradients = loss_and_gradients(parameters, text[starts[:, None] + np.arange(LONGEST - 31)].astype(np.int64))
        now = rate * min(1, (step + 1) / 20, 2 * (1 - step / steps))
        for name, g in gradients.items():
            mean, square = moments.get(name, (0, 0))
            mean, square = moments[name] = 0.9 * mean + 0.1 * g, 0.98 * square + 0.02 * g**2
            parameters[name] -= now * mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.98 ** (step + 1))) ** 0.5 + 1e-8)
        if step % 30 == 29:
            report(f"step {step + 1:3}   loss {loss:.3f}")
    return parameters


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("numpy", "cupy", "torch", "torch-cuda"), default="numpy", help="array library (default: %(default)s)")
    parser.add_argument("--dtype", help="of the cache (default: float16 on a GPU, else float32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest byte (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="of training (default: %(default)s)")
    given = parser.parse_args()
    arrays = Arrays(given.on, given.dtype or ("float16" if given.on in ("cupy", "torch-cuda") else "float32"))

    parameters = train(given.steps, report=print)
    requests = [Request(list(prompt), 40 + 9 * n, given.temperature, seed=n) for n, prompt in enumerate(PROMPTS)]
    start = time.perf_counter()
    Generator(parameters, arrays).run(requests, print)
    print(f"{sum(r.count for r in requests)} tokens in {time.perf_counter() - start:.1f} s\n")
    for request in requests:
        print(f"[{bytes(request.prompt).decode()}]{bytes(request.tokens).decode(errors='replace')}\n")


if __name__ == "__main__":
    main()
