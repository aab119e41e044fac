"""Serving on a GPU: keys appended and decoded step by step, in CUDA graphs, on streams, in threads and by two libraries at once.

The same conversation in NumPy on the CPU says what comes out.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import test_caches

import numbaflash
from numbaflash import dispatch
from numbaflash.problem import make_decode_problem
from numbaflash.testing import libraries

pytestmark = pytest.mark.gpu

LENGTHS = (0, 3, 130, 16, 61, 255, 31)
STEPS, SIZE, HEADS, KV_HEADS, DIM = 6, 16, 8, 2, 64


class Host:
    """NumPy on the CPU."""

    def put(self, x, dtype=None):
        return np.array(x, dtype)

    def fill(self, array, x):
        array[...] = x

    def get(self, x):
        return np.asarray(x, np.float64)


class Torch(Host):
    def __init__(self):
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")

    def put(self, x, dtype=None):
        made = self.torch.from_numpy(np.array(x)).cuda()
        return made if dtype is None else made.to(getattr(self.torch, dtype))

    def fill(self, array, x):
        array.copy_(self.torch.from_numpy(np.array(x)))

    def get(self, x):
        return libraries.to_numpy(x)

    def stream(self):
        return self.torch.cuda.Stream()

    def on(self, stream):
        return self.torch.cuda.stream(stream)

    def synchronize(self):
        self.torch.cuda.synchronize()

    def capture(self, work):
        """(replay, what the work returned)."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            kept = work()
        return graph.replay, kept


class Cupy(Torch):
    def __init__(self):
        self.cupy = pytest.importorskip("cupy")

    def put(self, x, dtype=None):
        return self.cupy.asarray(np.array(x, dtype))

    def fill(self, array, x):
        array[...] = self.cupy.asarray(np.array(x, array.dtype))

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def on(self, stream):
        return stream

    def synchronize(self):
        self.cupy.cuda.Device().synchronize()

    def capture(self, work):
        stream = self.stream()
        self.synchronize()
        with stream:
            stream.begin_capture()
            kept = work()
            graph = stream.end_capture()
        return lambda: (graph.launch(stream), stream.synchronize()), kept


LIBRARIES = {"torch": Torch, "cupy": Cupy}


