"""decode, cascade and append_kv where torch records: torch.compile, torch.export, make_fx, fake tensors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import numbaflash as nf
from numbaflash.problem import UnsupportedError

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

PAGES = torch.randperm(21, generator=torch.Generator().manual_seed(0)).to(torch.int32).reshape(7, 3)
LENGTHS = torch.tensor([37, 20, 0, 5, 16, 1, 46], dtype=torch.int32)
NUMBERS = (None, 1, None, None, None, None)
"""scale, causal, left, right, softcap and num_splits of an operator."""


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def paged(batch=3, tokens=2):
    """q, caches, lengths and page table of `decode`."""
    return random(batch, tokens, 4, 16), random(22, 16, 2, 16), random(22, 16, 2, 24), LENGTHS[:batch], PAGES[:batch]


def contiguous(batch=3):
    return random(batch, 1, 4, 16), random(batch, 40, 2, 16), random(batch, 40, 2, 24), LENGTHS[:batch]


def prefixed(batch=3, tokens=2):
    """Arguments of `cascade`."""
    q, *cache = paged(batch, tokens)
    return q, random(20, 2, 16), random(20, 2, 24), *cache


def appended(batch=3, tokens=2):
    """Arguments of `step`, with caches of their own."""
    q, k, v, lengths, table = paged(batch, tokens)
    return q, random(batch, tokens, 2, 16), random(batch, tokens, 2, 24), k.clone(), v.clone(), lengths, table, random(50, 8), random(50, 8)


def step(q, k, v, k_cache, v_cache, lengths, table, cos, sin):
    """As a model has it: the new token's keys are rotated into the cache, then attended."""
    q = nf.append_kv(k * 2, v, k_cache, v_cache, lengths, table, q=q * 2, cos=cos, sin=sin)
    return nf.decode(q, k_cache, v_cache, lengths + k.shape[1], table, causal=True) * 2


def compiled(function, **options):
    torch._dynamo.reset()  # its limit of recompilations counts over all tests
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


FUNCTIONS = {
    "decode": (lambda *x: nf.decode(*x, causal=True), paged),
    "decode, lse": (lambda *x: nf.decode(*x, return_lse=True, num_splits=2, scale=-0.3), paged),
    "decode, contiguous, options": (
        lambda *x: nf.decode(*x, causal=True, window=(9, None), softcap=2.0, sinks=torch.ones(4), alibi_slopes=torch.ones(4)),
        contiguous,
    ),
    "cascade": (lambda *x: nf.cascade(*x, causal=True), prefixed),
    "cascade, lse": (lambda *x: nf.cascade(*x, window=(None, 0), return_lse=True, sinks=torch.ones(4)), prefixed),
    "append_kv and decode": (step, appended),
}
functions = pytest.mark.parametrize(("function", "made"), FUNCTIONS.values(), ids=FUNCTIONS)


def assert_same(function, other, arrays):
    """Results and caches, bit for bit."""
    arrays, others = ([x.clone() for x in arrays] for _ in range(2))
    torch.testing.assert_close(function(*arrays), other(*others), rtol=0, atol=0)
    torch.testing.assert_close(arrays, others, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["decode, contiguous, options", "cascade, lse", "append_kv and decode"])
def test_compile(name):
    function, made = FUNCTIONS[name]
    assert_same(compiled(function), function, made())


@pytest.mark.parametrize(
    ("function", "made"),
    [
        (lambda *x: nf.decode(*x, scale=x[0].shape[-1] ** -0.5), paged),
        (lambda *x: nf.cascade(*x, causal=True, return_lse=True), prefixed),
        (step, appended),
    ],
    ids=["decode", "cascade", "append_kv and decode"],
)
def test_dynamic_shapes_are_one_graph(function, made):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for batch in (5, 6, 7):  # sizes that nothing else has
        assert_same(run, function, made(batch))
    assert counter.frame_count == 1


def test_each_is_one_node_of_the_graph():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch.compile(step, backend=counter, fullgraph=True)(*appended())
    names = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert [name for name in names if "numbaflash" in name] == ["numbaflash.append_kv", "numbaflash.decode"]


def test_what_append_kv_writes_is_seen_by_what_follows():
    """Reads of a cache before and after it keep their order."""
    page = int(PAGES[0, 2])

    def read(k, v, k_cache, v_cache, lengths, table):
        before = k_cache.sum()
        assert nf.append_kv(k, v, k_cache, v_cache, lengths, table) is None
        return before, k_cache.sum(), v_cache[page].exp()

    _, *arrays, _, _ = appended()
    assert_same(compiled(read), read, arrays)
    before, after, _ = compiled(read)(*arrays)
    assert before != after


