"""The server's loop: continuous batching, chunks of prompts and steps of answers apart."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from .engines import Engine
from .model import Model


@dataclass(frozen=True)
class Load:
    """What is asked of a server: so many requests of fixed lengths, at random times (a Poisson process).

    Attributes
    ----------
    requests : int
    prompt, answer : int
        Tokens of each.
    rate : float
        Requests a second on average; infinity is all at once.
    seed : int
    """

    requests: int = 64
    prompt: int = 2048
    answer: int = 128
    rate: float = 16.0
    seed: int = 0

    def __post_init__(self):
        for name in ("requests", "prompt", "answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate must be positive; got {self.rate}")


@dataclass
class Request:
    """A request, and what became of it; times are seconds from the start of the run."""

    arrival: float
    prompt: list[int]
    answer: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    failed: str = ""


def arrivals(load: Load, vocabulary: int) -> list[Request]:
    """The requests of a load, the same each time."""
    draw, now, found = random.Random(load.seed), 0.0, []
    for _ in range(load.requests):
        found.append(Request(now, [draw.randrange(vocabulary) for _ in range(load.prompt)], load.answer))
        now += draw.expovariate(load.rate)
    return found


class Server:
    """Serves requests with an engine.

    Parameters
    ----------
    model : Model
    engine : Engine
    chunk : int
        Tokens of a prompt that are computed between two steps of answers.
    graphs : bool
        Steps of answers are captured in CUDA graphs.
    """

    def __init__(self, model: Model, engine: Engine, chunk: int = 512, graphs: bool = True):
        self.model, self.engine, self.chunk = model, engine, chunk
        self._on_gpu = model.device.type == "cuda"
        self._tokens = torch.zeros(engine.slots, 1, device=model.device, dtype=torch.int64)
        self._lengths = torch.full((engine.slots,), -1, device=model.device, dtype=torch.int32)
        self._graphs = {} if graphs and self._on_gpu else None

    @torch.no_grad()
    def run(self, requests: list[Request]) -> float:
        """Serve the requests, and return the seconds it took. Each request has its tokens and their times afterwards."""
        coming = deque(sorted(requests, key=lambda each: each.arrival))
        free, answering, prompt = list(range(self.engine.slots)), {}, None
        self._lengths.fill_(-1)
        start = time.perf_counter()
        while coming or prompt or answering:
            now = time.perf_counter() - start
            if prompt is None and free and coming and coming[0].arrival <= now and self.engine.reserve(free[-1], self._room(coming[0])):
                prompt = coming.popleft(), free.pop(), 0
            if prompt:
                prompt = self._prefill(*prompt, answering, start)
            if answering:
                self._answer(answering, free, start)
            elif prompt is None and coming:
                time.sleep(max(0.0, min(coming[0].arrival - (time.perf_counter() - start), 0.001)))
        return time.perf_counter() - start

    def warm_up(self, load: Load) -> None:
        """Build kernels and capture graphs for a load before it is measured."""
        few = Load(requests=min(self.engine.slots, 2), prompt=load.prompt, answer=min(load.answer, 4), rate=float("inf"))
        self.run(arrivals(few, self.model.shape.vocabulary))
        if self._graphs is not None:
            for tokens in range(load.prompt, load.prompt + load.answer):
                self._captured(self.engine.variant(tokens))

    @staticmethod
    def _room(request):
        return len(request.prompt) + request.answer

    def _prefill(self, request, slot, done, answering, start):
        """The next chunk of a prompt; what is left of it, or None where its first token is there."""
        end = min(done + self.chunk, len(request.prompt))
        tokens = torch.tensor([request.prompt[done:end]], device=self.model.device)
        logits = self.model.forward(tokens, lambda layer, q, k, v: self.engine.prefill(slot, done, layer, q, k, v))
        if end < len(request.prompt):
            return request, slot, end
        self.engine.finish_prompt(slot, end)
        self._emit(request, logits, logits.argmax(-1), start)
        self._tokens[slot], self._lengths[slot] = request.tokens[-1], end
        answering[slot] = request
        return None

    def _answer(self, answering, free, start):
        """A token for each slot that is answering, and an end to those that are complete."""
        for slot in [slot for slot, request in answering.items() if len(request.tokens) >= request.answer or request.failed]:
            del answering[slot]
            self._lengths[slot] = -1
            self.engine.release(slot)
            free.append(slot)
        if not answering:
            return
        longest = max(len(request.prompt) + len(request.tokens) for request in answering.values())
        logits, chosen = self._step(self.engine.variant(longest - 1))
        finite = torch.isfinite(logits).all(dim=-1)
        host = torch.stack([chosen, finite.long()]).tolist()  # which waits for the step
        for slot, request in answering.items():
            self._record(request, host[0][slot], host[1][slot], start)
        self._tokens.copy_(chosen[:, None])
        self._lengths += (self._lengths >= 0).int()

    def _emit(self, request, logits, chosen, start):
        self._record(request, int(chosen[0]), bool(torch.isfinite(logits).all()), start)

    @staticmethod
    def _record(request, token, finite, start):
        request.tokens.append(token)
        request.times.append(time.perf_counter() - start)
        if not finite:
            request.failed = "a logit is no number"

    def _compute(self, variant):
        logits = self.model.forward(self._tokens, lambda layer, q, k, v: self.engine.step(layer, q, k, v, self._lengths, variant))
        return logits, logits.argmax(-1)

    def _step(self, variant):
        if self._graphs is None:
            return self._compute(variant)
        graph, results = self._captured(variant)
        graph.replay()
        return results

    def _captured(self, variant):
        if variant not in self._graphs:
            saved = self._lengths.clone()
            self._lengths.fill_(-1)  # so that nothing is written while it is tried
            self._compute(variant)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = self._compute(variant)
            self._lengths.copy_(saved)
            self._graphs[variant] = graph, results
        return self._graphs[variant]