class Conversation:
    """Sequences of several lengths in one pool of pages, each of which gets ``new`` tokens a step."""

    def __init__(self, library, dtype, paged=True, new=1, seed=0):
        self.library, self.dtype, self.new, self.seed = library, dtype, new, seed
        rng = np.random.default_rng(seed)
        batch, columns = len(LENGTHS), -(-(max(LENGTHS) + STEPS * new) // SIZE)
        rows = (batch * columns + 2, SIZE) if paged else (batch, columns * SIZE)
        table = rng.permutation(rows[0])[: batch * columns].reshape(batch, columns).astype(np.int32) if paged else None
        k, v = np.full((2, *rows, KV_HEADS, DIM), np.nan, np.float32)
        for b, length in enumerate(LENGTHS):
            for position in range(length):
                place = (table[b, position // SIZE], position % SIZE) if paged else (b, position)
                k[place], v[place] = rng.standard_normal((2, KV_HEADS, DIM))
        angles = np.arange(512)[:, None] / 100 ** np.linspace(0, 1, DIM // 4)
        self.caches = [library.put(x, dtype) for x in (k, v)]
        self.table = None if table is None else library.put(table)
        self.turn = {name: library.put(f(angles).astype(np.float32)) for name, f in (("cos", np.cos), ("sin", np.sin))}
        self.before, self.after = (library.put(np.array(LENGTHS, np.int32) + n) for n in (0, new))
        shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        self.tokens = {name: library.put(np.zeros((batch, new, heads, DIM), np.float32), dtype) for name, heads in shapes.items()}
        self.arguments = (*self.caches, self.after, *([] if table is None else [self.table]))

    def feed(self, number):
        """The tokens of a step, where the last ones were."""
        rng = np.random.default_rng((self.seed, number))
        for x in self.tokens.values():
            self.library.fill(x, rng.standard_normal(tuple(x.shape), np.float32))

    def plan(self):
        return numbaflash.plan_decode(self.tokens["q"], *self.arguments, causal=True, return_lse=True)

    def step(self, plan=None):
        """(turned queries, out, lse); all of it work for the device."""
        q, k, v = self.tokens.values()
        q = numbaflash.append_kv(k, v, *self.caches, self.before, self.table, q=q, **self.turn)
        if plan is None:
            out, lse = numbaflash.decode(q, *self.arguments, causal=True, return_lse=True)
        else:
            out, lse = plan.run(q, *self.arguments)
        self.before += self.new
        self.after += self.new
        return q, out, lse

    def answers(self, plan=None, steps=STEPS):
        """Results of each step in float64."""
        found = []
        for number in range(steps):
            self.feed(number)
            found.append([self.library.get(x) for x in self.step(plan)])
        return found


def kind_of(gpu):
    """(dtype, whether in pages) that a family can compute."""
    dtype = "float16" if gpu.family == "sm90" else "float32"
    shapes = [(1, 1, HEADS, DIM), (9, SIZE, KV_HEADS, DIM), (9, SIZE, KV_HEADS, DIM)]
    told = make_decode_problem(*shapes, (dtype,) * 3, seqlens_k=((1,), "int32"), page_table=((1, 9), "int32"))
    return dtype, not gpu.reasons(told, "decode")


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)


def close(found, wanted, dtype):
    tolerance = 1e-4 if dtype == "float32" else 8e-3
    for one, other in zip(found, wanted, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]()


@pytest.mark.parametrize("new", [1, 4])
def test_a_conversation(gpu, library, new):
    """Step by step, by calls and by a plan; a plan may merge in another order than a call."""
    dtype, paged = kind_of(gpu)
    with dispatch.use_family(gpu.family):
        called = Conversation(library, dtype, paged, new).answers()
        talk = Conversation(library, dtype, paged, new)
        planned = talk.answers(talk.plan())
    wanted = Conversation(Host(), dtype, paged, new).answers()
    for found in (called, planned):
        close(found, wanted, dtype)


@pytest.mark.parametrize("new", [1, 4])
def test_a_conversation_in_a_graph(gpu, library, new):
    """Append, decode and the growing lengths are one graph: a step is new tokens and a replay."""
    dtype, paged = kind_of(gpu)
    with dispatch.use_family(gpu.family):
        eager = Conversation(library, dtype, paged, new)
        wanted = eager.answers(eager.plan())
        talk = Conversation(library, dtype, paged, new)
        plan = talk.plan()
        rehearsal = Conversation(library, dtype, paged, new, seed=1)
        for number in range(2):  # builds what there is to build, and leaves memory in pools
            rehearsal.feed(number)
            rehearsal.step(rehearsal.plan())
        replay, results = library.capture(lambda: talk.step(plan))
        found = []
        for number in range(STEPS):
            talk.feed(number)
            library.synchronize()
            for x in results:
                library.fill(x, np.full(tuple(x.shape), np.nan, np.float32))
            library.synchronize()
            replay()
            library.synchronize()
            found.append([library.get(x) for x in results])
    same(found, wanted)
    assert library.get(talk.before).tolist() == [n + STEPS * new for n in LENGTHS]


def test_two_streams(gpu, library):
    """Conversations side by side do not see each other; each plan has its own workspace, each call too."""
    dtype, paged = kind_of(gpu)
    with dispatch.use_family(gpu.family):
        for planned in (True, False):
            alone = [Conversation(library, dtype, paged, seed=seed) for seed in (0, 1)]
            wanted = [talk.answers(talk.plan() if planned else None) for talk in alone]
            talks = [Conversation(library, dtype, paged, seed=seed) for seed in (0, 1)]
            plans, streams = [talk.plan() if planned else None for talk in talks], [library.stream() for _ in talks]
            found = [[], []]
            library.synchronize()
            for number in range(STEPS):
                for talk, stream, plan, answers in zip(talks, streams, plans, found, strict=True):
                    with library.on(stream):
                        talk.feed(number)
                        answers.append(talk.step(plan))
                library.synchronize()
                for answers in found:
                    answers[-1] = [library.get(x) for x in answers[-1]]
            for one, other in zip(found, wanted, strict=True):
                same(one, other)


def test_two_threads(gpu, library):
    """Each with a stream, a cache and a plan of its own, all at once."""
    dtype, paged = kind_of(gpu)
    together = threading.Barrier(4, timeout=60)
    with dispatch.use_family(gpu.family):
        alone = [Conversation(library, dtype, paged, seed=seed) for seed in range(4)]
        wanted = [talk.answers(talk.plan()) for talk in alone]
        library.synchronize()

        def work(seed):
            with dispatch.use_family(gpu.family), library.on(library.stream()):
                talk = Conversation(library, dtype, paged, seed=seed)
                plan = talk.plan()
                together.wait()
                return talk.answers(plan)

        with ThreadPoolExecutor(4) as pool:
            for one, other in zip(pool.map(work, range(4)), wanted, strict=True):
                same(one, other)


def test_two_libraries_at_once(gpu):
    """CuPy and torch in turn, each with its own arrays."""
    dtype, paged = kind_of(gpu)
    with dispatch.use_family(gpu.family):
        talks = [Conversation(make(), dtype, paged) for make in LIBRARIES.values()]
        plans = [talk.plan() for talk in talks]
        for number in range(STEPS):
            answers = []
            for talk, plan in zip(talks, plans, strict=True):
                talk.feed(number)
                answers.append([talk.library.get(x) for x in talk.step(plan)])
            same([answers[0]], [answers[1]])


def test_one_cache_of_two_libraries(gpu):
    """CuPy appends where torch decodes: both caches are the same memory."""
    torch, cupy = Torch().torch, Cupy().cupy
    dtype, paged = kind_of(gpu)
    with dispatch.use_family(gpu.family):
        wanted = Conversation(Torch(), dtype, paged).answers()
        talk, found = Conversation(Torch(), dtype, paged), []
        for number in range(STEPS):
            talk.feed(number)
            torch.cuda.synchronize()
            lent = {name: cupy.from_dlpack(x) for name, x in talk.tokens.items()}
            caches, before = [cupy.from_dlpack(x) for x in talk.caches], cupy.from_dlpack(talk.before)
            table = None if talk.table is None else cupy.from_dlpack(talk.table)
            turn = {name: cupy.from_dlpack(x) for name, x in talk.turn.items()}
            q = numbaflash.append_kv(lent["k"], lent["v"], *caches, before, table, q=lent["q"], **turn)
            cupy.cuda.Device().synchronize()
            q = torch.from_dlpack(q)
            out, lse = numbaflash.decode(q, *talk.arguments, causal=True, return_lse=True)
            found.append([talk.library.get(x) for x in (q, out, lse)])
            talk.before += 1
            talk.after += 1
    same(found, wanted)


def test_a_run_allocates_nothing_and_waits_for_nothing(gpu):
    library = Torch()
    torch, (dtype, paged) = library.torch, kind_of(gpu)
    with dispatch.use_family(gpu.family):
        talk = Conversation(library, dtype, paged)
        plan, q = talk.plan(), talk.tokens["q"]
        plan.run(q, *talk.arguments)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda._sleep(10**9)
        start = time.perf_counter()
        for _ in range(100):
            plan.run(q, *talk.arguments)
        handed_over = time.perf_counter() - start
        assert handed_over < 0.25, "the host waited"
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.cuda.synchronize()
        print(f"{gpu.family}: plan.run costs the host {handed_over / 100 * 1e6:.1f} us a call")


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dim, dim_v, rotary", [(128, 128, 128), (64, 32, 32), (576, 512, 64), (7, 5, 6)])
def test_append(library, page_size, dim, dim_v, rotary):
    """What the device writes is what the host's formula says, and nothing else is written."""
    rng = np.random.default_rng(0)
    for n, (dtype, tokens) in enumerate((("float16", 1), ("float32", 33), ("float64", 3), ("float16", 64))):
        batch = (5, 70)[n % 2]
        lengths = rng.integers(-3, 130, batch)
        shape = {"batch": batch, "tokens": tokens, "dim": dim, "dim_v": dim_v, "capacity": 160, "page_size": page_size, "positions": 150}
        given = test_caches.make(dtype=dtype, lengths=lengths, rotary=rotary * (n != 1), heads=4, seed=n, **shape)
        if n % 2:
            given["seqlens_k"] = given["seqlens_k"].astype(np.int64)
        if page_size:
            given["page_table"][0, 0], given["page_table"][1, 1] = -1, 2**31 - 1
        arrays = {name: library.put(x) for name, x in given.items()}
        rotated = numbaflash.append_kv(**arrays, interleaved=n % 2 == 0)
        results = [arrays["k_cache"], arrays["v_cache"], rotated]
        test_caches.check([x if x is None else library.get(x) for x in results], test_caches.expected(given, n % 2 == 0), dtype)


def test_a_cascade_is_the_flat_computation(gpu, library):
    dtype, paged = kind_of(gpu)
    rng = np.random.default_rng(0)
    k_prefix, v_prefix = (library.put(rng.standard_normal((200, KV_HEADS, DIM), np.float32), dtype) for _ in "kv")
    with dispatch.use_family(gpu.family):
        talk, host = Conversation(library, dtype, paged), Conversation(Host(), dtype, paged)
        for each in (talk, host):
            each.feed(0)
        found = numbaflash.cascade(talk.step()[0], k_prefix, v_prefix, *talk.arguments[:2], talk.before, *talk.arguments[3:], return_lse=True)
    q = host.step()[0]
    prefix = [library.get(x).astype(dtype) for x in (k_prefix, v_prefix)]
    wanted = numbaflash.cascade(q, *prefix, *host.arguments[:2], host.before, *host.arguments[3:], return_lse=True)
    close([[library.get(x) for x in found]], [wanted], dtype)