@pytest.mark.parametrize("decomposed", [False, True])
def test_export(decomposed):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, x in zip(("k_cache", "v_cache"), paged()[1:3], strict=True):
                self.register_buffer(name, x.clone())

        def forward(self, q, k, v, lengths, table):
            nf.append_kv(k, v, self.k_cache, self.v_cache, lengths, table)
            return nf.decode(q, self.k_cache, self.v_cache, lengths + k.shape[1], table, causal=True)

    batch = torch.export.Dim("batch", min=2, max=64)
    given = {n: [x for at, x in enumerate(appended(n)[:7]) if at not in (3, 4)] for n in (2, 3, 4)}
    program = torch.export.export(Model(), tuple(given[3]), dynamic_shapes=({0: batch},) * 5)
    program = program.run_decompositions() if decomposed else program
    for arrays in given.values():
        assert_same(program.module(), Model(), arrays)


def test_operators_keep_what_torch_asks_of_them():
    operators, (q, *cache) = torch.ops.numbaflash, paged()
    torch.library.opcheck(operators.decode.default, (q, *cache, None, torch.ones(4), True, *NUMBERS))
    torch.library.opcheck(operators.decode.default, (*contiguous(), None, torch.ones(3, 4), None, False, 0.3, 0, 4, 1, 2.0, 2))
    torch.library.opcheck(operators.cascade.default, (*prefixed(), None, *NUMBERS))
    _, k, v, *caches, lengths, table, cos, sin = appended()
    torch.library.opcheck(operators.append_kv.default, (k, v, *caches, lengths, table, q, cos, sin, True))
    torch.library.opcheck(operators.append_kv.default, (k, v, *caches, lengths, table, None, None, None, False))
    mutated = [each.name for each in operators.append_kv.default._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    assert mutated == ["k_cache", "v_cache"]


@functions
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx(function, made, mode):
    arrays = made()
    graph = make_fx(function, tracing_mode=mode)(*[x.clone() for x in arrays])
    assert_same(graph, function, arrays)


@functions
def test_make_fx_before_dispatch(function, made):
    """Its modes lie on a stack of their own, which torch does not count among the others."""
    arrays = made()
    graph = make_fx(function, pre_dispatch=True)(*[x.clone() for x in arrays])
    assert "numbaflash" in graph.code and "empty" not in graph.code
    assert_same(graph, function, arrays)
    with pytest.raises(TypeError, match="no trace can contain out"):
        make_fx(lambda *x: nf.decode(*x, out=torch.empty(3, 2, 4, 24)), pre_dispatch=True)(*paged())


@pytest.mark.parametrize("function", [nf.decode, lambda q, k, v, *x, **o: nf.attention(q, k[:3], v[:3], **o)], ids=["decode", "attention"])
def test_a_softcap_that_changes(function):
    """torch.compile makes a symbol of it, and no graph may break."""
    compare = compiled(function, dynamic=True)
    for softcap in (30.0, 2, 1.5):
        assert_same(lambda *x, c=softcap: compare(*x, softcap=c), lambda *x, c=softcap: function(*x, softcap=c), paged())
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(Exception, match="softcap must be finite and positive"):
            compiled(function)(*paged(), softcap=wrong)


def test_export_of_tensors_that_are_no_buffers():
    """They are constants of the trace, and stay plain tensors in it."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            cache = k, v, self.lengths, self.table
            return nf.decode(q, *cache), nf.cascade(q, self.prefix, self.prefix, *cache)

    model, (q, k, _, *rest) = Model(), paged()
    model.lengths, model.table, model.prefix = *rest, random(20, 2, 16)
    program = torch.export.export(model, (q, k, k * 2), strict=False)
    assert_same(program.module(), model, (q, k, k * 2))


def test_jit_trace():
    with torch.no_grad():
        traced = torch.jit.trace(FUNCTIONS["decode"][0], paged())
    assert_same(traced, FUNCTIONS["decode"][0], paged())


def test_tensors_without_values():
    given = paged()
    with FakeTensorMode() as mode:
        q, *cache = map(mode.from_tensor, given)
        out, lse = nf.decode(q.double(), *(x.double() for x in cache[:2]), *cache[2:], return_lse=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, 2, 4, 24), torch.float64, (3, 4, 2), torch.float64)
        with pytest.raises(ValueError, match="k_cache must have the same head_dim"):
            nf.decode(q, cache[0][..., :8], *cache[1:])
        with pytest.raises(ValueError, match="k_prefix must have the heads and head dim of k_cache"):
            nf.cascade(q, cache[0][0, :, :1], cache[1][0], *cache)
        with pytest.raises(ValueError, match="v_new must have the same batch"):
            nf.append_kv(cache[0][:, :2], cache[1][:3, :2], *cache)
        with pytest.raises(TypeError, match="no trace can contain out"):
            nf.decode(q, *cache, out=out)
        with pytest.raises(TypeError, match="no trace can contain stream"):
            nf.append_kv(*(x[:3, :2] for x in cache[:2]), *cache, stream=1)
    out, lse = torch.ops.numbaflash.decode(*(x.to("meta") for x in given), None, None, True, *NUMBERS)
    assert (out.shape, lse.shape, out.device.type) == ((3, 2, 4, 24), (3, 4, 2), "meta")


def test_modes_that_watch():
    """They see the operator, and results may be written where the caller wants them."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    given, room = paged(), torch.empty(3, 2, 4, 24)
    want = nf.decode(*given)
    with Watch():
        got = nf.decode(*given)
        assert nf.decode(*given, out=room) is room
    assert seen == ["numbaflash.decode.default"]
    torch.testing.assert_close([got, room], [want, want], rtol=0, atol=0)


# What cannot be


def test_a_graph_breaks_at_results_that_the_caller_gives():
    given, room = paged(), torch.empty(3, 2, 4, 24)
    torch._dynamo.reset()
    got = torch.compile(lambda out, *x: nf.decode(*x, out=out) * 2, backend="aot_eager")(room, *given)
    assert torch.equal(got, nf.decode(*given) * 2) and torch.equal(room, nf.decode(*given))


def test_errors_of_compiled_calls():
    q, *cache = paged()
    for call, arrays, message in (
        (nf.decode, (q, cache[0][..., :8], *cache[1:]), "k_cache must have the same head_dim"),
        (nf.decode, (q[0], *cache), r"q must have 4 axes \(batch, seqlen_q, heads, head_dim\); got 3 axes"),
        (nf.decode, (q, *cache[:2], None), "seqlens_k must be a torch tensor, as the others are; got NoneType"),
        (lambda *x: nf.decode(*x, window=(-1, 0)), (q, *cache), "window left must not be negative"),
        (lambda *x: nf.cascade(*x, window=(3, 0)), prefixed(), "a window with a bound to the left"),
    ):
        with pytest.raises(Exception, match=message):
            compiled(call)(*arrays)


def test_no_derivative():
    """As in eager mode: an error, at once where torch would record one."""
    q, *cache = paged()
    leaf = q.clone().requires_grad_()
    for run in (nf.decode, compiled(nf.decode), lambda *x: make_fx(lambda *y: nf.decode(*y))(*x)):
        with pytest.raises(Exception, match="q takes part in automatic differentiation"):
            run(leaf, *cache)
    with torch.no_grad():
        assert_same(compiled(nf.decode), nf.decode, (leaf, *cache))
    out = torch.ops.numbaflash.decode(leaf, *cache, None, None, False, *NUMBERS)[0]
    with pytest.raises(UnsupportedError, match="decode and cascade have no derivative"):
        out.sum().backward()


def test_vmap_is_refused():
    q, *cache = paged()
    with pytest.raises(TypeError, match="cannot be batched by vmap"):
        torch.vmap(lambda q: torch.ops.numbaflash.decode(q, *cache, None, None, False, *NUMBERS)[0])(torch.stack([q, q]))


def test_no_plans_where_torch_records():
    arrays = paged()
    plan = nf.plan_decode(*arrays)
    for run in (plan.run, nf.plan_decode):
        with pytest.raises(UnsupportedError, match="plan_decode and DecodePlan.run cannot be recorded by torch"):
            make_fx(lambda *x, run=run: run(*x))(*arrays)


def test_the_first_call_may_be_compiled():
    """Nothing of numbaflash has met torch before torch.compile traces it."""
    code = """
        import torch, numbaflash
        q, k, v = torch.randn(1, 1, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
        out = torch.compile(numbaflash.decode, backend="aot_eager", fullgraph=True)(q, k, v, torch.tensor([7]))
        torch.testing.assert_close(out, numbaflash.decode(q, k, v, torch.tensor([7])))
    """
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
