"""The small server: what engines answer, how requests are scheduled, and what the figures say; on the CPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the server computes with PyTorch")

from bench import serving  # noqa: E402
from numbaflash import service  # noqa: E402
from numbaflash.service.loop import Request  # noqa: E402

SHAPE = service.Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, feed_forward=48, vocabulary=50)
CAPACITY = 100


@pytest.fixture(scope="module")
def model():
    return service.Model(SHAPE, CAPACITY, "cpu", torch.float32)


def answers(model, name, load, slots=3, chunk=7):
    server = service.Server(model, service.ENGINES[name](model, slots, CAPACITY), chunk)
    requests = service.arrivals(load, SHAPE.vocabulary)
    seconds = server.run(requests)
    return requests, seconds, server


def without_a_cache(model, request):
    """The same tokens by the whole sequence at each step."""
    tokens = list(request.prompt)
    for _ in range(request.answer):

        def attend(layer, q, k, v):
            length = q.shape[1]
            q, k = (service.engines.rotate(x, model.cos[:length], model.sin[:length]) for x in (q, k))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        tokens.append(int(model.forward(torch.tensor([tokens]), attend).argmax(-1)))
    return tokens[len(request.prompt) :]


@pytest.mark.parametrize("name", ["numbaflash", "torch"])
def test_answers_are_those_without_a_cache(model, name):
    requests, _, server = answers(model, name, service.Load(requests=7, prompt=20, answer=6, rate=math.inf))
    for request in requests:
        assert request.tokens == without_a_cache(model, request) and not request.failed
        assert request.times == sorted(request.times) and len(request.times) == 6
    if name == "numbaflash":
        assert sorted(server.engine._free) == list(range(3 * -(-CAPACITY // server.engine.page_size))), "every page is free again"


def test_more_requests_than_pages_wait(model):
    engine = service.ENGINES["numbaflash"](model, 4, CAPACITY)
    engine._free = engine._free[:3]  # two pages a request: one at a time
    server = service.Server(model, engine, 50)
    requests = service.arrivals(service.Load(requests=4, prompt=70, answer=3, rate=math.inf), SHAPE.vocabulary)
    server.run(requests)
    assert all(len(each.tokens) == 3 for each in requests)
    assert all(one.times[-1] <= other.times[0] for one, other in zip(requests, requests[1:], strict=False))


def test_a_sequence_that_fits_no_slot_is_refused(model):
    with pytest.raises(ValueError, match="101 tokens does not fit a slot of 100"):
        answers(model, "numbaflash", service.Load(requests=1, prompt=100, answer=1, rate=math.inf))


def test_nan_is_an_error(model):
    broken = service.Model(SHAPE, CAPACITY, "cpu", torch.float32)
    broken.layers[0]["out"].fill_(math.nan)
    requests, seconds, _ = answers(broken, "none", service.Load(requests=2, prompt=5, answer=4, rate=math.inf))
    assert all(each.failed == "a logit is no number" for each in requests)
    assert service.summarise(requests, seconds, service.Limits())["errors"] == 1.0


def test_arrivals_are_a_poisson_process():
    load = service.Load(requests=2000, prompt=1, answer=1, rate=50.0)
    times = [each.arrival for each in service.arrivals(load, 10)]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and abs(sum(gaps) / len(gaps) - 1 / 50) < 0.002
    assert [each.prompt for each in service.arrivals(load, 10)] == [each.prompt for each in service.arrivals(load, 10)]


def test_figures():
    requests = [Request(0.5, [1], 3, [7, 8, 9], [0.75, 1.0, 1.25]), Request(0.0, [1], 3, [7, 8, 9], [2.0, 2.1, 2.2])]
    figures = service.summarise(requests, 2.0, service.Limits(first=1.0, token=0.3))
    assert figures["ttft"]["p50"] == pytest.approx(1125.0) and figures["tpot"]["p50"] == pytest.approx(175.0)
    assert figures["throughput"] == 3.0 and figures["goodput"] == 0.5 and figures["errors"] == 0.0
    with pytest.raises(ValueError, match="at least one request"):
        service.summarise([], 1.0, service.Limits())


@pytest.mark.parametrize("given", [{"rate": 0.0}, {"prompt": 0}, {"answer": -1}, {"requests": 0}])
def test_loads_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        service.Load(**given)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        service.Shape(heads=3, kv_heads=2)


def test_the_benchmark_compares_and_bounds(capsys):
    words = "--requests 4 --prompt 16 --answer 4 --slots 2 --chunk 8 --layers 1 --hidden 32 --heads 4/2 --head-dim 8 --rounds 2 --rate 1000"
    options = serving.parse(words.split(" "))
    figures = serving.measure(options, "cpu", torch.float32)
    assert set(figures) == {"numbaflash", "torch", "none"} and all(len(rounds) == 2 for rounds in figures.values())
    told = serving.table(figures)
    assert "ttft p50:" in told and "without any attention" in told
    found = serving.to_records(options, figures, {"gpu": "none", "torch": torch.__version__})
    for each in found:
        serving.records.check(each)
    assert {each["quantity"] for each in found} >= {"ttft p50", "tpot p99", "goodput", "errors"}


def test_the_benchmark_says_what_is_wrong(capsys):
    for words, told in (("--heads x", "heads must be like 16/4"), ("--engines vllm", "engines must be of")):
        with pytest.raises(SystemExit):
            serving.parse(words.split())
        assert told in capsys.readouterr().err
